"""The joint (gamma, T) grid compared with one pass over the data per cell."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import focalkern as fk
from benchmarks.harness import Provider, Row, measure, why_absent

N_BINS = 15
# Cells of the paper's grid on which the per-cell providers are timed; their time is scaled to all 4500.
SAMPLE = [(0.05, 1.0), (1.0, 2.0), (5.0, 4.0)]


def cell(logits: Tensor, target: Tensor, gamma: float, temperature: float) -> tuple[float, float]:
    """ECE (equal mass) and NLL of one cell, as published: softmax, map, sort, 15 bins."""
    q = torch.softmax(logits / temperature, dim=1).clamp(min=1e-30)
    u = (1 - q).clamp(min=1e-7)
    phi = -q * q.log() / u
    weight = q / (u**gamma * (1 + gamma * phi))
    probs = weight / weight.sum(dim=1, keepdim=True)
    nll = -probs.gather(1, target.unsqueeze(1)).log().mean()
    confidence, predicted = probs.max(dim=1)
    correct = (predicted == target).double()
    order = confidence.argsort()
    ece = torch.zeros((), dtype=torch.float64, device=logits.device)
    for rows in order.tensor_split(N_BINS):
        ece += (confidence[rows].double().mean() - correct[rows].mean()).abs() * len(rows) / len(order)
    return ece.item(), nll.item()


def validation_set(n: int, classes: int) -> tuple[Tensor, Tensor]:
    """Logits of an accurate, over-confident classifier, as validation logits usually are."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(classes, (n,), generator=generator)
    logits = torch.randn(n, classes, generator=generator) * 1.5
    logits[torch.arange(n), target] += 4.5 + 2 * torch.randn(n, generator=generator)
    return logits * 2, target


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    shapes = [(10000, 10), (10000, 100), (10000, 1000), (50000, 1000), (1000, 100), (3000, 100), (30000, 100)]
    gammas, temperatures = fk.PAPER_GAMMAS, fk.PAPER_TEMPERATURES
    for n, classes in shapes[:2] if quick else shapes:
        if not wanted(f"{n}x{classes} float32"):
            continue
        logits, target = validation_set(n, classes)
        logits, target = logits.to(device), target.to(device)

        def whole_grid(logits=logits, target=target):
            return fk.calibration_grid(logits, target, gammas, temperatures, criteria=("ece", "nll"))

        def per_cell(logits=logits, target=target):
            return [cell(logits, target, gamma, temperature) for gamma, temperature in SAMPLE]

        tables = whole_grid().tables
        expected = [
            tuple(float(tables[name][gammas.index(gamma), round(temperature / 0.01) - 1]) for name in ("ece", "nll"))
            for gamma, temperature in SAMPLE
        ]

        def check(found, expected=expected, n=n) -> None:
            for (ece, nll), (grid_ece, grid_nll) in zip(found, expected, strict=True):
                assert abs(ece - grid_ece) <= 1e-6 + 4 / n, (ece, grid_ece)
                assert abs(nll - grid_nll) <= 1e-3 * nll, (nll, grid_nll)  # the loop's clamps

        providers = [
            Provider("focalkern", whole_grid),
            Provider("per-cell loop", per_cell, check=check, scale=4500 / len(SAMPLE)),
        ]
        probs = torch.softmax(logits, dim=1)
        try:
            from torchmetrics.functional.classification import multiclass_calibration_error

            def torchmetrics_cell(probs=probs, target=target, classes=classes):
                return multiclass_calibration_error(probs, target, num_classes=classes, n_bins=N_BINS)

            providers.append(Provider("torchmetrics, ECE per cell", torchmetrics_cell, scale=4500))
        except (ImportError, RuntimeError) as error:
            providers.append(Provider("torchmetrics, ECE per cell", None, absent=why_absent(error)))
        try:
            from netcal.metrics import ECE

            arrays = probs.cpu().numpy(), target.cpu().numpy()
            providers.append(
                Provider("netcal, ECE per cell", lambda arrays=arrays: ECE(N_BINS).measure(*arrays), scale=4500)
            )
        except (ImportError, RuntimeError) as error:
            providers.append(Provider("netcal, ECE per cell", None, absent=why_absent(error)))
        yield measure(
            op="calibration_grid",
            case=f"4500 cells {n}x{classes}",
            n=n,
            classes=classes,
            dtype=torch.float32,
            providers=providers,
            bytes_moved=logits.numel() * 4,
            copy=None,
            seconds=seconds,
            device=device,
        )
