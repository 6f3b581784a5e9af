"""The figure: what it shows, that it can be rendered whatever the names are, and that it leaves pyplot alone."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text as Label

from nbdebug.report import Finding, Plot, Report
from nbdebug.views.plots import figure, tree
from nbdebug.views.plots import histogram as exponents
from nbdebug.views.plots.marks import FAULT, VALUES, Text, svg
from tests.views import reports


def found(plot: Plot) -> Report:
    return Report("q", (Finding("a/b", "t"),), plots=(plot,))


def words(drawn) -> list[str]:
    return [t.get_text().strip() for t in drawn.findobj(Label) if t.get_text().strip() and t.get_visible()]


def bars(axes, colour: str) -> list[float]:
    """Heights of the bars of one colour, left to right."""
    drawn = [p for p in axes.patches if to_hex(p.get_facecolor()) == colour]
    return [p.get_height() for p in sorted(drawn, key=lambda p: p.get_x())]


def test_left_the_values_and_the_ends_of_the_types_right_the_path_through_the_modules() -> None:
    drawn = figure.draw(reports.forward_log())
    said = words(drawn)
    assert "Rows 2 and 5 take the logarithm of zero: head.ent (In [7], line 4)." in said
    for text in (
        "Sizes of the values: input of log (float32), 5 at fault",
        "zero",
        "float16",
        "bfloat16",
        "float32",
        "6e-8",
        "65,504",
        "1.4e-45",
        "3.4e38",
        "ent",
        "made here  Entropy",
        "proj",
    ):
        assert text in said, text
    left, right = drawn.axes
    assert left.get_position().x1 <= right.get_position().x0


def test_bars_are_logarithmic_and_those_at_fault_are_marked() -> None:
    (axes,) = figure.draw(reports.overflow()).axes
    seen = exponents.read(reports.overflow().plot("histogram"))
    heights = [exponents.TALL * exponents.height(n, seen.tallest) for n in (31, 14, 3)]
    assert bars(axes, FAULT) == pytest.approx(heights)
    assert len(bars(axes, VALUES)) == 17 + 1 + 1  # finite, zeros, the band
    assert exponents.TALL in bars(axes, VALUES)


def test_the_figure_and_the_svg_have_the_same_marks() -> None:
    for make in reports.ALL.values():
        drawings = [picture.drawing() for _, picture in make()._pictures()]
        texts = [mark.text for drawing in drawings for mark in drawing.marks if isinstance(mark, Text)]
        drawn = words(figure.draw(make())) if drawings else []
        assert {t.strip() for t in texts if t.strip()} <= set(drawn)
        for drawing in drawings:
            assert svg(drawing).count("<text") == sum(isinstance(mark, Text) for mark in drawing.marks)


def test_float64_is_marked_when_it_is_the_type() -> None:
    data = {"dtype": "float64", "operand": "x", "counts": {"-1074": 4, "0": 9, "1023": 2}}
    said = words(figure.draw(found(Plot("histogram", data))))
    assert {"float64", "5e-324", "1.8e308", "float16", "bfloat16", "float32"} <= set(said)
    assert "float64" not in words(figure.draw(reports.overflow()))


def test_values_without_any_size_are_counted_all_the_same() -> None:
    drawn = figure.draw(found(Plot("histogram", {"dtype": "float32", "nans": 48})))
    assert {"nan", "48", "Sizes of the values: operand (float32), 48 at fault"} <= set(words(drawn))


def test_one_half_is_enough() -> None:
    only_tree = found(Plot("tree", reports.forward_log().plot("tree")))
    assert len(figure.draw(only_tree).axes) == 1
    assert len(figure.draw(reports.overflow()).axes) == 1


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
    lines = tree.read(reports.forward_log().plot("tree")).lines
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
    lines = tree.read(data).lines
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
        lines = tree.read(reports.backward_sqrt().plot("tree"), most).lines
        assert len(lines) <= 2 * most and any(line.born for line in lines)
        assert sum(line.more or 1 for line in lines) == 99 + 1


def test_several_models_have_a_root_each() -> None:
    nodes = [
        {"name": "gen", "type": "G", "path": True},
        {"name": "gen.0", "type": "Linear", "born": True},
        {"name": "dis", "type": "D"},
        {"name": "dis.0", "type": "Linear"},
    ]
    assert [(line.depth, line.name) for line in tree.read({"modules": nodes}).lines] == [
        (0, "gen"),
        (1, "0"),
        (0, "dis"),
        (1, "0"),
    ]


@pytest.mark.parametrize("data", [{}, {"modules": None}, {"modules": "x"}, {"modules": [{"name": "a"}]}])
def test_no_tree_without_a_bad_value_in_it(data) -> None:
    assert tree.read(data) is None
