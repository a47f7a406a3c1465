"""Builds the CPU kernels for 64-bit ARM and runs the operators' tests on an emulator: ``python -m tools.aarch64``.

The cross-compiler builds libfocalkern_cpu.so and the stable module, and puts them into a wheel. pytest then runs in
qemu-user with this wheel, PyPI's torch for ARM and Debian's Python, all of which are downloaded once into
build/wheel/aarch64. qemu-user executes the ARM instructions, slowly. PyPI's torch for ARM is a CUDA build, so the
script makes stand-ins for the CUDA libraries: torch loads them, and every function in them returns an error.

Needs Debian or Ubuntu with ``apt-get install g++-aarch64-linux-gnu qemu-user-static``, and pip. ``--wheel-only`` makes
the wheel (CPU kernels, for every Python from 3.11 and torch from 2.11 on) and runs no tests. Arguments after ``--`` go
to pytest in place of the default tests.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tools.compiler import BUILD, ROOT, Compiler, kernel_command, link, output_of, run, sources
from tools.manylinux import old_libraries
from tools.stable import build_stable
from tools.toolchain import fail
from tools.wheel import build_wheel, headers_of, with_platform_tag

TOOLS = "aarch64-linux-gnu-"
QEMU = ("qemu-aarch64-static", "qemu-aarch64")
PACKAGES = "g++-aarch64-linux-gnu qemu-user-static"
TORCH = "2.13.0"
# Packages that torch and the tests import; numpy and markupsafe have compiled parts.
BESIDE = (
    "numpy",
    *("filelock", "fsspec", "jinja2", "markupsafe", "networkx", "setuptools", "sympy", "typing_extensions"),
    *("attrs", "expecttest", "hypothesis", "iniconfig", "mpmath", "packaging", "pluggy", "pygments", "pytest"),
    "sortedcontainers",
)
TESTS = ("focal_loss", "row_loss", "sigmoid_loss")
FOLDER = BUILD / "aarch64"
SYSTEM, SITE, STUBS = FOLDER / "system", FOLDER / "site", FOLDER / "stubs"
# /proc/cpuinfo for the emulated program. That of this machine describes an x86-64 CPU, which torch cannot parse on ARM.
CPUINFO = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
CPU, MIDR = "neoverse-n1", "0x00000000413fd0c1"


def has_compiler() -> bool:
    return shutil.which(f"{TOOLS}g++") is not None


def fetch_system() -> Path:
    """Unpacks Debian's Python for ARM and its libraries into FOLDER and returns the interpreter; installs nothing."""
    if not (FOLDER / "system-complete").is_file():
        shutil.rmtree(SYSTEM, ignore_errors=True)
        state, cache = FOLDER / "apt/state", FOLDER / "apt/cache"
        (state / "lists/partial").mkdir(parents=True, exist_ok=True)
        (cache / "archives/partial").mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        settings = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::State": state}
        settings |= {"Dir::State::status": state / "status", "Dir::Cache": cache}
        apt = ["apt-get", "-q", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
        run([*apt, "update"])
        run([*apt, "install", "-y", "--download-only", "--no-install-recommends", "python3", "libstdc++6", "libgomp1"])
        for package in (cache / "archives").glob("*.deb"):
            run(["dpkg", "-x", package, SYSTEM])
        for number in range(os.cpu_count() or 1):
            registers = SYSTEM / f"sys/devices/system/cpu/cpu{number}/regs/identification"
            registers.mkdir(parents=True)
            (registers / "midr_el1").write_text(f"{MIDR}\n")
        (SYSTEM / "proc").mkdir()
        (SYSTEM / "proc/cpuinfo").write_text(CPUINFO)
        (FOLDER / "system-complete").touch()
    return next(path for path in (SYSTEM / "usr/bin").glob("python3.*") if path.name[8:].isdigit())


def fetch_packages(python: Path) -> None:
    """Downloads torch for ARM, and the packages that torch and the tests import."""
    if (FOLDER / "site-complete").is_file():
        return
    shutil.rmtree(SITE, ignore_errors=True)
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)] + ["manylinux2014_aarch64"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    pip += ["--only-binary", ":all:", "--target", SITE, "--python-version", python.name[6:], "--implementation", "cp"]
    pip += [word for name in platforms for word in ("--platform", name)]
    run([*pip, f"torch=={TORCH}", *BESIDE])
    (FOLDER / "site-complete").touch()


def make_stubs() -> None:
    """Makes the CUDA libraries that torch links to, with the functions and versions it needs; each returns an error."""
    if (FOLDER / "stubs-complete").is_file():
        return
    shutil.rmtree(STUBS, ignore_errors=True)
    STUBS.mkdir(parents=True)
    libraries = sorted((SITE / "torch/lib").glob("*.so*"))
    there = [*libraries, *SYSTEM.glob("lib/*/*.so*"), *SYSTEM.glob("usr/lib/*/*.so*"), *SYSTEM.glob("usr/bin/python3*")]
    defined = {line.split()[-1].partition("@")[0] for line in symbols("--defined-only", there)}
    needed: set[str] = set()
    file_of: dict[str, str] = {}  # by version
    for library in libraries:
        text = output_of(f"{TOOLS}readelf", "-dVW", library)
        needed.update(re.findall(r"\(NEEDED\).*\[(.+)\]", text))
        file = ""
        for kind, name in re.findall(r"(File|Name): (\S+)", text):
            file = name if kind == "File" else file
            file_of[name] = file
    first = "libcudart.so.13"
    functions: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # by file and version
    for line in symbols("--undefined-only", libraries):
        name, _, version = line.split()[-1].partition("@")
        if name not in defined and name.isidentifier():
            functions[file_of.get(version, first)][version].add(name)
    for name in sorted(needed - {path.name for path in there}):
        versions = functions.get(name, {})
        code, script = STUBS / "stub.c", STUBS / "stub.map"
        code.write_text("".join(f"int {f}(void) {{ return 100; }}\n" for found in versions.values() for f in found))
        nodes = [f"{version} {{ global: {'; '.join(found)}; }};\n" for version, found in versions.items() if version]
        script.write_text("".join(nodes))
        command = [f"{TOOLS}gcc", "-shared", "-fPIC", "-w", "-fno-builtin", code, f"-Wl,-soname,{name}"]
        run([*command, *([f"-Wl,--version-script={script}"] if nodes else []), "-o", STUBS / name])
    (FOLDER / "stubs-complete").touch()


def symbols(kind: str, libraries: Sequence[Path]) -> list[str]:
    """The lines that nm prints for the dynamic symbols."""
    done = subprocess.run([f"{TOOLS}nm", "-D", kind, *map(str, libraries)], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if len(line.split()) > 1]


def make_wheel(out: Path) -> Path:
    """Compiles the kernels and the stable module, and puts them into a wheel."""
    native = FOLDER / "native"
    shutil.rmtree(native, ignore_errors=True)
    native.mkdir(parents=True)
    compiler = Compiler()
    objects = compiler.objects(sources("cpu/**/*.cpp"), kernel_command(TOOLS), {}, "")
    old = old_libraries(TOOLS)
    link(native / "libfocalkern_cpu.so", objects, "-Wl,-Bsymbolic", *old, tools=TOOLS)
    build_stable(compiler, native, headers_of(TORCH), TORCH, [f"-L{native}", "-lfocalkern_cpu", *old], tools=TOOLS)
    (native / "_build_info.py").write_text(
        '"""The contents of this wheel. Written by tools/aarch64.py."""\n\n'
        "MODULES: dict[str, str] = {}\nCUDA: str | None = None\nARCH_LIST: list[str] = []\n"
    )
    os.environ["_PYTHON_HOST_PLATFORM"] = "linux-aarch64"  # for the wheel's tag; auditwheel replaces it by manylinux
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("focalkern-*_aarch64.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as work:
        return with_platform_tag(build_wheel(str(native), Path(work)), out)


def test(wheel: Path, words: Sequence[str]) -> None:
    """Runs pytest in the emulator on the wheel's files."""
    qemu = next(program for program in QEMU if shutil.which(program))
    python = fetch_system()
    fetch_packages(python)
    make_stubs()
    package = FOLDER / "package"
    shutil.rmtree(package, ignore_errors=True)
    zipfile.ZipFile(wheel).extractall(package)
    names = {"PYTHONHOME": SYSTEM / "usr", "PYTHONPATH": f"{package}:{SITE}", "LD_LIBRARY_PATH": STUBS}
    names |= {"OMP_NUM_THREADS": "1", "FOCALKERN_KERNELS": "stable", "PYTHONDONTWRITEBYTECODE": "1"}
    given = [word for name, value in names.items() for word in ("-E", f"{name}={value}")]
    command = [qemu, "-L", str(SYSTEM), "-cpu", CPU, *given, str(python)]
    code = (
        "import platform, sys, torch, focalkern as fk; i = fk.build_info()\n"
        "print(platform.machine(), 'Python', sys.version.split()[0], 'torch', torch.__version__, i['kernels'])\n"
        "assert platform.machine() == 'aarch64' and i['kernels'] == 'stable', i"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))}
    suite = ["-m", "pytest", "-q", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    for arguments in (["-c", code], [*suite, *words]):
        # Not in the source tree, which would be imported in place of the wheel.
        done = subprocess.run([*command, *arguments], cwd=package, env=environment)
        if done.returncode:
            fail(f"{' '.join(arguments[:3])} failed on the emulator with exit status {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.aarch64", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "wheel", help="folder for the wheel")
    parser.add_argument("--wheel-only", action="store_true", help="run nothing")
    parser.add_argument("pytest", nargs="*", metavar="-- WORD", help="arguments of pytest")
    arguments = parser.parse_args()
    if not has_compiler() or not (arguments.wheel_only or any(map(shutil.which, QEMU))):
        fail(f"the compiler or the emulator for ARM is missing: apt-get install {PACKAGES}")
    wheel = make_wheel(arguments.out.resolve())
    print(f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    if not arguments.wheel_only:
        given = [str(Path(word).resolve()) if Path(word).exists() else word for word in arguments.pytest]
        tests = [str(ROOT / "tests/ops" / f"test_{name}.py") for name in TESTS]
        # The bfloat16 look-up tables need tensors of millions of elements, which take too long here.
        test(wheel, given or ["-k", "not inductor and not looked_up", *tests])


if __name__ == "__main__":
    main()
