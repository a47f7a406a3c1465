"""The search for only the lowest ECEs, compared with the whole grid."""

import pytest
import torch

from focalkern.files import LogitSet
from focalkern.ops.calibration_grid import PAPER_GAMMAS, PAPER_TEMPERATURES
from focalkern.study.grid_search import scalings_of_grid, search_grid
from focalkern.study.samples import as_samples

_GAMMAS = (0.0, *PAPER_GAMMAS)
_LOWEST_OF = ((0.0,), PAPER_GAMMAS)


def _samples(case: str, n: int = 300, n_classes: int = 4):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(n_classes, (n,), generator=generator)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    logits += 2 * torch.nn.functional.one_hot(labels, n_classes)
    kind = "logits"
    if case == "float32":
        logits = logits.float()
    elif case == "large":  # float32 would lose the differences of the logits
        logits += 1e9
    elif case == "probs":
        logits, kind = logits.softmax(-1), "probs"
    elif case == "ties":  # every confidence is 1 up to T = 5, so all cells have the same ECE
        logits = (
            1e6 * torch.nn.functional.one_hot((labels + (torch.arange(n) % 5 == 0)) % n_classes, n_classes).double()
        )
    elif case == "impossible":
        logits[torch.arange(n), (labels + 1) % n_classes] = -torch.inf
    elif case == "hundreds":
        logits *= 300
    return as_samples(LogitSet(logits, labels, kind, "val", "rows.npz"))


@pytest.mark.parametrize("case", ["float64", "float32", "large", "probs", "ties", "impossible", "hundreds"])
@pytest.mark.parametrize("estimator", ["equal_mass", "equal_width", "equal_mass_interp"])
def test_the_lowest_cells_are_those_of_the_whole_grid(case, estimator):
    samples = _samples(case)
    options = {"n_bins": 15, "estimator": estimator}
    whole = search_grid(samples, _GAMMAS, PAPER_TEMPERATURES, **options).grid
    part = search_grid(samples, _GAMMAS, PAPER_TEMPERATURES, lowest_of=_LOWEST_OF, **options).grid
    finite = part.tables["ece"].isfinite()
    assert torch.equal(part.tables["ece"][finite], whole.tables["ece"][finite])
    for one in (PAPER_GAMMAS, _GAMMAS):  # focal temperature scaling, without gamma = 0 and with it
        expected, found = (scalings_of_grid(grid, one, "ece", samples) for grid in (whole, part))
        for method, scaling in expected.items():
            ours = found[method]
            for name in ("gamma_", "temperature_", "best_value_", "n_cells_", "at_border_"):
                assert getattr(ours, name) == getattr(scaling, name), (method, name)


def test_most_cells_are_left_out():
    part = search_grid(
        _samples("float32", 2000), _GAMMAS, PAPER_TEMPERATURES, n_bins=15, estimator="equal_mass", lowest_of=_LOWEST_OF
    )
    assert 10 <= int(part.grid.tables["ece"].isfinite().sum()) < 0.2 * 5000


def test_equal_cells_all_stay():
    part = search_grid(
        _samples("ties"), _GAMMAS, PAPER_TEMPERATURES, n_bins=15, estimator="equal_mass", lowest_of=_LOWEST_OF
    )
    assert bool(part.grid.tables["ece"].isfinite().all())
