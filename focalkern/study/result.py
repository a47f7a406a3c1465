"""What a study has found."""

from dataclasses import dataclass

from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.study.candidates import Choice
from focalkern.study.rows import Rows
from focalkern.study.trust import Trust

__all__ = ["Study"]


@dataclass(frozen=True)
class Study:
    """Everything that ``calibrate`` says.

    Attributes:
        selection, report: the rows that chose and the rows that report; the same object when they are the same.
        grid: all gammas that were searched by either method.
        choices: the rows of the table; the first is uncalibrated.
        chosen: the row that was asked for, None when its criterion is finite nowhere.
        remarks: sentences that the reader of the table needs.
        trust: intervals of the figures; None where they were not asked for.
    """

    selection: Rows
    report: Rows
    grid: CalibrationGrid
    choices: tuple[Choice, ...]
    chosen: Choice | None
    remarks: tuple[str, ...]
    trust: Trust | None = None
