"""The scaling of each label of a multi-label head: its fit, its map and its module."""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from focalkern._types import InputKind
from focalkern.calibrators._base import Calibrator
from focalkern.calibrators._modules import CalibratedLogits
from focalkern.calibrators._warnings import call_with_floor
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = ["LabelFits", "fit_labels", "map_of_label", "module_of_label"]


class LabelFits(NamedTuple):
    """The fits of all labels."""

    scalings: list[Calibrator | None]  # None for a label that stays uncalibrated
    positive: list[int]
    remarks: list[str]
    warnings: list[str]


def fit_labels(
    name: str, template: Calibrator, input: Tensor, labels: Tensor, known: Tensor, weight: Tensor | None
) -> LabelFits:
    """Fits a copy of ``template`` to each label; errors begin with ``name``.

    Args:
        input: [N, L] logits or probabilities.
        labels: [N, L] of 0 and 1.
        known: [N, L] bool, the entries of ``labels`` that count.
        weight: [N], or None.
    """
    found = LabelFits([], (labels * known).sum(0).tolist(), [], [])
    for label, count in enumerate(found.positive):
        rows = known[:, label]
        n_rows = int(rows.sum())
        if count in (0, n_rows):
            what = "positive" if count == 0 else "negative"
            found.remarks.append(f"label {label}: not calibrated, because its {n_rows} rows have no {what}")
            found.scalings.append(None)
            continue
        scaling = type(template)(**template.get_params(deep=False))
        try:
            scaling.fit_quietly(input[rows, label], labels[rows, label], None if weight is None else weight[rows])
        except ValueError as error:
            raise ValueError(f"{name}: label {label}: {_of_scaling(str(error), template)}") from error
        found.remarks.extend(f"label {label}: {words}" for words in getattr(scaling, "at_border_", ()))
        found.warnings.extend(f"label {label}: {_of_scaling(words, template)}" for words in scaling.warnings_)
        found.scalings.append(scaling)
    return found


def _of_scaling(words: str, template: Calibrator) -> str:
    """Words about a scaling; a remedy names its floor as part of ``scaling=``, the argument of the user."""
    form = f"scaling={call_with_floor(template)} gives"
    return re.sub(r"\bfloor=(\S+) gives", lambda found: form.replace("{}", found[1]), words)


def map_of_label(scaling: Calibrator | None, rows: Tensor, kind: InputKind, *, log: bool) -> Tensor:
    """(Log-)probabilities [...] of class 1 from rows [..., 2], without the floor of the scaling."""
    if scaling is None:
        return focal_calibration_map(rows, 0.0, 1.0, input_kind=kind, log=log)[..., 1]
    return scaling._apply(rows, log=log)[..., 1]


def module_of_label(scaling: Calibrator | None, kind: InputKind, *, fused: bool) -> torch.nn.Module:
    """The same map as a module from one logit (or probability) per sample to the calibrated logit."""
    if scaling is None:
        return CalibratedLogits(0.0, 1.0, kind, fused=fused)
    return scaling._module(fused, one_logit=True)
