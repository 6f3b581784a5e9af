"""The figure: what it shows, that it can be rendered whatever the names are, and that it leaves pyplot alone."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from nbdebug.report import Finding, Plot, Report
from nbdebug.views.plots import figure, tree
from nbdebug.views.plots import histogram as exponents
from nbdebug.views.plots.histogram import FAULT, VALUES
from tests.views import reports


def found(plot: Plot) -> Report:
    return Report("q", (Finding("a/b", "t"),), plots=(plot,))


def words(drawn) -> list[str]:
    return [t.get_text().strip() for t in drawn.findobj(Text) if t.get_text().strip() and t.get_visible()]


def bars(axes, colour: str) -> list[float]:
    """Heights of the bars of one colour, left to right."""
    drawn = [p for p in axes.patches if to_hex(p.get_facecolor()) == colour]
    return [p.get_height() for p in sorted(drawn, key=lambda p: p.get_x())]


def test_left_the_values_and_the_ends_of_the_types_right_the_way_through_the_modules() -> None:
    drawn = figure.draw(reports.forward_log())
    said = words(drawn)
    assert said[0] == "Rows 2 and 5 take the logarithm of zero: head.ent (In [7], line 4)."
    for text in (
        "Sizes of the values: input of log (float32)",
        "at fault: 5",
        "zero",
        "float16",
        "bfloat16",
        "float32",
        "6e-8",
        "65504",
        "1.4e-45",
        "3.4e38",
        "ent",
        "made here   Entropy",
        "proj",
    ):
        assert text in said, text
    assert len(drawn.findobj(lambda a: hasattr(a, "patches") and hasattr(a, "get_xlim"))) == 3


def test_bars_are_logarithmic_and_those_at_fault_are_marked() -> None:
    close = figure.draw(reports.overflow()).axes[0]
    seen = exponents.read(reports.overflow().plot("histogram"))
    assert bars(close, FAULT) == [exponents.height(n, seen.tallest) for n in (31, 14, 3)]
    assert len(bars(close, VALUES)) == 17 + 1
    assert max(bars(close, VALUES)) == 1.0


def test_float64_is_marked_when_it_is_the_type() -> None:
    data = {"dtype": "float64", "operand": "x", "counts": {"-1074": 4, "0": 9, "1023": 2}}
    said = words(figure.draw(found(Plot("histogram", data))))
    assert {"float64", "5e-324", "1.8e308", "float16", "bfloat16", "float32"} <= set(said)
    assert "float64" not in words(figure.draw(reports.overflow()))


def test_values_without_any_size_are_counted_all_the_same() -> None:
    drawn = figure.draw(found(Plot("histogram", {"dtype": "float32", "nans": 48})))
    assert {"nan", "48", "at fault: 48", "What each type can hold"} <= set(words(drawn))


def test_one_half_is_enough() -> None:
    only_tree = found(Plot("tree", reports.forward_log().plot("tree")))
    assert len(figure.draw(only_tree).axes) == 1
    assert len(figure.draw(reports.overflow()).axes) == 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [m for n, m in reports.ALL.items() if n not in ("silent", "watched_well")])
def test_every_report_can_be_rendered(make) -> None:
    drawn = figure.draw(make())
    drawn.savefig(io.BytesIO())  # a second drawing finds the layout of the first
    png, size = drawn._repr_png_()
    assert png.startswith(b"\x89PNG") and size["width"] <= 960  # as wide as a notebook's cell


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (reports.silent(), "nothing was found"),
        (Report("q", (Finding("a/b", "t"),)), "were kept"),
        (Report("q", (Finding("a/b", "t"),), plots=(Plot("tree", {"modules": [{"name": "a"}]}),)), "were kept"),
    ],
)
def test_nothing_to_draw_is_said_plainly(report, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        figure.draw(report)


def test_pyplot_is_never_imported() -> None:
    code = (
        "import sys; from tests.views import reports; from nbdebug.views.plots import figure; "
        "figure.draw(reports.forward_log())._repr_png_(); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_small_tree_is_shown_whole() -> None:
    lines = tree.read(reports.forward_log().plot("tree"))
    assert [(line.depth, line.name) for line in lines] == [
        (0, "the model"),
        (1, "embed"),
        (1, "norm"),
        (1, "head"),
        (2, "proj"),
        (2, "act"),
        (2, "ent"),
        (1, "out"),
    ]
    assert [line.name for line in lines if line.born] == ["ent"]
    assert [line.name for line in lines if line.path] == ["the model", "head", "ent"]


def test_of_a_large_tree_the_branches_that_matter() -> None:
    data = reports.bad_parameter().plot("tree")
    lines = tree.read(data)
    assert [line.name or line.more for line in lines] == [
        "the model",
        77,
        "encoder.layers.11",
        "attention",
        "self",
        "query",
        2,
        "output",
    ]
    assert sum(line.more or 1 for line in lines) == len(data["modules"])
    for most in (4, 9, 30):
        lines = tree.read(reports.backward_sqrt().plot("tree"), most)
        assert len(lines) <= 2 * most and any(line.born for line in lines)
        assert sum(line.more or 1 for line in lines) == 99 + 1


def test_several_models_have_a_root_each() -> None:
    nodes = [
        {"name": "gen", "type": "G", "path": True},
        {"name": "gen.0", "type": "Linear", "born": True},
        {"name": "dis", "type": "D"},
        {"name": "dis.0", "type": "Linear"},
    ]
    assert [(line.depth, line.name) for line in tree.read({"modules": nodes})] == [
        (0, "gen"),
        (1, "0"),
        (0, "dis"),
        (1, "0"),
    ]


@pytest.mark.parametrize("data", [{}, {"modules": None}, {"modules": "x"}, {"modules": [{"name": "a"}]}])
def test_no_tree_without_a_bad_value_in_it(data) -> None:
    assert tree.read(data) is None
