"""What a study has found."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from focalkern._checks import flag, path_text
from focalkern.calibrators import Calibrator, Criterion, Estimator
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.study.candidates import Choice
from focalkern.study.contest import Contest
from focalkern.study.rows import Rows
from focalkern.study.trust import Trust
from focalkern.study.verdict import Verdict

if TYPE_CHECKING:
    import pandas

__all__ = ["Predictor", "Study"]


class Predictor(Protocol):
    """A fitted candidate from elsewhere, as far as a study knows it."""

    def predict_proba(self, logits: Any, /) -> Any:
        """[N, C] probabilities of [N, C] logits."""


@dataclass(frozen=True)
class Study:
    """What :func:`focalkern.compare_calibrators` has found, and everything that ``calibrate`` says.

    Attributes:
        validation, test: the rows chosen by and the rows measured on; the same object when they are the same.
        grid: all gammas that were searched by either method of the paper.
        choices: the rows of the table; the first is uncalibrated.
        chosen: the row to use, None when its criterion is finite nowhere.
        remarks: sentences that the reader of the table needs.
        trust: intervals of the figures; None where they were not asked for.
        verdict: what to use, why, and what it costs.
        contest: the cross-validation of the candidates; None where a method was asked for by name.
        estimator: of the ECE in the verdict and in :meth:`table`; ``grid.estimator`` is that of the ECE chosen by.
        criterion: by which was chosen.

    Example:
        >>> labels = torch.arange(600) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]  # sure, and wrong in 1 of 5 rows
        >>> study = fk.compare_calibrators((logits[:300], labels[:300]), (logits[300:], labels[300:]), resamples=0)
        >>> study
        Study(5 choices on 300 rows, use temperature, NLL-optimal)
        >>> round(study.calibrator.temperature_, 2), "temperature, NLL-optimal" in study.table()
        (1.92, True)
        >>> study.to_dict()["criterion"], list(study.to_dataframe()["method"])[1]
        ('nll', 'temperature')
    """

    validation: Rows
    test: Rows
    grid: CalibrationGrid
    choices: tuple[Choice, ...]
    chosen: Choice | None
    remarks: tuple[str, ...]
    trust: Trust | None
    verdict: Verdict
    contest: Contest | None
    estimator: Estimator
    criterion: Criterion

    # The methods are doors to the rooms below, which import this one.

    @property
    def calibrator(self) -> Calibrator | Predictor:
        """The fitted calibrator to use: one of this library, or the candidate of your own that was chosen.

        Raises:
            ValueError: nothing was chosen.
        """
        if self.chosen is None:
            raise ValueError("Study: nothing was chosen: the criterion is finite nowhere")
        saved: Calibrator | Predictor = self.chosen.saved
        return saved

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save :attr:`calibrator` as its own ``save`` does, with the evidence in the summary of its fit.

        The evidence is the verdict, the cross-validation and the table.

        Args:
            path: of the file; :func:`focalkern.load_calibrator` reads it.

        Raises:
            TypeError: the calibrator is not one of this library's.
            ValueError: nothing was chosen.
            OSError: the file cannot be written.

        Example:
            >>> labels = torch.arange(600) % 3
            >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]
            >>> study = fk.compare_calibrators((logits[:300], labels[:300]), (logits[300:], labels[300:]), resamples=0)
            >>> study.save("calibrator.json")
            >>> round(fk.load_calibrator("calibrator.json").temperature_, 2)
            1.92
        """
        from focalkern.study.record import evidence

        if not isinstance(self.calibrator, Calibrator):
            raise TypeError(
                f"Study: save needs a calibrator of this library, but the one to use is a "
                f"{type(self.calibrator).__name__}"
            )
        self.calibrator.save(path, evidence=evidence(self))

    def table(self, *, all: bool = False) -> str:
        """The table of the choices and their figures, as text.

        Args:
            all: every estimator of the ECE, as wide as it gets. Otherwise at most 100 columns.

        Returns:
            The table, of several lines.

        Raises:
            ImportError: tabulate is not installed.
        """
        from focalkern.study.table import format_table, headline

        names = None if flag("Study.table", "all", all) else headline(self.estimator)
        return format_table(self.choices, self.chosen, self.trust, names=names)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as ``json.dumps`` takes it.

        Returns:
            A dictionary. A figure that is infinite is None; the remarks say why.
        """
        from focalkern.study.record import to_json

        return to_json(self)

    def to_dataframe(self) -> "pandas.DataFrame":
        """The choices as a table of pandas, one row per choice.

        Returns:
            A pandas.DataFrame: method, criterion, gamma, temperature, chosen, and the figures on the reported rows with
            the ends of their intervals.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas  # not needed for anything else

        from focalkern.study.record import to_records

        return pandas.DataFrame(to_records(self))

    def write_report(self, folder: str | os.PathLike[str], *, title: str = "Calibration report") -> list[Path]:
        """Write ``report.html``, which needs nothing but itself, its pictures, ``table.csv`` and ``report.json``.

        Args:
            folder: created if it is not there; files of the same names are replaced, each in one step.
            title: heading of the page.

        Returns:
            The files, the page last.

        Raises:
            ImportError: matplotlib is not installed.
            OSError: a file cannot be written.

        Example:
            >>> labels = torch.arange(600) % 3
            >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]
            >>> study = fk.compare_calibrators((logits[:300], labels[:300]), (logits[300:], labels[300:]), resamples=0)
            >>> files = study.write_report("report")  # doctest: +SKIP
            >>> files[-1].name  # doctest: +SKIP
            'report.html'
        """
        from focalkern.study.page import write_report

        if not isinstance(title, str):
            raise TypeError(f"Study.write_report: title must be text, got {type(title).__name__}")
        return write_report(self, Path(path_text("Study.write_report", "folder", folder)), self.to_dict(), title=title)

    def __str__(self) -> str:
        return str(self.verdict)

    def __repr__(self) -> str:
        use = "nothing" if self.chosen is None else self.chosen.label
        return f"Study({len(self.choices)} choices on {len(self.test)} rows, use {use})"

    def _repr_html_(self) -> str:
        from focalkern.study.table import table_in_html

        return table_in_html(self)
