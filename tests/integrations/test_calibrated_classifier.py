"""CalibratedClassifier: scikit-learn's own checks, results of CalibratedClassifierCV, and accepted calibrators."""

import pickle

import numpy as np
import pytest
from conftest import peer

import focalkern as fk
from focalkern.calibrators import FocalTemperatureScaling, IsotonicCalibration, StructuredScaling, TemperatureScaling

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from sklearn.base import BaseEstimator, ClassifierMixin  # noqa: E402
from sklearn.calibration import CalibratedClassifierCV  # noqa: E402
from sklearn.datasets import make_classification  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.frozen import FrozenEstimator  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.metrics import log_loss  # noqa: E402
from sklearn.model_selection import KFold, StratifiedGroupKFold, StratifiedKFold, cross_val_predict  # noqa: E402
from sklearn.naive_bayes import GaussianNB  # noqa: E402
from sklearn.neighbors import KNeighborsClassifier  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.svm import SVC, LinearSVC  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402


def sample(n=400, n_classes=3, seed=0):
    return make_classification(
        n, n_features=6, n_informative=4, n_redundant=2, n_classes=n_classes, flip_y=0.2, random_state=seed
    )


# scikit-learn's checks fit sets that are far too small to calibrate, and expect the warning.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ensemble", [False, True])
@pytest.mark.parametrize("options", [{}, {"cv": 2}])
def test_scikit_learns_checks(ensemble, options):
    results = check_estimator(fk.CalibratedClassifier(GaussianNB(), ensemble=ensemble, **options), on_skip=None)
    assert {result["status"] for result in results} <= {"passed", "skipped"}
    assert sum(result["status"] == "passed" for result in results) > 50


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("ensemble", [False, True])
def test_temperature_scaling_is_calibrated_classifier_cvs(n_classes, ensemble):
    X, y = sample(n_classes=n_classes)
    estimator = LogisticRegression(C=1e3)
    ours = fk.CalibratedClassifier(estimator, TemperatureScaling(), cv=4, ensemble=ensemble).fit(X, y)
    theirs = CalibratedClassifierCV(estimator, method="temperature", cv=4, ensemble=ensemble).fit(X, y)
    # scikit-learn stops at a step of about 1e-4, and represents two classes by opposite logits with twice the margin.
    assert ours.predict_proba(X) == pytest.approx(theirs.predict_proba(X), abs=2e-3)
    assert len(ours.calibrated_) == (4 if ensemble else 1)
    assert hasattr(ours, "estimator_") != ensemble


@pytest.mark.parametrize(
    ("estimator", "response"),
    [
        (LinearSVC(), "decision_function"),
        (GaussianNB(), "predict_log_proba"),
        (DecisionTreeClassifier(max_depth=6, random_state=0), "predict_log_proba"),
        (KNeighborsClassifier(), "predict_proba"),
    ],
)
@pytest.mark.parametrize("names", [False, True])
def test_every_kind_of_response(estimator, response, names):
    X, y = sample()
    y = np.array(["ape", "bee", "cat"])[y] if names else y
    calibrator = TemperatureScaling(input_kind="probs", criterion="brier") if response == "predict_proba" else None
    classifier = fk.CalibratedClassifier(estimator, calibrator, cv=3).fit(X[:300], y[:300])
    assert classifier.response_ == response
    probs = classifier.predict_proba(X[300:])
    assert probs.sum(1) == pytest.approx(np.ones(100))
    assert np.array_equal(classifier.predict(X[300:]), classifier.classes_[probs.argmax(1)])
    assert np.exp(classifier.predict_log_proba(X[300:])) == pytest.approx(probs)
    assert classifier.n_features_in_ == 6
    if response == "predict_log_proba":
        plain = estimator.fit(X[:300], y[:300]).predict_proba(X[300:])
        assert log_loss(y[300:], probs) < log_loss(y[300:], plain)


class OnlyProbabilities(ClassifierMixin, BaseEstimator):
    """A classifier whose only output is ``predict_proba``, as those of XGBoost and LightGBM."""

    def fit(self, X, y):
        self.classifier_ = LogisticRegression(C=1e3).fit(X, y)
        self.classes_ = self.classifier_.classes_
        return self

    def predict(self, X):
        return self.classifier_.predict(X)

    def predict_proba(self, X):
        return self.classifier_.predict_proba(X)


@pytest.mark.parametrize("calibrator", [None, fk.SplineScaling()], ids=["default", "spline"])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_a_classifier_of_probabilities_has_their_logarithms_as_logits(calibrator, n_classes):
    """The same classifier with a decision function has the same calibrated probabilities; the probabilities themselves
    are no logits."""
    X, y = sample(n_classes=n_classes)
    of_probs = fk.CalibratedClassifier(OnlyProbabilities(), calibrator, cv=3).fit(X[:300], y[:300])
    of_logits = fk.CalibratedClassifier(LogisticRegression(C=1e3), calibrator, cv=3).fit(X[:300], y[:300])
    assert of_probs.response_ == "predict_proba" and of_logits.response_ == "decision_function"
    assert of_probs.predict_proba(X[300:]) == pytest.approx(of_logits.predict_proba(X[300:]), abs=1e-6)


@pytest.mark.parametrize(
    "estimator", [KNeighborsClassifier(), RandomForestClassifier(20, max_depth=6, random_state=0)], ids=repr
)
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_rows_with_a_probability_of_0_are_mixed_with_the_uniform_distribution(estimator, kind):
    """With log(2e-16) for such a class, a few wrong rows would flatten all others."""
    X, y = sample()
    folds = StratifiedKFold(3)
    classifier = fk.CalibratedClassifier(estimator, TemperatureScaling(input_kind=kind), cv=folds).fit(X, y)
    p = cross_val_predict(estimator, X, y, cv=folds, method="predict_proba").astype(np.float64)
    zero, e = (p == 0).any(1, keepdims=True), 0.1 / (len(y) + 1)
    assert 0 < zero.mean() < 1
    z = np.log(np.where(zero, (1 - e) * p + e / 3, p))
    assert classifier.calibrator_.temperature_ == pytest.approx(TemperatureScaling().fit(z, y).temperature_, rel=1e-6)
    last = estimator.fit(X, y).predict_proba(X)
    z = np.log(np.where((last == 0).any(1, keepdims=True), (1 - e) * last + e / 3, last))
    expected = np.exp(z / classifier.calibrator_.temperature_)
    expected /= expected.sum(1, keepdims=True)
    assert classifier.predict_proba(X) == pytest.approx(expected, abs=1e-6)


@pytest.mark.filterwarnings("ignore:.*rows per class are few:focalkern.CalibrationWarning")
@pytest.mark.parametrize(
    "calibrator", [FocalTemperatureScaling(), StructuredScaling(kind="vector"), IsotonicCalibration()], ids=repr
)
def test_every_calibrator(calibrator):
    X, y = sample()
    classifier = fk.CalibratedClassifier(LogisticRegression(), calibrator, cv=3).fit(X, y, np.arange(400) % 3)
    assert classifier.score(X, y) > 0.6
    assert classifier.calibrator_ is not calibrator
    again = pickle.loads(pickle.dumps(classifier))
    assert np.array_equal(again.predict_proba(X), classifier.predict_proba(X))
    copy = sklearn.base.clone(classifier).set_params(estimator__C=0.1)
    assert copy.get_params()["estimator__C"] == 0.1


class Shrink(BaseEstimator):
    """Any object with the interface of a calibrator."""

    def fit(self, logits, labels):
        self.seen_ = logits.shape, sorted(set(labels.tolist()))
        return self

    def predict_proba(self, logits):
        return np.exp(logits / 2) / np.exp(logits / 2).sum(1, keepdims=True)


def test_anything_of_this_shape_calibrates():
    X, y = sample()
    classifier = fk.CalibratedClassifier(LogisticRegression(), Shrink(), cv=3).fit(X, np.array(["a", "b", "c"])[y])
    assert classifier.calibrator_.seen_ == ((400, 3), [0, 1, 2])
    with pytest.raises(ValueError, match="calibrator Shrink takes no sample_weight"):
        classifier.fit(X, y, np.ones(400) * 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_probmetrics_and_netcals_calibrate():
    peer("numba")
    probmetrics, netcal = peer("probmetrics.calibrators"), peer("netcal.scaling")
    X, y = sample()

    class OfNetcal(BaseEstimator):
        input_kind = "probs"

        def fit(self, probs, labels):
            self.scaling_ = netcal.TemperatureScaling()
            self.scaling_.fit(probs, labels)
            return self

        def predict_proba(self, probs):
            return self.scaling_.transform(probs)

    class OfProbmetrics(BaseEstimator):
        input_kind = "probs"

        def fit(self, probs, labels):
            self.scaling_ = probmetrics.SVSCalibrator().fit(probs, labels)
            return self

        def predict_proba(self, probs):
            return self.scaling_.predict_proba(probs)

    for calibrator in (OfNetcal(), OfProbmetrics()):
        classifier = fk.CalibratedClassifier(LogisticRegression(), calibrator, cv=3).fit(X, y)
        assert classifier.response_ == "predict_proba"
        assert classifier.predict_proba(X).sum(1) == pytest.approx(np.ones(400), abs=1e-5)


def test_a_rare_class_makes_fewer_folds():
    X, y = sample()
    y = np.where(np.arange(400) < 3, 7, y)
    classifier = fk.CalibratedClassifier(LogisticRegression())
    with pytest.warns(UserWarning, match="CalibratedClassifier: 3 folds in place of 5, because '7' has no more rows"):
        found = classifier.fit(X, y).predict_proba(X)
    assert np.array_equal(found, fk.CalibratedClassifier(LogisticRegression(), cv=3).fit(X, y).predict_proba(X))


def test_a_frozen_classifier_stays():
    X, y = sample()
    fitted = LogisticRegression().fit(X[:200], y[:200])
    classifier = fk.CalibratedClassifier(FrozenEstimator(fitted)).fit(X[200:], y[200:])
    assert np.array_equal(classifier.estimator_.decision_function(X), fitted.decision_function(X))
    expected = TemperatureScaling().fit(fitted.decision_function(X[200:]), y[200:])
    assert classifier.calibrator_.temperature_ == expected.temperature_


def test_a_frozen_classifier_keeps_a_class_that_the_rows_lack():
    """Its column and its predictions stay, and do not go to the next class."""
    X, y = sample()
    names = np.array(["cat", "ant", "bee"])[y]
    frozen = FrozenEstimator(LogisticRegression().fit(X, names))
    for rows in (names != "bee", names == "ant"):
        classifier = fk.CalibratedClassifier(frozen).fit(X[rows], names[rows])
        assert classifier.classes_.tolist() == ["ant", "bee", "cat"]
        assert np.array_equal(classifier.predict(X), frozen.predict(X))
        logits, labels = frozen.decision_function(X), np.unique(names, return_inverse=True)[1]
        expected = TemperatureScaling().fit_quietly(logits[rows], labels[rows]).predict_proba(logits)
        assert classifier.predict_proba(X) == pytest.approx(expected, abs=1e-12)
    frozen = FrozenEstimator(LogisticRegression().fit(X[names != "bee"], names[names != "bee"]))
    expected = r"y must have the classes of the frozen classifier, \['ant', 'cat'\], got \['bee'\] too"
    with pytest.raises(ValueError, match=expected):
        fk.CalibratedClassifier(frozen).fit(X, names)


class InReverse(ClassifierMixin, BaseEstimator):
    """A classifier whose classes_ are not sorted."""

    def fit(self, X, y):
        self.inner_ = LogisticRegression().fit(X, y)
        self.classes_ = self.inner_.classes_[::-1]
        return self

    def decision_function(self, X):
        found = self.inner_.decision_function(X)
        return -found if found.ndim == 1 else found[:, ::-1]

    def predict(self, X):
        return self.inner_.predict(X)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_classes_of_a_classifier_may_have_any_order(n_classes, is_frozen):
    X, y = make_classification(300, n_informative=6, n_classes=n_classes, random_state=0)
    estimators = [InReverse(), LogisticRegression()]
    if is_frozen:
        estimators = [FrozenEstimator(estimator.fit(X, y)) for estimator in estimators]
    reverse, expected = (fk.CalibratedClassifier(estimator).fit(X, y) for estimator in estimators)
    assert reverse.classes_.tolist() == expected.classes_.tolist() == list(range(n_classes))
    assert reverse.predict_proba(X) == pytest.approx(expected.predict_proba(X), abs=1e-6)


@pytest.mark.parametrize("n_classes", [2, 3, 4])
def test_scores_of_pairs_of_classes_are_no_logits(n_classes):
    """Three classes have three pairs: their scores would be read as logits, and all probabilities become equal."""
    X, y = make_classification(400, n_informative=6, n_classes=n_classes, random_state=0)
    pairs = SVC(decision_function_shape="ovo")
    for estimator in (pairs, make_pipeline(pairs), FrozenEstimator(make_pipeline(pairs).fit(X, y))):
        classifier = fk.CalibratedClassifier(estimator)
        if n_classes == 2:
            assert classifier.fit(X, y).score(X, y) > 0.8
            continue
        with pytest.raises(ValueError, match=r"got one per pair of classes; set decision_function_shape='ovr'$"):
            classifier.fit(X, y)
    loss = log_loss(y, fk.CalibratedClassifier(SVC()).fit(X, y).predict_proba(X))
    assert loss < 0.7 * np.log(n_classes)


def test_groups_stay_in_one_fold():
    X, y = sample()
    groups = np.arange(400) // 4
    folds = StratifiedGroupKFold(3)
    found = fk.CalibratedClassifier(LogisticRegression(), cv=folds).fit(X, y, groups=groups).predict_proba(X)
    expected = fk.CalibratedClassifier(LogisticRegression(), cv=list(folds.split(X, y, groups))).fit(X, y)
    assert np.array_equal(found, expected.predict_proba(X))


@pytest.mark.parametrize("calibrator", ["isotonic", TemperatureScaling])
def test_the_method_of_scikit_learn_is_no_calibrator(calibrator):
    expected = r"calibrator must be an object with fit and predict_proba, such as IsotonicCalibration\(\), got"
    with pytest.raises(TypeError, match=expected):
        fk.CalibratedClassifier(LogisticRegression(), calibrator).fit(*sample())


def test_reasons_are_one_warning_in_the_callers_line():
    X, y = sample()
    calibrator = TemperatureScaling(temperatures=[5.0, 6.0])
    with pytest.warns(fk.CalibrationWarning, match="temperature = 5 is the smallest") as caught:
        fk.CalibratedClassifier(LogisticRegression(), calibrator, cv=2, ensemble=True).fit(X, y)
    assert len(caught) == 1
    assert caught[0].filename == __file__


class NoResponse(ClassifierMixin, BaseEstimator):
    def fit(self, X, y):
        return self


class LogitsByName(OnlyProbabilities):
    def predict_proba(self, X):  # as skorch, for a criterion that it does not know
        return self.classifier_.decision_function(X)


@pytest.mark.parametrize(
    ("options", "y", "error", "words"),
    [
        ({}, np.zeros(400), ValueError, "y must have at least 2 classes, got 1 class"),
        ({}, np.arange(400) == 7, ValueError, "at least 2 rows, so that no fold is without it, but 'True' has 1"),
        (
            {"cv": StratifiedKFold(4)},
            np.arange(400) < 3,
            ValueError,
            "at least 4 rows, so that no fold is without it, but 'True' has 3",
        ),
        (
            {"cv": KFold(4)},
            np.repeat(["ape", "bee", "cat"], [300, 60, 40]),
            ValueError,
            "the training rows of fold 3 must have all 3 classes, but lack 'bee', 'cat'; pass a number or a Strat",
        ),
        (
            {"cv": KFold(4)},
            np.repeat([7, 8, 9], [100, 150, 150]),
            ValueError,
            "the training rows of fold 0 must have all 3 classes, but lack '7'",
        ),
        ({}, None, ValueError, "requires y to be passed"),
        (
            {"estimator": NoResponse()},
            np.arange(400) % 2,
            ValueError,
            "must have decision_function or predict_log_proba",
        ),
        ({"estimator": LogitsByName()}, np.arange(400) % 3, ValueError, "must return probabilities, got -"),
        ({"calibrator": TemperatureScaling(n_bins=0, criterion="ece")}, np.arange(400) % 2, ValueError, "n_bins"),
    ],
)
def test_mistakes_are_named(options, y, error, words):
    with pytest.raises(error) as caught:
        fk.CalibratedClassifier(**{"estimator": LogisticRegression(), **options}).fit(sample()[0], y)
    assert words in str(caught.value)


@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
@pytest.mark.parametrize("estimator", [GaussianNB(), LogisticRegression(), LinearSVC()], ids=repr)
def test_probabilities_of_a_row_do_not_depend_on_the_other_rows(estimator):
    """Tests folds without a class, whose logits are filled up."""
    X, y = sample()[0], np.repeat(range(4), 100)
    classifier = fk.CalibratedClassifier(estimator, cv=KFold(4), ensemble=True).fit(X + 0.5 * y[:, None], y)
    found, one_by_one = classifier.predict_proba(X), [classifier.predict_proba(row[None]) for row in X]
    np.testing.assert_allclose(found, np.concatenate(one_by_one), rtol=1e-9)


@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
def test_a_fold_without_a_class_is_filled_up_where_the_classifier_permits_it():
    X, _ = sample()
    for estimator, sizes in ((GaussianNB(), [100, 150, 150]), (LogisticRegression(), [100, 100, 100, 100])):
        classifier = fk.CalibratedClassifier(estimator, cv=KFold(4)).fit(X, np.repeat(range(len(sizes)), sizes))
        assert classifier.predict_proba(X).shape == (400, len(sizes))


def test_weights_that_the_classifier_does_not_take():
    X, y = sample()
    with pytest.warns(UserWarning, match="KNeighborsClassifier has no sample_weight; only the calibrator is weighted"):
        fk.CalibratedClassifier(KNeighborsClassifier(50), cv=3).fit(X, y, np.arange(400) % 3)


@pytest.mark.parametrize("estimator", [KNeighborsClassifier(7), RandomForestClassifier(10, random_state=0)], ids=repr)
@pytest.mark.parametrize("calibrator", [TemperatureScaling(), FocalTemperatureScaling()], ids=repr)
@pytest.mark.parametrize("names", [False, True])
def test_the_predictions_of_the_classifier_stay(estimator, calibrator, names):
    """Votes have many ties, and logarithms round different votes to the same number."""
    X, y = sample(2400, 4)
    y = np.array(["ape", "bee", "cat", "dog"])[y] if names else y
    classifier = fk.CalibratedClassifier(estimator, calibrator, cv=3).fit(X[:400], y[:400])
    found = classifier.predict(X[400:])
    assert np.array_equal(found, classifier.estimator_.predict(X[400:]))
    assert found.dtype == classifier.classes_.dtype
    frozen = fk.CalibratedClassifier(FrozenEstimator(classifier.estimator_), calibrator).fit(X[:400], y[:400])
    assert np.array_equal(frozen.predict(X[400:]), found)
    with pytest.raises(sklearn.exceptions.NotFittedError):
        fk.CalibratedClassifier(estimator, calibrator).predict(X)
