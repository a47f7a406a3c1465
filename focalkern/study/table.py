"""The table of a study as text, and the cells that its page shares with it."""

import math
import textwrap
from collections.abc import Sequence

from focalkern.calibrators import Search
from focalkern.study import html
from focalkern.study.candidates import IN_WORDS, Choice
from focalkern.study.result import Study
from focalkern.study.rows import FIGURES
from focalkern.study.trust import Trust
from focalkern.study.verdict import name_of

__all__ = ["figure_in_print", "floor_cells", "format_table", "headline", "legend", "table_cells", "table_in_html"]


def headline(estimator: str) -> tuple[str, ...]:
    """The figures of a table of at most 100 columns, with the ECE of one estimator."""
    return ("accuracy", "nll", "brier", f"ece_{estimator}")


def format_table(
    choices: Sequence[Choice],
    chosen: Choice | None = None,
    trust: Trust | None = None,
    *,
    names: Sequence[str] | None = None,
) -> str:
    """The table as text, four digits after the point; an arrow stands before the chosen row. ``names`` are those of its
    figures, all when None.

    With ``trust``, every row has a second line, half the width of the interval and the mark; what they mean stands
    below the table.
    """
    shown = tuple(FIGURES) if names is None else tuple(names)
    from tabulate import tabulate  # an extra: not everybody who imports this package needs it

    body = [
        [("-> " if choice is chosen else "   ") + label, *cells]
        for choice, (label, *cells) in table_cells(choices, trust, names=shown)
    ]
    if trust is not None:
        label, *cells = floor_cells(choices, chosen, trust, names=shown)
        body.append([f"   {label}", *cells])
    table: str = tabulate(
        body,
        headers=["", "gamma", "T", *(_heading(name, names) for name in shown)],
        tablefmt="simple",
        disable_numparse=True,
        colalign=("left", *["right"] * (len(shown) + 2)),
        preserve_whitespace=True,
    )
    return table if trust is None else f"{table}\n\n{textwrap.fill(legend(trust), 118 if names is None else 100)}"


def _heading(name: str, names: Sequence[str] | None) -> str:
    """Where there is room, a name in one line or two."""
    return FIGURES[name] if names is None else FIGURES[name].replace("_\n", "_")


def legend(trust: Trust, plus_minus: str = "+-") -> str:
    bootstrap = trust.bootstrap
    return (
        f"{plus_minus} half the {100 * bootstrap.level:g} % interval, of {bootstrap.n_resamples} resamples of the "
        "test rows. * better, ! worse: the interval of the paired difference excludes 0; temperature scaling is "
        "compared with no calibration, focal temperature scaling with temperature scaling by the same criterion"
        f"{', the other candidates with temperature scaling' if trust.others else ''}"
        f"{', bins with what stands before them' if trust.binned else ''}. Bias "
        "floor: the mean calibration error of a perfectly calibrated model with the same confidences and as many rows, "
        "and below it the 95 % quantile."
    )


def table_cells(
    choices: Sequence[Choice],
    trust: Trust | None = None,
    attribute: str = "test",
    plus_minus: str = "+-",
    names: Sequence[str] = tuple(FIGURES),
) -> list[tuple[Choice, list[str]]]:
    """Every choice with its label, gamma, T and figures in print."""
    rows = []
    for index, choice in enumerate(choices):
        scaled = choice.method in IN_WORDS
        values = getattr(choice, attribute)
        cells = [
            choice.label,
            parameter_in_print(choice.gamma, choice.search) if scaled else "",
            parameter_in_print(choice.temperature, choice.search) if scaled else "",
            *("-" if values is None else figure_in_print(values[name]) for name in names),
        ]
        if trust is not None:
            for column, name in enumerate(names, start=3):
                interval = trust.interval(index, name)
                if interval is not None and math.isfinite(interval.low):
                    half = max(interval.high - interval.estimate, interval.estimate - interval.low)
                    cells[column] += f"\n{plus_minus}{_half_in_print(half)}{trust.mark(index, name)}"
        rows.append((choice, cells))
    return rows


def floor_cells(
    choices: Sequence[Choice], chosen: Choice | None, trust: Trust, *, names: Sequence[str] = tuple(FIGURES)
) -> list[str]:
    """The last row of the table: the bias floor of the chosen row, or of the uncalibrated one."""
    floors = trust.floors[0 if chosen is None else choices.index(chosen)]
    assert floors is not None
    cells = [f"bias floor of {'the first row' if chosen is None else 'the row ->'}", "", ""]
    for name in names:
        floor = floors.get(name)
        cells.append("" if floor is None else f"{floor.mean:.4f}\n<{_half_in_print(floor.quantile(0.95))}")
    return cells


def _half_in_print(value: float) -> str:
    """As short as can be: it stands beside a mark."""
    return f"{value:.4f}".removeprefix("0") if value < 1 else f"{value:.3g}"


def parameter_in_print(value: float | None, search: Search) -> str:
    """At least two digits, more where the grid is finer; four of what is on no grid."""
    if value is None:
        return "-"
    if search != "grid" and value != 0:
        return f"{value:.4f}"
    text = f"{value:.10g}"
    return text if len(text.partition(".")[2]) > 1 else f"{value:.2f}"


def figure_in_print(value: float) -> str:
    """Absurd temperatures and logits have an NLL of hundreds of digits."""
    return f"{value:.4f}" if not abs(value) >= 1e6 or math.isinf(value) else f"{value:.4g}"


def table_in_html(study: Study) -> str:
    """The verdict and the table, for a notebook."""
    names = headline(study.estimator)
    rows = table_cells(study.choices, study.trust, plus_minus="\u00b1", names=names)
    head = ["", "gamma", "T", *(FIGURES[name].replace("_\n", "_").replace("\n", " ") for name in names)]
    # A notebook has no style for these parts, so that what the page shows by colour is an arrow here.
    body = [[("\u2192 " if choice is study.chosen else "") + label, *cells] for choice, (label, *cells) in rows]
    lines = [*map(html.typeset, study.verdict.sentences()), f"On {name_of(study.test)}; \u2192 is the one to use."]
    style = "overflow-x: auto; white-space: nowrap"
    return "\n".join([*map(html.paragraph, lines), f'<div style="{style}" tabindex="0">{html.table(head, body)}</div>'])
