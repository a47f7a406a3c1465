"""Scalings of many networks in one call: bitwise those of the calibrators; optima to eleven digits."""

import math

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern import fallback


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 300, 4, generator=generator)
    over = torch.tensor([0.6, 1.0, 1.5, 2.0, 3.0]).reshape(5, 1, 1)
    labels = torch.stack([torch.multinomial(p, 1, generator=generator).squeeze(1) for p in (logits / over).softmax(-1)])
    return logits, labels, torch.rand(5, 300, generator=generator).double()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_batched_fits_equal_single_fits(batch, weighted, dtype):
    logits, labels, weight = batch
    logits, weight = logits.to(dtype), weight if weighted else None
    found = fk.fit_temperatures(logits, labels, weight)
    assert found.shape == (5,) and found.dtype == torch.float64
    for b in range(5):
        of_one = fk.TemperatureScaling().fit_quietly(logits[b], labels[b], None if weight is None else weight[b])
        assert found[b].item() == of_one.temperature_
    gamma, temperature = fk.fit_focal_temperatures(logits, labels, weight)
    for b in range(5):
        of_one = fk.FocalTemperatureScaling().fit_quietly(logits[b], labels[b], None if weight is None else weight[b])
        assert (gamma[b].item(), temperature[b].item()) == (of_one.gamma_, of_one.temperature_)


@pytest.mark.parametrize("fit", [fk.fit_temperatures, fk.fit_focal_temperatures])
def test_probabilities_need_their_kind(batch, fit):
    logits, labels, _ = batch
    mixed = logits.clone()
    mixed[3] = logits[3].softmax(-1)
    words = "network 3: logits must not be probabilities without input_kind, got non-negative rows that sum to 1; pass "
    with pytest.raises(ValueError, match=f"^{fit.__name__}, {words}input_kind='probs'"):
        fit(mixed, labels)
    with pytest.raises(ValueError, match="network 0: logits must not be percentages without input_kind"):
        fit(100 * logits.softmax(-1), labels)
    probs = logits.softmax(-1)
    assert str(fit(probs, labels, input_kind="logits")) != str(fit(probs, labels, input_kind="probs"))


def test_rows_of_weight_zero_are_excluded(batch):
    logits, labels, weight = batch
    weight[1, ::2] = 0
    logits[1, 0] = math.nan
    found = fk.fit_temperatures(logits, labels, weight)
    assert found[1] == fk.fit_temperatures(logits[1:2, 1::2], labels[1:2, 1::2], weight[1:2, 1::2])[0]
    assert found[0] == fk.fit_temperatures(logits[:1], labels[:1], weight[:1])[0]


def test_no_step_in_gamma_or_temperature_lowers_the_loss(batch):
    logits, labels, _ = batch
    logits = logits.double()

    def loss(b, gamma, temperature):
        log_p = fk.focal_calibration_map(logits[b], gamma, temperature, log=True)
        return torch.nn.functional.nll_loss(log_p, labels[b]).item()

    for b, pair in enumerate(zip(*fk.fit_focal_temperatures(logits, labels), strict=True)):
        gamma, temperature = (one.item() for one in pair)
        least = loss(b, gamma, temperature)
        for factor in (0.5, 0.99, 1.01, 2.0):
            assert loss(b, (1 + gamma) * factor - 1, temperature) > least - 1e-12
            assert loss(b, gamma, temperature * factor) > least - 1e-12


def test_the_derivative_at_the_optimum_is_zero(batch):
    """The derivative of the NLL, computed in torch from the mean of the logits under softmax(z / T)."""
    logits, labels, _ = batch
    for z, y, temperature in zip(logits.double(), labels, fk.fit_temperatures(logits, labels), strict=True):
        mean = ((z / temperature).softmax(-1) * z).sum(-1)
        assert abs((mean - z.gather(1, y[:, None]).squeeze(1)).mean()) < 1e-10


def test_the_kernel_and_torch_find_the_same(batch, monkeypatch):
    """The rows include an impossible class."""
    logits, labels, _ = batch
    logits[:, ::3] = logits[:, ::3].scatter(2, ((labels[:, ::3] + 1) % 4).unsqueeze(2), -math.inf)
    found = fk.fit_temperatures(logits, labels)
    pairs = fk.fit_focal_temperatures(logits, labels)
    monkeypatch.setattr("focalkern.calibrators._smooth_losses.map_nll_sums_for", lambda input: fallback.map_nll_sums)
    torch.testing.assert_close(found, fk.fit_temperatures(logits, labels), rtol=1e-11, atol=0)
    # If an optimum is flat in one direction, rounding moves it further than the loss shows.
    torch.testing.assert_close(pairs, fk.fit_focal_temperatures(logits, labels), rtol=1e-6, atol=1e-7)


def test_probabilities_arrays_and_bounds(batch):
    logits, labels, _ = batch
    found = fk.fit_temperatures(logits.double().softmax(-1).numpy(), labels.numpy(), input_kind="probs")
    torch.testing.assert_close(found, fk.fit_temperatures(logits.double(), labels), rtol=1e-9, atol=0)
    right = fk.fit_temperatures(10 * torch.eye(3).repeat(1, 4, 1), torch.arange(3).repeat(4)[None])
    with pytest.warns(fk.CalibrationWarning):
        of_one = fk.TemperatureScaling().fit(10 * torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4))
    assert right.item() == of_one.temperature_
    none = torch.zeros(0, 3, 2), torch.zeros(0, 3, dtype=torch.int64)
    assert fk.fit_temperatures(*none).shape == (0,)
    assert [one.shape for one in fk.fit_focal_temperatures(*none)] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda z, y, w: (z[0], y[0], None), ValueError, r"logits must be \[B, N, C\], got shape \[300, 4\]; for one"),
        (lambda z, y, w: (z, y[:, 1:], None), ValueError, r"labels must be \[B, N\] = \[5, 300\], got \[5, 299\]"),
        (lambda z, y, w: (z, y, w[0]), ValueError, r"weight must be \[B, N\] = \[5, 300\], got \[300\]"),
        (lambda z, y, w: (z, y.index_fill(0, torch.tensor(2), 4), w), IndexError, "network 2: target must be in"),
        (lambda z, y, w: (z.index_fill(0, torch.tensor(1), math.nan), y, w), ValueError, "network 1: logits must not"),
        (lambda z, y, w: (z, y, 0 * w), ValueError, "network 0: "),
        (lambda z, y, w: (z.int(), y, w), TypeError, "network 0: logits must be floating point"),
        (lambda z, y, w: (np.array("x"), y, w), TypeError, "logits must be"),
    ],
)
def test_errors_name_the_network(batch, change, error, words):
    for fit in (fk.fit_temperatures, fk.fit_focal_temperatures):
        with pytest.raises(error, match=rf"^{fit.__name__}(, |: ){words}"):
            fit(*change(*batch))
