"""The comparison as a function, its verdict, and the calibrator that chooses."""

import json
import math
import re

import numpy as np
import pytest
import torch
from conftest import peer

import focalkern as fk
from focalkern.calibrators import FocalTemperatureScaling, RobustTemperatureScaling, SplineScaling, TemperatureScaling
from focalkern.calibrators._candidates import DEFAULT_CANDIDATES, as_candidates
from focalkern.calibrators._cross_validation import stratified_folds
from focalkern.calibrators._verdict import describe_method
from focalkern.study import samples, stream_sets
from focalkern.study.cross_validation import cross_validate_samples
from focalkern.study.grid_search import search_grid

pytest.importorskip("tabulate", reason="tabulate is not installed")

FAST = {"resamples": 0, "folds": 3}


def sample(n, seed, temperature=2.0, n_classes=4):
    """Logits whose labels follow softmax(z / temperature)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(1)
    return logits, labels


@pytest.fixture(scope="module")
def study():
    return fk.compare_calibrators(sample(400, 0), sample(500, 1), resamples=40, folds=3)


def test_the_verdict_of_over_confident_rows_is_temperature_scaling(study):
    fitted = RobustTemperatureScaling().fit(*sample(400, 0))
    assert isinstance(study.calibrator, RobustTemperatureScaling)
    assert study.calibrator.temperature_ == pytest.approx(fitted.temperature_, rel=1e-6)
    lines = str(study.verdict).splitlines()
    assert 1 <= len(lines) <= 3
    assert lines[0].startswith(f"Use temperature scaling, T = {fitted.temperature_:.4g}: NLL ")
    assert "on 500 test rows" in " ".join(lines)
    assert max(map(len, lines)) <= 100
    assert re.match(r"Cross-validated NLL 0\.\d+ \+-0\.\d+ below no calibration", study.verdict.because)
    assert study.verdict.costs == "No predicted class changes."
    assert str(study).startswith(f"{study.verdict}\nNext:\n  probs = study.calibrator.predict_proba(logits)\n")
    before, after = study.results[0].test["nll"], study.chosen.test["nll"]
    assert f"NLL {before:.4f} -> {after:.4f}" in lines[0]


def test_the_table_keeps_the_papers_rows(study):
    rows = [(row.method, row.criterion, row.search) for row in study.results]
    assert [row[:2] for row in rows] == [
        ("none", None),
        ("temperature", None),
        ("spline", None),
        ("spline-vector", None),
        ("spline-matrix", None),
        ("focal-temperature", "nll"),
        ("temperature", "ece"),
        ("focal-temperature", "ece"),
    ]
    paper = FocalTemperatureScaling(search="grid", criterion="ece", estimator="equal_mass").fit(*sample(400, 0))
    assert (study.results[-1].gamma, study.results[-1].temperature) == (paper.gamma_, paper.temperature_)
    text = study.table()
    assert max(map(len, text.splitlines())) <= 100
    assert "equal_width" in text and "equal_mass" not in text
    assert "ECE-optimal" not in text
    assert "classwise" in study.table(all=True) and "focal temperature, ECE-optimal" in study.table(all=True)


def test_a_study_for_machines_and_for_notebooks(study, tmp_path):
    document = json.loads(json.dumps(study.to_dict(), allow_nan=False))
    assert document["verdict"]["use"] == study.verdict.use
    assert document["rows"][document["chosen"]]["method"] == "temperature"
    candidates = document["cross_validation"]["candidates"]
    assert [one["name"] for one in candidates] == list(DEFAULT_CANDIDATES)
    assert [one["chosen"] for one in candidates] == [False, True, False, False, False]
    assert candidates[0]["excluded"] is None
    html = study._repr_html_()
    assert "Use temperature scaling" in html and "<table" in html and html.count("<tr") == 9
    assert [row.split("<")[0] for row in html.split('role="rowheader">')[1:]] == [
        "uncalibrated",
        "\u2192 temperature",
        "spline",
        "spline-vector",
        "spline-matrix",
        "focal temperature, NLL-optimal",
        "temperature, ECE-optimal",
        "focal temperature, ECE-optimal",
    ]
    shown = html.replace("NLL-optimal", "").replace("ECE-optimal", "")
    assert "-&gt;" not in shown and not re.search(r">-[.\d]", shown)  # signs are set, not typed


def test_a_data_frame(study):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = study.to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 8
    assert frame.loc[frame.chosen, "method"].tolist() == ["temperature"]
    low, high = frame.loc[1, ["nll_low", "nll_high"]]
    assert low < frame.loc[1, "nll"] < high


def test_the_report_is_written(study, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = study.write_report(tmp_path / "report", title="A title")
    assert {"report.html", "report.json", "table.csv"} <= {file.name for file in files}
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == study.to_dict()


def test_calibrated_rows_are_left_as_they_are():
    study = fk.compare_calibrators(sample(300, 0, temperature=1.0), sample(300, 1, temperature=1.0), **FAST)
    assert study.chosen.method == "none"
    assert str(study.verdict).startswith("Use no calibration: NLL ")
    logits, _ = sample(5, 2)
    assert torch.allclose(study.calibrator.predict_proba(logits), logits.softmax(-1))


def test_test_rows_never_choose():
    validation = sample(300, 0)
    studies = [fk.compare_calibrators(validation, sample(200, 1, temperature=t), **FAST) for t in (0.5, 2.0)]
    assert studies[0].chosen.method == studies[1].chosen.method != "none"
    assert studies[0].calibrator.temperature_ == studies[1].calibrator.temperature_
    assert studies[0].cross_validation.table() == studies[1].cross_validation.table()


def test_ece_is_the_papers_choice_with_its_price():
    study = fk.compare_calibrators(sample(300, 0), sample(300, 1), criterion="ece", resamples=30, folds=3)
    assert (study.chosen.method, study.chosen.criterion, study.chosen.search) == ("focal-temperature", "ece", "grid")
    words = describe_method(study.cross_validation.winner.name)
    assert study.verdict.because == f"The ECE was asked for (by NLL: {words})."
    costs = study.verdict.costs
    assert costs.startswith("Against no calibration: NLL ") and "; against temperature scaling: NLL " in costs
    plain, place = study.results[1], study.results.index(study.chosen)
    interval = study.intervals.between(place, 1, "nll")
    difference = study.chosen.test["nll"] - plain.test["nll"]
    half = max(interval.high - difference, difference - interval.low)
    assert f"NLL {difference:+.4f} +-{half:.4f}" in costs


def test_brier_is_a_criterion():
    study = fk.compare_calibrators(sample(300, 0), sample(300, 1), criterion="brier", **FAST)
    assert study.cross_validation.criterion == "brier"
    assert study.results[1].criterion == "brier"
    assert "Brier" in study.verdict.use


def test_few_rows_are_said():
    study = fk.compare_calibrators(sample(12, 3, temperature=1.3), sample(300, 1), **FAST)
    assert any("rows are few" in warning or "too few" in warning for warning in study.verdict.warnings)
    changing = fk.compare_calibrators(mixed(100, 0), mixed(300, 1), candidates=("spline-matrix",), **FAST)
    assert changing.chosen.method == "spline-matrix"
    assert "keep_predictions=True is the cautious choice" in changing.verdict.warnings[0]
    changed = int((changing.calibrator.changed(mixed(300, 1)[0])).sum())
    assert f"Predictions change in {changed} of 300 rows" in changing.verdict.costs


def mixed(n, seed):
    """Logits whose classes are mixed up, which a matrix undoes."""
    logits, labels = sample(n, seed)
    return logits @ (torch.eye(4, dtype=torch.float64) + 0.6 * torch.eye(4, dtype=torch.float64).roll(1, 0)), labels


def test_predictions_can_be_kept():
    kept = fk.compare_calibrators(mixed(300, 0), mixed(300, 1), keep_predictions=True, **FAST)
    assert [one.name for one in kept.cross_validation.entries] == ["none", "temperature", "spline"]
    assert kept.verdict.costs == "No predicted class changes."
    free = fk.compare_calibrators(mixed(300, 0), mixed(300, 1), **FAST)
    assert free.chosen.method in ("spline-vector", "spline-matrix")
    assert "For data of another source keep_predictions=True is safer." in free.verdict.notes()
    with pytest.raises(ValueError, match="compare_calibrators: candidates: isotonic may change predicted classes"):
        fk.compare_calibrators(mixed(300, 0), candidates=("isotonic",), keep_predictions=True)


def test_one_row_is_too_few():
    alone = fk.compare_calibrators((np.array([[1.0, 0.0]]), np.array([0])), **FAST)
    assert alone.chosen.method == "none" and "too few to compare anything" in alone.verdict.because


def test_an_impossible_row_leaves_what_has_a_floor():
    logits, labels = sample(100, 0)
    logits[3, labels[3]] = -math.inf
    study = fk.compare_calibrators((logits, labels), **FAST)
    assert study.chosen.method in ("temperature", "spline")
    assert math.isfinite(study.chosen.test["nll"])
    assert "gives probability 0 to classes that are possible in other rows" in " ".join(study.verdict.warnings)
    json.dumps(study.to_dict(), allow_nan=False)
    assert "Validation and test rows are the same" in str(study.verdict) or study.verdict.warnings


class Half:
    def fit(self, logits, labels):
        return self

    def predict_proba(self, logits):
        return torch.from_numpy(logits / 2).softmax(-1).numpy()


def test_a_candidate_from_elsewhere():
    study = fk.compare_calibrators(sample(300, 0), sample(300, 1), candidates={"half": Half()}, **FAST)
    assert isinstance(study.calibrator, Half)
    assert study.verdict.use.startswith("half: NLL ")
    assert [row.method for row in study.results] == ["none", "half", "temperature", "focal-temperature"]
    logits, labels = sample(300, 1)
    assert study.chosen.test["nll"] == pytest.approx(float(fk.metrics.nll((logits / 2).softmax(-1), labels)))
    study.table()
    json.dumps(study.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"validation": 3}, TypeError, "validation must be a pair"),
        ({"criterion": "mce"}, ValueError, "criterion must be one of nll, brier, ece"),
        ({"estimator": "guo"}, ValueError, "estimator must be one of"),
        ({"folds": 1}, ValueError, "folds must be at least 2, got 1"),
        ({"candidates": ("platt",)}, ValueError, "got 'platt'"),
        ({"candidates": {"platt": 3}}, TypeError, "platt must have fit and predict_proba"),
        ({"test": (np.zeros((2, 7)), np.zeros(2, int))}, ValueError, "test must have logits of 4 classes"),
        ({"validation": (np.zeros((2, 4)), np.array([0, 4]))}, ValueError, "class numbers from 0 to 3"),
    ],
)
def test_mistakes(arguments, error, words):
    options = {"validation": sample(20, 0), **FAST, **arguments}
    with pytest.raises(error, match=words):
        fk.compare_calibrators(options.pop("validation"), **options)


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


def test_streamed_folds_are_those_of_the_row_numbers(shards):
    (rows,) = stream_sets(shards, labels=None, input_kind=None).values()
    temperatures = [index * 0.25 for index in range(1, 21)]
    gammas = (0.0, -0.25, 0.5, 1.0)
    search = search_grid(rows, gammas, temperatures, n_bins=15, estimator="equal_mass", folds=3)
    logits, labels = sample(300, 0)
    fold = torch.arange(300) % 3
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
        seed=0,
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


def test_streamed_rows_leave_out_what_needs_them_all(shards):
    study = fk.compare_calibrators(shards, candidates={"half": Half(), "temperature": TemperatureScaling()}, **FAST)
    assert study.chosen.method == "temperature"
    assert "left out: half, which needs all rows in memory" in study.verdict.warnings
    assert study.calibrator.n_samples_ == 300


def test_streamed_rows_that_are_the_validation_rows_are_called_so(shards, tmp_path):
    """The same files, or copies of them under other names."""
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
    """All of them, or a sample; and whether validation and test rows are the same files."""
    for part in range(3):
        labels = np.load(tmp_path / f"val_labels-{part}.npy")
        np.save(tmp_path / f"val_labels-{part}.npy", (labels + 1) % 4)
    remarks = fk.compare_calibrators(shards, shards, **FAST).remarks
    assert [words for words in remarks if "of the 300 rows, but in" in words and "one too high" in words]
    assert "the same 300 rows are validation and test rows, so that the figures are too good." in remarks
    monkeypatch.setattr(samples, "_SAMPLED_ROWS", 128)
    remarks = fk.compare_calibrators(shards, shards, **FAST).remarks
    assert [words for words in remarks if "(128 of its rows): the labels are the largest logit in" in words]
    assert "of 128 rows that were compared, the same 128 rows are validation and test rows" in " ".join(remarks)


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


# -- what a verdict says and saves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["temperature scaling", "x" * 90, " ".join(["word"] * 70), "y" * 500])
@pytest.mark.parametrize("because", ["", "Because.", " ".join(["because"] * 20) + "."])
@pytest.mark.parametrize("costs", ["", "Costs " + "much " * 25 + "."])
def test_a_verdict_is_three_lines_of_a_hundred_columns_and_loses_nothing(use, because, costs):
    verdict = fk.Verdict(use, because, costs, ("one warning", "another"))
    lines = str(verdict).splitlines()
    assert 1 <= len(lines) <= 3 and max(map(len, lines)) <= 100
    assert str(verdict).startswith("Use ")
    said = " ".join(lines)
    for sentence in (because, costs, "One warning.", "Another."):
        assert not sentence or (sentence in said) != (sentence in verdict.notes())


def test_a_study_saves_its_calibrator_with_the_evidence(study, tmp_path):
    study.save(tmp_path / "calibrator.json")
    loaded = fk.load_calibrator(tmp_path / "calibrator.json")
    assert loaded.temperature_ == study.calibrator.temperature_
    evidence = json.loads((tmp_path / "calibrator.json").read_text())["fit"]["evidence"]
    assert (evidence["use"], evidence["because"]) == (study.verdict.use, study.verdict.because)
    assert evidence["candidates"] == study.cross_validation.table() and evidence["folds"] == 3
    (chosen,) = [row for row in evidence["table"] if row["chosen"]]
    assert chosen["test"] == study.chosen.test and len(evidence["table"]) == len(study.results)
    assert evidence["data"]["test"]["n_samples"] == 500 and not evidence["data"]["same_rows"]
    study.calibrator.save(tmp_path / "alone.json")
    alone = json.loads((tmp_path / "alone.json").read_text())
    assert "evidence" not in alone["fit"]
    other = fk.compare_calibrators(sample(300, 0), sample(300, 1), candidates={"half": Half()}, **FAST)
    with pytest.raises(TypeError, match="save needs a calibrator of this library, but the one to use is a Half"):
        other.save(tmp_path / "no.json")


# -- AutoCalibrator --------------------------------------------------------------------------------------------------


def test_auto_is_the_calibrator_it_chose(tmp_path):
    logits, labels = sample(300, 0)
    auto = fk.AutoCalibrator(folds=3).fit(logits, labels)
    assert auto.chosen_ == "spline"
    same = SplineScaling().fit(logits, labels)
    assert torch.equal(auto.predict_proba(logits), same.predict_proba(logits))
    assert torch.equal(auto.predict(logits), logits.argmax(-1))
    assert [row["name"] for row in auto.table_] == list(DEFAULT_CANDIDATES)
    assert auto.verdict_.use == "spline scaling"
    assert auto.verdict_.costs == "No predicted class changes."
    auto.save(tmp_path / "auto.json")
    loaded = fk.load_calibrator(tmp_path / "auto.json")
    assert isinstance(loaded, SplineScaling) and loaded.temperature_ == auto.calibrator_.temperature_
    evidence = json.loads((tmp_path / "auto.json").read_text())["fit"]["evidence"]
    assert evidence["candidates"] == auto.table_ and evidence["because"] == auto.verdict_.because
    assert torch.equal(auto.as_module()(logits), same.as_module()(logits))


def test_auto_weights_its_fits_and_its_losses():
    """Against the same by hand; zero is no row, and equal weights are none."""
    logits, labels = sample(300, 0)
    weight = torch.rand(300, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1
    auto = fk.AutoCalibrator(("temperature",), folds=3, seed=7).fit(logits, labels, weight)
    assert auto.calibrator_.temperature_ == RobustTemperatureScaling().fit(logits, labels, weight).temperature_
    fold = stratified_folds(labels, 3, 7)
    losses = torch.empty(2, 300, dtype=torch.float64)
    for k in range(3):
        part = RobustTemperatureScaling().fit(logits[fold != k], labels[fold != k], weight[fold != k])
        probs = [logits[fold == k].double().softmax(-1), part.predict_proba(logits[fold == k].double())]
        for row, of_all in zip(losses, probs, strict=True):
            row[fold == k] = -of_all.gather(1, labels[fold == k].unsqueeze(1)).squeeze(1).log()
    means, difference = np.average(losses, axis=1, weights=weight), (losses[0] - losses[1]).numpy()
    assert [row["loss"] for row in auto.table_] == pytest.approx(means.tolist(), rel=1e-9)
    share = (weight / weight.sum()).numpy()
    error = np.sqrt((share**2 * (difference - share @ difference) ** 2).sum() / (1 - (share**2).sum()))
    assert auto.table_[0]["standard_error"] == pytest.approx(error, rel=1e-6)

    none = (torch.arange(300) % 3 > 0).double()
    left = fk.AutoCalibrator(folds=3).fit(logits, labels, none)
    assert left.table_ == fk.AutoCalibrator(folds=3).fit(logits[none > 0], labels[none > 0]).table_
    plain = fk.AutoCalibrator(("temperature",), folds=3, seed=7).fit(logits, labels).table_
    equal = fk.AutoCalibrator(("temperature",), folds=3, seed=7).fit(logits, labels, 2 * torch.ones(300)).table_
    for one, other in zip(equal, plain, strict=True):
        for name in ("loss", "difference", "standard_error"):
            # A weight of 2 is two rows, which the prior on the temperature hardly tells from one.
            assert one[name] == pytest.approx(other[name], rel=1e-2, abs=1e-9), name


def test_auto_names_what_takes_no_weights():
    logits, labels = sample(100, 0)
    weight = torch.linspace(0.5, 1.5, 100)
    auto = fk.AutoCalibrator({"half": Half(), "T": TemperatureScaling()}, folds=2).fit(logits, labels, weight)
    assert [row["excluded"] for row in auto.table_] == [None, "could not be fitted: its fit has no sample_weight", None]
    assert any(words.startswith("half could not be fitted") for words in auto.verdict_.warnings)


def test_auto_in_numpy_with_names_and_with_one_logit():
    logits, labels = sample(200, 0, n_classes=2)
    names = np.array(["cat", "dog"])[labels.numpy()]
    auto = fk.AutoCalibrator(("temperature",), folds=2).fit(logits.numpy(), names)
    assert set(auto.predict(logits.numpy())) <= {"cat", "dog"}
    assert isinstance(auto.predict_proba(logits.numpy()), np.ndarray)
    one = fk.AutoCalibrator(folds=2).fit(logits[:, 1] - logits[:, 0], labels)
    assert one.predict_proba(logits[:5, 1] - logits[:5, 0]).shape == (5, 2)


def test_auto_checks_its_parameters_and_saves_only_ours(tmp_path):
    logits, labels = sample(100, 0)
    with pytest.raises(ValueError, match="folds must be at least 2"):
        fk.AutoCalibrator(folds=1).fit(logits, labels)
    with pytest.raises(ValueError, match="criterion must be one of nll, brier"):
        fk.AutoCalibrator(criterion="ece").fit(logits, labels)
    with pytest.raises(ValueError, match="got 'platt'"):
        fk.AutoCalibrator(("platt",)).fit(logits, labels)
    auto = fk.AutoCalibrator({"half": Half()}, folds=2).fit(logits, labels)
    assert auto.chosen_ == "half"
    assert torch.allclose(auto.predict_proba(logits), (logits / 2).softmax(-1))
    with pytest.raises(TypeError, match="save needs a calibrator of this library, but half was chosen"):
        auto.save(tmp_path / "no.json")
    assert fk.AutoCalibrator(seed=3).get_params()["seed"] == 3


def test_the_legend_says_what_a_richer_candidate_is_compared_with():
    for candidates, said in ((["temperature"], False), (["temperature", "structured-vector"], True)):
        table = str(fk.compare_calibrators(sample(200, 0), sample(200, 1), candidates=candidates, resamples=10).table())
        assert ("other candidates with temperature scaling" in " ".join(table.split())) == said


# -- candidates of other libraries -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_candidates_of_netcal_probmetrics_and_scikit_learn():
    """They take probabilities, and so does the comparison then; none of them needs an adapter."""
    scaling = peer("netcal.scaling")
    calibrators = peer("probmetrics.calibrators")
    linear_model = peer("sklearn.linear_model")
    (logits, labels), (test_logits, test_labels) = sample(200, 0), sample(200, 1)
    study = fk.compare_calibrators(
        (logits.softmax(-1), labels),
        (test_logits.softmax(-1), test_labels),
        input_kind="probs",
        candidates={
            "temperature": TemperatureScaling(input_kind="probs"),
            "netcal": scaling.TemperatureScaling(),
            "probmetrics": calibrators.SVSCalibrator(),
            "regression": linear_model.LogisticRegression(),
        },
        **FAST,
    )
    assert [row.method for row in study.results[:5]] == ["none", "temperature", "netcal", "probmetrics", "regression"]
    assert all(entry.excluded in ("", "is worse than no calibration") for entry in study.cross_validation.entries)
    ours, theirs = study.results[1].test, study.results[2].test
    assert theirs["nll"] == pytest.approx(ours["nll"], rel=1e-2)
    assert study.chosen.method in ("temperature", "netcal")  # the same map, to the last digits
