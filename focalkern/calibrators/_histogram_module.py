"""The module of histogram binning."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from focalkern.calibrators._inputs import cannot_occur, renormalized, widened
from focalkern.calibrators._modules import CalibratedLogProbs, FlooredInput, RowMap

__all__ = ["HistogramLogProbs", "bin_of", "bin_top_class", "cannot_occur_after", "scaled"]

# Relative error, in units of eps, of a confidence from a logarithm and an exponential. Less than half of the gap that
# separates the confidences of two bins of equal mass.
_ROUNDING = 4


class HistogramLogProbs(RowMap):
    """Logits (or probabilities) to the log-probabilities of histogram binning on the top class.

    Edges and values are float64 buffers; ``module.half()`` does not round them.

    Args:
        scaling: a module applied before the binning, from the input to log-probabilities [..., C].
        edges: [M - 1], the inner edges of the M bins (lo, hi], ascending.
        values: [M], the calibrated confidence of each bin.
        one_logit: ``forward`` takes one logit (or probability of class 1) per sample and returns the calibrated logit.

    Source: Zadrozny & Elkan 2001; Guo et al. 2017 (arXiv 1706.04599), section 4.1; on the top class as Wang et al.,
    NeurIPS 2021.
    """

    edges: Tensor
    values: Tensor

    def __init__(
        self,
        scaling: CalibratedLogProbs | FlooredInput,
        edges: Sequence[float],
        values: Sequence[float],
        *,
        one_logit: bool = False,
    ) -> None:
        super().__init__()
        self.scaling = scaling
        self.input_kind = scaling.input_kind
        self.one_logit = one_logit
        self.register_buffer("edges", torch.tensor(edges, dtype=torch.float64))
        self.register_buffer("values", torch.tensor(values, dtype=torch.float64))

    def mapped(self, input: Tensor, *, log: bool) -> Tensor:
        """Log-probabilities [..., C], or probabilities, of ``input`` [..., C], in its dtype."""
        log_probs = scaled(self.scaling, input)
        impossible = cannot_occur_after(self.scaling, input)
        top = input.argmax(-1, keepdim=True)
        return bin_top_class(log_probs, top, impossible, self.edges, self.values, log=log).to(input.dtype)


def scaled(scaling: CalibratedLogProbs | FlooredInput, input: Tensor) -> Tensor:
    """Log-probabilities after the scaling, in float32 for half precision."""
    log_probs: Tensor = scaling(renormalized(input) if scaling.input_kind == "probs" else widened(input))
    return log_probs


def cannot_occur_after(scaling: CalibratedLogProbs | FlooredInput, input: Tensor) -> Tensor:
    """[..., C] bool: the classes of ``input`` that cannot occur after the scaling: none after a floor."""
    if isinstance(scaling, FlooredInput):
        return torch.zeros_like(input, dtype=torch.bool)
    return cannot_occur(input, scaling.input_kind)


def bin_of(confidence: Tensor, edges: Tensor) -> Tensor:
    """[..., 1] int64: the bin (lo, hi] of confidences [..., 1]; on an edge, up to the rounding of a softmax, it is the
    lower one."""
    rounded = 1 + _ROUNDING * torch.finfo(confidence.dtype).eps
    # The number of edges below. A sum, because ONNX has no searchsorted.
    return (confidence > edges.to(confidence.dtype) * rounded).sum(-1, keepdim=True)


def bin_top_class(
    log_probs: Tensor, top: Tensor, impossible: Tensor, edges: Tensor, values: Tensor, *, log: bool
) -> Tensor:
    """Replace the probability of the top class by the value of its bin and rescale the others to the rest.

    Args:
        log_probs: [..., C], normalised, float32 or float64.
        top: [..., 1] int64, the class whose probability is replaced.
        impossible: [..., C] bool, the classes that cannot occur.
        edges: [M - 1] float64; bin (lo, hi], compared in the dtype of ``log_probs``.
        values: [M] float64 in [0, 1].
        log: return log-probabilities instead of probabilities.

    Returns:
        (Log-)probabilities [..., C] in the dtype of ``log_probs``; 0 (-inf) for classes that cannot occur. If all other
        possible classes have probability 0, they share the rest equally.
    """
    dtype = log_probs.dtype
    confidence = log_probs.gather(-1, top).exp()
    index = bin_of(confidence, edges)
    value = values.to(dtype)[index]

    is_top = torch.arange(log_probs.shape[-1], device=log_probs.device) == top
    apart = is_top | impossible
    alone = apart.all(-1, keepdim=True)
    value = torch.where(alone, 1.0, value)
    # In log space, so that probabilities that would underflow keep their ratios. Finite, so that classes of probability
    # 0 share the rest equally; also in ONNX, which keeps the bound in float32.
    others = log_probs.clamp(min=torch.finfo(torch.float32).min).masked_fill(apart, -math.inf)
    shares = others - others.amax(-1, keepdim=True)  # log_softmax takes longer for few classes
    weights = shares.exp()
    total = weights.sum(-1, keepdim=True)
    if log:
        shares = (shares - total.log()).masked_fill(alone, -math.inf)
        result = torch.where(is_top, value.log(), shares + (-value).log1p())
    else:
        shares = (weights * ((1 - value) / total)).masked_fill(alone, 0.0)
        result = torch.where(is_top, value, shares)
    # The comparison above put NaN rows into the first bin; they become NaN again.
    return torch.where(confidence.isnan(), torch.nan, result)
