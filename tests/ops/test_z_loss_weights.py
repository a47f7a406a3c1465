"""Class weights and the z-loss: a row has the weight that it adds to the divisor of the mean."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close

import focalkern as fk

N, C = 9, 7
WEIGHT = torch.linspace(0.0, 2.0, C, dtype=torch.float64)  # one class has weight 0
HEAD = torch.eye(C, dtype=torch.float64)


def eager(z, target, **options):
    return fk.focal_loss(z, target, **options)


def in_chunks(z, target, **options):
    return fk.linear_focal_loss(z, HEAD, target, chunk_rows=4, **options)


def in_a_graph(z, target, **options):
    torch._dynamo.reset()  # every combination of options is another graph
    return torch.compile(eager, fullgraph=True, backend="aot_eager")(z, target, **options)


def under_torch_func(z, target, **options):
    return torch.func.vmap(lambda z: fk.focal_loss(z, target, **options))(z.unsqueeze(0)).squeeze(0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("function", [eager, in_chunks, in_a_graph, under_torch_func], ids=lambda f: f.__name__)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_weight_of_the_z_loss_is_that_of_the_row_in_the_mean(smoothing, reduction, function):
    """Class weights weigh the row of a label, also with smoothing, and the classes of a row of probabilities. So the
    z-losses of labels and of their one-hot rows differ, although the rest of their losses is equal."""
    z, labels = (3 * torch.randn(N, C, dtype=torch.float64)).requires_grad_(), torch.arange(N) % C
    options = {"weight": WEIGHT, "reduction": reduction, "label_smoothing": smoothing}
    one = torch.ones(N, dtype=torch.float64)
    for target, of_row in ((labels, WEIGHT[labels]), (F.one_hot(labels, C).double(), one)):
        with_it, without = (function(z, target, z_loss=c, **options) for c in (0.3, 0.0))
        of_rows = 0.3 * of_row * z.logsumexp(1).square()
        expected = {"none": of_rows, "sum": of_rows.sum(), "mean": of_rows.sum() / of_row.sum()}[reduction]
        assert_close(with_it - without, expected)
        for create_graph in (False, function is not in_a_graph):
            found, wanted, other = (
                torch.autograd.grad(loss.sum(), z, retain_graph=True, create_graph=create_graph)[0]
                for loss in (with_it, expected, without)
            )
            assert_close(found - other, wanted)
