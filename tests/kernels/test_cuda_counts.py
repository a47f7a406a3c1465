"""Counting machine instructions: the reader of executed instructions, and the committed table."""

import pytest

counts = pytest.importorskip("tools.cuda.instruction_counts", reason="the benchmarks are in the source tree only")
counting = pytest.importorskip("tools.cuda.counting", reason="the benchmarks are in the source tree only")
operators = pytest.importorskip("tools.cuda.counted_operators", reason="the benchmarks are in the source tree only")

CODE = [  # warps, lanes, text
    (8, 256, "LDG.E.128 R4, desc[UR4][R2.64]"),
    (8, 256, "FADD R4, R4, R5"),
    (8, 128, "@P0 MUFU.EX2 R4, R4"),
    (8, 256, "BSSY B0, 0x120"),
    (4, 128, "@!P1 DADD R6, R6, R8"),
    (4, 128, "STG.E desc[UR4][R2.64], R4"),
]


def test_counts_by_element():
    found = counting.count(CODE, elements=256, moved=1024)
    assert found["instructions"] == 40 * 32 / 256
    assert (found["float64"], found["regions"], found["special"]) == (0.5, 1, 1)
    assert found["wide"] == round(256 * 16 / (256 * 16 + 128 * 4), 2)
    assert found["bound"] == "memory"  # 8 loads of four 16-byte words each, and 4 stores


def test_names_of_kernels():
    name = "_ZN9focalkern4cuda46_GLOBAL__N__25focal_loss_forward_kernelINS_8BFloat16ELNS0_7RowPathE1EEEvNS"
    assert counting.short(name) == "focal_loss_forward rows"
    assert counting.pipe("@P0 IMAD.WIDE R2, R3, 0x4, R4") == "imad"
    assert counting.pipe("UIADD3 UR4, UR4, 0x1, URZ") == "uniform"
    assert counting.pipe("LDCU.64 UR4, c[0x0][0x358]") == counting.pipe("@P0 VOTEU.ANY UR5, UPT, PT") == "uniform"


def test_table_is_whole_and_passes_its_own_check():
    table = counts.read(counts.TABLE)
    assert counts.problems(table, table) == []
    cases = {row.case for row in table}
    assert {f"{kind} {'x'.join(map(str, shape))}" for kind, shape, _ in operators.FOCAL_LOSS} <= cases
    assert len([case for case in cases if case.startswith("sigmoid")]) == len(operators.SIGMOID_LOSS)
    assert counts.TABLE.read_text() == counts.as_csv(table)


# Counts on sm_90 without compensated sums; these cost at most 5 % more.
PLAIN_SUMS = {
    "brier float32 16896x1000": 27.09,
    "focal float32 16896x1000 smooth": 42.16,
    "focal float32 135168x10 smooth": 93.83,
}


def test_compensated_sums_cost_a_twentieth():
    forward = ("_forward", "_forward_registers", "_forward_tile")
    found = {row.case: row.instructions for row in counts.read(counts.TABLE) if row.kernel.endswith(forward)}
    for case, before in PLAIN_SUMS.items():
        assert found[case] <= 1.05 * before, case


def test_table_of_sm_100_has_the_same_kernels_and_judges_no_pipe():
    table = counts.read(counts.TABLES["100"])
    assert counts.problems(table, table) == []
    assert {(row.case, row.kernel) for row in table} == {(row.case, row.kernel) for row in counts.read(counts.TABLE)}
    assert {(row.bound, row.pipes, row.cycles) for row in table} == {("", None, None)}
    assert counts.TABLES["100"].read_text() == counts.as_csv(table)


def test_counts_of_another_architecture_have_no_pipes(monkeypatch, tmp_path):
    (row, *_) = counts.read(counts.TABLE)
    monkeypatch.setattr(counts, "load", lambda folder, arch: None)
    monkeypatch.setattr(counts, "all_counts", lambda *_: iter([row]))
    assert list(counts.counts(tmp_path)) == [row]
    (other,) = counts.counts(tmp_path, arch="100")
    assert (other.instructions, other.bound, other.pipes) == (row.instructions, "", None)


def test_cycles_are_of_sm_90_alone(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["instruction_counts", "--arch", "100", "--cycles"])
    with pytest.raises(SystemExit):
        counts.main()
    assert "sm_90 alone" in capsys.readouterr().err


def test_more_instructions_are_a_problem():
    (row, *_) = counts.read(counts.TABLE)
    worse = counts.Count(**{**vars(row), "instructions": 1.1 * row.instructions, "wide": 0.1})
    assert len(counts.problems([worse], [row])) == 2
    assert len(counts.problems([row], [])) == 1
