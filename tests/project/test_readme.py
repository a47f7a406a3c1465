"""The examples of the README and of the documentation, run as they are printed.

These are Python blocks, cells of the tutorials, and focalkern commands. The blocks of a page run in their order and in
one empty folder, because commands read files that Python blocks have written. Each Python block has its own names, so
that it can be copied alone; the cells of a tutorial share theirs. For other commands, the module, the options and the
make target must exist.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+|\{code-cell\} python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\"]+)\"")

# Packages that an example may import although focalkern does not need them. Only these may be missing, and only if not
# all peers are required. (Not conftest.peer: this file also runs alone, against an installed wheel.)
PEERS = {
    "accelerate",
    "dask",
    "datasets",
    "distributed",
    "kornia",
    "lightning",
    "monai",
    "onnx",
    "onnxruntime",
    "ray",
    "segmentation_models_pytorch",
    "sklearn",
    "tokenizers",
    "torchmetrics",
    "torchvision",
    "transformers",
    "trl",
}


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """(kind, line before the block, code) of each block; the cells of a tutorial form one block."""
    text = page.read_text()
    cells = []
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(2))
        if block[1].startswith("{"):  # cell options are no code
            cells.append((line, re.sub(r"^:.*$", "", block[2], flags=re.MULTILINE)))
        else:
            yield block[1], line, block[2]
    code = ""
    for line, cell in cells:
        code += "\n" * (line - code.count("\n")) + cell
    if code:
        yield "python", 0, code


def examples(page):
    for kind, first_line, code in blocks(page):
        if kind == "python":
            yield first_line, code
        for number, line in enumerate(code.splitlines()):
            if kind == "sh" and line.startswith("focalkern "):
                yield first_line + number, line


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {page: tmp_path_factory.mktemp("page") for page in PAGES}


# transformers pins memory by default, and without a GPU torch warns about it.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
# TRL sets this argument of transformers itself.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("page", "line", "code"),
    [
        pytest.param(page, line, code, id=f"{name_of(page)}, line {line + 1}")
        for page in PAGES
        for line, code in examples(page)
    ],
)
def test_example(page, line, code, folders, monkeypatch):
    monkeypatch.chdir(folders[page])
    monkeypatch.setenv("MPLBACKEND", "agg")
    if code.startswith("focalkern "):
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(code)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
    else:
        if os.environ.get("FOCALKERN_REQUIRE_PEERS") != "1":
            for name in sorted(PEERS.intersection(IMPORT.findall(code))):
                pytest.importorskip(name, exc_type=ImportError)
        # Empty lines in front, so that a traceback has the line number of the page.
        exec(compile("\n" * line + code, str(page), "exec"), {"__name__": "__main__"})


def test_there_are_examples():
    kinds = [code.startswith("focalkern ") for page in PAGES for _, code in examples(page)]
    assert kinds.count(False) >= 2
    if len(PAGES) > 1:
        assert kinds.count(False) >= 30
        assert kinds.count(True) >= 6


def test_every_block_has_a_kind():
    """Every block is run, checked, or the output of a command."""
    for page in PAGES:
        fences = re.findall(r"^```([^\n`]+)$", page.read_text(), re.MULTILINE)
        known = {"python", "sh", "text", "{code-cell} python"}
        unknown = [kind for kind in fences if kind not in known and not re.match(r"\{(?!code)", kind)]
        assert not unknown, f"{name_of(page)}: {unknown}"


def test_links_lead_somewhere():
    if len(PAGES) == 1:
        pytest.skip("the README alone, beside an installed wheel")
    links = [(page, a or b) for page in PAGES for a, b in LINK.findall(page.read_text())]
    assert len(links) > 50
    broken = [(name_of(page), link) for page, link in links if not (page.parent / link).exists()]
    assert not broken


def test_the_readme_is_one_screen_and_more():
    assert len(README.read_text().splitlines()) <= 150


def shell_commands():
    for page in PAGES:
        for kind, _, code in blocks(page):
            for line in code.replace("\\\n", " ").splitlines() if kind == "sh" else ():
                yield name_of(page), shlex.split(line, comments=True)


def test_printed_verdicts_of_a_file_agree():
    first_line = re.compile(r"^\$ focalkern calibrate (\S+\.npz) .*\n(Use .*)$", re.MULTILINE)
    found = [verdict for page in PAGES for verdict in first_line.findall(page.read_text())]
    of_file: dict[str, set[str]] = {}
    for file, verdict in found:
        of_file.setdefault(file, set()).add(verdict)
    assert len(found) >= 3
    assert {file: verdicts for file, verdicts in of_file.items() if len(verdicts) > 1} == {}


@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="the source tree is not here")
def test_other_commands_exist():
    """Checks make targets, modules of -m, and their options."""
    pytest.importorskip("benchmarks", reason="the benchmarks are in the source tree only")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = set()
    for page, words in shell_commands():
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if not words:
            continue
        seen.add(words[0])
        assert words[0] in {"focalkern", "make", "python", "pip", "torchrun"}, (page, words)
        if words[0] == "make":
            assert words[1] in targets, (page, words)
        if words[0] == "python":
            spec = importlib.util.find_spec(words[2])
            assert words[1] == "-m" and spec is not None, (page, words)
            source = Path(spec.origin)
            files = source.parent.glob("*.py") if source.name == "__init__.py" else [source]
            text = "".join(file.read_text() for file in files)
            for option in (word for word in words if word.startswith("--")):
                assert f'"{option}"' in text, (page, words)
    assert {"focalkern", "make", "python", "pip"} <= seen


def test_tables_were_recorded():
    tables = pytest.importorskip(
        "benchmarks.published.readme_tables", reason="the benchmarks are in the source tree only"
    )
    for name, (path, make) in tables.TABLES.items():
        table = make()
        assert table.count("\n") >= 6
        assert tables.marked(path.read_text(), name)[0] == table, (
            f"{name}: python -m benchmarks.published.readme_tables --write"
        )


def test_pictures_are_those_of_the_rows(tmp_path):
    picture = pytest.importorskip(
        "benchmarks.published.readme_picture", reason="the benchmarks are in the source tree only"
    )
    recorded = sorted(picture.RESULTS.glob("reliability_*.csv"))[-1]
    for path in picture.draw(recorded, tmp_path):
        assert path.read_bytes()[:5] == b"<?xml"
    eces = {f"{float(line.split(',')[3]):.4f}" for line in recorded.read_text().splitlines()[1:]}
    assert len(eces) == 4
    for page in (README, ROOT / "docs" / "index.md"):
        described = " ".join(page.read_text().split())
        assert all(ece in described for ece in eces)
