"""The NLL of many networks and the Brier score of one, with their derivatives in gamma and T."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from focalkern._types import InputKind, Proper
from focalkern.calibrators._inputs import cannot_occur
from focalkern.calibrators._search import every_row_grid
from focalkern.calibrators._warnings import floor_remedy
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.ops.map_nll_sums import map_nll_sums_for

__all__ = ["BrierOfRows", "NllOfNetworks", "check_finite_nll", "coarse_table"]

# Numbers per block that is converted to float64.
_BLOCK = 1 << 18
# The table for starting points uses evenly spaced rows with this many numbers in all, and at least this many rows.
_TABLE_NUMBERS, _TABLE_ROWS = 1 << 13, 512


def check_finite_nll(
    name: str, input: Tensor, target: Tensor, input_kind: str, remedy: str = "", *, floor: str = "floor={}"
) -> None:
    """Raises if no temperature has a finite NLL; the values of ``input`` must have been checked.

    Args:
        remedy: another remedy than a floor, for the error.
        floor: as the argument of :func:`floor_remedy`.
    """
    impossible = cannot_occur(input.gather(1, target.unsqueeze(1)).squeeze(1), input_kind)
    if bool(impossible.any()):
        what = "probability 0" if input_kind == "probs" else "a logit of -inf"
        raise ValueError(
            f"{name}: the NLL must be finite for some temperature, but {int(impossible.sum())} of {len(input)} rows "
            f"(the first is {int(impossible.nonzero()[0])}) give their target {what}: "
            f"{floor_remedy(len(input), floor)}{remedy}"
        )


def coarse_table(
    input: Tensor,
    target: Tensor,
    input_kind: InputKind,
    criterion: Proper,
    gammas: Sequence[float],
    temperatures: Sequence[float],
    weight: Tensor | None = None,
) -> np.ndarray:
    """The criterion [gammas, temperatures] of some rows, at most in float32, for starting points."""
    n_rows = max(_TABLE_ROWS, _TABLE_NUMBERS // input.shape[1])
    places = slice(None, None, max(1, len(input) // n_rows)) if weight is None else _repeated(weight, n_rows)
    some = input[places]
    if some.dtype == torch.float64:  # rounding must not make a possible class impossible
        limits = torch.finfo(torch.float32)
        if input_kind == "logits":
            some = (some - some.amax(1, keepdim=True)).clamp(min=limits.min / 2)
        else:
            some = some.clamp(min=limits.tiny).where(some > 0, 0.0)
        some = some.to(torch.float32)
    rows = some.contiguous(), target[places].contiguous()
    grid = every_row_grid("fit", *rows, gammas, temperatures, criteria=(criterion,), input_kind=input_kind)
    table: np.ndarray = grid.tables[criterion].cpu().numpy()
    return table


def _repeated(weight: Tensor, n_rows: int) -> Tensor:
    """Indices of evenly spaced rows of those in which a row with weight w occurs w times: n_rows to 2 n_rows, or all.

    If the weights are not multiples of the smallest, the number of copies of a row is w n_rows / W, rounded up or down.
    """
    copies = weight / weight.amin()
    total, off = float(copies.sum()), float((copies - copies.round()).abs().amax())
    copies = copies.round() if off <= 1e-9 and total < 2**53 else weight * (n_rows / weight.sum())
    ends = copies.cumsum(0)
    step = max(1, int(ends[-1]) // n_rows)
    # The middle of a copy is never an end, so rounding does not move it to a neighbour.
    middles = torch.arange(0.5, float(ends[-1]), step, dtype=torch.float64, device=ends.device)
    return torch.searchsorted(ends, middles)


class NllOfNetworks:
    """The mean NLL of the focal calibration map for each of many networks.

    Args:
        input: [B, N, C] of ``input_kind``, checked; every target is a possible class.
        target: [B, N] int64.
        weight: [B, N] float64, weight of each row; None is 1.
    """

    def __init__(self, input: Tensor, target: Tensor, input_kind: InputKind, weight: Tensor | None) -> None:
        self.input, self.target, self.input_kind, self.weight = input, target, input_kind, weight
        whole = torch.full(target.shape, 1 / target.shape[1], dtype=torch.float64, device=input.device)
        self._share = whole if weight is None else weight / weight.sum(1, keepdim=True)
        self._sums = map_nll_sums_for(input)

    def __len__(self) -> int:
        return self.input.shape[0]

    def __call__(self, gammas: np.ndarray | None, betas: np.ndarray) -> np.ndarray:
        """[B, 7], as :func:`focalkern.fallback.map_nll_sums`; zeros for networks whose beta is NaN."""
        of_gamma = None if gammas is None else torch.from_numpy(gammas)
        is_probs = self.input_kind == "probs"
        found = self._sums(self.input, self.target, self._share, of_gamma, torch.from_numpy(betas), is_probs)
        sums: np.ndarray = found.numpy()
        return sums


class BrierOfRows:
    """The mean Brier score of the focal calibration map, with its first derivatives.

    A point is [log T], at gamma = 0, or [log(1 + gamma), log T].

    Args:
        input: [N, C] of ``input_kind``, checked.
        target: [N] int64.
        weight: [N] float64, weight of each row; None is 1.
    """

    def __init__(self, input: Tensor, target: Tensor, input_kind: InputKind, weight: Tensor | None) -> None:
        self.input_kind = input_kind
        self.input, self.target = _ordinary(input), _ordinary(target)
        self.weight = None if weight is None else _ordinary(weight)

    @torch.inference_mode(False)
    def __call__(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        values = [math.expm1(point[0]) if len(point) == 2 else 0.0, math.exp(point[-1])]
        gamma, temperature = (
            torch.tensor(value, dtype=torch.float64, device=self.input.device, requires_grad=True) for value in values
        )
        total = np.zeros(3)
        for block, labels, share in self._blocks():
            with torch.enable_grad():
                probs = focal_calibration_map(block, gamma, temperature, input_kind=self.input_kind)
                of_target = probs.gather(1, labels).squeeze(1)
                value = (probs.square().sum(-1) - 2 * of_target + 1) @ share
            slopes = torch.autograd.grad(value, (gamma, temperature))
            total += [value.item(), *(slope.item() for slope in slopes)]
        slopes_of = total[1:] * [1 + gamma.item(), temperature.item()]
        return total[0], slopes_of[-len(point) :]

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Blocks of (input in float64, target [n, 1], weight divided by the sum of the weights [n])."""
        rows = max(1, _BLOCK // self.input.shape[1])
        n, weight = len(self.target), self.weight
        shares = torch.full_like(self.target, 1 / n, dtype=torch.float64) if weight is None else weight / weight.sum()
        for block, labels, part in zip(
            self.input.split(rows), self.target.split(rows), shares.split(rows), strict=True
        ):
            yield block.to(torch.float64), labels.unsqueeze(-1), part


@torch.inference_mode(False)
def _ordinary(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one from torch.inference_mode(), of which autograd would compute no derivative."""
    return tensor.clone() if tensor.is_inference() else tensor
