"""Tables of the report with the slopes, intercepts and matrix of a spline scaling."""

from typing import Any

import numpy as np

from focalkern.calibrators import SplineScaling
from focalkern.study.report import html

__all__ = ["class_tables"]

_MOST_CLASSES = 20
_MOST_PAIRS = 10


def class_tables(calibrator: Any) -> list[html.Table]:
    """Tables of v and b of each class, and of the largest D_jk; empty for a calibrator without them."""
    if not isinstance(calibrator, SplineScaling) or calibrator.weight_ is None or calibrator.bias_ is None:
        return []
    weight, bias = calibrator.weight_, calibrator.bias_
    names = [f"class {name}" for name in calibrator.classes_]
    own = weight if weight.ndim == 1 else weight.diagonal()
    largest = np.argsort(-(np.abs(own) + np.abs(bias)), kind="stable")[:_MOST_CLASSES]
    rows = [[names[j], f"{own[j]:+.4f}", f"{bias[j]:+.4f}"] for j in sorted(largest)]
    shown = (
        "Each class" if len(names) == len(rows) else f"The {len(rows)} of {len(names)} classes with the largest terms"
    )
    symbol = "v" if weight.ndim == 1 else "D_jj"
    caption = f"{shown}: slope {symbol} and intercept b, added to the curve. In plain spline scaling they are 0."
    tables = [html.Table(["class", f"slope {symbol}", "intercept b"], rows, caption)]
    if weight.ndim == 2:
        tables.append(_pairs(weight, names))
    return tables


def _pairs(weight: np.ndarray[Any, Any], names: list[str]) -> html.Table:
    beside = np.abs(weight - np.diag(weight.diagonal()))
    places = np.argsort(-beside, axis=None, kind="stable")[: min(_MOST_PAIRS, beside.size - len(weight))]
    rows = []
    for j, k in zip(*np.unravel_index(places, weight.shape), strict=True):
        does = "raises" if weight[j, k] > 0 else "lowers"
        rows.append([f"{names[k]} {does} {names[j]}", f"{weight[j, k]:+.4f}"])
    caption = f"The {len(rows)} largest D_jk: class k raises or lowers the score of class j."
    return html.Table(["pair", "D_jk"], rows, caption)
