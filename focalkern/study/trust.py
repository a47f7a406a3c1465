"""How far to trust the figures on the reported rows: intervals, differences, bias floors."""

from collections.abc import Sequence
from dataclasses import dataclass

from focalkern.bootstrap import BiasFloor, Interval, PairedBootstrap
from focalkern.study.candidates import Choice
from focalkern.study.rows import Applied, Rows

__all__ = ["DEFAULT_RESAMPLES", "Trust", "default_resamples", "trust_in"]

DEFAULT_RESAMPLES = 200
_MOST_RESAMPLED_ROWS = 200_000


@dataclass(frozen=True)
class Trust:
    """How far to trust the figures on the reported rows.

    Attributes:
        names: the name in ``bootstrap`` of every choice; None for one without a cell. Equal cells share a name.
        bootstrap: the paired resamples.
        floors: by choice, the bias floor of each calibration error; None for one without a cell.
        against: by choice, the index of the choice that it has to beat: nothing for the uncalibrated row, which
            temperature scaling has to beat, which focal temperature scaling by the same criterion has to beat. Bins
            have to beat what stands before them: the scaling, or nothing.
        binned: whether there are bins among the choices.
        others: whether there are candidates that are no scaling.
    """

    names: tuple[str | None, ...]
    bootstrap: PairedBootstrap
    floors: tuple[dict[str, BiasFloor] | None, ...]
    against: tuple[int | None, ...]
    binned: bool = False
    others: bool = False

    def interval(self, index: int, figure: str) -> Interval | None:
        name = self.names[index]
        if name is None or figure not in self.bootstrap.figures:
            return None
        return self.bootstrap.interval(name, figure)

    def difference(self, index: int, figure: str) -> Interval | None:
        """Of this choice and the one that it has to beat; None where there is none."""
        other = self.against[index]
        return None if other is None else self.between(index, other, figure)

    def between(self, index: int, other: int, figure: str) -> Interval | None:
        """The paired difference of two choices; None where there is none."""
        name, beaten = self.names[index], self.names[other]
        if name is None or beaten is None or figure not in self.bootstrap.figures:
            return None
        return self.bootstrap.difference(name, beaten, figure)

    def mark(self, index: int, figure: str) -> str:
        """``*`` for a win, ``!`` for a loss, nothing while the interval of the difference contains 0."""
        difference = self.difference(index, figure)
        if difference is None or not difference.excludes_zero:
            return ""
        return "*" if (difference.low > 0) == (figure == "accuracy") else "!"


def default_resamples(rows: Rows) -> int:
    """200, whose cost is of the order of the search's; 0 where it would take minutes."""
    return DEFAULT_RESAMPLES if rows.resampled_in_seconds and len(rows) <= _MOST_RESAMPLED_ROWS else 0


def trust_in(choices: Sequence[Choice], rows: Rows, n_bins: int, resamples: int, seed: int) -> Trust:
    """The intervals of the choices on ``rows``, each against the one that it has to beat."""
    cells: dict[str, Applied] = {}
    names: list[str | None] = []
    for choice in choices:
        if choice.test is None:
            names.append(None)
            continue
        name = f"gamma = {choice.gamma!r}, T = {choice.temperature!r}{' + bins' if choice.binning else ''}"
        if choice.other is not None:
            name = f"candidate {choice.method}"
        cells[name] = choice.what
        names.append(name)
    # A seed of the command may be negative, numpy's may not.
    bootstrap, floors = rows.resampled(cells, n_bins=n_bins, n_resamples=resamples, seed=seed % 2**63)
    place = {(row.method, row.criterion, row.search, row.binning is None): i for i, row in enumerate(choices)}
    plain: dict[str | None, int] = {}
    for i, row in enumerate(choices):
        if row.method == "temperature" and row.binning is None:
            plain.setdefault(row.criterion, i)
            if row.contested:
                plain[None] = i  # candidates of another class have no criterion

    def has_to_beat(choice: Choice) -> int | None:
        if choice.binning is not None and choice.calibrator is not None:
            return place[choice.method, choice.criterion, choice.search, True]
        beaten = {"none": None, "temperature": 0, "histogram": 0}
        return beaten.get(choice.method, plain.get(choice.criterion))

    return Trust(
        names=tuple(names),
        bootstrap=bootstrap,
        floors=tuple(None if name is None else floors[name] for name in names),
        against=tuple(map(has_to_beat, choices)),
        binned=any(choice.binning for choice in choices),
        others=any(choice.other is not None for choice in choices),
    )
