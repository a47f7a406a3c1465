"""The draws of random_cases.py: arguments from a seed, and the case that they make."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import focalkern as fk

DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
FEW = (2, 2, 3, 4, 5, 7, 8, 10, 10, 16, 17, 31, 32, 33, 64)
MANY = (100, 101, 128, 255, 257, 512, 1000, 1025, 4097)
VOCABULARY = (32001, 50257, 128256, 300000)


@dataclass
class Draw:
    """The random choices of a seed. ``said`` is the text that a failure prints."""

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
    inputs: list[Tensor]  # the tensors with gradients
    condition: float = 1.0  # factor by which the operator magnifies rounding errors
    cancels: bool = False  # a small difference of two numbers near 1 has the unit of 1
    rows_last: bool = False  # classes are the last dimension of the first input, not the second
    twice: bool = True  # differentiable twice
    slope_of_log: bool = False  # whether the gradient of the first input is compared as that of its logarithm


# ---- random arguments ------------------------------------------------------------------------------------------------


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
        # Where 1 - p, and then p of the others, fall below the digits of the type.
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
    """Labels of possible classes, some of them ignored; or class probabilities."""
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
    """A gamma and its largest magnitude."""
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
