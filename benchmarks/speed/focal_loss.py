"""The fused focal loss compared with cross-entropy and with the focal loss written in torch, eager and compiled."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import focalkern as fk
from benchmarks.harness import Provider, Row, measure

GAMMA = 2.0
# The shapes of the performance targets: small and large numbers of classes, a vocabulary, pixels, and odd numbers.
SHAPES = [(65536, 10), (65536, 100), (8192, 1000), (1024, 32000)]
ALL_CLASSES = [(65536, c) for c in (2, 3, 10, 17, 100)] + [(8192, 1000), (2048, 4097), (1024, 32000), (256, 128256)]
ALL_ROWS = [(n, 100) for n in (64, 512, 4096, 262144)]
PIXELS = (64, 19, 128, 128)
TINY = (32, 10)


def composite(logits: Tensor, target: Tensor, gamma: float = GAMMA) -> Tensor:
    """The focal loss as most projects write it."""
    log_p = F.log_softmax(logits, dim=1).gather(1, target.unsqueeze(1)).squeeze(1)
    return (-((1 - log_p.exp()) ** gamma) * log_p).mean()


def published_flsd(logits: Tensor, target: Tensor) -> Tensor:
    """FLSD-53 by the algorithm of its authors: gamma is chosen on the host, sample by sample."""
    log_p = F.log_softmax(logits, dim=1).gather(1, target.unsqueeze(1)).squeeze(1)
    p = log_p.exp()
    gammas = torch.tensor([5.0 if value.item() < 0.2 else 3.0 for value in p], device=logits.device)
    return (-((1 - p) ** gammas) * log_p).mean()


def published_adafocal(logits: Tensor, target: Tensor, table: fk.GammaTable) -> Tensor:
    """AdaFocal by the algorithm of its authors: a search through the bins on the host, sample by sample."""
    log_p = F.log_softmax(logits, dim=1).gather(1, target.unsqueeze(1)).squeeze(1)
    p = log_p.exp()
    edges, bin_gammas = table.edges.tolist(), table.gammas.tolist()
    chosen = []
    for value in p:
        number, b = value.item(), 0
        while b < len(bin_gammas) - 1 and number >= edges[b + 1]:
            b += 1
        chosen.append(bin_gammas[b])
    gammas = torch.tensor(chosen, device=logits.device, dtype=p.dtype)
    return (torch.where(gammas >= 0, -((1 - p) ** gammas), -((1 + p) ** -gammas)) * log_p).mean()


def forward_backward(loss, logits: Tensor, *arguments):
    def run() -> Tensor:
        return torch.autograd.grad(loss(logits, *arguments), logits)[0]

    return run


def check_gradient(logits: Tensor, target: Tensor, gamma, tolerance: float):
    """Compares a gradient with that of the reference in float64, on the first rows of a large batch."""
    rows = slice(0, min(len(target), 256))
    exact = logits[rows].detach().double().requires_grad_()
    loss = fk.reference.focal_loss(exact, target[rows], gamma, reduction="sum") / target.numel()
    expected = torch.autograd.grad(loss, exact)[0]

    def check(gradient: object) -> None:
        assert isinstance(gradient, Tensor)
        torch.testing.assert_close(
            gradient[rows].double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
        )

    return check


def compiled(function, quick: bool) -> tuple[object, str]:
    if quick:
        return None, "left out of the quick run, for its compilation time"
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False), ""


def cases(device: str, quick: bool) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    shapes = SHAPES if quick else ALL_CLASSES + ALL_ROWS
    for shape in [TINY, *shapes, PIXELS]:
        yield "forward+backward", shape, torch.float32
    for shape in SHAPES[:2] if quick else SHAPES:
        yield "forward+backward", shape, torch.bfloat16


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    for case, shape, dtype in cases(device, quick):
        if not wanted(f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"):
            continue
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(3).to(dtype)
        logits.requires_grad_()
        n = logits.numel() // shape[1]
        target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator, device=device)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        focal = check_gradient(logits, target, GAMMA, tolerance)
        plain = check_gradient(logits, target, 0.0, tolerance)
        table = fk.GammaTable([k / 15 for k in range(16)], [3.0 - 0.3 * k for k in range(15)])
        per_sample = torch.full(target.shape, GAMMA, device=device)
        ce_compiled, ce_absent = compiled(F.cross_entropy, quick)
        focal_compiled, focal_absent = compiled(composite, quick)
        providers = [
            Provider("focalkern", forward_backward(fk.focal_loss, logits, target, GAMMA), check=focal),
            Provider(
                "focalkern, gamma per sample", forward_backward(fk.focal_loss, logits, target, per_sample), check=focal
            ),
            Provider("focalkern, gamma table", forward_backward(fk.focal_loss, logits, target, table)),
            Provider("cross_entropy", forward_backward(F.cross_entropy, logits, target), check=plain),
            Provider(
                "cross_entropy, compiled",
                ce_compiled and forward_backward(ce_compiled, logits, target),
                absent=ce_absent,
                check=plain,
            ),
            Provider("composite", forward_backward(composite, logits, target), check=focal),
            Provider(
                "composite, compiled",
                focal_compiled and forward_backward(focal_compiled, logits, target),
                absent=focal_absent,
                check=focal,
            ),
        ]
        if shape == (8192, 1000) and dtype == torch.float32:
            flsd = check_gradient(logits, target, fk.FLSD_53, tolerance)
            adaptive = check_gradient(logits, target, table, tolerance)
            providers += [
                Provider("focalkern, FLSD-53", forward_backward(fk.focal_loss, logits, target, fk.FLSD_53), check=flsd),
                Provider("published FLSD-53 loop", forward_backward(published_flsd, logits, target), check=flsd),
                Provider(
                    "published AdaFocal loop",
                    forward_backward(published_adafocal, logits, target, table),
                    check=adaptive,
                ),
            ]
        for package in ("liger_kernel", "quack"):
            if device == "cuda":
                providers.append(Provider(package, None, absent="no adapter was written for it yet"))
        source, destination = logits.detach(), torch.empty_like(logits.detach())
        copy = Provider("copy", lambda source=source, destination=destination: destination.copy_(source))
        size = logits.numel() * logits.element_size()
        yield measure(
            op="focal_loss",
            case=f"{case} {'x'.join(map(str, shape))}",
            n=n,
            classes=shape[1],
            dtype=dtype,
            providers=providers,
            bytes_moved=3 * size,  # the logits are read in each direction, the gradient is written
            copy=copy,
            seconds=seconds,
            device=device,
        )
