"""CONTRIBUTING lists every file that a new loss of rows changes: the list is compared with the files that name DFT."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "focalkern", "tests", "tools", "docs", "benchmarks")
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".def", ".py", ".md", ".toml"}
NAMES = re.compile(r"DFTLoss|DftFormula|dft_loss|math/dft\.h")
MOST = 12


def listed() -> set[str]:
    """The files of the section's list, for DFT."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## To add a loss of rows") : text.index("The fast checks")]
    entries = re.findall(r"^\d+\. (.*?)(?::|$)", section, re.M)
    paths = {path for entry in entries for path in re.findall(r"`([\w/]+\.\w+)`", entry)}
    return {path.replace("foo", "dft") for path in paths}


def naming() -> set[str]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    files += ROOT.glob("*.md")
    return {str(path.relative_to(ROOT)) for path in files if NAMES.search(path.read_text(errors="ignore"))}


def test_the_files_of_a_loss_are_those_of_the_list():
    if not (ROOT / "CONTRIBUTING.md").is_file() or not (ROOT / "csrc").is_dir():
        pytest.skip("CONTRIBUTING is in the source tree only")
    alternatives = {"focalkern/ops/softmax_losses.py", "focalkern/losses/_baselines.py"}  # one of these changes
    # Tests of features that only DFT has, the page on other libraries that have it, too, and this test.
    of_its_own = {"tests/losses/test_dft.py", "docs/howto/migrate.md", "CONTRIBUTING.md"}
    of_its_own.add("tests/project/test_contributing.py")
    assert alternatives <= listed()
    assert naming() - of_its_own == listed() - alternatives
    assert len(listed() - alternatives) == MOST
