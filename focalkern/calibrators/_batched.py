"""Temperature scaling and focal temperature scaling of many networks in one call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._checks import one_of
from focalkern._diagnostics import refuse_probs
from focalkern._types import INPUT_KINDS, InputKind
from focalkern.calibrators._fit_data import as_rows
from focalkern.calibrators._focal_temperature import FocalTemperatureScaling
from focalkern.calibrators._newton_search import check_finite_nll, nll_focal_scalings, nll_temperatures
from focalkern.calibrators._parameters import LOGITS, is_assumed
from focalkern.calibrators._search import SearchResult
from focalkern.calibrators._temperature import TemperatureScaling
from focalkern.calibrators._warnings import call_with_floor

__all__ = ["fit_focal_temperatures", "fit_temperatures"]


def fit_temperatures(logits: Any, labels: Any, weight: Any = None, *, input_kind: InputKind = LOGITS) -> Tensor:
    r"""Fits the temperature of every network of a batch by its mean NLL.

    .. math:: T_b = \arg\min_T \; -\overline{\log \mathrm{softmax}(z_b / T)_{y}}

    The result is that of ``TemperatureScaling().fit`` for each network, bit for bit, without its warnings. On the CPU a
    step reads the logits of a network once, in their own dtype, and accumulates in float64.

    Args:
        logits: [B, N, C] floating point, tensor or array; probabilities with ``input_kind="probs"``.
        labels: [B, N] integers, columns of ``logits``.
        weight: [B, N]: a row with weight w counts w times, and weight 0 leaves it out. None is 1 for every row.
        input_kind: ``"logits"`` or ``"probs"``. Without it, logits that look like probabilities are an error.

    Returns:
        [B] float64, on the device of ``logits``. For a network without an optimum this is the bound at which
        :class:`TemperatureScaling` stops.

    Raises:
        TypeError: logits that are not floating point.
        ValueError: shapes that do not fit; NaN or +inf; a target with probability 0; a network without rows; logits
            that look like probabilities, unless ``input_kind`` was given. The error names the network.
        IndexError: a label outside [0, C).

    Source: Guo et al., On Calibration of Modern Neural Networks, ICML 2017 (arXiv 1706.04599), section 4.2.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]]).repeat(2, 10, 1)
        >>> labels = torch.tensor([[0] * 8 + [1] * 2, [0] * 6 + [1] * 4])  # right in 8 and in 6 of 10 rows
        >>> fk.fit_temperatures(logits, labels).round(decimals=4)
        tensor([2.8854, 9.8652], dtype=torch.float64)
    """
    found, device = _fitted(
        "fit_temperatures", nll_temperatures, TemperatureScaling, logits, labels, weight, input_kind
    )
    return torch.tensor([one.temperature for one in found], dtype=torch.float64, device=device)


def fit_focal_temperatures(
    logits: Any, labels: Any, weight: Any = None, *, input_kind: InputKind = LOGITS
) -> tuple[Tensor, Tensor]:
    r"""Fits gamma and temperature of every network of a batch by the mean NLL of the focal calibration map.

    .. math:: \gamma_b, T_b = \arg\min_{\gamma, T} \; -\overline{\log p_y(z; \gamma, T)}

    with p the :func:`focalkern.focal_calibration_map`. The result is that of ``FocalTemperatureScaling().fit`` for each
    network, bit for bit, without its warnings. On the CPU a step reads the logits of every network once and computes
    the loss with its first and second derivatives in gamma and 1/T. On other devices plain torch fits one network after
    the other.

    Args:
        logits, labels, weight, input_kind: as :func:`fit_temperatures`.

    Returns:
        (gamma, temperature), [B] float64 each, on the device of ``logits``. If an optimum lies beyond a bound of the
        search, the result is the bound.

    Raises:
        TypeError, ValueError, IndexError: as :func:`fit_temperatures`.

    Source: Komisarenko & Kull, Improving Calibration by Relating Focal Loss, Temperature Scaling, and Properness, ECAI
    2024 (arXiv 2408.11598), section 4.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> labels = torch.randint(3, (2, 400), generator=generator)
        >>> logits = 2 * torch.randn(2, 400, 3, generator=generator) + 3 * torch.eye(3)[labels]
        >>> gamma, temperature = fk.fit_focal_temperatures(logits, labels)
        >>> one = fk.FocalTemperatureScaling().fit(logits[1], labels[1])
        >>> (one.gamma_, one.temperature_) == (gamma[1].item(), temperature[1].item())
        True
    """
    found, device = _fitted(
        "fit_focal_temperatures", nll_focal_scalings, FocalTemperatureScaling, logits, labels, weight, input_kind
    )
    pairs = torch.tensor([(one.gamma, one.temperature) for one in found], dtype=torch.float64, device=device)
    gamma, temperature = pairs.reshape(-1, 2).unbind(1)
    return gamma, temperature


def _fitted(
    op: str,
    search: Callable[..., list[SearchResult]],
    single: type[TemperatureScaling | FocalTemperatureScaling],
    logits: Any,
    labels: Any,
    weight: Any,
    input_kind: InputKind,
) -> tuple[list[SearchResult], torch.device]:
    """The results for every network, and the device of the logits; ``single`` fits one network."""
    one_of(op, "input_kind", input_kind, INPUT_KINDS)
    floor = call_with_floor(single(input_kind=input_kind))
    logits, labels = as_tensor(logits, f"{op}: logits").detach(), as_tensor(labels, f"{op}: labels")
    weights = None if weight is None else as_tensor(weight, f"{op}: weight")
    if logits.dim() != 3:
        remedy = "; for one network pass logits[None] and labels[None]" if logits.dim() == 2 else ""
        raise ValueError(f"{op}: logits must be [B, N, C], got shape {list(logits.shape)}{remedy}")
    for name, given in (("labels", labels), ("weight", weights)):
        if given is not None and given.shape != logits.shape[:2]:
            raise ValueError(f"{op}: {name} must be [B, N] = {list(logits.shape[:2])}, got {list(given.shape)}")
    networks = []
    for network, (input, target) in enumerate(zip(logits, labels, strict=True)):
        name = f"{op}, network {network}"
        of_network = None if weights is None else weights[network]
        rows = as_rows(name, input, target, of_network, None, input_kind=input_kind, one_logit=False)
        if is_assumed(input_kind):
            refuse_probs(name, rows.input)
        check_finite_nll(name, rows.input, rows.target, input_kind, floor=f"{floor}.fit(logits, labels)")
        networks.append(rows)
    if not networks:
        return [], logits.device
    if any(len(rows.input) != logits.shape[1] for rows in networks):  # rows of weight 0 are left out
        found = [
            search(rows.input[None], rows.target[None], input_kind, None if rows.weight is None else rows.weight[None])
            for rows in networks
        ]
        return [one for (one,) in found], logits.device
    together = None
    if any(rows.weight is not None for rows in networks):
        once = torch.ones(logits.shape[1], dtype=torch.float64, device=logits.device)
        together = torch.stack([once if rows.weight is None else rows.weight for rows in networks])
    inputs = logits if networks[0].input.dtype == logits.dtype else torch.stack([rows.input for rows in networks])
    return search(inputs, torch.stack([rows.target for rows in networks]), input_kind, together), logits.device
