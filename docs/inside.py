"""Collect the names that modules of the package offer each other, with what their docstrings say first."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import NamedTuple

import hvd_compress

EDGES = {"ddp", "keras", "tensorflow", "torch"}


class Inner(NamedTuple):
    """A module below the edges: its name, what it is for, and its names with what each of them is for."""

    name: str
    purpose: str
    names: dict[str, str]


def inner_modules() -> list[Inner]:
    """Return all modules directly below the package that import no framework.

    Example:
        >>> "ThreadRanks" in {module.name: module for module in inner_modules()}["hvd_compress.thread_ranks"].names
        True
    """
    below = [module.name for module in pkgutil.iter_modules(hvd_compress.__path__)]
    names = [name for name in below if name not in EDGES and not name.startswith("_")]
    return [_described(importlib.import_module(f"hvd_compress.{name}")) for name in names]


def _described(module: ModuleType) -> Inner:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    purposes = {name: _purpose(getattr(module, name)) for name in sorted(names)}
    return Inner(module.__name__, _first_sentence(module), purposes)


def _purpose(value: object) -> str:
    """Return what a class, a function or a module is for; a constant has no docstring of its own."""
    has_words = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
    return _first_sentence(value) if has_words else ""


def _first_sentence(value: object) -> str:
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0].split()
    sentence: list[str] = []
    for word in paragraph:
        sentence.append(word)
        if word.endswith("."):
            break
    return " ".join(sentence)
