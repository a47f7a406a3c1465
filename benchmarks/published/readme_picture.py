"""python -m benchmarks.published.readme_picture: the README's reliability diagrams, before and after calibration.

Draws the recorded bins, for light and for dark pages, wide and narrow, into docs/_static. --logits DIR first records
the bins again: of two published networks, one over-confident and one under-confident, calibrated by AutoCalibrator on
validation rows (a random half where a file has one set only), on the other rows.
"""

import argparse
import csv
import datetime
import itertools
from pathlib import Path

import focalkern as fk
from benchmarks.harness import RESULTS, commit
from benchmarks.studies.networks import two_sets

PICTURES = Path(__file__).parents[2] / "docs" / "_static"
NETWORKS = {
    "cifar100_densenet_bc100_probs": "CIFAR-100, DenseNet: over-confident",
    "20news_probs": "20 Newsgroups: under-confident",
}
# Okabe & Ito; markers and lines differ too.
STYLES = {"before": ("#D55E00", "s", (0, (4, 2))), "after": ("#0072B2", "o", "-")}
DARK = {"before": "#E69F00", "after": "#56B4E9"}
FEWEST = 20  # smallest count of a bin that is drawn: smaller bins are noise


def record(folder: Path, path: Path) -> None:
    rows = []
    for name in NETWORKS:
        sets = two_sets(folder / f"{name}.npz")
        assert sets is not None, name
        validation, test = sets
        probs = test.input if test.kind == "probs" else test.input.softmax(-1)
        calibrator = fk.AutoCalibrator(input_kind=validation.kind).fit(validation.input, validation.labels)
        for when, found in (("before", probs), ("after", calibrator.predict_proba(test.input))):
            ece = float(fk.metrics.expected_calibration_error(found, test.labels))
            bins = fk.metrics.reliability_bins(found, test.labels)
            for count, confidence, accuracy in zip(bins.count, bins.confidence, bins.accuracy, strict=True):
                rows.append(
                    {
                        "file": name,
                        "when": when,
                        "calibrator": "none" if when == "before" else calibrator.chosen_,
                        "ece_equal_width": f"{ece:.6g}",
                        "count": int(count),
                        "confidence": f"{float(confidence):.6g}",
                        "accuracy": f"{float(accuracy):.6g}",
                        "commit": commit(),
                    }
                )
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(recorded: Path, folder: Path) -> list[Path]:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with recorded.open() as stream:
        rows = list(csv.DictReader(stream))
    written = []
    inks = (("light", "#1f2328"), ("dark", "#f0f6fc"))
    shapes = (("", (10, 4.9), (1, 2)), ("narrow_", (4.9, 9.4), (2, 1)))
    for (mode, ink), (shape, size, grid) in itertools.product(inks, shapes):
        settings = {"svg.hashsalt": "focalkern", "font.size": 13, "text.color": ink, "axes.labelcolor": ink}
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=size, layout="constrained")
            figure.get_layout_engine().set(h_pad=0.12, w_pad=0.1)
            FigureCanvasSVG(figure)
            figure.patch.set_alpha(0)
            for axis, (name, title) in zip(figure.subplots(*grid), NETWORKS.items(), strict=True):
                axis.patch.set_alpha(0)
                axis.plot([0, 1], [0, 1], color=ink, alpha=0.5, linewidth=1)
                for when, (colour, marker, line) in STYLES.items():
                    bins = [row for row in rows if (row["file"], row["when"]) == (name, when)]
                    shown = [row for row in bins if int(row["count"]) >= FEWEST]
                    axis.plot(
                        [float(row["confidence"]) for row in shown],
                        [float(row["accuracy"]) for row in shown],
                        color=DARK[when] if mode == "dark" else colour,
                        marker=marker,
                        linestyle=line,
                        linewidth=2,
                        markersize=7,
                        label=f"{when}: ECE {float(bins[0]['ece_equal_width']):.4f}",
                    )
                axis.set_title(title, fontsize=14, color=ink)
                axis.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="accuracy", aspect="equal")
                axis.tick_params(colors=ink)
                axis.spines[:].set_color(ink)
                axis.spines[["top", "right"]].set_visible(False)
                place = "upper left" if "over" in title else "lower right"
                axis.legend(frameon=False, loc=place, labelcolor=ink)
            path = folder / f"before_after_{shape}{mode}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            written.append(path)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.readme_picture", description=__doc__)
    parser.add_argument("--logits", type=Path, metavar="DIR", help="record the bins of these networks first")
    arguments = parser.parse_args()
    if arguments.logits:
        record(arguments.logits, RESULTS / f"reliability_{datetime.date.today().isoformat()}.csv")
    print("\n".join(str(path) for path in draw(sorted(RESULTS.glob("reliability_*.csv"))[-1], PICTURES)))


if __name__ == "__main__":
    main()
