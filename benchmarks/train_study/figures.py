"""The figures of the papers, from the rows of the CSV files: lines are means over seeds, bands reach from the lowest to
the highest seed, error bars are a standard deviation either way.

[1] Komisarenko & Kull 2024, [2] Mukhoti et al. 2020, [3] Ghosh et al. 2022, [4] Wang et al. 2021. Losses differ in
colour (from the set of Okabe & Ito, safe for colour-blind readers, or along a scale of lightness) and in dashes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.train_study import objectives, sweep
from benchmarks.train_study.figure_parts import (
    STYLES,
    Styles,
    _summary,
    drawn,
    epoch_lines,
    grid,
    lines,
    losses_below,
    mark_significant,
    styles_by_gamma,
    styles_of_others,
    with_gamma,
    write_figures,
)
from benchmarks.train_study.records import Run
from benchmarks.train_study.run_rows import Row
from focalkern import PAPER_TEMPERATURES, metrics, plots

_BLUE, _VERMILION, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#8C8C8C"

_RELIABILITY = ("cross-entropy", "focal-3", "label-smoothing-0.05", "inverse-focal-2")

_SHOWN_BINS = (0, 7, 14)  # those of [3]


def training_curves(rows: Sequence[Row], styles: Styles = STYLES) -> Figure | None:
    """[2] Figure 1: NLL and error of training and test, entropy and test ECE per epoch."""
    if not drawn(rows, styles):
        return None
    figure, axes = grid(2, 3)
    panels = (
        ("train_nll", "NLL, training"),
        ("train_error", "error, training"),
        ("test_entropy", "mean entropy, test"),
        ("test_nll", "NLL, test"),
        ("test_error", "error, test"),
        ("test_ece_equal_width", "ECE (equal_width), test"),
    )
    for ax, (column, title) in zip(axes, panels, strict=True):
        epoch_lines(ax, rows, column, title, styles)
    losses_below(figure, axes[0])
    return figure


def correct_and_incorrect(rows: Sequence[Row], styles: Styles = STYLES) -> Figure | None:
    """[2] Figure 2: NLL and entropy of right and wrong test samples, and the last layer's weight norm, per epoch."""
    if not drawn(rows, styles):
        return None
    figure, axes = grid(2, 3)
    panels = (
        ("test_nll_correct", "NLL of correct test samples"),
        ("test_entropy_correct", "entropy of correct test samples"),
        ("head_weight_norm", "weight norm of the last layer"),
        ("test_nll_incorrect", "NLL of incorrect test samples"),
        ("test_entropy_incorrect", "entropy of incorrect test samples"),
        ("temperature_nll", "best temperature (validation NLL)"),
    )
    for ax, (column, title) in zip(axes, panels, strict=True):
        epoch_lines(ax, rows, column, title, styles)
    losses_below(figure, axes[0])
    return figure


def scaled_ece(rows: Sequence[Row]) -> Figure | None:
    """[4] Figure 4: test ECE per epoch, uncalibrated and at the temperature chosen on validation samples."""
    if not drawn(rows, STYLES):
        return None
    figure, axes = grid(1, 3)
    panels = (
        ("test_ece_equal_width", "ECE (equal_width), test"),
        ("test_ece_at_temperature_ece_equal_width", "after temperature scaling"),
        ("temperature_ece", "best temperature (validation ECE)"),
    )
    for ax, (column, title) in zip(axes, panels, strict=True):
        epoch_lines(ax, rows, column, title)
    losses_below(figure, axes[0])
    return figure


def adafocal(epochs: Sequence[Row], bins: Sequence[Row]) -> Figure | None:
    """[3]: ECE and every bin's gamma per epoch; calibration error and gamma of bins 0, 7 and 14."""
    own = [row for row in bins if row["loss"] == "adafocal"]
    if not own:
        return None
    figure, axes = grid(2, 4)
    epoch_lines(axes[0], epochs, "test_ece_equal_width", "ECE (equal_width), test")
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
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    for column, index in enumerate(_SHOWN_BINS, start=1):
        chosen = [row for row in bins if row["bin"] == index]
        epoch_lines(axes[column], chosen, "calibration_error", f"bin {index}: confidence - accuracy")
        axes[column].axhline(0, color=_GREY, linewidth=0.8, zorder=1)
        epoch_lines(
            axes[4 + column], [row for row in chosen if row["loss"] == "adafocal"], "gamma", f"bin {index}: gamma"
        )
    losses_below(figure, axes[0])
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# After training
# ---------------------------------------------------------------------------------------------------------------------
def validation_size(rows: Sequence[Row]) -> Figure | None:
    """[4] Figure 3: test ECE after calibration against the number of validation samples."""
    if not drawn(rows, STYLES):
        return None
    figure, axes = grid(1, 2)
    titles = {"temperature": "after temperature scaling", "histogram binning": "after histogram binning"}
    for ax, (method, title) in zip(axes, titles.items(), strict=True):
        chosen = [row for row in rows if row["method"] == method]
        lines(ax, chosen, "validation_samples", "ece_equal_width", marker="o")
        ax.set(xscale="log", xlabel="validation samples", ylabel="test ECE (equal_width)", title=title)
    losses_below(figure, axes[0])
    return figure


def learned(rows: Sequence[Row]) -> Figure | None:
    """[4] Figure 5: the largest logit after training, by the epoch in which a training sample was first right."""
    if not drawn(rows, STYLES):
        return None
    figure, axes = grid(1, 2)
    right = [row for row in rows if row["learned_epoch"] > 0]
    lines(axes[0], right, "learned_epoch", "top_logit", marker="o")
    lines(axes[1], right, "learned_epoch", "samples", marker="o")
    axes[0].set(xlabel="epoch in which the sample was first right", ylabel="mean largest logit")
    axes[1].set(xlabel="epoch in which the sample was first right", ylabel="training samples", yscale="log")
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_title("their logits after training")
    axes[1].set_title("how many they are")
    losses_below(figure, axes[0])
    return figure


def optimal_temperature(rows: Sequence[Row]) -> Figure | None:
    """[1] Figure 8: the temperature of lowest validation ECE (equal_mass) against the gamma of the calibration map."""
    styles = styles_by_gamma(row["loss"] for row in rows)
    if not styles:
        return None
    figure, axes = grid(1, 1, width=7.6)
    for (loss, (colour, _)), marker in zip(styles.items(), "os^vDPX*<>" * 3, strict=False):
        x, middle, low, high = _summary(
            [row for row in rows if row["loss"] == loss], "gamma_evaluated", "temperature_ece"
        )
        axes[0].plot(x, middle, color=colour, marker=marker, markersize=4.5, linewidth=1.3, label=with_gamma(loss))
        axes[0].fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes[0].set(xlabel="gamma of the calibration map", ylabel="best temperature (validation ECE)")
    highest = PAPER_TEMPERATURES[-1]
    if max(row["temperature_ece"] for row in rows) >= highest:
        axes[0].axhline(highest, color=_GREY, linewidth=0.8, linestyle="--", zorder=1, label="highest searched")
    # The legend is outside the axes, because up to a dozen lines leave no room inside.
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        title="gamma of the loss",
        loc="outside right center",
        frameon=False,
        fontsize=8,
        title_fontsize=8.5,
    )
    return figure


def from_focal_to_inverse(rows: Sequence[Row]) -> Figure | None:
    """[4] Figure 6: accuracy, temperature and calibrated ECE from strong focal to strong inverse focal loss."""
    chosen = sorted((row for row in rows if row["gamma"] is not None), key=lambda row: -row["gamma"])
    if len(chosen) < 3:
        return None
    figure, axes = grid(1, 4)
    gammas = [row["gamma"] for row in chosen]
    for ax, title, name in (
        (axes[0], "accuracy, test", "accuracy_{}"),
        (axes[1], "best temperature", "temperature_{}"),
        (axes[2], "test ECE with temperature scaling", "ece_{}_temperature"),
        (axes[3], "test ECE with histogram binning", "ece_{}_histogram"),
    ):
        mean, std = ([row[name.format(kind)] for row in chosen] for kind in ("mean", "std"))
        ax.errorbar(gammas, mean, np.nan_to_num(std), color=_BLUE, marker="o", capsize=3, linewidth=1.4)
        if name.format("floor") in chosen[0]:
            floor = [row[name.format("floor")] for row in chosen]
            ax.plot(gammas, floor, color=_VERMILION, linestyle=":", label="of perfect calibration")
            p = [row[name.format("p").removeprefix("ece_")] for row in chosen]
            mark_significant(ax, gammas, mean, p, _BLUE)
            ax.set_ylim(bottom=0)
            ax.legend(frameon=False, fontsize=8, loc="lower left", title="* p < 0.05", title_fontsize=8)
        ax.axvline(0, color=_GREY, linewidth=0.8, linestyle="--", zorder=1)
        ax.set(title=title, xlabel="gamma: focal > 0 > inverse focal")
        ax.invert_xaxis()
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def roc_curves(runs: Sequence[Run], temperatures: Sequence[Row]) -> Figure | None:
    """[3]: how well confidence detects out-of-distribution inputs, before and after temperature scaling."""
    names = sorted({name for run in runs for name in run.out_of_distribution})
    losses = [loss for loss in STYLES if any(run.loss == loss for run in runs)]
    if not names or not losses:
        return None
    best = {
        (row["loss"], row["seed"], row["set"]): row["temperature"] for row in temperatures if row["scaled"] == "yes"
    }
    figure, axes = grid(len(names), 2)
    rates = np.linspace(0, 1, 201)
    for row, name in enumerate(names):
        for column, scaled in enumerate((False, True)):
            ax = axes[2 * row + column]
            for loss in losses:
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
                colour, dashes = STYLES[loss]
                label = f"{loss}: {np.mean(areas):.3f}"
                ax.plot(rates, np.mean(curves, 0), color=colour, linestyle=dashes, linewidth=1.4, label=label)
            ax.plot([0, 1], [0, 1], color=_GREY, linewidth=0.8)
            ax.set(title=f"{name}, {'after temperature scaling' if scaled else 'T = 1'}", xlim=(0, 1), ylim=(0, 1.005))
            ax.set(xlabel="share of test samples rejected", ylabel="share of foreign inputs rejected")
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
        if run.seed != seed or run.loss not in _RELIABILITY:
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
    """[4] Figure 1: ECE against the coefficient of a regulariser, uncalibrated and after temperature scaling."""
    sizes = sorted({row["train_size"] for row in table})
    figure, axes = grid(len(sizes), len(sweep.FAMILIES))
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
                if name.startswith("ece_{}"):
                    p = [point[name.format("p").removeprefix("ece_")] for _, point in points]
                    mark_significant(ax, x, mean, p, colour)
            ax.set_xticks(x, [f"{coefficient:g}" for coefficient, _ in points])
            ax.set_title(f"{family}, {size} training samples")
            ax.set_xlabel("coefficient (0: cross-entropy)")
            if column == 0:
                ax.set_ylabel("test ECE (equal_width)")
            ax.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9,
        title="* p < 0.05 against cross-entropy, paired t-test over seeds", title_fontsize=9,
    )  # fmt: skip
    return figure


def best_coefficient(table: Sequence[Row]) -> Figure:
    """[4] Figure 1: the coefficient of lowest test ECE, uncalibrated and calibrated, against the training size."""
    sizes = sorted({row["train_size"] for row in table})
    figure, axes = grid(1, len(sweep.FAMILIES))
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
    epochs, losses = files["epochs"], list(dict.fromkeys(run.loss for run in runs))
    by_gamma, others = styles_by_gamma(losses), styles_of_others(losses)
    if by_gamma.keys() <= STYLES.keys():
        by_gamma = {}  # the figures of six have them
    makers: dict[str, Callable[[], Figure | None]] = {
        "training_curves": lambda: training_curves(epochs),
        "training_curves_by_gamma": lambda: training_curves(epochs, by_gamma),
        "training_curves_others": lambda: training_curves(epochs, others),
        "correct_and_incorrect": lambda: correct_and_incorrect(epochs),
        "correct_and_incorrect_by_gamma": lambda: correct_and_incorrect(epochs, by_gamma),
        "correct_and_incorrect_others": lambda: correct_and_incorrect(epochs, others),
        "scaled_ece": lambda: scaled_ece(epochs),
        "adafocal": lambda: adafocal(epochs, files["bins"]),
        "validation_size": lambda: validation_size(files["validation_size"]),
        "learned": lambda: learned(files["learned"]),
        "optimal_temperature": lambda: optimal_temperature(files["temperatures"]),
        "from_focal_to_inverse": lambda: from_focal_to_inverse(files["table_post_hoc"]),
        "out_of_distribution": lambda: roc_curves(runs, files["out_of_distribution"]),
        "reliability": lambda: reliability(runs, files["calibration"]),
    }
    write_figures(makers, folder)


def write_sweep(table: Sequence[Row], temperatures: Sequence[Row], folder: Path) -> None:
    largest = max(row["train_size"] for row in table)
    inverse = [row for row in table if row["train_size"] == largest and row["loss"] in sweep.FROM_FOCAL_TO_INVERSE]
    makers: dict[str, Callable[[], Figure | None]] = {
        "coefficients": lambda: coefficients(table),
        "best_coefficient": lambda: best_coefficient(table),
        "from_focal_to_inverse": lambda: from_focal_to_inverse(inverse),
        "optimal_temperature": lambda: optimal_temperature(temperatures),
    }
    write_figures(makers, folder)
