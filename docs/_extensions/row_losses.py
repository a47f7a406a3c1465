"""The directive ``row-losses``: the modules of focalkern/reference/_softmax_losses.py, in its order."""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from focalkern.reference._softmax_losses import ROW_LOSSES


class RowLosses(SphinxDirective):
    """``summary``: their table; without an argument, their docstrings."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        modules = [spec.module for spec in ROW_LOSSES.values()]
        if self.arguments == ["summary"]:
            lines = [".. autosummary::", "   :nosignatures:", "", *(f"   {module}" for module in modules)]
        else:
            lines = [line for module in modules for line in (f".. autoclass:: {module}", "")]
        return self.parse_text_to_nodes("\n".join(lines) + "\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("row-losses", RowLosses)
    return {"parallel_read_safe": True}
