"""focal_loss whose forward pass gives the statistics too, against the loss alone."""

import math

import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern.ops import _loss_extras
from focalkern.ops._backend import backend_for

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
        monkeypatch.setattr(_loss_extras, "row_statistics", None)  # no second read
    for found, wanted in zip(results(return_stats=True), alone, strict=True):
        assert_close(found, wanted)


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
