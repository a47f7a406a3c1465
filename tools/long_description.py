"""The package's long description: README.md for the page of a package index, outside its folder.

With the environment variable FOCALKERN_REPOSITORY (https://github.com/OWNER/focalkern), its pictures and links point to
the files of the version's tag there. Without the variable, a picture is replaced by its alternative text, and a link by
its text.
"""

import re

CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)]+)\)")
PICTURE = re.compile(r"<picture>.*?alt=\"([^\"]*)\".*?</picture>", re.DOTALL)
ADDRESS = re.compile(r"((?:src|srcset)=\")(?!\w+:)")


def long_description(readme: str, repository: str, version: str) -> str:
    repository = repository.rstrip("/")
    page, file = (f"{repository}/{kind}/v{version}/" for kind in ("blob", "raw"))

    def converted(text: str) -> str:
        if not repository:
            return LINK.sub(r"\1", PICTURE.sub(lambda found: "*" + " ".join(found[1].split()) + "*", text))
        return LINK.sub(rf"[\1]({page}\2)", ADDRESS.sub(rf"\1{file}", text))

    # Code is not changed: the odd elements of the list are code blocks.
    return "".join(part if place % 2 else converted(part) for place, part in enumerate(CODE.split(readme)))


def version_of(source: str) -> str:
    found = re.search(r"^__version__ = \"([^\"]+)\"$", source, re.MULTILINE)
    assert found, "focalkern/_version.py has no __version__"
    return found[1]
