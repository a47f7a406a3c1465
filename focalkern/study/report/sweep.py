"""The result of a sweep: tables of networks by methods, mean ranks, paired wins, as text, CSV and HTML."""

import csv
import io
import math
from dataclasses import dataclass
from typing import Any

from focalkern._version import __version__
from focalkern.calibrators._selection import LOSS_NAMES, Proper
from focalkern.study.report import html

__all__ = ["METHODS", "SCORES", "Sweep"]

METHODS = ("auto", "none", "temperature", "focal", "temperature, ECE", "focal, ECE")
"""The columns of the tables: what the cross-validation chooses; no calibration; both scalings by the proper loss; the
paper's, by the ECE from its grid."""

SCORES = {"nll": "NLL", "brier": "Brier score", "ece_equal_width": "ECE (equal_width)"}


@dataclass(frozen=True)
class Sweep:
    """The result of :func:`focalkern.study.sweep.sweep`.

    Attributes:
        networks: one dictionary per file, in the order that they were named: ``name``, ``source``, ``n_validation``,
            ``n_test``, ``n_classes``, ``same_rows``, ``chosen``, ``use`` (the verdict), and ``figures``, by method and
            figure.
        failed: by file, why it could not be used.
        criterion: by which the candidates were compared.

    Example:
        >>> labels = np.arange(400) % 3
        >>> np.savez("small.npz", logits=4 * np.eye(3)[(labels + (np.arange(400) % 5 == 0)) % 3], labels=labels)
        >>> found = fk.study.sweep.sweep(["small.npz"])
        >>> found.wins("nll")["temperature"]["none"], found.ranks("nll")["none"]
        (1, 6.0)
        >>> found.value(*found.networks, "none", "nll") > 0.6
        True
        >>> len(found.table("nll")), len(found.to_csv().splitlines()), found.to_html()[:15], "wins" in found.to_dict()
        (5, 7, b'<!DOCTYPE html>', True)
    """

    networks: tuple[dict[str, Any], ...]
    failed: dict[str, str]
    criterion: Proper

    def value(self, network: dict[str, Any], method: str, figure: str) -> float:
        """One figure of one network.

        Args:
            network: one of ``networks``.
            method: ``"auto"``, ``"none"``, ``"temperature"``, ``"focal"``, ``"temperature, ECE"`` or ``"focal, ECE"``.
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``, of the test rows.

        Returns:
            The figure; NaN where a method has none, infinity where it has no end.

        Raises:
            KeyError: no such figure.
        """
        figures = network["figures"].get(method)
        if figures is None:
            return math.nan
        return math.inf if figures[figure] is None else float(figures[figure])

    def ranks(self, figure: str) -> dict[str, float]:
        """The mean rank of every method over the networks, 1 for the lowest; equal ones share the mean of theirs.

        Args:
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``.

        Returns:
            By method, its mean rank.

        Raises:
            KeyError: no such figure.
        """
        total = dict.fromkeys(METHODS, 0.0)
        for network in self.networks:
            values = {method: self.value(network, method, figure) for method in METHODS}
            for method, value in values.items():
                below = sum(other < value for other in values.values())
                equal = sum(other == value for other in values.values())
                total[method] += below + (equal + 1) / 2 if not math.isnan(value) else len(METHODS)
        return {method: rank / max(1, len(self.networks)) for method, rank in total.items()}

    def wins(self, figure: str) -> dict[str, dict[str, int]]:
        """How often one method is better than another.

        Args:
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``.

        Returns:
            By method a and method b, on how many networks a is lower than b.

        Raises:
            KeyError: no such figure.
        """
        return {
            one: {
                other: sum(
                    self.value(network, one, figure) < self.value(network, other, figure) for network in self.networks
                )
                for other in METHODS
            }
            for one in METHODS
        }

    def table(self, figure: str) -> list[list[str]]:
        """A figure as a table: a row per network, then means, mean ranks, and paired wins.

        Args:
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``.

        Returns:
            Rows of cells under ``["network", *METHODS]``: the networks, the mean of those where every figure is finite,
            the mean ranks, and for each of none and temperature scaling on how many networks a method is lower.

        Raises:
            KeyError: no such figure.
        """
        rows = [
            [network["name"], *(_cell(self.value(network, method, figure)) for method in METHODS)]
            for network in self.networks
        ]
        finite = [
            network
            for network in self.networks
            if all(math.isfinite(self.value(network, method, figure)) for method in METHODS)
        ]
        means = [
            sum(self.value(network, method, figure) for network in finite) / len(finite) if finite else math.nan
            for method in METHODS
        ]
        ranks, wins = self.ranks(figure), self.wins(figure)
        everywhere = len(finite) == len(self.networks)
        rows.append(["mean" if everywhere else f"mean of the {len(finite)} that are finite", *map(_cell, means)])
        rows.append(["mean rank", *(f"{ranks[method]:.2f}" for method in METHODS)])
        for other in ("none", "temperature"):
            rows.append(
                [
                    f"lower than {other}",
                    *(
                        "" if method == other else f"{wins[method][other]} of {len(self.networks)}"
                        for method in METHODS
                    ),
                ]
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, as ``json.dumps`` takes it.

        Returns:
            Networks with their figures, mean ranks, wins, and files that failed. A figure that is infinite is None.
        """
        return {
            "focalkern": __version__,
            "criterion": self.criterion,
            "methods": list(METHODS),
            "networks": list(self.networks),
            "mean_ranks": {figure: self.ranks(figure) for figure in SCORES},
            "wins": {figure: self.wins(figure) for figure in SCORES},
            "failed": self.failed,
        }

    def to_csv(self) -> str:
        """The figures as a .csv file.

        Returns:
            One line per network and method, under a header.
        """
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["network", "classes", "validation_rows", "test_rows", "method", "chosen", *SCORES])
        for network in self.networks:
            for method in METHODS:
                values = [self.value(network, method, figure) for figure in SCORES]
                writer.writerow(
                    [
                        network["name"],
                        network["n_classes"],
                        network["n_validation"],
                        network["n_test"],
                        method,
                        network["chosen"] if method == "auto" else "",
                        *("" if math.isnan(value) else repr(value) for value in values),
                    ]
                )
        return stream.getvalue()

    def to_html(self) -> bytes:
        """The tables as a page that needs nothing but itself.

        Returns:
            HTML, in UTF-8.
        """
        verdicts = [[network["name"], html.typeset(network["use"])] for network in self.networks]
        tables = {"use": html.Table(["network", "verdict"], verdicts, text=True)}
        for score, heading in SCORES.items():
            caption = f"{heading} on test rows; lower is better."
            tables[score] = html.Table(["network", *METHODS], self.table(score), caption)
        sections = {"use": "What to use", **SCORES, **({"failed": "Not used"} if self.failed else {})}
        return html.render_page(
            "sweep.html.j2",
            title="Sweep",
            sections=sections,
            n_networks=len(self.networks),
            loss=LOSS_NAMES[self.criterion],
            tables=tables,
            failed=[f"{name}: {reason}" for name, reason in self.failed.items()],
        )


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"
