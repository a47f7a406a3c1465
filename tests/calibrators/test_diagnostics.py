"""Unlikely labels and sets with common rows cause a warning; weak models, rare labels and small sets do not."""

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern._diagnostics import input_notes, label_problems, pair_problems
from focalkern.calibrators._verdict import sentence
from focalkern.study.sweep import sweep


def model(n_rows, n_classes, signal, prior=None, bias=0.0, seed=0):
    """Logits of noise plus ``signal`` at the label and ``bias`` times a common part."""
    generator = torch.Generator().manual_seed(seed)
    prior = torch.ones(n_classes) if prior is None else prior
    labels = torch.multinomial(prior, n_rows, replacement=True, generator=generator)
    logits = torch.randn(n_rows, n_classes, generator=generator)
    logits[torch.arange(n_rows), labels] += signal
    return logits + bias * prior.log(), labels


Z, Y = model(1000, 6, 4.0)
RARE, RARE_LABELS = model(1000, 2, 2.0, prior=torch.tensor([0.95, 0.05]))  # with column 1 too high below
ORDER = torch.tensor([3, 5, 0, 1, 2, 4])


@pytest.mark.parametrize(
    ("logits", "labels", "words"),
    [
        (Z[Y < 5], Y[Y < 5] + 1, "if the labels are one too high (the first class is 0)"),
        (Z[Y > 0], Y[Y > 0] - 1, "if the labels are one too low (the first class is 0)"),
        (Z, (Y + 1) % 6, "if the columns are reordered"),
        (Z[1:], Y[:-1], "belongs to the row before"),
        (Z[:-1], Y[1:], "belongs to the next row"),
        (-Z, Y, "the sign of the logits is reversed"),
        (Z[:, ORDER], Y, "if the columns are reordered: the columns are not in the order of the class numbers"),
        (Z[:, [1, 0]], (Y == 1).long(), "if "),
        (Z + torch.tensor([50.0, 0, 0, 0, 0, 0]), Y, "the logits of one class are too high"),
        (RARE + torch.tensor([0.0, 3.0]), RARE_LABELS, "the logits of one class are too high"),
        (Z, Y[torch.randperm(1000, generator=torch.Generator().manual_seed(1))], "no more than chance (16"),
        (Z[Y == 2], Y[Y == 2], "labels are class 2: the rows of the other classes are missing"),
        (Z, torch.where(Y == 2, 4, Y), "class 2 never occurs as a label, but has the largest logit in"),
    ],
)
def test_labels_that_cannot_be_right(logits, labels, words):
    for form in (logits, logits.half(), logits.double(), logits.softmax(-1)):
        (warning,) = label_problems(form, labels)
        assert words in warning
        assert "\n" not in warning


LONG_TAIL = torch.logspace(0, -2.5, 20)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (Z, Y),
        (Z.softmax(-1), Y),
        (Z[Y.argsort()], Y.sort().values),  # rows in the order of their labels
        (Z.round(), Y),
        model(1, 2, 1.0),
        model(30, 2, 0.0),  # too few rows for a conclusion
        model(60, 20, 1.0),
        model(300, 2, 0.5),
        model(500, 20, 0.5),
        *(model(n_rows, 20, signal, LONG_TAIL, bias) for n_rows in (100, 1000) for signal in (1, 3) for bias in (0, 1)),
        model(1000, 2, 0.7, torch.tensor([0.95, 0.05]), 1.0),  # predicts one class for nearly every row
        (Z[Y < 4], Y[Y < 4]),  # classes that do not occur
        (torch.cat([Z, torch.full((1000, 3), -20.0)], 1), Y),  # classes that are impossible and do not occur
        (torch.where(torch.rand(Z.shape) < 0.3, -torch.inf, Z).scatter(1, Y[:, None], 5.0), Y),  # ruled out
        (torch.zeros(100, 5), torch.arange(100) % 5),
    ],
)
def test_ordinary_sets_cause_no_warning(logits, labels):
    assert label_problems(logits, labels) == []


def test_sets_with_rows_in_common():
    one, two = (Z[:500], Y[:500]), (Z[500:], Y[500:])
    assert pair_problems(*one, *two) == []
    assert pair_problems(*one, *one) == [
        "the same 500 rows are validation and test rows, so the metrics are optimistic"
    ]
    mixed = torch.cat([two[0], one[0][:100].flip(0)]), torch.cat([two[1], one[1][:100].flip(0)])
    assert pair_problems(*one, *mixed)[0].startswith("100 of the 600 test rows are also validation rows")
    assert pair_problems(one[0].double(), one[1], *mixed)  # in another dtype
    few = torch.cat([two[0], one[0][:10]]), torch.cat([two[1], one[1][:10]])
    assert pair_problems(*one, *few) == []
    # A tree gives few distinct rows, so two sets may have the same rows without common samples.
    assert pair_problems(Z[:500].sign(), Y[:500], Z[500:].sign(), Y[500:]) == []
    # Copies of rows, of which each set has many, are in both parts of a random split.
    order = torch.arange(1000) % 700
    order = order[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    halves = Z[order[:500]], Y[order[:500]], Z[order[500:]], Y[order[500:]]
    shared = int(torch.isin(order[500:], order[:500]).sum())
    assert pair_problems(*halves)[0].startswith(f"{shared} of the 500 test rows are also validation rows")
    assert pair_problems(*one, Z[:500, :3], Y[:500]) == pair_problems(*one, Z[:0], Y[:0]) == []


# Networks so confident that up to 12 % of the rounded rows are in both sets, but few of a set are equal.
@pytest.mark.parametrize(("n_digits", "scale"), [(2, 4), (3, 6), (4, 7)])
@pytest.mark.parametrize("n_rows", [300, 1000])
def test_rows_of_few_digits_are_in_both_sets_by_chance(n_digits, scale, n_rows):
    """Half of the rows in common are no chance."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(2 * n_rows, 10, generator=generator, dtype=torch.float64)
    probs, labels = logits.softmax(-1).round(decimals=n_digits), logits.argmax(-1)
    sets = probs[:n_rows], labels[:n_rows], probs[n_rows:], labels[n_rows:]
    assert pair_problems(*sets) == []
    half = n_rows // 2
    (said,) = pair_problems(*sets[:2], probs[half : half + n_rows], labels[half : half + n_rows])
    assert "test rows are also validation rows" in said


def test_log_probabilities_are_a_note():
    assert input_notes(Z) == [] and input_notes(-Z.abs()) == []
    for form in (Z.log_softmax(-1), Z.double().log_softmax(-1), Z.log_softmax(-1).bfloat16()):
        assert "are log-probabilities" in input_notes(form)[0]


def test_the_command_prints_them(tmp_path, capsys):
    from focalkern.cli import main

    np.savez(tmp_path / "a.npz", val_logits=Z, val_labels=(Y + 1) % 6, test_logits=Z, test_labels=(Y + 1) % 6)
    options = ["--method", "temperature", "--temperatures", "0.5:2:0.5", "--bootstrap", "0"]
    assert main(["calibrate", str(tmp_path / "a.npz"), *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("Check the data first: ")
    assert said.index("a.npz, val: the label has the largest logit in") < said.index("use temperature scaling")
    assert said.count("the columns are not in the order of the class numbers.") == 2  # the test rows are a note
    assert "the same 1,000 rows are validation and test rows" in said


def test_a_problem_of_the_labels_comes_first(tmp_path):
    wrong = (Y + 1) % 6
    study = fk.compare_calibrators((Z, wrong), (Z, Y), candidates=["temperature"], resamples=0)
    verdict = study.verdict
    assert verdict.check_data
    first, *others = verdict.sentences()
    assert first == f"Check the data first: {verdict.warnings[0]}"
    assert str(verdict).startswith("Check the data first: ")
    assert str(study).startswith("Check the data first: ")
    assert others[0].startswith("Use ")
    assert not [words for words in (*verdict.notes(), *study.remarks) if verdict.warnings[0] in words]
    of_test = fk.compare_calibrators((Z, Y), (Z, wrong), candidates=["temperature"], resamples=0).verdict
    assert of_test.check_data
    assert not fk.compare_calibrators((Z, Y), (Z, Y), candidates=["temperature"], resamples=0).verdict.check_data
    assert sentence("a.npz (val): the label") == "a.npz (val): the label."
    assert sentence("the label") == "The label."
    names = []
    for name, labels in (("right", Y), ("wrong", wrong)):
        names.append(str(tmp_path / f"{name}.npz"))
        np.savez(names[-1], val_logits=Z, val_labels=labels, test_logits=Z, test_labels=labels)
    right, found = sweep(names).networks
    assert found["use"].startswith("check the data first; ")
    assert not right["use"].startswith("check")
