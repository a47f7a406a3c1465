"""Varifocal, matchability and IoU-aware loss: accuracy, detached factors, agreement with published code."""

import functools
import types

import oracle
import pytest
import torch
from conftest import assert_close, peer
from sigmoid_cases import SCORED, SCORES, grads, leaf

import focalkern as fk
from focalkern import reference

SHARES = [0.0, 1.0, 0.3, 0.75, 2.0**-20, 1 - 2.0**-20]
LOSSES = [(name, detached) for name in SCORED for detached in (False, True) if name != "ia_bce_loss" or detached]


def options_of(name, detached):
    return {} if name == "ia_bce_loss" else {"detach_modulation": detached}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.5, 2.0])
@pytest.mark.parametrize(("name", "detached"), LOSSES)
def test_value_and_slope_at_300_digits(device, dtype, gamma, name, detached):
    pairs = [(x, t) for x in SCORES for t in SHARES]
    x, t = (torch.tensor(list(column), dtype=dtype, device=device) for column in zip(*pairs, strict=True))
    x = leaf(x)
    alpha = 0.25
    with oracle.precision():
        expected = [oracle.scored(name, x, t, gamma, alpha) for x, t in pairs]
        slopes = [
            oracle.gradient(
                lambda v, x=x, t=t: oracle.scored(name, v[0], t, gamma, alpha, x if detached else None), [x]
            )[0]
            for x, t in pairs
        ]
    loss = getattr(fk, name)(x, t, gamma, alpha, **options_of(name, detached))
    assert loss.isfinite().all()
    assert_close(loss, torch.tensor([float(v) for v in expected], dtype=torch.float64))
    (slope,) = grads(loss, x)
    assert slope.isfinite().all()
    assert_close(slope, torch.tensor([float(v) for v in slopes], dtype=torch.float64))


@pytest.mark.parametrize(("name", "detached"), LOSSES)
@pytest.mark.parametrize("gamma", [0.3, 2.0])
def test_slopes_in_gamma_and_target_at_300_digits(device, gamma, name, detached):
    pairs = [(x, t) for x in SCORES for t in (0.0, 1.0, 0.3, 0.75)]
    x, t = (torch.tensor(list(column), dtype=torch.float64, device=device) for column in zip(*pairs, strict=True))
    g, t = leaf(torch.full_like(x, gamma)), leaf(t)
    alpha = 0.25
    found = grads(getattr(fk, name)(x, t, g, alpha, **options_of(name, detached)), [g, t])
    with oracle.precision():
        of_gamma = [
            oracle.gradient(lambda v, x=x, t=t: oracle.scored(name, x, t, v[0], alpha), [gamma])[0] for x, t in pairs
        ]
        of_target = [
            oracle.gradient(lambda v, x=x: oracle.scored(name, x, v[0], gamma, alpha), [t])[0]
            if t > 0 and name != "ia_bce_loss"
            else 0
            for x, t in pairs
        ]
    assert_close(found[0], torch.tensor([float(v) for v in of_gamma], dtype=torch.float64))
    assert_close(found[1], torch.tensor([float(v) for v in of_target], dtype=torch.float64))


@pytest.mark.parametrize(("name", "detached"), LOSSES)
def test_slopes_of_saturated_logits(device, name, detached):
    """Uses logits up to a tenth of the largest number. The loss is linear where sigmoid is 0 or 1."""
    for dtype in (torch.float32, torch.float64):
        sizes = torch.tensor([1e4, 1e30, torch.finfo(dtype).max / 10], dtype=dtype, device=device)
        for sign in (1.0, -1.0):
            for share in (0.0, 1.0, 0.5):
                x = leaf(sign * sizes)
                loss = getattr(fk, name)(x, torch.full_like(x, share), 100.0, 0.5, **options_of(name, detached))
                assert loss.isfinite().all()
                for again in (False, True):
                    (slope,) = torch.autograd.grad(loss.sum(), x, retain_graph=True, create_graph=again)
                    assert_close(slope, (loss / x.detach().abs()).double() * sign)


@pytest.mark.parametrize("shape", [(40, 80), (700, 3)])
@pytest.mark.parametrize("gamma", [1.5, 2.0, 3.0])
@pytest.mark.parametrize(("name", "detached"), LOSSES)
def test_the_kernel_is_its_definition(device, shape, gamma, name, detached):
    x, t = torch.randn(shape, device=device) * 4, torch.rand(shape, device=device)
    t = torch.where(torch.rand(shape, device=device) < 0.1, t, 0.0)
    t[: len(t) // 2] = t[: len(t) // 2].ceil()  # tiles of hard targets
    weight = torch.rand(shape[1], device=device)
    alpha = torch.rand(shape[1], device=device)
    for parameters in ({"alpha": 0.25}, {"alpha": alpha, "weight": weight}):
        given = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in parameters.items()}
        for target in (t, torch.randint(shape[1] + 1, shape[:1], device=device)):
            z, wide = leaf(x), leaf(x.double())
            exact = target.double() if target.is_floating_point() else target
            options = options_of(name, detached)
            loss = getattr(fk, name)(z, target, gamma, reduction="mean", **parameters, **options)
            expected = getattr(reference, name)(wide, exact, gamma, reduction="mean", **given, **options)
            assert_close(loss, expected)
            assert_close(grads(loss, z)[0], grads(expected, wide)[0])


@pytest.mark.parametrize("name", SCORED)
def test_second_derivatives_are_those_of_the_definition(device, name):
    x, t = torch.randn(6, 5, dtype=torch.float64, device=device), torch.rand(6, 5, dtype=torch.float64, device=device)
    t[:3] = t[:3].round()
    direction, found = torch.randn_like(x), []
    for module in (fk, reference):
        z, target = leaf(x), leaf(t)
        slopes = torch.autograd.grad(getattr(module, name)(z, target).sum(), [z, target], create_graph=True)
        found.append(torch.autograd.grad((slopes[0] * direction).sum() + slopes[1].square().sum(), [z, target]))
    for ours, exact in zip(*found, strict=True):
        assert_close(ours, exact)


# ---- published code -------------------------------------------------------------------------------------------------

CLASSES, QUERIES = 7, 12


def matched_boxes():
    """Outputs, targets and matches of two images in the format of DETR's criteria, and the dense target of overlaps."""
    random = torch.Generator().manual_seed(3)
    boxes = torch.rand(2, QUERIES, 4, generator=random) * 0.3 + 0.3
    logits = 3 * torch.randn(2, QUERIES, CLASSES, generator=random)
    matches = [(torch.tensor([1, 4, 9]), torch.tensor([2, 0, 1])), (torch.tensor([0, 11]), torch.tensor([0, 1]))]
    targets = [
        {
            "boxes": boxes[i, rows][order.argsort()] + 0.02,
            "class_labels": torch.randint(CLASSES, (len(rows),), generator=random),
        }
        for i, (rows, order) in enumerate(matches)
    ]
    overlaps = peer("transformers.loss.loss_for_object_detection").box_iou
    corners = peer("transformers.image_transforms").center_to_corners_format
    dense = torch.zeros(2, QUERIES, CLASSES)
    for i, (rows, order) in enumerate(matches):
        ious = overlaps(corners(boxes[i, rows]), corners(targets[i]["boxes"][order]))[0].diag()
        dense[i, rows, targets[i]["class_labels"][order]] = ious
    return logits, boxes, targets, matches, dense


def labels_and_scores(targets, matches, dense):
    """The class and the overlap of each query; class CLASSES without a match."""
    labels = torch.full(dense.shape[:2], CLASSES)
    for i, (rows, order) in enumerate(matches):
        labels[i, rows] = targets[i]["class_labels"][order]
    return labels, dense.sum(-1)


@pytest.mark.parametrize(
    ("file", "kind", "method", "settings", "ours"),
    [
        (
            "loss_rt_detr",
            "RTDetrLoss",
            "loss_labels_vfl",
            {"alpha": 0.75, "gamma": 2.0},
            functools.partial(fk.varifocal_loss, detach_modulation=True),
        ),
        ("loss_deimv2", "Deimv2Loss", "loss_labels_mal", {"mal_alpha": None, "gamma": 1.5}, fk.matchability_loss),
        (
            "loss_deimv2",
            "Deimv2Loss",
            "loss_labels_mal",
            {"mal_alpha": 0.4, "gamma": 2.0},
            functools.partial(fk.matchability_loss, gamma=2.0, alpha=0.4),
        ),
        ("loss_lw_detr", "LwDetrImageLoss", "loss_labels", {"focal_alpha": 0.25}, fk.ia_bce_loss),
    ],
)
def test_transformers(file, kind, method, settings, ours):
    logits, boxes, targets, matches, dense = matched_boxes()
    criterion = getattr(peer(f"transformers.loss.{file}"), kind)
    itself = types.SimpleNamespace(num_classes=CLASSES, **settings)
    itself._get_source_permutation_idx = functools.partial(criterion._get_source_permutation_idx, itself)
    theirs, z = leaf(logits), leaf(logits)
    outputs = {"logits": theirs, "pred_boxes": boxes}
    (expected,) = getattr(criterion, method)(itself, outputs, targets, matches, 5.0).values()
    found = ours(z.transpose(1, 2), dense.transpose(1, 2), reduction="sum") / 5.0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads(found, z)[0], grads(expected, theirs)[0], rtol=1e-4, atol=1e-6)
    targets[0]["boxes"][1] = torch.tensor([0.05, 0.05, 0.02, 0.02])  # a match without overlap
    (expected,) = getattr(criterion, method)(itself, outputs, targets, matches, 5.0).values()
    dense[0, 9] = 0
    pairs = tuple(value.flatten() for value in labels_and_scores(targets, matches, dense))
    found = ours(z.flatten(0, 1), pairs, reduction="sum") / 5.0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads(found, z)[0], grads(expected, theirs)[0], rtol=1e-4, atol=1e-6)


def test_varifocal_loss_of_mmdet_and_ultralytics():
    """Both differentiate the modulation. mmdet weights the background with alpha |p - t|^gamma."""
    x, t = torch.randn(30, CLASSES, dtype=torch.float64), torch.rand(30, CLASSES, dtype=torch.float64)
    t = torch.where(t < 0.7, 0.0, t)
    bce = functools.partial(torch.nn.functional.binary_cross_entropy_with_logits, reduction="none")

    def mmdet(z, alpha=0.75, gamma=2.0):
        return bce(z, t) * torch.where(t > 0, t, alpha * (z.sigmoid() - t).abs().pow(gamma))

    def ultralytics(z, alpha=0.75, gamma=2.0):
        label = (t > 0).double()
        return bce(z, t) * (alpha * z.sigmoid().pow(gamma) * (1 - label) + t * label)

    for theirs in (mmdet, ultralytics):
        y, z = leaf(x), leaf(x)
        found, expected = fk.varifocal_loss(y, t), theirs(z)
        assert_close(found, expected)
        assert_close(grads(found, y)[0], grads(expected, z)[0])
