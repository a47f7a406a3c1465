"""States of AdaFocalLoss: checkpoints, copies, settings and errors."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from adafocal_cases import EDGES, NAN, extra_of, snapshot, validation

import focalkern as fk


# ---------------------------------------------------------------------------------------------------------------------
# Saved state
# ---------------------------------------------------------------------------------------------------------------------
def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_training_goes_on_from_a_checkpoint():
    """Saved during a validation, after two updates; the continued run gives bitwise the same results."""
    straight = fk.AdaFocalLoss()
    for sharpness in (1.0, 3.0):
        straight.update(*validation(sharpness=sharpness))
    batches = [validation(), validation()]
    straight.accumulate(*batches[0])

    resumed = fk.AdaFocalLoss()
    resumed.accumulate(*validation())  # forgotten
    resumed.load_state_dict(through_a_file(straight.state_dict()))
    assert resumed.n_accumulated == 200
    assert len(resumed.history) == 2
    for loss in (straight, resumed):
        loss.accumulate(*batches[1])
        loss.update()
        loss.update_bins(torch.linspace(0, 1, 16), torch.full((15,), 0.5), torch.full((15,), 0.4))
    assert len(resumed.history) == 4
    for one, other in zip(straight.history, resumed.history, strict=True):
        for name in ("bin_edges", "confidence", "accuracy", "count", "bin_gammas"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None and b is None) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(straight.bin_gammas, resumed.bin_gammas)


def test_a_copy_has_a_history_of_its_own():
    loss = fk.AdaFocalLoss()
    loss.accumulate(*validation())
    again = copy.deepcopy(loss)
    again.update()
    assert (len(loss.history), len(again.history)) == (0, 1)
    assert loss.n_accumulated == 200
    state = loss.state_dict()
    loss.update()
    assert extra_of(state)["history"] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_state_is_tensors_and_that_of_version_0_1_loads(dtype):
    loss = fk.AdaFocalLoss()
    loss.update(*validation(dtype=dtype))
    loss.update_bins(torch.linspace(0, 1, 16), torch.full((15,), 0.5), torch.full((15,), 0.4))
    loss.accumulate(*validation(dtype=dtype))
    state = loss.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    old = {**state, "_extra_state": extra_of(state)}
    assert [record["count"] is None for record in old["_extra_state"]["history"]] == [False, True]
    assert old["_extra_state"]["confidence"].dtype == dtype
    resumed = fk.AdaFocalLoss()
    resumed.load_state_dict(through_a_file(old))
    assert snapshot(resumed) == snapshot(loss)
    # As bytes they survive casts of a state, which round floating-point tensors.
    assert state["_extra_state"].dtype == torch.uint8


def test_a_state_outside_the_range_of_the_loss_is_refused():
    wide = fk.AdaFocalLoss(gamma_init=15.0)
    loss = fk.AdaFocalLoss(gamma_max=10.0)
    before = snapshot(loss)
    with pytest.raises(RuntimeError, match=r"from 15 to 15, outside of \[gamma_min, gamma_max\] = \[-2, 10\]"):
        loss.load_state_dict(wide.state_dict())
    assert snapshot(loss) == before
    edge = fk.AdaFocalLoss(gamma_max=0.3, gamma_init=0.3)
    edge.load_state_dict(edge.state_dict() | {"bin_gammas": edge.bin_gammas.bfloat16()})  # rounded up


def trained():
    loss = fk.AdaFocalLoss()
    loss.update(*validation())
    loss.accumulate(*validation())
    return loss


def changed(**entries):
    state = trained().state_dict()
    extra = entries.pop("extra", {})
    state.update(entries)
    if isinstance(extra, dict):
        state["_extra_state"] = {**extra_of(state), **extra}
    else:
        state["_extra_state"] = extra
    return state


def without(name):
    return {key: value for key, value in changed().items() if key != name}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: fk.FLSDLoss().state_dict(), r"AdaFocalLoss: the checkpoint has another loss, FLSDLoss"),
        (dict, r"Missing key\(s\) in state_dict: \"bin_edges\", \"bin_gammas\""),
        (lambda: fk.AdaFocalLoss(10).state_dict(), r"AdaFocalLoss: bin_edges must have shape \[16\], got \[11\]"),
        (lambda: without("_extra_state"), r"Missing key\(s\).*_extra_state"),
        (lambda: changed(weight=torch.ones(5)), r"Unexpected key\(s\).*weight"),
        (lambda: changed(bin_edges=torch.linspace(1, 0, 16)), r"edges must be ascending"),
        (lambda: changed(bin_gammas=torch.full((15,), NAN)), r"gammas must be finite"),
        (lambda: changed(bin_gammas=torch.ones(15).int()), r"gammas must be a floating-point tensor"),
        (lambda: changed(extra={"more": 1}), r"_extra_state must hold history, confidence and correct"),
        (lambda: changed(extra=[]), r"_extra_state must be the saved bytes"),
        (lambda: changed(extra=torch.zeros(8)), r"_extra_state must be the saved bytes"),
        (lambda: changed(extra=torch.zeros(0, dtype=torch.uint8)), r"_extra_state must be the saved bytes"),
        (lambda: changed(extra=trained().get_extra_state()[:-8]), r"_extra_state must be the saved bytes"),
        (lambda: changed(extra=fk.AdaFocalLoss(10).get_extra_state()), r"of a loss with the same n_bins, complete"),
        (lambda: changed(extra={"correct": torch.ones(3).bool()}), r"must hold one correctness per confidence"),
        (lambda: changed(extra={"confidence": [0.5]}), r"must hold one correctness per confidence"),
        (lambda: changed(extra={"confidence": torch.full((200,), NAN)}), r"confidence, confidences in \[0, 1\]"),
        (lambda: changed(extra={"correct": torch.ones(200)}), r"must hold one correctness per confidence"),
        (lambda: changed(extra={"history": [{"gammas": 1}]}), r"history in _extra_state must be a list of dicts of"),
        (lambda: changed(extra={"history": 3}), r"history in _extra_state must be a list of dicts of"),
        (lambda: changed(bin_gammas=[1.0] * 15), r"AdaFocalLoss: bin_gammas must be a tensor, got list"),
    ],
)
def test_a_checkpoint_that_does_not_fit_leaves_the_loss_as_it_was(state, message):
    loss = trained()
    before = snapshot(loss)
    with pytest.raises(RuntimeError, match=message):
        loss.load_state_dict(state())
    assert snapshot(loss) == before


def test_part_of_a_state_is_not_loaded_even_if_the_caller_is_not_strict():
    loss = trained()
    before = snapshot(loss)
    result = loss.load_state_dict(without("bin_gammas"), strict=False)
    assert result.missing_keys == ["bin_gammas"]
    assert snapshot(loss) == before


# ---------------------------------------------------------------------------------------------------------------------
# Errors leave the state as it was
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((EDGES[:3], [0.5] * 3, [0.5] * 3), ValueError, r"bin_edges must be \[4\], got \[3\]"),
        (([*EDGES, 1.0], [0.5] * 4, [0.5] * 4), ValueError, r"bin_edges must be \[4\], got \[5\]"),
        ((EDGES, [0.5] * 2, [0.5] * 3), ValueError, r"mean_confidence must be \[3\], got \[2\]"),
        ((EDGES, [0.5] * 3, [0.5] * 4), ValueError, r"accuracy must be \[3\], got \[4\]"),
        ((EDGES, [0.5] * 3, [0.5] * 3, [1, 2]), ValueError, r"counts must be \[3\], got \[2\]"),
        ((EDGES, [[0.5] * 3], [0.5] * 3), ValueError, r"mean_confidence must be \[3\], got \[1, 3\]"),
        (([0.0, 0.5, 0.4, 1.0], [0.5] * 3, [0.5] * 3), ValueError, r"bin_edges must be finite and ascending, got"),
        (([0.0, NAN, 0.4, 1.0], [0.5] * 3, [0.5] * 3), ValueError, r"bin_edges must be finite and ascending, got"),
        ((EDGES, [0.5, NAN, 0.5], [0.5] * 3), ValueError, r"mean_confidence must be in \[0, 1\].*got nan in bin 1"),
        ((EDGES, [0.5] * 3, [0.5, 0.5, NAN]), ValueError, r"accuracy must be in \[0, 1\].*got nan in bin 2"),
        ((EDGES, [0.5] * 3, [NAN, 0.5, 0.5], [1, 0, 1]), ValueError, r"accuracy must be .*got nan in bin 0"),
        ((EDGES, [0.5] * 3, [95.3, 0.5, 0.5]), ValueError, r"accuracy must be in \[0, 1\].*got 95.3 in bin 0"),
        ((EDGES, [-0.1, 0.5, 0.5], [0.5] * 3), ValueError, r"mean_confidence must be in \[0, 1\].*got -0.1"),
        ((EDGES, [0.5] * 3, [0.5] * 3, [1, -1, 2]), ValueError, r"counts must be whole numbers of at least 0"),
        ((EDGES, [0.5] * 3, [0.5] * 3, [1, 1.5, 2]), ValueError, r"counts must be whole numbers of at least 0"),
        ((EDGES, ["a", "b", "c"], [0.5] * 3), TypeError, r"mean_confidence must be a sequence of numbers"),
        ((EDGES, [0.5] * 3, None), TypeError, r"accuracy must be a sequence of numbers"),
        ((EDGES, [0.5] * 3, [0.5j] * 3), TypeError, r"accuracy must be a sequence of numbers"),
    ],
)
def test_bad_statistics(arguments, error, message):
    loss = fk.AdaFocalLoss(3)
    loss.update_bins(EDGES, [0.5] * 3, [0.4] * 3)
    loss.accumulate(*validation())
    before = snapshot(loss)
    with pytest.raises(error, match="AdaFocalLoss.update_bins: " + message):
        loss.update_bins(*arguments)
    assert snapshot(loss) == before


def test_statistics_of_any_kind_are_copied():
    edges, confidence = np.array(EDGES), torch.tensor([0.5, 0.5, NAN], dtype=torch.float64)
    loss = fk.AdaFocalLoss(3)
    record = loss.update_bins(edges, confidence, (0.4, 0.6, NAN), np.array([3, 4, 0], dtype=np.uint8))
    edges[:], confidence[:] = 0, 0
    assert record.bin_edges.tolist() == EDGES
    assert record.confidence[:2].tolist() == [0.5, 0.5]
    assert record.count.tolist() == [3, 4, 0]
    assert loss.bin_gammas[2] == 1.0


@pytest.mark.parametrize("method", ["accumulate", "update"])
def test_bad_validation_batches(method, device):
    loss = trained().to(device)
    logits, target = validation(device=device)
    before = snapshot(loss)
    broken = logits.clone()
    broken[7] = NAN
    infinite = logits.clone()
    infinite[9, 2] = math.inf
    far = target.clone()
    far[3] = 5
    cases = [
        (broken, target, ValueError, r"logits must not be NaN, \+inf or all -inf, as in valid row 7"),
        (infinite, target, ValueError, r"logits must not be NaN, \+inf or all -inf, as in valid row 9"),
        (logits, far, IndexError, r"target must be in \[0, 5\) or ignore_index, got 5 at row 3"),
        (logits, target[:9], ValueError, r"target must be \[N\] = \[200\], got \[9\]"),
        (logits, target.double(), TypeError, r"target must be labels, .* got torch.float64; convert them with .long"),
        (
            logits,
            logits.softmax(-1),
            TypeError,
            r"target must be labels, int64, int32 or uint8, got torch.float64; for one-hot",
        ),
        (logits.long(), target, TypeError, r"logits must be float16, .*, got torch.int64"),
        (logits.tolist(), target, TypeError, r"logits must be a tensor, got list"),
    ]
    for bad_logits, bad_target, error, message in cases:
        with pytest.raises(error, match=f"AdaFocalLoss.{method}: " + message):
            getattr(loss, method)(bad_logits, bad_target)
        assert snapshot(loss) == before


def test_an_update_needs_samples():
    loss = fk.AdaFocalLoss()
    before = snapshot(loss)
    with pytest.raises(ValueError, match=r"AdaFocalLoss.update: no validation sample: call accumulate, or pass logits"):
        loss.update()
    with pytest.raises(ValueError, match=r"no validation sample"):
        loss.update(torch.empty(0, 3), torch.empty(0, dtype=torch.long))
    with pytest.raises(ValueError, match=r"logits and target must both be given or both None, got one"):
        loss.update(torch.randn(4, 3))
    assert snapshot(loss) == before


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"n_bins": 0}, ValueError, r"n_bins must be at least 1, got 0"),
        ({"n_bins": 15.0}, TypeError, r"n_bins must be an int, got 15.0"),
        ({"lam": -1.0}, ValueError, r"lam must be at least 0, got -1.0"),
        ({"switch": -0.2}, ValueError, r"switch must be at least 0"),
        ({"gamma_min": 3.0, "gamma_max": 2.0}, ValueError, r"gamma_max must be at least 3, got 2.0"),
        ({"gamma_init": 30.0}, ValueError, r"gamma_init must be in \[-2, 20\], got 30.0"),
        ({"gamma_max": math.inf}, ValueError, r"gamma_max must be at least -2, got inf"),
        ({"gamma_min": NAN}, ValueError, r"gamma_min must be finite, got nan"),
        ({"lam": "1"}, TypeError, r"lam must be a number, got str"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match="AdaFocalLoss: " + message):
        fk.AdaFocalLoss(**settings)


def test_a_steep_gamma_min_is_warned_about():
    with pytest.warns(UserWarning, match=r"gamma_min = -5.0 is below -3.591"):
        fk.AdaFocalLoss(gamma_min=-5.0)
