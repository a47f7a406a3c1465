"""Reliability diagrams and maps of calibration grids, as matplotlib figures that belong to nobody's pyplot.

All functions return a ``matplotlib.figure.Figure`` with its own canvas: ``figure.savefig("name.png")`` writes it, a
notebook shows it. Axes are fractions. Colours are from the set of Okabe & Ito and the map ``cividis``, which people
with any of the common colour deficiencies can tell apart, and which differ in lightness too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from focalkern.metrics import ReliabilityBins
from focalkern.ops.calibration_grid import CalibrationGrid

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise ImportError("focalkern.plots needs matplotlib: pip install matplotlib") from error

__all__ = ["grid_heatmap", "reliability_diagram"]

_BLUE, _VERMILION, _GREY, _INK = "#0072B2", "#D55E00", "#8C8C8C", "#222222"


def reliability_diagram(bins: ReliabilityBins | Mapping[str, ReliabilityBins], *, title: str | None = None) -> Figure:
    r"""Accuracy against confidence, bin by bin, above the histogram of the confidences.

    .. math:: \text{bar}_b = \text{acc}_b, \quad \text{gap}_b = \text{acc}_b - \text{conf}_b

    A bar stands over the range of an equal-width bin and is as high as its accuracy; the hatched part runs from there
    to the bin's mean confidence, so its height is the gap. Bins of equal mass, most of them narrower than a line, are
    points at (mean confidence, accuracy) with their gap as a stroke. Above each panel stand its figures, as
    fractions, computed from the bins given; in the histogram below, the samples of each bin.

    Args:
        bins: what :func:`focalkern.metrics.reliability_bins` returns, or several by panel title, drawn side by side
            on common axes. Equal-width bins make the familiar picture.
        title: heading of the whole figure.

    Returns:
        ``matplotlib.figure.Figure``.

    Raises:
        ValueError: no panel; bins of a batch; bins without samples.
        ImportError: matplotlib is not installed (on import of this module).

    Source: Guo et al. 2017 (arXiv 1706.04599), figure 1.
    """
    panels = dict(bins) if isinstance(bins, Mapping) else {"": bins}
    if not panels:
        raise ValueError("reliability_diagram: expected at least one set of bins, got none")
    for one in panels.values():
        if one.count.dim() != 1:
            raise ValueError(f"reliability_diagram: bins must be [n_bins], got shape {list(one.count.shape)}")
        if one.n_samples == 0:
            raise ValueError("reliability_diagram: bins must hold at least one sample, got none")
    figure = _figure(width=0.5 + 4.1 * len(panels), height=5.9)
    axes = figure.subplots(
        2, len(panels), sharex=True, sharey="row", squeeze=False, gridspec_kw={"height_ratios": [3.4, 1]}
    )
    tallest = max(float(one.weight.max()) for one in panels.values()) or 1.0
    by_bar = all(one.estimator == "equal_width" for one in panels.values())
    for column, (name, one) in enumerate(panels.items()):
        _reliability_panel(axes[0, column], axes[1, column], one, name, first=column == 0)
        axes[1, column].set_ylim(0, tallest * 1.22)
    figure.legend(
        handles=[
            *(
                [
                    Patch(facecolor=_BLUE, label="accuracy of the bin"),
                    Patch(facecolor="none", edgecolor=_VERMILION, hatch="////", label="gap to its mean confidence"),
                ]
                if by_bar
                else [
                    Line2D([], [], color=_BLUE, marker="o", linewidth=0.8, label="accuracy of the bin"),
                    Line2D([], [], color=_VERMILION, linewidth=1.6, label="gap to its mean confidence"),
                ]
            ),
            Line2D([], [], color=_INK, linestyle="--", linewidth=1, label="perfect calibration"),
        ],
        loc="outside lower center",
        ncols=3 if len(panels) > 1 else 2,
        frameon=False,
        fontsize=9,
    )
    if title:
        figure.suptitle(title, fontsize=12)
    return figure


def _reliability_panel(top: Any, bottom: Any, bins: ReliabilityBins, name: str, *, first: bool) -> None:
    filled = (bins.count > 0).cpu().numpy()
    lower, upper, confidence, accuracy, weight, count = (
        values.cpu().numpy()[filled]
        for values in (bins.lower, bins.upper, bins.confidence, bins.accuracy, bins.weight, bins.count)
    )
    gap = np.abs(accuracy - confidence)
    if bins.estimator == "equal_width":
        width = upper - lower
        top.bar(lower, accuracy, width, align="edge", color=_BLUE, edgecolor="white", linewidth=0.6, zorder=2)
        top.bar(
            lower,
            gap,
            width,
            bottom=np.minimum(accuracy, confidence),
            align="edge",
            facecolor=(1, 1, 1, 0.55),  # where accuracy is above confidence, the bar shines through
            edgecolor=_VERMILION,
            hatch="////",
            linewidth=0.9,
            zorder=3,
        )
        bottom.bar(lower, weight, width, align="edge", color=_GREY, edgecolor="white", linewidth=0.6, zorder=2)
        if len(bins.count) <= 20:
            # The bins that look worst often hold a handful of samples, too few for their bar to show.
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
    else:
        # Bins of equal mass are mostly narrower than a pixel and lie side by side at the right: a point each.
        top.vlines(confidence, accuracy, confidence, color=_VERMILION, linewidth=1.6, zorder=3)
        top.plot(
            confidence,
            accuracy,
            "o-",
            color=_BLUE,
            linewidth=0.8,
            markersize=5,
            markeredgecolor="white",
            zorder=6,
            clip_on=False,
        )
        bottom.vlines(confidence, 0, weight, color=_GREY, linewidth=2, zorder=2)
    top.plot([0, 1], [0, 1], color=_INK, linestyle="--", linewidth=1, zorder=5)
    # Not N: equal_mass_interp leaves samples out. Not 0 either, when it leaves all out.
    samples = weight.sum() or np.nan
    first_line = (
        f"ECE {float((weight * gap).sum()):.4f} ({bins.estimator}), largest gap {float(gap.max(initial=0.0)):.4f}"
    )
    second_line = (
        f"accuracy {float((weight * accuracy).sum() / samples):.4f}, "
        f"mean confidence {float((weight * confidence).sum() / samples):.4f}, {bins.n_samples:,} samples"
    )
    top.text(
        0.5,
        1.015,
        f"{first_line}\n{second_line}",
        transform=top.transAxes,
        ha="center",
        va="bottom",
        fontsize=7.5,
        linespacing=1.3,
        color="#444444",
    )
    top.set_title(name, fontsize=10.5, pad=27)
    top.set(xlim=(0, 1), ylim=(0, 1))
    bottom.set_xlabel("confidence (probability of the top class)")
    ticks = np.linspace(0, 1, 6)
    top.set_xticks(ticks)
    top.set_yticks(ticks)
    bottom.yaxis.set_major_locator(MaxNLocator(3))
    if first:
        top.set_ylabel("accuracy")
        bottom.set_ylabel("share of samples")
    for axes in (top, bottom):
        _plain(axes)
        axes.grid(axis="y", color="#E4E4E4", linewidth=0.7, zorder=0)
        axes.set_axisbelow(True)


def grid_heatmap(
    grid: CalibrationGrid,
    criterion: str = "ece",
    *,
    title: str | None = None,
    best: tuple[float, float, float] | None = None,
) -> Figure:
    """The (gamma, T) table of one criterion as a map, with the best temperature of every gamma.

    One row per gamma, ascending upwards, equally high whatever the distances between the gammas; the temperature axis
    is to scale. Colour is logarithmic, because the interesting differences are near the minimum, and is cut off where
    it says nothing any more. A dot marks the best temperature of a row and its value stands at the right; the star is
    the best cell of all. Cells that are not finite are left blank.

    Args:
        grid: a computed grid.
        criterion: a name in ``grid.tables``.
        title: heading; by default the criterion, its estimator and its number of bins.
        best: (gamma, temperature, value) of the cell with the star; ``grid.best(criterion)`` when None.

    Returns:
        ``matplotlib.figure.Figure``.

    Raises:
        ValueError: a criterion that the grid does not have, or without a finite cell.
        ImportError: matplotlib is not installed (on import of this module).

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), figure 8.
    """
    best = grid.best(criterion) if best is None else best
    order = np.argsort(grid.gammas.cpu().numpy(), kind="stable")
    gammas = grid.gammas.cpu().numpy()[order]
    table = grid.tables[criterion].cpu().numpy()[order]
    columns = np.argsort(grid.temperatures.cpu().numpy(), kind="stable")
    temperatures = grid.temperatures.cpu().numpy()[columns]
    table = np.where(np.isfinite(table), table, np.nan)[:, columns]

    figure = _figure(width=9.2, height=max(3.2, 1.9 + 0.36 * len(gammas)))
    axes = figure.subplots()
    rows = [row for row in range(len(gammas)) if np.isfinite(table[row]).any()]
    best_columns = [int(np.nanargmin(table[row])) for row in rows]
    optima = table[rows, best_columns]
    # A perfect zero has no logarithm: it gets the colour of the smallest value that has one.
    positive = table[np.isfinite(table) & (table > 0)]
    low, top = (float(positive.min()), float(positive.max())) if positive.size else (1.0, 1.0)
    # Far above the minimum every cell is equally useless; keep the colours for the others, the optimum of each gamma
    # included. A proper score has a floor that no calibrator gets under, so its useful range is a small multiple.
    far, beyond = (40, 4) if criterion in ("ece", "mce") else (2, 1.2)
    high = max(min(top, max(low * far, float(optima.max()) * beyond)), low * 1.02)
    mesh = axes.pcolormesh(
        _cell_edges(temperatures),
        np.arange(len(gammas) + 1) - 0.5,
        np.ma.masked_invalid(np.where(table == 0, low, table)),
        cmap="cividis_r",
        norm=LogNorm(low, high),
        rasterized=True,
    )
    axes.set_facecolor("#F0F0F0")
    # Thin white lines between the rows say that the gamma axis is not to scale.
    axes.hlines(np.arange(1, len(gammas)) - 0.5, *axes.get_xlim(), color="white", linewidth=1.2)

    axes.plot(
        temperatures[best_columns],
        rows,
        linestyle="none",
        marker="o",
        markersize=6.5,
        markerfacecolor="white",
        markeredgecolor="black",
        markeredgewidth=1.1,
        zorder=4,
        clip_on=False,
        label="best T of each gamma",
    )
    star = int(np.flatnonzero(gammas == best[0])[0])
    axes.plot(
        [best[1]],
        [star],
        linestyle="none",
        marker="*",
        markersize=17,
        markerfacecolor=_VERMILION,
        markeredgecolor="white",
        markeredgewidth=1.1,
        zorder=5,
        clip_on=False,
        label=f"best of all: gamma = {best[0]:g}, T = {best[1]:g}",
    )
    axes.set_yticks(range(len(gammas)), [f"{gamma:g}" + ("  (T alone)" if gamma == 0 else "") for gamma in gammas])
    axes.set_ylabel("gamma (rows not to scale)")
    axes.set_xlabel("temperature T")
    axes.set_xlim(*_cell_edges(temperatures)[[0, -1]])
    axes.set_ylim(-0.5, len(gammas) - 0.5)
    _plain(axes, frame=True)

    decimals = next((n for n in range(4) if np.allclose(temperatures.round(n), temperatures, atol=1e-9)), 4)
    right = axes.secondary_yaxis("right")
    right.set_yticks(
        rows,
        [
            f"{_short(table[row, column])} at T = {temperatures[column]:.{decimals}f}"
            for row, column in zip(rows, best_columns, strict=True)
        ],
    )
    right.tick_params(length=0, labelsize=8.5, pad=8)
    bar = figure.colorbar(
        mesh, ax=axes, extend="max" if top > high else "neither", pad=0.015, fraction=0.045, aspect=22
    )
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 8 * low else MaxNLocator(6))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=8.5)
    bar.set_label(f"{_criterion_name(grid, criterion)}, logarithmic", fontsize=9)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes.set_title(title or f"{_criterion_name(grid, criterion)} over gamma and T", fontsize=12)
    return figure


def _criterion_name(grid: CalibrationGrid, criterion: str) -> str:
    if criterion in ("ece", "mce"):
        return f"{criterion.upper()} ({grid.estimator}, {grid.n_bins} bins)"
    return {"nll": "NLL", "brier": "Brier score"}.get(criterion, criterion)


def _short(value: float) -> str:
    return f"{value:.4f}" if value < 10 else f"{value:.4g}"


def _cell_edges(centres: Sequence[float] | np.ndarray) -> np.ndarray:
    """[K + 1] borders halfway between K ascending centres; the outer cells are symmetric."""
    centres = np.asarray(centres, dtype=np.float64)
    if len(centres) == 1:
        return np.array([centres[0] * 0.9, centres[0] * 1.1])
    middle = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _plain(axes: Any, *, frame: bool = False) -> None:
    axes.tick_params(labelsize=9, color="#888888")
    axes.xaxis.label.set_fontsize(10)
    axes.yaxis.label.set_fontsize(10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(frame)
    for spine in axes.spines.values():
        spine.set_color("#888888")
