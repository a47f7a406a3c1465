"""Figures, colours, axes and argument checks shared by all plots."""

import functools
import io
import textwrap
from collections.abc import Callable
from typing import Any, ParamSpec

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from focalkern._arrays import with_tensors
from focalkern._checks import number, short
from focalkern.metrics import ReliabilityBins

__all__ = [
    "BAND",
    "BLUE",
    "GREY",
    "INK",
    "PALE_BLUE",
    "VERMILION",
    "check_title",
    "checked_bins",
    "checked_level",
    "new_figure",
    "on_white",
    "plain_axes",
    "set_heading",
    "wrapped",
]

BLUE, VERMILION, GREY, INK = "#0072B2", "#D55E00", "#8C8C8C", "#222222"
PALE_BLUE = "#9CC9E6"  # opacity of bars, so that marks on top of them are visible
BAND = to_rgba(INK, 0.2)


# The page of a figure is white, also if a style of the user, such as dark_background, writes in white.
_COLOURS = {name: value for name, value in matplotlib.rcParamsDefault.items() if name.endswith("color")}

P = ParamSpec("P")


def on_white(plot: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator: the figure has matplotlib's default colours where the function sets none."""

    @functools.wraps(plot)
    def call(*arguments: P.args, **options: P.kwargs) -> Figure:
        with matplotlib.rc_context(_COLOURS):
            return plot(*arguments, **options)

    return call


def check_title(op: str, title: Any) -> None:
    if title is not None and not isinstance(title, str):
        raise TypeError(f"{op}: title must be text or None, got {short(title)}")


class _Figure(Figure):
    """A figure that a notebook shows as a picture even if pyplot was never imported."""

    def draw(self, renderer: Any) -> None:
        with matplotlib.rc_context(_COLOURS):  # some ticks are made while they are drawn
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def new_figure(width: float, height: float) -> Figure:
    figure = _Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def wrapped(text: str, inches: float, points: float) -> str:
    """The text with line breaks, so that it is about as wide as ``inches`` at most."""
    letters = max(8, int(72 * inches / (0.61 * points)))  # the mean width of a letter, as a fraction of the size
    return "\n".join(textwrap.fill(line, letters) for line in text.split("\n"))


def set_heading(figure: Figure, title: str | None) -> None:
    if title:
        figure.suptitle(wrapped(title, figure.get_figwidth() - 0.2, 12), fontsize=12)


def plain_axes(axes: Any, *, frame: bool = False) -> None:
    axes.tick_params(labelsize=9, color="#888888")
    axes.xaxis.label.set_fontsize(10)
    axes.yaxis.label.set_fontsize(10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(frame)
    for spine in axes.spines.values():
        spine.set_color("#888888")


def checked_level(op: str, level: Any) -> float:
    found = number(op, "level", level)
    if not 0 < found < 1:
        raise ValueError(f"{op}: level must be between 0 and 1, got {short(level)}")
    return found


def checked_bins(op: str, bins: Any) -> ReliabilityBins:
    if not isinstance(bins, ReliabilityBins):
        raise TypeError(f"{op}: bins must be ReliabilityBins, got {short(bins)}; pass metrics.reliability_bins(...)")
    bins = with_tensors(bins)
    if bins.count.dim() != 1:
        raise ValueError(f"{op}: bins must be [n_bins], got shape {list(bins.count.shape)}")
    if bins.n_samples == 0:
        raise ValueError(f"{op}: bins must hold at least one sample, got none")
    return bins
