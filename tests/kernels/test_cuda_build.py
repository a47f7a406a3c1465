"""The build of the kernels for the tests: its order and its targets."""

from pathlib import Path

import pytest

build = pytest.importorskip("tools.cuda.build", reason="the tools are in the source tree only")
pytestmark = pytest.mark.skipif(not build.CSRC.is_dir(), reason="needs the sources")


def test_longest_jobs_begin_first(monkeypatch):
    begun = []
    monkeypatch.setattr(build.subprocess, "call", lambda command: begun.append(Path(command[2]).stem) or 0)
    build.run_all((["g++", "-o", f"{name}.o"] for name in ("harness", "runtime", "row_loss_soft")), at_once=1)
    assert begun == ["row_loss_soft", "runtime", "harness"]


def test_longest_jobs_are_about_sources_that_are_there():
    sources = [*build.kernels(), *build.HERE.glob("*/*.cpp")]
    assert set(build.LONGEST) <= {source.stem for source in sources}


def test_first_failure_raises():
    with pytest.raises(RuntimeError, match="failed: false"):
        build.run_all([["true"], ["false"]])


def test_kinds_of_builds(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "build_ptx", lambda folder, arch: folder / f"ptx_{arch}")
    monkeypatch.setattr(build, "build_machine_code", lambda folder, arch: (folder / f"sm_{arch}", folder / "code"))
    assert build.build(tmp_path, "80") == (tmp_path / "ptx_80", None)
    assert build.build(tmp_path, "machine_code") == (tmp_path / "sm_90", tmp_path / "code")
    assert build.build(tmp_path, "machine_code_100") == (tmp_path / "sm_100", tmp_path / "code")


def test_parts_of_the_proof_can_be_built():
    proof = pytest.importorskip("tools.cuda.proof", reason="the benchmarks are in the source tree only")
    kinds = {part.arch for part in proof.PARTS} - {None}
    assert {kind for kind in kinds if not kind.isdigit()} == set(build.MACHINE_CODE)
