"""The modules, exported by torch.onnx.export and run by onnxruntime."""

import warnings

import numpy as np
import pytest
import torch
from conftest import assert_close, peer

import focalkern as fk
from focalkern.calibrators import (
    CalibratedLogits,
    CalibratedLogProbs,
    FlooredInput,
    HistogramLogProbs,
    IsotonicLogProbs,
    MultiLabelLogits,
    SplineLogProbs,
    StructuredLogProbs,
)


def rows(n_classes):
    """Ordinary, saturated and tied rows, and rows with impossible classes."""
    torch.manual_seed(3)
    logits = torch.randn(40, n_classes) * torch.logspace(-3, 3, 40).unsqueeze(1)
    logits[0] = 0
    logits[1, 0], logits[1, 1:] = 1e4, -1e4
    logits[2, 0] = 80
    logits[3, 1:] = -torch.inf
    logits[4, 0] = -torch.inf
    return logits


def compare(name, found, expected):
    """onnxruntime has its own exp and log, and the export turns log1p(x) into log(1 + x), which loses digits near 0."""
    infinite = np.isinf(expected)
    assert np.array_equal(np.where(infinite, expected, 0), np.where(np.isinf(found), found, 0)), name
    assert found[~infinite] == pytest.approx(expected[~infinite], rel=2e-6, abs=2e-6), name


class Everything(torch.nn.Module):
    """All modules in one export, because each export takes seconds."""

    def __init__(self):
        super().__init__()
        binned = HistogramLogProbs(CalibratedLogProbs(-0.5, 0.3), [0.3, 0.55, 0.8, 0.9], [0.2, 0.5, 0.6, 0.97, 1.0])
        labels = MultiLabelLogits([0.0, 1.0, -0.5, 3.0, 0.1, -0.9], [1.0, 2.0, 0.5, 0.01, 30.0, 1.0])
        vector = torch.linspace(0.6, 1.4, 6, dtype=torch.float64)
        matrix = torch.diag(vector) + 0.1 * torch.sin(torch.arange(36, dtype=torch.float64)).view(6, 6)
        bias = torch.cos(torch.arange(6, dtype=torch.float64))
        # Each class has a different number of points; one class has a single one.
        steps = [(np.linspace(0, 1, 2 + k), np.linspace(0.01 * k, 1 - 0.1 * k, 2 + k) ** 2) for k in range(5)]
        steps.append((np.array([0.4]), np.array([0.2])))
        curve = torch.tensor([[-6.0, -2.0, -1.5, 0.5, 3.0], [0.3, 0.0, -0.1, 0.6, 2.0]], dtype=torch.float64)
        self.of_logits = torch.nn.ModuleDict(
            {
                "structured vector": StructuredLogProbs(1.4, 0.01, vector, bias, (0.0, 1.0)),
                "structured focal matrix": StructuredLogProbs(0.7, 0.002, matrix, bias, (0.8, 1.2)),
                "isotonic": IsotonicLogProbs(steps, 0.01),
                "spline": SplineLogProbs(1.3, 1e-3, 0.1, *curve),
                "spline vector": SplineLogProbs(0.8, 1e-3, 0.1, *curve, vector - 1, bias),
                "spline matrix": SplineLogProbs(0.8, 1e-3, 0.1, *curve, 0.1 * matrix, bias, masks=False),
                "focal": CalibratedLogProbs(2.0, 1.7),
                "histogram": binned,
                "one_logit": CalibratedLogits(1.5, 0.6),
                "labels": labels,
                "floor": FlooredInput(CalibratedLogProbs(2.0, 1.7), 0.01, "logits"),
                "floor of one logit": FlooredInput(CalibratedLogits(1.5, 0.6), 0.01, "logits", one_logit=True),
                "bins after a floor": HistogramLogProbs(
                    FlooredInput(CalibratedLogProbs(0.0, 0.9), 0.01, "logits"), [0.3, 0.6], [0.2, 0.5, 0.97]
                ),
            }
        )
        self.of_probs = torch.nn.ModuleDict(
            {
                "focal": CalibratedLogProbs(1.0, 0.8, "probs"),
                "structured": StructuredLogProbs(1.4, 0.01, matrix, bias, (0.0, 1.0), "probs"),
                "isotonic": IsotonicLogProbs(steps, 0.01, "probs"),
                "spline": SplineLogProbs(1.3, 1e-3, 0.1, *curve, input_kind="probs"),
                "floor": FlooredInput(CalibratedLogProbs(1.0, 0.8, "probs"), 0.01, "probs"),
            }
        )

    def forward(self, logits, probs):
        return tuple(module(logits) for module in self.of_logits.values()) + tuple(
            module(probs) for module in self.of_probs.values()
        )


# Float64, because ONNX keeps the numbers of a graph in float32: 1 - 1e-16 would become 1.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_onnxruntime_computes_is_what_the_modules_compute(dtype, tmp_path):
    peer("onnx"), peer("onnxscript")
    runtime = peer("onnxruntime")
    module = Everything().eval()
    # A probability below the smallest normal number has no digits to compare, in both implementations.
    logits, probs = rows(6).to(dtype), rows(6).to(dtype).softmax(-1)
    probs = torch.where(probs < torch.finfo(torch.float32).tiny, 0.0, probs)
    dim = torch.export.Dim("rows")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the exporter about deprecated parts of torch
        torch.onnx.export(
            module,
            (logits[:5], probs[:5]),
            tmp_path / "everything.onnx",
            dynamo=True,
            verbose=False,
            optimize=False,  # by far the slowest step
            dynamic_shapes=({0: dim}, {0: dim}),
        )
    session = runtime.InferenceSession(tmp_path / "everything.onnx", providers=["CPUExecutionProvider"])
    found = session.run(
        None, dict(zip([i.name for i in session.get_inputs()], [logits.numpy(), probs.numpy()], strict=True))
    )
    names = [*module.of_logits, *(f"{name} of probs" for name in module.of_probs)]
    for name, ours, theirs in zip(names, module(logits, probs), found, strict=True):
        compare(name, theirs, ours.numpy())


@pytest.mark.parametrize(("module", "nodes"), [(CalibratedLogProbs(2.0, 1.7), 26), (CalibratedLogProbs(0.0, 1.7), 4)])
def test_the_graph_is_small(module, nodes):
    peer("onnx"), peer("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, (rows(6),), dynamo=True, verbose=False)
    assert len(program.model.graph) <= nodes
    # Runtimes compute it without a shift, so that confident rows would become NaN.
    assert "ReduceLogSumExp" not in {node.op_type for node in program.model.graph}


# Also near the limit -1, and one whose factor u^gamma is far below p.
@pytest.mark.parametrize("gamma", [0.0, 2.0, 8.0, -0.5, -0.9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_the_plain_formula_is_the_operator(gamma, dtype):
    logits = rows(6).to(dtype)
    fused, plain = CalibratedLogProbs(gamma, 1.7), CalibratedLogProbs(gamma, 1.7, fused=False)
    assert_close(plain(logits), fused(logits))
    assert "fused=False" in repr(plain)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_plain_formula_of_two_equal_classes(classes):
    """The softmax of both may round to more than 1/2."""
    logits = torch.full((64, classes), -1.0)
    logits[:, :2] = torch.linspace(-3, 3, 64).unsqueeze(1)
    logits[:, 2:] = torch.linspace(-100, -10, 64).unsqueeze(1)
    expected = fk.reference.focal_calibration_map(logits.double(), 2.0, 1.7, log=True)
    assert_close(CalibratedLogProbs(2.0, 1.7, fused=False)(logits), expected)


@pytest.mark.parametrize("gamma", [0.0, 2.0, -0.5])
def test_the_plain_formula_keeps_the_digits_of_large_logits(gamma):
    """z / temperature would round the difference of two logits of 10,000, and overflow for 3e38."""
    logits = torch.tensor([[1e4, 1e4 - 1, 1e4 - 2.5], [3e38, 1e38, 0.0]])
    fused, plain = CalibratedLogProbs(gamma, 0.37), CalibratedLogProbs(gamma, 0.37, fused=False)
    assert_close(plain(logits)[0], plain((logits - 1e4)[:1])[0])
    assert_close(plain(logits).exp(), fused(logits).exp())


@pytest.mark.parametrize("gamma", [2.0, -0.5])
def test_the_plain_formula_has_the_derivatives_and_the_order_of_the_definition(gamma):
    given = rows(6)[5:].double()
    given[0, :2] = given[0].max()
    plain, definition = given.clone().requires_grad_(), given.clone().requires_grad_()
    result = CalibratedLogProbs(gamma, 1.7, fused=False)(plain)
    upstream = torch.randn_like(given)
    result.backward(upstream)
    fk.reference.focal_calibration_map(definition, gamma, 1.7, log=True).backward(upstream)
    assert_close(plain.grad, definition.grad)
    close = (1 + torch.arange(40) * 2.0**-23).flip(0).repeat_interleave(2).unsqueeze(0)
    ordered = CalibratedLogProbs(gamma, 1.7, fused=False)(close)[0]
    assert torch.equal(ordered[::2], ordered[1::2]) and bool((ordered.diff() <= 0).all())


def test_the_plain_formula_needs_two_classes():
    with pytest.raises(ValueError, match=r"at least two classes in its last dimension, got shape \[3, 1\]"):
        CalibratedLogProbs(1.0, 1.0, fused=False)(torch.zeros(3, 1))
