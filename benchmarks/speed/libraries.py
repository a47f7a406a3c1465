"""Times the losses of other libraries, forward and backward, next to focalkern's calls with the same gradient.

The calls are those of the page "Replace another library's focal loss". Gradients are compared before anything is timed.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import focalkern as fk
from benchmarks.harness import Provider, Row, measure, why_absent
from benchmarks.speed.focal_loss import forward_backward

Loss = Callable[[Tensor], Tensor]

GAMMA, ALPHA = 2.0, 0.25


def kornia_softmax(labels: Tensor) -> Loss:
    losses = importlib.import_module("kornia.losses")
    return lambda z: losses.focal_loss(z, labels, None, GAMMA, "sum")


def monai_softmax(labels: Tensor) -> Loss:
    loss = importlib.import_module("monai.losses").FocalLoss(to_onehot_y=True, use_softmax=True, gamma=GAMMA)
    return lambda z: loss(z, labels.unsqueeze(1)) * z.numel()


def kornia_sigmoid(target: Tensor) -> Loss:
    losses = importlib.import_module("kornia.losses")
    return lambda z: losses.binary_focal_loss_with_logits(z, target, ALPHA, GAMMA, "sum")


def torchvision_sigmoid(target: Tensor) -> Loss:
    loss = importlib.import_module("torchvision.ops").sigmoid_focal_loss
    return lambda z: loss(z, target, ALPHA, GAMMA, "sum")


def timm_asymmetric(target: Tensor) -> Loss:
    loss = importlib.import_module("timm.loss").AsymmetricLossMultiLabel(4, 1, 0.05)
    return lambda z: loss(z, target)


def provider(
    library: str, make: Callable[[Tensor], Loss], logits: Tensor, target: Tensor, expected: Tensor
) -> Provider:
    name = f"{library} {importlib.metadata.version(library)}" if _is_installed(library) else library
    try:
        loss = make(target)
    except (ImportError, RuntimeError) as error:
        return Provider(name, None, absent=why_absent(error))
    check = functools.partial(torch.testing.assert_close, expected=expected, rtol=1e-3, atol=1e-5)
    return Provider(name, forward_backward(loss, logits), check=check)


def _is_installed(library: str) -> bool:
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def cases(quick: bool) -> Iterator[tuple[str, int, int, list[Provider]]]:
    """Name, rows, classes, and providers, focalkern's first."""
    generator = torch.Generator().manual_seed(0)
    softmax = {"kornia": kornia_softmax, "monai": monai_softmax}
    shapes: tuple[tuple[int, ...], ...] = ((64, 10), (8192, 100), (4, 20, 128, 128))
    for shape in shapes[:1] if quick else shapes:
        logits = (torch.randn(shape, generator=generator) * 3).requires_grad_()
        labels = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
        run = forward_backward(lambda z, y=labels: fk.focal_loss(z, y, GAMMA, reduction="sum"), logits)
        others = [provider(name, make, logits, labels, run()) for name, make in softmax.items()]
        yield f"focal loss {'x'.join(map(str, shape))}", labels.numel(), shape[1], [Provider("focalkern", run), *others]
    for shape in ((64, 80),) if quick else ((64, 80), (20000, 80)):
        logits = (torch.randn(shape, generator=generator) * 3).requires_grad_()
        target = F.one_hot(torch.randint(80, shape[:1], generator=generator), 80).float()
        run = forward_backward(lambda z, t=target: fk.sigmoid_focal_loss(z, t, GAMMA, ALPHA, "sum"), logits)
        sigmoid = {"kornia": kornia_sigmoid, "torchvision": torchvision_sigmoid}
        others = [provider(name, make, logits, target, run()) for name, make in sigmoid.items()]
        yield f"sigmoid focal loss {shape[0]}x80", shape[0], 80, [Provider("focalkern", run), *others]
        run = forward_backward(lambda z, t=target: fk.asymmetric_loss(z, t, 4.0, 1.0, 0.05, "sum") / len(z), logits)
        others = [provider("timm", timm_asymmetric, logits, target, run())]
        yield f"asymmetric loss {shape[0]}x80", shape[0], 80, [Provider("focalkern", run), *others]


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    if device != "cpu":
        return
    for name, n, classes, providers in cases(quick):
        if wanted(f"{name} float32"):
            yield measure(
                op="libraries",
                case=name,
                n=n,
                classes=classes,
                dtype=torch.float32,
                providers=providers,
                bytes_moved=float("nan"),
                copy=None,
                seconds=seconds,
            )
