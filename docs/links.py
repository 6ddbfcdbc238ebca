"""Turn links that lead to files of the repository into those of the site.

Some pages of the site are files that readers of the repository open where they lie, such as ARCHITECTURE.md. They are
not copied: their stub here says which file it is.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {
    "ARCHITECTURE.md": "how/architecture",
    "CONTRIBUTING.md": "how/contributing",
    "SECURITY.md": "how/security",
    "CHANGELOG.md": "changelog",
    "README.md": "index",
    "benchmarks/results/README.md": "results/measured",
}
INCLUDED = {page: file for file, page in PAGES.items() if page != "index"}
# readers of the repository see these pages without what only the site needs
ADDED = {"decisions/README": "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"}
LINK = re.compile(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<place>[^)\s]+)\)")
FENCE = re.compile(r"^(`{3,}|~{3,}|:{3,}).*?^\1$", re.M | re.S)


def source_of(page: str) -> Path:
    """Return the file that holds the text of a page."""
    return ROOT / INCLUDED.get(page, f"docs/{page}.md")


def page_text(page: str, stub: str) -> str:
    """Return the text of a page with links that lead somewhere on the site, or name the file of the repository."""
    source = source_of(page)
    text = (source.read_text(encoding="utf-8") if page in INCLUDED else stub) + ADDED.get(page, "")
    parts, end = [], 0
    # programs are left as they are
    for fence in FENCE.finditer(text):
        parts += [_changed(text[end : fence.start()], page, source), fence.group()]
        end = fence.end()
    return "".join([*parts, _changed(text[end:], page, source)])


def _changed(text: str, page: str, source: Path) -> str:
    return LINK.sub(lambda link: _site_link(link, page, source), text)


def _site_link(link: re.Match[str], page: str, source: Path) -> str:
    place, _, anchor = link["place"].partition("#")
    if not place or re.match(r"[a-z]+:", place):
        return link.group()
    file = os.path.relpath(source.parent / place, ROOT)
    here = f"docs/{os.path.dirname(page)}"
    if link["mark"]:
        return f"![{link['text']}]({os.path.relpath(file, here)})"
    target = f"docs/{PAGES[file]}.md" if file in PAGES else file
    if target.startswith("docs/") and target.endswith(".md"):
        return f"[{link['text']}]({os.path.relpath(target, here)}{'#' * bool(anchor)}{anchor})"
    if not (ROOT / file).exists():
        return link.group()  # Sphinx says that it leads nowhere
    name = link["text"].strip("`")
    return f"`{file}`" if name in (file, os.path.basename(file)) else f"{link['text']} (`{file}`)"
