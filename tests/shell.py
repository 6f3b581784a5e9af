"""A real IPython shell for tests: its cells, what they showed, what Tab offers."""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import nbdebug


class Notebook:
    """A shell and what its cells showed."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell

    def run(self, text: str) -> SimpleNamespace:
        """Run a cell as a notebook does. result: the last expression; shown: the text of what was displayed."""
        with capture_output() as seen:
            done = self.shell.run_cell(textwrap.dedent(text), store_history=True)
        shown = "\n".join([seen.stdout, *(output.data["text/plain"] for output in seen.outputs)])
        return SimpleNamespace(
            result=done.result,
            error=done.error_in_exec or done.error_before_exec,
            shown=shown,
            data=[output.data for output in seen.outputs],
            printed=seen.stdout + seen.stderr,
        )


def _new_shell() -> InteractiveShell:
    """One without history on disk, in the place of the one before."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    InteractiveShell.clear_instance()
    return InteractiveShell.instance(config=config)


def _close(shell: InteractiveShell) -> None:
    """At the process's end nothing waits for it: each shell's exit would collect the garbage of all tests."""
    InteractiveShell.clear_instance()
    atexit.unregister(shell.atexit_operations)


@contextlib.contextmanager
def started(setup: str) -> Iterator[Notebook]:
    """A shell without history on disk; In [1] loads nbdebug, In [2] is `setup`."""
    book = Notebook(_new_shell())
    try:
        assert book.run("%load_ext nbdebug").error is None
        assert book.run(setup.lstrip()).error is None
        yield book
    finally:
        book.run("%unload_ext nbdebug")
        _close(book.shell)


@contextlib.contextmanager
def of_cells(cells: list[str], compiler: Any = None) -> Iterator[tuple[InteractiveShell, BaseException | None]]:
    """A shell in which these cells ran, one by one, and nbdebug is not loaded: In [1] is the first; the exception of
    the first one that failed and did not run well later, if any did: those behind it may fail for want of it.
    compiler: the class that names and compiles cells; left out: the terminal's. Modules that the cells imported from a
    temporary folder are forgotten again."""
    shell, failed = _new_shell(), dict[str, BaseException]()
    before = {
        name: getattr(sys, name)
        for name in ("last_type", "last_value", "last_traceback", "last_exc", "path")
        if hasattr(sys, name)
    }
    before["path"], modules = list(sys.path), set(sys.modules)
    if compiler is not None:
        shell.compile = compiler()
    try:
        with warnings.catch_warnings(), np.errstate(), capture_output():
            for cell in cells:
                done = shell.run_cell(cell, store_history=True)
                error = done.error_in_exec or done.error_before_exec
                failed.pop(cell, None) if error is None else failed.setdefault(cell, error)
        yield shell, next(iter(failed.values()), None)
    finally:
        _close(shell)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        for name in set(sys.modules) - modules:
            file = str(getattr(sys.modules[name], "__file__", ""))
            if file.startswith(tempfile.gettempdir()) and "site-packages" not in file:
                del sys.modules[name]
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if name not in before and hasattr(sys, name):
                delattr(sys, name)
        for name, value in before.items():
            setattr(sys, name, value)


def completions(notebook: Notebook, typed: str) -> list[str]:
    with provisionalcompleter():
        return [match.text for match in notebook.shell.Completer.completions(typed, len(typed))]


def in_this_checkout() -> dict[str, str]:
    """The environment of a kernel that imports this very nbdebug."""
    root = str(pathlib.Path(nbdebug.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
