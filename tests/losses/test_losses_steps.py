"""Training steps of the losses: no synchronisation with the device, one graph, export."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, no_waiting
from loss_cases import LOSSES, NAMES, PER_SAMPLE, batch, gradient

import focalkern as fk


# ---------------------------------------------------------------------------------------------------------------------
# Nothing waits for the device, nothing compiles again
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_step_does_not_depend_on_values(name):
    """The meta device has no values: .item(), .cpu(), bool() and a mask as an index raise."""
    loss = LOSSES[name](weight=torch.ones(7), label_smoothing=0.1).to("meta")
    input = torch.empty(8, 7, device="meta", requires_grad=True)
    loss(input, torch.empty(8, dtype=torch.long, device="meta")).backward()
    assert input.grad.shape == (8, 7)


@pytest.mark.parametrize("name", [*NAMES, "sigmoid"])
def test_a_step_does_not_wait_for_the_device(name, cuda):
    input, target = batch(dtype=torch.float32, device=cuda)
    loss = fk.SigmoidFocalLoss() if name == "sigmoid" else LOSSES[name](weight=torch.ones(7)).to(cuda)
    if name == "sigmoid":
        target = F.one_hot(target, 7)
    loss(input, target).backward()  # loads kernels
    torch.cuda.synchronize()
    with no_waiting():
        loss(input, target).backward()


def test_labels_out_of_range_on_cuda_are_nan(cuda, monkeypatch):
    input, target = batch(dtype=torch.float32, device=cuda)
    target[4] = 7
    for name in PER_SAMPLE:
        if name == "norm":  # torch's derivative of a selected NaN is 0
            continue
        loss = LOSSES[name](reduction="none").to(cuda)
        found = loss(input, target)
        assert found.isnan().nonzero().tolist() == [[4]]
        rows = gradient(found.sum(), input).isnan()
        assert rows[4].all()
        assert rows.sum() == 7
        with monkeypatch.context() as patch:
            patch.setenv("FOCALKERN_VALIDATE", "1")
            with pytest.raises(IndexError, match=r"got 7 at row 4"):
                loss(input, target)


@pytest.mark.parametrize("name", ["focal, tensor", "flsd", "adafocal", "dual", "brier", "mmce"])
def test_compiled_whole_and_not_again_for_other_gammas(name):
    loss = LOSSES[name](weight=torch.rand(7), label_smoothing=0.1)
    input, target = batch(dtype=torch.float32)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close(compiled(input, target), loss(input, target))
    with torch.compiler.set_stance("fail_on_recompile"):
        for buffer in loss.buffers():
            with torch.no_grad():
                buffer.mul_(0.5)
            found = compiled(input, target)
            assert_close(found, loss(input, target))
            assert_close(gradient(found, input), gradient(loss(input, target), input))


@pytest.mark.parametrize("name", ["flsd", "adafocal", "dual", "mmce"])
def test_export(name):
    loss = LOSSES[name](label_smoothing=0.1)
    input, target = batch(dtype=torch.float32)
    exported = torch.export.export(loss, (input.detach(), target)).module()
    assert_close(exported(input, target), loss(input, target))
