"""``focalkern demo``: train three small classifiers, calibrate them with the paper's grid, show the result."""

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern import study as report
from focalkern._atomic import write_atomically
from focalkern.calibrators import DEFAULT_GAMMAS
from focalkern.cli.calibrate import seed as seed_of
from focalkern.files import InputError, LogitSet
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES
from focalkern.ops.focal_loss import focal_loss

__all__ = ["add_parser"]

_LOSSES = {
    "cross-entropy": 0.0,
    "focal loss": 3.0,
    "inverse focal loss": -2.0,
}
_EPOCHS = 60
_BATCH = 32


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
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            "the demo's images come with scikit-learn, which is missing: pip install scikit-learn"
        ) from error
    import matplotlib  # noqa: F401  # extras whose absence is better said now than after the training; main says it
    import tabulate  # noqa: F401

    if arguments.out.exists() and not arguments.out.is_dir():
        raise InputError(f"{arguments.out}: expected a folder for --out, found a file")
    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.float32).flatten(1) / 16
    labels = torch.from_numpy(digits.target).to(torch.int64)
    # A third each: small for training, so that the networks make some mistakes; the others as large as can be.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(arguments.seed))
    train, val, test = order.tensor_split(3)
    print(
        f"digits: {len(labels)} images of 8 x 8; {len(train)} training, {len(val)} validation, {len(test)} test rows\n"
    )
    logits = _train_all(images, labels, train, arguments.seed)
    for name, all_logits in logits.items():
        folder = arguments.out / name.replace(" ", "_").replace("-", "_")
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "logits.npz"
        study = report.run_study(
            LogitSet(all_logits[val], labels[val], "logits", "val", str(source)),
            LogitSet(all_logits[test], labels[test], "logits", "test", str(source)),
            gammas=DEFAULT_GAMMAS,
            temperatures=PAPER_TEMPERATURES,
        )
        arrays = io.BytesIO()
        np.savez_compressed(
            arrays,
            val_logits=all_logits[val].numpy(),
            val_labels=labels[val].numpy(),
            test_logits=all_logits[test].numpy(),
            test_labels=labels[test].numpy(),
        )
        write_atomically(source, arrays.getvalue())
        document = report.to_json(study, more={"loss": name, "seed": arguments.seed})
        report.write_report(study, folder, document)
        heading = f"{name} (gamma = {_LOSSES[name]:g})"
        print(f"{heading}\n{'=' * len(heading)}")
        print(study.verdict)
        print()
        print(study.table())
        print()
        for remark in (*map(report.as_sentence, study.verdict.doubts), *study.remarks):
            print(f"Note: {remark}")
        print()
    print(
        f"Chosen on the {len(val)} validation rows, reported on the {len(test)} test rows. -> is what focalkern "
        f"calibrate\nwould save; the ECE-optimal rows are the paper's, from {len(DEFAULT_GAMMAS)} gammas x "
        f"{len(PAPER_TEMPERATURES)} temperatures.\n"
        f"Diagrams, maps, tables and logits: {arguments.out}\n"
        f"Next: focalkern calibrate {arguments.out / 'cross_entropy' / 'logits.npz'} --out calibrator.json"
    )
    return 0


def _train_all(images: Tensor, labels: Tensor, train: Tensor, seed: int) -> dict[str, Tensor]:
    """The logits [N, C] of all images, by the name of the loss."""
    from tqdm import tqdm

    logits = {}
    with tqdm(total=len(_LOSSES) * _EPOCHS, unit="epoch", leave=False, disable=None) as bar:
        for name, gamma in _LOSSES.items():
            bar.set_description(f"training with {name}")
            logits[name] = _train(images, labels, train, gamma, seed, bar)
    return logits


def _train(images: Tensor, labels: Tensor, train: Tensor, gamma: float, seed: int, bar: Any) -> Tensor:
    # The same start and the same order of batches for every loss, and none of the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = torch.nn.Sequential(
            torch.nn.Linear(images.shape[1], 128), torch.nn.ReLU(), torch.nn.Linear(128, int(labels.max()) + 1)
        )
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-4)
        for _ in range(_EPOCHS):
            for batch in train[torch.randperm(len(train))].split(_BATCH):
                optimizer.zero_grad(set_to_none=True)
                focal_loss(network(images[batch]), labels[batch], gamma).backward()
                optimizer.step()
            bar.update()
        with torch.no_grad():
            return network(images)
