"""Risk against coverage."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from focalkern._arrays import with_tensors
from focalkern._checks import short
from focalkern.metrics import AcceptThreshold, RiskCoverage
from focalkern.metrics._risk import threshold_digits
from focalkern.plots._figure import (
    BLUE,
    GREY,
    INK,
    VERMILION,
    check_title,
    new_figure,
    on_white,
    plain_axes,
    set_heading,
)

__all__ = ["risk_coverage"]

_STYLES = ((BLUE, "-"), (VERMILION, "--"), (INK, ":"), (GREY, "-."))


@on_white
def risk_coverage(
    curves: RiskCoverage | Mapping[str, RiskCoverage],
    *,
    accept: AcceptThreshold | None = None,
    title: str | None = None,
) -> Figure:
    r"""The error rate of the accepted rows against the accepted fraction.

    .. math:: (\text{coverage}(t), \text{risk}(t)) \quad \text{for every threshold } t

    Args:
        curves: a result of :func:`focalkern.metrics.risk_coverage`, or up to four of them by name.
        accept: a result of :func:`focalkern.accept_threshold`, drawn as a line at its ``max_risk``, a point at its
            threshold, and a stroke from the risk to its bound.
        title: heading of the figure.

    Returns:
        ``matplotlib.figure.Figure``.

    Raises:
        TypeError: an argument of another kind.
        ValueError: no curve, or more than four.
        ImportError: matplotlib is not installed (on import of this module).

    Source: Geifman & El-Yaniv 2017 (arXiv 1705.08500), figure 1.

    Example:
        >>> scores = torch.linspace(0, 1, 2000)
        >>> curve = fk.metrics.risk_coverage(confidence=scores, correct=scores > 0.25)
        >>> chosen = fk.accept_threshold(scores=scores, correct=scores > 0.25)
        >>> figure = fk.plots.risk_coverage(curve, accept=chosen)
        >>> figure.axes[0].get_xlabel()
        'coverage: accepted fraction of the rows'
    """
    op = "plots.risk_coverage"
    named: dict[str, Any] = dict(curves) if isinstance(curves, Mapping) else {"": curves}
    if not 1 <= len(named) <= len(_STYLES):
        raise ValueError(f"{op}: curves must be 1 to {len(_STYLES)}, got {len(named)}")
    for curve in named.values():
        if not isinstance(curve, RiskCoverage):
            raise TypeError(f"{op}: curves must be of metrics.risk_coverage, got {short(curve)}")
    if accept is not None and not isinstance(accept, AcceptThreshold):
        raise TypeError(f"{op}: accept must be an AcceptThreshold, got {short(accept)}")
    check_title(op, title)
    figure = new_figure(width=5.2, height=3.8)
    axes = figure.subplots()
    for (name, given), (colour, style) in zip(named.items(), _STYLES, strict=False):
        curve = with_tensors(given)
        axes.step(
            curve.coverage.tolist(), curve.risk.tolist(), style, where="post", color=colour, linewidth=1.6, label=name
        )
    if accept is not None:
        axes.axhline(accept.max_risk, color=GREY, linewidth=1, label=f"max_risk = {accept.max_risk:g}")
        if accept.n_accepted:
            axes.plot([accept.coverage] * 2, [accept.risk, accept.bound], color=INK, linewidth=1.2)
            label = f"accept confidence >= {threshold_digits(accept.threshold)}"
            axes.plot([accept.coverage], [accept.risk], "o", color=INK, markersize=5, label=label)
    axes.set(xlim=(0, 1.01), ylim=(0, None))
    axes.set_xlabel("coverage: accepted fraction of the rows")
    axes.set_ylabel("risk: error rate of accepted rows")
    plain_axes(axes)
    if len(named) > 1 or accept is not None or "" not in named:
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    set_heading(figure, title)
    return figure
