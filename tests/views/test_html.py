"""The HTML view: what it says, that the user's words stay words, and that an untrusted notebook keeps all of it."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from nbdebug.report import Finding, Fix, Link, Plot, Report, RuledOut, Table, Where
from nbdebug.views import html
from nbdebug.views.plots import histogram as exponents
from nbdebug.views.plots.marks import FAULT, VALUES, image, svg
from tests.views import reports

TAGS = {
    "div",
    "p",
    "h1",
    "span",
    "strong",
    "code",
    "pre",
    "br",
    "ol",
    "ul",
    "li",
    "img",
    "details",
    "summary",
    "table",
    "caption",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
}
ATTRIBUTES = {"style", "class", "scope", "src", "alt", "width", "start"}
# Properties and forms of values that JupyterLab's sanitizer lets through (it drops `inherit`, `anywhere`, `var()` …).
STYLES = {
    "color": r"#[0-9a-f]{6}",
    "background": r"none|rgba\([\d.,]+\)",
    "opacity": r"\.\d+",
    "border": "0",
    "border-left": r"\dpx solid #[0-9a-f]{6}",
    "border-bottom": r"\dpx solid rgba\([\d.,]+\)",
    "border-radius": r"\dpx",
    "border-collapse": "collapse",
    "font-family": r"[\w', -]+",
    "font-size": r"[\d.]+em",
    "font-weight": r"\d00",
    "line-height": r"[\d.]+",
    "margin": r"([\d.]+(em)? ?)+",
    "padding": r"([\d.]+(em)? ?)+",
    "padding-left": r"[\d.]+em",
    "white-space": "pre|normal|nowrap",
    "overflow-x": "auto",
    "overflow-wrap": "break-word",
    "max-width": r"\d+em|100%",
    "box-sizing": "border-box",
    "display": "block",
    "height": "auto",
    "text-align": "left",
    "vertical-align": "top",
    "caption-side": "top",
    "cursor": "pointer",
}
VOID = {"br", "img"}


class Reader(HTMLParser):
    """Collects the tags, the styles and the visible text; checks that every tag is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("make", reports.ALL.values(), ids=reports.ALL)
def test_an_untrusted_notebook_keeps_all_of_it(make) -> None:
    fragment = Reader(html.render(make()))
    assert set(fragment.tags) <= TAGS
    assert {name for _, name, _ in fragment.attributes} <= ATTRIBUTES
    for _, name, value in fragment.attributes:
        for part in value.split(";") if name == "style" else ():
            prop, given = part.split(":", 1)
            assert re.fullmatch(STYLES[prop], given), part


@pytest.mark.parametrize("make", reports.ALL.values(), ids=reports.ALL)
def test_every_table_has_scopes_and_every_picture_a_text(make) -> None:
    fragment = Reader(html.render(make()))
    assert fragment.tags.count("th") == sum(tag == "th" and name == "scope" for tag, name, _ in fragment.attributes)
    assert all(value for tag, name, value in fragment.attributes if name == "alt")
    assert fragment.tags.count("img") == sum(name == "alt" for _, name, _ in fragment.attributes)


def test_the_parts_come_in_order_and_details_are_folded() -> None:
    source = html.render(reports.forward_log())
    text = Reader(source).text
    parts = [
        "Cause: nan/log-of-nonpositive",
        "Rows 2 and 5 take the logarithm of zero: head.ent (In [7], line 4).",
        "logp = torch.log(p)",
        "head.ent (Entropy)",
        "How it came about",
        "relu set 5 elements to zero.",
        "p = self.act(self.proj(x))",
        "What to do",
        "logp = torch.log(p.clamp_min(1e-8))",
        "Tried, it works: loss 0.3117, gradients finite, the other 6 rows unchanged",
        "Tried, did not help",
        "A suggestion, not tried: it needs the scores",
        "The numbers",
        "Ruled out (3)",
        "Not checked (1)",
        "Notes (2)",
        "nan_trace(train_step)",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "<details style" in source and "<details open" not in source
    assert source.index("What to do") < source.index("<details") < source.index("Evidence")


def test_severity_is_said_in_words() -> None:
    assert "Cause: nan/overflow" in Reader(html.render(reports.overflow())).text
    assert "Most likely: nan/sqrt-grad-at-zero" in Reader(html.render(reports.backward_sqrt())).text
    assert Reader(html.render(reports.silent())).text.startswith(
        "HealthyNothing was found.3 steps were checked. The loss went from 2.303 to 2.052."
    )


def test_code_can_be_copied_as_it_stands() -> None:
    code = "if a < b and c:\n    x = \"<&>\"\n\n    y = 'é'"
    source = html.render(Report("q", (Finding("a/b", "t", fixes=(Fix("f", code),)),)))
    block = re.search(r"<pre[^>]*>(.*?)</pre>", source, re.S)[1]
    assert Reader(block).text == code


@pytest.mark.parametrize("draw", [html.render, html.page])
def test_nothing_from_the_user_becomes_markup(draw) -> None:
    source = draw(reports.hostile())
    assert "<script" not in source and "<img src=x" not in source and "\x1b" not in source and "\u202e" not in source
    assert reports.EVIL in Reader(re.sub(r"(?s)<!doctype.*?</style>|</?(html|head|body|main)[^>]*>", "", source)).text
    source.encode()


def test_mathjax_is_told_to_leave_dollar_signs_alone() -> None:
    assert html.render(reports.hostile()).startswith('<div class="mathjax_ignore tex2jax_ignore"')


def test_a_report_stays_under_100_kb_whatever_it_holds() -> None:
    long = '"<&' * 3000
    where = Where(
        step=1,
        phase="backward",
        module=long,
        module_type=long,
        op=long,
        file=long,
        line=3,
        cell=long,
        text="\n".join([long] * 200),
        samples=tuple(range(0, 4000, 2)),
    )
    table = {row: dict.fromkeys(range(40), long) for row in range(90)}
    finding = Finding(
        long,
        long,
        where,
        {f"{long}{i}": table for i in range(50)},
        (Fix(long, "\n".join([long] * 200), True, {f"{long}{i}": long for i in range(50)}),) * 40,
        (Link(long, where, {long: long}), Link(long, Where(module="x"), {long: [long] * 90})) * 100,
    )
    values = {"operand": long, "dtype": long, "counts": dict.fromkeys(range(-1074, 1024), 10**9)}
    report = Report(
        long,
        (finding,) * 50,
        (RuledOut(long, long),) * 90,
        (long,) * 90,
        (long,) * 90,
        long,
        headline=long,
        tables=(Table(long, [long] * 9, [[long] * 9] * 400, long),) * 9,
        plots=(Plot("histogram", values),),
    )
    for draw in (html.render, html.page):
        source = draw(report)
        assert len(source.encode()) < 100_000
        assert "more" in Reader(re.sub(r"(?s)<!doctype.*?</style>|</?(html|head|body|main)[^>]*>", "", source)).text


def test_the_page_stands_alone() -> None:
    source = html.page(reports.forward_log())
    assert source.startswith("<!doctype html>") and "color-scheme:light dark" in source
    assert "<title>Rows 2 and 5 take the logarithm of zero: head.ent (In [7], line 4).</title>" in source
    assert not re.search(r"https?://(?!www\.w3\.org)", source) and source.count("<h1") == 1


def test_a_dataframe_becomes_a_table_of_its_own_values() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"layer": [f"<b>{i}" for i in range(100)], "norm": 1.5})
    source = html.render(Report("q", (Finding("a/b", "t", evidence={"by layer": frame}),)))
    assert "&lt;b&gt;29" in source and "&lt;b&gt;30" not in source and "… 70 more" in source


def test_the_chart_is_well_formed_and_marks_what_is_at_fault() -> None:
    seen = exponents.read(reports.overflow().plot("histogram"))
    drawing = ElementTree.fromstring(svg(seen.drawing()))
    fills = [e.get("fill") for e in drawing.iter("{http://www.w3.org/2000/svg}rect")]
    assert fills.count(FAULT) == 3 and fills.count(VALUES) == 17 + 1  # finite, zeros
    words = " ".join(drawing.itertext())
    assert all(name in words for name in ("float16", "65,504", "bfloat16", "float32", "3.4e38", "1.4e-45", "zero"))
    picture = re.search(r"base64,([^\"]+)", image(seen.drawing(), seen.sentence()))[1]
    assert base64.b64decode(picture).decode() == svg(seen.drawing())


def test_the_chart_says_in_words_what_it_shows() -> None:
    assert exponents.read(reports.overflow().plot("histogram")).sentence() == (
        "input of exp (float32): 1,091 finite non-zero values between 0.004 and 512, 2 zeros; "
        "48 of the finite values are at fault."
    )


@pytest.mark.parametrize(
    ("zeros", "bad"),
    [
        ({"zeros": 5}, 5),
        ({"zeros": 5, "nans": 1}, 1),
        ({"zeros": 5, "bad_counts": {"0": 2}}, 2),
        ({"zeros": 5, "bad_counts": {"0": 2}, "bad_zeros": 5}, 7),
        ({"zeros": 5, "bad_zeros": 0}, 0),
    ],
)
def test_zeros_are_marked_when_they_are_at_fault(zeros, bad) -> None:
    assert exponents.read({"dtype": "torch.float32", "counts": {"0": 9}, **zeros}).bad == bad


@pytest.mark.parametrize("data", [{}, {"counts": {"3": 0}}])
def test_no_chart_without_values(data) -> None:
    assert exponents.read(data) is None
    assert "<img" not in html.render(Report("q", (Finding("a/b", "t"),), plots=(Plot("histogram", data),)))


def test_names_in_what_was_tried_are_code_and_escaped() -> None:
    fix = Fix("Drop it.", "x", None, {"experiment": "without the `softmax` <b>"})
    shown = html.page(Report("q", (Finding("training/double-softmax", "t", Where(), {}, (fix,)),)))
    assert ">softmax</code>" in shown and "`softmax`" not in shown and "<b>" not in shown
