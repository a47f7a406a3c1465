"""The other losses, the head with its loss, and calibrators on a GPU; run by benchmarks.speed.gpu.

Each is one step, forward and backward, next to the same loss in torch (compiled) and in other projects.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import focalkern as fk
from benchmarks.speed import losses, sigmoid_loss, soft_targets
from benchmarks.speed.focal_loss import GAMMA, composite
from benchmarks.speed.gpu_rows import BYTES, GpuRow, Providers, median_us, step, timed

Loss = Callable[[Tensor, Any], Tensor]
Case = tuple[str, str, Callable[[], Iterator[GpuRow]]]

SMOOTHING = 0.1
Z_LOSS = 1e-4
HEAD = (8192, 4096, 128256)  # words, features, vocabulary: a batch of an 8-billion-parameter language model
FITS = ((10000, 100), (50000, 1000))
CALIBRATORS = ("TemperatureScaling", "StructuredScaling", "SplineScaling", "AutoCalibrator")


def cases(copy: float) -> Iterator[Case]:
    torch._dynamo.config.recompile_limit = 100  # torch compiles one function again for every shape and dtype
    yield "linear_focal_loss", "x".join(map(str, HEAD)), linear_rows
    for classes, dtype in itertools.product((32000, 1000), (torch.bfloat16, torch.float32)):
        for name in ("smoothed", "probabilities"):
            label = f"{name}, {classes} classes, {dtype}"
            yield "focal_loss", label, functools.partial(soft_rows, name, classes, dtype, copy)
    for classes, dtype in itertools.product((32000, 1000), (torch.bfloat16, torch.float32)):
        yield "focal_loss", f"extras, {classes} classes, {dtype}", functools.partial(extras_rows, classes, dtype, copy)
    for n, classes in FITS:
        yield "fit", f"{n}x{classes}", functools.partial(fit_rows, n, classes)
    for dtype in (torch.bfloat16, torch.float32):
        for name, ours, published in sigmoid_loss.cases():
            label = f"{name}, {dtype}"
            yield "sigmoid_loss", label, functools.partial(sigmoid_rows, name, ours, published, dtype, copy)
    for short, classes in itertools.product(("poly", "brier", "dual", "dft"), (32000, 1000)):
        label = f"{short}, {classes} classes"
        yield "row_loss", label, functools.partial(published_rows, short, classes, copy)


def data(classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    rows = BYTES // dtype.itemsize // classes
    logits = (3 * torch.randn(rows, classes, device="cuda")).to(dtype).requires_grad_()
    return logits, torch.randint(classes, (rows,), device="cuda")


def check(ours: Loss, published: Loss, logits: Tensor, target: Any) -> None:
    """Compares the gradients of the first and last rows of the whole batch with the published formula in float64."""
    found = step(ours, logits, target)[0]
    tolerance = 1e-4 if logits.dtype == torch.float32 else 2e-2
    for rows in (slice(0, 64), slice(-64, None)):
        exact = logits[rows].detach().double().requires_grad_()
        given = target[rows].double() if target.is_floating_point() else target[rows]
        (wanted,) = torch.autograd.grad(published(exact, given), exact)
        scaled = found[rows].double() * (len(logits) / len(exact))
        torch.testing.assert_close(scaled, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


def steps(functions: dict[str, tuple[Loss | str, Any]], logits: Tensor) -> Providers:
    """A step of each loss with its target. Some write the gradient over the logits, so each has its own copy."""
    found: Providers = {}
    for name, (function, target) in functions.items():
        if isinstance(function, str):
            found[name] = function
            continue
        run = functools.partial(step, function, logits.detach().clone().requires_grad_(), target)
        try:
            run()
            found[name] = run
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def compiled(function: Loss) -> Loss:
    return torch.compile(function, dynamic=False)


def of_liger(name: str) -> Any:
    try:
        return getattr(importlib.import_module("liger_kernel.transformers.functional"), name)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def soft_rows(kind: str, classes: int, dtype: torch.dtype, copy: float) -> Iterator[GpuRow]:
    """Label smoothing, or a tensor of class probabilities."""
    logits, labels = data(classes, dtype)
    shares = torch.full_like(logits.detach(), SMOOTHING / classes)
    shares.scatter_add_(1, labels[:, None], shares.new_full((len(labels), 1), 1 - SMOOTHING))
    target, smoothing = (labels, SMOOTHING) if kind == "smoothed" else (shares, 0.0)

    def focal(z: Tensor, y: Tensor, gamma: float = 2.0) -> Tensor:
        return fk.focal_loss(z, y, gamma, label_smoothing=smoothing)

    def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, label_smoothing=smoothing)

    def written_out(z: Tensor, y: Tensor) -> Tensor:
        return soft_targets.composite(z, y, 2.0)

    check(lambda z, _: focal(z, target), written_out, logits, shares)
    functions: dict[str, tuple[Loss | str, Any]] = {
        "focalkern": (focal, target),
        "focalkern, gamma 0": (functools.partial(focal, gamma=0.0), target),
        "cross_entropy": (cross_entropy, target),
        "cross_entropy, compiled": (compiled(cross_entropy), target),
        "composite, compiled": (compiled(written_out), shares),
    }
    if kind == "smoothed":
        liger = of_liger("liger_cross_entropy")
        own = liger if isinstance(liger, str) else functools.partial(liger, label_smoothing=SMOOTHING)
        functions["Liger-Kernel cross-entropy"] = own, target
    reads = 3 if kind == "smoothed" else 5
    case = f"{kind}, forward+backward {len(logits)}x{classes}"
    yield from timed("focal_loss", case, dtype, steps(functions, logits), reads * logits.nbytes, copy, None, True)


def extras_rows(classes: int, dtype: torch.dtype, copy: float) -> Iterator[GpuRow]:
    """Statistics of the rows from the same step, and the z-loss."""
    logits, target = data(classes, dtype)
    plain = functools.partial(fk.focal_loss, gamma=GAMMA)
    with_z = functools.partial(plain, z_loss=Z_LOSS)

    def with_statistics(z: Tensor, y: Tensor) -> Tensor:
        return plain(z, y, return_stats=True).loss

    def formula(z: Tensor, y: Tensor) -> Tensor:
        return composite(z, y) + Z_LOSS * z.float().logsumexp(1).square().mean()

    rows = len(logits)
    for name, ours, more in (
        ("statistics", with_statistics, {}),
        ("z-loss", with_z, {"composite, compiled": (compiled(formula), target)}),
    ):
        functions: dict[str, tuple[Loss | str, Any]] = {
            "focalkern": (ours, target),
            "focalkern, without": (plain, target),
        }
        case = f"{name}, forward+backward {rows}x{classes}"
        yield from timed(
            "focal_loss", case, dtype, steps(functions | more, logits), 3 * logits.nbytes, copy, None, bool(more)
        )


def sigmoid_rows(name: str, ours: Loss, published: Loss, dtype: torch.dtype, copy: float) -> Iterator[GpuRow]:
    """A detector's logits of 80 classes; dense targets, and labels."""
    classes = 80
    logits, _ = data(classes, dtype)
    labels = torch.randint(2 * classes, (len(logits),), device="cuda").clamp_(max=classes)
    dense = F.one_hot(labels, classes + 1)[:, :classes].to(dtype)
    given: Any = labels
    if name not in ("sigmoid focal", "asymmetric"):
        scores = torch.rand(len(logits), device="cuda").to(dtype)
        dense = dense * scores[:, None]
        given = (labels, scores)
    mean = sigmoid_loss.mean(ours)
    check(mean, published, logits, dense)
    functions: dict[str, tuple[Loss | str, Any]] = {
        "focalkern": (mean, given),
        "focalkern, dense": (mean, dense),
        "published formula, compiled": (compiled(published), dense),
        "BCE, compiled": (compiled(sigmoid_loss.binary_cross_entropy), dense),
    }
    case = f"{name}, forward+backward {len(logits)}x{classes}"
    yield from timed("sigmoid_loss", case, dtype, steps(functions, logits), 3 * logits.nbytes, copy, None, True)


def published_rows(short: str, classes: int, copy: float) -> Iterator[GpuRow]:
    """The other losses of a softmax next to the code of their papers."""
    logits, target = data(classes, torch.float32)
    name, published = losses.PUBLISHED[short]
    module = getattr(fk, next(spec.module for spec in losses.ROW_LOSSES.values() if spec.short == short))()
    check(module, published, logits, target)
    functions: dict[str, tuple[Loss | str, Any]] = {
        "focalkern": (module, target),
        "published algorithm, compiled": (compiled(published), target),
        "cross_entropy, compiled": (compiled(F.cross_entropy), target),
    }
    case = f"{name}, forward+backward {len(logits)}x{classes}"
    yield from timed("row_loss", case, logits.dtype, steps(functions, logits), 3 * logits.nbytes, copy, None, True)


def linear_rows() -> Iterator[GpuRow]:
    """Head and loss in one, in bfloat16: the time and the additional memory of a step."""
    words, features, classes = HEAD
    torch.manual_seed(0)
    x = torch.randn(words, features, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (3 / features**0.5 * torch.randn(classes, features, device="cuda")).bfloat16().requires_grad_()
    y = torch.randint(classes, (words,), device="cuda")

    def of_linear(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), y)

    def focal_of_linear(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return fk.focal_loss(F.linear(x, w), y, 2.0)

    functions: dict[str, Any] = {
        "focalkern": lambda x, w, y: fk.linear_focal_loss(x, w, y, 2.0),
        "focal_loss of linear": focal_of_linear,
        "cross_entropy of linear": of_linear,
        "cross_entropy of linear, compiled": torch.compile(of_linear, dynamic=False),
        "Liger-Kernel fused linear cross-entropy": of_liger("liger_fused_linear_cross_entropy"),
    }
    wanted = torch.autograd.grad(focal_of_linear(x, w, y), (x, w))
    found = torch.autograd.grad(functions["focalkern"](x, w, y), (x, w))
    for ours, separate in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, separate, rtol=0.05, atol=0.02 * separate.abs().max().item())
    del wanted, found
    own = float("nan")
    for name, function in functions.items():
        row = GpuRow("linear_focal_loss", "forward+backward " + "x".join(map(str, HEAD)), "bfloat16", name)
        try:
            if isinstance(function, str):
                raise ImportError(function)

            def run(function: Any = function) -> object:
                loss = function(x, w, y)
                return torch.autograd.grad(loss[0] if isinstance(loss, tuple) else loss, (x, w))

            run()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            extra = (torch.cuda.max_memory_allocated() - before) / 2**20
            row.median_us = median_us(run)
            own = row.median_us if name == "focalkern" else own
            row.ratio = row.median_us / own
            row.note = f"{extra:.0f} MiB beside input and weight, gradients included"
        except Exception as error:
            row.note = f"absent: {type(error).__name__}: {error}".splitlines()[0]
        yield row


def fit_rows(n: int, classes: int) -> Iterator[GpuRow]:
    """Fits of calibrators to logits that lie on the GPU; the ratio is to temperature scaling."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(n, classes, device="cuda")
    target = torch.randint(classes, (n,), device="cuda")
    logits[torch.arange(n, device="cuda"), target] += 8
    first = float("nan")
    for name in CALIBRATORS:
        row = GpuRow("fit", f"{n}x{classes}", "float32", name)
        row.median_us = median_us(lambda name=name: getattr(fk, name)().fit(logits, target))
        first = row.median_us if name == CALIBRATORS[0] else first
        row.ratio = row.median_us / first
        yield row
