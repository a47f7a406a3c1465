"""Writes one text file for sassrun from the output (*.sass) and the extracted files (*.cubins) of cuobjdump.

Per kernel a line "K name shared-bytes params-at jump-tables", then a line per instruction: address, its two encoded
words, text.
"""

import re
import struct
from pathlib import Path

NO_BITS = 8  # the type of a section that has no bytes in the file
PARAMS, SIZED = 0x0A, 0x04  # of .nv.info: EIATTR_PARAM_CBANK, and the format of an attribute with a size


def sections(path: Path) -> dict[str, tuple[bytes, int]]:
    """The bytes and the size of each section of an ELF file."""
    elf = path.read_bytes()
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_size) for i in range(count)]
    found = {}
    for name_at, kind, _, _, offset, size, *_ in headers:
        begin = headers[names][4] + name_at
        name = elf[begin : elf.index(b"\0", begin)].decode()
        found[name] = (b"" if kind == NO_BITS else elf[offset : offset + size], size)
    return found


def params_at(info: bytes) -> int:
    """The offset of the parameters in c[0x0], read from the section .nv.info of a kernel."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if attribute == PARAMS:
            return struct.unpack_from("<H", info, at + 8)[0]
        at += 4 + (size if form == SIZED else 0)
    return 0


def extract(folder: Path, out: Path) -> None:
    with out.open("w") as file:
        for listing in sorted(folder.glob("*.sass")):
            elf = {}
            for cubin in listing.with_suffix(".cubins").glob("*.cubin"):
                elf.update(sections(cubin))
            first_half = None
            for line in listing.read_text().splitlines():
                if name := re.match(r"\s*Function : (\S+)", line):
                    kernel = name[1]
                    tables = elf.get(f".nv.constant2.{kernel}", (b"", 0))[0].hex() or "-"
                    for what in ("nv.constant2", "text"):
                        if any(elf.get(f"{kind}.{what}.{kernel}", (b"", 0))[0] for kind in (".rela", ".rel")):
                            raise ValueError(f"the section {what} of {kernel} is relocated")
                    shared = elf.get(f".nv.shared.{kernel}", (b"", 0))[1]
                    at = params_at(elf.get(f".nv.info.{kernel}", (b"", 0))[0])
                    file.write(f"K {kernel} {shared} {at} {tables}\n")
                elif half := re.match(r"\s*/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;\s*/\* (0x[0-9a-f]+) \*/", line):
                    first_half = half
                elif first_half and (half := re.match(r"\s*/\* (0x[0-9a-f]+) \*/", line)):
                    address, text, low = first_half.groups()
                    file.write(f"{address} {low} {half[1]} {text}\n")
                    first_half = None
