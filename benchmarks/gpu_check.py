"""Tests and times the CUDA kernels on the GPU of this machine: python -m benchmarks.gpu_check --out DIR

Builds the module for this GPU, runs the tests on it, runs compute-sanitizer over a part of them, checks determinism,
graph capture and the absence of synchronisation, then takes timings. Every stage runs in its own process, so that a
failure, a crash or a hang in one does not affect the others. DIR gets gpu_check.json, summary.md, gpu_check.csv
(timings), kernel_resources.csv and log.txt. The exit code is 0 if every stage passed, 1 if one failed, 3 without a GPU.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_stages import ROOT, STAGES, Result, StageError

NO_GPU = 3
MIN_SECONDS = 5  # a stage does not start with less time left


def _commit() -> str:
    try:
        from benchmarks.harness import commit
    except ImportError:  # the module is not built yet
        return "unknown"
    return commit()


def run_stage(name: str, arguments: argparse.Namespace, end: float, later: Sequence[str] = ()) -> Result:
    """Runs a stage in its own process and records its result or failure; the last of ``later`` must end by ``end``."""
    limits = {stage.__name__: numbers for stage, numbers in STAGES.items()}
    limit = min(limits[name][0], int(end - time.monotonic()) - sum(limits[stage][1] for stage in later))
    if limit < MIN_SECONDS:
        return {"stage": name, "seconds": 0, "status": "failed", "summary": "not run: no time left (--seconds)"}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--stage", name, "--out", str(arguments.out)]
    command += ["--benchmark-seconds", str(arguments.benchmark_seconds), "--stage-seconds", str(limit)]
    if arguments.prebuilt is not None:
        command += ["--prebuilt", str(arguments.prebuilt)]
    file = arguments.out / f".{name}.json"
    file.unlink(missing_ok=True)
    began = time.monotonic()
    with (arguments.out / "log.txt").open("a") as log:
        log.write(f"\n==== {name}\n")
        log.flush()
        # A new session, so that all processes that the stage started stop with it.
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended = f"ended with {process.wait(limit)}; see log.txt"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit} s; see log.txt"
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if file.exists():
        result: Result = json.loads(file.read_text())
        file.unlink()
    else:
        result = {"status": "failed", "summary": ended}
    return {"stage": name, "seconds": round(time.monotonic() - began, 1), **result}


def stage_process(name: str, arguments: argparse.Namespace) -> int:
    stage = next(s for s in STAGES if s.__name__ == name)
    try:
        result = {"status": "passed", **stage(arguments)}
    except Exception as error:  # the report must show any error
        if not isinstance(error, StageError):
            traceback.print_exc()
        result = {"status": "failed", "summary": f"{type(error).__name__}: {error}".removeprefix("StageError: ")}
    (arguments.out / f".{name}.json").write_text(json.dumps(result))
    return 0


def summary(document: Result, out: Path) -> str:
    lines = [f"# GPU check, {document['date']}, commit {document['commit']}", ""]
    lines += ["| stage | result | seconds | |", "|---|---|---|---|"]
    for stage in document["stages"]:
        text = " ".join(stage["summary"].split()).replace("|", "\\|")
        lines.append(f"| {stage['stage']} | {stage['status']} | {stage['seconds']} | {text} |")
    for stage in document["stages"]:
        if failures := stage.get("failures"):
            lines += ["", f"{stage['stage']}:", "", *(f"* `{failure[:200]}`" for failure in failures[:40])]
    csv_file = out / "gpu_check.csv"
    if csv_file.exists():
        with contextlib.suppress(ImportError):  # without the module no new timings exist
            from benchmarks.speed import gpu_rows

            counted = ROOT / "benchmarks/results/kernel_counts.csv"
            lines += ["", gpu_rows.markdown(csv_file)]
            if counted.exists():
                table = gpu_rows.write_comparisons(csv_file, counted, out / "counted_and_measured.csv")
                lines += ["", "Counted instructions, and what was measured:", "", table]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="folder for the results (default gpu-check)"
    )
    parser.add_argument(
        "--prebuilt",
        type=Path,
        metavar="PATH",
        help="take the compiled files of this wheel or folder instead of building",
    )
    names = [stage.__name__ for stage in STAGES]
    parser.add_argument("--only", nargs="+", choices=names, help="these stages")
    parser.add_argument("--benchmark-seconds", type=float, default=150, help="time for the benchmarks (default 150)")
    parser.add_argument("--seconds", type=float, default=570, help="time for everything together (default 570)")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--stage-seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        return stage_process(arguments.stage, arguments)
    end = time.monotonic() + arguments.seconds  # importing torch takes its time too

    import torch

    if not torch.cuda.is_available():
        build_of_torch = "a CUDA build" if torch.version.cuda else "a CPU-only build"
        print(
            f"gpu_check: torch {torch.__version__} ({build_of_torch}) finds no GPU: nothing was checked",
            file=sys.stderr,
        )
        return NO_GPU
    arguments.out = arguments.out.resolve()
    arguments.prebuilt = arguments.prebuilt and arguments.prebuilt.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in names if name in (arguments.only or names)]
    (arguments.out / "log.txt").unlink(missing_ok=True)
    if "benchmarks" in chosen:
        (arguments.out / "gpu_check.csv").unlink(missing_ok=True)
    stages = []
    for number, name in enumerate(chosen, start=1):
        print(f"{name} ... ", end="", flush=True)
        stages.append(run_stage(name, arguments, end, later=chosen[number:]))
        print(f"{stages[-1]['status']} in {stages[-1]['seconds']} s: {stages[-1]['summary']}", flush=True)
        # Written after every stage, so that results are on disk before the next one.
        document = {"date": datetime.date.today().isoformat(), "commit": _commit(), "stages": stages}
        (arguments.out / "gpu_check.json").write_text(json.dumps(document, indent=2) + "\n")
        (arguments.out / "summary.md").write_text(summary(document, arguments.out))
    print(f"\nwritten to {arguments.out}")
    return int(any(stage["status"] == "failed" for stage in stages))


if __name__ == "__main__":
    sys.exit(main())
