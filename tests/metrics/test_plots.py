"""The figures show the data and can be drawn for unusual data."""

import io
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from focalkern import metrics
from focalkern.ops.calibration_grid import PAPER_GAMMAS, PAPER_TEMPERATURES, CalibrationGrid, calibration_grid

scipy_stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
plots = pytest.importorskip("focalkern.plots", reason="matplotlib is not installed", exc_type=ImportError)


def png(figure):
    """The bytes of the drawn figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=50)
    data = buffer.getvalue()
    assert data.startswith(b"\x89PNG")
    return data


def texts(figure):
    """All texts of the figure."""
    from matplotlib.text import Text

    png(figure)
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def some_bins(estimator="equal_width", n=500, n_bins=15):
    confidence = torch.rand(n, dtype=torch.float64) * 0.6 + 0.4
    return metrics.reliability_bins(
        confidence=confidence, correct=torch.rand(n) < confidence, estimator=estimator, n_bins=n_bins
    )


def some_grid(table, gammas=(0.0, 1.0, -0.5), temperatures=(0.5, 1.0, 1.5, 2.0), criterion="ece"):
    return CalibrationGrid(
        gammas=torch.tensor(gammas, dtype=torch.float64),
        temperatures=torch.tensor(temperatures, dtype=torch.float64),
        tables={criterion: torch.tensor(table, dtype=torch.float64)},
        n_bins=15,
        estimator="equal_mass",
    )


TABLE = [[0.4, 0.2, 0.3, 0.5], [0.6, 0.5, 0.1, 0.2], [0.05, 0.2, 0.4, 0.8]]


@pytest.mark.parametrize("estimator", metrics.ESTIMATORS)
def test_a_diagram_shows_the_figures_of_its_bins(estimator):
    bins = some_bins(estimator)
    written = texts(plots.reliability_diagram(bins, title="A heading"))
    ece = float((bins.weight * bins.gap.abs()).nansum())
    assert f"ECE {ece:.4f} ({estimator}, {bins.n_bins} bins)" in written
    assert "500 samples" in written
    assert "A heading" in written
    assert "perfect calibration" in written


def test_long_headings_stay_within_the_figure():
    long = "vit_large_patch16_224.augreg_in21k_ft_in1k on ImageNet, with a name that goes on and on"
    confidence = torch.linspace(0.1, 1, 50)
    curve = metrics.risk_coverage(confidence=confidence, correct=confidence > 0.5)
    for figure in (
        plots.reliability_diagram(some_bins(), title=long),
        plots.reliability_diagram({long: some_bins(), f"{long}!": some_bins(), "third": some_bins()}, title=long),
        plots.risk_coverage(curve, title=long),
        plots.grid_heatmap(some_grid(TABLE), title=long),
        plots.ridge_diagram(some_grid(TABLE), title=long),
    ):
        figure.canvas.draw()
        headings = [text for text in (figure._suptitle, *(axes.title for axes in figure.axes)) if text is not None]
        boxes = [text.get_window_extent() for text in headings if "vit" in text.get_text()]
        assert boxes and all(0 <= box.x0 < box.x1 <= figure.bbox.x1 for box in boxes)
        assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)


def test_the_bars_are_the_accuracies_at_the_bins():
    bins = some_bins(n_bins=5)
    figure = plots.reliability_diagram(bins)
    bars = figure.axes[0].containers[0]
    filled = bins.count > 0
    assert [bar.get_height() for bar in bars] == pytest.approx(bins.accuracy[filled].tolist())
    assert [bar.get_x() for bar in bars] == pytest.approx(bins.lower[filled].tolist())
    gaps = figure.axes[0].containers[1]
    assert [bar.get_height() for bar in gaps] == pytest.approx(bins.gap[filled].abs().tolist())
    shares = figure.axes[1].containers[0]
    assert sum(bar.get_height() for bar in shares) == pytest.approx(1.0)


def test_a_notebook_shows_the_picture_without_pyplot():
    """In a separate interpreter, as in a notebook: nothing has imported pyplot."""
    code = """
import sys, torch
from focalkern import metrics, plots

bins = metrics.reliability_bins(confidence=torch.rand(50, dtype=torch.float64), correct=torch.rand(50) < 0.5)
picture = plots.reliability_diagram(bins)._repr_png_()
assert picture.startswith(bytes([137]) + b"PNG"), picture[:8]
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_several_panels_share_their_axes():
    figure = plots.reliability_diagram({"before": some_bins(), "after": some_bins("equal_mass")})
    written = texts(figure)
    assert "before" in written
    assert "after" in written
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_many_panels_are_wrapped_and_none_is_left_empty():
    figure = plots.reliability_diagram({str(index): some_bins() for index in range(5)})
    assert len(figure.axes) == 10
    width, height = figure.get_size_inches()
    assert width < 13
    assert height > width / 2
    tops = [axes for axes in figure.axes if axes.get_title()]
    assert {axes.get_ylim() for axes in tops} == {(0.0, 1.0)}


def test_the_largest_gap_is_not_that_of_a_single_sample():
    confidence = torch.cat([torch.full((1,), 0.1), torch.full((25,), 0.95)])
    correct = torch.ones(26)
    written = texts(plots.reliability_diagram(metrics.reliability_bins(confidence=confidence, correct=correct)))
    assert "26 samples; largest gap 0.0500 (bins of 20 or more)" in written
    few = metrics.reliability_bins(confidence=confidence[:3], correct=correct[:3])
    assert "3 samples; no bin has 20" in texts(plots.reliability_diagram(few))


# One sample; everything at 1; more bins than samples.
@pytest.mark.parametrize("confidence", [[0.5], [1.0, 1.0, 1.0], [0.0, 1.0]])
@pytest.mark.parametrize("estimator", metrics.ESTIMATORS)
def test_a_diagram_of_awkward_bins_can_be_drawn(confidence, estimator):
    bins = metrics.reliability_bins(
        confidence=torch.tensor(confidence), correct=torch.ones(len(confidence)), estimator=estimator
    )
    png(plots.reliability_diagram(bins))


# One sample, or equal confidences: equal_mass_interp has its lowest edge there and leaves all of them out.
@pytest.mark.parametrize("confidence", [[0.5], [0.7] * 30])
@pytest.mark.parametrize("level", [None, 0.95])
def test_a_panel_of_empty_bins_keeps_its_size_and_says_so(confidence, level):
    bins = metrics.reliability_bins(
        confidence=torch.tensor(confidence), correct=torch.ones(len(confidence)), estimator="equal_mass_interp"
    )
    assert bins.count.sum() == 0
    figure = plots.reliability_diagram({"before": some_bins("equal_mass"), "after": bins}, level=level)
    written = texts(figure)
    assert "every bin is empty" in written
    assert "nan" not in written
    heights = [axes.get_position().height for axes in figure.axes]
    assert heights[0] == pytest.approx(heights[1]) and heights[0] > 0.4
    alone = plots.reliability_diagram(bins, level=level)
    png(alone)
    assert alone.axes[0].get_position().height > 0.4


def test_bad_bins_are_refused():
    with pytest.raises(ValueError, match="at least one set of bins, got none"):
        plots.reliability_diagram({})
    with pytest.raises(ValueError, match="at least one sample, got none"):
        plots.reliability_diagram(metrics.reliability_bins(confidence=torch.empty(0), correct=torch.empty(0)))
    batch = metrics.reliability_bins(confidence=torch.rand(2, 9), correct=torch.ones(2, 9))
    with pytest.raises(ValueError, match=r"bins must be \[n_bins\], got shape \[2, 15\]"):
        plots.reliability_diagram(batch)


def by_hand(bins, level=0.95):
    """The bands by their definitions: exact binomial quantiles, and N rows drawn one by one."""
    count, accuracy, confidence = bins.count.numpy(), bins.accuracy.numpy(), bins.confidence.numpy()
    tail = (1 - level) / 2
    calibrated = np.array(
        [scipy_stats.binom.ppf((tail, 1 - tail), n, c) / n for n, c in zip(count, confidence, strict=True)]
    )
    labels = np.repeat(np.arange(len(count)), count)
    right = np.concatenate([np.arange(n) < round(n * a) for n, a in zip(count, accuracy, strict=True)])
    rng = np.random.default_rng(1)
    resampled = []
    for _ in range(2000):
        rows = rng.integers(len(labels), size=len(labels))
        drawn = np.bincount(labels[rows], minlength=len(count))
        resampled.append(np.bincount(labels[rows], weights=right[rows], minlength=len(count)) / drawn)
    return np.quantile(resampled, (tail, 1 - tail), axis=0).T, calibrated


@pytest.mark.parametrize("level", [0.95, 0.5])
def test_the_bands_are_the_quantiles_of_their_level(level):
    bins = some_bins(n=2000, n_bins=5, estimator="equal_mass")
    bands = plots.reliability_bands(bins, level=level, replicates=4000)
    interval, calibrated = by_hand(bins, level)
    # 400 samples per bin, so steps of 1/400; the first comparison draws both bands.
    assert torch.stack([bands.lower, bands.upper], 1).numpy() == pytest.approx(interval, abs=0.012)
    found = torch.stack([bands.calibrated_lower, bands.calibrated_upper], 1).numpy()
    assert found == pytest.approx(calibrated, abs=2.01 / 400)
    inside = (bins.accuracy >= bands.calibrated_lower) & (bins.accuracy <= bands.calibrated_upper)
    assert torch.equal(bands.inside(bins), inside)


def test_a_calibrated_classifier_is_inside_its_band_and_an_overconfident_one_is_not():
    confidence = torch.rand(40, 3000, dtype=torch.float64) * 0.8
    correct = torch.rand(40, 3000, dtype=torch.float64) < confidence
    share = []
    for row, hits in zip(confidence, correct, strict=True):
        bins = metrics.reliability_bins(confidence=row, correct=hits, n_bins=10)
        share.append(plots.reliability_bands(bins, replicates=500).inside(bins)[bins.count > 0].double().mean())
        over = metrics.reliability_bins(confidence=row + 0.2, correct=hits, n_bins=10)
        assert not plots.reliability_bands(over, replicates=500).inside(over)[over.count > 100].any()
    # 95 % of 320 bins, and slightly more where the binomial distribution is coarse.
    assert 0.93 <= float(torch.stack(share).mean()) <= 0.985


def test_bands_of_awkward_bins():
    one_and_empty = metrics.reliability_bins(confidence=torch.tensor([0.5]), correct=torch.tensor([1.0]), n_bins=3)
    bands = plots.reliability_bands(one_and_empty)
    assert bands.lower.isnan().tolist() == [True, False, True]
    assert (bands.lower[1], bands.upper[1]) == (1, 1)
    assert (bands.calibrated_lower[1], bands.calibrated_upper[1]) == (0, 1)
    assert bands.inside(one_and_empty).tolist() == [False, True, False]
    # equal_mass_interp may leave every sample out of its bins.
    none = metrics.reliability_bins(
        confidence=torch.tensor([0.5]), correct=torch.ones(1), estimator="equal_mass_interp"
    )
    assert plots.reliability_bands(none).lower.isnan().all()
    with pytest.raises(ValueError, match="level must be between 0 and 1, got 95"):
        plots.reliability_bands(one_and_empty, level=95)
    with pytest.raises(ValueError, match="replicates must be at least 1, got 0"):
        plots.reliability_bands(one_and_empty, replicates=0)
    empty = metrics.reliability_bins(confidence=torch.empty(0), correct=torch.empty(0))
    with pytest.raises(ValueError, match="reliability_bands: bins must hold at least one sample"):
        plots.reliability_bands(empty)


def test_a_diagram_has_its_bands_unless_they_are_not_wanted():
    assert "if calibrated (90 %)" in texts(plots.reliability_diagram(some_bins(), level=0.9))
    assert "if calibrated" not in texts(plots.reliability_diagram(some_bins(), level=None))


def test_the_ridge_and_its_line():
    # T* = 0.5 gamma + 1, one optimum at the border, one gamma without a finite cell.
    gammas, temperatures = (2.0, 0.0, 1.0, 9.0, -1.0 / 2), torch.arange(0.25, 3.01, 0.25)
    optimum = torch.tensor([2.0, 1.0, 1.5, 3.0, 0.75])
    table = (temperatures - optimum[:, None]).abs() + 0.1
    table = torch.cat([table, torch.full_like(table[:1], math.inf)])
    grid = some_grid(table.tolist(), (*gammas, 5.0), temperatures.tolist())
    ridge = plots.fit_ridge(grid)
    assert ridge.gammas.tolist() == [-0.5, 0.0, 1.0, 2.0, 9.0]
    assert ridge.temperatures.tolist() == [0.75, 1.0, 1.5, 2.0, 3.0]
    assert ridge.at_border.tolist() == [False, False, False, False, True]
    assert ridge.values.tolist() == pytest.approx([0.1] * 5)
    assert (ridge.slope, ridge.intercept, ridge.r_squared) == pytest.approx((0.5, 1.0, 1.0))
    assert ridge.line(4.0) == pytest.approx(3.0)
    written = texts(plots.ridge_diagram(grid))
    assert "T = 0.5 gamma + 1, R\u00b2 = 1.000" in written
    assert "at the border of the grid: not in the fit" in written


def test_no_text_is_cut_at_the_edge():
    # Long equations and a long estimator name, as in every map of the paper's size.
    ridges = some_grid(TABLE)
    grid = CalibrationGrid(
        ridges.gammas, ridges.temperatures, dict.fromkeys(("ece", "nll", "brier"), ridges.tables["ece"]), 15,
        "equal_mass_interp",
    )  # fmt: skip
    for figure in (plots.ridge_diagram(grid), plots.grid_heatmap(grid), plots.reliability_diagram(some_bins())):
        png(figure)
        page = figure.get_window_extent()
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert page.x0 <= box.x0 < box.x1 <= page.x1
            assert page.y0 <= box.y0 < box.y1 <= page.y1


def test_a_noisy_ridge_is_fitted_as_polyfit_does():
    x = torch.rand(12, dtype=torch.float64)
    temperatures = torch.arange(1, 101, dtype=torch.float64) / 20
    optimum = ((1 + 2 * x + 0.3 * torch.randn(12, dtype=torch.float64)) * 20).round().clamp(2, 99) / 20
    grid = some_grid((temperatures - optimum[:, None]).square().tolist(), x.tolist(), temperatures.tolist())
    ridge = plots.fit_ridge(grid)
    assert (ridge.slope, ridge.intercept) == pytest.approx(tuple(np.polyfit(x.numpy(), optimum.numpy(), 1)))
    assert ridge.r_squared == pytest.approx(float(torch.corrcoef(torch.stack([x, optimum]))[0, 1]) ** 2)


def test_a_ridge_of_one_gamma_has_no_line():
    ridge = plots.fit_ridge(some_grid([[0.3, 0.2, 0.4]], [1.0], [1.0, 2.0, 3.0]))
    assert math.isnan(ridge.slope) and ridge.temperatures.tolist() == [2.0]
    with pytest.raises(ValueError, match="fit_ridge: criterion must be one of ece, got 'nll'"):
        plots.fit_ridge(some_grid(TABLE), "nll")
    with pytest.raises(ValueError, match="must have a finite cell, got none"):
        plots.ridge_diagram(some_grid([[math.inf]], [1.0], [1.0]))


def test_a_map_marks_the_best_temperature_of_every_gamma_and_the_best_of_all():
    figure = plots.grid_heatmap(some_grid(TABLE))
    fit, dots, star = figure.axes[0].lines
    # Rows ascend with gamma: -0.5, 0, 1.
    assert list(zip(dots.get_xdata(), dots.get_ydata(), strict=True)) == [(0.5, 0), (1.0, 1), (1.5, 2)]
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([0.5], [0])
    # The optimum at T = 0.5 is at the border, so the fit uses only the other two: T = 0.5 gamma + 1.
    assert list(zip(fit.get_xdata(), fit.get_ydata(), strict=True)) == [(1.0, 1), (1.5, 2)]
    written = texts(figure)
    assert "fit: T = 0.5 gamma + 1" in written
    assert "best of all: gamma = -0.5, T = 0.5" in written
    assert "0.1000 at T = 1.5" in written
    assert "0  (T alone)" in written
    assert "ECE (equal_mass, 15 bins)" in written


def test_a_map_leaves_cells_that_are_not_finite_blank():
    table = [[math.inf] * 4, [0.6, math.nan, 0.1, math.inf], [0.05, 0.2, 0.4, 0.8]]
    figure = plots.grid_heatmap(some_grid(table, criterion="nll"), "nll")
    assert "NLL over gamma and T" in texts(figure)
    dots, _ = figure.axes[0].lines  # one optimum inside the grid: no line through it
    assert len(dots.get_xdata()) == 2


# All cells equal; an exact zero, which has no logarithm; one cell; one row; a range of many decades.
@pytest.mark.parametrize(
    ("table", "gammas", "temperatures"),
    [
        ([[0.2, 0.2]], [0.0], [1.0, 2.0]),
        ([[0.0, 0.2]], [0.0], [1.0, 2.0]),
        ([[0.0]], [0.0], [1.0]),
        ([[0.3], [0.2]], [0.0, 1.0], [1.0]),
        ([[1e-9, 1.0, 1e9]], [0.0], [1.0, 2.0, 3.0]),
    ],
)
def test_a_map_of_awkward_values_can_be_drawn(table, gammas, temperatures):
    png(plots.grid_heatmap(some_grid(table, gammas, temperatures)))


@pytest.mark.parametrize("criterion", ["nll", "brier"])
def test_a_map_of_rows_that_are_all_right_has_more_than_two_colours(criterion):
    """The scores fall to 0 with T: colours for small multiples of the lowest would leave one for all temperatures."""
    labels = torch.arange(500) % 5
    logits = 6 * torch.nn.functional.one_hot(labels, 5) + 0.5 * torch.randn(500, 5, dtype=torch.float64)
    temperatures = torch.linspace(0.01, 5, 100)
    grid = calibration_grid(logits, labels, gammas=[0.0, 1.0], temperatures=temperatures, criteria=(criterion,))
    table = grid.tables[criterion].numpy()
    low, high, top = plots.colour_range(table, criterion)
    assert float(table[table > 0].min()) < 1e-9 < low < high < top
    assert ((table > low) & (table < high)).mean() > 0.05
    png(plots.grid_heatmap(grid, criterion))


def test_a_map_of_the_papers_size_can_be_drawn():
    table = torch.rand(len(PAPER_GAMMAS), len(PAPER_TEMPERATURES)).tolist()
    png(plots.grid_heatmap(some_grid(table, PAPER_GAMMAS, PAPER_TEMPERATURES)))


def test_a_criterion_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="nll"):
        plots.grid_heatmap(some_grid(TABLE), "nll")


def test_no_figure_belongs_to_pyplot():
    code = "import focalkern.plots, sys; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_curve_of_spline_scaling_is_what_it_does_to_two_classes():
    from focalkern.calibrators import SplineScaling, TemperatureScaling
    from focalkern.calibrators._spline_shown import describe_curve, shown_curve

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2000, 2, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((logits / 2).softmax(-1), 1, generator=generator).squeeze(1)
    calibrator = SplineScaling().fit(logits, labels)
    figure = plots.calibration_curve(calibrator, title="A curve")
    assert "focal map, gamma = 3" in texts(figure)
    shown = shown_curve(calibrator)
    # Two classes, with q after the temperature; the floor causes the difference.
    pairs = torch.from_numpy(np.stack([1 - shown.confidence, shown.confidence], -1)).log() * calibrator.temperature_
    found = calibrator.predict_proba(pairs)[:, 1].numpy()
    assert shown.calibrated == pytest.approx(found, abs=1e-4)
    assert (shown.lower <= shown.calibrated).all() and (shown.calibrated <= shown.upper).all()
    assert describe_curve(calibrator).startswith("For two classes, after temperature scaling, ")
    calibrator.values_, calibrator.slope_ = calibrator.values_ * 0, 0.0
    assert "leaves every confidence as it is" in describe_curve(calibrator)
    calibrator.slope_ = 0.5
    assert "all confidences are raised" in describe_curve(calibrator)
    with pytest.raises(TypeError, match="calibration_curve: calibrator must be a fitted SplineScaling"):
        plots.calibration_curve(TemperatureScaling())
