"""tools/hub.py: the kernel of the Kernel Hub, loaded by the package kernels."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import peer

import focalkern as fk

hub = pytest.importorskip("tools.hub", reason="not in the source tree")

ROOT = Path(__file__).parents[2]
REDUCTIONS = ["none", "mean", "sum"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    generated = tmp_path_factory.mktemp("hub") / "focal-loss"
    hub.generate(generated)
    return generated


@pytest.fixture(scope="module")
def kernel(folder):
    """Reuses the objects of csrc/cpu that `make wheel` left in build/wheel; compiles the binding."""
    kernels = peer("kernels")
    hub.build(folder)
    return kernels.get_local_kernel(folder, backend="cpu")


# -- the sources ------------------------------------------------------------------------------------------------------


def trees(folder):
    for path in (folder / "torch-ext").rglob("*.py"):
        yield path, ast.parse(path.read_text(), feature_version=(3, 9))


def test_python_imports_torch_and_the_standard_library_alone(folder):
    allowed = {"torch", *sys.stdlib_module_names}
    for path, tree in trees(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {name.name.partition(".")[0] for name in node.names} <= allowed, path
            if isinstance(node, ast.ImportFrom):
                assert node.level or node.module.partition(".")[0] in allowed, path


def test_python_has_nothing_that_python_3_9_lacks(folder):
    """Python 3.9 cannot evaluate annotations with |, `zip(strict=...)`, or a union in isinstance."""
    n_modules = 0
    for path, tree in trees(folder):
        n_modules += 1
        has_unions = any(isinstance(getattr(node, "op", None), ast.BitOr) for node in ast.walk(tree))
        assert not has_unions or "\nfrom __future__ import annotations\n" in path.read_text(), path
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = getattr(call.func, "id", "")
            assert name != "zip" or not call.keywords, path
            assert name != "isinstance" or not isinstance(call.args[1], ast.BinOp), path
    assert n_modules > 20


def test_operators_are_in_the_library_of_the_build(folder):
    for path in (folder / "torch-ext").rglob("*.py"):
        text = path.read_text()
        assert "torch.ops.focalkern" not in text, path
        assert "focalkern::" not in text, path


def test_build_toml_lists_every_source_and_no_other(folder):
    settings = tomllib.loads((folder / "build.toml").read_text())
    listed = {*settings["torch"]["src"], *(name for kernel in settings["kernel"].values() for name in kernel["src"])}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*") if path.suffix in hub.COMPILED}
    assert listed == there
    assert settings["torch"]["stable-abi"] == {"cpu": "2.11", "cuda": "2.11"}
    assert {kernel["backend"] for kernel in settings["kernel"].values()} == set(settings["general"]["backends"])


def test_cpp_sources_are_copies(folder):
    copies = [path for path in (folder / "csrc").rglob("*") if path.is_file()]
    assert len(copies) > 40
    for path in copies:
        assert path.read_bytes() == (ROOT / path.relative_to(folder)).read_bytes()


def test_another_source_gives_another_name(tmp_path):
    hub.generate(tmp_path / "kernel")
    name = hub.identity(tmp_path / "kernel")
    with (tmp_path / "kernel/csrc/math/focal.h").open("a") as file:
        file.write("// another\n")
    assert hub.identity(tmp_path / "kernel") != name
    assert name.startswith("_focal_loss_cpu_")


# -- the kernel -------------------------------------------------------------------------------------------------------


def cases(dtype):
    """For each loss: name, options, tensors to differentiate, and the constant target."""
    torch.manual_seed(0)
    for shape in ((9,), (33, 10), (3, 1000), (3, 7, 5, 4), (0, 4)):
        dim = 0 if len(shape) == 1 else 1
        z, y = torch.randn(shape).to(dtype), torch.randint(shape[dim], shape[:dim] + shape[dim + 1 :])
        probabilities, weight = torch.rand(shape).softmax(dim).to(dtype), torch.rand(shape[dim])
        for reduction in REDUCTIONS:
            how = {"reduction": reduction}
            yield "focal_loss", {"gamma": 2.0, **how}, (z,), y
            yield "focal_loss", {"gamma": -1.5, "label_smoothing": 0.1, "ignore_index": 0, **how}, (z,), y
            yield "focal_loss", {"gamma": 0.5, "weight": weight, "detach_modulation": True, **how}, (z,), y
            yield "focal_loss", {"gamma": 1.0, **how}, (z, probabilities), None
            yield "focal_loss", how, (z, torch.rand(y.shape, dtype=torch.float64)), y
            yield "sigmoid_focal_loss", how, (z,), y
            yield "sigmoid_focal_loss", {"gamma": 1.5, "alpha": None, **how}, (z, probabilities), None


def value_and_gradients(function, options, tensors, target):
    variables = [tensor.clone().requires_grad_() for tensor in tensors]
    arguments = variables if target is None else [variables[0], target, *variables[1:]]
    result = function(*arguments, **options)
    upstream = torch.linspace(-1, 2, result.numel()).view(result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, variables, upstream)]


def assert_same_bits(found, expected):
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_and_gradients_have_the_bits_of_focalkern(kernel, dtype):
    for name, *case in cases(dtype):
        assert_same_bits(
            value_and_gradients(getattr(kernel, name), *case), value_and_gradients(getattr(fk, name), *case)
        )


@pytest.mark.kernels
def test_a_compiled_graph_has_the_same_bits_and_no_break(kernel):
    torch.manual_seed(1)
    z, y = torch.randn(16, 10), torch.randint(10, (16,))
    layer = kernel.layers.FocalForCausalLMLoss()

    def both(z):
        return kernel.focal_loss(z, y, 2.0) + kernel.sigmoid_focal_loss(z, y).sum() + layer(z, y, 10)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert_same_bits(value_and_gradients(compiled, {}, (z,), None), value_and_gradients(both, {}, (z,), None))


def test_second_derivatives(kernel):
    z, y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 1])
    assert torch.autograd.gradgradcheck(lambda z: kernel.focal_loss(z, y, 2.0), z)
    assert torch.autograd.gradgradcheck(lambda z: kernel.sigmoid_focal_loss(z, y, reduction="mean"), z)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("items", [None, 9, torch.tensor(9)])
def test_the_layer_is_the_loss_of_the_next_token(kernel, dtype, items):
    torch.manual_seed(2)
    logits, labels = torch.randn(2, 7, 11).to(dtype), torch.randint(11, (2, 7))
    labels[0, 3] = -100
    layer = kernel.layers.FocalForCausalLMLoss()

    def expected(logits):
        rows, target = logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1)
        with torch.autocast("cpu"):
            return fk.focal_loss(rows, target, 1.5, reduction="sum") / (11 if items is None else 9)

    options = {"num_items_in_batch": items, "gamma": 1.5}
    found = value_and_gradients(lambda z: layer(z, labels, 11, **options), {}, (logits,), None)
    assert found[0].dtype == torch.float32
    for one, other in zip(found, value_and_gradients(expected, {}, (logits,), None), strict=True):
        torch.testing.assert_close(one, other)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert torch.equal(layer(logits, None, 11, shift_labels=shifted, **options), found[0])


def test_layers_have_no_state(kernel):
    """The Hub requires a layer without a constructor, with forward as its only method and two known class variables."""
    layer = kernel.layers.FocalForCausalLMLoss
    assert {name for name in vars(layer) if not name.startswith("__")} == {
        "forward",
        "has_backward",
        "can_torch_compile",
    }
    assert "__init__" not in vars(layer)


def test_errors_are_those_of_focalkern(kernel):
    z, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 3])
    for arguments in ((z, y), (z, y[:2]), (z.long(), y), (z, y.tolist())):
        with pytest.raises((TypeError, ValueError, IndexError)) as found:
            kernel.focal_loss(*arguments)
        with pytest.raises(type(found.value)) as expected:
            fk.focal_loss(*arguments)
        assert str(found.value) == str(expected.value)
    with pytest.raises(TypeError, match="focal_loss: gamma must be a number or a tensor, got str"):
        kernel.focal_loss(z, y, "two")


def test_local_kernels_names_the_folder(kernel, folder, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"focalkern/focal-loss={folder}")
    assert peer("kernels").get_kernel("focalkern/focal-loss", version=0, backend="cpu") is kernel
