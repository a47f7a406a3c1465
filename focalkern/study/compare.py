"""The comparison: cross-validation of candidates, search of the grid, and scores of all results on test samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from focalkern._checks import MOST_BINS, MOST_RESAMPLES, flag, integer, number, one_of
from focalkern._columns import ClassColumns, column_misfit
from focalkern._devices import cpu_by_default
from focalkern._types import CRITERIA, INPUT_KINDS
from focalkern.calibrators import (
    DEFAULT_GAMMAS,
    Binning,
    Calibrator,
    Criterion,
    Estimator,
    InputKind,
    Search,
)
from focalkern.calibrators._candidates import as_candidates
from focalkern.calibrators._folds import check_folds
from focalkern.calibrators._parameters import LOGITS
from focalkern.files import InputError, LogitSet
from focalkern.metrics import ESTIMATORS
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES
from focalkern.study.choices import Settings, automatic_choice, named_method
from focalkern.study.given import given_samples
from focalkern.study.grid_search import search_grid
from focalkern.study.intervals import bootstrap_intervals, default_resamples
from focalkern.study.remarks import remarks
from focalkern.study.results import Comparison, scored
from focalkern.study.samples import Samples, as_samples
from focalkern.study.study import Study
from focalkern.study.verdict import accept_rows, judge

__all__ = ["compare_calibrators", "run_study"]

_OP = "compare_calibrators"


def compare_calibrators(
    validation: Any,
    test: Any = None,
    *,
    candidates: Sequence[str] | Mapping[str, Any] | None = None,
    criterion: Criterion = "nll",
    estimator: Estimator = "equal_width",
    n_bins: int = 15,
    folds: int = 5,
    resamples: int | None = None,
    seed: int = 0,
    input_kind: InputKind = LOGITS,
    keep_predictions: bool = False,
    accept_risk: float | None = None,
    ignore_index: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Study:
    r"""Compare calibrators and recommend one, with the reason and its cost, as ``focalkern calibrate`` does.

    The candidates are fitted on the validation samples and compared by cross-validation, all on the same folds. The
    rule starts with the candidate of lowest mean loss among those that change no predicted class. A richer candidate
    replaces it if its mean loss is lower by more than half a standard error of the paired difference; see
    :class:`focalkern.AutoCalibrator`. Test samples do not influence the choice. The table also has focal temperature
    scaling by the criterion, and with ``all=True`` the paper's two choices: the lowest ECE (``equal_mass``) of its grid
    for temperature scaling and for focal temperature scaling.

    Args:
        validation: samples for the fits and the choice: a pair (logits [N, C], labels [N]) of tensors or arrays (for
            pixels [N, C, d1, ...] and [N, d1, ...]; a frame as in ``fit``), a set of
            :func:`focalkern.study.stream_sets`, or a pattern of files. With files, focal temperature scaling is
            searched on the grid, and candidates that need all samples in memory (such as ``"spline-matrix"``) are left
            out; the warnings of the verdict name them.
        test: samples for the scores. None uses the validation samples; the scores are then optimistic, and the verdict
            says so.
        candidates: some of ``"none"``, ``"temperature"`` (:class:`focalkern.RobustTemperatureScaling`), ``"spline"``,
            ``"spline-vector"``, ``"spline-matrix"`` and the other names in ``focalkern.study.CANDIDATES``; None is the
            five named here. Or a mapping of names to objects with ``fit(logits, labels)`` and
            ``predict_proba(logits)``, the simplest first. No calibration is always included.
        criterion: ``"nll"`` or ``"brier"``, a proper loss, for the fits and the comparison; or ``"ece"``, the paper's
            choice: focal temperature scaling by the ECE. The verdict then states the cost in NLL.
        estimator: estimator of the ECE in the verdict: ``"equal_width"``, ``"equal_mass"`` or ``"equal_mass_interp"``.
        n_bins: number of bins of every ECE.
        folds: number of folds of the cross-validation, at least 2.
        resamples: number of bootstrap resamples for the intervals; 0 for none. By default 200, or none if that would
            take minutes.
        seed: random seed of the folds and of the resamples.
        input_kind: ``"logits"`` or ``"probs"``, the content of the pairs. Without it, logits that look like
            probabilities raise an error.
        keep_predictions: choose only among candidates that change no predicted class.
        accept_risk: an error rate in (0, 1). The verdict then has one more line, from the test samples: the confidence
            above which predictions can be accepted, the fraction of such predictions, and the 95% upper bound of their
            error rate (:func:`focalkern.accept_threshold`).
        ignore_index: label of ignored rows, in pairs and in files.
        storage_options: options for patterns that are URLs, as in :func:`focalkern.files.read_sets`.

    Returns:
        A :class:`focalkern.Study` with ``verdict``, ``calibrator`` (the recommended one, fitted), ``table()``,
        ``to_dict()``, ``to_dataframe()`` and ``write_report(folder)``. A notebook displays its table.

    Raises:
        TypeError: samples of another type; a candidate without ``fit`` or ``predict_proba``.
        ValueError: an unknown option or name; samples that cannot be used, naming the first; test samples with another
            number of classes.

    Source: Breiman et al., Classification and Regression Trees, 1984, section 3.4.3 (the one-standard-error rule);
    Komisarenko & Kull 2024 (arXiv 2408.11598), section 5 (the grid).

    Example:
        >>> labels = torch.arange(600) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]  # confident, wrong in 1 of 5 rows
        >>> study = fk.compare_calibrators((logits[:300], labels[:300]), (logits[300:], labels[300:]), resamples=0)
        >>> print(study.verdict.use)
        spline matrix scaling: NLL 0.8360 -> 0.5439, Brier 0.3807 -> 0.3230, ECE 0.1647 -> 0.0004 on 300 test rows
        >>> study.calibrator.predict_proba(logits[1:2]).round(decimals=3)  # the class above is correct in 1 of 5 rows
        tensor([[0.1610, 0.8000, 0.0390]])
    """
    for name, value, known in (
        ("criterion", criterion, CRITERIA),
        ("estimator", estimator, ESTIMATORS),
        ("input_kind", input_kind, INPUT_KINDS),
    ):
        one_of(_OP, name, value, known)
    folds, seed = check_folds(_OP, folds, seed)
    n_bins = integer(_OP, "n_bins", n_bins, 1, MOST_BINS)
    flag(_OP, "keep_predictions", keep_predictions)
    if accept_risk is not None:
        accept_risk = number(_OP, "accept_risk", accept_risk, "a number or None")
        if not 0 < accept_risk < 1:
            raise ValueError(f"{_OP}: accept_risk must be between 0 and 1, got {accept_risk:g}")
    if resamples is not None:
        resamples = integer(_OP, "resamples", resamples, 0, MOST_RESAMPLES, " or None")
    of_pairs: dict[str, Any] = {"ignore_index": ignore_index, "storage_options": storage_options}
    try:
        validation = given_samples(_OP, "validation", validation, "val", input_kind, **of_pairs)
        test = validation if test is None else given_samples(_OP, "test", test, "test", input_kind, **of_pairs)
    except InputError as error:
        raise ValueError(f"compare_calibrators: {error}") from None
    if (test.n_classes, test.kind) != (validation.n_classes, validation.kind):
        raise ValueError(
            f"compare_calibrators: test must have {validation.kind} of {validation.n_classes} classes as validation, "
            f"got {test.kind} of {test.n_classes}"
        )
    if validation.memory is not None and test.memory is not None:
        misfit = column_misfit(validation.memory.classes, test.memory.classes)
        if misfit:
            raise ValueError(f"compare_calibrators: test must have the columns of validation in their order, {misfit}")
    return run_study(
        validation,
        test,
        gammas=DEFAULT_GAMMAS,
        temperatures=PAPER_TEMPERATURES,
        candidates=candidates,
        folds=folds,
        criterion=criterion,
        keep_predictions=keep_predictions,
        report_estimator=estimator,
        n_bins=n_bins,
        resamples=resamples,
        seed=seed,
        accept_risk=accept_risk,
    )


@cpu_by_default()
def run_study(
    validation: LogitSet | Samples,
    test: LogitSet | Samples,
    *,
    gammas: Sequence[float] = DEFAULT_GAMMAS,
    temperatures: Sequence[float] = PAPER_TEMPERATURES,
    method: str = "auto",
    candidates: Sequence[str] | Mapping[str, Any] | None = None,
    keep_predictions: bool = False,
    folds: int = 5,
    search: Search | None = None,
    binning: Binning | None = None,
    criterion: Criterion = "nll",
    estimator: Estimator = "equal_mass",
    report_estimator: Estimator = "equal_width",
    n_bins: int = 15,
    resamples: int | None = None,
    seed: int = 0,
    accept_risk: float | None = None,
    brief: bool = False,
    paper: bool = True,
) -> Study:
    """Fit and choose calibrators on ``validation``, and score them on ``test``.

    The results are no calibration and the paper's two: temperature scaling and focal temperature scaling with the
    lowest ECE of one grid. Temperature scaling is the row gamma = 0, which is added if ``gammas`` lacks 0.
    ``method="auto"`` adds every candidate. Another method adds both scalings by a proper loss from the same grid, and
    the method itself with its search and bins; a search other than ``"grid"`` and bins need both sets in memory.

    Args:
        validation: samples for the fits and the choice.
        test: samples for the scores; ``validation`` itself without a test set.
        gammas, temperatures: the grid; the first of equal cells is used.
        method: ``"auto"``, or ``"temperature"``, ``"focal-temperature"`` or ``"histogram"``.
        candidates, keep_predictions, folds: settings of the cross-validation of ``"auto"``; see
            :func:`focalkern.compare_calibrators`.
        criterion: loss that chooses.
        search: search for gamma and T of a named method. None is the default search of the calibrator: by derivatives
            for NLL and Brier score, but on the grid if the grid is not the default or the samples are read in parts.
        binning: bins after the method's scaling, or of ``"histogram"``; None is no bins.
        estimator, n_bins: estimator and bins of the ECE as a criterion; ``n_bins`` also applies to ``binning`` and to
            the ECEs of the scores.
        report_estimator: estimator of the ECE in the verdict and the remarks.
        resamples: number of bootstrap resamples of ``test``; 0 for none, None for :func:`default_resamples`.
        seed: random seed of the folds and of the resamples.
        accept_risk: the largest error rate of accepted rows; None for no threshold.
        brief: for ``method="auto"`` and samples in memory, compute only the verdict and the scores on the test samples:
            no remarks, and only those cells of the grid that may have the lowest ECE.
        paper: with ``brief``, whether to search the paper's two choices; otherwise they have no calibrator.
    """
    same = test is validation
    validation = as_samples(validation)
    test = validation if same else as_samples(test)
    settings = Settings(
        gammas=tuple(gammas),
        temperatures=tuple(temperatures),
        method=method,
        search=search,
        binning=binning,
        criterion=criterion,
        estimator=estimator,
        n_bins=n_bins,
    )
    auto = method == "auto"
    try:
        made = as_candidates(candidates, settings.proper, validation.kind, keep_predictions) if auto else {}
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_OP}: {error}") from None
    searched = search_grid(
        validation,
        settings.gammas if 0.0 in settings.gammas else (0.0, *settings.gammas),
        settings.temperatures,
        n_bins=n_bins,
        estimator=estimator,
        criterion=settings.proper,
        folds=min(folds, len(validation)) if auto else 0,
        seed=seed,
        lowest_of=None if not (auto and brief) else ((0.0,), settings.gammas) if paper else (),
    )
    if auto:
        with_focal = candidates is None
        options: Any = {"folds": folds, "seed": seed, "with_focal": with_focal, "brief": brief}
        choice = automatic_choice(validation, settings, searched, made, **options)
    else:
        choice = named_method(validation, settings, searched)
    only_test = ("accuracy", "nll", "brier", f"ece_{report_estimator}") if brief else None
    results = scored(choice.results, validation, test, n_bins, only_test)
    if validation.memory is not None and validation.memory.classes:
        for one in results:
            if isinstance(one.calibrator, Calibrator):
                one.calibrator._columns = ClassColumns.called(validation.memory.classes)
    chosen = None if choice.chosen is None else results[choice.chosen]
    n_resamples = default_resamples(test) if resamples is None else resamples
    n_resamples = n_resamples if test.processes.rank == 0 else 0  # only rank 0 has the results
    comparison = Comparison(
        validation=validation,
        test=test,
        search=searched,
        results=tuple(results),
        chosen=None if chosen is None or chosen.calibrator is None else chosen,
        intervals=bootstrap_intervals(results, test, n_bins, n_resamples, seed) if n_resamples else None,
        cross_validation=choice.cross_validation,
        estimator=report_estimator,
        criterion=criterion,
    )
    accept = None if accept_risk is None else accept_rows(comparison, accept_risk)
    verdict = judge(comparison, accept)
    found = () if brief else remarks(comparison, intervals_expected=resamples is None)
    return Study(
        **vars(comparison),
        verdict=verdict,
        remarks=tuple(words for words in found if words not in verdict.warnings),
        accept=accept,
    )
