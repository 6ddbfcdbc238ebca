"""How Sphinx makes the site of this folder; `make docs` calls it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# after the paths and settings above
from docutils import nodes  # noqa: E402
from inside import inner_modules  # noqa: E402
from links import ADDED, page_text, source_of  # noqa: E402
from messages import messages  # noqa: E402
from sphinx.transforms.post_transforms import SphinxPostTransform  # noqa: E402
from sphinx.util.docutils import SphinxDirective  # noqa: E402

from hvd_compress import __version__  # noqa: E402

if find_spec("tensorflow") is None:
    raise SystemExit("make docs needs TensorFlow, which has no wheel for this Python; take Python 3.11 to 3.13")

project = "hvd_compress"
copyright = "the authors of hvd_compress, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
root_doc = "index"

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4

# docstrings give shapes and units, which say more than annotations
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "literal"  # what docstrings set in single backticks
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
add_module_names = False
# users call methods of wrapped optimizers without the class that holds them
toc_object_entries_show_parents = "hide"
python_display_short_literal_types = True

smartquotes = False  # "--gpu" stays what one types

nitpicky = True
# other projects' names are no pages of this site
nitpick_ignore_regex = [("py:.*", r"(?!hvd_compress).*")]

html_theme = "furo"
html_title = f"hvd_compress {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

linkcheck_timeout = 20
linkcheck_ignore = [r"https?://localhost.*"]


def _read(app: Any, docname: str, content: list[str]) -> None:
    """Lay files of the repository that are pages, too, into the site, and turn their links into the site's."""
    app.env.note_dependency(str(source_of(docname)))
    content[0] = page_text(docname, content[0])


_RANGE = re.compile(r"(?<![\w.])([-+]?[\d.]+)–([-+]?[\d.]+)(?![\w.])")
_MINUS = re.compile(r"(?<![^ (])-(?=\d)")
_UNIT = re.compile(r"(?<=\d) (?=(?:%|µs|ms|s|[kMG]B|[KMG]iB|[MG]bit/s|points?)(?!\w))")


class Unbroken(SphinxPostTransform):
    """Keep ranges, and figures with their units, on one line, and set minus signs."""

    default_priority = 900

    def run(self, **_: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            if isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.raw | nodes.comment):
                continue
            whole = _UNIT.sub("\u00a0", _MINUS.sub("\u2212", _RANGE.sub(_range, text.astext())))
            if whole != text.astext():
                text.parent.replace(text, nodes.Text(whole))


def _range(found: re.Match[str]) -> str:
    low, high = (end.replace("-", "\u2212") for end in found.groups())
    has_sign = not (low[0] + high[0]).isdecimal()
    return f"{low}\u00a0to\u00a0{high}" if has_sign else f"{low}\u2060–\u2060{high}"


class Help(SphinxDirective):
    """Show what a subcommand prints for --help, as it is now."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        command = [sys.executable, "-m", "hvd_compress", self.arguments[0], "--help"]
        environment = {**os.environ, "COLUMNS": "92", "PYTHONPATH": str(DOCS.parent), "NO_COLOR": "1"}
        said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        text = said.replace(str(Path.home()), "~")
        return [nodes.literal_block(text, text, language="text")]


class Messages(SphinxDirective):
    """List all messages of the package."""

    def run(self) -> list[nodes.Node]:
        parts: list[nodes.Node] = []
        for kind, texts in messages().items():
            section = nodes.section(ids=[kind.lower()], names=[kind])
            section += nodes.title(kind, kind)
            section += nodes.bullet_list("", *(nodes.list_item("", nodes.paragraph(t, t)) for t in texts))
            parts.append(section)
        return parts


class InnerModules(SphinxDirective):
    """List the modules below the edges, and what each name of theirs is for."""

    def run(self) -> list[nodes.Node]:
        lines = []
        for module in inner_modules():
            lines += [f"`{module.name}`: {module.purpose}", ""]
            lines += [f"- `{name}`: {purpose}" if purpose else f"- `{name}`" for name, purpose in module.names.items()]
            lines += [""]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Any) -> None:
    """Tell Sphinx of what is above."""
    app.connect("source-read", _read)
    # pages that an earlier build has read are read again after a change of these
    app.add_config_value("added_to_pages", repr(ADDED), "env")
    app.add_post_transform(Unbroken)
    app.add_directive("cli-help", Help)
    app.add_directive("all-messages", Messages)
    app.add_directive("inner-modules", InnerModules)
