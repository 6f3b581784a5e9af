"""The line that a report shows is the line that the user wrote."""

from __future__ import annotations

import linecache

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from nbdebug.observe.locations import Site, source_text

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
