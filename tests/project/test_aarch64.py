"""tools/aarch64.py: its errors and its stand-in libraries. `make aarch64-check` runs all of it, in minutes."""

import shutil
import subprocess
import sys

import pytest

aarch64 = pytest.importorskip("tools.aarch64", reason="not in the source tree")


def test_the_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(aarch64.shutil, "which", lambda _program: None)
    monkeypatch.setattr(sys, "argv", ["tools.aarch64"])
    with pytest.raises(SystemExit, match=r"apt-get install g\+\+-aarch64-linux-gnu qemu-user-static"):
        aarch64.main()


def test_stand_ins_have_what_a_library_lacks(tmp_path, monkeypatch):
    """Builds, with this machine's compiler, a library that needs two versioned functions of another one."""
    system, site, stubs = (tmp_path / name for name in ("system", "site", "stubs"))
    libraries = site / "torch/lib"
    libraries.mkdir(parents=True)
    gcc = [shutil.which("gcc") or "gcc", "-shared", "-fPIC", "-x", "c", "-"]

    def compiled(code, *words):
        subprocess.run([*gcc, *words], input=code, text=True, check=True)

    (tmp_path / "map").write_text("cuda_1 { global: first; second; };\n")
    other = tmp_path / "libother.so.1"
    compiled(
        "int first() { return 1; } int second() { return 2; }",
        f"-Wl,--version-script={tmp_path / 'map'}",
        "-Wl,-soname,libother.so.1",
        "-o",
        other,
    )
    code = "int first(), second(); int own() { return first() + second(); }"
    compiled(code, "-x", "none", other, "-o", libraries / "libtorch.so")
    for name, value in {"SYSTEM": system, "SITE": site, "STUBS": stubs, "FOLDER": tmp_path, "TOOLS": ""}.items():
        monkeypatch.setattr(aarch64, name, value)
    aarch64.make_stubs()
    assert (stubs / "libother.so.1").is_file()
    run = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).own())"
    done = subprocess.run(
        [sys.executable, "-c", run, libraries / "libtorch.so"],
        env={"LD_LIBRARY_PATH": str(stubs)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "200\n", done.stderr  # each of them fails with 100
