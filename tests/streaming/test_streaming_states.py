"""Grid states: merged, refused, saved, and damaged."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from state_cases import CRITERIA, GAMMAS, TEMPERATURES, batches_of, samples, snapshot, state_of, through_a_file

import focalkern as fk

ESTIMATORS = ["equal_width", "equal_mass", "equal_mass_interp"]


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
    assert loaded["n_samples"] == 300  # the state shares no memory with the loaded tensors
    for name, table in whole.compute().tables.items():
        tolerance = 0 if exact else 1e-6
        found = resumed.compute().tables[name].to(device)
        torch.testing.assert_close(found, table, rtol=tolerance, atol=tolerance)
    empty = fk.CalibrationGridState(GAMMAS, TEMPERATURES)
    assert fk.CalibrationGridState.from_state_dict(empty.state_dict()).n_samples == 0


@pytest.mark.parametrize("exact", [False, True])
def test_later_batches_do_not_change_a_state_dict(exact, device):
    logits, target = samples(60, device=device)
    state = fk.CalibrationGridState(GAMMAS, TEMPERATURES, exact=exact).update(logits[:20], target[:20])
    saved, expected = state.state_dict(), state.compute().tables
    state.update(logits[20:], target[20:])
    found = fk.CalibrationGridState.from_state_dict(saved)
    assert found.n_samples == 20
    for name, table in found.compute().tables.items():
        torch.testing.assert_close(table.cpu(), expected[name].cpu(), rtol=1e-12, atol=0)


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
    """It is the size that the docstring states."""
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
    """Tokens of a language model with 128256 words, in bfloat16; positions of the prompt are ignored."""
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


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_default_device_does_not_change_a_state(estimator):
    def tables(batches):
        state = state_of(batches[:2], criteria=CRITERIA, estimator=estimator)
        state.merge(pickle.loads(pickle.dumps(state_of(batches[2:], criteria=CRITERIA, estimator=estimator))))
        state = fk.CalibrationGridState.from_state_dict(state.state_dict())
        empty = fk.CalibrationGridState(GAMMAS, TEMPERATURES, criteria=CRITERIA).total("nll")
        return {**state.compute().tables, "bound": state.error_bound("ece"), "empty": empty}

    batches = batches_of(*samples(300), [100, 100, 100])
    expected = tables(batches)
    with torch.device("meta"):
        found = tables(batches)
    for name, table in expected.items():
        assert torch.equal(found[name], table), name
