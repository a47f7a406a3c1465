"""How far to trust the figures on the reported rows: intervals, differences, bias floors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from focalkern.bootstrap import BiasFloor, Interval, PairedBootstrap, bias_floor, paired_bootstrap
from focalkern.files import LogitSet
from focalkern.study.candidates import Choice
from focalkern.study.rows import FIGURES, Rows, calibrated, is_correct
from focalkern.study.streamed import StreamedSet

__all__ = ["DEFAULT_RESAMPLES", "Trust", "default_resamples", "trust_in"]

CALIBRATION_ERRORS = tuple(name for name in FIGURES if "ece_" in name)
DEFAULT_RESAMPLES = 200
_MOST_RESAMPLED_ROWS = 200_000
_MOST_FIGURES = 20_000_000


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
    """

    names: tuple[str | None, ...]
    bootstrap: PairedBootstrap
    floors: tuple[dict[str, BiasFloor] | None, ...]
    against: tuple[int | None, ...]
    binned: bool = False

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
    # Streamed rows have one confidence each, whatever the number of classes.
    possible = rows.keeps_confidences if isinstance(rows, StreamedSet) else rows.input.numel() <= _MOST_FIGURES
    return DEFAULT_RESAMPLES if possible and len(rows) <= _MOST_RESAMPLED_ROWS else 0


class _Calibrated(Mapping[str, Tensor]):
    """Log-probabilities by name, computed when they are asked for: only one set is in memory at a time."""

    def __init__(self, rows: LogitSet, cells: dict[str, tuple[float | None, float | None, Any]]) -> None:
        self._rows, self._cells = rows, cells

    def __getitem__(self, name: str) -> Tensor:
        return calibrated(self._rows, *self._cells[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def trust_in(choices: Sequence[Choice], rows: Rows, n_bins: int, resamples: int, seed: int) -> Trust:
    """Of rows that are not in memory there are confidences, but no probabilities: accuracy and ECE have intervals."""
    cells: dict[str, tuple[float | None, float | None, Any]] = {}
    names: list[str | None] = []
    for choice in choices:
        if choice.report is None:
            names.append(None)
            continue
        name = f"gamma = {choice.gamma!r}, T = {choice.temperature!r}{' + bins' if choice.binning else ''}"
        if choice.other is not None:
            name = f"candidate {choice.method}"
        cells[name] = (choice.gamma, choice.temperature, choice.applied)
        names.append(name)
    # A seed of the command may be negative, numpy's may not.
    options: dict[str, Any] = {"n_bins": n_bins, "n_resamples": resamples, "seed": seed % 2**63}
    if isinstance(rows, StreamedSet):
        confidence = {
            name: rows.measured(gamma, temperature, n_bins).confidence
            for name, (gamma, temperature, _) in cells.items()
            if gamma is not None and temperature is not None
        }
        bootstrap = paired_bootstrap(confidence=confidence, correct=rows.correct, **options)
        floors = {name: bias_floor(confidence=confidence[name], **options) for name in cells}
    else:
        calibrated = _Calibrated(rows, cells)
        bootstrap = paired_bootstrap(
            calibrated,
            rows.labels,
            log=True,
            correct={name: is_correct(rows, other) for name, (_, _, other) in cells.items()},
            figures=tuple(FIGURES),
            **options,
        )
        floors = {name: bias_floor(calibrated[name].exp_(), figures=CALIBRATION_ERRORS, **options) for name in cells}
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
    )
