"""Reliability diagrams and maps of calibration grids, as matplotlib figures that belong to nobody's pyplot.

The drawing functions return a ``matplotlib.figure.Figure`` with its own canvas: ``figure.savefig("name.png")`` writes
it, a notebook shows it. Axes are fractions. Colours are from the set of Okabe & Ito and the map ``cividis``, which
people with any of the common colour deficiencies can tell apart, and which differ in lightness too; nothing is told by
colour alone. :func:`reliability_bands` and :func:`fit_ridge` return the numbers behind the bands and the fitted line.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import with_tensors
from focalkern._checks import MOST_RESAMPLES, finite, integer, number, one_of, short
from focalkern.losses import AdaFocalRecord
from focalkern.metrics import ReliabilityBins
from focalkern.ops.calibration_grid import CalibrationGrid

try:
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, to_rgba
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise ImportError("focalkern.plots needs matplotlib: pip install matplotlib") from error

__all__ = [
    "ReliabilityBands",
    "Ridge",
    "adafocal_history",
    "fit_ridge",
    "grid_heatmap",
    "reliability_bands",
    "reliability_diagram",
    "ridge_diagram",
]

_BLUE, _VERMILION, _GREY, _INK = "#0072B2", "#D55E00", "#8C8C8C", "#222222"
_PALE_BLUE = "#9CC9E6"  # of bars, so that what is drawn over them can be read
_BAND = to_rgba(_INK, 0.2)
_ENOUGH = 20  # samples of a bin whose gap is worth a word


@dataclass(frozen=True)
class ReliabilityBands:
    """How far chance alone moves the accuracy of each bin. All are float64 [M], NaN for an empty bin.

    Attributes:
        lower, upper: bootstrap interval of the bin's accuracy.
        calibrated_lower, calibrated_upper: where the accuracy of the bin falls if the classifier is perfectly
            calibrated.
        level: of both, a fraction.

    Example:
        >>> confidence, correct = torch.full((100,), 0.8), torch.arange(100) < 77
        >>> bins = fk.metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=1)
        >>> bands = fk.plots.reliability_bands(bins)
        >>> bool(bands.calibrated_lower < 0.8), bool(bands.calibrated_upper > 0.8)
        (True, True)
        >>> bands.inside(bins)
        tensor([True])
    """

    lower: Tensor
    upper: Tensor
    calibrated_lower: Tensor
    calibrated_upper: Tensor
    level: float

    def inside(self, bins: ReliabilityBins) -> Tensor:
        """Whether the accuracy of each bin is one that a perfectly calibrated classifier would show.

        Args:
            bins: the bins that the bands were computed of.

        Returns:
            bool [M], False for an empty bin.

        Raises:
            RuntimeError: bins of another number.
        """
        accuracy = with_tensors(bins).accuracy.cpu()
        return (self.calibrated_lower <= accuracy) & (accuracy <= self.calibrated_upper)


def reliability_bands(
    bins: ReliabilityBins, *, level: float = 0.95, replicates: int = 2000, seed: int = 0
) -> ReliabilityBands:
    r"""Bootstrap interval of every bin's accuracy, and the band of a perfectly calibrated classifier.

    .. math::
        \text{interval}_b: \text{quantiles of the accuracy of bin } b \text{ when the } N \text{ samples are drawn anew
        with replacement}, \qquad
        \text{band}_b: \text{quantiles of } \tfrac{1}{n_b} \text{Binomial}(n_b, \text{conf}_b)

    The cuts between the bins stay where they are. Then a replicate is no more than new counts of right and wrong
    samples per bin, multinomial with the observed shares, and the samples themselves are not needed. Where all samples
    of a bin are right, or all wrong, every replicate agrees and the interval is one point, which says how little the
    bootstrap knows of such a bin, not how sure it is; the band has no such weakness. The binomial takes all samples of
    a bin to have its mean confidence: their true spread makes the accuracy vary a little less, never more.

    Args:
        bins: one set of bins, not a batch.
        level: share of the replicates inside, 0 < level < 1.
        replicates: how many.
        seed: the same seed gives the same bands.

    Returns:
        :class:`ReliabilityBands`, on the CPU.

    Raises:
        ValueError: bins of a batch or without samples; a level outside (0, 1); replicates < 1.

    Source: Efron & Tibshirani 1993, *An Introduction to the Bootstrap*, chapter 13 (the interval); Bröcker & Smith
    2007, "Increasing the reliability of reliability diagrams" (the band).

    Example:
        >>> confidence, correct = torch.linspace(0.5, 1.0, 100), torch.arange(100) % 4 > 0
        >>> bins = fk.metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=2, estimator="equal_mass")
        >>> bands = fk.plots.reliability_bands(bins)
        >>> bands.inside(bins)  # 0.75 of each bin are right, its mean confidence is 0.62 and 0.88
        tensor([ True, False])
    """
    bins = _checked_bins("reliability_bands", bins)
    level = _checked_level("reliability_bands", level)
    replicates = integer("reliability_bands", "replicates", replicates, 1, MOST_RESAMPLES)
    rng = np.random.default_rng(integer("reliability_bands", "seed", seed) % 2**63)
    count = bins.count.cpu().numpy()
    filled = count > 0
    confidence, accuracy = (
        values.cpu().to(torch.float64).numpy()[filled].clip(0, 1) for values in (bins.confidence, bins.accuracy)
    )
    right = accuracy * count[filled]
    # equal_mass_interp leaves samples out; they are drawn too.
    shares = np.concatenate([right, count[filled] - right, [bins.n_samples - count.sum()]]) / bins.n_samples
    drawn = rng.multinomial(bins.n_samples, shares / shares.sum(), size=replicates)  # [replicates, 2 * filled + 1]
    drawn_right, drawn_wrong = drawn[:, : len(right)], drawn[:, len(right) : -1]
    with np.errstate(invalid="ignore"):  # a bin that a replicate leaves empty has no accuracy there
        resampled = drawn_right / (drawn_right + drawn_wrong)
    calibrated = rng.binomial(count[filled], confidence, size=(replicates, len(right))) / count[filled]
    tail = (1 - level) / 2

    def spread(values: np.ndarray) -> tuple[Tensor, Tensor]:
        both = np.full((2, len(count)), np.nan)
        if values.shape[1]:
            both[:, filled] = np.nanquantile(values, (tail, 1 - tail), axis=0)
        lower, upper = torch.from_numpy(both)
        return lower, upper

    # A bin that no replicate has hit (there is no such bin unless replicates is tiny) keeps its own accuracy.
    missed = np.isnan(resampled).all(axis=0)
    resampled[:, missed] = accuracy[missed]
    return ReliabilityBands(*spread(resampled), *spread(calibrated), level)


def reliability_diagram(
    bins: ReliabilityBins | Mapping[str, ReliabilityBins], *, title: str | None = None, level: float | None = 0.95
) -> Figure:
    r"""Accuracy against confidence, bin by bin, above the histogram of the confidences.

    .. math:: \text{bar}_b = \text{acc}_b, \quad \text{gap}_b = \text{acc}_b - \text{conf}_b

    A bar stands over the range of an equal-width bin and is as high as its accuracy; the hatched part runs from there
    to the bin's mean confidence, so its height is the gap. Bins of equal mass, most of them narrower than a line, are
    points at (mean confidence, accuracy) with their gap as a stroke. Above each panel stand its figures, as
    fractions, computed from the bins given; the largest gap is that of the bins with at least 20 samples, because a bin
    of one sample can have any. In the histogram below, the samples of each bin.

    The shaded band is where the accuracies of a perfectly calibrated classifier with these confidences would fall; a
    bin outside of it is miscalibrated beyond chance. The whisker is the bootstrap interval of the bin's accuracy; a
    bin that is all right or all wrong has none. Both are from :func:`reliability_bands`.

    Args:
        bins: what :func:`focalkern.metrics.reliability_bins` returns, or several by panel title, drawn side by side
            on common axes, at most three in a row. Equal-width bins make the familiar picture.
        title: heading of the whole figure.
        level: of band and whiskers; None draws neither.

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
    _check_title("reliability_diagram", title)
    level = None if level is None else _checked_level("reliability_diagram", level)
    if not panels:
        raise ValueError("reliability_diagram: expected at least one set of bins, got none")
    panels = {name: _checked_bins("reliability_diagram", one) for name, one in panels.items()}
    across = _across(len(panels))
    down = -(-len(panels) // across)
    figure = _figure(width=0.5 + 3.6 * across + 0.6 * (across == 1), height=0.7 + 5.2 * down)
    axes = figure.subplots(2 * down, across, squeeze=False, gridspec_kw={"height_ratios": [3.4, 1] * down})
    tallest = max(float(one.weight.max()) for one in panels.values()) or 1.0
    by_bar = all(one.estimator == "equal_width" for one in panels.values())
    for index, (name, one) in enumerate(panels.items()):
        row, column = divmod(index, across)
        top, bottom = axes[2 * row : 2 * row + 2, column]
        bands = None if level is None else reliability_bands(one, level=level)
        # A line of air above the panels of a lower row.
        _reliability_panel(top, bottom, one, bands, "\n" * (row > 0) + name, first=column == 0)
        bottom.set_ylim(0, tallest * 1.22)
    for index in range(len(panels), across * down):
        row, column = divmod(index, across)
        for unused in axes[2 * row : 2 * row + 2, column]:
            unused.remove()
    figure.legend(
        handles=[
            *(
                [
                    Patch(facecolor=_PALE_BLUE, edgecolor=_BLUE, label="accuracy of the bin"),
                    Patch(facecolor="none", edgecolor=_VERMILION, hatch="////", label="gap to its mean confidence"),
                ]
                if by_bar
                else [
                    Line2D([], [], color=_BLUE, marker="o", linewidth=0.8, label="accuracy of the bin"),
                    Line2D([], [], color=_VERMILION, linewidth=1.6, label="gap to its mean confidence"),
                ]
            ),
            Line2D([], [], color=_INK, linestyle="--", linewidth=1, label="perfect calibration"),
            *(
                []
                if level is None
                else [
                    Patch(facecolor=_BAND, edgecolor=_INK, label=f"if calibrated ({100 * level:g} %)"),
                    Line2D(
                        [],
                        [],
                        color=_INK,
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
    if title:
        figure.suptitle(title, fontsize=12)
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
        top.bar(lower, accuracy, width, align="edge", color=_PALE_BLUE, edgecolor="white", linewidth=0.6, zorder=2)
        top.hlines(accuracy, lower, upper, color=_BLUE, linewidth=1.8, zorder=6)
        top.bar(
            lower,
            gap,
            width,
            bottom=np.minimum(accuracy, confidence),
            align="edge",
            facecolor="none",
            edgecolor=_VERMILION,
            hatch="////",
            linewidth=0.7,
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
    if bands is not None:
        low, high, band_low, band_high = (
            values.numpy()[filled]
            for values in (bands.lower, bands.upper, bands.calibrated_lower, bands.calibrated_upper)
        )
        if bins.estimator == "equal_width":
            top.bar(lower, band_high - band_low, upper - lower, bottom=band_low, align="edge", color=_BAND, zorder=4)
            for edge in (band_low, band_high):
                top.hlines(edge, lower, upper, color=_INK, linewidth=0.7, zorder=4)
            at = (lower + upper) / 2
        else:
            top.fill_between(confidence, band_low, band_high, facecolor=_BAND, edgecolor=_INK, linewidth=0.6, zorder=1)
            at = confidence
        known = low < high
        top.vlines(at[known], low[known], high[known], color=_INK, linewidth=1.3, zorder=7)
    top.plot([0, 1], [0, 1], color=_INK, linestyle="--", linewidth=1, zorder=5)
    # Not N: equal_mass_interp leaves samples out. Not 0 either, when it leaves all out.
    samples = weight.sum() or np.nan
    lines = [
        f"ECE {float((weight * gap).sum()):.4f} ({bins.estimator}, {bins.n_bins} bins)",
        f"accuracy {float((weight * accuracy).sum() / samples):.4f}, "
        f"mean confidence {float((weight * confidence).sum() / samples):.4f}",
        f"{bins.n_samples:,} samples; {_largest_gap(gap, count)}",
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
        _plain(axes)
        axes.grid(axis="y", color="#E4E4E4", linewidth=0.7, zorder=0)
        axes.set_axisbelow(True)


def _across(n_panels: int) -> int:
    """Panels in a row: more than three beside each other are too small to read."""
    return {1: 1, 2: 2, 4: 2}.get(n_panels, 3)


def _largest_gap(gap: np.ndarray[Any, Any], count: np.ndarray[Any, Any]) -> str:
    """In words, over the bins that hold enough samples for their gap to say something."""
    enough = count >= _ENOUGH
    if not enough.any():
        return f"no bin has {_ENOUGH}"
    at = int(np.where(enough, gap, -1).argmax())
    return f"largest gap {gap[at]:.4f} (bins of {_ENOUGH} or more)"


def _checked_level(op: str, level: Any) -> float:
    found = number(op, "level", level)
    if not 0 < found < 1:
        raise ValueError(f"{op}: level must be between 0 and 1, got {short(level)}")
    return found


def _check_title(op: str, title: Any) -> None:
    if title is not None and not isinstance(title, str):
        raise TypeError(f"{op}: title must be text or None, got {short(title)}")


def _checked_grid(op: str, grid: Any) -> CalibrationGrid:
    if not isinstance(grid, CalibrationGrid):
        raise TypeError(f"{op}: grid must be a CalibrationGrid, got {short(grid)}")
    return with_tensors(grid)


def _checked_bins(op: str, bins: Any) -> ReliabilityBins:
    if not isinstance(bins, ReliabilityBins):
        raise TypeError(f"{op}: bins must be ReliabilityBins, got {short(bins)}")
    bins = with_tensors(bins)
    if bins.count.dim() != 1:
        raise ValueError(f"{op}: bins must be [n_bins], got shape {list(bins.count.shape)}")
    if bins.n_samples == 0:
        raise ValueError(f"{op}: bins must hold at least one sample, got none")
    return bins


@dataclass(frozen=True)
class Ridge:
    """The best temperature of every gamma of a grid, and the straight line through them.

    Attributes:
        gammas, temperatures: float64 [R], one per gamma that has a finite cell, gammas ascending.
        values: float64 [R], the criterion there.
        at_border: bool [R], the temperature is the smallest or largest of the grid, so the optimum may lie beyond.
            These are not in the fit.
        slope, intercept: of T = slope * gamma + intercept, least squares; NaN for fewer than two different gammas.
        r_squared: share of the variance of T that the line explains; NaN where there is no line or no variance.

    Example:
        >>> logits, target = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> grid = fk.calibration_grid(logits, target, [0.0, 1.0, 2.0], torch.arange(1, 21) / 2, criteria=("nll",))
        >>> ridge = fk.plots.fit_ridge(grid, "nll")
        >>> ridge.temperatures
        tensor([3.0000, 5.0000, 7.5000], dtype=torch.float64)
        >>> round(ridge.line(1.0), 2)
        5.17
    """

    gammas: Tensor
    temperatures: Tensor
    values: Tensor
    at_border: Tensor
    slope: float
    intercept: float
    r_squared: float

    def line(self, gamma: Any) -> Any:
        """The temperature on the line: slope * gamma + intercept.

        Args:
            gamma: a number, a tensor or an array.

        Returns:
            The temperature, of the same kind.
        """
        return self.slope * gamma + self.intercept


def fit_ridge(grid: CalibrationGrid, criterion: str = "ece") -> Ridge:
    r"""The valley of a grid: the best temperature of every gamma, and its least-squares line.

    .. math:: T^*(\gamma) = \arg\min_T \text{criterion}(\gamma, T) \approx a \gamma + b

    The focal calibration map with gamma is close to a temperature of 1/(a' gamma + b'), so the temperature that undoes
    it grows about linearly with gamma.

    Args:
        grid: a computed grid.
        criterion: a name in ``grid.tables``.

    Returns:
        :class:`Ridge`, on the CPU.

    Raises:
        ValueError: a criterion that the grid does not have.

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), section 5.2 and figure 8.

    Example:
        >>> logits, target = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> grid = fk.calibration_grid(logits, target, [0.0, 1.0, 2.0], torch.arange(1, 21) / 2, criteria=("nll",))
        >>> ridge = fk.plots.fit_ridge(grid, "nll")
        >>> round(ridge.slope, 2), round(ridge.intercept, 2)
        (2.25, 2.92)
    """
    grid = _checked_grid("fit_ridge", grid)
    one_of("fit_ridge", "criterion", criterion, grid.tables)
    gammas, order = grid.gammas.cpu().to(torch.float64).sort(stable=True)
    table = grid.tables[criterion].cpu().to(torch.float64)[order]
    temperatures = grid.temperatures.cpu().to(torch.float64)
    table = torch.where(table.isfinite(), table, torch.inf)
    filled = table.isfinite().any(1)
    gammas, (values, column) = gammas[filled], table[filled].min(1)
    best = temperatures[column]
    single = len(temperatures) == 1  # a border that was asked for is none
    at_border = ((best == temperatures.min()) | (best == temperatures.max())) & (not single)
    x, y = gammas[~at_border], best[~at_border]
    slope = intercept = r_squared = float("nan")
    if len(x.unique()) > 1:
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
        intercept = float(y.mean() - slope * x.mean())
        variance = float((y - y.mean()).square().sum())
        if variance > 0:
            r_squared = 1 - float((y - slope * x - intercept).square().sum()) / variance
    return Ridge(gammas, best, values, at_border, slope, intercept, r_squared)


def ridge_diagram(grid: CalibrationGrid, *, title: str | None = None) -> Figure:
    """The best temperature of every gamma against gamma, to scale, with the fitted line, for each criterion.

    Args:
        grid: a computed grid; every criterion with a finite cell is drawn.
        title: heading.

    Returns:
        ``matplotlib.figure.Figure``.

    Raises:
        ValueError: a grid without a finite cell.
        ImportError: matplotlib is not installed (on import of this module).

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), figure 8.

    Example:
        >>> logits, target = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> grid = fk.calibration_grid(logits, target, [0.0, 1.0, 2.0], torch.arange(1, 21) / 2, criteria=("nll",))
        >>> figure = fk.plots.ridge_diagram(grid, title="NLL")
        >>> len(figure.axes)
        1
    """
    grid = _checked_grid("ridge_diagram", grid)
    _check_title("ridge_diagram", title)
    ridges = {name: fit_ridge(grid, name) for name, table in grid.tables.items() if bool(table.isfinite().any())}
    if not ridges:
        raise ValueError("ridge_diagram: grid must have a finite cell, got none")
    figure = _figure(width=7.2, height=4.0 + 0.4 * len(ridges))
    axes = figure.subplots()
    # Each criterion differs from the others in colour, lightness, marker, size and dashes.
    styles = [(_BLUE, "o", 9, "-"), (_VERMILION, "s", 5.5, "--"), (_INK, "^", 5, ":"), (_GREY, "D", 4, "-.")]
    bordered = False
    for index, (name, ridge) in enumerate(ridges.items()):
        colour, marker, size, dashes = styles[index % len(styles)]
        gammas, best, at_border = (values.numpy() for values in (ridge.gammas, ridge.temperatures, ridge.at_border))
        label = _criterion_name(grid, name)
        if np.isfinite(ridge.slope):
            fitted = gammas[~at_border]
            ends = np.array([fitted.min(), fitted.max()])
            r_squared = f", R\u00b2 = {ridge.r_squared:.3f}" if np.isfinite(ridge.r_squared) else ""
            axes.plot(
                ends,
                ridge.line(ends),
                dashes,
                color=colour,
                linewidth=1.3,
                label=f"{label}: T = {_line_in_words(ridge)}{r_squared}",
            )
        point: dict[str, Any] = {
            "linestyle": "none",
            "color": colour,
            "marker": marker,
            "markersize": size,
            "zorder": 3,
        }
        axes.plot(
            gammas[~at_border],
            best[~at_border],
            **point,
            markeredgecolor="white",
            label=f"{label}: best T of each gamma",
        )
        axes.plot(gammas[at_border], best[at_border], **point, fillstyle="none", markeredgewidth=1.4)
        bordered = bordered or bool(at_border.any())
    if bordered:
        axes.plot(
            [],
            [],
            linestyle="none",
            color=_INK,
            marker="o",
            markersize=7,
            fillstyle="none",
            label="at the border of the grid: not in the fit",
        )
    axes.set_xlabel("gamma")
    axes.set_ylabel("temperature T")
    _plain(axes)
    axes.grid(color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    # One below the other: two beside each other are wider than the figure.
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=8.5)
    axes.set_title(title or "Best temperature of each gamma", fontsize=12)
    return figure


def _line_in_words(ridge: Ridge) -> str:
    return f"{ridge.slope:.3g} gamma {'-' if ridge.intercept < 0 else '+'} {abs(ridge.intercept):.3g}"


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
    the best cell of all. The line is :func:`fit_ridge`'s, straight in gamma and therefore bent where the rows are not
    to scale; :func:`ridge_diagram` has it to scale. Cells that are not finite are left blank.

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

    Example:
        >>> logits, target = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> grid = fk.calibration_grid(logits, target, [0.0, 1.0, 2.0], torch.arange(1, 21) / 2, criteria=("nll",))
        >>> figure = fk.plots.grid_heatmap(grid, "nll", title="NLL")
        >>> figure.axes[0].get_xlabel()
        'temperature T'
    """
    grid = _checked_grid("grid_heatmap", grid)
    _check_title("grid_heatmap", title)
    one_of("grid_heatmap", "criterion", criterion, grid.tables)
    if best is None:
        best = grid.best(criterion)
    elif isinstance(best, tuple | list) and len(best) == 3:
        gamma, temperature, value = (finite("grid_heatmap", "best", one) for one in best)
        best = gamma, temperature, value
    else:
        raise TypeError(f"grid_heatmap: best must be (gamma, temperature, value), got {short(best)}")
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
    low, high, top = colour_range(table, criterion)
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

    ridge = fit_ridge(grid, criterion)
    if np.isfinite(ridge.slope):
        fitted = ridge.gammas[~ridge.at_border].numpy()
        covered = (fitted.min() <= gammas) & (gammas <= fitted.max())
        axes.plot(
            ridge.line(gammas[covered]),
            np.flatnonzero(covered),
            color="white",
            linewidth=1.6,
            path_effects=[withStroke(linewidth=3.2, foreground="black")],  # shows on every colour
            zorder=3,
            label=f"fit: T = {_line_in_words(ridge)}",
        )
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


def colour_range(table: np.ndarray[Any, Any], criterion: str) -> tuple[float, float, float]:
    """Where the colours of a map begin and end, and its largest value; ``table`` is [Gg, Gt] with a finite cell."""
    # A perfect zero has no logarithm: it gets the colour of the smallest value that has one.
    positive = table[np.isfinite(table) & (table > 0)]
    low, top = (float(positive.min()), float(positive.max())) if positive.size else (1.0, 1.0)
    # Far above the minimum every cell is equally useless; keep the colours for the others, the optimum of each gamma
    # included. A proper score has a floor that no calibrator gets under, so its useful range is a small multiple.
    finite = np.where(np.isfinite(table), table, np.inf)
    optima = finite.min(1)
    far, beyond = (40, 4) if criterion in ("ece", "mce") else (2, 1.2)
    high = max(min(top, max(low * far, float(optima[np.isfinite(optima)].max()) * beyond)), low * 1.02)
    return low, high, top


def adafocal_history(history: Sequence[AdaFocalRecord], *, title: str | None = None) -> Figure:
    r"""What AdaFocal saw in each bin and what it did: calibration error above, gamma below, against the update.

    .. math:: E_b = \text{conf}_b - \text{acc}_b

    One line per bin, dark for low confidence and light for high. A bin without validation samples has a gap in the
    upper panel and keeps its gamma in the lower one, where the line at 0 parts focal from inverse focal.

    Args:
        history: ``AdaFocalLoss.history``, all of one number of bins.
        title: heading of the figure.

    Returns:
        ``matplotlib.figure.Figure``.

    Raises:
        ValueError: an empty history.
        ImportError: matplotlib is not installed (on import of this module).

    Source: Ghosh et al., NeurIPS 2022, which shows a few bins so.

    Example:
        >>> criterion = fk.AdaFocalLoss(n_bins=2)
        >>> for accuracy in ([0.4, 0.6], [0.4, 0.7]):
        ...     record = criterion.update_bins([0.0, 0.5, 1.0], mean_confidence=[0.4, 0.9], accuracy=accuracy)
        >>> figure = fk.plots.adafocal_history(criterion.history)
        >>> len(figure.axes)
        3
    """
    _check_title("adafocal_history", title)
    given: object = history
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    if not listed or not all(isinstance(record, AdaFocalRecord) for record in history):
        raise TypeError(f"adafocal_history: history must be a list of AdaFocalRecord, got {short(history)}")
    if not history:
        raise ValueError("adafocal_history: history must have at least one update, got none")
    update = np.arange(1, len(history) + 1)
    error = torch.stack([record.confidence - record.accuracy for record in history]).numpy()
    gamma = torch.stack([record.bin_gammas for record in history]).numpy()
    n_bins = gamma.shape[1]
    figure = _figure(width=7.2, height=6.0)
    above, below = figure.subplots(2, 1, sharex=True)
    colours = colormaps["cividis"](np.linspace(0, 0.92, n_bins))  # its lightest yellow is lost on white
    for b in range(n_bins):
        marker = "." if len(history) < 30 else ""
        above.plot(update, error[:, b], color=colours[b], linewidth=1.2, marker=marker)
        below.plot(update, gamma[:, b], color=colours[b], linewidth=1.2, marker=marker)
    above.set_ylabel("confidence - accuracy")
    below.set_ylabel("gamma")
    below.set_xlabel("update")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.axhline(0, color=_INK, linewidth=0.8, zorder=0)
        _plain(axes)
    shades = ScalarMappable(BoundaryNorm(np.arange(n_bins + 1) - 0.5, n_bins), ListedColormap(colours))
    bar = figure.colorbar(shades, ax=[above, below], pad=0.015, fraction=0.04, aspect=30)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=8.5)
    bar.set_label("bin, by confidence", fontsize=9)
    above.set_title(title or "AdaFocal in validation, bin by bin", fontsize=12)
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


class _Figure(Figure):
    """One that a notebook shows as a picture, also where pyplot, which would see to that, was never imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def _figure(width: float, height: float) -> Figure:
    figure = _Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
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
