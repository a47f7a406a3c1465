"""AdaFocal: bins and gammas against the published algorithm, sample by sample; saved state; two processes."""

import copy
import dataclasses
import datetime
import io
import itertools
import math
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import assert_close

import focalkern as fk

NAN = float("nan")
EDGES = [0.0, 0.25, 0.5, 1.0]


def published_rule(gamma, error, *, lam=1.0, gamma_max=20.0, gamma_min=-2.0, switch=0.2):
    """One bin, one epoch."""
    gamma = gamma * math.exp(lam * error) if gamma > 0 else gamma * math.exp(-lam * error)
    if abs(gamma) < switch:
        gamma = -switch if gamma > 0 else switch
    return min(max(gamma, gamma_min), gamma_max)


def published_bins(confidence, correct, n_bins):
    """Edges, mean confidence and accuracy by the published AdaECE code: NumPy's interpolation, bins (lo, hi]."""
    n = len(confidence)
    edges = np.interp(np.linspace(0, n, n_bins + 1), np.arange(n), np.sort(confidence)).astype(confidence.dtype)
    confidence = confidence.tolist()
    bins = []
    for low, high in itertools.pairwise(edges):
        inside = [i for i in range(n) if low < confidence[i] <= high]
        mean = sum(confidence[i] for i in inside) / len(inside) if inside else NAN
        accuracy = sum(correct[i] for i in inside) / len(inside) if inside else NAN
        bins.append((mean, accuracy, len(inside)))
    return edges, *map(list, zip(*bins, strict=True))


def validation(n=200, c=5, sharpness=3.0, dtype=torch.float64, device="cpu"):
    target = torch.randint(c, (n,), device=device)
    logits = torch.randn(n, c, dtype=dtype, device=device)
    logits[torch.arange(n), target] += 1.0
    return sharpness * logits, target


def snapshot(loss):
    """Everything in the state, exactly."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.tolist()
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, list) else value

    return repr(plain(dict(loss.state_dict())))


# ---------------------------------------------------------------------------------------------------------------------
# The update
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lam": 4.0, "gamma_max": 3.0, "gamma_min": -1.5},
        {"lam": 2.0, "gamma_init": -0.7, "switch": 0.5},
        {"lam": 0.0},
        {"switch": 0.0},
    ],
)
def test_trajectory_is_the_published_rule(settings):
    """A recorded sequence of statistics: bins that stay over-confident, stay under-confident, and change their mind."""
    epochs, n_bins = 40, 6
    drift = torch.tensor([0.3, -0.3, 0.05, -0.05, 0.0, 0.0], dtype=torch.float64)
    confidence = torch.linspace(0.35, 0.65, n_bins, dtype=torch.float64).expand(epochs, -1)
    noise = torch.randn(epochs, n_bins, dtype=torch.float64) * torch.tensor([0.02, 0.02, 0.05, 0.05, 0.2, 0.01])
    flips = torch.where(torch.arange(epochs) % 16 < 8, 0.3, -0.3)[:, None] * (torch.arange(n_bins) == 5)
    accuracy = (confidence - drift - noise - flips).clamp(0, 1)

    loss = fk.AdaFocalLoss(n_bins, **settings)
    gammas = [settings.get("gamma_init", 1.0)] * n_bins
    rule = {name: value for name, value in settings.items() if name != "gamma_init"}
    trajectory = []
    for epoch in range(epochs):
        edges = torch.linspace(0.1, 0.9, n_bins + 1) + 0.001 * epoch
        record = loss.update_bins(edges, confidence[epoch], accuracy[epoch], torch.full((n_bins,), 10))
        errors = (confidence[epoch] - accuracy[epoch]).tolist()
        gammas = [published_rule(gamma, error, **rule) for gamma, error in zip(gammas, errors, strict=True)]
        trajectory.append(gammas)
        assert loss.bin_gammas.tolist() == pytest.approx(gammas, rel=1e-13)
        assert torch.equal(loss.bin_edges, edges.double())
        assert torch.equal(record.bin_gammas, loss.bin_gammas)
    assert torch.equal(torch.stack([record.bin_gammas for record in loss.history])[-1], loss.bin_gammas)
    assert len(loss.history) == epochs

    if settings == {"lam": 4.0, "gamma_max": 3.0, "gamma_min": -1.5}:
        # The sequence reaches both signs, both switches and both clips.
        path = torch.tensor(trajectory)
        assert (path == 3.0).any()
        assert (path == -1.5).any()
        to_inverse = (path[:-1] > 0) & (path[1:] == -0.2)
        to_focal = (path[:-1] < 0) & (path[1:] == 0.2)
        assert to_inverse.any()
        assert to_focal.any()


@pytest.mark.parametrize(
    ("gamma", "error", "expected"),
    [
        (1.0, 0.5, math.exp(0.5)),  # over-confident: more focal
        (1.0, -0.5, math.exp(-0.5)),
        (-1.0, -0.5, -math.exp(0.5)),  # under-confident: more inverse
        (-1.0, 0.5, -math.exp(-0.5)),
        (0.21, -0.5, -0.2),  # focal to inverse
        (-0.21, 0.5, 0.2),  # and back
        (0.2, 0.0, 0.2),  # the threshold itself does not switch
        (-0.2, 0.0, -0.2),
        (0.0, 0.3, 0.2),  # neither positive: to focal
        (15.0, 0.5, 20.0),
        (-1.8, -0.5, -2.0),
        (1.0, NAN, 1.0),  # empty
    ],
)
def test_one_update(gamma, error, expected):
    loss = fk.AdaFocalLoss(1, gamma_init=gamma)
    empty = math.isnan(error)
    confidence, accuracy = (NAN, NAN) if empty else (0.5 + error / 2, 0.5 - error / 2)
    loss.update_bins([0, 1], [confidence], [accuracy], [0 if empty else 7])
    assert loss.bin_gammas.item() == pytest.approx(expected, rel=1e-15)


def test_extreme_settings_stay_finite():
    """exp overflows: the clip holds; and 0 * inf is 0."""
    loss = fk.AdaFocalLoss(2, lam=1e4, gamma_init=0.0, switch=0.0)
    loss.bin_gammas[1] = 1.0
    loss.update_bins([0, 0.5, 1], [1.0, 1.0], [0.0, 0.0])
    assert loss.bin_gammas.tolist() == [0.0, 20.0]
    loss.update_bins([0, 0.5, 1], [0.0, 0.0], [1.0, 1.0])
    assert loss.bin_gammas.tolist() == [0.0, 0.0]
    loss = fk.AdaFocalLoss(1, lam=1e4)
    loss.update_bins([0, 1], [0.0], [1.0])
    assert loss.bin_gammas.item() == -0.2  # it was positive before exp underflowed


def test_first_epoch():
    loss = fk.AdaFocalLoss()
    assert loss.bin_edges.tolist() == pytest.approx([k / 15 for k in range(16)])
    assert loss.bin_gammas.tolist() == [1.0] * 15
    assert loss.bin_edges.dtype == loss.bin_gammas.dtype == torch.float64
    assert set(loss.state_dict()) == {"bin_edges", "bin_gammas", "_extra_state"}
    assert list(loss.parameters()) == []
    logits, target = validation()
    assert_close(loss(logits, target), fk.focal_loss(logits, target, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 7, 14, 16, 500])
def test_update_from_logits_is_the_published_algorithm(n, dtype, device):
    """Also with fewer samples than bins, whose interpolated edges coincide: empty bins keep their gamma."""
    loss = fk.AdaFocalLoss().to(device)
    expected = [1.0] * 15
    for epoch in range(3):
        logits, target = validation(n, sharpness=1.0 + 2 * epoch, dtype=dtype, device=device)
        record = loss.update(logits, target)
        confidence, top = logits.softmax(-1).max(-1)
        edges, mean, accuracy, count = published_bins(confidence.cpu().numpy(), (top == target).tolist(), 15)
        assert record.count.tolist() == count
        assert_close(record.bin_edges, torch.tensor(edges), dtype)
        assert_close(record.confidence, torch.tensor(mean, dtype=torch.float64))
        assert_close(record.accuracy, torch.tensor(accuracy, dtype=torch.float64))
        expected = [
            gamma if math.isnan(c) else published_rule(gamma, c - a)
            for gamma, c, a in zip(expected, mean, accuracy, strict=True)
        ]
        assert_close(loss.bin_gammas, torch.tensor(expected, dtype=torch.float64))
        assert loss.bin_edges.device.type == device.type


def test_ties_make_empty_bins_that_keep_their_gamma():
    logits = torch.tensor([[2.0, 0.0]] * 30 + [[0.1 * k, 0.0] for k in range(1, 11)])
    loss = fk.AdaFocalLoss(5)
    record = loss.update(logits, torch.zeros(40, dtype=torch.long))
    assert (record.bin_edges.diff() == 0).any()
    empty = record.count == 0
    assert empty.any()
    assert torch.equal(loss.bin_gammas[empty], torch.ones(int(empty.sum()), dtype=torch.float64))
    assert (loss.bin_gammas[~empty] != 1).all()
    assert loss(logits, torch.zeros(40, dtype=torch.long)).isfinite()


def test_a_training_sample_is_looked_up_by_the_probability_of_its_target():
    """Not by its confidence, and in [lo, hi), outer bins open-ended."""
    loss = fk.AdaFocalLoss(3, reduction="none")
    loss.update_bins([0.1, 0.3, 0.5, 0.9], [0.2, 0.4, 0.8], [0.05, 0.9, 0.8])
    gammas = loss.bin_gammas.tolist()
    assert len(set(gammas)) == 3
    # Probabilities of 0.05, 0.25, 0.35, 0.4, 0.5 without rounding, and 0.97.
    shares = [[1, 5, 7, 7], [5, 5, 5, 5], [7, 5, 4, 4], [4, 2, 2, 2], [1, 1, 0, 0], [97, 1, 1, 1]]
    logits = torch.tensor(shares, dtype=torch.float64).log()
    expected = torch.tensor([gammas[b] for b in (0, 0, 1, 1, 2, 2)], dtype=torch.float64)
    target = torch.zeros(6, dtype=torch.long)
    assert_close(loss(logits, target), fk.focal_loss(logits, target, expected, reduction="none"))


# ---------------------------------------------------------------------------------------------------------------------
# Accumulating
# ---------------------------------------------------------------------------------------------------------------------


def test_batches_are_one_set(device):
    logits, target = validation(device=device)
    whole, parts, mixed = (fk.AdaFocalLoss().to(device) for _ in range(3))
    expected = whole.update(logits, target)
    for rows in torch.arange(200).split(64):
        parts.accumulate(logits[rows], target[rows])
    assert parts.n_accumulated == 200
    assert torch.equal(parts.bin_gammas, torch.ones(15, dtype=torch.float64, device=device))
    found = parts.update()
    assert parts.n_accumulated == 0
    mixed.accumulate(logits[:150], target[:150])
    last = mixed.update(logits[150:], target[150:])
    for name in ("bin_edges", "confidence", "accuracy", "count", "bin_gammas"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
        assert torch.equal(getattr(last, name), getattr(expected, name))


def test_ignored_samples_pixels_and_other_forms(device):
    logits, target = validation(device=device)
    expected = fk.AdaFocalLoss().update(logits, target)
    loss = fk.AdaFocalLoss(ignore_index=255).to(device)
    loss.accumulate(logits[:1], torch.tensor([255], device=device))
    assert loss.n_accumulated == 0
    holes = torch.full((10, 21), 255, device=device)
    pixels = torch.full((10, 5, 21), NAN, dtype=torch.float64, device=device)  # what is ignored may hold anything
    holes[:, :20], pixels[:, :, :20] = target.reshape(10, 20), logits.reshape(10, 20, 5).movedim(-1, 1)
    loss.accumulate(pixels[:9], holes[:9].to(torch.uint8))
    loss.accumulate(pixels[9].T.contiguous(), holes[9].int())
    loss.accumulate(logits[0], torch.tensor(255, device=device))
    assert_close(loss.update().bin_gammas, expected.bin_gammas)


def test_only_confidence_and_correctness_are_kept():
    loss = fk.AdaFocalLoss()
    logits, target = validation(1000, 50, dtype=torch.float32)
    loss.accumulate(logits.requires_grad_(), target)
    (confidence,), (correct,) = loss._confidence, loss._correct
    assert confidence.dtype == torch.float32
    assert correct.dtype == torch.bool
    assert confidence.untyped_storage().nbytes() == 4000
    assert correct.untyped_storage().nbytes() == 1000
    assert not confidence.requires_grad
    half = fk.AdaFocalLoss()
    half.accumulate(logits.bfloat16(), target)
    assert half._confidence[0].dtype == torch.float32


def test_reset_forgets_samples_only():
    loss = fk.AdaFocalLoss()
    loss.update(*validation())
    gammas = loss.bin_gammas.clone()
    loss.accumulate(*validation())
    loss.reset()
    assert loss.n_accumulated == 0
    assert torch.equal(loss.bin_gammas, gammas)
    assert len(loss.history) == 1


def test_validation_in_inference_mode_between_training_steps():
    loss = fk.AdaFocalLoss()
    logits, target = validation()
    logits.requires_grad_()
    for _ in range(2):
        loss(logits, target).backward()
        with torch.inference_mode():
            loss.accumulate(logits, target)
            loss.update()
    again = copy.deepcopy(loss)
    assert torch.equal(again.bin_gammas, loss.bin_gammas)
    assert torch.stack([record.bin_gammas for record in again.history]).shape == (2, 15)


def test_a_compiled_step_sees_the_update():
    loss = fk.AdaFocalLoss()
    logits, target = validation(dtype=torch.float32)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    before = compiled(logits, target)
    edges = loss.bin_edges
    loss.update(logits, target)
    assert loss.bin_edges is edges  # in place, so captured CUDA graphs see it too
    with torch.compiler.set_stance("fail_on_recompile"):
        after = compiled(logits, target)
    assert after != before
    assert_close(after, loss(logits, target))


def test_the_history_is_drawn():
    plots = pytest.importorskip("focalkern.plots", reason="matplotlib is not installed", exc_type=ImportError)
    loss = fk.AdaFocalLoss(3)
    with pytest.raises(ValueError, match=r"adafocal_history: history must have at least one update, got none"):
        plots.adafocal_history(loss.history)
    loss.update_bins(EDGES, [0.3, NAN, 0.8], [0.1, NAN, 0.9], [5, 0, 5])
    loss.update_bins(EDGES, [0.3, 0.4, 0.8], [0.1, 0.5, 0.9])
    figure = plots.adafocal_history(loss.history, title="three bins")
    above, below, _ = figure.axes
    assert above.get_title() == "three bins"
    lines = [[line.get_ydata().tolist() for line in axes.lines[:3]] for axes in (above, below)]
    assert lines[0][0] == pytest.approx([0.2, 0.2])
    assert lines[0][1] == pytest.approx([NAN, -0.1], nan_ok=True)
    assert lines[1] == torch.stack([record.bin_gammas for record in loss.history]).T.tolist()
    figure.savefig(io.BytesIO(), format="png")


# ---------------------------------------------------------------------------------------------------------------------
# Saved state
# ---------------------------------------------------------------------------------------------------------------------


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_training_goes_on_from_a_checkpoint():
    """Saved in the middle of a validation, after two updates: the rest gives the same bits."""
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


def extra_of(state):
    """The history and the waiting samples of a state in the form that version 0.1 saved them in."""
    loss = fk.AdaFocalLoss()
    loss.set_extra_state(state["_extra_state"])
    return {
        "history": [dataclasses.asdict(record) for record in loss.history],
        "confidence": torch.cat(loss._confidence),
        "correct": torch.cat(loss._correct),
    }


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
    # As bytes they survive what a cast of a state does to floating-point tensors.
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
        (lambda: changed(extra=[]), r"_extra_state must be the bytes that were saved"),
        (lambda: changed(extra=torch.zeros(8)), r"_extra_state must be the bytes that were saved"),
        (lambda: changed(extra=torch.zeros(0, dtype=torch.uint8)), r"_extra_state must be the bytes"),
        (lambda: changed(extra=trained().get_extra_state()[:-8]), r"_extra_state must be the bytes"),
        (lambda: changed(extra=fk.AdaFocalLoss(10).get_extra_state()), r"of as many bins and whole"),
        (lambda: changed(extra={"correct": torch.ones(3).bool()}), r"must hold one correctness per confidence"),
        (lambda: changed(extra={"confidence": [0.5]}), r"must hold one correctness per confidence"),
        (lambda: changed(extra={"confidence": torch.full((200,), NAN)}), r"confidence, and these in \[0, 1\]"),
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
        (logits, target.double(), ValueError, r"target must be the shape of logits = \[200, 5\], got \[200\]"),
        (logits, logits.softmax(-1), TypeError, r"target must be labels, int64, int32 or uint8, got torch.float64"),
        (logits.long(), target, TypeError, r"logits must be floating point, got torch.int64"),
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
    with pytest.raises(ValueError, match=r"logits and target go together, got one of them"):
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


# ---------------------------------------------------------------------------------------------------------------------
# Two processes. (Training in two processes is in test_distributed_training.py.)
# ---------------------------------------------------------------------------------------------------------------------

TIMEOUT = datetime.timedelta(seconds=90)


def shards(rank):
    """200 samples, in parts of 137 and 63."""
    torch.manual_seed(5)
    logits, target = validation()
    rows = slice(0, 137) if rank == 0 else slice(137, 200)
    return (logits, target) if rank is None else (logits[rows], target[rows])


def message_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=TIMEOUT)
    results = {}
    uneven = fk.AdaFocalLoss()
    uneven.accumulate(*shards(rank))
    uneven.update()
    results["uneven"] = uneven.state_dict()

    empty = fk.AdaFocalLoss()
    if rank == 1:
        empty.accumulate(*shards(None))
    empty.update()
    results["one rank empty"] = empty.state_dict()

    alone = fk.AdaFocalLoss()
    alone.update(*shards(rank), distributed=False)
    results["not distributed"] = alone.state_dict()

    # With an error on one rank, both raise and stay as they were.
    before = snapshot(uneven)
    logits, target = shards(rank)
    logits[0] = NAN if rank == 1 else 0.0
    results["one rank fails"] = message_of(lambda: uneven.update(logits, target))
    results["nobody has samples"] = message_of(uneven.update)
    results["unchanged"] = snapshot(uneven) == before

    own = dist.new_group([0]), dist.new_group([1])
    grouped = fk.AdaFocalLoss()
    grouped.update(*shards(rank), group=own[rank])
    results["group"] = grouped.state_dict()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """One start of two processes for all tests: it takes longer than what they do."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo processes")
    folder = tmp_path_factory.mktemp("ranks")
    context = mp.spawn(process, args=(str(folder),), nprocs=2, join=False)
    end = time.monotonic() + TIMEOUT.total_seconds()
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, "the processes wait for each other"
    finally:
        for child in context.processes:
            child.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def assert_state(state, loss):
    for name in ("bin_edges", "bin_gammas"):
        assert_close(state[name], getattr(loss, name))
    assert len(extra_of(state)["history"]) == 1


@pytest.mark.parametrize("case", ["uneven", "one rank empty"])
def test_every_rank_ends_as_one_process_with_all_samples(ranks, case):
    one = fk.AdaFocalLoss()
    one.update(*shards(None))
    assert len(one.bin_gammas.unique()) > 5
    for rank in ranks:
        assert_state(rank[case], one)
        extra = extra_of(rank[case])
        assert extra["history"][0]["count"].sum() == 199  # all but the lowest
        assert len(extra["confidence"]) == 0
    assert torch.equal(ranks[0][case]["bin_gammas"], ranks[1][case]["bin_gammas"])
    assert torch.equal(ranks[0][case]["bin_edges"], ranks[1][case]["bin_edges"])


@pytest.mark.parametrize("case", ["not distributed", "group"])
def test_a_rank_can_stay_alone(ranks, case):
    for number, rank in enumerate(ranks):
        one = fk.AdaFocalLoss()
        one.update(*shards(number))
        assert_state(rank[case], one)


def test_an_error_on_one_rank_is_one_on_all(ranks):
    assert ranks[1]["one rank fails"].startswith("ValueError: AdaFocalLoss.update: logits must not be NaN")
    assert ranks[0]["one rank fails"].startswith("RuntimeError: AdaFocalLoss.update: rank 1 failed: AdaFocal")
    for rank in ranks:
        assert rank["nobody has samples"].startswith("ValueError: AdaFocalLoss.update: no validation sample")
        assert rank["unchanged"]


def test_a_distributed_checkpoint_has_the_whole_state(tmp_path):
    """Its loader fills tensors of known sizes, and history and waiting samples have none: the way back is a file."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    loss, again = fk.AdaFocalLoss(n_bins=3), fk.AdaFocalLoss(n_bins=3)
    logits, target = torch.randn(60, 5), torch.randint(5, (60,))
    loss.update(logits, target)
    loss.accumulate(logits, target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a checkpoint of one process
        dcp.save({"model": loss.state_dict()}, checkpoint_id=str(tmp_path / "checkpoint"))
        dcp_to_torch_save(str(tmp_path / "checkpoint"), str(tmp_path / "checkpoint.pt"))
    again.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"])
    assert torch.equal(again.bin_gammas, loss.bin_gammas)
    assert len(again.history) == 1
    assert again.n_accumulated == 60
