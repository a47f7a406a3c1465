"""A study: a comparison with its verdict, its remarks, and the methods that render it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from focalkern._checks import count_rows, flag, path_text
from focalkern.calibrators import Calibrator
from focalkern.study.report.export import evidence, to_json, to_records
from focalkern.study.report.page import write_report
from focalkern.study.report.tables import format_table, headline, table_in_html
from focalkern.study.results import JudgedComparison, hidden_results

if TYPE_CHECKING:
    import pandas

__all__ = ["Predictor", "Study"]


class Predictor(Protocol):
    """A fitted candidate of another library."""

    def predict_proba(self, logits: Any, /) -> Any:
        """The probabilities [N, C] for logits [N, C]."""


@dataclass(frozen=True)
class Study(JudgedComparison):
    """The result of :func:`focalkern.compare_calibrators`, and of ``focalkern calibrate``.

    Attributes:
        validation, test: the samples for fit and choice, and the samples for the scores; the same object without test
            samples.
        search: ECE and NLL of every (gamma, T) of the paper's search on the validation samples, with error bounds for
            samples in files; :attr:`grid` has only the tables.
        results: the rows of the table, a :class:`focalkern.study.CalibratorResult` each; the first is no calibration.
        chosen: the recommended result; None if its criterion is infinite in every cell.
        intervals: bootstrap intervals of the scores; None without a bootstrap.
        cross_validation: results for the candidates; None if the user named a method.
        estimator: estimator of the ECE in the verdict and in :meth:`table`; ``grid.estimator`` is that of the search.
        criterion: the criterion by which ``chosen`` was chosen.
        verdict: the recommendation, its reason and its cost.
        remarks: sentences for the reader of the table.
        accept: with ``accept_risk``, the result of :func:`focalkern.accept_threshold` for ``chosen`` on the test
            samples; otherwise None.

    Example:
        >>> labels = torch.arange(600) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]  # confident, wrong in 1 of 5 rows
        >>> study = fk.compare_calibrators((logits[:300], labels[:300]), (logits[300:], labels[300:]), resamples=0)
        >>> study
        Study(8 results on 300 rows, use spline-matrix)
        >>> round(study.calibrator.temperature_, 2), "NLL-optimal" in study.table(), study.same_samples
        (1.92, True, False)
        >>> study.to_dict()["criterion"], list(study.to_dataframe()["method"])[study.chosen_index]
        ('nll', 'spline-matrix')
    """

    @property
    def calibrator(self) -> Calibrator | Predictor:
        """The recommended calibrator, fitted: one of this library, or your own candidate.

        Raises:
            ValueError: no calibrator was chosen.
        """
        if self.chosen is None:
            raise ValueError("Study: no calibrator was chosen, because the criterion is infinite in every cell")
        calibrator: Calibrator | Predictor = self.chosen.calibrator
        return calibrator

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save :attr:`calibrator` by its ``save``, with the evidence in the summary of its fit.

        The evidence consists of the verdict, the cross-validation and the table.

        Args:
            path: the file to write; :func:`focalkern.load_calibrator` reads it.

        Raises:
            TypeError: the calibrator is not a calibrator of this library.
            ValueError: no calibrator was chosen.
            OSError: the file cannot be written.

        Example:
            >>> labels = torch.arange(600) % 3
            >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]
            >>> study = fk.compare_calibrators((logits[:300], labels[:300]), (logits[300:], labels[300:]), resamples=0)
            >>> study.save("calibrator.json")
            >>> round(fk.load_calibrator("calibrator.json").temperature_, 2)
            1.92
        """
        if not isinstance(self.calibrator, Calibrator):
            raise TypeError(
                f"Study: save needs a calibrator of this library, but the one to use is a "
                f"{type(self.calibrator).__name__}"
            )
        self.calibrator.save(path, evidence=evidence(self))

    def table(self, *, all: bool = False, legend: bool = True) -> str:
        """The table of the results and their scores, as text.

        Args:
            all: show every estimator of the ECE, at any width, and the ECE-optimal rows of the paper. Without it the
                table has at most 100 characters per line, and shows those rows only with ``criterion="ece"`` or a named
                method.
            legend: explain intervals and marks below the table.

        Returns:
            The table as text of several lines.

        Raises:
            ImportError: tabulate is not installed.
        """
        names = None if flag("Study.table", "all", all) else headline(self.estimator)
        hidden = [] if all else hidden_results(self)
        flag("Study.table", "legend", legend)
        return format_table(self.results, self.chosen, self.intervals, names=names, hidden=hidden, legend=legend)

    def to_dict(self) -> dict[str, Any]:
        """The study as data for ``json.dumps``.

        Returns:
            A dictionary. An infinite score is None; the remarks give the reason.
        """
        return to_json(self)

    def to_dataframe(self) -> "pandas.DataFrame":
        """The results as a pandas DataFrame, one row per result.

        Returns:
            A pandas.DataFrame: method, criterion, gamma, temperature, chosen, and the scores on the test samples with
            the ends of their intervals.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas  # an extra

        return pandas.DataFrame(to_records(self))

    def write_report(self, folder: str | os.PathLike[str], *, title: str = "Calibration report") -> list[Path]:
        """Write ``report.html``, a self-contained page, and into the same folder pictures, tables and the calibrator.

        Args:
            folder: created if missing; files of the same names are replaced atomically.
            title: heading of the page.

        Returns:
            The paths of the files, the page last.

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
        if not isinstance(title, str):
            raise TypeError(f"Study.write_report: title must be text, got {type(title).__name__}")
        return write_report(self, Path(path_text("Study.write_report", "folder", folder)), self.to_dict(), title=title)

    def __str__(self) -> str:
        """The verdict, and two lines of Python that use it."""
        if self.chosen is None:
            return str(self.verdict)
        save = '\n  study.save("calibrator.json")' if isinstance(self.calibrator, Calibrator) else ""
        kind = self.validation.kind
        result = "probs" if kind == "logits" else "calibrated"
        return f"{self.verdict}\nNext:\n  {result} = study.calibrator.predict_proba({kind}){save}"

    def __repr__(self) -> str:
        use = "nothing" if self.chosen is None else self.chosen.label
        return f"Study({len(self.results)} results on {count_rows(len(self.test))}, use {use})"

    def _repr_html_(self) -> str:
        return table_in_html(self)
