"""The page of the report: complete, self-contained, and safe for any file name."""

import base64
import contextlib
import functools
import io
import json
import os
import pathlib
import re
import tomllib
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import focalkern
from focalkern.cli import main
from focalkern.study.report import html
from focalkern.study.report.tables import class_tables

pytest.importorskip("tabulate", reason="tabulate is not installed")

PROJECT = tomllib.loads((pathlib.Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
PACKAGE_DATA = PROJECT["tool"]["setuptools"]["package-data"]["focalkern"]
VOID = {"meta", "img", "wbr", "br", "input"}


class Page(HTMLParser):
    """The content of a page: the text, the tags with their attributes, and whether every tag is closed."""

    def __init__(self, data):
        super().__init__()
        self.tags, self.open, self.text, self.cells = [], [], [], []
        self.feed(data.decode())
        self.close()
        assert self.open == []
        self.said = "".join(self.text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data


def write_logits(path, n=300, n_classes=4):
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for part in ("val", "test"):
        logits = torch.randn(n, n_classes, generator=generator) * 2
        arrays[f"{part}_labels"] = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1).numpy()
        arrays[f"{part}_logits"] = (logits * 2).numpy()
    with open(path, "wb") as stream:
        np.savez(stream, **arrays)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """(page, folder) of a calibration of a file with the given name, which is in the same folder."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")

    @functools.cache
    def make(name="logits.npz", *more):
        folder = tmp_path_factory.mktemp("report")
        source = os.path.join(str(folder), name)
        write_logits(source)
        command = ["calibrate", source, "--temperatures", "0.1:5:0.1", "--bootstrap", "40", "--report", str(folder)]
        command += ["--out", str(folder / "calibrator.json")]
        with contextlib.redirect_stdout(io.StringIO()):
            assert main([*command, *more]) == 0
        return folder

    def page(*command):
        folder = make(*command)
        return Page((folder / "report.html").read_bytes()), folder

    return page


def test_the_page_needs_nothing_but_itself(report):
    page, folder = report()
    assert {tag for tag, _ in page.tags} & {"link", "iframe", "object", "base"} == set()
    anchors = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if tag == "a" and name == "href":
                assert value.removeprefix("#") in anchors
            elif name in ("src", "href", "srcset", "data"):
                assert (tag, name) == ("img", "src")
                assert value.startswith("data:image/png;base64,")
    data = (folder / "report.html").read_bytes()
    assert b"@import" not in data
    assert data.count(b"url(") == data.count(b"url(#explorer-hatch)") == 1
    assert b"http:" not in data and b"https:" not in data
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    embedded = sorted(base64.b64decode(image["src"].partition(",")[2], validate=True) for image in images)
    assert embedded == sorted(file.read_bytes() for file in folder.glob("*.png"))
    assert all(image["alt"].strip() for image in images)


def test_the_page_says_everything(report):
    page, folder = report()
    document = json.loads((folder / "report.json").read_text())
    for row in document["rows"]:
        for part in ("test", "validation"):
            for value in row[part].values():
                # In the reported rows, the interval is below the number.
                assert any(cell.partition("\u00b1")[0] == f"{value:.4f}" for cell in page.cells)
    for row in document["rows"]:
        low, high = row["intervals"]["nll"]
        half = f"{max(high - row['test']['nll'], row['test']['nll'] - low):.4f}".removeprefix("0")
        assert f"{row['test']['nll']:.4f}\u00b1{half}" in "\n".join(page.cells)
        if row["difference"] is not None:
            found = row["difference"]["figures"]["nll"]
            ends = f"{found['low']:+.4f}\u00a0to\u00a0{found['high']:+.4f}"
            assert ends.replace("-", "\u2212") in page.said
    chosen = document["rows"][document["chosen"]]
    assert f"{chosen['bias_floor']['ece_equal_mass']['mean']:.4f}" in "\n".join(page.cells)
    assert f"Use {document['verdict']['use']}.".replace("->", "\u2192") in page.said
    assert f"{document['rows'][1]['temperature']:.4f}" in page.cells
    assert document["remarks"]
    # Minus signs of numbers are typographic; hyphens in words are not.
    assert all(re.sub(r"(?<= )-(?=\d)", "\u2212", remark) in page.said for remark in document["remarks"])
    for words in (
        f"focalkern {focalkern.__version__}",
        f"torch {torch.__version__}",
        "UTC",
        "300 validation rows",
        "300 test rows",
        "10 gammas (0, -0.5, -0.25, 0.05, 0.25, 0.37, 0.5, 0.75, 1, 5) x 50 temperatures from 0.1 to 5, 500 cells",
        "equal_mass, 15 bins",
        "2408.11598",
    ):
        assert words in page.said, words


def test_differences_of_accuracy_are_shown_where_bins_make_any(report):
    scaled, binned = (report("logits.npz", "--method", method)[0] for method in ("temperature", "histogram"))
    headings = [[cell.split()[:1] == ["accuracy"] for cell in page.cells].count(True) for page in (scaled, binned)]
    assert headings[1] == headings[0] + 2  # in the short table of differences and in the long one


def test_the_bins_of_the_page_are_those_of_the_metrics(report):
    page, folder = report()
    arrays = {name: torch.from_numpy(array) for name, array in np.load(folder / "logits.npz").items()}
    logits, labels = arrays["test_logits"].double(), arrays["test_labels"]
    calibrator = focalkern.load_calibrator(folder / "calibrator.json")
    for probs in (logits.softmax(-1), calibrator.predict_proba(logits)):
        bins = focalkern.metrics.reliability_bins(probs, labels)
        first = page.cells.index(f"{0:.3f}\u00a0\u2013\u00a0{1 / 15:.3f}")
        rows = [page.cells[first + 8 * index : first + 8 * index + 8] for index in range(15)]
        page.cells = page.cells[first + 1 :]
        for index, row in enumerate(rows):
            assert row[1] == f"{int(bins.count[index])}"
            if bins.count[index]:
                gap = float(bins.accuracy[index] - bins.confidence[index])
                assert row[2] == f"{float(bins.confidence[index]):.4f}"
                assert row[3] == f"{float(bins.accuracy[index]):.4f}"
                assert row[5] == f"{gap:+.4f}".replace("-", "\u2212")
                assert row[7] in ("", "under-confident" if gap > 0 else "over-confident")
            else:
                assert row[2:] == [""] * 6


def test_a_file_name_is_text(report):
    # Markup, quotes, an entity, a placeholder of a template.
    name = "<script>alert(1)<b>\"'&lt; $title ${body}.npz"
    page, _ = report(name)
    assert name in page.said
    assert "b" not in {tag for tag, _ in page.tags}
    assert [tag for tag, _ in page.tags].count("script") == 2  # scripts of the page itself


def test_a_page_where_nothing_was_chosen(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    probs = np.full((40, 3), 0.5)
    probs[:, 2] = 0
    np.savez(tmp_path / "zeros.npz", probs=probs, labels=np.full(40, 2))
    code = main(
        ["calibrate", str(tmp_path / "zeros.npz"), "--method", "temperature", "--temperatures", "1:3:1",
         "--report", str(tmp_path / "r")]
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    page = Page((tmp_path / "r" / "report.html").read_bytes())
    assert "Use no calibration" in page.said
    assert not (tmp_path / "r" / "reliability_after.png").exists()


def rendered(title, words):
    table = html.Table([words], [[f"{words}\n{words}"]], words, 0)
    sections = {"use": words, "failed": words}
    values = {"sections": sections, "tables": {"use": table}, "failed": [words], "networks": "1 network", "loss": words}
    values |= {"with_ece": True, "folded": {}}
    return Page(html.render_page("sweep.html.j2", title=title, **values))


def test_the_templates_escape_what_they_are_given():
    nasty = "<i>&\"'{{ title }}"
    page = rendered(nasty, nasty)
    assert "i" not in {tag for tag, _ in page.tags}
    assert page.said.count(nasty) == 12
    assert ("tr", {"role": "row", "class": "marked"}) in page.tags
    (heading,) = [attributes for tag, attributes in page.tags if tag == "th" and attributes["scope"] == "col"]
    (name,) = [attributes for tag, attributes in page.tags if tag == "th" and attributes["scope"] == "row"]
    assert (heading["role"], name["role"]) == ("columnheader", "rowheader")
    template = '{% from "_parts.html.j2" import figure %}{{ figure(png, nasty, nasty) }}'
    page = Page(html._environment().from_string(template).render(png=b"\x89PNG", nasty=nasty).encode())
    (image,) = [attributes for tag, attributes in page.tags if tag == "img"]
    assert image["alt"] == nasty and page.said.count(nasty) == 1


def test_a_name_that_is_no_utf_8_does_not_break_the_page():
    assert "caf?.npz" in rendered("caf\udce9.npz", "").said


def test_templates_are_package_data():
    package = pathlib.Path(html.__file__).parents[2]
    kept = {file for pattern in PACKAGE_DATA for file in package.glob(pattern)}
    templates = {file for file in (package / "study" / "report" / "templates").iterdir() if file.is_file()}
    assert len(templates) >= 8 and templates <= kept


def test_tables_of_slopes_and_intercepts():
    """v and b of a vector, and the largest pairs of a matrix, for known numbers."""
    labels = torch.arange(90) % 3
    logits = 3.0 * torch.nn.functional.one_hot((labels + (torch.arange(90) > 70)) % 3)
    assert class_tables(focalkern.SplineScaling().fit(logits, labels)) == []
    assert class_tables(focalkern.TemperatureScaling().fit(logits, labels)) == []
    vector = focalkern.SplineScaling(kind="vector").fit(logits, labels)
    vector.weight_, vector.bias_ = np.array([0.5, -0.25, 0.0]), np.array([0.125, 0.0, -1.0])
    (table,) = class_tables(vector)
    assert table.rows == [
        ["class 0", "+0.5000", "+0.1250"],
        ["class 1", "-0.2500", "+0.0000"],
        ["class 2", "+0.0000", "-1.0000"],
    ]
    matrix = focalkern.SplineScaling(kind="matrix").fit(logits, labels)
    matrix.weight_ = np.array([[9.0, 0.1, -0.2], [0.3, 0.0, 0.05], [0.01, -0.02, 0.5]])
    own, pairs = class_tables(matrix)
    assert [row[1] for row in own.rows] == ["+9.0000", "+0.0000", "+0.5000"]
    assert pairs.rows[:2] == [["class 0 raises class 1", "+0.3000"], ["class 2 lowers class 0", "-0.2000"]]
    assert len(pairs.rows) == 6 and "6 largest" in pairs.caption
    many = focalkern.SplineScaling(kind="vector").fit(torch.randn(200, 30), torch.arange(200) % 30)
    (table,) = class_tables(many)
    assert len(table.rows) == 20 and table.caption.startswith("The 20 of 30 classes")
