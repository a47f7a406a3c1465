"""Spline scaling and robust temperature scaling as modules, to append to a network."""

import torch
from torch import Tensor

from focalkern._devices import cpu_by_default
from focalkern._types import InputKind
from focalkern.calibrators._inputs import as_scores
from focalkern.calibrators._modules import RowMap, exports_to_onnx
from focalkern.calibrators._spline_curve import NaturalSpline, evaluate
from focalkern.calibrators._spline_features import features, floored
from focalkern.ops.spline_map import map_by_pieces

__all__ = ["FlooredLogProbs", "MapArguments", "SplineLogProbs"]

MapArguments = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool, bool, bool]
"""The arguments of :func:`map_by_pieces` between the input and ``log``."""


class FlooredLogProbs(RowMap):
    r"""Logits (or probabilities) to the log-probabilities of robust temperature scaling.

    .. math:: \hat p = (1 - e)\, \text{softmax}(z / T) + e / C

    It computes in float64.

    Args:
        temperature: T > 0.
        floor: e, between 0 and 1.
        input_kind: ``"logits"`` or ``"probs"``, the kind of the input of ``forward``.
        masks: whether a logit of -inf means probability 0, not e / C.
        keep_order: correct the rounding of nearly equal classes so that their order is kept.
        one_logit: ``forward`` takes one logit (or probability of class 1) per sample and returns the calibrated logit.
        fused: the compiled operator; False computes in torch's own operators, for exporters that support only these.
            In these, rounding may exchange nearly equal classes.

    Source: Guo et al. 2017 (arXiv 1706.04599); the floor of Berta et al., AISTATS 2026 (arXiv 2511.03685).
    """

    def __init__(
        self,
        temperature: float,
        floor: float,
        input_kind: InputKind = "logits",
        *,
        masks: bool = True,
        keep_order: bool = True,
        one_logit: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.temperature, self.floor = float(temperature), float(floor)
        self.input_kind, self.masks, self.keep_order, self.one_logit = input_kind, masks, keep_order, one_logit

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.temperature, self.floor], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.temperature, self.floor = state.tolist()

    def mapped(self, input: Tensor, *, log: bool) -> Tensor:
        """Log-probabilities [..., C], or probabilities, by the operator of the map."""
        if not self.fused or torch.compiler.is_compiling() or exports_to_onnx():
            log_probs = self._plain(input)
            return log_probs if log else log_probs.exp()
        return map_by_pieces(input, *self.arguments(), log=log)

    def arguments(self) -> MapArguments:
        """The arguments of the map between the input and ``log``."""
        slope, knots, coefficients, weight, bias = self._curve()
        parameters = torch.tensor([1 + slope, self.temperature, self.floor], dtype=torch.float64, device="cpu")
        is_probs = self.input_kind == "probs"
        keep_zeros = self.masks and not is_probs
        return parameters, knots, coefficients, weight, bias, is_probs, keep_zeros, self.keep_order

    def _curve(self) -> tuple[float, Tensor, Tensor, Tensor | None, Tensor | None]:
        """a, knots, coefficients, weight and bias; without a curve, f = 0."""
        wide = torch.float64
        knots, coefficients = (torch.arange(2, dtype=wide, device="cpu"), torch.zeros(3, 4, dtype=wide, device="cpu"))
        return 0.0, knots, coefficients, None, None

    def _plain(self, input: Tensor) -> Tensor:
        """The log-probabilities in torch's own operators, which exporters support."""
        scores = self.scores(input)
        if self.masks and self.input_kind == "logits":
            scores = scores.masked_fill(input == -torch.inf, -torch.inf)
        return scores.log_softmax(-1).to(input.dtype)

    def scores(self, input: Tensor) -> Tensor:
        """Log-probabilities up to a constant of the row, [..., C] float64."""
        return floored(as_scores(input, self.input_kind), self.temperature, self.floor).log()

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, floor={self.floor}, input_kind={self.input_kind!r}"


class SplineLogProbs(FlooredLogProbs):
    r"""Logits (or probabilities) to the log-probabilities of spline scaling, with the numbers of a fitted one.

    .. math::
        \hat p = \text{softmax}\big((1 + a) x + f(u) + W x + b\big), \qquad
        x = \log\big((1 - e)\, \text{softmax}(z / T) + e / C\big), \quad u = \text{logit}(\exp x)

    with a natural cubic spline f. It computes in float64; knots, values, weight and bias are float64 buffers, which
    ``module.half()`` does not round.

    Args:
        temperature: T > 0.
        floor: e, between 0 and 1.
        slope: a.
        knots, values: [m], the knots of the spline and its values at them.
        weight: v [C], the diagonal of W, or W [C, C]; None is 0.
        bias: b [C]; None is 0.
        input_kind, masks, one_logit, fused: as :class:`FlooredLogProbs`.
        keep_order: correct the rounding of nearly equal classes so that their order is kept; the curve must keep it.

    Source: a generalised additive model (Hastie & Tibshirani 1990) on the features of structured scaling (Berta et al.,
    AISTATS 2026, arXiv 2511.03685).
    """

    knots: Tensor
    values: Tensor
    weight: Tensor | None
    bias: Tensor | None
    _origins: Tensor
    _coefficients: Tensor
    _of_fit = ("knots", "values")

    def __init__(
        self,
        temperature: float,
        floor: float,
        slope: float,
        knots: Tensor,
        values: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        input_kind: InputKind = "logits",
        *,
        masks: bool = True,
        keep_order: bool = False,
        one_logit: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__(
            temperature, floor, input_kind, masks=masks, keep_order=keep_order, one_logit=one_logit, fused=fused
        )
        self.slope = float(slope)
        self.weight = self.bias = None
        for name, value in (("knots", knots), ("values", values), ("weight", weight), ("bias", bias)):
            if value is not None:  # torch.export does not support a buffer that is None
                vars(self).pop(name, None)
                self.register_buffer(name, value)
        self._shaped()

    @cpu_by_default()
    def _shaped(self) -> None:
        spline = NaturalSpline(self.knots.cpu())
        for name, value in (
            ("_origins", spline.origins),
            ("_coefficients", spline.coefficients(self.values.cpu())),
        ):
            self.register_buffer(name, value.to(self.knots.device), persistent=False)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.temperature, self.floor, self.slope], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.temperature, self.floor, self.slope = state.tolist()
        self._shaped()

    def _curve(self) -> tuple[float, Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.slope, self.knots, self._coefficients, self.weight, self.bias

    def scores(self, input: Tensor) -> Tensor:
        """(1 + a) x + f(u) + W x + b [..., C] float64."""
        x, u = features(as_scores(input, self.input_kind), self.temperature, self.floor)
        # ONNX has no searchsorted.
        piece = (u.unsqueeze(-1) > self.knots).sum(-1) if exports_to_onnx() else torch.bucketize(u, self.knots)
        scores = (1 + self.slope) * x + evaluate(self._coefficients, piece, u - self._origins[piece])
        if self.weight is not None:
            scores = scores + (x * self.weight if self.weight.dim() == 1 else x @ self.weight.T)
        return scores if self.bias is None else scores + self.bias

    def extra_repr(self) -> str:
        weight = None if self.weight is None else list(self.weight.shape)
        return f"{super().extra_repr()}, slope={self.slope}, knots={len(self.knots)}, weight={weight}"
