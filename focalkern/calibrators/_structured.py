"""Structured scaling: a temperature, then a regularised vector or matrix and an intercept, and the focal map on top."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import flag, number
from focalkern.calibrators._base import Calibrator, InputKind, as_count, as_number
from focalkern.calibrators._derivatives import nll_temperature, smooth_focal
from focalkern.calibrators._modules import StructuredLogProbs
from focalkern.calibrators._rows import Rows
from focalkern.calibrators._search import every_row_grid
from focalkern.calibrators._warnings import judged

__all__ = ["Structure", "StructuredScaling"]

Structure = Literal["vector", "matrix"]
_STRUCTURES: tuple[Structure, ...] = get_args(Structure)

# Rows are converted to float64 so many numbers at a time.
_BLOCK = 1 << 22


class StructuredScaling(Calibrator):
    r"""Structured vector or matrix scaling: regularised logistic regression on temperature-scaled log-probabilities.

    .. math::
        \hat p = \text{softmax}(W x + b), \qquad x = \log\big((1 - \epsilon)\, \text{softmax}(z / T) + \epsilon / C\big)

    with T the NLL optimum of temperature scaling and epsilon = 1 / (N + 1), which keeps x finite; a class that could
    not occur can afterwards. W and b minimise

    .. math::
        \overline{-\log \hat p_y} + \lambda \frac{C}{N} \Big(\sum_k (W_{kk} - 1)^2 + \sum_k b_k^2\Big)
            + \lambda \frac{C (C - 1)}{N} \sum_{j \ne k} W_{jk}^2

    a convex problem. The penalty draws W and b towards leaving the probabilities as they are: the few parameters of a
    vector need few rows, and those off the diagonal appear as the rows allow.

    Args:
        kind: ``"matrix"``, or ``"vector"`` for W with zeros off the diagonal.
        focal: the focal calibration map on top of the result, its gamma and temperature the NLL optimum there.
            Jointly with the others it fits the rows of ``fit`` better and test rows no better
            (``benchmarks/results/joint_focal_*.md``).
        penalty: lambda.
        input_kind: ``"logits"`` or ``"probs"``; never guessed.

    After ``fit`` there are ``temperature_`` (the first T), ``weight_`` ([C, C], or [C], the diagonal), ``bias_`` [C],
    ``floor_`` (epsilon), ``focal_gamma_`` and ``focal_temperature_`` (0 and 1 without ``focal``), ``best_value_`` (the
    NLL of the rows of ``fit``, without the penalty) and ``n_changed_``: rows of ``fit`` whose predicted class changed.

    Source: Berta, Holzmüller, Jordan & Bach, Structured matrix scaling for multi-class calibration, AISTATS 2026 (arXiv
    2511.03685), whose penalty and defaults these are.

    Example:
        >>> labels = torch.arange(300) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(300) >= 240)) % 3]  # right in 240 of 300 rows
        >>> calibrator = fk.StructuredScaling(kind="vector").fit(logits, labels)
        >>> calibrator.predict_proba(logits[:1]).round(decimals=2)
        tensor([[0.8000, 0.1000, 0.1000]])
        >>> list(calibrator.as_module()(logits).shape)  # log-probabilities
        [300, 3]
    """

    method = "structured"
    _parameter_names = ("kind", "focal", "penalty", "input_kind")

    temperature_: float
    weight_: np.ndarray[Any, np.dtype[np.float64]]
    bias_: np.ndarray[Any, np.dtype[np.float64]]
    floor_: float
    focal_gamma_: float
    focal_temperature_: float
    best_value_: float
    n_changed_: int

    def __init__(
        self,
        *,
        kind: Structure = "matrix",
        focal: bool = False,
        penalty: float = 1.0,
        input_kind: InputKind = "logits",
    ) -> None:
        self.kind = kind
        self.focal = focal
        self.penalty = penalty
        self.input_kind = input_kind

    def as_module(self, *, fused: bool = True) -> torch.nn.Module:
        """The fitted map as a module, to append to a network.

        It goes from logits [..., C] to calibrated log-probabilities, or, fitted on one logit per row, from logits [...]
        to calibrated logits.

        Args:
            fused: as :class:`CalibratedLogProbs`.

        Returns:
            The module, without parameters to train.

        Raises:
            NotFittedError: neither ``fit`` nor ``load`` came before.
        """
        self._check_fitted()
        return self._placed(self._module(fused, one_logit=self.one_logit_))

    # -- private ------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_option("kind", _STRUCTURES)
        name = type(self).__name__
        if isinstance(self.penalty, bool | Tensor):
            raise TypeError(f"{name}: penalty must be a number, got {type(self.penalty).__name__}")
        if not 0 <= number(name, "penalty", self.penalty) < float("inf"):
            raise ValueError(f"{name}: penalty must be at least 0 and finite, got {self.penalty}")
        flag(name, "focal", self.focal)

    def _module(self, fused: bool = True, *, one_logit: bool = False) -> StructuredLogProbs:
        return StructuredLogProbs(
            self.temperature_,
            self.floor_,
            torch.from_numpy(self.weight_),
            torch.from_numpy(self.bias_),
            (self.focal_gamma_, self.focal_temperature_),
            self.input_kind,
            one_logit=one_logit,
            fused=fused,
        )

    def _fit(self, rows: Rows) -> dict[str, Any]:
        input, target, weight = rows.input, rows.target, rows.weight
        # One cell, for its checks of values and labels.
        every_row_grid(
            type(self).__name__, input, target, (0.0,), (1.0,), criteria=("ece",), input_kind=self.input_kind
        )
        n_classes = input.shape[1]
        n_rows = float(len(input) if weight is None else weight.sum())
        share = torch.full_like(target, 1 / n_rows, dtype=torch.float64) if weight is None else weight / n_rows
        fitted: dict[str, Any] = {"focal_gamma_": 0.0, "focal_temperature_": 1.0, "floor_": 1 / (n_rows + 1)}
        possible = self._possible(input, target)
        fitted["temperature_"] = 1.0
        if len(possible):
            part = None if weight is None else weight[possible]
            found = nll_temperature(input[possible], target[possible], self.input_kind, part)
            fitted["temperature_"] = found.temperature
        shape = (n_classes,) if self.kind == "vector" else (n_classes, n_classes)
        ones = torch.ones(n_classes, dtype=torch.float64, device=input.device)
        identity = ones if self.kind == "vector" else torch.diag(ones)
        module = StructuredLogProbs(
            fitted["temperature_"], fitted["floor_"], identity, torch.zeros_like(ones), (0.0, 1.0), self.input_kind
        )
        features = module.features(input.to(torch.float64))
        strength = float(self.penalty) * n_classes / n_rows
        penalties = torch.full(shape, strength * (n_classes - 1), dtype=torch.float64, device=input.device)
        if self.kind == "vector":
            penalties.fill_(strength)
        else:
            penalties.fill_diagonal_(strength)
        module.weight, module.bias = _regularised(features, target, share, identity, penalties, strength)
        scores = module.scores(features)
        if self.focal:
            found = smooth_focal(scores, target, "logits", "nll", weight)
            fitted["focal_gamma_"], fitted["focal_temperature_"] = found.gamma, found.temperature
            module.focal = (found.gamma, found.temperature)
        log_probs = module.finished(scores)
        return {
            **fitted,
            "weight_": module.weight.cpu().numpy(),
            "bias_": module.bias.cpu().numpy(),
            "best_value_": -float(log_probs.gather(1, target.unsqueeze(1)).squeeze(1) @ share),
            "n_changed_": int((log_probs.argmax(-1) != input.argmax(-1)).sum()),
        }

    def _possible(self, input: Tensor, target: Tensor) -> Tensor:
        """The rows whose target can occur: the others say nothing of a temperature."""
        of_target = input.gather(1, target.unsqueeze(1)).squeeze(1)
        return (of_target > (0 if self.input_kind == "probs" else -torch.inf)).nonzero().squeeze(1)

    def _doubts(self, rows: Rows) -> list[str]:
        remedy = "a larger penalty, or TemperatureScaling"
        return judged(rows, self._module(), by=("nll",), input_kind=self.input_kind, remedy=remedy)

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        log_probs: Tensor = self._module().to(input.device)(input)
        return log_probs if log else log_probs.exp()

    def _predicted(self, input: Tensor) -> Tensor:
        return self._apply(input, log=True).argmax(-1)

    def _fitted_to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        names = ("temperature_", "floor_", "focal_gamma_", "focal_temperature_")
        numbers = {name[:-1]: getattr(self, name) for name in names}
        top = {**numbers, "weight": self.weight_.tolist(), "bias": self.bias_.tolist()}
        return top, {"best_value": self.best_value_, "n_changed": self.n_changed_}

    def _fitted_from_json(self, document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
        n_classes = as_count(fit["n_classes"])
        weight = np.array(document["weight"], dtype=np.float64)
        bias = np.array(document["bias"], dtype=np.float64)
        shape = (n_classes,) if self.kind == "vector" else (n_classes, n_classes)
        if weight.shape != shape or bias.shape != (n_classes,):
            raise ValueError(
                f"expected weight {list(shape)} and bias {[n_classes]}, found {list(weight.shape)} and "
                f"{list(bias.shape)}"
            )
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise ValueError("expected finite weights and biases, found others")
        names = ("temperature", "floor", "focal_gamma", "focal_temperature")
        numbers = {f"{name}_": as_number(name, document[name]) for name in names}
        if min(numbers["temperature_"], numbers["focal_temperature_"]) <= 0 or numbers["focal_gamma_"] <= -1:
            raise ValueError(f"expected temperatures > 0 and focal_gamma > -1, found {numbers}")
        if not 0 < numbers["floor_"] < 1:
            raise ValueError(f"expected a floor between 0 and 1, found {numbers['floor_']}")
        value, changed = as_number("best_value", fit["best_value"]), as_count(fit["n_changed"], least=0)
        return {**numbers, "weight_": weight, "bias_": bias, "best_value_": value, "n_changed_": changed}


def _regularised(
    features: Tensor, target: Tensor, share: Tensor, identity: Tensor, penalties: Tensor, of_bias: float
) -> tuple[Tensor, Tensor]:
    """Weight and bias with the smallest mean NLL plus penalties * (weight - identity)^2 + of_bias * bias^2.

    Args:
        features: [N, C] float64.
        target: [N] int64.
        share: [N] float64, of the mean; it sums to 1.
        identity, penalties: [C, C], or [C] for a diagonal.
    """
    n_classes = features.shape[1]
    rows = max(1, _BLOCK // n_classes)
    vector = identity.dim() == 1
    change = torch.zeros_like(identity, requires_grad=True)
    bias = torch.zeros(n_classes, dtype=torch.float64, device=features.device, requires_grad=True)

    @torch.no_grad()
    def value_and_gradient() -> float:
        weight = identity + change
        value = (penalties * change.square()).sum() + of_bias * bias.square().sum()
        of_weight, of_intercept = 2 * penalties * change, 2 * of_bias * bias
        for x, labels, part in zip(features.split(rows), target.split(rows), share.split(rows), strict=True):
            scores = (x * weight if vector else x @ weight.T) + bias
            log_probs = scores.log_softmax(-1)
            value = value - log_probs.gather(1, labels.unsqueeze(1)).squeeze(1) @ part
            # Softmax minus one-hot, of which everything else is a sum.
            slope = log_probs.exp_()
            slope.scatter_add_(1, labels.unsqueeze(1), slope.new_full((len(labels), 1), -1.0))
            slope *= part.unsqueeze(1)
            of_weight += (slope * x).sum(0) if vector else slope.T @ x
            of_intercept += slope.sum(0)
        change.grad, bias.grad = of_weight, of_intercept
        return float(value)

    _minimise([change, bias], value_and_gradient)
    return (identity + change).detach(), bias.detach()


def _minimise(parameters: list[Tensor], closure: Callable[[], float]) -> None:
    """L-BFGS until the gradient is gone to six digits of what a row can change."""
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=500,
        tolerance_grad=1e-7,
        tolerance_change=1e-11,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
