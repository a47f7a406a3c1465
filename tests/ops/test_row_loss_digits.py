"""Row losses in float32 compared with their definitions in float64: sums over many classes keep their digits."""

import pytest
import torch
import torch.nn.functional as F
from row_losses import public_form

import focalkern as fk
from focalkern import reference
from focalkern.reference._softmax_losses import ROW_LOSSES

TABLE = fk.GammaTable([0.0, 0.2, 1.0], [5.0, 3.0])
FOCAL = (fk.focal_loss, reference.focal_loss)


def without_gamma(function):
    """A loss that has no gamma, called with one."""
    return lambda z, target, gamma, **options: function(z, target, **options)


def pair_of(spec):
    """The loss and its definition, both of (z, target, gamma)."""
    pair = public_form(spec), spec.definition
    return pair if "gamma" in spec.parameters else tuple(map(without_gamma, pair))


def mmce(z, target, gamma, *, reduction):
    """The sum over rows, as a loss of one row."""
    return fk.MMCELoss(reduction="sum")(z, target).reshape(1)


def mmce_definition(z, target, gamma, *, reduction):
    log_p = z.movedim(1, -1).reshape(-1, z.shape[1]).log_softmax(1)
    labels = target.reshape(-1)
    confidence, top = log_p.max(1)
    confidence = confidence.exp()
    lack = (top == labels).to(log_p) - confidence
    kernel = (-(confidence[:, None] - confidence).abs() / 0.4).exp()
    error = (lack @ kernel @ lack).sqrt() / len(labels)
    return (F.nll_loss(log_p, labels, reduction="sum") + 2 * len(labels) * error).reshape(1)


# Loss pairs and gammas by name.
LOSSES = {
    "cross-entropy": (FOCAL, 0.0),
    "gamma per row": (FOCAL, torch.tensor([0.0, 0.5, 3.0])),
    "inverse": (FOCAL, -0.7),
    "table": (FOCAL, TABLE),
    **{spec.short: ((mmce, mmce_definition) if spec.of_batch else pair_of(spec), 2.0) for spec in ROW_LOSSES.values()},
}
ONLY_LABELS = {spec.short for spec in ROW_LOSSES.values() if not spec.soft_target}
# The target of a row is one label of many, all classes alike, or a share per class.
SHARES = ["labels", "smoothed", "smoothed away", "smoothed and weighted", "one of many", "probabilities", "all"]


def case(shares, z):
    rows, classes = z.shape
    labels = torch.randint(classes, (rows,))
    weight = torch.rand(classes) + 0.5
    probabilities = (2 * torch.randn(rows, classes)).softmax(1)
    return {
        "labels": (labels, {}),
        "smoothed": (labels, {"label_smoothing": 0.1}),
        "smoothed away": (labels, {"label_smoothing": 1.0}),
        "smoothed and weighted": (labels, {"label_smoothing": 0.1, "weight": weight}),
        "one of many": (F.one_hot(labels, classes) * 0.9 + 0.1 / classes, {}),
        "probabilities": (probabilities, {}),
        "all": (probabilities, {"label_smoothing": 0.1, "weight": weight}),
    }[shares]


def as_pixels(function):
    """The same rows as columns of memory."""

    def of_pixels(z, target, gamma, **options):
        columns = z.t().contiguous()[None]
        return function(columns, target[None], gamma, **options).reshape(-1)

    return of_pixels


def gradients(function, dtype, z, target, gamma, options):
    def typed(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    leaves = [typed(z).detach().requires_grad_()]
    for x in (target, gamma):
        leaves.append(
            typed(x).detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        )
    loss = function(*leaves, reduction="none", **{name: typed(x) for name, x in options.items()})
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    return loss.detach(), torch.autograd.grad(loss.sum(), wanted)


def check(pair, z, target, gamma, options, is_brier=False):
    loss, found = gradients(pair[0], torch.float32, z, target, gamma, options)
    exact, expected = gradients(pair[1], torch.float64, z, target, gamma, options)
    # The gradient is the difference of p and a target share; its error is relative to the larger one.
    p = z.double().softmax(1)
    smoothing, weight = options.get("label_smoothing", 0.0), options.get("weight", torch.ones(z.shape[1])).double()
    t = target.double() if target.is_floating_point() else F.one_hot(target, z.shape[1]).double()
    t = weight * ((1 - smoothing) * t + smoothing / z.shape[1])
    largest = torch.maximum(p * t.sum(1, keepdim=True), t).amax(1, keepdim=True)
    # The loss of a nearly certain class is a power of 1 - p, which has the digits of a difference of logits.
    scale = exact.abs().clamp(min=1e-4)
    if is_brier:  # (p - t)^2 loses digits where p and t are close
        scale = scale + (scale * (p * p).sum(1)).sqrt()
    assert ((loss - exact).abs() / scale).max() < 1e-6
    for gradient, right in zip(found, expected, strict=True):
        size = right.abs().amax(1, keepdim=True) if right.dim() == 2 else right.abs().clamp(min=1e-4)
        size = torch.maximum(size, largest) if gradient is found[0] or is_brier else size
        # log(1 - p), part of the derivative in gamma, has the digits of p, whose logarithm is known to one unit.
        limit = 1e-6 if right.dim() == 2 else max(1e-6, -p.log().min().item() * 2**-23)
        assert ((gradient - right).abs() / size).max() < limit


# Less than a vector and than a tile of few classes; one block, and one class more; vocabularies of language models.
# Logits that are almost equal, and those of a trained network.
@pytest.mark.parametrize("classes", [2, 3, 10, 33, 100, 4097, 128256, 256000])
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", LOSSES)
def test_digits_of_rows_of_any_length(name, shares, classes):
    if name in ONLY_LABELS and shares != "labels":
        pytest.skip("their kernels take labels without smoothing")
    pair, gamma = LOSSES[name]
    for scale in (0.01, 4.0):
        z = scale * torch.randn(3, classes)
        target, options = case(shares, z)
        check(pair, z, target, gamma, options, name == "brier")


# From 87.3 the probabilities of the other classes are denormal, from 88.03 they are 0.
@pytest.mark.parametrize("gap", [80.0, 87.0, 87.4, 88.0, 88.02, 88.1, 104.0])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0, -0.5])
@pytest.mark.parametrize("label", [0, 1])
def test_slope_in_gamma_of_a_certain_class(label, gamma, gap):
    for target in (torch.tensor([label]), F.one_hot(torch.tensor([label]), 4) * 0.9 + 0.025):
        options = {} if target.is_floating_point() else {"label_smoothing": 0.1}
        found, expected = (
            gradients(f, dtype, torch.tensor([[gap, 0.0, 0.0, 0.0]]), target, torch.tensor([gamma]), options)[1][-1]
            for f, dtype in ((fk.focal_loss, torch.float32), (reference.focal_loss, torch.float64))
        )
        assert found.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-35)


# One class above all others, which are equal: all rounding errors of a sum have the same sign.
@pytest.mark.parametrize("classes", [4097, 300000])
@pytest.mark.parametrize("layout", ["rows", "pixels"])
@pytest.mark.parametrize("shares", ["labels", "smoothed"])
@pytest.mark.parametrize("name", [spec.short for spec in ROW_LOSSES.values()])
def test_digits_of_equal_classes(name, shares, layout, classes):
    if shares == "smoothed" and name in ONLY_LABELS:
        pytest.skip("their kernels take labels without smoothing")
    pair, gamma = LOSSES[name]
    z = torch.full((4, classes), 0.1) + torch.arange(4)[:, None] / 10
    z[:, 7] = torch.tensor([0.8, 1.1, 1.7, 2.6])
    target, options = case(shares, z)
    if layout == "pixels":
        pair = tuple(as_pixels(function) for function in pair)
    check(pair, z, target, gamma, options, name == "brier")


# Similar logits, and a label with little or no share of the target: the gradient p_j - t_j cancels.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 10, 1000, 50000])
@pytest.mark.parametrize("layout", ["rows", "pixels"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "mmce"])
def test_digits_of_a_gradient_without_a_label(name, layout, classes, dtype):
    pair, gamma = LOSSES[name]
    if layout == "pixels":
        pair = tuple(as_pixels(function) for function in pair)
    z = 0.01 * torch.randn(3, classes)
    target = torch.randint(classes, (3,))
    for smoothing in (1.0, 1 - 0.1 / classes, 1 - 2 / classes):
        options = {"label_smoothing": smoothing}
        expected = gradients(pair[1], torch.float64, z, target, gamma, options)[1][0]
        found = gradients(pair[0], dtype, z, target, gamma, options)[1][0]
        assert found.dtype == dtype
        assert ((found - expected).abs() <= 1e-6 * expected.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("classes", [2, 1000])
def test_digits_of_a_gradient_without_a_label_of_the_properized_loss(classes):
    logits, target = 0.01 * torch.randn(4, classes), torch.randint(classes, (4,))

    def of(dtype):
        leaf = logits.to(dtype).requires_grad_()
        loss = fk.properized_focal_loss(leaf, target, 2.0, label_smoothing=1.0)
        assert loss.dtype == dtype
        return torch.autograd.grad(loss, leaf)[0]

    found, expected = of(torch.float32), of(torch.float64)
    assert ((found - expected).abs() <= 1e-6 * expected.abs().amax(1, keepdim=True)).all()


def test_digits_of_a_gradient_without_a_label_of_a_linear_layer():
    hidden, head, target = torch.randn(8, 64), torch.randn(1000, 64) / 800, torch.randint(1000, (8,))

    def of(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, head)]
        loss = fk.linear_focal_loss(*leaves, target, label_smoothing=1.0)
        return torch.autograd.grad(loss, leaves)

    for found, expected in zip(of(torch.float32), of(torch.float64), strict=True):
        assert ((found - expected).abs() <= 1e-6 * expected.abs().max()).all()


# p_j - t_j cancels: the error is relative to p_j and t_j, as the docstring says.
@pytest.mark.parametrize("classes", [2, 40, 1000, 50000])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("gamma", [0.0, 1.5, 2.0])
def test_digits_of_a_gradient_of_probabilities_like_the_prediction(device, classes, noise, gamma):
    for spread in (0.01, 1.0, 4.0):
        z = spread * torch.randn(4, classes)
        target = (z.double() + noise * torch.randn(4, classes)).softmax(1).float()

        def of(function, dtype, where, z=z, target=target):
            leaf = z.to(where, dtype).requires_grad_()
            loss = function(leaf, target.to(where, dtype), gamma, reduction="sum")
            return torch.autograd.grad(loss, leaf)[0].cpu().double()

        found = of(fk.focal_loss, torch.float32, device)
        expected = of(reference.focal_loss, torch.float64, "cpu")
        assert ((found - expected).abs() <= 4e-6 * (z.double().softmax(1) + target)).all()
