"""The compiled module: build_info, and behaviour and messages if the module does not fit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import focalkern as fk
from focalkern.ops import _backend

PACKAGE = Path(fk.__file__).parent
pytestmark = pytest.mark.kernels


@pytest.fixture
def copy(tmp_path):
    """A copy of the package with the compiled module and without the stable module, which a test may damage."""
    shutil.copytree(PACKAGE, tmp_path / "focalkern", ignore=shutil.ignore_patterns("__pycache__", "_C_stable*"))
    return tmp_path / "focalkern"


@pytest.fixture
def copy_with_stable(copy):
    """A copy with both modules."""
    for path in PACKAGE.glob("_C_stable*"):
        shutil.copy(path, copy)
    return copy


def run(code, *folders, kernels="auto"):
    """Runs code in a new process with the folders first on the path."""
    path = os.pathsep.join(map(str, folders))
    # -P: the current folder must not hide the copy.
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "FOCALKERN_KERNELS": kernels},
    )


def last_line_of_failed_import(package, code="import focalkern"):
    """The error of an import if the compiled module is required; otherwise the same text is a warning."""
    done = run(code, package.parent, kernels="require")
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


def write_build_info(package, *, torch_version=torch.__version__, cuda=None):
    (package / "_build_info.py").write_text(f"TORCH = {str(torch_version)!r}\nCUDA = {cuda!r}\nARCH_LIST = []\n")


def compiled_module(package):
    (found,) = package.glob("_C.*")
    return found


def test_build_info_names_the_torch_of_the_build():
    info = fk.build_info()
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert info["cuda"] is None or info["cuda"] == torch.version.cuda
    assert bool(info["arch_list"]) == (info["cuda"] is not None)
    assert info["kernels"] == "compiled"
    assert f" was compiled for torch {info['torch']}" in info["why"]


def test_build_info_lists_the_kernels():
    info = fk.build_info()
    assert any(name.startswith("focal_loss") for name in info["cpu_kernels"])
    assert info["cuda_kernels"] == (info["cpu_kernels"] if info["cuda"] else [])
    assert info["devices"]["cpu"] == "kernels"


def test_a_copy_of_the_package_works(copy):
    # Otherwise the tests of damaged copies could fail for another reason.
    done = run("import focalkern; print(focalkern.__file__)", copy.parent)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == copy


def test_another_torch(copy):
    write_build_info(copy, torch_version="2.9.1+cu126")
    assert last_line_of_failed_import(copy) == (
        f"ImportError: focalkern was built for torch 2.9.1+cu126, but torch {torch.__version__} is imported. To build "
        "a module that fits, run in the source folder of focalkern: pip install --no-build-isolation ."
    )


def test_wheel_without_a_module_for_this_torch(copy):
    (copy / "_build_info.py").write_text("MODULES = {'2.9': '2.9.1', '2.10': '2.10.0'}\nCUDA = None\nARCH_LIST = []\n")
    assert last_line_of_failed_import(copy) == (
        f"ImportError: focalkern has modules for torch 2.9, 2.10, but torch {torch.__version__} is imported. To build "
        "a module that fits, run in the source folder of focalkern: pip install --no-build-isolation ."
    )


def test_wheel_whose_module_is_for_another_python(copy):
    minor = ".".join(torch.__version__.split(".")[:2])
    (copy / "_build_info.py").write_text(f"MODULES = {{{minor!r}: ''}}\nCUDA = '13.0'\nARCH_LIST = []\n")
    assert "ImportError: focalkern has no compiled module for Python" in last_line_of_failed_import(copy)


def test_another_patch_release_of_torch_is_accepted(copy):
    minor = ".".join(torch.__version__.split(".")[:2])
    write_build_info(copy, torch_version=f"{minor}.99")
    assert run("import focalkern", copy.parent).returncode == 0


def test_another_cuda(copy):
    write_build_info(copy, cuda="10.2")
    line = last_line_of_failed_import(copy)
    found = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    assert line.startswith(
        f"ImportError: focalkern was built for CUDA 10.2, but torch {torch.__version__} was built {found}."
    )
    assert line.endswith(": pip install --no-build-isolation .")


def test_wheel_without_compiled_modules(copy):
    (copy / "_build_info.py").unlink()
    assert last_line_of_failed_import(copy) == (
        f"ImportError: focalkern was installed without compiled modules in {copy}. To build a module that fits, run in "
        "the source folder of focalkern: pip install --no-build-isolation ."
    )


SMALL_STEP = (
    "import torch, focalkern\n"
    "z, y = torch.tensor([[1.0, 2.0], [0.5, 0.0]]), torch.tensor([1, 0])\n"
    "print(round(float(focalkern.focal_loss(z, y)), 4), round(float(focalkern.focal_loss(z, y)), 4))\n"
    "info = focalkern.build_info()\n"
    "print(info['kernels'], '-', info['why'])\n"
)


def test_without_a_module_plain_torch_computes_and_one_warning_names_the_command(copy):
    compiled_module(copy).unlink()
    done = run(SMALL_STEP, copy.parent)
    assert done.returncode == 0, done.stderr
    numbers, backend = done.stdout.splitlines()
    assert numbers == "0.0451 0.0451"
    assert backend.startswith("plain torch - focalkern has no compiled module for Python")
    assert done.stderr.count("Warning") == 1
    assert "focalkern computes with plain torch, which is slower: focalkern has no compiled module" in done.stderr
    assert "pip install --no-build-isolation ." in done.stderr


def test_kernels_0_is_silent(copy):
    done = run(f"{SMALL_STEP}print(info['devices']['cpu'])\n", copy.parent, kernels="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "0.0451 0.0451\nplain torch - FOCALKERN_KERNELS=0 asks for plain torch\nplain torch\n"


def test_kernels_compile_is_silent_and_told(copy):
    code = f"{SMALL_STEP}print(info['devices']['cpu'], info['cpu_kernels'])\n"
    done = run(code, copy.parent, kernels="compile")
    assert (done.returncode, done.stderr) == (0, "")
    numbers, backend, compiled = done.stdout.splitlines()
    assert (numbers, backend) == (
        "0.0451 0.0451",
        "plain torch - FOCALKERN_KERNELS=compile asks for plain torch, compiled by torch.compile",
    )
    assert compiled == "torch.compile []"


def test_a_setting_that_is_none(copy):
    done = run("import focalkern", copy.parent, kernels="no")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: FOCALKERN_KERNELS must be auto, 0, compile, require or stable, got 'no'"
    )


def test_required_kernels_and_a_device_without_them(copy):
    """Simulates a device like MPS: the patched module reports that it does not support the device's type."""
    code = (
        "import torch, focalkern\n"
        "from focalkern.ops import _backend\n"
        "_backend._DEVICES, _backend._ON_CPU = ('cuda',), False\n"
        "print(float(focalkern.focal_calibration_map(torch.zeros(2), 1.0)[0]))\n"
    )
    done = run(code, copy.parent, kernels="require")
    assert done.stderr.splitlines()[-1].startswith(
        "NotImplementedError: FOCALKERN_KERNELS=require, but focalkern has no kernel for device cpu"
    )
    done = run(code, copy.parent)
    assert done.stdout == "0.5\n", done.stderr
    assert "focalkern has no kernel for device cpu" in done.stderr


def test_a_rocm_build_of_torch_is_told_what_runs(copy):
    """Its GPUs have the device type cuda, but no build of this package has kernels for them."""
    code = (
        "import torch\n"
        "torch.version.cuda, torch.version.hip = None, '6.2.41134'\n"
        "import focalkern\n"
        "from focalkern.ops import _backend\n"
        "_backend._say_why('cuda')\n"
    )
    write_build_info(copy)
    done = run(code, copy.parent)
    words = "torch was built for ROCm (HIP 6.2.41134), and focalkern has compiled kernels for CUDA and the CPU only"
    backend = "plain torch and compiles the losses by torch.compile"
    assert f"computes with {backend}, which is slower: {words} (FOCALKERN_KERNELS=0 silences this)" in done.stderr
    assert "FOCALKERN_CUDA" not in done.stderr
    last = run(code, copy.parent, kernels="require").stderr.splitlines()[-1]
    assert last == f"NotImplementedError: FOCALKERN_KERNELS=require, but {words}"
    write_build_info(copy, cuda="13.0")
    assert "was built for ROCm (HIP 6.2.41134). To build a module" in last_line_of_failed_import(copy, code)


NEEDED = "the CUDA kernels need a torch for CUDA 13"


@pytest.mark.parametrize(
    "cuda, hip, built_for, failed, why",
    [
        (None, None, "13.0", "", ""),
        ("13.2", None, "13.0", "no libcuda", "the module with CUDA kernels cannot be loaded: no libcuda"),
        ("12.6", None, None, "", "this build has no CUDA kernels"),
        ("12.6", None, "13.0", "", f"{NEEDED}, and torch 9.9 was built for CUDA 12.6"),
        (None, "6.2", "13.0", "", f"{NEEDED}, and torch 9.9 was built for ROCm (HIP 6.2)"),
    ],
)
def test_the_reason_names_gpus_that_have_no_kernels(monkeypatch, cuda, hip, built_for, failed, why):
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    build, module = SimpleNamespace(CUDA=built_for), SimpleNamespace(build_info=lambda: {"cuda": None})
    assert _backend._on_gpus(build, module, failed) == (why and f". GPUs use plain torch: {why}")
    with_kernels = SimpleNamespace(build_info=lambda: {"cuda": "13.0"})
    assert _backend._on_gpus(build, with_kernels, "") == ""


def test_source_tree_names_the_in_place_build(copy):
    (copy / "_build_info.py").unlink()
    (copy.parent / "setup.py").touch()
    assert last_line_of_failed_import(copy) == (
        f"ImportError: focalkern's compiled module has not been built in {copy}. To build a module that fits, run in "
        f"{copy.parent}: python setup.py build_ext --inplace"
    )


def test_built_for_another_python(copy):
    compiled_module(copy).unlink()
    line = last_line_of_failed_import(copy)
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert line.startswith(f"ImportError: focalkern has no compiled module for {version} in {copy}.")


def test_broken_module(copy):
    compiled_module(copy).write_bytes(b"no module")
    line = last_line_of_failed_import(copy)
    assert line.startswith(f"ImportError: focalkern's compiled module does not fit torch {torch.__version__}: ")
    assert line.endswith(": pip install --no-build-isolation .")


def test_undefined_symbol(copy):
    """A torch of the same version number can still lack a symbol of the one that the module was built for."""
    module = compiled_module(copy)
    library = module.read_bytes()
    name = b"torch7Library"  # as in _ZNR5torch7Library4_def...; every build refers to it
    assert name in library
    module.write_bytes(library.replace(name, b"torch7Lubrary"))
    line = last_line_of_failed_import(copy)
    assert "undefined symbol" in line
    assert line.endswith(": pip install --no-build-isolation .")


ANOTHER_COPY = (
    "focalkern cannot be loaded: another copy of it is loaded in this process. Start a new one; if both copies are "
    "found there too, remove the installed one: pip uninstall focalkern\n"
)


def test_second_copy_in_one_process(copy):
    done = run(
        "import sys, focalkern\n"
        "for name in [name for name in sys.modules if name.startswith('focalkern')]: del sys.modules[name]\n"
        f"sys.path.insert(0, {str(copy.parent)!r})\n"
        "try:\n    import focalkern\nexcept ImportError as error:\n    print(error)\n",
        PACKAGE.parent,
    )
    assert (done.returncode, done.stdout) == (0, ANOTHER_COPY), done.stderr


def test_second_copy_under_another_name(copy):
    """Another project may ship its own copy of the compiled module, but torch registers each operator library once."""
    done = run(
        "import importlib.util, torch\n"
        f"spec = importlib.util.spec_from_file_location('vendored._C', {str(compiled_module(copy))!r})\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "try:\n    import focalkern\nexcept ImportError as error:\n    print(error)\n",
        PACKAGE.parent,
    )
    assert (done.returncode, done.stdout) == (0, ANOTHER_COPY), done.stderr


def test_second_import_of_the_same_copy():
    """Notebooks drop and import modules again."""
    done = run(
        "import sys, focalkern\n"
        "for name in [name for name in sys.modules if name.startswith('focalkern')]: del sys.modules[name]\n"
        "import focalkern\n",
        PACKAGE.parent,
    )
    assert done.returncode == 0, done.stderr


# ---- the module behind torch's stable ABI ----------------------------------------------------------------------------


def test_a_torch_newer_than_all_builds_has_kernels(copy_with_stable):
    (copy_with_stable / "_build_info.py").write_text("MODULES = {'2.9': '2.9.1'}\nCUDA = None\nARCH_LIST = []\n")
    done = run(SMALL_STEP, copy_with_stable.parent, kernels="require")
    assert done.returncode == 0, done.stderr
    numbers, why = done.stdout.splitlines()
    assert numbers == "0.0451 0.0451"
    assert why.startswith("stable - _C_stable.abi3.so has kernels for every torch from 2.11 on")
    assert ". A module for one torch is faster: focalkern has modules for torch 2.9, but torch" in why
    assert done.stderr == ""


def test_another_python_has_kernels(copy_with_stable):
    compiled_module(copy_with_stable).unlink()
    done = run(SMALL_STEP, copy_with_stable.parent, kernels="require")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("stable - ")


def test_the_stable_module_can_be_asked_for(copy, copy_with_stable):
    listed = "print(info['cpu_kernels'])"
    done = run(SMALL_STEP + listed, copy_with_stable.parent, kernels="stable")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("focal_loss_forward", "calibration_grid", "spline_map_forward"))
    modules = sorted(path.name for path in copy.glob("_C_stable*"))  # a build with CUDA kernels has a second one
    assert done.stdout.splitlines()[1].startswith(f"stable - {modules[-1]} has kernels for every torch from 2.11 on")
    for module in modules:
        (copy / module).unlink()
    done = run(SMALL_STEP, copy.parent, kernels="stable")
    assert done.returncode == 1
    assert "ImportError: focalkern has no _C_stable.abi3.so in" in done.stderr


def test_the_stable_module_has_operators_on_fake_and_meta_tensors(copy_with_stable):
    code = (
        "import torch, focalkern as fk\n"
        "z = torch.zeros(3, 5, device='meta', dtype=torch.bfloat16)\n"
        "y = torch.zeros(3, dtype=torch.long, device='meta')\n"
        "loss = fk.focal_loss(z, y, reduction='none'), fk.sigmoid_focal_loss(z, z), fk.focal_calibration_map(z, 1.0)\n"
        "print([(*x.shape, x.dtype, x.device.type) for x in loss])\n"
    )
    done = run(code, copy_with_stable.parent, kernels="stable")
    assert done.returncode == 0, done.stderr
    half = "torch.bfloat16, 'meta'"
    assert done.stdout.strip() == f"[(3, {half}), (3, 5, {half}), (3, 5, {half})]"


def test_a_second_copy_of_the_stable_module_is_refused(copy_with_stable, tmp_path):
    other = shutil.copytree(copy_with_stable, tmp_path / "other" / "focalkern")
    code = (
        "import sys, focalkern\n"
        "for name in [name for name in sys.modules if name.startswith('focalkern')]: del sys.modules[name]\n"
        f"sys.path.insert(0, {str(other.parent)!r})\n"
        "import focalkern\n"
    )
    done = run(code, copy_with_stable.parent, kernels="stable")
    assert done.returncode == 1
    assert "ImportError: focalkern cannot be loaded: another copy of it is loaded" in done.stderr
