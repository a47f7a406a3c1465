"""The focal calibration map in few of torch's own operators, which every exporter supports.

The definition in :mod:`focalkern.reference` masks impossible classes for its gradient and computes phi by a series; an
exporter would write about 160 nodes of it.
"""

import torch
from torch import Tensor

from focalkern.calibrators._inputs import widened
from focalkern.reference._calibration import in_order

__all__ = ["plain_binary_map", "plain_map"]


def plain_map(input: Tensor, gamma: float | Tensor, temperature: float | Tensor, input_kind: str) -> Tensor:
    """Log-probabilities of the focal calibration map of ``input`` [..., C], C >= 2.

    The graph for ONNX has 26 nodes, with gamma = 0 four. gamma and temperature are numbers, or tensors broadcastable to
    [...]. ONNX has no cumulative maximum, so its graph does not correct the rounding of nearly equal classes.
    """
    wide = widened(input)
    z = wide.log() if input_kind == "probs" else wide
    shifted = z - z.amax(-1, keepdim=True)  # z / temperature could overflow, and lose the digits of the differences
    if isinstance(gamma, Tensor):
        gamma = gamma.to(z).unsqueeze(-1)
    elif gamma == 0:
        return (shifted / temperature).log_softmax(-1).to(input.dtype)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(z).unsqueeze(-1)

    if z.shape[-1] < 2:
        raise ValueError(
            "focal_calibration_map: input must have at least two classes in its last dimension, got shape "
            f"{list(input.shape)}"
        )
    log_q = (shifted / temperature).log_softmax(-1)
    log_u, focal = _terms(log_q.exp(), gamma)
    # 1 - q cancels as q -> 1. For the one class with q > 0.6, log_u is the log-sum-exp of the others: of any of them,
    # its value before a softmax minus its value after. Not torch.logsumexp: onnxruntime computes it without a
    # shift if the first value is -inf, some other runtimes always.
    is_likely = log_q > -0.5
    others = log_q.masked_fill(is_likely, -1e30)  # not -inf, because it may be the only possible class
    log_u_likely = others.amax(-1, keepdim=True) - others.log_softmax(-1).amax(-1, keepdim=True)
    log_u = torch.where(is_likely, log_u_likely, log_u)
    log_p = (log_q - gamma * log_u - focal).log_softmax(-1)
    return in_order(log_p, z).to(input.dtype)


def plain_binary_map(logits: Tensor, gamma: float | Tensor, temperature: float | Tensor) -> Tensor:
    """Calibrated logits of one logit per sample: the difference of the two classes of :func:`plain_map`."""
    s = widened(logits)
    gamma, temperature = (x.to(s) if isinstance(x, Tensor) else x for x in (gamma, temperature))
    s = s / temperature
    focal, focal_of_other = (_terms(x.sigmoid(), gamma)[1] for x in (s, -s))
    return ((1 + gamma) * s - focal + focal_of_other).to(logits.dtype)


def _terms(q: Tensor, gamma: float | Tensor) -> tuple[Tensor, Tensor]:
    """log(1 - q) and log(1 + gamma phi) of probabilities.

    phi = -q log(q) / (1 - q) does not cancel for q near 1: q is a floating-point number, 1 - q is exact there, and phi
    changes little with the rounding of q.
    """
    # ONNX keeps numbers in float32: with bounds that it rounds to 0 and 1, a graph in float64 would compute 0 / 0.
    half_step = q.new_full((), torch.finfo(q.dtype).eps / 2)
    q = torch.minimum(q.clamp(min=torch.finfo(torch.float32).tiny), 1 - half_step)
    u = 1 - q
    return u.log(), (1 - gamma * (q * q.log() / u)).log()
