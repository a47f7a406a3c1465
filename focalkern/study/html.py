"""The parts of a page of HTML that needs nothing but itself: no link to fetch, style, script and images inside.

Every function takes plain text and escapes it, and returns markup; :func:`page` puts markup together. What the page
says is decided in :mod:`focalkern.study.page`; how it looks, in ``page.css``; and what it does with script, where there
is script, in ``explorer.js``.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template

__all__ = [
    "contents",
    "explorer",
    "figure",
    "figures",
    "lead",
    "page",
    "paragraph",
    "section",
    "table",
    "typeset",
    "unordered",
]

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="$generator">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<a class="skip" href="#main">Skip to the figures</a>
<header>
<h1>$title</h1>
$lead
</header>
<main id="main">
$body
</main>
<footer class="quiet">
$foot
</footer>
</body>
</html>
""")

_EXPLORER = Template("""\
<noscript><p>With script, this section has a map whose cells can be chosen. The maps and diagrams below need none.</p>
</noscript>
<div id="explorer" class="explorer" hidden>
<p class="all quiet">$introduction</p>
<div class="all buttons" id="explorer-choices" role="group" aria-label="Rows of the table"></div>
<div>
<div class="buttons">
<label>Colours: <select id="explorer-which-map"></select></label>
<button type="button" id="explorer-lowest">Go to the lowest</button>
</div>
<div><canvas id="explorer-map" tabindex="0" role="application" aria-roledescription="map"
 aria-label="Map over gamma and T. Left and right arrow change T, up and down gamma."></canvas></div>
<div class="scale" aria-hidden="true"><span id="explorer-low"></span><i></i><span id="explorer-high"></span></div>
<p class="quiet"><span id="explorer-colours"></span> Star: the row to use. Dots: the other rows of the table. Ring: the
 cell shown. The gammas are not to scale.</p>
<label class="slide">gamma<input type="range" id="explorer-gamma" min="0" step="1"></label>
<label class="slide">temperature T<input type="range" id="explorer-temperature" min="0" step="1"></label>
</div>
<div>
<h3 id="explorer-title"></h3>
<p class="quiet" id="explorer-which"></p>
<table>
<tbody>
$figures
<tr><th scope="row">mean confidence</th><td id="explorer-confidence"></td></tr>
<tr><th scope="row">accuracy</th><td id="explorer-accuracy"></td></tr>
</tbody>
</table>
<svg id="explorer-diagram" role="img"></svg>
<p class="quiet" id="explorer-gap"></p>
<details>
<summary>Its $n_bins bins as a table</summary>
<div class="wide"><table class="cards" role="table">
<thead role="rowgroup"><tr role="row"><th scope="col" role="columnheader">confidence</th>
<th scope="col" role="columnheader">samples</th><th scope="col" role="columnheader">mean confidence</th>
<th scope="col" role="columnheader">accuracy</th><th scope="col" role="columnheader">gap</th></tr></thead>
<tbody role="rowgroup" id="explorer-bins"></tbody>
</table></div>
</details>
</div>
<p id="explorer-live" class="unseen" role="status" aria-live="polite"></p>
</div>
<script type="application/json" id="explorer-data">$data</script>
<script>
$script</script>""")


def page(title: str, *, lead: str, sections: Iterable[str], foot: str, generator: str) -> bytes:
    """The whole page. ``title`` and ``generator`` are text; the others are markup made by the functions below."""
    text = _PAGE.substitute(
        title=escape(title),
        style=_asset("page.css"),
        lead=lead,
        body="\n".join(sections),
        foot=foot,
        generator=escape(generator),
    )
    # A file name may hold bytes that no encoding knows (Python keeps them as lone surrogates).
    return text.encode("utf-8", errors="replace")


def typeset(text: str) -> str:
    """Arrows, minus and plus-minus signs in place of what a terminal shows of them."""
    return re.sub(r"(?<![^\s(])-(?=\.?\d)", "\u2212", text).replace("->", "\u2192").replace("+-", "\u00b1")


def section(heading: str, *parts: str, anchor: str = "") -> str:
    """``anchor`` is what :func:`contents` leads to."""
    opening = f'<section id="{escape(anchor)}">' if anchor else "<section>"
    return f"{opening}\n<h2>{escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def contents(headings: Mapping[str, str]) -> str:
    """A list of links to the sections, by their anchors."""
    links = [f'<li><a href="#{escape(anchor)}">{escape(heading)}</a></li>' for anchor, heading in headings.items()]
    return '<nav aria-label="Contents">\n<ul>\n' + "\n".join(links) + "\n</ul>\n</nav>"


def paragraph(text: str, kind: str = "") -> str:
    """``kind``: ``"quiet"`` or nothing."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def lead(lines: Iterable[str]) -> str:
    """What the reader is to read first."""
    return '<div class="lead">\n' + "\n".join(paragraph(line) for line in lines) + "\n</div>"


def unordered(items: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(item)}</li>" for item in items) + "\n</ul>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str = "",
    marked: int | None = None,
    text: bool = False,
) -> str:
    """A table, whose first column names the rows; on a narrow screen, each of them a card. The second line of a cell is
    set small; the row of index ``marked`` stands out; ``text`` aligns left.
    """
    name = f' role="region" tabindex="0" aria-label="{escape(caption.partition(".")[0])}"' if caption else ""
    # The roles say what a browser forgets when a narrow screen makes cards of the rows.
    lines = [f'<div class="wide"{name}><table role="table" class="{"cards text" if text else "cards"}">']
    if caption:
        lines.append(f"<caption>{escape(caption)}</caption>")
    # A name in snake case may break where it has its underscores.
    names = (escape(name).replace("_", "_<wbr>") for name in head)
    headings = "".join(f'<th scope="col" role="columnheader">{name}</th>' for name in names)
    lines.append(f'<thead role="rowgroup"><tr role="row">{headings}</tr></thead>')
    lines.append('<tbody role="rowgroup">')
    for index, row in enumerate(rows):
        cells: list[str] = []
        for cell, heading in zip(row, head, strict=True):
            first, _, second = cell.partition("\n")
            first, second = (first, second) if text or not cells else (typeset(first), typeset(second))
            small = f"<small>{escape(second)}</small>" if second else ""
            if cells:
                cells.append(f'<td role="cell" data-name="{escape(heading)}">{escape(first)}{small}</td>')
            else:
                cells.append(f'<th scope="row" role="rowheader">{escape(first)}{small}</th>')
        kind = ' class="marked"' if index == marked else ""
        lines.append(f'<tr role="row"{kind}>{"".join(cells)}</tr>')
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def figure(png: bytes, *, alt: str, caption: str, wide: bool = True, tall: bool = False) -> str:
    """An image inside the page; ``alt`` is for those who do not see it. Only a ``tall`` one may fill a sheet; on a
    narrow screen, a ``wide`` or ``tall`` one has its full size while it has the focus.
    """
    source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
    kind = ' class="tall" tabindex="0"' if tall else ' class="wide" tabindex="0"' if wide else ""
    image = f'<img src="{source}" alt="{escape(alt)}">'
    return f"<figure{kind}>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def figures(*parts: str) -> str:
    """Figures beside each other where there is room."""
    return '<div class="figures">\n' + "\n".join(parts) + "\n</div>"


def explorer(data: str, *, introduction: str, figures: Mapping[str, str], n_bins: int) -> str:
    """The map that answers, at most once in a page.

    Args:
        data: JSON, as ``explorer.js`` reads it.
        introduction: what the map has, and how it is used.
        figures: names of what is shown of a cell, by key.
        n_bins: of the diagram.
    """
    rows = [
        f'<tr><th scope="row">{escape(name)}</th><td id="explorer-{key}"></td></tr>' for key, name in figures.items()
    ]
    return _EXPLORER.substitute(
        introduction=escape(introduction),
        figures="\n".join(rows),
        n_bins=n_bins,
        data=data.replace("<", "\\u003c"),  # nothing in a script ends it
        script=_asset("explorer.js"),
    )


def _asset(name: str) -> str:
    return resources.files("focalkern.study").joinpath(name).read_text("utf-8")
