"""The metrics compared with other libraries, on the same probabilities.

``python -m benchmarks.speed.metrics_peers --logits DIR`` goes through every .npz of a folder that has logits or
probabilities with labels, prints the agreements and differences, and writes them to benchmarks/results. Nothing is
timed here. The tests run the same comparisons on a network that they train themselves."""

import argparse
import csv
import datetime
import importlib
import importlib.metadata
import io
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

import focalkern
from benchmarks.harness import RESULTS, commit, why_absent
from benchmarks.speed.metrics_published import N_BINS, Comparison, published_code, relplot, uncertainty_calibration
from focalkern import metrics


def rows_on_an_edge(confidence: Tensor) -> int:
    """The number of rows that change their bin if the bins are closed on the other side, including rows such as 1 -
    2^-53."""
    place = confidence.double() * N_BINS
    return int(((place - place.round()).abs() < 1e-6).sum())


def torchmetrics(probs: Tensor, target: Tensor) -> Iterator[Comparison]:
    """float32, bins [k/M, (k + 1)/M), and an extra bin for confidences of exactly 1."""
    functional = importlib.import_module("torchmetrics.functional.classification")
    probs = probs.float()
    n, n_classes = probs.shape
    edge = rows_on_an_edge(probs.amax(-1))
    note = f"{edge} rows within 1e-6 of an edge or of 1, which is a bin of its own there" if edge else ""
    for norm, ours in (
        ("l1", metrics.expected_calibration_error),
        ("l2", metrics.rms_calibration_error),
        ("max", metrics.maximum_calibration_error),
    ):
        theirs = functional.multiclass_calibration_error(probs, target, num_classes=n_classes, n_bins=N_BINS, norm=norm)
        # The peer adds up to n float32 numbers; the rounding errors grow as sqrt(n). A row that moves takes its
        # residual from one bin to another.
        allowed = 1e-6 + n**0.5 * 2.0**-24 + (2 * edge / n if norm == "l1" else np.inf if edge else 0)
        yield Comparison(
            "torchmetrics",
            f"multiclass_calibration_error(norm={norm!r})",
            f"{ours.__name__}(probs)",
            float(theirs),
            float(ours(probs, target)),
            allowed,
            note,
        )
    score = functional.multiclass_accuracy(probs, target, num_classes=n_classes, average="micro")
    yield Comparison(
        "torchmetrics",
        "multiclass_accuracy(average='micro')",
        "accuracy(probs)",
        float(score),
        float(metrics.accuracy(probs, target)),
        1e-6,
    )


def netcal(probs: Tensor, target: Tensor) -> Iterator[Comparison]:
    """Bins [k/M, (k + 1)/M), the last one closed; confidences are clamped to [eps, 1 - eps]."""
    library = importlib.import_module("netcal.metrics")
    arrays = probs.double().numpy(), target.numpy()
    confidence = probs.double().amax(-1)
    edge = rows_on_an_edge(confidence[confidence < 1 - 1e-6])
    note = f"{edge} rows within 1e-6 of an inner edge" if edge else ""
    allowed = 1e-9 + 2 * edge / len(target)
    bins = metrics.reliability_bins(probs.double(), target)
    yield Comparison(
        "netcal",
        "ECE(15).measure",
        "expected_calibration_error(probs)",
        float(library.ECE(N_BINS).measure(*arrays)),
        float(metrics.expected_calibration_error(probs.double(), target)),
        allowed,
        note,
    )
    strict = np.inf if edge else 1e-9
    yield Comparison(
        "netcal",
        "MCE(15).measure",
        "maximum_calibration_error(probs)",
        float(library.MCE(N_BINS).measure(*arrays)),
        float(metrics.maximum_calibration_error(probs.double(), target)),
        strict,
        note,
    )
    yield Comparison(
        "netcal",
        "ACE(15).measure",
        "reliability_bins(probs).gap.abs().nanmean()",
        float(library.ACE(N_BINS).measure(*arrays)),
        float(bins.gap.abs().nanmean()),
        strict,
        note,
    )
    whole = len(target) - len(target) % N_BINS
    part = probs.double()[:whole], target[:whole]
    ties = whole - len(part[0].amax(-1).unique())
    yield Comparison(
        "netcal",
        f"ECE(15, equal_intervals=False).measure, {whole} rows",
        "expected_calibration_error(probs, estimator='equal_mass')",
        float(library.ECE(N_BINS, equal_intervals=False).measure(*(x.numpy() for x in part))),
        float(metrics.expected_calibration_error(*part, estimator="equal_mass")),
        1e-9 + 2 * ties / whole,
        f"{ties} rows tie with another" if ties else "",
    )


def sklearn(probs: Tensor, target: Tensor) -> Iterator[Comparison]:
    """Curves, not errors: the largest difference of their points is compared with 0."""
    calibration = importlib.import_module("sklearn.calibration")
    scores = importlib.import_module("sklearn.metrics")
    probs = probs.double()
    confidence, predicted = probs.max(-1)
    correct = predicted == target
    whole = len(target) - len(target) % N_BINS
    for strategy, estimator, n in (("uniform", "equal_width", len(target)), ("quantile", "equal_mass", whole)):
        ties = n - len(confidence[:n].unique()) if strategy == "quantile" else 0
        accuracy, mean = calibration.calibration_curve(
            correct[:n].numpy(), confidence[:n].numpy(), n_bins=N_BINS, strategy=strategy
        )
        bins = metrics.reliability_bins(
            confidence=confidence[:n], correct=correct[:n], n_bins=N_BINS, estimator=estimator
        )
        there = torch.from_numpy(np.stack([accuracy, mean]))
        here = torch.stack([bins.accuracy, bins.confidence])[:, bins.count > 0]
        same = here.shape == there.shape
        yield Comparison(
            "scikit-learn",
            f"calibration_curve(strategy={strategy!r}), {n} rows",
            f"reliability_bins(probs, estimator={estimator!r}): largest difference",
            0.0,
            float((here - there).abs().max()) if same else np.inf,
            np.inf if ties else 1e-9,
            f"{ties} rows tie with another" if ties else "",
        )
    labels = np.arange(probs.shape[1])
    if bool((probs.sum(-1) - 1).abs().max() < 1e-9):
        infinite = bool(metrics.nll(probs, target).isinf())
        yield Comparison(
            "scikit-learn",
            "log_loss",
            "nll(probs)",
            float(scores.log_loss(target.numpy(), probs.numpy(), labels=labels)),
            float(metrics.nll(probs, target)),
            np.inf if infinite else 1e-9,
            "probabilities of 0 are replaced by the smallest number there" if infinite else "",
        )
        one_hot = torch.nn.functional.one_hot(target, probs.shape[1]).double()
        yield Comparison(
            "scikit-learn",
            "mean_squared_error(one_hot, probs) * C",
            "brier_score(probs)",
            float(scores.mean_squared_error(one_hot.numpy(), probs.numpy())) * probs.shape[1],
            float(metrics.brier_score(probs, target)),
            1e-9,
        )
    if 0 < int(correct.sum()) < len(correct):
        yield Comparison(
            "scikit-learn",
            "roc_auc_score(correct, confidence)",
            "auroc(confidence[correct], confidence[~correct])",
            float(scores.roc_auc_score(correct.numpy(), confidence.numpy())),
            float(metrics.auroc(confidence[correct], confidence[~correct])),
            1e-9,
        )


# The distribution on PyPI (None: nothing to install), the module that must be importable, the comparisons.
LIBRARIES: dict[str, tuple[str | None, str | None, Callable[[Tensor, Tensor], Iterator[Comparison]]]] = {
    "torchmetrics": ("torchmetrics", "torchmetrics", torchmetrics),
    "netcal": ("netcal", "netcal", netcal),
    "scikit-learn": ("scikit-learn", "sklearn", sklearn),
    "relplot": ("relplot", "relplot", relplot),
    "uncertainty-calibration": ("uncertainty-calibration", "calibration", uncertainty_calibration),
    "Mukhoti et al.": (None, None, published_code),
}


def sets(folder: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, probabilities in float64, labels) of every file with a test set of probabilities or logits."""
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            kind = next((key for key in ("test_logits", "logits", "test_probs", "probs") if key in arrays), None)
            labels = next((key for key in ("test_labels", "labels") if key in arrays), None)
            if kind is None or labels is None:
                continue
            values = torch.from_numpy(arrays[kind]).double()
            target = torch.from_numpy(arrays[labels]).long()
        # Rows of float32 probabilities sum to 1 only approximately.
        probs = values.softmax(-1) if "logits" in kind else values / values.sum(-1, keepdim=True)
        yield path.stem, probs, target


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.metrics_peers", description=__doc__)
    parser.add_argument("--logits", type=Path, required=True, help="folder of .npz files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    versions = {}
    for name, (distribution, module, _) in LIBRARIES.items():
        try:
            if module is not None and distribution is not None:
                importlib.import_module(module)
                versions[name] = importlib.metadata.version(distribution)
            else:
                versions[name] = ""
        except (ImportError, RuntimeError) as error:
            print(f"{name} is left out: {why_absent(error)}")
    header = ["set", "n", "classes", *(f.name for f in fields(Comparison)), "difference", "agrees", "version"]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*header, "focalkern", "commit", "date"])
    disagree = 0
    for name, probs, target in sets(arguments.logits):
        table = []
        for library in versions:
            for comparison in LIBRARIES[library][2](probs, target):
                table.append(comparison)
                disagree += comparison.agrees == "NO"
                values = [
                    f"{v:.9g}" if isinstance(v, float) else v
                    for v in (*asdict(comparison).values(), comparison.difference, comparison.agrees)
                ]
                writer.writerow(
                    [
                        name,
                        len(target),
                        probs.shape[1],
                        *values,
                        versions[library],
                        focalkern.__version__,
                        commit(),
                        datetime.date.today().isoformat(),
                    ]
                )
        print(f"\n{name}: {len(target)} rows, {probs.shape[1]} classes")
        shown = [[c.library, c.theirs, c.their_value, c.our_value, c.difference, c.agrees, c.note] for c in table]
        print(tabulate(shown, ["library", "call", "theirs", "ours", "difference", "agrees", ""], floatfmt=".3g"))
    path = arguments.out / f"metrics_peers_{datetime.date.today().isoformat()}.csv"
    path.write_text(stream.getvalue())
    print(f"\n{disagree} disagreements; written to {path}")


if __name__ == "__main__":
    main()
