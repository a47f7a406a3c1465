"""tools/release.py: the files that it writes next to the wheels, and its errors."""

import datetime
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

release = pytest.importorskip("tools.release", reason="not in the source tree")

release_check = pytest.importorskip("tools.release_check", reason="not in the source tree")

ROOT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## 1.2.0 (2026-11-24)\n\n### Added\n\n- A thing.\n\n## 1.1.0 (unreleased)\n\n- Another.\n"


def test_notes_are_the_part_of_one_version():
    assert release.notes_of(CHANGELOG, "1.2.0") == ("2026-11-24", "### Added\n\n- A thing.\n")
    assert release.notes_of(CHANGELOG, "1.1.0") == ("unreleased", "- Another.\n")
    with pytest.raises(SystemExit, match=r"must have a heading '## 1\.2 \(date\)'"):
        release.notes_of(CHANGELOG, "1.2")


def test_this_version_has_notes():
    version = release.version_of((ROOT / "focalkern/_version.py").read_text())
    assert release.notes_of((ROOT / "CHANGELOG.md").read_text(), version)[1]


@pytest.mark.parametrize(
    "date, citation, changes, problem",
    [
        ("unreleased", "version: 1.2.0\n", "", "must date version 1.2.0"),
        ("2026-11-24", "version: 1.1.0\n", "", "CITATION.cff must have the version 1.2.0"),
        ("2026-11-24", "version: 1.2.0\n", " M setup.py\n", "committed files"),
    ],
)
def test_a_release_is_refused(date, citation, changes, problem):
    release.check_release("2026-11-24", "1.2.0", "version: 1.2.0\n", "")
    with pytest.raises(SystemExit, match=problem):
        release.check_release(date, "1.2.0", citation, changes)


def test_records_name_every_file_with_its_digest(tmp_path):
    wheel, archive = tmp_path / "focalkern-1.2.0-py3-none-any.whl", tmp_path / "focalkern-1.2.0.tar.gz"
    wheel.write_bytes(b"wheel")
    archive.write_bytes(b"archive")
    release.write_records(tmp_path, "1.2.0", "- A thing.\n", ["torch>=2.11", "numpy"])
    assert (tmp_path / "notes.md").read_text() == "# focalkern 1.2.0\n\n- A thing.\n"
    checked = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert len((tmp_path / "SHA256SUMS").read_text().splitlines()) == 4
    bill = json.loads((tmp_path / "focalkern.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    component = bill["metadata"]["component"]
    assert component["purl"] == "pkg:pypi/focalkern@1.2.0"
    files = {file["name"]: file["hashes"][0]["content"] for file in component["components"]}
    assert files == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, archive)}
    assert [entry["name"] for entry in bill["components"]] == ["torch", "numpy"]
    references = {component["bom-ref"], *(entry["bom-ref"] for entry in bill["components"])}
    assert {bill["dependencies"][0]["ref"], *bill["dependencies"][0]["dependsOn"]} == references


def test_records_of_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="must hold wheels or a source archive"):
        release.write_records(tmp_path, "1.2.0", "", [])


WHEEL = [
    "focalkern/_C_2_11.cpython-311-x86_64-linux-gnu.so",
    "focalkern/_C_2_11_cuda.cpython-311-x86_64-linux-gnu.so",
    "focalkern/_C_stable.abi3.so",
]


@pytest.mark.parametrize(
    "cache_tag, torch, module",
    [
        ("cpython-311", "2.11.0", "compiled"),
        ("cpython-311", "2.11.1+cu130", "compiled"),
        ("cpython-311", "2.1.1", "stable"),  # a version that begins like 2.11
        ("cpython-311", "2.12.0", "stable"),
        ("cpython-312", "2.11.0", "stable"),
    ],
)
def test_the_release_check_knows_which_module_must_run(cache_tag, torch, module):
    assert release_check.module_for(WHEEL, cache_tag, torch) == module


def test_the_release_check_takes_every_torch_here_and_the_newest_elsewhere():
    assert release_check.pairs("a", ["b", "c"], ["2.11.0", "2.15.0"]) == [
        ("a", "2.11.0"),
        ("a", "2.15.0"),
        ("b", "2.15.0"),
        ("c", "2.15.0"),
    ]
    assert release_check.cache_tag_of(sys.executable) == sys.implementation.cache_tag
    assert release_check.cache_tag_of("python0.0") is None


def test_every_other_python_has_its_day():
    day, pythons = datetime.date(2026, 12, 30), ["python3.12", "python3.13", "python3.14"]
    chosen = [release_check.of_the_day(pythons, day + datetime.timedelta(n)) for n in range(6)]
    assert sorted(chosen[:3]) == [[python] for python in pythons]
    assert chosen[:3] == chosen[3:]
    assert release_check.of_the_day([], day) == []


def test_a_python_is_on_path_or_of_pyenv(tmp_path, monkeypatch):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for version in ("0.1.2", "0.1.3", "0.10.1"):
        program = tmp_path / "versions" / version / "bin/python"
        program.parent.mkdir(parents=True)
        program.touch()
    assert release_check.interpreter("python0.1") == str(tmp_path / "versions/0.1.3/bin/python")
    assert release_check.interpreter("python0.2") == "python0.2"
    assert release_check.interpreter(sys.executable) == sys.executable


def test_the_release_check_has_tests_of_every_operator():
    files = [word for word in release_check.operator_tests() if word.endswith(".py")]
    for name in release_check.OPERATORS:
        assert str(ROOT / f"tests/ops/test_{name}.py") in files


def test_the_release_check_takes_one_wheel(tmp_path, monkeypatch):
    monkeypatch.setattr(release_check.platform, "machine", lambda: "x86_64")
    for name in ("cp311-abi3-manylinux_2_34_x86_64", "cp311-abi3-manylinux_2_34_aarch64", "py3-none-any"):
        (tmp_path / f"focalkern-1.0-{name}.whl").touch()
    assert release_check.wheel_in(tmp_path).name == "focalkern-1.0-cp311-abi3-manylinux_2_34_x86_64.whl"
    (tmp_path / "focalkern-1.0-cp312-abi3-manylinux_2_34_x86_64.whl").touch()
    with pytest.raises(SystemExit, match=r"must hold one wheel focalkern-\*-manylinux\*_x86_64\.whl, found 2"):
        release_check.wheel_in(tmp_path)
