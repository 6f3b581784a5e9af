"""Modules against the ends of a type: read from plain facts, drawn, and said in words."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from nbdebug.report import Plot, Report
from nbdebug.views.plots import ranges
from nbdebug.views.plots.marks import svg


def data(count: int = 3, dtype: str = "float16") -> dict[str, Any]:
    modules = [
        {"name": f"blocks.{i}.norm<b>", "values": [-12.0 - i, 3.0 + i], "kept": i == 1, "gradient": -20.5}
        for i in range(count)
    ]
    return {"dtype": dtype, "modules": modules}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_is_drawn_and_said(dtype: str) -> None:
    seen = ranges.read(data(dtype=dtype))
    assert seen is not None and "kept in float32: blocks.1.norm<b>" in seen.sentence() and "2^5.0" in seen.sentence()
    drawn = svg(seen.drawing())
    ElementTree.fromstring(drawn)
    assert drawn.count("kept in float32") == 1 and "<b>" not in drawn
    report = Report("precision(…)", plots=(Plot("ranges", data(dtype=dtype)),))
    assert "kept in float32" in str(report) and "<img" in report._repr_mimebundle_()["text/html"]
    assert report.figure().get_size_inches()[0] > 6


def test_of_many_modules_those_near_the_ends_are_shown_and_the_kept_ones() -> None:
    seen = ranges.read(data(90))
    assert seen is not None and len(seen.lines) == ranges.MOST and seen.more == 90 - ranges.MOST
    assert any(line.kept for line in seen.lines)
    assert [line.name for line in seen.lines] == sorted(
        (line.name for line in seen.lines), key=lambda name: int(name.split(".")[1])
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": "int8", "modules": []},
        {"dtype": "float16", "modules": [{"values": None}, 3]},
    ],
)
def test_nothing_to_draw(given: dict[str, Any]) -> None:
    assert ranges.read(given) is None
