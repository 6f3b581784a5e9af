"""What of the notebook explains one exception."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from nbdebug.chapters.notebook.cells import History
from nbdebug.chapters.notebook.classes import redefined
from nbdebug.chapters.notebook.facts import NotebookFacts
from nbdebug.chapters.notebook.files import stale_modules
from nbdebug.chapters.notebook.order import too_early
from nbdebug.chapters.notebook.probe import met_from
from nbdebug.chapters.notebook.rules import name_all
from nbdebug.finding import Finding
from nbdebug.observe.named import own


def explaining(error: BaseException, names: Mapping[str, Any], shell: Any) -> tuple[Finding, ...]:
    """The findings that belong to the exception; () where the notebook has no part in it."""
    with torch._C.DisableTorchFunctionSubclass():
        history, mine = History.of(shell), own(names)
        files = _files(error)
        stale, _ = stale_modules(mine, history, psutil.Process().create_time())
        classes = [one for one in redefined(mine, met_from(mine), history, error) if one.seen == "exception"] if (
            issubclass(type(error), (TypeError, AttributeError)) or "pickl" in type(error).__name__.lower()) else []
        return tuple(name_all(NotebookFacts(
            stale=tuple(one for one in stale if one.file in files), classes=tuple(classes),
            early=tuple(too_early(mine, history, error)))))


def _files(error: BaseException) -> set[str]:
    """The base names of the files in its traceback."""
    at, found = vars(BaseException)["__traceback__"].__get__(error), set()
    while at is not None:
        found.add(os.path.basename(at.tb_frame.f_code.co_filename))
        at = at.tb_next
    return found
