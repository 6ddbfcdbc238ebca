"""Constants of kernels stand behind the operator where a tensor stands on the other side.

Triton 3.7, which the torch 2.13 of the index brings, interprets `constant + tensor` as a constant, and then refuses it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "hvd_compress" / "kernels" / "cuda"


def _is_constant(node: ast.expr) -> bool:
    """Whether it is made of numbers and names of constants, which are in capitals, alone."""
    names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    return not any(isinstance(each, ast.Call) for each in ast.walk(node)) and all(name.isupper() for name in names)


def _constants_before_tensors(source: str) -> Iterator[str]:
    for function in ast.walk(ast.parse(source)):
        if not (isinstance(function, ast.FunctionDef) and function.decorator_list):
            continue
        arguments = {argument.arg for argument in function.args.args}
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and _is_constant(node.left) and not _is_constant(node.right):
                named = {each.id for each in ast.walk(node.left) if isinstance(each, ast.Name)}
                # arguments in capitals are numbers there
                if named - arguments:
                    yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("file", sorted(path.name for path in KERNELS.glob("*.py")))
def test_constants_stand_behind_tensors(file: str) -> None:
    assert list(_constants_before_tensors((KERNELS / file).read_text())) == []


def test_one_that_does_not_is_found() -> None:
    kernel = "@triton.jit\ndef kernel(x, WIDTH):\n    a = WIDTH + x\n    b = 8 + x\n    return HEADER + x\n"
    assert list(_constants_before_tensors(kernel)) == ["line 5: HEADER + x"]
