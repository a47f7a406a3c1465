"""Statistics of rows, alone or with a loss of rows, and terms in the log-sum-exp of a row beside its loss."""

import pytest
import torch

from tools.cuda.cases.common import DTYPES, LABELS, NAN, assert_near, real_of
from tools.cuda.cases.focal_loss import ALONE, labels_for, run_focal_loss
from tools.cuda.cases.row_loss import SOFT, SPECS, check_row_loss, number, shares_for

OTHERS = [(name, torch.float32) for name in SPECS if name != "focal"]


def expected_statistics(logits, target, ignore_index):
    """Of contiguous rows, in float64."""
    z, target = logits.double(), target.long()
    classes = z.shape[1]
    counts = target != ignore_index
    legal = counts & (target >= 0) & (target < classes)
    largest = z.amax(1)
    log_p = z - largest.unsqueeze(1)
    powers = log_p.exp()
    index = z.argmax(1)
    rest = powers.scatter(1, index.unsqueeze(1), 0.0).sum(1)
    log_sum = rest.log1p()
    entropy = log_sum + torch.where(powers > 0, -log_p * powers, 0.0).sum(1) / (1 + rest)
    of_label = log_p.gather(1, torch.where(legal, target, 0).unsqueeze(1)).squeeze(1) - log_sum
    predicted = torch.where(counts, index, -1)
    return {
        "log_p": torch.where(legal, of_label, torch.where(counts, NAN, 0.0)),
        "entropy": torch.where(counts, entropy, 0.0),
        "lse": torch.where(counts, largest + log_sum, 0.0),
        "predicted": predicted,
        "correct": (counts & (predicted == target)).to(torch.uint8),
        "counts": counts.to(torch.uint8),
    }


def assert_statistics(actual, logits, target, ignore_index=-100):
    """That the statistics in `actual` are those of the reference."""
    real, classes = real_of(logits.dtype), logits.shape[1]
    expected = expected_statistics(logits.movedim(1, -1).reshape(-1, classes), target.reshape(-1), ignore_index)
    for name in ("log_p", "entropy", "lse"):
        assert_near(actual[name], expected[name], real, 20)
    for name in ("predicted", "correct", "counts"):
        assert torch.equal(actual[name], expected[name]), name


def check_statistics(library, logits, target, gamma=2.0, *, kind, ignore_index=-100, **options):
    """The statistics, and with a loss its results, which are those of the loss alone."""
    rows = logits.numel() // logits.shape[1]
    real = real_of(logits.dtype)
    options |= {"kind": max(kind, 0), "ignore_index": ignore_index}
    grad = torch.randn(rows if options.get("reduction") == "none" else 1, dtype=real)
    actual = run_focal_loss(library, logits, target, gamma, grad, statistics=kind, **options)
    assert_statistics(actual, logits, target, ignore_index)
    if kind == ALONE:
        return actual
    alone = run_focal_loss(library, logits, target, gamma, grad, **options)
    for name in ("loss", "divisor", "grad_logits"):
        assert_near(actual[name], alone[name], logits.dtype if name == "grad_logits" else real, 20)
    return actual


# Classes around each threshold between the ways of sharing a row, and rows of several tiles.
@pytest.mark.parametrize(("name", "dtype"), [*((name, dtype) for name in (None, "focal") for dtype in DTYPES), *OTHERS])
def test_row_statistics(library, name, dtype):
    kind = ALONE if name is None else number(name)
    for rows, classes in ((1, 1), (33, 3), (257, 10), (40, 129), (9, 513), (3, 4099)):
        logits = (3 * torch.randn(rows, classes)).to(dtype)
        target = labels_for(logits, LABELS[rows % 3] if classes < 256 else torch.int32)
        target[rows // 2] = 77
        check_statistics(library, logits, target, kind=kind, ignore_index=77, reduction="none" if rows % 2 else "mean")


# With label smoothing, gammas of a kernel of their own and others, with and without class weights.
@pytest.mark.parametrize(
    ("name", "dtype"), [*(("focal", dtype) for dtype in DTYPES), *((name, torch.float32) for name in SOFT[1:])]
)
def test_row_statistics_with_smoothing(library, name, dtype):
    for rows, classes in ((1, 1), (33, 3), (257, 10), (70, 129), (9, 513), (3, 4099)):
        logits = (3 * torch.randn(rows, classes)).to(dtype)
        target = labels_for(logits, LABELS[rows % 3] if classes < 256 else torch.int32)
        target[rows // 2] = 77
        if rows > 3:
            target[1] = classes  # out of range
            logits[2:4] = 0  # ties, of which one is the label
            target[2] = classes - 1
        for gamma in (0.0, 1.0, 2.0, 1.5) if name == "focal" else (2.0,):
            for options in ({}, {"weight": torch.rand(classes)}):
                options |= {"label_smoothing": 0.1, "ignore_index": 77, "reduction": "none"}
                actual = check_row_loss(library, name, logits, target, gamma, statistics=number(name), **options)
                assert_statistics(actual, logits, target, 77)


@pytest.mark.parametrize("name", ["focal", "poly"])
def test_row_statistics_layouts(library, name):
    for dtype in (torch.float32, torch.bfloat16):
        for logits in (
            torch.randn(2, 70, 15).to(dtype),
            torch.randn(9, 1100).to(dtype)[:, 7:1050],
            torch.randn(300, 40).to(dtype).t().contiguous().t(),
        ):
            check_statistics(library, 3 * logits, labels_for(logits), kind=number(name))
            for gamma in (2.0, 1.5):
                check_statistics(library, 3 * logits, labels_for(logits), gamma, kind=number(name), label_smoothing=0.1)


# Largest classes that are far above, tied, masked, infinite or missing, in the first and the last vector of a row.
@pytest.mark.parametrize("classes", [3, 100, 2500])
def test_row_statistics_edges(library, classes):
    logits = torch.randn(12, classes)
    target = torch.zeros(12, dtype=torch.int64)
    logits[0, 0] = 1e4  # certain and right
    logits[1, 1] = 1e4  # certain and wrong
    logits[2, 0] = 80
    logits[3, 1:] = -torch.inf
    logits[4, 1] = -torch.inf
    logits[5] = NAN  # ignored, so never read
    target[5] = -100
    logits[6] = 0.0  # the first of equal classes is predicted
    logits[7, classes - 1] = logits[7, 1] = 9.0
    target[7] = 1
    target[8] = classes  # out of range
    smoothed = [{"gamma": gamma, "label_smoothing": 0.1} for gamma in (0.0, 1.0, 2.0, 1.5)]
    for options in ({"kind": ALONE}, {}, *smoothed):
        actual = check_statistics(library, logits, target, **{"kind": 0, "reduction": "none"} | options)
        assert actual["predicted"][6] == 0
        assert actual["predicted"][7] == 1
        assert actual["log_p"][8].isnan() and not actual["entropy"][8].isnan()
    logits[9, classes - 1] = NAN
    logits[10, classes - 1] = torch.inf
    logits[11] = -torch.inf
    also_infinite = logits.clone()
    also_infinite[10, 0] = torch.inf  # not NaN, although their difference is
    for options in ({"gamma": 2.0}, *smoothed):
        options |= {"grad": torch.ones(12), "reduction": "none", "statistics": 0}
        actual = run_focal_loss(library, logits, target, **options)
        assert actual["predicted"][9:].tolist() == [-1, classes - 1, 0]
        assert actual["entropy"][9:].isnan().tolist() == [True, True, False]
        assert actual["lse"][11] == -torch.inf
        assert actual["log_p"][9:].isnan().all()
        assert actual["loss"].isnan().nonzero().flatten().tolist() == [8, 9, 10, 11]
        assert run_focal_loss(library, also_infinite, target, **options)["predicted"][10] == 0


def test_row_statistics_of_nothing(library):
    for rows, gamma, smoothing in ((0, 2.0, 0.0), (40, 2.0, 0.0), (0, 2.0, 0.1), (40, 2.0, 0.1), (0, 1.5, 0.1)):
        logits, target = torch.randn(rows, 5), torch.full((rows,), -100)
        actual = run_focal_loss(library, logits, target, gamma, torch.ones(1), statistics=0, label_smoothing=smoothing)
        assert actual["loss"].isnan().all()
        assert (actual["predicted"] == -1).all()
        assert (actual["entropy"] == 0).all()


# As for the z-loss: labels, smoothing with one read and with two, class probabilities; short and long rows, pixels.
@pytest.mark.parametrize(("name", "dtype"), [("focal", torch.float32), ("focal", torch.float64), *OTHERS])
def test_a_term_in_the_log_sum_exp(library, name, dtype):
    soft = [{"label_smoothing": 0.1}, {"label_smoothing": 0.1, "gamma": 1.5}, {}] if SPECS[name].soft_target else []
    for shape in ((40, 5), (33, 100), (5, 1000), (2, 9000), (2, 7, 6)):
        logits = (3 * torch.randn(shape)).to(dtype)
        rows, classes = logits.numel() // shape[1], shape[1]
        target = labels_for(logits)
        target[0] = -100
        top = logits.argmax(1)
        logits.scatter_add_(1, top.unsqueeze(1), torch.where(top % 2 == 0, 6.0, 0.0).to(dtype).unsqueeze(1))
        p = logits.double().softmax(1).movedim(1, -1).reshape(rows, classes)
        for number_of_case, options in enumerate([{}, {"weight": torch.rand(classes)}, *soft]):
            target_of_case = shares_for(logits) if number_of_case == 4 else target
            slope = torch.randn(rows, dtype=real_of(dtype))
            arguments = (library, logits, target_of_case, options.pop("gamma", 2.0), torch.tensor([0.75]).to(slope))
            options |= {"kind": number(name), "reduction": "mean"}
            alone = run_focal_loss(*arguments, **options)
            both = run_focal_loss(*arguments, lse_slope=slope, **options)
            counts = torch.ones(rows) if number_of_case == 4 else (target != -100).reshape(-1).double()
            if "weight" in options:
                counts = counts * options["weight"].double()[target.reshape(-1).clamp(0)]
            factor = 0.75 / alone["divisor"].double() * counts * slope.double()
            grad = alone["grad_logits"].double().movedim(1, -1).reshape(rows, classes) + factor.unsqueeze(1) * p
            for found in (both["grad_logits"], both["grad_logits_alone"]):
                assert_near(found.movedim(1, -1).reshape(rows, classes), grad, dtype, 20)
