"""The page of a study: one file of HTML with its tables, diagrams and maps, and the same one by one."""

import contextlib
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from focalkern import metrics
from focalkern._atomic import opened_atomically
from focalkern.study import html
from focalkern.study.cells import Cells, cells_on, thinned
from focalkern.study.explorer import make_explorer
from focalkern.study.pictures import draw_all, shown_bins
from focalkern.study.record import to_csv
from focalkern.study.result import Study
from focalkern.study.rows import FIGURES
from focalkern.study.table import floor_cells, legend, table_cells
from focalkern.study.verdict import as_sentence, rows_of_the_figures
from focalkern.study.words import on_which, search_in_words

__all__ = ["cells_of", "write_report"]


def write_report(
    study: Study,
    folder: Path,
    document: dict[str, Any],
    *,
    title: str = "Calibration report",
    cells: Cells | None = None,
) -> list[Path]:
    """A page with everything, and its diagrams, maps and tables one by one.

    Args:
        study: what :func:`run_study` returned.
        folder: created if it is not there; files of the same names are replaced when all the new ones are complete.
        document: what goes into ``report.json``.
        title: heading of the page.
        cells: what :func:`cells_of` returned, which several processes have to call together; here it is called when
            None.

    Returns:
        The files, in the order in which they were written; the page is ``report.html``.
    """
    bins = shown_bins(study)
    images = draw_all(study, bins)
    map_that_answers = make_explorer(study, cells or cells_of(study))
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "table.csv": to_csv(study).encode(),
        "report.json": (json.dumps(document, indent=2, allow_nan=False) + "\n").encode(),
        **images,
        "report.html": make_page(study, title, str(document["focalkern"]), images, bins, map_that_answers),
    }
    with contextlib.ExitStack() as complete:  # all of them or none
        for name, data in files.items():
            stream = complete.enter_context(opened_atomically(folder / name))
            stream.write(data)
            stream.flush()
    return [folder / name for name in files]


def cells_of(study: Study) -> Cells:
    """The figures and bins of every cell of the map on the test rows. Where several processes share the rows, each
    of them calls this.
    """
    kept = [one.temperature for one in study.choices if one.temperature is not None]
    n_bins = study.grid.n_bins
    gammas, temperatures, every = thinned(study.grid, study.test, n_bins, kept)
    return cells_on(study.test, gammas, temperatures, n_bins, every)


def make_page(
    study: Study,
    title: str,
    version: str,
    images: dict[str, bytes],
    bins: dict[str, metrics.ReliabilityBins],
    map_that_answers: str,
) -> bytes:
    """The study as a page of HTML with the images inside."""
    same = study.test is study.validation
    measured = rows_of_the_figures(study.test, same)
    headline = ("accuracy", "nll", "brier", f"ece_{study.estimator}")
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    first = [_choices(study, "test", f"Figures {measured}. The row with the shade is the one to use.", headline)]
    if study.trust is not None:
        first.append(html.paragraph(legend(study.trust, plus_minus="\u00b1"), "quiet"))
        first.append(_difference_table(study, headline))
    every = [_choices(study, "test", f"All figures {measured}.", tuple(FIGURES))]
    if study.trust is not None:
        every.append(_difference_table(study, tuple(FIGURES)))
    if not same:
        caption = f"Figures on the {len(study.validation)} validation rows, by which was chosen: too good."
        every.append(_choices(study, "validation", caption, tuple(FIGURES)))
    remarks = [*map(as_sentence, study.verdict.doubts), *study.remarks]
    known = html.paragraph("Nothing stood out.")
    if remarks:
        known = html.unordered(map(html.typeset, dict.fromkeys(remarks)))
    parts: dict[str, tuple[str, list[str]]] = {
        "choices": ("Choices", first),
        "trust": ("What to know before trusting this", [known]),
        "explore": ("Explore the map", [map_that_answers]),
        "reliability": ("Reliability", _diagrams(images)),
        "search": ("Search", [html.paragraph(search_in_words(study)), *_maps(study, images)]),
        "bins": ("Bins", [_bin_table(name, one) for name, one in bins.items()]),
        "figures": ("All figures", every),
        "data": ("Data", [_data_table(study)]),
        "glossary": ("How to read the figures", [html.unordered(_GLOSSARY)]),
    }
    foot = html.paragraph(
        f"Made by focalkern {version}, torch {torch.__version__} on {made}. table.csv and report.json beside this page "
        "have every figure in full. Methods: Guo et al. 2017 (arXiv 1706.04599), temperature scaling; Komisarenko & "
        "Kull 2024 (arXiv 2408.11598), focal temperature scaling."
    )
    sources = " and ".join(dict.fromkeys((study.validation.source, study.test.source)))
    header = "\n".join(
        (
            html.paragraph(f"{sources}; {made}; focalkern {version}", "quiet"),
            html.lead([html.typeset(text) for text in study.verdict.sentences()]),
            html.contents({anchor: heading for anchor, (heading, _) in parts.items()}),
        )
    )
    sections = [html.section(heading, *inside, anchor=anchor) for anchor, (heading, inside) in parts.items()]
    return html.page(title, lead=header, sections=sections, foot=foot, generator=f"focalkern {version}")


def _choices(study: Study, attribute: str, caption: str, names: Sequence[str]) -> str:
    """The table of the choices; ``names`` are those of its figures."""
    trust = study.trust if attribute == "test" else None
    rows = table_cells(study.choices, trust, attribute, plus_minus="\u00b1", names=names)
    marked = next((index for index, (choice, _) in enumerate(rows) if choice is study.chosen), None)
    body = [cells for _, cells in rows]
    if trust is not None:
        label, *cells = floor_cells(study.choices, study.chosen, trust, names=names)
        body.append([label.replace("the row ->", "the chosen row"), *cells])
    return html.table(["row", "gamma", "T", *map(_heading, names)], body, caption=caption, marked=marked)


def _heading(name: str) -> str:
    return FIGURES[name].replace("_\n", "_").replace("\n", " ")


def _diagrams(images: dict[str, bytes]) -> list[str]:
    reading = (
        "The height of a bar is the accuracy of the samples in the bin; the hatched part is the gap to their mean "
        "confidence. The grey band is where 95 % of perfectly calibrated classifiers with these confidences would "
        "have their accuracy: a bin outside of it is miscalibrated beyond chance (one in twenty is outside by "
        "chance). The whisker is the 95 % bootstrap interval of the accuracy."
    )
    pair = [
        html.figure(
            images[f"reliability_{when}.png"],
            alt=f"Reliability diagram {when} calibration; its numbers are in the table of bins below.",
            caption=f"{when.capitalize()} calibration.",
            wide=False,
        )
        for when in ("before", "after")
        if f"reliability_{when}.png" in images
    ]
    parts = [html.paragraph(reading), html.figures(*pair)]
    if "reliability_compared.png" in images:
        parts.append(
            html.figure(
                images["reliability_compared.png"],
                alt="Reliability diagrams of no calibration and of the rows of the table, side by side.",
                caption="The rows of the table, one by one.",
                tall=True,
            )
        )
    return parts


def _maps(study: Study, images: dict[str, bytes]) -> list[str]:
    grid = study.grid
    parts = []
    for criterion in grid.tables:
        words = {"ece": f"ECE ({grid.estimator}, {grid.n_bins} bins)", "nll": "NLL", "brier": "Brier score"}[criterion]
        if f"grid_{criterion}.png" in images:
            parts.append(
                html.figure(
                    images[f"grid_{criterion}.png"],
                    alt=f"Map of the {words} over gamma and T, with the best T of each gamma and the fitted line.",
                    caption=f"{words} {on_which(study)}, by gamma and T. The line is fitted to the best T of each "
                    "gamma (dots).",
                )
            )
    if "ridge.png" in images:
        parts.append(
            html.figure(
                images["ridge.png"],
                alt="Best temperature of each gamma against gamma, with fitted lines; the equations are in the legend.",
                caption="The ridge to scale: the best T of each gamma against gamma, by each criterion.",
            )
        )
    return parts


_GLOSSARY = (
    "All figures are fractions, never percent. Lower is better, but for accuracy, which scaling never changes and "
    "histogram binning may.",
    "ECE: the gap between accuracy and mean confidence, averaged over bins of the confidence. Its value depends on "
    "the bins: equal_width (15 ranges of the same width, the common one), equal_mass (the same number of samples in "
    "each), equal_mass_interp (interpolated quantiles, as in published code). Compare like with like.",
    "ECE is noisy and never negative: a perfectly calibrated classifier does not score 0 on a finite set.",
    "Classwise ECE: the same for the probability of every class, averaged over the classes.",
    "NLL (negative log-likelihood) and Brier score are proper: no classifier does better than the true probabilities. "
    "They judge sharpness too, so they and the ECE may prefer different calibrators.",
    "gamma = 0 is temperature scaling alone. gamma > 0 raises a confidence where it is high, gamma < 0 lowers it.",
)


def _difference_table(study: Study, names: Sequence[str]) -> str:
    trust = study.trust
    assert trust is not None
    shown = {name: _heading(name) for name in names}
    if all(choice.applied is None for choice in study.choices):
        del shown["accuracy"]  # all the same
    rows = []
    for index, choice in enumerate(study.choices):
        other = trust.against[index]
        if other is None or trust.names[index] is None or trust.names[other] is None:
            continue
        cells = [f"{choice.label}\nminus {study.choices[other].label}"]
        for name in shown:
            one = trust.difference(index, name)
            if one is None or not math.isfinite(one.low):
                cells.append("")
                continue
            ends = f"{one.low:+.4f} to {one.high:+.4f}".replace(" ", "\u00a0")
            cells.append(f"{one.estimate:+.4f}{trust.mark(index, name)}\n{ends}")
        rows.append(cells)
    caption = (
        f"Paired differences on the test rows with their {100 * trust.bootstrap.level:g} % intervals, one pair and "
        "one figure at a time. * and ! are differences whose interval excludes 0."
    )
    return html.table(["row", *shown.values()], rows, caption=caption)


def _bin_table(name: str, bins: metrics.ReliabilityBins) -> str:
    from focalkern import plots

    bands = plots.reliability_bands(bins)
    inside = bands.inside(bins).tolist()
    rows = []
    for index in range(bins.n_bins):
        count = int(bins.count[index])
        cells = [f"{float(bins.lower[index]):.3f}\u00a0\u2013\u00a0{float(bins.upper[index]):.3f}", f"{count:,}"]
        if count:
            accuracy, confidence = float(bins.accuracy[index]), float(bins.confidence[index])
            cells += [
                f"{confidence:.4f}",
                f"{accuracy:.4f}",
                # All right or all wrong: every resample says the same, which is no interval.
                f"{float(bands.lower[index]):.4f}\u00a0\u2013\u00a0{float(bands.upper[index]):.4f}"
                if 0 < accuracy < 1
                else "",
                f"{accuracy - confidence:+.4f}",
                f"{float(bands.calibrated_lower[index]):.4f}\u00a0\u2013\u00a0{float(bands.calibrated_upper[index]):.4f}",
                "" if inside[index] else ("under-confident" if accuracy > confidence else "over-confident"),
            ]
        else:
            cells += [""] * 6
        rows.append(cells)
    head = [
        "confidence",
        "samples",
        "mean confidence",
        "accuracy",
        "bootstrap, 95 %",
        "gap",
        "if calibrated, 95 %",
        "beyond chance",
    ]
    return html.table(
        head, rows, caption=f"{name[0].upper()}{name[1:]}, {bins.estimator}. An empty bin has no figures."
    )


def _data_table(study: Study) -> str:
    same = study.test is study.validation
    sets = {"validation and test" if same else "validation": study.validation}
    if not same:
        sets["test"] = study.test
    rows = []
    for role, one in sets.items():
        per_class = one.class_counts
        absent = int((per_class == 0).sum())
        bins = one.reliability((0.0, 1.0, None), study.grid.n_bins)
        hit, confidence = (float((bins.weight * of_bin).nansum()) for of_bin in (bins.accuracy, bins.confidence))
        rows.append(
            [
                role,
                one.source + (f"\n{one.part}" if one.part else ""),
                one.kind,
                f"{len(one):,}",
                str(one.n_classes),
                f"{int(per_class.min()):,} to {int(per_class.max()):,}"
                + (f"\n{absent} without rows" if absent else ""),
                f"{hit:.4f}",
                f"{confidence:.4f}",
            ]
        )
    head = ["rows that", "file", "input", "rows", "classes", "rows per class", "accuracy", "mean confidence"]
    return html.table(head, rows)
