"""The focal loss with label smoothing or class probabilities, compared with cross-entropy with the same option."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import focalkern as fk
from benchmarks.harness import Provider, Row, measure
from benchmarks.speed.focal_loss import compiled, forward_backward

SMOOTHING, GAMMA, OTHER_GAMMA = 0.1, 2.0, 1.5  # for gamma 1.5 the power has no short form
SHAPES = [(16384, 10), (4096, 100), (128, 1000), (128, 32000)]


def composite(logits: Tensor, shares: Tensor, gamma: float) -> Tensor:
    """The focal loss of class probabilities as usually written in torch."""
    log_p = F.log_softmax(logits, dim=1)
    return (-shares * (1 - log_p.exp()) ** gamma * log_p).sum(1).mean()


def check_beside(logits: Tensor, shares: Tensor, gamma: float, tolerance: float = 1e-5) -> Callable[[object], None]:
    exact = logits.detach().double().requires_grad_()
    expected = torch.autograd.grad(composite(exact, shares.double(), gamma), exact)[0]

    def check(gradient: object) -> None:
        assert isinstance(gradient, Tensor)
        torch.testing.assert_close(
            gradient.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
        )

    return check


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    for n, classes in SHAPES[:1] if quick else SHAPES:
        for option in ("smoothed", "probabilities"):
            if not wanted(f"{option} {n}x{classes} float32"):
                continue
            generator = torch.Generator(device).manual_seed(0)
            logits = torch.randn(n, classes, generator=generator, device=device).mul_(3).requires_grad_()
            labels = torch.randint(classes, (n,), generator=generator, device=device)
            shares = F.one_hot(labels, classes).float() * (1 - SMOOTHING) + SMOOTHING / classes
            target = labels if option == "smoothed" else shares
            smoothing = SMOOTHING if option == "smoothed" else 0.0

            def focal(logits: Tensor, gamma: float, target=target, smoothing=smoothing) -> Tensor:
                return fk.focal_loss(logits, target, gamma, label_smoothing=smoothing)

            def cross_entropy(logits: Tensor, target=target, smoothing=smoothing) -> Tensor:
                return F.cross_entropy(logits, target, label_smoothing=smoothing)

            graph, absent = compiled(composite, quick)
            checks = {gamma: check_beside(logits, shares, gamma) for gamma in (GAMMA, 0.0, OTHER_GAMMA)}
            # The error of torch's float32 softmax is 1.4e-5 of the largest gradient for 32000 classes.
            loose = {gamma: check_beside(logits, shares, gamma, 1e-4) for gamma in (GAMMA, 0.0)}
            providers = [
                Provider("focalkern", forward_backward(focal, logits, GAMMA), check=checks[GAMMA]),
                Provider("focalkern, gamma 0", forward_backward(focal, logits, 0.0), check=checks[0.0]),
                Provider(
                    "focalkern, gamma 1.5", forward_backward(focal, logits, OTHER_GAMMA), check=checks[OTHER_GAMMA]
                ),
                Provider("cross_entropy", forward_backward(cross_entropy, logits), check=loose[0.0]),
                Provider(
                    "composite, compiled",
                    graph and forward_backward(graph, logits, shares, GAMMA),
                    check=loose[GAMMA],
                    absent=absent,
                ),
            ]
            source, destination = logits.detach(), torch.empty_like(logits.detach())
            yield measure(
                op="soft_targets",
                case=f"{option} {n}x{classes}",
                n=n,
                classes=classes,
                dtype=torch.float32,
                providers=providers,
                bytes_moved=3 * logits.numel() * logits.element_size(),
                copy=Provider("copy", lambda source=source, destination=destination: destination.copy_(source)),
                seconds=seconds,
                device=device,
            )
