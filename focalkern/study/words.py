"""What the reader of a study has to know, in sentences."""

import math
from collections.abc import Sequence

import torch

from focalkern._doubts import input_notes, label_doubts, pair_doubts
from focalkern.files import LogitSet
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.study.candidates import IN_WORDS, Choice
from focalkern.study.contest import LOSS_NAMES
from focalkern.study.result import Study
from focalkern.study.rows import About, Rows
from focalkern.study.trust import Trust
from focalkern.study.verdict import name_of

__all__ = [
    "bin_remarks",
    "describe",
    "doubts",
    "on_which",
    "read_remarks",
    "remarks_of",
    "rows_in_words",
    "search_in_words",
    "shared_remarks",
    "short_name",
    "streaming_remarks",
]


def streaming_remarks(choices: Sequence[Choice], validation: Rows, test: Rows, grid: CalibrationGrid) -> list[str]:
    """What is known less well of rows that were read a few at a time."""
    remarks = []
    cells = [(one.criterion, one.gamma, one.temperature) for one in choices]
    bounds = [
        validation.bound_of(gamma, temperature)
        for criterion, gamma, temperature in cells
        if criterion == "ece" and gamma is not None and temperature is not None
    ]
    if any(bounds):
        remarks.append(
            f"the ECE ({grid.estimator}) of the grid comes from counts of the confidences in buckets: for the chosen "
            f"cells it is at most {max(bounds):.1g} off."
        )
    if not test.keeps_confidences:
        bound = max(
            test.bound_of_figures(gamma, temperature, grid.n_bins)
            for _, gamma, temperature in cells
            if gamma is not None and temperature is not None
        )
        remarks.append(
            f"with so many rows the ECEs of equal mass in the table come from buckets too, and are at most {bound:.1g} "
            "off."
        )
    return remarks


def read_remarks(rows: Rows) -> list[str]:
    """What has to be said of a set, whatever is done with it."""
    remarks = []
    subject = "a logit of -inf" if rows.kind == "logits" else "probability exactly 0"
    zeros = rows.impossible_targets
    if zeros:
        where = f"({rows.part})" if rows.part else f"of {rows.source}"
        remarks.append(
            f"{zeros} of the {name_of(rows)} {where} give their true class {subject}: its "
            "negative log-likelihood is infinite, and so is the mean NLL. No gamma and no temperature changes that, "
            "because the map keeps an exact zero; the NLL has no optimum on these rows. The other figures are not "
            "affected."
        )
    if rows.looks_like_probs:
        remarks.append(
            f"the rows of {rows.source} were read as logits, but are all positive and sum to 1: if they are "
            "probabilities, say --input-kind probs."
        )
    of_rows = f"{rows.source}{f' ({rows.part})' if rows.part else f', {rows.name}' if rows.name else ''}"
    input, labels = rows.sample()
    if len(labels) < len(rows):
        of_rows += f" ({len(labels):,} of its rows)"
    notes = input_notes(input) if rows.kind == "logits" else []
    remarks.extend(f"{of_rows}: {words}." for words in (*label_doubts(input, labels), *notes))
    return remarks


def shared_remarks(validation: Rows, test: Rows) -> list[str]:
    """What has to be said of two sets together, which were given as two."""
    if validation is test:
        return []
    (input, labels), (other, other_labels) = validation.sample(), test.sample()
    words = pair_doubts(input, labels, other, other_labels)
    part = f"of {len(other_labels):,} rows that were compared, " if len(other_labels) < len(test) else ""
    return [f"{part}{one}." for one in words]


def remarks_of(choices: Sequence[Choice], validation: Rows, test: Rows, n_bins: int, trust: Trust | None) -> list[str]:
    remarks = []
    if len(validation) < 20 * n_bins:
        remarks.append(
            f"{len(validation)} rows in {n_bins} bins are about {len(validation) / n_bins:.2g} per bin: an ECE of so "
            "few is mostly noise, and the ECE-optimal choice with it."
        )
    if test is not validation and len(test) < 20 * n_bins:
        remarks.append(
            f"{len(test)} test rows in {n_bins} bins are about {len(test) / n_bins:.2g} per bin: their ECE is "
            "mostly noise."
        )
    before = choices[0].test
    assert before is not None  # the uncalibrated row always has figures
    plain_rows = [choice for choice in choices if (choice.search == "grid" or choice.contested) and not choice.applied]
    by_key = {(choice.method, choice.criterion): choice for choice in plain_rows}
    for method, words in IN_WORDS.items():
        ece, nll = by_key.get((method, "ece")), by_key.get((method, "nll"))
        for choice in (ece, nll):
            if choice is not None and choice.calibrator is not None and choice.calibrator.at_border_:
                remarks.append(
                    f"{choice.label}: {' and '.join(choice.calibrator.at_border_)}; the optimum may lie beyond the "
                    "border of the grid."
                )
        if ece is None or nll is None or ece.test is None or nll.test is None:
            continue
        was, with_ece, with_nll = before["nll"], ece.test["nll"], nll.test["nll"]
        if not all(map(math.isfinite, (was, with_ece, with_nll))):
            continue
        if with_nll <= was < with_ece:
            lowered = f"{with_nll:.4f}" != f"{was:.4f}"
            remarks.append(
                f"{words}: ECE and NLL disagree. The ECE-optimal choice RAISES the NLL from {was:.4f} to "
                f"{with_ece:.4f}; the NLL-optimal one {'lowers it to' if lowered else 'leaves it at'} {with_nll:.4f}."
            )
        elif with_ece > with_nll * 1.01:
            remarks.append(
                f"{words}: ECE and NLL disagree. The ECE-optimal choice leaves the NLL at {with_ece:.4f}, where the "
                f"NLL-optimal one gets {with_nll:.4f} (uncalibrated {was:.4f})."
            )
    for choice in choices:
        if (
            choice.search != "grid"
            and not choice.contested
            and choice.saved is choice.calibrator is not None
            and choice.calibrator.at_border_
        ):
            remarks.append(f"{choice.label}: {' and '.join(choice.calibrator.at_border_)}.")
        if test.memory is not None:
            remarks.extend(bin_remarks(choice, test.memory))
    plain, focal = by_key["temperature", "ece"], by_key["focal-temperature", "ece"]
    if test is not validation and plain.test is not None and focal.test is not None and focal.calibrator is not None:
        name = f"ece_{focal.calibrator.estimator}"
        # Where the interval of the difference contains 0 there is nothing to say of which is higher; doubts says that.
        decided = trust is None or trust.mark(choices.index(focal), name) == "!"
        if decided and focal.test[name] > plain.test[name]:
            remarks.append(
                f"on the test rows focal temperature scaling has the higher ECE ({focal.calibrator.estimator}), "
                f"{focal.test[name]:.4f} against {plain.test[name]:.4f}: what it gained on the validation rows "
                "does not carry over."
            )
    return remarks


def bin_remarks(choice: Choice, rows: LogitSet) -> list[str]:
    """What the bins of a choice do to the rows that it is measured on; nothing without bins."""
    if choice.binning is None or choice.test is None:
        return []
    remarks = []
    changed = int(choice.binning.changed(rows.input.to(torch.float64)).sum())
    if changed:
        remarks.append(f"{choice.label}: the bins change the predicted class of {changed} of the {name_of(rows)}.")
    if math.isinf(choice.test["nll"]) and bool((choice.binning.values_ % 1 == 0).any()):
        remarks.append(
            f"{choice.label}: a bin in which all validation rows were right (or all wrong) leaves a probability of 0, "
            "and a row that contradicts it makes the NLL infinite. Fewer bins (--n-bins) may mend it."
        )
    return remarks


def doubts(choices: Sequence[Choice], chosen: int, estimator: str, trust: Trust) -> list[str]:
    """What the intervals say of the chosen row."""
    remarks = []
    choice, other = choices[chosen], trust.against[chosen]
    assert choice.test is not None  # it has a cell
    name = f"ece_{estimator}"
    level = f"{100 * trust.bootstrap.level:g} %"
    same_cell = other is not None and trust.names[chosen] == trust.names[other]
    difference = trust.difference(chosen, name)
    if other is not None and difference is not None and not same_cell and not difference.excludes_zero:
        remarks.append(
            f"{choice.label} and {choices[other].label} cannot be told apart by their ECE ({estimator}) on the "
            f"test rows: the difference is {difference.estimate:+.4f}, and its {level} interval, "
            f"{difference.low:+.4f} to {difference.high:+.4f}, contains 0."
        )
    floors = trust.floors[chosen]
    if floors is not None and floors[name].p_value(choice.test[name]) > 1 - trust.bootstrap.level:
        remarks.append(
            f"{choice.label}: its ECE ({estimator}) of {choice.test[name]:.4f} on the test rows cannot be told "
            f"from that of a perfectly calibrated model, which scores {floors[name].mean:.4f} on average with these "
            f"confidences. A smaller ECE would prove nothing."
        )
    return remarks


def describe(study: Study) -> str:
    """What the table is about, above it."""
    lines = [f"validation   {_of_rows(study.validation)}"]
    if study.test is not study.validation:
        lines.append(f"test         {_of_rows(study.test)}")
    else:
        lines.append("test         the same rows")
    if study.contest is not None and study.contest.folds:
        of = LOSS_NAMES[study.contest.criterion]
        lines.append(f"compared by  {of} of {study.contest.folds}-fold cross-validation on the validation rows")
    grid = study.grid
    temperatures = grid.temperatures
    lines.append(
        f"grid         {len(grid.gammas)} gammas x {len(temperatures)} temperatures from {float(temperatures.min()):g} "
        f"to {float(temperatures.max()):g}; ECE of {grid.n_bins} bins, {grid.estimator}"
    )
    return "\n".join(lines)


def rows_in_words(rows: About) -> str:
    return _of_rows(rows, name_of(rows))


def _of_rows(rows: About, name: str = "") -> str:
    part = f" ({rows.part})" if rows.part else ""
    return f"{name or f'{len(rows)} rows'}{part} of {rows.n_classes} classes, {rows.kind}: {rows.source}"


def on_which(study: Study) -> str:
    return f"on the {len(study.validation)} validation rows"


def search_in_words(study: Study) -> str:
    grid = study.grid
    gammas = ", ".join(f"{gamma:g}" for gamma in grid.gammas.tolist())
    low, high = float(grid.temperatures.min()), float(grid.temperatures.max())
    beyond = []
    for choice in study.choices:
        if choice.binning is not None:
            beyond.append(
                f"{choice.label}: the confidence of the top class becomes the accuracy of its bin, one of "
                f"{len(choice.binning.values_)} of {choice.binning.binning.replace('_', ' ')}."
            )
        elif choice.search != "grid" and choice.calibrator is not None:
            beyond.append(f"{choice.label}: {choice.calibrator.n_cells_} cells, which need not be of the grid.")
    return (
        f"{len(grid.gammas)} gammas ({gammas}) x {len(grid.temperatures)} temperatures from {low:g} to {high:g}, "
        f"{len(grid.gammas) * len(grid.temperatures)} cells, each with its ECE ({grid.estimator}, {grid.n_bins} bins) "
        f"and NLL {on_which(study)}. Temperature scaling is the row gamma = 0."
        f"{''.join(f' {words}' for words in beyond)}"
    )


def short_name(choice: Choice) -> str:
    if choice.method == "none":
        return "uncalibrated"
    name = choice.label.partition(", ")[0]
    return f"{name}, {choice.parameters}" if choice.parameters else name
