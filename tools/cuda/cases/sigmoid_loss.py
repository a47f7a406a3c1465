"""The losses of one logit, forward and backward."""

import ctypes
from ctypes import c_bool, c_double, c_int, c_int32, c_int64, c_void_p

import pytest
import torch

from focalkern import reference
from focalkern.reference._scored_losses import IA_BCE_FLOOR
from tools.cuda.cases.common import DTYPES, NAN, Memory, assert_near, real_of, structure

MAX_DIMS = 10
FOCAL, ASYMMETRIC, QUALITY, VARIFOCAL, MATCHABILITY, IA_BCE = KINDS = range(6)
SCORED = {VARIFOCAL: reference.varifocal_loss, MATCHABILITY: reference.matchability_loss, IA_BCE: reference.ia_bce_loss}
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64]


class Space(ctypes.Structure):
    _fields_ = [("size", c_int64), ("dims", c_int), ("sizes", c_int64 * MAX_DIMS)]


class Operand(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p), ("type", c_int32), ("dense", c_bool), ("strides", c_int64 * MAX_DIMS), ("value", c_double),
    ]  # fmt: skip

    @classmethod
    def of(cls, memory, value, shape):
        """A number, or a tensor that broadcasts to the shape of the contiguous results."""
        if not isinstance(value, torch.Tensor):
            return cls(value=value)
        wide = value.expand(shape)
        strides = [stride if size > 1 else 0 for size, stride in zip(shape, wide.stride(), strict=True)]
        kind = torch.uint8 if value.dtype == torch.bool else value.dtype
        dense = wide.is_contiguous()
        return cls(memory.put(value), TYPES.index(kind), dense, (c_int64 * MAX_DIMS)(*strides), 0.0)


ARGS = [
    ("loss_kind", c_int32), ("space", Space), ("input", Operand), ("target", Operand), ("target_is_labels", c_bool),
    ("has_alpha", c_bool), ("class_dim", c_int), ("classes", c_int64), ("ignore_index", c_int64), ("gamma", Operand),
    ("second", Operand), ("weight", Operand), ("scores", Operand), ("constant", "real"),
]  # fmt: skip
FORWARD = [*ARGS, ("loss", c_void_p), ("loss_wide", c_void_p)]
BACKWARD = [
    *ARGS, ("grad_loss", Operand), ("divisor", c_void_p), ("grad_input", c_void_p), ("grad_target", c_void_p),
    ("grad_gamma", c_void_p), ("grad_second", c_void_p),
]  # fmt: skip


def run_sigmoid_loss(library, kind, x, target, gamma, second, grad, *, weight=1.0, constant=0.0, ignore_index=-100,
                     reduction="mean", wide=True, all_gradients=True, one_image=False, scores=None):  # fmt: skip
    """All results of the two kernels, by name. Without `all_gradients`, the only gradient is that of the logits. With
    `one_image`, the space lacks the first dimension, which has size 1."""
    dtype, real, shape = x.dtype, real_of(x.dtype), x.shape
    labels = target.dim() < x.dim()
    has_alpha = kind not in (ASYMMETRIC, QUALITY) and second is not None
    second = 1.0 if second is None else second
    in_real = [v.to(real) if isinstance(v, torch.Tensor) else v for v in (gamma, second, weight)]
    with Memory(library) as memory:
        forward = structure(library, "SigmoidLossForward", dtype, FORWARD)
        forward.loss_kind = kind
        forward.space = Space(x.numel(), x.dim(), (c_int64 * MAX_DIMS)(*shape))
        forward.input = Operand.of(memory, x, shape)
        forward.target = Operand.of(memory, target.unsqueeze(1) if labels else target, shape)
        forward.target_is_labels, forward.class_dim = labels, 1 if labels else -1
        forward.has_alpha = has_alpha
        if one_image:
            forward.space = Space(x.numel(), x.dim() - 1, (c_int64 * MAX_DIMS)(*shape[1:]))
            forward.input = Operand.of(memory, x[0], shape[1:])
            forward.target, forward.class_dim = Operand.of(memory, target, shape[1:]), 0
        forward.classes, forward.ignore_index, forward.constant = shape[1], ignore_index, constant
        forward.gamma, forward.second, forward.weight = (Operand.of(memory, v, shape) for v in in_real)
        if scores is not None:
            forward.scores = Operand.of(memory, scores.unsqueeze(1), shape)
        one, all_real = torch.full((1,), NAN, dtype=real), torch.full(shape, NAN, dtype=real)
        unreduced = all_real if wide else all_real.to(dtype)
        total, divisor, loss = memory.out(one), memory.out(one), memory.out(unreduced)
        if reduction == "none":
            forward.loss, forward.loss_wide = (None, loss) if wide else (loss, None)
        size = library.sigmoid_loss_workspace(c_int64(x.numel()))
        status = library.sigmoid_loss_forward(
            DTYPES.index(dtype), ctypes.byref(forward), int(reduction == "mean"),
            c_void_p(None if reduction == "none" else total), c_void_p(divisor), c_void_p(memory.scratch(size)),
        )  # fmt: skip
        assert status == 0
        backward = structure(library, "SigmoidLossBackward", dtype, BACKWARD)
        for name, _ in ARGS:
            setattr(backward, name, getattr(forward, name))
        backward.grad_loss = Operand.of(memory, grad.to(real), shape)
        backward.divisor = divisor if reduction == "mean" else None
        narrow = torch.full(shape, NAN, dtype=dtype)
        backward.grad_input = memory.out(narrow)
        others = ("grad_target", "grad_gamma", "grad_second") if all_gradients else ()
        for name in others:
            setattr(backward, name, memory.out(all_real))
        assert library.sigmoid_loss_backward(DTYPES.index(dtype), ctypes.byref(backward)) == 0
        return {
            "loss": memory.get(loss, unreduced) if reduction == "none" else memory.get(total, one),
            "divisor": memory.get(divisor, one),
            "grad_input": memory.get(backward.grad_input, narrow),
            **{name: memory.get(getattr(backward, name), all_real) for name in others},
        }


def check_sigmoid_loss(library, kind, x, target, gamma=2.0, second=None, *, reduction="mean", **options):
    dtype, real = x.dtype, real_of(x.dtype)
    if kind == IA_BCE:
        second, options["constant"] = 0.25 if second is None else second, IA_BCE_FLOOR
    grad = torch.randn(x.shape if reduction == "none" else (1,) * x.dim(), dtype=real)
    actual = run_sigmoid_loss(library, kind, x, target, gamma, second, grad, reduction=reduction, **options)
    wide = options.pop("wide", True)
    constant = options.pop("constant", 0.0)
    weight = options.pop("weight", 1.0)
    scores = options.pop("scores", None)
    options["weight"] = torch.as_tensor(weight, dtype=torch.float64)
    labels = target.dim() < x.dim()
    z = x.double().requires_grad_()
    t = target if labels else target.double().requires_grad_()
    gammas = [
        (v.double() if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=torch.float64))
        .expand(x.shape).clone().requires_grad_()
        for v in (gamma, 1.0 if second is None else second)
    ]  # fmt: skip
    scored = t if scores is None else (t, scores.double())
    if kind == ASYMMETRIC:
        expected = reference.asymmetric_loss(z, t, *gammas, constant, reduction, **options)
    elif kind == QUALITY:
        expected = reference.quality_focal_loss(z, scored, gammas[0], reduction, **options)
    else:
        alpha = None if second is None else gammas[1].detach()
        if kind in (VARIFOCAL, MATCHABILITY):
            options["detach_modulation"] = constant == 1
        function = SCORED.get(kind, reference.sigmoid_focal_loss)
        expected = function(z, scored, gammas[0], alpha, reduction, **options)
        options.pop("detach_modulation", None)
    inputs = [z, gammas[0], *([] if labels else [t]), *([gammas[1]] if kind == ASYMMETRIC else [])]
    upstream = grad.double().reshape(expected.shape)
    found = torch.autograd.grad(expected, inputs, upstream)
    assert_near(actual["loss"], expected, real if wide or reduction != "none" else dtype, 20)
    if reduction != "mean":
        assert actual["divisor"].item() == 1
    assert_near(actual["grad_input"], found[0], dtype, 20 if dtype == real else 2)
    assert_near(actual["grad_gamma"], found[1], real, 20)
    if not labels:
        assert_near(actual["grad_target"], found[2], real, 20)
    if kind == ASYMMETRIC:
        assert_near(actual["grad_second"], found[-1], real, 20)
    # If only the gradient of the logits is requested, a separate kernel computes it.
    alone = run_sigmoid_loss(library, kind, x, target, gamma, second, grad, reduction=reduction, wide=wide,
                             constant=constant, all_gradients=False, scores=scores,
                             **{**options, "weight": weight})  # fmt: skip
    assert_near(alone["loss"], expected, real if wide or reduction != "none" else dtype, 20)
    assert_near(alone["grad_input"], found[0], dtype, 20 if dtype == real else 2)
    return actual


# One element, one pack, sizes around a block of packs, and several rounds of the small grid.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (13, 79), (40, 80)])
@pytest.mark.parametrize("kind", KINDS)
def test_sigmoid_loss_of_dense_targets(library, dtype, shape, kind):
    x, t = (torch.randn(shape) * 4).to(dtype), torch.rand(shape).to(dtype)
    constant = {ASYMMETRIC: 0.0625, MATCHABILITY: 1.0}.get(kind, 0.0)
    if kind in SCORED:
        t = torch.where(torch.rand(shape) < 0.5, t, 0.0).to(dtype)
    for reduction, gamma in (("mean", 2.0), ("none", 1.5), ("sum", 3.0)):
        check_sigmoid_loss(library, kind, x, t, gamma, reduction=reduction, constant=constant)
        # Hard targets, in some packs only; and a weight tensor, for which other kernels exist.
        hard = torch.where(torch.rand(shape[0], 1) < 0.2, t, t.round())
        weight = 0.5 if reduction == "none" else torch.full((1, 1), 2.0)
        check_sigmoid_loss(library, kind, x, hard, gamma, reduction=reduction, constant=constant, weight=weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 9), (30, 80)])
def test_sigmoid_loss_of_labels(library, dtype, shape):
    x = (torch.randn(shape) * 4).to(dtype)
    labels = torch.randint(shape[1] + 1, (shape[0], *shape[2:]))
    labels.view(-1)[::5] = -100
    labels.view(-1)[3] = shape[1] + 7 if reduction_may_be_nan(shape) else 0
    for kind in KINDS:
        for reduction in ("none", "sum", "mean"):
            check_sigmoid_loss(library, kind, x, labels, reduction=reduction)
    check_sigmoid_loss(library, FOCAL, x, labels.int(), reduction="none", wide=False)
    check_sigmoid_loss(library, FOCAL, x, labels, 0.3, 0.25, reduction="sum", weight=torch.full((1,) * x.dim(), 2.0))


# Labels of rows and of pixels; scores of 0 and 1; scores of background and of ignored rows.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (30, 80), (3, 4, 9), (3, 4, 16)])
@pytest.mark.parametrize("kind", [QUALITY, *SCORED])
def test_sigmoid_loss_of_labels_and_scores(library, dtype, shape, kind):
    x = (torch.randn(shape) * 4).to(dtype)
    labels = torch.randint(shape[1] + 1, (shape[0], *shape[2:]))
    labels.view(-1)[::5] = -100
    scores = torch.rand(labels.shape)
    labels.view(-1)[1:3], scores.view(-1)[1:3] = 0, torch.tensor([0.0, 1.0])
    for reduction, gamma in (("none", 2.0), ("sum", 1.5), ("mean", 3.0)):
        check_sigmoid_loss(library, kind, x, labels, gamma, reduction=reduction, scores=scores.to(dtype))


# Rows that share packs, end within them or fill them; more packs than the small grid has threads.
@pytest.mark.parametrize("shape", [(700, 1), (4000, 3), (500, 8), (97, 33), (2, 4099)])
def test_sigmoid_loss_of_labels_in_rows(library, shape):
    for dtype, kind in ((torch.float32, torch.int32), (torch.bfloat16, torch.uint8), (torch.float16, torch.int64)):
        x = (torch.randn(shape) * 4).to(dtype)
        labels = torch.randint(min(shape[1] + 1, 255), shape[:1]).to(kind)
        labels[::7] = 255 if kind == torch.uint8 else -100
        for gamma, reduction in ((2.0, "mean"), (0.0, "sum"), (0.7, "none")):
            check_sigmoid_loss(library, FOCAL, x, labels, gamma, 0.25, reduction=reduction,
                               ignore_index=255 if kind == torch.uint8 else -100)  # fmt: skip


# A thread computes some classes of a vector of pixels. The shapes have fewer and more classes than a thread takes,
# several vectors per thread of the small grid, and one image. 28 pixels do not fill whole vectors of 16 bits, so they
# take the other kernels.
@pytest.mark.parametrize("shape", [(2, 5, 24), (3, 19, 40), (1, 8, 3208), (2, 1, 8), (2, 17, 28)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_loss_of_labels_of_pixels(library, dtype, shape):
    x = (torch.randn(shape) * 4).to(dtype)
    for kind in (torch.int32, torch.uint8, torch.int64):
        labels = torch.randint(shape[1] + 1, (shape[0], *shape[2:])).to(kind)
        ignored = 255 if kind == torch.uint8 else -100
        labels.view(-1)[::7] = ignored
        labels.view(-1)[-1] = shape[1] - 1
        for loss, gamma, reduction in (
            (FOCAL, 2.0, "mean"),
            (ASYMMETRIC, 0.7, "sum"),
            (QUALITY, 3.0, "none"),
            (VARIFOCAL, 2.0, "sum"),
            (MATCHABILITY, 1.5, "mean"),
            (IA_BCE, 3.0, "none"),
        ):
            check_sigmoid_loss(library, loss, x, labels, gamma, reduction=reduction, ignore_index=ignored)
    x = x.detach().clone()
    if len(x) == 1:
        grad = torch.ones((1, 1, 1))
        as_three, as_two = (
            run_sigmoid_loss(library, FOCAL, x, labels, 2.0, 0.25, grad, all_gradients=False, one_image=one_image)
            for one_image in (False, True)
        )
        for name, values in as_three.items():
            assert torch.equal(as_two[name], values) and not values.isnan().any()
    x.movedim(1, -1)[0, 0] = NAN  # ignored
    labels[-1, 2] = shape[1] + 1
    most = library.max_grid()
    for blocks in (most, 64):  # with more blocks a thread has fewer classes
        library.set_max_grid(c_int64(blocks))
        actual = run_sigmoid_loss(library, FOCAL, x, labels, 2.0, 0.25, torch.ones((1, 1, 1)), reduction="none",
                                  all_gradients=False)  # fmt: skip
        library.set_max_grid(c_int64(most))
        for name in ("loss", "grad_input"):
            assert (actual[name].movedim(1, -1)[0, 0] == 0).all()
            assert actual[name].movedim(1, -1)[-1, 2].isnan().all()
            assert actual[name].isnan().sum() == shape[1]


def reduction_may_be_nan(shape):
    """One shape has a label out of range, whose row is NaN."""
    return shape == (7, 5)


@pytest.mark.parametrize("target", [torch.uint8, torch.int64, torch.float16, torch.float64])
def test_sigmoid_loss_of_targets_of_other_types(library, target):
    x = torch.randn(6, 33)
    check_sigmoid_loss(library, FOCAL, x, torch.randint(2, (6, 33)).to(target), second=0.25, reduction="none")


# The kernel does not check the values of a weight tensor, so it uses an invalid weight, too.
@pytest.mark.parametrize("alpha", [NAN, -0.5, -1.0])
def test_sigmoid_loss_of_an_alpha_that_is_no_weight(library, alpha):
    x, labels = torch.randn(7, 33), torch.randint(34, (7,))
    for target in (torch.rand(7, 33), torch.randint(2, (7, 33)).float(), labels):
        check_sigmoid_loss(library, FOCAL, x, target, second=alpha, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigmoid_loss_with_strides_and_broadcast_parameters(library, dtype):
    x = (torch.randn(5, 9, 6) * 3).to(dtype).transpose(0, 2).contiguous().transpose(0, 2)
    t = torch.rand(5, 1, 6).expand(5, 9, 6)
    for kind in KINDS:
        check_sigmoid_loss(library, kind, x, t, torch.rand(9, 1) * 3, torch.rand(6), weight=torch.rand(5, 1, 1),
                           reduction="none")  # fmt: skip
    # Off the boundary of a pack, with input and target alike or not.
    flat, soft = torch.randn(200).to(dtype), torch.rand(200).to(dtype)
    check_sigmoid_loss(library, FOCAL, flat[1:127].view(2, 63), soft[1:127].view(2, 63))
    check_sigmoid_loss(library, FOCAL, flat[:126].view(2, 63), soft[3:129].view(2, 63))


def test_sigmoid_loss_at_extreme_logits(library):
    x = torch.tensor([[-1000.0, -90.0, -17.0, 0.0, 17.0, 90.0, 1000.0]]).expand(3, 7).contiguous()
    for kind in KINDS:
        constant = IA_BCE_FLOOR if kind == IA_BCE else 0.0
        for gamma in (0.0, 0.3, 2.0):
            # An approximate p may miss t = 0.5 by a unit in the last place, which is 0.006 in |t - p|^0.3.
            share = 0.25 if kind == QUALITY and gamma == 0.3 else 0.5
            t = torch.tensor([[0.0], [1.0], [share]]).expand(3, 7).contiguous()
            # The reference has no derivative in the target where 1 - p underflows.
            grad = torch.ones(3, 7)
            found = run_sigmoid_loss(library, kind, x, t, gamma, 1.0, grad, reduction="none", constant=constant)
            z = x.double().requires_grad_()
            functions = (reference.sigmoid_focal_loss, reference.asymmetric_loss, reference.quality_focal_loss)
            function = (*functions, *SCORED.values())[kind]
            options = {ASYMMETRIC: {"gamma_positive": 1.0, "margin": 0.0}, QUALITY: {}}.get(kind, {"alpha": 1.0})
            if kind == MATCHABILITY:
                options["detach_modulation"] = False
            expected = function(z, t.double(), gamma, **options)
            assert_near(found["loss"], expected, torch.float32)
            assert_near(found["grad_input"], torch.autograd.grad(expected.sum(), z)[0], torch.float32)
            assert found["grad_gamma"].isfinite().all()
            alone = run_sigmoid_loss(
                library, kind, x, t, gamma, 1.0, grad[:1, :1], reduction="sum", all_gradients=False, constant=constant
            )
            assert_near(alone["grad_input"], found["grad_input"], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [FOCAL, QUALITY])
def test_sigmoid_loss_where_gamma_times_the_logit_overflows(library, dtype, kind):
    """p is 0 or 1 there. With A the share of the other side, the loss is A^gamma A |x|."""
    x = torch.tensor([[1.0, -1.0, -1.0, 1.0]], dtype=dtype) * 0.25 * torch.finfo(dtype).max
    t = torch.tensor([[0.3, 0.75, 0.999, 0.999]], dtype=dtype)
    against = torch.where(x > 0, 1 - t, t).double()
    for gamma in (5.0, 100.0):
        found = run_sigmoid_loss(library, kind, x, t, gamma, None, torch.ones_like(x), reduction="none")
        assert_near(found["loss"] / x.abs(), against ** (gamma + 1), dtype, 20)
        assert_near(found["grad_input"], x.double().sign() * against ** (gamma + 1), dtype, 20)
        assert not any(values.isnan().any() for values in found.values())


def test_sigmoid_loss_of_nothing_and_of_ignored_rows(library):
    found = run_sigmoid_loss(
        library, FOCAL, torch.full((4, 6), NAN), torch.full((4,), -100), 2.0, 0.25, torch.ones(1, 1), reduction="mean"
    )
    assert found["loss"].isnan()
    assert (found["grad_input"] == 0).all()
    empty = run_sigmoid_loss(library, FOCAL, torch.ones(0, 6), torch.ones(0, 6), 2.0, 0.25, torch.ones(1, 1))
    assert empty["loss"].isnan()
