"""fk.calibration_grid compared with the reference, cell by cell."""

import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from grid_cases import CRITERIA, ESTIMATORS, GAMMAS, TEMPERATURES, samples
from hypothesis import given, settings
from hypothesis import strategies as st

import focalkern as fk
from focalkern import reference

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40, database=None)


def samples_near_cuts(confidence, n_bins, estimator, eps):
    """The number of samples that a rounding of eps in the confidences may move to another bin."""
    n = len(confidence)
    ordered = confidence.double().sort().values
    near = torch.zeros(n, dtype=torch.bool)
    if estimator == "equal_mass":
        begins = numpy.cumsum([len(part) for part in numpy.array_split(numpy.arange(n), n_bins)])[:-1]
        for c in begins:
            if 0 < c < n and ordered[c] - ordered[c - 1] <= eps:
                near |= ((ordered - ordered[c]).abs() <= eps) | ((ordered - ordered[c - 1]).abs() <= eps)
        return int(near.sum())
    if estimator == "equal_width":
        for k in range(1, n_bins):
            near |= (ordered - k / n_bins).abs() <= eps
        return int(near.sum())
    count = 0
    edges = numpy.interp(numpy.linspace(0, n, n_bins + 1), numpy.arange(n), ordered.numpy())
    for edge in edges:
        close = int(((ordered - float(edge)).abs() <= eps).sum())
        # An edge that is itself a sample moves with it.
        count += close - (1 if close and bool((ordered == float(edge)).any()) else 0)
    return count


def check_against_reference(z, target, gammas=GAMMAS, temperatures=TEMPERATURES, near_cuts=True, **options):
    """Compares all cells: NLL to 1e-6 relative, the others to 1e-6, plus 2/N per sample within rounding of a cut."""
    options = {"criteria": CRITERIA, **options}
    grid = fk.calibration_grid(z, target, gammas, temperatures, **options)
    # Confidences computed in float32 have the contract's error of 1e-6.
    eps = 1e-12 if z.dtype == torch.float64 else 2e-6
    half = z.element_size() == 2
    z, target = z.detach().cpu().double(), target.cpu()
    expected = reference.calibration_grid(z, target, gammas, temperatures, **options)
    assert list(grid.tables) == list(options["criteria"])
    keep = target != options.get("ignore_index", -100)
    n = int(keep.sum())
    n_bins, estimator = options.get("n_bins", 15), options.get("estimator", "equal_mass")
    strict = 0
    for i, gamma in enumerate(gammas):
        for j, temperature in enumerate(temperatures):
            p = reference.focal_calibration_map(
                z[keep], float(gamma), float(temperature), input_kind=options.get("input_kind", "logits")
            )
            moved = samples_near_cuts(p.max(-1).values, n_bins, estimator, eps) if near_cuts else 0
            for name in options["criteria"]:
                actual, exact = grid.tables[name][i, j].item(), expected[name][i, j].item()
                if name == "nll":
                    tolerance = 1e-6 * abs(exact) if math.isfinite(exact) else 0.0
                elif name == "brier":
                    tolerance = 1e-6
                elif name == "ece":
                    tolerance = 1e-6 + moved * 2 / n
                elif moved:
                    continue
                else:
                    tolerance = 1e-6
                    strict += 1
                where = (name, gamma, temperature, moved, actual, exact)
                assert actual == exact or abs(actual - exact) <= tolerance, where
    # The allowance must stay small. (Half precision causes ties between rows, which round differently.)
    if "mce" in options["criteria"] and not half:
        assert strict >= len(gammas) * len(temperatures) // 3
    return grid


# ---- equality to the reference --------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
# float64 is exact at the cuts; float32 is the usual input; the others are computed in float32.
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
# Two classes, a few, one more than a vector, and many with few samples. N is a multiple of 15 or coprime to it:
# otherwise some edges of equal_mass_interp are samples up to rounding.
@pytest.mark.parametrize(("n", "n_classes"), [(202, 2), (150, 10), (101, 17), (31, 1000)])
def test_every_cell_equals_the_reference(device, estimator, dtype, n, n_classes):
    z, target = samples(n, n_classes, dtype, device)
    check_against_reference(z, target, estimator=estimator)


# Without the Brier score, float32 has several sums over the classes: moments for gammas up to 1, a division for two
# whole gammas, and the exact form for the rest (1.5, -0.97, 20 and a third whole one). Small classes of a long row use
# seven moments, unless some gamma is too large, as 20 is.
@pytest.mark.parametrize(
    "gammas",
    [[-0.9, -0.5, 0.0, 0.05, 0.75, 1.0, 1.5, 5.0], [-0.97, 0.25, 2.0, 3.0, 4.0, 20.0]],
    ids=["tail", "no tail"],
)
# Below, at and above the length from which a row is split; complete runs of 64 classes, and an incomplete one.
@pytest.mark.parametrize(("n", "n_classes"), [(150, 3), (60, 63), (60, 65), (31, 1000)])
@pytest.mark.parametrize("scale", [1.0, 6.0])  # hardly any large class, or hardly any small one
def test_every_path_equals_the_reference(device, gammas, n, n_classes, scale):
    z, target = samples(n, n_classes, torch.float32, device, scale)
    check_against_reference(z, target, gammas, criteria=("ece", "mce", "nll"), estimator="equal_width")


@pytest.mark.parametrize("estimator", ESTIMATORS)
# Fewer samples than bins; one sample; one bin; as many bins as samples; edges at ranks that rounding may miss.
@pytest.mark.parametrize(("n", "n_bins"), [(7, 15), (1, 15), (50, 1), (15, 15), (50, 15), (99, 55), (3, 1000)])
def test_bins_and_samples(device, estimator, n, n_bins):
    z, target = samples(n, 4, device=device)
    check_against_reference(z, target, estimator=estimator, n_bins=n_bins)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_ties_are_split_by_row(device, estimator):
    # Three distinct rows, repeated many times, correct and wrong in an order that matters for the split.
    rows = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.25, 0.0], [0.0, 1.5, 1.0]], dtype=torch.float64, device=device)
    z = rows[torch.randint(3, (100,), device=device)]
    target = torch.randint(3, (100,), device=device)
    check_against_reference(z, target, estimator=estimator, near_cuts=False)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_confidences_of_exactly_1(device, estimator):
    # Saturated beyond float64: every confidence is 1, so only ties remain; in the other case, half of them.
    z, target = samples(60, 5, device=device)
    top = z.argmax(-1, keepdim=True)
    saturated = z.scatter_add(1, top, torch.full_like(z[:, :1], 5000.0))
    gammas = [0.0, 1.0]
    check_against_reference(saturated, target, gammas, estimator=estimator, near_cuts=False)
    mixed = torch.cat([saturated[:30], z[30:]])
    check_against_reference(mixed, target, gammas, estimator=estimator, near_cuts=False)
    # An exact tie of the largest: the first class is the prediction.
    tied = torch.zeros(8, 4, dtype=torch.float64, device=device)
    grid = check_against_reference(tied, torch.arange(8, device=device) % 4, estimator=estimator, near_cuts=False)
    if estimator != "equal_mass_interp":  # there all samples equal the lowest and fall in no bin
        assert (grid.tables["ece"] >= 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_confidence_on_an_edge_belongs_to_the_bin_below(device, estimator):
    # Two classes and gamma = 0: confidences 0.6 and 0.8 up to a rounding, 0.5 and 1 exactly, with 2 bins.
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.5], [0.25, 0.75]], dtype=torch.float64, device=device)
    target = torch.tensor([0, 0, 1, 1], device=device)
    grid = check_against_reference(
        p, target, [0.0], [1.0], estimator=estimator, n_bins=2, input_kind="probs", near_cuts=False
    )
    if estimator == "equal_width":
        # (0, 0.5]: correct and wrong at 0.5; (0.5, 1]: correct at 1 and at 0.75.
        assert grid.tables["ece"].item() == pytest.approx(0.5 * 0.125)
        assert grid.tables["mce"].item() == pytest.approx(0.125)


def test_ignored_rows_are_dropped(device):
    z, target = samples(90, 6, device=device)
    target[::7] = -100
    z[0] = math.nan  # never read
    for estimator in ESTIMATORS:
        grid = check_against_reference(z, target, estimator=estimator)
    keep = target != -100
    kept = fk.calibration_grid(z[keep], target[keep], GAMMAS, TEMPERATURES, criteria=CRITERIA, estimator=estimator)
    for name in CRITERIA:
        assert torch.equal(grid.tables[name], kept.tables[name])
    check_against_reference(z[1:], target[1:].clamp(min=0), ignore_index=2)


def test_probabilities(device):
    z, target = samples(120, 5, device=device)
    p = z.softmax(-1)
    check_against_reference(p, target, input_kind="probs")
    from_logits = fk.calibration_grid(z, target, GAMMAS, TEMPERATURES, criteria=CRITERIA)
    from_probs = fk.calibration_grid(p * 1.0005, target, GAMMAS, TEMPERATURES, criteria=CRITERIA, input_kind="probs")
    for name in CRITERIA:
        torch.testing.assert_close(from_probs.tables[name], from_logits.tables[name], rtol=1e-9, atol=1e-9)


def test_absent_classes(device):
    z, target = samples(80, 5, device=device)
    z[::3, 4] = -math.inf
    target[::3] = target[::3].clamp(max=3)
    check_against_reference(z, target)
    # A target with probability 0: the NLL of every cell is infinite, and the other criteria are as before.
    target[0] = 4
    grid = check_against_reference(z, target)
    assert (grid.tables["nll"] == math.inf).all()
    assert grid.tables["brier"].isfinite().all()
    with pytest.raises(ValueError, match="nll must be finite"):
        grid.best("nll")


def test_huge_logits(device):
    z, target = samples(60, 4, device=device, scale=3000.0)
    for dtype in (torch.float64, torch.float32):
        grid = fk.calibration_grid(z.to(dtype), target, GAMMAS, TEMPERATURES, criteria=CRITERIA)
        expected = reference.calibration_grid(
            z.to(dtype).double().cpu(), target.cpu(), GAMMAS, TEMPERATURES, criteria=CRITERIA
        )
        for name in ("nll", "brier"):
            torch.testing.assert_close(grid.tables[name].cpu(), expected[name], rtol=1e-6, atol=1e-6)
        assert all(grid.tables[name].isfinite().all() for name in CRITERIA)


# 1 / G(1/2) is 2^gamma: beyond float32 from gamma = 128, its square from 64, and beyond float64 from 1024.
@pytest.mark.parametrize("gamma", [33.0, 70.0, 140.0, 1000.0, 1e6, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_classes", [5, 100])
def test_huge_gammas(device, gamma, dtype, n_classes):
    z, target = samples(100, n_classes, device=device)
    for estimator in ("equal_width", "equal_mass", "equal_mass_interp"):
        # The last row has only ties, where a large gamma amplifies rounding errors.
        grid = fk.calibration_grid(
            torch.cat([z, torch.zeros_like(z[:1])]).to(dtype),
            torch.cat([target, target[:1] * 0 + 1]),
            [0.0, 0.5, gamma],
            [0.1, 1.0, 7.0],
            criteria=("ece", "mce", "nll", "brier"),
            estimator=estimator,
        )
        assert all(table.isfinite().all() for table in grid.tables.values())
        assert bool((grid.tables["ece"] <= 1).all())
    temperatures = [0.1, 1.0, 7.0]
    grid = fk.calibration_grid(z.to(dtype), target, [gamma], temperatures, criteria=("nll", "brier"))
    relative = 1e-5 if dtype == torch.float32 else 1e-12
    for index, temperature in enumerate(temperatures):
        log_p = fk.focal_calibration_map(z.to(dtype).double(), gamma, temperature, log=True)
        nll = float(-log_p.gather(1, target.unsqueeze(1)).mean())
        brier = float((log_p.exp() - F.one_hot(target, n_classes)).square().sum(1).mean())
        assert float(grid.tables["nll"][0, index]) == pytest.approx(nll, rel=relative)
        assert float(grid.tables["brier"][0, index]) == pytest.approx(brier, rel=relative)


def test_gamma_0_is_plain_temperature_scaling(device):
    z, target = samples(500, 10, device=device)
    temperatures = [0.5, 1.0, 1.7, 4.0]
    grid = fk.calibration_grid(z, target, [0.0], temperatures, criteria=CRITERIA, estimator="equal_width")
    for j, temperature in enumerate(temperatures):
        log_p = torch.log_softmax(z / temperature, -1)
        p = log_p.exp()
        confidence, predicted = p.max(-1)
        ece, mce = reference.calibration_error(confidence, predicted == target, 15, "equal_width")
        expected = {
            "nll": F.nll_loss(log_p, target).item(),
            "brier": (p - F.one_hot(target, 10)).square().sum(-1).mean().item(),
            "ece": ece,
            "mce": mce,
        }
        for name, value in expected.items():
            assert grid.tables[name][0, j].item() == pytest.approx(value, rel=1e-9, abs=1e-9)


def test_correctness_follows_the_input_where_the_output_ties(device):
    # At T = 0.01 both classes of every row saturate in float32, or tie at gamma near -1; the input decides.
    z = torch.tensor([[1e-6, 0.0], [0.0, 1e-6]] * 10, device=device)
    target = torch.tensor([0, 1] * 10, device=device)
    grid = fk.calibration_grid(z, target, [0.0, -0.9], [100.0], n_bins=1)
    # All correct, at a confidence of 0.5.
    assert grid.tables["ece"].flatten().tolist() == pytest.approx([0.5, 0.5], abs=1e-6)


# ---- properties -----------------------------------------------------------------------------------------------------


@st.composite
def small_sets(draw):
    n, c = draw(st.integers(1, 25)), draw(st.integers(2, 5))
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, c, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.5, 3.0, 20.0]))
    return z, torch.randint(c, (n,), generator=generator)


@PROPERTY
@given(small_sets(), st.sampled_from(ESTIMATORS), st.integers(1, 20))
def test_property_errors_are_fractions_and_mce_bounds_ece(data, estimator, n_bins):
    z, target = data
    grid = fk.calibration_grid(z, target, GAMMAS, TEMPERATURES, criteria=CRITERIA, estimator=estimator, n_bins=n_bins)
    ece, mce = grid.tables["ece"], grid.tables["mce"]
    assert (ece >= 0).all()
    assert (ece <= mce + 1e-12).all()
    assert (mce <= 1).all()
    assert ((grid.tables["brier"] >= 0) & (grid.tables["brier"] <= 2)).all()
    assert (grid.tables["nll"] >= 0).all()


@PROPERTY
@given(small_sets(), st.integers(-64, 64), st.data())
def test_property_order_of_rows_and_shifts_change_nothing(data, eighths, draw):
    z, target = data
    options = {"criteria": CRITERIA, "estimator": "equal_width"}
    expected = fk.calibration_grid(z, target, GAMMAS, TEMPERATURES, **options)
    order = draw.draw(st.permutations(range(len(z))))
    shuffled = fk.calibration_grid(z[order], target[order], GAMMAS, TEMPERATURES, **options)
    shifted = fk.calibration_grid(z + eighths / 8, target, GAMMAS, TEMPERATURES, **options)
    for name in CRITERIA:
        torch.testing.assert_close(shuffled.tables[name], expected.tables[name], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(shifted.tables["nll"], expected.tables["nll"], rtol=1e-9, atol=1e-9)


@PROPERTY
@given(small_sets())
def test_property_one_bin_is_the_gap_of_the_means(data):
    z, target = data
    grid = fk.calibration_grid(z, target, GAMMAS, TEMPERATURES, criteria=("ece", "mce"), n_bins=1)
    accuracy = (z.argmax(-1) == target).double().mean()
    for i, gamma in enumerate(GAMMAS):
        for j, temperature in enumerate(TEMPERATURES):
            gap = (reference.focal_calibration_map(z, gamma, temperature).max(-1).values.mean() - accuracy).abs()
            assert grid.tables["ece"][i, j].item() == pytest.approx(gap.item(), abs=1e-12)
            assert grid.tables["mce"][i, j].item() == pytest.approx(gap.item(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_probabilities_may_miss_a_sum_of_1_by_their_rounding(device, dtype):
    # Ten times 0.1 in bfloat16 is 1.00098; with a thousand classes the rounding errors of the entries add up.
    logits = torch.randn(50, 1000, device=device)
    probs = logits.softmax(1).to(dtype)
    assert (probs.double().sum(1) - 1).abs().max() > 1e-5
    target = torch.randint(1000, (50,), device=device)
    table = fk.calibration_grid(probs, target, [0.0], [1.0], input_kind="probs", criteria=("nll",)).tables["nll"]
    expected = -(probs.double() / probs.double().sum(1, keepdim=True)).log().gather(1, target[:, None]).mean()
    torch.testing.assert_close(table[0, 0], expected, rtol=1e-5, atol=0)
    fully_off = (1.01 * logits.softmax(1)).to(dtype)
    with pytest.raises(ValueError, match="sum to 1 within"):
        fk.calibration_grid(fully_off, target, [0.0], [1.0], input_kind="probs")
