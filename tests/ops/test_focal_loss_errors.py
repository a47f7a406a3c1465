"""Errors of fk.focal_loss name the argument; layouts and types that are refused or promoted."""

import math

import focal_cases
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from conftest import assert_close

import focalkern as fk
from focalkern.fallback.focal_loss import focal_definition

dynamo = focal_cases.dynamo  # fixture
threads = focal_cases.threads  # fixture

# ---- bad input ------------------------------------------------------------------------------------------------------
Z = torch.zeros(4, 3)

T = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        # Shapes.
        ((torch.zeros(()), T), {}, ValueError, r"input must .*got"),
        ((Z, T[:2]), {}, ValueError, r"target must be \[N\] = \[4\], got \[2\]"),
        ((Z, T[None]), {}, ValueError, r"target must be .*\[4\], got \[1, 4\]"),
        ((torch.zeros(4, 3, 2), T), {}, ValueError, r"target must be .*\[4, 2\], got \[4\]"),
        ((torch.zeros(3), T), {}, ValueError, r"target must be .*\[\], .* logits, got \[4\]"),
        ((Z, torch.zeros(4, 2)), {}, ValueError, r"target of class probabilities must .*\[4, 3\], got \[4, 2\]"),
        ((torch.zeros(4, 0), T), {}, ValueError, r"input must .*class"),
        ((Z, T), {"weight": torch.ones(4)}, ValueError, r"weight must be \[C\] = \[3\], got \[4\]"),
        ((Z, T), {"weight": torch.ones(3, 1)}, ValueError, r"weight must be \[C\] = \[3\], got \[3, 1\]"),
        ((Z, T, torch.ones(3)), {}, ValueError, r"gamma must be .*\[4\], got \[3\]"),
        # Along the class axis: refused even where it would broadcast by chance.
        ((Z, T, torch.ones(4, 3)), {}, ValueError, r"gamma must be .*\[4\], got \[4, 3\]"),
        ((Z, T, torch.ones(4, 1)), {}, ValueError, r"gamma must be .*\[4\], got \[4, 1\]"),
        ((Z, T, torch.ones(1, 4)), {}, ValueError, r"gamma must be .*\[4\], got \[1, 4\]"),
        # Dtypes and types.
        ((Z.int(), T), {}, TypeError, r"input must be .*got .*torch.int32"),
        ((Z.to(torch.complex64), T), {}, TypeError, r"input must be .*got torch.complex64"),
        ((Z, T.bool()), {}, TypeError, r"target must be .*got torch.bool"),
        ((Z, T.to(torch.int16)), {}, TypeError, r"target must be .*got .*torch.int16"),
        ((Z, torch.zeros(4, 3, dtype=torch.int64)), {}, ValueError, r"target must be .*\[4\], got \[4, 3\]"),
        ((Z, T, torch.tensor(2)), {}, TypeError, r"gamma must be .*got .*torch.int64"),
        ((Z, T, None), {}, TypeError, r"gamma must be .*got"),
        ((Z, T, [2.0] * 4), {}, TypeError, r"gamma must be .*got"),
        ((Z, T), {"weight": torch.ones(3, dtype=torch.int64)}, TypeError, r"weight must be .*got"),
        ((Z.tolist(), T), {}, TypeError, r"input must be .*got"),
        ((Z, T.tolist()), {}, TypeError, r"target must be .*got"),
        # Values.
        ((Z, T, math.nan), {}, ValueError, r"gamma must be .*got nan"),
        ((Z, T, math.inf), {}, ValueError, r"gamma must be .*got inf"),
        ((Z, T), {"label_smoothing": -0.1}, ValueError, r"label_smoothing must be .*got -0\.1"),
        ((Z, T), {"label_smoothing": 1.1}, ValueError, r"label_smoothing must be .*got 1\.1"),
        ((Z, T), {"label_smoothing": math.nan}, ValueError, r"label_smoothing must be .*got nan"),
        ((Z, T), {"reduction": "avg"}, ValueError, r"reduction must be .*got .*avg"),
        # Devices.
        ((Z, T.to("meta")), {}, ValueError, r"target must be on .*cpu, got meta"),
        ((Z, T), {"weight": torch.ones(3, device="meta")}, ValueError, r"weight must be on .*cpu, got meta"),
        ((Z, T, torch.ones(4, device="meta")), {}, ValueError, r"gamma must be on .*cpu, got meta"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match="^focal_loss: " + message):
        fk.focal_loss(*arguments, **options)


def test_options_are_keywords():
    with pytest.raises(TypeError):
        fk.focal_loss(Z, T, 2.0, None)


# The first label out of range, in row 2; below 0; after ignored rows; and in a layout of several dimensions.
@pytest.mark.parametrize("bad", [3, -1, -99, 2**32, 2**32 + 1, 2**40, -(2**62), -(2**63)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_out_of_range_on_the_cpu_name_the_row(bad, smoothing):
    target = torch.tensor([0, -100, bad, 2, 7])
    for reduction in ("none", "mean", "sum"):
        with pytest.raises(IndexError, match=rf"^focal_loss: target.*\[0, 3\).*got {bad}.*row 2"):
            fk.focal_loss(torch.zeros(5, 3), target, reduction=reduction, label_smoothing=smoothing)
    spread = torch.zeros(5, 3, 2)
    with pytest.raises(IndexError, match=rf"got {bad}"):
        fk.focal_loss(spread, target[:, None].expand(5, 2), label_smoothing=smoothing)
    with pytest.raises(IndexError, match=rf"got {bad}"):
        fk.focal_loss(torch.zeros(3), torch.tensor(bad), label_smoothing=smoothing)


ON_LABELS = {
    "focal": (fk.focal_loss, "focal_loss"),
    "smoothed": (lambda z, y: fk.focal_loss(z, y, label_smoothing=0.1), "focal_loss"),
    "z-loss": (lambda z, y: fk.focal_loss(z, y, z_loss=0.1), "focal_loss"),
    "poly": (fk.poly_focal_loss, "poly_focal_loss"),
    "dual": (fk.DualFocalLoss(), "DualFocalLoss"),
    "mmce": (fk.MMCELoss(), "MMCELoss"),
    "sigmoid": (lambda z, y: fk.sigmoid_focal_loss(z, y, reduction="sum"), "sigmoid_focal_loss"),
}
TRANSFORMED = {
    "grad": lambda f, z, y: torch.func.grad(f)(z, y),
    "grad, labels from outside": lambda f, z, y: torch.func.grad(lambda z: f(z, y))(z),
    "vmap": lambda f, z, y: torch.func.vmap(f)(z, y),
    "gradients per sample": lambda f, z, y: torch.func.vmap(torch.func.grad(f))(z, y),
    "jvp": lambda f, z, y: torch.func.jvp(lambda z: f(z, y), (z,), (z,)),
    "hessian": lambda f, z, y: torch.func.hessian(f)(z, y),
}


@focal_cases.torch_jit_warns
@pytest.mark.parametrize("bad", [4, -1])
@pytest.mark.parametrize("transform", TRANSFORMED)
@pytest.mark.parametrize("name", ON_LABELS)
def test_labels_out_of_range_raise_under_torch_func_too(name, transform, bad):
    loss, op = ON_LABELS[name]
    with pytest.raises(IndexError, match=rf"^{op}: target must be in \[0, 3.*got {bad} at row 2"):
        TRANSFORMED[transform](loss, torch.randn(4, 3), torch.tensor([0, 1, bad, 2]))


def test_a_label_that_is_not_checked_makes_loss_and_gradient_nan():
    """In plain torch, where reading labels would synchronise a device."""
    z = torch.randn(4, 3, requires_grad=True)
    target = torch.tensor([0, 3, -100, 2])
    loss = focal_definition(z, target, 2.0, None, None, 0, -100, 0.0, False)
    assert loss.isnan().tolist() == [False, True, False, False]
    (grad,) = torch.autograd.grad(loss.nansum() + loss.sum(), z)
    assert grad.isnan().tolist() == [[row == 1] * 3 for row in range(4)]


def test_a_large_batch_names_its_first_bad_label_on_any_number_of_threads(threads):
    target = torch.zeros(50_000, dtype=torch.int64)
    target[[40_000, 30_001, 49_999]] = torch.tensor([9, 8, 7])
    for count in (1, 2, 3):
        threads(count)
        with pytest.raises(IndexError, match=r"got 8.*row 30001"):
            fk.focal_loss(torch.zeros(50_000, 3), target)


def test_check_labels(device):
    good = torch.tensor([0, 2, -100, 1], device=device)
    assert fk.check_labels(good, 3) is None
    assert fk.check_labels(good[:0], 3) is None
    with pytest.raises(IndexError, match=r"target.*got 2.*row 1"):
        fk.check_labels(good, 2)
    with pytest.raises(IndexError, match=r"target.*got -100.*row 2"):
        fk.check_labels(good, 3, ignore_index=-1)
    assert fk.check_labels(torch.tensor([255, 1], dtype=torch.uint8, device=device), 2, ignore_index=255) is None
    with pytest.raises(TypeError, match="target"):
        fk.check_labels(good.double(), 3)


def test_validate_environment_checks_labels(device, monkeypatch):
    monkeypatch.setenv("FOCALKERN_VALIDATE", "1")
    z = torch.zeros(3, 4, device=device)
    assert_close(fk.focal_loss(z, torch.tensor([0, 3, -100], device=device), 0.0), torch.tensor(math.log(4)))
    with pytest.raises(IndexError, match=r"got 4.*row 1"):
        fk.focal_loss(z, torch.tensor([0, 4, 1], device=device))


def test_strong_inverse_focal_loss_warns_once_about_its_negative_coefficient():
    with pytest.warns(UserWarning, match=r"focal_loss: gamma .*-4"):
        fk.focal_loss(Z, T, -4.0)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Z, T, "2"), {}, TypeError, r"gamma must be .*got"),
        ((Z, T), {"weight": [1.0, 1.0, 1.0]}, TypeError, r"weight must be .*got"),
        ((Z, T), {"ignore_index": 0.5}, TypeError, r"ignore_index must be .*got"),
        ((Z, T), {"label_smoothing": "0.1"}, TypeError, r"label_smoothing must be .*got"),
    ],
)
def test_bad_types_are_named(arguments, options, error, message):
    with pytest.raises(error, match="^focal_loss: " + message):
        fk.focal_loss(*arguments, **options)


def test_layouts_without_elements_in_memory_are_refused():
    for z in (Z.to_sparse(), Z.to_mkldnn()):
        with pytest.raises((NotImplementedError, TypeError, ValueError), match=r"^focal_loss: input"):
            fk.focal_loss(z, T)


@pytest.mark.kernels
def test_opcheck_of_a_layout_that_is_copied(device):
    # The gradient of the fake kernel and of the real one must have the same strides.
    z = torch.randn(2, 5, 6, device=device).permute(2, 1, 0)
    target = torch.randint(5, (6, 2), device=device)
    number = torch.tensor(2.0, dtype=torch.float64)
    loss, saved = torch.ops.focalkern.focal_loss_forward(z, target, number, None, None, 0, -100, 0.0, False, False)
    arguments = (torch.randn_like(loss), z, target, number, None, None, saved, 0, -100, 0.0, False)
    torch.library.opcheck(torch.ops.focalkern.focal_loss_backward, (*arguments, [True, False, False]))


# Every pair of dtypes, and the promotions to float32 and to float64, also compiled.
@pytest.mark.parametrize("logits_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("target_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_class_probabilities_of_another_dtype_promote_as_in_torch(device, dynamo, logits_dtype, target_dtype):
    z = torch.randn(4, 5, device=device).to(logits_dtype).requires_grad_()
    target = torch.rand(4, 5, device=device).softmax(1).to(target_dtype)
    calls = [fk.focal_loss]
    if (logits_dtype, target_dtype) in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        calls.append(torch.compile(fk.focal_loss, fullgraph=True, backend="aot_eager"))
    for call in calls:
        loss = call(z, target, 1.0)
        assert loss.dtype == F.cross_entropy(z.detach(), target).dtype
        assert torch.autograd.grad(loss, z)[0].dtype == logits_dtype


def test_infinite_logits_spoil_soft_targets_too(device):
    z = torch.tensor([[math.inf, 0.0, 0.0]], device=device, requires_grad=True)
    loss = fk.focal_loss(z, torch.tensor([[0.0, 0.5, 0.5]], device=device))
    assert loss.isnan()
    assert torch.autograd.grad(loss, z)[0].isnan().all()


def test_empty_batch_of_any_strides(device):
    z = torch.empty(4, 3, 5, 0, device=device).permute(3, 2, 1, 0).requires_grad_()
    loss = fk.focal_loss(z, torch.empty(0, 3, 4, dtype=torch.int64, device=device), reduction="none")
    assert loss.shape == (0, 3, 4)
    assert torch.autograd.grad(loss.sum(), z)[0].shape == z.shape


@pytest.mark.kernels
def test_backward_operator_takes_only_what_the_forward_pass_saved():
    z, target, number = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.tensor(2.0, dtype=torch.float64)
    _, saved = torch.ops.focalkern.focal_loss_forward(z, target, number, None, None, 1, -100, 0.0, False, False)
    strided = torch.stack([saved, saved], dim=1)[:, 0]
    for wrong in (strided, saved[:-1], saved.double()):
        with pytest.raises(ValueError, match=r"^focal_loss: saved must be"):
            torch.ops.focalkern.focal_loss_backward(
                torch.ones(()), z, target, number, None, None, wrong, 1, -100, 0.0, False, [True, False, False]
            )
