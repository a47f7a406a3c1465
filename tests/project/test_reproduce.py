"""The figures of the papers: the mathematical statements hold, and the comparison detects a wrong figure."""

import csv

import numpy as np
import pytest
import torch

pytest.importorskip("tabulate", reason="tabulate is not installed")
reproduce = pytest.importorskip("benchmarks.published.reproduce", reason="the benchmarks are in the source tree only")

from benchmarks.published import lines as printed_lines  # noqa: E402
from benchmarks.published import statements  # noqa: E402


def by_what(lines):
    found = {line.what: line for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.mark.parametrize(
    "part", [part for part in statements.STATEMENTS if part is not statements.relations], ids=lambda part: part.__name__
)
def test_statements_of_the_papers_hold(part):
    lines = list(part())
    assert [line for line in lines if not line.good] == []
    assert any(line.verdict in ("holds", "as printed") for line in lines)
    assert all(line.source and (line.published or line.verdict) for line in lines)


def test_the_figures_that_the_papers_print():
    lines = by_what([*statements.bounds(), *statements.confidence()])
    assert lines["counterexample: 10 classes, gamma = 1, confidence 0.11 becomes"].verdict == "as printed"
    assert lines["experiment: highest T, 1 / slope at one half"].verdict == "as printed"
    # The paper's bound is from an experiment with finitely many points; the true bound is 1/(gamma + 1).
    lowest = lines["experiment: lowest T, s up to 60"]
    assert (lowest.published, lowest.verdict) == ("0.206", "")
    assert float(lowest.computed) == pytest.approx(0.2011, abs=1e-4)


def test_the_nearest_temperature_is_the_nearest():
    log_q = statements.points(3)
    for measure in (0, 1):
        beta = statements.best_beta(3, 2.0, measure)
        others = [statements.apart(log_q, 2.0, beta + step)[measure] for step in np.linspace(-0.5, 0.5, 21)]
        assert statements.apart(log_q, 2.0, beta)[measure] <= min(others) + 1e-12


@pytest.mark.parametrize("n_classes", [2, 3, 4])
def test_the_published_fit_is_near_the_map(n_classes):
    slope, intercept, _ = statements.FITS[n_classes]
    for gamma in (1.0, 3.0, 5.0):
        # As initial values: within a tenth of the nearest inverse temperature.
        nearest = statements.best_beta(n_classes, gamma)
        assert float(slope) * gamma + float(intercept) == pytest.approx(nearest, rel=0.1)


def test_the_simplex_is_covered_evenly():
    points = statements.simplex(3, 5)
    assert points.shape == (6, 3)
    assert points.sum(1).tolist() == pytest.approx([1.0] * 6)
    assert points.min() == pytest.approx(0.2)


def test_a_figure_is_as_printed_up_to_its_last_digit():
    def verdict(published, computed, **options):
        return printed_lines.number("", "", published, computed, "", **options).verdict

    assert verdict("0.0435", 0.04354) == "as printed"
    assert verdict("0.0435", 0.04356) == "differs"
    assert verdict("0.0435", 0.04345) == "as printed"
    assert verdict("0.0364", 0.0384, known="known to differ") == "known to differ"
    assert verdict("61", 61.0) == "as printed"
    assert verdict("61", 62.0) == "differs"
    assert verdict("0.95", 0.9, judge=False) == ""
    line = printed_lines.number("", "", None, 0.25, "")
    assert (line.published, line.difference, line.verdict) == ("not at hand", "", "")


def write_network(path, n=2000, n_classes=10):
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for part in ("val", "test"):
        logits = 2 * torch.randn(n, n_classes, generator=generator)
        arrays[f"{part}_labels"] = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1).numpy()
        arrays[f"{part}_logits"] = (2.5 * logits).numpy()
    np.savez(path, **arrays)


def test_logits_that_are_not_the_papers_are_told(tmp_path, capsys):
    write_network(tmp_path / "cifar10_resnet50_ce.npz")
    assert reproduce.main(["--logits", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    out = capsys.readouterr().out
    assert "differs" in out
    assert "cifar10_wrn26_10_brier.npz is not in the folder" in out
    with (tmp_path / "out" / "networks.csv").open(newline="") as stream:
        rows = {row["what"]: row for row in csv.DictReader(stream) if row["figure"] == "cifar10_resnet50_ce"}
    # These logits are over-confident by a factor of 2.5 and otherwise calibrated.
    assert float(rows["T of the validation ECE, step 0.1"]["computed"]) == pytest.approx(2.5, abs=0.2)
    assert rows["ECE, before scaling"]["verdict"] == "differs"
    assert len(rows) == 15


def test_a_folder_without_logits_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"expected one of cifar10_resnet50_ce\.npz, .* found none"):
        reproduce.main(["--logits", str(tmp_path)])
