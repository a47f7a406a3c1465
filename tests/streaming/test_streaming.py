"""fk.CalibrationGridState compared with fk.calibration_grid on all rows."""

import copy

import pytest
import torch
from state_cases import CRITERIA, GAMMAS, TEMPERATURES, batches_of, samples, snapshot, state_of, through_a_file

import focalkern as fk
from focalkern.streaming._tables import _bucket_limits


# Batches: a single one; and uneven ones, including one of a single row and an empty one.
@pytest.mark.parametrize("sizes", [[1000], [1, 0, 600, 399]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exact_criteria_are_those_of_all_rows_at_once(device, dtype, sizes):
    logits, target = samples(1000, dtype=dtype, device=device)
    target[::9] = -100
    options = {"criteria": CRITERIA, "estimator": "equal_width"}
    state = state_of(batches_of(logits, target, sizes), **options)
    expected = fk.calibration_grid(logits, target, GAMMAS, TEMPERATURES, **options)
    actual = state.compute()
    assert state.n_samples == int((target != -100).sum())
    assert (actual.n_bins, actual.estimator, list(actual.tables)) == (15, "equal_width", list(CRITERIA))
    for name in CRITERIA:
        assert actual.tables[name].device == logits.device
        torch.testing.assert_close(actual.tables[name], expected.tables[name], rtol=1e-12, atol=1e-12)
        assert not state.error_bound(name).any()


# Few samples with many bins, ties (multiples of 1/8), many classes with low confidences.
CASES = {
    "plain": lambda: samples(2000),
    "fewer rows than bins": lambda: samples(9),
    "one row": lambda: samples(1),
    "ties": lambda: tuple(x.div(8, rounding_mode="floor") for x in samples(500)),
    "two classes": lambda: samples(700, 2, scale=0.7),
    "low confidences": lambda: samples(400, 300, scale=0.3),
    "nearly always right": lambda: samples(3000, 5, scale=6.0),
    "float64": lambda: samples(800, dtype=torch.float64),
}


@pytest.mark.parametrize("n_buckets", [16, 1024])
@pytest.mark.parametrize("estimator", ["equal_mass", "equal_mass_interp"])
@pytest.mark.parametrize("case", CASES)
def test_the_sketch_keeps_its_error_bound(device, case, estimator, n_buckets):
    logits, target = (x.to(device) for x in CASES[case]())
    target = target % logits.shape[1]
    options = {"criteria": CRITERIA, "estimator": estimator}
    state = state_of(batches_of(logits, target, 170), n_buckets=n_buckets, **options)
    exact = fk.calibration_grid(logits, target, GAMMAS, TEMPERATURES, **options)
    grid = state.compute()
    for name in ("ece", "mce"):
        error = (grid.tables[name] - exact.tables[name]).abs()
        bound = state.error_bound(name)
        assert (error <= bound + 1e-8).all(), (error - bound).max()
        assert (bound <= 1).all()
    for name in ("nll", "brier"):
        torch.testing.assert_close(grid.tables[name], exact.tables[name], rtol=1e-12, atol=1e-12)


def test_the_bound_holds_for_every_order_of_ties():
    """The order of rows determines which of several equal confidences come first in an equal-mass bin."""
    logits, target = samples(300)
    logits = logits.round()
    state = state_of([(logits, target)], criteria=("ece",))
    low, high = state.compute().tables["ece"] - state.error_bound("ece"), None
    high = state.compute().tables["ece"] + state.error_bound("ece")
    for _ in range(20):
        order = torch.randperm(300)
        exact = fk.calibration_grid(logits[order], target[order], GAMMAS, TEMPERATURES, criteria=("ece",)).tables["ece"]
        assert (low - 1e-8 <= exact).all() and (exact <= high + 1e-8).all()


def test_the_bound_is_worth_having():
    """At the optimum the error bound of the ECE is below 0.01 with 1024 buckets and falls with more buckets. The error
    itself is far smaller."""
    logits, target = samples(20_000)
    exact = fk.calibration_grid(logits, target, [0.0], [1.5, 1.8, 1.95, 2.1, 2.4], criteria=("ece",))
    _, temperature, ece = exact.best("ece")
    bounds, errors = [], []
    for n_buckets in (256, 1024, 4096):
        state = fk.CalibrationGridState([0.0], [temperature], criteria=("ece",), n_buckets=n_buckets)
        bounds.append(state.update(logits, target).error_bound("ece").item())
        errors.append(abs(state.compute().tables["ece"].item() - ece))
    assert bounds[1] < 1e-2
    assert bounds[0] > 2 * bounds[1] > 4 * bounds[2]
    assert max(errors[1:]) < 5e-4


def test_buckets_are_where_the_bound_takes_them_to_be(device):
    """Every confidence lies within the bounds of its bucket, and buckets ascend."""
    c = torch.cat([torch.linspace(0.5, 1, 200), 1 - torch.logspace(-8, -1, 50), torch.tensor([0.5, 1.0])]).sort().values
    c = torch.cat([c, torch.nextafter(torch.tensor([0.5]), torch.tensor([1.0]))])
    for n_buckets in (16, 1023, 1024):
        low, high = _bucket_limits(torch.arange(n_buckets), n_buckets)
        places = []
        for value in c.sort().values.tolist():
            probs = torch.tensor([[value, 1 - value]], dtype=torch.float64, device=device)
            for p in (probs, probs.float()):
                state = fk.CalibrationGridState(
                    [0.0], [1.0], input_kind="probs", criteria=("ece",), n_buckets=n_buckets
                )
                tensors = state.update(p, torch.zeros(1, dtype=torch.int64, device=device)).state_dict()["tensors"]
                place = int(tensors["count"].flatten().argmax())
                assert low[place] <= tensors["confidence"].sum().item() <= high[place]
            places.append(place)
        assert places == sorted(places) and places[-1] == n_buckets - 1
    assert low[0] == 0 and high[-1] == 1


@pytest.mark.parametrize("estimator", ["equal_mass", "equal_mass_interp"])
def test_exact_is_the_grid_itself(device, estimator):
    logits, target = samples(700, device=device)
    target[3] = -100
    options = {"criteria": CRITERIA, "estimator": estimator}
    state = state_of(batches_of(logits, target, 300), exact=True, **options)
    actual = state.compute().tables
    expected = fk.calibration_grid(logits.cpu(), target.cpu(), GAMMAS, TEMPERATURES, **options).tables
    other = state_of(batches_of(logits[:100], target[:100], 60), exact=True, **options)
    other.merge(state_of([(logits[100:], target[100:])], exact=True, **options))
    resumed = fk.CalibrationGridState.from_state_dict(through_a_file(state))
    for name in CRITERIA:
        for tables in (actual, other.compute().tables, copy.deepcopy(state).compute().tables, resumed.compute().tables):
            torch.testing.assert_close(tables[name], expected[name], rtol=0, atol=0)
        assert not state.error_bound(name).any()


@pytest.mark.parametrize("exact", [False, True])
def test_tables_are_in_the_order_of_the_criteria(exact):
    """The order is that of ``criteria``, not that of the sums or of the operator."""
    logits, target = samples(40)
    criteria = ("brier", "nll", "mce", "ece")
    state = fk.CalibrationGridState(GAMMAS, TEMPERATURES, criteria=criteria, exact=exact).update(logits, target)
    at_once = fk.calibration_grid(logits, target, GAMMAS, TEMPERATURES, criteria=criteria)
    assert tuple(state.compute().tables) == tuple(at_once.tables) == criteria


def test_exact_takes_one_dtype():
    state = state_of([samples(5)], exact=True)
    with pytest.raises(
        TypeError, match=r"update: logits must be torch.float32 as in the batches before .* torch.float64"
    ):
        state.update(*samples(5, dtype=torch.float64))
    assert state.n_samples == 5


def test_sums_do_not_depend_on_threads_and_batches_may_differ():
    logits, target = samples(3000)
    threads = torch.get_num_threads()
    states = []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            states.append(snapshot(state_of(batches_of(logits, target, 1100), criteria=CRITERIA)))
    finally:
        torch.set_num_threads(threads)
    assert states[0] == states[1]
    mixed = state_of([(logits[:10].double(), target[:10]), (logits[10:20].half(), target[10:20].int())])
    assert mixed.n_samples == 20


def test_a_large_batch_equals_small_ones():
    """Uses more rows than one call of the operator takes, with and without ignored rows."""
    logits, target = samples(3000, 3)
    for ignored in (target, torch.where(torch.arange(3000) % 5 == 0, -100, target)):
        gammas = torch.linspace(-0.9, 1.0, 200)  # 2^18 / 200 = 1310 rows at once
        once, often = (fk.CalibrationGridState(gammas, [1.0, 2.0], estimator="equal_width") for _ in range(2))
        once.update(logits, ignored)
        for batch in batches_of(logits, ignored, 700):
            often.update(*batch)
        for name, table in once.compute().tables.items():
            torch.testing.assert_close(table, often.compute().tables[name], rtol=1e-13, atol=1e-13)
        assert torch.equal(once.state_dict()["tensors"]["count"], often.state_dict()["tensors"]["count"])


@pytest.mark.parametrize("estimator", ["equal_mass", "equal_mass_interp"])
def test_torchs_default_dtype_does_not_change_the_tables(estimator):
    logits, target = samples(3000)
    state = state_of(batches_of(logits, target, 1000), criteria=CRITERIA, estimator=estimator, n_buckets=64)
    expected = state.compute()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = state.compute()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(found.tables[name], expected.tables[name]) for name in CRITERIA)
