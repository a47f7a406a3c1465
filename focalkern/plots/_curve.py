"""The curve of a spline scaling."""

import torch
from matplotlib.figure import Figure

from focalkern._checks import short
from focalkern.calibrators import SplineScaling
from focalkern.calibrators._spline_shown import shown_curve
from focalkern.ops.calibration_map import binary_focal_calibration_map
from focalkern.plots._figure import (
    BLUE,
    GREY,
    INK,
    PALE_BLUE,
    check_title,
    new_figure,
    on_white,
    plain_axes,
    set_heading,
)

__all__ = ["calibration_curve"]

_GAMMAS = ((1.0, "--"), (3.0, ":"))


@on_white
def calibration_curve(calibrator: SplineScaling, *, title: str | None = None) -> Figure:
    r"""The learned curve of a fitted spline scaling, with the diagonal and two focal maps.

    .. math::
        \text{logit}\, \hat p = h(u) - h(-u), \quad h(u) = (1 + a) \log \sigma(u) + f(u), \quad u = \text{logit}\, q

    The figure shows two classes, for which one curve is the whole map. q in [0.5, 1) is the confidence after
    temperature scaling. On the diagonal the confidence does not change; above it the curve raises the confidence. The
    shaded band is the approximate 95 % interval of the fit (Laplace approximation). The figure does not contain the
    slopes, intercepts and matrices of ``kind="vector"`` and ``"matrix"``. The grey lines are the focal calibration maps
    of gamma = 1 and 3.

    Args:
        calibrator: a fitted :class:`focalkern.SplineScaling`.
        title: heading of the figure.

    Returns:
        ``matplotlib.figure.Figure``.

    Raises:
        TypeError: another calibrator, or a title that is not a string.
        NotFittedError: the calibrator is not fitted.
        ImportError: matplotlib is not installed (on import of this module).

    Source: the focal maps of Komisarenko & Kull 2024 (arXiv 2408.11598); the band, Green & Silverman 1994, section 3.8.

    Example:
        >>> labels = torch.arange(300) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(300) >= 240)) % 3]  # correct in 240 of 300 rows
        >>> figure = fk.plots.calibration_curve(fk.SplineScaling().fit(logits, labels))
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['spline', 'unchanged', 'focal map, gamma = 1', 'focal map, gamma = 3']
    """
    if not isinstance(calibrator, SplineScaling):
        raise TypeError(f"calibration_curve: calibrator must be a fitted SplineScaling, got {short(calibrator)}")
    check_title("calibration_curve", title)
    calibrator._check_fitted()
    shown = shown_curve(calibrator)
    q = shown.confidence
    figure = new_figure(width=5.2, height=4.6)
    axes = figure.subplots()
    axes.fill_between(q, shown.lower, shown.upper, color=PALE_BLUE, alpha=0.6, linewidth=0, label="95 % band")
    axes.plot(q, shown.calibrated, color=BLUE, linewidth=2, label="spline")
    axes.plot([0.5, 1], [0.5, 1], color=INK, linewidth=1, label="unchanged")
    for gamma, style in _GAMMAS:
        mapped = binary_focal_calibration_map(torch.from_numpy(q).logit(), gamma).numpy()
        axes.plot(q, mapped, color=GREY, linestyle=style, linewidth=1.2, label=f"focal map, gamma = {gamma:g}")
    axes.set(xlim=(0.5, 1), ylim=(min(0.5, float(shown.lower.min())), 1))
    axes.set_xlabel("confidence after temperature scaling, two classes")
    axes.set_ylabel("calibrated confidence")
    plain_axes(axes)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    set_heading(figure, title)
    return figure
