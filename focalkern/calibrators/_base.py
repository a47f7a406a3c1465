"""What every calibrator has: scikit-learn's shape, checks of what comes in, and the JSON file."""

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self, overload

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._atomic import write_atomically
from focalkern._checks import number, path_text, short
from focalkern._diagnostics import input_doubts, label_problems, one_logit_doubts, refuse_probs
from focalkern._types import ESTIMATORS, INPUT_KINDS, InputKind
from focalkern._version import __version__
from focalkern.calibrators._fit_data import (
    FitData,
    as_floating,
    as_rows,
    check_input,
    check_values,
    labels_array,
    weighted_mean,
)
from focalkern.calibrators._inputs import as_pairs, floored_input
from focalkern.calibrators._modules import ClassAxis, FlooredInput
from focalkern.calibrators._warnings import warn

__all__ = ["Calibrator", "NotFittedError", "load_calibrator"]


class _Assumed(str):
    """A default that nobody has said: equal to the word, and told from it."""


def is_assumed(input_kind: str) -> bool:
    """Whether it is a default that nobody has said."""
    return isinstance(input_kind, _Assumed)


LOGITS: Any = _Assumed("logits")
"""The default of ``input_kind``: ``fit`` refuses rows that look like probabilities unless "logits" was said."""


_FORMAT = "focalkern-calibrator"
# 1: gamma, temperature, parameters and fit of the two scalings. 2 adds methods, nested calibrators, the classes, the
# version of the library, and in "fit" which search it was and how many cells it looked at. 3 adds methods, the Brier
# score as a criterion and the doubts, and has no criterion that depends on the search. 4 adds the floor, and calls
# epsilon what structured scaling and isotonic regression called that.
_FORMAT_VERSION = 4

# Of a file: no search goes there.
_MOST_GAMMA, _MOST_TEMPERATURE = 1e6, 1e30
# Of an epsilon that is 1 / (N + 1): below it there are no digits left.
LEAST_EPSILON = 1e-100

BY_METHOD: dict[str, type["Calibrator"]] = {}


class Layout(NamedTuple):
    """What fit was given."""

    n_classes: int
    names: np.ndarray[Any, Any] | None = None
    one_logit: bool = False
    dense: bool = False


class NotFittedError(ValueError, AttributeError):
    """A calibrator was used before ``fit`` or ``load``. Where scikit-learn is in use, what is raised is its
    ``NotFittedError`` as well."""


def _not_fitted(words: str) -> NotFittedError:
    theirs = sys.modules.get("sklearn.exceptions")
    if theirs is None:  # nobody can expect it
        return NotFittedError(words)
    both: type[NotFittedError] = type("NotFittedError", (NotFittedError, theirs.NotFittedError), {})
    return both(words)


class Calibrator:
    """Base of all calibrators: everything but what is fitted and how it is applied.

    A subclass has ``method``, ``_parameter_names`` and an ``__init__`` that only stores its arguments (scikit-learn's
    contract), and the hooks at the end of this class.
    """

    method: ClassVar[str]
    _parameter_names: ClassVar[tuple[str, ...]]
    _estimator_type = "classifier"  # for scikit-learn before 1.6
    _fewest_classes: ClassVar[int] = 2

    input_kind: InputKind

    # Set by fit and load.
    n_classes_: int
    n_samples_: int
    input_floor_: float
    one_logit_: bool
    dense_: bool
    warnings_: tuple[str, ...]
    _names: np.ndarray[Any, Any] | None  # what the columns are called; None where they are numbers

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "method" in vars(cls):
            BY_METHOD[cls.method] = cls

    @property
    def classes_(self) -> np.ndarray[Any, Any]:
        """[C]: the names of the classes in the order of the columns, or 0, 1, ... C - 1.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), ["cat"] * 8 + ["dog"] * 2
            >>> print(fk.TemperatureScaling().fit(logits, labels).classes_)
            ['cat' 'dog']
        """
        # Made when it is wanted: a file says how many classes there are, and holds nothing of that size.
        n_classes = self.n_classes_
        return np.arange(n_classes) if self._names is None else self._names

    def fit(self, logits: Any, target: Any, sample_weight: Any = None, *, ignore_index: int | None = None) -> Self:
        """Fit on held-out data.

        Args:
            logits: [N, C] floating point, tensor or array; probabilities with ``input_kind="probs"``. Or [N], one
                logit (or probability) per row, that of class 1 of two: the same as [N, 2] with a logit of 0 for class
                0. Or [N, C, d1, ...] with the classes where torch's losses have them: every place is a row, and what
                is fitted so takes and gives this layout.
            target: [N], or [N, d1, ...]. Integers, bools and whole floats are class indices, columns of ``logits``.
                Strings are taken as scikit-learn does: in alphabetical order they are the columns, and all must occur.
            sample_weight: [N], or of the shape of ``target``: how often a row counts; None is once.
            ignore_index: label of rows that are left out; None is no label.

        Returns:
            The calibrator itself, with ``n_samples_``, ``n_classes_``, ``classes_``, ``one_logit_``, ``warnings_``, and
            what the class says. When anything is raised, a calibrator that was fitted before stays as it was.

        Warns:
            CalibrationWarning: what was fitted is doubtful, or the labels cannot be right (shifted, of another row, of
                columns in another order, no better than chance): once, in words that name the remedy or the likely
                cause, which ``warnings_`` has as well.

        Raises:
            TypeError: logits that are not floating point, a target that is neither integer nor strings.
            ValueError: no rows; one class; shapes that do not fit; NaN or +inf logits; logits that look like
                probabilities, unless ``input_kind`` was said; an option or parameter outside its domain; more or fewer
                strings than classes.
            IndexError: an integer target outside [0, C).

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> calibrator = fk.HistogramBinning(n_bins=2).fit(logits, labels)
            >>> calibrator.n_samples_, calibrator.n_classes_, calibrator.warnings_
            (10, 2, ())
        """
        rows = self._fit_rows(logits, target, sample_weight, ignore_index, assumed=is_assumed(self.input_kind))
        if not rows.one_logit:
            of_input = input_doubts(rows.input, self.input_kind)
        else:
            of_input = one_logit_doubts(rows.input[:, 1]) if self.input_kind == "logits" else []
        self.warnings_ = (*of_input, *label_problems(rows.input, rows.target), *self.warnings_)
        warn(type(self).__name__, self.warnings_)
        return self

    def fit_quietly(
        self, logits: Any, target: Any, sample_weight: Any = None, *, ignore_index: int | None = None
    ) -> Self:
        """:meth:`fit` without the warning and without a look at the labels: for callers that read ``warnings_``.

        Args:
            logits, target, sample_weight, ignore_index: as :meth:`fit`.

        Returns:
            The calibrator itself.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`fit`.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> calibrator = fk.TemperatureScaling(temperatures=[1.0, 2.0]).fit_quietly(logits, labels)
            >>> len(calibrator.warnings_)  # the optimum lies beyond 2
            1
        """
        self._fit_rows(logits, target, sample_weight, ignore_index)
        return self

    def _fit_rows(
        self, logits: Any, target: Any, sample_weight: Any, ignore_index: int | None, *, assumed: bool = False
    ) -> FitData:
        """Fit, and return what it was fitted on; ``assumed``: nobody said that they are logits."""
        name = type(self).__name__
        self._check_parameters()
        input = self._as_tensor(logits)
        one_logit = input.dim() == 1
        input = self._pairs(input) if one_logit else input
        rows = as_rows(
            name, input, target, sample_weight, ignore_index, input_kind=self.input_kind, one_logit=one_logit
        )
        if assumed:
            refuse_probs(name, rows.input)
        floor = float(getattr(self, "floor", 0.0))
        of_fit = replace(rows, input=floored_input(rows.input, floor, self.input_kind)) if floor else rows
        fitted = self._fit(of_fit)
        layout = Layout(rows.input.shape[1], rows.names, one_logit, rows.dense)
        self._become(fitted, layout, n_samples=len(rows.input), floor=floor)
        self.warnings_ = tuple(self._doubts(of_fit))
        return rows

    @overload
    def predict_proba(self, logits: Tensor) -> Tensor: ...
    @overload
    def predict_proba(self, logits: np.ndarray[Any, Any] | Sequence[Any]) -> np.ndarray[Any, Any]: ...
    def predict_proba(self, logits: Any) -> Any:
        """Calibrated probabilities.

        Args:
            logits: [..., C] floating point, with the number of classes of ``fit``; [...] where ``fit`` had one logit
                per row; [N, C, d1, ...] where ``fit`` had such.

        Returns:
            Probabilities of the same shape ([..., 2] for one logit): a tensor for a tensor, on its device; a NumPy
            array for anything else.

        Raises:
            NotFittedError: neither ``fit`` nor ``load`` came before.
            TypeError, ValueError: as ``fit``.

        Example:
            >>> logits, labels = np.array([[4.0, 0.0]] * 10), [0] * 8 + [1] * 2
            >>> calibrator = fk.TemperatureScaling().fit(logits, labels)
            >>> print(calibrator.predict_proba(logits[:1]).round(4))  # an array for an array
            [[0.8 0.2]]
            >>> calibrator.predict_proba(torch.tensor([[4.0, 0.0]])).round(decimals=4)  # a tensor for a tensor
            tensor([[0.8000, 0.2000]])
        """
        return self._laid_out(logits, self._applied(logits, log=False))

    @overload
    def predict_log_proba(self, logits: Tensor) -> Tensor: ...
    @overload
    def predict_log_proba(self, logits: np.ndarray[Any, Any] | Sequence[Any]) -> np.ndarray[Any, Any]: ...
    def predict_log_proba(self, logits: Any) -> Any:
        """The logarithms of :meth:`predict_proba`, precise also where a probability is near 1 or underflows.

        Args:
            logits: as :meth:`predict_proba`.

        Returns:
            Log-probabilities, in the shape and the kind of :meth:`predict_proba`.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_proba`.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> calibrator = fk.TemperatureScaling().fit(logits, labels)
            >>> calibrator.predict_log_proba(logits[:1]).round(decimals=4)
            tensor([[-0.2231, -1.6094]])
        """
        return self._laid_out(logits, self._applied(logits, log=True))

    @overload
    def predict(self, logits: Tensor) -> Tensor | np.ndarray[Any, Any]: ...
    @overload
    def predict(self, logits: np.ndarray[Any, Any] | Sequence[Any]) -> np.ndarray[Any, Any]: ...
    def predict(self, logits: Any) -> Any:
        """The most probable class of each row.

        Args:
            logits: as :meth:`predict_proba`.

        Returns:
            [...] class indices, int64: a tensor for a tensor, a NumPy array for anything else. Where ``fit`` had
            strings, a NumPy array of those.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_proba`.

        Example:
            >>> logits, labels = np.array([[4.0, 0.0]] * 10), ["cat"] * 8 + ["dog"] * 2
            >>> calibrator = fk.TemperatureScaling().fit(logits, labels)
            >>> print(calibrator.predict([[4.0, 0.0], [-1.0, 1.0]]))
            ['cat' 'dog']
        """
        index = self._named(self._predicted, self._input(logits))
        return _like(logits, index) if self._names is None else self._names[index.cpu().numpy()]

    def score(self, logits: Any, target: Any, sample_weight: Any = None) -> float:
        """Accuracy of :meth:`predict`: what scikit-learn calls the score of a classifier.

        Args:
            logits: as :meth:`predict_proba`.
            target: [...] classes, as :meth:`predict` gives them.
            sample_weight: [...] of the shape of ``target``; None is 1 for each.

        Returns:
            A fraction, in [0, 1].

        Raises:
            NotFittedError, TypeError: as :meth:`predict_proba`.
            ValueError: as :meth:`predict_proba`; a target of another shape.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> fk.TemperatureScaling().fit(logits, labels).score(logits, labels)
            0.8
        """
        name, found = type(self).__name__, self.predict(logits)
        found = found.cpu().numpy() if isinstance(found, Tensor) else found
        wanted = labels_array(name, target)
        if wanted.shape != found.shape:
            raise ValueError(f"{name}: target must be {list(found.shape)}, got {list(wanted.shape)}")
        return weighted_mean(name, found == wanted, sample_weight)

    @overload
    def changed(self, logits: Tensor) -> Tensor: ...
    @overload
    def changed(self, logits: np.ndarray[Any, Any] | Sequence[Any]) -> np.ndarray[Any, Any]: ...
    def changed(self, logits: Any) -> Any:
        """The rows whose predicted class is another one than before calibration.

        Args:
            logits: as :meth:`predict_proba`.

        Returns:
            [...] bool: a tensor for a tensor, a NumPy array for anything else.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_proba`.

        Example:
            >>> logits = torch.tensor([[4.0, 0.0], [1.0, 0.0]]).repeat(10, 1)
            >>> labels = torch.tensor([0, 1] * 6 + [0, 0] * 3 + [1, 1])  # right in 9 and in 3 of 10 rows
            >>> calibrator = fk.HistogramBinning(n_bins=2).fit(logits, labels)
            >>> calibrator.changed(logits[:2])
            tensor([False,  True])
        """
        input = self._input(logits)
        result = self._named(self._predicted, input) != input.argmax(-1)
        return result if isinstance(logits, Tensor) else result.numpy()

    def as_module(self) -> torch.nn.Module:
        raise NotImplementedError

    def _placed(self, module: torch.nn.Module) -> torch.nn.Module:
        """A module of what comes after the floor, for all that fit was given."""
        if self.input_floor_:
            module = FlooredInput(module, self.input_floor_, self.input_kind, one_logit=self.one_logit_)
        return ClassAxis(module) if self.dense_ else module

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, by name.

        Args:
            deep: those of a nested calibrator besides, as ``name__argument``.

        Returns:
            {name: value}.

        Example:
            >>> fk.HistogramBinning(n_bins=10).get_params()
            {'n_bins': 10, 'binning': 'equal_mass', 'scaling': None, 'input_kind': 'logits'}
            >>> fk.TemperatureScaling(criterion="brier").get_params()["criterion"]
            'brier'
        """
        params = {name: getattr(self, name) for name in self._parameter_names}
        if deep:
            for name, value in list(params.items()):
                if isinstance(value, Calibrator):
                    params.update({f"{name}__{key}": nested for key, nested in value.get_params().items()})
        return params

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; they take effect with the next ``fit``.

        Args:
            **params: new values by name, ``name__argument`` for a nested calibrator.

        Returns:
            The calibrator itself.

        Raises:
            ValueError: a name that the constructor does not have.

        Example:
            >>> calibrator = fk.HistogramBinning(scaling=fk.TemperatureScaling())
            >>> calibrator.set_params(n_bins=10, scaling__criterion="brier").get_params()["scaling__criterion"]
            'brier'
        """
        for name in params:
            first, _, rest = name.partition("__")
            nested = getattr(self, first) if rest and first in self._parameter_names else None
            if first not in self._parameter_names or (rest and not isinstance(nested, Calibrator)):
                raise ValueError(
                    f"{type(self).__name__}: parameters are {', '.join(self._parameter_names)}, got {name!r}"
                )
        # Nested ones last, so that they reach a calibrator that is replaced in the same call.
        for name, value in sorted(params.items(), key=lambda item: "__" in item[0]):
            first, _, rest = name.partition("__")
            if rest:
                getattr(self, first).set_params(**{rest: value})
            else:
                setattr(self, name, value)
        return self

    def save(self, path: str | os.PathLike[str], *, evidence: Mapping[str, Any] | None = None) -> None:
        """Write the fitted calibrator as JSON. All of it or nothing: a failed write leaves an existing file alone.

        Args:
            path: of the file; :func:`focalkern.load_calibrator` reads it.
            evidence: why it is the one to use, as ``json.dumps`` takes it: kept in the file, in the summary of the fit,
                for whoever reads it.

        Raises:
            NotFittedError: neither ``fit`` nor ``load`` came before.
            OSError: the file cannot be written.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> fk.TemperatureScaling().fit(logits, labels).save("calibrator.json")
            >>> round(fk.load_calibrator("calibrator.json").temperature_, 4)
            2.8854
        """
        path = path_text(type(self).__name__, "path", path)
        document = self._to_json()
        if evidence is not None:
            name = type(self).__name__
            if not isinstance(evidence, Mapping):
                raise TypeError(f"{name}: evidence must be a mapping, got {short(evidence)}")
            try:
                document["fit"]["evidence"] = json.loads(json.dumps(dict(evidence), allow_nan=False))
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name}: evidence must be what json.dumps takes, got {short(evidence)}") from error
        write_atomically(path, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what ``save`` wrote, this version's or an older one's.

        Args:
            path: of the file.

        Returns:
            The fitted calibrator.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a calibrator, is of a newer version, or of another class.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> fk.TemperatureScaling().fit(logits, labels).save("calibrator.json")
            >>> round(fk.TemperatureScaling.load("calibrator.json").temperature_, 4)
            2.8854
        """
        document = _read_json(path_text(cls.__name__, "path", path))
        if document["method"] != cls.method:
            raise ValueError(f"{path}: expected a calibrator of method {cls.method!r}, found {document['method']!r}")
        return _from_document(path, document)  # type: ignore[return-value]

    def __repr__(self) -> str:
        params = self.get_params(deep=False)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in params.items())})"

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "_modules"}
        return {**state, "_format_version": _FORMAT_VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        version = state.pop("_format_version", 2)  # the last that did not say so
        if version > _FORMAT_VERSION:
            raise ValueError(
                f"{type(self).__name__}: expected a pickle of format version {_FORMAT_VERSION} or older, found "
                f"{version}; upgrade focalkern"
            )
        if version == 2:
            # What None meant, and what there was not.
            if self.method == "focal-temperature" and state.get("criterion", "") is None:
                state["criterion"] = "nll" if state.get("search") == "nll" else "ece"
            if self.method in ("temperature", "focal-temperature"):
                state.setdefault("widen", False)
            if "n_classes_" in state:
                state = {"dense_": False, "warnings_": (), **state}
        if "n_classes_" in state and version < 4:
            if self.method in ("structured", "isotonic"):
                state["epsilon_"] = state.pop("floor_")
            state["input_floor_"] = 0.0
        if "floor" in self._parameter_names:
            state.setdefault("floor", 0.0)
        if "classes_" in state:
            classes = state.pop("classes_")
            state["_names"] = None if classes.dtype.kind in "iu" else classes
        vars(self).update(state)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_classes_")

    def __sklearn_tags__(self) -> Any:
        # Called by scikit-learn (1.6 and newer) only, so that it is there.
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(one_d_array=True),
        )

    # -- what a subclass says -----------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        self._check_option("input_kind", INPUT_KINDS)
        if "floor" in self._parameter_names:
            name, floor = type(self).__name__, self.get_params(deep=False)["floor"]
            if isinstance(floor, bool) or not 0 <= number(name, "floor", floor) < 1:
                raise ValueError(f"{name}: floor must be at least 0 and less than 1, got {short(floor)}")

    def _fit(self, rows: FitData) -> dict[str, Any]:
        """The fitted attributes."""
        raise NotImplementedError

    def _doubts(self, rows: FitData) -> Iterable[str]:
        """What is doubtful about what was fitted to these rows, each with its remedy."""
        return self._warnings_of(torch.bincount(rows.target, minlength=rows.input.shape[1]))

    def _warnings_of(self, class_counts: Tensor) -> Iterable[str]:
        """The same, of calibrators that need no more than the number of rows per class [C]."""
        return ()

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        """[..., C] to calibrated (log-)probabilities [..., C]."""
        raise NotImplementedError

    def _keeps_predictions(self) -> bool:
        """Whether the map keeps the order of the classes, so that no row's predicted class changes."""
        return False

    def _predicted(self, input: Tensor) -> Tensor:
        """[..., C] to class indices [...], the first of equal ones."""
        return (input if self._keeps_predictions() else self._after_floor(input, log=True)).argmax(-1)

    def _fitted_to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What ``_fit`` returned, for the top of the file and for its summary of the fit."""
        raise NotImplementedError

    def _fitted_from_json(self, document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse; KeyError, TypeError or ValueError where it is not what ``_fitted_to_json`` writes."""
        raise NotImplementedError

    # -- private ------------------------------------------------------------------------------------------------

    def _become(self, fitted: Mapping[str, Any], layout: Layout, *, n_samples: int, floor: float = 0.0) -> None:
        """Replace everything that an earlier fit has left."""
        for name in [name for name in vars(self) if name.endswith("_") and not name.startswith("_")]:
            delattr(self, name)
        vars(self).pop("_modules", None)
        vars(self).update(fitted)
        self.n_classes_, self._names, self.one_logit_, self.dense_ = layout
        self.n_samples_, self.input_floor_ = n_samples, floor
        self.warnings_ = ()

    def _pairs(self, input: Tensor) -> Tensor:
        """[...] of class 1 to [..., 2]."""
        return as_pairs(as_floating(type(self).__name__, input), self.input_kind)

    def _as_tensor(self, logits: Any) -> Tensor:
        return as_tensor(logits, f"{type(self).__name__}: logits")

    def _laid_out(self, given: Any, result: Tensor) -> Any:
        """[..., C] as it was given: a tensor or an array, and the classes where they were."""
        return _like(given, result.movedim(-1, 1) if self.dense_ and result.dim() > 2 else result)

    def _input(self, logits: Any) -> Tensor:
        self._check_fitted()
        name = type(self).__name__
        input = self._as_tensor(logits)
        if self.one_logit_:
            input = self._pairs(input)
        else:
            if self.dense_ and input.dim() > 2:
                input = input.movedim(1, -1)
            check_input(name, input, any_rank=True)
        if input.shape[-1] != self.n_classes_:
            raise ValueError(
                f"{name}: logits must have the {self.n_classes_} classes of fit, got shape {list(input.shape)}"
            )
        check_values(name, input, self.input_kind)
        return input

    def _applied(self, logits: Any, *, log: bool) -> Tensor:
        return self._named(functools.partial(self._after_floor, log=log), self._input(logits))

    def _after_floor(self, input: Tensor, *, log: bool) -> Tensor:
        if not self.input_floor_:
            return self._apply(input, log=log)
        return self._apply(floored_input(input, self.input_floor_, self.input_kind), log=log).to(input.dtype)

    def _named(self, function: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        """Calls what computes with operators, whose errors then carry the name of the calibrator and its argument."""
        try:
            return function(input)
        except (TypeError, ValueError) as error:
            raise renamed(type(self).__name__, error) from None

    def _kept_module(self, make: Callable[[], torch.nn.Module], device: torch.device) -> torch.nn.Module:
        """What ``make`` gives, on the device: made once for a fit, because that takes longer than a row."""
        modules: dict[Any, torch.nn.Module] = vars(self).setdefault("_modules", {})
        key = device, self.input_kind
        if key not in modules:
            modules[key] = make().to(device)
        return modules[key]

    def _check_option(self, option: str, known: tuple[Any, ...]) -> None:
        value = getattr(self, option)
        if not isinstance(value, str | None) or value not in known:
            words = ", ".join(str(choice) for choice in known if choice is not None)
            raise ValueError(f"{type(self).__name__}: {option} must be one of {words}, got {short(value)}")

    def _check_estimator(self) -> None:
        self._check_option("estimator", ESTIMATORS)

    def _check_fitted(self) -> None:
        if not hasattr(self, "n_classes_"):
            name = type(self).__name__
            raise _not_fitted(f"{name}: not fitted yet; call fit(logits, target) or {name}.load(path) first")

    def _nested_json(self) -> dict[str, Any]:
        """The fitted calibrator as part of another one."""
        document = self._to_json()
        return {key: document[key] for key in document if key not in ("format", "format_version", "focalkern")}

    def _check_scaling(self) -> None:
        """A parameter ``scaling``, which may be None."""
        name, scaling = type(self).__name__, self.get_params(deep=False)["scaling"]
        if scaling is None:
            return
        if not isinstance(scaling, Calibrator) or scaling.method not in ("temperature", "focal-temperature"):
            raise TypeError(
                f"{name}: scaling must be a TemperatureScaling, a FocalTemperatureScaling or None, got "
                f"{type(scaling).__name__}"
            )
        scaling._check_parameters()
        if scaling.input_kind != self.input_kind:
            raise ValueError(f"{name}: input_kind of scaling must be {self.input_kind!r}, got {scaling.input_kind!r}")

    def _to_json(self) -> dict[str, Any]:
        self._check_fitted()
        fitted, fit = self._fitted_to_json()
        data: dict[str, Any] = {"n_samples": self.n_samples_, "n_classes": self.n_classes_}
        if self._names is not None:
            data["classes"] = self._names.tolist()
        if self.one_logit_:
            data["one_logit"] = True
        if self.dense_:
            data["dense"] = True
        if self.warnings_:
            data["doubts"] = list(self.warnings_)
        return {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "focalkern": __version__,
            "method": self.method,
            **({"input_floor": self.input_floor_} if self.input_floor_ else {}),
            **fitted,
            "parameters": {key: _plain(key, value) for key, value in self.get_params(deep=False).items()},
            "fit": {**data, **fit},
        }


def renamed(name: str, error: Exception) -> Exception:
    """What an operator or a nested calibrator says of its rows, as the calibrator that was called says it."""
    who, _, words = str(error).partition(": ")
    known = who == "focal_calibration_map" or who in {kind.__name__ for kind in BY_METHOD.values()}
    if not known or not words.startswith(("input ", "logits ")):
        return error
    return type(error)(f"{name}: logits {words.split(' ', 1)[1]}")


def load_calibrator(path: str | os.PathLike[str]) -> Calibrator:
    """Read any calibrator that ``save`` wrote; the file says which.

    Args:
        path: of the file.

    Returns:
        The fitted calibrator, of the class that was saved.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a calibrator, or is of a newer version.

    Example:
        >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> fk.TemperatureScaling().fit(logits, labels).save("calibrator.json")
        >>> calibrator = fk.load_calibrator("calibrator.json")
        >>> type(calibrator).__name__, round(calibrator.temperature_, 4)
        ('TemperatureScaling', 2.8854)
    """
    path = path_text("load_calibrator", "path", path)
    return _from_document(path, _read_json(path))


def _from_document(path: str | os.PathLike[str], document: Mapping[str, Any]) -> Calibrator:
    """A calibrator from parsed JSON whose format, version and method are good."""
    try:
        return calibrator_from_json(document)
    except KeyError as error:
        raise ValueError(f"{path}: not a complete calibrator, {error.args[0]!r} is missing") from error
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: not a valid calibrator: {error}") from error


def calibrator_from_json(document: Mapping[str, Any]) -> Calibrator:
    """A calibrator, which may be part of another one; it is fitted where the document has ``fit``."""
    cls = BY_METHOD[document["method"]]
    parameters = {key: value for key, value in document["parameters"].items() if key in cls._parameter_names}
    for key, value in parameters.items():
        if isinstance(value, dict):
            parameters[key] = calibrator_from_json(value)
    search, given = parameters.get("search"), parameters.get("criterion")
    if document.get("format_version") == 1:
        parameters["search"] = "grid"  # the only one there was
    elif document.get("format_version", 2) == 2 and cls.method == "focal-temperature" and given is None:
        parameters["criterion"] = "nll" if search == "nll" else "ece"  # what None meant
    calibrator = cls(**parameters)
    calibrator._check_parameters()
    if "fit" not in document and "format" not in document:
        return calibrator
    fit = document["fit"]
    n_samples, n_classes = as_count(fit["n_samples"]), as_count(fit["n_classes"], cls._fewest_classes)
    names = np.asarray(fit["classes"]) if "classes" in fit else None
    if names is not None and (names.shape != (n_classes,) or names.dtype.kind != "U"):
        raise ValueError(f"expected {n_classes} classes with names, found {short(fit['classes'])}")
    layout = Layout(n_classes, names, fit.get("one_logit") is True, fit.get("dense") is True)
    if layout.one_logit and n_classes != 2:
        raise ValueError(f"expected 2 classes where a row is one logit, found {n_classes}")
    if document.get("format_version", 4) < 4 and cls.method in ("structured", "isotonic"):
        document = {**document, "epsilon": document["floor"]}
    floor = as_number("input_floor", document.get("input_floor", 0.0))
    if not 0 <= floor < 1:
        raise ValueError(f"expected an input_floor of at least 0 and less than 1, found {floor}")
    fitted = calibrator._fitted_from_json(document, fit)
    calibrator._become(fitted, layout, n_samples=n_samples, floor=floor)
    calibrator.warnings_ = tuple(str(words) for words in fit.get("doubts", ()))
    return calibrator


def _like(given: Any, result: Tensor) -> Any:
    return result if isinstance(given, Tensor) else result.numpy()


def as_numbers(calibrator: str, name: str, values: Iterable[float] | Tensor) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in (values.tolist() if isinstance(values, Tensor) else values))
    except Exception:  # no iterable, no numbers, beyond float64; or what its class does there
        raise TypeError(f"{calibrator}: {name} must be a sequence of numbers, got {short(values)}") from None


def _plain(name: str, value: Any) -> Any:
    """A parameter as JSON has it."""
    if isinstance(value, Calibrator):
        return {
            "method": value.method,
            "parameters": {key: _plain(key, nested) for key, nested in value.get_params(deep=False).items()},
        }
    if name in ("gammas", "temperatures") and value is not None:
        return list(as_numbers("save", name, value))
    if name == "criterion" and value is None:
        return "nll"  # None meant something else before version 3
    return int(value) if name == "n_bins" else value


def as_number(name: str, value: Any) -> float:
    """A finite number out of JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, found {value!r}")
    return float(value)


def as_map(gamma: Any, temperature: Any, names: tuple[str, str] = ("gamma", "temperature")) -> tuple[float, float]:
    """gamma and T of a focal calibration map out of JSON, at which it has no overflow in float32."""
    found = as_number(names[0], gamma), as_number(names[1], temperature)
    if not (-1 < found[0] <= _MOST_GAMMA and 1 / _MOST_TEMPERATURE <= found[1] <= _MOST_TEMPERATURE):
        raise ValueError(
            f"expected {names[0]} > -1 and {names[1]} > 0, at most {_MOST_GAMMA:g} and {_MOST_TEMPERATURE:g}, "
            f"found {found[0]} and {found[1]}"
        )
    return found


def as_count(value: Any, least: int = 1) -> int:
    """A count out of JSON."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"expected a count of at least {least}, found {value!r}")
    return value


def _read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The parsed file; format, version and method are checked, nothing else."""
    with open(path, "rb") as stream:
        data = stream.read()
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
        raise ValueError(f"{path}: expected a calibrator in JSON, found something else ({error})") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f'{path}: expected a calibrator with "format": "{_FORMAT}", found other JSON')
    version = document.get("format_version")
    if isinstance(version, int) and version > _FORMAT_VERSION:
        raise ValueError(
            f"{path}: expected a calibrator of format version 1 to {_FORMAT_VERSION}, found {version}, written by "
            f"focalkern {document.get('focalkern', 'of a later version')}; upgrade focalkern"
        )
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"{path}: expected a calibrator of format version 1 to {_FORMAT_VERSION}, found {version!r}")
    if document.get("method") not in tuple(BY_METHOD):
        raise ValueError(f"{path}: expected a method out of {', '.join(BY_METHOD)}, found {document.get('method')!r}")
    return document
