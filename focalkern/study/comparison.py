"""The comparison: search the grid on the rows that choose, and report the choices on others."""

from collections.abc import Sequence
from typing import Any

import torch

from focalkern.calibrators import (
    DEFAULT_GAMMAS,
    Binning,
    Criterion,
    Estimator,
    FocalTemperatureScaling,
    Search,
    TemperatureScaling,
)
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES, calibration_grid
from focalkern.study.candidates import Calibrator, Choice, beyond_the_grid, choice_of, part_of_grid
from focalkern.study.result import Study
from focalkern.study.rows import Rows
from focalkern.study.streamed import StreamedSet
from focalkern.study.trust import DEFAULT_RESAMPLES, default_resamples, trust_in
from focalkern.study.words import doubts, name_of, read_remarks, remarks_of, streaming_remarks

__all__ = ["run_study"]


def run_study(
    selection: Rows,
    report: Rows,
    *,
    gammas: Sequence[float],
    temperatures: Sequence[float],
    method: str = "focal-temperature",
    search: Search = "grid",
    binning: Binning | None = None,
    criterion: Criterion = "ece",
    estimator: Estimator = "equal_mass",
    n_bins: int = 15,
    resamples: int | None = None,
    seed: int = 0,
) -> Study:
    """Search the grid on ``selection`` and compare the choices on ``report``.

    Plain temperature scaling is the row gamma = 0 of the same grid, searched whether or not 0 is among ``gammas``;
    focal temperature scaling is chosen among ``gammas`` only. What was asked for beyond the grid, another search or
    bins, are rows after those of the grid; for them both sets must be in memory.

    Args:
        selection: rows that choose.
        report: rows that report; ``selection`` itself when there are no others.
        gammas, temperatures: the grid; of equal cells the first wins.
        method, criterion: which choice the user asked for.
        search: how its gamma and T are found.
        binning: the bins after it, or those of the method ``"histogram"``; None for none.
        estimator, n_bins: of the ECE that chooses; ``n_bins`` also of those that report, and of ``binning``.
        resamples: of the bootstrap on ``report``; 0 for none, :func:`default_resamples` when None.
        seed: of the resamples.
    """
    searched = tuple(gammas) if 0.0 in gammas else (0.0, *gammas)
    if isinstance(selection, StreamedSet):
        grid = selection.grid(searched, tuple(temperatures), n_bins=n_bins, estimator=estimator)
    else:
        # float64, whatever the file holds: a float32 confidence that lands on the other side of a cut moves an ECE
        # cell, and with it the choice between near-equal cells.
        grid = calibration_grid(
            selection.input.to(torch.float64),
            selection.labels,
            searched,
            tuple(temperatures),
            n_bins=n_bins,
            criteria=("ece", "nll"),
            estimator=estimator,
            input_kind=selection.kind,
        )
    # A saved calibrator says that it was the default that was searched, rather than 500 numbers.
    axis = None if tuple(temperatures) == PAPER_TEMPERATURES else tuple(temperatures)
    focal_axis = None if tuple(gammas) == DEFAULT_GAMMAS else tuple(gammas)
    criteria: tuple[Criterion, ...] = ("ece", "nll")
    fitted: list[tuple[Calibrator, Criterion, bool]] = []
    for wanted in criteria:
        options: Any = {
            "temperatures": axis,
            "criterion": wanted,
            "estimator": estimator,
            "n_bins": n_bins,
            "input_kind": selection.kind,
        }
        candidates: tuple[tuple[Calibrator, Sequence[float]], ...] = (
            (TemperatureScaling(**options), (0.0,)),
            (FocalTemperatureScaling(gammas=focal_axis, **options), gammas),
        )
        for calibrator, part in candidates:
            searched_by_it = part_of_grid(grid, part)
            finite = bool(searched_by_it.tables[wanted].isfinite().any())
            if finite:
                calibrator.choose(searched_by_it, n_samples=len(selection), n_classes=selection.n_classes)
            fitted.append((calibrator, wanted, finite))
    cells = [(0.0, 1.0), *((one.gamma_, one.temperature_) for one, _, finite in fitted if finite)]
    for rows in (selection, report):
        if isinstance(rows, StreamedSet):
            rows.measure(cells, n_bins)  # one pass for all
    choices = [choice_of("none", None, None, 0.0, 1.0, selection, report, n_bins)]
    for calibrator, wanted, finite in fitted:
        if not finite:
            choices.append(Choice(calibrator.method, wanted, None, None, None, None, None))
            continue
        cell = (calibrator.gamma_, calibrator.temperature_)
        choices.append(choice_of(calibrator.method, wanted, calibrator, *cell, selection, report, n_bins))
    more = beyond_the_grid(
        selection,
        report,
        gammas=focal_axis,
        temperatures=axis,
        method=method,
        search=search,
        binning=binning,
        criterion=criterion,
        estimator=estimator,
        n_bins=n_bins,
    )
    asked = next((row for row in choices if (row.method, row.criterion) == (method, criterion)), None)
    if search != "grid" or binning is not None:
        asked = more[-1] if more else None
    choices.extend(more)
    chosen = None if asked is None or asked.saved is None else asked
    wanted_resamples = default_resamples(report) if resamples is None else resamples
    trust = trust_in(choices, report, n_bins, wanted_resamples, seed) if wanted_resamples else None
    remarks = [
        *read_remarks(selection),
        *(read_remarks(report) if report is not selection else ()),
        *remarks_of(choices, selection, report, n_bins, trust),
        *(doubts(choices, choices.index(chosen), estimator, trust) if trust is not None and chosen is not None else ()),
        *streaming_remarks(choices, selection, report, grid),
    ]
    if resamples is None and trust is None:
        remedy = f"Say --bootstrap {DEFAULT_RESAMPLES} to have them, --bootstrap 0 not to be told."
        if isinstance(report, StreamedSet) and not report.keeps_confidences:
            remedy = "So many rows leave little to chance."
        remarks.append(
            f"no intervals: on {name_of(report)} of {report.n_classes} classes they would take longer than all the "
            f"rest. {remedy}"
        )
    # Two halves of one file say the same of their file.
    return Study(selection, report, grid, tuple(choices), chosen, tuple(dict.fromkeys(remarks)), trust)
