"""The figures of rows as they are, and after a fitted calibrator."""

from dataclasses import dataclass, replace
from typing import Any

from focalkern._checks import short
from focalkern.calibrators import (
    Calibrator,
    FocalTemperatureScaling,
    HistogramBinning,
    MultiLabelScaling,
    TemperatureScaling,
)
from focalkern.files import InputError, LogitSet
from focalkern.study.candidates import Choice
from focalkern.study.memory import as_rows
from focalkern.study.record import finite_or_none
from focalkern.study.rows import Rows
from focalkern.study.table import format_table
from focalkern.study.words import bin_remarks, read_remarks, rows_in_words

__all__ = ["Evaluation", "evaluate_rows"]


@dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate_rows` has found.

    Attributes:
        rows: the set.
        choices: uncalibrated, and calibrated where there is a calibrator.
        n_bins: of every ECE.
        remarks: sentences that the reader needs.

    Example:
        >>> np.savez("logits.npz", logits=4 * np.eye(3)[[0, 1, 2, 0]], labels=[0, 1, 2, 1])
        >>> found = fk.study.evaluate_rows(fk.files.read_sets("logits.npz")[""])
        >>> found.to_dict()["rows"][0]["figures"]["accuracy"]
        0.75
    """

    rows: Rows
    choices: tuple[Choice, ...]
    n_bins: int
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{rows_in_words(self.rows)}; {self.n_bins} bins\n\n{format_table(self.choices)}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as ``json.dumps`` takes it.

        Returns:
            Texts, numbers and lists. A figure that is infinite is None.
        """
        return {
            "source": self.rows.source,
            "set": self.rows.name,
            "input_kind": self.rows.kind,
            "n_samples": len(self.rows),
            "n_classes": self.rows.n_classes,
            "rows": [
                {
                    "method": choice.method,
                    "binning": choice.binning.binning if choice.binning else None,
                    "gamma": choice.gamma,
                    "temperature": choice.temperature,
                    "figures": finite_or_none(choice.test),
                }
                for choice in self.choices
            ],
            "remarks": list(self.remarks),
        }


def evaluate_rows(
    given: LogitSet | Rows, calibrator: Calibrator | None = None, *, name: str = "the calibrator", n_bins: int = 15
) -> Evaluation:
    """Accuracy, NLL, Brier score and calibration errors of a set, as it is and calibrated.

    Args:
        given: what :func:`focalkern.files.read_sets` or :func:`focalkern.study.stream_sets` has for a file.
        calibrator: fitted; None for the figures as they are.
        name: what errors call it.
        n_bins: of every ECE.

    Returns:
        An :class:`Evaluation`; as text, a table.

    Raises:
        InputError: the calibrator cannot be applied to these rows.
        TypeError: ``given`` is no set, ``calibrator`` is none.

    Example:
        >>> np.savez("logits.npz", logits=4 * np.eye(3)[[0, 1, 2, 0]], labels=[0, 1, 2, 1])
        >>> rows = fk.files.read_sets("logits.npz")[""]
        >>> calibrator = fk.TemperatureScaling().fit(rows.input, rows.labels)
        >>> for choice in fk.study.evaluate_rows(rows, calibrator).choices:
        ...     print(choice.method, round(choice.test["nll"], 3))
        none 1.036
        temperature 0.736
    """
    if not isinstance(given, LogitSet) and not hasattr(given, "measure"):
        raise TypeError(f"evaluate_rows: given must be a set of read_sets or of stream_sets, got {short(given)}")
    if calibrator is not None and not isinstance(calibrator, Calibrator):
        raise TypeError(f"evaluate_rows: calibrator must be a fitted calibrator or None, got {short(calibrator)}")
    rows = as_rows(given)
    if calibrator is not None:
        _check(name, calibrator, rows)
    table = [Choice("none", None, 0.0, 1.0, None, None, None)]
    binning = calibrator if isinstance(calibrator, HistogramBinning) else None
    scaling = calibrator if binning is None else binning.scaling_
    if isinstance(scaling, TemperatureScaling | FocalTemperatureScaling):
        cell = (scaling.gamma_, scaling.temperature_)
        table.append(Choice(scaling.method, None, *cell, None, None, None, binning=binning))
    elif binning is not None:
        table.append(Choice(binning.method, None, 0.0, 1.0, None, None, None, binning=binning))
    elif calibrator is not None:
        table.append(Choice(calibrator.method, None, None, None, None, None, None, other=calibrator))
    cells = [(row.gamma, row.temperature) for row in table if row.gamma is not None and row.temperature is not None]
    rows.measure(cells, n_bins)  # one pass for all
    choices = [replace(row, test=rows.figures(row.what, n_bins)) for row in table]
    remarks = read_remarks(rows)
    if rows.memory is not None:
        remarks += bin_remarks(choices[-1], rows.memory)
    return Evaluation(rows, tuple(choices), n_bins, tuple(remarks))


def _check(name: str, calibrator: Calibrator, rows: Rows) -> None:
    """Raises InputError where the calibrator cannot be applied to the rows."""
    if isinstance(calibrator, MultiLabelScaling):
        raise InputError(f"{name}: expected a calibrator of one label per row, found {calibrator.method!r}")
    if calibrator.one_logit_:
        raise InputError(f"{name}: expected a scaling for {rows.source}, found one of one logit per row")
    if rows.memory is None and not isinstance(calibrator, TemperatureScaling | FocalTemperatureScaling):
        raise InputError(
            f"{name}: expected a scaling for {rows.source}, which is read in parts, found {calibrator.method!r}"
        )
    kind = getattr(calibrator, "input_kind", rows.kind)
    if rows.kind != kind:
        raise InputError(f"{rows.source}: expected {kind}, for which {name} was fitted, found {rows.kind}")
    if rows.n_classes != calibrator.n_classes_:
        raise InputError(
            f"{rows.source}: expected the {calibrator.n_classes_} classes of {name}, found {rows.n_classes}"
        )
