"""The figures: that they can be drawn for awkward data, and that what they show is what they were given."""

import io
import math
import subprocess
import sys

import pytest
import torch

from focalkern import metrics
from focalkern.ops.calibration_grid import PAPER_GAMMAS, PAPER_TEMPERATURES, CalibrationGrid

plots = pytest.importorskip("focalkern.plots", reason="matplotlib is not installed", exc_type=ImportError)


def png(figure):
    """The bytes of the figure, drawn for real."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=50)
    data = buffer.getvalue()
    assert data.startswith(b"\x89PNG")
    return data


def texts(figure):
    """Everything that is written in the figure."""
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
    assert f"ECE {ece:.4f} ({estimator})" in written
    assert "500 samples" in written
    assert "A heading" in written
    assert "perfect calibration" in written


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


def test_several_panels_share_their_axes():
    figure = plots.reliability_diagram({"before": some_bins(), "after": some_bins("equal_mass")})
    written = texts(figure)
    assert "before" in written
    assert "after" in written
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


# One sample; everything at 1; more bins than samples.
@pytest.mark.parametrize("confidence", [[0.5], [1.0, 1.0, 1.0], [0.0, 1.0]])
@pytest.mark.parametrize("estimator", metrics.ESTIMATORS)
def test_a_diagram_of_awkward_bins_can_be_drawn(confidence, estimator):
    bins = metrics.reliability_bins(
        confidence=torch.tensor(confidence), correct=torch.ones(len(confidence)), estimator=estimator
    )
    png(plots.reliability_diagram(bins))


def test_bad_bins_are_refused():
    with pytest.raises(ValueError, match="at least one set of bins, got none"):
        plots.reliability_diagram({})
    with pytest.raises(ValueError, match="at least one sample, got none"):
        plots.reliability_diagram(metrics.reliability_bins(confidence=torch.empty(0), correct=torch.empty(0)))
    batch = metrics.reliability_bins(confidence=torch.rand(2, 9), correct=torch.ones(2, 9))
    with pytest.raises(ValueError, match=r"bins must be \[n_bins\], got shape \[2, 15\]"):
        plots.reliability_diagram(batch)


def test_a_map_marks_the_best_temperature_of_every_gamma_and_the_best_of_all():
    figure = plots.grid_heatmap(some_grid(TABLE))
    dots, star = figure.axes[0].lines
    # Rows ascend with gamma: -0.5, 0, 1.
    assert list(zip(dots.get_xdata(), dots.get_ydata(), strict=True)) == [(0.5, 0), (1.0, 1), (1.5, 2)]
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([0.5], [0])
    written = texts(figure)
    assert "best of all: gamma = -0.5, T = 0.5" in written
    assert "0.1000 at T = 1.5" in written
    assert "0  (T alone)" in written
    assert "ECE (equal_mass, 15 bins)" in written


def test_a_map_leaves_cells_that_are_not_finite_blank():
    table = [[math.inf] * 4, [0.6, math.nan, 0.1, math.inf], [0.05, 0.2, 0.4, 0.8]]
    figure = plots.grid_heatmap(some_grid(table, criterion="nll"), "nll")
    assert "NLL over gamma and T" in texts(figure)
    assert len(figure.axes[0].lines[0].get_xdata()) == 2


# All cells equal; a perfect zero, which a logarithm does not have; one cell; one row; a range of many decades.
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


def test_a_map_of_the_papers_size_can_be_drawn():
    table = torch.rand(len(PAPER_GAMMAS), len(PAPER_TEMPERATURES)).tolist()
    png(plots.grid_heatmap(some_grid(table, PAPER_GAMMAS, PAPER_TEMPERATURES)))


def test_a_criterion_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="nll"):
        plots.grid_heatmap(some_grid(TABLE), "nll")


def test_no_figure_belongs_to_pyplot():
    code = "import focalkern.plots, sys; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
