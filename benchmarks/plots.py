"""Pictures of the recorded medians: time against the number of classes and of rows."""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.harness import recorded_medians

# Line styles and markers differ, too, for black-and-white print and for colour-blind readers.
STYLES = {
    "focalkern": ("C0", "-", "o"),
    "cross_entropy": ("C1", "--", "s"),
    "cross_entropy, compiled": ("C3", ":", "v"),
    "composite": ("C2", "--", "^"),
    "composite, compiled": ("C4", ":", "D"),
    "per-cell loop": ("C1", "--", "s"),
    "torchmetrics, ECE per cell": ("C2", "--", "^"),
    "netcal, ECE per cell": ("C4", ":", "D"),
}


def series(op: str, out: Path, pattern: str) -> dict[str, list[tuple[int, int, float]]]:
    """{provider: (rows, classes, milliseconds)} of the float32 cases whose name fits."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for (case, dtype), providers in recorded_medians(op, out).items():
        match = re.fullmatch(pattern + r" (\d+)x(\d+)", case)
        if match is None or dtype != "float32":
            continue
        for provider, time in providers.items():
            if provider in STYLES:
                found.setdefault(provider, []).append((int(match[1]), int(match[2]), time))
    return found


def panel(axis, lines: dict[str, list[tuple[float, float]]], x_label: str, y_label: str, title: str) -> None:
    axis.set_title(title, fontsize=10)
    if not any(lines.values()):
        return  # nothing recorded: a logarithmic axis cannot be drawn
    for provider, points in lines.items():
        colour, line, marker = STYLES[provider]
        points = sorted(points)
        x, y = [point[0] for point in points], [point[1] for point in points]
        axis.plot(x, y, color=colour, linestyle=line, marker=marker, markersize=4, label=provider)
    axis.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncol=2)  # below the lines


def draw(out: Path, folder: Path) -> list[Path]:
    """Writes speed.png: a row for each operator, against the number of classes and of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    operators = (
        ("focal_loss, forward + backward", series("focal_loss", out, r"forward\+backward")),
        ("focal_calibration_map, forward + backward", series("calibration_map", out, r"forward\+backward")),
        ("calibration_grid, 4500 cells", series("calibration_grid", out, "4500 cells")),
    )
    figure, axes = plt.subplots(len(operators), 2, figsize=(8.4, 12.6), layout="constrained")
    for (title, lines), (by_classes, by_rows) in zip(operators, axes, strict=True):
        if title.startswith("calibration_grid"):
            points = {provider: [(c, t) for n, c, t in cases if n == 10000] for provider, cases in lines.items()}
            panel(by_classes, points, "classes", "milliseconds", f"{title}, 10000 rows")
        else:
            # Batches get smaller as rows get longer, so the time per logit is compared.
            points = {provider: largest_batches(cases) for provider, cases in lines.items()}
            panel(by_classes, points, "classes", "nanoseconds per logit", title)
        points = {provider: [(n, t) for n, c, t in cases if c == 100] for provider, cases in lines.items()}
        panel(by_rows, points, "rows", "milliseconds", f"{title.partition(',')[0]}, 100 classes")
    written = folder / "speed.png"
    figure.savefig(written, dpi=110)
    plt.close("all")
    return [written]


def largest_batches(cases: list[tuple[int, int, float]]) -> list[tuple[float, float]]:
    """(classes, nanoseconds per logit) of the largest batch of each number of classes."""
    largest = {c: max(n for n, other, _ in cases if other == c) for _, c, _ in cases}
    return [(c, t * 1e6 / (n * c)) for n, c, t in cases if n == largest[c]]
