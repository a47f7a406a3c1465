"""The calibration maps keep the order of the classes exactly: equal inputs have equal results, and a larger input never
has a smaller result, for inputs at any distance."""

import pytest
import torch
from neighbours import broken_pairs, consecutive, rows_of_neighbours

import focalkern as fk

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# The ends of the domain; both sides of 1, where the power of 1 - q changes direction; and cross-entropy.
GAMMAS = [-0.9999, -0.5, 0.0, 0.3, 1.0, 2.0, 30.0]
# One thread's columns, and vectors along the classes.
CLASSES = [4, 31, 100]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_rows(device, dtype, gamma, kind):
    for classes in CLASSES:
        given = rows_of_neighbours(400, classes, dtype)
        if kind == "probs":
            given = given.double().softmax(1).to(dtype)
        for log in (False, True):
            result = fk.focal_calibration_map(given.to(device), gamma, input_kind=kind, log=log).cpu()
            assert broken_pairs(given, result) == 0
            assert torch.equal(result.amax(1), result.gather(1, given.argmax(1, keepdim=True)).squeeze(1))


def test_the_example_of_a_tie():
    result = fk.focal_calibration_map(torch.tensor([[0.7, 0.7, -1.0]]), 1.0)
    assert result[0, 0] == result[0, 1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_parameters_of_each_row(device, dtype):
    given = rows_of_neighbours(2000, 12, dtype)
    gamma = 10 * torch.rand(2000, dtype=torch.float64) ** 3 - 0.99
    temperature = 0.2 + 3 * torch.rand(2000, dtype=torch.float64)
    for log in (False, True):
        result = fk.focal_calibration_map(given.to(device), gamma.to(device), temperature.to(device), log=log)
        assert broken_pairs(given, result.cpu()) == 0


# Vote fractions of 100 trees: many rows have ties of the largest.
@pytest.mark.parametrize("gamma", [-0.5, 1.0, 3.0])
def test_vote_fractions(device, gamma):
    votes = torch.distributions.Multinomial(100, probs=torch.tensor([0.3, 0.3, 0.2, 0.2])).sample((2000,)) / 100
    assert (votes.sort(1, descending=True).values[:, :2].diff() == 0).any()
    result = fk.focal_calibration_map(votes.to(device), gamma, input_kind="probs").cpu()
    assert broken_pairs(votes, result) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_binary(device, dtype, gamma):
    sign = torch.randint(0, 2, (1000, 1)) * 2 - 1
    start = (sign * 10 ** (8 * torch.rand(1000, 1, dtype=torch.float64) - 6)).to(dtype)
    given = consecutive(start.expand(1000, 64).contiguous(), torch.arange(64))
    for log_odds in (False, True):
        result = fk.binary_focal_calibration_map(given.to(device), gamma, 0.7, log_odds=log_odds).cpu()
        assert broken_pairs(given, result) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gamma", [g for g in GAMMAS if g >= 0])
def test_inverse(device, dtype, gamma):
    given = rows_of_neighbours(300, 12, dtype)
    for log in (False, True):
        result = fk.inverse_focal_calibration_map(given.to(device), gamma, log=log).cpu()
        assert broken_pairs(given, result) == 0


# The gammas of the other tests, and gammas whose results are denormal.
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gamma", [*(g for g in GAMMAS if g >= 0), 300.0, 10000.0])
def test_binary_inverse(device, dtype, gamma):
    sign = torch.randint(0, 2, (1000, 1)) * 2 - 1
    smallest = 87.34 if dtype != torch.float64 else 708.4
    size = torch.cat([10 ** (8 * torch.rand(800, 1) - 6), smallest * (1 + gamma) + 0.1 * torch.randn(200, 1)])
    start = (sign * size).to(dtype).clamp(-6e4, 6e4)
    given = consecutive(start.expand(1000, 64).contiguous(), torch.arange(64))
    given[:, 0] = given[:, 1]
    for log_odds in (False, True):
        result = fk.binary_inverse_focal_calibration_map(given.to(device), gamma, log_odds=log_odds).cpu()
        assert broken_pairs(given, result) == 0
        everywhere = broken_pairs(given.reshape(1, -1), result.reshape(1, -1))
        assert everywhere == 0


def test_binary_inverse_of_several_gammas():
    gamma = torch.tensor([0.3, 2.0, 5.0], dtype=torch.float64)[torch.arange(3000) % 3].reshape(1000, 3)
    given = consecutive(torch.rand(1000, 1, dtype=torch.float64).expand(1000, 3).contiguous(), torch.arange(3))
    result = fk.binary_inverse_focal_calibration_map(given, gamma, log_odds=True)
    for column in range(3):
        assert broken_pairs(given[None, :, column], result[None, :, column]) == 0
    back = fk.binary_focal_calibration_map(result, gamma, log_odds=True)
    torch.testing.assert_close(back, given, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_reference(dtype, gamma):
    given = rows_of_neighbours(400, 31, dtype)
    for log in (False, True):
        assert broken_pairs(given, fk.reference.focal_calibration_map(given, gamma, log=log)) == 0
