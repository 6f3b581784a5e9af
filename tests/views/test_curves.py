"""Losses beside each other: named at their ends, told in words and in a table, and drawn whatever the facts are."""

from __future__ import annotations

import base64
import io
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.text import Text

from nbdebug.report import Plot, Report
from nbdebug.views import html, text
from nbdebug.views.plots import figure
from nbdebug.views.plots import losses as curves
from nbdebug.views.plots.marks import FAULT, svg
from tests.views import reports

SVG = "{http://www.w3.org/2000/svg}"


def drawing(data):
    return ElementTree.fromstring(svg(curves.read(data).drawing()))


def named(found) -> dict[str, float]:
    """Texts and their heights."""
    return {t.text: float(t.get("y")) for t in found.iter(f"{SVG}text")}


def test_both_curves_stand_over_one_logarithmic_scale_with_their_names_at_their_ends() -> None:
    found = drawing(reports.diagnosed().plot("losses"))
    words = named(found)
    assert {
        "as it is ×",
        "with the fix",
        "on training batches",
        "on validation batches",
        "step",
        "loss of each step (logarithmic)",
    } <= set(words)
    assert abs(words["on training batches"] - words["on validation batches"]) >= curves.APART - 0.1
    crosses = [p for p in found.iter(f"{SVG}path") if p.get("stroke") == FAULT]
    assert len(crosses) == 1
    dashed = [p for p in found.iter(f"{SVG}path") if p.get("stroke-dasharray")]
    assert {p.get("stroke") for p in dashed} == {curves.COLOURS[1]}


def test_html_and_text_have_start_end_and_lowest_of_each() -> None:
    report = reports.diagnosed()
    source, said = html.render(report), text.render(report)
    for shown in (source, said):
        assert "not finite from step 40" in shown and "0.1196 (step 59)" in shown
        assert shown.index("with the fix") < shown.index("What to do")
    alt = re.search(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)"', source)
    assert "as it is: 2.3 at first, not finite from step 40, lowest 2.3 at step 0" in alt[2]
    ElementTree.fromstring(base64.b64decode(alt[1]))
    assert said.index("Loss of each step") < said.index("What to do")


def test_the_figure_names_the_curves_too() -> None:
    said = {t.get_text() for t in figure.draw(reports.diagnosed()).findobj(Text)}
    assert {"as it is ×", "with the fix", "on validation batches", "step", "loss of each step (logarithmic)"} <= said


def test_a_report_says_whose_losses_they_are() -> None:
    data = {"curves": {"as it is": [[0, 2.0], [1, 1.9]]}, "curves of": "one batch, learnt by heart"}
    assert "one batch, learnt by heart" in named(drawing(data))
    assert "One batch, learnt by heart" in text.render(Report("q", plots=(Plot("losses", data),)))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"curves": None, "checkups": None},
        {"curves": {}},
        {"curves": {"a": []}},
        {"curves": {"a": [[0, None]]}},
        {"curves": [[0, 1]]},
        {"curves": {"a": [0.5, 0.4]}},
        {"checkups": [{"step": 0, "training": 1.0}]},
    ],
)
def test_nothing_to_draw_is_no_picture(data) -> None:
    assert curves.read(data) is None
    assert "<img" not in html.render(Report("q", plots=(Plot("losses", data),)))


@pytest.mark.parametrize(
    ("places", "moved"), [([50, 50], [50, 63]), ([99, 98, 97], [100, 87, 74]), ([0, 5, 60], [0, 13, 60]), ([30], [30])]
)
def test_names_are_moved_apart_as_little_as_it_takes(places, moved) -> None:
    assert curves.apart([float(p) for p in places], 13, 0, 100) == moved


values = st.one_of(st.floats(), st.integers(), st.text(max_size=3), st.none(), st.booleans())
rows = st.lists(st.one_of(st.lists(values, max_size=3), values), max_size=6)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.text(max_size=4), rows, max_size=6),
    st.lists(st.one_of(values, st.fixed_dictionaries({"step": values, "training": values})), max_size=4),
    values,
)
def test_whatever_the_facts_are_they_can_be_drawn(losses, checkups, of) -> None:
    data = {"curves": losses, "checkups": checkups, "curves of": of}
    report = Report("q", plots=(Plot("losses", data),))
    html.render(report)
    text.render(report)
    seen = curves.read(data)
    if seen is not None:
        assert not re.search(r"nan|inf", re.sub(r"<text.*?</text>", "", svg(seen.drawing())))


def test_the_figure_of_odd_values() -> None:
    for points in ([[0, 0.0]], [[5, -3.0], [2**60, 1e300]], [[0, 5e-324], [1, 1.0]]):
        figure.draw(Report("q", plots=(Plot("losses", {"curves": {"$a$": points}}),))).savefig(io.BytesIO(), dpi=20)
