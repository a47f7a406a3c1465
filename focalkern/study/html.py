"""The parts of a page of HTML that needs nothing but itself: no script, no link to fetch, images inside.

Every function takes plain text and escapes it, and returns markup; :func:`page` puts markup together. What the page
says is decided in :mod:`focalkern.study.page`.
"""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from string import Template

__all__ = ["figure", "figures", "page", "paragraph", "section", "table", "unordered"]

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="$generator">
<title>$title</title>
<style>
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem 1.25rem 3rem; color: #1a1a1a; background: #fff;
  font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: .5rem 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.25rem 0 .5rem; padding-top: .5rem; border-top: 1px solid #ccc; }
p { margin: .5rem 0; max-width: 52rem; }
.quiet { color: #555; font-size: .875rem; }
.lead { border-left: .3rem solid #0072b2; padding: .25rem 0 .25rem 1rem; margin: 1rem 0; }
ul { max-width: 52rem; padding-left: 1.25rem; }
li { margin: .4rem 0; }
.wide { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { text-align: left; color: #555; padding-bottom: .35rem; }
th, td { padding: .3rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid #ddd; }
th { font-weight: 600; vertical-align: bottom; border-bottom: 2px solid #888; }
th:first-child, td:first-child { text-align: left; }
tr.marked td { font-weight: 700; background: #eef5fb; border-bottom-color: #0072b2; }
td small { display: block; color: #555; font-weight: 400; white-space: nowrap; }
.text td { text-align: left; overflow-wrap: anywhere; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: .75rem 0; break-inside: avoid; }
figure img { display: block; max-width: 100%; height: auto; }
@media screen and (max-width: 40rem) { .wide figure img { max-width: none; width: 44rem; } }
figcaption { color: #555; font-size: .875rem; max-width: 52rem; }
footer { margin-top: 3rem; border-top: 1px solid #ccc; }
@page { margin: 14mm; }
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  .wide { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: .2rem .35rem; }
  .wide, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .figures { grid-template-columns: 1fr 1fr; gap: .5rem; }
  .wide figure { margin: .3rem 0; }
  .wide figure img { max-height: 92mm; }
  footer { margin-top: 1rem; }
  tr.marked td, .lead { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
</style>
</head>
<body>
<header>
<h1>$title</h1>
$lead
</header>
<main>
$body
</main>
<footer class="quiet">
$foot
</footer>
</body>
</html>
""")


def page(title: str, *, lead: str, sections: Iterable[str], foot: str, generator: str) -> bytes:
    """The whole page. ``title`` and ``generator`` are text; the others are markup made by the functions below."""
    text = _PAGE.substitute(
        title=escape(title), lead=lead, body="\n".join(sections), foot=foot, generator=escape(generator)
    )
    # A file name may hold bytes that no encoding knows (Python keeps them as lone surrogates).
    return text.encode("utf-8", errors="replace")


def section(heading: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def paragraph(text: str, kind: str = "") -> str:
    """``kind``: ``"quiet"`` or ``"lead"``."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


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
    """A table. The second line of a cell is set small; the row of index ``marked`` stands out; ``text`` aligns left."""
    lines = ['<div class="wide"><table class="text">' if text else '<div class="wide"><table>']
    if caption:
        lines.append(f"<caption>{escape(caption)}</caption>")
    if head:
        # A name in snake case may break where it has its underscores.
        names = (escape(name).replace("_", "_<wbr>") for name in head)
        lines.append("<thead><tr>" + "".join(f'<th scope="col">{name}</th>' for name in names) + "</tr></thead>")
    lines.append("<tbody>")
    for index, row in enumerate(rows):
        cells = []
        for cell in row:
            first, _, second = cell.partition("\n")
            small = f"<small>{escape(second)}</small>" if second else ""
            cells.append(f"<td>{escape(first)}{small}</td>")
        lines.append(('<tr class="marked">' if index == marked else "<tr>") + "".join(cells) + "</tr>")
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def figure(png: bytes, *, alt: str, caption: str, wide: bool = True) -> str:
    """An image inside the page; ``alt`` is for those who do not see it. A wide one scrolls on a narrow screen."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
    image = f'<figure><img src="{source}" alt="{escape(alt)}"><figcaption>{escape(caption)}</figcaption></figure>'
    return f'<div class="wide">{image}</div>' if wide else image


def figures(*parts: str) -> str:
    """Figures beside each other where there is room."""
    return '<div class="figures">\n' + "\n".join(parts) + "\n</div>"
