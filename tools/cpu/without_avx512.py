"""Copies focalkern and patches the copy so that it finds no AVX-512: python -m tools.cpu.without_avx512 FOLDER

    PYTHONPATH=FOLDER:tests python tests/random_cases.py --count 1000     the kernels in vectors of 32 bytes

When the compiled module is loaded, a function of gcc asks the CPU for its features. AVX-512 counts as available only if
the system saves certain registers. The copy compares them with a number that no system reports.
"""

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# and edx, XMM | YMM | opmask | ZMM | ZMM16-31; cmp edx, the same
QUESTION = bytes.fromhex("81e2e600000081fae6000000")
ANSWERED_NO = bytes.fromhex("81e2e600000081fae7000000")


def copy_without_avx512(folder: Path) -> Path:
    """Copies the package into ``folder``; raises ValueError if the module does not hold the expected comparison
    once."""
    target = folder / "focalkern"
    shutil.copytree(ROOT / "focalkern", target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (module,) = target.glob("_C.*.so")
    code = module.read_bytes()
    if code.count(QUESTION) != 1:
        raise ValueError(f"{module.name} asks {code.count(QUESTION)} times whether registers of AVX-512 are saved")
    module.write_bytes(code.replace(QUESTION, ANSWERED_NO))
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(copy_without_avx512(parser.parse_args().folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
