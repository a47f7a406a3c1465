"""Scores of samples without calibration and after a fitted calibrator."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from focalkern._checks import MOST_BINS, count_rows, counted, integer, short
from focalkern._columns import listed, pattern_of_classes
from focalkern._devices import cpu_by_default
from focalkern.calibrators import Calibrator, HistogramBinning, MultiLabelScaling, RobustTemperatureScaling
from focalkern.files import Hint, InputError, LogitSet
from focalkern.files.inputs import UnlabelledRows
from focalkern.files.tables import check_column_names
from focalkern.study.remarks import remarks_on_bins, remarks_on_samples
from focalkern.study.report.export import finite_or_none
from focalkern.study.report.tables import format_table
from focalkern.study.results import CalibratorResult
from focalkern.study.samples import Samples, as_samples, describe_samples, describe_source, digest_of, scaling_or_none
from focalkern.study.scores import identity, score

__all__ = ["Evaluation", "check_fits", "evaluate_rows"]


@dataclass(frozen=True)
class Evaluation:
    """The result of :func:`evaluate_rows`.

    Attributes:
        samples: the samples.
        results: a :class:`focalkern.study.CalibratorResult` for no calibration, and one for the calibrator if given.
        n_bins: number of bins of every ECE.
        remarks: sentences for the reader of the table.

    Example:
        >>> np.savez("logits.npz", logits=4 * np.eye(3)[[0, 1, 2, 0]], labels=[0, 1, 2, 1])
        >>> found = fk.study.evaluate_rows(fk.files.read_sets("logits.npz")[""])
        >>> found.to_dict()["rows"][0]["figures"]["accuracy"]
        0.75
    """

    samples: Samples
    results: tuple[CalibratorResult, ...]
    n_bins: int
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        source = describe_source(self.samples, describe_samples(self.samples))
        return f"{source}; {counted(self.n_bins, 'bin')}\n\n{format_table(self.results)}"

    def to_dict(self) -> dict[str, Any]:
        """The evaluation as data for ``json.dumps``.

        Returns:
            A dictionary of strings, numbers and lists. An infinite score is None.
        """
        return {
            "source": self.samples.source,
            "set": self.samples.name,
            "input_kind": self.samples.kind,
            "n_samples": len(self.samples),
            "n_classes": self.samples.n_classes,
            "rows": [
                {
                    "method": result.method,
                    "binning": result.binning.binning if result.binning else None,
                    "gamma": result.gamma,
                    "temperature": result.temperature,
                    "figures": finite_or_none(result.test),
                }
                for result in self.results
            ],
            "remarks": list(self.remarks),
        }


@cpu_by_default()
def evaluate_rows(
    given: LogitSet | Samples, calibrator: Calibrator | None = None, *, name: str = "the calibrator", n_bins: int = 15
) -> Evaluation:
    """Accuracy, NLL, Brier score and calibration errors of a set, before and after calibration.

    Args:
        given: a set of :func:`focalkern.files.read_sets` or :func:`focalkern.study.stream_sets`.
        calibrator: a fitted calibrator; None gives only the scores without calibration.
        name: name of the calibrator in errors.
        n_bins: number of bins of every ECE.

    Returns:
        An :class:`Evaluation`; its ``str()`` is a table.

    Raises:
        InputError: the calibrator cannot be applied to these rows.
        TypeError, ValueError: ``given`` is not a set of samples, ``calibrator`` is not a calibrator, or ``n_bins`` is
            not an integer from 1 to 2^24.

    Example:
        >>> np.savez("logits.npz", logits=4 * np.eye(3)[[0, 1, 2, 0]], labels=[0, 1, 2, 1])
        >>> rows = fk.files.read_sets("logits.npz")[""]
        >>> calibrator = fk.TemperatureScaling().fit(rows.input, rows.labels)
        >>> for result in fk.study.evaluate_rows(rows, calibrator).results:
        ...     print(result.method, round(result.test["nll"], 3))
        none 1.036
        temperature 0.736
    """
    if not isinstance(given, LogitSet) and not hasattr(given, "batches"):
        raise TypeError(f"evaluate_rows: given must be a set from read_sets or stream_sets, got {short(given)}")
    if calibrator is not None and not isinstance(calibrator, Calibrator):
        raise TypeError(f"evaluate_rows: calibrator must be a fitted calibrator or None, got {short(calibrator)}")
    n_bins = integer("evaluate_rows", "n_bins", n_bins, 1, MOST_BINS)
    samples = as_samples(given)
    if calibrator is not None:
        if isinstance(calibrator, MultiLabelScaling):
            raise InputError(f"{name}: expected a calibrator of one label per row, found {calibrator.method!r}")
        check_fits(name, calibrator, samples, () if samples.memory is None else samples.memory.classes)
    fitted = [] if calibrator is None else [CalibratorResult(_method(calibrator), None, calibrator)]
    of_none, *of_fitted = score(samples, [(0.0, 1.0), *(one.calibrator for one in fitted)], n_bins)
    none = CalibratorResult("none", None, identity(samples, n_bins))
    results = [
        replace(one, test=found.scores) for one, found in zip((none, *fitted), (of_none, *of_fitted), strict=True)
    ]
    remarks = remarks_on_samples(samples)
    if calibrator is not None and calibrator._fitted_on is not None:
        remarks += _on_rows_of_fit(name, calibrator._fitted_on, samples)
    if samples.memory is not None:
        remarks += remarks_on_bins(results[-1], samples.memory)
    return Evaluation(samples, tuple(results), n_bins, tuple(remarks))


def _on_rows_of_fit(name: str, data: Mapping[str, Any], samples: Samples) -> list[str]:
    """A remark if rows of the fit are among the samples. ``data`` is the description of rows in a saved calibrator."""
    fit, test = (data.get(key) for key in ("validation", "test"))
    if not isinstance(fit, dict) or not isinstance(test, dict):
        return []
    n_rows, n_fit, n_test = len(samples), fit.get("n_samples"), test.get("n_samples")
    digest, of_fit, of_test = digest_of(samples), _digest(fit), _digest(test)
    if digest is not None and of_fit is not None and of_test is not None:  # by the content, under any name
        is_fit, is_both = digest == of_fit, digest == (of_fit + of_test) % 2**64
    else:
        is_fit = fit.get("source") == samples.source and fit.get("set") == samples.name
        is_both = fit.get("source") == test.get("source") == samples.source
    if is_fit and n_fit == n_rows:
        which = f"these {count_rows(n_rows)}"
    elif is_both and isinstance(n_test, int) and n_fit == n_rows - n_test:
        which = f"{n_fit:,} of these {count_rows(n_rows)}"
    else:
        return []
    return [f"{name} was fitted to {which}, so its metrics on them are optimistic. Measure it on other rows."]


def _digest(data: Mapping[str, Any]) -> int | None:
    """The digest of rows in a saved calibrator; None without one."""
    digest = data.get("digest")
    return int(digest, 16) if isinstance(digest, str) and re.fullmatch("[0-9a-f]{16}", digest) else None


def _method(calibrator: Calibrator) -> str:
    """The method of a calibrator as in the table of a comparison; for bins after a scaling, that of the scaling."""
    scaling = scaling_or_none(calibrator.scaling_) if isinstance(calibrator, HistogramBinning) else None
    if isinstance(calibrator, RobustTemperatureScaling):
        return "temperature"
    return calibrator.method if scaling is None else scaling.method


def check_fits(name: str, calibrator: Calibrator, rows: Samples | UnlabelledRows, columns: Sequence[str]) -> None:
    """Raises InputError if the calibrator cannot be applied to the rows.

    Args:
        name: name of the calibrator.
        calibrator: fitted.
        rows: the rows.
        columns: names of the classes in a table; empty without names.
    """
    if calibrator.one_logit_:
        raise InputError(f"{name}: expected a calibrator of [N, C] {rows.kind}, found one of one logit per row")
    kind = getattr(calibrator, "input_kind", rows.kind)
    if rows.kind != kind:
        raise InputError(
            f"{rows.source}: expected {kind}, for which {name} was fitted, found {rows.kind}; pass {kind}, or fit a "
            f"calibrator to {rows.kind}"
        )
    wanted = calibrator._expected_columns(columns)
    if rows.n_classes != calibrator.n_classes_:
        expected = f"the {calibrator.n_classes_} classes of {name}"
        raise InputError(
            rows.source, expected, **_other_classes(calibrator.n_classes_, rows.n_classes, wanted, columns)
        )
    check_column_names(f"the columns to which {name} was fitted", wanted, rows.source, columns)


def _other_classes(of_fit: int, n_classes: int, wanted: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """The found classes and the remedy, as arguments of the error of rows with ``n_classes`` classes.

    Args:
        of_fit: the number of classes of the calibrator.
        n_classes: that of the rows.
        wanted: names of the columns to which the calibrator was fitted; empty if they are not known.
        columns: those of the rows; empty without names.
    """
    others = [column for column in columns if column not in wanted]
    if wanted and n_classes - len(others) == of_fit:
        hint = Hint("logits_key", pattern_of_classes(columns, others))
        return {"found": f"{n_classes}, with {listed(others)} besides", "hint": hint}
    remedy = "use a calibrator of the same network"
    if not columns:
        return {"found": f"{n_classes}; {remedy}"}
    if n_classes < of_fit:
        return {"found": f"{n_classes}: {listed(columns)}; {remedy}"}
    words = f"{n_classes}: {listed(columns)}; {remedy}, or leave out the columns that are no classes"
    return {"found": words, "hint": Hint("logits_key", "'*,!NAME'")}
