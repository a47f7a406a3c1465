"""The losses of rows that share the focal loss's arguments, as focalkern/reference/_softmax_losses.py lists them."""

import math

import pytest
import torch

from focalkern import GammaTable
from focalkern.reference._softmax_losses import ROW_LOSSES, number_of
from tools.cuda.cases.common import DTYPES, LABELS, NAN, assert_near, real_of
from tools.cuda.cases.focal_loss import check_focal_loss, labels_for, run_focal_loss

SPECS = {spec.short: spec for spec in ROW_LOSSES.values() if not spec.of_batch}
# focal_loss.py has the cases of the focal loss of labels without smoothing.
NAMES = [name for name in SPECS if number_of(SPECS[name].name) != 0]


def number(name):
    return number_of(SPECS[name].name)


def gammas_of(spec, *gammas):
    """Those of a loss: 2 for one that has no gamma."""
    return gammas if "gamma" in spec.parameters else (2.0,)


def check_row_loss(library, name, logits, target, gamma=2.0, epsilon=1.5, *, reduction="mean", ignore_index=-100,
                   grad_like=None, statistics=None, **options):  # fmt: skip
    spec, dtype, real = SPECS[name], logits.dtype, real_of(logits.dtype)
    classes = logits.shape[1]
    rows = logits.numel() // classes
    grad = torch.randn(rows if reduction == "none" else 1, dtype=real)
    given = gamma if "gamma" in spec.parameters else 0.0
    actual = run_focal_loss(library, logits, target, given, grad, kind=number(name), epsilon=epsilon,
                            reduction=reduction, ignore_index=ignore_index, grad_like=grad_like,
                            statistics=statistics, **options)  # fmt: skip
    z = logits.double().requires_grad_()
    soft = target.is_floating_point()
    t = target.double().requires_grad_() if soft else target.long()
    differentiable = isinstance(gamma, torch.Tensor)
    g = gamma.double().requires_grad_() if differentiable else gamma
    # Label out of range: NaN in that row; the other rows as if it were ignored.
    outside = torch.zeros(rows, dtype=torch.bool)
    if not soft:
        outside = ((t < 0) | (t >= classes)) & (t != ignore_index)
        t = torch.where(outside, ignore_index, t)
        outside = outside.reshape(-1)
    if options.get("weight") is not None:
        options["weight"] = options["weight"].double()
    expected = spec.loss(z, t, g, epsilon, reduction=reduction, ignore_index=ignore_index, **options)
    inputs = [z, *([t] if soft else []), *([g] if differentiable else [])]
    gradients = torch.autograd.grad(expected, inputs, grad.double().reshape(expected.shape))
    factor = 100 if logits.abs().nan_to_num(posinf=0, neginf=0).max() > 100 else 20
    if outside.any():
        expected = (
            torch.where(outside.reshape(expected.shape), NAN, expected) if reduction == "none" else expected * NAN
        )
    assert_near(actual["loss"], expected, real, factor)
    if reduction != "mean":
        assert actual["divisor"].item() == 1
    z_grad = torch.where(outside.unsqueeze(-1), NAN, gradients[0].movedim(1, -1).reshape(rows, classes))
    assert_near(
        actual["grad_logits"].movedim(1, -1).reshape(rows, classes), z_grad, dtype, factor if dtype == real else 2
    )
    if soft:
        assert_near(actual["grad_target"], gradients[1], real, factor)
    if differentiable:
        of_rows = actual["grad_gamma"] if gamma.dim() > 0 else actual["grad_gamma"].sum()
        expected_gamma = torch.where(outside, NAN, gradients[-1].reshape(-1)) if gamma.dim() else gradients[-1]
        assert_near(of_rows, expected_gamma, real, factor)
    return actual


# Classes around each threshold between the ways of sharing a row (one thread, lanes, a warp, the block), and their
# remainders, also of the unrolled loop.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("rows", "classes"), [(1, 1), (33, 3), (257, 10), (40, 129), (17, 512), (9, 513), (3, 4099), (2, 9001)]
)
def test_row_loss_rows(library, name, dtype, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    check_row_loss(library, name, logits, labels_for(logits))
    check_row_loss(library, name, logits, labels_for(logits, torch.int32), reduction="none")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", [1, 255, 2040])
def test_row_loss_takes_each_element_once(library, name, first):
    for classes in range(first, first + 36):
        logits = torch.randn(3, classes)
        check_row_loss(library, name, logits, labels_for(logits), reduction="sum")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [5, 300, 2100])
def test_row_loss_layouts(library, name, classes):
    n = 11 if classes < 1000 else 3
    for logits in (
        torch.randn(2, classes, 37 if classes < 1000 else 5),  # a row is a column of memory
        torch.randn(n, 2, classes).transpose(1, 2),  # channels last
        torch.randn(n, classes + 3)[:, :classes],  # with gaps
    ):
        for grad_like in (logits, torch.empty(logits.shape)):
            check_row_loss(library, name, logits, labels_for(logits), grad_like=grad_like)
        if SPECS[name].soft_target:
            soft = torch.empty_like(logits).copy_(torch.randn(logits.shape).softmax(1))
            check_row_loss(library, name, logits, soft, label_smoothing=0.1, reduction="none")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [4, 100, 1500])
def test_row_loss_of_a_class_of_weight_zero_that_cannot_occur(library, name, classes):
    logits, weight = torch.randn(9, classes), torch.rand(classes) + 0.1
    target = torch.arange(9) % 3
    logits[target == 1, 1], weight[1] = -torch.inf, 0
    found = check_row_loss(library, name, logits, target, reduction="none", weight=weight)
    assert (found["loss"][1::3] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [4, 100, 1500])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_row_loss_options(library, name, classes, reduction):
    spec = SPECS[name]
    logits = 3 * torch.randn(20, classes)
    target = labels_for(logits)
    target[::5] = -100
    gammas = (2.0,)
    if spec.soft_target:  # the operators of the others take a number
        table = GammaTable([0.0, 0.013, 0.27, 1.0], [5.0, 0, 3.0])
        gammas = gammas_of(spec, 0.0, 0.5, torch.tensor(1.5), 4 * torch.rand(20), table)
    for gamma in gammas:
        for smoothing in (0.0, 0.2) if spec.soft_target else (0.0,):
            check_row_loss(library, name, logits, target, gamma, reduction=reduction, weight=torch.rand(classes),
                           label_smoothing=smoothing)  # fmt: skip
    if spec.detachable:
        check_row_loss(library, name, logits, target, 3.0, reduction=reduction, detach_modulation=True)
    if spec.soft_target:
        soft = torch.randn(logits.shape).softmax(1)
        check_row_loss(library, name, logits, soft, reduction=reduction, weight=torch.rand(classes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label_type", LABELS)
def test_row_loss_never_follows_a_label_out_of_range(library, name, label_type):
    for classes in (3, 200):
        logits = torch.randn(12, classes)
        target = labels_for(logits, label_type)
        target[3], target[7] = 1, classes
        if label_type != torch.uint8:
            target[11] = -1
        check_row_loss(library, name, logits, target, ignore_index=1, reduction="none")
        if SPECS[name].soft_target:
            check_row_loss(library, name, logits, target, ignore_index=1, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [3, 100, 2500])
def test_row_loss_edges(library, name, classes):
    kind = number(name)
    logits = torch.randn(9, classes)
    target = torch.zeros(9, dtype=torch.int64)
    logits[0, 0] = 1e4  # certain and right
    logits[1, 1] = 1e4  # certain and wrong
    logits[2, 0] = 80
    logits[3, 1:] = -torch.inf
    logits[4, 1] = -torch.inf
    target[5] = -100
    check_row_loss(library, name, logits, target, 0.5, reduction="none")
    logits[5] = NAN  # ignored, so never read
    for value in (NAN, torch.inf):
        logits[6, classes - 1] = value
        actual = run_focal_loss(library, logits, target, 2.0, torch.ones(9), reduction="none", kind=kind)
        assert actual["loss"].isnan().nonzero().tolist() == [[6]]
        assert actual["grad_logits"].isnan().any(1).nonzero().tolist() == [[6]]
        assert (actual["grad_logits"][5] == 0).all()
    logits[7] = -torch.inf
    assert run_focal_loss(library, logits, target, 2.0, torch.ones(9), reduction="none", kind=kind)["loss"][7].isnan()


@pytest.mark.parametrize("name", NAMES)
def test_row_loss_of_nothing(library, name):
    for rows in (0, 40):
        logits = torch.randn(rows, 5)
        target = torch.full((rows,), -100)
        actual = run_focal_loss(library, logits, target, 2.0, torch.ones(1), kind=number(name))
        assert actual["loss"].isnan().all()
        assert (actual["grad_logits"] == 0).all()


def test_a_tied_rival_is_the_first(library):
    for classes in (4, 40, 3000):
        logits = torch.zeros(2, classes)
        logits[:, 2] = 1.0
        actual = run_focal_loss(
            library, logits, torch.tensor([2, 2]), 2.0, torch.ones(2), reduction="none", kind=number("dual")
        )
        gradient = actual["grad_logits"]
        assert (gradient[:, 0] > gradient[:, 1]).all()
        assert (gradient[:, 3:] == gradient[:, 1:2]).all()


def check_soft(library, loss, logits, target, gamma=2.0, **options):
    if loss not in NAMES:
        return check_focal_loss(library, logits, target, gamma, **options)
    return check_row_loss(library, loss, logits, target, gamma, **options)


# Class probabilities and label smoothing have separate kernels.
SOFT = [name for name, spec in SPECS.items() if spec.soft_target]
WITH_GAMMA = [name for name in SOFT if "gamma" in SPECS[name].parameters]


def shares_for(logits, temperature=1.0):
    return (torch.randn(logits.shape) / temperature).softmax(1).to(real_of(logits.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", SOFT)
@pytest.mark.parametrize(
    ("rows", "classes"), [(1, 1), (33, 3), (257, 10), (70, 129), (17, 512), (9, 513), (3, 4099), (2, 9001)]
)
def test_soft_rows(library, loss, dtype, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    check_soft(library, loss, logits, labels_for(logits), label_smoothing=0.1)
    check_soft(library, loss, logits, shares_for(logits), reduction="none")


# Rows that begin and end at every position of a 16-byte vector: single classes before and after the vectors, and
# numbers of vectors that a warp's lanes divide evenly or not.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [1, 505, 1010])
def test_soft_takes_each_element_once(library, dtype, first):
    for classes in range(first, first + 40):
        skip = classes % 8
        logits = torch.randn(3 * classes + skip).to(dtype)[skip:].reshape(3, classes)
        check_soft(library, "focal", logits, labels_for(logits), label_smoothing=0.3, reduction="sum")
        grad_like = torch.empty(3 * classes + 1, dtype=dtype)[1:].reshape(3, classes)
        check_soft(library, "focal", logits, labels_for(logits), label_smoothing=0.3, grad_like=grad_like)


# Class probabilities in the type of the logits or of the computation, at every offset from a vector boundary: one
# thread, lanes and a warp share the row.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [12, 136, 2056])
def test_soft_targets_of_both_types(library, dtype, classes):
    for skip in (0, 1, 4):
        logits = torch.randn(3 * classes + skip).to(dtype)[skip:].reshape(3, classes)
        for skip_target in (0, 1, 4):
            for target_type in dict.fromkeys((dtype, torch.float32)):
                shares = shares_for(logits).reshape(-1).to(target_type)
                target = torch.cat([torch.zeros(skip_target, dtype=target_type), shares])[skip_target:]
                check_soft(library, "focal", logits, target.reshape(3, classes), reduction="none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", SOFT)
def test_soft_targets_of_pixels_in_the_type_of_logits(library, loss, dtype):
    for logits in (torch.randn(2, 9, 37).to(dtype), torch.randn(3, 2, 600).to(dtype).transpose(1, 2)):
        target = torch.empty_like(logits).copy_(torch.randn(logits.shape).softmax(1))
        for other in (target, target.contiguous()):
            check_soft(library, loss, logits, other, 0.0, label_smoothing=0.1, reduction="none")


# Every kind of gamma has its own formulas. So has a class with more than half of the probability: the label or another
# class, barely above and below one half, certain, and tied with others.
@pytest.mark.parametrize("loss", SOFT)
@pytest.mark.parametrize("classes", [2, 7, 700])
def test_soft_likely_classes(library, loss, classes):
    gammas = gammas_of(SPECS[loss], 0.0, 0.3, 1.0, 2.0, 5.5, *((-1.0, -2.5) if SPECS[loss].has_inverse else ()))
    logits = torch.randn(12, classes)
    above = torch.log(
        torch.tensor([0.5, 0.54, 0.56, 0.9, 0.999, 1 - 1e-6]) / torch.tensor([0.5, 0.46, 0.44, 0.1, 1e-3, 1e-6])
    )
    for side in (0, 1):
        logits[6 * side : 6 * side + 6, side] = 0
        others = torch.cat([logits[6 * side : 6 * side + 6, :side], logits[6 * side : 6 * side + 6, side + 1 :]], 1)
        logits[6 * side : 6 * side + 6, side] = others.logsumexp(1) + above
    target = torch.zeros(12, dtype=torch.int64)
    ties = torch.randn(6, classes)
    ties[0] = 0.25
    ties[1, :2] = 20.0
    ties[2, -2:] = 3.0
    ties[3, 0] = 100.0
    ties[4, -1] = 1000.0
    ties[5] *= 1000
    for gamma in gammas:
        for z in (logits, ties):
            for smoothing in (1e-3, 0.4):
                check_soft(library, loss, z, target[: len(z)], gamma, label_smoothing=smoothing, reduction="none")
            for temperature in (1.0, 0.02):
                check_soft(library, loss, z, shares_for(z, temperature), gamma, reduction="none")
            check_soft(library, loss, z, shares_for(z), gamma, reduction="none", weight=torch.rand(classes))


@pytest.mark.parametrize("loss", WITH_GAMMA)
@pytest.mark.parametrize("classes", [3, 600])
def test_soft_gammas_of_rows(library, loss, classes):
    logits = 2 * torch.randn(11, classes)
    gamma = 4 * torch.rand(11)
    gamma[::2] = 2.0
    if SPECS[loss].has_inverse:
        gamma[3] = -1.5
    for target, options in ((labels_for(logits), {"label_smoothing": 0.1}), (shares_for(logits), {})):
        check_soft(library, loss, logits, target, gamma, reduction="none", **options)
    # If no gradient in gamma is requested, a row with gamma 2 takes another code path.
    for options in ({}, {"detach_modulation": True}) if SPECS[loss].detachable else ({},):
        check_soft(library, loss, logits, labels_for(logits), 2.0, label_smoothing=0.1, **options)


# Gamma as a number that has a gradient: another kernel than that of the forward pass.
@pytest.mark.parametrize("classes", [5, 700])
def test_soft_gradient_of_a_number(library, classes):
    logits = 2 * torch.randn(11, classes)
    logits[::2, 1] += 9.0
    for target, options in ((labels_for(logits), {"label_smoothing": 0.1}), (shares_for(logits), {})):
        arguments = (library, logits, target)
        of_rows = run_focal_loss(*arguments, torch.full((11,), 2.0), torch.ones(11), reduction="none", **options)
        alone = run_focal_loss(*arguments, 2.0, torch.ones(11), reduction="none", gradients=False, **options)
        assert_near(alone["grad_gamma"], of_rows["grad_gamma"], torch.float32, 20)


# Logits masked by a large finite number, impossible labels without a share, factors that overflow where a class has no
# share.
@pytest.mark.parametrize("loss", SOFT)
@pytest.mark.parametrize("classes", [4, 700])
def test_soft_extremes(library, loss, classes):
    kind = number(loss)
    logits = torch.randn(3, classes)
    logits[0, 0] = 3e38
    logits[1, 1:] = -1.2e38
    target = torch.tensor([0, 0, 1])
    check_soft(library, loss, logits, target, label_smoothing=0.1, reduction="none")
    logits = torch.randn(3, classes)
    logits[1, 1] = -torch.inf
    actual = run_focal_loss(library, logits, torch.ones(3, dtype=torch.int64), 2.0, torch.ones(3), reduction="none",
                            kind=kind, label_smoothing=1.0)  # fmt: skip
    assert not actual["grad_logits"].isnan().any()
    if SPECS[loss].infinite_at_zero:
        assert actual["loss"].isinf().tolist() == [False, True, False] and not actual["loss"].isnan().any()
    if SPECS[loss].has_inverse:
        logits = torch.zeros(1, classes)
        logits[0, 0] = math.log(1.17 * (classes - 1))  # p = 0.54
        shares = torch.zeros(1, classes)
        shares[0, 1] = 1
        actual = run_focal_loss(library, logits, shares, -250.0, torch.ones(1), reduction="none", kind=kind)
        assert actual["loss"].isfinite().all() and actual["grad_logits"].isfinite().all()


# Logits that rise with the class: the running sums are rescaled at every step and must not drift.
@pytest.mark.parametrize("loss", SPECS)
def test_slowly_rising_logits(library, loss):
    logits = torch.linspace(0, 2.4, 24000)[None, :, None].expand(2, -1, 2).contiguous()
    target = torch.full((2, 2), 23999)
    if loss in NAMES:
        check_row_loss(library, loss, logits, target, 2.0)
    if SPECS[loss].soft_target:
        check_soft(library, loss, logits, target, label_smoothing=0.1)


@pytest.mark.parametrize("loss", SOFT)
@pytest.mark.parametrize("classes", [3, 100, 2500])
def test_soft_edges(library, loss, classes):
    kind = number(loss)
    logits = torch.randn(9, classes)
    shares = torch.rand(9, classes)
    shares[:, 0] = 0
    shares /= shares.sum(1, keepdim=True)
    logits[0, 1] = 1e4
    logits[1, 0] = 1e4  # certain, without a share
    logits[2, 1] = 80
    logits[3, 0] = -torch.inf  # impossible, without a share
    logits[4, 1:] -= 1e3
    check_soft(library, loss, logits[[0, 2, 3]], shares[[0, 2, 3]], 0.5, reduction="none")
    check_soft(library, loss, logits[[1, 4, 5]], shares[[1, 4, 5]], 2.0, reduction="none")
    target = torch.full((9,), classes - 1)
    target[5] = -100
    logits[5] = NAN  # ignored, so never read
    for value in (NAN, torch.inf):
        logits[6, classes // 2] = value
        for smoothing in (0.1, 1.0):
            actual = run_focal_loss(library, logits, target, 2.0, torch.ones(9), reduction="none", kind=kind,
                                    label_smoothing=smoothing)  # fmt: skip
            assert actual["loss"].isnan().nonzero().tolist() == [[6]]
            assert actual["grad_logits"].isnan().any(1).nonzero().tolist() == [[6]]
            assert actual["grad_logits"][6].isnan().all()
            assert (actual["grad_logits"][5] == 0).all()
