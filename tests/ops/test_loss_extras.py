"""z_loss and return_stats of focal_loss and linear_focal_loss, on one process; over ranks:
test_focal_loss_vocab_parallel and test_dtensor."""

import math

import mpmath
import oracle
import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE, assert_close

import focalkern as fk
from focalkern import reference

N, C, D = 9, 7, 5
WEIGHT = torch.linspace(0.0, 2.0, C, dtype=torch.float64)  # one class has weight 0
TABLE = fk.GammaTable([0, 0.1, 0.4, 1], [2.0, -1.0, 0.5])
CASES = {
    "labels": {},
    "cross-entropy": {"gamma": 0.0},
    "inverse": {"gamma": -1.5},
    "table": {"gamma": TABLE},
    "weights": {"weight": WEIGHT},
    "confidence": {"gamma": 1.0, "modulation": "confidence", "detach_modulation": True},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing, weights": {"label_smoothing": 0.1, "weight": WEIGHT},
    "other index ignored": {"ignore_index": 2},
}


def labels_of(shape, ignore_index=-100):
    target = torch.randint(C, shape)
    target.view(-1)[:2] = ignore_index
    return target


def gradients(loss, *leaves):
    upstream = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype, device=loss.device).reshape(loss.shape)
    return torch.autograd.grad(loss, leaves, upstream)


def on_device(value, device):
    return value.to(device) if isinstance(value, torch.Tensor | fk.GammaTable) else value


# ---- z_loss against the reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(C,), (N, C), (3, C, 2, 2)], ids=str)
def test_is_the_reference(shape, case, reduction, device):
    options = {"reduction": reduction, "z_loss": 0.1, **CASES[case]}
    options = {name: on_device(value, device) for name, value in options.items()}
    z = (3 * torch.randn(shape, dtype=torch.float64, device=device)).requires_grad_()
    rows = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    target = (labels_of(rows, options.get("ignore_index", -100)) if rows else torch.tensor(3)).to(device)
    found, expected = (function(z, target, **options) for function in (fk.focal_loss, reference.focal_loss))
    assert_close(found, expected)
    assert_close(*(gradients(loss, z)[0] for loss in (found, expected)))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_of_class_probabilities(reduction, device):
    z, target = torch.randn(2, N, C, dtype=torch.float64, device=device)
    z, target = z.clone().requires_grad_(), target.softmax(1)
    options = {"reduction": reduction, "z_loss": 0.1, "weight": WEIGHT.to(device), "label_smoothing": 0.1}
    found, expected = (function(z, target, 2.0, **options) for function in (fk.focal_loss, reference.focal_loss))
    assert_close(found, expected)
    assert_close(gradients(found, z)[0], gradients(expected, z)[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_other_dtypes(dtype, smoothing):
    """Half types are computed in float32 and rounded once."""
    z, target = (3 * torch.randn(N, C)).to(dtype).requires_grad_(), labels_of((N,))
    wide = z.detach().double().requires_grad_()
    options = {"z_loss": 0.1, "label_smoothing": smoothing, "reduction": "sum"}
    found, expected = fk.focal_loss(z, target, **options), reference.focal_loss(wide, target, **options)
    assert found.dtype == dtype
    assert_close(found, expected)
    assert_close(gradients(found, z)[0], torch.autograd.grad(expected, wide)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fk.focal_loss(z, target, **options)
    assert found.dtype == torch.float32
    assert_close(found, expected)


def test_digits_of_the_gradient_beside_a_certain_target():
    """For a target with p near 1 both terms keep their digits: c (p - 1) from the other classes, and 2 c lse p."""
    z = torch.tensor([[30.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(fk.focal_loss(z, torch.tensor([0]), 0.0, z_loss=1e-14), z)
    with oracle.precision():
        values = [mpmath.mpf(float(value)) for value in z.detach()[0]]
        p, lse = oracle.softmax(values), mpmath.log(mpmath.fsum(mpmath.exp(value) for value in values))
        factor = 2 * mpmath.mpf(1e-14) * lse
        expected = [float(p[j] - (j == 0) + factor * p[j]) for j in range(3)]
    assert_close(found[0], torch.tensor(expected, dtype=torch.float64))
    assert abs(found[0, 0].item() / expected[0] - 1) < 1e-11  # the absolute tolerance of the table would hide the error


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": WEIGHT}], ids=str)
def test_derivatives_of_any_order(options):
    z, target = torch.randn(4, C, dtype=torch.float64, requires_grad=True), torch.tensor([0, -100, 6, 3])
    gamma = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def loss(z, gamma):
        return fk.focal_loss(z, target, gamma, z_loss=0.3, **options)

    assert torch.autograd.gradcheck(loss, (z, gamma))
    assert torch.autograd.gradgradcheck(loss, (z, gamma))


# The composite operator has no batching rule.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of torch's own decompositions
def test_under_torch_func_and_forward_mode():
    z, target = torch.randn(3, 4, C, dtype=torch.float64), torch.tensor([0, -100, 6, 3])

    def loss(z, function=fk.focal_loss):
        return function(z, target, 2.0, z_loss=0.3)

    def expected(z):
        return loss(z, reference.focal_loss)

    assert_close(torch.func.vmap(loss)(z), torch.func.vmap(expected)(z))
    assert_close(torch.func.grad(loss)(z[0]), torch.func.grad(expected)(z[0]))
    assert_close(torch.func.hessian(loss)(z[0]), torch.func.hessian(expected)(z[0]))
    for found, wanted in zip(*(torch.func.jvp(f, (z[0],), (z[1],)) for f in (loss, expected)), strict=True):
        assert_close(found, wanted)
    with pytest.raises(NotImplementedError, match="does not transform return_stats=True; leave it out"):
        torch.func.grad(lambda z: fk.focal_loss(z, target, return_stats=True).loss)(z[0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_one_graph(options):
    def loss(z, target):
        return fk.focal_loss(z, target, 2.0, z_loss=0.1, return_stats=True, **options)

    z, target = torch.randn(N, C).requires_grad_(), labels_of((N,))
    found, expected = torch.compile(loss, fullgraph=True, backend="aot_eager")(z, target), loss(z, target)
    assert_close(found.loss, expected.loss)
    assert_close(gradients(found.loss, z)[0], gradients(expected.loss, z)[0])
    for value, wanted in zip(found.stats, expected.stats, strict=True):
        assert_close(value, wanted, torch.float32)


# ---- edges -----------------------------------------------------------------------------------------------------------


def test_rows_that_do_not_count():
    z = torch.randn(N, C, dtype=torch.float64)
    z[0], z[1] = torch.nan, torch.inf
    z.requires_grad_()
    target = labels_of((N,))  # the first two are ignored
    loss, stats = fk.focal_loss(z, target, z_loss=0.1, return_stats=True)
    assert_close(loss, reference.focal_loss(z[2:], target[2:], z_loss=0.1))
    (gradient,) = torch.autograd.grad(loss, z)
    assert (gradient[:2] == 0).all()
    assert not gradient.isnan().any()
    assert stats.predicted[:2].tolist() == [-1, -1]
    assert all((values[:2] == 0).all() for values in (stats.log_p, stats.entropy, stats.correct, stats.lse))
    nothing, stats = fk.focal_loss(z, torch.full((N,), -100), z_loss=0.1, return_stats=True)
    assert nothing.isnan()
    assert (torch.autograd.grad(nothing, z)[0] == 0).all()
    assert all(value.isnan() for value in stats.means().values())


def test_edges_of_logits():
    """An impossible class, logits of +-1e4, a single class, no row."""
    z = torch.tensor([[0.0, -math.inf, 1.0], [1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]], dtype=torch.float64)
    target = torch.tensor([0, 0, 2])
    loss, stats = fk.focal_loss(z, target, 0.0, reduction="none", z_loss=1e-3, return_stats=True)
    lse = z.logsumexp(1)
    assert_close(loss, F.cross_entropy(z, target, reduction="none") + 1e-3 * lse**2)
    assert_close(stats.entropy, torch.special.entr(z.softmax(1)).sum(1))
    assert_close(stats.lse, lse)
    one = torch.full((2, 1), 3.0, dtype=torch.float64, requires_grad=True)
    loss, stats = fk.focal_loss(one, torch.tensor([0, 0]), z_loss=0.1, return_stats=True)
    assert_close(loss, torch.tensor(0.9, dtype=torch.float64))
    assert_close(torch.autograd.grad(loss, one)[0], torch.full_like(one, 0.3))
    assert (stats.log_p == 0).all()
    assert (stats.entropy == 0).all()
    none, stats = fk.focal_loss(torch.zeros(0, C), torch.zeros(0, dtype=torch.long), z_loss=0.1, return_stats=True)
    assert none.isnan()
    assert stats.predicted.shape == (0,)


def test_label_out_of_range():
    with pytest.raises(IndexError, match=r"focal_loss: target must be in \[0, 7\) or ignore_index, got 7 at row 1"):
        fk.focal_loss(torch.zeros(2, C), torch.tensor([0, C]), z_loss=0.1)


# ---- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(N, C), (3, C, 2, 2), (40, 4097)], ids=str)
def test_statistics(shape, dtype, smoothing, device):
    z, target = (3 * torch.randn(shape)).to(device, dtype), labels_of((shape[0], *shape[2:])).to(device)
    target[-1] = z[-1:].argmax(1)  # some row is correct
    plain, options = fk.focal_loss(z, target, label_smoothing=smoothing), {"label_smoothing": smoothing}
    loss, stats = fk.focal_loss(z, target, return_stats=True, **options)
    assert_close(loss, plain)
    counts, wide = target != -100, z.double()
    log_p = wide.log_softmax(1)
    of_target = log_p.gather(1, torch.where(counts, target, 0).unsqueeze(1)).squeeze(1)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    for found, wanted in (
        (stats.log_p, of_target),
        (stats.entropy, torch.special.entr(log_p.exp()).sum(1)),
        (stats.lse, wide.logsumexp(1)),
    ):
        assert found.dtype == real
        assert not found.requires_grad
        assert_close(found, torch.where(counts, wanted, 0.0), real)
    assert torch.equal(stats.counts, counts)
    assert torch.equal(stats.predicted, torch.where(counts, z.argmax(1), -1))
    assert torch.equal(stats.correct, counts & (z.argmax(1) == target))
    means = stats.means()
    assert all(mean.dtype == real for mean in means.values())
    assert_close(means["accuracy"], stats.correct[counts].double().mean(), torch.float32)
    assert_close(means["entropy"], stats.entropy[counts].mean())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [255, 256, 257, 400])
def test_the_predicted_class_of_many(classes, dtype, device):
    """Ties in a group of classes, between groups and in the last group; a row of -inf; a NaN, which has no class."""
    z = torch.randint(3, (300, classes)).to(dtype)
    z[:3] = 0
    z[0, -1], z[1, 130], z[2, 127:129] = 5, 5, 5
    z[3], z[4, 7] = -math.inf, torch.nan
    z, target = z.to(device), torch.zeros(len(z), dtype=torch.long, device=device)
    predicted = fk.focal_loss(z, target, return_stats=True).stats.predicted
    assert predicted[:5].tolist() == [classes - 1, 130, 127, 0, -1]
    assert torch.equal(predicted[5:], z[5:].argmax(1))


def test_the_first_of_equal_classes_is_predicted():
    z = torch.zeros(2, C)
    assert fk.focal_loss(z, torch.tensor([0, 1]), return_stats=True).stats.correct.tolist() == [True, False]


# ---- a head ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("case", [*CASES, "probabilities"])
def test_head_is_the_loss_of_its_logits(case, reduction):
    options = {"reduction": reduction, "z_loss": 0.1, **CASES.get(case, {})}
    x, w, b = (torch.randn(*size, dtype=torch.float64).requires_grad_() for size in ((3, 4, D), (C, D), (C,)))
    target = labels_of((3, 4), options.get("ignore_index", -100))
    if case == "probabilities":
        target = torch.rand(3, 4, C, dtype=torch.float64)
    found = fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=5, softcap=3.0, **options)
    z = (3.0 * torch.tanh(F.linear(x, w, b) / 3.0)).reshape(12, C)
    rows = target.reshape(12, C) if case == "probabilities" else target.reshape(12)
    expected = reference.focal_loss(z, rows, **options)
    assert_close(found.reshape(expected.shape), expected)
    for gradient, wanted in zip(gradients(found, x, w, b), gradients(expected, x, w, b), strict=True):
        assert_close(gradient, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_in_other_dtypes(dtype):
    """Compared with the operator on all logits of the same dtype."""
    x, w, target = torch.randn(N, D).to(dtype), torch.randn(C, D).to(dtype), labels_of((N,))
    leaves = [x.requires_grad_(), w.requires_grad_()]
    loss, stats = fk.linear_focal_loss(x, w, target, z_loss=0.1, return_stats=True)
    expected, of_logits = fk.focal_loss(F.linear(x.float(), w.float()), target, z_loss=0.1, return_stats=True)
    assert loss.dtype == dtype
    tolerance = {"rtol": TOLERANCE[dtype][0] * 4, "atol": TOLERANCE[dtype][0] * 4}  # products of rounded factors
    torch.testing.assert_close(loss.float(), expected, **tolerance)
    for found, wanted in zip(gradients(loss, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), **tolerance)
    torch.testing.assert_close(stats.entropy, of_logits.entropy, **tolerance)


def test_statistics_of_a_head():
    x, w, target = torch.randn(2, N, D, dtype=torch.float64), torch.randn(C, D, dtype=torch.float64), labels_of((2, N))
    stats = fk.linear_focal_loss(x, w, target, chunk_rows=4, return_stats=True).stats
    rows = fk.focal_loss((x @ w.T).flatten(0, 1), target.flatten(), return_stats=True).stats
    for found, wanted in zip(stats, rows, strict=True):
        assert found.dtype == wanted.dtype
        assert_close(found.flatten(), wanted, torch.float64)


def test_of_a_head_with_more_dimensions():
    """A K-dimensional head computes all its logits at once."""
    x, w = torch.randn(N, D, dtype=torch.float64), torch.randn(C, 2, D, dtype=torch.float64)
    target = labels_of((N, 2))
    loss, stats = fk.linear_focal_loss(x, w, target, z_loss=0.1, return_stats=True)
    expected = fk.focal_loss(torch.einsum("nd,ckd->nck", x, w), target, z_loss=0.1, return_stats=True)
    assert_close(loss, expected.loss)
    assert_close(stats.entropy, expected.stats.entropy)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_derivatives_of_a_head(reduction):
    x, w = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((4, 3), (C, 3)))
    gamma, target = torch.tensor(1.5, dtype=torch.float64, requires_grad=True), torch.tensor([0, -100, 6, 3])

    def loss(x, w, gamma):
        return fk.linear_focal_loss(x, w, target, gamma, z_loss=0.3, softcap=2.0, reduction=reduction)

    # The first backward pass scales the gradients of the forward pass; the next one recomputes them.
    assert torch.autograd.gradcheck(loss, (x, w, gamma), nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(loss, (x, w, gamma), nondet_tol=1e-12)


@pytest.mark.parametrize("modulation", [None, "confidence"])
def test_torch_func_of_a_head(modulation):
    """Chunk by chunk, without all logits at once."""
    x, w, target = torch.randn(N, D, dtype=torch.float64), torch.randn(C, D, dtype=torch.float64), labels_of((N,))
    options = {"gamma": 1.0, "modulation": modulation, "z_loss": 0.3}

    def slope(loss):
        return torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x)

    found = slope(lambda x: fk.linear_focal_loss(x, w, target, chunk_rows=4, **options))
    assert_close(found, slope(lambda x: fk.focal_loss(x @ w.T, target, **options)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
def test_one_graph_of_a_head():
    def loss(x, w, target):
        return fk.linear_focal_loss(x, w, target, 2.0, z_loss=0.1, return_stats=True)

    x, w, target = torch.randn(N, D).requires_grad_(), torch.randn(C, D).requires_grad_(), labels_of((N,))
    found, expected = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w, target), loss(x, w, target)
    assert_close(found.loss, expected.loss)
    for value, wanted in zip(gradients(found.loss, x, w), gradients(expected.loss, x, w), strict=True):
        assert_close(value, wanted)
    for value, wanted in zip(found.stats, expected.stats, strict=True):
        assert_close(value, wanted, torch.float32)


# ---- modules and errors ----------------------------------------------------------------------------------------------


def test_modules():
    z, target = torch.randn(N, C), labels_of((N,))
    criterion = fk.FocalLoss(3.0, z_loss=0.1, return_stats=True)
    assert repr(criterion) == "FocalLoss(gamma=3.0, z_loss=0.1, return_stats=True)"
    found, expected = criterion(z, target), fk.focal_loss(z, target, 3.0, z_loss=0.1, return_stats=True)
    assert isinstance(found, fk.LossWithStats)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.stats.entropy, expected.stats.entropy)
    head = fk.LinearFocalLoss(D, C, z_loss=0.1)
    x = torch.randn(N, D)
    assert torch.equal(head(x, target), fk.linear_focal_loss(x, head.linear.weight, target, z_loss=0.1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"z_loss": -1.0}, ValueError, "z_loss must be at least 0, got -1"),
        ({"z_loss": math.nan}, ValueError, "z_loss must be"),
        ({"z_loss": "1"}, TypeError, "z_loss must be a number"),
        ({"return_stats": 2}, TypeError, "return_stats must be"),
        ({"z_loss": 0.1, "reduction": "average"}, ValueError, "reduction must be"),
        ({"z_loss": 0.1, "gamma": "2"}, TypeError, "gamma must be"),
        ({"z_loss": 0.1, "modulation": "focal"}, ValueError, "modulation must be"),
    ],
    ids=str,
)
def test_errors(options, error, message):
    z, target = torch.zeros(2, C), torch.tensor([0, 1])
    with pytest.raises(error, match=f"focal_loss: {message}"):
        fk.focal_loss(z, target, **options)
    with pytest.raises(error, match=f"linear_focal_loss: {message}"):
        fk.linear_focal_loss(z, torch.zeros(3, C), target, **options)
    with pytest.raises(error, match=f"FocalLoss: {message.removesuffix(', got -1')}"):
        fk.FocalLoss(**options)


def test_statistics_want_labels():
    message = "return_stats=True needs labels, got class probabilities"
    with pytest.raises(ValueError, match=message):
        fk.focal_loss(torch.zeros(2, C), torch.zeros(2, C), return_stats=True)
    with pytest.raises(ValueError, match=message):
        fk.linear_focal_loss(torch.zeros(2, D), torch.zeros(C, D), torch.zeros(2, C), return_stats=True)


def test_errors_of_other_arguments_name_the_function():
    with pytest.raises(ValueError, match=r"focal_loss: target must be \[N\] = \[2\], got \[3\]"):
        fk.focal_loss(torch.zeros(2, C), torch.zeros(3, dtype=torch.long), z_loss=0.1)
    with pytest.raises(ValueError, match=r"focal_loss: weight must be \[C\] = \[7\], got \[3\]"):
        fk.focal_loss(torch.zeros(2, C), torch.tensor([0, 1]), z_loss=0.1, weight=torch.ones(3))
