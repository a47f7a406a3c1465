"""Focal loss, forward and backward."""

import ctypes
from ctypes import c_bool, c_int64, c_void_p

import pytest
import torch

from focalkern import GammaTable, reference
from focalkern.reference._softmax_losses import row_loss_of
from tools.cuda.cases.common import (
    DTYPES,
    LABELS,
    NAN,
    Labels,
    Layout,
    Memory,
    assert_near,
    nan_like,
    real_of,
    structure,
)

FOCAL_LOSS = [
    ("rows", c_int64), ("classes", c_int64), ("logits", c_void_p), ("layout", Layout), ("labels", Labels),
    ("ignore_index", c_int64), ("target_probs", c_void_p), ("target_is_real", c_bool), ("target_layout", Layout),
    ("label_smoothing", "real"), ("class_weight", c_void_p), ("detach_modulation", c_bool), ("gamma", c_void_p),
    ("gamma_stride", c_int64), ("gamma_value", "real"), ("epsilon", "real"), ("edges", c_void_p),
    ("n_bins", c_int64), ("saved", c_void_p),
]  # fmt: skip
FOCAL_LOSS_FORWARD = [*FOCAL_LOSS, ("row_loss", c_void_p)]
FOCAL_LOSS_BACKWARD = [
    *FOCAL_LOSS, ("grad_loss", c_void_p), ("grad_stride", c_int64), ("divisor", c_void_p), ("grad_logits", c_void_p),
    ("grad_layout", Layout), ("grad_target", c_void_p), ("grad_gamma", c_void_p),
    ("lse_slope", c_void_p), ("first_is_class", c_bool),
]  # fmt: skip
ALONE = -1  # for `statistics`
STATISTICS = [(name, c_void_p) for name in ("log_p", "entropy", "lse", "predicted", "correct", "counts")]


def run_focal_loss(library, logits, target, gamma, grad, *, weight=None, ignore_index=-100, reduction="mean",
                   label_smoothing=0.0, detach_modulation=False, grad_like=None, gradients=True, target_gradient=True,
                   kind=0, epsilon=0.0, statistics=None, lse_slope=None):  # fmt: skip
    """All results of the two kernels, by name. Without `gradients`, the only gradient is that of gamma. Other values of
    `kind` are the other losses of rows. `statistics`: `kind`, if the forward pass gives those of
    the rows, too, or ALONE, if it gives nothing else."""
    which = (kind,) if kind else ()
    launch_forward = library.row_loss_forward if kind else library.focal_loss_forward
    launch_backward = library.row_loss_backward if kind else library.focal_loss_backward
    dtype, real = logits.dtype, real_of(logits.dtype)
    classes = logits.shape[1]
    rows = logits.numel() // classes
    soft = target.is_floating_point()
    with Memory(library) as memory:
        forward = structure(library, "RowLossForward", dtype, FOCAL_LOSS_FORWARD)
        forward.rows, forward.classes = rows, classes
        forward.logits, forward.layout = memory.put(logits), Layout.of(logits)
        if soft:
            forward.target_probs, forward.target_layout = memory.put(target), Layout.of(target)
            forward.target_is_real = target.dtype != dtype
        else:
            forward.labels = Labels(memory.put(target.contiguous()), LABELS.index(target.dtype))
        forward.ignore_index, forward.label_smoothing = ignore_index, label_smoothing
        forward.detach_modulation, forward.epsilon = detach_modulation, epsilon
        forward.class_weight = None if weight is None else memory.put(weight.to(real))
        if isinstance(gamma, GammaTable):
            forward.gamma, forward.n_bins = memory.put(gamma.gammas.to(real)), len(gamma.gammas)
            forward.edges = memory.put(gamma.edges.to(real))
        elif isinstance(gamma, torch.Tensor):
            forward.gamma, forward.gamma_stride = memory.put(gamma.to(real)), int(gamma.dim() > 0)
        else:
            forward.gamma_value = gamma
        numbers = torch.full(((4 if row_loss_of(kind).keeps_class else 3) * rows,), NAN, dtype=real)
        row_numbers, one = numbers[:rows].clone(), torch.full((1,), NAN, dtype=real)
        forward.saved = memory.out(numbers)
        divisor, loss, row_loss = memory.out(one), memory.out(one), memory.out(row_numbers)
        forward.row_loss = row_loss if reduction == "none" else None
        scratch = library.focal_loss_workspace(c_int64(rows), c_int64(classes), int(reduction != "none"))
        launched, more = which, ()
        if statistics is not None:
            of_rows = Statistics(memory, library, dtype, rows)
            launch_forward, launched = library.row_loss_with_statistics, (statistics,)
            more = (ctypes.byref(of_rows.struct),)
        status = launch_forward(
            *launched, DTYPES.index(dtype), ctypes.byref(forward), *more, int(reduction == "mean"),
            c_void_p(None if reduction == "none" else loss), c_void_p(divisor),
            c_void_p(memory.scratch(scratch) if scratch else None),
        )  # fmt: skip
        assert status == 0
        if statistics == ALONE:
            return of_rows.get()

        backward = structure(library, "RowLossBackward", dtype, FOCAL_LOSS_BACKWARD)
        for name, _ in FOCAL_LOSS:
            setattr(backward, name, getattr(forward, name))
        backward.grad_loss, backward.grad_stride = memory.put(grad), int(reduction == "none")
        backward.divisor = divisor if reduction == "mean" else None
        backward.lse_slope = memory.put(lse_slope)
        grad_like = logits if grad_like is None else grad_like
        backward.grad_layout = Layout.of(grad_like)
        if gradients:
            backward.grad_logits = memory.out(nan_like(grad_like))
            backward.grad_target = memory.out(nan_like(target.to(real))) if soft and target_gradient else None
        # As in the operator: a number has no gradient, and the kernels may take another path.
        with_gamma = isinstance(gamma, torch.Tensor) or not gradients
        backward.grad_gamma = memory.out(row_numbers) if with_gamma else None
        assert launch_backward(*which, DTYPES.index(dtype), ctypes.byref(backward)) == 0
        first = (backward.grad_logits, backward.grad_target)
        if first[1]:  # without the target's gradient, too: the kernels may take another path
            backward.grad_logits, backward.grad_target = memory.out(nan_like(grad_like)), None
            assert launch_backward(*which, DTYPES.index(dtype), ctypes.byref(backward)) == 0
        return {
            **({} if statistics is None else of_rows.get()),
            "saved": memory.get(forward.saved, numbers),
            "loss": memory.get(row_loss, row_numbers) if reduction == "none" else memory.get(loss, one),
            "divisor": memory.get(divisor, one),
            "grad_logits": memory.get(first[0], grad_like) if gradients else None,
            "grad_logits_alone": memory.get(backward.grad_logits, grad_like) if gradients else None,
            "grad_target": memory.get(first[1], target.to(real)) if first[1] else None,
            "grad_gamma": memory.get(backward.grad_gamma, row_numbers) if with_gamma else None,
        }


class Statistics:
    """Memory for the statistics of rows."""

    def __init__(self, memory, library, dtype, rows):
        real = torch.full((rows,), NAN, dtype=real_of(dtype))
        flags = torch.full((rows,), 255, dtype=torch.uint8)
        classes = torch.full((rows,), -7, dtype=torch.int64)
        self.memory = memory
        self.like = dict(zip(dict(STATISTICS), (real, real, real, classes, flags, flags), strict=True))
        self.struct = structure(library, "RowStatisticsResult", dtype, STATISTICS)
        for name, like in self.like.items():
            setattr(self.struct, name, memory.out(like))

    def get(self):
        return {name: self.memory.get(getattr(self.struct, name), like) for name, like in self.like.items()}


def check_focal_loss(library, logits, target, gamma, *, reduction="mean", **options):
    grad_like = options.pop("grad_like", None)
    dtype, real = logits.dtype, real_of(logits.dtype)
    classes = logits.shape[1]
    rows = logits.numel() // classes
    grad = torch.randn(rows if reduction == "none" else 1, dtype=real)
    actual = run_focal_loss(library, logits, target, gamma, grad, reduction=reduction, grad_like=grad_like, **options)
    z = logits.double().requires_grad_()
    soft = target.is_floating_point()
    t = target.double().requires_grad_() if soft else target.long()
    differentiable = isinstance(gamma, torch.Tensor) and not options.get("detach_modulation", False)
    g = gamma.double().requires_grad_() if differentiable else gamma
    # Label out of range: NaN in that row; the other rows as if it were ignored.
    ignore_index = options.pop("ignore_index", -100)
    outside = torch.zeros(rows, dtype=torch.bool)
    if not soft:
        outside = ((t < 0) | (t >= classes)) & (t != ignore_index)
        t = torch.where(outside, ignore_index, t)
        outside = outside.reshape(-1)
    if options.get("weight") is not None:
        options["weight"] = options["weight"].double()
    expected = reference.focal_loss(z, t, g, reduction=reduction, ignore_index=ignore_index, **options)
    inputs = [z, *([t] if soft else []), *([g] if differentiable else [])]
    upstream = grad.double().reshape(expected.shape)
    gradients = list(torch.autograd.grad(expected, inputs, upstream, allow_unused=True))
    factor = 100 if logits.abs().nan_to_num(posinf=0, neginf=0).max() > 100 else 20
    if outside.any():
        expected = (
            torch.where(outside.reshape(expected.shape), NAN, expected) if reduction == "none" else expected * NAN
        )
    assert_near(actual["loss"], expected, real, factor)
    if reduction != "mean":
        assert actual["divisor"].item() == 1
    z_grad = gradients[0].movedim(1, -1).reshape(rows, classes)
    z_grad = torch.where(outside.unsqueeze(-1), NAN, z_grad)
    for name in ("grad_logits", "grad_logits_alone") if soft else ("grad_logits",):
        z_actual = actual[name].movedim(1, -1).reshape(rows, classes)
        assert_near(z_actual, z_grad, dtype, factor if dtype == real else 2)
    if soft:
        assert_near(actual["grad_target"], gradients[1], real, factor)
    if differentiable:
        of_rows = actual["grad_gamma"] if gamma.dim() > 0 else actual["grad_gamma"].sum()
        assert_near(of_rows, torch.where(outside, NAN, gradients[-1].reshape(-1)) if gamma.dim() else gradients[-1],
                    real, factor)  # fmt: skip
    return actual


def labels_for(logits: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    shape = logits.shape[:1] + logits.shape[2:]
    return torch.randint(min(logits.shape[1], 200), shape).to(dtype)


# Classes around each threshold between the ways of reading a row (one vector, one tile, a warp, the block), and their
# remainders. Rows around a tile.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "classes"),
    [(1, 1), (33, 3), (257, 10), (300, 17), (40, 129), (17, 512), (9, 513), (5, 1023), (3, 4099), (2, 9001)],
)
def test_focal_loss_rows(library, dtype, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    check_focal_loss(library, logits, labels_for(logits), 2.0, reduction="mean")
    check_focal_loss(library, logits, labels_for(logits, torch.int32), torch.rand(rows), reduction="none")


# Every remainder of a vector and of a warp, for each way of reading a row. An element that no thread takes stays NaN in
# the gradient; one that is taken twice changes the sums.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [1, 65, 129, 257, 481, 513, 2030, 4090])
def test_focal_loss_takes_each_element_once(library, dtype, first):
    for classes in range(first, first + (64 if first < 1000 else 40), 1 if first < 1000 else 3):
        for skip in (0, 1):  # rows from a boundary on, and off it
            logits = torch.randn(3 * classes + skip).to(dtype)[skip:].reshape(3, classes)
            check_focal_loss(library, logits, labels_for(logits), 2.0, reduction="sum")


# Tiles of short rows. The class counts cover each number of lanes per row (1 to 32), rows that begin in few banks (64,
# 96, 128 and 256 classes), and tiles with two rounds of rows (33 and 54 classes in 16 bits). The row counts give one
# full tile, several tiles, and a last tile of one row or a few.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [18, 33, 54, 64, 96, 100, 101, 128, 210, 255, 256, 420, 511])
def test_focal_loss_tiles_of_short_rows(library, dtype, classes):
    full = 16
    while 2 * full * classes * dtype.itemsize <= 16384 and full < 256:
        full *= 2
    for rows in (full, full - 1, 4 * full + 1, 5 * full - 3):
        logits = (3 * torch.randn(rows, classes)).to(dtype)
        target = labels_for(logits, torch.uint8 if rows == full else torch.int64)
        target[rows // 2 :: 7] = 255 if rows == full else -100
        gamma = torch.rand(rows) if rows == full - 1 else 2.0
        reduction = "none" if rows == full - 1 else "mean"
        check_focal_loss(
            library, logits, target, gamma, reduction=reduction, ignore_index=255 if rows == full else -100
        )


# The sum over a short row uses a product of each logit, not of its distance from the largest.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [20, 33, 100])
def test_focal_loss_of_logits_far_from_zero(library, dtype, classes):
    limit = torch.finfo(dtype).max
    for offset in (1e3, -3e4, 1e6, -(2.0**24), 2.0**27, 2.0**30, -(2.0**30), 1e38, -2.5e38, 3.3e38):
        if abs(offset) >= limit:
            continue
        logits = (offset + 3 * torch.randn(40, classes, dtype=torch.float64)).to(dtype)
        nearest = abs(offset) * torch.finfo(dtype).eps  # about one unit in the last place
        spread = (offset + nearest * torch.randint(-2, 3, (40, classes), dtype=torch.float64)).to(dtype)
        for z in (logits, spread):
            check_focal_loss(library, z, labels_for(z), 2.0, reduction="sum")


# A thread has one row of a tile by itself, or two: as many rows as threads, and a last thread with one of two rows.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", range(1, 17))
def test_focal_loss_own_rows(library, dtype, classes):
    for rows in (512, 511, 255, 7):
        logits = (3 * torch.randn(rows, classes)).to(dtype)
        target = labels_for(logits, torch.int32 if rows == 7 else torch.int64)
        target[rows // 2 :: 5] = -100
        reduction = "none" if rows == 511 else "mean"
        gamma = torch.rand(rows) if rows == 511 else 2.0
        check_focal_loss(library, logits, target, gamma, reduction=reduction, weight=torch.rand(classes) + 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [5, 300, 2100])
def test_focal_loss_layouts(library, dtype, classes):
    n = 11 if classes < 1000 else 3
    sources = [
        torch.randn(2, classes, 37 if classes < 1000 else 5),  # a row is a column of memory
        torch.randn(n, classes, 3),
        torch.randn(n, 2, classes).transpose(1, 2),  # channels last
        torch.randn(classes, n).t(),
        torch.randn(n * classes + 1)[1:].reshape(n, classes),  # not on a 16-byte boundary
        torch.randn(n, classes + 3)[:, :classes],  # with gaps
    ]
    for source in sources:
        logits = torch.empty_strided(source.shape, source.stride(), dtype=dtype).copy_(source)
        for grad_like in (logits, torch.empty(logits.shape, dtype=dtype)):
            check_focal_loss(library, logits, labels_for(logits), 1.5, grad_like=grad_like)
        soft = torch.empty_like(logits, dtype=torch.float32).copy_(torch.randn(logits.shape).softmax(1))
        check_focal_loss(library, logits, soft, 2.0, label_smoothing=0.1)


@pytest.mark.parametrize("classes", [4, 100, 1500])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_focal_loss_options(library, classes, reduction):
    logits = 3 * torch.randn(20, classes)
    target = labels_for(logits)
    target[::5] = -100
    table = GammaTable([0.0, 0.013, 0.27, 1.0], [5.0, -1.5, 3.0])
    for gamma in (0.0, 0.5, -2.0, torch.tensor(1.5), 4 * torch.rand(20) - 1, table):
        for smoothing in (0.0, 0.2):
            options = {"label_smoothing": smoothing, "detach_modulation": smoothing > 0 and gamma is table}
            check_focal_loss(library, logits, target, gamma, reduction=reduction, weight=torch.rand(classes), **options)


@pytest.mark.parametrize("classes", [3, 200, 2500])
@pytest.mark.parametrize("label_type", LABELS)
def test_focal_loss_never_follows_a_label_out_of_range(library, classes, label_type):
    logits = torch.randn(12, classes)
    target = labels_for(logits, label_type)
    target[3] = 1
    if classes < 256 or label_type != torch.uint8:
        target[7] = classes if classes < 256 else 2**31 - 1
    if label_type != torch.uint8:
        target[11] = -1
    for smoothing in (0.0, 0.1):
        check_focal_loss(library, logits, target, 2.0, ignore_index=1, reduction="none", label_smoothing=smoothing)
        check_focal_loss(library, logits[:9], target[:9], 2.0, ignore_index=1, label_smoothing=smoothing)


@pytest.mark.parametrize("classes", [3, 100, 2500])
def test_focal_loss_edges(library, classes):
    logits = torch.randn(9, classes)
    target = torch.zeros(9, dtype=torch.int64)
    logits[0, 0] = 1e4  # certain and right
    logits[1, 1] = 1e4  # certain and wrong
    logits[2, 0] = 80
    logits[3, 1:] = -torch.inf
    logits[4, 1] = -torch.inf
    target[5] = -100
    check_focal_loss(library, logits, target, 0.5, reduction="none")
    logits[5] = NAN  # ignored, so never read
    for value in (NAN, torch.inf):
        logits[6, classes - 1] = value
        actual = run_focal_loss(library, logits, target, 2.0, torch.ones(9), reduction="none")
        assert actual["loss"].isnan().nonzero().tolist() == [[6]]
        assert actual["grad_logits"].isnan().any(1).nonzero().tolist() == [[6]]
        assert (actual["grad_logits"][5] == 0).all()
    logits[7] = -torch.inf
    assert run_focal_loss(library, logits, target, 2.0, torch.ones(9), reduction="none")["loss"][7].isnan()


# A thread with one row or two, a tile, a warp and a block per row.
@pytest.mark.parametrize("classes", [3, 12, 40, 100, 1000])
def test_focal_loss_of_a_class_of_weight_zero_that_cannot_occur(library, classes):
    logits, weight = torch.randn(20, classes), torch.rand(classes) + 0.1
    target = labels_for(logits)
    target[::3] = 1
    logits[target == 1, 1], weight[1] = -torch.inf, 0
    for reduction in ("none", "mean"):
        for gamma in (0.0, 2.0, -1.5):
            check_focal_loss(library, logits, target, gamma, reduction=reduction, weight=weight)


# A thread, a warp and a block per row; labels and class probabilities; the focal, the poly focal and the Brier loss.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [3, 40, 1000])
@pytest.mark.parametrize("kind", [0, 1, 3])
def test_a_row_without_upstream_gradient_has_a_zero_gradient(library, dtype, classes, kind):
    logits = torch.randn(9, classes).to(dtype)
    logits[4], logits[6, 0] = torch.inf, NAN
    upstream = torch.ones(9, dtype=real_of(dtype))
    upstream[[4, 6]] = 0
    labels = torch.randint(classes, (9,))
    for target in (labels, torch.rand(9, classes, dtype=real_of(dtype)).softmax(1)):
        grad = run_focal_loss(library, logits, target, 2.0, upstream, reduction="none", kind=kind)["grad_logits"]
        assert (grad[[4, 6]] == 0).all()
        assert grad.isfinite().all() and (grad[5] != 0).any()


def test_focal_loss_of_nothing(library):
    for rows in (0, 40):
        logits = torch.randn(rows, 5)
        target = torch.full((rows,), -100)
        actual = run_focal_loss(library, logits, target, 2.0, torch.ones(1))
        assert actual["loss"].isnan().all()
        assert (actual["grad_logits"] == 0).all()
        assert run_focal_loss(library, logits, target, 2.0, torch.ones(1), reduction="sum")["loss"] == 0


def test_focal_loss_is_deterministic(library):
    """The emulator runs blocks and threads in another order each time; the results must not change."""
    logits = torch.randn(1000, 100).bfloat16()
    target = labels_for(logits)
    first, *others = [run_focal_loss(library, logits, target, 2.0, torch.ones(1)) for _ in range(3)]
    for other in others:
        for name in ("loss", "divisor", "grad_logits", "saved"):
            assert torch.equal(first[name], other[name])
