"""The docstrings of public objects: their sections, the names of their arguments, and their examples, which are run."""

import dataclasses
import doctest
import functools
import importlib
import inspect
import os
import re
import types

import numpy as np
import pytest
import torch

import focalkern as fk

# Modules with optional dependencies.
MODULES = {
    "focalkern": None,
    "focalkern.bootstrap": None,
    "focalkern.files": None,
    "focalkern.losses": None,
    "focalkern.metrics": None,
    "focalkern.plots": "matplotlib",
    "focalkern.reference": None,
    "focalkern.study": None,
    "focalkern.integrations.ray": "ray",
    "focalkern.integrations.sklearn": "sklearn",
    "focalkern.integrations.torchmetrics": "torchmetrics",
    "focalkern.integrations.transformers": "transformers",
}
NEEDS = {
    "focalkern.CalibratedClassifier": "sklearn",
    "focalkern.files.from_frame": "pandas",
    "focalkern.plots": "matplotlib",
}
# Packages whose files use each other's names; the reference documents these.
OF_THE_ROOM = {
    "focalkern": dir(fk),
    "focalkern.study": ["CalibratorResult", "Evaluation", "Sweep", "apply_calibrator", "evaluate_rows", "stream_sets"],
}

# Hooks of torch, scikit-learn and transformers, which those libraries document.
HOOKS = {
    "on_evaluate",
    "on_init_end",
    "on_log",
    "on_train_begin",
    "on_predict",
    "on_prediction_step",
    "extra_repr",
    "get_extra_state",
    "set_extra_state",
    "get_metadata_routing",
    "set_fit_request",
    "set_score_request",
    "compute_result",
}

NEVER_RAISE = {
    "focalkern.AutoCalibrator.get_params",
    "focalkern.bootstrap.BiasFloor.describe",
    "focalkern.bootstrap.BiasFloor.p_value",
    "focalkern.plots.Ridge.line",
}
NOTHING_TO_SHOW = {"focalkern.empty_cache"}

HEADER = re.compile(r"^(Args|Attributes|Returns|Raises|Warns|Example):$")
ENTRY = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):(?: \S|$)")


def present(requirement):
    return requirement is None or importlib.util.find_spec(requirement) is not None


def members(kind):
    """The public methods and properties of a class that this library defines."""
    for name in dir(kind):
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        if name.startswith("_") or name in HOOKS or not owner.__module__.startswith("focalkern"):
            continue
        member = inspect.getattr_static(kind, name)
        if isinstance(member, types.FunctionType | classmethod | property | functools.cached_property):
            yield name, owner, member


def public():
    """(qualified name, object, kind) of every public object, each once."""
    seen = set()
    for module_name, requirement in MODULES.items():
        if not present(requirement):
            if os.environ.get("FOCALKERN_REQUIRE_PEERS") == "1":
                raise ModuleNotFoundError(requirement)
            continue
        module = importlib.import_module(module_name)
        for name in OF_THE_ROOM.get(module_name) or module.__all__:
            if not present(NEEDS.get(f"{module_name}.{name}")):
                continue
            found = getattr(module, name)
            if id(found) in seen or not isinstance(found, type | types.FunctionType | types.ModuleType):
                continue
            seen.add(id(found))
            path = f"{module_name}.{name}"
            kind = "class" if isinstance(found, type) else "module" if inspect.ismodule(found) else "function"
            yield path, found, kind
            if kind == "class":
                for member_name, owner, member in members(found):
                    if (owner, member_name) not in seen:
                        seen.add((owner, member_name))
                        of = "function" if isinstance(member, types.FunctionType | classmethod) else "property"
                        yield f"{path}.{member_name}", getattr(found, member_name), of


PUBLIC = list(public())


def of_kind(*kinds):
    chosen = [(path, found) for path, found, kind in PUBLIC if kind in kinds]
    return pytest.mark.parametrize(("path", "found"), chosen, ids=[path for path, _ in chosen])


def text_of(found):
    if isinstance(found, property | functools.cached_property):
        return inspect.cleandoc(found.__doc__ or "")
    return inspect.getdoc(found) or ""


def sections(found):
    """{header: lines} of a docstring; the lines before the first header are under ""."""
    parts, header = {"": []}, ""
    for line in text_of(found).splitlines():
        match = HEADER.match(line)
        if match:
            header = match[1]
            assert header not in parts, f"two sections {header}"
            parts[header] = []
        else:
            if line and not line.startswith(" "):
                header = ""
            parts[header].append(line)
    return parts


def entries(lines):
    """The names in front of the colons of a section."""
    return [name.lstrip("*") for line in lines if (match := ENTRY.match(line)) for name in match[1].split(", ")]


def arguments(found):
    """The names of the signature, without self."""
    return [name for name in inspect.signature(found).parameters if name != "self"]


def has_fields(found):
    return dataclasses.is_dataclass(found) or hasattr(found, "_fields")  # fields of a named tuple


@of_kind("function", "class", "property", "module")
def test_summary_is_one_line(path, found):
    lines = text_of(found).splitlines()
    assert lines, "no docstring"
    assert lines[0].endswith((".", ":")), lines[0]
    assert len(lines) == 1 or lines[1] == "", "the summary must be one line"


@of_kind("function", "class")
def test_arguments_are_those_of_the_signature(path, found):
    parts = sections(found)
    if has_fields(found):
        if dataclasses.is_dataclass(found):
            shown = [field.name for field in dataclasses.fields(found) if field.repr]
        else:
            shown = found._fields
        assert entries(parts.get("Attributes", ())) == [name for name in shown if not name.startswith("_")]
    elif not (isinstance(found, type) and issubclass(found, Exception)):
        assert entries(parts.get("Args", ())) == arguments(found)


@of_kind("function")
def test_result_and_errors_are_told(path, found):
    parts = sections(found)
    assert ("Returns" in parts) == (inspect.signature(found).return_annotation is not None)
    if arguments(found) and path not in NEVER_RAISE:
        assert "Raises" in parts
    for header in ("Returns", "Raises", "Args"):
        assert header not in parts or "".join(parts[header]).strip(), f"{header} is empty"


def example_of(found):
    return "\n".join(sections(found).get("Example", ()))


@of_kind("function", "class", "property")
def test_there_is_an_example(path, found):
    """An example of its own or, for a method, that of its class."""
    lines = [line.strip() for line in example_of(found).splitlines()]
    code = [line for line in lines if line.startswith((">>> ", "... "))]
    if code:
        assert 2 <= len(code) <= 6
        assert path in NOTHING_TO_SHOW or any(line and not line.startswith((">>>", "...")) for line in lines)
        return
    owner = next((other for name, other, kind in PUBLIC if kind == "class" and name == path.rpartition(".")[0]), None)
    assert owner is not None, "no example"
    # The docstring of a module is that of the class, not of forward.
    use = r"\(" if path.endswith(".forward") else rf"\.{path.rpartition('.')[2]}\b"
    assert re.search(use, example_of(owner)), "no example, also not in that of the class"


WITH_EXAMPLE = [(path, found) for path, found, _ in PUBLIC if ">>>" in text_of(found)]


@pytest.mark.parametrize(("path", "found"), WITH_EXAMPLE, ids=[path for path, _ in WITH_EXAMPLE])
def test_example(path, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"fk": fk, "np": np, "torch": torch}
    test = doctest.DocTestParser().get_doctest(text_of(found), names, path, None, 0)
    said = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)


def test_help_begins_with_a_map():
    """The docstring of the package has every public name."""
    named = set(re.findall(r"\w+", fk.__doc__))
    assert set(dir(fk)) - {"__version__"} <= named
