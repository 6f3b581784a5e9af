"""The line that a report shows is the line that the user wrote."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
import types

import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager

import nbdebug
from nbdebug.observe import sources
from nbdebug.observe.locations import Site, edited_since_import, is_users_file, source_text
from nbdebug.observe.variables import is_user_module
from nbdebug.report import Where

LINES = [
    "loss = step()",
    "%mem step()",
    "report = %nan_trace step(batch['x'])",
    "%preflight",
    "%diagnose train('a\\'b')",
]


@pytest.mark.parametrize("line", LINES)
def test_a_magic_is_shown_as_it_was_typed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TransformerManager().transform_cell(line)
    monkeypatch.setitem(linecache.cache, "<cell>", (len(source), None, source.splitlines(True), "<cell>"))
    assert source_text(Site("<cell>", 1, "<module>")) == line


def test_a_cell_magic_is_shown_by_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    source = TransformerManager().transform_cell("%%nan_trace --steps 3\nfor x in data:\n    step(x)\n")
    monkeypatch.setitem(linecache.cache, "<cell>", (len(source), None, source.splitlines(True), "<cell>"))
    assert source_text(Site("<cell>", 1, "<module>")) == "%%nan_trace --steps 3"


def test_no_source_no_text() -> None:
    assert source_text(None) is None
    assert source_text(Site("<nowhere>", 1, "f")) is None


def test_a_file_that_was_edited_after_its_import_is_not_quoted_as_it_is_now(tmp_path, monkeypatch) -> None:
    path = tmp_path / "edited_model.py"
    text = "import torch\n\n\ndef loss(x):\n    return torch.log(x).sum()\n"
    path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    loss = importlib.import_module("edited_model").loss

    def examined() -> Where:
        return nbdebug.nan_trace(lambda: loss(torch.zeros(3, requires_grad=True))).findings[0].where

    try:
        where = examined()
        assert where.text == "return torch.log(x).sum()" and not edited_since_import(str(path))
        os.utime(path, (1, 1))  # written again, the same text
        assert not edited_since_import(str(path))
        path.write_text(text.replace("def loss", "# a line more\ndef loss"))
        assert edited_since_import(str(path)) and sources.tree_of(str(path)) is None
        where = examined()
        assert where.line == 5 and "was edited after its import" in (where.text or "")
    finally:
        del sys.modules["edited_model"]


def test_a_folder_of_pip_install_target_holds_packages_and_where_the_user_works_does_not(tmp_path, monkeypatch) -> None:
    (tmp_path / "some-1.0.dist-info").mkdir()
    file = str(tmp_path / "some.py")
    loaded = types.ModuleType("some_package_in_a_target_folder")
    loaded.__file__ = file
    monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    assert is_users_file(file)
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_users_file(file) and is_users_file(__file__)
    assert not is_user_module(loaded.__name__) and is_user_module(__name__)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path.parent)
    assert is_users_file(file)
