"""The page of the report in headless Chromium: a cell is chosen, and its values equal those of the table.

Needs Debian's chromium and chromium-driver, and selenium from PyPI. Without them the tests are skipped, or fail with
FOCALKERN_REQUIRE_PEERS=1 (continuous integration).
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import peer

import focalkern as fk
from focalkern import metrics
from focalkern.calibrators._spline_shown import shown_curve
from focalkern.cli import main
from focalkern.ops.calibration_map import focal_calibration_map

peer("selenium")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("tabulate", reason="tabulate is not installed")

from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    missing = "chromium and chromedriver are not installed: apt-get install chromium chromium-driver"
    if os.environ.get("FOCALKERN_REQUIRE_PEERS") == "1":
        raise RuntimeError(missing)
    pytest.skip(missing, allow_module_level=True)
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report of 300 rows and 5 classes, and the rows."""
    folder = tmp_path_factory.mktemp("report")
    generator = torch.Generator().manual_seed(3)
    arrays = {}
    for part in ("val", "test"):
        logits = torch.randn(300, 5, generator=generator) * 2
        arrays[f"{part}_labels"] = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1).numpy()
        arrays[f"{part}_logits"] = (logits * 2).numpy()
    np.savez(folder / "logits.npz", **arrays)
    command = ["calibrate", str(folder / "logits.npz"), "--temperatures", "0.1:5:0.1", "--bootstrap", "20"]
    assert main([*command, "--report", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium, folder):
    """The page, freshly loaded in a desktop window, with its folded sections open."""
    resize(chromium, 1280)
    chromium.get((folder / "report.html").as_uri())
    unfold(chromium)
    yield chromium
    assert chromium.get_log("browser") == []


def resize(chromium, width, mode="light"):
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": mode}]}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def unfold(page):
    page.execute_script("document.querySelectorAll('details.fold').forEach((one) => (one.open = true))")


def find(page, name):
    return page.find_element(By.ID, f"explorer-{name}")


def shown(page):
    """The text next to the map."""
    return {name: find(page, name).text for name in ("title", "nll", "brier", "ece", "accuracy")}


def table_row(page, label):
    """The cells of a row of the first table, by the heading of their column, without their intervals."""
    table = page.find_element(By.CSS_SELECTOR, "#choices table")
    heads = [one.text for one in table.find_elements(By.CSS_SELECTOR, "thead th")]
    for row in table.find_elements(By.CSS_SELECTOR, "tbody tr"):
        cells = [one.text.partition("\n")[0] for one in row.find_elements(By.CSS_SELECTOR, "th, td")]
        if cells[0] == label:
            return dict(zip(heads, cells, strict=True))
    raise AssertionError(f"no row {label!r}")


def same_figures(page, label):
    row = table_row(page, label)
    now = shown(page)
    assert now["nll"] == row["NLL"]
    assert now["brier"] == row["Brier"]
    assert now["ece"] == row["ECE equal_width"]
    assert now["accuracy"] == row["accuracy"]


def rows_of(folder):
    return json.loads((folder / "report.json").read_text())["rows"]


def cell_by_hand(folder, gamma, temperature):
    """The printed metrics and the lines of the table of bins, computed from the file itself."""
    with np.load(folder / "logits.npz") as arrays:
        logits = torch.from_numpy(arrays["test_logits"]).double()
        labels = torch.from_numpy(arrays["test_labels"])
    log_probs = focal_calibration_map(logits, gamma, temperature, log=True)
    bins = metrics.reliability_bins(confidence=log_probs.amax(-1).exp(), correct=logits.argmax(-1) == labels, n_bins=15)
    figures = {
        "nll": f"{float(metrics.nll(log_probs, labels, log=True)):.4f}",
        "brier": f"{float(metrics.brier_score(log_probs.exp(), labels)):.4f}",
        "ece": f"{float(metrics.expected_error(bins)):.4f}",
        "accuracy": f"{float((logits.argmax(-1) == labels).double().mean()):.4f}",
    }
    return figures, bins


def test_the_cells_of_the_table_are_one_click_away(page, folder):
    buttons = find(page, "choices").find_elements(By.TAG_NAME, "button")
    labels = [one.text for one in page.find_elements(By.CSS_SELECTOR, "#choices table:first-of-type tbody th")]
    assert len(buttons) == len(rows_of(folder))
    for button in buttons:
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        same_figures(page, button.text.partition(":")[0].removesuffix(" (chosen)"))
    assert {button.text.partition(":")[0].removesuffix(" (chosen)") for button in buttons} <= set(labels)


def test_the_arrow_keys_choose_the_cell_beside(page, folder):
    row = next(row for row in rows_of(folder) if (row["method"], row["criterion"]) == ("focal-temperature", "ece"))
    for button in find(page, "choices").find_elements(By.TAG_NAME, "button"):
        if button.text.startswith("focal temperature, ECE-optimal"):
            button.click()
    figures, _ = cell_by_hand(folder, row["gamma"], row["temperature"])
    assert {name: shown(page)[name] for name in figures} == figures
    canvas = find(page, "map")
    canvas.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    temperature = round(row["temperature"] - 0.2, 1)
    assert shown(page)["title"] == f"gamma = {row['gamma']:g}, T = {temperature:g}"
    figures, bins = cell_by_hand(folder, row["gamma"], temperature)
    assert {name: shown(page)[name] for name in figures} == figures
    # The table below the diagram, and the diagram.
    lines = page.execute_script(
        "return [...document.querySelectorAll('#explorer-bins tr')].map(row => [...row.cells].map(c => c.textContent))"
    )
    for index, (line, count) in enumerate(zip(lines, bins.count.tolist(), strict=True)):
        assert line[1] == str(count)
        if count:
            expected = float(bins.confidence[index]), float(bins.accuracy[index]), float(bins.gap[index])
            assert [float(value) for value in line[2:4]] == pytest.approx(expected[:2], abs=1.01e-4)
    filled = int((bins.count > 0).sum())
    assert len(page.find_elements(By.CSS_SELECTOR, "#explorer-diagram .bin")) == filled
    assert shown(page)["title"] in find(page, "diagram").get_attribute("aria-label")


def test_pointer_and_sliders_choose_a_cell(page, folder):
    page.execute_script("document.getElementById('explorer-map').scrollIntoView({block: 'center'})")
    canvas = find(page, "map")
    before = shown(page)["title"]
    ActionChains(page).move_to_element_with_offset(canvas, 60, -60).click().perform()
    after = shown(page)
    assert after["title"] != before
    gamma, temperature = (float(part.rpartition("= ")[2]) for part in after["title"].split(", "))
    figures, _ = cell_by_hand(folder, gamma, temperature)
    assert {name: after[name] for name in figures} == figures
    find(page, "gamma").send_keys(Keys.HOME)
    find(page, "temperature").send_keys(Keys.HOME)
    assert shown(page)["title"] == "gamma = -0.5, T = 0.1"
    figures, _ = cell_by_hand(folder, -0.5, 0.1)
    assert {name: shown(page)[name] for name in figures} == figures


def test_the_lowest_cell_of_a_map_is_found(page, folder):
    for index in range(len(find(page, "which-map").find_elements(By.TAG_NAME, "option"))):
        find(page, "which-map").find_elements(By.TAG_NAME, "option")[index].click()
        find(page, "lowest").click()
    row = next(row for row in rows_of(folder) if (row["method"], row["criterion"]) == ("focal-temperature", "ece"))
    find(page, "which-map").find_elements(By.TAG_NAME, "option")[3].click()  # the map of the ECE-optimal row
    assert "ECE (equal_mass) on the 300 validation rows" in find(page, "colours").text
    find(page, "lowest").click()
    assert shown(page)["title"] == f"gamma = {row['gamma']:g}, T = {row['temperature']:g}"


def test_the_chosen_cell_is_announced(page):
    said = find(page, "live")
    assert said.get_attribute("textContent") == ""
    find(page, "map").send_keys(Keys.ARROW_UP)
    WebDriverWait(page, 60).until(lambda _: said.get_attribute("textContent") != "")
    now = shown(page)
    words = f"{now['title']}: NLL {now['nll']}, Brier {now['brier']}, ECE {now['ece']}"
    assert said.get_attribute("textContent") == words
    assert said.get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 768, 900, 1280])
def test_nothing_is_cut(page, width, mode):
    resize(page, width, mode)
    page.refresh()
    unfold(page)
    page.execute_script("document.querySelector('#explorer details').open = true")
    beyond = page.execute_script(
        """
        const width = document.documentElement.clientWidth;
        return [...document.querySelectorAll("body *")]
          .filter((one) => !one.matches(".skip, .unseen") && !one.closest("thead, div.wide, svg"))
          .filter((one) => one.getBoundingClientRect().right > width + 0.5)
          .map((one) => one.outerHTML.slice(0, 80));
        """
    )
    assert beyond == []
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.execute_script(f"return {overflow}") == 0
    # No table scrolls horizontally either: on a telephone all of them, elsewhere the bins beside the map.
    tables = page.find_elements(By.CSS_SELECTOR, "div.wide" if width == 320 else "#explorer div.wide")
    hidden = "return arguments[0].scrollWidth - arguments[0].clientWidth"
    assert {page.execute_script(hidden, one) for one in tables} == {0}
    # Dark text on light, or light on dark.
    luminance = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    assert (max(page.execute_script(f"return {luminance}")) < 64) == (mode == "dark")


def test_commands_break_between_words(page):
    resize(page, 320)
    page.refresh()
    words = page.find_elements(By.CSS_SELECTOR, ".use pre span")
    whole = [word for word in words if len(word.text) < 30]  # a longer one is broken
    assert any(word.text == "--out" for word in whole)
    one_line = page.find_element(By.CSS_SELECTOR, ".use pre code span").size["height"]
    assert {word.size["height"] for word in whole} == {one_line}
    lines = [code.get_attribute("textContent") for code in page.find_elements(By.CSS_SELECTOR, ".use pre code")]
    assert lines[0].startswith("focalkern apply ") and "import focalkern as fk" in lines


def test_commands_of_the_documentation_scroll(chromium, tmp_path):
    style = Path(__file__).parents[2] / "docs" / "_static" / "focalkern.css"
    command = "focalkern calibrate logits.npz --split 0.5 --out calibrator.json --report report"
    blocks = "".join(f'<div class="highlight-{kind}"><pre>{command}</pre></div>' for kind in ("sh", "python"))
    plain = '<meta name="viewport" content="width=device-width">'
    plain += "<style>pre { overflow: auto; white-space: pre; }</style>"
    (tmp_path / "page.html").write_text(
        f'<!doctype html>{plain}<link rel="stylesheet" href="{style.as_uri()}"><div class="bd-article">{blocks}</div>'
    )
    resize(chromium, 390)
    chromium.get((tmp_path / "page.html").as_uri())
    commands, python = chromium.find_elements(By.TAG_NAME, "pre")
    assert commands.size["height"] < python.size["height"]
    hidden = "return arguments[0].scrollWidth - arguments[0].clientWidth"
    assert chromium.execute_script(hidden, commands) > 0 == chromium.execute_script(hidden, python)


def test_bins_with_few_samples_are_pale(page):
    def opacities(part):
        style = f"one => getComputedStyle(one.querySelector('.{part}')).opacity"
        of = "[...document.querySelectorAll('#explorer-diagram .bin{}')].map(" + style + ")"
        return [set(page.execute_script("return " + of.format(which))) for which in (".few", ":not(.few)")]

    assert "Bins with fewer are pale." in find(page, "gap").text
    for part in ("bar", "gap", "top"):
        assert opacities(part) == [{"0.5"}, {"1"}], part


def test_the_star_is_explained_only_if_the_map_has_one(page):
    """The recommended row of this report is a spline, which is no focal map."""
    assert "(chosen)" in page.find_element(By.CSS_SELECTOR, "#explorer-choices [aria-pressed=true]").text
    assert find(page, "which").text == "not given by gamma and T alone, so it has no place on the map"
    assert not find(page, "star").is_displayed()
    assert "Dots: the other rows of the table." in find(page, "colours").find_element(By.XPATH, "..").text


def test_a_wide_picture_is_enlarged_on_a_telephone(page):
    resize(page, 320)
    page.refresh()
    unfold(page)
    figure = page.find_element(By.CSS_SELECTOR, "#search figure")
    image = figure.find_element(By.TAG_NAME, "img")
    assert image.size["width"] <= 320
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
    ActionChains(page).move_to_element(image).click().perform()
    assert image.size["width"] == 704
    assert page.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", figure)
    assert page.execute_script("return document.documentElement.scrollWidth") == 320  # the page itself does not scroll
    page.find_element(By.TAG_NAME, "h1").click()
    assert image.size["width"] <= 320


def test_the_focal_map_of_the_cell_is_drawn_beside_the_learned_curve(page, folder):
    calibrator = fk.load_calibrator(folder / "calibrator.json")
    shown_as = shown_curve(calibrator, 100)
    logits = torch.from_numpy(shown_as.confidence).logit()

    def focal_map(gamma, temperature):
        return fk.binary_focal_calibration_map(logits * calibrator.temperature_, gamma, temperature)

    def difference():
        return float(find(page, "difference").text.rpartition("at most ")[2].rstrip("."))

    assert "no focal map" in find(page, "difference").text  # the row that is shown first is a spline
    assert page.find_elements(By.CSS_SELECTOR, "#explorer-curve .focal") == []
    find(page, "gamma").send_keys(Keys.HOME)
    find(page, "temperature").send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * 14)
    assert shown(page)["title"] == "gamma = -0.5, T = 1.5"
    expected = focal_map(-0.5, 1.5)
    learned = torch.from_numpy(shown_as.calibrated)
    assert difference() == pytest.approx(float((expected - learned).abs().max()), abs=6e-5)
    # The drawn curve: the height of its path in pixels of a box of 250, from the lowest tick to 1.
    path = page.find_element(By.CSS_SELECTOR, "#explorer-curve .focal").get_attribute("d")
    heights = torch.tensor([float(point.split()[1]) for point in path[1:].split("L")])
    lowest = float(page.find_element(By.CSS_SELECTOR, "#explorer-curve .end").text)
    assert float(((1 - (heights - 8) / 250 * (1 - lowest)) - expected.clamp(min=lowest)).abs().max()) < 1e-4
    find(page, "nearest").click()
    gammas, temperatures = fk.PAPER_GAMMAS, [step / 10 for step in range(1, 51)]
    nearest = min(
        float((focal_map(gamma, one) - learned).abs().max()) for gamma in (0, *gammas) for one in temperatures
    )
    assert difference() == pytest.approx(nearest, abs=6e-5)
    said = page.find_element(By.CSS_SELECTOR, "#curve").text
    assert f"{shown(page)['title']}: its largest difference from the curve is {nearest:.4f}" in said


def test_the_map_opens_on_the_nll_and_a_link_opens_its_section(chromium, folder):
    chromium.get("about:blank")
    chromium.get(f"{(folder / 'report.html').as_uri()}#bins")
    opened = chromium.execute_script(
        "return [...document.querySelectorAll('details.fold[open]')].map((one) => one.parentElement.id)"
    )
    assert opened == ["bins"]
    chromium.find_element(By.CSS_SELECTOR, "nav a[href='#explore']").click()
    WebDriverWait(chromium, 60).until(lambda _: find(chromium, "colours").is_displayed())
    assert find(chromium, "colours").text == "NLL on the 300 test rows, logarithmic."


def test_without_script_everything_but_the_map_is_there(chromium, folder):
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get((folder / "report.html").as_uri())
        for summary in chromium.find_elements(By.CSS_SELECTOR, "details.fold > summary"):
            summary.click()
        text = chromium.find_element(By.TAG_NAME, "body").text
        assert "The interactive map needs JavaScript" in text
        assert "Candidates" in text
        assert not find(chromium, "title").is_displayed()
        assert all(image.is_displayed() for image in chromium.find_elements(By.TAG_NAME, "img"))
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
