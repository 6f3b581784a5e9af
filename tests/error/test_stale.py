"""Errors that an edited file explains though it has no line in the traceback: the file has by now what is asked for."""

from __future__ import annotations

import sys

import pytest

from tests.shell import started

BEFORE = """
def f(x, alpha=1):
    return x

def same(x):
    return x

class Net:
    def go(self):
        return 1
"""
NOW = """
def f(x, alpha=1, gamma=2):
    return x * gamma

def same(x):
    return x

def new(x):
    return x

class New:
    pass

class Net:
    def __init__(self, width=3):
        self.width = width

    def go(self):
        return 1

    def stop(self):
        return 2
"""


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "edited_losses.py"
    file.write_text(BEFORE)
    with started("x = 1") as book:
        book.run("import edited_losses\nfrom edited_losses import f, same, Net")
        book.run(f"open({str(file)!r}, 'w').write({NOW!r})")
        yield book
    sys.modules.pop("edited_losses", None)


def codes(notebook, cell):
    assert notebook.run(cell).error is not None
    return [finding.code for finding in notebook.run("%explain").result]


def test_what_the_file_has_by_now(notebook) -> None:
    for cell in (
        "edited_losses.new(1)",
        "f(1, gamma=3)",
        "Net().stop()",
        "Net(width=4)",
        "from edited_losses import New",
    ):
        assert codes(notebook, cell) == ["error/stale-import"], cell


def test_what_it_has_not_by_now_either(notebook) -> None:
    assert [codes(notebook, cell) for cell in ("f(1, delta=3)", "same()")] == [["error/wrong-argument"]] * 2
    for cell in ("edited_losses.nope", "Net().wait()", "import json; json.new(1)"):
        assert codes(notebook, cell) == [], cell
    assert codes(notebook, "from edited_losses import Nope") == ["error/module-not-found"]
