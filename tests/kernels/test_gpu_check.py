"""The stages of the GPU check: a failure, crash or timeout of one does not affect the others.

No GPU is needed.
"""

import argparse
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

gpu_check = pytest.importorskip("benchmarks.gpu_check", reason="the benchmarks are in the source tree only")
gpu_stages = pytest.importorskip("benchmarks.gpu_stages", reason="the benchmarks are in the source tree only")


@pytest.fixture
def arguments(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(out=tmp_path, prebuilt=None, benchmark_seconds=1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(tmp_path / "out")],
        cwd=gpu_check.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == gpu_check.NO_GPU
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_check: torch ") and "no GPU" in line
    assert not (tmp_path / "out").exists()


def test_a_failing_stage_is_a_result(arguments, monkeypatch):
    def finding(_):
        raise gpu_check.StageError("two bits differ")

    def mistake(_):
        raise KeyError("name")

    def fine(_):
        return {"summary": "10 cases"}

    monkeypatch.setattr(gpu_check, "STAGES", {finding: 10, mistake: 10, fine: 10})
    found = {}
    for name in ("finding", "mistake", "fine"):
        assert gpu_check.stage_process(name, arguments) == 0
        found[name] = json.loads((arguments.out / f".{name}.json").read_text())
    assert found["finding"] == {"status": "failed", "summary": "two bits differ"}
    assert found["mistake"] == {"status": "failed", "summary": "KeyError: 'name'"}
    assert found["fine"] == {"status": "passed", "summary": "10 cases"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_stage_runs_in_its_own_process(arguments):
    result = gpu_check.run_stage("resources", arguments, time.monotonic() + 100)
    # No CUDA kernels, or kernels but no GPU: the stage itself needs neither.
    assert result["stage"] == "resources"
    assert (
        result["status"] == "passed" or "without CUDA kernels" in result["summary"] or "cuobjdump" in result["summary"]
    )
    result = gpu_check.run_stage("determinism", arguments, time.monotonic() + 100)
    assert result["status"] == "failed"
    assert "==== determinism" in (arguments.out / "log.txt").read_text()


def test_a_stage_that_hangs_is_stopped(arguments, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(arguments.out / "python"))
    (arguments.out / "python").write_text("#!/bin/sh\nsleep 100\n")
    (arguments.out / "python").chmod(0o755)
    monkeypatch.setattr(gpu_check, "MIN_SECONDS", 0)
    result = gpu_check.run_stage("device", arguments, time.monotonic() + 1.5)
    assert result["status"] == "failed"
    assert result["summary"].startswith("stopped after 1 s")
    assert result["seconds"] < 50


def test_without_time_a_stage_is_not_begun(arguments):
    result = gpu_check.run_stage("device", arguments, time.monotonic())
    assert (result["status"], result["seconds"]) == ("failed", 0)
    assert "no time left" in result["summary"]


def test_the_summary_names_every_stage(arguments):
    stages = [
        {"stage": "device", "status": "passed", "seconds": 1.5, "summary": "a GPU"},
        {"stage": "tests", "status": "failed", "seconds": 2.5, "summary": "1 failed"},
    ]
    text = gpu_check.summary({"date": "2026-01-01", "commit": "abc", "stages": stages}, arguments.out)
    assert "| device | passed | 1.5 | a GPU |" in text
    assert "| tests | failed | 2.5 | 1 failed |" in text


def test_a_case_that_fails_is_a_row(tmp_path, monkeypatch):
    pytest.importorskip("tabulate", reason="tabulate is not installed")
    from benchmarks.speed import gpu as bench_gpu
    from benchmarks.speed import gpu_rows

    def broken():
        yield gpu_rows.GpuRow("focal_loss", "forward", "float32", "focalkern", 2.0)
        raise RuntimeError("another number\nthan expected")

    def fine():
        yield gpu_rows.GpuRow("calibration_map", "forward", "float32", "focalkern", 3.0)

    monkeypatch.setattr(gpu_rows, "device_name", lambda _: "a GPU")
    monkeypatch.setattr(bench_gpu, "copy_gb_per_s", lambda: 4000.0)
    monkeypatch.setattr(bench_gpu, "cases", lambda _: [("focal_loss", "one", broken), ("calibration_map", "two", fine)])
    rows = bench_gpu.run(tmp_path / "rows.csv", deadline=time.monotonic() + 100)
    assert [(row.op, row.median_us) for row in rows if not row.note][1:] == [("focal_loss", 2), ("calibration_map", 3)]
    assert [row.note for row in rows if row.note] == ["failed: RuntimeError: another number than expected"]
    assert "another number" in gpu_rows.markdown(tmp_path / "rows.csv")
    (late,) = bench_gpu.run(tmp_path / "late.csv", deadline=time.monotonic())[1:2]
    assert late.note == "not run: out of time"


def test_counts_are_printed_beside_measurements(tmp_path, monkeypatch):
    pytest.importorskip("tabulate", reason="tabulate is not installed")
    from benchmarks.speed import gpu as bench_gpu
    from benchmarks.speed import gpu_rows

    measured, counted = tmp_path / "measured.csv", tmp_path / "counted.csv"
    monkeypatch.setattr(gpu_rows, "device_name", lambda _: "a GPU")
    monkeypatch.setattr(bench_gpu, "copy_gb_per_s", lambda: 2680.0)  # 0.8 of an H100's 3350
    row = gpu_rows.GpuRow

    def rows():
        yield row("focal_loss", "forward 500x1000", "float32", "focalkern", 1.0, of_copy=0.9)
        yield row("focal_loss", "forward 500x1000", "float32", "cross_entropy", 1.0, of_copy=0.5)
        yield row("focal_loss", "forward 500x1000", "float64", "focalkern", 1.0, of_copy=0.9)
        yield row("focal_loss", "backward 500x1000", "float32", "focalkern", 1.0, of_copy=0.9)
        yield row("calibration_map", "forward 500x1000", "float32", "focalkern", 1.0, of_copy=0.4)
        yield row("focal_loss", "backward 2x19x4x4", "float32", "focalkern", 1.0, of_copy=0.7)

    monkeypatch.setattr(bench_gpu, "cases", lambda _: [("focal_loss", "all", rows)])
    bench_gpu.run(measured, deadline=time.monotonic() + 100)
    counted.write_text(
        "case,kernel,pipes,tb_per_s\n"
        "float32 16896x1000,focal_loss_forward rows,0.5,3.35\n"
        "float32 8x1000,focal_loss_chunk_forward,0.9,\n"
        "map float32 64x1000,calibration_map_forward,2.5,\n"
        "float32 2x19x16,focal_loss_backward_pairs,1.0,3.0\n"
        "poly float32 16896x1000,row_loss_forward,3.0,\n"
    )
    table = gpu_rows.write_comparisons(measured, counted, tmp_path / "both.csv")
    found = [(c.op, c.case, c.expected_of_copy, c.of_copy) for c in gpu_rows.comparisons(measured, counted)]
    assert found == [
        ("focal_loss", "forward 500x1000", 1.0, 0.9),
        ("calibration_map", "forward 500x1000", pytest.approx(0.5), 0.4),
        ("focal_loss", "backward 2x19x4x4", 1.0, 0.7),
    ]
    assert (tmp_path / "both.csv").read_text().splitlines()[2].endswith(",2,0.5,nan,0.4,0.8")
    assert "measured_over_expected" in table


def test_the_committed_counts_can_be_compared(tmp_path):
    pytest.importorskip("tabulate", reason="tabulate is not installed")
    from benchmarks.speed import gpu_rows

    counted = gpu_check.ROOT / "benchmarks/results/kernel_counts.csv"
    names = ("op", "case", "dtype", "provider", "gb_per_s", "of_copy", "note")
    lines = [",".join(names), "copy,256 MiB,float32,Tensor.copy_,3350,1,"]
    for op, classes in (("focal_loss", 10), ("focal_loss", 100), ("focal_loss", 1000), ("calibration_map", 1000)):
        for dtype in ("float32", "bfloat16"):
            lines += [f"{op},{way} 500x{classes},{dtype},focalkern,3000,0.9," for way in ("forward", "backward")]
    (tmp_path / "measured.csv").write_text("\n".join(lines))
    assert len(gpu_rows.comparisons(tmp_path / "measured.csv", counted)) == len(lines) - 2


def test_a_stage_leaves_time_for_those_after_it(arguments):
    # Later stages reserve 100 seconds, so the tests do not begin; the sanitizer stage after them could.
    end = time.monotonic() + 100
    result = gpu_check.run_stage("tests", arguments, end, later=["benchmarks", "sanitizer"])
    assert "no time left" in result["summary"]


def write_compiled(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(f"{name} of {folder.name}")
    return folder


FOR_ONE_TORCH = ("_C.cpython-311-x86_64-linux-gnu.so", "_build_info.py")
OF_A_WHEEL = (
    "_C_2_13.cpython-311-x86_64-linux-gnu.so",
    "_C_2_13_cuda.cpython-311-x86_64-linux-gnu.so",
    "_build_info.py",
    "libfocalkern_cpu.so",
    "libfocalkern_cuda.so",
)


@pytest.mark.parametrize(("there", "taken"), [(FOR_ONE_TORCH, OF_A_WHEEL), (OF_A_WHEEL, FOR_ONE_TORCH)])
@pytest.mark.parametrize("from_wheel", [False, True])
def test_prebuilt_files_replace_those_that_are_there(tmp_path, there, taken, from_wheel):
    package = write_compiled(tmp_path / "package", *there, "metrics.py")
    place = write_compiled(tmp_path / "focalkern", *taken, "metrics.py")
    if from_wheel:
        place = tmp_path / "focalkern-0.2.0-cp311-cp311-linux_x86_64.whl"
        with zipfile.ZipFile(place, "w") as wheel:
            for name in (*taken, "metrics.py", "ops/__init__.py"):
                wheel.writestr(f"focalkern/{name}", f"{name} of focalkern")
    gpu_stages.take_prebuilt(place, package)
    assert {file.name: file.read_text() for file in package.iterdir()} == {
        **{name: f"{name} of focalkern" for name in taken},
        "metrics.py": "metrics.py of package",
    }


def test_prebuilt_files_may_be_those_that_are_there(tmp_path):
    package = write_compiled(tmp_path, *OF_A_WHEEL)
    gpu_stages.take_prebuilt(package, package)
    assert sorted(file.name for file in package.iterdir()) == sorted(OF_A_WHEEL)


@pytest.mark.parametrize("names", [(), ("_build_info.py",), ("libfocalkern_cpu.so", "_build_info.py"), OF_A_WHEEL[:2]])
def test_prebuilt_files_that_lack_something(tmp_path, names):
    package = write_compiled(tmp_path / "package", *FOR_ONE_TORCH)
    with pytest.raises(gpu_stages.StageError, match=r"expected _build_info\.py and a module _C\*\.so, found \["):
        gpu_stages.take_prebuilt(write_compiled(tmp_path / "other", *names), package)
    assert sorted(file.name for file in package.iterdir()) == sorted(FOR_ONE_TORCH)
