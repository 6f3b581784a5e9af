"""What of the notebook explains one exception."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from nbdebug.chapters.notebook.cells import History
from nbdebug.chapters.notebook.classes import redefined
from nbdebug.chapters.notebook.facts import NotebookFacts, StaleModule
from nbdebug.chapters.notebook.files import stale_modules
from nbdebug.chapters.notebook.order import too_early
from nbdebug.chapters.notebook.probe import met_from
from nbdebug.chapters.notebook.rules import name_all
from nbdebug.finding import Finding
from nbdebug.observe.named import own

MODULES = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'|cannot import name '(\w+)' from '([\w.]+)'")
CALLS = re.compile(r"((?:\w+\.)*\w+)\(\) (?:got an unexpected keyword argument '(\w+)'|takes|missing)")
OBJECTS = re.compile(r"(?:type object )?'(\w+)'(?: object)? has no attribute '(\w+)'")
"""How Python says that something lacks what was asked of it."""


def explaining(error: BaseException, names: Mapping[str, Any], shell: Any) -> tuple[Finding, ...]:
    """The findings that belong to the exception; () where the notebook has no part in it."""
    with torch._C.DisableTorchFunctionSubclass():
        history, mine = History.of(shell), own(names)
        files, said = _files(error), _said(error)
        stale, _ = stale_modules(mine, history, psutil.Process().create_time())
        classes = (
            [one for one in redefined(mine, met_from(mine), history, error) if one.seen == "exception"]
            if (issubclass(type(error), (TypeError, AttributeError)) or "pickl" in type(error).__name__.lower())
            else []
        )
        return tuple(
            name_all(
                NotebookFacts(
                    stale=tuple(one for one in stale if one.file in files or _meant(one, said)),
                    classes=tuple(classes),
                    early=tuple(too_early(mine, history, error)),
                )
            )
        )


def _said(error: BaseException) -> str:
    given = vars(BaseException)["args"].__get__(error)
    return given[0] if given and type(given[0]) is str else ""


def _meant(one: StaleModule, said: str) -> bool:
    """Whether the message asks a module, or a class or function of it, for what its file has by now: the file itself
    has no line in such a traceback."""
    changed = {part for name in one.changed for part in (name, name.rpartition(".")[2])}
    if (asked := MODULES.search(said)) is not None:
        module, name = (asked[1], asked[2]) if asked[1] else (asked[4], asked[3])
        return module == one.module and name in changed
    if (asked := CALLS.match(said)) is not None:
        name = asked[1].removesuffix(".__init__")
        known = name in one.changed or f"{name}.__init__" in one.changed or "takes no arguments" in said
        return known and _takes(one.module, name, asked[2])
    asked = OBJECTS.search(said)
    return asked is not None and f"{asked[1]}.{asked[2]}" in one.changed


def _takes(module: str, name: str, argument: str | None) -> bool:
    """Whether the file has a function, method or class of this name that takes such an argument."""
    file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
    try:
        with open(file or "", encoding="utf-8") as opened:
            body: list[ast.stmt] = ast.parse(opened.read()).body
    except (OSError, SyntaxError, ValueError):
        return False
    for part in [*name.split("."), "__init__"]:
        found = next((n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part), None)
        if found is None:
            return False
        if isinstance(found, ast.FunctionDef):
            given = found.args
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            return argument is None or argument in names or given.kwarg is not None
        body = found.body
    return False


def _files(error: BaseException) -> set[str]:
    """The base names of the files in its traceback."""
    at, found = vars(BaseException)["__traceback__"].__get__(error), set()
    while at is not None:
        found.add(os.path.basename(at.tb_frame.f_code.co_filename))
        at = at.tb_next
    return found
