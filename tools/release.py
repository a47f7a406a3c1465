"""Makes a release in a folder and uploads nothing: ``python -m tools.release [--draft] [--out dist]``.

First it checks that version, changelog and CITATION.cff agree, that the tree is committed, and that ``.ci/run`` passes.
Then it makes the wheels (one for 64-bit ARM if its cross-compiler is installed, see tools/aarch64.py), the source
archive, the notes (``notes.md``, the version's part of the changelog), a software bill of materials
(``focalkern.cdx.json``, CycloneDX 1.6) and the digests (``SHA256SUMS``, for ``sha256sum --check``). ``--draft`` skips
the checks and accepts an unreleased version. Arguments after ``--`` go to tools.wheel.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.aarch64 import PACKAGES, has_compiler
from tools.long_description import version_of
from tools.toolchain import fail

ROOT = Path(__file__).resolve().parent.parent


def notes_of(changelog: str, version: str) -> tuple[str, str]:
    """The date of a version, or "unreleased", and its part of the changelog."""
    found = re.search(rf"^## {re.escape(version)} \(([^)]+)\)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        fail(f"CHANGELOG.md must have a heading '## {version} (date)', found none")
    assert found is not None
    return found[1], found[2].strip() + "\n"


def check_release(date: str, version: str, citation: str, changes: str) -> None:
    """Exits unless the version is dated and cited and the tree is committed."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        fail(f"CHANGELOG.md must date version {version} as YYYY-MM-DD, got {date!r}; --draft accepts it")
    if f"version: {version}\n" not in citation:
        fail(f"CITATION.cff must have the version {version}")
    if changes:
        fail(f"a release is made of committed files; git status lists\n{changes}")


def digests(files: Sequence[Path]) -> str:
    """Lines for ``sha256sum --check``."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def software_bill(version: str, dependencies: Sequence[str], files: Sequence[Path]) -> dict[str, Any]:
    """The package, its files with their digests, and its dependencies as CycloneDX."""
    package = f"pkg:pypi/focalkern@{version}"
    names = {dependency: re.split(r"[^\w.-]", dependency)[0] for dependency in dependencies}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": package,
                "name": "focalkern",
                "version": version,
                "purl": package,
                "licenses": [{"license": {"id": "MIT"}}],
                "components": [
                    {
                        "type": "file",
                        "bom-ref": file.name,
                        "name": file.name,
                        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}],
                    }
                    for file in files
                ],
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{name}",
                "name": name,
                "purl": f"pkg:pypi/{name}",
                "description": f"installed beside focalkern, not part of its files: {dependency}",
            }
            for dependency, name in names.items()
        ],
        "dependencies": [{"ref": package, "dependsOn": [f"pkg:pypi/{name}" for name in names.values()]}],
    }


def write_records(out: Path, version: str, notes: str, dependencies: Sequence[str]) -> None:
    """Writes notes, software bill and digests into the folder of the wheels and the source archive."""
    (out / "notes.md").write_text(f"# focalkern {version}\n\n{notes}", encoding="utf-8")
    made = sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])
    if not made:
        fail(f"{out} must hold wheels or a source archive, found none")
    bill = software_bill(version, dependencies, made)
    (out / "focalkern.cdx.json").write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
    listed = sorted([*made, out / "notes.md", out / "focalkern.cdx.json"])
    (out / "SHA256SUMS").write_text(digests(listed), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__.splitlines()[0])
    parser.add_argument("--draft", action="store_true", help="no checks; an unreleased version is accepted")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder, emptied first (default: dist)")
    parser.add_argument("wheel", nargs="*", metavar="-- WORD", help="arguments of tools.wheel")
    arguments = parser.parse_args()
    version = version_of((ROOT / "focalkern/_version.py").read_text(encoding="utf-8"))
    date, notes = notes_of((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if not arguments.draft:
        status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
        check_release(date, version, (ROOT / "CITATION.cff").read_text(encoding="utf-8"), status.stdout)
        subprocess.run(["bash", ".ci/run"], cwd=ROOT, check=True)
    out = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    python = [sys.executable, "-m"]
    subprocess.run([*python, "tools.wheel", "--out", str(out), *arguments.wheel], cwd=ROOT, check=True)
    if has_compiler():
        subprocess.run([*python, "tools.aarch64", "--wheel-only", "--out", str(out)], cwd=ROOT, check=True)
    else:
        print(f"no wheel for 64-bit ARM, because its compiler is missing: apt-get install {PACKAGES}")
    subprocess.run([*python, "build", "--no-isolation", "--sdist", "--outdir", str(out)], cwd=ROOT, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    write_records(out, version, notes, project["dependencies"])
    print((out / "SHA256SUMS").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
