"""Maps of a calibration grid and the line of its best temperatures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from focalkern._arrays import with_tensors
from focalkern._checks import counted, finite, one_of, short
from focalkern._types import LOSS_NAMES
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.plots._figure import BLUE, GREY, INK, VERMILION, check_title, new_figure, on_white, plain_axes, wrapped

__all__ = ["Ridge", "colour_range", "fit_ridge", "grid_heatmap", "ridge_diagram"]


def _checked_grid(op: str, grid: Any) -> CalibrationGrid:
    if not isinstance(grid, CalibrationGrid):
        raise TypeError(f"{op}: grid must be a CalibrationGrid, got {short(grid)}")
    return with_tensors(grid)


@dataclass(frozen=True)
class Ridge:
    """The best temperature of every gamma of a grid, and the straight line through them.

    Attributes:
        gammas, temperatures: float64 [R], one per gamma with a finite cell, gammas ascending.
        values: float64 [R], the criterion at these cells.
        at_border: bool [R], whether the temperature is the smallest or largest of the grid, so that the optimum may lie
            beyond. These gammas are not in the fit.
        slope, intercept: least-squares fit T = slope * gamma + intercept; NaN for fewer than two different gammas.
        r_squared: fraction of the variance of T that the line explains; NaN without a line or without variance.

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
    r"""The best temperature of every gamma of a grid, and the least-squares line through them.

    .. math:: T^*(\gamma) = \arg\min_T \text{criterion}(\gamma, T) \approx a \gamma + b

    The focal calibration map with gamma is close to a temperature of 1/(a' gamma + b'), so the temperature that
    compensates it grows about linearly with gamma.

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
    single = len(temperatures) == 1  # a single temperature is not a border
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


@on_white
def ridge_diagram(grid: CalibrationGrid, *, title: str | None = None) -> Figure:
    """The best temperature against gamma, to scale, with the fitted line, for each criterion.

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
    check_title("ridge_diagram", title)
    ridges = {name: fit_ridge(grid, name) for name, table in grid.tables.items() if bool(table.isfinite().any())}
    if not ridges:
        raise ValueError("ridge_diagram: grid must have a finite cell, got none")
    figure = new_figure(width=7.2, height=4.0 + 0.4 * len(ridges))
    axes = figure.subplots()
    # Each criterion differs from the others in colour, lightness, marker, size and dashes.
    styles = [(BLUE, "o", 9, "-"), (VERMILION, "s", 5.5, "--"), (INK, "^", 5, ":"), (GREY, "D", 4, "-.")]
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
                label=f"{label}: T = {_describe_line(ridge)}{r_squared}",
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
            color=INK,
            marker="o",
            markersize=7,
            fillstyle="none",
            label="at the border of the grid: not in the fit",
        )
    axes.set_xlabel("gamma")
    axes.set_ylabel("temperature T")
    plain_axes(axes)
    axes.grid(color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    # One legend entry per line: side by side they would be wider than the figure.
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=8.5)
    axes.set_title(wrapped(title or "Best temperature of each gamma", 0.8 * figure.get_figwidth(), 12), fontsize=12)
    return figure


def _describe_line(ridge: Ridge) -> str:
    return f"{ridge.slope:.3g} gamma {'-' if ridge.intercept < 0 else '+'} {abs(ridge.intercept):.3g}"


@on_white
def grid_heatmap(
    grid: CalibrationGrid,
    criterion: str = "ece",
    *,
    title: str | None = None,
    best: tuple[float, float, float] | None = None,
) -> Figure:
    """The (gamma, T) table of one criterion as a map, with the best temperature of every gamma.

    The map has one row per gamma, ascending upwards, all of the same height; the temperature axis is to scale. The
    colour scale is logarithmic, because the interesting differences are near the minimum, and is clipped beyond the
    useful range. A dot marks the best temperature of a row, with its value at the right; the star marks the best cell.
    The line is that of :func:`fit_ridge`. It is straight in gamma, so it bends where the rows are not to scale;
    :func:`ridge_diagram` shows it to scale. Cells that are not finite are blank.

    Args:
        grid: a computed grid.
        criterion: a name in ``grid.tables``.
        title: heading; by default the criterion, its estimator and its number of bins.
        best: (gamma, temperature, value) of the cell with the star; None is ``grid.best(criterion)``.

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
    check_title("grid_heatmap", title)
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

    figure = new_figure(width=9.2, height=max(3.2, 1.9 + 0.36 * len(gammas)))
    axes = figure.subplots()
    rows = [row for row in range(len(gammas)) if np.isfinite(table[row]).any()]
    best_columns = [int(np.nanargmin(table[row])) for row in rows]
    low, high, top = colour_range(table, criterion)
    mesh = axes.pcolormesh(
        _cell_edges(temperatures),
        np.arange(len(gammas) + 1) - 0.5,
        np.ma.masked_invalid(np.maximum(table, low)),
        cmap="cividis_r",
        norm=LogNorm(low, high),
        rasterized=True,
    )
    axes.set_facecolor("#F0F0F0")
    # Thin white lines between the rows show that the gamma axis is not to scale.
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
            path_effects=[withStroke(linewidth=3.2, foreground="black")],  # visible on every colour
            zorder=3,
            label=f"fit: T = {_describe_line(ridge)}",
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
        markerfacecolor=VERMILION,
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
    plain_axes(axes, frame=True)

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
    heading = title or f"{_criterion_name(grid, criterion)} over gamma and T"
    axes.set_title(wrapped(heading, 0.7 * figure.get_figwidth(), 12), fontsize=12)
    return figure


def colour_range(table: np.ndarray[Any, Any], criterion: str) -> tuple[float, float, float]:
    """The bounds of the colour scale and the largest value of ``table`` [Gg, Gt], which has a finite cell."""
    # Log 0 is not finite: 0 gets the colour of the smallest positive value.
    positive = table[np.isfinite(table) & (table > 0)]
    low, top = (float(positive.min()), float(positive.max())) if positive.size else (1.0, 1.0)
    # If all rows are right, the scores fall to 0 with T, and multiples of the lowest are no useful range.
    least = 1e-3 * float(np.median(positive)) if positive.size else 0.0
    # Cells far above the minimum need no distinct colours; the scale ends above the optimum of each gamma. A proper
    # score has a lower bound above 0, so its useful range is a small multiple of the minimum.
    finite = np.where(np.isfinite(table), table, np.inf)
    optima = finite.min(1)
    far, beyond = (40, 4) if criterion in ("ece", "mce") or low < least else (2, 1.2)
    low = max(low, least)
    high = max(min(top, max(low * far, float(optima[np.isfinite(optima)].max()) * beyond)), low * 1.02)
    return low, high, top


def _criterion_name(grid: CalibrationGrid, criterion: str) -> str:
    if criterion in ("ece", "mce"):
        return f"{criterion.upper()} ({grid.estimator}, {counted(grid.n_bins, 'bin')})"
    return LOSS_NAMES.get(criterion, criterion)


def _short(value: float) -> str:
    return f"{value:.4f}" if value < 10 else f"{value:.4g}"


def _cell_edges(centres: Sequence[float] | np.ndarray) -> np.ndarray:
    """[K + 1] borders halfway between K ascending centres; the outer cells are symmetric."""
    centres = np.asarray(centres, dtype=np.float64)
    if len(centres) == 1:
        return np.array([centres[0] * 0.9, centres[0] * 1.1])
    middle = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])
