"""The figures of the papers, from the rows of the CSV files: lines are means over seeds, bands reach from the lowest to
the highest seed.

[1] Komisarenko & Kull 2024, [2] Mukhoti et al. 2020, [3] Ghosh et al. 2022, [4] Wang et al. 2021. Losses differ in
colour (from the set of Okabe & Ito, safe for colour-blind readers), in dashes and in lightness.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.train_study import objectives, sweep
from benchmarks.train_study.records import Run
from benchmarks.train_study.tables import Row
from focalkern import metrics, plots

_STYLES: dict[str, tuple[str, Any]] = {
    "cross-entropy": ("#000000", "-"),
    "focal-3": ("#0072B2", "-"),
    "flsd-53": ("#56B4E9", (0, (5, 1.5))),
    "adafocal": ("#009E73", "-"),
    "inverse-focal-2": ("#D55E00", "-"),
    "brier": ("#CC79A7", (0, (3, 1, 1, 1))),
}
"""The losses that are drawn, where a figure compares losses: more lines than six are not to be told apart."""

_BLUE, _VERMILION, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#8C8C8C"
_SHOWN_BINS = (0, 7, 14)  # those of [3]


# ---------------------------------------------------------------------------------------------------------------------
# Per epoch
# ---------------------------------------------------------------------------------------------------------------------


def training_curves(rows: Sequence[Row]) -> Figure:
    """[2] Figure 1: NLL and error of training and test, entropy and test ECE per epoch."""
    figure, axes = _grid(2, 3)
    panels = (
        ("train_nll", "NLL, training"),
        ("train_error", "error, training"),
        ("test_entropy", "mean entropy, test"),
        ("test_nll", "NLL, test"),
        ("test_error", "error, test"),
        ("test_ece_equal_width", "ECE (equal_width), test"),
    )
    for ax, (column, title) in zip(axes, panels, strict=True):
        _epoch_lines(ax, rows, column, title)
    _losses_below(figure, axes[0])
    return figure


def correct_and_incorrect(rows: Sequence[Row]) -> Figure:
    """[2] Figure 2: NLL and entropy of right and wrong test samples, and the last layer's weight norm, per epoch."""
    figure, axes = _grid(2, 3)
    panels = (
        ("test_nll_correct", "NLL of correct test samples"),
        ("test_entropy_correct", "entropy of correct test samples"),
        ("head_weight_norm", "weight norm of the last layer"),
        ("test_nll_incorrect", "NLL of incorrect test samples"),
        ("test_entropy_incorrect", "entropy of incorrect test samples"),
        ("temperature_nll", "best temperature (validation NLL)"),
    )
    for ax, (column, title) in zip(axes, panels, strict=True):
        _epoch_lines(ax, rows, column, title)
    _losses_below(figure, axes[0])
    return figure


def scaled_ece(rows: Sequence[Row]) -> Figure:
    """[4] Figure 4: test ECE per epoch, as it is and at the temperature that validation finds best."""
    figure, axes = _grid(1, 3)
    panels = (
        ("test_ece_equal_width", "ECE (equal_width), test"),
        ("test_ece_at_temperature_ece_equal_width", "after temperature scaling"),
        ("temperature_ece", "best temperature (validation ECE)"),
    )
    for ax, (column, title) in zip(axes, panels, strict=True):
        _epoch_lines(ax, rows, column, title)
    _losses_below(figure, axes[0])
    return figure


def adafocal(epochs: Sequence[Row], bins: Sequence[Row]) -> Figure | None:
    """[3]: ECE and every bin's gamma per epoch; calibration error and gamma of bins 0, 7 and 14."""
    own = [row for row in bins if row["loss"] == "adafocal"]
    if not own:
        return None
    figure, axes = _grid(2, 4)
    _epoch_lines(axes[0], epochs, "test_ece_equal_width", "ECE (equal_width), test")
    ax = axes[4]
    gammas = {}
    for row in own:
        gammas.setdefault((int(row["epoch"]), int(row["bin"])), []).append(row["gamma"])
    n_epochs, last = (max(key[i] for key in gammas) for i in (0, 1))
    table = np.array([[np.mean(gammas[e, b]) for e in range(1, n_epochs + 1)] for b in range(last + 1)])
    # Where gammas of both signs occur, white is 0, the border of focal and inverse focal loss.
    limit = float(np.abs(table).max())
    colours = {"cmap": "PuOr", "vmin": -limit, "vmax": limit} if table.min() < 0 else {"cmap": "cividis"}
    places = np.arange(n_epochs + 1) + 0.5, np.arange(last + 2) - 0.5
    mesh = ax.pcolormesh(*places, table, **colours)
    figure.colorbar(mesh, ax=ax, pad=0.02)
    ax.set(title="AdaFocal: gamma of each bin", ylabel="bin (by confidence)", xlabel="epoch")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    for column, index in enumerate(_SHOWN_BINS, start=1):
        chosen = [row for row in bins if row["bin"] == index]
        _epoch_lines(axes[column], chosen, "calibration_error", f"bin {index}: confidence - accuracy")
        axes[column].axhline(0, color=_GREY, linewidth=0.8, zorder=1)
        _epoch_lines(
            axes[4 + column], [row for row in chosen if row["loss"] == "adafocal"], "gamma", f"bin {index}: gamma"
        )
    _losses_below(figure, axes[0])
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# After training
# ---------------------------------------------------------------------------------------------------------------------


def validation_size(rows: Sequence[Row]) -> Figure:
    """[4] Figure 3: test ECE after calibration against the number of validation samples."""
    figure, axes = _grid(1, 2)
    for ax, method in zip(axes, ("temperature", "histogram binning"), strict=True):
        chosen = [row for row in rows if row["method"] == method]
        _lines(ax, chosen, "validation_samples", "ece_equal_width", marker="o")
        ax.set(xscale="log", xlabel="validation samples", ylabel="test ECE (equal_width)", title=f"after {method}")
    _losses_below(figure, axes[0])
    return figure


def learned(rows: Sequence[Row]) -> Figure:
    """[4] Figure 5: the largest logit after training, by the epoch in which a training sample was first right."""
    figure, axes = _grid(1, 2)
    right = [row for row in rows if row["learned_epoch"] > 0]
    _lines(axes[0], right, "learned_epoch", "top_logit", marker="o")
    _lines(axes[1], right, "learned_epoch", "samples", marker="o")
    axes[0].set(xlabel="epoch in which the sample was first right", ylabel="mean largest logit", title="after training")
    axes[1].set(xlabel="epoch in which the sample was first right", ylabel="training samples", yscale="log")
    axes[1].set_title("how many they are")
    _losses_below(figure, axes[0])
    return figure


def optimal_temperature(rows: Sequence[Row]) -> Figure:
    """[1] Figure 8: the temperature of lowest validation ECE (equal_mass) against the gamma of the calibration map."""
    figure, axes = _grid(1, 1, width=6.2)
    trained = {loss: objectives.gamma(loss) for loss in dict.fromkeys(row["loss"] for row in rows)}
    order = sorted((loss for loss, gamma in trained.items() if gamma is not None), key=lambda loss: -trained[loss])
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 0.95, max(len(order), 2)))
    for loss, colour, marker in zip(order, colours, "os^vDPX*<>" * 3, strict=False):
        x, middle, low, high = _summary(
            [row for row in rows if row["loss"] == loss], "gamma_evaluated", "temperature_ece"
        )
        axes[0].plot(
            x, middle, color=colour, marker=marker, markersize=4.5, linewidth=1.3, label=f"{trained[loss]:g} ({loss})"
        )
        axes[0].fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes[0].set(xlabel="gamma of the calibration map", ylabel="best temperature")
    axes[0].legend(title="gamma of the loss", frameon=False, fontsize=8, title_fontsize=8.5)
    return figure


def from_focal_to_inverse(rows: Sequence[Row]) -> Figure | None:
    """[4] Figure 6: accuracy, temperature and calibrated ECE from strong focal to strong inverse focal loss."""
    chosen = sorted((row for row in rows if row["gamma"] is not None), key=lambda row: -row["gamma"])
    if len(chosen) < 3:
        return None
    figure, axes = _grid(1, 4)
    gammas = [row["gamma"] for row in chosen]
    for ax, title, mean, std in (
        (axes[0], "accuracy", "accuracy_mean", "accuracy_std"),
        (axes[1], "best temperature", "temperature_mean", "temperature_std"),
        (axes[2], "ECE with temperature scaling", "ece_mean_temperature", "ece_std_temperature"),
        (axes[3], "ECE with histogram binning", "ece_mean_histogram", "ece_std_histogram"),
    ):
        error = np.nan_to_num([row[std] for row in chosen])
        ax.errorbar(gammas, [row[mean] for row in chosen], error, color=_BLUE, marker="o", capsize=3, linewidth=1.4)
        ax.axvline(0, color=_GREY, linewidth=0.8, linestyle="--", zorder=1)
        ax.set(title=title, xlabel="gamma: focal > 0 > inverse focal")
        ax.invert_xaxis()
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def roc_curves(runs: Sequence[Run], temperatures: Sequence[Row]) -> Figure | None:
    """[3]: how well confidence tells out-of-distribution inputs, before and after temperature scaling."""
    names = sorted({name for run in runs for name in run.out_of_distribution})
    if not names:
        return None
    best = {
        (row["loss"], row["seed"], row["set"]): row["temperature"] for row in temperatures if row["scaled"] == "yes"
    }
    figure, axes = _grid(len(names), 2)
    rates = np.linspace(0, 1, 201)
    for row, name in enumerate(names):
        for column, scaled in enumerate((False, True)):
            ax = axes[2 * row + column]
            for loss in _drawn(run.loss for run in runs):
                curves, areas = [], []
                for run in runs:
                    if run.loss != loss:
                        continue
                    temperature = best[run.loss, run.seed, name] if scaled else 1.0
                    inside, outside = (
                        (z.double() / temperature).softmax(-1).amax(-1)
                        for z in (run.logits["test_logits"], run.out_of_distribution[name])
                    )
                    areas.append(float(metrics.auroc(inside, outside)))
                    curves.append(_roc(inside.numpy(), outside.numpy(), rates))
                colour, dashes = _STYLES[loss]
                label = f"{loss}: {np.mean(areas):.3f}"
                ax.plot(rates, np.mean(curves, 0), color=colour, linestyle=dashes, linewidth=1.4, label=label)
            ax.plot([0, 1], [0, 1], color=_GREY, linewidth=0.8)
            ax.set(title=f"{name}, {'after temperature scaling' if scaled else 'T = 1'}", xlim=(0, 1), ylim=(0, 1.005))
            ax.set(xlabel="false alarms: in-distribution, below", ylabel="detected")
            ax.legend(title="AUROC", frameon=False, fontsize=7.5, title_fontsize=8, loc="lower right")
    return figure


def _roc(inside: np.ndarray, outside: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Share of ``outside`` whose confidence is below the threshold under which ``rates`` of ``inside`` are."""
    thresholds = np.unique(np.concatenate([inside, outside]))
    false_alarms = np.searchsorted(np.sort(inside), thresholds, side="right") / len(inside)
    detected = np.searchsorted(np.sort(outside), thresholds, side="right") / len(outside)
    return np.interp(rates, np.r_[0, false_alarms], np.r_[0, detected])


def reliability(runs: Sequence[Run], rows: Sequence[Row]) -> Figure | None:
    """[4] Figure 2: reliability after temperature scaling, of the first seed."""
    seed = min(run.seed for run in runs)
    panels = {}
    for run in runs:
        if run.seed != seed or run.loss not in ("cross-entropy", "focal-3", "inverse-focal-2"):
            continue
        temperature = next(
            row["temperature"]
            for row in rows
            if (row["loss"], row["seed"], row["method"], row["criterion"])
            == (run.loss, seed, "temperature", "ece equal_width")
        )
        logits = run.logits["test_logits"].double()
        panels[f"{run.loss}, T = {temperature:g}"] = metrics.reliability_bins(
            confidence=(logits / temperature).softmax(-1).amax(-1),
            correct=logits.argmax(-1) == run.logits["test_labels"],
        )
    return plots.reliability_diagram(panels, title=f"After temperature scaling, seed {seed}") if panels else None


# ---------------------------------------------------------------------------------------------------------------------
# Sweep
# ---------------------------------------------------------------------------------------------------------------------


def coefficients(table: Sequence[Row]) -> Figure:
    """[4] Figure 1: ECE against the coefficient of a regulariser, as it is and after temperature scaling."""
    sizes = sorted({row["train_size"] for row in table})
    figure, axes = _grid(len(sizes), len(sweep.FAMILIES))
    for row, size in enumerate(sizes):
        for column, family in enumerate(sweep.FAMILIES):
            ax = axes[row * len(sweep.FAMILIES) + column]
            points = _family(table, family, size)
            x = np.arange(len(points))
            for name, label, colour, marker in (
                ("ece_equal_width_{}_uncalibrated", "as it is", _VERMILION, "s"),
                ("ece_{}_temperature", "with temperature scaling", _BLUE, "o"),
                ("ece_{}_histogram", "with histogram binning", _GREEN, "^"),
            ):
                mean, std = (np.nan_to_num([point[name.format(k)] for _, point in points]) for k in ("mean", "std"))
                ax.errorbar(
                    x, mean, std, color=colour, marker=marker, capsize=3, linewidth=1.3, label=label, markersize=5
                )
            ax.set_xticks(x, [f"{coefficient:g}" for coefficient, _ in points])
            ax.set_title(f"{family}, {size} training samples")
            ax.set_xlabel("coefficient (0: cross-entropy)")
            if column == 0:
                ax.set_ylabel("test ECE (equal_width)")
            ax.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def best_coefficient(table: Sequence[Row]) -> Figure:
    """[4] Figure 1: the coefficient of lowest test ECE, as it is and after calibration, against the training size."""
    sizes = sorted({row["train_size"] for row in table})
    figure, axes = _grid(1, len(sweep.FAMILIES))
    for ax, family in zip(axes, sweep.FAMILIES, strict=True):
        for name, label, colour, marker in (
            ("ece_equal_width_mean_uncalibrated", "as it is", _VERMILION, "s"),
            ("ece_mean_temperature", "with temperature scaling", _BLUE, "o"),
            ("ece_mean_histogram", "with histogram binning", _GREEN, "^"),
        ):
            best = []
            for size in sizes:
                points = _family(table, family, size)
                best.append(int(np.argmin([point[name] for _, point in points])))
            ax.plot(range(len(sizes)), best, color=colour, marker=marker, label=label, linewidth=1.3)
        values = [coefficient for coefficient, _ in points]
        ax.set_yticks(range(len(values)), [f"{value:g}" for value in values])
        ax.set_ylim(-0.4, len(values) - 0.6)
        ax.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        ax.set(title=family, xlabel="training samples", ylabel="coefficient of lowest test ECE")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _family(table: Sequence[Row], family: str, size: int) -> list[tuple[float, Row]]:
    """(coefficient, row), ascending; cross-entropy is 0 and first."""
    wanted = {"cross-entropy": 0.0} | {objectives.canonical(f"{family}-{c}"): float(c) for c in sweep.FAMILIES[family]}
    found = [(wanted[row["loss"]], row) for row in table if row["train_size"] == size and row["loss"] in wanted]
    return sorted(found, key=lambda point: point[0])


# ---------------------------------------------------------------------------------------------------------------------
# All of them
# ---------------------------------------------------------------------------------------------------------------------


def write_study(files: dict[str, list[Row]], runs: Sequence[Run], folder: Path) -> None:
    makers: dict[str, Callable[[], Figure | None]] = {
        "training_curves": lambda: training_curves(files["epochs"]),
        "correct_and_incorrect": lambda: correct_and_incorrect(files["epochs"]),
        "scaled_ece": lambda: scaled_ece(files["epochs"]),
        "adafocal": lambda: adafocal(files["epochs"], files["bins"]),
        "validation_size": lambda: validation_size(files["validation_size"]),
        "learned": lambda: learned(files["learned"]),
        "optimal_temperature": lambda: optimal_temperature(files["temperatures"]),
        "from_focal_to_inverse": lambda: from_focal_to_inverse(files["table_post_hoc"]),
        "out_of_distribution": lambda: roc_curves(runs, files["out_of_distribution"]),
        "reliability": lambda: reliability(runs, files["calibration"]),
    }
    _write(makers, folder)


def write_sweep(table: Sequence[Row], temperatures: Sequence[Row], folder: Path) -> None:
    largest = max(row["train_size"] for row in table)
    inverse = [row for row in table if row["train_size"] == largest and row["loss"] in sweep.FROM_FOCAL_TO_INVERSE]
    makers: dict[str, Callable[[], Figure | None]] = {
        "coefficients": lambda: coefficients(table),
        "best_coefficient": lambda: best_coefficient(table),
        "from_focal_to_inverse": lambda: from_focal_to_inverse(inverse),
        "optimal_temperature": lambda: optimal_temperature(temperatures),
    }
    _write(makers, folder)


def _write(makers: dict[str, Callable[[], Figure | None]], folder: Path) -> None:
    for name, make in makers.items():
        figure = make()
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=110)


def _drawn(losses: Iterable[str]) -> list[str]:
    present = list(losses)
    return [loss for loss in _STYLES if loss in present]


def _grid(rows: int, columns: int, width: float = 3.4) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * columns, 2.9 * rows + 0.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.tick_params(labelsize=8)
        ax.title.set_fontsize(9.5)
        ax.xaxis.label.set_fontsize(9)
        ax.yaxis.label.set_fontsize(9)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        ax.grid(color="#E8E8E8", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def _epoch_lines(ax: Axes, rows: Sequence[Row], column: str, title: str) -> None:
    _lines(ax, rows, "epoch", column)
    ax.set(title=title, xlabel="epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _lines(ax: Axes, rows: Sequence[Row], x: str, y: str, marker: str | None = None) -> None:
    for loss in _drawn(row["loss"] for row in rows):
        colour, dashes = _STYLES[loss]
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


def _losses_below(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    columns = 6 if figure.get_figwidth() > 8 else 3
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
