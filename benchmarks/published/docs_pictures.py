"""python -m benchmarks.published.docs_pictures: drawings of the explanations, light and dark, into docs/_static.

Nothing is measured. It draws G with the calibration map, a learned spline, and the data flow through a tile.
"""

from pathlib import Path

import matplotlib
import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

import focalkern as fk
from focalkern.calibrators._spline_shown import shown_curve

PICTURES = Path(__file__).parents[2] / "docs" / "_static"
# Ink, paper, and Okabe & Ito's colours in two brightnesses.
MODES = {
    "light": ("#1f2328", "#ffffff", ("#555555", "#0072B2", "#D55E00", "#007a5a")),
    "dark": ("#f0f6fc", "#14181e", ("#b0b0b0", "#56B4E9", "#E69F00", "#34c99b")),
}


def figure_of(width: float, height: float, ink: str) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)  # type: ignore[union-attr]
    return figure


def focal_map(ink: str, paper: str, colours: tuple[str, ...]) -> Figure:
    figure = figure_of(10, 4.9, ink)
    left, right = figure.subplots(1, 2)
    q = torch.linspace(1e-4, 1 - 1e-4, 400, dtype=torch.float64)
    for gamma, colour, line in zip((0, 1, 2, 5), colours, ("-", "--", "-.", ":"), strict=True):
        style = {"color": colour, "linestyle": line, "linewidth": 2.2, "label": f"gamma = {gamma}"}
        left.plot(q, (1 - q) ** gamma * (1 - gamma * q * q.log() / (1 - q)), **style)
        right.plot(q, fk.focal_calibration_map(torch.stack([q, 1 - q], -1), gamma, input_kind="probs")[:, 0], **style)
    left.set(title="the function G", xlabel="probability q of a class", ylabel="G(q)", xlim=(0, 1), ylim=(0, 1.65))
    right.set(title="the map, two classes", xlabel="the network says q", ylabel="calibrated", xlim=(0, 1), ylim=(0, 1))
    for axis in (left, right):
        axis.patch.set_alpha(0)
        axis.title.set_color(ink)
        axis.tick_params(colors=ink)
        axis.spines[:].set_color(ink)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, labelcolor=ink, loc="upper right")
    right.legend(frameon=False, labelcolor=ink, loc="upper left")
    return figure


def spline_scaling(ink: str, paper: str, colours: tuple[str, ...]) -> Figure:
    """A learned curve: two classes whose true map is a focal map up to 0.8 and flatter beyond."""
    figure = figure_of(6.2, 4.9, ink)
    axis = figure.subplots()
    random = torch.Generator().manual_seed(0)
    u = torch.linspace(-4, 4, 2001, dtype=torch.float64)[torch.randint(2001, (5000,), generator=random)]

    def truth(u: torch.Tensor) -> torch.Tensor:
        curve = (
            fk.binary_focal_calibration_map(u.abs().clamp(max=1.4), 1.0, log_odds=True)
            + (u.abs() - 1.4).clamp(min=0) / 4
        )
        return (u.sign() * curve).sigmoid()

    labels = (torch.rand(len(u), generator=random, dtype=torch.float64) < truth(u)).long()
    calibrator = fk.SplineScaling().fit(torch.stack([torch.zeros_like(u), u], -1), labels)
    shown = shown_curve(calibrator)
    # On the network's scale: the temperature is part of the map.
    q = (torch.from_numpy(shown.confidence).logit() * calibrator.temperature_).sigmoid()
    inside = torch.linspace(0.5, 0.982, 300, dtype=torch.float64)
    axis.fill_between(q, shown.lower, shown.upper, color=colours[1], alpha=0.25, linewidth=0)
    axis.plot(q, shown.calibrated, color=colours[1], linewidth=2.6, label="spline, learned")
    axis.plot(inside, truth(inside.logit()), color=colours[3], linestyle="--", linewidth=2, label="truth")
    axis.plot([0.5, 1], [0.5, 1], color=ink, linestyle=(0, (4, 4)), linewidth=1)
    for gamma, line in ((1.0, "-."), (3.0, ":")):
        mapped = fk.binary_focal_calibration_map(inside.logit(), gamma)
        axis.plot(
            inside, mapped, color=colours[0], linestyle=line, linewidth=1.6, label=f"focal map, gamma = {gamma:g}"
        )
    axis.set(xlabel="the network says q", ylabel="calibrated", xlim=(0.5, 1), ylim=(0.5, 1))
    axis.patch.set_alpha(0)
    axis.tick_params(colors=ink)
    axis.spines[:].set_color(ink)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, labelcolor=ink, loc="lower right")
    return figure


def tile(ink: str, paper: str, colours: tuple[str, ...]) -> Figure:
    figure = figure_of(10, 4.6, ink)
    axis = figure.subplots()
    axis.set(xlim=(0, 100), ylim=(0, 46))
    axis.axis("off")
    grey, blue, orange, green = colours

    def grid(x: float, y: float, rows: int, columns: int, size: float, colour: str, marked: bool = False) -> None:
        for row in range(rows):
            for column in range(columns):
                target = marked and column == (row * 5 + 2) % columns
                axis.add_patch(
                    Rectangle(
                        (x + column * size, y + row * size),
                        size,
                        size,
                        facecolor=orange if target else colour,
                        alpha=0.95 if target else 0.45,
                        edgecolor=paper,
                        linewidth=1.2,
                    )
                )

    def arrow(x: float, y: float, to_x: float, to_y: float) -> None:
        axis.add_patch(FancyArrowPatch((x, y), (to_x, to_y), arrowstyle="-|>", mutation_scale=18, color=ink, lw=1.6))

    def text(x: float, y: float, words: str, **style: object) -> None:
        axis.text(x, y, words, color=ink, ha="center", va="center", **style)  # type: ignore[arg-type]

    text(13, 44, "memory", weight="bold")
    text(52, 44, "registers and cache", weight="bold")
    text(89, 44, "memory", weight="bold")
    axis.plot([27, 27], [1, 46], [76, 76], [1, 46], color=ink, alpha=0.35, linewidth=1, linestyle=(0, (4, 4)))

    grid(4, 24, 5, 9, 2, blue, marked=True)
    text(13, 38, "a tile of logits\nrows x classes", size=12)
    text(13, 20.8, "orange: the target's", size=11)
    arrow(23, 29, 32, 29)
    text(27.5, 32, "read once", size=11)
    grid(33, 24, 5, 2, 2, green)
    grid(38, 24, 5, 1, 2, orange)
    text(39.5, 38.5, "per row: max, sum exp of the\nothers; the target's logit", size=11)
    arrow(41, 29, 51, 29)
    grid(53, 24, 5, 2, 2, grey)
    text(57, 38.5, "log p,\nlog (1 - p)", size=11)
    text(56, 20.8, "focal terms: once per row", size=11)
    arrow(58, 29, 81, 29)
    grid(83, 24, 5, 1, 2, grey)
    grid(87, 24, 5, 3, 2, green)
    text(89, 38.5, "loss, and three\nnumbers per row", size=11)

    arrow(87, 23, 60, 9)
    text(80, 12.5, "backward:\nfactor of the row", size=11)
    arrow(13, 18.5, 44, 8)
    text(20, 11.5, "read once more", size=11)
    grid(46, 3, 5, 6, 2, blue, marked=True)
    text(52, 0.6, "factor x p of each class", size=11)
    arrow(58, 5, 81, 5)
    text(91, 5, "gradient,\nwritten once", size=12)
    return figure


def main() -> None:
    for mode, (ink, paper, colours) in MODES.items():
        words = {"svg.hashsalt": "focalkern", "font.size": 13, "text.color": ink, "axes.labelcolor": ink}
        for name, draw in (("focal_map", focal_map), ("spline_scaling", spline_scaling), ("tile", tile)):
            path = PICTURES / f"{name}_{mode}.svg"
            with matplotlib.rc_context(words):
                draw(ink, paper, colours).savefig(path, metadata={"Date": None, "Creator": None})
            print(path)


if __name__ == "__main__":
    main()
