"""Hazards are named with the cell that brought them in; the same notebook without them is left in peace."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from ipykernel.compiler import XCachingCompiler

import nbdebug
from nbdebug import Report
from tests.notebook.books import BOOKS, HEALTHY, Book
from tests.shell import of_cells


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook's folder, in which its modules lie."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def checked(cells: list[str], compiler: Any = None) -> Report:
    with of_cells(cells, compiler) as (shell, _):
        return nbdebug.check_notebook(shell=shell)


def cell_of(report: Report) -> int:
    return int((report.findings[0].where.cell or "In [0]")[4:-1]) - 1


@pytest.mark.parametrize("name", BOOKS)
def test_the_cause_and_its_cell_are_named(name: str) -> None:
    book: Book = BOOKS[name]
    report = checked(book.cells)
    assert [f.code for f in report] == [book.code], str(report)
    assert cell_of(report) == book.cell, str(report)
    missing = [word for word in book.names if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(report))]
    assert not missing, str(report)
    assert all(fix.code.strip() for fix in report.findings[0].fixes) and report.findings[0].fixes
    assert not report.unchecked


@pytest.mark.parametrize("name", [name for name, book in BOOKS.items() if len(set(book.cells)) < len(book.cells)])
def test_a_kernel_names_cells_by_their_text_and_the_cell_is_found_all_the_same(name: str) -> None:
    """Two runs of one text have one file name in a kernel, that of the last run; in a terminal each has its own."""
    book: Book = BOOKS[name]
    report = checked(book.cells, XCachingCompiler)
    assert [f.code for f in report] == [book.code], str(report)
    assert cell_of(report) == book.cell, str(report)


@pytest.mark.parametrize("name", BOOKS)
def test_the_repaired_notebook_is_left_in_peace(name: str) -> None:
    report = checked(BOOKS[name].twin)
    assert report.ok, str(report)
    assert not report.unchecked


@pytest.mark.parametrize("name", HEALTHY)
def test_an_untidy_notebook_that_is_well_is_left_in_peace(name: str) -> None:
    report = checked(HEALTHY[name])
    assert report.ok, str(report)
    assert not report.unchecked
