"""The modules of all calibrators in a network: compiled, and built without memory."""

import copy

import pytest
import torch
from conftest import assert_close, peer
from scaling_cases import sample

import focalkern as fk

# The data are small, so fits warn; test_calibrators_warnings.py tests the warnings.
pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")

CALIBRATORS = {
    "temperature": fk.TemperatureScaling,
    "focal": fk.FocalTemperatureScaling,
    "floor": lambda: fk.TemperatureScaling(floor=0.01),
    "robust": fk.RobustTemperatureScaling,
    "histogram": fk.HistogramBinning,
    "bins after a floor": lambda: fk.HistogramBinning(scaling=fk.TemperatureScaling(floor=0.01), n_bins=3),
    "isotonic": fk.IsotonicCalibration,
    "structured": lambda: fk.StructuredScaling(solver="lbfgs"),
    "structured, focal": lambda: fk.StructuredScaling(kind="matrix", focal=True, solver="lbfgs"),
    "scalar": fk.SplineScaling,
    "free": lambda: fk.SplineScaling(keep_order=False),
    "vector": lambda: fk.SplineScaling(kind="vector"),
    "matrix": lambda: fk.SplineScaling(kind="matrix"),
    "labels": fk.MultiLabelScaling,
    "labels, a spline each": lambda: fk.MultiLabelScaling(scaling=fk.SplineScaling()),
}


def network(name, n_rows=300):
    """A layer and the module of a calibrator, and rows for it."""
    logits, target = sample(n_rows)
    peer("sklearn") if name == "isotonic" else None
    of_labels = torch.nn.functional.one_hot(target, logits.shape[1])
    calibrator = CALIBRATORS[name]().fit(logits, of_labels if name.startswith("labels") else target)
    layer = torch.nn.Linear(7, logits.shape[1], dtype=logits.dtype)
    return torch.nn.Sequential(layer, calibrator.as_module()).eval(), torch.randn(33, 7, dtype=logits.dtype)


@pytest.mark.parametrize("name", CALIBRATORS)
def test_one_graph(name):
    model, rows = network(name)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(rows), model(rows))


class Tracer(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return type(module).__module__.startswith("focalkern.") or super().is_leaf_module(module, name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", CALIBRATORS)
def test_traces(name):
    """Of torch.jit, for any number of rows, and of torch.fx, whose own tracer looks into the modules."""
    model, rows = network(name)
    assert torch.equal(torch.jit.trace(model, rows[:5])(rows), model(rows))
    assert torch.equal(torch.fx.GraphModule(model, Tracer().trace(model))(rows), model(rows))


@pytest.mark.parametrize("name", CALIBRATORS)
def test_memory_that_comes_later(name):
    """As FSDP and accelerate build a network: on the meta device, with memory but no values, then a checkpoint."""
    model, rows = network(name)
    other = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(rows), model(rows))
    with torch.device("meta"):
        other = copy.deepcopy(model).to("meta")
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other(rows), model(rows))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", CALIBRATORS)
def test_the_state_of_another_fit(name, assign):
    """Knots of splines and points of isotonic regression have another length in another fit."""
    (model, rows), (other, _) = network(name), network(name, n_rows=20)
    sizes = [{key: value.shape for key, value in one.state_dict().items()} for one in (model, other)]
    vary = ("isotonic", "scalar", "free", "vector", "matrix", "labels, a spline each")
    assert (sizes[0] != sizes[1]) == (name in vary)
    other.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(other(rows), model(rows))
    assert {key: value.shape for key, value in other.state_dict().items()} == sizes[0]


@pytest.mark.parametrize("name", ["scalar", "isotonic"])
def test_a_state_whose_tensors_do_not_fit_together(name):
    model, rows = network(name)
    expected, state = model(rows), model.state_dict()
    for key in ("1.values", "1.knots", "1.points"):
        if key in state:
            with pytest.raises(RuntimeError, match="size mismatch for 1"):
                model.load_state_dict({**state, key: state[key][..., :-1]})
    assert torch.equal(model(rows), expected)


@pytest.mark.parametrize(
    "averaging", [None, torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)], ids=["mean", "exponential"]
)
@pytest.mark.parametrize("name", CALIBRATORS)
def test_averages_of_models_with_their_buffers(name, averaging):
    model, rows = network(name)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=averaging, use_buffers=True)
    for _ in range(3):
        averaged.update_parameters(model)
    assert all(bool(buffer.isfinite().all()) for buffer in averaged.buffers())
    assert_close(averaged(rows), model(rows))
