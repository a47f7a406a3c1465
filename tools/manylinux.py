"""Link flags that keep a module on manylinux_2_28 (RHEL 8 and newer), as torch is, on every build machine.

The linker records the version of each symbol from the library in which it finds the symbol. The flags name stand-ins
for glibc's libraries, with the versions of glibc 2.28, and an archive of the symbols that libstdc++ got later
(manylinux.cpp).
"""

import re
from collections import defaultdict
from pathlib import Path

from tools.compiler import BUILD, output_of, run

__all__ = ["PLATFORM", "old_libraries"]

GLIBC = (2, 28)
PLATFORM = f"manylinux_{GLIBC[0]}_{GLIBC[1]}"
# Until glibc 2.34 these libraries held what is in libc.so.6 now.
MOVED = {
    "libdl.so.2": "dl[a-z]+",
    "libpthread.so.0": "(__)?pthread_.+|sem_.+",
    "librt.so.1": "(aio|mq|shm|timer)_.+",
}


def old_symbols(listing: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """The version of each symbol in glibc 2.28, and its letter, from the output of ``nm -D`` for a library."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for letter, name, numbers in re.findall(r" (\w) (\w+)@+GLIBC_([0-9.]+)$", listing, re.MULTILINE):
        version = tuple(map(int, numbers.split(".")))
        if letter != "A" and found.get(name, ((0,), ""))[0] < version <= GLIBC:
            found[name] = version, letter
    return found


def old_libraries(tools: str = "") -> list[str | Path]:
    """Link flags, to follow the objects. ``tools`` is the prefix of a cross-compiler's programs."""
    folder = BUILD / f"{tools}{PLATFORM}"
    folder.mkdir(parents=True, exist_ok=True)
    held: dict[str, dict[str, tuple[tuple[int, ...], str]]] = defaultdict(dict)
    for library in ("libc.so.6", "libm.so.6"):
        real = output_of(f"{tools}gcc", f"-print-file-name={library}").strip()
        for name, entry in old_symbols(output_of(f"{tools}nm", "-D", "--defined-only", real)).items():
            held[next((old for old, names in MOVED.items() if re.fullmatch(names, name)), library)][name] = entry
    for library, symbols in held.items():
        code, script = folder / "symbols.s", folder / "symbols.map"
        code.write_text(
            "".join(
                f".globl {name}\n.type {name}, @{'function' if letter in 'TWi' else 'object'}\n{name}:\n"
                for name, (_, letter) in symbols.items()
            )
        )
        names_of: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, (version, _) in symbols.items():
            names_of[version].append(name)
        script.write_text(
            "".join(f"GLIBC_{'.'.join(map(str, v))} {{ {'; '.join(names)}; }};\n" for v, names in names_of.items())
        )
        flags = ["-shared", "-nostdlib", f"-Wl,-soname,{library}", f"-Wl,--version-script={script}"]
        run([f"{tools}gcc", *flags, code, "-o", folder / library])
    compiled, archive = folder / "manylinux.o", folder / "libmanylinux.a"
    run([f"{tools}g++", "-std=c++20", "-O2", "-fPIC", "-c", Path(__file__).with_suffix(".cpp"), "-o", compiled])
    archive.unlink(missing_ok=True)
    run([f"{tools}ar", "rcs", archive, compiled])
    libraries = [f"-l:{library}" for library in held]
    return [
        archive,
        f"-Wl,--exclude-libs,{archive.name}",
        "-Wl,--push-state,--as-needed",
        f"-L{folder}",
        *libraries,
        "-Wl,--pop-state",
    ]
