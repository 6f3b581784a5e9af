"""Memory and the tables of a report: drawn in every view, whole in a DataFrame, and safe from what the user named."""

from __future__ import annotations

import base64
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from nbdebug.report import Finding, Plot, Report, Table
from nbdebug.text import bytes_of, size
from nbdebug.views.plots import memory
from nbdebug.views.plots.marks import svg

MIB = 2**20


def report(found: bool = False, **changed: Any) -> Report:
    held: dict[str, Any] = {
        "title": "Peak of one training step",
        "parts": [["activations", 50 * MIB], ["parameters", 10 * MIB]],
        "total": 60 * MIB,
        "limit": 40 * MIB,
        "course": [[0, 10 * MIB], [5, 60 * MIB], [9, 10 * MIB]],
        "events": {"forward": 0, "backward": 6},
    }
    rows = [[f"history[{i}]<b>", (40 - i) * MIB, None] for i in range(40)]
    tables = [
        Table("By owner", ["owner", "size (bytes)", "shape"], rows, "views count once"),
        Table("By kind", ["kind", "count"], [["variable", 40]]),
    ]
    findings = (Finding("memory/graph-retained", "`history` keeps every graph"),) if found else ()
    return Report("mem()", findings, tables=tables, plots=(Plot("memory", held | changed),))


@pytest.mark.parametrize("found", [False, True])
def test_text_and_html_show_the_sizes_and_say_what_they_left_out(found: bool) -> None:
    given = report(found)
    text, html = str(given.full()), given._repr_mimebundle_()["text/html"]
    for shown in (text, html):
        assert "40.0 MiB" in shown and "By kind" in shown and "views count once" in shown and "10 more" in shown
        assert "(bytes)" not in shown
    assert "60.0 MiB of 40.0 MiB" in text and "<b>" not in html
    assert html.count("<details") >= (2 if found else 1)


def test_the_picture_stands_in_words_and_is_well_formed() -> None:
    seen = memory.read(report().plot("memory"))
    assert seen is not None and seen.peak == (5.0, 60.0 * MIB)
    image = str(report()._repr_mimebundle_()["text/html"])
    assert "activations 50.0 MiB" in image and "60.0 MiB at the peak" in image
    ElementTree.fromstring(base64.b64decode(re.search(r"base64,([^\"]+)", image)[1]))
    assert "more than there is" in svg(seen.drawing())
    assert report().figure().get_size_inches()[1] > 3


@pytest.mark.parametrize(
    "data",
    [{}, {"parts": "x", "course": [1, [2]]}, {"parts": [["a", float("nan")]], "course": [[0, 1]]}],
)
def test_nothing_to_draw(data: dict[str, Any]) -> None:
    assert memory.read(data) is None
    assert "Nothing was found" in str(Report("mem()", plots=(Plot("memory", data),)))


def test_many_parts_and_small_courses() -> None:
    seen = memory.read({"parts": [[f"p{i}", 100 - i] for i in range(30)], "course": [[0, 0], [1, 0]]})
    assert seen is not None and len(seen.parts) == 10 and seen.parts[-1][0] == "21 others"
    assert sum(count for _, count in seen.parts) == seen.total
    ElementTree.fromstring(svg(seen.drawing()))


def test_a_frame_has_every_row_and_raw_numbers() -> None:
    table = report().frame()
    assert len(table) == 40 and table["size (bytes)"].sum() == sum(range(1, 41)) * MIB
    assert report().frame("By kind")["count"].tolist() == [40]
    with pytest.raises(ValueError, match="'By owner', 'By kind'"):
        report().frame("by owner")
    with pytest.raises(ValueError, match="no table"):
        Report("mem()").frame()


@pytest.mark.parametrize(
    "count, said",
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * MIB, "10.0 MiB"),
        (84 * 10**9, "78.2 GiB"),
        (-3 * MIB, "-3.00 MiB"),
    ],
)
def test_sizes_are_said(count: int, said: str) -> None:
    assert size(count) == said


@pytest.mark.parametrize(
    "given, count",
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("80g", 80 * 2**30),
        (512, 512),
        ("1.5 KiB", 1536),
        ("100 bytes", 100),
        ("1e9", 10**9),
    ],
)
def test_sizes_are_read(given: Any, count: int) -> None:
    assert bytes_of(given) == count


@pytest.mark.parametrize("given", ["", "much", "-1", 0, True, float("inf"), "3 PiB"])
def test_what_is_no_size_is_refused_with_the_words_that_were_given(given: Any) -> None:
    with pytest.raises(ValueError, match="a size is"):
        bytes_of(given)
