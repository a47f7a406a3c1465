"""Fused linear head and loss, compared with two separate operations and with torch's own: forward and backward.

A case is N x D x C: rows, features, classes. A step computes the gradients of input and weight. The memory is the peak
of a step above everything allocated before, results included. The three matrix products alone, each in one piece and
without any loss, are a lower bound for any implementation on torch's products."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import focalkern as fk
from benchmarks.harness import Provider, Row, measure

# (rows, features, classes, dtype, share of ignored rows)
CASES = [
    (2048, 512, 32000, torch.float32, 0.0),
    (1024, 256, 128256, torch.float32, 0.0),
    (2048, 512, 32000, torch.float32, 0.9),
    (2048, 512, 32000, torch.bfloat16, 0.0),
]
# Chunk sizes that are timed in addition to the default.
OTHER_CHUNKS = (128, 512, 1024)
QUICK = [(256, 64, 4000, torch.float32, 0.0)]
GAMMA = 2.0


def name_of(rows: int, features: int, classes: int, ignored: float) -> str:
    shape = f"forward+backward {rows}x{features}x{classes}"
    return f"{shape}, {ignored:.0%} ignored" if ignored else shape


def gradients(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], input: Tensor, weight: Tensor, target: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: torch.autograd.grad(loss(input, weight, target), (input, weight))


def products(input: Tensor, weight: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    x, w = input.detach(), weight.detach()

    def run() -> tuple[Tensor, ...]:
        logits = x @ w.t()
        return logits @ w, logits.t() @ x

    return run


def check(loss: Callable[[Tensor, Tensor, Tensor], Tensor], input: Tensor, weight: Tensor, target: Tensor) -> None:
    """Compares the gradients of a few rows with those in float64."""
    rows = (target != -100).nonzero().squeeze(1)[:64]
    exact = [input.detach()[rows].double().requires_grad_(), weight.detach().double().requires_grad_()]
    found = [input.detach()[rows].clone().requires_grad_(), weight.detach().clone().requires_grad_()]
    expected = torch.autograd.grad(loss(*exact, target[rows]), exact)
    actual = torch.autograd.grad(loss(*found, target[rows]), found)
    tolerance = 1e-4 if input.dtype == torch.float32 else 0.05
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=tolerance * e.abs().max().item())


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    for rows, features, classes, dtype, ignored in QUICK if quick else CASES:
        case = name_of(rows, features, classes, ignored)
        if not wanted(f"{case} {str(dtype).removeprefix('torch.')}"):
            continue
        generator = torch.Generator(device).manual_seed(0)
        input = torch.randn(rows, features, generator=generator, device=device)
        weight = torch.randn(classes, features, generator=generator, device=device) / features**0.5 * 3
        target = torch.randint(classes, (rows,), generator=generator, device=device)
        target[: int(ignored * rows)] = -100
        target = target[torch.randperm(rows, generator=generator, device=device)]
        x, w = (t.to(dtype).requires_grad_() for t in (input, weight))
        providers = []
        case_losses = losses()
        if (rows, features, classes, dtype, ignored) == CASES[0]:
            case_losses |= {f"focalkern, {n} rows a chunk": with_chunks(n) for n in OTHER_CHUNKS}
        for name, loss in case_losses.items():
            if loss is None:
                providers.append(Provider(name, None, absent="this torch has no linear_cross_entropy"))
                continue
            check(loss, x, w, target)
            providers.append(Provider(name, gradients(loss, x, w, target)))
        providers.append(Provider("three products", products(x, w)))
        yield measure(
            op="linear_focal_loss",
            case=case,
            n=rows,
            classes=classes,
            dtype=dtype,
            providers=providers,
            # The bytes that every implementation must move: input, weight, and the gradients of both.
            bytes_moved=2 * (x.numel() + w.numel()) * x.element_size(),
            copy=None,
            seconds=seconds,
            device=device,
        )


def with_chunks(rows: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, w, y: fk.linear_focal_loss(x, w, y, GAMMA, chunk_rows=rows)


def losses() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor] | None]:
    chunked = None
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()

        def chunked(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return F.linear_cross_entropy(x, w, y, options=options)

    return {
        "focalkern": lambda x, w, y: fk.linear_focal_loss(x, w, y, GAMMA),
        "focal_loss of linear": lambda x, w, y: fk.focal_loss(F.linear(x, w), y, GAMMA),
        "cross_entropy of linear": lambda x, w, y: F.cross_entropy(F.linear(x, w), y),
        "torch, chunked": chunked,
    }
