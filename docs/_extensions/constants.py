"""A tuple of the library is described by the string below its definition, not by the docstring of `tuple`."""

import sys
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer


def describe(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    if type(value) is not tuple:
        return
    attribute = name.rpartition(".")[2]
    loaded = [(key, module) for key, module in sys.modules.items() if key.startswith("focalkern")]
    owners = [key for key, module in loaded if _owns(module, attribute, value)]
    docs = [ModuleAnalyzer.for_module(key).find_attr_docs().get(("", attribute)) for key in owners]
    lines[:] = next((found for found in docs if found), [])


def _owns(module: Any, attribute: str, value: tuple[Any, ...]) -> bool:
    return vars(module).get(attribute) is value and str(getattr(module, "__file__", "")).endswith(".py")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
