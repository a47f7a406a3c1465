"""The page of a study: one file of HTML with its tables, diagrams and maps, and the same one by one."""

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from focalkern import metrics
from focalkern._atomic import write_atomically
from focalkern.study import html
from focalkern.study.pictures import draw_all, shown_bins
from focalkern.study.record import to_csv
from focalkern.study.result import Study
from focalkern.study.rows import FIGURES, reliability
from focalkern.study.streamed import StreamedSet
from focalkern.study.table import figure_in_print, floor_cells, legend, table_cells
from focalkern.study.verdict import name_of
from focalkern.study.words import on_which, search_in_words, short_name

__all__ = ["write_report"]


def write_report(
    study: Study, folder: Path, document: dict[str, Any], *, title: str = "Calibration report"
) -> list[Path]:
    """A page with everything, and its diagrams, maps and tables one by one.

    Args:
        study: what :func:`run_study` returned.
        folder: created if it is not there; files of the same names are replaced, each in one step.
        document: what goes into ``report.json``.
        title: heading of the page.

    Returns:
        The files, in the order in which they were written; the page is ``report.html``.
    """
    bins = shown_bins(study)
    images = draw_all(study, bins)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "table.csv": to_csv(study).encode(),
        "report.json": (json.dumps(document, indent=2, allow_nan=False) + "\n").encode(),
        **images,
        "report.html": make_page(study, title, str(document["focalkern"]), images, bins),
    }
    for name, data in files.items():
        write_atomically(folder / name, data)
    return [folder / name for name in files]


def make_page(
    study: Study, title: str, version: str, images: dict[str, bytes], bins: dict[str, metrics.ReliabilityBins]
) -> bytes:
    """The study as a page of HTML with the images inside."""
    same = study.report is study.selection
    reported = "on the rows that chose" if same else f"on the {name_of(study.report)}, which did not choose"
    grid = study.grid
    estimator = f"{grid.estimator}, {grid.n_bins} bins"

    if study.chosen is None or study.chosen.report is None:
        lead = "Nothing was chosen: the criterion is finite nowhere on the grid."
    else:
        was, now = study.choices[0].report, study.chosen.report
        assert was is not None
        ece = f"ece_{grid.estimator}"
        changes = ", ".join(
            f"{words} {figure_in_print(was[name])} \u2192 {figure_in_print(now[name])}"
            for words, name in ((f"ECE ({grid.estimator})", ece), ("NLL", "nll"), ("Brier score", "brier"))
        )
        lead = f"Chosen: {short_name(study.chosen)} ({study.chosen.label}). {changes}, {reported}."

    names = [heading.replace("_\n", "_").replace("\n", " ") for heading in FIGURES.values()]
    head = ["", "gamma", "T", *names]

    def choices(attribute: str, caption: str) -> str:
        trust = study.trust if attribute == "report" else None
        rows = table_cells(study.choices, trust, attribute, plus_minus="\u00b1")
        marked = next((index for index, (choice, _) in enumerate(rows) if choice is study.chosen), None)
        body = [cells for _, cells in rows]
        if trust is not None:
            label, *cells = floor_cells(study.choices, study.chosen, trust)
            body.append([label.replace("the row ->", "the chosen row"), *cells])
        return html.table(head, body, caption=caption, marked=marked)

    tables = [choices("report", f"Figures {reported}. The row with the shade is the one chosen.")]
    if study.trust is not None:
        tables.append(html.paragraph(legend(study.trust, plus_minus="\u00b1"), "quiet"))
        tables.append(_difference_table(study, names))
    if not same:
        tables.append(choices("selection", f"Figures on the {name_of(study.selection)}, which chose: too good."))

    def image(name: str, alt: str, caption: str, *, wide: bool = True) -> list[str]:
        return [html.figure(images[name], alt=alt, caption=caption, wide=wide)] if name in images else []

    reading = (
        "The height of a bar is the accuracy of the samples in the bin; the hatched part is the gap to their mean "
        "confidence. The grey band is where 95 % of perfectly calibrated classifiers with these confidences would "
        "have their accuracy: a bin outside of it is miscalibrated beyond chance (one in twenty is outside by "
        "chance). The whisker is the 95 % bootstrap interval of the accuracy."
    )
    diagrams = [
        html.paragraph(reading),
        html.figures(
            *image(
                "reliability_before.png",
                "Reliability diagram before calibration; its numbers are in the table of bins below.",
                "Before calibration.",
                wide=False,
            ),
            *image(
                "reliability_after.png",
                "Reliability diagram after calibration; its numbers are in the table of bins below.",
                "After calibration.",
                wide=False,
            ),
        ),
        *image(
            "reliability_compared.png",
            "Reliability diagrams of no calibration, temperature scaling and focal temperature scaling, side by side.",
            "The same, beside temperature scaling alone.",
        ),
    ]
    maps = [
        part
        for criterion in grid.tables
        for part in image(
            f"grid_{criterion}.png",
            f"Map of the {criterion.upper()} over gamma and T, with the best T of each gamma and the fitted line.",
            f"{'NLL' if criterion == 'nll' else f'ECE ({estimator})'} {on_which(study)}, by gamma and T. "
            "The line is fitted to the best T of each gamma (dots).",
        )
    ]
    maps += image(
        "ridge.png",
        "Best temperature of each gamma against gamma, with fitted lines; the equations are in the legend.",
        "The ridge to scale: the best T of each gamma against gamma, by both criteria.",
    )
    sections = [
        html.section("Choices", *tables),
        html.section("What to know before trusting this", html.unordered(study.remarks))
        if study.remarks
        else html.section("What to know before trusting this", html.paragraph("Nothing stood out.")),
        html.section("Reliability", *diagrams),
        html.section("Search", html.paragraph(search_in_words(study)), *maps),
        html.section("Bins", *(_bin_table(name, one) for name, one in bins.items())),
        html.section("Data", _data_table(study)),
        html.section("How to read the figures", html.unordered(_GLOSSARY)),
    ]
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    software = f"focalkern {version}, torch {torch.__version__}"
    foot = html.paragraph(
        f"Made by {software} on {made}. table.csv and report.json beside this page have every figure in full. Methods: "
        "Guo et al. 2017 (arXiv 1706.04599), temperature scaling; Komisarenko & Kull 2024 (arXiv 2408.11598), focal "
        "temperature scaling."
    )
    sources = " and ".join(dict.fromkeys((study.selection.source, study.report.source)))
    header = html.paragraph(f"{sources}; {made}; focalkern {version}", "quiet") + html.paragraph(lead, "lead")
    return html.page(title, lead=header, sections=sections, foot=foot, generator=f"focalkern {version}")


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


def _difference_table(study: Study, names: list[str]) -> str:
    trust = study.trust
    assert trust is not None
    shown = dict(zip(FIGURES, names, strict=True))
    if all(choice.binning is None for choice in study.choices):
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
        f"Paired differences on the reported rows with their {100 * trust.bootstrap.level:g} % intervals, one pair and "
        "one figure at a time. * and ! are differences whose interval excludes 0."
    )
    return html.table(["", *shown.values()], rows, caption=caption)


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
    same = study.report is study.selection
    sets = {"chose and report" if same else "chose": study.selection}
    if not same:
        sets["report"] = study.report
    rows = []
    for role, one in sets.items():
        if isinstance(one, StreamedSet):
            per_class = one.class_counts
        else:
            per_class = torch.bincount(one.labels, minlength=one.n_classes)
        absent = int((per_class == 0).sum())
        bins = reliability(one, 0.0, 1.0, study.grid.n_bins)
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
