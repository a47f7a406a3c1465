"""Times small calls, options and serving, next to the call that a user would make without focalkern.

A row's factor is the time of the plain call over the time of focalkern's; below 1 focalkern is slower. If the other
provider is focalkern too (without the option, with a contiguous tensor, or with a calibrator's module), the factor
shows the cost of the option.
"""

import functools
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import focalkern as fk
from benchmarks.harness import Provider, Row, measure, why_absent
from benchmarks.speed.focal_loss import forward_backward
from focalkern import fallback
from focalkern.fallback._compile import compile_on

Case = tuple[str, int, int, list[Provider]]
"""Name, rows, classes, and the providers, with focalkern's call first."""

GROUPS: dict[str, Callable[[bool], Iterator[Case]]] = {}


def group(cases: Callable[[bool], Iterator[Case]]) -> Callable[[bool], Iterator[Case]]:
    GROUPS[cases.__name__] = cases
    return cases


def drawn(n: int, classes: int, *pixels: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, classes, *pixels, generator=generator) * scale
    return logits, torch.randint(classes, (n, *pixels), generator=generator)


def step(loss: Callable[..., Tensor], logits: Tensor, target: Tensor, **options: Any) -> Callable[[], object]:
    leaf = logits.detach().requires_grad_()
    return forward_backward(lambda *arguments: loss(*arguments, **options), leaf, target)


@group
def losses(quick: bool) -> Iterator[Case]:
    """Small batches: forward alone, and forward and backward."""
    for n, classes in ((1, 10), (32, 10), (64, 10), (128, 1000)):
        logits, target = drawn(n, classes)
        yield (
            f"focal loss, forward {n}x{classes}",
            n,
            classes,
            [
                Provider("focalkern", lambda z=logits, y=target: fk.focal_loss(z, y, 2.0)),
                Provider("cross_entropy", lambda z=logits, y=target: F.cross_entropy(z, y)),
            ],
        )
        yield (
            f"focal loss {n}x{classes}",
            n,
            classes,
            [
                Provider("focalkern", step(fk.focal_loss, logits, target, gamma=2.0)),
                Provider("cross_entropy", step(F.cross_entropy, logits, target)),
            ],
        )


@group
def gammas(quick: bool) -> Iterator[Case]:
    """Gammas from a table, against a gamma that is a number."""
    for n, classes in ((1, 10), (32, 10)):
        logits, target = drawn(n, classes)
        for name, module in (("FLSD", fk.FLSDLoss()), ("AdaFocal", fk.AdaFocalLoss())):
            providers = [
                Provider("focalkern", step(module, logits, target)),
                Provider("focal loss", step(fk.FocalLoss(3.0), logits, target)),
                Provider("cross_entropy", step(F.cross_entropy, logits, target)),
            ]
            yield f"{name} {n}x{classes}", n, classes, providers


@group
def smoothing(quick: bool) -> Iterator[Case]:
    """Label smoothing and class probabilities, against cross-entropy with the same option."""
    shapes = ((128, 1000), (4096, 100), (16384, 10), (128, 32000))
    for n, classes in shapes[:1] if quick else shapes:
        logits, target = drawn(n, classes)
        probs = torch.randn(n, classes, generator=torch.Generator().manual_seed(1)).softmax(1)
        named: list[tuple[str, Callable[..., Tensor], dict[str, Any]]] = [
            ("focal loss", fk.focal_loss, {"gamma": 2.0}),
            ("poly focal loss", fk.poly_focal_loss, {"gamma": 2.0}),
            ("Brier", fk.BrierLoss(label_smoothing=0.1), {}),
        ]
        for name, loss, options in named:
            smoothed = options | ({} if isinstance(loss, nn.Module) else {"label_smoothing": 0.1})
            providers = [
                Provider("focalkern", step(loss, logits, target, **smoothed)),
                Provider("cross_entropy", step(F.cross_entropy, logits, target, label_smoothing=0.1)),
            ]
            yield f"{name}, smoothing 0.1 {n}x{classes}", n, classes, providers
        providers = [
            Provider("focalkern", step(fk.focal_loss, logits, probs, gamma=2.0)),
            Provider("cross_entropy", step(F.cross_entropy, logits, probs)),
        ]
        yield f"focal loss, class probabilities {n}x{classes}", n, classes, providers
    logits, target = drawn(4096, 100)
    providers = [
        Provider("focalkern", step(fk.DualFocalLoss(label_smoothing=0.1), logits, target)),
        Provider("without smoothing", step(fk.DualFocalLoss(), logits, target)),
    ]
    yield "dual focal loss, smoothing 0.1 4096x100", 4096, 100, providers


@group
def extras(quick: bool) -> Iterator[Case]:
    """Statistics of the rows and the z-loss, against the loss without them."""
    plain = list(itertools.product(((1024, 1000), (4096, 100), (128, 32000)), (torch.float32, torch.bfloat16), ({},)))
    smoothed = [((1024, 1000), torch.float32, {"label_smoothing": 0.1})]
    for (n, classes), dtype, common in plain[:1] if quick else plain + smoothed:
        logits, target = drawn(n, classes)
        name = (
            "focal loss" + (" in bfloat16" if dtype == torch.bfloat16 else "") + (", smoothing 0.1" if common else "")
        )
        for option, value in (("return_stats", True), ("z_loss", 1e-4)):
            providers = [
                Provider("focalkern", step(loss_alone, logits.to(dtype), target, **common, **{option: value})),
                Provider(f"without {option}", step(loss_alone, logits.to(dtype), target, **common)),
            ]
            yield f"{name}, {option} {n}x{classes}", n, classes, providers


def loss_alone(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The focal loss without its statistics."""
    found = fk.focal_loss(logits, target, 2.0, **options)
    return found.loss if isinstance(found, fk.LossWithStats) else found


@group
def layouts(quick: bool) -> Iterator[Case]:
    """Crops and permuted pixels, against contiguous tensors of the same values."""
    whole, target = drawn(4, 20, 160, 160)
    crop = target[..., 16:144, 16:144]
    for name, part in (
        ("a crop", whole[..., 16:144, 16:144]),
        ("channels last", whole.to(memory_format=torch.channels_last)[..., :128, :128]),
        ("transposed pixels", whole.transpose(2, 3)[..., :128, :128]),
    ):
        contiguous = part.contiguous()

        def run(z: Tensor, y: Tensor = crop) -> Callable[[], object]:
            leaf = z.detach().requires_grad_()  # keeps the strides
            return lambda: torch.autograd.grad(fk.focal_loss(leaf, y, 2.0), leaf)[0]

        yield (
            f"focal loss, {name} of 4x20x128x128",
            4 * 128 * 128,
            20,
            [Provider("focalkern", run(part)), Provider("contiguous", run(contiguous))],
        )


@group
def heads(quick: bool) -> Iterator[Case]:
    """Fused linear head and loss, with few tokens or a narrow head."""
    shapes = ((32, 64, 50), (32, 64, 1000), (256, 128, 32000))
    for n, features, classes in shapes[:2] if quick else shapes:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(n, features, generator=generator, requires_grad=True)
        weight = (torch.randn(classes, features, generator=generator) / features**0.5).requires_grad_()
        target = torch.randint(classes, (n,), generator=generator)

        def run(loss: Callable[..., Tensor], h: Tensor = hidden, w: Tensor = weight) -> Callable[[], object]:
            return lambda: torch.autograd.grad(loss(h, w), (h, w))

        yield (
            f"linear focal loss {n}x{features}x{classes}",
            n,
            classes,
            [
                Provider("focalkern", run(lambda h, w, y=target: fk.linear_focal_loss(h, w, y, 2.0))),
                Provider("F.linear and cross_entropy", run(lambda h, w, y=target: F.cross_entropy(F.linear(h, w), y))),
            ],
        )


@group
def compiled(quick: bool) -> Iterator[Case]:
    """The focal loss inside a compiled graph."""
    if quick:
        return
    for n, classes in ((32, 10), (4096, 100)):
        logits, target = drawn(n, classes)
        focal = torch.compile(lambda z, y: fk.focal_loss(z, y, 2.0))
        plain = torch.compile(F.cross_entropy)
        yield (
            f"compiled focal loss {n}x{classes}",
            n,
            classes,
            [
                Provider("focalkern", step(focal, logits, target)),
                Provider("compiled cross_entropy", step(plain, logits, target)),
                Provider("eager focal loss", step(fk.focal_loss, logits, target, gamma=2.0)),
                Provider("cross_entropy", step(F.cross_entropy, logits, target)),
            ],
        )


@group
def plain_torch(quick: bool) -> Iterator[Case]:
    """Plain torch, compiled, as on GPUs without kernels, against eager plain torch and the kernels."""
    if quick:
        return
    n, classes, options = 8192, 1000, (None, None, 1, -100, 0.0, False)
    logits, target = drawn(n, classes)
    run = step(lambda z, y: fallback.focal_loss(z, y, 2.0, *options), logits, target)

    def run_compiled() -> object:
        compile_on(["cpu"])
        try:
            return run()
        finally:
            compile_on([])

    yield (
        f"plain torch, compiled {n}x{classes}",
        n,
        classes,
        [
            Provider("focalkern", run_compiled),
            Provider("eager", run),
            Provider("kernels", step(fk.focal_loss, logits, target, gamma=2.0)),
        ],
    )


@group
def serving(quick: bool) -> Iterator[Case]:
    """``predict_proba`` of one row and of many, against the calibrator's module or the formula written out."""
    for classes in (10, 1000):
        logits, labels = drawn(4000, classes)
        logits[torch.arange(4000), labels] += 3.0
        made: dict[str, Any] = {
            "temperature": fk.TemperatureScaling(),
            "focal temperature": fk.FocalTemperatureScaling(gammas=(1.0,)),
            "isotonic": fk.IsotonicCalibration(),
            "structured": fk.StructuredScaling(kind="vector"),
            "histogram": fk.HistogramBinning(),
            "spline": fk.SplineScaling(),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fk.CalibrationWarning)
            for calibrator in made.values():
                calibrator.fit(logits, labels)
        for name, calibrator in made.items():
            for n in (1,) if quick else (1, 4000):
                rows = logits[:n]
                module = calibrator.as_module()
                providers = [
                    Provider("focalkern", lambda c=calibrator, z=rows: c.predict_proba(z)),
                    Provider("its module", lambda m=module, z=rows: m(z)),
                ]
                if name == "temperature":
                    scale = 1 / calibrator.temperature_
                    providers.append(Provider("(z / T).softmax", lambda s=scale, z=rows: (z * s).softmax(-1)))
                yield f"predict_proba, {name} {n}x{classes}", n, classes, providers


@group
def exported(quick: bool) -> Iterator[Case]:
    """The graph for ONNX of one row, in torch and in onnxruntime."""
    try:
        import onnxruntime
    except (ImportError, RuntimeError) as error:
        onnxruntime, absent = None, why_absent(error)
    for classes in (10, 1000):
        logits, labels = drawn(4000, classes)
        logits[torch.arange(4000), labels] += 3.0
        row = logits[:1]
        made = {"temperature": fk.TemperatureScaling(), "focal temperature": fk.FocalTemperatureScaling(gammas=(1.0,))}
        for name, calibrator in made.items():
            calibrator.fit(logits, labels)
            scale = 1 / calibrator.temperature_
            module = calibrator.as_module(fused=False).eval()
            session: Callable[[], object] | None = None
            if onnxruntime is not None:
                with tempfile.TemporaryDirectory() as folder:
                    path = str(Path(folder, "calibrator.onnx"))
                    names = {"input_names": ["logits"], "output_names": ["output"]}
                    torch.onnx.export(module, (row,), path, dynamo=True, verbose=False, **names)
                    read = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
                session = functools.partial(read.run, None, {"logits": row.numpy()})
            providers = [
                Provider("focalkern", lambda m=module, z=row: m(z)),
                Provider("fused", functools.partial(calibrator.as_module(), row)),
                Provider("onnxruntime", session, absent="" if session else absent),
                Provider("(z / T).log_softmax", lambda s=scale, z=row: (z * s).log_softmax(-1)),
            ]
            yield f"graph for ONNX, {name} 1x{classes}", 1, classes, providers


@group
def metrics(quick: bool) -> Iterator[Case]:
    """Metrics in one call, and the ``update`` of a metric of torchmetrics."""
    try:
        import torchmetrics.classification as theirs

        from focalkern.integrations import torchmetrics as ours
    except (ImportError, RuntimeError) as error:
        yield "update", 0, 0, [Provider("focalkern", None, absent=why_absent(error))]
        return

    for n, classes in ((32, 10), (256, 100), (1024, 1000))[: 2 if quick else 3]:
        logits, target = drawn(n, classes)
        probs = logits.softmax(1)
        pairs: list[tuple[str, Any, Any]] = [
            ("CalibrationError", ours.CalibrationError(), theirs.MulticlassCalibrationError(classes)),
            ("NegativeLogLikelihood", ours.NegativeLogLikelihood(), None),
            ("ClasswiseCalibrationError", ours.ClasswiseCalibrationError(classes), None),
        ]
        for name, own, peer in pairs:
            providers = [Provider("focalkern", lambda m=own, p=probs, y=target: m.update(p, y))]
            if peer is not None:  # torchmetrics keeps all rows
                providers.append(
                    Provider("torchmetrics", lambda m=peer, p=probs, y=target: (m.update(p, y), m.reset()))
                )
            yield f"update, {name} {n}x{classes}", n, classes, providers
    n = 10_000 if quick else 1_000_000
    probs, target = drawn(n, 10)[0].softmax(1), drawn(n, 10)[1]
    peer = theirs.MulticlassCalibrationError(10)
    providers = [
        Provider("focalkern", lambda: fk.metrics.expected_calibration_error(probs, target)),
        Provider("torchmetrics", lambda: (peer.reset(), peer(probs, target))),
    ]
    yield f"expected_calibration_error {n}x10", n, 10, providers


@group
def fits(quick: bool) -> Iterator[Case]:
    """Fits of a calibrator to one set of rows."""
    for n, classes in ((2000, 10),) if quick else ((2000, 10), (5000, 100)):
        logits, labels = drawn(n, classes, scale=2.0)
        logits[torch.arange(n), labels] += 3.0
        providers = [
            Provider("focalkern", lambda z=logits, y=labels: fk.FocalTemperatureScaling().fit(z, y)),
            Provider("temperature scaling", lambda z=logits, y=labels: fk.TemperatureScaling().fit(z, y)),
        ]
        yield f"fit, focal temperature {n}x{classes}", n, classes, providers


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    if device != "cpu":
        return
    for name, n, classes, providers in itertools.chain.from_iterable(cases(quick) for cases in GROUPS.values()):
        if wanted(f"{name} float32"):
            yield measure(
                op="calls",
                case=name,
                n=n,
                classes=classes,
                dtype=torch.float32,
                providers=providers,
                bytes_moved=float("nan"),
                copy=None,
                seconds=seconds / 4,
            )
