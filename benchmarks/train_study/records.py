"""Reads and writes the files of a run."""

import csv
import datetime
import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import focalkern as fk
from benchmarks.harness import commit, device_name
from focalkern._atomic import write_atomically


@dataclass(frozen=True)
class Run:
    """A complete run in its folder."""

    folder: Path
    loss: str
    seed: int
    about: Mapping[str, Any]

    @cached_property
    def epochs(self) -> list[dict[str, float]]:
        return read_csv(self.folder / "epochs.csv")

    @cached_property
    def bins(self) -> list[dict[str, float]]:
        return read_csv(self.folder / "bins.csv")

    @cached_property
    def logits(self) -> dict[str, Tensor]:
        """val_logits, val_labels, test_logits, test_labels."""
        return self._arrays("logits.npz")

    @cached_property
    def training_samples(self) -> dict[str, Tensor]:
        """learned_epoch (0: never), top_logit and label_logit of every training sample."""
        return self._arrays("training_samples.npz")

    @cached_property
    def out_of_distribution(self) -> dict[str, Tensor]:
        """Logits by the name of the set."""
        return self._arrays("out_of_distribution.npz")

    def _arrays(self, name: str) -> dict[str, Tensor]:
        with np.load(self.folder / name, allow_pickle=False) as file:
            return {key: torch.from_numpy(file[key]) for key in file.files}


def folder_of(out: Path, loss: str, seed: int) -> Path:
    return out / loss / f"seed-{seed}"


def is_complete(folder: Path) -> bool:
    return (folder / "run.json").exists()


def read_runs(out: Path, rank: Callable[[str], Any]) -> list[Run]:
    """All complete runs, by the rank of the loss and by seed."""
    found = []
    for path in out.glob("*/seed-*/run.json"):
        about = json.loads(path.read_text())
        found.append(Run(path.parent, about["loss"], about["seed"], about))
    return sorted(found, key=lambda run: (rank(run.loss), run.seed))


def about(loss: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Versions and machine of the run."""
    return {
        "loss": loss,
        "seed": seed,
        "device": device_name(device.type),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "focalkern": fk.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def test_ece(logits: Tensor, labels: Tensor, *, temperature: float, prefix: str) -> dict[str, float]:
    """ECE by every estimator at one temperature, correctness by the argmax of the logits."""
    confidence = (logits.double() / temperature).softmax(-1).amax(-1)
    correct = logits.argmax(-1) == labels
    return {
        f"{prefix}_{estimator}": float(
            fk.metrics.expected_calibration_error(confidence=confidence, correct=correct, estimator=estimator)
        )
        for estimator in fk.metrics.ESTIMATORS
    }


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], digits: int = 6) -> None:
    """Writes rows with the same keys, and numbers with six digits, more than training reproduces on another machine."""
    rows = list(rows)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: f"{value:.{digits}g}" if isinstance(value, float) else value for key, value in row.items()}
        )
    write_atomically(path, stream.getvalue().encode())


def read_csv(path: Path) -> list[dict[str, Any]]:
    """The values of a row, as numbers where the text is a number."""
    with path.open(newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
