"""Tables fold on a narrow screen: each row becomes a block, its first cell the heading.

The cells of a table of text (class `fold`) stand below each other. The cells of any other table (class `cards`) stand
beside each other, each below the name of its column, which a wide screen hides. A table of many columns (class `dense`)
is set smaller on a wide screen. A long name of code (class `long`) is broken on a narrow screen, and in a table
of text of three columns on every screen.
"""

from docutils import nodes
from sphinx.application import Sphinx

COLUMNS = 3
TEXT = 30  # characters of a cell that make a table one of text
DENSE = 6  # columns
LONG = 28  # characters of a name of code


def mark(app: Sphinx, doctree: nodes.document) -> None:
    for code in doctree.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) > LONG:
            code["classes"].append("long")
    for table in doctree.findall(nodes.table):
        head, rows = (
            list(table.findall(nodes.thead)),
            [list(row.findall(nodes.entry)) for body in table.findall(nodes.tbody) for row in body.findall(nodes.row)],
        )
        width = max(map(len, rows), default=0)
        longest = max((len(cell.astext()) for row in rows for cell in row[1:]), default=0)
        if width <= COLUMNS and (longest > TEXT or not head):
            table["classes"].append("fold")
            if width == COLUMNS and any("long" in code["classes"] for code in table.findall(nodes.literal)):
                table["classes"].append("long")
        elif head:
            table["classes"] += ["cards", "dense"] if width >= DENSE else ["cards"]
            names = [cell.astext() for cell in head[0].findall(nodes.entry)]
            for row in rows:
                for name, cell in zip(names[1:], row[1:], strict=False):
                    if cell.astext():
                        cell.insert(0, nodes.inline(text=f"{name} ", classes=["column-name"]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
