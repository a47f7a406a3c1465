"""Types of attributes under their public names: `AcceptThreshold` for `focalkern.metrics._risk.AcceptThreshold`."""

import re

from sphinx.application import Sphinx

import focalkern
from focalkern import bootstrap, calibrators, files, losses, metrics, plots

PUBLIC = {
    f"{value.__module__}.{name}": f"{module.__name__}.{name}"
    for module in (calibrators, losses, bootstrap, files, metrics, plots, focalkern)
    for name, value in vars(module).items()
    if isinstance(value, type)
}
CLASS = re.compile(r"(?<![\w.~])focalkern(\.\w+)*\.[A-Z]\w*")


def public(match: re.Match[str]) -> str:
    return f"~{PUBLIC.get(match[0], match[0])}"


def shorten(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Napoleon writes the annotation of an attribute in full."""
    lines[:] = [CLASS.sub(public, line) if line.lstrip().startswith(":type:") else line for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", shorten, priority=900)  # after napoleon
    return {"parallel_read_safe": True}
