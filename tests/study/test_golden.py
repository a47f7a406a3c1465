"""The outputs of a study, compared with files in tests/study/golden: words and keys exactly, numbers as printed.

After an intended change, `pytest tests/study/test_golden.py --renew` rewrites them. Figures that agree within the
tolerance stay as they were, so that another processor changes only words. Review the change as a diff.
"""

import csv
import difflib
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import focalkern as fk

pytest.importorskip("tabulate", reason="tabulate is not installed")

GOLDEN = Path(__file__).with_name("golden")
# Other vector widths and other releases of torch change the last digits of float64 results, and the search by
# derivatives ends within 1e-9 of its optimum.
RELATIVE, ABSOLUTE = 1e-6, 1e-9
STEPS = 0.05  # with other last digits, a search by derivatives ends a few steps earlier or later
NUMBER = re.compile(r"\d*\.?\d+(?:e[-+]?\d+)?")
VOID = {"meta", "img", "wbr", "br", "input"}


def write_rows(folder):
    """Over-confident logits of 4 classes, 500 validation rows and 400 test rows, as arrays and as one archive."""
    random = np.random.RandomState(0)  # a generator whose numbers never change
    arrays = {}
    for part, n in (("val", 500), ("test", 400)):
        logits = (3 * random.standard_normal((n, 4))).round(3)
        probs = np.exp(logits / 1.8)
        above = random.random_sample((n, 1)) > (probs / probs.sum(1, keepdims=True)).cumsum(1)[:, :3]
        arrays |= {f"{part}_logits": logits, f"{part}_labels": above.sum(1)}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "network.npz", **arrays)
    np.savez(folder / "one_set.npz", logits=arrays["val_logits"][:120] / 2, labels=arrays["val_labels"][:120])


CALIBRATE = ("calibrate", "val_logits.npy", "--test", "test_logits.npy", "--temperatures", "0.1:5:0.1")
COMMANDS = {
    "memory": (*CALIBRATE, "--bootstrap", "40", "--report", "report", "--out", "calibrator.json"),
    "streamed": (*CALIBRATE, "--bootstrap", "40", "--report", "report", "--stream"),
    "bins": (*CALIBRATE, "--bootstrap", "40", "--search", "refine", "--binning", "equal_mass", "--all"),
    "ece": (*CALIBRATE, "--bootstrap", "40", "--criterion", "ece"),
    "same_rows": ("calibrate", "val_logits.npy", "--temperatures", "0.1:5:0.1", "--bootstrap", "0"),
    "json": (*CALIBRATE, "--method", "histogram", "--bootstrap", "0", "--json"),
    "sweep": ("sweep", "network.npz", "one_set.npz", "absent.npz", "--all", "--jobs", "1", "--report", "report"),
}
FILES = {
    "memory": ("report/report.json", "report/table.csv", "report/report.html", "calibrator.json"),
    "streamed": ("report/report.json", "report/table.csv", "report/report.html"),
    "sweep": ("report/sweep.json", "report/sweep.csv", "report/sweep.html"),
}


class Words(HTMLParser):
    """The text of a page, one line per element (not per word of a command), with the texts of attributes and of the
    script's data."""

    def __init__(self, page):
        super().__init__()
        self.lines, self.data, self.open = [""], "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        if tag == "wbr":
            return
        if tag == "span" and self.open[-1][0] == "code":
            self.open.append((tag, None))
            return
        found = dict(attributes)
        self.lines += [f"{name}: {found[name]}" for name in ("alt", "aria-label") if found.get(name)]
        self.lines += [f"# {found['id']}"] if tag == "section" else []
        self.lines.append("")
        if tag not in VOID:
            self.open.append((tag, found.get("id")))

    def handle_endtag(self, tag):
        if self.open.pop()[0] != "span" or self.open[-1][0] != "code":
            self.lines.append("")

    def handle_data(self, data):
        if self.open and self.open[-1] == ("script", "explorer-data"):
            self.data = data
        elif not self.open or self.open[-1][0] not in ("style", "script"):
            self.lines[-1] += " ".join(data.split("\n"))


def words_of_page(page):
    words = Words(page)
    lines = [line.strip() for line in words.lines]
    if words.data:
        data = json.loads(words.data)
        lines += ["# explorer-data", ", ".join(data), *(row["label"] for row in data["choices"])]
        lines += [f"{one['name']}, {one['rows']}: {', '.join(one)}" for one in data["maps"]]
    return "\n".join(line for line in lines if line) + "\n"


def without_versions(text):
    """Replaces versions, the time, the number of steps of a search by derivatives, and a file that needs pyarrow."""
    text = text.replace(", sweep.parquet", "")
    text = re.sub(r"\d+ pairs of gamma and T", "SOME pairs of gamma and T", text)
    text = text.replace(f"focalkern {fk.__version__}", "focalkern VERSION")
    text = text.replace(f'"focalkern": "{fk.__version__}"', '"focalkern": "VERSION"')
    text = re.sub(r"torch [\d.]+\S*", "torch VERSION", text)
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "DATE", text)


def same_text(found, expected, where):
    """Checks for the same words and spaces; a number may differ by one in the last printed digit."""
    found_lines, expected_lines = found.splitlines(), expected.splitlines()
    for number, (one, other) in enumerate(zip(found_lines, expected_lines, strict=False), start=1):
        assert NUMBER.sub("0", one) == NUMBER.sub("0", other), f"{where}, line {number}"
        for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True):
            assert agree(a, b, other), f"{where}, line {number}: {a}, {b}"
    assert len(found_lines) == len(expected_lines), where


def agree(found, expected, line):
    """Whether two printed numbers, the second in this line, differ by at most the tolerance."""
    relative = RELATIVE * float(expected) if "." in expected else 0.0
    allowed = max(1.01 * last_digit(found), 1.01 * last_digit(expected), relative)
    if f"{expected} pairs of gamma and T" in line:
        allowed = STEPS * float(expected)
    return abs(float(found) - float(expected)) <= allowed


def last_digit(number):
    """The tolerance of a printed number: one in the last digit; whole numbers are exact."""
    digits, _, power = number.partition("e")
    places = len(digits.partition(".")[2])
    return 10.0 ** (int(power or 0) - places) if places or power else 0.0


def same_json(found, expected, where):
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            if key == "n_cells" and value is not None:
                assert found[key] == pytest.approx(value, rel=STEPS), where
            else:
                same_json(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for place, value in enumerate(expected):
            same_json(found[place], value, f"{where}[{place}]")
    elif where.endswith(".n_cells") and expected is not None:  # last digits change the steps of a search
        assert found == pytest.approx(expected, rel=0.05), where
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE), where
    elif isinstance(expected, str):
        same_text(found, expected, where)
    else:
        assert found == expected, where


def cells_of_csv(text):
    """Lines of text and numbers, as JSON has them."""

    def value(cell):
        try:
            return float(cell) if "." in cell and math.isfinite(float(cell)) else cell
        except ValueError:
            return cell

    return [[value(cell) for cell in row] for row in csv.reader(io.StringIO(text))]


def csv_of_cells(rows):
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def json_of(document):
    return json.dumps(document, indent=1) + "\n"


TEXTS = {".csv": csv_of_cells, ".json": json_of}


def rounded(value):
    """Rounds to twelve digits, so that a renewal shows only real changes."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def kept(found, old):
    """The new value, with the old figures where these agree within the tolerance."""
    if isinstance(found, str) and isinstance(old, str):
        return kept_text(found, old)
    if isinstance(found, dict) and isinstance(old, dict):
        result = {key: kept(value, old.get(key)) for key, value in found.items()}
        steps, before = found.get("n_cells"), old.get("n_cells")
        if steps is not None and before is not None and steps == pytest.approx(before, rel=STEPS):
            result["n_cells"] = before
        return result
    if isinstance(found, list) and isinstance(old, list) and len(found) == len(old):
        return [kept(one, other) for one, other in zip(found, old, strict=True)]
    if isinstance(found, float) and isinstance(old, float) and found == pytest.approx(old, rel=RELATIVE, abs=ABSOLUTE):
        return old
    return found


def kept_text(found, old):
    lines, old_lines = found.splitlines(keepends=True), old.splitlines(keepends=True)
    words, old_words = ([NUMBER.sub("0", line) for line in one] for one in (lines, old_lines))
    for block in difflib.SequenceMatcher(None, old_words, words, autojunk=False).get_matching_blocks():
        for place in range(block.size):
            before, line = old_lines[block.a + place], lines[block.b + place]
            pairs = zip(NUMBER.findall(line), NUMBER.findall(before), strict=True)
            if all(agree(a, b, before) for a, b in pairs):
                lines[block.b + place] = before
    return "".join(lines)


def hold(name, found, renew):
    """Compares a text, the cells of a CSV file or a JSON document with the file of that name, or writes it."""
    file = GOLDEN / name
    found = without_versions(found) if isinstance(found, str) else rounded(found)
    read = {".txt": str, ".csv": cells_of_csv}.get(file.suffix, json.loads)
    if renew:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = kept(found, read(file.read_text())) if file.exists() else found
        file.write_text(TEXTS.get(file.suffix, str)(new))
    if file.suffix == ".txt":
        same_text(found, file.read_text(), name)
    else:
        same_json(found, read(file.read_text()), name)


def test_a_renewal_keeps_figures_that_agree():
    old = "use T = 1.2345 here\nNLL 0.5000\ngone 7\n"
    new = "use T = 1.2346 here\nadded 3\nNLL 0.6000\n"
    assert kept(new, old) == "use T = 1.2345 here\nadded 3\nNLL 0.6000\n"
    assert kept("NLL is 0.5001\n", old) == "NLL is 0.5001\n"  # other words
    before = {"a": 1.0, "b": [2.0, "T = 3.50"], "n": 4, "n_cells": 322}
    found = {"a": 1.0 + 1e-12, "b": [2.1, "T = 3.51"], "n": 5, "n_cells": 316, "c": 6.0}
    assert kept(found, before) == {"a": 1.0, "b": [2.1, "T = 3.50"], "n": 5, "n_cells": 322, "c": 6.0}
    assert kept([1.0 + 1e-12], [1.0, 2.0]) == [1.0 + 1e-12]


@pytest.fixture
def renew(request):
    return request.config.getoption("--renew")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_rows(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_outputs_of_the_command(name, folder, run, renew):
    if "--report" in COMMANDS[name]:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    code, out, err = run(*COMMANDS[name])
    hold(f"{name}/printed.txt", f"exit code {code}\n{out}--- stderr\n{err}", renew)
    for file in FILES.get(name, ()):
        text = (folder / file).read_text()
        stem = f"{name}/{Path(file).stem}"
        if file.endswith(".html"):
            hold(f"{stem}.txt", words_of_page(text), renew)
        elif file.endswith(".csv"):
            hold(f"{stem}.csv", cells_of_csv(text), renew)
        else:
            document = json.loads(without_versions(text))
            hold(f"{stem}.json", document | {"focalkern": "VERSION"} if "focalkern" in document else document, renew)


@pytest.mark.parametrize("stream", [False, True])
def test_evaluation(stream, folder, run, renew, monkeypatch):
    validation = [np.load(f"val_{what}.npy") for what in ("logits", "labels")]
    fk.FocalTemperatureScaling(search="grid", temperatures=[0.5, 1.0, 1.5, 2.0]).fit(*validation).save("focal.json")
    if stream:
        monkeypatch.setattr("focalkern.cli.evaluate.wants_streaming", lambda paths: True)
    name = "evaluated_streamed" if stream else "evaluated"
    code, out, err = run("evaluate", "test_logits.npy", "--calibrator", "focal.json")
    hold(f"{name}/printed.txt", f"exit code {code}\n{out}--- stderr\n{err}", renew)
    _, out, _ = run("evaluate", "test_logits.npy", "--calibrator", "focal.json", "--json")
    hold(f"{name}/document.json", json.loads(out) | {"focalkern": "VERSION"}, renew)


def test_other_candidates(folder, renew):
    sets = [tuple(np.load(f"{part}_{what}.npy") for what in ("logits", "labels")) for part in ("val", "test")]
    study = fk.compare_calibrators(*sets, candidates=("temperature", "isotonic"), criterion="brier", resamples=40)
    hold("candidates/printed.txt", f"{study}\n\n{study.table()}\n\n{study!r}\n", renew)
    document = study.to_dict() | {"focalkern": "VERSION"}
    del document["grid"]
    hold("candidates/report.json", document, renew)
    hold("candidates/notebook.txt", words_of_page(study._repr_html_()), renew)
