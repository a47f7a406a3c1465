"""The operators ``*_composite``: declared by the compiled module, implemented by focalkern.fallback."""

import subprocess
import sys

import pytest
import torch
from conftest import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import focalkern as fk
from focalkern.ops import _backend
from focalkern.reference._softmax_losses import ROW_LOSSES, number_of, row_loss_of, take_numbers

pytestmark = pytest.mark.kernels("stable")

OPERATORS = torch.ops.focalkern


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


POLY = number_of("poly_focal_loss")
LABELS = torch.tensor([0, 3, -100, 2])
# An operator, and arguments of it.
CALLS = {
    "focal": lambda: (
        OPERATORS.focal_loss_composite,
        (leaf(4, 5), LABELS, leaf(4), None, None, 1, -100, 0.1, False, False),
    ),
    "poly": lambda: (
        OPERATORS.focal_loss_composite,
        (
            leaf(4, 5),
            LABELS,
            number(2.0),
            None,
            torch.rand(5),
            0,
            -100,
            0.0,
            False,
            False,
            number_of("poly_focal_loss"),
            1.5,
        ),
    ),
    "asymmetric": lambda: (
        OPERATORS.sigmoid_loss_composite,
        (leaf(4, 5), torch.rand(4, 5), number(4.0), number(1.0), None, None, 1, 0.05, 2, -100, False),
    ),
    "varifocal": lambda: (
        OPERATORS.sigmoid_loss_composite,
        (leaf(4, 5), torch.rand(4, 5), number(2.0), number(0.75), None, None, 3, 0.0, 2, -100, False),
    ),
    "map": lambda: (OPERATORS.calibration_map_composite, (leaf(4, 5), number(0.5), number(1.5), 0, True, False)),
    "binary map": lambda: (OPERATORS.calibration_map_composite, (leaf(4), number(2.0), number(1.5), 2, False, False)),
    "mmce": lambda: (OPERATORS.mmce_loss_composite, (leaf(4, 5), LABELS, 2.0, True, 0.4, 1, -100)),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    operator, arguments = CALLS[name]()
    detached = tuple(
        a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments
    )
    torch.library.opcheck(operator, detached)


FUNCTIONS = {
    "focal": lambda z: fk.focal_loss(z, LABELS, 1.5),
    "dual": lambda z: fk.DualFocalLoss(2.0)(z, LABELS),
    "sigmoid": lambda z: fk.sigmoid_focal_loss(z, torch.eye(4, 5), reduction="sum"),
    "map": lambda z: fk.focal_calibration_map(z, 1.5, log=True)[..., 0].sum(),
    "binary map": lambda z: fk.binary_focal_calibration_map(z, 1.5).square().sum(),
}


def gradient_of_gradient(function, z):
    (first,) = torch.autograd.grad(function(z), z, create_graph=True)
    return torch.autograd.grad(first.square().sum(), z)[0]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_looked_at_by_the_caller(name, inside):
    """A backward pass outside autocast recomputes, in float32, the loss that was computed inside."""
    z = leaf(4, 5, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = FUNCTIONS[name](z)
        assert loss.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        (first,) = torch.autograd.grad(loss, z, create_graph=True)
        (found,) = torch.autograd.grad(first.float().square().sum(), z)
    wide = z.detach().float().requires_grad_()
    assert first.dtype == found.dtype == torch.bfloat16
    assert_close(first, torch.autograd.grad(FUNCTIONS[name](wide), wide)[0], torch.bfloat16)
    # `first` is rounded before it is squared; this error adds to that of the result.
    expected = gradient_of_gradient(FUNCTIONS[name], wide)
    size = float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected, rtol=2.0**-6, atol=2.0**-7 * size)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_compile_to_one_graph(name):
    z = torch.randn(4, 5, dtype=torch.float64)
    gradient = torch.func.grad(FUNCTIONS[name])
    assert_close(torch.compile(gradient, fullgraph=True, backend="aot_eager")(z), gradient(z))


class Counting(TorchDispatchMode):
    """Counts the operations that torch runs."""

    operations = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.operations += 1
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_runs_each_operation_once_for_all_samples(name):
    counts = []
    for samples in (2, 5):
        with Counting() as counting:
            torch.func.vmap(FUNCTIONS[name])(torch.randn(samples, 4, 5))
        counts.append(counting.operations)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_third_derivatives(name):
    z = leaf(4, 5)
    (first,) = torch.autograd.grad(FUNCTIONS[name](z), z, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), z, create_graph=True)
    (third,) = torch.autograd.grad(second.square().sum(), z)
    step = 1e-5 * torch.randn_like(z)
    values = [
        gradient_of_gradient(FUNCTIONS[name], leaf_at).square().sum()
        for leaf_at in ((z + step).detach().requires_grad_(), (z - step).detach().requires_grad_())
    ]
    torch.testing.assert_close((third * step).sum(), (values[0] - values[1]) / 2, rtol=1e-5, atol=1e-12)


@pytest.mark.kernels
def test_the_module_alone_declares_them():
    """Kernels run without the Python package; a composite operator then raises that it has no implementation."""
    path, name = _backend._module.__file__, _backend._module.__name__.split(".")[-1]
    code = f"""
import importlib.machinery, importlib.util, torch
loader = importlib.machinery.ExtensionFileLoader({name!r}, {path!r})
loader.exec_module(importlib.util.module_from_spec(importlib.util.spec_from_loader({name!r}, loader)))
z, y, g = torch.randn(3, 4), torch.tensor([0, 1, 2]), torch.tensor(2.0)
options = (None, None, 1, -100, 0.0, False, False)
assert torch.ops.focalkern.focal_loss_forward(z, y, g, *options)[0] > 0
try:
    torch.ops.focalkern.focal_loss_composite(z, y, g, *options)
except NotImplementedError:
    print("no implementation")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "no implementation\n"


def test_the_numbers_of_the_losses_are_those_of_the_compiled_module():
    names = _backend._module.row_losses()
    assert sorted(names) == sorted(ROW_LOSSES)
    assert [number_of(name) for name in names] == list(range(len(names)))
    assert [row_loss_of(number).name for number in range(len(names))] == names


def test_a_module_with_other_losses_does_not_fit():
    with pytest.raises(ValueError, match="differ in another_loss"):
        take_numbers([*ROW_LOSSES, "another_loss"])
    with pytest.raises(ValueError, match="differ in BrierLoss"):
        take_numbers([name for name in ROW_LOSSES if name != "BrierLoss"])
