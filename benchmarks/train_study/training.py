"""One run: a network trained with one loss from one seed, recorded every epoch, resumable after every epoch.

A run does not depend on interruptions: the seed, the epoch's number and the checkpoint of the epoch before determine an
epoch. On the same machine with the same number of threads, results are bitwise the same."""

import contextlib
import fcntl
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import focalkern as fk
from benchmarks.train_study import data, networks, objectives, records
from benchmarks.train_study.errors import SettingsError, StudyError
from focalkern._atomic import write_atomically

# The learning rate is divided by 10 after 150 and after 250 of 350 epochs (Mukhoti et al. 2020, appendix), scaled.
_DROPS = (150 / 350, 250 / 350)
_EVALUATION_BATCH = 1000


class DivergedError(RuntimeError):
    """A run whose logits are not finite any more."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run except loss and seed."""

    data: str  # fingerprint
    network: str
    width: int
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    val_fraction: float
    train_size: int | None
    augment: bool
    device: str

    def __post_init__(self) -> None:
        for name, good, what in (
            ("epochs", self.epochs >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 2, "at least 2"),
            ("width", self.width >= 1, "at least 1"),
            ("lr", 0 < self.lr < math.inf, "above 0 and finite"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "at least 0 and finite"),
            ("val_fraction", 0 < self.val_fraction < 1, "between 0 and 1"),
            ("train_size", self.train_size is None or self.train_size >= 2, "at least 2"),
            ("device", self.device != "cuda" or torch.cuda.is_available(), "one that torch finds"),
        ):
            if not good:
                raise StudyError(f"{name} must be {what}, got {getattr(self, name)}")

    def learning_rate(self, epoch: int) -> float:
        """The learning rate of an epoch; the first epoch is 1."""
        return self.lr * 0.1 ** sum(epoch > round(drop * self.epochs) for drop in _DROPS)

    def claim(self, out: Path) -> None:
        """Write the settings into the folder, or compare them with the existing ones.

        Raises:
            SettingsError: they differ.
        """
        path = out / "settings.json"
        if path.exists():
            before = json.loads(path.read_text())
            now = asdict(self)
            differing = [f"{key} {before.get(key)!r}, now {now[key]!r}" for key in now if before.get(key) != now[key]]
            if differing:
                raise SettingsError(
                    f"{out} holds a study with other settings ({'; '.join(differing)}): choose another --out"
                )
        else:
            out.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (json.dumps(asdict(self), indent=2) + "\n").encode())


def run(
    dataset: data.Dataset,
    settings: Settings,
    loss_name: str,
    seed: int,
    folder: Path,
    on_epoch: Callable[[int, dict[str, float]], None] = lambda epoch, row: None,
) -> bool:
    """Train or resume training, and write the run's result files into ``folder``.

    ``on_epoch`` is called after every epoch, once it is saved; after a resume, first with the last saved epoch.

    Returns:
        False if another process is training this run.

    Raises:
        DivergedError: the logits are not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder) as mine:
        if not mine:
            return False
        if not records.is_complete(folder):
            _Run(dataset, settings, loss_name, seed, folder).train(on_epoch)
        return True


class _Run:
    def __init__(self, dataset: data.Dataset, settings: Settings, loss_name: str, seed: int, folder: Path) -> None:
        self.dataset, self.settings, self.seed, self.folder = dataset, settings, seed, folder
        self.device = torch.device(settings.device)
        self.parts = data.split(
            dataset,
            seed=seed,
            val_fraction=settings.val_fraction,
            train_size=settings.train_size,
            device=self.device,
        )
        torch.manual_seed(seed)  # the same weights for every loss
        self.network = networks.build(settings.network, dataset, settings.width).to(self.device)
        self.loss = objectives.build(loss_name).to(self.device)
        self.optimizer = torch.optim.SGD(
            self.network.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        n = len(self.parts.train_labels)
        self.learned = torch.zeros(n, dtype=torch.int64, device=self.device)  # epoch of the first correct one; 0: none
        self.epochs: list[dict[str, float]] = []
        self.bins: list[dict[str, float]] = []
        self.about = records.about(loss_name, seed, self.device)
        self.checkpoint = folder / "checkpoint.pt"

    def train(self, on_epoch: Callable[[int, dict[str, float]], None]) -> None:
        if self.checkpoint.exists():
            self._load()
            on_epoch(len(self.epochs), self.epochs[-1])
        for epoch in range(len(self.epochs) + 1, self.settings.epochs + 1):
            row = {"epoch": epoch, "learning_rate": self.settings.learning_rate(epoch), **self._train_epoch(epoch)}
            val_logits, test_logits = (self._logits(inputs) for inputs in self._held_out())
            row.update(self._follow(val_logits, test_logits))
            self.epochs.append(row)
            self.bins += self._follow_bins(epoch, val_logits)
            if isinstance(self.loss, fk.AdaFocalLoss):
                self.loss.update(val_logits, self.parts.val_labels)
            self._save()
            on_epoch(epoch, row)
        self._finish()

    # -- one epoch -----------------------------------------------------------------------------------------------------

    def _train_epoch(self, epoch: int) -> dict[str, float]:
        """Loss, NLL and error of the training samples during the epoch, so that no extra pass is needed."""
        parts, n = self.parts, len(self.parts.train_labels)
        # Both start anew in every epoch, so there is no state to restore.
        seed = 1_000_003 * (self.seed + 1) + epoch
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        augmenting = torch.Generator(self.device).manual_seed(seed)
        order = torch.randperm(n, generator=generator).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(epoch)
        self.network.train()
        met, losses = [], []
        for batch in order.split(self.settings.batch_size):
            inputs = parts.train_inputs[batch]
            if self.settings.augment:
                inputs = data.augment(inputs, augmenting)
            self.optimizer.zero_grad(set_to_none=True)
            logits = self.network(parts.prepare(inputs))
            loss = self.loss(logits, parts.train_labels[batch])
            loss.backward()
            self.optimizer.step()
            met.append(logits.detach())
            losses.append(loss.detach() * len(batch))
        logits, labels = torch.cat(met).float(), parts.train_labels[order]
        right = torch.zeros_like(self.learned).index_copy_(0, order, (logits.argmax(-1) == labels).long())
        self.learned = torch.where((self.learned == 0) & (right == 1), epoch, self.learned)
        return {
            "train_loss": float(torch.stack(losses).double().sum()) / n,
            "train_nll": float(F.cross_entropy(logits, labels)),
            "train_error": 1 - float(right.double().mean()),
        }

    def _held_out(self) -> tuple[Tensor, Tensor]:
        return self.parts.val_inputs, self.parts.test_inputs

    @torch.no_grad()
    def _logits(self, inputs: Tensor, *, prepared: bool = False) -> Tensor:
        self.network.eval()
        logits = torch.cat(
            [
                self.network(batch if prepared else self.parts.prepare(batch))
                for batch in inputs.split(_EVALUATION_BATCH)
            ]
        ).float()
        if not bool(logits.isfinite().all()):
            raise DivergedError(f"{self.folder.name}: the logits are not finite after {len(self.epochs) + 1} epochs")
        return logits

    @torch.no_grad()
    def _follow(self, val_logits: Tensor, test_logits: Tensor) -> dict[str, float]:
        parts = self.parts
        row: dict[str, float] = {}
        for name, logits, labels in (
            ("val", val_logits, parts.val_labels),
            ("test", test_logits, parts.test_labels),
        ):
            row[f"{name}_loss"] = float(self.loss(logits, labels))
            row[f"{name}_nll"] = float(F.cross_entropy(logits.double(), labels))
            row[f"{name}_error"] = 1 - float((logits.argmax(-1) == labels).double().mean())
        log_probs = test_logits.double().log_softmax(-1)
        probs = log_probs.exp()
        nll = -log_probs.gather(-1, parts.test_labels[:, None]).squeeze(-1)
        entropy = -(probs * log_probs.clamp(min=-1e4)).sum(-1)  # 0 * -inf is 0 here
        correct = test_logits.argmax(-1) == parts.test_labels
        for name, values in (("nll", nll), ("entropy", entropy)):
            row[f"test_{name}_correct"] = float(values[correct].mean())
            row[f"test_{name}_incorrect"] = float(values[~correct].mean())
        row["test_entropy"] = float(entropy.mean())
        row["test_confidence"] = float(probs.amax(-1).mean())
        row["head_weight_norm"] = float(self.network.head.weight.double().norm())
        row.update(records.test_ece(test_logits, parts.test_labels, temperature=1.0, prefix="test_ece"))
        grid = fk.calibration_grid(val_logits, parts.val_labels, [0.0], fk.PAPER_TEMPERATURES, estimator="equal_width")
        for criterion in ("ece", "nll"):
            temperature = grid.best(criterion)[1]
            row[f"temperature_{criterion}"] = temperature
            prefix = f"test_ece_at_temperature_{criterion}"
            row.update(records.test_ece(test_logits, parts.test_labels, temperature=temperature, prefix=prefix))
        return row

    @torch.no_grad()
    def _follow_bins(self, epoch: int, val_logits: Tensor) -> list[dict[str, float]]:
        """The validation bins of AdaFocal, for every loss; gamma is the value used in this epoch."""
        bins = fk.metrics.reliability_bins(val_logits.softmax(-1), self.parts.val_labels, estimator="equal_mass_interp")
        n_bins = bins.n_bins
        gammas = self.loss.bin_gammas.tolist() if isinstance(self.loss, fk.AdaFocalLoss) else [float("nan")] * n_bins
        columns = (gammas, bins.lower, bins.upper, bins.count, bins.confidence, bins.accuracy, -bins.gap)
        names = ("gamma", "lower", "upper", "count", "confidence", "accuracy", "calibration_error")
        rows = zip(*(c if isinstance(c, list) else c.tolist() for c in columns), strict=True)
        return [{"epoch": epoch, "bin": i, **dict(zip(names, values, strict=True))} for i, values in enumerate(rows)]

    # -- files ---------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        stream = io.BytesIO()
        torch.save(
            {
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "loss": self.loss.state_dict(),
                "learned": self.learned,
                "records": json.dumps({"epochs": self.epochs, "bins": self.bins, "about": self.about}),
            },
            stream,
        )
        write_atomically(self.checkpoint, stream.getvalue())

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(self.checkpoint, map_location=self.device)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loss.load_state_dict(state["loss"])
        self.learned = state["learned"]
        found = json.loads(state["records"])
        self.epochs, self.bins, self.about = found["epochs"], found["bins"], found["about"]

    def _finish(self) -> None:
        parts = self.parts
        train_logits = self._logits(parts.train_inputs)
        val_logits, test_logits = (self._logits(inputs) for inputs in self._held_out())
        arrays = {
            "logits.npz": {
                "val_logits": val_logits,
                "val_labels": parts.val_labels,
                "test_logits": test_logits,
                "test_labels": parts.test_labels,
            },
            "training_samples.npz": {
                "learned_epoch": self.learned.to(torch.int32),
                "top_logit": train_logits.amax(-1),
                "label_logit": train_logits.gather(-1, parts.train_labels[:, None]).squeeze(-1),
            },
            "out_of_distribution.npz": {
                name: self._logits(inputs, prepared=True)
                for name, inputs in data.out_of_distribution(self.dataset, parts).items()
            },
        }
        for name, tensors in arrays.items():
            stream = io.BytesIO()
            np.savez_compressed(stream, **{key: tensor.cpu().numpy() for key, tensor in tensors.items()})
            write_atomically(self.folder / name, stream.getvalue())
        records.write_csv(self.folder / "epochs.csv", self.epochs)
        records.write_csv(self.folder / "bins.csv", self.bins)
        # Written last: a run with this file is complete.
        write_atomically(self.folder / "run.json", (json.dumps(self.about, indent=2) + "\n").encode())
        self.checkpoint.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Whether this process holds the lock of the folder; the system releases it even if the process is killed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
