"""The directive ``row-losses``: a table of the modules of focalkern/reference/_softmax_losses.py, in its order.

Their pages in reference/api are written here, because autosummary looks for names in the text of a page only.
"""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from focalkern.reference._softmax_losses import ROW_LOSSES

MODULES = [spec.module for spec in ROW_LOSSES.values()]


class RowLosses(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        lines = [".. autosummary::", "   :nosignatures:", "   :toctree: api", "", *(f"   {name}" for name in MODULES)]
        return self.parse_text_to_nodes("\n".join(lines) + "\n")


def write_pages(app: Sphinx) -> None:
    folder = Path(app.srcdir, "reference", "api")
    folder.mkdir(exist_ok=True)
    for name in MODULES:
        path = folder / f"focalkern.{name}.rst"
        text = f"{name}\n{'=' * len(name)}\n\n.. currentmodule:: focalkern\n\n.. autoclass:: {name}\n"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("row-losses", RowLosses)
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True}
