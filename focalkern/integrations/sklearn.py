"""A classifier and its calibrator as one scikit-learn classifier."""

import functools
import inspect
import warnings
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.model_selection import check_cv
from sklearn.utils import column_or_1d, get_tags, indexable
from sklearn.utils._indexing import _safe_indexing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_feature_names,
    _check_n_features,
    _check_sample_weight,
    _num_samples,
    check_is_fitted,
    has_fit_parameter,
)

from focalkern._checks import short
from focalkern.calibrators import Calibrator, TemperatureScaling
from focalkern.calibrators._warnings import warn

__all__ = ["CalibratedClassifier"]

# Methods of classifiers whose output is used, in order of preference. Log-probabilities are logits.
_RESPONSES = ("decision_function", "predict_log_proba", "predict_proba")


class CalibratedClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier whose probabilities are calibrated on rows that it was not fitted on.

    It is scikit-learn's ``CalibratedClassifierCV`` for the calibrators of this library. ``fit`` computes the logits of
    every row with a copy of the classifier fitted on the other folds, fits the calibrator on these logits, and fits the
    classifier on all rows. Logits are the decision function, or else the logarithms of the probabilities. A row with a
    probability of 0, as of forests and nearest neighbours, is first mixed with the uniform distribution: p becomes
    (1 - e) p + e / C with e = 0.1 / (N + 1) for N rows of ``fit``, as in :class:`focalkern.SplineScaling`.

    Args:
        estimator: a classifier with ``decision_function``, ``predict_log_proba`` or ``predict_proba``. A
            ``sklearn.frozen.FrozenEstimator`` is not fitted again, and all rows are used for calibration; their labels
            may lack some of its classes.
        calibrator: an object with ``fit(logits, labels)`` and ``predict_proba(logits)``. Labels are class indices;
            logits are [N, C], or [N] for the second class if the decision function of two classes is one number. A
            calibrator with ``input_kind="probs"`` gets ``predict_proba``. None is
            :class:`focalkern.TemperatureScaling`.
        cv: the folds, as in scikit-learn: a number, a splitter, or an iterable of pairs of index arrays. A number
            above the number of rows of the rarest class is reduced to it, with a warning.
        ensemble: keep the classifier and the calibrator of each fold and average their probabilities, in place of one
            classifier and one calibrator.

    ``fit`` sets ``classes_``, ``calibrated_`` (pairs of a classifier and its calibrator), without ``ensemble`` also
    ``estimator_`` and ``calibrator_``, and ``n_features_in_`` if the classifier has it.

    Source: Platt 1999; Niculescu-Mizil & Caruana, ICML 2005; the interface is scikit-learn's.

    Example:
        >>> from sklearn.naive_bayes import GaussianNB
        >>> X, y = np.arange(40.0).reshape(-1, 1) % 20, np.arange(40) % 20 > 8
        >>> y[[3, 17, 23, 37]] ^= True  # four labels are wrong
        >>> classifier = fk.CalibratedClassifier(GaussianNB()).fit(X, y)
        >>> print(classifier.predict(X[:2]), classifier.predict_proba(X[:1]).round(2))
        [False False] [[0.87 0.13]]
        >>> bool(np.allclose(classifier.predict_log_proba(X), np.log(classifier.predict_proba(X))))
        True
    """

    def __init__(self, estimator: Any, calibrator: Any = None, *, cv: Any = 5, ensemble: bool = False) -> None:
        self.estimator = estimator
        self.calibrator = calibrator
        self.cv = cv
        self.ensemble = ensemble

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None, **fit_params: Any) -> Self:
        """Fit the classifier and its calibrator.

        Args:
            X: rows in a form that the classifier accepts.
            y: [N] labels.
            sample_weight: [N], passed to the classifier and the calibrator, if they accept it.
            groups: [N], passed to a splitter such as ``GroupKFold``, which keeps the rows of a group in one fold.
            **fit_params: passed to the ``fit`` of the classifier.

        Returns:
            The classifier itself.

        Warns:
            CalibrationWarning: as the calibrator's ``fit``.

        Raises:
            TypeError: the calibrator is no object with ``fit`` and ``predict_proba``.
            ValueError: only one class; a class with one row; fewer rows of a class than a splitter has folds; a fold of
                a splitter whose training rows lack a class; a label that is no class of a frozen classifier; a
                decision function of pairs of classes; errors of the classifier and the calibrator.
        """
        name = type(self).__name__
        if y is None:
            raise ValueError(f"{name}: requires y to be passed, but the target y is None")
        X, y, groups = indexable(X, y, groups)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if _num_samples(X) == 0:
            raise ValueError(f"{name}: expected at least one sample, found array with 0 sample(s)")
        classes, labels, counts = np.unique(y, return_inverse=True, return_counts=True)
        if _frozen(self.estimator):  # y may lack a class of its predictions
            classes, labels = _labels_of_frozen(self.estimator, classes, labels)
        if len(classes) < 2:
            raise ValueError(f"{name}: y must have at least 2 classes, got 1 class")
        cv, rarest, least = self.cv, classes[counts.argmin()], int(counts.min())
        if isinstance(cv, int) and 2 <= least < cv and not _frozen(self.estimator):
            warnings.warn(
                f"{name}: {least} folds in place of {cv}, because {str(rarest)!r} has no more rows", stacklevel=2
            )
            cv = least
        folds = cv if isinstance(cv, int) else getattr(cv, "n_splits", None)
        if isinstance(folds, int) and not _frozen(self.estimator) and least < folds:
            needed = 2 if isinstance(cv, int) else folds
            raise ValueError(
                f"{name}: every class needs at least {needed} rows, so that no fold is without it, but {str(rarest)!r} "
                f"has {least}"
            )
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, X)
        calibrator = TemperatureScaling() if self.calibrator is None else self.calibrator
        if isinstance(calibrator, type) or not (hasattr(calibrator, "fit") and hasattr(calibrator, "predict_proba")):
            raise TypeError(
                f"{name}: calibrator must be an object with fit and predict_proba, such as IsotonicCalibration(), got "
                f"{short(calibrator)}"
            )
        if weight is not None and not _takes_weights(self.estimator):
            warnings.warn(
                f"{name}: {type(self.estimator).__name__} has no sample_weight; only the calibrator is weighted",
                stacklevel=2,
            )

        def fitted(rows: Any = None) -> Any:
            """A copy of the classifier, fitted on some rows."""
            copy = clone(self.estimator)
            given = dict(fit_params)
            if weight is not None and _takes_weights(copy):
                given["sample_weight"] = weight if rows is None else weight[rows]
            part = (X, y) if rows is None else (_safe_indexing(X, rows), y[rows])
            return copy.fit(*part, **given)

        response = _response(self.estimator, calibrator)
        if response == "decision_function" and len(classes) > 2 and _scores_pairs(self.estimator):
            raise ValueError(
                f"{name}: the decision function of estimator must have a column per class, got one per pair of "
                "classes; set decision_function_shape='ovr'"
            )
        floor = 0.1 / (len(y) + 1)
        logits_of = functools.partial(_logits, response=response, classes=classes, kind=_kind(calibrator), floor=floor)
        pairs: list[tuple[Any, Any]] = []
        found: list[str] = []
        if _frozen(self.estimator):
            classifier = clone(self.estimator).fit(X, y)
            pairs.append((classifier, _calibrated(calibrator, logits_of(classifier, X), labels, weight)))
        else:
            held_out: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
            for fold, (train, test) in enumerate(check_cv(cv, y, classifier=True).split(X, y, groups)):
                _check_fold(fold, classes, labels[train], response)
                classifier = fitted(train)
                logits = logits_of(classifier, _safe_indexing(X, test))
                if self.ensemble:
                    part = None if weight is None else weight[test]
                    pairs.append((classifier, _calibrated(calibrator, logits, labels[test], part)))
                else:
                    held_out.append((test, logits))
            if not self.ensemble:
                rows = np.concatenate([test for test, _ in held_out])
                logits = np.concatenate([part for _, part in held_out])
                part = None if weight is None else weight[rows]
                pairs.append((fitted(), _calibrated(calibrator, logits, labels[rows], part)))
        for _, one in pairs:
            found.extend(getattr(one, "warnings_", ()))

        self.classes_ = classes
        self.calibrated_ = pairs
        self.response_ = response
        self._logits_of = logits_of
        for attribute in ("estimator_", "calibrator_"):
            if hasattr(self, attribute):
                delattr(self, attribute)
        if len(pairs) == 1:
            self.estimator_, self.calibrator_ = pairs[0]
        if hasattr(pairs[0][0], "n_features_in_"):
            _check_n_features(self, X, reset=True)
            _check_feature_names(self, X, reset=True)
        warn(name, tuple(dict.fromkeys(found)))
        return self

    def predict_proba(self, X: Any) -> np.ndarray[Any, Any]:
        """Calibrated probabilities.

        Args:
            X: rows in a form that the classifier accepts.

        Returns:
            [N, C] array, in the order of ``classes_``.

        Raises:
            NotFittedError: call ``fit`` first.
            ValueError: errors of the classifier.
        """
        check_is_fitted(self)
        if hasattr(self, "n_features_in_"):
            _check_feature_names(self, X, reset=False)
        parts = (
            _as_array(calibrator.predict_proba(self._logits_of(classifier, X)))
            for classifier, calibrator in self.calibrated_
        )
        return np.asarray(sum(parts) / len(self.calibrated_))

    def predict_log_proba(self, X: Any) -> np.ndarray[Any, Any]:
        """The logarithms of :meth:`predict_proba`.

        Args:
            X: rows in a form that the classifier accepts.

        Returns:
            [N, C] array, in the order of ``classes_``.

        Raises:
            NotFittedError, ValueError: as :meth:`predict_proba`.
        """
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray[Any, Any]:
        """The most probable class of each row.

        Args:
            X: rows in a form that the classifier accepts.

        Returns:
            [N] array of labels from ``classes_``. With ``ensemble=False`` and a calibrator that keeps the order of the
            classes, such as temperature scaling, they are the predictions of the classifier itself.

        Raises:
            NotFittedError, ValueError: as :meth:`predict_proba`.
        """
        check_is_fitted(self)
        if len(self.calibrated_) == 1:
            classifier, calibrator = self.calibrated_[0]
            # Rounding may make two probabilities equal that differ in the classifier, so use its predictions.
            if isinstance(calibrator, Calibrator) and calibrator._keeps_predictions():
                return self.classes_[np.searchsorted(self.classes_, classifier.predict(X))]
        return self.classes_[self.predict_proba(X).argmax(1)]

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "calibrated_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        of_classifier = get_tags(self.estimator)
        tags.input_tags.sparse = of_classifier.input_tags.sparse
        tags.input_tags.allow_nan = of_classifier.input_tags.allow_nan
        tags.input_tags.pairwise = of_classifier.input_tags.pairwise
        return tags


def _frozen(estimator: Any) -> bool:
    return type(estimator).__name__ == "FrozenEstimator"


def _scores_pairs(estimator: Any) -> bool:
    """Whether the decision function of more than two classes compares pairs of them. Three classes have three pairs, so
    the number of columns does not tell."""
    while _frozen(estimator) or hasattr(estimator, "steps"):
        estimator = estimator.estimator if _frozen(estimator) else estimator.steps[-1][1]
    return getattr(estimator, "decision_function_shape", None) == "ovo"


def _labels_of_frozen(
    estimator: Any, classes: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The classes of a frozen classifier, and the labels as their indices."""
    known = np.unique(getattr(estimator, "classes_", classes))
    unknown = np.setdiff1d(classes, known)
    if len(unknown):
        raise ValueError(
            f"CalibratedClassifier: y must have the classes of the frozen classifier, {short(known.tolist())}, got "
            f"{short(unknown.tolist())} too"
        )
    return known, np.searchsorted(known, classes)[labels]


def _takes_weights(estimator: Any) -> bool:
    return bool(has_fit_parameter(estimator, "sample_weight"))


def _kind(calibrator: Any) -> str:
    """Whether the calibrator takes logits or probabilities."""
    return "probs" if getattr(calibrator, "input_kind", "logits") == "probs" else "logits"


def _response(estimator: Any, calibrator: Any) -> str:
    wanted = ("predict_proba",) if _kind(calibrator) == "probs" else _RESPONSES
    for name in wanted:
        if hasattr(estimator, name):
            return name
    raise ValueError(
        f"CalibratedClassifier: estimator must have {' or '.join(wanted)}, {type(estimator).__name__} has not"
    )


def _check_fold(fold: int, classes: Any, labels: Any, response: str) -> None:
    """Raises if the training rows of a fold have too few classes for logits of all classes.

    The decision function of two classes is one number per row, so it cannot be filled up for others.
    """
    present = np.unique(labels)
    if len(present) == len(classes) or len(present) > (2 if response == "decision_function" else 1):
        return
    lacking = ", ".join(repr(str(name)) for name in np.delete(classes, present))
    raise ValueError(
        f"CalibratedClassifier: the training rows of fold {fold} must have all {len(classes)} classes, but lack "
        f"{lacking}; pass a number or a StratifiedKFold as cv"
    )


def _logits(classifier: Any, X: Any, *, response: str, classes: Any, kind: str, floor: float) -> np.ndarray[Any, Any]:
    """Logits or probabilities, as ``kind`` says, [N, C] or [N], in the order of all classes. Classes that the
    classifier lacks are least probable. ``floor`` is the share of the uniform distribution in rows with a probability
    of 0, whose NLL could be infinite."""
    with np.errstate(divide="ignore"):  # log 0 for probabilities of 0
        found = np.asarray(getattr(classifier, response)(X))
        if not np.issubdtype(found.dtype, np.floating):
            found = found.astype(np.float64)
        if response == "predict_proba":
            if ((found < 0) | (found > 1.001)).any():  # a rounded 1 may be above 1
                raise ValueError(
                    f"CalibratedClassifier: predict_proba of {type(classifier).__name__} must return probabilities, "
                    f"got {found.min():g} to {found.max():g}; apply a softmax (skorch: "
                    "predict_nonlinearity=torch.nn.Softmax(-1))"
                )
            found = np.log(found)
    little = np.finfo(found.dtype).eps
    if response != "decision_function":
        n_classes = found.shape[-1]
        zero = np.isneginf(found).any(-1, keepdims=True)
        share = np.where(zero, floor, n_classes * little).astype(found.dtype)
        found = np.logaddexp(found + np.log1p(-share), np.log(share / n_classes))
        found = np.exp(found) if kind == "probs" else found
    seen = np.searchsorted(classes, classifier.classes_)
    if found.ndim == 1 and len(classes) == 2 and len(seen) == 2:
        return found if seen[1] else -found
    if found.ndim != 2 or found.shape[1] != len(seen):
        raise ValueError(
            f"CalibratedClassifier: {response} of {type(classifier).__name__} must be [N, {len(seen)}], got "
            f"{list(found.shape)}"
        )
    if np.array_equal(seen, np.arange(len(classes))):
        return found
    whole = np.empty((len(found), len(classes)), found.dtype)
    whole[:] = little if kind == "probs" else found.min(1, keepdims=True) - 10.0
    whole[:, seen] = found
    return whole


def _calibrated(calibrator: Any, logits: Any, labels: Any, weight: Any) -> Any:
    """A fitted copy of the calibrator."""
    copy = clone(calibrator)
    weights = {} if weight is None else {"sample_weight": weight}
    if isinstance(copy, Calibrator):
        return copy.fit_quietly(logits, labels, **weights)
    if weights and "sample_weight" not in inspect.signature(copy.fit).parameters:
        raise ValueError(f"CalibratedClassifier: calibrator {type(copy).__name__} takes no sample_weight")
    return copy.fit(logits, labels, **weights)


def _as_array(values: Any) -> np.ndarray[Any, Any]:
    return values.numpy(force=True) if isinstance(values, torch.Tensor) else np.asarray(values)
