"""Compiles and links the sources of csrc. Objects are cached in build/wheel, under a hash of all their inputs."""

import fcntl
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tools.toolchain import HOST_FLAGS, fail, host_compiler

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheel"
# Libraries that are loaded before a binding, because torch is imported first; a wheel does not contain them.
TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")
JOBS = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)


def run(command: Sequence[str | Path], **options: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits while another process holds the lock, which may be compiling the same file."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def release_of(torch: str) -> str:
    """The release of torch, whose CPU and CUDA builds have the same headers. A build from source is one of its own."""
    return re.sub(r"\+(cpu|cu\d+)$", "", torch)


def output_of(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


class Compiler:
    """Compiles the sources whose objects are not in the cache."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(JOBS)
        (BUILD / "objects").mkdir(parents=True, exist_ok=True)

    def object(self, source: Path, command: Sequence[str | Path], macros: dict[str, str], torch: str) -> Path:
        """The object file of one source. It is compiled with the macros whose names it contains; if it contains none,
        several modules share it."""
        text = b"".join(path.read_bytes() for path in with_includes(source))
        defines = [f"-D{name}={value}" for name, value in macros.items() if name.encode() in text]
        words = [*map(str, command), *defines]
        nvcc = [os.environ.get(f"NVCC_{part}PEND_FLAGS", "") for part in ("AP", "PRE")]
        # Not the folders of the headers of torch and Python, whose releases `torch` names.
        known = [word for word in words if not (torch and word.startswith("-isystem"))]
        inputs = [*known, torch, *(nvcc if Path(command[0]).name == "nvcc" else [])]
        # Without the folder of this copy of the tree: another may share the cache.
        key = hashlib.sha256(b"\0".join([text, *(word.replace(str(ROOT), "").encode() for word in inputs)]))
        target = BUILD / "objects" / f"{source.stem}-{key.hexdigest()[:24]}.o"
        with locked(target.with_suffix(".lock")):
            if not target.is_file():
                print("compiling", source.name, torch, *defines, flush=True)
                unfinished = target.with_suffix(".tmp")
                run([*words, "-c", source, "-o", unfinished])
                unfinished.rename(target)
        return target

    def objects(
        self, sources: Sequence[Path], command: Sequence[str | Path], macros: dict[str, str], torch: str
    ) -> list[Path]:
        return list(self._pool.map(lambda source: self.object(source, command, macros, torch), sources))


def with_includes(source: Path) -> list[Path]:
    """A source and the files of csrc that it includes, directly or not."""
    found = {source: None}
    open_files = [source]
    while open_files:
        for name in re.findall(rb'^#include "(.+)"', open_files.pop().read_bytes(), re.MULTILINE):
            path = ROOT / "csrc" / name.decode()
            if path not in found and path.is_file():  # tools/hub.py writes a header that is not in csrc
                found[path] = None
                open_files.append(path)
    return list(found)


def sources(pattern: str) -> list[Path]:
    return sorted((ROOT / "csrc").glob(pattern))


# The library exports the functions that csrc/kernels declares.
EXPORTED = ["-std=c++20", "-fPIC", "-DNDEBUG", *(flag for flag in HOST_FLAGS if "visibility" not in flag)]


def kernel_command(tools: str = "") -> list[str | Path]:
    """Compiles csrc/cpu. ``tools`` is the prefix of a cross-compiler's programs."""
    return [
        *host_compiler(tools),
        *EXPORTED,
        "-fno-semantic-interposition",
        "-fvisibility-inlines-hidden",
        f"-I{ROOT / 'csrc'}",
    ]


def cuda_command(toolkit: Path, architectures: Sequence[str]) -> list[str | Path]:
    """Compiles csrc/cuda for architectures as TORCH_CUDA_ARCH_LIST names them, such as 8.0 and 9.0+PTX."""
    codes = []
    for name in architectures:
        found = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", name)
        if found is None:
            fail(f"TORCH_CUDA_ARCH_LIST must be a list such as '8.0;9.0+PTX', got {name!r} in it")
        assert found is not None
        number = found[1] + found[2]
        codes += [f"sm_{number}"] + ([f"compute_{number}"] if found[3] else [])
    return [
        toolkit / "bin" / "nvcc",
        "-std=c++20",
        "-O3",
        # Constants of the standard library in kernels, as in the emulator's tests.
        "--expt-relaxed-constexpr",
        # nvcc's default compresses for speed; its machine code takes more than twice as many bytes.
        "--compress-mode=size",
        "-Xcompiler=-fPIC,-fvisibility=default",
        *(f"-gencode=arch={code.replace('sm_', 'compute_')},code={code}" for code in codes),
        f"-I{ROOT / 'csrc'}",
    ]


def link(target: Path, objects: Sequence[Path], *flags: str | Path, tools: str = "") -> None:
    # $ORIGIN: the libraries are next to the modules. -s: strips all symbols that dynamic linking does not need.
    command = [*host_compiler(tools), "-shared", "-s", *objects, "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{target.name}"]
    run([*command, *flags, "-o", target])


def stand_ins(folder: Path, names: Sequence[str], tools: str = "") -> list[str | Path]:
    """Link flags for torch's libraries if only their names are known."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        library = folder / f"lib{name}.so"
        unfinished = library.with_suffix(f".{os.getpid()}")  # another process may be linking with it
        run([*host_compiler(tools), "-shared", "-x", "c", os.devnull, f"-Wl,-soname,{library.name}", "-o", unfinished])
        unfinished.rename(library)
    return ["-Wl,--no-as-needed", f"-L{folder}", *(f"-l{name}" for name in names)]
