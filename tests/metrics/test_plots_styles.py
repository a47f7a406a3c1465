"""Figures under styles of matplotlib."""

import pytest
import torch
from test_plots import TABLE, plots, png, some_bins, some_grid

from focalkern import metrics

STYLED = {
    "reliability": lambda: plots.reliability_diagram(some_bins(n=200), title="A heading"),
    "points": lambda: plots.reliability_diagram(some_bins("equal_mass", n=200)),
    "grid": lambda: plots.grid_heatmap(some_grid(TABLE), title="A heading"),
    "ridge": lambda: plots.ridge_diagram(some_grid(TABLE)),
    "risk": lambda: plots.risk_coverage(
        metrics.risk_coverage(confidence=torch.linspace(0, 1, 99), correct=torch.arange(99) % 3 > 0)
    ),
}


@pytest.mark.parametrize("name", STYLED)
def test_a_dark_style_leaves_the_page_white(name):
    """Its letters are white, and its axes black."""
    style = pytest.importorskip("matplotlib.style")
    torch.manual_seed(0)
    expected = png(STYLED[name]())
    with style.context("dark_background"):
        torch.manual_seed(0)
        assert png(STYLED[name]()) == expected
