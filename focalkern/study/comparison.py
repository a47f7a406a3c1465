"""The comparison: cross-validate the candidates, search the paper's grid, and measure the choices on test rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from focalkern.calibrators import DEFAULT_GAMMAS, Binning, Criterion, Estimator, Search
from focalkern.files import LogitSet
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES
from focalkern.study.candidates import Choice, beyond_the_grid, measured, of_contest, of_grid
from focalkern.study.contest import Proper, as_candidates
from focalkern.study.memory import as_rows
from focalkern.study.result import Study
from focalkern.study.rows import Rows
from focalkern.study.trust import DEFAULT_RESAMPLES, default_resamples, trust_in
from focalkern.study.verdict import judge, name_of
from focalkern.study.words import doubts, read_remarks, remarks_of, shared_remarks, streaming_remarks

__all__ = ["run_study"]


def run_study(
    validation: LogitSet | Rows,
    test: LogitSet | Rows,
    *,
    gammas: Sequence[float] = DEFAULT_GAMMAS,
    temperatures: Sequence[float] = PAPER_TEMPERATURES,
    method: str = "auto",
    candidates: Sequence[str] | Mapping[str, Any] | None = None,
    folds: int = 5,
    search: Search = "grid",
    binning: Binning | None = None,
    criterion: Criterion = "nll",
    estimator: Estimator = "equal_mass",
    shown: Estimator = "equal_width",
    n_bins: int = 15,
    resamples: int | None = None,
    seed: int = 0,
) -> Study:
    """Compare calibrators on ``test`` that were chosen and fitted on ``validation``.

    The table has no calibration, the paper's two rows (temperature scaling and focal temperature scaling by the ECE,
    from one grid, of which plain temperature scaling is the row gamma = 0, whether or not 0 is among ``gammas``), and,
    with ``method="auto"``, every candidate. Otherwise it has both scalings by a proper loss from the same grid, and
    then what was asked for beyond the grid, another search or bins; for these both sets must be in memory.

    Args:
        validation: rows to fit and to choose by.
        test: rows to measure on; ``validation`` itself when there are no others.
        gammas, temperatures: the grid; of equal cells the first wins.
        method: ``"auto"``, or which choice the user asked for.
        candidates, folds: of the cross-validation of ``"auto"``; see :func:`focalkern.compare_calibrators`.
        criterion: by which is chosen.
        search: how gamma and T of a named method are found.
        binning: the bins after it, or those of the method ``"histogram"``; None for none.
        estimator, n_bins: of the ECE to choose by; ``n_bins`` also of those in the table, and of ``binning``.
        shown: estimator of the ECE in the words.
        resamples: of the bootstrap on ``test``; 0 for none, :func:`default_resamples` when None.
        seed: of the folds and of the resamples.
    """
    same = test is validation
    validation = as_rows(validation)
    test = validation if same else as_rows(test)
    proper: Proper = "brier" if criterion == "brier" else "nll"
    auto = method == "auto"
    searched = tuple(gammas) if 0.0 in gammas else (0.0, *gammas)
    grid = validation.grid(
        searched,
        tuple(temperatures),
        n_bins=n_bins,
        estimator=estimator,
        criterion=proper,
        folds=min(folds, len(validation)) if auto else 0,
    )
    of_paper = of_grid(grid, gammas, ("ece",) if auto else ("ece", proper), validation)
    contest = None
    if auto:
        made = as_candidates(candidates, proper, validation.kind)
        contest = validation.cross_validate(made, grid, gammas, criterion=proper, folds=folds, seed=seed)
        none, *others = of_contest(contest)
        choices = [none, *others, *of_paper]
        wanted = none if criterion == "ece" else choices[contest.chosen]
        if criterion == "ece":
            wanted = next(row for row in of_paper if row.method == "focal-temperature")
    else:
        choices = [Choice("none", None, 0.0, 1.0, None, None, None), *of_paper]
        more = beyond_the_grid(
            validation,
            gammas=None if tuple(gammas) == DEFAULT_GAMMAS else tuple(gammas),
            temperatures=None if tuple(temperatures) == PAPER_TEMPERATURES else tuple(temperatures),
            method=method,
            search=search,
            binning=binning,
            criterion=criterion,
            estimator=estimator,
            n_bins=n_bins,
        )
        choices += more
        wanted = next((row for row in choices if (row.method, row.criterion) == (method, criterion)), choices[0])
        if search != "grid" or binning is not None:
            wanted = more[-1] if more else choices[0]
    place = choices.index(wanted)
    cells = [(row.gamma, row.temperature) for row in choices if row.gamma is not None and row.temperature is not None]
    for rows in (validation, test):
        rows.measure(cells, n_bins)  # one pass for all
    choices = [measured(choice, validation, test, n_bins) for choice in choices]
    chosen = choices[place] if choices[place].saved is not None else None
    wanted_resamples = default_resamples(test) if resamples is None else resamples
    trust = trust_in(choices, test, n_bins, wanted_resamples, seed) if wanted_resamples else None
    verdict = judge(
        choices,
        chosen,
        contest=contest,
        trust=trust,
        criterion=criterion,
        estimator=shown,
        test=test,
        same_rows=same,
    )
    remarks = [
        *read_remarks(validation),
        *(read_remarks(test) if test is not validation else ()),
        *shared_remarks(validation, test),
        *remarks_of(choices, validation, test, n_bins, trust),
        *(
            doubts(choices, place, estimator if criterion == "ece" else shown, trust)
            if trust is not None and chosen is not None
            else ()
        ),
        *streaming_remarks(choices, validation, test, grid),
    ]
    if resamples is None and trust is None:
        remedy = f"Say --bootstrap {DEFAULT_RESAMPLES} to have them, --bootstrap 0 not to be told."
        if not test.keeps_confidences:
            remedy = "So many rows leave little to chance."
        remarks.append(
            f"no intervals: on {name_of(test)} of {test.n_classes} classes they would take longer than all the "
            f"rest. {remedy}"
        )
    return Study(
        validation=validation,
        test=test,
        grid=grid,
        choices=tuple(choices),
        chosen=chosen,
        # Two halves of one file say the same of their file.
        remarks=tuple(dict.fromkeys(remarks)),
        trust=trust,
        verdict=verdict,
        contest=contest,
        estimator=shown,
        criterion=criterion,
    )
