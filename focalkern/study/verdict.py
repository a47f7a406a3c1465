"""The verdict on a comparison: the recommendation, its reason, its cost, and warnings."""

import math

import torch

from focalkern._checks import short
from focalkern._columns import pattern_of_classes
from focalkern._types import LOSS_NAMES, PROPER
from focalkern.bootstrap import Interval
from focalkern.calibrators import Verdict
from focalkern.calibrators._candidates import keeps_predictions, log_proba
from focalkern.calibrators._verdict import (
    cross_validation_warnings,
    describe_evidence,
    describe_method,
    describe_predictions,
    sentence,
)
from focalkern.metrics import AcceptThreshold, accept_threshold
from focalkern.study.results import CalibratorResult, Comparison, at_bound, print_score
from focalkern.study.samples import SCORES, Samples, about_rows, data_problem, describe_test, overlap_problem

__all__ = ["accept_rows", "column_problem", "judge"]

# With fewer rows of a class in expectation, chance may leave it without a row.
_ENOUGH_EXPECTED = 10


def judge(comparison: Comparison, accept: AcceptThreshold | None = None) -> Verdict:
    """The recommendation, its reason and its cost, and with ``accept`` the threshold of accepted predictions."""
    results, chosen, criterion = comparison.results, comparison.chosen, comparison.criterion
    cross_validation = comparison.cross_validation
    if chosen is None or chosen.test is None:
        name = LOSS_NAMES.get(criterion, "ECE")
        return Verdict("no calibration", f"The {name} of the requested calibrator is infinite in every cell.", "")
    ece = f"ece_{comparison.estimator}"
    before, now = results[0].test, chosen.test
    assert before is not None
    where = describe_test(comparison.test, comparison.same_samples)
    use = _with_parameters(chosen)
    if chosen.method == "none":
        use += f": NLL {print_score(now['nll'])}, ECE {print_score(now[ece])} {where}"
    else:
        changed = [
            f"{words} {print_score(before[name])} -> {print_score(now[name])}"
            for words, name in _first_scores(criterion, ece)
        ]
        use += f": {', '.join(changed)} {where}"
    problem = data_problem(comparison.validation) or column_problem(comparison.validation)
    if not (problem or comparison.same_samples):
        problem = data_problem(comparison.test)
    optimistic = _has_same_rows(comparison)
    if not (problem or optimistic):
        problem = overlap_problem(comparison.validation, comparison.test)
    warnings = [problem] if problem else []
    if comparison.same_samples:
        warnings.append(
            "the test set is the validation set, so the metrics after calibration are optimistic: pass a separate "
            "test set"
        )
    if accept is not None and optimistic:
        warnings.append(
            "the bound on accepted rows does not hold for new rows, because the calibrator was fitted on the test "
            "rows: pass a separate test set"
        )
    if cross_validation is not None and criterion != "ece":
        because = describe_evidence(cross_validation)
        warnings += cross_validation_warnings(cross_validation)
        costs = (
            ""
            if chosen.method == "none"
            else describe_predictions(
                _n_changed(comparison, chosen), len(comparison.test), (before["accuracy"], now["accuracy"])
            )
        )
    else:
        because = (
            "The criterion is the ECE"
            if criterion == "ece"
            else "The options name the calibrator, without cross-validation"
        )
        if cross_validation is not None:
            loss, best = LOSS_NAMES[cross_validation.criterion], describe_method(cross_validation.winner.name)
            because += f"; the {loss} chooses {best}"
        because += "."
        costs = _price(comparison, chosen)
        if now["nll"] > before["nll"]:
            warnings.append(
                f"the calibrator's NLL, {print_score(now['nll'])}, is higher than without calibration, "
                f"{print_score(before['nll'])}"
            )
    accepts = "" if accept is None else str(accept)
    return Verdict(use, because, costs, tuple(warnings), optimistic, check_data=bool(problem), accepts=accepts)


def accept_rows(comparison: Comparison, max_risk: float) -> AcceptThreshold | None:
    """The threshold on the confidence of the chosen calibrator, from the test samples; None without a calibrator and on
    ranks other than 0."""
    if comparison.chosen is None:
        return None
    test, parts = comparison.test, [torch.zeros(2, 0, dtype=torch.float64)]
    for _, input, target, _ in test.batches("accepted rows"):
        log_p, predicted = log_proba(comparison.chosen.calibrator, input).max(-1)
        parts.append(torch.stack([log_p.double().exp().clamp(max=1.0), (predicted == target).double()]))
    confidence, correct = (test.processes.to_first(values) for values in torch.cat(parts, 1))
    if test.processes.rank:
        return None
    return accept_threshold(scores=confidence, correct=correct > 0, max_risk=max_risk)


def _has_same_rows(comparison: Comparison) -> bool:
    """Whether the test rows equal the validation rows; for long files, blocks of rows are compared."""
    one, other = comparison.validation, comparison.test
    if comparison.same_samples or len(one) != len(other) or one.n_classes != other.n_classes:
        return comparison.same_samples
    return all(torch.equal(rows, others) for rows, others in zip(one.sample(), other.sample(), strict=True))


def _with_parameters(result: CalibratorResult) -> str:
    name = describe_method(result.method)
    if result.binning is not None and result.method != "histogram":
        name += " and bins"
    if result.method in ("none", "histogram") or result.temperature is None:
        return name
    at = at_bound(result)
    gamma = f"gamma = {result.gamma:.4g}{at['gamma']}, " if result.method == "focal-temperature" else ""
    return f"{name}, {gamma}T = {result.temperature:.4g}{at['temperature']}"


def _first_scores(criterion: str, ece: str) -> list[tuple[str, str]]:
    """Names in print and names of the scores in the first line."""
    losses = [(SCORES[name], name) for name in PROPER]
    return [("ECE", ece), *losses] if criterion == "ece" else [*losses, ("ECE", ece)]


def _n_changed(comparison: Comparison, chosen: CalibratorResult) -> int:
    """Number of test samples whose predicted class changes."""
    if keeps_predictions(chosen.calibrator):
        return 0
    test = comparison.test
    changed = torch.zeros(1, dtype=torch.int64)
    for _, input, _, _ in test.batches("count"):
        changed += (log_proba(chosen.calibrator, input).argmax(-1) != input.argmax(-1)).sum()
    return int(test.processes.add_up(changed))


def _price(comparison: Comparison, chosen: CalibratorResult) -> str:
    """NLL and Brier score against no calibration and against temperature scaling by a proper loss, with intervals."""
    results, place = comparison.results, comparison.chosen_index
    assert place is not None
    temperature = next(
        (
            i
            for i, one in enumerate(results)
            if one.method == "temperature" and one.criterion != "ece" and one.binning is None and one.test
        ),
        None,
    )
    parts = []
    for words, other in (("no calibration", 0), ("temperature scaling", temperature)):
        if other is None or other == place:
            continue
        changes = []
        for score in PROPER:
            interval = None if comparison.intervals is None else comparison.intervals.between(place, other, score)
            changes.append(f"{SCORES[score]} {_difference(chosen, results[other], score, interval)}")
        parts.append(f"against {words}: {', '.join(changes)}")
    return sentence("; ".join(parts)) if parts else ""


def _difference(result: CalibratorResult, other: CalibratorResult, score: str, interval: Interval | None) -> str:
    assert result.test is not None
    assert other.test is not None
    difference = result.test[score] - other.test[score]
    if not math.isfinite(difference):
        return "infinite"
    if interval is None or not math.isfinite(interval.low):
        return f"{difference:+.4f}"
    half = max(interval.high - difference, difference - interval.low)
    return f"{difference:+.4f} +-{half:.4f}"


def column_problem(samples: Samples) -> str:
    """A sentence on a column of logits that may be no class: no row has its label, but its probability says that many
    should. Empty if there is none."""
    rows = samples.memory
    if rows is None or not rows.assumed_classes or rows.kind != "logits" or len(rows) < 20 * rows.n_classes:
        return ""
    counts = torch.bincount(rows.labels, minlength=rows.n_classes)
    if bool(counts.all()):
        return ""
    usual, present = len(rows) / rows.n_classes, counts[counts > 0]
    # In a long tail, or a set of few of the classes, a class without rows may have the probability of a usual class.
    is_no_surprise = int(present.min()) < usual / 4 or len(present) < rows.n_classes / 2
    expected = rows.input.softmax(-1, dtype=torch.float64).sum(0)
    doubtful = (counts == 0) & (expected >= (2 * usual if is_no_surprise else _ENOUGH_EXPECTED))
    absent = [name for name, doubt in zip(rows.classes, doubtful.tolist(), strict=True) if doubt]
    if not absent:
        return ""
    shown = ", ".join(map(short, absent[:5])) + ", ..." * (len(absent) > 5)
    return (
        f"{about_rows(samples)}: no row has the label {shown}, a column of the table. If this is no class, pass "
        f"logits_key={pattern_of_classes(rows.classes, absent)}; if it is, logits_key='*' takes every column."
    )
