"""The benchmark harness: cases that it does not time, and its output. These tests depend on no clock."""

import csv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

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


def test_a_ratio_compares_the_times_of_one_turn(monkeypatch):
    # The machine gets slower in the middle. The ratio of the medians of "even" and "here" would be 2.
    times = {"here": [1.0, 1.0, 2.0, 4.0, 4.0], "there": [3.0, 3.0, 6.0, 12.0, 12.0], "even": [1.0, 1.0, 4.0, 4.0, 4.0]}
    monkeypatch.setattr(harness, "time_in_turns", lambda providers, seconds: times)
    rows = case([harness.Provider(name, lambda: torch.ones(2)) for name in times])
    assert [row.speedup for row in rows] == [1, 3, 1]
    assert [row.median_ms for row in rows] == [2, 6, 4]


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
    assert peak != peak or peak >= 15  # NaN if the system does not report it


def test_recorded_medians_are_over_runs_of_the_last_commit(tmp_path):
    rows = [case([harness.Provider("here", lambda: torch.ones(2))])[0] for _ in range(4)]
    for row, median in zip(rows, (100.0, 1.0, 5.0, 2.0), strict=True):
        row.median_ms = median
    rows[0].commit = "another"
    harness.append_rows(rows, tmp_path)
    assert harness.recorded_medians("op", tmp_path) == {("case", "float32"): {"here": 2.0}}


def test_what_takes_long_is_called_once():
    calls = []
    rows = harness.measure(
        op="op",
        case="case",
        n=1,
        classes=1,
        dtype=torch.float32,
        providers=[harness.Provider("slow", lambda: calls.append(1))],
        bytes_moved=1,
        copy=None,
        seconds=0.0,
        once=True,
    )
    assert len(calls) == rows[0].repeats == 1


def test_page_faults_are_counted():
    # Larger than any block of glibc's heap, so each call gets fresh pages.
    pages = 2**26 // 4096
    assert harness.page_faults(lambda: torch.ones(2**26 // 4)) >= min(pages, 32)  # 32 huge pages at least


def recorded(tmp_path, op, case, n, classes, times):
    rows = []
    for provider, time in times.items():
        slower = time / times["focalkern"]
        rows.append(harness.Row(op, case, n, classes, "float32", provider, median_ms=time, repeats=5, speedup=slower))
    harness.append_rows(rows, tmp_path)


def test_summary_shows_what_was_recorded(tmp_path):
    main = pytest.importorskip("benchmarks.__main__")
    recorded(tmp_path, "op", "forward 4x2", 4, 2, {"focalkern": 2.0, "other": 5.0})
    recorded(tmp_path, "op", "forward 8x2", 8, 2, {"focalkern": 1500.0})
    lines = main.summary("op", tmp_path).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == ["case", "dtype", "focalkern", "other"]
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["forward 4x2", "float32", "2 ms", "2.5 x"]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["forward 8x2", "float32", "1.5 s", ""]


def test_pages_show_what_was_recorded():
    main = pytest.importorskip("benchmarks.__main__")
    evidence = Path(__file__).parents[2] / "docs" / "evidence"
    pages = (evidence / "speed.md").read_text() + (evidence / "missed.md").read_text()
    for table in (
        *(
            main.summary(op, harness.RESULTS)
            for op in ("focal_loss", "soft_targets", "sigmoid_loss", "calibration_map", "calibration_grid")
        ),
        main.targets_summary(harness.RESULTS),
    ):
        assert table.count("\n") > 5 and table in pages


def test_targets_stand_beside_what_was_recorded(tmp_path):
    targets = pytest.importorskip("benchmarks.targets")

    def loss(shape, dtype, own, copy=1.0, **others):
        for provider, time in {"focalkern": own, **others}.items():
            case = f"forward+backward {shape}"
            row = harness.Row("focal_loss", case, 1, 1, dtype, provider, time, repeats=5, speedup=time / own)
            row.ratio_to_copy = copy
            harness.append_rows([row], tmp_path)

    per_sample = {"focalkern, gamma per sample": 2.2}
    loss("65536x10", "float32", 2.0, **per_sample, cross_entropy=10.0, composite=7.0)
    loss("65536x10", "bfloat16", 1.0)
    loss("8192x1000", "float32", 4.0, 1.9, cross_entropy=3.0)
    loss("32x10", "float32", 1.0, cross_entropy=1.5, composite=0.5)
    assert targets.target_lines(tmp_path) == [
        ("focal_loss 65536x10, against composite, the fastest other", ">= 3 x", "3.5 x", True),
        ("focal_loss 8192x1000, against cross_entropy, the fastest other", ">= 2.5 x", "0.75 x", False),
        ("focal_loss, the least favourable of 2 shapes (8192x1000)", ">= 1 x", "0.75 x", False),
        ("focal_loss 32x10, against cross_entropy", ">= 1 x", "1.5 x", True),
        ("focal_loss, gamma per sample, worst of 1 shapes (65536x10)", "<= 1.05 of scalar", "1.1 of scalar", False),
        ("focal_loss 65536x10, bfloat16 against float32", ">= 1.5 x", "2 x", True),
        ("focal_loss 8192x1000", "<= 2 of a copy", "1.9 of a copy", True),
    ]


def test_plots_show_what_was_recorded(tmp_path):
    plots = pytest.importorskip("benchmarks.plots", reason="matplotlib is not installed")
    times = {"focalkern": 2.0, "cross_entropy": 6.0, "a variant without a style": 1.0}
    for n, classes in ((65536, 10), (1000, 100), (4000, 100)):
        recorded(tmp_path, "focal_loss", f"forward+backward {n}x{classes}", n, classes, times)
        recorded(tmp_path, "calibration_map", f"forward+backward {n}x{classes}", n, classes, {"focalkern": 1.0})
        recorded(tmp_path, "calibration_grid", f"4500 cells {n}x{classes}", n, classes, {"focalkern": 1.0})
    recorded(tmp_path, "focal_loss", "forward+backward 2x3, memory kept", 2, 3, times)
    found = plots.series("focal_loss", tmp_path, r"forward\+backward")
    assert found == {
        "focalkern": [(65536, 10, 2.0), (1000, 100, 2.0), (4000, 100, 2.0)],
        "cross_entropy": [(65536, 10, 6.0), (1000, 100, 6.0), (4000, 100, 6.0)],
    }
    assert plots.largest_batches(found["focalkern"]) == [(10, 2e6 / 655360), (100, 2e6 / 400000)]
    for path in plots.draw(tmp_path, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_page_of_the_calibrators_is_that_of_the_rows():
    pages = pytest.importorskip(
        "benchmarks.studies.calibrator_pages", reason="the benchmarks are in the source tree only"
    )
    path = sorted((ROOT / "benchmarks/results").glob("calibrator_table_*.csv"))[-1]
    assert path.with_suffix(".md").read_text() == pages.page(path)
    rows = pages.read(path)
    for n in pages.FEW:  # the goal of the automatic choice: with 100 rows and more it is better on average
        differences = [
            row["vs_auto"] for row in rows if row["calibrator"] == "temperature, robust" and row["n_fit"] == n
        ]
        assert len(differences) == pages.DRAWS * 8
        assert sum(differences) > 0


def test_the_study_of_shift_compares_on_every_source(monkeypatch, tmp_path):
    pytest.importorskip("sklearn")
    shift = pytest.importorskip("benchmarks.studies.shift")
    names = ("temperature", "automatic")
    monkeypatch.setattr(shift, "CALIBRATORS", {name: shift.CALIBRATORS[name] for name in names})
    monkeypatch.setattr(shift, "SIZES", (40,))
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(3, (200,), generator=generator)
    probs = (torch.nn.functional.one_hot(target, 3) + torch.rand(200, 3, generator=generator).double()).softmax(-1)
    probs[:10] = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)  # some labels have probability 0
    same, other = (probs[:100], target[:100]), (probs[100:], target[100:])
    rows = shift.measure(shift.Model("a model", same, {shift.SAME: same, "elsewhere": other}))
    assert [(row["calibrator"], row["source"], row["n_fit"]) for row in rows[:4]] == [
        ("none", shift.SAME, 100),
        ("none", "elsewhere", 100),
        ("temperature", shift.SAME, 100),
        ("temperature", "elsewhere", 100),
    ]
    # Few rows: two draws on the same source only.
    assert [row["source"] for row in rows if row["n_fit"] == 40] == [shift.SAME] * 4
    assert all(row["nll"] < 20 for row in rows)
    of_temperature = [row for row in rows if row["calibrator"] == "temperature"]
    assert all(row["vs_temperature"] == row["vs_temperature_error"] == 0 for row in of_temperature)
    shift.write_rows(tmp_path / "shift_x.csv", (*shift.FIELDS, *shift.PAIRED), rows, shift.about_run())
    drawn = [{**row, "source": shift.CALIBRATED} for row in rows if row["source"] == shift.SAME]
    shift.write_rows(tmp_path / "shift_x.csv", (*shift.FIELDS, *shift.PAIRED), rows + drawn, shift.about_run())
    text = shift.page(tmp_path / "shift_x.csv")
    assert "| elsewhere (1 models)" in text and "| same source, 40 rows" in text
    assert "| calibrated rows, all rows" in text


def test_other_priors_make_the_first_class_nine_times_the_last():
    pytest.importorskip("sklearn")
    small_models = pytest.importorskip("benchmarks.studies.small_models")
    labels = torch.arange(30_000).numpy() % 3
    _, drawn = small_models.other_priors((labels, labels))
    counts = torch.bincount(torch.from_numpy(drawn)).tolist()
    assert counts[0] / counts[2] == pytest.approx(9, rel=0.1)
    assert counts[0] / counts[1] == pytest.approx(3, rel=0.1)


def test_calibrated_rows_are_calibrated():
    pytest.importorskip("sklearn")
    small_models = pytest.importorskip("benchmarks.studies.small_models")
    probs, target = small_models.calibrated(4, 20_000, 0)
    hits = torch.nn.functional.one_hot(target, 4)
    assert (hits - probs).mean(0).abs().max() < 0.015


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the processor time of all processes is in /proc")
def test_the_time_of_the_client_is_measured_without_the_computation(tmp_path):
    """The benchmark replaces the task of a sweep."""
    sweep = pytest.importorskip("benchmarks.sweep")
    found = sweep.measure(sweep.write_files(tmp_path, 4), "1 process", True, "")
    assert (found["measured"], found["networks"]) == ("client", 4)
