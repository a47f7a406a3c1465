"""The verdict: what to use, why, what it costs, and what speaks against trusting that."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from focalkern.bootstrap import Interval
from focalkern.study.candidates import Choice
from focalkern.study.contest import LOSS_NAMES, Contest, Entry
from focalkern.study.rows import About
from focalkern.study.trust import Trust

__all__ = ["Verdict", "as_sentence", "evidence_in_words", "judge", "method_in_words", "name_of", "rows_of_the_figures"]

_METHODS = {
    "none": "no calibration",
    "temperature": "temperature scaling",
    "focal-temperature": "focal temperature scaling",
    "histogram": "histogram binning",
    "structured-vector": "structured vector scaling",
    "structured-matrix": "structured matrix scaling",
    "structured-focal": "structured matrix scaling with the focal map",
    "isotonic": "isotonic regression",
}

_LINES, _COLUMNS = 3, 100
_SPACE = "\u00a0"

# Fewer rows than this, and a standard error says little itself.
_FEW_ROWS = 100


@dataclass(frozen=True)
class Verdict:
    """What a study comes to. ``str()`` has at most three lines of at most 100 columns.

    Attributes:
        use: what to use, with its parameters, and what it does to the figures.
        because: the evidence of the cross-validation.
        costs: what it costs, or what another choice would gain and cost; empty where there is nothing to say.
        doubts: what speaks against trusting all this, a sentence each.

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
    doubts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines()[0])

    def notes(self) -> tuple[str, ...]:
        """What ``str()`` had no room for, and the doubts.

        Returns:
            A sentence each.
        """
        said = self._lines()[1]
        return tuple(
            text for text in (self.because, self.costs, *map(as_sentence, self.doubts)) if text and text not in said
        )

    def sentences(self) -> tuple[str, ...]:
        """What to use, why, and what it costs, or the first doubt.

        Returns:
            One to three sentences.
        """
        third = self.costs or (as_sentence(self.doubts[0]) if self.doubts else "")
        return tuple(text for text in (f"Use {self.use}.", self.because, third) if text)

    def _lines(self) -> tuple[list[str], list[str]]:
        """The lines, and the sentences that they have: as many as there is room for."""
        use, *others = self.sentences()
        for parts in ((use, *others), (use, *others[1:]), (use, *others[:1])):
            said = [text for text in parts if text]
            if max(map(len, said)) <= _COLUMNS:
                return said, said
            lines = _wrapped(" ".join(said))
            if len(lines) <= _LINES:
                return lines, said
        return _wrapped(use)[:_LINES], [use]


def _wrapped(text: str) -> list[str]:
    """Lines that keep together what is read together."""
    for joined in ("-> ", " ->", "= ", " =", " +-", "NLL ", "ECE ", "Brier score "):
        text = text.replace(joined, joined.replace(" ", _SPACE))
    return [line.replace(_SPACE, " ") for line in textwrap.wrap(text, _COLUMNS, break_on_hyphens=False)]


def judge(
    choices: Sequence[Choice],
    chosen: Choice | None,
    *,
    contest: Contest | None,
    trust: Trust | None,
    criterion: str,
    estimator: str,
    test: About,
    same_rows: bool,
) -> Verdict:
    """The verdict on the choices of a study.

    Args:
        choices: the rows of the table; the first is uncalibrated.
        chosen: the one to use.
        contest: the cross-validation; None where a method was asked for by name.
        trust: intervals on the test rows.
        criterion: by which was chosen.
        estimator: of the ECE in the words.
        test, same_rows: the rows of the figures, and whether they are the validation rows.
    """
    if chosen is None or chosen.test is None:
        name = LOSS_NAMES.get(criterion, "ECE")
        return Verdict("no calibration", f"The {name} of what was asked for is finite nowhere.", "")
    ece = f"ece_{estimator}"
    before, now = choices[0].test, chosen.test
    assert before is not None
    where = rows_of_the_figures(test, same_rows)
    use = method_with_parameters(chosen)
    if chosen.method == "none":
        use += f": NLL {_print(now['nll'])}, ECE {_print(now[ece])} {where}"
    else:
        changed = [f"{words} {_print(before[name])} -> {_print(now[name])}" for words, name in _shown(criterion, ece)]
        use += f": {', '.join(changed)} {where}"
    doubts = []
    if same_rows:
        doubts.append(
            "validation and test rows are the same: the figures after calibration are too good; give test rows of "
            "their own (in the command --test FILE or --split 0.5)"
        )
    if contest is not None and criterion != "ece":
        because = evidence_in_words(contest)
        doubts += doubts_of(contest)
        costs = _alternative(choices, chosen, ece)
    else:
        because = "The ECE was asked for" if criterion == "ece" else "It was asked for, and not compared"
        if contest is not None:
            because += f" (by {LOSS_NAMES[contest.criterion]}: {_name(contest.winner)})"
        because += "."
        costs = _price(choices, chosen, trust)
        border = getattr(chosen.calibrator, "at_border_", ())
        if border:
            doubts.append(f"{' and '.join(border)}; the optimum may lie beyond it")
        if now["nll"] > before["nll"]:
            doubts.append(f"its NLL, {_print(now['nll'])}, is higher than without calibration, {_print(before['nll'])}")
    return Verdict(use, because, costs, tuple(doubts))


def method_in_words(method: str) -> str:
    return _METHODS.get(method, method)


def method_with_parameters(choice: Choice) -> str:
    name = method_in_words(choice.method)
    if choice.binning is not None and choice.method != "histogram":
        name += " and bins"
    if choice.method == "none" or choice.temperature is None or choice.gamma is None or choice.calibrator is None:
        return name
    gamma = f"gamma = {choice.gamma:.4g}, " if choice.method == "focal-temperature" else ""
    return f"{name}, {gamma}T = {choice.temperature:.4g}"


def name_of(rows: About) -> str:
    """``5000 validation rows``."""
    name = {"val": "validation ", "test": "test "}.get(rows.name, "")
    return f"{len(rows)} {name}rows"


def rows_of_the_figures(test: About, same_rows: bool) -> str:
    return f"on {len(test)} {'validation' if same_rows else 'test'} rows"


def evidence_in_words(contest: Contest) -> str:
    """One sentence on why the winner of a cross-validation is used."""
    loss = LOSS_NAMES[contest.criterion]
    if contest.folds == 0:
        return f"{contest.n_samples} row is too few to compare anything: the simplest is used."
    if not math.isfinite(contest.winner.loss):
        return (
            f"The {loss} is infinite with and without calibration: a row gives its true class probability 0. "
            "Choose by brier, or replace zeros by a small probability."
        )
    best, winner = contest.entries[contest.best], contest.winner
    if contest.chosen != contest.best:
        return f"Within one standard error of {_name(best)}'s cross-validated {loss} ({_signed(winner)})."
    simpler = [entry for entry in contest.entries[: contest.best] if not entry.excluded]
    if simpler:
        nearest = min(simpler, key=lambda entry: entry.difference)
        return f"Lowest cross-validated {loss} ({_name(nearest)} {_signed(nearest)})."
    return f"No candidate has a lower cross-validated {loss} ({best.loss:.4f})."


def doubts_of(contest: Contest) -> list[str]:
    """What the cross-validation could not tell, and who could not take part."""
    loss = LOSS_NAMES[contest.criterion]
    doubts = []
    if contest.folds > 0 and contest.chosen != contest.best and math.isfinite(contest.winner.loss):
        best = contest.entries[contest.best]
        doubts.append(f"{contest.n_samples} rows are too few to tell {_name(contest.winner)} from {_name(best)}")
    elif contest.n_samples < _FEW_ROWS:
        doubts.append(f"{contest.n_samples} rows are few: another sample of them may choose otherwise")
    for entry in contest.entries[1:]:
        if entry.excluded and not entry.excluded.startswith("is worse"):
            doubts.append(f"{_name(entry)} {entry.excluded}, and is not chosen")
    worse = [entry for entry in contest.entries if entry.excluded.startswith("is worse")]
    if worse:
        names = " and ".join(map(_name, worse))
        doubts.append(f"{names}: the cross-validated {loss} is higher than that of no calibration")
    doubts += [f"left out: {words}" for words in contest.left_out]
    return doubts


def as_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _shown(criterion: str, ece: str) -> list[tuple[str, str]]:
    """Headings and names of the figures that the first line has."""
    loss = ("Brier score", "brier") if criterion == "brier" else ("NLL", "nll")
    return [("ECE", ece), loss] if criterion == "ece" else [loss, ("ECE", ece)]


def _alternative(choices: Sequence[Choice], chosen: Choice, ece: str) -> str:
    """What the paper's choice, focal temperature scaling by the ECE, would gain and cost."""
    paper = next((row for row in choices if (row.method, row.criterion) == ("focal-temperature", "ece")), None)
    assert chosen.test is not None
    if paper is None or paper.test is None or paper is chosen:
        return ""
    now, other = chosen.test, paper.test
    figures = f"Focal scaling by ECE: ECE {_print(other[ece])}"
    if other[ece] >= now[ece]:
        return f"{figures} and NLL {_print(other['nll'])}: not even a lower ECE."
    if other["nll"] >= now["nll"]:
        return f"{figures} but NLL {_print(other['nll'])} (criterion ece)."
    return f"{figures} and NLL {_print(other['nll'])}, lower on these rows (criterion ece)."


def _price(choices: Sequence[Choice], chosen: Choice, trust: Trust | None) -> str:
    """Against no calibration, and against temperature scaling by a proper loss: NLL and Brier, with intervals."""
    place = choices.index(chosen)
    plain = next(
        (
            i
            for i, row in enumerate(choices)
            if row.method == "temperature" and row.criterion in LOSS_NAMES and row.binning is None and row.test
        ),
        None,
    )
    parts = []
    for words, other in (("no calibration", 0), ("temperature scaling", plain)):
        if other is None or other == place:
            continue
        changes = []
        for name, figure in (("NLL", "nll"), ("Brier", "brier")):
            interval = None if trust is None else trust.between(place, other, figure)
            changes.append(f"{name} {_difference(choices[place], choices[other], figure, interval)}")
        parts.append(f"against {words}: {', '.join(changes)}")
    return as_sentence("; ".join(parts)) if parts else ""


def _difference(choice: Choice, other: Choice, figure: str, interval: Interval | None) -> str:
    assert choice.test is not None
    assert other.test is not None
    difference = choice.test[figure] - other.test[figure]
    if not math.isfinite(difference):
        return "infinite"
    if interval is None or not math.isfinite(interval.low):
        return f"{difference:+.4f}"
    half = max(interval.high - difference, difference - interval.low)
    return f"{difference:+.4f} +-{half:.4f}"


def _signed(entry: Entry) -> str:
    """The mean paired difference from the best candidate, and its standard error."""
    if not 0 < entry.error < math.inf:
        return f"{entry.difference:+.2g}"
    digits = max(2, -math.floor(math.log10(entry.error)))
    return f"{entry.difference:+.{digits}f} +-{entry.error:.{digits}f}"


def _name(entry: Entry) -> str:
    return method_in_words(entry.name)


def _print(value: float) -> str:
    return f"{value:.4f}" if not abs(value) >= 1e6 or math.isinf(value) else f"{value:.4g}"
