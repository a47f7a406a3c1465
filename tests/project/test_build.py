"""setup.py: its one-line errors if a build is impossible, and its search for the CUDA toolkit.

A stand-in for torch simulates the CPU-only and the CUDA build, so that each case runs on every machine.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools")

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("tools.long_description", reason="the tools are in the source tree only")

from tools.long_description import long_description, version_of  # noqa: E402


@pytest.fixture
def fake_torch(tmp_path):
    """Writes a torch that only has its versions of CUDA and ROCm."""

    def write(cuda, hip=None):
        folder = tmp_path / "packages" / "torch"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"class version:\n    cuda, hip = {cuda!r}, {hip!r}\n")

    return write


@pytest.fixture
def fake_nvcc(tmp_path):
    """Writes a toolkit whose nvcc prints what the real one prints; returns its folder."""

    def write(release):
        toolkit = tmp_path / "toolkit"
        (toolkit / "bin").mkdir(parents=True)
        nvcc = toolkit / "bin" / "nvcc"
        nvcc.write_text(
            "#!/bin/sh\n"
            f'case "$*" in *--version*) echo "Cuda compilation tools, release {release}, V{release}.88";;\n'
            f'*--dryrun*) echo "#$ TOP={toolkit}/bin/.." >&2;; esac\n'
        )
        nvcc.chmod(0o755)
        return toolkit

    return write


def setup_py(tmp_path, *arguments, **environment):
    """Runs setup.py where neither nvcc nor CUDA can be found, except through `environment`."""
    kept = {name: value for name, value in os.environ.items() if "CUDA" not in name}
    # /usr/bin and /bin have the shell of a wrapper script.
    kept |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "packages"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "setup.py", *(arguments or ["--name"])],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("value", ["yes", "2", "on"])
def test_setting_that_is_none(tmp_path, fake_torch, value):
    fake_torch(cuda=None)
    done = setup_py(tmp_path, FOCALKERN_CUDA=value)
    assert done.returncode == 1
    assert done.stderr == f"focalkern: FOCALKERN_CUDA must be auto, 0 or 1, got {value!r}\n"


def test_cuda_wanted_with_a_cpu_only_torch(tmp_path, fake_torch, fake_nvcc):
    fake_torch(cuda=None)
    done = setup_py(tmp_path, FOCALKERN_CUDA="1", CUDA_HOME=str(fake_nvcc("13.0")))
    assert done.returncode == 1
    assert done.stderr == "focalkern: FOCALKERN_CUDA=1, but the installed torch is built without CUDA\n"


@pytest.mark.parametrize("named", [{}, {"CUDA_HOME": "/nowhere"}])
def test_cuda_wanted_without_nvcc(tmp_path, fake_torch, named):
    fake_torch(cuda="13.0")
    done = setup_py(tmp_path, FOCALKERN_CUDA="1", **named)
    assert done.returncode == 1
    assert done.stderr == "focalkern: FOCALKERN_CUDA=1, but nvcc was not found (put it on PATH or set CUDA_HOME)\n"


def test_cuda_wanted_with_an_nvcc_of_another_release(tmp_path, fake_torch, fake_nvcc):
    fake_torch(cuda="13.0")
    done = setup_py(tmp_path, FOCALKERN_CUDA="1", CUDA_HOME=str(fake_nvcc("12.4")))
    assert done.returncode == 1
    assert done.stderr == "focalkern: FOCALKERN_CUDA=1, but nvcc is CUDA 12.4 and torch was built with CUDA 13.0\n"


@pytest.mark.parametrize(
    ("cuda", "release", "reason"),
    [
        (None, "13.0", "the installed torch is built without CUDA"),
        ("13.0", None, "nvcc was not found (put it on PATH or set CUDA_HOME)"),
        ("13.0", "12.4", "nvcc is CUDA 12.4 and torch was built with CUDA 13.0"),
    ],
)
def test_auto_builds_without_cuda_and_says_why(tmp_path, fake_torch, fake_nvcc, cuda, release, reason):
    fake_torch(cuda=cuda)
    done = setup_py(tmp_path, CUDA_HOME=str(fake_nvcc(release)) if release else "")
    assert done.stdout == f"focalkern: building without CUDA kernels: {reason}\nfocalkern\n"


def test_a_rocm_build_is_called_one(tmp_path, fake_torch, fake_nvcc):
    fake_torch(cuda=None, hip="6.2.41134")
    toolkit = str(fake_nvcc("13.0"))
    words = (
        "the installed torch is a ROCm build (HIP 6.2.41134), for which focalkern has no kernels; its GPUs compute "
        "with plain torch, its CPU with the compiled kernels\n"
    )
    found = setup_py(tmp_path, CUDA_HOME=toolkit).stdout
    assert found == f"focalkern: building without CUDA kernels: {words}focalkern\n"
    assert (
        setup_py(tmp_path, FOCALKERN_CUDA="1", CUDA_HOME=toolkit).stderr == f"focalkern: FOCALKERN_CUDA=1, but {words}"
    )


@pytest.mark.parametrize("setting", [{}, {"FOCALKERN_CUDA": "auto"}, {"FOCALKERN_CUDA": "1"}])
def test_toolkit_behind_a_wrapper_on_path(tmp_path, fake_torch, fake_nvcc, setting):
    fake_torch(cuda="13.0")
    toolkit = fake_nvcc("13.0")
    wrapper = tmp_path / "wrappers" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {toolkit}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    done = setup_py(tmp_path, PATH=f"{wrapper.parent}:/usr/bin:/bin", **setting)
    assert done.stdout == f"focalkern: building with CUDA kernels for 8.0;9.0+PTX, by {toolkit}\nfocalkern\n"


def test_settings_of_the_user_are_kept(tmp_path, fake_torch, fake_nvcc):
    fake_torch(cuda="13.0")
    toolkit = fake_nvcc("13.2")
    done = setup_py(tmp_path, CUDA_HOME=str(toolkit), TORCH_CUDA_ARCH_LIST="7.5")
    assert done.stdout == f"focalkern: building with CUDA kernels for 7.5, by {toolkit}\nfocalkern\n"


def test_zero_builds_without_cuda(tmp_path, fake_torch, fake_nvcc):
    fake_torch(cuda="13.0")
    toolkit = fake_nvcc("13.0")
    done = setup_py(tmp_path, PATH=f"{toolkit}/bin:/usr/bin:/bin", FOCALKERN_CUDA="0")
    assert done.stdout == "focalkern\n"


def test_build_without_torch(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "torch.py").write_text("raise ModuleNotFoundError('no torch')\n")
    done = setup_py(tmp_path, "-q", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.endswith(
        "focalkern: building needs the torch it will run with, and sees none: pip's build isolation hides an installed "
        "one. With torch installed, run: pip install --no-build-isolation .\n"
    )


def test_source_archive_needs_no_torch(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "torch.py").write_text("raise ModuleNotFoundError('no torch')\n")
    done = setup_py(tmp_path, "--name")
    assert (done.returncode, done.stdout) == (0, "focalkern\n"), done.stderr


README = """[Docs](docs/a.md) and [torch](https://pytorch.org)

<picture>
  <source media="(prefers-color-scheme: dark)" srcset="docs/dark.svg">
  <img src="docs/light.svg" alt="Two
  curves.">
</picture>

```python
table[key](value)
```
"""


def test_the_long_description_points_to_the_repository():
    text = long_description(README, "https://example.org/us/focalkern/", "1.2.3")
    assert "[Docs](https://example.org/us/focalkern/blob/v1.2.3/docs/a.md) and [torch](https://pytorch.org)" in text
    assert 'srcset="https://example.org/us/focalkern/raw/v1.2.3/docs/dark.svg"' in text
    assert 'src="https://example.org/us/focalkern/raw/v1.2.3/docs/light.svg"' in text
    assert "table[key](value)" in text


def test_the_long_description_without_a_repository_points_nowhere():
    text = long_description(README, "", "1.2.3")
    assert text.startswith("Docs and [torch](https://pytorch.org)\n\n*Two curves.*\n\n```python\ntable[key](value)\n")


def test_the_packages_own_long_description():
    source = (ROOT / "focalkern" / "_version.py").read_text()
    text = long_description((ROOT / "README.md").read_text(), "", version_of(source))
    assert "](docs/" not in text and "<picture>" not in text and "Accuracy against confidence before" in text
