"""The tables about the networks of Mukhoti et al. 2020 (arXiv 2002.09437), from the files of their logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import focalkern as fk
from benchmarks.published.lines import Line, number


@dataclass(frozen=True)
class Network:
    """The published figures of one network, in fractions. "Before" is at T = 1, "after" at the T of the validation ECE.

    Attributes:
        error, ece, temperature, adaptive, classwise: [2], tables C.3, 1, 1, C.1 and C.2; before and after.
        plain, focal: of the paper grid of [1], the figures that came with the logits, computed in float64: T, or
            (gamma, T), then test ECE (equal_mass) and NLL.
    """

    file: str
    error: str
    ece: tuple[str, str]
    temperature: str
    adaptive: tuple[str, str]
    classwise: tuple[str, str]
    plain: tuple[str, str, str]
    focal: tuple[str, str, str, str]


NETWORKS = (
    Network("cifar10_resnet50_ce", "0.0495", ("0.0435", "0.0135"), "2.5", ("0.0433", "0.0214"), ("0.0091", "0.0045"),
            ("2.47", "0.02139", "0.2041"), ("1", "3.45", "0.01622", "0.2091")),
    Network("cifar10_resnet50_flsd53", "0.0498", ("0.0155", "0.0095"), "1.1", ("0.0156", "0.0126"),
            ("0.0042", "0.0042"), ("1.09", "0.01287", "0.1737"), ("5", "2.64", "0.00759", "0.1933")),
    Network("cifar10_densenet121_brier", "0.0511", ("0.0153", "0.0153"), "1.0", ("0.0203", "0.0203"),
            ("0.0046", "0.0046"), ("0.91", "0.02121", "0.1930"), ("5", "2.20", "0.01209", "0.2088")),
    Network("cifar10_wrn26_10_brier", "0.0408", ("0.0125", "0.0125"), "1.0", ("0.0170", "0.0170"),
            ("0.0044", "0.0044"), ("0.95", "0.01604", "0.1575"), ("5", "2.14", "0.01146", "0.1707")),
    Network("cifar100_resnet50_brier", "0.2339", ("0.0652", "0.0364"), "1.1", ("0.0652", "0.0384"),
            ("0.0022", "0.0020"), ("1.18", "0.03452", "1.0120"), ("0.37", "1.24", "0.03416", "1.0286")),
    Network("cifar100_densenet121_brier", "0.2375", ("0.0517", "0.0229"), "1.1", ("0.0504", "0.0256"),
            ("0.0020", "0.0021"), ("1.13", "0.02077", "0.9930"), ("-0.25", "1.09", "0.02824", "0.9845")),
)  # fmt: skip

# Table C.1 prints 3.64 in one cell, which is the ECE of the same row; the value from the file is .0384.
MISPRINT = ("cifar100_resnet50_brier", "0.0364")

# Settings of the search in [2]: T in steps of 0.1, chosen by the validation ECE.
PUBLISHED_TEMPERATURES = tuple(index * 0.1 for index in range(1, 101))


def networks(folder: Path) -> Iterator[Line]:
    """The tables of [2] and the paper grid of [1] on the logits of each network that is in the folder."""
    found = [network for network in NETWORKS if (folder / f"{network.file}.npz").is_file()]
    if not found:
        raise SystemExit(f"{folder}: expected one of {', '.join(f'{one.file}.npz' for one in NETWORKS)}, found none")
    for network in found:
        yield from tables_of(network, folder / f"{network.file}.npz")
    for missing in (network for network in NETWORKS if network not in found):
        yield Line(missing.file, "all", "published", f"{missing.file}.npz is not in the folder", "", "", "")
    yield from others(folder)


def tables_of(network: Network, path: Path) -> Iterator[Line]:
    with np.load(path, allow_pickle=False) as arrays:
        val, test = (torch.from_numpy(arrays[f"{part}_logits"]).to(torch.float64) for part in ("val", "test"))
        val_labels, labels = (torch.from_numpy(arrays[f"{part}_labels"]).to(torch.int64) for part in ("val", "test"))
    name = network.file
    yield number(name, "test error", network.error, 1 - float(fk.metrics.accuracy(test, labels)), "[2] table C.3")

    search = fk.calibration_grid(
        val, val_labels, (0.0,), PUBLISHED_TEMPERATURES, criteria=("ece",), estimator="equal_width"
    )
    temperature = search.best("ece")[1]
    yield number(name, "T of the validation ECE, step 0.1", network.temperature, temperature, "[2] table 1")
    for index, (when, scale) in enumerate((("before", 1.0), ("after", temperature))):
        probs = (test / scale).softmax(-1)
        for what, table, published, value in (
            ("ECE", "1", network.ece, fk.metrics.expected_calibration_error(probs, labels)),
            (
                "adaptive ECE",
                "C.1",
                network.adaptive,
                fk.metrics.expected_calibration_error(probs, labels, estimator="equal_mass_interp"),
            ),
            ("classwise ECE", "C.2", network.classwise, fk.metrics.classwise_calibration_error(probs, labels)),
        ):
            misprint = what == "adaptive ECE" and when == "after" and network.file == MISPRINT[0]
            source = "recorded with the logits" if misprint else f"[2] table {table}"
            yield number(name, f"{what}, {when} scaling", published[index], float(value), source)
            if misprint:
                what = f"{what}, {when} scaling, as printed"
                yield number(name, what, MISPRINT[1], float(value), "[2] table C.1", known="known to differ")

    grid = fk.calibration_grid(
        val, val_labels, (0.0, *fk.PAPER_GAMMAS), fk.PAPER_TEMPERATURES, criteria=("ece",), estimator="equal_mass"
    )
    table = grid.tables["ece"]
    source = "recorded with the logits; the grid of [1], section 5"
    cell = int(table[0].argmin())
    yield from chosen(
        name, "T alone", 0.0, float(grid.temperatures[cell]), (None, *network.plain), test, labels, source
    )
    cell = int(table[1:].argmin())
    row, column = divmod(cell, table.shape[1])
    gamma, temperature = float(grid.gammas[1 + row]), float(grid.temperatures[column])
    yield from chosen(name, "gamma and T", gamma, temperature, network.focal, test, labels, source)


def chosen(
    name: str,
    what: str,
    gamma: float,
    temperature: float,
    published: tuple[str | None, ...],
    test: Tensor,
    labels: Tensor,
    source: str,
) -> Iterator[Line]:
    log_probs = fk.focal_calibration_map(test, gamma, temperature, log=True)
    correct = test.argmax(-1) == labels
    ece = fk.metrics.expected_calibration_error(
        confidence=log_probs.amax(-1).exp(), correct=correct, estimator="equal_mass"
    )
    nll = fk.metrics.nll(log_probs, labels, log=True)
    if published[0] is not None:
        yield number(name, f"paper grid, {what}: gamma", published[0], gamma, source)
    for words, digits, value in (
        ("T", published[1], temperature),
        ("test ECE (equal_mass)", published[2], float(ece)),
        ("test NLL", published[3], float(nll)),
    ):
        yield number(name, f"paper grid, {what}: {words}", digits, value, source)


def others(folder: Path) -> Iterator[Line]:
    """The sets of probabilities other than the networks of [2]."""
    source = "recorded with the probabilities"
    for file, what in (
        # The record does not name the estimator; it is the interpolated one (the other gives .14215).
        ("cifar100_densenet_bc100_probs", (("accuracy", "0.7541"), ("ECE (equal_mass_interp)", "0.1421"))),
        ("20news_probs", (("ECE (equal_width)", "0.201"), ("zeros on the true class", "61"))),
    ):
        path = folder / f"{file}.npz"
        if not path.is_file():
            continue
        with np.load(path, allow_pickle=False) as arrays:
            prefix = "test_" if "test_probs" in arrays else ""
            probs = torch.from_numpy(arrays[f"{prefix}probs"]).to(torch.float64)
            labels = torch.from_numpy(arrays[f"{prefix}labels"]).to(torch.int64)
        figures = {
            "accuracy": float(fk.metrics.accuracy(probs, labels)),
            "ECE (equal_width)": float(fk.metrics.expected_calibration_error(probs, labels)),
            "ECE (equal_mass_interp)": float(
                fk.metrics.expected_calibration_error(probs, labels, estimator="equal_mass_interp")
            ),
            "zeros on the true class": float((probs.gather(1, labels[:, None]) == 0).sum()),
        }
        for words, published in what:
            yield number(file, words, published, figures[words], source)
