"""Instructions, bytes and cycles of a kernel's run on the emulator."""

import ctypes
import re
import tempfile
from ctypes import c_double
from dataclasses import dataclass
from pathlib import Path

CLOCK, MULTIPROCESSORS, MEMORY = 1.755e9, 132, 3.35e12  # of the H100 SXM: Hz, count, bytes per second
MEMORY_LATENCY = 650  # cycles
BYTES_PER_CYCLE = 0.93 * MEMORY / MULTIPROCESSORS / CLOCK  # the fraction of the memory's rate that a copy reaches

PIPES = {
    "fma": "FADD FMUL FFMA HADD2 HFMA2",
    "imad": "IMAD",
    "fp64": "DADD DMUL DFMA DSETP",
    "special": "MUFU I2F F2I F2F FRND POPC FCHK",
    "memory": "LD LDG STG LDS STS ATOMS ATOMG REDG SHFL LDC",
    "control": "BRA BSSY BSYNC EXIT CALL RET BAR WARPSYNC NOP BREAK YIELD MEMBAR BRX BRXU ERRBAR CCTL CGAERRBAR "
    "ENDCOLLECTIVE",
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}


@dataclass(frozen=True)
class Count:
    case: str
    kernel: str
    instructions: float  # per element; the next three likewise
    float64: float
    regions: float
    special: float
    wide: float  # fraction of the bytes
    bound: str  # these two are for an H100; empty for another architecture
    pipes: float | None
    cycles: float | None = None  # per element and multiprocessor
    tb_per_s: float | None = None  # of the simulated chip


def pipe(instruction: str) -> str:
    name = re.sub(r"^@!?U?P\w+ +", "", instruction).split()[0].split(".")[0]
    if name in PIPE_OF:
        return PIPE_OF[name]
    return "uniform" if name.startswith("U") or name in ("R2UR", "S2UR", "LDCU", "VOTEU") else "alu"


def executed(library: ctypes.CDLL) -> dict[str, list[tuple[int, int, str]]]:
    """Kernel -> how many warps and lanes ran each instruction, and its text. Forgets them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "counts")
        library.sassrun_write_counts(str(path).encode())
        lines = path.read_text().splitlines() if path.exists() else []
    library.sassrun_clear_counts()
    found: dict[str, list[tuple[int, int, str]]] = {}
    for line in lines:
        kind, *rest = line.split("\t")
        if kind == "K":
            found[rest[0]] = code = []
        else:
            code.append((int(rest[1]), int(rest[2]), rest[4]))
    return dict(sorted(found.items()))


def short(name: str) -> str:
    """A short name, such as "focal_loss_backward tile", for a mangled one."""
    found = re.search(r"\d((?:[a-z]+_)+)kernel(?:I|E|$)", name)
    path = re.search(r"RowPathE(\d)", name)
    return (found[1].strip("_") if found else name[-30:]) + (
        f" {('tile', 'rows', 'pixels')[int(path[1])]}" if path else ""
    )


def count(code: list[tuple[int, int, str]], elements: float, moved: float) -> dict[str, float | str]:
    warps = dict.fromkeys([*PIPES, "uniform", "alu"], 0)
    memory_cycles = wide = narrow = 0
    for times, lanes, text in code:
        kind, mnemonic = pipe(text), re.sub(r"^@!?U?P\w+ +", "", text).split()[0]
        warps[kind] += times
        parts = mnemonic.split(".")
        size = 16 if "128" in parts else 8 if "64" in parts else 2 if "U16" in parts or "S16" in parts else 4
        if kind == "memory":
            memory_cycles += times * max(1, size // 4)
        if parts[0] in ("LD", "LDG", "STG"):
            wide += lanes * size if size == 16 else 0
            narrow += lanes * size if size < 16 else 0
    cycles = {
        "issue": sum(warps.values()) / 4,
        "alu": 2 * warps["alu"] / 4,
        "fma": max(2 * warps["imad"], warps["imad"] + warps["fma"]) / 4,
        "special": 8 * warps["special"] / 4,
        "float64": 2 * warps["fp64"] / 4,
        "memory": memory_cycles,
    }
    bound = max(cycles, key=lambda name: cycles[name])

    def each(times: float) -> float:
        return round(32 * times / elements, 2)

    return {
        "instructions": each(sum(warps.values())),
        "float64": each(warps["fp64"]),
        "regions": each(sum(times for times, _, text in code if "BSSY" in text)),
        "special": each(warps["special"]),
        "wide": round(wide / (wide + narrow), 2) if wide + narrow else 0.0,
        "bound": bound,
        "pipes": round(cycles[bound] / MULTIPROCESSORS / CLOCK / (moved / MEMORY), 2),
    }


def simulate(library: ctypes.CDLL, resident: int, elements: float) -> dict[str, float]:
    """The counts of the launch that was traced last."""
    issued, moved, idle = c_double(), c_double(), c_double()
    cycles = library.sassrun_simulate(
        resident, c_double(BYTES_PER_CYCLE), MEMORY_LATENCY, *map(ctypes.byref, (issued, moved, idle))
    )
    rate = moved.value / cycles * MULTIPROCESSORS * CLOCK / 1e12
    return {"cycles": round(cycles / elements, 3), "tb_per_s": round(rate, 2)}
