"""The verdict on a comparison, and sentences on a cross-validation."""

import math
import textwrap
from dataclasses import dataclass

from focalkern._types import LOSS_NAMES
from focalkern.calibrators._selection import NO_ERRORS, CandidateScore, CrossValidation

__all__ = [
    "Verdict",
    "cross_validation_warnings",
    "describe_copies",
    "describe_evidence",
    "describe_method",
    "describe_predictions",
    "sentence",
]

_METHODS = {
    "none": "no calibration",
    "temperature": "temperature scaling",
    "focal-temperature": "focal temperature scaling",
    "histogram": "histogram binning",
    "spline": "spline scaling",
    "spline-vector": "spline vector scaling",
    "spline-matrix": "spline matrix scaling",
    "structured-vector": "structured vector scaling",
    "structured-matrix": "structured matrix scaling",
    "structured-focal": "structured matrix scaling with the focal map",
    "isotonic": "isotonic regression",
}

_LINES, _COLUMNS = 3, 100
_NORMAL_95 = 1.96  # half of a normal distribution's 95 % interval, in standard errors
_SPACE = "\u00a0"

# With fewer rows, 5 to 15 of 100 networks have a higher loss than temperature scaling by more than two standard errors.
_FEW_ROWS = 300


@dataclass(frozen=True)
class Verdict:
    """The recommended calibrator, the reason, and its cost. ``str()`` has at most three lines of at most 100 columns.

    With ``accept_risk`` it has one more line, and a problem of the data comes first, in lines of its own.

    Attributes:
        use: the recommended calibrator with its parameters and its effect on the metrics.
        because: the evidence of the cross-validation; ``+-`` is half the 95 % interval, 1.96 standard errors of the
            paired difference.
        costs: the cost of the choice, or gain and cost of another choice; empty if neither applies.
        warnings: reasons to check the choice before it is used, a sentence each.
        optimistic: whether the test set is the validation set; ``str()`` then begins with "Optimistic".
        check_data: whether the first warning is about labels or columns that cannot be right, or about rows that are
            in both sets; ``str()`` then begins with it.
        accepts: with ``accept_risk``, the confidence threshold of accepted predictions, its coverage and its risk.

    Example:
        >>> verdict = fk.Verdict(use="temperature scaling, T = 1.9", because="Its NLL is the lowest.", costs="")
        >>> print(verdict)
        Use temperature scaling, T = 1.9.
        Its NLL is the lowest.
        >>> len(verdict.sentences()), verdict.notes()
        (2, ())
    """

    use: str
    because: str
    costs: str
    warnings: tuple[str, ...] = ()
    optimistic: bool = False
    check_data: bool = False
    accepts: str = ""

    def __str__(self) -> str:
        return "\n".join([*_wrapped(self._problem()), *self._lines()[0], *_wrapped(self.accepts)])

    def notes(self) -> tuple[str, ...]:
        """The sentences that do not fit into ``str()``, and the warnings.

        Returns:
            The sentences.
        """
        said = self._lines()[1]
        return tuple(
            text for text in (self.because, self.costs, *map(sentence, self._others())) if text and text not in said
        )

    def sentences(self) -> tuple[str, ...]:
        """A problem of the data, recommendation, reason, cost or first warning, and the threshold of accepted rows.

        Returns:
            One to five sentences.
        """
        return tuple(text for text in (self._problem(), *self._sentences(), self.accepts) if text)

    def _problem(self) -> str:
        return f"Check the data first: {self.warnings[0]}" if self.check_data else ""

    def _others(self) -> tuple[str, ...]:
        """The warnings that ``_problem`` does not say."""
        return self.warnings[1:] if self.check_data else self.warnings

    def _sentences(self) -> tuple[str, ...]:
        third = self.costs or next(map(sentence, self._others()), "")
        start = "Optimistic, because the validation rows are the test rows: use" if self.optimistic else "Use"
        return tuple(text for text in (f"{start} {self.use}.", self.because, third) if text)

    def _lines(self) -> tuple[list[str], list[str]]:
        """The lines, and the sentences in them: as many sentences as fit."""
        use, *others = self._sentences()
        for parts in ((use, *others), (use, *others[1:]), (use, *others[:1])):
            said = [text for text in parts if text]
            if max(map(len, said)) <= _COLUMNS:
                return said, said
            lines = _wrapped(" ".join(said))
            if len(lines) <= _LINES:
                return lines, said
        return _wrapped(use)[:_LINES], [use]


def _wrapped(text: str) -> list[str]:
    """The text in lines; a number stays on the line of its name."""
    for joined in ("-> ", " ->", "= ", " =", " +-", "NLL ", "ECE ", "Brier score "):
        text = text.replace(joined, joined.replace(" ", _SPACE))
    return [line.replace(_SPACE, " ") for line in textwrap.wrap(text, _COLUMNS, break_on_hyphens=False)]


def describe_method(method: str) -> str:
    return _METHODS.get(method, method)


def describe_evidence(cross_validation: CrossValidation) -> str:
    """One sentence: the reason for which the rule chose this candidate."""
    loss = LOSS_NAMES[cross_validation.criterion]
    if cross_validation.folds == 0:
        return f"{cross_validation.n_samples} validation row is too few for cross-validation."
    if not math.isfinite(cross_validation.winner.loss):
        return (
            f"The {loss} is infinite with and without calibration, because a row gives its true class probability 0. "
            "Use criterion='brier', or replace zeros by a small probability."
        )
    winner = cross_validation.winner
    if cross_validation.chosen == 0:
        return f"No candidate has a lower cross-validated {loss} ({winner.loss:.4f})."
    none, *rest = cross_validation.entries
    others = [one for one in rest if one is not winner and math.isfinite(one.difference) and one.difference > 0]
    against = []
    if math.isfinite(none.difference):
        against.append(("no calibration", none))
    if others:
        nearest = min(others, key=lambda entry: entry.difference)
        against.append((_name(nearest), nearest))
    if not against:
        return f"Its cross-validated {loss} is the lowest ({winner.loss:.4f})."
    parts = [f"{_with_error(entry.difference, entry.error)} below {words}" for words, entry in against]
    return f"Cross-validated {loss} {', '.join(parts)}."


def describe_predictions(changed: int, rows: int, accuracies: tuple[float, float] | None = None) -> str:
    """One sentence on the rows whose predicted class changes, with the change of the accuracy, before and after."""
    if changed == 0:
        return "No predicted class changes."
    effect = "" if accuracies is None else f" (accuracy {accuracies[1] - accuracies[0]:+.4f})"
    return f"{changed:,} of {rows:,} predictions change{effect}, none with keep_predictions=True."


def describe_copies(cross_validation: CrossValidation) -> list[str]:
    """A warning if many rows are copies of others."""
    copies, rows = cross_validation.n_copies, cross_validation.n_samples
    if not copies:
        return []
    return [
        f"{copies:,} of the {rows:,} validation rows are copies of others: the folds keep equal rows together, but the "
        "fits and the standard errors count every copy (drop the copies)"
    ]


def cross_validation_warnings(cross_validation: CrossValidation) -> list[str]:
    """Differences within the standard error, excluded candidates, candidates that were not tried, and the warnings of
    the chosen calibrator."""
    loss = LOSS_NAMES[cross_validation.criterion]
    winner, rows = cross_validation.winner, cross_validation.n_samples
    warnings = describe_copies(cross_validation)
    if 1 < rows < _FEW_ROWS:
        warnings.append(
            f"{rows:,} validation rows are few: another sample may lead to another choice"
            if winner.keeps_predictions
            else f"{rows:,} validation rows are few: on new rows {_name(winner)} can be worse than temperature "
            "scaling, and keep_predictions=True is safer"
        )
    elif cross_validation.folds > 0 and cross_validation.chosen != cross_validation.best and math.isfinite(winner.loss):
        best = cross_validation.entries[cross_validation.best]
        warnings.append(f"{rows:,} validation rows are too few to tell {_name(winner)} from {_name(best)}")
    if cross_validation.chosen == 0 and any(entry.excluded == NO_ERRORS for entry in cross_validation.entries):
        warnings.append(
            "no validation row is wrong, so these rows cannot show that the confidence is too high (validate on more "
            "rows)"
        )
    mean, error = cross_validation.brier
    if mean > 2 * error:
        warnings.append(
            f"the cross-validated Brier score is {_with_error(mean, error)} higher than without calibration"
        )
    if not winner.keeps_predictions and rows >= _FEW_ROWS:
        warnings.append("for data from another source, keep_predictions=True is safer")
    for entry in cross_validation.entries:
        if entry.excluded and not entry.excluded.startswith(("is worse", "adds nothing")):
            warnings.append(f"{_name(entry)} {entry.excluded}, so it is not chosen")
    worse = [entry for entry in cross_validation.entries if entry.excluded.startswith("is worse")]
    if worse:
        *others, last = map(_name, worse)
        names = f"{', '.join(others)} and {last}" if others else last
        warnings.append(f"{names}: the cross-validated {loss} is higher than that of no calibration")
    warnings += [f"left out: {words}" for words in cross_validation.left_out]
    warnings += getattr(winner.calibrator, "warnings_", ())
    return warnings


def sentence(text: str) -> str:
    """The text with a capital and a full stop; the name of a file at its beginning stays as it is."""
    is_file = any(mark in text.split(" ")[0].rstrip(".,:") for mark in "./\\")
    start = text[:1] if is_file else text[:1].upper()
    return f"{start}{text[1:]}{'' if text.endswith('.') else '.'}"


def _with_error(value: float, error: float) -> str:
    """The number +- half of its 95 % interval, with as many digits as the interval justifies."""
    half = _NORMAL_95 * error
    if not 0 < half < math.inf:
        return f"{value:.2g}"
    digits = max(2, -math.floor(math.log10(half / 2)))  # two significant digits for 0.015, one for 0.02
    return f"{value:.{digits}f} +-{half:.{digits}f}"


def _name(entry: CandidateScore) -> str:
    return describe_method(entry.name)
