"""fk.CalibrationGridState against fk.calibration_grid on all rows at once."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import focalkern as fk
from focalkern.streaming._tables import _bucket_limits

ESTIMATORS = ["equal_width", "equal_mass", "equal_mass_interp"]
CRITERIA = ("ece", "mce", "nll", "brier")
# Flatter, plain temperature scaling, much sharper; saturated, cold, neutral, hot.
GAMMAS = [-0.5, 0.0, 5.0]
TEMPERATURES = [0.01, 0.3, 1.0, 2.5]


def samples(n, n_classes=10, dtype=torch.float32, device="cpu", scale=3.0):
    """Logits of a model that is right more often than not."""
    target = torch.randint(n_classes, (n,), device=device)
    z = torch.randn(n, n_classes, dtype=torch.float64, device=device) * scale
    z[torch.arange(n, device=device), target] += 1.5 * scale
    return z.to(dtype), target


def state_of(batches, **options):
    state = fk.CalibrationGridState(GAMMAS, TEMPERATURES, **options)
    for logits, target in batches:
        state.update(logits, target)
    return state


def batches_of(logits, target, sizes):
    return list(zip(logits.split(sizes), target.split(sizes), strict=True))


def snapshot(state):
    """Everything in a state, to the bit."""
    content = state.state_dict()
    tensors = {name: tensor.cpu().numpy().tobytes() for name, tensor in content["tensors"].items()}
    return {**content, "tensors": tensors}


def through_a_file(state):
    stream = io.BytesIO()
    torch.save(state.state_dict(), stream)
    return torch.load(io.BytesIO(stream.getvalue()), weights_only=True)


# Batches: one; uneven ones, a single row and an empty one among them.
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
    """The row order decides which of several equal confidences come first in an equal-mass bin."""
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
    """Every confidence lies within the limits of its bucket, and buckets ascend."""
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
    """More rows than the operator takes at once, with and without rows that are left out."""
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


def test_merge(device):
    logits, target = samples(900, device=device)
    parts = [state_of([batch], criteria=CRITERIA) for batch in batches_of(logits, target, [400, 499, 1])]
    empty = fk.CalibrationGridState(GAMMAS, TEMPERATURES, criteria=CRITERIA)
    whole = state_of([(logits, target)], criteria=CRITERIA)
    a, b, c = (copy.deepcopy(part) for part in parts)
    left = a.merge(b).merge(c).merge(empty)
    right = copy.deepcopy(empty).merge(copy.deepcopy(parts[0]).merge(copy.deepcopy(parts[1]).merge(parts[2])))
    assert left.n_samples == right.n_samples == whole.n_samples == 900
    assert parts[2].n_samples == 1
    for name, tensor in whole.state_dict()["tensors"].items():
        for merged in (left, right):
            found = merged.state_dict()["tensors"][name]
            if tensor.dtype == torch.int64:
                assert torch.equal(found, tensor)
            else:
                torch.testing.assert_close(found, tensor, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_bins": 10}, "must have n_bins = 15, got 10"),
        ({"estimator": "equal_width"}, "must have estimator = 'equal_mass', got 'equal_width'"),
        ({"criteria": ("nll",)}, "must have criteria"),
        ({"n_buckets": 64}, "must have n_buckets = 1024, got 64"),
        ({"input_kind": "probs"}, "must have input_kind"),
        ({"ignore_index": -1}, "must have ignore_index = -100, got -1"),
        ({"exact": True}, "must have exact = False, got True"),
    ],
)
def test_states_of_something_else_are_refused(options, message):
    state = state_of([samples(20)])
    before = snapshot(state)
    other = fk.CalibrationGridState(GAMMAS, TEMPERATURES, **options)
    with pytest.raises(ValueError, match=f"merge: other {message}"):
        state.merge(other)
    with pytest.raises(ValueError, match=f"load_state_dict: state_dict {message}"):
        state.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="must have 10 classes, got 4"):
        state.merge(state_of([samples(20, 4)]))
    with pytest.raises(ValueError, match="must have gammas"):
        state.merge(fk.CalibrationGridState([1.0], TEMPERATURES))
    with pytest.raises(TypeError, match="must be a CalibrationGridState, got int"):
        state.merge(3)
    assert snapshot(state) == before


def bad_batches():
    logits, target = samples(50)
    nan, inf, lost = (logits.clone() for _ in range(3))
    nan[49, 3], inf[48, 0], lost[47] = torch.nan, torch.inf, -torch.inf
    wrong = target.clone()
    wrong[49] = 10
    name = "CalibrationGridState.update: "
    return {
        "NaN": (nan, target, ValueError, f"{name}logits must not contain NaN, got one in row 49"),
        "inf": (inf, target, ValueError, f"{name}logits must not contain .inf, got one in row 48"),
        "no class": (lost, target, ValueError, f"{name}.* got none in row 47"),
        "label": (logits, wrong, IndexError, f"{name}target must be in .* got 10 at row 49"),
        "classes": (logits[:, :9], target % 9, ValueError, f"{name}logits must have the 10 classes of the batches"),
        "no rows, other classes": (logits[:0, :9], target[:0], ValueError, "must have the 10 classes"),
        "shape": (logits, target[1:], ValueError, f"{name}target must be .N. = .50., got .49."),
        "dtype": (logits.long(), target, TypeError, f"{name}logits must be float16"),
        "label dtype": (logits, target.float(), TypeError, f"{name}target must be int64"),
        "empty, label dtype": (logits[:0], target[:0].float(), TypeError, f"{name}target must be int64"),
        "array": (logits.numpy(), target, TypeError, f"{name}logits must be a tensor, got ndarray"),
    }


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", bad_batches())
def test_a_bad_batch_changes_nothing(kind, exact):
    logits, target, error, message = bad_batches()[kind]
    state = state_of([samples(30)], criteria=CRITERIA, exact=exact)
    before = snapshot(state)
    with pytest.raises(error, match=message):
        state.update(logits, target)
    assert snapshot(state) == before
    state.update(*samples(5))
    assert state.n_samples == 35


def test_batches_without_rows_are_welcome():
    logits, target = samples(40)
    state = fk.CalibrationGridState(GAMMAS, TEMPERATURES)
    state.update(logits[:0], target[:0])
    state.update(logits, torch.full_like(target, -100))
    assert (state.n_samples, state.n_classes, state.device) == (0, None, None)
    for call in (state.compute, lambda: state.error_bound("ece")):
        with pytest.raises(ValueError, match="at least one row must have been seen, got none"):
            call()
    state.update(logits, target)
    before = snapshot(state)
    state.update(logits[:0], target[:0])
    assert snapshot(state) == before
    assert "n_samples=40" in repr(state)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gammas": [-1.0]}, ValueError, "gammas must be finite and greater than -1, got -1 at index 0"),
        ({"gammas": []}, ValueError, "gammas must have at least one value"),
        ({"temperatures": [1.0, 0.0]}, ValueError, "temperatures must be finite and greater than 0, got 0 at index 1"),
        ({"temperatures": "hot"}, TypeError, "temperatures must be a sequence of numbers"),
        ({"criteria": ["acc"]}, ValueError, "criteria must be one of"),
        ({"criteria": []}, ValueError, "criteria must name at least one"),
        ({"estimator": "kde"}, ValueError, "estimator must be one of"),
        ({"input_kind": "odds"}, ValueError, "input_kind must be one of"),
        ({"n_bins": 0}, ValueError, "n_bins must be at least 1, got 0"),
        ({"n_bins": 2.0}, TypeError, "n_bins must be an int, got 2.0"),
        ({"n_bins": 10**9}, ValueError, "n_bins must be at most 16777216, got 1000000000"),
        ({"n_buckets": 4}, ValueError, "n_buckets must be at least 16, got 4"),
        ({"ignore_index": None}, TypeError, "ignore_index must be an int"),
        ({"exact": 1}, TypeError, "exact must be a bool"),
    ],
)
def test_options_are_checked_at_once(options, error, message):
    with pytest.raises(error, match=f"CalibrationGridState: {message}"):
        fk.CalibrationGridState(**{"gammas": GAMMAS, "temperatures": TEMPERATURES, **options})


def test_state_dict_goes_on_where_it_was(device):
    logits, target = samples(500, device=device)
    whole = state_of(batches_of(logits, target, 100), criteria=CRITERIA)
    first = state_of(batches_of(logits[:300], target[:300], 100), criteria=CRITERIA)
    loaded = through_a_file(first)
    resumed = fk.CalibrationGridState.from_state_dict(loaded)
    for batch in batches_of(logits[300:], target[300:], 100):
        resumed.update(*batch)
    # The loaded state is on the CPU, where the sums are rounded in another order than on CUDA.
    exact = device.type == "cpu"
    assert not exact or snapshot(resumed) == snapshot(whole)
    assert loaded["n_samples"] == 300  # what was loaded is no part of the state
    for name, table in whole.compute().tables.items():
        tolerance = 0 if exact else 1e-6
        found = resumed.compute().tables[name].to(device)
        torch.testing.assert_close(found, table, rtol=tolerance, atol=tolerance)
    empty = fk.CalibrationGridState(GAMMAS, TEMPERATURES)
    assert fk.CalibrationGridState.from_state_dict(empty.state_dict()).n_samples == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: None, "must be what state_dict.. returns"),
        (lambda d: {**d, "format": 2}, "must have format 1, got 2"),
        (lambda d: {**d, "tensors": {}}, "must have the tensors of this grid"),
        (lambda d: {**d, "tensors": {**d["tensors"], "count": torch.zeros(3)}}, "must have the tensors of this grid"),
        (lambda d: {**d, "n_samples": None}, "must have the tensors of this grid"),
    ],
)
def test_a_damaged_state_dict_changes_nothing(change, message):
    state = state_of([samples(20)])
    before = snapshot(state)
    with pytest.raises(ValueError, match=message):
        state.load_state_dict(change(state.state_dict()))
    assert snapshot(state) == before


def test_memory_does_not_depend_on_the_number_of_samples():
    """And is what the docstring says it is."""
    sizes = {}
    for estimator in ESTIMATORS[:2]:
        state = fk.CalibrationGridState(fk.PAPER_GAMMAS, fk.PAPER_TEMPERATURES, estimator=estimator)
        for n in (10, 200):
            state.update(*samples(n, 3))
            tensors = state.state_dict()["tensors"].values()
            sizes.setdefault(estimator, set()).add(sum(tensor.nbytes for tensor in tensors))
    assert sizes == {"equal_width": {4500 * (24 * 15 + 8)}, "equal_mass": {4500 * (24 * 1024 + 8)}}


def test_updates_within_and_without_inference_mode():
    state = fk.CalibrationGridState(GAMMAS, TEMPERATURES)
    with torch.inference_mode():
        state.update(*samples(10))
    state.update(*samples(10))
    with torch.inference_mode():
        state.update(*samples(10))
        state.merge(copy.deepcopy(state))
        state = fk.CalibrationGridState.from_state_dict(state.state_dict())
    logits, target = samples(10)
    state.update(logits.requires_grad_(), target)
    assert state.n_samples == 70 and not state.compute().tables["ece"].requires_grad


def test_rows_as_wide_as_a_vocabulary():
    """Tokens of a language model with 128256 words, in bfloat16; positions of the prompt are left out."""
    logits = (torch.randn(24, 128_256) * 2).bfloat16()
    target = logits.argmax(1)
    target[::2] = torch.randint(128_256, (12,))
    target[:4] = -100
    state = fk.CalibrationGridState([0.0], [1.0], criteria=("nll", "ece"), estimator="equal_width")
    for batch in batches_of(logits, target, 10):
        state.update(*batch)
    grid = state.compute()
    expected = F.cross_entropy(logits[4:].double(), target[4:])
    torch.testing.assert_close(grid.tables["nll"][0, 0], expected, rtol=1e-6, atol=0)


def test_devices_may_differ(cuda):
    logits, target = samples(600)
    state = state_of([(logits[:200], target[:200])], criteria=CRITERIA)
    state.update(logits[200:400].to(cuda), target[200:400].to(cuda))
    state.merge(state_of([(logits[400:].to(cuda), target[400:].to(cuda))], criteria=CRITERIA))
    assert state.device == torch.device("cpu")
    whole = state_of([(logits, target)], criteria=CRITERIA)
    for name, table in state.compute().tables.items():
        torch.testing.assert_close(table, whole.compute().tables[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rows", [0, 1, 700])
def test_a_pickled_state_is_the_state_to_the_bit(estimator, rows):
    state = state_of([samples(rows)] if rows else [], criteria=CRITERIA, estimator=estimator)
    again = pickle.loads(pickle.dumps(state))
    assert snapshot(again) == snapshot(state)
    more = samples(50)
    assert snapshot(again.update(*more)) == snapshot(state.update(*more))
    assert snapshot(copy.deepcopy(state)) == snapshot(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pickled_state_is_small_enough_to_send(dtype):
    """Every gamma of the paper's grid, every tenth temperature."""
    state = fk.CalibrationGridState(fk.PAPER_GAMMAS, fk.PAPER_TEMPERATURES[::10]).update(*samples(5000, dtype=dtype))
    in_memory = sum(one.numel() * one.element_size() for one in state.state_dict()["tensors"].values())
    assert in_memory > 9 * 50 * 1024 * 24
    assert len(pickle.dumps(state)) < in_memory / 5


def test_counts_of_many_rows_are_packed_without_loss():
    state = fk.CalibrationGridState([0.0], [1.0], estimator="equal_width").update(*samples(40))
    content = state.state_dict()
    content["tensors"] = {name: tensor * 2**33 for name, tensor in content["tensors"].items()}
    large = fk.CalibrationGridState.from_state_dict({**content, "n_samples": 40 * 2**33})
    assert snapshot(pickle.loads(pickle.dumps(large))) == snapshot(large)
