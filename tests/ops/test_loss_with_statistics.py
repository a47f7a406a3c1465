"""focal_loss whose forward pass gives the statistics too, against the loss alone."""

import math
import sys

import focal_cases
import pytest
import torch
from conftest import assert_close
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import focalkern as fk
from focalkern import fallback
from focalkern.ops import _loss_extras, _row_kernels, _vocab_soft
from focalkern.ops._backend import backend_for
from focalkern.ops._collectives import ALONE
from focalkern.ops.row_sums import row_sums

dynamo = focal_cases.dynamo  # fixture

TABLE = fk.GammaTable([0.0, 0.3, 1.0], [3.0, -1.0])
# The factor: a square, a power, its inverse, per row, from a table; of another loss; detached.
OPTIONS = [
    {"gamma": 2.0, "reduction": "sum"},
    {"gamma": 1.5, "ignore_index": 1},
    {"gamma": -0.5, "reduction": "none"},
    {"gamma": "rows", "weight": torch.tensor([0.5, 2.0, 1.0]).repeat(40)},
    {"gamma": TABLE},
    {"gamma": 1.0, "modulation": "confidence", "reduction": "none"},
    {"gamma": 2.0, "detach_modulation": True},
    {"gamma": 2.0, "label_smoothing": 0.1},
    {"gamma": 2.0, "label_smoothing": 0.6},  # float32 logits are computed in float64
    {"gamma": TABLE, "label_smoothing": 0.1, "reduction": "none"},
    {"gamma": 2.0, "z_loss": 0.1},
    {"gamma": "rows", "z_loss": 0.1, "label_smoothing": 0.1, "reduction": "none"},
]


# classes: padded to a group, and two tiles of rows; more than a group, off the vector width
@pytest.mark.parametrize("classes", [5, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) + f"-{options['gamma']}"[:6])
def test_loss_and_gradients(options, dtype, classes, device, monkeypatch):
    options = dict(options)
    z = (4 * torch.randn(70, classes)).to(device, dtype)
    target = torch.randint(classes, (70,), device=device)
    z[0], z[1] = 1.0, -math.inf  # equal classes; one possible class
    z[1, target[1]] = 0.0
    z[2, target[2]] = 60.0  # p = 1 - 1e-26
    z[3, target[3]] = -60.0
    z[4], target[4] = math.nan, options.get("ignore_index", -100)
    if "weight" in options:
        options["weight"] = options["weight"][:classes].to(device)
    if options["gamma"] is TABLE:
        options["gamma"] = TABLE.to(device)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    per_row = torch.linspace(-1, 3, 70, dtype=real, device=device) if options["gamma"] == "rows" else None

    def results(**stats):
        leaves = [z.clone().requires_grad_()]
        if per_row is not None:
            leaves.append(per_row.clone().requires_grad_())
            options["gamma"] = leaves[1]
        found = fk.focal_loss(leaves[0], target, **options, **stats)
        loss = found.loss if stats else found
        upstream = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype, device=device).reshape(loss.shape)
        return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]

    alone = results()
    in_one_read = hasattr(backend_for(z), "row_loss_with_statistics")
    if in_one_read and (device.type == "cpu" or "z_loss" not in options):
        monkeypatch.setattr(_loss_extras, "statistics_of_input", None)  # no second read
    for found, wanted in zip(results(return_stats=True), alone, strict=True):
        assert_close(found, wanted)


# Pixels: vectors and a remainder, fewer than a vector; lines of a crop; classes last; strides that are copied.
PIXELS = {
    "pixels": lambda z: z,
    "few pixels": lambda z: z[..., :1, :3].contiguous(),
    "crop": lambda z: z[..., 2:7, 1:18],
    "channels last": lambda z: z.to(memory_format=torch.channels_last),
    "every second pixel": lambda z: z[..., ::2],
    "transposed": lambda z: z.transpose(2, 3),
}


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", PIXELS)
def test_pixels_in_one_read(layout, dtype, smoothing, z_loss, device, monkeypatch):
    """The statistics are those of the rows [N H W, C], without row_statistics, where kernels compute them."""
    z = PIXELS[layout]((4 * torch.randn(2, 37, 9, 21)).to(device, dtype))
    target = torch.randint(37, (2, *z.shape[2:]), device=device)
    target[0, 0, :2] = -100
    z[0, :, 0, 0], z[0, 3, 0, 2] = math.nan, math.nan  # the first is ignored
    z[1, :, 0, 0], z[1, :, 0, 1] = 1.0, -math.inf
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": "none"}
    rows = z.movedim(1, -1).reshape(-1, 37)
    wanted = fallback.row_statistics(rows, target.reshape(-1), -100)
    log_p, entropy, lse, predicted, correct, counts = (field.reshape(target.shape) for field in wanted)
    leaf = z.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    plain = fk.focal_loss(leaf, target, 2.0, **options)
    upstream = torch.linspace(1, 2, plain.numel(), dtype=plain.dtype, device=device).reshape(plain.shape)
    (expected,) = torch.autograd.grad(plain, leaf, upstream)
    if hasattr(backend_for(z), "row_loss_with_statistics") and device.type == "cpu":
        monkeypatch.setattr(_loss_extras, "statistics_of_input", None)  # no second read
    loss, stats = fk.focal_loss(leaf, target, 2.0, return_stats=True, **options)
    assert_close(loss, plain)
    assert_close(torch.autograd.grad(loss, leaf, upstream)[0], expected)
    for found, number in ((stats.log_p, log_p), (stats.entropy, entropy), (stats.lse, lse)):
        assert_close(found, number)
    for found, number in ((stats.predicted, predicted), (stats.correct, correct), (stats.counts, counts)):
        assert torch.equal(found, number)


@pytest.mark.kernels("stable")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
@pytest.mark.parametrize("options", OPTIONS[:10], ids=lambda options: "-".join(options) + f"-{options['gamma']}"[:6])
def test_a_graph_has_one_operator_for_both(options, dynamo):
    options = dict(options)
    z, target = (4 * torch.randn(70, 5)).requires_grad_(), torch.randint(5, (70,))
    target[:3] = options.get("ignore_index", -100)
    if "weight" in options:
        options["weight"] = options["weight"][:5]
    inputs = [z]
    if options["gamma"] == "rows":
        options["gamma"] = torch.linspace(-1, 3, 70).requires_grad_()
        inputs.append(options["gamma"])
    operators = []

    def keep(graph, _inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes if "focalkern" in str(node.target))
        return make_boxed_func(graph)

    def loss(z):
        return fk.focal_loss(z, target, return_stats=True, **options)

    results = []
    for function in (torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=keep)), loss):
        found = function(z)
        upstream = torch.linspace(1, 2, found.loss.numel()).reshape(found.loss.shape)
        results.append([found.loss.detach(), *found.stats, *torch.autograd.grad(found.loss, inputs, upstream)])
    assert operators == [
        "focalkern.row_loss_with_statistics.default",
        "focalkern.focal_loss_backward.default",
    ]
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.kernels("stable")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", [0, 1])
def test_the_operator(reduction, smoothing):
    z, target, gamma = torch.randn(2, 6, 3), torch.randint(6, (2, 3)), torch.tensor(2.0, dtype=torch.float64)
    options = (reduction, -100, smoothing, False, 0)
    operator = torch.ops.focalkern.row_loss_with_statistics.default
    torch.library.opcheck(operator, (z, target, gamma, None, None, *options))
    torch.library.opcheck(operator, (z.bfloat16(), z.softmax(1), gamma, None, None, *options))  # more than one read


def test_smoothing_over_slices_takes_the_sums_of_the_loss(monkeypatch):
    """Statistics take no further call of row_sums, over ranks; a head on one process reads its logits once."""
    rows, slices = [], sys.modules["focalkern.ops.focal_loss_vocab_parallel"]
    monkeypatch.setattr(_vocab_soft, "row_sums", lambda z: (rows.append(len(z)), row_sums(z))[1])
    monkeypatch.setattr(slices, "row_sums", None)
    z, x, w, target = torch.randn(9, 7), torch.randn(9, 5), torch.randn(7, 5), torch.randint(7, (9,))
    arguments = {"label_smoothing": 0.1, "return_stats": True}
    slices.loss_of_slices("focal_loss", 0, z, target, 2.0, process_group=ALONE, **arguments)
    assert rows == [9]
    if hasattr(backend_for(z), "row_loss_with_statistics"):
        monkeypatch.setattr(_row_kernels, "statistics_of_input", None)
    fk.linear_focal_loss(x, w, target, 2.0, chunk_rows=9, **arguments)
    assert rows == [9]


def test_rows_without_a_loss_and_second_derivatives():
    z = torch.randn(4, 6, dtype=torch.float64)
    z[0], z[1, 2], z[2, 3] = -math.inf, math.nan, math.inf
    target = torch.tensor([0, 1, 2, 3])
    loss = fk.focal_loss(z, target, reduction="none", return_stats=True).loss
    assert loss.isnan().tolist() == [True, True, True, False]
    single = fk.focal_loss(z[3], target[3], return_stats=True)
    assert_close(single.loss, loss[3])
    assert single.stats.log_p.shape == ()
    rows = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda rows: fk.focal_loss(rows, torch.tensor([0, 4, 2]), return_stats=True).loss, rows
    )


def test_a_wrong_label_is_an_error_of_the_function():
    with pytest.raises(IndexError, match=r"focal_loss: target must be in \[0, 3\) or ignore_index, got 7 at row 1"):
        fk.focal_loss(torch.zeros(2, 3), torch.tensor([0, 7]), modulation="confidence", return_stats=True)
