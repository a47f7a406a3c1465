"""Calibrators in scikit-learn's tools."""

import pickle
import warnings

import numpy as np
import pytest
from conftest import peer

from focalkern.calibrators import (
    CalibrationWarning,
    FocalTemperatureScaling,
    HistogramBinning,
    MultiLabelScaling,
    TemperatureScaling,
)

NAMES = np.array(["ape", "bee", "cat"])
CALIBRATORS = [
    TemperatureScaling(),
    FocalTemperatureScaling(temperatures=[0.5, 1.0, 2.0, 4.0, 8.0]),
    FocalTemperatureScaling(search="nll"),
    HistogramBinning(n_bins=5, scaling=TemperatureScaling()),
]


def sample(n=300, scale=3.0):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(n, 3)) * 2
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    target = (probs.cumsum(1) < rng.random((n, 1))).sum(1)
    return logits * scale, target


# Few temperatures and bins cause warnings, which other tests check.
@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
@pytest.mark.parametrize("calibrator", CALIBRATORS)
@pytest.mark.parametrize("named", [False, True])
def test_cross_val_predict_and_a_pipeline(calibrator, named):
    base, pipeline = peer("sklearn.base"), peer("sklearn.pipeline")
    preprocessing, selection = peer("sklearn.preprocessing"), peer("sklearn.model_selection")
    logits, target = sample()
    y = NAMES[target] if named else target
    assert base.is_classifier(calibrator)
    probs = selection.cross_val_predict(calibrator, logits, y, cv=3, method="predict_proba")
    assert probs.shape == (300, 3)
    assert probs.sum(1) == pytest.approx(np.ones(300))
    # The calibrator of the other folds predicts each row.
    train, test = next(iter(selection.StratifiedKFold(3).split(logits, y)))
    alone = base.clone(calibrator).fit(logits[train], y[train])
    assert np.array_equal(probs[test], alone.predict_proba(logits[test]))

    # A step before the logits, here one that removes the over-confidence.
    thirds = preprocessing.FunctionTransformer(lambda z: z / 3)
    pipe = pipeline.make_pipeline(thirds, calibrator).fit(logits, y)
    assert pipe.predict_proba(logits) == pytest.approx(alone.fit(logits / 3, y).predict_proba(logits / 3))
    assert pipe.score(logits, y) == pytest.approx((pipe.predict(logits) == y).mean())
    assert list(pipe.classes_) == (list(NAMES) if named else [0, 1, 2])
    if named:
        assert set(pipe.predict(logits)) <= set(NAMES)


def test_a_grid_search_reaches_nested_parameters():
    selection = peer("sklearn.model_selection")
    logits, target = sample()
    search = selection.GridSearchCV(
        HistogramBinning(scaling=TemperatureScaling()),
        {"n_bins": [1, 5], "scaling__criterion": ["nll", "ece"]},
        scoring="neg_log_loss",
        cv=2,
    ).fit(logits, target)
    assert set(search.best_params_) == {"n_bins", "scaling__criterion"}
    assert len(search.cv_results_["params"]) == 4


def test_independent_labels_are_cloned():
    base = peer("sklearn.base")
    calibrator = MultiLabelScaling(scaling=FocalTemperatureScaling(search="nll"))
    copy = base.clone(calibrator)
    assert copy.scaling is not calibrator.scaling
    assert copy.get_params()["scaling__search"] == "nll"


class Named(TemperatureScaling):
    """A user's calibrator, with its own arguments in front of those of its base class."""

    def __init__(self, *, name="mine", **options):
        super().__init__(**options)
        self.name = name


class Fixed(Named):
    def __init__(self, note, criterion="brier"):
        super().__init__(criterion=criterion)
        self.note = note


def test_arguments_of_a_subclass_are_cloned(tmp_path):
    base = peer("sklearn.base")
    for calibrator, added in ((Named(name="cat", floor=0.1), {"name": "cat"}), (Fixed(object), {"note": object})):
        copy = base.clone(calibrator)
        assert copy.get_params() == calibrator.get_params() == {**calibrator.get_params(), **added}
        assert vars(copy) == vars(calibrator)
        assert repr(copy.set_params(**dict.fromkeys(added, "b"))) == repr(calibrator).replace(
            repr(*added.values()), "'b'"
        )
        copy.fit(*sample()).save(tmp_path / "calibrator.json")  # which has only the arguments of TemperatureScaling
        assert TemperatureScaling.load(tmp_path / "calibrator.json").floor == calibrator.floor
    assert list(Named().get_params()) == [*TemperatureScaling().get_params(), "name"]
    assert list(Fixed("").get_params()) == ["note", "criterion"]


def test_the_remedy_of_an_infinite_nll_has_the_arguments_of_a_subclass():
    logits, labels = np.array([[-np.inf, 1.0], [2.0, -1.0]] * 9), [[1, 0], [0, 1]] * 9
    with pytest.raises(ValueError, match=r"scaling=Fixed\(note='n', criterion='nll', floor=0\.\d+\) gives every"):
        MultiLabelScaling(scaling=Fixed("n", criterion="nll")).fit(logits, labels)


@pytest.mark.parametrize("calibrator", [*CALIBRATORS, MultiLabelScaling()], ids=lambda made: type(made).__name__)
def test_metadata_routing(calibrator):
    sklearn, selection = peer("sklearn"), peer("sklearn.model_selection")
    base, pipeline = peer("sklearn.base"), peer("sklearn.pipeline")
    logits, target = sample()
    y = np.eye(3, dtype=int)[target] if isinstance(calibrator, MultiLabelScaling) else target
    weight = np.random.default_rng(1).random(300)
    with sklearn.config_context(enable_metadata_routing=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        plain = pipeline.make_pipeline(base.clone(calibrator)).fit(logits, y)
        assert plain.score(logits, y) == calibrator.fit(logits, y).score(logits, y)
        with pytest.raises(ValueError, match="sample_weight"):
            plain.fit(logits, y, sample_weight=weight)
        asks = base.clone(calibrator).set_fit_request(sample_weight="w").set_score_request(sample_weight=True)
        pipe = base.clone(pipeline.make_pipeline(asks)).fit(logits, y, w=weight)
        expected = base.clone(calibrator).fit(logits, y, weight)
        assert np.array_equal(pipe.predict_proba(logits), expected.predict_proba(logits))
        assert pipe.score(logits, y, sample_weight=weight) == expected.score(logits, y, weight)
        scores = selection.cross_validate(asks, logits, y, cv=2, params={"sample_weight": weight, "w": weight})
        assert len(scores["test_score"]) == 2
        loaded = pickle.loads(pickle.dumps(asks))
        assert loaded.get_metadata_routing().fit.requests == asks.get_metadata_routing().fit.requests
    with pytest.raises(TypeError, match=r": arguments of fit are sample_weight, ignore_index, got 'weight'$"):
        asks.set_fit_request(weight=True)


def test_names_of_classes(tmp_path):
    logits, target = sample()
    numbers = TemperatureScaling().fit(logits, target)
    for names in (NAMES[target], NAMES[target].astype(object), list(NAMES[target])):
        calibrator = TemperatureScaling().fit(logits, names)
        assert calibrator.temperature_ == numbers.temperature_
        assert calibrator.classes_.tolist() == ["ape", "bee", "cat"]
        assert np.array_equal(calibrator.predict(logits), NAMES[logits.argmax(1)])
        assert calibrator.score(logits, names) == numbers.score(logits, target)
    calibrator.save(tmp_path / "calibrator.json")
    loaded = TemperatureScaling.load(tmp_path / "calibrator.json")
    assert np.array_equal(loaded.predict(logits), NAMES[logits.argmax(1)])
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "calibrator.json").read_bytes()


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (["ape", "bee"] * 150, ValueError, "must name each of the 3 classes of the logits, got 2 names"),
        (["ape", "bee", "cat", "dog"] * 75, ValueError, "got 4 names"),
        (
            np.array(["ape", 1, "cat"] * 100, dtype=object),
            TypeError,
            "integer class indices or strings, got int and str",
        ),
        (["ape"] * 299, ValueError, "got 1 names"),
        (["1", "2", "10"] * 100, ValueError, "text of numbers, whose alphabetical order is '1', '10', '2', ...; pass "),
    ],
)
def test_names_that_do_not_fit_the_logits(target, error, words):
    with pytest.raises(error) as caught:
        TemperatureScaling().fit(sample()[0], target)
    assert words in str(caught.value)
