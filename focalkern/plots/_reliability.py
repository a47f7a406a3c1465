"""Reliability diagrams."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from focalkern._checks import counted
from focalkern.metrics import ReliabilityBins
from focalkern.plots._bands import ReliabilityBands, reliability_bands
from focalkern.plots._figure import (
    BAND,
    BLUE,
    GREY,
    INK,
    PALE_BLUE,
    VERMILION,
    check_title,
    checked_bins,
    checked_level,
    new_figure,
    on_white,
    plain_axes,
    set_heading,
    wrapped,
)

__all__ = ["reliability_diagram"]
_ENOUGH = 20  # least number of samples for the largest gap in the title


@on_white
def reliability_diagram(
    bins: ReliabilityBins | Mapping[str, ReliabilityBins], *, title: str | None = None, level: float | None = 0.95
) -> Figure:
    r"""Accuracy against confidence, bin by bin, above the histogram of the confidences.

    .. math:: \text{bar}_b = \text{acc}_b, \quad \text{gap}_b = \text{acc}_b - \text{conf}_b

    A bar covers the range of an equal-width bin, and its height is the accuracy. The hatched part reaches from the
    accuracy to the mean confidence of the bin, so its height is the gap. Bins of equal mass are mostly narrower than a
    line; they are points at (mean confidence, accuracy) with the gap as a stroke. The title of each panel gives its
    metrics as fractions, computed from the given bins. The largest gap uses only bins with at least 20 samples, because
    a bin with one sample can have any gap. If every bin is empty (``equal_mass_interp`` leaves out the samples with the
    lowest confidence), the panel has no marks and its title says so. The histogram below shows the number of samples of
    each bin.

    The shaded band is the interval of the accuracies of a perfectly calibrated classifier with these confidences; a bin
    outside the band is miscalibrated beyond chance. The whisker is the bootstrap interval of the bin's accuracy; a bin
    with only correct or only wrong samples has none. Both come from :func:`reliability_bands`.

    Args:
        bins: a result of :func:`focalkern.metrics.reliability_bins`, or a mapping from panel titles to results, drawn
            side by side on common axes, at most three in a row.
        title: heading of the whole figure.
        level: confidence level of band and whiskers, in (0, 1); None draws neither.

    Returns:
        ``matplotlib.figure.Figure``.

    Raises:
        ValueError: no panel; bins of a batch; bins without samples; a level outside (0, 1).
        ImportError: matplotlib is not installed (on import of this module).

    Source: Guo et al. 2017 (arXiv 1706.04599), figure 1; Bröcker & Smith 2007 for the band.

    Example:
        >>> confidence, correct = torch.linspace(0.5, 1.0, 100), torch.arange(100) % 4 > 0
        >>> bins = fk.metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=10)
        >>> figure = fk.plots.reliability_diagram({"before": bins, "after": bins})
        >>> len(figure.axes)  # two panels, each above a histogram
        4
        >>> figure.savefig("reliability.png")
    """
    panels = dict(bins) if isinstance(bins, Mapping) else {"": bins}
    check_title("reliability_diagram", title)
    level = None if level is None else checked_level("reliability_diagram", level)
    if not panels:
        raise ValueError("reliability_diagram: expected at least one set of bins, got none")
    panels = {name: checked_bins("reliability_diagram", one) for name, one in panels.items()}
    across = _across(len(panels))
    down = -(-len(panels) // across)
    figure = new_figure(width=0.5 + 3.6 * across + 0.6 * (across == 1), height=0.7 + 5.2 * down)
    axes = figure.subplots(2 * down, across, squeeze=False, gridspec_kw={"height_ratios": [3.4, 1] * down})
    tallest = max(float(one.weight.max()) for one in panels.values()) or 1.0
    by_bar = all(one.estimator == "equal_width" for one in panels.values())
    for index, (name, one) in enumerate(panels.items()):
        row, column = divmod(index, across)
        top, bottom = axes[2 * row : 2 * row + 2, column]
        bands = None if level is None else reliability_bands(one, level=level)
        # An empty line above the panels of a lower row.
        _reliability_panel(top, bottom, one, bands, "\n" * (row > 0) + wrapped(name, 3.4, 10.5), first=column == 0)
        bottom.set_ylim(0, tallest * 1.22)
    for index in range(len(panels), across * down):
        row, column = divmod(index, across)
        for unused in axes[2 * row : 2 * row + 2, column]:
            unused.remove()
    figure.legend(
        handles=[
            *(
                [
                    Patch(facecolor=PALE_BLUE, edgecolor=BLUE, label="accuracy of the bin"),
                    Patch(facecolor="none", edgecolor=VERMILION, hatch="////", label="gap to its mean confidence"),
                ]
                if by_bar
                else [
                    Line2D([], [], color=BLUE, marker="o", linewidth=0.8, label="accuracy of the bin"),
                    Line2D([], [], color=VERMILION, linewidth=1.6, label="gap to its mean confidence"),
                ]
            ),
            Line2D([], [], color=INK, linestyle="--", linewidth=1, label="perfect calibration"),
            *(
                []
                if level is None
                else [
                    Patch(facecolor=BAND, edgecolor=INK, label=f"if calibrated ({100 * level:g} %)"),
                    Line2D(
                        [],
                        [],
                        color=INK,
                        linestyle="none",
                        marker="|",
                        markersize=9,
                        markeredgewidth=1.3,
                        label=f"its bootstrap interval ({100 * level:g} %)",
                    ),
                ]
            ),
        ],
        loc="outside lower center",
        ncols=3 if across > 1 else 2,
        frameon=False,
        fontsize=9,
    )
    set_heading(figure, title)
    return figure


def _reliability_panel(
    top: Any, bottom: Any, bins: ReliabilityBins, bands: ReliabilityBands | None, name: str, *, first: bool
) -> None:
    filled = (bins.count > 0).cpu().numpy()
    lower, upper, confidence, accuracy, weight, count = (
        values.cpu().numpy()[filled]
        for values in (bins.lower, bins.upper, bins.confidence, bins.accuracy, bins.weight, bins.count)
    )
    gap = np.abs(accuracy - confidence)
    if bins.estimator == "equal_width":
        width = upper - lower
        top.bar(lower, accuracy, width, align="edge", color=PALE_BLUE, edgecolor="white", linewidth=0.6, zorder=2)
        top.hlines(accuracy, lower, upper, color=BLUE, linewidth=1.8, zorder=6)
        top.bar(
            lower,
            gap,
            width,
            bottom=np.minimum(accuracy, confidence),
            align="edge",
            facecolor="none",
            edgecolor=VERMILION,
            hatch="////",
            linewidth=0.7,
            zorder=3,
        )
        bottom.bar(lower, weight, width, align="edge", color=GREY, edgecolor="white", linewidth=0.6, zorder=2)
        if len(bins.count) <= 20:
            # The bins with the largest gaps often have only a few samples, too few for a visible bar in the histogram.
            for left, wide, share, samples in zip(lower, width, weight, count, strict=True):
                bottom.annotate(
                    f"{samples}",
                    (left + wide / 2, share),
                    xytext=(0, 1.5),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=6,
                    color="#444444",
                )
    elif filled.any():  # without a point, constrained layout would shrink the axes to a line
        # Bins of equal mass are mostly narrower than a pixel, and close together near 1: draw one point each.
        top.vlines(confidence, accuracy, confidence, color=VERMILION, linewidth=1.6, zorder=3)
        top.plot(
            confidence,
            accuracy,
            "o-",
            color=BLUE,
            linewidth=0.8,
            markersize=5,
            markeredgecolor="white",
            zorder=6,
            clip_on=False,
        )
        bottom.vlines(confidence, 0, weight, color=GREY, linewidth=2, zorder=2)
    if bands is not None and filled.any():
        low, high, band_low, band_high = (
            values.numpy()[filled]
            for values in (bands.lower, bands.upper, bands.calibrated_lower, bands.calibrated_upper)
        )
        if bins.estimator == "equal_width":
            top.bar(lower, band_high - band_low, upper - lower, bottom=band_low, align="edge", color=BAND, zorder=4)
            for edge in (band_low, band_high):
                top.hlines(edge, lower, upper, color=INK, linewidth=0.7, zorder=4)
            at = (lower + upper) / 2
        else:
            top.fill_between(confidence, band_low, band_high, facecolor=BAND, edgecolor=INK, linewidth=0.6, zorder=1)
            at = confidence
        known = low < high
        top.vlines(at[known], low[known], high[known], color=INK, linewidth=1.3, zorder=7)
    top.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1, zorder=5)
    # Samples in bins, not N: with equal_mass_interp some, or all, samples are in no bin.
    samples = weight.sum()
    means = "every bin is empty"
    if samples:
        means = (
            f"accuracy {float((weight * accuracy).sum() / samples):.4f}, "
            f"mean confidence {float((weight * confidence).sum() / samples):.4f}"
        )
    lines = [
        f"ECE {float((weight * gap).sum()):.4f} ({bins.estimator}, {counted(bins.n_bins, 'bin')})",
        means,
        f"{bins.n_samples:,} sample{'s' * (bins.n_samples != 1)}; {_largest_gap(gap, count)}",
    ]
    top.text(
        0.5,
        1.015,
        "\n".join(lines),
        transform=top.transAxes,
        ha="center",
        va="bottom",
        fontsize=8,
        linespacing=1.3,
        color="#444444",
    )
    top.set_title(name, fontsize=10.5, pad=42)
    top.set(xlim=(0, 1), ylim=(0, 1))
    bottom.set(xlim=(0, 1), xlabel="confidence (probability of the top class)")
    ticks = np.linspace(0, 1, 6)
    bottom.set_xticks(ticks)
    top.set_xticks(ticks, [""] * len(ticks))
    top.set_yticks(ticks)
    bottom.yaxis.set_major_locator(MaxNLocator(3))
    if first:
        top.set_ylabel("accuracy")
        bottom.set_ylabel("share")
    else:
        for axes in (top, bottom):
            axes.tick_params(labelleft=False)
    for axes in (top, bottom):
        plain_axes(axes)
        axes.grid(axis="y", color="#E4E4E4", linewidth=0.7, zorder=0)
        axes.set_axisbelow(True)


def _across(n_panels: int) -> int:
    """Number of panels in a row; more than three would be too small to read."""
    return {1: 1, 2: 2, 4: 2}.get(n_panels, 3)


def _largest_gap(gap: np.ndarray[Any, Any], count: np.ndarray[Any, Any]) -> str:
    """The text on the largest gap among the bins that have enough samples."""
    enough = count >= _ENOUGH
    if not enough.any():
        return f"no bin has {_ENOUGH}"
    at = int(np.where(enough, gap, -1).argmax())
    return f"largest gap {gap[at]:.4f} (bins of {_ENOUGH} or more)"
