"""Compiled graphs of any number of rows: every operator and its gradient, whole (fullgraph=True)."""

import pytest
import torch
from conftest import assert_close

import focalkern as fk

N, C = 8, 6
LABELS = torch.arange(N) % C
SCORES = torch.linspace(0.1, 0.9, N)
WEIGHT = torch.linspace(-1, 1, 4 * C).reshape(C, 4)
GAMMAS = torch.linspace(0, 2, N)  # one per row: its size is fixed where the number of rows is a symbol
MMCE = fk.MMCELoss()


def both(function, **options):
    """Twice: the second call sees the symbols and numbers of the first."""
    return lambda z: function(z, **options) + function(2 * z, **options)


CASES = {
    "focal": both(fk.focal_loss, target=LABELS, gamma=GAMMAS),
    "z-loss": both(fk.focal_loss, target=LABELS, gamma=GAMMAS, z_loss=0.1),
    "z-loss, whole": lambda z, c=2: fk.focal_loss(z, LABELS, z_loss=c),
    "statistics": lambda z: fk.focal_loss(z, LABELS, return_stats=True).loss,
    "head": lambda z: fk.linear_focal_loss(z[:, :4], WEIGHT, LABELS, GAMMAS),
    "head, z-loss": lambda z: fk.linear_focal_loss(z[:, :4], WEIGHT, LABELS, GAMMAS, z_loss=0.1),
    "properized": both(fk.properized_focal_loss, target=LABELS, gamma=GAMMAS),
    "poly": both(fk.poly_focal_loss, target=LABELS),
    "sigmoid": both(fk.sigmoid_focal_loss, target=LABELS, gamma=GAMMAS[:, None]),
    "labels and scores": both(fk.varifocal_loss, target=(LABELS, SCORES)),
    "MMCE": lambda z: MMCE(z, LABELS),
    "map": both(fk.focal_calibration_map, gamma=GAMMAS),
    "binary map": both(fk.binary_focal_calibration_map, gamma=GAMMAS[:, None]),
    "inverse map": both(fk.inverse_focal_calibration_map, gamma=GAMMAS, log=True),
    "binary inverse map": both(fk.binary_inverse_focal_calibration_map, gamma=GAMMAS[:, None]),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
@pytest.mark.parametrize("name", CASES)
def test_one_graph_of_any_number_of_rows(name):
    torch._dynamo.reset()
    z = torch.randn(N, C, requires_grad=True)
    found = torch.compile(CASES[name], fullgraph=True, backend="aot_eager", dynamic=True)(z)
    expected = CASES[name](z)
    assert_close(found, expected)
    upstream = torch.randn_like(expected)
    assert_close(torch.autograd.grad(found, z, upstream)[0], torch.autograd.grad(expected, z, upstream)[0])
    torch._dynamo.reset()


WITH_LABEL = {
    "z-loss": lambda z, label: fk.focal_loss(z, LABELS, ignore_index=label, z_loss=0.1),
    "statistics": lambda z, label: fk.focal_loss(z, LABELS, ignore_index=label, return_stats=True).loss,
    "head": lambda z, label: fk.linear_focal_loss(z[:, :4], WEIGHT, LABELS, ignore_index=label),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
@pytest.mark.parametrize("name", WITH_LABEL)
def test_one_graph_where_ignore_index_is_an_argument(name):
    torch._dynamo.reset()
    z = torch.randn(N, C)
    compiled = torch.compile(WITH_LABEL[name], fullgraph=True, backend="aot_eager", dynamic=True)
    for label in (3, 4):
        assert_close(compiled(z, label), WITH_LABEL[name](z, label))
    torch._dynamo.reset()


WRONG = {
    "[N] = [8], got [7]": lambda z: fk.focal_loss(z, LABELS[:7]),
    "shape of input, [8, 6], got [8, 4]": lambda z: fk.focal_loss(z, z[:, :4]),
    "unreduced loss [8], got [7]": lambda z: fk.focal_loss(z, LABELS, GAMMAS[:7]),
    "[N] = [8], got [6]": lambda z: fk.linear_focal_loss(z[:, :4], WEIGHT, LABELS[:6]),
    "input = [8, 6], got [8, 4]": lambda z: fk.sigmoid_focal_loss(z, z[:, :4]),
    "class dimension, [8], got [7]": lambda z: fk.sigmoid_focal_loss(z, LABELS[:7]),
    "[N] = [8], got [5]": lambda z: MMCE(z, LABELS[:5]),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
@pytest.mark.parametrize("message", WRONG)
def test_errors_of_dynamic_graphs_have_numbers(message):
    torch._dynamo.reset()
    compiled = torch.compile(WRONG[message], fullgraph=True, backend="aot_eager", dynamic=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        compiled(torch.randn(N, C))
    assert message in str(raised.value)
    torch._dynamo.reset()
