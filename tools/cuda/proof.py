"""The long form of the proof of the CUDA kernels, without a GPU: python -m tools.cuda.proof --out FILE

Every part runs cases of tools/cuda/cases another way: the source of the kernels on a shim and under sanitizers, what
nvcc makes of it for several architectures on an emulator that checks every access, with other orders of threads and
with approximate instructions that err, larger and random cases, machine code; and planted faults, each of which has to
be seen. Needs nvcc and g++; for machine code also cuobjdump and nvdisasm.

--keep FOLDER stores builds and results there. A later run with the same kernel sources reuses them, so you can
interrupt the proof and continue it. A part in which a case failed is done again.

--changed repeats only what a change of the kernels concerns: the report in --out names the commit of the last whole
proof, and since.py finds the kernels, cases and faults that differ. The result becomes the last section of the report.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.cuda import build, since
from tools.cuda import mutants as planting
from tools.cuda.faults import Fault

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Part:
    name: str
    what: str
    arch: str | None = None  # of the library for tests/kernels/test_cuda_ptx.py
    settings: str = ""
    tests: str = "tests/kernels/test_cuda_ptx.py"


SHIM = Part("shim", "the source on the host shim", tests="tests/kernels/test_cuda_shim.py")
PARTS = [
    Part("geometry", "launch geometry of every size", tests="tests/kernels/test_cuda_geometry.py"),
    SHIM,
    Part(
        "sanitizers",
        "the source under ThreadSanitizer and AddressSanitizer",
        tests="tests/kernels/test_cuda_sanitizers.py",
    ),
    Part("sm_90", "PTX for sm_90", "90"),
    Part("sm_80", "PTX for sm_80", "80"),
    Part("sm_75", "PTX for sm_75", "75"),
    Part("random_lanes", "PTX, any group of lanes goes on, 16 blocks at a time", "90", "random_lanes=1,resident=16"),
    Part("approx_error", "PTX, approximate instructions err as far as the ISA allows", "90", "approx_error=5"),
    Part("larger", "PTX, larger cases", "90", "cases=larger"),
    Part("random", "PTX, random cases", "90", "cases=random_cases"),
    Part("machine_code", "machine code for sm_90", "machine_code"),
    Part("machine_code_100", "machine code for sm_100", "machine_code_100"),
]


@dataclass(frozen=True)
class Outcome:
    name: str
    what: str
    passed: int
    failed: int
    seconds: float
    totals: tuple[int, ...]  # launches, blocks, instructions of warps and of threads
    note: str = ""


class Libraries:
    """The libraries; each is built once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.built: dict[str, str] = {}

    def settings(self, arch: str) -> str:
        if arch not in self.built:
            folder = self.folder / arch
            library, code = folder / "kernels.so", folder / "code.txt"
            if not library.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                build.build(folder, arch)
            self.built[arch] = f"library={library}" + (f",code={code}" if code.is_file() else "")
        return self.built[arch]


class Changes:
    """The kernels that have changed since a commit, the cases that launch them, and the faults in their sources."""

    def __init__(self, commit: str, libraries: Libraries) -> None:
        self.commit, self.libraries = commit, libraries
        self.before = since.sources_of(commit, libraries.folder / "before")
        self.kernels: dict[str, dict[str, str]] = {}

    def changed(self, kind: str) -> dict[str, str]:
        """The changed kernels of a library, and their sources."""
        if kind not in self.kernels:
            self.libraries.settings(kind)
            library = self.libraries.folder / kind / "kernels.so"
            self.kernels[kind] = since.changed_kernels(library, build.MACHINE_CODE.get(kind, kind), self.before)
        return self.kernels[kind]

    def cases(self, part: Part) -> list[str] | None:
        """The cases of a part to execute again; None for all of them."""
        if part.arch is None or "random_cases" in part.settings:
            return None
        changed = self.changed(part.arch)
        launched = self.launched("larger" if "cases=larger" in part.settings else "")
        return [case for case, kernels in launched.items() if any(kernel in changed for kernel in kernels)]

    def launched(self, modules: str) -> dict[str, list[str]]:
        """The kernels of each case. The part "shim" has found those of its cases."""
        path = self.shim().parent / f"launched-{modules}.json"
        if not path.is_file():
            outcome = run(SHIM, self.libraries, 0, None, self.shim_settings(modules))
            if outcome.failed:
                raise SystemExit("proof: a case failed on the shim")
            self.keep_launched(modules)
        found: dict[str, list[str]] = json.loads(path.read_text())
        return found

    def shim(self) -> Path:
        folder = self.libraries.folder / "shim"
        folder.mkdir(exist_ok=True)
        library = folder / "kernels.so"
        return library if library.is_file() else build.build_shim(folder)

    def shim_settings(self, modules: str) -> str:
        record = self.shim().parent / "record"
        record.unlink(missing_ok=True)
        return f"library={self.shim()},launched={record}" + (f",cases={modules}" if modules else "")

    def keep_launched(self, modules: str) -> None:
        found = since.launched(self.shim().parent / "record", self.shim())
        (self.shim().parent / f"launched-{modules}.json").write_text(json.dumps(found))

    def run(self, part: Part, seconds: float) -> Outcome:
        outcome = run(part, self.libraries, seconds, self.cases(part), self.shim_settings("") if part == SHIM else "")
        if part == SHIM and not outcome.failed:
            self.keep_launched("")
        return outcome

    def faults(self) -> list[Fault]:
        sources = set(self.changed("90").values())
        return [f for f in planting.all_faults() if sources & set(planting.COMPILED.get(f.file, (f.file,)))]


def run(
    part: Part, libraries: Libraries, seconds: float, cases: list[str] | None = None, shim_settings: str = ""
) -> Outcome:
    report = libraries.folder / "report"
    report.unlink(missing_ok=True)
    settings = ""
    if part.arch is not None:
        given = [libraries.settings(part.arch), *filter(None, [part.settings]), f"report={report}"]
        settings = ",".join(given)
    tests = part.tests
    if cases is not None:
        names = libraries.folder / "names"
        names.write_text("".join(f"{part.tests}::{case}\n" for case in cases))
        tests = f"@{names}"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-s", "--tb=short", tests],
        cwd=ROOT,
        env={
            **os.environ,
            "FOCALKERN_PTX": settings,
            "FOCALKERN_FUZZ_SECONDS": str(seconds),
            "FOCALKERN_SHIM": shim_settings,
        },
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    numbers = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|errors?)\b", output)}
    failed = numbers.get("failed", 0) + numbers.get("error", 0) + numbers.get("errors", 0)
    if done.returncode != 0:
        print(output[-3000:], file=sys.stderr)
        failed = max(failed, 1)
    totals = tuple(map(int, report.read_text().split())) if report.is_file() else ()
    note = found[1] if (found := re.search(r"(\d+ random cases, seeds \d+ to \d+)", output)) else ""
    return Outcome(part.name, part.what, numbers.get("passed", 0), failed, time.monotonic() - began, totals, note)


def prove_mutants(kept: "Kept", faults: list[Fault], say: Callable[[str], None]) -> tuple[list[str], bool]:
    """The lines of the report, and whether all faults were caught or are redundant."""
    for verdict in planting.verdicts(kept.folder / "mutants", [f for f in faults if f.name not in kept.mutants]):
        say(f"{verdict.result}: {verdict.fault} ({verdict.seconds:.0f} s)")
        kept.add("mutants", verdict.fault, asdict(verdict))
    found = [planting.Verdict(**kept.mutants[fault.name]) for fault in faults if fault.name in kept.mutants]
    lines = ["| {} | {} | {} |".format(v.fault, v.result, v.report.replace("|", "\\|")) for v in found]
    return lines, len(found) == len(faults) and all(v.is_right for v in found)


class Kept:
    """The stored results for these sources, by part and by fault."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder, self.path = folder, folder / "found.json"
        folder.mkdir(parents=True, exist_ok=True)
        files = [*ROOT.glob("csrc/kernels/*"), *ROOT.glob("csrc/cuda/*"), *ROOT.glob("csrc/math/*")]
        self.sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest() + commit
        found = json.loads(self.path.read_text()) if self.path.is_file() else {"sources": self.sources}
        if found["sources"] != self.sources:
            raise SystemExit(f"proof: {folder} is about other sources; choose another folder")
        self.parts: dict[str, dict[str, Any]] = found.get("parts", {})
        self.mutants: dict[str, dict[str, Any]] = found.get("mutants", {})

    def add(self, kind: str, name: str, what: dict[str, Any]) -> None:
        getattr(self, kind)[name] = what
        self.path.write_text(json.dumps({"sources": self.sources, "parts": self.parts, "mutants": self.mutants}))


def versions() -> str:
    import torch

    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\S+),", nvcc)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    return (
        f"{datetime.date.today()}, commit {commit.strip() or 'unknown'}, nvcc {release[1] if release else 'unknown'}, "
        f"g++ {compiler}, torch {torch.__version__}, {platform.machine()}"
    )


def tables(outcomes: list[Outcome], mutants: list[str], heading: str) -> list[str]:
    rows = [
        f"| {o.what}{': ' + o.note if o.note else ''} | {o.passed} | {o.failed} | "
        + (f"{o.totals[0]:,} | {o.totals[1]:,} | {o.totals[3] / 1e6:,.0f} |" if o.totals else "| | |")
        for o in outcomes
    ]
    text = [
        "| part | cases passed | failed | launches | blocks | million instructions of threads |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    if mutants:
        text += [
            "",
            f"{heading} Planted faults: {len(mutants)}",
            "",
            "Each was compiled into the kernels by itself (`tools/cuda/mutants.py`). Caught: this case failed.",
            "",
            "| fault | result | report, or why nothing can depend on it |",
            "|---|---|---|",
            *mutants,
        ]
    return text


def document(outcomes: list[Outcome], mutants: list[str], when: str) -> str:
    text = [
        "# CUDA kernels: what was executed and checked without a GPU",
        "",
        f"Written by `make cuda-proof`: {when}.",
        "",
        "The emulator executes what nvcc made of the kernels, through the real launchers, and checks every access:",
        "bounds, alignment, races in shared and global memory, values never written, shuffles and barriers that not",
        "all threads reach. Results are compared with the reference in double precision. No GPU took part: of the chip",
        "itself, and of other versions of nvcc and ptxas, this proves nothing.",
        "",
        *tables(outcomes, mutants, "##"),
    ]
    return "\n".join(text) + "\n"


AGAIN = "\n## Executed again\n"


def with_changes(whole: str, outcomes: list[Outcome], mutants: list[str], when: str, changes: Changes) -> str:
    """The report of the last whole proof, with a section about what has changed since then."""
    changed = changes.changed("90")
    sources = ", ".join(f"`{source}`" for source in sorted(set(changed.values())))
    text = [
        AGAIN,
        f"Written by `make cuda-proof`: {when}.",
        "",
        f"Since commit {changes.commit}, nvcc makes other PTX of {len(changed)} kernels, in {sources}.",
        "Executed again: the cases that launch one of them, on the shim all cases, and the planted faults in these",
        "files and their headers.",
        "",
        *tables(outcomes, mutants, "###"),
    ]
    return whole.partition(AGAIN)[0] + "\n".join(text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.cuda.proof", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the report to this file; default: standard output")
    parser.add_argument("--parts", nargs="*", help="only these: " + ", ".join([p.name for p in PARTS] + ["mutants"]))
    parser.add_argument("--keep", type=Path, help="keep what is built and found in this folder, and go on from there")
    parser.add_argument("--changed", action="store_true", help="only what changed since the last whole proof in --out")
    parser.add_argument("--seconds", type=float, default=120, help="for the random cases (%(default)s)")
    arguments = parser.parse_args()
    wanted = arguments.parts if arguments.parts is not None else [*(part.name for part in PARTS), "mutants"]
    if unknown := set(wanted) - {"mutants", *(part.name for part in PARTS)}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    whole, commit = "", ""
    if arguments.changed:
        if arguments.out is None or not arguments.out.is_file():
            parser.error("--changed needs --out with the report of a whole proof")
        whole = arguments.out.read_text()
        found = re.search(r"commit (\w+)", whole)
        commit = found[1] if found else parser.error(f"{arguments.out} names no commit")

    outcomes: list[Outcome] = []
    mutants: list[str] = []
    all_seen = True
    with tempfile.TemporaryDirectory() as temporary:
        kept = Kept(arguments.keep or Path(temporary), commit)
        libraries = Libraries(kept.folder)
        changes = Changes(commit, libraries) if commit else None
        for part in PARTS:
            if part.name in wanted:
                if part.name not in kept.parts or kept.parts[part.name]["failed"]:
                    outcome = (
                        changes.run(part, arguments.seconds) if changes else run(part, libraries, arguments.seconds)
                    )
                    say(f"{part.name}: {outcome.passed} passed, {outcome.failed} failed ({outcome.seconds:.0f} s)")
                    kept.add("parts", part.name, asdict(outcome))
                outcomes.append(Outcome(**kept.parts[part.name]))
        if "mutants" in wanted:
            faults = changes.faults() if changes else planting.all_faults()
            mutants, all_seen = prove_mutants(kept, faults, say)
        if changes:
            text = with_changes(whole, outcomes, mutants, versions(), changes)
        else:
            text = document(outcomes, mutants, versions())
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text, end="")
    is_green = all_seen and all(o.failed == 0 and o.passed > 0 for o in outcomes)
    say("green" if is_green else "NOT GREEN")
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())
