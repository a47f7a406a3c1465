"""The comparison as a function: calibrators on validation rows, judged on test rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from focalkern._checks import MOST_BINS, MOST_RESAMPLES, integer, one_of, short
from focalkern.calibrators import DEFAULT_GAMMAS, Criterion, Estimator, InputKind
from focalkern.files import InputError, LogitSet
from focalkern.files.checks import checked_set
from focalkern.metrics import ESTIMATORS
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES
from focalkern.study.comparison import run_study
from focalkern.study.contest import as_candidates, check_folds
from focalkern.study.memory import MemorySet, as_rows
from focalkern.study.result import Study
from focalkern.study.rows import Rows
from focalkern.study.streamed import StreamedSet, stream_sets

__all__ = ["compare_calibrators"]

_OP = "compare_calibrators"
_CRITERIA = ("nll", "brier", "ece")


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
    input_kind: InputKind = "logits",
) -> Study:
    r"""Which calibrator to use, why, and what it costs: what ``focalkern calibrate`` does.

    The candidates are fitted on the validation rows and compared there by cross-validation, all on the same folds. Used
    is the simplest one whose mean loss l lies within one standard error of the best one's, b:

    .. math:: \overline{l - b} \le \text{sd}(l - b) / \sqrt{N}

    Never chosen are a candidate with a higher mean loss than no calibration, one whose optimum lies where its search
    ended, on all rows or without a fold, and one whose loss is infinite on a row. Test rows never choose. Beside the
    candidates the table has the paper's two choices, the lowest ECE (``equal_mass``) of its grid for temperature
    scaling and for focal temperature scaling.

    Args:
        validation: the rows to choose by: a pair (logits [N, C], labels [N]) of tensors or arrays, or what
            :func:`focalkern.study.stream_sets` has for files that are read a few rows at a time. Of streamed rows the
            folds are by row number, temperature and focal temperature scaling are taken from the grid, and candidates
            that need all rows in memory are left out and named.
        test: likewise, the rows that the figures are of; the validation rows when None, which is too good and said.
        candidates: names out of ``"none"``, ``"temperature"``, ``"focal-temperature"`` (all of these when None) and the
            others in ``focalkern.study.CANDIDATES``; or a mapping of names to anything with ``fit(logits, labels)`` and
            ``predict_proba(logits)``, the simplest first. No calibration is always among them.
        criterion: ``"nll"`` or ``"brier"``, proper losses, by which the candidates are fitted and compared; or
            ``"ece"``: the paper's choice, focal temperature scaling by the ECE, whatever it does to the others. Then
            the verdict says what that costs.
        estimator: of the ECE that is shown: ``"equal_width"``, ``"equal_mass"`` or ``"equal_mass_interp"``.
        n_bins: of every ECE.
        folds: of the cross-validation, at least 2.
        resamples: of the bootstrap behind the intervals; 0 for none. By default 200, and none where that would take
            minutes.
        seed: of the folds and of the resamples.
        input_kind: ``"logits"`` or ``"probs"``: what the pairs hold.

    Returns:
        A :class:`focalkern.Study`: ``verdict``, ``calibrator`` (fitted, the one to use), ``table()``, ``to_dict()``,
        ``to_dataframe()``, ``write_report(folder)``; it shows itself in a notebook.

    Raises:
        TypeError: rows of another kind; a candidate without ``fit`` or ``predict_proba``.
        ValueError: an unknown option or name; rows that cannot be used, naming the first; test rows with another number
            of classes.

    Source: Breiman et al., Classification and Regression Trees, 1984, section 3.4.3 (the rule of one standard error);
    Komisarenko & Kull 2024 (arXiv 2408.11598), section 5 (the grid).

    Example:
        >>> labels = torch.arange(600) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]  # sure, and wrong in 1 of 5 rows
        >>> study = fk.compare_calibrators((logits[:300], labels[:300]), (logits[300:], labels[300:]), resamples=0)
        >>> print(study.verdict.use)
        temperature scaling, T = 1.924: NLL 0.8360 -> 0.6390, ECE 0.1647 -> 0.0000 on 300 test rows
        >>> study.calibrator.predict_proba(logits[1:2]).round(decimals=3)
        tensor([[0.1000, 0.8000, 0.1000]])
    """
    for name, value, known in (
        ("criterion", criterion, _CRITERIA),
        ("estimator", estimator, ESTIMATORS),
        ("input_kind", input_kind, ("logits", "probs")),
    ):
        one_of(_OP, name, value, known)
    folds, seed = check_folds(_OP, folds, seed)
    n_bins = integer(_OP, "n_bins", n_bins, 1, MOST_BINS)
    if resamples is not None:
        resamples = integer(_OP, "resamples", resamples, 0, MOST_RESAMPLES, " or None")
    try:
        validation = _rows("validation", validation, "val", input_kind)
        test = validation if test is None else _rows("test", test, "test", input_kind)
    except InputError as error:
        raise ValueError(f"compare_calibrators: {error}") from None
    if (test.n_classes, test.kind) != (validation.n_classes, validation.kind):
        raise ValueError(
            f"compare_calibrators: test must have {validation.kind} of {validation.n_classes} classes as validation, "
            f"got {test.kind} of {test.n_classes}"
        )
    try:
        as_candidates(candidates, "nll", validation.kind)  # what is wrong with them is said before the search
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_OP}: {error}") from None
    return run_study(
        validation,
        test,
        gammas=DEFAULT_GAMMAS,
        temperatures=PAPER_TEMPERATURES,
        candidates=candidates,
        folds=folds,
        criterion=criterion,
        shown=estimator,
        n_bins=n_bins,
        resamples=resamples,
        seed=seed,
    )


def _rows(name: str, given: Any, prefix: str, kind: InputKind) -> Rows:
    if isinstance(given, LogitSet | MemorySet | StreamedSet):
        return as_rows(given)
    if isinstance(given, str | Path):
        if not str(given).isprintable() or len(str(given)) > 4096:
            raise ValueError(f"{_OP}: {name} must be a path or a pattern of files, got {short(given)}")
        sets = stream_sets(str(given), labels=None, input_kind=None)
        if len(sets) > 1 and prefix not in sets:
            raise ValueError(f"compare_calibrators: {name} must be one set of rows, got {', '.join(sets)} in {given}")
        return sets.get(prefix, next(iter(sets.values())))
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(
            f"compare_calibrators: {name} must be a pair (logits, labels), a pattern of files or a streamed set, got "
            f"{type(given).__name__}"
        )
    pair = [one.detach().cpu() if isinstance(one, torch.Tensor) else one for one in given]
    return as_rows(checked_set(name, prefix, kind, kind, pair[0], "labels", pair[1]))
