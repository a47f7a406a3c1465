"""The calibration grid in plain torch: blocks of temperatures by blocks of rows, all gammas at once.

q, log(1 - q) and phi depend only on the temperature, so they are computed once for all gammas. The quantities are
those of :mod:`focalkern.fallback.calibration_map`; a cell keeps only sums of its probabilities over the classes.
"""

from typing import Any

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.fallback._calibration_bins import EQUAL_MASS, EQUAL_WIDTH, bucket_sums, calibration_error
from focalkern.fallback._checks import widest_dtype
from focalkern.fallback._grid_arguments import axis_on_host, check_arguments, check_has_data, checked_rows
from focalkern.fallback.calibration_map import _one_minus_phi_of_odds

__all__ = [
    "EQUAL_MASS",
    "EQUAL_WIDTH",
    "CalibrationGridRun",
    "calibration_grid",
    "count_criteria",
    "grid_shapes",
    "whole_grid",
]


_ECE, _MCE, _NLL, _BRIER = 1, 2, 4, 8  # the codes of the compiled module, in the order of its tables


# Above this gamma, (1 - q)^-gamma may overflow for classes other than the top class, for which q <= 1/2.
_LARGE_GAMMA = 64.0

_BLOCK_ELEMENTS = 1 << 16  # rows x classes per block, so that a block fits the caches

_KEPT_CONFIDENCES = 1 << 20  # temperatures x gammas x rows between two steps


class CalibrationGridRun:
    """The compiled module's CalibrationGridRun in plain torch: the checked samples, and the tables of blocks of
    temperatures."""

    def __init__(
        self,
        input: Tensor,
        target: Tensor,
        gammas: Tensor,
        temperatures: Tensor,
        n_bins: int,
        criteria: int,
        estimator: int,
        input_is_probs: bool,
        ignore_index: int,
    ) -> None:
        check_arguments(input, target, gammas, temperatures, n_bins, criteria, estimator)
        check_has_data(input)
        # Tables are float64: devices without float64 hand the samples to the CPU.
        if widest_dtype(input) != torch.float64:
            input, target = input.cpu(), target.cpu()
        self._gammas = axis_on_host("gammas", gammas, -1.0)
        self._temperatures = axis_on_host("temperatures", temperatures, 0.0)
        if bool(self._gammas.max() > _LARGE_GAMMA):  # a large gamma multiplies rounding errors
            input = input.double()
        self._n_bins, self._criteria, self._estimator = n_bins, criteria, estimator
        self._samples = _Samples(*checked_rows(input, target, input_is_probs, ignore_index), input_is_probs)
        cells = max(1, len(self._gammas) * self._samples.rows)
        self.per_block = max(1, min(len(self._temperatures), _KEPT_CONFIDENCES // cells))

    def run(self, begin: int, end: int) -> Tensor:
        """[n_criteria, n_gammas, end - begin], on the device of the input (on the CPU for one without float64)."""
        confidence, nll, brier = self._block(begin, end, self._samples)
        tables = {}
        if self._criteria & (_ECE | _MCE):
            correct = self._samples.correct
            tables[_ECE], tables[_MCE] = calibration_error(confidence, correct, self._n_bins, self._estimator)
        rows = self._samples.rows
        tables[_NLL], tables[_BRIER] = nll / rows, brier / rows
        wanted = [tables[code].T for code in (_ECE, _MCE, _NLL, _BRIER) if self._criteria & code]
        return torch.stack(wanted)

    def add_to(
        self,
        rows: Tensor,
        count: Tensor | None,
        confidence: Tensor | None,
        correct: Tensor | None,
        nll: Tensor | None,
        brier: Tensor | None,
        sketch: bool,
    ) -> None:
        """Adds the samples to running sums; see the compiled module's add_to."""
        everything = self._samples
        step = max(256, _KEPT_CONFIDENCES // 4 // len(self._gammas))
        # Compute everything before changing the sums, so that an interruption leaves them unchanged.
        found: list[tuple[Tensor, Tensor]] = []
        for first in range(0, everything.rows, step):
            part = everything.slice(first, first + step)
            wide = max(1, _KEPT_CONFIDENCES // max(1, len(self._gammas) * part.rows))
            for begin in range(0, len(self._temperatures), wide):
                end = min(begin + wide, len(self._temperatures))
                conf, nll_sum, brier_sum = self._block(begin, end, part)
                if nll is not None:
                    found.append((nll[:, begin:end], nll_sum.T))
                if brier is not None:
                    found.append((brier[:, begin:end], brier_sum.T))
                if count is not None and confidence is not None and correct is not None:
                    found += bucket_sums(
                        conf, part.correct, count[:, begin:end], confidence[:, begin:end], correct[:, begin:end], sketch
                    )
        for total, part_of_it in found:
            total += part_of_it
        rows += everything.rows

    def _block(self, begin: int, end: int, samples: "_Samples") -> tuple[Tensor, Tensor, Tensor]:
        """Confidences [Gt, Gg, rows] in the dtype of the computation; sums of nll and of Brier scores, [Gt, Gg]."""
        temperatures = self._temperatures[begin:end].tolist()
        cells = (len(temperatures), len(self._gammas))
        dtype, device = samples.offset.dtype, samples.offset.device
        binned = bool(self._criteria & (_ECE | _MCE))
        confidence = torch.empty(*cells, samples.rows if binned else 0, dtype=dtype, device=device)
        nll = torch.zeros(cells, dtype=torch.float64, device=device)
        brier = torch.zeros(cells, dtype=torch.float64, device=device)
        gammas = _Gammas(self._gammas, dtype, device)
        step = max(1, _BLOCK_ELEMENTS // samples.offset.shape[1])
        for first in range(0, samples.rows, step):
            part = samples.slice(first, first + step)
            for t, temperature in enumerate(temperatures):
                terms = _Terms(part, gammas, 1.0 / temperature, bool(self._criteria & _BRIER))
                if binned:
                    confidence[t, :, first : first + step] = (1 + terms.sum).reciprocal()
                if self._criteria & _NLL:
                    nll[t] += terms.nll().sum(-1, dtype=torch.float64)
                if self._criteria & _BRIER:
                    brier[t] += terms.brier().sum(-1, dtype=torch.float64)
        return confidence, nll, brier


class _Samples:
    """The rows that are not ignored, with the quantities that every cell needs."""

    def __init__(self, input: Tensor, target: Tensor, is_probs: bool) -> None:
        x = input.to(compute_dtype(input.dtype))
        # The top class is that of the given input, because rounding in the computation may produce ties.
        top = x.argmax(-1, keepdim=True)
        if is_probs:
            x = x.log()
        self.correct = top.squeeze(-1) == target
        others = x.scatter(-1, top, -torch.inf)
        largest = others.amax(-1, keepdim=True)
        x_top = x.gather(-1, top)
        self.alone = largest == -torch.inf
        largest = torch.where(self.alone, x_top, largest)
        # offset [rows, C]: logits minus the largest logit of the other classes. -inf for the top class and impossible
        # classes excludes them from sums. level: the same with 0 in place of -inf.
        self.offset = others - largest
        self.level = torch.where(self.offset == -torch.inf, 0.0, self.offset)
        self.gap = largest - x_top  # [rows, 1]
        self.target = target.unsqueeze(-1)
        self.rows = len(x)

    def slice(self, begin: int, end: int) -> "_Samples":
        part = object.__new__(_Samples)
        for name, value in vars(self).items():
            setattr(part, name, value[begin:end] if isinstance(value, Tensor) else value)
        part.rows = len(part.offset)
        return part


class _Gammas:
    """The gammas and 1 + gamma as [Gg, 1, 1]; the sum is computed in float64."""

    def __init__(self, gammas: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self.value = gammas.view(-1, 1, 1).to(device, dtype)
        self.numbers = gammas.tolist()
        self.plus_one = (gammas + 1).view(-1, 1, 1).to(device, dtype)


class _Terms:
    """Sums over the classes k of the ratios p_k / p_top, for a block of rows, one temperature and all gammas."""

    def __init__(self, samples: _Samples, gammas: _Gammas, beta: float, squares: bool) -> None:
        self._samples = samples
        y = samples.offset * beta
        # The clamp keeps an overflowing quotient finite; its exponential is 0.
        least = -torch.finfo(y.dtype).max / 16
        gap = (samples.gap * beta).clamp_(min=least)
        e = y.exp()
        rest = e.sum(-1, keepdim=True) + samples.alone
        exp_gap = gap.exp()
        odds = rest * exp_gap
        minus_log_q = odds.log1p()
        q_top = (1 + odds).reciprocal()
        q = e.mul_(exp_gap * q_top)
        # log_u is multiplied by gamma and added to numbers near 1. For small gammas, log(1 - q) is accurate enough, and
        # log is faster than log1p.
        log_u = q.neg().log1p_() if max(gammas.numbers) > _LARGE_GAMMA else (1 - q).log_()
        phi = (samples.level * beta).clamp_(min=least).add_(gap - minus_log_q).mul_(q).div_(q - 1)
        g = gammas.value
        shift = (
            gammas.plus_one * gap
            + g * (rest.log() - minus_log_q)
            + (gammas.plus_one - g * _one_minus_phi_of_odds(odds, odds * q_top)).log()
        )
        # [Gg, rows], sums over the classes without the top class, whose ratio is 1. The loop reuses two buffers.
        self.sum = torch.empty_like(shift.squeeze(-1))
        self._square_sum = torch.empty_like(self.sum) if squares else None
        ratio, divisor = torch.empty_like(y), torch.empty_like(y)
        for i, number in enumerate(gammas.numbers):
            torch.add(y, log_u, alpha=-number, out=ratio)
            torch.mul(phi, number, out=divisor).add_(1)
            if number > _LARGE_GAMMA:
                # Only rounding multiplied by a large gamma can put another class above the top class; clamp it.
                ratio.add_(shift[i]).sub_(divisor.log_()).clamp_(max=0).exp_()
            else:
                ratio.exp_().div_(divisor)
            torch.sum(ratio, -1, out=self.sum[i])
            if self._square_sum is not None:
                torch.sum(ratio.square_(), -1, out=self._square_sum[i])
        scale = torch.where(g > _LARGE_GAMMA, 0.0, shift).exp().squeeze(-1)
        self.sum *= scale
        if self._square_sum is not None:
            self._square_sum *= scale.square()
        target = samples.target

        def of_target(values: Tensor) -> Tensor:
            return values.gather(-1, target)

        g, shift = g.squeeze(-1), shift.squeeze(-1)
        self._log_ratio = of_target(y).squeeze(-1) + shift
        self._log_ratio = self._log_ratio - g * of_target(log_u).squeeze(-1)
        self._log_ratio = self._log_ratio - (g * of_target(phi).squeeze(-1)).log1p()
        self._log_ratio = self._log_ratio.clamp(max=0)

    def nll(self) -> Tensor:
        """-log p_target, [Gg, rows]."""
        return self.sum.log1p() - torch.where(self._samples.correct, 0.0, self._log_ratio)

    def brier(self) -> Tensor:
        """sum over the classes of (p_k - [k = target])^2, [Gg, rows]."""
        assert self._square_sum is not None
        p_top = (1 + self.sum).reciprocal()
        right = (self._square_sum + self.sum.square()) * p_top.square()
        wrong = (self._square_sum + 1) * p_top.square() + (1 - 2 * self._log_ratio.exp() * p_top)
        return torch.where(self._samples.correct, right, wrong)


def count_criteria(criteria: int) -> int:
    return sum(bool(criteria & code) for code in (_ECE, _MCE, _NLL, _BRIER))


def whole_grid(run: Any, n_temperatures: int) -> Tensor:
    """The tables of all blocks of a run."""
    step = run.per_block
    blocks = [run.run(begin, min(begin + step, n_temperatures)) for begin in range(0, n_temperatures, step)]
    return torch.cat(blocks, dim=2)


@torch.library.custom_op("focalkern::plain_calibration_grid", mutates_args=())
def calibration_grid(
    input: Tensor,
    target: Tensor,
    gammas: Tensor,
    temperatures: Tensor,
    n_bins: int,
    criteria: int,
    estimator: int,
    input_is_probs: bool,
    ignore_index: int,
) -> Tensor:
    """The whole grid as one operator, for compiled graphs, which cannot read the values of the rows."""
    run = CalibrationGridRun(
        input, target, gammas, temperatures, n_bins, criteria, estimator, input_is_probs, ignore_index
    )
    return whole_grid(run, len(temperatures))


@calibration_grid.register_fake
def grid_shapes(
    input: Tensor,
    target: Tensor,
    gammas: Tensor,
    temperatures: Tensor,
    n_bins: int,
    criteria: int,
    estimator: int,
    input_is_probs: bool,
    ignore_index: int,
) -> Tensor:
    """The tables, without values."""
    check_arguments(input, target, gammas, temperatures, n_bins, criteria, estimator)
    shape = (count_criteria(criteria), gammas.shape[0], temperatures.shape[0])
    return input.new_empty(shape, dtype=torch.float64)
