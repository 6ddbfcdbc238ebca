"""Collect the messages of the package's errors and warnings from its source, by the kind of error."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hvd_compress"
GAP = "{…}"  # what an f-string fills in
_LEAST = 12  # letters, below which a text says nothing without what fills its gaps


def said(node: ast.AST) -> str | None:
    """Return the text of a string, an f-string or several joined by "+", else None.

    Example:
        >>> said(ast.parse("f'{n} of ' + kind", mode="eval").body)
        '{…} of {…}'
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else GAP for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = said(node.left), said(node.right)
        return None if left is None and right is None else (left or GAP) + (right or GAP)
    return None


def _trees(folder: Path) -> list[ast.Module]:
    return [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.py"))]


def strings(folder: Path = PACKAGE) -> Iterator[str]:
    """Return all strings of all files below a folder."""
    for tree in _trees(folder):
        for node in ast.walk(tree):
            if (text := said(node)) is not None:
                yield text


def messages(folder: Path = PACKAGE) -> dict[str, list[str]]:
    """Return the texts of errors and warnings by their kind, also those that a function of the package puts together.

    Example:
        >>> "MismatchError" in messages()
        True
    """
    trees = _trees(folder)
    returned = _returned(trees)
    found: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        named = _named(tree, returned)
        for node in ast.walk(tree):
            kind = _kind(node)
            if kind is None or not isinstance(node, ast.Call) or not node.args:
                continue
            for text in _texts(node.args[0], named, returned):
                if len(text.replace(GAP, "").strip()) > _LEAST:
                    found[kind].add(" ".join(text.split()))
    return {kind: sorted(texts, key=str.lower) for kind, texts in sorted(found.items())}


def _kind(node: ast.AST) -> str | None:
    """Return which error or warning a call makes."""
    if not isinstance(node, ast.Call):
        return None
    name = _called(node)
    if name == "warn":
        given = [argument.id for argument in node.args[1:2] if isinstance(argument, ast.Name)]
        return given[0] if given else "UserWarning"
    return name if isinstance(node.func, ast.Name) and name.endswith("Error") else None


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _returned(trees: list[ast.Module]) -> dict[str, list[str]]:
    """Return the texts that functions return, by their names; two of one name count together."""
    found: dict[str, list[str]] = defaultdict(list)
    for tree in trees:
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Return) and node.value is not None:
                        found[function.name] += [text for text in [said(node.value)] if text is not None]
    return found


def _named(tree: ast.Module, returned: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the texts that names of a file stand for."""
    found: dict[str, list[str]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] += _texts(node.value, {}, returned)
    return found


def _texts(node: ast.AST, named: Mapping[str, list[str]], returned: Mapping[str, list[str]]) -> list[str]:
    text = said(node)
    if text is not None:
        return [text]
    if isinstance(node, ast.Name):
        return named.get(node.id, [])
    return returned.get(_called(node), []) if isinstance(node, ast.Call) else []
