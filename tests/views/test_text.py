"""The text view: what it says, in which order, and that it is plain text of bounded width whatever the names are."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest

from nbdebug.report import Finding, Fix, Link, Report, Table, Where
from nbdebug.views import text
from nbdebug.views import wording as words
from tests.views import reports


def test_headline_comes_first_then_where_chain_fixes_and_the_rest() -> None:
    said = text.render(reports.forward_log().full())
    assert said.startswith("Rows 2 and 5 take the logarithm of zero: `head.ent` (In [7], line 4).\n")
    parts = [
        "Cause: nan/log-of-nonpositive",
        "    logp = torch.log(p)\nstep 3 (from 0) · phase forward",
        "How it came about",
        "What to do",
        "Evidence",
        "By row",
        "Sizes of the values",
        "Ruled out",
        "Not checked",
        "Notes",
        "nan_trace(train_step) · model `net`",
    ]
    places = [said.index(part) for part in parts]
    assert places == sorted(places)


def test_where_names_everything_that_is_known() -> None:
    assert "step 3 (from 0) · phase forward · module head.ent (Entropy) · op log · batch rows 2, 5" in text.render(
        reports.forward_log()
    )


def test_code_that_runs_in_no_module_names_none() -> None:
    finding = Finding("a/b", "t", Where(step=0, module="", op="mul"))
    assert "step 0 (the first) · op mul" in text.render(Report("q", (finding,)))


def test_chain_gives_what_place_and_source_and_says_no_place_twice_running() -> None:
    lines = text.render(reports.backward_sqrt().full()).splitlines()
    first = lines.index("  1. The two views of row 5 are the same, so their squared distance is exactly 0.")
    assert lines[first + 1] == "     contrast.py, line 31, dist (PairDistance):  return ((a - b) ** 2).sum(-1).sqrt()"
    assert lines[first + 3] == "  3. All 6 gradients of the encoder are NaN."


def test_fixes_say_whether_they_were_tried_and_keep_their_code_whole() -> None:
    said = text.render(reports.forward_log().full())
    assert "Tried, it works: loss 0.3117, gradients finite, the other 6 rows unchanged." in said
    assert "Tried, did not help: loss 0.3117, gradients NaN in head.proj.weight." in said
    assert "A suggestion, not tried: it needs the scores, which this step does not keep." in said
    code = "x = " + " + ".join(f"term_{i}" for i in range(60))
    assert code in text.render(Report("q", (Finding("a/b", "t", fixes=(Fix("f", code),)),)))


def test_several_findings_are_told_most_likely_first_and_the_others_shorter() -> None:
    said = text.render(reports.backward_sqrt().full())
    assert "Most likely: nan/sqrt-grad-at-zero" in said
    after = said[said.index("Less likely") :]
    assert "A gradient is too large for float32" in after and "Clip the gradients. (Tried, did not help)" in after


def test_silence_is_short_and_says_how_much_was_looked_at() -> None:
    said = text.render(reports.silent())
    assert said.splitlines()[0] == "Nothing was found. 3 steps were checked. The loss went from 2.303 to 2.052."
    assert "GradScaler skipped step 0" in said and "14 of 14 parameters are finite" in text.render(
        reports.silent().full()
    )
    assert text.render(Report("preflight(model)")) == "Nothing was found.\n\npreflight(model)"


@pytest.mark.parametrize("make", reports.ALL.values(), ids=reports.ALL)
def test_no_line_is_too_wide_and_no_character_is_unprintable(make) -> None:
    said = text.render(make())
    assert max(map(len, said.splitlines())) <= 100
    assert all(c.isprintable() or c == "\n" for c in said)
    said.encode()  # lone surrogates would fail here


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("make", reports.ALL.values(), ids=reports.ALL)
def test_a_report_fits_on_a_screen_and_says_what_it_leaves_out(make, columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines, whole = str(make()).splitlines(), str(make().full()).splitlines()
    assert len(lines) <= 30 and max(len(line) for line in lines if "term_" not in line) <= columns
    assert lines[-1].startswith("Left out (report.full() shows it): ") or whole == lines or len(whole) <= 30


def test_the_cause_its_first_fix_and_the_numbers_are_on_the_screen() -> None:
    said = str(reports.forward_log())
    for part in (
        "Cause: nan/log-of-nonpositive",
        "  2. `log` of these zeros is -inf.",
        "Tried, it works: loss 0.3117",
        "  operand   p             smallest  0\n",
        "Ruled out: the batch was bad when it came in,",
        "Not checked: The optimizer: the step stopped at the loss.",
        "Left out (report.full() shows it): 2 fixes, 2 numbers, 1 table.",
    ):
        assert part in said, part


def test_of_a_long_chain_the_first_and_the_last_events_stay() -> None:
    chain = tuple(Link(f"event {i}") for i in range(40))
    said = str(Report("q", (Finding("a/b", "t", chain=chain),)))
    assert "  1. event 0\n  2. event 1\n     … 36 more\n 39. event 38\n 40. event 39" in said
    assert "Left out (report.full() shows it): 36 events." in said


def test_colour_is_for_terminals_and_takes_the_place_of_backticks(monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    report = reports.forward_log()
    assert "\033" not in repr(report) + str(report) + report._repr_mimebundle_()["text/plain"]
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[36mhead.ent\033[0m" in repr(report) and "`" not in repr(report) and "\033" not in str(report)
    plain = re.sub(r"\033\[\d+m", "", repr(report))
    assert plain == str(report).replace("`", "")
    monkeypatch.setenv("NO_COLOR", "1")
    assert repr(report) == str(report)


def test_columns_for_which_there_is_no_room_are_named() -> None:
    heads = [f"column {i}" for i in range(20)]
    said = str(Report("q", tables=(Table("wide", heads, [[10**7] * 20]),)))
    assert "more columns: column" in said and max(map(len, said.splitlines())) <= 100


def test_endless_things_are_cut_with_a_count() -> None:
    many = tuple(Link(f"link {i}") for i in range(400))
    where = Where(text="\n".join(["xyz" * 200] * 90))
    finding = Finding("a/b", "t", where, {f"k{i}": i for i in range(90)}, chain=many)
    said = text.render(Report("q", (finding,), unchecked=("u",) * 100).full())
    assert "… 370 more" in said and "… 78 more lines" in said and "… 60 more" in said and "… 70 more" in said
    assert len(said) < 20_000


def test_a_dataframe_is_a_table_of_its_own_values() -> None:
    pandas = pytest.importorskip("pandas")
    columns = {"layer": ["conv1", "fc"], "norm": [0.5, float("inf")], "dead": [False, True]}
    frame = pandas.DataFrame(columns, index=[3, 7])
    said = text.render(Report("q", (Finding("a/b", "t", evidence={"by layer": frame}),)))
    assert "By layer\n     layer  norm  dead\n  3  conv1  0.5   no\n  7  fc     inf   yes" in said
    whole = dataclasses.replace(reports.forward_log().findings[0], evidence=frame)
    assert "conv1" in text.render(Report("q", (whole,)))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1234567, "1,234,567"),
        (0.31415926, "0.3142"),
        (1e-8, "1e-8"),
        (65504.0, "65,504"),
        (3.4e38, "3.4e38"),
        (float("nan"), "nan"),
        (True, "yes"),
        (None, "not known"),
        ([1, 2, 3], "1, 2, 3"),
        ({"a_b": 1, "ok": True}, "a b 1, ok"),
        (list(range(20)), "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
        (10**400, "about 2^1329"),
        ([], "none"),
    ],
)
def test_values_in_words(value, said) -> None:
    assert words.in_words(value) == said


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ((5,), "5"),
        ((2, 5), "2, 5"),
        ((0, 1), "0, 1"),
        ((0, 1, 2, 3, 7), "0–3, 7"),
        (tuple(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_rows_in_words(samples, said) -> None:
    assert words.rows(samples) == said


def test_root_module_and_code_in_no_module_are_told_apart() -> None:
    assert words.module(Where(module="", module_type="Net")) == "the model itself (Net)"
    assert words.module(Where(module="")) == ""
    assert words.module(Where()) == ""
