"""The temperatures of many networks in one call."""

from typing import Any

import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._checks import one_of
from focalkern._types import InputKind
from focalkern.calibrators._fit_data import as_rows
from focalkern.calibrators._newton_search import check_finite_nll, nll_temperature

__all__ = ["fit_temperatures"]

_OP = "fit_temperatures"


def fit_temperatures(logits: Any, labels: Any, weight: Any = None, *, input_kind: InputKind = "logits") -> Tensor:
    r"""The temperature of every network of a batch, by its mean NLL.

    .. math:: T_b = \arg\min_T \; -\overline{\log \mathrm{softmax}(z_b / T)_{y}}

    ``TemperatureScaling().fit`` of each network, without its warnings: the same bits. On the CPU a step reads the
    logits of a network once, in their own dtype, and accumulates in float64.

    Args:
        logits: [B, N, C] floating point, tensor or array; probabilities with ``input_kind="probs"``.
        labels: [B, N] integers, columns of ``logits``.
        weight: [B, N], how often a row counts; a weight of 0 leaves it out. None is once.
        input_kind: ``"logits"`` or ``"probs"``.

    Returns:
        [B] float64, on the device of ``logits``. A network without an optimum has the bound that
        :class:`TemperatureScaling` stops at.

    Raises:
        TypeError: logits that are not floating point.
        ValueError: shapes that do not fit; NaN or +inf; a target with probability 0; a network without rows. The error
            names the network.
        IndexError: a label outside [0, C).

    Source: Guo et al., On Calibration of Modern Neural Networks, ICML 2017 (arXiv 1706.04599), section 4.2.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]]).repeat(2, 10, 1)
        >>> labels = torch.tensor([[0] * 8 + [1] * 2, [0] * 6 + [1] * 4])  # right in 8 and in 6 of 10 rows
        >>> fk.fit_temperatures(logits, labels).round(decimals=4)
        tensor([2.8854, 9.8652], dtype=torch.float64)
    """
    one_of(_OP, "input_kind", input_kind, ("logits", "probs"))
    logits, labels = as_tensor(logits, f"{_OP}: logits"), as_tensor(labels, f"{_OP}: labels")
    weights = None if weight is None else as_tensor(weight, f"{_OP}: weight")
    if logits.dim() != 3:
        raise ValueError(f"{_OP}: logits must be [B, N, C], got shape {list(logits.shape)}")
    for name, given in (("labels", labels), ("weight", weights)):
        if given is not None and given.shape != logits.shape[:2]:
            raise ValueError(f"{_OP}: {name} must be [B, N] = {list(logits.shape[:2])}, got {list(given.shape)}")
    found = []
    for network, (input, target) in enumerate(zip(logits.detach(), labels, strict=True)):
        name = f"{_OP}, network {network}"
        of_network = None if weights is None else weights[network]
        rows = as_rows(name, input, target, of_network, None, input_kind=input_kind, one_logit=False)
        check_finite_nll(name, rows.input, rows.target, input_kind)
        found.append(nll_temperature(rows.input, rows.target, input_kind, rows.weight).temperature)
    return torch.tensor(found, dtype=torch.float64, device=logits.device)
