"""Copies of a row among the rows of a cross-validation."""

import numpy as np
import pytest
import torch
from test_spline_fit import draw

import focalkern as fk
from focalkern._diagnostics import repeated_rows
from focalkern.calibrators._candidates import as_candidates
from focalkern.calibrators._cross_validation import cross_validate
from focalkern.calibrators._verdict import cross_validation_warnings


def copied(n, times=4):
    logits, target = draw(n, 5, seed=3, scale=2.0)
    return logits.repeat(times, 1), target.repeat(times)


def test_copies_of_a_row_stay_in_one_fold():
    """Each fit then leaves out all copies of its rows, as a cross-validation of the rows with weights does."""
    logits, target = copied(60)
    candidates = as_candidates(None, "nll", "logits")
    found = cross_validate(logits, target, candidates, criterion="nll", folds=5, seed=0)
    assert found.n_copies == 180
    weight = torch.full((60,), 4.0, dtype=torch.float64)
    # The numbers of distinct rows are those of their order by hash.
    order = np.unique(repeated_rows(logits, target), return_index=True)[1]
    distinct = cross_validate(logits[order], target[order], candidates, criterion="nll", folds=5, seed=0, weight=weight)
    for one, other in zip(found.entries, distinct.entries, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-5)
    assert found.winner.name == distinct.winner.name
    assert cross_validation_warnings(found)[0].startswith("180 of the 240 validation rows are copies of others")
    with pytest.warns(fk.CalibrationWarning, match="180 of the 240 validation rows are copies"):
        calibrator = fk.AutoCalibrator().fit(logits, target)
    assert calibrator.verdict_.warnings[0].startswith("180 of the 240")


# Rows of a confident network that are equal by chance: few decimals, clipped or saturated probabilities.
@pytest.mark.parametrize("n_classes", [2, 3, 10])
@pytest.mark.parametrize("form", ["2 digits", "3 digits", "4 digits", "float32", "clipped", "saturated", "logits"])
def test_equal_rows_of_few_digits_are_no_copies(form, n_classes):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3000, n_classes, generator=generator, dtype=torch.float64)
    probs, target = logits.softmax(-1), logits.argmax(-1)
    input = {
        "2 digits": probs.round(decimals=2),
        "3 digits": probs.round(decimals=3),
        "4 digits": probs.round(decimals=4),
        "float32": probs.round(decimals=3).float(),
        "clipped": probs.clamp(1e-3, 1 - 1e-3),
        "saturated": (20 * logits).float().softmax(-1),
        "logits": logits.round(),
    }[form]
    assert repeated_rows(input, target) is None
    # Copies among rows that are not saturated are found in any dtype.
    twice = torch.arange(3000).repeat(2)
    for found in (logits, logits.bfloat16(), probs, probs.float()):
        number = repeated_rows(found[twice], target[twice])
        assert number is not None and number.max() < 3000


def test_few_copies_and_the_outputs_of_trees_are_no_copies():
    logits, target = draw(1000, 5)
    assert repeated_rows(logits, target) is None
    assert repeated_rows(logits[:1], target[:1]) is None
    few = torch.cat([logits, logits[:40]]), torch.cat([target, target[:40]])
    assert repeated_rows(*few) is None
    many = repeated_rows(torch.cat([logits, logits[:80]]), torch.cat([target, target[:80]]))
    assert many is not None and len(set(many.tolist())) == 1000 and (many[1000:] == many[:80]).all()
    assert repeated_rows(logits.sign(), target) is None  # 32 outputs, each with several labels
    leaves = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).repeat(100, 1)
    assert repeated_rows(leaves, leaves.argmax(-1)) is None  # two outputs
    votes = torch.where(torch.arange(1000)[:, None] < 300, logits[:1], logits)
    assert repeated_rows(votes, votes.argmax(-1)) is None  # one frequent output
    assert fk.AutoCalibrator().fit_quietly(logits, target).warnings_ == ()
