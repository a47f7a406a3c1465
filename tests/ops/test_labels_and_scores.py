"""Labels and scores as the target of box losses: results equal those of the dense target."""

import pytest
import torch
import torch._dynamo
from conftest import assert_close
from sigmoid_cases import FLOATS, SCORED, grads, leaf

import focalkern as fk
from focalkern import reference

NAMES = ["quality_focal_loss", *SCORED]


def dense_target(labels, scores, n_classes):
    """The dense target, and a mask of its counted elements. A score of 0 becomes the smallest normal number."""
    tiny = torch.finfo(torch.float64 if scores.dtype == torch.float64 else torch.float32).tiny
    at = torch.arange(n_classes, device=labels.device).view(-1, *[1] * (labels.dim() - 1)) == labels.unsqueeze(1)
    counts = (labels != -100).unsqueeze(1).expand_as(at)
    wide = scores.double().unsqueeze(1)
    return torch.where(at, torch.where(wide == 0, tiny, wide), 0.0), counts


def rows(shape, dtype, device):
    labels = torch.randint(shape[1] + 1, (shape[0], *shape[2:]), device=device)  # the last is background
    labels[torch.rand(labels.shape, device=device) < 0.1] = -100
    scores = torch.rand(labels.shape, device=device)
    scores[torch.rand(labels.shape, device=device) < 0.2] = 0
    scores[torch.rand(labels.shape, device=device) < 0.1] = 1
    return (torch.randn(shape, device=device) * 3).to(dtype), labels, scores.to(dtype)


# Many and few classes; whole tiles and a remainder; queries after the class dimension; and pixels.
@pytest.mark.parametrize("shape", [(30, 80), (700, 3), (3, 7, 40), (2, 5, 4, 6), (2, 1, 5)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_dense_target(device, shape, dtype, name):
    x, labels, scores = rows(shape, dtype, device)
    t, counts = dense_target(labels, scores, shape[1])
    function, definition = getattr(fk, name), getattr(reference, name)
    for layout in ("contiguous", "channels last"):
        given = x.movedim(1, -1).contiguous().movedim(-1, 1) if layout == "channels last" else x
        for gamma in (2.0, 1.3):
            z, wide = leaf(given), leaf(given.double())
            elements = torch.where(counts, definition(wide, t, gamma), 0.0)
            for reduction, expected in (
                ("none", elements),
                ("sum", elements.sum()),
                ("mean", elements.sum() / counts.sum()),
            ):
                loss = function(z, (labels, scores), gamma, reduction=reduction)
                assert_close(loss, expected)
                upstream = torch.randn(loss.shape, dtype=torch.float64, device=device)
                slope = grads(loss, z, upstream.to(loss.dtype))[0]
                assert_close(slope, grads(expected, wide, upstream.to(loss.dtype).double())[0])


@pytest.mark.parametrize("kinds", [(torch.int32, torch.float64), (torch.uint8, torch.float16)])
@pytest.mark.parametrize("name", NAMES)
def test_weights_gammas_and_other_dtypes(device, name, kinds):
    x, labels, scores = rows((40, 12), torch.float32, device)
    labels = labels.where(labels >= 0, 12).to(kinds[0])
    scores = scores.to(kinds[1])
    t, _ = dense_target(labels.long(), scores.float(), 12)
    weight, gamma = torch.rand(40, 1, device=device), torch.rand(12, device=device) + 0.5
    found, expected = (leaf(x), leaf(gamma)), (leaf(x.double()), leaf(gamma.double()))
    loss = getattr(fk, name)(found[0], (labels, scores), found[1], reduction="sum", weight=weight)
    exact = getattr(reference, name)(expected[0], t, expected[1], reduction="sum", weight=weight.double())
    assert_close(loss, exact)
    for ours, theirs in zip(grads(loss, found), grads(exact, expected), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_a_match_without_overlap_is_a_match(device, name):
    x = torch.tensor([[1.5]], dtype=torch.float64, device=device)
    (loss,) = getattr(fk, name)(x, (torch.tensor([0], device=device), x.new_zeros(1)), 2.0).flatten()
    p, minus_log_q = x.sigmoid(), torch.nn.functional.softplus(x)
    score = 0.01
    expected = {
        "quality_focal_loss": p**2 * minus_log_q,
        "varifocal_loss": 0 * p,
        "matchability_loss": minus_log_q,
        "ia_bce_loss": minus_log_q - score * x,
    }[name]
    assert_close(loss, expected.squeeze())


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_and_transforms(device, name):
    x, labels, scores = rows((4, 3), torch.float64, device)
    scores = scores.clamp(0.1, 0.9)
    function = getattr(fk, name)
    z, s = leaf(x), leaf(scores)
    (slope,) = torch.autograd.grad(function(z, (labels, scores)).sum(), z)
    (again,) = torch.autograd.grad(function(z, (labels, scores)).sum(), z, create_graph=True)
    assert_close(again, slope)
    of_both = torch.autograd.grad(function(z, (labels, s)).sum(), [z, s])  # scores with a gradient
    t, counts = dense_target(labels, scores, 3)
    dense = leaf(t)
    of_dense = torch.autograd.grad(torch.where(counts, function(z, dense), 0.0).sum(), [z, dense])
    assert_close(of_both[0], slope)
    at = labels.clamp(0, 2).unsqueeze(1)
    assert_close(of_both[1], of_dense[1].gather(1, at).squeeze(1).where((labels >= 0) & (labels < 3), 0.0))
    mapped = torch.func.vmap(lambda z, y, s: function(z, (y, s)))(z.detach(), labels, scores)
    assert_close(mapped, function(z, (labels, scores)))


def test_it_compiles(device):
    torch._dynamo.reset()
    x, labels, scores = rows((6, 5), torch.float32, device)
    module = fk.MatchabilityLoss()
    z = leaf(x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    loss = compiled(z, (labels, scores))
    assert_close(loss, module(z, (labels, scores)))
    assert_close(grads(loss, z)[0], grads(module(z, (labels, scores)), z)[0])
    torch._dynamo.reset()


@pytest.mark.parametrize("bad", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_scores_outside_of_0_and_1_are_nan(device, name, bad):
    x = torch.randn(3, 40, device=device)
    scores = torch.tensor([0.5, bad, bad], device=device)
    loss = getattr(fk, name)(x, (torch.tensor([3, 7, 40], device=device), scores))
    assert loss.isnan().nonzero().tolist() == [[1, 7]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, y, s: fk.sigmoid_focal_loss(x, (y, s)), TypeError, "a tensor, got tuple; labels with scores"),
        (lambda x, y, s: fk.asymmetric_loss(x, [1, 2]), TypeError, "asymmetric_loss: target must be a tensor, got"),
        (lambda x, y, s: fk.varifocal_loss(x, (y, s, s)), ValueError, "or labels and scores, got 3 values"),
        (lambda x, y, s: fk.varifocal_loss(x, (y, [0.5])), TypeError, "scores of target must be a tensor, got list"),
        (lambda x, y, s: fk.varifocal_loss(x, (s, s)), TypeError, "labels of target must be integer, got torch.float"),
        (lambda x, y, s: fk.varifocal_loss(x, (y, y)), TypeError, "scores of target must be floating point, got torch"),
        (lambda x, y, s: fk.varifocal_loss(x, (y, s[:2])), ValueError, r"scores of target must have the shape of its"),
        (lambda x, y, s: fk.ia_bce_loss(x, (y[:2], s[:2])), ValueError, r"ia_bce_loss: target"),
        (lambda x, y, s: fk.ia_bce_loss(x, (x.long(), x)), ValueError, r"target must be labels and scores, with"),
        (lambda x, y, s: fk.quality_focal_loss(x, (y + 9, s)), (IndexError), r"target must be in \[0, 5\]"),
    ],
)  # fmt: skip
def test_bad_targets_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(3, 5), torch.tensor([0, 1, 5]), torch.rand(3))
