"""The comparison of an operator with float64 for random_cases.py, and its record of the results."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from random_draws import Case, Draw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Relative to the largest number of a row: some roundings of the computation, then one of the result. 1e-6 is the
# contract of float32; gradients are sums of terms of either sign.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
SMALLEST = {torch.float64: 1e-300, torch.float32: 1e-36, torch.bfloat16: 1e-36, torch.float16: 2.0**-23}


class MismatchError(AssertionError):
    pass


# The worst error of a value, a gradient, ..., relative to the largest number of its row.
Errors = dict[str, float]


def compare(what: str, found: Tensor, wanted: Tensor, tolerance: float, smallest: float, dim: int | None) -> float:
    """Compares ``found`` with ``wanted`` in float64. The tolerance is relative to the largest number along ``dim``, or
    to each number for None. Returns the worst relative error; raises MismatchError beyond the tolerance.
    """
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
    return float(worst.max()) * tolerance if worst.numel() else 0.0


def leaves(inputs: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [
        (t if dtype is None else t.to(dtype)).detach().clone(memory_format=torch.preserve_format).requires_grad_()
        for t in inputs
    ]


def check(case: Case, draw: Draw) -> Errors:
    """The value and all first gradients."""
    given = case.inputs[0]
    dtype = given.dtype
    ours, theirs = leaves(case.inputs), leaves(case.inputs, torch.float64)
    # Not from a clone, which removes gaps between rows.
    ours[0] = given.detach().requires_grad_()
    found, wanted = case.ours(*ours), case.oracle(*theirs)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    tolerance, smallest = TOLERANCE[real] * case.condition, SMALLEST[dtype]
    if found.dtype in (torch.float16, torch.bfloat16):
        tolerance = max(tolerance, TOLERANCE[found.dtype])
    rows = -1 if case.rows_last else None
    # A loss below 1e-6 counts as near 0, as in the tests' tolerance table.
    near_zero = max(smallest, tolerance * 1e-3, torch.finfo(real).eps if case.cancels else 0.0)
    errors: Errors = {}
    errors["value"] = compare("value", found, wanted, tolerance, near_zero, None if rows is None else wanted.dim() - 1)
    if not found.requires_grad or not bool(wanted.isfinite().all()):
        return errors
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
        unit = 2.0**-24 if leaf.dtype == torch.float16 else 0.0  # of its denormal numbers
        error = compare(
            f"gradient {i}",
            slope,
            reference_slope,
            scaled,
            max(scaled * 0.1 * beside, unit),
            dim if slope.dim() else None,
        )
        name = "gradient" if i == 0 else "other gradients"
        errors[name] = max(errors.get(name, 0.0), error)
    return errors


def check_twice(case: Case, draw: Draw) -> Errors:
    """Compares a product with the Hessian, and the gradient by torch.func. Cases and oracles are in float64."""
    if case.inputs[0].dtype != torch.float64 or not case.twice or case.inputs[0].numel() > 400:
        return {}
    products = []
    direction = draw.normal(*case.inputs[0].shape)
    for function in (case.ours, case.oracle):
        values = leaves(case.inputs)
        result = function(*values)
        if not bool(result.isfinite().all()):
            return {}
        upstream = torch.linspace(1, 2, result.numel(), dtype=torch.float64).reshape(result.shape)
        (slope,) = torch.autograd.grad(result, values[:1], upstream, create_graph=True)
        if not slope.requires_grad:
            return {}
        (product,) = torch.autograd.grad(slope, values[:1], direction, allow_unused=True)
        if product is None:
            return {}
        products.append((slope.detach(), product.detach()))
    (_, found), (_, wanted) = products
    errors: Errors = {}
    if bool(wanted.isfinite().all()):
        scale = float(wanted.abs().max()) + 1.0
        errors["second derivative"] = compare(
            "second derivative", found / scale, wanted / scale, 1e-8 * case.condition, 1e-8, None
        )
    rest = [t.detach() for t in case.inputs[1:]]

    def total(z: Tensor) -> Tensor:
        result = case.ours(z, *rest)
        return (result * torch.linspace(1, 2, result.numel(), dtype=torch.float64).reshape(result.shape)).sum()

    transformed = torch.func.grad(total)(case.inputs[0].detach())
    scale = float(products[0][0].abs().max()) + 1e-30
    errors["torch.func.grad"] = compare(
        "torch.func.grad", transformed / scale, products[0][0] / scale, 1e-9 * case.condition, 1e-9, None
    )
    return errors


class _Calls(TorchDispatchMode):
    """Records the focalkern operators that run, each with the arguments of its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "focalkern":
            self.found.setdefault(func, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def check_operators(case: Case) -> list[str]:
    """Checks the schemas and fake kernels, which torch.compile needs, of all operators of the case, forward and
    backward. Returns their names.
    """
    if case.inputs[0].numel() >= 10000:
        return []
    values = leaves(case.inputs)
    with _Calls() as calls:
        result = case.ours(*values)
        if result.requires_grad:
            torch.autograd.grad(result.sum(), values, allow_unused=True)
    for operator, (arguments, options) in calls.found.items():
        given = [value.detach() if isinstance(value, Tensor) else value for value in arguments]
        torch.library.opcheck(operator, tuple(given), options, test_utils=("test_schema", "test_faketensor"))
    return [str(operator) for operator in calls.found]


@dataclass
class Figures:
    """Draws, failures and the worst errors of each operator."""

    draws: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    worst: dict[str, dict[str, float]] = field(default_factory=dict)  # by operator, then by kind and dtype
    checked: set[str] = field(default_factory=set)  # the operators that opcheck has checked

    def add(self, operator: str, dtype: torch.dtype, errors: Errors) -> None:
        of_operator = self.worst.setdefault(operator, {})
        for kind, error in errors.items():
            key = f"{kind} {str(dtype).removeprefix('torch.')}"
            of_operator[key] = max(of_operator.get(key, 0.0), error)

    def table(self) -> str:
        lines = [f"{'operator':14} {'draws':>6} {'failures':>8}  worst error, relative to the largest of its row"]
        for name in sorted(self.draws):
            errors = ", ".join(f"{kind} {error:.1e}" for kind, error in sorted(self.worst.get(name, {}).items()))
            lines.append(f"{name:14} {self.draws[name]:6} {self.failures.get(name, 0):8}  {errors}")
        lines.append(f"opcheck: {', '.join(sorted(self.checked)) or 'none'}")
        return "\n".join(lines)
