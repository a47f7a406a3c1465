"""A device without float64, and one without autocast: the meta device stands in for a Mac's GPU."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import focalkern as fk
from focalkern import _devices
from focalkern._arrays import as_tensor
from focalkern.ops import _backend


class WithoutFloat64(TorchDispatchMode):
    """Raises, as torch does, if a float64 tensor would be created on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta" and tensor.dtype == torch.float64:
                raise TypeError(f"the device has no float64, and {function} makes some")
        return result


@pytest.fixture
def without_float64(monkeypatch):
    monkeypatch.setattr(_devices, "_WITHOUT_FLOAT64", {"mps", "meta"})
    monkeypatch.setattr(_backend, "_DEVICES", ("cpu",))
    monkeypatch.setattr(_backend, "_warned", True)  # once per process is enough
    with WithoutFloat64():
        yield


def there(*shape):
    return torch.empty(*shape, device="meta", requires_grad=True)


LABELS = torch.empty(5, dtype=torch.int64, device="meta")
TABLE = fk.GammaTable([0.0, 0.2, 1.0], [5.0, 3.0])
OPERATORS = {
    "focal_loss": lambda: fk.focal_loss(there(5, 4), LABELS, weight=there(4).detach()),
    "focal_loss, smoothed": lambda: fk.focal_loss(there(5, 4), LABELS, label_smoothing=0.1),
    "focal_loss, probabilities": lambda: fk.focal_loss(there(5, 4), there(5, 4), there(5)),
    "focal_loss, a table": lambda: fk.focal_loss(there(5, 4), LABELS, TABLE.to("meta")),
    "sigmoid_focal_loss": lambda: fk.sigmoid_focal_loss(there(5, 4), there(5, 4)),
    "asymmetric_loss": lambda: fk.asymmetric_loss(there(5, 4), LABELS),
    "quality_focal_loss": lambda: fk.quality_focal_loss(there(5, 4), LABELS),
    "varifocal_loss": lambda: fk.varifocal_loss(there(5, 4), there(5, 4)),
    "matchability_loss": lambda: fk.matchability_loss(there(5, 4), LABELS),
    "ia_bce_loss": lambda: fk.ia_bce_loss(there(5, 4), LABELS),
    "linear_focal_loss": lambda: fk.linear_focal_loss(there(5, 3), there(4, 3), LABELS),
    "linear_focal_loss, a table": lambda: fk.linear_focal_loss(
        there(5, 3), there(4, 3), LABELS, gamma=TABLE.to("meta")
    ),
    "focal_calibration_map": lambda: fk.focal_calibration_map(there(5, 4), np.ones(5), there(5)),
    "binary_focal_calibration_map": lambda: fk.binary_focal_calibration_map(there(5), 1.0, 2.0),
    "inverse_focal_calibration_map": lambda: fk.inverse_focal_calibration_map(there(5, 4), np.ones(5)),
    "binary_inverse_focal_calibration_map": lambda: fk.binary_inverse_focal_calibration_map(there(5), 1.0),
}
LOSSES = {
    "FocalLoss": lambda: fk.FocalLoss(TABLE),
    "FLSDLoss": fk.FLSDLoss,
    "AdaFocalLoss": fk.AdaFocalLoss,
    "DualFocalLoss": fk.DualFocalLoss,
    "BrierLoss": fk.BrierLoss,
    "LinearFLSDLoss": lambda: fk.LinearFLSDLoss(4, 7),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_make_no_float64(without_float64, name):
    result = OPERATORS[name]()
    assert (result.device.type, result.dtype) == ("meta", torch.float32)
    result.sum().backward()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_move_there(without_float64, name):
    module = LOSSES[name]().to("meta")
    assert all(buffer.dtype != torch.float64 for buffer in module.buffers())
    module(there(5, 4), LABELS).backward()


@pytest.mark.parametrize("name", ["FocalLoss", "FLSDLoss", "AdaFocalLoss"])
def test_buffers_stay_exact_where_they_can(name):
    assert {buffer.dtype for buffer in LOSSES[name]().to("meta").buffers()} >= {torch.float64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_what_is_computed_in_float64_goes_to_the_cpu(monkeypatch, dtype):
    """Tests metrics, calibrators and grids. Here the CPU plays the device without float64."""
    copied = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copied.append(self) or self)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    as_tensor(torch.ones(3, dtype=dtype))
    assert len(copied) == 0
    monkeypatch.setattr(_devices, "_WITHOUT_FLOAT64", {"cpu"})
    as_tensor(torch.ones(3, dtype=dtype))
    assert len(copied) == 1


def test_a_loss_over_ranks_says_that_it_needs_float64(without_float64):
    with pytest.raises(TypeError, match=r"logits must be on a device with float64.*got meta"):
        fk.focal_loss_vocab_parallel(there(5, 4), LABELS)
