"""fk.calibration_grid as a function: its result, axes, layouts, memory and errors."""

import math
import subprocess
import sys

import numpy
import pytest
import torch
import torch.nn.functional as F
from grid_cases import CRITERIA, ESTIMATORS, GAMMAS, TEMPERATURES, samples

import focalkern as fk
from focalkern import reference

# ---- the result -----------------------------------------------------------------------------------------------------


def test_the_result_and_its_defaults(device):
    z, target = samples(50, 3, torch.float32, device)
    grid = fk.calibration_grid(z, target, GAMMAS, TEMPERATURES)
    assert isinstance(grid, fk.CalibrationGrid)
    assert list(grid.tables) == ["ece", "nll"]
    assert (grid.n_bins, grid.estimator) == (15, "equal_mass")
    assert grid.gammas.tolist() == GAMMAS
    assert grid.temperatures.tolist() == TEMPERATURES
    for table in grid.tables.values():
        assert table.dtype == torch.float64
        assert table.shape == (len(GAMMAS), len(TEMPERATURES))
    with pytest.raises(AttributeError):
        grid.n_bins = 10
    # The order is as requested; one table is the same with and without other criteria.
    only = fk.calibration_grid(z, target, GAMMAS, TEMPERATURES, criteria=("nll",))
    assert list(only.tables) == ["nll"]
    assert torch.equal(only.tables["nll"], grid.tables["nll"])
    assert list(fk.calibration_grid(z, target, [0.0], [1.0], criteria=("mce", "ece")).tables) == ["mce", "ece"]


def test_axes_may_be_lists_arrays_and_tensors(device):
    z, target = samples(50, 3, device=device)
    expected = fk.calibration_grid(z, target, GAMMAS, TEMPERATURES)
    for convert in (tuple, numpy.array, lambda v: torch.tensor(v, dtype=torch.float64), range_like):
        grid = fk.calibration_grid(z, target, convert(GAMMAS), convert(TEMPERATURES))
        for name, table in grid.tables.items():
            assert torch.equal(table, expected.tables[name])
    assert fk.calibration_grid(z, target, [1], [2]).temperatures.tolist() == [2.0]


def range_like(values):
    return numpy.array(values)[::-1][::-1]


def test_targets_and_layouts(device):
    z, target = samples(60, 5, device=device)
    expected = fk.calibration_grid(z, target, GAMMAS, TEMPERATURES, criteria=CRITERIA)
    for z_, target_ in (
        (z, target.int()),
        (z, target.to(torch.uint8)),
        (z, target.repeat_interleave(2)[::2]),
        (z.t().contiguous().t(), target),
        (z.repeat_interleave(2, 1)[:, ::2], target),
        (z.clone().requires_grad_(), target),
    ):
        grid = fk.calibration_grid(z_, target_, GAMMAS, TEMPERATURES, criteria=CRITERIA)
        for name in CRITERIA:
            torch.testing.assert_close(grid.tables[name], expected.tables[name], rtol=1e-12, atol=1e-12)


def test_paper_grid():
    assert fk.PAPER_GAMMAS == (-0.5, -0.25, 0.05, 0.25, 0.37, 0.5, 0.75, 1.0, 5.0)
    # index * step, never accumulated.
    assert tuple(i / 100 for i in range(1, 501)) == fk.PAPER_TEMPERATURES
    z, target = samples(30, 3)
    grid = fk.calibration_grid(z, target, fk.PAPER_GAMMAS, fk.PAPER_TEMPERATURES)
    assert grid.tables["ece"].shape == (9, 500)
    # The lowest and the highest temperature, the most difficult ones.
    ends = [fk.PAPER_TEMPERATURES[0], fk.PAPER_TEMPERATURES[-1]]
    expected = reference.calibration_grid(z, target, fk.PAPER_GAMMAS, ends, criteria=("nll", "brier"))
    torch.testing.assert_close(grid.tables["nll"][:, [0, -1]], expected["nll"], rtol=1e-6, atol=0)


def hand_made(table):
    table = torch.tensor(table, dtype=torch.float64)
    return fk.CalibrationGrid(
        gammas=torch.tensor([0.5, 1.0], dtype=torch.float64),
        temperatures=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        tables={"ece": table},
        n_bins=15,
        estimator="equal_mass",
    )


def test_best_is_the_first_smallest_finite_cell():
    nan, inf = math.nan, math.inf
    # The first in (gamma index, temperature index) order among equal cells.
    assert hand_made([[3.0, 2.0, 9.0], [1.0, 1.0, 2.0]]).best("ece") == (1.0, 1.0, 1.0)
    assert hand_made([[3.0, 1.0, 1.0], [1.0, 1.0, 2.0]]).best("ece") == (0.5, 2.0, 1.0)
    # NaN and both infinities never win, at any position.
    assert hand_made([[nan, inf, -inf], [7.0, nan, 5.0]]).best("ece") == (1.0, 3.0, 5.0)
    assert all(type(v) is float for v in hand_made([[0.0] * 3] * 2).best("ece"))
    with pytest.raises(ValueError, match="ece must be finite"):
        hand_made([[nan, inf, inf], [nan, nan, -inf]]).best("ece")
    with pytest.raises(ValueError, match="criterion must be one of ece, got 'nll'"):
        hand_made([[0.0] * 3] * 2).best("nll")


def test_best_of_a_real_grid_is_its_minimum(device):
    z, target = samples(200, 5, device=device)
    grid = fk.calibration_grid(z, target, GAMMAS, TEMPERATURES, criteria=CRITERIA)
    for name in CRITERIA:
        gamma, temperature, value = grid.best(name)
        table = grid.tables[name]
        assert value == table.min().item()
        assert table[GAMMAS.index(gamma), TEMPERATURES.index(temperature)].item() == value


# ---- determinism, memory, dispatcher --------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_same_bits_on_every_run_and_for_every_number_of_threads(device, estimator):
    z, target = samples(5000, 10, torch.float32, device)
    temperatures = [0.1 * i for i in range(1, 12)]
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            results.append(fk.calibration_grid(z, target, GAMMAS, temperatures, criteria=CRITERIA, estimator=estimator))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name in CRITERIA:
            assert torch.equal(other.tables[name], results[0].tables[name])


MEMORY = """
import resource, torch, focalkern as fk
n, c = 50_000, 200
z, target = torch.randn(n, c), torch.randint(c, (n,))
fk.calibration_grid(z[:100], target[:100], [1.0], [1.0])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fk.calibration_grid(z, target, fk.PAPER_GAMMAS, [0.5 * i for i in range(1, 9)], criteria=("ece", "mce", "nll", "brier"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.kernels("stable")
def test_no_probabilities_in_memory():
    # The probabilities of one cell would take 40 MB in float32, 80 MB in float64; the grid has 72 cells.
    answer = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(answer.stdout) < 40


def test_nothing_is_printed_where_nobody_watches(capfd):
    z, target = samples(50, 3)
    fk.calibration_grid(z, target, fk.PAPER_GAMMAS, fk.PAPER_TEMPERATURES)
    assert capfd.readouterr() == ("", "")


@pytest.mark.kernels("stable")
def test_opcheck(device):
    z, target = samples(40, 5, torch.float32, device)
    axes = (torch.tensor(GAMMAS, dtype=torch.float64), torch.tensor(TEMPERATURES, dtype=torch.float64))
    # All criteria (1 ece + 2 mce + 4 nll + 8 brier) and one; each estimator; probabilities and ignored labels.
    # torch's fake tensors do not accept a vector on the CPU beside a tensor on CUDA.
    checks = ["test_schema", "test_autograd_registration"] + ["test_faketensor"] * (z.device.type == "cpu")
    for arguments in (
        (z, target, *axes, 15, 15, 1, False, -100),
        (z.double(), target.int(), *axes, 3, 4, 0, False, 2),
        (z.softmax(-1), target, *axes, 15, 3, 2, True, -100),
    ):
        torch.library.opcheck(torch.ops.focalkern.calibration_grid, arguments, test_utils=checks)


# ---- bad input ------------------------------------------------------------------------------------------------------

Z = torch.zeros(4, 3)
T = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.zeros(3), T, [1.0], [1.0]), {}, ValueError, r"input must be \[N, C\].*got \[3\]"),
        (
            (torch.zeros(4, 3, 1), T, [1.0], [1.0]),
            {},
            ValueError,
            r"target must be \[N, d1, ...\] = \[4, 1\], got \[4\]",
        ),
        ((torch.zeros(4, 1), T, [1.0], [1.0]), {}, ValueError, r"input must .*(two|2) classes.*got"),
        ((Z, T[:3], [1.0], [1.0]), {}, ValueError, r"target must be \[N\] = \[4\], got \[3\]"),
        ((Z, T[:, None], [1.0], [1.0]), {}, ValueError, r"target must be \[N\] = \[4\], got \[4, 1\]"),
        ((Z[:0], T[:0], [1.0], [1.0]), {}, ValueError, r"input must .*"),
        ((Z, torch.full((4,), -100), [1.0], [1.0]), {}, ValueError, r".*ignore"),
        ((Z.int(), T, [1.0], [1.0]), {}, TypeError, r"input must .*got"),
        ((Z, T.float(), [1.0], [1.0]), {}, TypeError, r"target must be int64, .*float32; pass target.long\(\)"),
        ((Z, F.one_hot(T), [1.0], [1.0]), {}, ValueError, r"target must be .*got \[4, 3\]; .* target.argmax\(1\)"),
        ((Z, F.one_hot(T).double(), [1.0], [1.0]), {}, TypeError, r"target must be .*float64; .* target.argmax\(1\)"),
        ((Z[..., None], F.one_hot(T)[..., None], [1.0], [1.0]), {}, ValueError, r"target must be .*target.argmax\(1\)"),
        ((Z.numpy(), T, [1.0], [1.0]), {}, TypeError, r"input must be a tensor, got ndarray"),
        ((Z, T.tolist(), [1.0], [1.0]), {}, TypeError, r"target must be a tensor, got list"),
        ((Z, T, [], [1.0]), {}, ValueError, r"gammas must .*got"),
        ((Z, T, [1.0], []), {}, ValueError, r"temperatures must .*got"),
        ((Z, T, [[1.0]], [1.0]), {}, ValueError, r"gammas must .*got"),
        ((Z, T, 1.0, [1.0]), {}, (TypeError, ValueError), r"gammas must .*got"),
        ((Z, T, ["a"], [1.0]), {}, TypeError, r"gammas must .*got"),
        ((Z, T, [0.5, -1.0], [1.0]), {}, ValueError, r"gammas must .*-1.*got .*-1"),
        ((Z, T, [0.5, math.nan], [1.0]), {}, ValueError, r"gammas must .*got .*nan"),
        ((Z, T, [math.inf], [1.0]), {}, ValueError, r"gammas must .*got .*inf"),
        ((Z, T, [0.5], [1.0, 0.0]), {}, ValueError, r"temperatures must .*got .*0"),
        ((Z, T, [0.5], [-2.0]), {}, ValueError, r"temperatures must .*got .*-2"),
        ((Z, T, [0.5], [math.nan]), {}, ValueError, r"temperatures must .*got .*nan"),
        ((Z, T, [0.5], [1.0]), {"n_bins": 0}, ValueError, r"n_bins must .*got 0"),
        ((Z, T, [0.5], [1.0]), {"n_bins": 2.5}, TypeError, r"n_bins must .*got 2.5"),
        ((Z, T, [0.5], [1.0]), {"criteria": ()}, ValueError, r"criteria must .*got"),
        ((Z, T, [0.5], [1.0]), {"criteria": ("ece", "auc")}, ValueError, r"criteria must .*got .*auc"),
        ((Z, T, [0.5], [1.0]), {"estimator": "kde"}, ValueError, r"estimator must .*got 'kde'"),
        ((Z, T, [0.5], [1.0]), {"input_kind": "odds"}, ValueError, r"input_kind must .*got 'odds'"),
        ((Z, T.to("meta"), [0.5], [1.0]), {}, ValueError, r"target must be on .*cpu, got meta"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match="^calibration_grid: " + message):
        fk.calibration_grid(*arguments, **options)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ([0.0, math.nan, 1.0], "logits"),
        ([0.0, math.inf, 1.0], "logits"),
        ([-math.inf, -math.inf, -math.inf], "logits"),
        ([0.5, 0.5, math.nan], "probs"),
        ([0.5, 0.7, -0.2], "probs"),
        ([0.5, 0.502, 0.0], "probs"),
        ([0.0, 0.0, 0.0], "probs"),
    ],
)
def test_bad_rows_are_named(device, row, kind):
    rows = torch.full((5, 3), 1 / 3, device=device)
    rows[3] = torch.tensor(row)
    target = torch.tensor([0, 1, 2, 0, 1], device=device)
    with pytest.raises(ValueError, match=r"^calibration_grid: input .*row 3"):
        fk.calibration_grid(rows, target, [1.0], [1.0], input_kind=kind)


@pytest.mark.parametrize("bad", [3, -1, 2**40])
def test_bad_labels_are_named(device, bad):
    target = torch.tensor([0, -100, bad, 7], device=device)
    with pytest.raises(IndexError, match=rf"^calibration_grid: target .*\[0, 3\).*got {bad}.*row 2"):
        fk.calibration_grid(torch.zeros(4, 3, device=device), target, [1.0], [1.0])


@pytest.mark.parametrize("scale", [1, 100])
def test_probabilities_need_their_kind(device, scale):
    z, target = samples(60, 3, torch.float32, device)
    probs, state = z.softmax(-1) * scale, fk.CalibrationGridState(GAMMAS, TEMPERATURES)
    what = "probabilities" if scale == 1 else "percentages"
    for name, call in (("calibration_grid: input", fk.calibration_grid), ("CalibrationGridState.update: logits", None)):
        with pytest.raises(ValueError, match=f"^{name} must not be {what} without input_kind, got non-negative rows"):
            state.update(probs, target) if call is None else call(probs, target, GAMMAS, TEMPERATURES)
    assert state.n_samples == 0
    for options in ({"input_kind": "logits"}, {"input_kind": "probs"}):
        rows = probs if options["input_kind"] == "logits" else probs / scale
        grid = fk.calibration_grid(rows, target, GAMMAS, TEMPERATURES, **options)
        state = fk.CalibrationGridState(GAMMAS, TEMPERATURES, **options).update(rows, target)
        torch.testing.assert_close(state.compute().tables["nll"], grid.tables["nll"])
    # Later batches are not looked at, and the kind of a state is a plain string.
    state = fk.CalibrationGridState(GAMMAS, TEMPERATURES).update(z, target).update(probs, target)
    assert state.n_samples == 120
    assert type(state.state_dict()["config"]["input_kind"]) is str
