"""Self-contained HTML pages: the Jinja environment, its filters, and tables.

The templates have the content of a page and escape all text; ``report.css`` is its style sheet, and ``explorer.js``
its script."""

import base64
import functools
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import torch

from focalkern._version import __version__

__all__ = ["Table", "render_page", "render_table", "typeset"]


class Table(NamedTuple):
    """A table for the templates.

    Attributes:
        head: headings of the columns.
        rows: cells of text. The first cell names the row; the second line of a cell is small.
        caption: text of the caption; empty for none.
        marked: index of the highlighted row.
        text: whether the cells are words: then they are aligned left, and signs are not replaced.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    marked: int | None = None
    text: bool = False


def render_page(template: str, **values: Any) -> bytes:
    """The page of a template, in UTF-8."""
    text = _environment().get_template(template).render(version=__version__, torch_version=torch.__version__, **values)
    # A file name may contain bytes that are not UTF-8 (Python represents them as lone surrogates).
    return str(text).encode("utf-8", errors="replace")


def render_table(table: Table, lines: Sequence[str] = ()) -> str:
    """Paragraphs and a table, for a notebook."""
    return str(_environment().get_template("notebook.html.j2").render(table_=table, lines=lines))


def typeset(text: str) -> str:
    """Replaces the ASCII of terminal output by arrows, minus and plus-minus signs."""
    return re.sub(r"(?<![^\s(])-(?=\.?\d)", "\u2212", text).replace("->", "\u2192").replace("+-", "\u00b1")


@functools.cache
def _environment() -> Any:
    import jinja2  # an extra, which torch requires
    from markupsafe import Markup, escape

    def breakable(name: str) -> Markup:
        """A name in snake case, which HTML may break after an underscore."""
        return Markup(str(escape(name)).replace("_", "_<wbr>"))

    def data_uri(png: bytes) -> str:
        return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"

    def script_json(text: str) -> Markup:
        """JSON for a script element; no text in it can end the element."""
        return Markup(text.replace("<", "\\u003c"))

    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FunctionLoader(_source),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "breakable": breakable,
        "data_uri": data_uri,
        "script_json": script_json,
        "typeset": typeset,
    }
    environment.globals["asset"] = lambda name: Markup(_source(name))
    return environment


def _source(name: str) -> str:
    return resources.files("focalkern.study.report").joinpath("templates", name).read_text("utf-8")
