"""The curve of a spline scaling for plots: calibrated confidence against confidence for two classes, with its band."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from focalkern._devices import cpu_by_default
from focalkern.calibrators._spline import SplineScaling
from focalkern.calibrators._spline_curve import NaturalSpline

__all__ = ["ShownCurve", "describe_curve", "shown_curve"]

# A smaller change of confidence counts as none.
_LEAST_CHANGE = 0.005


@dataclass(frozen=True)
class ShownCurve:
    """Arrays [n]: ``confidence`` q after temperature scaling, the calibrated confidence, and the bounds of its 95 %
    band."""

    confidence: np.ndarray[Any, Any]
    calibrated: np.ndarray[Any, Any]
    lower: np.ndarray[Any, Any]
    upper: np.ndarray[Any, Any]


@cpu_by_default()
def shown_curve(calibrator: SplineScaling, points: int = 200) -> ShownCurve:
    r"""The confidence of two classes after the curve, from the confidence q.

    .. math::
        \text{logit}\, \hat p = h(u) - h(-u), \quad h(u) = (1 + a) \log \sigma(u) + f(u), \quad u = \text{logit}\, q

    The band is :math:`\pm 1.96 \sqrt{k' V k}` around the logit, with k the derivative of the logit in (a, f) and V the
    covariance of the Laplace approximation.
    """
    q = torch.linspace(0.5, 0.999, points, dtype=torch.float64)
    u = q.logit()
    spline = NaturalSpline(torch.from_numpy(calibrator.knots_))
    slopes = torch.cat([u.unsqueeze(1), spline.rows(u) - spline.rows(-u)], 1)
    curve = torch.cat([torch.tensor([calibrator.slope_], dtype=torch.float64), torch.from_numpy(calibrator.values_)])
    logit = u + slopes @ curve
    wide = 1.96 * ((slopes @ torch.from_numpy(calibrator.covariance_)) * slopes).sum(1).clamp(min=0).sqrt()
    return ShownCurve(
        *(one.numpy() for one in (q, logit.sigmoid(), (logit - wide).sigmoid(), (logit + wide).sigmoid()))
    )


def describe_curve(calibrator: SplineScaling) -> str:
    """One sentence that names the confidences that the curve raises and those that it lowers."""
    shown = shown_curve(calibrator)
    change = shown.calibrated - shown.confidence
    signs = np.where(np.abs(change) < _LEAST_CHANGE, 0, np.sign(change)).astype(int)
    parts: list[tuple[str, float, float]] = []
    start = 0
    for end in range(1, len(signs) + 1):
        if end == len(signs) or signs[end] != signs[start]:
            if signs[start]:
                words = "raised" if signs[start] > 0 else "lowered"
                parts.append((words, float(shown.confidence[start]), float(shown.confidence[end - 1])))
            start = end
    if not parts:
        return "After temperature scaling the curve leaves every confidence as it is, to 0.005."

    def between(low: float, high: float) -> str:
        if high > 0.99:
            return "all confidences" if low < 0.52 else f"confidences above {low:.2f}"
        return f"confidences up to {high:.2f}" if low < 0.52 else f"confidences from {low:.2f} to {high:.2f}"

    said = ", ".join(f"{between(low, high)} are {words}" for words, low, high in parts)
    return f"For two classes, after temperature scaling, {said}."
