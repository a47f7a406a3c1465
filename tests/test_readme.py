"""The README's examples, run as they are printed: Python blocks, and the commands of focalkern.

They run in the order of the page and in one empty folder, because the commands read what a Python block has written;
but each Python block has its own names, so that it can be copied alone.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import focalkern as fk

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)

# What an example may import that focalkern does not need. Elsewhere than here a missing module is a failure, and here
# too where all of them must be installed. (Not conftest.peer: this file also runs alone, against an installed wheel.)
PEERS = {
    "accelerate",
    "kornia",
    "lightning",
    "monai",
    "onnx",
    "onnxruntime",
    "segmentation_models_pytorch",
    "sklearn",
    "torchmetrics",
    "torchvision",
    "transformers",
}


def examples():
    text = README.read_text()
    for block in BLOCK.finditer(text):
        first_line = text.count("\n", 0, block.start(2))
        if block[1] == "python":
            yield first_line, block[2]
        for number, line in enumerate(block[2].splitlines()):
            if block[1] == "sh" and line.startswith("focalkern "):
                yield first_line + number, line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


# transformers pins memory by default, which without a GPU is nothing but this warning.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
@pytest.mark.parametrize(
    ("line", "code"), [pytest.param(line, code, id=f"line {line + 1}") for line, code in examples()]
)
def test_example(line, code, folder, monkeypatch):
    monkeypatch.chdir(folder)
    if code.startswith("focalkern "):
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(code)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(fk.__file__).parents[1])},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
    else:
        if os.environ.get("FOCALKERN_REQUIRE_PEERS") != "1":
            for name in sorted(PEERS.intersection(IMPORT.findall(code))):
                pytest.importorskip(name, exc_type=ImportError)
        # Empty lines in front, so that a traceback shows the README's line.
        exec(compile("\n" * line + code, str(README), "exec"), {"__name__": "__main__"})


def test_there_are_examples():
    kinds = [code.startswith("focalkern ") for _, code in examples()]
    assert kinds.count(False) >= 5
    assert kinds.count(True) >= 3
