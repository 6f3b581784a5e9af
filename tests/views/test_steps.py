"""What a guard's report says first, and the table of its last steps in text and in HTML."""

from __future__ import annotations

from nbdebug.tools.guard.record.files import StepLine, last_steps
from nbdebug.views import html, text
from nbdebug.views import wording as words
from tests.views import reports
from tests.views.test_html import Reader


def test_a_quiet_guard_says_how_many_steps_it_watched_and_not_that_nothing_was_found() -> None:
    said = text.render(reports.watched_well())
    assert said.splitlines()[0] == "10,000 steps watched, none stopped. The loss went from 4.2 to 0.31."
    assert words.NOTHING not in said and "looked at" not in said
    assert Reader(html.render(reports.watched_well())).text.startswith(
        "Healthy10,000 steps watched, none stopped.The loss went from 4.2 to 0.31."
    )
    assert "<title>10,000 steps watched, none stopped.</title>" in html.page(reports.watched_well())


def test_a_stopped_step_is_told_before_its_cause() -> None:
    said = text.render(reports.stopped())
    assert said.startswith("1 of 412 steps stopped: step 411.\nRows 2 and 5 take the logarithm of zero")
    shown = Reader(html.render(reports.stopped())).text
    assert shown.startswith("1 of 412 steps stopped: step 411.Cause: nan/log-of-nonpositive")


def test_the_last_steps_are_a_table_with_what_was_done() -> None:
    said = text.render(reports.stopped().full())
    assert (
        "The last 4 steps\n"
        "  step  loss    gradient norm  what was done\n"
        "  408   0.52    1.1            updated\n"
        "  409   0.44    7.5            clipped\n"
        "  410   0.3912  100,000        clipped; norm too large, dropped\n"
        "  411   nan                    not finite, stopped\n"
    ) in said
    source = html.render(reports.stopped())
    assert source.index("The numbers") < source.index("The last 4 steps</summary>") < source.index("Ruled out")
    assert "norm too large, dropped" in source
    assert "The last 2 steps</summary>" in html.render(reports.watched_well())


def test_of_many_steps_the_last_are_shown() -> None:
    (table,) = last_steps([StepLine(n, 1.0, 2.0) for n in range(100)])
    assert (table.title, len(table.rows), table.rows[-1]) == ("The last 30 steps", 30, (99, 1.0, 2.0, "updated"))
    assert last_steps([]) == ()
