"""Tables of text fold on a narrow screen: each row becomes a block, its first cell the heading (class `fold`).

Tables of numbers, and tables of more than three columns, scroll instead.
"""

from docutils import nodes
from sphinx.application import Sphinx

COLUMNS = 3
TEXT = 30  # characters of a cell that make a table one of text


def mark(app: Sphinx, doctree: nodes.document) -> None:
    for table in doctree.findall(nodes.table):
        rows = [list(row.findall(nodes.entry)) for row in table.findall(nodes.row)]
        longest = max((len(cell.astext()) for row in rows[1:] for cell in row[1:]), default=0)
        if len(rows[0]) <= COLUMNS and longest > TEXT:
            table["classes"].append("fold")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
