"""Sums of the NLL of the focal calibration map of many networks on the kernels of the stable module."""

import torch
from torch import Tensor

from focalkern.fallback._checks import check_floating

__all__ = ["map_nll_sums"]

_OP = "map_nll_sums"
_SUMS = 7


def map_nll_sums(
    input: Tensor, target: Tensor, share: Tensor, gammas: Tensor | None, betas: Tensor, is_probs: bool
) -> Tensor:
    """As :func:`focalkern.fallback.map_nll_sums`, on the CPU."""
    check_floating(_OP, "input", input)
    if not input.is_cpu:
        raise ValueError(f"{_OP}: input must be on the CPU, got {input.device}")
    if input.dim() != 3 or input.shape[2] < 2:
        raise ValueError(f"{_OP}: input must be [B, N, C] with C >= 2, got {list(input.shape)}")
    n_networks, n_rows, n_classes = input.shape
    for name, tensor, dtype in (("target", target, torch.int64), ("share", share, torch.float64)):
        if not tensor.is_cpu or tensor.dtype != dtype or tensor.shape != (n_networks, n_rows):
            words, found = str(dtype).removeprefix("torch."), f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{_OP}: {name} must be {words} [B, N] = [{n_networks}, {n_rows}], got {found}")
    for tensor in (betas, betas if gammas is None else gammas):
        if not tensor.is_cpu or tensor.dtype != torch.float64 or tensor.shape != (n_networks,):
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{_OP}: gammas and betas must be float64 [B] = [{n_networks}], got {found}")
    if target.numel() and not 0 <= int(target.min()) <= int(target.max()) < n_classes:
        network, row = ((target < 0) | (target >= n_classes)).nonzero()[0].tolist()
        label = int(target[network, row])
        raise IndexError(
            f"{_OP}: target must be from 0 to {n_classes - 1}, got {label} at row {row} of network {network}"
        )
    total = share.new_empty(n_networks, _SUMS)
    rows = (one.contiguous() for one in (input, target, share))
    parameters = (None if one is None else one.contiguous() for one in (gammas, betas))
    torch.ops.focalkern_stable.map_nll_sums_out(*rows, *parameters, is_probs, total)
    return total
