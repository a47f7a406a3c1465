"""AdaFocal: bins and gammas compared with the published algorithm, sample by sample."""

import copy
import io
import itertools
import math

import numpy as np
import pytest
import torch
from adafocal_cases import EDGES, NAN, validation
from conftest import assert_close

import focalkern as fk


def published_rule(gamma, error, *, lam=1.0, gamma_max=20.0, gamma_min=-2.0, switch=0.2):
    """The published update of one bin in one epoch."""
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
    """A recorded sequence of statistics of bins: always over-confident, always under-confident, or in turns."""
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
        # The sequence includes both signs, both switches and both clips.
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
    """exp overflows: the clip applies, and 0 * inf is 0."""
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
    """With fewer samples than bins, interpolated edges coincide; empty bins keep their gamma."""
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
    """p of the target, not the confidence, determines the bin [lo, hi); the outer bins are unbounded."""
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
    pixels = torch.full((10, 5, 21), NAN, dtype=torch.float64, device=device)  # ignored entries may have any value
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
    assert loss.bin_edges is edges  # in place, so captured CUDA graphs use the new values, too
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
