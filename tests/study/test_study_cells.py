"""The cells of the report's map: each has the results of the calibrator with its gamma and T on the reported rows."""

import base64
import json

import numpy as np
import pytest
import torch

from focalkern import metrics
from focalkern.files import LogitSet
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.study.grid_search import GridSearch
from focalkern.study.report import explorer as module
from focalkern.study.report.explorer import Cells, cells_on, payload, subsampled_grid
from focalkern.study.results import Comparison
from focalkern.study.samples import MemorySamples, stream_sets

GAMMAS = torch.tensor([-0.5, 0.0, 2.0], dtype=torch.float64)
TEMPERATURES = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64)


def some_rows(n=300, n_classes=5, kind="logits"):
    logits = torch.randn(n, n_classes) * 3
    labels = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
    rows = LogitSet(logits if kind == "logits" else logits.softmax(-1), labels, kind, "test", "rows.npz")
    return MemorySamples(rows)


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_a_cell_is_what_its_calibrator_does(kind):
    cells = cells_on(some := some_rows(kind=kind), GAMMAS, TEMPERATURES, 15)
    rows = some.memory
    for i, gamma in enumerate(GAMMAS):
        for j, temperature in enumerate(TEMPERATURES):
            log_probs = focal_calibration_map(rows.input.double(), gamma, temperature, input_kind=kind, log=True)
            bins = metrics.reliability_bins(
                confidence=log_probs.amax(-1).exp(), correct=rows.input.argmax(-1) == rows.labels, n_bins=15
            )
            assert cells.count[i, j].tolist() == bins.count.tolist()
            assert cells.correct[i, j].tolist() == (bins.accuracy * bins.count).nan_to_num().round().tolist()
            torch.testing.assert_close(cells.confidence[i, j], (bins.confidence * bins.count).nan_to_num())
            assert float(cells.tables["ece"][i, j]) == pytest.approx(float(metrics.expected_error(bins)))
            assert float(cells.tables["nll"][i, j]) == pytest.approx(
                float(metrics.nll(log_probs, rows.labels, log=True))
            )
            brier = metrics.brier_score(log_probs.exp(), rows.labels)
            assert float(cells.tables["brier"][i, j]) == pytest.approx(float(brier))


def test_streamed_rows_have_the_same_cells(tmp_path):
    rows = some_rows()
    parts = zip(rows.memory.input.split(70), rows.memory.labels.split(70), strict=True)
    for index, (logits, labels) in enumerate(parts):
        np.save(tmp_path / f"logits-{index}.npy", logits.numpy())
        np.save(tmp_path / f"labels-{index}.npy", labels.numpy())
    (streamed,) = stream_sets(str(tmp_path / "logits-*.npy"), labels=None, input_kind=None).values()
    expected, found = (cells_on(one, GAMMAS, TEMPERATURES, 10) for one in (rows, streamed))
    assert found.count.tolist() == expected.count.tolist()
    assert found.correct.tolist() == expected.correct.tolist()
    for name, table in expected.tables.items():
        torch.testing.assert_close(found.tables[name], table)


def a_grid(n_temperatures):
    temperatures = torch.arange(1, n_temperatures + 1, dtype=torch.float64) / 100
    table = torch.zeros(2, n_temperatures, dtype=torch.float64)
    return CalibrationGrid(
        torch.tensor([1.0, 0.0], dtype=torch.float64), temperatures, {"ece": table}, 15, "equal_mass"
    )


def test_a_map_has_every_cell_where_that_costs_little():
    gammas, temperatures, stride = subsampled_grid(a_grid(500), some_rows(), 15, [])
    assert (gammas.tolist(), len(temperatures), stride) == ([0.0, 1.0], 500, 1)


def test_a_map_that_would_cost_much_is_subsampled_but_keeps_what_was_chosen(monkeypatch):
    monkeypatch.setattr(module, "_NUMBERS", 300 * 5 * 100)  # a hundred cells
    _, temperatures, stride = subsampled_grid(a_grid(500), some_rows(), 15, [0.01, 3.33, 7.77])
    assert stride == 10
    assert {0.01, 3.33} <= set(temperatures.tolist())
    assert 50 <= len(temperatures) <= 52
    # At least a sixteenth of the search, for any number of rows.
    monkeypatch.setattr(module, "_NUMBERS", 1)
    assert subsampled_grid(a_grid(512), some_rows(), 15, [])[2] == 16


def test_a_map_is_never_larger_than_its_page_may_be():
    _, temperatures, stride = subsampled_grid(a_grid(100_000), some_rows(n=2), 15, [])
    cells = 2 * len(temperatures)
    assert stride > 1
    assert len(base64.b64encode(bytes(cells * (36 + 10 * 15)))) < 2_000_000


@pytest.mark.parametrize(("n", "dtype"), [(1000, np.uint16), (100_000, np.uint32)])
def test_the_page_keeps_the_counts_and_stays_small(n, dtype):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    grid, rows = a_grid(2500), some_rows(n=2)
    shape = (2, 2500, 15)
    count = torch.randint(n, shape)
    correct = (count * torch.rand(shape)).long()
    mean = (torch.arange(15) + torch.rand(shape, dtype=torch.float64)) / 15
    tables = {name: torch.rand(2, 2500, dtype=torch.float64) for name in module.CRITERIA}
    gammas = grid.gammas.sort().values
    cells = Cells(gammas, grid.temperatures, count, correct, count * mean, tables, n, 1)
    table = torch.zeros(2, 2500)
    search = GridSearch(grid, table, table, torch.zeros_like)
    study = Comparison(some_rows(n=3), rows, search, (), None, None, None, "equal_width", "nll")
    found = payload(study, cells, None)
    assert len(json.dumps(found)) < 1_500_000  # 5000 cells; the pictures of the page have another megabyte

    def unpacked(name, dtype):
        return torch.from_numpy(np.frombuffer(base64.b64decode(found[name]), dtype).astype(np.float64))

    assert unpacked("count", dtype).tolist() == count.flatten().tolist()
    assert unpacked("correct", dtype).tolist() == correct.flatten().tolist()
    bins = torch.arange(15).expand(shape).flatten()
    seen = (count > 0).flatten()
    confidence = (bins + unpacked("confidence", np.uint16) / 65535) / 15
    torch.testing.assert_close(confidence[seen], mean.flatten()[seen], rtol=0, atol=1e-6)
    assert unpacked("nll", np.float64).tolist() == tables["nll"].flatten().tolist()
