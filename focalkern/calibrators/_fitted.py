"""Application of a fitted calibrator to rows: checks of the input, floor, probabilities, predicted classes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._columns import ClassColumns
from focalkern._devices import cpu_by_default
from focalkern._diagnostics import likely_sum
from focalkern.calibrators._fit_data import (
    as_floating,
    check_input,
    check_scored,
    check_values,
    classes_misfit,
    labels_like_fit,
    weighted_mean,
)
from focalkern.calibrators._inputs import as_pairs, floored_input
from focalkern.calibrators._modules import ClassAxis, FlooredInput
from focalkern.calibrators._named_columns import check_columns, expected_columns
from focalkern.calibrators._not_fitted import not_fitted
from focalkern.calibrators._parameters import Parameters
from focalkern.calibrators._warnings import warn

__all__ = ["BY_METHOD", "Fitted", "Layout", "renamed"]

_FEW = 4096
_UNSEEN = "_unseen"

BY_METHOD: dict[str, type["Fitted"]] = {}  # every calibrator class, by its "method" in JSON files


class Layout(NamedTuple):
    """The classes of the input of ``fit``, their names, its layout, and the names of its columns, if it was a frame."""

    n_classes: int
    names: np.ndarray[Any, Any] | None = None
    one_logit: bool = False
    dense: bool = False
    columns: ClassColumns | None = None


class Fitted(Parameters):
    """The attributes that ``fit`` and ``load`` set, and the methods that read them."""

    _fewest_classes: ClassVar[int] = 2

    n_classes_: int
    n_samples_: int
    input_floor_: float
    one_logit_: bool
    dense_: bool
    warnings_: tuple[str, ...]
    _names: np.ndarray[Any, Any] | None  # names of the classes; None if they are numbers
    _fitted_on: Mapping[str, Any] | None = None  # description of the rows, from the file of a study
    _columns: ClassColumns | None = None  # the columns of the frame of fit; None if they had no names

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "method" in vars(cls):
            BY_METHOD[cls.method] = cls

    @property
    def classes_(self) -> np.ndarray[Any, Any]:
        """[C]: the names of the classes in the order of the columns, or 0, 1, ... C - 1.

        String labels are in alphabetical order; if all are names of the columns of a frame, in the order of the frame.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), ["cat"] * 8 + ["dog"] * 2
            >>> print(fk.TemperatureScaling().fit(logits, labels).classes_)
            ['cat' 'dog']
        """
        # Made on demand: a small file with a huge number of classes must not allocate memory when it is loaded.
        n_classes = self.n_classes_
        return np.arange(n_classes) if self._names is None else self._names

    @overload
    def predict_proba(self, logits: Tensor) -> Tensor: ...
    @overload
    def predict_proba(self, logits: np.ndarray[Any, Any] | Sequence[Any]) -> np.ndarray[Any, Any]: ...
    def predict_proba(self, logits: Any) -> Any:
        """Calibrated probabilities.

        Args:
            logits: [..., C] floating point, with the number of classes of ``fit``; [...] after a fit on one logit per
                row; [N, C, d1, ...] after a fit on that layout.

        Returns:
            Probabilities of the same shape ([..., 2] for one logit) and dtype: a tensor for a tensor, on its device; a
            NumPy array for anything else.

        Warns:
            CalibrationWarning: once, if ``fit`` took logits and the first rows look like probabilities.

        Raises:
            NotFittedError: call ``fit`` or ``load`` first.
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
        """The logarithms of :meth:`predict_proba`, precise also if a probability is near 1 or underflows.

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
            [...] class indices, int64: a tensor for a tensor, a NumPy array for anything else. If the labels of ``fit``
            were strings, a NumPy array of these.

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
        """Accuracy of :meth:`predict`, scikit-learn's score of a classifier.

        Args:
            logits: as :meth:`predict_proba`.
            target: [...] classes, as :meth:`predict` gives them: strings if the labels of ``fit`` were strings.
            sample_weight: [...] of the shape of ``target``; None is 1 for each.

        Returns:
            A fraction, in [0, 1].

        Raises:
            NotFittedError, TypeError: as :meth:`predict_proba`.
            ValueError: as :meth:`predict_proba`; a target of another shape; strings in place of numbers or vice versa.
            IndexError: a number that is no class, unless its weight is 0.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> fk.TemperatureScaling().fit(logits, labels).score(logits, labels)
            0.8
        """
        name, found = type(self).__name__, self.predict(logits)
        found = found.cpu().numpy() if isinstance(found, Tensor) else found
        wanted = labels_like_fit(name, target, self._names)
        if wanted.shape != found.shape:
            raise ValueError(f"{name}: target must be {list(found.shape)}, got {list(wanted.shape)}")
        check_scored(name, wanted, self.n_classes_, sample_weight)
        return weighted_mean(name, found == wanted, sample_weight)

    @overload
    def changed(self, logits: Tensor) -> Tensor: ...
    @overload
    def changed(self, logits: np.ndarray[Any, Any] | Sequence[Any]) -> np.ndarray[Any, Any]: ...
    def changed(self, logits: Any) -> Any:
        """Marks the rows whose predicted class differs from the prediction before calibration.

        Args:
            logits: as :meth:`predict_proba`.

        Returns:
            [...] bool: a tensor for a tensor, a NumPy array for anything else.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_proba`.

        Example:
            >>> logits = torch.tensor([[4.0, 0.0], [1.0, 0.0]]).repeat(10, 1)
            >>> labels = torch.tensor([0, 1] * 6 + [0, 0] * 3 + [1, 1])  # correct in 9 and in 3 of 10 rows
            >>> calibrator = fk.HistogramBinning(n_bins=2).fit(logits, labels)
            >>> calibrator.changed(logits[:2])
            tensor([False,  True])
        """
        input = self._input(logits)
        result = self._named(self._predicted, input) != input.argmax(-1)
        return result if isinstance(logits, Tensor) else result.numpy()

    # -- hooks of a subclass ------------------------------------------------------------------------------------

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        """Maps [..., C] to calibrated (log-)probabilities [..., C]."""
        raise NotImplementedError

    def _made(self, device: torch.device) -> Any:
        """The map of rows of a device, if ``_apply`` takes it from ``_kept``."""
        raise NotImplementedError

    def _invalid_rows_are(self) -> Literal["rejected", "nan"] | None:
        """The result of ``_apply`` for rows of logits that are not distributions; None if such rows must not reach it.

        ``"rejected"``: its operator raises, and also rejects such rows of probabilities. ``"nan"``: such rows become
        NaN; the results of other rows are finite, or -inf with ``log``.
        """
        return None

    def _keeps_predictions(self) -> bool:
        """Whether the map keeps the order of the classes, so that no row's predicted class changes."""
        return False

    def _predicted(self, input: Tensor) -> Tensor:
        """Maps [..., C] to class indices [...]; of equal classes the first."""
        return (input if self._keeps_predictions() else self._after_floor(input, log=True)).argmax(-1)

    def _fitted_to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Two dicts with the result of ``_fit``: for the top of the file, and for its summary of the fit."""
        raise NotImplementedError

    def _fitted_from_json(self, document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of ``_fitted_to_json``; raises KeyError, TypeError or ValueError for invalid data."""
        raise NotImplementedError

    # -- private ------------------------------------------------------------------------------------------------

    def _become(self, fitted: Mapping[str, Any], layout: Layout, *, n_samples: int, floor: float = 0.0) -> None:
        """Replaces all attributes of an earlier fit."""
        for name in [name for name in vars(self) if name.endswith("_") and not name.startswith("_")]:
            delattr(self, name)
        for name in ("_made_for", "_fitted_on", _UNSEEN):
            vars(self).pop(name, None)
        vars(self).update(fitted)
        self.n_classes_, self._names, self.one_logit_, self.dense_, self._columns = layout
        self.n_samples_, self.input_floor_ = n_samples, floor
        self.warnings_ = ()

    def _placed(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with the floor before it, for the layout of the input of ``fit``."""
        if self.input_floor_:
            module = FlooredInput(module, self.input_floor_, self.input_kind, one_logit=self.one_logit_)
        return ClassAxis(module, self.n_classes_) if self.dense_ else module

    def _pairs(self, input: Tensor) -> Tensor:
        """Inputs [...] of class 1 as [..., 2] of both classes."""
        return as_pairs(as_floating(type(self).__name__, input), self.input_kind)

    def _as_tensor(self, logits: Any) -> Tensor:
        return as_tensor(logits, f"{type(self).__name__}: logits")

    def _check_columns(self, columns: ClassColumns) -> None:
        check_columns(type(self).__name__, columns, self._expected_columns(columns.classes))

    def _expected_columns(self, found: Sequence[str]) -> Sequence[str]:
        """The names that columns called ``found`` must have; empty if any will do."""
        return expected_columns(self._columns, self._names, found)

    def _laid_out(self, given: Any, result: Tensor) -> Any:
        """Converts a result [..., C] to the type of the input (tensor or array) and to its class dimension."""
        return _like(given, result.movedim(-1, 1) if self.dense_ and result.dim() > 2 else result)

    def _input(self, logits: Any) -> Tensor:
        """Input as rows [..., C] with the classes of ``fit``; checks that each row is a distribution."""
        input = self._of_fit(logits)
        self._check_values(input)
        return input

    def _check_values(self, input: Tensor) -> None:
        check_values(type(self).__name__, input, self.input_kind)

    def _of_fit(self, logits: Any) -> Tensor:
        """Input as rows [..., C] with the classes of ``fit``; does not check their values."""
        self._check_fitted()
        input = as_tensor(logits, f"{type(self).__name__}: logits", self._check_columns)
        shape = tuple(input.shape)
        if self.one_logit_:
            input = self._pairs(input)
        elif self.dense_ and input.dim() > 2:
            input = input.movedim(1, -1)
        if not input.is_floating_point() or input.dim() < 1 or input.shape[-1] != self.n_classes_:
            name = type(self).__name__
            check_input(name, input, any_rank=True)
            raise classes_misfit(name, shape, self.n_classes_, self.dense_)
        if _UNSEEN in vars(self) and input.numel() > self.n_classes_:  # a single row may look like anything
            self._look_at(input)
        return input

    def _look_at(self, input: Tensor) -> None:
        """Warns, once, if the first rows to predict look like probabilities."""
        self._look_at_next(False)
        total = likely_sum(input.detach().reshape(-1, self.n_classes_))
        if total:
            what = "probabilities" if total == 1 else "percentages"
            words = f"the rows to predict look like {what}, but fit took logits: pass logits, or fit again on "
            warn(type(self).__name__, [f"{words}probabilities with input_kind='probs'"])

    def _look_at_next(self, look: bool) -> None:
        """Whether the next rows to predict may cause the warning about rows that look like probabilities."""
        vars(self).pop(_UNSEEN, None)
        if look:
            vars(self)[_UNSEEN] = True

    def _applied(self, logits: Any, *, log: bool) -> Tensor:
        input = self._of_fit(logits)
        found_by = self._invalid_rows_are()
        # A sum other than 1 makes no row NaN, and a floor hides it from the operator.
        if not found_by or (self.input_kind == "probs" and (found_by == "nan" or self.input_floor_)):
            self._check_values(input)
        try:
            result = self._after_floor(input, log=log)
        except (TypeError, ValueError) as error:
            self._check_values(input)
            raise renamed(type(self).__name__, error) from None
        if found_by == "nan" and _has_nan(result):
            self._check_values(input)
        return result.to(self._as_tensor(logits).dtype) if self.one_logit_ else result

    def _after_floor(self, input: Tensor, *, log: bool) -> Tensor:
        if not self.input_floor_:
            return self._apply(input, log=log)
        return self._apply(floored_input(input, self.input_floor_, self.input_kind), log=log).to(input.dtype)

    def _named(self, function: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        """Calls a function; errors of operators in it then name the calibrator and its argument."""
        try:
            return function(input)
        except (TypeError, ValueError) as error:
            raise renamed(type(self).__name__, error) from None

    def _kept(self, device: torch.device) -> Any:
        """The result of ``_made``, once per fit, device and kind of input: it takes longer than mapping a row."""
        made: dict[Any, Any] = vars(self).setdefault("_made_for", {})
        key = device, self.input_kind
        found = made.get(key)
        if found is None:
            with cpu_by_default():
                found = made[key] = self._made(device)
        return found

    def _check_fitted(self) -> None:
        if not hasattr(self, "n_classes_"):
            name = type(self).__name__
            raise not_fitted(f"{name}: not fitted yet; call fit(logits, target) or {name}.load(path) first")


def _has_nan(values: Tensor) -> bool:
    """Whether an element is NaN. ``values`` must not have both inf and -inf, whose sum is NaN."""
    # Tensors with NaN never equal themselves. For few elements the comparison is faster than a sum, which is a tensor.
    return not torch.equal(values, values) if values.numel() <= _FEW else math.isnan(values.sum().item())


def _like(given: Any, result: Tensor) -> Any:
    return result if isinstance(given, Tensor) else result.numpy()


def renamed(name: str, error: Exception) -> Exception:
    """Context in which errors of an operator or a nested calibrator name the calibrator that the user called."""
    who, _, words = str(error).partition(": ")
    known = who in ("focal_calibration_map", "spline_calibration_map") or who in {
        kind.__name__ for kind in BY_METHOD.values()
    }
    if not known or not words.startswith(("input ", "logits ")):
        return error
    return type(error)(f"{name}: logits {words.split(' ', 1)[1]}")
