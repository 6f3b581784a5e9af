"""The course of a run: scales that hold anything, marks that are named, and pictures that can always be drawn."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.text import Text

from nbdebug.report import Finding, Plot, Report
from nbdebug.views import html, text
from nbdebug.views.plots import axes, figure, run
from nbdebug.views.plots.marks import FAULT, INK, VALUES, svg
from tests.views import reports

SVG = "{http://www.w3.org/2000/svg}"


def drawing(report):
    return ElementTree.fromstring(svg(run.read(report.plot("run")).drawing()))


def words_of(element) -> list[str]:
    return [t.text for t in element.iter(f"{SVG}text")]


def test_the_sentence_says_what_the_picture_shows() -> None:
    assert run.read(reports.recorded_well().plot("run")).sentence() == (
        "4 steps; loss 2.4 at first, 1.9 at last, between 1.9 and 2.4; "
        "gradient norm 1 at first, 1 at last, between 1 and 1."
    )
    said = run.read(reports.recorded().plot("run")).sentence()
    assert said.startswith("1,200 steps in 2 runs; loss 2.6 at first, 0.3609 at last")
    assert said.endswith(
        "; not finite, stopped: step 1,199; norm too large, dropped: step 900; "
        "skipped by GradScaler: 3 steps (0, 1, 2)."
    )


def test_every_view_has_the_run_before_the_chain() -> None:
    report = reports.recorded()
    assert text.render(report).index("The run") < text.render(report).index("How it came about")
    source = html.render(report)
    assert source.index('alt="1,200 steps in 2 runs') < source.index("How it came about")
    said = [t.get_text() for t in figure.draw(report).findobj(Text)]
    assert {
        "loss",
        "gradient norm (logarithmic)",
        "not finite, stopped: step 1,199",
        "steps, the runs one after another",
        "ent",
    } <= set(said)
    alone = [t.get_text() for t in figure.draw(reports.recorded_well()).findobj(Text)]
    assert {"loss", "gradient norm", "step"} <= set(alone)


def test_a_trip_is_a_line_across_both_panels_and_a_dropped_step_a_triangle() -> None:
    found = drawing(reports.recorded())
    paths = list(found.iter(f"{SVG}path"))
    trips = [p.get("d") for p in paths if p.get("stroke") == FAULT]
    assert len(trips) == 2 and trips[0].startswith(f"M{run.RIGHT} ")  # and its legend
    assert len([p for p in paths if p.get("fill") == INK]) == 4
    assert len([p for p in paths if p.get("stroke") == VALUES]) == 2
    assert "new run" in words_of(found) and "new run" not in words_of(drawing(reports.recorded_well()))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"losses": [], "norms": None},
        {"losses": [[1, "x"], [None, 2], [1, math.nan], "ab"], "marks": {"tripped": [3]}},
    ],
)
def test_nothing_to_draw_is_no_picture(data) -> None:
    report = Report("q", plots=(Plot("run", data),))
    assert run.read(data) is None
    assert "<img" not in html.render(report)
    assert "The run" not in text.render(report)


values = st.one_of(st.floats(), st.integers(), st.text(max_size=3), st.none(), st.booleans())
points = st.lists(st.one_of(st.lists(values, max_size=3), values), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "losses": points,
            "norms": points,
            "runs": points,
            "steps": values,
            "joined": values,
            "marks": st.dictionaries(st.sampled_from(["tripped", "above", "x"]), st.one_of(points, st.lists(values))),
            "counts": st.dictionaries(st.sampled_from(["tripped", "above"]), values),
        },
    )
)
def test_whatever_the_facts_are_they_can_be_drawn(given_course) -> None:
    report = Report("q", (Finding("a/b", "t"),), plots=(Plot("run", given_course),))
    html.render(report)
    text.render(report)
    picture = run.read(given_course)
    if picture is not None:
        assert not re.search(r"nan|inf", re.sub(r"<text.*?</text>", "", svg(picture.drawing())))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**63), min_size=1, max_size=5),
)
def test_the_figure_too(losses, steps) -> None:
    data = {"losses": [list(p) for p in zip(steps, losses)], "marks": {"above": steps, "tripped": steps}}
    figure.draw(Report("q", plots=(Plot("run", data),))).savefig(io.BytesIO(), dpi=20)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=6))
def test_a_scale_holds_its_values_and_has_ticks_inside(given_values) -> None:
    scale = axes.RunScale.around(given_values)
    for value in given_values:
        assert 0 <= scale.at(value) <= 1
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 6
    assert all(scale.low * (1 - 1e-9) <= v or scale.low - 1e-9 * abs(scale.low) <= v for v, _ in ticks)


@pytest.mark.parametrize(
    ("given_values", "said", "log"),
    [
        ([0.3, 2.4], ["1", "2"], False),
        ([0.0, 10.0], ["0", "5", "10"], False),
        ([1e-3, 40.0], ["0.001", "0.1", "10"], True),
        ([1.0], ["0.99", "1", "1.01"], False),
        ([-3.0, 3.0], ["-2", "0", "2"], False),
    ],
)
def test_ticks_are_round_numbers(given_values, said, log) -> None:
    scale = axes.RunScale.around(given_values)
    assert scale.log == log
    assert [label for _, label in scale.ticks()] == said


def test_a_long_night_stays_small() -> None:
    many = [[n, 2.0 + (n * 7919 % 1000) / 1000] for n in range(0, 10**6, 1250)]
    marks = {key: [n * 37 for n in range(300)] for key in run.OUTCOMES}
    plot = Plot("run", {"losses": many, "norms": many, "marks": marks, "steps": 10**6})
    report = dataclasses.replace(reports.forward_log(), plots=(plot, *reports.forward_log().plots))
    assert len(html.render(report).encode()) < 90_000


@pytest.mark.parametrize("step", [0, 2**53, 2**63, 10**400])
def test_a_single_step_has_room_however_far_the_run_is(step) -> None:
    picture = run.read({"losses": [[step, 1.0]]})
    assert picture is not None and picture.across.high > picture.across.low
    assert svg(picture.drawing()) and picture.across.ticks(6)
