"""Collect the messages of the package's errors from its source, by the kind of error."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hvd_compress"
GAP = "{…}"  # what an f-string fills in


def said(node: ast.AST) -> str | None:
    """Return the text of a string or an f-string, else None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else GAP for v in node.values)
    return None


def strings(folder: Path = PACKAGE) -> Iterator[str]:
    """Return all strings of all files below a folder."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (text := said(node)) is not None:
                yield text


def messages(folder: Path = PACKAGE) -> dict[str, list[str]]:
    """Return the texts that are raised, by the name of the error; not those that a function puts together.

    Example:
        >>> "MismatchError" in messages()
        True
    """
    found: dict[str, set[str]] = defaultdict(set)
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
                text = said(call.args[0])
                if text is not None and call.func.id.endswith("Error") and len(text.replace(GAP, "").strip()) > 12:
                    found[call.func.id].add(" ".join(text.split()))
    return {kind: sorted(texts, key=str.lower) for kind, texts in sorted(found.items())}
