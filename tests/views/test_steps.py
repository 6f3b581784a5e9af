"""What a guard's report says first, and the table of its last steps: in text, in HTML, and whatever the facts are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdebug.report import Report
from nbdebug.views import html, text
from nbdebug.views import wording as words
from nbdebug.views.plots import run as steps
from tests.views import reports
from tests.views.test_html import Reader


def test_a_quiet_guard_says_how_many_steps_it_watched_and_not_that_nothing_was_found() -> None:
    said = text.render(reports.watched_well())
    assert said.splitlines()[0] == "10,000 steps watched, none stopped. The loss went from 4.2 to 0.31."
    assert words.NOTHING not in said and "looked at" not in said
    assert Reader(html.render(reports.watched_well())).text.startswith(
        "10,000 steps watched, none stopped.The loss went from 4.2 to 0.31."
    )
    assert "<title>10,000 steps watched, none stopped.</title>" in html.page(reports.watched_well())


def test_a_stopped_step_is_told_before_its_cause() -> None:
    said = text.render(reports.stopped())
    assert said.startswith("1 of 412 steps stopped: step 411.\nRows 2 and 5 take the logarithm of zero")
    shown = Reader(html.render(reports.stopped())).text
    assert shown.startswith("1 of 412 steps stopped: step 411.Cause: nan/log-of-nonpositive")


def test_the_last_steps_are_a_table_with_what_was_done() -> None:
    said = text.render(reports.stopped())
    assert (
        "The last 4 steps\n"
        "  Step  Loss    Gradient norm  What was done\n"
        "  408   0.52    1.1            updated\n"
        "  409   0.44    7.5            clipped\n"
        "  410   0.3912  100,000        clipped; norm too large, dropped\n"
        "  411   nan     not known      not finite, stopped\n"
    ) in said
    source = html.render(reports.stopped())
    assert source.index("The numbers") < source.index("The last 4 steps</summary>") < source.index("Ruled out")
    assert "norm too large, dropped" in source
    assert "The last 2 steps</summary>" in html.render(reports.watched_well())


def test_of_many_steps_the_last_are_shown_and_the_others_counted() -> None:
    lines = [{"step": n, "loss": 1.0, "norm": 2.0, "clipped": False, "outcome": "ok"} for n in range(100)]
    shown = steps.table({"guard": lines}, 30)
    assert shown is not None and (len(shown.body), shown.more, shown.body[-1][0]) == (30, 70, "99")
    assert shown.caption == "The last 100 steps"


@pytest.mark.parametrize("facts", [{}, {"guard": None}, {"guard": []}, {"guard": "abc"}, {"guard": [1, None]}])
def test_without_steps_there_is_no_table(facts) -> None:
    assert steps.table(facts, 30) is None


anything = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.text()))


@settings(max_examples=60, deadline=None)
@given(
    anything,
    st.lists(
        st.one_of(
            anything, st.dictionaries(st.sampled_from(["step", "loss", "norm", "clipped", "outcome", "lr"]), anything)
        ),
        max_size=5,
    ),
)
def test_whatever_the_facts_are_they_are_shown(headline, lines) -> None:
    report = Report("q", facts={"headline": headline, "guard": lines})
    assert text.render(report) and Reader(html.render(report)).text
