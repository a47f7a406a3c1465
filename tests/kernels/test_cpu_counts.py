"""The instruction counts of the CPU kernels: the program that counts, and the table of the documentation."""

import csv
import platform
import shutil
from pathlib import Path

import pytest

counts = pytest.importorskip("tools.cpu.instruction_counts", reason="the benchmarks are in the source tree only")


def test_the_documentation_has_the_recorded_table():
    page = (counts.ROOT / "docs" / "evidence" / "instructions.md").read_text()
    assert counts.summary() in page
    assert counts.soft_summary() in page
    assert counts.soft_summary(counts.of_avx2(counts.SOFT_TABLE)) in page
    assert counts.element_summary() in page
    assert counts.spline_summary() in page


# The most instructions per element of the map of splines: those of its short loops, which take more loads and stores
# than one long loop took, but less time.
MAP_INSTRUCTIONS = {
    (10, "float32"): 21.9,
    (10, "float64"): 51.7,
    (100, "float32"): 18.8,
    (100, "float64"): 35.1,
    (1000, "float32"): 13.4,
    (1000, "float64"): 29.4,
}


def test_the_recorded_map_of_splines_takes_no_more_instructions():
    with counts.SPLINE_TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["classes"]), row["dtype"]) for row in rows] == counts.SPLINE_CASES
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(float(row["forward"]) / float(row["temperature"]), abs=0.01)
        # The map does not become slower.
        assert float(row["forward"]) <= MAP_INSTRUCTIONS[int(row["classes"]), row["dtype"]], row
        # The page says where the ratio is at most 2.
        few = 100 if row["dtype"] == "float32" else 10
        assert (float(row["ratio"]) <= 2) == (int(row["classes"]) <= few), row


def test_the_floor_of_a_long_row_is_that_of_its_elements():
    assert counts.floor(10**9, "float32") == pytest.approx(34 / 16)
    assert counts.floor(10**9, "bfloat16") == pytest.approx(44 / 16)
    # Three transpositions of 28 instructions for sixteen rows and four classes.
    rows = (2 * 22 + 7 * 14) / 16 / 32
    assert counts.floor(32, "float32") == pytest.approx(34 / 16 + 3 * 28 / 64 + rows)
    # Seven vectors, the last with four classes, and two reductions of four rows in 13 instructions each.
    assert counts.floor(100, "float32") == pytest.approx((7 * 34 + 2 * 13 / 4 + rows * 32) / 100)


def most_soft(gamma: str) -> float:
    """The goal for 100 and more classes, forward and backward."""
    return 10 if gamma in ("0", "1", "2", "3") else 16


def test_the_recorded_counts_of_soft_targets_meet_their_goal():
    with counts.SOFT_TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["target"], int(row["classes"]), row["dtype"], row["gamma"]) for row in rows] == counts.SOFT_CASES
    long = [row for row in rows if int(row["classes"]) >= 100 and row["dtype"] == "float32"]
    for row in long:
        assert float(row["both"]) <= most_soft(row["gamma"]), row


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("c++"), reason="steps through x86-64 code")
def test_counts_repeat(tmp_path: Path):
    if "avx512bw" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the floors are those of AVX-512")
    program = counts.build(tmp_path)
    first = counts.count(program, 10, "float32", "number")
    assert first == counts.count(program, 10, "float32", "number")
    assert 1 < first.ratio < 5
    table = counts.count(program, 10, "float32", "table")
    assert table.forward > first.forward
    # The forward pass also computes the part of the gradient that depends on gamma. Counts are rounded to two digits.
    assert table.backward == pytest.approx(first.backward, abs=0.011)
    for gamma in ("3", "1.5"):
        assert counts.count_soft(program, "smoothed", 100, "float32", gamma).both <= most_soft(gamma)
    computed = counts.count_elements(program, "focal", "float32", "dense")
    looked_up = counts.count_elements(program, "focal", "bfloat16", "dense")
    assert 1 < looked_up.forward < computed.forward < 6
    assert 1 < looked_up.backward < computed.backward < 6
