"""No sentence begins with a clause in the place of a noun: "What is left of a row ...", "How the bins are cut ...".

A named subject is shorter and is understood at once. README, docs, sources and tests have none.
`python tests/project/test_sentences.py PATH ...` lists those of any text: Markdown, docstrings and comments of Python,
comments of C++ and CUDA. To hold a folder to it, add the folder to HELD.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "csrc", "focalkern", "examples", "tools", "tests")
BENCHMARKS = ("published", "speed", "studies", "train_study")
HELD = ("README.md", "CONTRIBUTING.md", *FOLDERS, *(f"benchmarks/{folder}" for folder in BENCHMARKS))

CPP = {".h", ".cpp", ".cu", ".cuh", ".def"}
# A question ("What does an ECE mean?") and an infinitive ("How to read them") are no clauses in the place of a noun.
CLAUSE = re.compile(
    r"(?:^|(?<=[.!?;|])\s+|(?<=\*\*)\s*)(?:[-*>#]+ +|\d+\. +|\*\*|_)*"
    r"((?:What(?:ever)?|Whoever|Which(?:ever)?|How)\b(?! to\b)[^.!?|]*(?:\.(?=\w)[^.!?|]*)*([.!?|]|$))"
)


def markdown(text: str) -> Iterator[tuple[int, str]]:
    """(first line, paragraph): lists and table rows are paragraphs of their own; code and headings are left out."""
    blank = lambda found: "\n" * found[0].count("\n")  # noqa: E731
    text = re.sub(r"^(```|:::)[^\n]*\n.*?^\1$", blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\A---\n.*?^---$", blank, text, flags=re.MULTILINE | re.DOTALL)
    lines: list[str] = []
    first = 1
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        begins = not line.strip() or re.match(r"\s*(?:[-*] |\d+\. |\||#)", line)
        if begins and lines:
            yield first, " ".join(lines)
            lines = []
        if line.strip() and not line.startswith("#"):
            first = first if lines else number
            lines.append(line.strip())


def python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for part in re.split(r"\n\s*\n", node.value.value):
                yield node.lineno, " ".join(part.split())
    found: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if found and token.start[0] != last + 1:
                yield first, " ".join(found)
                found = []
            first, last = first if found else token.start[0], token.start[0]
            found.append(token.string.lstrip("#: "))
    yield first, " ".join(found)


def cpp(text: str) -> Iterator[tuple[int, str]]:
    found: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        comment = re.search(r"(?:^|\s)//+ ?(.*)$", line)
        if found and (comment is None or line.strip()[:2] != "//"):
            yield first, " ".join(found)
            found = []
        if comment is not None:
            first = first if found else number
            found.append(comment[1].strip())
    for block in re.finditer(r"/\*(.*?)\*/", text, re.DOTALL):
        yield text.count("\n", 0, block.start()) + 1, " ".join(block[1].split())


def clauses(path: Path) -> list[tuple[int, str]]:
    """(line of the paragraph, sentence) of a file."""
    read = python if path.suffix == ".py" else cpp if path.suffix in CPP else markdown
    return [
        (line, found[1].strip())
        for line, paragraph in read(path.read_text())
        for found in CLAUSE.finditer(paragraph)
        if found[2] != "?"
    ]


def files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(one for one in path.rglob("*") if one.suffix in {".md", ".py", *CPP})


@pytest.mark.parametrize("name", HELD)
def test_no_sentence_begins_with_a_clause(name: str) -> None:
    if not (ROOT / name).exists():
        pytest.skip("the source tree is not here")
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path in files(ROOT / name) for line, text in clauses(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("suffix", "text", "expected"),
    [
        (".md", "What is left counts. All is well.", ["What is left counts."]),
        (".md", "All is well. How the bins\nare cut decides.", ["How the bins are cut decides."]),
        (".md", "What is it? How to read them: so. Whatever.\n", ["Whatever."]),
        (".md", "- This is what it is.\n- this is what it is\n\n# What it is\n\n```\nWhat it is.\n```\n", []),
        (".md", "| a | What it shows |\n", ["What it shows |"]),
        (".py", '"""What f gives, in `x.y` or\nnone."""\n# How it is done.\nx = "What is no sentence."\n',
         ["What f gives, in `x.y` or none.", "How it is done."]),
        (".cu", "// The sum.\n// What is left of it.\nint what;  // Which is it?\n", ["What is left of it."]),
    ],
)  # fmt: skip
def test_the_count(tmp_path: Path, suffix: str, text: str, expected: list[str]) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_text(text)
    assert sorted(found for _, found in clauses(path)) == sorted(expected)


def main(names: list[str]) -> int:
    found = [(path, *one) for name in names for path in files(Path(name)) for one in clauses(path)]
    for path, line, text in found:
        print(f"{path}:{line}: {text}")
    print(f"{len(found)} sentences begin with a clause")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
