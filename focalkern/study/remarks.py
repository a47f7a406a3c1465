"""Remarks: sentences for the reader of a comparison, in addition to its table."""

import math
from dataclasses import replace

import torch

from focalkern._checks import count_rows, counted
from focalkern._diagnostics import input_notes, input_problems
from focalkern.files import LogitSet
from focalkern.study.intervals import DEFAULT_RESAMPLES
from focalkern.study.results import SCALINGS, CalibratorResult, Comparison, Intervals, JudgedComparison, hidden_results
from focalkern.study.samples import Samples, about_rows, data_problem, describe_samples, overlap_problem
from focalkern.study.scores import facts

__all__ = ["printed_remarks", "remarks", "remarks_on_bins", "remarks_on_samples"]


def remarks(comparison: Comparison, *, intervals_expected: bool = False) -> tuple[str, ...]:
    """All remarks on a comparison, each once.

    Args:
        comparison: with its scores, and its intervals if it has any.
        intervals_expected: whether missing intervals need a remark, because the user did not disable them.
    """
    validation, test = comparison.validation, comparison.test
    found = [*remarks_on_samples(validation)]
    if not comparison.same_samples:
        found += remarks_on_samples(test)
        overlap = overlap_problem(validation, test)
        found += [overlap] if overlap else []
    found += _on_few_samples(comparison)
    found += _on_scores(comparison)
    if comparison.intervals is not None and comparison.chosen is not None:
        found += _on_small_differences(comparison, comparison.intervals, comparison.chosen)
    found += _on_approximate_scores(comparison)
    if comparison.cross_validation is not None:
        found += [
            f"{entry.name}: no scores, because it {entry.excluded}."
            for entry in comparison.cross_validation.entries
            if entry.excluded.startswith("adds nothing")  # the verdict has the other reasons
        ]
    if intervals_expected and comparison.intervals is None:
        remedy = f"Pass resamples={DEFAULT_RESAMPLES} to compute them, or resamples=0 to omit this note."
        if not test.keeps_confidences:
            remedy = "With so many rows the intervals would be narrow."
        found.append(
            f"no intervals: for {describe_samples(test)} of {test.n_classes} classes they would take longer than the "
            f"rest of the comparison. {remedy}"
        )
    return tuple(dict.fromkeys(found))  # two halves of one file give the same remarks on the file


def printed_remarks(comparison: JudgedComparison) -> tuple[str, ...]:
    """The remarks without those on results that the printed table leaves out."""
    hidden = hidden_results(comparison)
    if not hidden:
        return comparison.remarks
    # The other results keep their indices, because the hidden ones are the last.
    shown = replace(comparison, results=comparison.results[: -len(hidden)])
    dropped = {*_on_results(comparison)} - {*_on_results(shown)}
    return tuple(words for words in comparison.remarks if words not in dropped)


def _on_results(comparison: Comparison) -> list[str]:
    return [*_on_scores(comparison), *_on_approximate_scores(comparison)]


def remarks_on_samples(samples: Samples) -> list[str]:
    """Remarks on problems of the samples, independent of the calibrators."""
    found, counted = [], facts(samples)
    subject = "a logit of -inf" if samples.kind == "logits" else "probability exactly 0"
    zeros = counted.impossible_targets
    if zeros:
        where = f"({samples.part})" if samples.part else f"of {samples.source}"
        found.append(
            f"{zeros} of the {describe_samples(samples)} {where} give their true class {subject}. The mean NLL is "
            "infinite without calibration and for every gamma and temperature of the grid, because the focal map "
            "keeps a probability of exactly 0. The candidates temperature and spline have a floor, so their NLL is "
            "finite."
        )
    if counted.looks_like_probs:
        found.append(
            f"the rows of {samples.source} were read as logits, but they are all positive and sum to 1. For "
            "probabilities, pass input_kind=probs."
        )
    input, _ = samples.sample()
    notes = input_notes(input) if samples.kind == "logits" else []
    problem = data_problem(samples)
    found.extend(f"{about_rows(samples)}: {words}." for words in input_problems(input, samples.kind))
    found.extend([problem] if problem else [])
    found.extend(f"{about_rows(samples)}: {words}." for words in notes)
    return found


def _on_few_samples(comparison: Comparison) -> list[str]:
    """Remarks on too few samples per bin."""
    found, n_bins = [], comparison.grid.n_bins
    bins = counted(n_bins, "bin")
    n_validation, n_test = len(comparison.validation), len(comparison.test)
    if n_validation < 20 * n_bins:
        found.append(
            f"{count_rows(n_validation, 'validation ')} in {bins} {_are(n_validation)} about "
            f"{n_validation / n_bins:.2g} per bin: the ECE is mostly noise, and so is the ECE-optimal choice."
        )
    if not comparison.same_samples and n_test < 20 * n_bins:
        found.append(
            f"{count_rows(n_test, 'test ')} in {bins} {_are(n_test)} about {n_test / n_bins:.2g} per bin: the "
            "ECE is mostly noise."
        )
    return found


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _on_scores(comparison: Comparison) -> list[str]:
    """Remarks on optima at a bound of the search, and on scores that disagree with each other."""
    found = []
    before = comparison.results[0].test
    assert before is not None  # no calibration always has scores
    of_grid = {
        (one.method, one.criterion): one
        for one in comparison.results
        if one.is_scaling and one.search not in ("line", "refine")
    }
    for method, words in SCALINGS.items():
        ece, nll = of_grid.get((method, "ece")), of_grid.get((method, "nll"))
        for one in (ece, nll):
            said = one is not None and one.cross_validated  # the verdict already says that it is not chosen
            if one is not None and one.scaling is not None and one.scaling.at_border_ and not said:
                found.append(
                    f"{one.label}: {' and '.join(one.scaling.at_border_)}; the optimum may lie beyond the border of "
                    "the grid."
                )
        if ece is None or nll is None or ece.test is None or nll.test is None:
            continue
        was, with_ece, with_nll = before["nll"], ece.test["nll"], nll.test["nll"]
        if not all(map(math.isfinite, (was, with_ece, with_nll))):
            continue
        if with_nll <= was < with_ece:
            lowered = f"{with_nll:.4f}" != f"{was:.4f}"
            found.append(
                f"{words}: ECE and NLL disagree. The ECE-optimal choice RAISES the NLL from {was:.4f} to "
                f"{with_ece:.4f}; the NLL-optimal one {'lowers it to' if lowered else 'leaves it at'} {with_nll:.4f}."
            )
        elif with_ece > with_nll * 1.01:
            found.append(
                f"{words}: ECE and NLL disagree. The NLL is {with_ece:.4f} for the ECE-optimal choice, "
                f"{with_nll:.4f} for the NLL-optimal one, and {was:.4f} without calibration."
            )
    test = comparison.test
    for one in comparison.results:
        other_search = one.search in ("line", "refine")
        if other_search and one.is_scaling and one.scaling is not None and one.scaling.at_border_:
            found.append(f"{one.label}: {' and '.join(one.scaling.at_border_)}.")
        if test.memory is not None:
            found += remarks_on_bins(one, test.memory)
    temperature, focal = of_grid.get(("temperature", "ece")), of_grid.get(("focal-temperature", "ece"))
    if comparison.same_samples or temperature is None or focal is None:
        return found
    if temperature.test is not None and focal.test is not None:
        assert focal.scaling is not None
        estimator = focal.scaling.estimator
        name = f"ece_{estimator}"
        intervals, place = comparison.intervals, comparison.results.index(focal)
        # If the interval of the difference contains 0, neither is higher; _on_small_differences says so.
        decided = intervals is None or intervals.mark(place, name) == "!"
        if decided and focal.test[name] > temperature.test[name]:
            found.append(
                f"on the test rows focal temperature scaling has the higher ECE ({estimator}), "
                f"{focal.test[name]:.4f} against {temperature.test[name]:.4f}: its gain on the validation rows does "
                "not generalise."
            )
    return found


def remarks_on_bins(result: CalibratorResult, samples: LogitSet) -> list[str]:
    """Remarks on predictions changed by the bins of a result, and on probabilities of 0."""
    if result.binning is None or result.test is None:
        return []
    found = []
    changed = int(result.binning.changed(samples.input.to(torch.float64)).sum())
    if changed:
        found.append(
            f"{result.label}: the bins change the predicted class of {changed} of the {describe_samples(samples)}."
        )
    if math.isinf(result.test["nll"]) and bool((result.binning.values_ % 1 == 0).any()):
        found.append(
            f"{result.label}: in one bin all validation rows were right (or all wrong), which sets a probability to 0. "
            "A test row that contradicts it makes the NLL infinite. Use fewer bins (n_bins=5)."
        )
    return found


def _on_small_differences(comparison: Comparison, intervals: Intervals, chosen: CalibratorResult) -> list[str]:
    """Remarks on differences of the chosen result whose intervals contain 0."""
    found = []
    place = comparison.chosen_index
    assert place is not None
    assert chosen.test is not None
    estimator = comparison.grid.estimator if comparison.criterion == "ece" else comparison.estimator
    name = f"ece_{estimator}"
    level = f"{100 * intervals.bootstrap.level:g} %"
    baseline = intervals.baseline[place]
    same_calibrator = baseline is not None and intervals.names[place] == intervals.names[baseline]
    difference = intervals.difference(place, name)
    if baseline is not None and difference is not None and not same_calibrator and not difference.excludes_zero:
        found.append(
            f"{chosen.label} and {comparison.results[baseline].label} cannot be distinguished by their ECE "
            f"({estimator}) on the test rows: the difference is {difference.estimate:+.4f}, and its {level} interval, "
            f"{difference.low:+.4f} to {difference.high:+.4f}, contains 0."
        )
    floors = intervals.floors[place]
    if floors is not None and floors[name].p_value(chosen.test[name]) > 1 - intervals.bootstrap.level:
        found.append(
            f"{chosen.label}: the ECE ({estimator}) of {chosen.test[name]:.4f} on the test rows is within chance of a "
            f"perfectly calibrated model, whose mean ECE with these confidences is {floors[name].mean:.4f}. A smaller "
            "ECE would prove nothing."
        )
    return found


def _on_approximate_scores(comparison: Comparison) -> list[str]:
    """Remarks on the error bounds of scores computed from buckets of the confidences."""
    found = []
    grid, test = comparison.grid, comparison.test
    bounds = [
        comparison.search.bound_of(one.gamma, one.temperature)
        for one in comparison.results
        if one.criterion == "ece" and one.gamma is not None and one.temperature is not None
    ]
    if any(bounds):
        found.append(
            f"the ECE ({grid.estimator}) of the grid comes from a histogram of the confidences: for the chosen cells "
            f"its error is at most {max(bounds):.1g}."
        )
    if not test.keeps_confidences:
        bound = max(one.error_bound for one in comparison.results)
        found.append(
            f"with so many rows the equal-mass ECEs in the table come from a histogram too: their error is at most "
            f"{bound:.1g}."
        )
    return found
