"""The comparison of streamed samples: its folds, its candidates and its search."""

import math

import numpy as np
import pytest
import torch
from compare_cases import FAST, Half, sample

import focalkern as fk
from focalkern import _diagnostics
from focalkern.calibrators import TemperatureScaling, _copies
from focalkern.calibrators._candidates import as_candidates
from focalkern.calibrators._folds import fold_of
from focalkern.study import samples, stream_sets
from focalkern.study.compare import run_study
from focalkern.study.cross_validation import cross_validate_samples
from focalkern.study.given import given_samples
from focalkern.study.grid_search import search_grid

pytest.importorskip("tabulate", reason="tabulate is not installed")


# -- streamed --------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path, monkeypatch):
    logits, labels = sample(300, 0)
    for part, rows in enumerate(np.array_split(np.arange(300), 3)):
        np.save(tmp_path / f"val_logits-{part}.npy", logits[rows].numpy())
        np.save(tmp_path / f"val_labels-{part}.npy", labels[rows].numpy())
    monkeypatch.setattr(samples, "_SEARCH_BATCH", 4 * 70)
    monkeypatch.setattr(samples, "_FLOAT64_BATCH", 4 * 40)
    return str(tmp_path / "val_logits-*.npy")


ON_THE_GRID = {"temperature": TemperatureScaling(), "focal-temperature": fk.FocalTemperatureScaling()}


def test_streamed_folds_are_those_of_the_rows_in_memory(shards):
    (rows,) = stream_sets(shards, labels=None, input_kind=None).values()
    temperatures = [index * 0.25 for index in range(1, 21)]
    gammas = (0.0, -0.25, 0.5, 1.0)
    search = search_grid(rows, gammas, temperatures, n_bins=15, estimator="equal_mass", folds=3, seed=8)
    logits, labels = sample(300, 0)
    fold = fold_of(torch.arange(300), 300, 3, 8)
    totals = search.fold_totals
    for k in range(3):
        expected = fk.calibration_grid(logits[fold == k], labels[fold == k], gammas, temperatures, criteria="nll")
        torch.testing.assert_close(totals[k], expected.tables["nll"] * 100, rtol=1e-12, atol=0)
    cross_validation = cross_validate_samples(
        rows,
        as_candidates(ON_THE_GRID, "nll", "logits"),
        search,
        gammas,
        criterion="nll",
        folds=3,
        seed=8,
    )
    losses = torch.zeros(2, 300, dtype=torch.float64)
    for k in range(3):
        part = TemperatureScaling(temperatures=temperatures).fit(logits[fold != k], labels[fold != k])
        for place, temperature in enumerate((1.0, part.temperature_)):
            log_probs = (logits[fold == k] / temperature).log_softmax(-1)
            losses[place, fold == k] = -log_probs.gather(1, labels[fold == k, None]).squeeze(1)
    assert [entry.loss for entry in cross_validation.entries[:2]] == pytest.approx(losses.mean(1).tolist(), rel=1e-12)
    difference = losses[0] - losses[1]
    first, second = cross_validation.entries[:2]
    assert first.difference - second.difference == pytest.approx(float(difference.mean()), rel=1e-9)
    if cross_validation.best == 1:
        assert first.error == pytest.approx(float(difference.std()) / math.sqrt(300), rel=1e-9)
    assert cross_validation.winner.name == "temperature"


BY_SUMS = ["none", "temperature", "spline", "spline-vector"]


def with_copies(n=210, copies=90):
    """Rows of which 30 % are copies of others, in random order."""
    logits, labels = sample(n, 0)
    generator = torch.Generator().manual_seed(1)
    order = torch.cat([torch.arange(n), torch.randint(n, (copies,), generator=generator)])
    order = order[torch.randperm(n + copies, generator=generator)]
    return logits[order], labels[order]


@pytest.fixture
def copies(tmp_path):
    logits, labels = with_copies()
    for part, rows in enumerate(np.array_split(np.arange(300), 3)):
        np.save(tmp_path / f"val_logits-{part}.npy", logits[rows].numpy())
        np.save(tmp_path / f"val_labels-{part}.npy", labels[rows].numpy())
    return str(tmp_path / "val_logits-*.npy")


def losses_of_study(study):
    found = study.cross_validation
    return {entry.name: (entry.loss, entry.difference, entry.error) for entry in found.entries}


@pytest.mark.parametrize("at_once", [70, 300])
@pytest.mark.parametrize("in_memory", [True, False])
def test_copies_of_a_streamed_row_stay_in_one_fold(copies, monkeypatch, at_once, in_memory):
    monkeypatch.setattr(samples, "_MOST_ROWS", at_once)
    monkeypatch.setattr("focalkern.study.cross_validation.fits_in_memory", lambda numbers: in_memory)
    (rows,) = stream_sets(copies, labels=None, input_kind=None).values()
    options = {"candidates": BY_SUMS, "gammas": (0.0, 0.5), "temperatures": (1.0, 2.0, 3.0), **FAST}
    memory = given_samples("", "validation", with_copies(), "val", "logits")
    found, expected = (run_study(one, one, estimator="equal_width", **options) for one in (rows, memory))
    assert found.verdict == expected.verdict
    assert any("90 of the 300 validation rows are copies of others" in words for words in found.verdict.warnings)
    for name, theirs in losses_of_study(expected).items():
        assert losses_of_study(found)[name] == pytest.approx(theirs, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("most", [150, 1 << 20])
def test_the_folds_of_copies_do_not_depend_on_the_batches(copies, monkeypatch, most):
    """Tests the folds of many rows, by a hash, and of few, also of a subset."""
    monkeypatch.setattr(_copies, "_MOST", most)
    logits, labels = with_copies()
    subset = torch.arange(300)[torch.arange(300) % 7 != 3]
    options = {"n_bins": 15, "estimator": "equal_width", "folds": 4, "seed": 8}
    for index in (torch.arange(300), subset):
        folds = []
        for at_once in (90, 300):
            monkeypatch.setattr(samples, "_MOST_ROWS", at_once)
            (rows,) = stream_sets(copies, labels=None, input_kind=None).values()
            search = search_grid(rows.subset(index, "a part"), (0.0,), (1.0, 2.0), **options)
            assert 0.2 < search.n_copies / len(index) < 0.4
            folds.append(search.folds_of_rows(index))
        assert torch.equal(*folds)
        groups = torch.unique(torch.column_stack([logits[index], labels[index], folds[0]]), dim=0)
        assert len(groups) == len(torch.unique(torch.column_stack([logits[index], labels[index]]), dim=0))
        assert torch.bincount(groups[:, -1].long(), minlength=4).min() > 30
        for k, total in enumerate(search.fold_totals):
            of_fold = index[folds[0] == k]
            expected = fk.calibration_grid(logits[of_fold], labels[of_fold], (0.0,), (1.0, 2.0), criteria="nll")
            torch.testing.assert_close(total, expected.tables["nll"] * len(of_fold), rtol=1e-12, atol=0)


def test_streamed_rows_leave_out_what_needs_them_all(shards):
    study = fk.compare_calibrators(shards, candidates={"half": Half(), "temperature": TemperatureScaling()}, **FAST)
    assert study.chosen.method == "temperature"
    assert "left out: half, which needs all rows in memory" in study.verdict.warnings
    assert study.calibrator.n_samples_ == 300


def test_streamed_rows_that_are_the_validation_rows_are_called_so(shards, tmp_path):
    """Tests the same files, and copies of them under other names."""
    for part in range(3):
        for what in ("logits", "labels"):
            (tmp_path / f"test_{what}-{part}.npy").write_bytes((tmp_path / f"val_{what}-{part}.npy").read_bytes())
    copies = str(tmp_path / "test_logits-*.npy")
    for test in (shards, copies):
        assert fk.compare_calibrators(shards, test=test, candidates=ON_THE_GRID, **FAST).verdict.optimistic
    labels = np.load(tmp_path / "test_labels-2.npy")
    labels[-1] = (labels[-1] + 1) % 4
    np.save(tmp_path / "test_labels-2.npy", labels)
    assert not fk.compare_calibrators(shards, test=copies, candidates=ON_THE_GRID, **FAST).verdict.optimistic


def test_labels_of_streamed_rows_are_looked_at(shards, tmp_path, monkeypatch):
    """Checks all labels or a sample of them, and whether validation and test rows are the same files."""
    for part in range(3):
        labels = np.load(tmp_path / f"val_labels-{part}.npy")
        np.save(tmp_path / f"val_labels-{part}.npy", (labels + 1) % 4)
    study = fk.compare_calibrators(shards, shards, **FAST)
    verdict, remarks = study.verdict, study.remarks
    assert verdict.check_data
    assert "of the 300 rows, but in" in verdict.warnings[0] and "the columns are reordered" in verdict.warnings[0]
    assert "the same 300 rows are validation and test rows, so the metrics are optimistic." in remarks
    monkeypatch.setattr(_diagnostics, "_SAMPLED_ROWS", 128)
    study = fk.compare_calibrators(shards, shards, **FAST)
    verdict, remarks = study.verdict, study.remarks
    assert "(128 of its rows): the label has the largest logit in" in verdict.warnings[0]
    assert "of 128 compared rows: the same 128 rows are validation and test rows" in " ".join(remarks)


def test_an_optimum_at_the_end_of_the_grid_is_searched_on(shards):
    (rows,) = stream_sets(shards, labels=None, input_kind=None).values()
    gammas, temperatures = (0.0, 0.25), (0.5, 0.75, 1.0)
    search = search_grid(rows, gammas, temperatures, n_bins=15, estimator="equal_mass", folds=3)
    cross_validation = cross_validate_samples(
        rows, as_candidates(ON_THE_GRID, "nll", "logits"), search, gammas, criterion="nll", folds=3, seed=0
    )
    plain = cross_validation.entries[1]
    assert not plain.excluded and plain.calibrator.at_border_ == ()
    exact = TemperatureScaling().fit(*sample(300, 0)).temperature_
    assert 1.5 < plain.calibrator.temperature_ < 2.5 and 1.5 < exact < 2.5
    assert cross_validation.winner.name == "temperature"
