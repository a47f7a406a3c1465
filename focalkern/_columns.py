"""Finds the columns of a table that are classes, and their order; raises for a column that may not be a class."""

import fnmatch
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from focalkern._checks import short
from focalkern._types import InputKind

__all__ = [
    "ClassColumns",
    "ColumnsError",
    "class_columns",
    "column_misfit",
    "kind_from_name",
    "listed",
    "other_order",
    "pattern_of_classes",
]

# Columns that other programs write next to the classes. Beside numbered columns, any other column is refused.
_NO_CLASS = re.compile(
    r"|unnamed:.*|__index_level_\d+__|index|idx|(.*[_ ])?id|uuid|row|fold|split|epoch|(sample_)?weights?|file_?name|"
    r"path|pred|preds|predicted|predictions?|predicted[_ ].*|y_?(pred|hat)|top_?1|argmax|conf|confidences?|correct|"
    r"labels?|targets?|y|y_?true|true_label|gt|ground_?truth",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"(.*?)([0-9]+)(?:\.0+)?")


class ColumnsError(ValueError):
    """Columns that cannot be told apart: one line that names them.

    Attributes:
        remedy: what to do if no pattern for the columns helps; else empty.
    """

    def __init__(self, words: str, remedy: str = "") -> None:
        super().__init__(words)
        self.remedy = remedy


@dataclass(frozen=True)
class ClassColumns:
    """The columns that are the classes.

    Attributes:
        places: positions of class 0, 1, ... among all columns.
        names: names of these columns.
        numbers: the numbers at the end of their names, consecutive from 0 or 1; None if they are not numbered.
        prefix: the text before the numbers.
    """

    places: list[int]
    names: list[str]
    numbers: list[int] | None = None
    prefix: str = ""

    @classmethod
    def called(cls, names: Sequence[str]) -> "ClassColumns":
        """Columns that are all classes, in this order."""
        return cls(list(range(len(names))), list(names))

    @property
    def kind(self) -> InputKind | None:
        """The kind of input by the prefix of numbered columns, or by the names of all columns."""
        said = {kind_from_name(name) for name in ([self.prefix] if self.numbers is not None else self.names)}
        return said.pop() if len(said) == 1 else None

    @property
    def classes(self) -> list[str]:
        """Names of the classes: ``cat`` for the column ``logit_cat``; for numbered columns the numbers."""
        if self.numbers is not None:
            return [str(number) for number in self.numbers]
        if self.kind is None:
            return self.names
        prefix = r"^(logits?|prob(s|a|ability|abilities)?)[^a-zA-Z0-9]+"
        return [re.sub(prefix, "", name) or name for name in self.names]

    def names_of_labels(self, labels: Collection[str]) -> list[str] | None:
        """The names of all columns, ``logit_cat`` or ``cat``, if each label is one of them; else None."""
        return next((names for names in (self.names, self.classes) if set(labels) <= set(names)), None)


def class_columns(names: Sequence[str], pattern: str | None = None) -> ClassColumns:
    """The columns of the classes, without the columns of labels.

    Columns whose names are numbers, or share a prefix and end in a number, are the classes in the order of the numbers.
    Other columns are the classes in the order of the table; a name such as ``id`` or ``pred`` then raises.

    Args:
        names: names of all columns except the labels.
        pattern: selects the columns of the classes by name, with ``*`` and ``?``; or several names or patterns with
            commas between them, of which those after ``!`` leave columns out. It does not decide the order of the
            classes.

    Raises:
        ColumnsError: other columns next to the numbered ones; names such as ``id``; gaps in the numbers; repeated
            names; a pattern, or a part of it, without a match.
    """
    places = list(range(len(names)))
    if pattern is not None:
        places = _matching(names, pattern)
    found = [names[place] for place in places]
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise ColumnsError(
            f"expected every column once, found several called {listed(twice)}", "rename or delete all but one"
        )
    groups: dict[str, list[int]] = {}
    for place in places:
        match = _NUMBERED.fullmatch(names[place].strip())
        if match is not None:
            groups.setdefault(match[1], []).append(place)
    groups = {prefix: group for prefix, group in groups.items() if len(group) > 1}
    if len(groups) == 1:
        ((prefix, group),) = groups.items()
        others = [names[place] for place in places if place not in set(group)]
        if not others:
            return _in_order(names, prefix, group)
        if pattern is None:
            ends = f"{names[group[0]]!r} to {names[group[-1]]!r}"
            raise ColumnsError(f"expected only columns of classes and labels, found {listed(others)} next to {ends}")
    elif groups and pattern is None:
        shown = " and ".join(f"{prefix}*" for prefix in groups)
        raise ColumnsError(f"expected one group of numbered columns, found {len(groups)}: {shown}")
    if pattern is None:
        odd = [name for name in found if _NO_CLASS.fullmatch(name.strip())]
        if odd:
            raise ColumnsError(f"expected only columns of classes and labels, found {listed(odd)}")
    return ClassColumns(places, found)


def _matching(names: Sequence[str], pattern: str) -> list[int]:
    """The places of the names that match the pattern, or its parts between commas."""

    def matching(one: str) -> set[int]:
        return {place for place, name in enumerate(names) if fnmatch.fnmatchcase(name, one)}

    parts = [pattern] if matching(pattern) else [one.strip() for one in pattern.split(",")]
    chosen: set[int] = set()
    left_out: set[int] = set()
    for part in parts:
        group = chosen if matching(part) else left_out
        of_part = matching(part) or matching(part.removeprefix("!"))
        if not of_part:
            raise ColumnsError(f"expected columns that match {part.removeprefix('!')!r}, found {listed(names)}")
        group |= of_part
    found = (chosen or matching("*")) - left_out
    if not found:
        raise ColumnsError(f"expected columns that match {pattern!r}, found {listed(names)}")
    return sorted(found)


def pattern_of_classes(names: Sequence[str], others: Sequence[str] = (), pattern: str = "*") -> str:
    """A pattern for the columns that are probably the classes, in quotes, for the remedy of an error.

    Args:
        names: names of all columns except the labels.
        others: columns that are no classes; empty for those with a name such as ``id``.
        pattern: the pattern that has selected ``names`` and ``others``.
    """
    numbered = [match[1] for name in names if not others and (match := _NUMBERED.fullmatch(name.strip()))]
    prefix = max(numbered, key=numbered.count, default="")
    if numbered.count(prefix) > 1:  # as class_columns: one number does not make a group
        is_alone = prefix and sum(name.startswith(prefix) for name in names) == numbered.count(prefix)
        return f"'{prefix}*'" if is_alone else f"'{prefix}[0-9]*'"
    odd = others or [name for name in names if _NO_CLASS.fullmatch(name.strip())]
    if len(odd) > 8 or any(set(name) & set("'*?[],") for name in odd):
        return "'NAME,NAME,...'"
    return f"'{','.join([pattern, *(f'!{name}' for name in odd)])}'"


def column_misfit(wanted: Sequence[str], found: Sequence[str]) -> str:
    """The first column whose name is not the wanted one, for the middle of an error; empty if there is none."""
    for place, (one, other) in enumerate(zip(wanted, found, strict=False)):
        if one != other:
            return f"{one!r} as class {place}, found {other!r}"
    return ""


def other_order(columns: ClassColumns, labels: Collection[str]) -> str:
    """The end of an error about labels that are no names of numbered columns, if they end in numbers whose alphabetical
    order is not their own: the columns may have either order. Empty for other labels."""
    names = sorted(labels)
    found = [_NUMBERED.fullmatch(name) for name in names]
    numbers = [int(match[2]) for match in found if match is not None]
    prefixes = {match[1] for match in found if match is not None}
    if columns.numbers is None or None in found or len(prefixes) > 1 or numbers == sorted(numbers):
        return ""
    return (
        f"whose alphabetical order is {listed(names[:4])}, ..., for the columns {columns.names[0]!r} to "
        f"{columns.names[-1]!r}; call the columns as the labels, or pass integers, or the array of the classes "
        "(.to_numpy()) if its columns are in alphabetical order"
    )


def kind_from_name(name: str) -> InputKind | None:
    """The kind of input by the name of an array or of columns; None if the name does not determine it."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    if words & {"logit", "logits"}:
        return "logits"
    return "probs" if words & {"prob", "probs", "proba", "probability", "probabilities"} else None


def _in_order(names: Sequence[str], prefix: str, group: list[int]) -> ClassColumns:
    numbers = {}
    for place in group:
        match = _NUMBERED.fullmatch(names[place].strip())
        assert match is not None
        if int(match[2]) in numbers:
            raise ColumnsError(f"expected every number once, found {prefix}{int(match[2])} several times")
        numbers[int(match[2])] = place
    ordered = sorted(numbers)
    first = min(ordered[0], 1)
    # Only gaps between the first and the last number: the last number may be any.
    missing = sorted(set(range(first, ordered[-1] + 1)) - set(ordered)) if ordered[-1] < 10**6 else ordered[-1:]
    if missing:
        raise ColumnsError(
            f"expected classes numbered without gaps, found {prefix}{ordered[0]} to {prefix}{ordered[-1]} without "
            f"{listed([f'{prefix}{number}' for number in missing])}",
            f"number columns and labels from 0 to {len(ordered) - 1}, or add the missing columns (logits -inf, "
            "probabilities 0)",
        )
    places = [numbers[number] for number in ordered]
    return ClassColumns(places, [names[place] for place in places], ordered, prefix)


def listed(names: Sequence[str]) -> str:
    """The first names, for an error."""
    shown = ", ".join(short(name) if name.strip() else f"{name!r} (no name)" for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"
