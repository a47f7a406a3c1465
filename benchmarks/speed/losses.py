"""The training losses compared with the published algorithms of their papers: forward and backward of one step.

The published FLSD and AdaFocal choose gamma on the host, sample by sample, and fetch one number from the device for
each; the note of a row counts the numbers that one step fetches. The published MMCE builds its N x N kernel.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import focalkern as fk
from benchmarks.harness import Provider, Row, measure
from benchmarks.speed.focal_loss import (
    check_gradient,
    compiled,
    forward_backward,
    published_adafocal,
    published_flsd,
)
from focalkern.reference._softmax_losses import ROW_LOSSES

# A training batch of CIFAR and of ImageNet; many samples, as in segmentation; a vocabulary.
SHAPES = [(128, 10), (256, 1000), (8192, 20), (1024, 32000)]
# MMCE at several batch sizes: its published form has a term for each pair of samples.
MMCE_SHAPES = [(16, 10), (512, 10), (2048, 10)]


class Fetches(TorchDispatchMode):
    """Counts the numbers that Python takes out of tensors."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += operator is torch.ops.aten._local_scalar_dense.default
        return operator(*arguments, **(options or {}))


def fetched(run: Callable[[], object]) -> int:
    with Fetches() as mode:
        run()
    return mode.count


def published_dual(logits: Tensor, target: Tensor, gamma: float = 5.0) -> Tensor:
    log_p = F.log_softmax(logits, dim=1)
    p = log_p.exp()
    log_p_y = log_p.gather(1, target.unsqueeze(1))
    p_y = log_p_y.exp()
    p_j = torch.topk(p * (p < p_y), 1)[0]
    return (-((1 - p_y + p_j) ** gamma) * log_p_y).mean()


def published_poly(logits: Tensor, target: Tensor, gamma: float = 2.0, epsilon: float = 1.0) -> Tensor:
    cross_entropy = F.cross_entropy(logits, target, reduction="none")
    p = logits.softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    return ((1 - p) ** gamma * cross_entropy + epsilon * (1 - p) ** (gamma + 1)).mean()


def published_brier(logits: Tensor, target: Tensor) -> Tensor:
    one_hot = torch.zeros_like(logits).scatter_(1, target.unsqueeze(1), 1)
    return (logits.softmax(1) - one_hot).square().sum(1).mean()


def published_mmce(logits: Tensor, target: Tensor) -> Tensor:
    r, top = logits.softmax(1).max(1)
    gap = (top == target).to(r) - r
    kernel = (-(r.unsqueeze(0) - r.unsqueeze(1)).abs() / 0.4).exp()
    squared = (gap.unsqueeze(0) * gap.unsqueeze(1) * kernel).sum() / len(target) ** 2
    return F.cross_entropy(logits, target) + 2 * squared.sqrt()


def published_dft(logits: Tensor, target: Tensor) -> Tensor:
    cross_entropy = F.cross_entropy(logits, target, reduction="none")
    return (logits.softmax(1).gather(1, target.unsqueeze(1)).squeeze(1).detach() * cross_entropy).mean()


# Short name of the loss -> its name in the results, and the published algorithm with the module's defaults.
PUBLISHED: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "poly": ("poly focal", published_poly),
    "dual": ("dual focal", published_dual),
    "brier": ("Brier", published_brier),
    "mmce": ("MMCE", published_mmce),
    "dft": ("DFT", published_dft),
}


def check_beside(
    published: Callable[..., Tensor], logits: Tensor, target: Tensor, tolerance: float = 1e-5
) -> Callable[[object], None]:
    """Compares a gradient with that of the published algorithm in float64."""
    exact = logits.detach().double().requires_grad_()
    expected = torch.autograd.grad(published(exact, target), exact)[0]

    def check(gradient: object) -> None:
        assert isinstance(gradient, Tensor)
        # Confidences that are equal in float32 may differ in float64, and MMCE is not differentiable where two are
        # equal.
        allowed = 1e-3 if published is published_mmce else tolerance
        scale = expected.abs().max().item()
        torch.testing.assert_close(gradient.double(), expected, rtol=allowed, atol=allowed * scale)

    return check


def cases(device: str, n: int, classes: int) -> Iterator[tuple[str, Any, Callable[..., Tensor], Any]]:
    """Name, module, published algorithm, and the gamma of both where the reference is a focal loss."""
    only_batch = (n, classes) in MMCE_SHAPES
    for spec in ROW_LOSSES.values():
        if spec.short in PUBLISHED and (spec.of_batch or not only_batch):
            name, published = PUBLISHED[spec.short]
            yield name, getattr(fk, spec.module)().to(device), published, None
    if only_batch or n * classes >= 10_000_000:  # the other losses choose gamma sample by sample
        return
    adafocal = fk.AdaFocalLoss().to(device)
    edges = torch.linspace(0.05, 0.95, 16) ** 2
    error = torch.linspace(0.5, -0.5, 15)
    for _ in range(4):  # gammas of both signs, as after some epochs
        adafocal.update_bins(edges, 0.5 + error / 2, 0.5 - error / 2)
    table = fk.GammaTable(adafocal.bin_edges, adafocal.bin_gammas)
    yield "FLSD-53", fk.FLSDLoss().to(device), published_flsd, fk.FLSD_53
    yield "AdaFocal", adafocal, lambda logits, target: published_adafocal(logits, target, table), table


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    for n, classes in SHAPES[:1] if quick else SHAPES + MMCE_SHAPES:
        for name, module, published, gamma in cases(device, n, classes):
            if not wanted(f"{name} {n}x{classes} float32"):
                continue
            generator = torch.Generator(device).manual_seed(0)
            logits = torch.randn(n, classes, generator=generator, device=device).mul_(3).requires_grad_()
            target = torch.randint(classes, (n,), generator=generator, device=device)
            check = (
                check_beside(published, logits, target)
                if gamma is None
                else check_gradient(logits, target, gamma, tolerance=1e-5)
            )
            # Code that reads numbers on the host has no graph to compile.
            graph, absent = compiled(published, quick) if gamma is None else (None, "it chooses gamma on the host")
            # The published Brier score loses digits with many classes: 2.7e-5 of the largest gradient at 32000.
            loose = check_beside(published, logits, target, 1e-4) if published is published_brier else check
            providers = [
                Provider("focalkern", forward_backward(module, logits, target), check=check),
                Provider("published algorithm", forward_backward(published, logits, target), check=loose),
                Provider(
                    "published algorithm, compiled",
                    graph and forward_backward(graph, logits, target),
                    check=loose,
                    absent=absent,
                ),
                Provider("cross_entropy", forward_backward(F.cross_entropy, logits, target)),
            ]
            source, destination = logits.detach(), torch.empty_like(logits.detach())
            copy = Provider("copy", lambda source=source, destination=destination: destination.copy_(source))
            rows = measure(
                op="losses",
                case=f"{name} {n}x{classes}",
                n=n,
                classes=classes,
                dtype=torch.float32,
                providers=providers,
                bytes_moved=3 * logits.numel() * logits.element_size(),
                copy=copy,
                seconds=seconds,
                device=device,
            )
            for row, provider in zip(rows, providers, strict=True):
                if (
                    provider.run is not None and "compiled" not in provider.name
                ):  # the counted run uses no compiled graph
                    row.note = f"{fetched(provider.run)} numbers fetched"
            yield rows
