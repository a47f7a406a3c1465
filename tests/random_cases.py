"""Random cases of every operator against float64: value, all first gradients, and sometimes more.

    python tests/random_cases.py --seed 0 --count 1000
    python tests/random_cases.py --seed 4711 --count 1          one draw again
    python tests/random_cases.py --only map,sigmoid_focal

A draw chooses operator, layout, dtype, number of classes (to 300,000), ties, classes at -inf, saturated rows, weights,
smoothing, soft targets and every kind of gamma. The oracle is `focalkern.reference` in float64 of the inputs as they
are after rounding. A failure is one line with the seed and the arguments. test_random_cases.py runs some.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import focalkern as fk
from focalkern import reference

DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Relative to the largest number of a row: some roundings of the computation, then one of the result. 1e-6 is the
# contract of float32; a gradient is a sum of terms of either sign.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
SMALLEST = {torch.float64: 1e-300, torch.float32: 1e-36, torch.bfloat16: 1e-36, torch.float16: 2.0**-23}
FEW = (2, 2, 3, 4, 5, 7, 8, 10, 10, 16, 17, 31, 32, 33, 64)
MANY = (100, 101, 128, 255, 257, 512, 1000, 1025, 4097)
VOCABULARY = (32001, 50257, 128256, 300000)


@dataclass
class Draw:
    """A seed's choices. ``said`` is what a failure prints."""

    seed: int
    random: torch.Generator = field(init=False)
    said: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)

    def below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.random))

    def chance(self, p: float) -> bool:
        return float(torch.rand((), generator=self.random)) < p

    def pick(self, name: str, values: Any) -> Any:
        self.said[name] = value = values[self.below(len(values))]
        return value

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random, dtype=torch.float64)

    def labels(self, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(high, shape, generator=self.random)


@dataclass
class Case:
    ours: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    inputs: list[Tensor]  # what has gradients
    condition: float = 1.0  # by how much the operator magnifies rounding
    rows_last: bool = False  # classes are the last dimension of the first input, not the second
    twice: bool = True  # differentiable twice
    slope_of_log: bool = False  # the gradient of the first input is compared as that of its logarithm
    operator: tuple[str, tuple[Any, ...]] | None = None  # of the compiled module, and its arguments


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def draw_classes(draw: Draw) -> int:
    pool = VOCABULARY if draw.chance(0.02) else MANY if draw.chance(0.25) else FEW
    return int(draw.pick("classes", pool))


def draw_rows(draw: Draw, classes: int) -> int:
    rows = 1 + draw.below(4 if classes > 5000 else max(4, min(200, 20000 // classes)))
    draw.said["rows"] = rows
    return rows


def draw_logits(draw: Draw, rows: int, classes: int, dtype: torch.dtype) -> Tensor:
    """[rows, classes] in float64, values of ``dtype``."""
    kind = draw.pick("logits", ("normal", "normal", "normal", "near", "far", "ties", "constant", "leader", "denormal"))
    z = draw.normal(rows, classes) * draw.pick("scale", (0.3, 1.0, 3.0, 10.0))
    if kind == "near":
        z = z * 1e-3
    elif kind == "far":
        z = z * draw.pick("far", (10.0, 100.0, 1000.0))
    elif kind == "ties":
        z = z.round()
    elif kind == "constant":
        z = z[:, :1].expand(-1, classes).clone()
    elif kind in ("leader", "denormal"):
        # Where 1 - p, then p of the others, leave the digits of the type.
        low, high = (5.0, 60.0) if kind == "leader" else (700.0, 745.0) if dtype == torch.float64 else (86.0, 105.0)
        place = draw.labels(classes, (rows, 1))
        gap = low + (high - low) * draw.uniform(rows, 1)
        z = z * 0.1
        z = z.scatter(1, place, z.gather(1, place) + gap)
    if draw.chance(0.2):
        draw.said["masked"] = True
        mask = draw.uniform(rows, classes) < 0.3
        mask.scatter_(1, z.argmax(1, keepdim=True), False)
        z = z.masked_fill(mask, -math.inf)
    limit = torch.finfo(dtype).max / 4
    return torch.where(z.isfinite(), z.clamp(-limit, limit), z).to(dtype).double()


def laid_out(draw: Draw, z: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, classes] as (C), (N, C) or (N, C, d1, ...), contiguous or not; classes are dimension 1."""
    rows, classes = z.shape
    form = draw.pick("layout", ("rows", "rows", "rows", "vector", "pixels", "pixels", "transposed", "gap", "channels"))
    z = z.to(dtype)
    if form == "vector":
        return z[0]
    if form in ("pixels", "channels") and rows > 3:
        d = 1 + draw.below(3)
        n = rows // (2 * d)
        if n:
            z = z[: n * 2 * d].reshape(n, d, 2, classes)
            return z.movedim(-1, 1) if form == "channels" else z.movedim(-1, 1).contiguous()
    if form == "transposed":
        return z.t().contiguous().t()
    if form == "gap":
        wide = torch.full((rows, classes + 3), math.nan, dtype=dtype)
        wide[:, 1 : classes + 1] = z
        return wide[:, 1 : classes + 1]
    return z


def outer_shape(z: Tensor) -> tuple[int, ...]:
    return () if z.dim() == 1 else (z.shape[0], *z.shape[2:])


def draw_row_target(draw: Draw, z: Tensor, soft: bool) -> Tensor:
    """Labels, some ignored, at classes that can occur; or probabilities."""
    shape = outer_shape(z)
    flat = (z if z.dim() == 1 else z.movedim(1, -1)).double()
    if soft:
        p = (2 * draw.normal(*flat.shape)).softmax(-1)
        p = torch.where(draw.uniform(*flat.shape) < 0.3, 0.0, p)
        p = torch.where(flat == -math.inf, 0.0, p)
        p = p / p.sum(-1, keepdim=True).clamp(min=1e-9)
        dtype = torch.float64 if z.dtype == torch.float64 else torch.float32
        return (p if z.dim() == 1 else p.movedim(-1, 1)).to(dtype)
    possible = torch.where(flat == -math.inf, -1.0, draw.uniform(*flat.shape))
    target = possible.argmax(-1)
    if draw.chance(0.3):
        draw.said["ignored"] = True
        target = torch.where(draw.uniform(*shape) < 0.2, -100, target)
    return target


def draw_gamma(draw: Draw, shape: tuple[int, ...], negative: bool, tables: bool) -> tuple[Any, float]:
    """A gamma, and the largest magnitude of it."""
    kind = draw.pick("gamma_kind", ("number", "number", "tensor", "rows", "table") if tables else ("number", "rows"))
    numbers = (0.0, 0.0, 0.5, 1.0, 2.0, 2.0, 3.7, 5.0, 12.0, *((-0.5, -2.0, -3.5) if negative else ()))
    if kind == "table":
        gammas = [5.0, -1.5 if negative else 1.5, 3.0, 0.0]
        return fk.GammaTable([0.0, 0.0131, 0.2717, 0.7133, 1.0], gammas), 5.0
    if kind == "rows":
        gamma = 5 * draw.uniform(*shape) - (2 if negative else 0)
        return gamma, 5.0
    gamma = draw.pick("gamma", numbers)
    return (torch.tensor(gamma, dtype=torch.float64) if kind == "tensor" else gamma), abs(gamma)


def row_options(draw: Draw, classes: int) -> dict[str, Any]:
    options: dict[str, Any] = {"reduction": draw.pick("reduction", ("none", "none", "mean", "sum"))}
    if draw.chance(0.3):
        draw.said["weight"] = True
        options["weight"] = draw.uniform(classes) + 0.05
        if draw.chance(0.3):
            options["weight"][draw.below(classes)] = 0.0
    if draw.chance(0.25):
        options["label_smoothing"] = draw.pick("label_smoothing", (0.1, 0.5, 1.0))
    return options


# ---- operators: what is called, and the same in float64 --------------------------------------------------------------


def as_real(value: Any, dtype: torch.dtype) -> Any:
    """Parameters are given in the dtype of the computation."""
    real = torch.float64 if dtype == torch.float64 else torch.float32
    return value.to(real) if isinstance(value, Tensor) and value.is_floating_point() else value


def row_loss(name: str) -> Callable[[Draw], Case]:
    def case(draw: Draw) -> Case:
        dtype = draw.pick("dtype", DTYPES)
        classes = draw_classes(draw)
        z = laid_out(draw, draw_logits(draw, draw_rows(draw, classes), classes, dtype), dtype)
        if draw.said.get("masked") and name == "dual_focal":
            z = z.clamp(min=-50.0)
        soft = name != "dual_focal" and draw.chance(0.2)
        draw.said["soft"] = soft
        target = draw_row_target(draw, z, soft)
        options = {key: as_real(value, dtype) for key, value in row_options(draw, classes).items()}
        gamma, magnitude = 2.0, 2.0
        if name in ("focal", "poly_focal"):
            gamma, magnitude = draw_gamma(draw, outer_shape(z), name == "focal", True)
            gamma = as_real(gamma, dtype)
        if name == "focal" and not isinstance(gamma, Tensor) and draw.chance(0.15):
            options["detach_modulation"] = draw.said["detach"] = True
        inputs = [z]
        if isinstance(gamma, Tensor):
            inputs.append(gamma)
        if soft:
            inputs.append(target)

        def call(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
            left = list(arguments)
            logits = left.pop(0)
            wide = logits.dtype == torch.float64 and dtype != torch.float64
            of_gamma = left.pop(0) if isinstance(gamma, Tensor) else gamma
            of_target = left.pop(0) if soft else target
            given = {
                key: value.double() if wide and isinstance(value, Tensor) else value for key, value in options.items()
            }
            if name in ("focal", "poly_focal"):
                return function(logits, of_target, of_gamma, **given)
            return function(logits, of_target, **given)

        def module(kind: Any) -> Callable[..., Tensor]:
            return lambda logits, of_target, **given: kind(**given)(logits, of_target)

        functions: dict[str, tuple[Any, Any]] = {
            "focal": (fk.focal_loss, reference.focal_loss),
            "poly_focal": (fk.poly_focal_loss, reference.poly_focal_loss),
            "dual_focal": (module(fk.DualFocalLoss), reference.dual_focal_loss),
            "brier": (module(fk.BrierLoss), reference.brier_loss),
        }
        ours, oracle = functions[name]
        magnitude = 5.0 if name == "dual_focal" else magnitude
        operator = None
        if name == "focal" and not isinstance(gamma, fk.GammaTable):
            of_gamma = gamma if isinstance(gamma, Tensor) else torch.tensor(gamma, dtype=torch.float64)
            smoothing, detached = options.get("label_smoothing", 0.0), options.get("detach_modulation", False)
            settings = (0, -100, smoothing, detached, True)
            operator = ("focal_loss_forward", (z, target, of_gamma, None, options.get("weight"), *settings))
        return Case(lambda *a: call(ours, *a), lambda *a: call(oracle, *a), inputs, 1 + magnitude, operator=operator)

    return case


def mmce(draw: Draw) -> Case:
    dtype = draw.pick("dtype", (torch.float32, torch.float64))
    classes = min(draw_classes(draw), 1000)
    # Confidences that tie, or vanish differently in float64, make other kernels: only rows that are apart.
    z = (3 * draw.normal(draw_rows(draw, classes) + 1, classes)).to(dtype)
    target = draw_row_target(draw, z, False)
    weighted = draw.pick("weighted", (False, True))

    def oracle(logits: Tensor) -> Tensor:
        keep = target != -100
        kept, labels = logits[keep], target[keep]
        entropy = torch.nn.functional.cross_entropy(kept, labels)
        confidence, best = kept.softmax(1).max(1)
        correct = (best == labels).double()
        a = (correct - confidence) / len(labels)
        if weighted:
            right, wrong = correct.sum(), (1 - correct).sum()
            if right == 0 or wrong == 0:
                return entropy
            a = correct * (1 - confidence) / right - (1 - correct) * confidence / wrong
        kernel = (-(confidence[:, None] - confidence[None]).abs() / 0.4).exp()
        return entropy + 2 * (a @ kernel @ a).clamp(min=0).sqrt()

    if int((target != -100).sum()) < 1:
        target = torch.zeros_like(target)
    return Case(lambda logits: fk.MMCELoss(weighted=weighted)(logits, target), oracle, [z], 30.0, twice=False)


def linear(draw: Draw) -> Case:
    dtype = draw.pick("dtype", (torch.float32, torch.float64))
    classes, rows, features = min(draw_classes(draw), 5000), 1 + draw.below(60), draw.pick("features", (1, 3, 16, 33))
    x, w = draw.normal(rows, features).to(dtype), draw.normal(classes, features).to(dtype)
    b = draw.normal(classes).to(dtype)
    if draw.chance(0.3):
        b[1 + draw.below(classes - 1) :] = -math.inf
    possible = int(b.isfinite().sum())
    target = draw.labels(possible, (rows,))
    target[draw.uniform(rows) < 0.1] = -100
    target[0] = 0
    gamma, magnitude = draw_gamma(draw, (rows,), True, True)
    gamma = as_real(gamma, dtype)
    reduction = draw.pick("reduction", ("none", "mean", "sum"))
    chunk = draw.pick("chunk_rows", (None, 1, 7, 64))
    inputs = [x, w, b, *([gamma] if isinstance(gamma, Tensor) else [])]

    def ours(x: Tensor, w: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        of = rest[0] if rest else gamma
        return fk.linear_focal_loss(x, w, target, of, linear_bias=b, reduction=reduction, chunk_rows=chunk)

    def oracle(x: Tensor, w: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        of = rest[0] if rest else gamma
        return reference.focal_loss(torch.nn.functional.linear(x, w, b), target, of, reduction=reduction)

    return Case(ours, oracle, inputs, (4 + magnitude) * math.sqrt(features), twice=False)


def properized(draw: Draw) -> Case:
    dtype = draw.pick("dtype", (torch.float32, torch.float64))
    classes = min(draw_classes(draw), 1000)
    z = laid_out(draw, (3 * draw.normal(min(draw_rows(draw, classes), 40), classes)), dtype)
    target = draw_row_target(draw, z, False)
    gamma = draw.pick("gamma", (0.0, 0.3, 1.0, 2.0, 5.0))
    dimension = 0 if z.dim() == 1 else 1

    def oracle(logits: Tensor) -> Tensor:
        q = fk.inverse_focal_calibration_map(logits.movedim(dimension, -1), gamma, log=True)
        back = reference.focal_calibration_map(q.detach(), gamma, log=True)
        wanted = logits.detach().movedim(dimension, -1).log_softmax(-1)
        torch.testing.assert_close(back, wanted, rtol=1e-8, atol=1e-8)
        return reference.focal_loss(q.movedim(-1, dimension), target, gamma, reduction="none")

    return Case(lambda a: fk.properized_focal_loss(a, target, gamma, reduction="none"), oracle, [z], 8 + gamma)


def elements(name: str) -> Callable[[Draw], Case]:
    def case(draw: Draw) -> Case:
        dtype = draw.pick("dtype", DTYPES)
        n, classes = 1 + draw.below(50), 1 + draw.below(90)
        draw.said["shape"] = (n, classes)
        x = draw.normal(n, classes) * draw.pick("scale", (0.01, 1.0, 5.0, 30.0, 100.0))
        if draw.chance(0.2):
            x = x.round()
        x = x.to(dtype)
        form = draw.pick("layout", ("rows", "rows", "flat", "transposed"))
        if form == "flat":
            x = x.reshape(-1)
        if form == "transposed":
            x = x.t().contiguous().t()
        kind = draw.pick("target", ("hard", "soft", "labels") if x.dim() == 2 else ("hard", "soft"))
        if kind == "labels":
            target = draw.labels(classes + 1, (n,))
            target[draw.uniform(n) < 0.1] = -100
        elif kind == "hard":
            target = (draw.uniform(*x.shape) < 0.2).to(dtype)
        else:
            target = draw.uniform(*x.shape).to(dtype)
            target = torch.where(draw.uniform(*x.shape) < 0.3, target.round(), target)
        reduction = draw.pick("reduction", ("none", "mean", "sum"))
        options: dict[str, Any] = {"reduction": reduction}
        if draw.chance(0.3):
            draw.said["weight"] = True
            options["weight"] = as_real(draw.uniform(x.shape[-1]) + 0.1, dtype)
        # Near p = t the power of their distance, below 1, has no digits.
        steep = name == "quality_focal" and kind == "soft"
        gamma = draw.pick("gamma", (1.0, 2.0, 3.3) if steep else (0.0, 0.5, 1.0, 2.0, 2.0, 3.3))
        inputs = [x]
        if draw.chance(0.2):
            draw.said["tensor_gamma"] = True
            inputs.append(as_real(torch.tensor(gamma, dtype=torch.float64), dtype))
        if name == "sigmoid_focal":
            options["alpha"] = draw.pick("alpha", (0.25, None, 0.7))
        if name == "asymmetric":
            options["margin"] = draw.pick("margin", (0.0, 0.05, 0.2))
            options["gamma_positive"] = draw.pick("gamma_positive", (0.0, 1.0, 2.5))

        def call(module: Any, *arguments: Tensor) -> Tensor:
            wide = arguments[0].dtype == torch.float64
            given = {k: v.double() if wide and isinstance(v, Tensor) else v for k, v in options.items()}
            of_target = target.double() if wide and target.is_floating_point() else target
            of_gamma = arguments[1] if len(arguments) > 1 else gamma
            result: Tensor = getattr(module, name + "_loss")(arguments[0], of_target, of_gamma, **given)
            return result

        twice = name == "sigmoid_focal" and kind != "soft"
        return Case(lambda *a: call(fk, *a), lambda *a: call(reference, *a), inputs, 4 + gamma, twice=twice)

    return case


def calibration_map(draw: Draw) -> Case:
    dtype = draw.pick("dtype", DTYPES)
    classes = draw_classes(draw)
    z = draw_logits(draw, draw_rows(draw, classes), classes, dtype).to(dtype)
    kind = draw.pick("input_kind", ("logits", "logits", "logits", "probs"))
    if kind == "probs":
        # Not where the logarithms are too close to tell, or the gradient is that of a power that has vanished.
        z = z * 100 if draw.said["logits"] == "near" else z.clamp(-40.0, 40.0)
        z = z.double().softmax(1).to(dtype)
        z = z[(z.double().sum(1) - 1).abs() < 5e-4]
    if draw.chance(0.2):
        z = z.t().contiguous().t()
    if draw.chance(0.1) and len(z):
        z = z[0]
    shape = tuple(z.shape[:-1])
    gamma: Any = draw.pick("gamma", (0.0, 0.5, 1.0, 2.0, 5.0, 20.0, -0.3, -0.7, -0.95))
    temperature: Any = draw.pick("temperature", (1.0, 1.0, 0.1, 0.5, 2.0, 10.0))
    inputs = [z]
    per_row = draw.chance(0.3)
    if per_row:
        draw.said["per_row"] = True
        inputs += [6 * draw.uniform(*shape) - 0.95, 0.2 + 2 * draw.uniform(*shape)]
    log = draw.pick("log", (False, True))

    def call(module: Any, values: Tensor, *parameters: Tensor) -> Tensor:
        result: Tensor = module.focal_calibration_map(
            values, *(parameters or (gamma, temperature)), input_kind=kind, log=log
        )
        return result

    magnitude = 6 if per_row else abs(gamma)
    spread = float(z[z.isfinite()].abs().max()) / (0.2 if per_row else temperature) if z.numel() else 0.0
    narrow = dtype in (torch.float16, torch.bfloat16)
    condition = (4 + magnitude) * (1 + (0.0 if narrow else 0.02) * spread) + (4 / (1 + gamma) if gamma < 0 else 0)
    twice = kind == "logits" and not bool((z == -math.inf).any())
    parameters = inputs[1:] or [torch.tensor(value, dtype=torch.float64) for value in (gamma, temperature)]
    operator = ("calibration_map_forward", (z, *parameters, int(kind == "probs"), log, False, False))
    return Case(
        lambda *a: call(fk, *a),
        lambda *a: call(reference, *a),
        inputs,
        condition,
        rows_last=True,
        twice=twice,
        slope_of_log=kind == "probs",
        operator=operator,
    )


def binary_map(draw: Draw) -> Case:
    dtype = draw.pick("dtype", DTYPES)
    s = (draw.normal(1 + draw.below(300)) * draw.pick("scale", (1e-3, 1.0, 5.0, 30.0))).to(dtype)
    gamma = draw.pick("gamma", (0.0, 0.5, 2.0, 20.0, -0.3, -0.95))
    temperature = draw.pick("temperature", (1.0, 0.3, 4.0))
    log_odds = draw.pick("log_odds", (False, True))

    def call(module: Any, values: Tensor) -> Tensor:
        result: Tensor = module.binary_focal_calibration_map(values, gamma, temperature, log_odds=log_odds)
        return result

    return Case(lambda a: call(fk, a), lambda a: call(reference, a), [s], 4 + abs(gamma) + (10 if gamma < 0 else 0))


def inverse_map(draw: Draw) -> Case:
    dtype = draw.pick("dtype", (torch.float32, torch.float64))
    classes = min(draw_classes(draw), 1000)
    z = (3 * draw.normal(min(draw_rows(draw, classes), 40), classes)).to(dtype)
    if draw.chance(0.2):
        z = z.round()
    gamma = draw.pick("gamma", (0.0, 0.3, 1.0, 2.0, 10.0))

    def oracle(logits: Tensor) -> Tensor:
        q = fk.inverse_focal_calibration_map(logits, gamma, log=True)
        back = reference.focal_calibration_map(q.detach(), gamma, log=True)
        torch.testing.assert_close(back, logits.detach().log_softmax(-1), rtol=1e-8, atol=1e-8)
        return q

    return Case(lambda a: fk.inverse_focal_calibration_map(a, gamma, log=True), oracle, [z], 10 + gamma, rows_last=True)


def grid(draw: Draw) -> Case:
    dtype = draw.pick("dtype", (torch.float32, torch.float64))
    classes, rows = draw.pick("classes", (2, 3, 10, 33, 100)), 2 + draw.below(200)
    z = draw_logits(draw, rows, classes, dtype).to(dtype)
    target = draw_row_target(draw, z, False)
    target[0] = int(z[0].argmax())
    estimator = draw.pick("estimator", ("equal_width", "equal_mass", "equal_mass_interp"))
    gammas, temperatures = [-0.5, 0.0, 1.0, 5.0], [0.5, 1.0, 2.0]

    def tables(found: dict[str, Tensor]) -> Tensor:
        # A sample within rounding of a cut may change its bin, and an ECE counts in steps of such samples.
        exact = dtype == torch.float64 and draw.said["logits"] in ("normal", "leader") and not draw.said.get("masked")
        return torch.stack([found[name] for name in ("nll", "brier", "ece") if name != "ece" or exact])

    def ours(given: Tensor) -> Tensor:
        found = fk.calibration_grid(
            given.detach(), target, gammas, temperatures, criteria=("nll", "brier", "ece"), estimator=estimator
        )
        return tables(found.tables)

    def oracle(given: Tensor) -> Tensor:
        found = reference.calibration_grid(
            given.detach(), target, gammas, temperatures, criteria=("nll", "brier", "ece"), estimator=estimator
        )
        return tables(found)

    return Case(ours, oracle, [z], 20.0, twice=False)


OPERATORS: dict[str, Callable[[Draw], Case]] = {
    "focal": row_loss("focal"),
    "poly_focal": row_loss("poly_focal"),
    "dual_focal": row_loss("dual_focal"),
    "brier": row_loss("brier"),
    "mmce": mmce,
    "linear": linear,
    "properized": properized,
    "sigmoid_focal": elements("sigmoid_focal"),
    "asymmetric": elements("asymmetric"),
    "quality_focal": elements("quality_focal"),
    "map": calibration_map,
    "binary_map": binary_map,
    "inverse_map": inverse_map,
    "grid": grid,
}
# How often each is drawn: the kernels with the most ways through them most often.
SHARES = {"focal": 5, "poly_focal": 2, "map": 4, "sigmoid_focal": 2}


# ---- comparison ------------------------------------------------------------------------------------------------------


class MismatchError(AssertionError):
    pass


def compare(what: str, found: Tensor, wanted: Tensor, tolerance: float, smallest: float, dim: int | None) -> None:
    """``wanted`` in float64, to the tolerance beside the largest number along ``dim`` (each number alone for None)."""
    if found.shape != wanted.shape:
        raise MismatchError(f"{what}: shape {list(found.shape)}, not {list(wanted.shape)}")
    # Beyond the largest number of the type its result is infinite.
    wanted = torch.where(wanted.detach().to(found.dtype).isinf(), wanted.sign() * math.inf, wanted).detach()
    found = found.detach().double()
    largest = torch.finfo(torch.float64).max
    size = torch.where(wanted.isfinite(), wanted.abs(), 0.0)
    if dim is not None and size.dim() > dim and size.numel():
        size = size.amax(dim, keepdim=True)
    error = torch.where(found == wanted, 0.0, (found - wanted).abs())
    error = torch.where(found.isnan() & wanted.isnan(), 0.0, error.nan_to_num(largest, largest))
    worst = error / (tolerance * (size + smallest / tolerance))
    if worst.numel() and float(worst.max()) > 1:
        place = int(worst.argmax())
        raise MismatchError(
            f"{what}[{place}]: {float(found.reshape(-1)[place])!r}, not {float(wanted.reshape(-1)[place])!r}, "
            f"{float(worst.max()):.3g} times the tolerance {tolerance:.1e}"
        )


def leaves(inputs: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [
        (t if dtype is None else t.to(dtype)).detach().clone(memory_format=torch.preserve_format).requires_grad_()
        for t in inputs
    ]


def check(case: Case, draw: Draw) -> None:
    given = case.inputs[0]
    dtype = given.dtype
    ours, theirs = leaves(case.inputs), leaves(case.inputs, torch.float64)
    # Not of a clone, which closes gaps between rows.
    ours[0] = given.detach().requires_grad_()
    found, wanted = case.ours(*ours), case.oracle(*theirs)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    tolerance, smallest = TOLERANCE[real] * case.condition, SMALLEST[dtype]
    if found.dtype in (torch.float16, torch.bfloat16):
        tolerance = max(tolerance, TOLERANCE[found.dtype])
    rows = -1 if case.rows_last else None
    # A loss below 1e-6 counts as near 0, as in the tolerance table of the tests.
    compare(
        "value", found, wanted, tolerance, max(smallest, tolerance * 1e-3), None if rows is None else wanted.dim() - 1
    )
    if not found.requires_grad or not bool(wanted.isfinite().all()):
        return
    upstream = draw.normal(*wanted.shape) if wanted.dim() else draw.normal(1)[0]
    upstream = upstream.to(found.dtype)
    slopes = torch.autograd.grad(found, ours, upstream, create_graph=False, allow_unused=True, retain_graph=False)
    exact = torch.autograd.grad(wanted, theirs, upstream.double(), allow_unused=True)
    beside = float(upstream.double().abs().max()) if upstream.numel() else 1.0
    classes = given.dim() - 1 if case.rows_last or given.dim() == 1 else 1
    for i, (slope, reference_slope, leaf) in enumerate(zip(slopes, exact, ours, strict=True)):
        if slope is None or reference_slope is None:
            continue
        if not bool(reference_slope.isfinite().all()):
            continue
        if i == 0 and case.slope_of_log:
            infinite = reference_slope.to(slope.dtype).isinf()
            reference_slope = torch.where(infinite, reference_slope.sign() * math.inf, reference_slope)
            slope, reference_slope = slope.double() * given.double(), reference_slope * given.double()
        dim = classes if i == 0 and leaf.dim() > 1 else 0
        scaled = TOLERANCE[leaf.dtype] * case.condition * 4 if leaf.dtype == torch.float32 else TOLERANCE[leaf.dtype]
        scaled = scaled * case.condition * 4 if leaf.dtype == torch.float64 else scaled
        if TOLERANCE[dtype] > TOLERANCE[leaf.dtype]:
            scaled = max(scaled, TOLERANCE[dtype] * (4 * case.condition if dtype == torch.float32 else 1))
        compare(f"gradient {i}", slope, reference_slope, scaled, scaled * 0.1 * beside, dim if slope.dim() else None)


def check_twice(case: Case, draw: Draw) -> None:
    """A product with the Hessian, and the gradient by torch.func. Both oracles are in float64, and so are the cases."""
    if case.inputs[0].dtype != torch.float64 or not case.twice or case.inputs[0].numel() > 400:
        return
    products = []
    direction = draw.normal(*case.inputs[0].shape)
    for function in (case.ours, case.oracle):
        values = leaves(case.inputs)
        result = function(*values)
        if not bool(result.isfinite().all()):
            return
        upstream = torch.linspace(1, 2, result.numel(), dtype=torch.float64).reshape(result.shape)
        (slope,) = torch.autograd.grad(result, values[:1], upstream, create_graph=True)
        if not slope.requires_grad:
            return
        (product,) = torch.autograd.grad(slope, values[:1], direction, allow_unused=True)
        if product is None:
            return
        products.append((slope.detach(), product.detach()))
    (_, found), (_, wanted) = products
    if bool(wanted.isfinite().all()):
        scale = float(wanted.abs().max()) + 1.0
        compare("second derivative", found / scale, wanted / scale, 1e-8 * case.condition, 1e-8, None)
    rest = [t.detach() for t in case.inputs[1:]]

    def total(z: Tensor) -> Tensor:
        result = case.ours(z, *rest)
        return (result * torch.linspace(1, 2, result.numel(), dtype=torch.float64).reshape(result.shape)).sum()

    transformed = torch.func.grad(total)(case.inputs[0].detach())
    scale = float(products[0][0].abs().max()) + 1e-30
    compare("torch.func.grad", transformed / scale, products[0][0] / scale, 1e-9 * case.condition, 1e-9, None)


def check_operator(case: Case) -> None:
    """Schema and shapes without values, as torch.compile wants them."""
    if case.operator is not None and fk.build_info()["kernels"] == "compiled" and case.inputs[0].numel() < 10000:
        name, arguments = case.operator
        operator = getattr(torch.ops.focalkern, name)
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def run(seed: int, only: list[str] | None = None) -> str | None:
    """The draw of a seed: None, or what is wrong with it."""
    draw = Draw(seed)
    names = [name for name in OPERATORS for _ in range(SHARES.get(name, 1)) if only is None or name in only]
    name = draw.pick("operator", names)
    try:
        case = OPERATORS[name](draw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(case, draw)
            if seed % 5 == 0:
                check_twice(case, draw)
            if seed % 20 == 0:
                check_operator(case)
    except Exception as problem:
        message = str(problem).splitlines()[0] if str(problem) else ""
        said = ", ".join(f"{key}={value}" for key, value in draw.said.items())
        return f"seed {seed}: {type(problem).__name__}: {message} [{said}]"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first draw")
    parser.add_argument("--count", type=int, default=1000, help="draws; each has the next seed")
    parser.add_argument("--only", help="operators, separated by commas: " + ", ".join(OPERATORS))
    arguments = parser.parse_args()
    only = arguments.only.split(",") if arguments.only else None
    failures = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        problem = run(seed, only)
        if problem is not None:
            failures += 1
            print(problem, flush=True)
    print(f"{arguments.count} draws, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
