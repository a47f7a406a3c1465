"""The warning of ``fit`` and two of its checks: a small sum of weights, and a result worse than no calibration."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._diagnostics import warn_outside
from focalkern._types import LOSS_NAMES
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._inputs import as_scores, losses_of
from focalkern.calibrators._parameters import Parameters

__all__ = [
    "UNMASKED",
    "CalibrationWarning",
    "call_with_floor",
    "few_by_weight",
    "floor_remedy",
    "unseen_classes",
    "warn",
    "worse_than_uncalibrated",
]

UNMASKED = (
    "a row has its label at a logit of -inf, so such logits count as small probabilities (logits of impossible classes "
    "are -inf in no row of that label)"
)

# Number of logits per block of rows.
_BLOCK = 1 << 18


class CalibrationWarning(UserWarning):
    """A result of ``fit`` that should be checked before it is used, or rows to predict that look like probabilities.

    After ``fit``: the optimum lies at a bound of the search, the NLL of the rows is infinite, no calibration would be
    better, or the labels cannot be right. ``warnings_`` holds the same sentences, each with its remedy or likely cause.

    Example:
        >>> import warnings
        >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always", fk.CalibrationWarning)
        ...     calibrator = fk.TemperatureScaling(temperatures=[1.0, 2.0]).fit(logits, labels)
        >>> print(said[0].message)
        TemperatureScaling: temperature = 2 is the largest that was searched (widen=True extends the search)
    """


def warn(name: str, words: Sequence[str]) -> None:
    """Emits one warning with all sentences. Its location is the first line outside this package."""
    if words:
        warn_outside(f"{name}: {', and '.join(words)}", CalibrationWarning)


def unseen_classes(class_counts: Tensor, classes: np.ndarray[Any, Any], remedy: str) -> list[str]:
    """A warning if a class has no row, for fits whose map then lowers its probability everywhere.

    Args:
        class_counts: [C], rows per class.
        classes: [C], their names.
        remedy: another calibrator or option.
    """
    unseen = (class_counts == 0).nonzero().squeeze(1).tolist()
    if not unseen:
        return []
    its = "its" if len(unseen) == 1 else "their"
    names = ", ".join(str(classes[one]) for one in unseen[:5]) + (", ..." if len(unseen) > 5 else "")
    return [f"no row of fit has class {names}, so {its} probability falls (fit on rows of every class, or {remedy})"]


def few_by_weight(of: FitData) -> list[str]:
    """A warning if the weights sum to less than a tenth of the rows, for fits that depend on the number of rows."""
    if of.weight is None:
        return []
    total = float(of.weight.sum())
    if total >= 0.1 * len(of.input):
        return []
    return [
        f"the sample weights sum to {total:g}, so the {len(of.input)} rows count as only {total:g} (divide the "
        "weights by their mean: a row with weight w counts w times)"
    ]


def call_with_floor(calibrator: Parameters) -> str:
    """``TemperatureScaling(input_kind='probs', floor={})``: the parameters that are no defaults, and the floor."""
    params, defaults = calibrator.get_params(deep=False), calibrator._defaults()
    params.pop("floor", None)
    words = [f"{name}={value!r}" for name, value in params.items() if repr(value) != repr(defaults[name])]
    return f"{type(calibrator).__name__}({', '.join([*words, 'floor={}'])})"


def floor_remedy(n_rows: int, argument: str = "floor={}") -> str:
    """The remedy for rows whose target has probability 0. ``argument`` has ``{}`` in the place of the floor."""
    return f"{argument.replace('{}', f'{0.1 / n_rows:.2g}')} gives every class a little of the probability"


def worse_than_uncalibrated(
    of: FitData,
    apply: Callable[..., Tensor],
    *,
    by: Sequence[str],
    input_kind: str,
    remedy: str,
    floor: str = "floor={}",
) -> list[str]:
    """Sentences if calibration makes the rows of ``fit`` worse.

    Worse means that the mean loss rises by more than one standard error of the paired difference.

    Args:
        of: the rows of fit.
        apply: with ``log=True``, maps [n, C] to calibrated log-probabilities.
        by: the losses to check, ``"nll"`` and/or ``"brier"``.
        remedy: the remedy that the sentence names.
        floor: as the argument of :func:`floor_remedy`.

    Returns:
        At most two sentences.
    """
    input, target, weight = of.input, of.target, of.weight
    rows = max(1, _BLOCK // input.shape[1])
    parts: list[list[Tensor]] = []
    for block, labels in zip(input.split(rows), target.split(rows), strict=True):
        log_probs = apply(block, log=True)
        nll = -log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)
        if by:
            none = as_scores(block, input_kind).log_softmax(-1)
            parts.append([nll, losses_of(none, labels, by), losses_of(log_probs.to(torch.float64), labels, by)])
        else:
            parts.append([nll])
    nll, *both = (torch.cat(list(side), -1) for side in zip(*parts, strict=True))

    found = []
    impossible = nll == math.inf
    if weight is not None:
        impossible &= weight > 0
    if bool(impossible.any()):
        found.append(
            f"the NLL is infinite because {int(impossible.sum())} of {len(input)} rows (the first is "
            f"{int(impossible.nonzero()[0])}) give their target probability 0 ({floor_remedy(len(input), floor)})"
        )
    risen = []
    share = torch.ones_like(nll, dtype=torch.float64) if weight is None else weight
    share = share / share.sum()
    for loss in by:
        old, new = (side[by.index(loss)] for side in both)
        difference = new - old
        if len(input) < 2 or not bool(difference.isfinite().all()):
            continue
        mean = (share * difference).sum()
        error = (share.square() * (difference - mean).square()).sum().sqrt()
        if float(mean) > float(error):
            first, last = (float((share * side).sum()) for side in (old, new))
            risen.append(f"the {LOSS_NAMES[loss]} rises from {first:.4f} to {last:.4f}")
    if risen:
        found.append(f"on the rows of fit {' and '.join(risen)} ({remedy})")
    return found
