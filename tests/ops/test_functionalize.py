"""torch.func.functionalize, which has no rule for a torch.autograd.Function."""

import pytest
import torch
from conftest import assert_close
from torch.func import functionalize, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import focalkern as fk

TARGET = torch.tensor([0, 4, 2, -100])
HEAD = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
LOSSES = {
    "focal": lambda z: fk.focal_loss(z, TARGET, 2.0, z_loss=0.1),
    "linear": lambda z: fk.linear_focal_loss(z, HEAD, TARGET, 2.0),
    "linear, rows": lambda z: fk.linear_focal_loss(z, HEAD, TARGET, 2.0, softcap=3.0, reduction="none").square().sum(),
}
INVERSES = {
    "inverse_focal_calibration_map": lambda z: fk.inverse_focal_calibration_map(z, 2.0).square().sum(),
    "binary_inverse_focal_calibration_map": lambda z: fk.binary_inverse_focal_calibration_map(z, 2.0).square().sum(),
    "properized_focal_loss": lambda z: fk.properized_focal_loss(z, TARGET, 2.0),
}


def rows():
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", [*LOSSES, *INVERSES])
def test_functions_are_functionalized(name):
    loss, z = (LOSSES | INVERSES)[name], rows().requires_grad_()
    for function in (functionalize(loss), make_fx(functionalize(loss))(z)):
        found, expected = function(z), loss(z)
        assert_close(found, expected)
        assert_close(torch.autograd.grad(found, z)[0], torch.autograd.grad(expected, z)[0])


@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_of_losses_are_functionalized(name):
    loss, z = LOSSES[name], rows()
    expected = grad(loss)(z)
    assert_close(functionalize(grad(loss))(z), expected)
    assert_close(grad(functionalize(loss))(z), expected)


@pytest.mark.parametrize("name", INVERSES)
@pytest.mark.parametrize(
    "of",
    [
        lambda f: functionalize(grad(f)),
        lambda f: grad(functionalize(f)),
        lambda f: functionalize(vmap(f)),
        lambda f: functionalize(lambda z: jvp(f, (z,), (z,))),
    ],
    ids=["of grad", "in grad", "of vmap", "of jvp"],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*torch.jit.script:DeprecationWarning")
def test_derivatives_of_inverse_maps_are_an_error(name, of):
    """Tests that no derivative is silently 0, as the operator's own would be in forward mode."""
    with pytest.raises(NotImplementedError, match=f"^{name}: .*functionalize does not combine .*; leave functionalize"):
        of(INVERSES[name])(rows())
