"""The result of a sweep: tables of networks by methods, mean ranks, paired wins, as text, CSV and HTML."""

import csv
import io
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

from focalkern._checks import short
from focalkern._types import LOSS_NAMES, PROPER, Proper
from focalkern._version import __version__
from focalkern.files.paths import name_of
from focalkern.study.report import html

__all__ = ["METHODS", "SCORES", "Sweep", "missing_keys", "names_of"]

METHODS = ("auto", "none", "temperature", "focal", "temperature, ECE", "focal, ECE")
"""The columns of the tables: the choice of the cross-validation; no calibration; both scalings by the proper loss; with
``all=True`` both scalings by the ECE on the paper's grid."""

_USUAL = METHODS[:4]

SCORES = {**LOSS_NAMES, "ece_equal_width": "ECE (equal_width)"}

_MOST_UNFOLDED = 20  # largest number of networks whose rows a page shows at once

_KINDS = {"path": str, "error": str | None}
_KINDS_WITHOUT_ERROR = {"n_classes": Real, "n_validation": Real, "n_test": Real, "chosen": str, "use": str}

_SIZES = ("classes", "validation_rows", "test_rows")
_COLUMNS = ["network", "path", *_SIZES, "method", "chosen", *SCORES, "error"]


def missing_keys(record: Mapping[str, Any]) -> list[str]:
    """The keys that a record of one network lacks. A value of another kind counts as lacking."""
    has_error = record.get("error", "") is not None
    kinds = _KINDS if has_error else _KINDS | _KINDS_WITHOUT_ERROR
    missing = [key for key, kind in kinds.items() if not isinstance(record.get(key, ...), kind)]
    if record.get("criterion") not in PROPER:
        missing.append(f"criterion ({' or '.join(PROPER)})")
    if not has_error and not _has_scores(record.get("figures")):
        missing.append(f"figures of {', '.join(SCORES)} by method")
    return missing


def _has_scores(figures: Any) -> bool:
    """Whether each method has None or every score, a number or None."""
    found = list(figures.values()) if isinstance(figures, Mapping) else [...]
    return bool(found) and all(
        one is None or (isinstance(one, Mapping) and all(isinstance(one.get(key, ...), Real | None) for key in SCORES))
        for one in found
    )


def names_of(paths: Iterable[str]) -> dict[str, str]:
    """A name for each path: the file name without suffix. Equal names get the folders that distinguish them, as in
    ``a/logits`` and ``b/logits``; if no folder does, they are the whole paths."""
    names = {path: name_of(path).stem for path in paths}
    equal: dict[str, list[str]] = {}
    for path, name in names.items():
        equal.setdefault(name, []).append(path)
    for name, group in equal.items():
        if len(group) > 1:
            parts = [(*path.split("/")[:-1], name) for path in group]
            depths = range(2, max(map(len, parts)) + 1)
            enough = next((depth for depth in depths if len({one[-depth:] for one in parts}) == len(group)), None)
            names |= zip(group, group if enough is None else ("/".join(one[-enough:]) for one in parts), strict=True)
    return names


@dataclass(frozen=True)
class Sweep:
    """The result of :func:`focalkern.sweep`.

    Attributes:
        networks: one record per usable file, in the order of the files: ``name`` (of the file), ``path``,
            ``error`` (None), ``criterion``, ``n_validation``, ``n_test``, ``n_classes``, ``split`` (whether one set was
            halved), ``chosen`` (name of the calibrator), ``use`` (the recommendation), and ``figures``, the scores by
            method and name.
        failed: for each unusable file, the reason.
        criterion: the loss by which the candidates were compared.

    Example:
        >>> labels = np.arange(400) % 3
        >>> np.savez("small.npz", logits=4 * np.eye(3)[(labels + (np.arange(400) % 5 == 0)) % 3], labels=labels)
        >>> found = fk.sweep(["small.npz"])
        >>> found.wins("nll")["temperature"]["none"], found.ranks("nll")["none"]
        (1, 4.0)
        >>> found.value(*found.networks, "none", "nll") > 0.6, found.methods
        (True, ('auto', 'none', 'temperature', 'focal'))
        >>> len(found.table("nll")), len(found.to_csv().splitlines()), found.to_html()[:15], "wins" in found.to_dict()
        (5, 5, b'<!DOCTYPE html>', True)
    """

    networks: tuple[dict[str, Any], ...]
    failed: dict[str, str]
    criterion: Proper

    @property
    def methods(self) -> tuple[str, ...]:
        """The columns of the tables; those of the ECE only if a record has them (``all=True``)."""
        found = {method for network in self.networks for method in network["figures"]}
        return tuple(method for method in METHODS if method in _USUAL or method in found)

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> Self:
        """Join records of :func:`focalkern.sweep_one` from any machine.

        Args:
            records: the records, in the order for the tables. Of several records of one path, the last one without an
                error is used, or else the last one.

        Returns:
            A sweep.

        Raises:
            TypeError: an item that is not a record.
            ValueError: a record that lacks a key of :func:`focalkern.sweep_one` or has a value of another kind in it;
                records of different criteria.

        Example:
            >>> records = [fk.sweep_one("absent.npz")]
            >>> fk.Sweep.from_records(records).failed
            {'absent.npz': 'expected a file, found nothing there'}
        """
        found: dict[str, Mapping[str, Any]] = {}
        for record in records:
            if not isinstance(record, Mapping):
                raise TypeError(f"from_records: records must be dictionaries from sweep_one, got {short(record)}")
            missing = missing_keys(record)
            if missing:
                raise ValueError(
                    f"from_records: records must have {', '.join(missing)}, got {short(dict(record))}; run sweep_one "
                    "on the file again"
                )
            earlier = found.get(record["path"])
            if earlier is None or earlier["error"] is not None or record["error"] is None:
                found[record["path"]] = record
        criteria = dict.fromkeys(record["criterion"] for record in found.values()) or {"nll": None}
        if len(criteria) > 1:
            raise ValueError(f"from_records: records must have one criterion, got {', '.join(map(str, criteria))}")
        names = names_of(found)
        return cls(
            tuple({"name": names[path], **record} for path, record in found.items() if record["error"] is None),
            {path: record["error"] for path, record in found.items() if record["error"] is not None},
            next(iter(criteria)),
        )

    def value(self, network: dict[str, Any], method: str, figure: str) -> float:
        """One score of one network.

        Args:
            network: one of ``networks``.
            method: ``"auto"``, ``"none"``, ``"temperature"``, ``"focal"``, ``"temperature, ECE"`` or ``"focal, ECE"``.
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``, of the test rows.

        Returns:
            The score; NaN if the method has no value; infinity for infinite values.

        Raises:
            KeyError: an unknown method or score.
        """
        figures = network["figures"].get(method)
        if figures is None:
            return math.nan
        return math.inf if figures[figure] is None else float(figures[figure])

    def _values(self, figure: str) -> list[list[float]]:
        """For each network, the score of every method."""
        methods = self.methods
        return [[self.value(network, method, figure) for method in methods] for network in self.networks]

    def ranks(self, figure: str) -> dict[str, float]:
        """The mean rank of every method over the networks; 1 is the lowest score, and ties get their mean rank.

        Args:
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``.

        Returns:
            The mean rank by method; NaN without networks.

        Raises:
            KeyError: an unknown score.
        """
        total = dict.fromkeys(self.methods, 0.0)
        for values in self._values(figure):
            for method, value in zip(total, values, strict=True):
                below = sum([other < value for other in values])
                total[method] += below + (values.count(value) + 1) / 2 if not math.isnan(value) else len(total)
        return {method: rank / len(self.networks) if self.networks else math.nan for method, rank in total.items()}

    def wins(self, figure: str) -> dict[str, dict[str, int]]:
        """Counts of networks on which one method is better than another.

        Args:
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``.

        Returns:
            For methods a and b, ``[a][b]`` is the number of networks on which a is lower than b.

        Raises:
            KeyError: an unknown score.
        """
        methods = self.methods
        columns = list(zip(*self._values(figure), strict=True)) or [()] * len(methods)
        every = dict(zip(methods, columns, strict=True))
        return {
            one: {other: sum(map(operator.lt, ours, theirs)) for other, theirs in every.items()}
            for one, ours in every.items()
        }

    def table(self, figure: str) -> list[list[str]]:
        """A score as a table: a row per network, then means, mean ranks, and paired wins.

        Args:
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``.

        Returns:
            Rows of cells under ``["network", *methods]``: the networks; the mean over networks with finite scores only;
            the mean ranks; and the number of networks on which a method is lower than none, and than temperature
            scaling.

        Raises:
            KeyError: an unknown score.
        """
        every = self._values(figure)
        rows = [[network["name"], *map(_cell, values)] for network, values in zip(self.networks, every, strict=True)]
        finite = [values for values in every if all(map(math.isfinite, values))]
        means = [sum(column) / len(finite) for column in zip(*finite, strict=True)] or [math.nan] * len(self.methods)
        ranks, wins = self.ranks(figure), self.wins(figure)
        everywhere = len(finite) == len(self.networks)
        rows.append(["mean" if everywhere else f"mean of the {len(finite)} that are finite", *map(_cell, means)])
        rows.append(["mean rank", *("-" if math.isnan(rank) else f"{rank:.2f}" for rank in ranks.values())])
        for other in ("none", "temperature"):
            rows.append(
                [
                    f"lower than {other}",
                    *("" if method == other else f"{wins[method][other]} of {len(self.networks)}" for method in ranks),
                ]
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The sweep as data for ``json.dumps``.

        Returns:
            A dictionary of the networks with their scores, mean ranks, wins, and files that failed. An infinite score
            is None, and so are the mean ranks without networks.
        """
        return {
            "focalkern": __version__,
            "criterion": self.criterion,
            "methods": list(self.methods),
            "networks": list(self.networks),
            "mean_ranks": {figure: self.ranks(figure) if self.networks else None for figure in SCORES},
            "wins": {figure: self.wins(figure) for figure in SCORES},
            "failed": self.failed,
        }

    def to_csv(self) -> str:
        """The scores as the content of a .csv file.

        Returns:
            One line per network and method, then one per file that failed, with its error, under a header.
        """
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for row in self._rows():
            writer.writerow(["" if cell is None else repr(cell) if isinstance(cell, float) else cell for cell in row])
        return stream.getvalue()

    def to_frame(self) -> Any:
        """The scores as a pandas DataFrame.

        Returns:
            The rows and columns of :meth:`to_csv`; empty cells are missing values.

        Raises:
            ImportError: pandas is not installed.

        Example:
            >>> frame = fk.sweep(["absent.npz"]).to_frame()
            >>> frame[["path", "error"]].values.tolist()
            [['absent.npz', 'expected a file, found nothing there']]
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("Sweep.to_frame needs pandas: pip install pandas", name="pandas") from None
        frame = pandas.DataFrame(list(self._rows()), columns=_COLUMNS)
        return frame.astype(dict.fromkeys(_SIZES, "Int64"))

    def to_parquet(self) -> bytes:
        """The scores as the content of a .parquet file.

        Returns:
            The rows and columns of :meth:`to_csv`, with numbers as numbers and empty cells as missing values. Bytes of
            a path that are not UTF-8 are replaced.

        Raises:
            ImportError: pyarrow is not installed.

        Example:
            >>> data = fk.sweep(["absent.npz"]).to_parquet()
            >>> data[:4]
            b'PAR1'
        """
        try:
            import pyarrow
            from pyarrow import parquet
            from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv
        except ImportError:
            message = "Sweep.to_parquet needs pyarrow: pip install 'focalkern[tables]'"
            raise ImportError(message, name="pyarrow") from None
        # Not pyarrow.array: it imports pandas if installed, which takes longer than the table of 500 networks.
        numbers = {**dict.fromkeys(_SIZES, pyarrow.int64()), **dict.fromkeys(SCORES, pyarrow.float64())}
        table = read_csv(
            pyarrow.BufferReader(_utf8(self.to_csv()).encode()),
            ReadOptions(use_threads=False),
            ParseOptions(newlines_in_values=True),
            ConvertOptions(
                column_types={name: numbers.get(name, pyarrow.string()) for name in _COLUMNS},
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        stream = io.BytesIO()
        parquet.write_table(table, stream)
        return stream.getvalue()

    def _rows(self) -> Iterator[list[Any]]:
        methods = self.methods
        for network in self.networks:
            sizes = [network["n_classes"], network["n_validation"], network["n_test"]]
            for method in methods:
                values = [self.value(network, method, figure) for figure in SCORES]
                yield [
                    network["name"],
                    network["path"],
                    *sizes,
                    method,
                    network["chosen"] if method == "auto" else None,
                    *(None if math.isnan(value) else value for value in values),
                    None,
                ]
        names = names_of([*(network["path"] for network in self.networks), *self.failed])
        for path, error in self.failed.items():
            yield [names[path], path, None, None, None, None, None, *(None for _ in SCORES), error]

    def to_html(self) -> bytes:
        """The tables as a self-contained page. With more than twenty networks their rows are folded.

        Returns:
            HTML, in UTF-8.
        """
        n = len(self.networks)
        verdicts = [[network["name"], html.typeset(network["use"])] for network in self.networks]
        folded = {"use": html.Table(["network", "verdict"], verdicts, text=True)}
        tables = {}
        for score, heading in SCORES.items():
            rows, head = self.table(score), ["network", *self.methods]
            tables[score] = html.Table(["", *self.methods], rows[n:], f"{heading} on test rows; lower is better.")
            folded[score] = html.Table(head, rows[:n], f"{heading} of every network.")
            if n <= _MOST_UNFOLDED:
                tables[score] = html.Table(head, rows, tables[score].caption)
        if n <= _MOST_UNFOLDED:
            tables, folded = {"use": folded["use"], **tables}, {}
        sections = {"use": "Recommendations", **SCORES} if n else {}  # without networks, the errors are all
        sections |= {"failed": "Failed files"} if self.failed else {}
        return html.render_page(
            "sweep.html.j2",
            title="Sweep",
            sections=sections,
            networks=f"{n:,} network{'s' * (n != 1)}",
            with_ece=self.methods != _USUAL,
            loss=LOSS_NAMES[self.criterion],
            tables=tables,
            folded=folded,
            failed=[f"{name}: {reason}" for name, reason in self.failed.items()],
        )


def _utf8(text: str) -> str:
    return os.fsencode(text).decode(errors="replace")


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"
