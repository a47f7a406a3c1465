"""The fused losses of independent logits compared with the formulas of detectors and multi-label heads, eager and
compiled.

The target of a detector's head: dense zeros and ones, or labels without the class dimension, most of them background.
The box losses have overlaps in place of the ones, and scores next to the labels.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import focalkern as fk
from benchmarks.harness import Provider, Row, measure
from benchmarks.speed.focal_loss import compiled

# A detector's anchors and classes (8 images of 20000), and a small batch of a multi-label head.
SHAPES = [(160000, 80), (64, 80)]


def torchvision_formula(x: Tensor, t: Tensor) -> Tensor:
    """torchvision.ops.sigmoid_focal_loss, alpha = 0.25, gamma = 2."""
    p = torch.sigmoid(x)
    loss = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    p_t = p * t + (1 - p) * (1 - t)
    return (loss * (1 - p_t) ** 2 * (0.25 * t + 0.75 * (1 - t))).mean()


def published_asymmetric(x: Tensor, t: Tensor) -> Tensor:
    """The code of Ridnik et al., with the mean."""
    p = torch.sigmoid(x)
    q = (1 - p + 0.05).clamp(max=1)
    loss = t * torch.log(p.clamp(min=1e-8)) + (1 - t) * torch.log(q.clamp(min=1e-8))
    p_t = p * t + q * (1 - t)
    return -(loss * torch.pow(1 - p_t, t + 4 * (1 - t))).mean()


def published_quality(x: Tensor, t: Tensor) -> Tensor:
    """Quality focal loss as in mmdet, for dense qualities."""
    return (F.binary_cross_entropy_with_logits(x, t, reduction="none") * (x.sigmoid() - t).abs().pow(2)).mean()


def published_varifocal(x: Tensor, t: Tensor) -> Tensor:
    """RT-DETR's loss for dense overlaps, alpha = 0.75, gamma = 2; the modulation is detached."""
    weight = 0.75 * x.detach().sigmoid().pow(2) * (t == 0) + t
    return F.binary_cross_entropy_with_logits(x, t, weight=weight, reduction="none").mean()


def published_matchability(x: Tensor, t: Tensor) -> Tensor:
    """DEIM's loss for dense overlaps, gamma = 1.5."""
    is_match = t > 0
    weight = x.detach().sigmoid().pow(1.5) * ~is_match + is_match
    return F.binary_cross_entropy_with_logits(x, t.pow(1.5), weight=weight, reduction="none").mean()


def published_ia_bce(x: Tensor, t: Tensor) -> Tensor:
    """The loss of LW-DETR and RF-DETR for dense overlaps, alpha = 0.25."""
    p = x.sigmoid()
    soft = (p.pow(0.25) * t.pow(0.75)).clamp(min=0.01).detach()
    positive = torch.where(t > 0, soft, 0.0)
    negative = torch.where(t > 0, 1 - soft, p.pow(2))
    return (negative * x - F.logsigmoid(x) * (positive + negative)).mean()


def binary_cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, t)


def forward_backward(loss, x: Tensor, t: Tensor | tuple[Tensor, Tensor]):
    return lambda: torch.autograd.grad(loss(x, t), x)[0]


def check_beside(published: Callable[..., Tensor], x: Tensor, t: Tensor) -> Callable[[object], None]:
    """Compares a gradient with that of the published formula in float64."""
    exact = x.detach().double().requires_grad_()
    expected = torch.autograd.grad(published(exact, t.double()), exact)[0]

    def check(gradient: object) -> None:
        assert isinstance(gradient, Tensor)
        tolerance = 1e-5 if gradient.dtype == torch.float32 else 2e-2
        scale = expected.abs().max().item()
        torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance * scale)

    return check


def mean(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, t: loss(x, t, reduction="mean")


def cases() -> Iterator[tuple[str, Callable[..., Tensor], Callable[..., Tensor]]]:
    yield "sigmoid focal", fk.sigmoid_focal_loss, torchvision_formula
    yield "asymmetric", fk.asymmetric_loss, published_asymmetric
    yield "quality focal", fk.quality_focal_loss, published_quality
    yield "varifocal", functools.partial(fk.varifocal_loss, detach_modulation=True), published_varifocal
    yield "matchability", fk.matchability_loss, published_matchability
    yield "IA-BCE", fk.ia_bce_loss, published_ia_bce


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    for n, classes in SHAPES[-1:] if quick else SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for name, ours, published in cases():
                if not wanted(f"{name} {n}x{classes} {str(dtype).removeprefix('torch.')}"):
                    continue
                generator = torch.Generator(device).manual_seed(0)
                x = torch.randn(n, classes, generator=generator, device=device).mul_(3).to(dtype).requires_grad_()
                labels = torch.randint(2 * classes, (n,), generator=generator, device=device).clamp_(max=classes)
                t = F.one_hot(labels, classes + 1)[:, :classes].to(dtype).contiguous()
                given: Tensor | tuple[Tensor, Tensor] = labels
                if name not in ("sigmoid focal", "asymmetric"):
                    scores = torch.rand(n, generator=generator, device=device).to(dtype)
                    t = t * scores.unsqueeze(1)
                    given = (labels, scores)
                check = check_beside(published, x, t)
                published_compiled, absent = compiled(published, quick)
                bce_compiled, _ = compiled(binary_cross_entropy, quick)
                providers = [Provider("focalkern", forward_backward(mean(ours), x, t), check=check)]
                providers.append(Provider("focalkern, labels", forward_backward(mean(ours), x, given), check=check))
                providers += [
                    Provider("published formula", forward_backward(published, x, t)),
                    Provider(
                        "published formula, compiled",
                        published_compiled and forward_backward(published_compiled, x, t),
                        absent=absent,
                    ),
                    Provider("BCE, compiled", bce_compiled and forward_backward(bce_compiled, x, t), absent=absent),
                ]
                source, destination = x.detach(), torch.empty_like(x.detach())
                yield measure(
                    op="sigmoid_loss",
                    case=f"{name} {n}x{classes}",
                    n=n,
                    classes=classes,
                    dtype=dtype,
                    providers=providers,
                    bytes_moved=5 * x.numel() * x.element_size(),  # logits and target are read twice
                    copy=Provider("copy", lambda a=destination, b=source: a.copy_(b)),
                    seconds=seconds,
                    device=device,
                )
