"""Structured scaling: a temperature, then a regularised vector or matrix and an intercept, and the focal map on top."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import flag, number
from focalkern._types import InputKind, compute_dtype
from focalkern.calibrators._base import Calibrator
from focalkern.calibrators._document import LEAST_EPSILON, as_array, as_count, as_map, as_number
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._inputs import cannot_occur, probabilities
from focalkern.calibrators._modules import RowMap, in_each_dtype
from focalkern.calibrators._newton_search import check_finite_nll, minimize_focal, nll_temperature
from focalkern.calibrators._parameters import LOGITS
from focalkern.calibrators._probmetrics import fit_structured
from focalkern.calibrators._structured_module import StructuredLogProbs
from focalkern.calibrators._temperature_bound import bound_remedy, no_error_warnings
from focalkern.calibrators._warnings import few_by_weight, unseen_classes, worse_than_uncalibrated

__all__ = ["Solver", "Structure", "StructuredScaling"]

Structure = Literal["vector", "matrix"]
Solver = Literal["auto", "probmetrics", "lbfgs"]
_STRUCTURES: tuple[Structure, ...] = get_args(Structure)
_SOLVERS: tuple[Solver, ...] = get_args(Solver)

# Numbers per block of the sums of the search, and of the maps of rows, which need several copies of their block.
_BLOCK = 1 << 22
_MAP_BLOCK = 1 << 18

# Bound for a file: a sum of numbers this large does not overflow in float32.
_MOST_WEIGHT = 1e20

_Found = tuple[str, float, Tensor, Tensor, tuple[str, ...]]
"""Name of the solver; temperature, weight and bias; bounds of the search that the temperature hit."""


class StructuredScaling(Calibrator):
    r"""Structured vector or matrix scaling: regularised logistic regression on temperature-scaled log-probabilities.

    .. math::
        \hat p = \text{softmax}(W x + b), \qquad x = \log\big((1 - \epsilon)\, \text{softmax}(z / T) + \epsilon / C\big)

    with T the NLL optimum of temperature scaling and epsilon = 1 / (N + 1), which keeps x finite. A class that cannot
    occur (a logit of -inf, a probability of 0) keeps probability 0. W and b minimise

    .. math::
        \overline{-\log \hat p_y} + \lambda \frac{C}{N} \Big(\sum_k (W_{kk} - 1)^2 + \sum_k b_k^2\Big)
            + \lambda \frac{C (C - 1)}{N} \sum_{j \ne k} W_{jk}^2

    which is convex. The penalty shrinks W towards the identity and b towards 0. Its weight falls with the number of
    rows, so off-diagonal entries become large only with many rows.

    Args:
        kind: ``"matrix"``, or ``"vector"`` for W with zeros off the diagonal.
        focal: apply the focal calibration map to the result; its gamma and temperature minimise the NLL afterwards. A
            joint fit with W and b has a lower NLL on the rows of ``fit`` but not on test rows
            (``benchmarks/results/joint_focal_*.md``).
        penalty: lambda.
        solver: of T, W and b. ``"probmetrics"``: the library of the authors (the extra ``[probmetrics]``), in float32.
            ``"lbfgs"``: torch's L-BFGS, in float64, which also accepts ``sample_weight`` and probabilities of 0.
            ``"auto"``: probmetrics if it is installed and accepts the rows, else L-BFGS; ``solver_`` and the saved file
            name the solver. Their NLLs agree to 1e-3. Choose one solver if results must not depend on the installed
            packages.
        floor: in [0, 1): first, the probabilities p of a row become (1 - floor) p + floor / C, so that the true class
            has a probability above 0.
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Without it ``fit`` rejects logits that
            look like probabilities.

    ``fit`` sets ``temperature_`` (T), ``weight_`` ([C, C], or [C], the diagonal), ``bias_`` [C], ``epsilon_``,
    ``focal_gamma_`` and ``focal_temperature_`` (0 and 1 without ``focal``), ``best_value_`` (the mean NLL of the rows
    of ``fit``, without the penalty), ``n_changed_`` (rows of ``fit`` whose predicted class changed) and ``solver_``
    (``"lbfgs"``, or ``"probmetrics"`` and its version).

    Raises:
        TypeError, ValueError, IndexError: in ``fit``, which checks the arguments of the constructor too.

    Source: Berta, Holzmüller, Jordan & Bach, Structured matrix scaling for multi-class calibration, AISTATS 2026 (arXiv
    2511.03685), also for the penalty and the defaults.

    Example:
        >>> labels = torch.arange(300) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(300) >= 240)) % 3]  # correct in 240 of 300 rows
        >>> calibrator = fk.StructuredScaling(kind="vector").fit(logits, labels)
        >>> calibrator.predict_proba(logits[:1]).round(decimals=2)
        tensor([[0.8000, 0.1000, 0.1000]])
        >>> list(calibrator.as_module()(logits).shape)  # log-probabilities
        [300, 3]
    """

    method = "structured"

    temperature_: float
    weight_: np.ndarray[Any, np.dtype[np.float64]]
    bias_: np.ndarray[Any, np.dtype[np.float64]]
    epsilon_: float
    focal_gamma_: float
    focal_temperature_: float
    best_value_: float
    n_changed_: int
    solver_: str

    _border: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        kind: Structure = "matrix",
        focal: bool = False,
        penalty: float = 1.0,
        solver: Solver = "auto",
        floor: float = 0.0,
        input_kind: InputKind = LOGITS,
    ) -> None:
        self.kind = kind
        self.focal = focal
        self.penalty = penalty
        self.solver = solver
        self.floor = floor
        self.input_kind = input_kind

    # -- private ------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_option("kind", _STRUCTURES)
        self._check_option("solver", _SOLVERS)
        name = type(self).__name__
        if isinstance(self.penalty, bool | Tensor):
            raise TypeError(f"{name}: penalty must be a number, got {type(self.penalty).__name__}")
        if not 0 <= number(name, "penalty", self.penalty) < float("inf"):
            raise ValueError(f"{name}: penalty must be at least 0 and finite, got {self.penalty}")
        flag(name, "focal", self.focal)

    def _module(self, fused: bool = True, *, one_logit: bool = False) -> StructuredLogProbs:
        return StructuredLogProbs(
            self.temperature_,
            self.epsilon_,
            torch.from_numpy(self.weight_).clone(),
            torch.from_numpy(self.bias_).clone(),
            (self.focal_gamma_, self.focal_temperature_),
            self.input_kind,
            one_logit=one_logit,
            fused=fused,
        )

    def _fit(self, rows: FitData) -> dict[str, Any]:
        input, target, weight = rows.input, rows.target, rows.weight
        check_finite_nll(type(self).__name__, input, target, self.input_kind)
        n_rows = float(len(input) if weight is None else weight.sum())
        share = torch.full_like(target, 1 / n_rows, dtype=torch.float64) if weight is None else weight / n_rows
        found = None if self.solver == "lbfgs" else self._by_probmetrics(rows)
        solver, temperature, module_weight, bias, border = found or self._by_lbfgs(rows, share, n_rows)
        fitted: dict[str, Any] = {"solver_": solver, "temperature_": temperature, "epsilon_": 1 / (n_rows + 1)}
        fitted["_border"] = border
        fitted |= {"focal_gamma_": 0.0, "focal_temperature_": 1.0}
        module = StructuredLogProbs(temperature, fitted["epsilon_"], module_weight, bias, (0.0, 1.0), self.input_kind)
        scores = _mapped(module.scores, input)
        if self.focal:
            focal = minimize_focal(scores, target, "logits", "nll", weight)
            fitted["focal_gamma_"], fitted["focal_temperature_"] = focal.gamma, focal.temperature
            module.focal = (focal.gamma, focal.temperature)
        log_probs = _mapped(functools.partial(module.finished, log=True), scores, out=scores)
        return {
            **fitted,
            "weight_": module.weight.cpu().numpy(),
            "bias_": module.bias.cpu().numpy(),
            "best_value_": -float(log_probs.gather(1, target.unsqueeze(1)).squeeze(1) @ share),
            "n_changed_": int((log_probs.argmax(-1) != input.argmax(-1)).sum()),
        }

    def _by_probmetrics(self, rows: FitData) -> _Found | None:
        """The fit by probmetrics; None if ``solver="auto"`` must use L-BFGS."""
        name = type(self).__name__
        probs = probabilities(rows.input, self.input_kind)
        zero = probs == 0
        try:
            if rows.weight is not None:
                raise ValueError(f"{name}: solver 'probmetrics' takes no sample_weight; 'auto' and 'lbfgs' do")
            if bool(zero.any()):
                raise ValueError(
                    f"{name}: solver 'probmetrics' takes probabilities above 0, got 0 at (row, class) "
                    f"{tuple(zero.nonzero()[0].tolist())}; 'auto' and 'lbfgs' take them"
                )
            try:
                found = *fit_structured(self.kind, probs, rows.target, float(self.penalty)), ()
            except ImportError as error:
                raise ImportError(
                    f"{name}: solver 'probmetrics' needs probmetrics; pip install probmetrics numba ({error})"
                ) from error
            if not all(bool(torch.isfinite(values).all()) for values in found[2:4]):
                raise ValueError(f"{name}: solver 'probmetrics' has found no finite weights on these rows; try 'lbfgs'")
        except (ImportError, ValueError):
            if self.solver == "auto":
                return None
            raise
        return found

    def _by_lbfgs(self, rows: FitData, share: Tensor, n_rows: float) -> _Found:
        """The fit by L-BFGS. ``share`` [N] float64 sums to 1; the penalty treats the rows as ``n_rows`` rows."""
        input, target, weight = rows.input, rows.target, rows.weight
        n_classes = input.shape[1]
        first = nll_temperature(input, target, self.input_kind, weight)
        temperature = first.temperature
        shape = (n_classes,) if self.kind == "vector" else (n_classes, n_classes)
        ones = torch.ones(n_classes, dtype=torch.float64, device=input.device)
        identity = ones if self.kind == "vector" else torch.diag(ones)
        module = StructuredLogProbs(
            temperature, 1 / (n_rows + 1), identity, torch.zeros_like(ones), (0.0, 1.0), self.input_kind
        )
        features = _mapped(module.features, input)
        strength = float(self.penalty) * n_classes / n_rows
        penalties = torch.full(shape, strength * (n_classes - 1), dtype=torch.float64, device=input.device)
        if self.kind == "vector":
            penalties.fill_(strength)
        else:
            penalties.fill_diagonal_(strength)
        impossible = cannot_occur(input, self.input_kind)
        weights = _regularised(features, impossible, target, share, identity, penalties, strength)
        return "lbfgs", temperature, *weights, first.at_border

    def _fit_warnings(self, rows: FitData) -> list[str]:
        remedy = "a larger penalty, or TemperatureScaling"
        worse = worse_than_uncalibrated(rows, self._apply, by=("nll",), input_kind=self.input_kind, remedy=remedy)
        limits = no_error_warnings(rows) or [f"{words} ({bound_remedy(words)})" for words in self._border]
        return [*few_by_weight(rows), *super()._fit_warnings(rows), *limits, *worse]

    def _warnings_of(self, class_counts: Tensor) -> list[str]:
        return unseen_classes(class_counts, self.classes_, "TemperatureScaling")

    def _invalid_rows_are(self) -> Literal["nan"]:
        return "nan"

    def _made(self, device: torch.device) -> dict[torch.dtype, RowMap]:
        return in_each_dtype(self._module().to(device))

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        module: RowMap = self._kept(input.device)[compute_dtype(input.dtype)]
        return module.mapped(input, log=log)

    def _fitted_to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        names = ("temperature_", "epsilon_", "focal_gamma_", "focal_temperature_")
        numbers = {name[:-1]: getattr(self, name) for name in names}
        top = {**numbers, "weight": self.weight_.tolist(), "bias": self.bias_.tolist()}
        return top, {"solver": self.solver_, "best_value": self.best_value_, "n_changed": self.n_changed_}

    def _fitted_from_json(self, document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
        n_classes = as_count("n_classes", fit["n_classes"])
        weight, bias = (as_array(name, document[name]) for name in ("weight", "bias"))
        shape = (n_classes,) if self.kind == "vector" else (n_classes, n_classes)
        if weight.shape != shape or bias.shape != (n_classes,):
            raise ValueError(
                f"expected weight {list(shape)} and bias {[n_classes]}, found {list(weight.shape)} and "
                f"{list(bias.shape)}"
            )
        # The comparison is false for NaN, so NaN raises too.
        if not np.abs([*weight.flat, *bias]).max() <= _MOST_WEIGHT:
            raise ValueError(f"expected finite weights and biases of at most {_MOST_WEIGHT:g}, found others")
        names = ("temperature", "epsilon", "focal_gamma", "focal_temperature")
        numbers = {f"{name}_": as_number(name, document[name]) for name in names}
        as_map(0.0, numbers["temperature_"])
        as_map(numbers["focal_gamma_"], numbers["focal_temperature_"], names[2:])
        if not LEAST_EPSILON <= numbers["epsilon_"] < 1:
            raise ValueError(f"expected an epsilon between {LEAST_EPSILON:g} and 1, found {numbers['epsilon_']}")
        value = as_number("best_value", fit["best_value"])
        changed = as_count("n_changed", fit["n_changed"], least=0)
        done = {"best_value_": value, "n_changed_": changed, "solver_": str(fit.get("solver", "lbfgs"))}
        return {**numbers, "weight_": weight, "bias_": bias, **done}


def _mapped(function: Callable[[Tensor], Tensor], input: Tensor, out: Tensor | None = None) -> Tensor:
    """``function`` of the rows [N, C] in float64, block by block; ``out`` may be the input."""
    result = torch.empty_like(input, dtype=torch.float64) if out is None else out
    rows = max(1, _MAP_BLOCK // input.shape[1])
    for block, found in zip(input.split(rows), result.split(rows), strict=True):
        found.copy_(function(block.to(torch.float64)))
    return result


def _regularised(
    features: Tensor,
    impossible: Tensor,
    target: Tensor,
    share: Tensor,
    identity: Tensor,
    penalties: Tensor,
    of_bias: float,
) -> tuple[Tensor, Tensor]:
    """Weight and bias with the smallest mean NLL plus penalties * (weight - identity)^2 + of_bias * bias^2.

    Args:
        features: [N, C] float64.
        impossible: [N, C] bool, the classes that cannot occur.
        target: [N] int64.
        share: [N] float64, weights of the mean, which sum to 1.
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
        for x, mask, labels, part in zip(
            *(each.split(rows) for each in (features, impossible, target, share)), strict=True
        ):
            scores = (x * weight if vector else x @ weight.T).add_(bias).masked_fill_(mask, -torch.inf)
            log_probs = scores.log_softmax(-1)
            del scores  # one block less in memory
            value = value - log_probs.gather(1, labels.unsqueeze(1)).squeeze(1) @ part
            # Softmax minus one-hot; all gradients are weighted sums of it.
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
    """L-BFGS until the gradient is below 1e-6 of the largest gradient of a row."""
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=500,
        tolerance_grad=1e-7,
        tolerance_change=1e-11,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
