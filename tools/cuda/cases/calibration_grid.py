"""The calibration grid: checking the samples, and the tables of one block of temperatures."""

import ctypes
from ctypes import c_bool, c_int32, c_int64, c_void_p

import pytest
import torch

from focalkern import reference
from tools.cuda.cases.common import DTYPES, LABELS, NAN, Labels, Memory, assert_near, real_of, structure

NO_PROBLEM = 2**63 - 1
ESTIMATORS = ["equal_width", "equal_mass", "equal_mass_interp"]
CRITERIA = ["ece", "mce", "nll", "brier"]
SAMPLES = [
    ("rows", c_int64), ("classes", c_int64), ("input", c_void_p), ("row_stride", c_int64), ("input_is_probs", c_bool),
    ("labels", Labels), ("kept", c_void_p), ("top", c_void_p), ("correct", c_void_p),
]  # fmt: skip


def fill_samples(samples, memory, values, labels, kept, is_probs):
    samples.rows, samples.classes = len(labels) if kept is None else len(kept), values.shape[1]
    samples.input, samples.row_stride, samples.input_is_probs = memory.put(values), values.stride(0), is_probs
    samples.labels = Labels(memory.put(labels), LABELS.index(labels.dtype))
    samples.kept = memory.put(kept)
    samples.top = memory.out(torch.full((samples.rows,), -7, dtype=torch.int32))
    samples.correct = memory.out(torch.full((samples.rows,), 7, dtype=torch.uint8))


def run_grid(library, values, labels, gammas, temperatures, *, n_bins, estimator, kept=None, is_probs=False,
             criteria=CRITERIA):  # fmt: skip
    """The tables by criterion, null for those not requested; the confidences [Gt, Gg, N]; and which samples are
    correct."""
    dtype, real = values.dtype, real_of(values.dtype)
    block_fields = [
        ("samples", None), ("n_gammas", c_int64), ("n_temperatures", c_int64), ("gammas", c_void_p),
        ("temperatures", c_void_p), ("n_bins", c_int64), ("estimator", c_int32),
        *[(name, c_void_p) for name in CRITERIA], ("table_stride", c_int64), ("keep_confidence", c_bool),
    ]  # fmt: skip
    with Memory(library) as memory:
        samples = structure(library, "CalibrationGridSamples", dtype, SAMPLES)
        fill_samples(samples, memory, values, labels, kept, is_probs)
        problem = memory.out(torch.zeros(1, dtype=torch.int64))
        index = DTYPES.index(dtype)
        assert library.calibration_grid_prepare(index, ctypes.byref(samples), c_void_p(problem)) == 0
        assert memory.get(problem, torch.zeros(1, dtype=torch.int64)).item() == NO_PROBLEM

        block_fields[0] = ("samples", type(samples))
        block = structure(library, "CalibrationGridBlock", dtype, block_fields)
        block.samples = samples
        block.n_gammas, block.n_temperatures, block.n_bins = len(gammas), len(temperatures), n_bins
        block.gammas = memory.put(torch.tensor(gammas, dtype=torch.float64))
        block.temperatures = memory.put(torch.tensor(temperatures, dtype=torch.float64))
        block.estimator = ESTIMATORS.index(estimator)
        table = torch.full((len(gammas), len(temperatures) + 3), NAN, dtype=torch.float64)
        block.table_stride = table.stride(0)
        for name in criteria:
            setattr(block, name, memory.out(table))
        sizes = (samples.rows, values.shape[1], len(gammas), len(temperatures), n_bins, real.itemsize)
        scratch = memory.scratch(library.calibration_grid_workspace(*map(c_int64, sizes)))
        assert library.calibration_grid_block(index, ctypes.byref(block), c_void_p(scratch)) == 0
        shape = (len(temperatures), len(gammas), samples.rows)
        tables = {name: memory.get(getattr(block, name), table) for name in criteria}
        assert all(values[:, len(temperatures) :].isnan().all() for values in tables.values())
        return (
            {name: values[:, : len(temperatures)] for name, values in tables.items()},
            memory.get(scratch, torch.empty(shape, dtype=real)),
            memory.get(samples.correct, torch.empty(samples.rows, dtype=torch.uint8)).bool(),
        )


# Numbers of rows: fewer than bins, fewer than a digit of the radix, and more. Saturated cells (temperature 0.01) have
# ties.
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("rows", "classes", "n_bins"), [(1, 2, 3), (7, 3, 15), (300, 3, 15), (70, 17, 8), (30, 5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grid(library, dtype, rows, classes, n_bins, estimator):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    labels = torch.where(torch.rand(rows) < 0.6, logits.argmax(1), torch.randint(classes, (rows,)))
    gammas, temperatures = [-0.5, 0.0, 0.37, 1.0, 5.0, 2.0], [0.01, 1.0, 2.3]
    tables, confidence, correct = run_grid(library, logits, labels, gammas, temperatures, n_bins=n_bins,
                                           estimator=estimator)  # fmt: skip
    expected = reference.calibration_grid(logits.double(), labels, gammas, temperatures, criteria=("nll", "brier"))
    for name in ("nll", "brier"):
        assert_near(tables[name], expected[name], real_of(dtype))
    assert torch.equal(correct, logits.argmax(1) == labels)
    for g, gamma in enumerate(gammas):
        for t, temperature in enumerate(temperatures):
            probs = reference.focal_calibration_map(logits.double(), gamma, temperature)
            assert_near(confidence[t, g], probs.max(1).values, real_of(dtype))
            ece, mce = reference.calibration_error(confidence[t, g], correct, n_bins, estimator)
            assert abs(tables["ece"][g, t].item() - ece) < 1e-12
            # An edge interpolated between neighbouring floats equals one of them, so a sample there may fall into
            # either bin.
            if dtype == torch.float64 or estimator != "equal_mass_interp":
                assert abs(tables["mce"][g, t].item() - mce) < 1e-9


def test_grid_takes_kept_rows_probabilities_and_many_temperatures(library):
    probs = torch.randn(20, 4).softmax(1).bfloat16().float()
    probs[0, 1] = 0
    probs /= probs.sum(1, keepdim=True)
    labels = torch.randint(4, (20,)).to(torch.uint8)
    labels[3] = 200  # not selected, so never read
    kept = torch.tensor([0, 1, 2, *range(5, 20)])
    temperatures = [0.1 * (i + 1) for i in range(40)]  # more than a warp
    tables, _, _ = run_grid(library, probs, labels, [0.75], temperatures, n_bins=5, estimator="equal_mass", kept=kept,
                            is_probs=True)  # fmt: skip
    expected = reference.calibration_grid(probs[kept].double(), labels[kept].long(), [0.75], temperatures,
                                          criteria=("nll",), input_kind="probs")  # fmt: skip
    assert_near(tables["nll"], expected["nll"], torch.float32)


# Without the Brier score, sums over the classes serve many gammas at once. The cases have more of these gammas than one
# launch takes, together with whole gammas and others; rows that fit a warp's memory or do not; few temperatures and
# many.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "classes", "temperatures"),
    [
        (9, 3, [0.4]),
        (70, 3, [0.5, 1.0, 2.0]),
        (9, 17, [0.01, 1.0]),
        (3, 150, [0.7]),
        (3, 530, [0.2 * i for i in range(1, 18)]),
    ],
)
def test_grid_of_gammas_that_share_sums(library, dtype, rows, classes, temperatures):
    gammas = [*(i / 8 - 0.5 for i in range(13)), 2.0, 3.0, 4.0, 2.5, -0.97, 9.5]
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    labels = torch.where(torch.rand(rows) < 0.5, logits.argmax(1), torch.randint(classes, (rows,)))
    logits[1, classes // 2 :] = -torch.inf
    logits[2, :-1] = -torch.inf  # no other class is possible
    labels[1:3] = logits[1:3].argmax(1)
    tables, confidence, _ = run_grid(library, logits, labels, gammas, temperatures, n_bins=4, estimator="equal_width",
                                     criteria=["ece", "nll"])  # fmt: skip
    expected = reference.calibration_grid(logits.double(), labels, gammas, temperatures, criteria=("nll",))
    assert_near(tables["nll"], expected["nll"], dtype)
    for g, gamma in enumerate(gammas):
        for t, temperature in enumerate(temperatures):
            probs = reference.focal_calibration_map(logits.double(), gamma, temperature)
            assert_near(confidence[t, g], probs.max(1).values, dtype)


# A huge gamma amplifies the rounding errors of a row of ties.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [5, 100])
def test_grid_of_a_huge_gamma_is_finite(library, dtype, classes):
    logits = (3 * torch.randn(21, classes)).to(dtype)
    logits[-1] = 0
    labels = torch.randint(1, classes, (21,))
    tables, confidence, _ = run_grid(library, logits, labels, [0.5, 1e30], [0.1, 7.0], n_bins=4,
                                     estimator="equal_width")  # fmt: skip
    assert all(table.isfinite().all() for table in tables.values())
    assert ((confidence > 0) & (confidence <= 1)).all()


# More bins than one pass of the kernel handles, with confidences at both ends, on edges and tied.
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grid_of_many_bins(library, dtype, estimator):
    logits = torch.cat([torch.zeros(20, 2), 3 * torch.randn(230, 2), 40 * torch.randn(20, 2)]).to(dtype)
    labels = torch.randint(2, (len(logits),))
    for n_bins in (17, 300):
        tables, confidence, correct = run_grid(library, logits, labels, [1.0], [1.0], n_bins=n_bins,
                                               estimator=estimator, criteria=["ece", "mce"])  # fmt: skip
        ece, mce = reference.calibration_error(confidence[0, 0], correct, n_bins, estimator)
        assert abs(tables["ece"].item() - ece) < 1e-12
        assert estimator == "equal_mass_interp" or abs(tables["mce"].item() - mce) < 1e-9


def test_grid_names_the_first_bad_row(library):
    kinds = [("nan", 0), ("inf", 1), ("no logit", 2), ("label", 5)]
    for name, kind in kinds:
        logits = torch.randn(50, 33)
        labels = torch.randint(33, (50,))
        for row in (41, 17, *range(22, 40)):  # many of them, in several warps and blocks
            if name == "nan":
                logits[row, 32] = NAN
            elif name == "inf":
                logits[row, 5] = torch.inf
            elif name == "no logit":
                logits[row] = -torch.inf
            else:
                labels[row] = 33
        assert first_problem(library, logits, labels, False) == 17 * 8 + kind
    probs = torch.randn(50, 33).softmax(1)
    labels = torch.randint(33, (50,))
    assert first_problem(library, probs, labels, True) == NO_PROBLEM
    probs[20] *= 1.01
    assert first_problem(library, probs, labels, True) == 20 * 8 + 4
    probs[19, 3] = -0.1
    assert first_problem(library, probs, labels, True) == 19 * 8 + 3


def first_problem(library, values, labels, is_probs):
    with Memory(library) as memory:
        samples = structure(library, "CalibrationGridSamples", values.dtype, SAMPLES)
        fill_samples(samples, memory, values, labels, None, is_probs)
        problem = torch.zeros(1, dtype=torch.int64)
        address = memory.out(problem)
        index = DTYPES.index(values.dtype)
        assert library.calibration_grid_prepare(index, ctypes.byref(samples), c_void_p(address)) == 0
        return memory.get(address, problem).item()
