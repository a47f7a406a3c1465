"""Two checks of the pages: the reference has every public name, and every link within the site has a target.

Both are warnings, which `make docs` turns into errors.
"""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

import focalkern

logger = logging.getLogger(__name__)
MODULES = {"bootstrap", "files", "losses", "metrics", "plots", "reference"}


def missing_names(documented: set[str]) -> list[str]:
    """Names of dir(focalkern), and of its documented modules, that no page of the reference describes."""
    public = [f"focalkern.{name}" for name in dir(focalkern) if not name.startswith("__") and name not in MODULES]
    for module in ("bootstrap", "files", "metrics", "plots", "reference"):
        public += [f"focalkern.{module}.{name}" for name in getattr(focalkern, module).__all__]
    return sorted(set(public) - documented)


def check_names(app: Sphinx, env: object) -> None:
    for name in missing_names(set(app.env.domains.python_domain.objects)):
        logger.warning("no page of the reference describes %s", name)


class Links(HTMLParser):
    """The links and images of a page, and the anchors in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            if value and ((tag, name) in {("a", "href"), ("link", "href"), ("img", "src"), ("script", "src")}):
                self.links.append(value)


def broken_links(folder: Path) -> list[tuple[str, str]]:
    pages = {path.resolve(): Links(path) for path in folder.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        if path.relative_to(folder.resolve()).parts[0] in ("_static", "_modules"):  # templates; sources
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            no_anchor = parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].anchors
            if not to.is_file() or no_anchor:
                broken.append((path.name, link))
    return broken


def check_links(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        for page, link in broken_links(Path(app.outdir)):
            logger.warning("%s: nothing is at %s", page, link)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("env-check-consistency", lambda app, env: check_names(app, env))
    app.connect("build-finished", check_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
