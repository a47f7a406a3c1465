"""The CUDA kernels that a change concerns, and the cases that launch them, for tools.cuda.proof --changed.

A kernel is unchanged if nvcc makes the same PTX of it as of the sources of the commit, and if the host code of its file
is the same, too. A case is unchanged if all kernels that it launches are. The shim, which runs all cases natively,
tells which kernels a case launches.
"""

import re
import shutil
import subprocess
from pathlib import Path

from tools.cuda import build

ROOT = Path(__file__).parents[2]


def sources_of(commit: str, folder: Path) -> Path:
    """The folder csrc as it was then."""
    if not (folder / "csrc").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", commit, "csrc"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "--extract", "--directory", str(folder)], input=archive, check=True)
    return folder / "csrc"


def text_with_headers(source: Path, csrc: Path) -> str:
    """The text of a source and of all headers of csrc that it includes."""
    found: dict[Path, str] = {}
    waiting = [source]
    while waiting:
        file = waiting.pop()
        if file not in found and file.is_file():
            found[file] = file.read_text()
            waiting += [csrc / name for name in re.findall(r'#include "([^"]+)"', found[file])]
    return "".join(found[file] for file in sorted(found))


def changed_sources(before: Path) -> list[str]:
    """The kernel sources that differ, with their headers, from those in the other csrc."""
    names = {path.name for csrc in (build.CSRC, before) for path in build.kernels(csrc)}
    return sorted(
        name
        for name in names
        if text_with_headers(build.CSRC / "cuda" / name, build.CSRC)
        != text_with_headers(before / "cuda" / name, before)
    )


def plain(text: str) -> str:
    """Mangled names without those of anonymous namespaces, which differ between compilers and builds."""
    parts, at = [], 0
    for found in re.finditer(r"(\d+)(?=_GLOBAL__N_|_INTERNAL_)", text):
        if found.start() >= at:
            parts.append(text[at : found.start()])
            at = found.end() + int(found[1])
    return "".join([*parts, text[at:]])


def output(tool: str, *arguments: str | Path) -> str:
    command = [build.tool(tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def kernels_of(object_file: Path) -> dict[str, str]:
    """The PTX of each kernel in an object, after what the file declares for all of them, sorted. Without comments."""
    found = {}
    for ptx in re.findall(rb"\.version [^\0]*", object_file.read_bytes()):
        code = re.sub(r"^\s*//.*\n", "", plain(ptx.decode()), flags=re.MULTILINE)
        declared, *kernels = code.split(".entry ")
        for_all = "\n".join(sorted(filter(None, declared.splitlines())))
        found.update({text[: text.index("(")]: for_all + text for text in kernels})
    return found


def host_code(object_file: Path) -> str:
    code = output("objdump", "--disassemble", "--reloc", "--no-show-raw-insn", object_file)
    return plain(code.partition("\n\n")[2])  # without the name of the file


def changed_kernels(library: Path, arch: str, before: Path) -> dict[str, str]:
    """The kernels of a library that differ from those of the sources in `before`, and their sources."""
    changed = changed_sources(before)
    folder = before.with_name(f"objects_{arch}")
    if not folder.is_dir():
        made = before.with_name("objects")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        code = f"arch=compute_{arch},code=compute_{arch}"
        there = [before / "cuda" / name for name in changed if (before / "cuda" / name).is_file()]
        build.run_all(build.nvcc_command(source, made, before, code) for source in there)
        made.rename(folder)
    found = {}
    for name in changed:
        old, new = ((at / name).with_suffix(".o") for at in (folder, library.parent))
        before_it, after_it = (kernels_of(path) if path.is_file() else {} for path in (old, new))
        has_same_launchers = old.is_file() and new.is_file() and host_code(old) == host_code(new)
        for kernel, text in after_it.items():
            if before_it.get(kernel) != text or not has_same_launchers:
                found[kernel] = name
    return found


def launched(record: Path, shim: Path) -> dict[str, list[str]]:
    """The kernels that each case launched on the shim, from their addresses in the record."""
    symbols = [line.split() for line in output("nm", shim).splitlines()]
    names = {int(symbol[0], 16): plain(symbol[2]) for symbol in symbols if len(symbol) == 3}
    lines = (line.split("\t") for line in record.read_text().splitlines())
    return {case: sorted(names[int(address, 16)] for address in addresses) for case, *addresses in lines}
