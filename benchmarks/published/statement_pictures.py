"""Pictures of the statements of Komisarenko & Kull 2024 (arXiv 2408.11598)."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import focalkern as fk
from benchmarks.published.statements import FIT_GAMMAS, FITS, best_beta, log_odds_of_map, optimum_of_bound, simplex


def draw(out: Path) -> list[Path]:
    """The figures, drawn from the same functions."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    blue, vermilion, ink, grey = "#0072B2", "#D55E00", "#222222", "#8C8C8C"
    written = []

    def new(width: float, height: float) -> Any:
        figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        return figure

    def save(figure: Any, name: str) -> None:
        figure.savefig(out / name)
        written.append(out / name)

    p = torch.linspace(0.0005, 0.9995, 1999, dtype=torch.float64)
    s = p.logit()

    figure = new(10, 4)
    left, right = figure.subplots(1, 2)
    for gamma, colour, dashes in ((1.0, blue, "-"), (3.0, vermilion, "--"), (5.0, ink, ":")):
        left.plot(p, fk.binary_focal_calibration_map(s, gamma), dashes, color=colour, label=f"gamma = {gamma:g}")
    left.plot([0, 1], [0, 1], color=grey, linewidth=0.8)
    left.set(title="Focal calibration map, two classes ([1] Fig. 1)", xlabel="probability", ylabel="calibrated")
    left.legend(frameon=False)
    right.plot(p, fk.binary_focal_calibration_map(s, 3.0), color=ink, linewidth=3, alpha=0.4, label="map, gamma = 3")
    nearest = 1 / best_beta(2, 3.0)
    for temperature, colour, dashes, words in (
        (0.36, vermilion, "--", "caption"),
        (1 / 3.7, blue, "-", "fit"),
        (nearest, ink, ":", "nearest"),
    ):
        right.plot(p, (s / temperature).sigmoid(), dashes, color=colour, label=f"T = {temperature:.3f} ({words})")
    right.set(title="beside temperature scaling ([1] Fig. 2)", xlabel="probability", ylabel="calibrated")
    right.legend(frameon=False)
    save(figure, "binary_map.png")

    figure = new(6, 4.2)
    axes = figure.subplots()
    for (n_classes, (slope, intercept, _)), colour, marker, dashes in zip(
        FITS.items(), (blue, vermilion, ink), "os^", ("-", "--", ":"), strict=True
    ):
        axes.plot(
            FIT_GAMMAS, [best_beta(n_classes, gamma) for gamma in FIT_GAMMAS], marker, color=colour, markersize=5,
            label=f"{n_classes} classes, nearest",
        )  # fmt: skip
        line = [float(slope) * gamma + float(intercept) for gamma in FIT_GAMMAS]
        axes.plot(FIT_GAMMAS, line, dashes, color=colour, label=f"{n_classes} classes, {slope} gamma + {intercept}")
    axes.set(title="Temperature nearest to the map ([1] Figs. 2 and 6)", xlabel="gamma", ylabel="1/T")
    axes.legend(frameon=False, fontsize=8)
    save(figure, "relation.png")

    figure = new(6, 4.2)
    axes = figure.subplots()
    odds = torch.linspace(0.001, 15, 1500, dtype=torch.float64)
    axes.plot(odds.sigmoid().logit(), odds / log_odds_of_map(odds, 4.0), color=ink, label="map: log-odds in / out")
    for value, colour, dashes, words in (
        (1 / (5 - math.log(5) / 2), vermilion, "--", "theory, highest"),
        (0.218, blue, "-", "experiment, highest"),
        (0.206, blue, "-.", "experiment, lowest"),
        (0.2, vermilion, ":", "theory, lowest"),
    ):
        axes.axhline(value, color=colour, linestyle=dashes, linewidth=1.2, label=f"T = {value:.4g} ({words})")
    axes.set(title="Bounds for gamma = 4 ([1] Fig. 3, Prop. 3)", xlabel="log-odds", ylabel="equivalent temperature")
    axes.legend(frameon=False, fontsize=8, loc=(0.48, 0.58))
    save(figure, "bounds.png")

    figure = new(11, 3.9)
    panels = figure.subplots(1, 3)
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])
    fine, coarse = simplex(3, 90), simplex(3, 14)
    for axes, gamma, title in (
        (panels[0], 1.0, "how far gamma = 1 moves (Fig. 5)"),
        (panels[1], 3.0, "how far gamma = 3 moves (Fig. 4)"),
        (panels[2], 3.0, "gamma = 3 less its nearest T"),
    ):
        mapped = fk.focal_calibration_map(fine.log(), gamma)
        start = fine if axes is not panels[2] else (fine.log() * best_beta(3, gamma)).softmax(-1)
        far = (mapped - start).abs().amax(-1).numpy()
        place = fine.numpy() @ corners
        mesh = axes.tripcolor(place[:, 0], place[:, 1], far, cmap="cividis_r", shading="gouraud", rasterized=True)
        figure.colorbar(mesh, ax=axes, label="largest difference of a probability", shrink=0.8)
        if axes is not panels[2]:
            tail, head = coarse.numpy() @ corners, fk.focal_calibration_map(coarse.log(), gamma).numpy() @ corners
            shift = head - tail
            axes.quiver(*tail.T, *shift.T, angles="xy", scale_units="xy", scale=1, width=0.005, color=vermilion)
        axes.set_title(title, fontsize=10)
        axes.set_aspect("equal")
        axes.set_axis_off()
    save(figure, "simplex.png")

    figure = new(6, 4.2)
    axes = figure.subplots()
    truth = np.linspace(0.5, 0.995, 100)
    both = torch.tensor(np.stack([truth, 1 - truth], 1))
    for gamma, colour, dashes in ((1.0, blue, "-"), (3.0, vermilion, "--")):
        focal = fk.inverse_focal_calibration_map(both, gamma, input_kind="probs")[:, 0]
        axes.plot(truth, focal, dashes, color=colour, linewidth=2, label=f"focal loss, gamma = {gamma:g}")
        bound = [optimum_of_bound(float(q), gamma) for q in truth]
        axes.plot(truth, bound, dashes, color=colour, linewidth=0.9, label=f"its bound, gamma = {gamma:g}")
    axes.plot([0.5, 1], [0.5, 1], color=grey, linewidth=0.8, label="cross-entropy")
    axes.set(title="Probability that minimizes ([2] Fig. A.1)", xlabel="true probability q", ylabel="p")
    axes.legend(frameon=False, fontsize=8)
    save(figure, "minimizers.png")
    return written
