"""Formulas as MathML, which browsers draw by themselves: no script, nothing to fetch, readable by screen readers."""

import html
import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def mathml(formula: str, *, as_block: bool = False) -> str:
    formula = re.sub(r"\\[bB]ig+[lr]?(?![A-Za-z])", "", formula)  # brackets that are large by themselves
    try:
        return tex2mathml(formula, as_block=as_block)
    except MathError as error:
        logger.warning("%s in the formula %s", error, formula)
        return f"<code>{html.escape(formula)}</code>"


def equations(formula: str) -> list[str]:
    """The equations of a line, which a narrow screen sets below each other."""
    parts = re.split(r"\\q?quad(?![A-Za-z])", formula)
    whole = "&" in formula or r"\begin" in formula or any(part.count("{") != part.count("}") for part in parts)
    return [formula] if whole else [part.strip() for part in parts if part.strip()]


def inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    for part in node.astext().split("\n\n"):
        line = "".join(mathml(equation, as_block=True) for equation in equations(part.strip()))
        translator.body.append(f'<div class="math-block">{line}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
