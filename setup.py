"""The parts of the package's metadata that follow from where its source is kept; the others are in pyproject.toml.

Links and pictures of the README lead to files beside it, which an index page does not have. Where pyproject.toml names
a home, they lead there; else the page says which file is meant.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def project_urls(home: str) -> dict[str, str]:
    """What an index page lists beside the text; nothing without a home."""
    if not home:
        return {}
    return {"Source": home, "Changelog": f"{home}/blob/main/CHANGELOG.md", "Issues": f"{home}/issues"}


def index_page(readme: str, home: str) -> str:
    """The README without links that lead nowhere."""

    def absolute(link: re.Match[str]) -> str:
        mark, text, place = link.groups()
        if re.match(r"[a-z]+:|#", place):
            return link.group()
        if home:
            return f"{mark}[{text}]({home}/{'raw' if mark else 'blob'}/main/{place})"
        file = place.partition("#")[0]
        return f"`{file}`" if text == file else f"{text} (`{file}`)"

    return re.sub(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)", absolute, readme)


if __name__ == "__main__":
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    repository = settings["tool"]["hvd_compress"]["home"].rstrip("/")
    setup(
        long_description=index_page((ROOT / "README.md").read_text(encoding="utf-8"), repository),
        long_description_content_type="text/markdown",
        project_urls=project_urls(repository),
    )
