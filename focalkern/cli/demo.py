"""``focalkern demo``: train three small classifiers, calibrate them, and write reports."""

import argparse
import io
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from focalkern import study as report
from focalkern._atomic import write_atomically
from focalkern.calibrators import DEFAULT_GAMMAS
from focalkern.cli._demo_data import LOSSES, demo_rows
from focalkern.cli._notes import print_wrapped, with_options
from focalkern.cli._options import check_out_folder, path_of
from focalkern.cli._options import seed as seed_of
from focalkern.files import LogitSet
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES
from focalkern.study import Study
from focalkern.study.report import html
from focalkern.study.report.tables import legend_of
from focalkern.study.scores import confidences

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train, calibrate and report on images that scikit-learn ships, in under two minutes",
        description="Trains a small network on scikit-learn's digits images with three losses: cross-entropy, and "
        "the focal loss with gamma = 3 and with gamma = 1. The training is long enough to make cross-entropy "
        "over-confident. Then calibrates each network on validation rows, by cross-validation and with the paper's "
        "grid of gamma and T. Prints the recommendations and the tables, and writes index.html, a report for each "
        "network, and the logits. Downloads nothing.",
    )
    parser.add_argument(
        "--out",
        type=path_of,
        default=Path("demo-report"),
        metavar="DIR",
        help="folder for the results (default ./demo-report)",
    )
    parser.add_argument("--seed", type=seed_of, default=0, help="seed of the split and of the training (default 0)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import matplotlib  # noqa: F401  # extras whose absence is better said now than after the training; main says it
    import tabulate  # noqa: F401

    check_out_folder(arguments.out, "--out")
    studies: dict[str, Study] = {}
    data = ""
    for name, (val, test, n_train) in demo_rows(arguments.seed).items():
        if not data:
            parts = f"{n_train} training, {len(val)} validation, {len(test)} test rows"
            data = f"digits: {n_train + len(val) + len(test)} images of 8 x 8; {parts}"
            print(f"{data}\n")
        study = studies[name] = _calibrate(arguments, name, val, test)
        heading = name if "gamma" in name else f"{name} (gamma = {LOSSES[name]:g})"
        print(f"{heading}\n{'=' * len(heading)}")
        print(study.verdict)
        print()
        print(study.table(legend=False))
        print()
    intervals = next(iter(studies.values())).intervals
    if intervals is not None:
        print_wrapped(legend_of(intervals))
        print()
    found, commands = _found(studies), _commands(arguments.out, next(iter(studies)))
    for sentence in found:
        print_wrapped(sentence)
    page = arguments.out / "index.html"
    write_atomically(page, _index(arguments.out, data, studies, found, commands))
    print(f"\nReport: {page}\nNext:")
    print("\n".join(f"  {command}" for command in commands))
    return 0


def _calibrate(arguments: argparse.Namespace, name: str, val: LogitSet, test: LogitSet) -> Study:
    """The study of a network; writes its logits and its report into a folder."""
    folder = arguments.out / _folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "logits.npz"
    compared = report.run_study(
        replace(val, source=str(source)),
        replace(test, source=str(source)),
        gammas=DEFAULT_GAMMAS,
        temperatures=PAPER_TEMPERATURES,
    )
    study = with_options(compared)
    arrays = io.BytesIO()
    np.savez_compressed(
        arrays,
        val_logits=val.input.numpy(),
        val_labels=val.labels.numpy(),
        test_logits=test.input.numpy(),
        test_labels=test.labels.numpy(),
    )
    write_atomically(source, arrays.getvalue())
    document = report.to_json(study, more={"loss": name, "seed": arguments.seed})
    command = shlex.join(["focalkern", "apply", str(folder / "calibrator.json"), str(source), "--out", "probs.npz"])
    report.write_report(study, folder, document, title=f"Calibration report: {name}", commands=[command])
    return study


def _folder(name: str) -> str:
    return re.sub(r"\W+", "_", name.replace("gamma = ", ""))


def _scores(study: Study) -> tuple[dict[str, float], dict[str, float]]:
    """Scores on the test rows, before and after calibration."""
    before = study.results[0].test
    after = before if study.chosen is None else study.chosen.test
    assert before is not None
    assert after is not None
    return before, after


def _found(studies: dict[str, Study]) -> list[str]:
    """Sentences that name the best network before and after calibration, with the reason."""
    said = []
    for place, when in enumerate(("before", "after")):
        best = min(studies, key=lambda name: _scores(studies[name])[place]["nll"])
        scores = _scores(studies[best])[place]
        said.append(
            f"Lowest test NLL {when} calibration: {best}, {scores['nll']:.4f} (ECE {scores['ece_equal_width']:.4f})."
        )
    gaps = "; ".join(f"{name}, {_overconfidence(study):+.4f}" for name, study in studies.items())
    said.append(
        f"Mean confidence minus accuracy before calibration: {gaps}. A long training makes cross-entropy "
        "over-confident; a focal loss lowers the confidence, the more the larger gamma is."
    )
    return said


def _overconfidence(study: Study) -> float:
    """Mean confidence minus accuracy on the test rows, before calibration."""
    uncalibrated = study.results[0]
    assert uncalibrated.test is not None
    confidence, _ = confidences(study.test, uncalibrated.calibrator, n_bins=15)  # in memory, where it needs no bins
    return float(confidence.mean()) - uncalibrated.test["accuracy"]


def _commands(out: Path, first: str) -> list[str]:
    source = out / _folder(first) / "logits.npz"
    return [shlex.join(["focalkern", "calibrate", str(source), "--out", "calibrator.json", "--report", "report"])]


def _index(out: Path, data: str, studies: dict[str, Study], found: list[str], commands: list[str]) -> bytes:
    """The index page of all networks, with links to their reports."""
    head = ["network", "accuracy", "NLL before", "NLL after", "ECE before", "ECE after", "calibrator"]
    rows, reports = [], []
    for name, study in studies.items():
        before, after = _scores(study)
        cells = [before["accuracy"], before["nll"], after["nll"], before["ece_equal_width"], after["ece_equal_width"]]
        label = "none" if study.chosen is None else study.chosen.label
        rows.append([name, *(f"{value:.4f}" for value in cells), label])
        folder = _folder(name)
        image = (out / folder / "reliability_before.png").read_bytes()
        reports.append((name, f"{folder}/report.html", image, study.verdict.sentences()[0]))
    caption = "Metrics on the test rows, before and after calibration; the cross-validation chooses the calibrator."
    return html.render_page(
        "demo.html.j2",
        title="focalkern demo",
        data=data,
        found=found,
        networks=html.Table(head, rows, caption),
        reports=reports,
        commands=commands,
    )
