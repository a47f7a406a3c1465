"""Calibration of each label of a multi-label head."""

from collections.abc import Mapping, Sequence
from typing import Any, Self, overload

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._checks import not_floating
from focalkern._diagnostics import one_logit_problems
from focalkern._types import InputKind
from focalkern.calibrators._base import Calibrator
from focalkern.calibrators._document import as_count, as_list, calibrator_from_json, nested_document
from focalkern.calibrators._fit_data import as_binary, as_weight, no_rows, weighted_mean
from focalkern.calibrators._fitted import Layout
from focalkern.calibrators._inputs import as_pairs, floored_input
from focalkern.calibrators._label_scalings import fit_labels, map_of_label, module_of_label
from focalkern.calibrators._modules import FlooredInput, MultiLabelLogits, PerLabelLogits
from focalkern.calibrators._named_columns import check_label_columns, given_columns, with_names
from focalkern.calibrators._parameters import LOGITS
from focalkern.calibrators._scaling import Scaling
from focalkern.calibrators._structured import StructuredScaling
from focalkern.calibrators._warnings import warn
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = ["MultiLabelScaling"]

_SCALINGS = ("temperature", "focal-temperature", "robust-temperature", "spline", "structured")
_EXPECTED = "a TemperatureScaling, FocalTemperatureScaling, RobustTemperatureScaling, SplineScaling, StructuredScaling"
_MOST_NAMED = 3  # largest number of sentences in the warning, because each label may have one


class MultiLabelScaling(Calibrator):
    r"""One scaling per label, for heads of independent labels with logits [N, L] and a sigmoid per logit.

    .. math:: \hat p_l = \sigma(g_l(z_l))

    with g the map of one logit of the scaling of label l. The default has an intercept, because scores of rare labels
    are often too high or too low on average, which no temperature corrects. It can change predictions;
    temperature scaling cannot. A label without positives or without negatives in the rows of ``fit`` stays
    uncalibrated, and ``remarks_`` names it. The ``floor`` of the scaling applies to all labels.

    Args:
        scaling: a :class:`TemperatureScaling`, :class:`FocalTemperatureScaling`, :class:`RobustTemperatureScaling`,
            :class:`SplineScaling` or :class:`StructuredScaling`; each label gets a copy. None is
            ``StructuredScaling(kind="vector", solver="lbfgs")``.
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Without it ``fit`` rejects logits that
            look like probabilities. ``scaling`` must have the same value.

    ``fit`` sets ``n_positive_`` [L], ``remarks_`` (sentences: labels without positives or negatives, optima at a bound
    of the search) and ``scalings_``, the fitted copies (None for an uncalibrated label). It also sets ``gammas_`` [L]
    and ``temperatures_`` [L] (0 and 1 for an uncalibrated label) if the scaling is a :class:`TemperatureScaling` or
    :class:`FocalTemperatureScaling`.

    Source: the source of the scaling, for each label as a problem of two classes. For one logit, structured scaling is
    a regularised beta calibration (Kull, Silva Filho & Flach, AISTATS 2017).

    Example:
        >>> logits = torch.tensor([[4.0, -1.0]]).repeat(10, 1)  # two labels per row
        >>> labels = torch.tensor([[1, 0]] * 8 + [[0, 1]] * 2)
        >>> calibrator = fk.MultiLabelScaling(scaling=fk.TemperatureScaling()).fit(logits, labels)
        >>> calibrator.predict_proba(logits[:1]).round(decimals=3)
        tensor([[0.8000, 0.2000]])
        >>> calibrator.as_module()(logits[:1]).sigmoid().round(decimals=3)
        tensor([[0.8000, 0.2000]])
    """

    method = "multi-label"
    _fewest_classes = 1

    gammas_: np.ndarray[Any, np.dtype[np.float64]]
    temperatures_: np.ndarray[Any, np.dtype[np.float64]]
    n_positive_: np.ndarray[Any, np.dtype[np.int64]]
    scalings_: tuple[Calibrator | None, ...]
    remarks_: tuple[str, ...]

    def __init__(self, *, scaling: Calibrator | None = None, input_kind: InputKind = LOGITS) -> None:
        self.scaling = scaling
        self.input_kind = input_kind

    def fit(self, logits: Any, target: Any, sample_weight: Any = None, *, ignore_index: int | None = None) -> Self:
        """Fit every label on held-out data.

        Args:
            logits: [N, L] floating point, tensor or array; probabilities with ``input_kind="probs"``.
            target: [N, L] of 0 and 1: integer, floating point or bool; columns of a frame in the order of ``logits``.
            sample_weight: [N]: a row with weight w counts w times; None is 1.
            ignore_index: the value of ignored labels in ``target``; None ignores no label.

        Returns:
            The calibrator itself. After an error, an earlier fit stays unchanged.

        Raises:
            TypeError, ValueError: logits that are not floating point; shapes that do not fit; no rows; a target other
                than 0 and 1; NaN or infinite logits; an error of the scaling, which names the label.

        Example:
            >>> logits, labels = torch.tensor([[4.0, -1.0]]).repeat(10, 1), torch.tensor([[1, 0]] * 8 + [[0, 1]] * 2)
            >>> calibrator = fk.MultiLabelScaling(scaling=fk.TemperatureScaling()).fit(logits, labels)
            >>> print(calibrator.temperatures_.round(3))
            [2.885 0.721]
        """
        counted = self._fit_labels(logits, target, sample_weight, ignore_index)
        if self.input_kind == "logits":
            self.warnings_ = (*one_logit_problems(counted), *self.warnings_)
        first = self.warnings_[:_MOST_NAMED]
        more = len(self.warnings_) - len(first)
        warn(type(self).__name__, (*first, f"{more} more in warnings_") if more else first)
        return self

    def fit_quietly(
        self, logits: Any, target: Any, sample_weight: Any = None, *, ignore_index: int | None = None
    ) -> Self:
        """:meth:`fit` without the warning, for callers that read ``warnings_``.

        Args:
            logits, target, sample_weight, ignore_index: as :meth:`fit`.

        Returns:
            The calibrator itself.

        Raises:
            TypeError, ValueError: as :meth:`fit`.

        Example:
            >>> logits, labels = torch.tensor([[4.0, -1.0]]).repeat(10, 1), torch.tensor([[1, 0]] * 8 + [[0, 0]] * 2)
            >>> calibrator = fk.MultiLabelScaling().fit_quietly(logits, labels)
            >>> calibrator.remarks_
            ('label 1: not calibrated, because its 10 rows have no positive',)
        """
        self._fit_labels(logits, target, sample_weight, ignore_index)
        return self

    def _fit_labels(self, logits: Any, target: Any, sample_weight: Any, ignore_index: int | None) -> Tensor:
        """Fit, and return the logits of the rows with a positive weight."""
        name = type(self).__name__
        self._check_parameters()
        input = self._as_tensor(logits)
        self._check_labels(input)
        if input.dim() != 2 or 0 in input.shape:
            raise ValueError(f"{name}: logits must be [N, L] with at least one row, got shape {list(input.shape)}")
        columns = given_columns(name, logits)
        check_label_columns(name, columns, target)
        labels, known = as_binary(name, target, input, ignore_index)
        weight = None if sample_weight is None else as_weight(name, sample_weight, input.shape[:1]).to(input.device)
        if weight is not None:
            known &= (weight > 0).unsqueeze(1)
        self._check_values(input, known)
        if weight is not None and not bool(weight.any()):
            raise no_rows(name, len(input), True, False)
        template: Calibrator = StructuredScaling(kind="vector", solver="lbfgs", input_kind=self.input_kind)
        template = template if self.scaling is None else self.scaling
        found = fit_labels(name, template, input, labels, known, weight)
        fitted = self._of(found.scalings, found.positive, found.remarks)
        counted = input if weight is None else input[weight > 0]
        layout = Layout(input.shape[1], columns=with_names(columns))
        self._become(fitted, layout, n_samples=len(counted), floor=float(getattr(template, "floor", 0.0)))
        self.warnings_ = tuple(found.warnings)
        return counted

    @overload
    def predict_proba(self, logits: Tensor) -> Tensor: ...
    @overload
    def predict_proba(self, logits: np.ndarray[Any, Any] | Sequence[Any]) -> np.ndarray[Any, Any]: ...
    def predict_proba(self, logits: Any) -> Any:
        """Calibrated probabilities of the labels.

        Args:
            logits: [..., L] floating point, with the labels of ``fit``.

        Returns:
            [..., L] probabilities that a label is 1: a tensor for a tensor, on its device; a NumPy array for anything
            else.

        Raises:
            NotFittedError: call ``fit`` or ``load`` first.
            TypeError, ValueError: as ``fit``.

        Example:
            >>> logits, labels = torch.tensor([[4.0, -1.0]]).repeat(10, 1), torch.tensor([[1, 0]] * 8 + [[0, 1]] * 2)
            >>> calibrator = fk.MultiLabelScaling().fit(logits, labels)
            >>> calibrator.predict_proba(logits[:1]).round(decimals=3)
            tensor([[0.7900, 0.2100]])
        """
        return super().predict_proba(logits)

    @overload
    def predict_log_proba(self, logits: Tensor) -> Tensor: ...
    @overload
    def predict_log_proba(self, logits: np.ndarray[Any, Any] | Sequence[Any]) -> np.ndarray[Any, Any]: ...
    def predict_log_proba(self, logits: Any) -> Any:
        """The logarithms of :meth:`predict_proba`.

        Args:
            logits: [..., L], as :meth:`predict_proba`.

        Returns:
            [..., L] log-probabilities that a label is 1.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_proba`.

        Example:
            >>> logits, labels = torch.tensor([[4.0, -1.0]]).repeat(10, 1), torch.tensor([[1, 0]] * 8 + [[0, 1]] * 2)
            >>> calibrator = fk.MultiLabelScaling().fit(logits, labels)
            >>> calibrator.predict_log_proba(logits[:1]).exp().round(decimals=3)
            tensor([[0.7900, 0.2100]])
        """
        return super().predict_log_proba(logits)

    @overload
    def changed(self, logits: Tensor) -> Tensor: ...
    @overload
    def changed(self, logits: np.ndarray[Any, Any] | Sequence[Any]) -> np.ndarray[Any, Any]: ...
    def changed(self, logits: Any) -> Any:
        """Marks labels whose prediction calibration changes: none if every scaling keeps the side of 1/2.

        Args:
            logits: [..., L], as :meth:`predict_proba`.

        Returns:
            [..., L] bool: a tensor for a tensor, a NumPy array for anything else.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_proba`.

        Example:
            >>> logits, labels = torch.tensor([[4.0, -1.0]]).repeat(10, 1), torch.tensor([[1, 0]] * 8 + [[0, 1]] * 2)
            >>> fk.MultiLabelScaling().fit(logits, labels).changed(logits[:1])
            tensor([[False, False]])
        """
        input = self._input(logits)
        result = self._predicted(input) != self._before(input)
        return result if isinstance(logits, Tensor) else result.numpy()

    @overload
    def predict(self, logits: Tensor) -> Tensor: ...
    @overload
    def predict(self, logits: np.ndarray[Any, Any] | Sequence[Any]) -> np.ndarray[Any, Any]: ...
    def predict(self, logits: Any) -> Any:
        """The predicted labels: those with a calibrated probability above 1/2.

        Args:
            logits: [..., L], as :meth:`predict_proba`.

        Returns:
            [..., L] int64: 1 where the probability is above 1/2, else 0.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_proba`.

        Example:
            >>> logits, labels = torch.tensor([[4.0, -1.0]]).repeat(10, 1), torch.tensor([[1, 0]] * 8 + [[0, 1]] * 2)
            >>> calibrator = fk.MultiLabelScaling().fit(logits, labels)
            >>> calibrator.predict(logits[:1])
            tensor([[1, 0]])
        """
        return super().predict(logits)

    def score(self, logits: Any, target: Any, sample_weight: Any = None) -> float:
        """The fraction of rows with all labels correct, scikit-learn's score for multi-label classifiers.

        Args:
            logits: [N, L], as :meth:`predict_proba`.
            target: [N, L] of 0 and 1.
            sample_weight: [N]; None is 1 for each.

        Returns:
            A fraction, in [0, 1].

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_proba`.

        Example:
            >>> logits, labels = torch.tensor([[4.0, -1.0]]).repeat(10, 1), torch.tensor([[1, 0]] * 8 + [[0, 1]] * 2)
            >>> fk.MultiLabelScaling().fit(logits, labels).score(logits, labels)
            0.8
        """
        name, found = type(self).__name__, torch.as_tensor(self.predict(logits))
        check_label_columns(name, self._columns, target)
        wanted, _ = as_binary(name, target, found, None)
        return weighted_mean(name, (found == wanted).all(-1).cpu().numpy(), sample_weight)

    def as_module(self, *, fused: bool = True) -> torch.nn.Module:
        """The fitted maps as a module. It maps logits [..., L] to calibrated logits, for a sigmoid or a loss of logits.

        Args:
            fused: the compiled operator; False computes in torch's own operators, for exporters that support only
                these.

        Returns:
            The module, without parameters to train.

        Raises:
            NotFittedError: call ``fit`` or ``load`` first.
        """
        self._check_fitted()
        kind = self.input_kind
        module: torch.nn.Module
        if hasattr(self, "gammas_"):
            module = MultiLabelLogits(self.gammas_.tolist(), self.temperatures_.tolist(), kind, fused=fused)
        else:
            module = PerLabelLogits([module_of_label(scaling, kind, fused=fused) for scaling in self.scalings_])
        return FlooredInput(module, self.input_floor_, self.input_kind, one_logit=True) if self.input_floor_ else module

    # -- private ------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_scaling(_SCALINGS, _EXPECTED)

    def _check_labels(self, input: Tensor) -> None:
        if not input.is_floating_point():
            raise TypeError(f"{type(self).__name__}: logits must be floating point, got {not_floating(input.dtype)}")

    def _check_values(self, input: Tensor, known: Tensor | None = None) -> None:
        """Raise for the first invalid probability or logit: the rule of :func:`check_values` for labels."""
        if self.input_kind == "probs":
            good, expected = (input >= 0) & (input <= 1), "probabilities in [0, 1]"
        else:
            good, expected = input < torch.inf, "below +inf and not NaN"
        bad = (~good if known is None else ~good & known).reshape(-1, input.shape[-1]).nonzero()
        if len(bad):
            row, label = bad[0].tolist()
            value = input.detach().reshape(-1, input.shape[-1])[row, label].item()
            raise ValueError(
                f"{type(self).__name__}: logits must be {expected}, got {value:g} at row {row}, label {label}"
            )

    def _keeps_predictions(self) -> bool:
        return all(scaling is None or scaling._keeps_predictions() for scaling in vars(self).get("scalings_", ()))

    def _of(self, scalings: list[Calibrator | None], positive: list[int], remarks: list[str]) -> dict[str, Any]:
        numbers = {}
        if all(scaling is None or isinstance(scaling, Scaling) for scaling in scalings):
            maps = [(s.gamma_, s.temperature_) if isinstance(s, Scaling) else (0.0, 1.0) for s in scalings]
            gammas, temperatures = np.array(maps).T
            numbers = {"gammas_": gammas.copy(), "temperatures_": temperatures.copy()}
        return {
            **numbers,
            "n_positive_": np.array(positive, dtype=np.int64),
            "scalings_": tuple(scalings),
            "remarks_": tuple(remarks),
        }

    def _of_fit(self, logits: Any) -> Tensor:
        self._check_fitted()
        input = as_tensor(logits, f"{type(self).__name__}: logits", self._check_columns)
        self._check_labels(input)
        if input.dim() < 1 or input.shape[-1] != self.n_classes_:
            raise ValueError(
                f"{type(self).__name__}: logits must have the {self.n_classes_} labels of fit, "
                f"got shape {list(input.shape)}"
            )
        return input

    def _after_floor(self, input: Tensor, *, log: bool) -> Tensor:
        if not self.input_floor_:
            return self._apply(input, log=log)
        pairs = floored_input(as_pairs(input, self.input_kind), self.input_floor_, self.input_kind)
        return self._of_pairs(pairs, log=log).to(input.dtype)

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        return self._of_pairs(as_pairs(input, self.input_kind), log=log).to(input.dtype)

    def _of_pairs(self, pairs: Tensor, *, log: bool) -> Tensor:
        if not hasattr(self, "gammas_"):
            columns = zip(self.scalings_, pairs.unbind(-2), strict=True)
            mapped = [map_of_label(scaling, rows, self.input_kind, log=log) for scaling, rows in columns]
            return torch.stack(mapped, -1)
        gammas, temperatures = (torch.from_numpy(axis).to(pairs.device) for axis in (self.gammas_, self.temperatures_))
        return focal_calibration_map(pairs, gammas, temperatures, input_kind=self.input_kind, log=log)[..., 1]

    def _before(self, input: Tensor) -> Tensor:
        return (input > (0.5 if self.input_kind == "probs" else 0)).to(torch.int64)

    def _predicted(self, input: Tensor) -> Tensor:
        if self._keeps_predictions():
            return self._before(input)
        return (self._after_floor(input, log=False) > 0.5).to(torch.int64)

    def _fitted_to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        nested = [None if scaling is None else nested_document(scaling) for scaling in self.scalings_]
        return {"labels": nested}, {"n_positive": self.n_positive_.tolist(), "remarks": list(self.remarks_)}

    def _fitted_from_json(self, document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
        labels = as_list("labels", document["labels"])
        scalings = [None if nested is None else calibrator_from_json(nested) for nested in labels]
        fitted = [scaling for scaling in scalings if scaling is not None]
        methods = sorted({scaling.method for scaling in fitted})
        if len(methods) > 1 or not set(methods) <= set(_SCALINGS):
            raise ValueError(f"expected one kind of scaling for all labels, found {', '.join(methods)}")
        if not all(hasattr(scaling, "n_classes_") for scaling in fitted):
            raise ValueError("expected a fitted scaling for every label, found one without its fit")
        positive = [as_count("n_positive", count, least=0) for count in as_list("n_positive", fit["n_positive"])]
        if not len(scalings) == len(positive) == as_count("n_classes", fit["n_classes"]):
            raise ValueError(f"expected {fit['n_classes']} labels, found {len(scalings)} and {len(positive)} counts")
        return self._of(scalings, positive, as_list("remarks", fit["remarks"], str))  # type: ignore[arg-type]
