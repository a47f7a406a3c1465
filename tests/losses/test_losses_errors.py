"""Errors of the training losses name the argument and the remedy."""

import pytest
import torch
from loss_cases import batch

import focalkern as fk
from focalkern.ops import _backend
from focalkern.reference._softmax_losses import ROW_LOSSES

# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------
NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fk.FocalLoss("2"), TypeError, r"FocalLoss: gamma must be a number, got str"),
        (lambda: fk.FocalLoss(NAN), ValueError, r"FocalLoss: gamma must be finite, got nan"),
        (lambda: fk.FocalLoss(torch.tensor(2)), TypeError, r"FocalLoss: gamma must be float16, .* got torch.int64"),
        (lambda: fk.FocalLoss(torch.nn.Parameter(torch.tensor([2.0, NAN]))), ValueError, r"finite, got \[2, nan\]"),
        (
            lambda: fk.FocalLoss(torch.ones(5)),
            ValueError,
            r"got a tensor of shape \[5\]; class weights are weight=; gam",
        ),
        (lambda: fk.InverseFocalLoss(torch.ones(5)), ValueError, r"InverseFocalLoss: gamma.*class weights are weight="),
        (lambda: fk.FLSDLoss(torch.ones(3)), ValueError, r"FLSDLoss: gammas must be given.*class weights are weight="),
        (lambda: fk.AdaFocalLoss(torch.ones(5)), TypeError, r"n_bins must be an int, got.*class weights are weight="),
        (lambda: fk.MMCELoss(torch.ones(5)), TypeError, r"coefficient must be a number, got.*weights are weight="),
        (
            lambda: fk.FocalLoss(alpha=0.25),
            TypeError,
            r"FocalLoss: alpha is not an argument.*weight=torch.tensor\(.*Sigmoid",
        ),
        (lambda: fk.FocalLoss(2.0, [1.0]), TypeError, r"FocalLoss: weight must be a tensor, got list"),
        (lambda: fk.FocalLoss(2.0, torch.ones(2, 2)), ValueError, r"weight must be \[C\], got shape \[2, 2\]"),
        (lambda: fk.BrierLoss(torch.ones(2).int()), TypeError, r"BrierLoss: weight must be float16, bfloat16"),
        (lambda: fk.BrierLoss(reduction="avg"), ValueError, r"reduction must be 'none', 'mean' or 'sum', got 'avg'"),
        (lambda: fk.BrierLoss(ignore_index=None), TypeError, r"ignore_index must be an int, got None"),
        (lambda: fk.FLSDLoss(label_smoothing=1.5), ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
        (lambda: fk.FLSDLoss(detach_modulation=1), TypeError, r"detach_modulation must be a bool, got int"),
        (lambda: fk.FLSDLoss([0, 0.5, 0.2, 1], [1, 2, 3]), ValueError, r"edges must be ascending"),
        (lambda: fk.FLSDLoss([0, 1], [1, 2]), ValueError, r"edges must have len\(gammas\) \+ 1 = 3 entries, got 2"),
        (lambda: fk.InverseFocalLoss(-1.0), ValueError, r"InverseFocalLoss: gamma must be at least 0, got -1.0"),
        (lambda: fk.InverseFocalLoss(torch.tensor(-1.0)), ValueError, r"gamma must be at least 0, got -1"),
        (lambda: fk.InverseFocalLoss(fk.FLSD_53), TypeError, r"InverseFocalLoss: gamma must be a number"),
        (lambda: fk.DualFocalLoss(-0.5), ValueError, r"DualFocalLoss: gamma must be at least 0, got -0.5"),
        (lambda: fk.DualFocalLoss(torch.ones(3)), TypeError, r"DualFocalLoss: gamma must be a number"),
        (lambda: fk.MMCELoss(reduction="none"), ValueError, r"MMCELoss: reduction must be 'mean' or 'sum', got 'none'"),
        (lambda: fk.MMCELoss(bandwidth=0.0), ValueError, r"MMCELoss: bandwidth must be at least 0.01"),
        (lambda: fk.MMCELoss(weighted="yes"), TypeError, r"MMCELoss: weighted must be a bool"),
        (lambda: fk.LogitNormPenalty(-1), ValueError, r"LogitNormPenalty: coefficient must be at least 0"),
        (lambda: fk.SigmoidFocalLoss(-1), ValueError, r"SigmoidFocalLoss: gamma must be at least 0"),
        (lambda: fk.SigmoidFocalLoss(alpha=2), ValueError, r"SigmoidFocalLoss: alpha must be in \[0, 1\]"),
        (lambda: fk.SigmoidFocalLoss(reduction="avg"), ValueError, r"reduction must be"),
    ],
)
def test_bad_settings_are_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: fk.FocalLoss(2.0), fk.BrierLoss, fk.SigmoidFocalLoss, fk.AdaFocalLoss])
def test_a_parameter_is_no_class_weight(make):
    """Torch would put it in place of the buffer, which the loss reads."""
    loss, weight = make(), torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match=rf"^{type(loss).__name__}: weight must not be a Parameter.*\.detach\(\)$"):
        loss.weight = weight
    loss.weight = weight.detach()
    assert torch.equal(loss.state_dict()["weight"], weight)


@pytest.mark.parametrize("loss", [fk.FLSDLoss(), fk.AdaFocalLoss(), fk.FocalLoss(fk.FLSD_53)])
def test_a_parameter_is_no_table(loss):
    input, target = batch()
    expected = loss(input, target)
    for name in loss._exact_buffers:
        with pytest.raises(ValueError, match=rf"^{type(loss).__name__}: {name} must not be a Parameter"):
            setattr(loss, name, torch.nn.Parameter(loss.get_buffer(name).clone()))
    assert torch.equal(loss(input, target), expected)


def test_a_steep_inverse_gamma_is_warned_about():
    input, target = batch()
    with pytest.warns(UserWarning, match=r"gamma = -4.0 is below -3.591"):
        fk.InverseFocalLoss(4.0)(input, target)


@pytest.mark.parametrize("loss", [fk.DualFocalLoss(), fk.BrierLoss(), fk.MMCELoss(), fk.LogitNormPenalty()])
def test_bad_batches_are_named(loss):
    name = type(loss).__name__
    input, target = batch(5, 3)
    with pytest.raises(TypeError, match=rf"{name}: input must be a tensor, got list"):
        loss([0.0], target)
    expected = "float16, bfloat16, float32 or float64, got torch.int64"
    with pytest.raises(TypeError, match=rf"{name}: input must be {expected}"):
        loss(target, target)
    expected = "int64, int32 or uint8 labels or floating-point class probabilities, got torch.bool"
    with pytest.raises(TypeError, match=rf"{name}: target must be {expected}"):
        loss(input, target.bool())
    with pytest.raises(ValueError, match=rf"{name}: target must be \[N\] = \[5\], got \[4\]"):
        loss(input, target[:4])
    with pytest.raises(ValueError, match=rf"{name}: target must be on the device of input, cpu, got meta"):
        loss(input, target.to("meta"))
    with pytest.raises(IndexError, match=rf"{name}: target must be in \[0, 3\) or ignore_index, got 3 at row 1"):
        loss(input, torch.tensor([0, 3, 0, 0, 0]))
    with pytest.raises(ValueError, match=rf"{name}: weight must be \[C\] = \[3\], got \[4\]"):
        type(loss)(weight=torch.ones(4))(input, target)
    if not isinstance(loss, fk.DualFocalLoss):
        with pytest.raises(ValueError, match=r"ignore_index must be negative \(unused\) for a target of class prob"):
            type(loss)(ignore_index=1)(input, input.softmax(-1))


def test_dual_takes_labels_only():
    """The errors name a remedy, and the loss takes what it gives."""
    input, labels = torch.randn(2, 3), torch.tensor([2, 0])
    rows = torch.nn.functional.one_hot(labels, 3)
    expected = fk.DualFocalLoss()(input, labels)
    words = r"DualFocalLoss: target must be labels, int64, int32 or uint8, got torch.float32; "
    with pytest.raises(TypeError, match=words + r"for one-hot rows pass target.argmax\(1\)$"):
        fk.DualFocalLoss()(input, rows.float())
    with pytest.raises(ValueError, match=r"got \[2, 3\]; for one-hot rows pass target.argmax\(1\)$"):
        fk.DualFocalLoss()(input, rows)
    assert fk.DualFocalLoss()(input, rows.float().argmax(1)) == expected
    with pytest.raises(TypeError, match=words + r"convert them with .long\(\), in NumPy"):
        fk.DualFocalLoss()(input, labels.float())
    assert fk.DualFocalLoss()(input, labels.float().long()) == expected


_LOSSES_OF_LABELS = [
    *(getattr(fk, spec.module)() for spec in ROW_LOSSES.values()),
    fk.FLSDLoss(),
    fk.InverseFocalLoss(),
]


@pytest.mark.parametrize("backend", ["kernels", "plain torch"])
@pytest.mark.parametrize("loss", _LOSSES_OF_LABELS, ids=repr)
@pytest.mark.parametrize(
    ("shape", "target", "kind", "words"),
    [
        (
            (8,),
            torch.ones(8).long(),
            ValueError,
            r"target must be one label, \[\], for one sample of \[C\] = \[8\] logits",
        ),
        ((8,), torch.ones(8).long(), ValueError, "got \\[8\\]; for one logit per sample use SigmoidFocalLoss"),
        ((8, 1), torch.ones(8).long(), IndexError, "got 1 at row 0; for one logit per sample use SigmoidFocalLoss"),
        ((8, 1), torch.ones(8, 1).long(), ValueError, "got \\[8, 1\\]; .* with target.view_as\\(input\\)$"),
        ((8,), torch.ones(3).long(), ValueError, r"logits, got \[3\]$"),
        (
            (2, 5, 7),
            torch.ones(2, 5).long(),
            ValueError,
            r"\[N, d1, ...\] = \[2, 7\], got \[2, 5\]; classes are dimension 1",
        ),
        ((2, 5, 7), torch.ones(2, 5).long(), ValueError, r"input.flatten\(0, 1\), target.flatten\(0, 1\)"),
        ((2, 4, 5, 7), torch.ones(2, 4, 5).long(), ValueError, r"input.flatten\(0, 2\), target.flatten\(0, 2\)"),
        ((5, 8, 6), torch.ones(8, 6).long(), ValueError, r"; for one image .* input\[None\] and target\[None\]$"),
        ((8, 3), torch.ones(8, 1).long(), ValueError, r"\[N\] = \[8\], got \[8, 1\]; target.squeeze\(-1\)"),
        ((2, 4, 5, 7), torch.ones(2, 1, 5, 7).long(), ValueError, r"got \[2, 1, 5, 7\]; target.squeeze\(1\)$"),
        ((2, 1, 5, 7), torch.ones(2, 1, 5, 7).long(), ValueError, r"; .* with target.view_as\(input\)$"),
        ((8, 3), torch.ones(8), (TypeError, ValueError), r"(labels are integers: target|convert them with ).long\(\)"),
        (
            (8, 3),
            torch.ones(8, 3).long(),
            ValueError,
            r"got \[8, 3\]; (for )?one-hot rows (are class|pass target.argmax)",
        ),
    ],
)
def test_a_target_that_does_not_fit_is_told_what_does(loss, backend, shape, target, kind, words, monkeypatch):
    if backend == "plain torch":
        monkeypatch.setattr(_backend, "_DEVICES", ())
        monkeypatch.setattr(_backend, "_ON_CPU", False)
        monkeypatch.setattr(_backend, "_SETTING", "0")
    with pytest.raises(kind, match=words):
        loss(torch.zeros(shape), target)


@pytest.mark.parametrize("loss", [fk.FocalLoss(), fk.FocalLoss(z_loss=0.1), fk.MMCELoss(), fk.LogitNormPenalty()])
@pytest.mark.parametrize(
    ("shape", "target", "words"),
    [
        ((8, 3), torch.ones(8, 1), r"got \[8, 1\]; labels are integers: target.squeeze\(-1\).long\(\)$"),
        ((2, 3, 5, 7), torch.ones(2, 1, 5, 7), r"labels are integers: target.squeeze\(1\).long\(\)$"),
        ((8, 1), torch.ones(8), r"got \[8\]; for one logit per sample use SigmoidFocalLoss"),
        ((8, 3), torch.ones(8, 4), r"got \[8, 4\]$"),
    ],
)
def test_labels_in_floating_point_are_told_to_be_integers(loss, shape, target, words):
    with pytest.raises(ValueError, match=words):
        loss(torch.zeros(shape), target)


def test_remedies_for_floating_point_labels_work():
    hidden, labels = torch.randn(8, 4), torch.ones(8)
    with pytest.raises(ValueError, match=r"got \[8\]; labels are integers: target.long\(\)$"):
        fk.LinearFocalLoss(4, 3)(hidden, labels)
    assert fk.LinearFocalLoss(4, 3)(hidden, labels.long()).isfinite()
    with pytest.raises(ValueError, match=r"AdaFocalLoss.accumulate: .*; for one-hot rows pass target.argmax\(1\)$"):
        fk.AdaFocalLoss().accumulate(hidden, torch.eye(4).long().repeat(2, 1))
