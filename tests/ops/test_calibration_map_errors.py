"""Errors of the calibration maps name the argument."""

import math

import pytest
import torch
import torch._dynamo

import focalkern as fk

# ---- bad input ------------------------------------------------------------------------------------------------------
Z = torch.zeros(4, 3)

P = torch.full((4, 3), 1 / 3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.zeros(()), 1.0), {}, ValueError, r"input must .*got"),
        ((torch.zeros(4, 1), 1.0), {}, ValueError, r"input must .*(two|2).*got"),
        ((torch.zeros(4, 0), 1.0), {}, ValueError, r"input must .*got"),
        ((Z.int(), 1.0), {}, TypeError, r"input must .*got"),
        ((["text"], 1.0), {}, TypeError, r"input must .*got"),
        ((Z, torch.ones(3)), {}, ValueError, r"gamma must .*\[4\], got \[3\]"),
        ((Z, torch.ones(4, 3)), {}, ValueError, r"gamma must .*\[4\], got \[4, 3\]"),
        ((Z, torch.ones(4, 1)), {}, ValueError, r"gamma must .*\[4\], got \[4, 1\]"),
        ((Z, 1.0, torch.ones(3)), {}, ValueError, r"temperature must .*\[4\], got \[3\]"),
        ((Z, torch.tensor(1)), {}, TypeError, r"gamma must .*got"),
        ((Z, 1.0, torch.tensor(1)), {}, TypeError, r"temperature must .*got"),
        ((Z, None), {}, TypeError, r"gamma must .*got"),
        ((Z, 1.0, [1.0]), {}, TypeError, r"temperature must .*got"),
        # The domain.
        ((Z, -1.0), {}, ValueError, r"gamma must .*-1.*got -1"),
        ((Z, -3.0), {}, ValueError, r"gamma must .*-1.*got -3"),
        ((Z, math.nan), {}, ValueError, r"gamma must .*got nan"),
        ((Z, math.inf), {}, ValueError, r"gamma must .*got inf"),
        ((Z, 1.0, 0.0), {}, ValueError, r"temperature must .*got 0"),
        ((Z, 1.0, -1.0), {}, ValueError, r"temperature must .*got -1"),
        ((Z, 1.0, math.nan), {}, ValueError, r"temperature must .*got nan"),
        ((Z, 1.0, math.inf), {}, ValueError, r"temperature must .*got inf"),
        # Values.
        ((Z, 1.0), {"input_kind": "probabilities"}, ValueError, r"input_kind must .*got 'probabilities'"),
        ((Z, 1.0, torch.ones(4, device="meta")), {}, ValueError, r"temperature must .*cpu, got meta"),
        ((Z, torch.ones(4, device="meta")), {}, ValueError, r"gamma must .*cpu, got meta"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match="^focal_calibration_map: " + message):
        fk.focal_calibration_map(*arguments, **options)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ([0.0, math.nan, 1.0], "logits"),
        ([0.0, math.inf, 1.0], "logits"),
        ([-math.inf, -math.inf, -math.inf], "logits"),
        ([0.5, 0.5, math.nan], "probs"),
        ([0.5, 0.7, -0.2], "probs"),
        ([0.5, 0.502, 0.0], "probs"),
        ([0.5, 0.498, 0.0], "probs"),
        ([0.0, 0.0, 0.0], "probs"),
        ([math.inf, 0.0, 0.0], "probs"),
    ],
)
def test_bad_rows_on_the_cpu_are_named(row, kind):
    rows = torch.full((5, 3), 1 / 3)
    rows[3] = torch.tensor(row)
    with pytest.raises(ValueError, match=r"^focal_calibration_map: input .*row 3"):
        fk.focal_calibration_map(rows, 1.0, input_kind=kind)
    with pytest.raises(ValueError, match=r"^focal_calibration_map: input .*row 3"):
        fk.focal_calibration_map(rows.double(), 1.0, input_kind=kind)


def test_bad_tensor_values_give_nan_rows_or_raise_when_asked(device, monkeypatch):
    z = torch.zeros(4, 3, device=device)
    gamma = torch.tensor([0.5, -1.0, 2.0, -5.0], device=device)
    temperature = torch.tensor([1.0, 1.0, 0.0, 1.0], device=device)
    monkeypatch.setenv("FOCALKERN_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"^focal_calibration_map: gamma must .*-1"):
        fk.focal_calibration_map(z, gamma, 1.0)
    with pytest.raises(ValueError, match=r"^focal_calibration_map: temperature must .*0"):
        fk.focal_calibration_map(z, 1.0, temperature)
    with pytest.raises(ValueError, match=r"^binary_focal_calibration_map: gamma must .*-1"):
        fk.binary_focal_calibration_map(z[:, 0], gamma, 1.0)


def test_binary_bad_arguments_are_named():
    s = torch.zeros(4)
    for arguments, error, message in (
        ((s.int(), 1.0), TypeError, "logits must .*got"),
        (("0.0", 1.0), TypeError, "logits must .*got"),
        ((s, -1.0), ValueError, "gamma must .*got -1"),
        ((s, 1.0, 0.0), ValueError, "temperature must .*got 0"),
        ((s, torch.ones(3)), ValueError, r"gamma must .*\[4\], got \[3\]"),
        ((s, torch.ones(2, 4)), ValueError, r"gamma must .*\[4\], got \[2, 4\]"),
    ):
        with pytest.raises(error, match="^binary_focal_calibration_map: " + message):
            fk.binary_focal_calibration_map(*arguments)
