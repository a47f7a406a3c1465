"""``focalkern demo``: train three small classifiers, calibrate them with the paper's grid, show the result."""

import argparse
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from focalkern import study as report
from focalkern._atomic import write_atomically
from focalkern.calibrators import DEFAULT_GAMMAS
from focalkern.cli._demo_data import LOSSES, demo_rows
from focalkern.cli._notes import print_note
from focalkern.cli._options import check_out_folder
from focalkern.cli._options import seed as seed_of
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train, calibrate and report on images that scikit-learn ships, in under two minutes",
        description="Trains a small network on scikit-learn's digits images three times, with cross-entropy, with the "
        "focal loss (gamma = 3) and with the inverse focal loss (gamma = -2), all through focalkern.focal_loss; "
        "calibrates each on validation rows, by cross-validation and with the paper's grid of gamma and T; prints what "
        "to use and the tables, and writes diagrams, maps and the logits. Nothing is downloaded.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-report"), metavar="DIR", help="where to write (default ./demo-report)"
    )
    parser.add_argument("--seed", type=seed_of, default=0, help="of the split and of the training (default 0)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import matplotlib  # noqa: F401  # extras whose absence is better said now than after the training; main says it
    import tabulate  # noqa: F401

    check_out_folder(arguments.out, "--out")
    sets = demo_rows(arguments.seed)
    for place, (name, (val, test, n_train)) in enumerate(sets.items()):
        if place == 0:
            parts = f"{n_train} training, {len(val)} validation, {len(test)} test rows"
            print(f"digits: {n_train + len(val) + len(test)} images of 8 x 8; {parts}\n")
        folder = arguments.out / name.replace(" ", "_").replace("-", "_")
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "logits.npz"
        study = report.run_study(
            replace(val, source=str(source)),
            replace(test, source=str(source)),
            gammas=DEFAULT_GAMMAS,
            temperatures=PAPER_TEMPERATURES,
        )
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
        report.write_report(study, folder, document)
        heading = f"{name} (gamma = {LOSSES[name]:g})"
        print(f"{heading}\n{'=' * len(heading)}")
        print(study.verdict)
        print()
        print(study.table())
        print()
        for remark in (*study.verdict.notes(), *study.remarks):
            print_note(remark)
        print()
    print(
        f"Chosen on the {len(val)} validation rows, measured on the {len(test)} test rows. -> is what focalkern "
        f"calibrate\nwould save; the ECE-optimal rows are the paper's, from {len(DEFAULT_GAMMAS)} gammas x "
        f"{len(PAPER_TEMPERATURES)} temperatures.\n"
        f"Diagrams, maps, tables and logits: {arguments.out}\n"
        f"Next: focalkern calibrate {arguments.out / 'cross_entropy' / 'logits.npz'} --out calibrator.json"
    )
    return 0
