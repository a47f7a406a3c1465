"""The benchmark harness: what it refuses to time, and what it writes. No clock is tested."""

import csv

import pytest
import torch

harness = pytest.importorskip("benchmarks.harness", reason="the benchmarks are in the source tree only")


def case(providers):
    return harness.measure(
        op="op",
        case="case",
        n=4,
        classes=2,
        dtype=torch.float32,
        providers=providers,
        bytes_moved=32,
        copy=None,
        seconds=0.0,
    )


def test_a_wrong_provider_is_not_timed():
    def check(found):
        torch.testing.assert_close(found, torch.ones(2))

    with pytest.raises(AssertionError, match="not close"):
        case(
            [
                harness.Provider("right", lambda: torch.ones(2), check=check),
                harness.Provider("wrong", lambda: torch.zeros(2), check=check),
            ]
        )


def test_an_absent_provider_is_listed_and_never_timed():
    rows = case(
        [harness.Provider("here", lambda: torch.ones(2)), harness.Provider("there", None, absent="not installed")]
    )
    assert [row.provider for row in rows] == ["here", "there"]
    assert rows[0].repeats >= 5
    assert rows[0].speedup == 1
    assert rows[1].note == "absent: not installed"
    assert rows[1].repeats == 0
    assert rows[1].median_ms != rows[1].median_ms


def test_rows_are_appended(tmp_path):
    rows = case([harness.Provider("here", lambda: torch.ones(2))])
    (path,) = harness.append_rows(rows, tmp_path)
    before = path.read_text()
    assert harness.append_rows(rows, tmp_path) == [path]
    assert path.read_text().startswith(before)
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["provider"] for row in read] == ["here", "here"]
    assert read[0]["torch"] == torch.__version__


def test_peak_memory_sees_an_allocation():
    peak = harness.peak_extra_mib(lambda: torch.ones(16 * 2**20 // 4))
    assert peak != peak or peak >= 15  # NaN where the system does not tell


def test_recorded_medians_are_over_runs_of_the_last_commit(tmp_path):
    rows = [case([harness.Provider("here", lambda: torch.ones(2))])[0] for _ in range(4)]
    for row, median in zip(rows, (100.0, 1.0, 5.0, 2.0), strict=True):
        row.median_ms = median
    rows[0].commit = "another"
    harness.append_rows(rows, tmp_path)
    assert harness.recorded_medians("op", tmp_path) == {("case", "float32"): {"here": 2.0}}
