"""Parts of the figures of the training study: styles of the losses, axes, lines with their spread, files."""

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from benchmarks.train_study import objectives
from benchmarks.train_study.run_rows import Row
from focalkern._atomic import write_atomically

Styles = dict[str, tuple[Any, Any]]  # by loss: colour and dashes

STYLES: Styles = {
    "cross-entropy": ("#000000", "-"),
    "focal-3": ("#0072B2", "-"),
    "flsd-53": ("#56B4E9", (0, (5, 1.5))),
    "adafocal": ("#009E73", "-"),
    "inverse-focal-2": ("#D55E00", "-"),
    "brier": ("#CC79A7", (0, (3, 1, 1, 1))),
}
"""The losses in figures that compare losses: more than six lines would be indistinguishable. The other losses have
separate figures of their curves by epoch."""

FONTS = {"axes.titlesize": 10, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8}


def styles_by_gamma(losses: Iterable[str]) -> Styles:
    """Styles from the strongest focal loss over cross-entropy to inverse focal losses: dark to light, with alternating
    dashes."""
    gammas = {loss: gamma for loss in losses if (gamma := objectives.gamma(loss)) is not None}
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 0.95, max(len(gammas), 2)))
    dashes = ("-", (0, (5, 1.5)))
    order = sorted(gammas, key=lambda loss: -gammas[loss])
    return {loss: (colours[i], dashes[i % 2]) for i, loss in enumerate(order)}


def styles_of_others(losses: Iterable[str]) -> Styles:
    """Style of cross-entropy and of losses that the other tables of styles lack."""
    found = [loss for loss in losses if loss not in STYLES and objectives.gamma(loss) is None]
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    dashes = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)))
    styles = {loss: (colours[i % 6], dashes[i % 4]) for i, loss in enumerate(found)}
    return {"cross-entropy": STYLES["cross-entropy"], **styles} if styles else {}


def with_gamma(loss: str) -> str:
    return f"{objectives.gamma(loss):g} ({loss})"


def mark_significant(
    ax: Axes, x: Sequence[float], heights: Sequence[float], p: Sequence[float | None], colour: str
) -> None:
    """A star above each point that differs from cross-entropy: p < 0.05 in the paired t-test of the table."""
    for at, height, value in zip(x, heights, p, strict=True):
        if value is not None and value < 0.05:  # none: cross-entropy itself, or too few seeds
            ax.annotate("*", (at, height), xytext=(5, 3), textcoords="offset points", fontsize=14, color=colour)


def png(figure: Figure) -> bytes:
    """A palette of 256 colours is enough for lines and bands, and takes a third of the bytes."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    picture = Image.open(drawn).convert("RGB")
    picture.quantize(256, kmeans=1, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def drawn(rows: Iterable[Row], styles: Styles) -> list[str]:
    present = {row["loss"] for row in rows}
    return [loss for loss in styles if loss in present]


def grid(rows: int, columns: int, width: float = 3.4) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * columns, 2.9 * rows + 0.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        ax.grid(color="#E8E8E8", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def epoch_lines(ax: Axes, rows: Sequence[Row], column: str, title: str, styles: Styles = STYLES) -> None:
    lines(ax, rows, "epoch", column, styles=styles)
    ax.set(title=title, xlabel="epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def lines(ax: Axes, rows: Sequence[Row], x: str, y: str, marker: str | None = None, styles: Styles = STYLES) -> None:
    for loss in drawn(rows, styles):
        colour, dashes = styles[loss]
        places, middle, low, high = _summary([row for row in rows if row["loss"] == loss], x, y)
        ax.plot(
            places, middle, color=colour, linestyle=dashes, linewidth=1.5, label=loss, marker=marker, markersize=3.5
        )
        ax.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)


def _summary(rows: Sequence[Row], x: str, y: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """x ascending, and mean, lowest and highest y over seeds."""
    values: dict[float, list[float]] = {}
    for row in rows:
        values.setdefault(row[x], []).append(row[y])
    places = sorted(values)
    return (
        places,
        [float(np.mean(values[place])) for place in places],
        [min(values[place]) for place in places],
        [max(values[place]) for place in places],
    )


def losses_below(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    columns = 6 if figure.get_figwidth() > 8 else 3
    if len(labels) > columns:
        columns = -(-len(labels) // 2)  # two full rows
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def write_figures(makers: dict[str, Callable[[], Figure | None]], folder: Path) -> None:
    for name, make in makers.items():
        with matplotlib.rc_context(FONTS):
            figure = make()
        path = folder / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)  # a figure of an earlier report, which had other losses
        else:
            write_atomically(path, png(figure))
