"""Words for numbers and names: the examples of the docstrings, and what must hold of any input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdebug.text import clip, clip_start, count, figures, listed, percent


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.006, "0.6%"),
        (0.4321, "43%"),
        (0.99997, "99.997%"),
        (1e-7, "under 0.001%"),
        (0, "0%"),
        (1, "100%"),
        (0.999, "99.9%"),
        (2.5, "250%"),
        (0.0004, "0.04%"),
    ],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (65504.0, "65,504"), (1.2e-8, "1.2e-8"), (float("nan"), "nan"), (3.0, "3"), (9e6, "9e6")],
)
def test_figures(value: float, text: str) -> None:
    assert figures(value) == text


def test_listed() -> None:
    assert listed([]) == ""
    assert listed(["a"]) == "`a`"
    assert listed(["a", "b"]) == "`a` and `b`"
    assert listed("abc") == "`a`, `b` and `c`"
    assert listed(range(7), 3, "") == "0, 1, 2 and 4 more"


def test_count() -> None:
    assert [count(n, "step") for n in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]
    assert count(2, "batch", "batches") == "2 batches"


@given(st.text(), st.integers(2, 40))
def test_what_is_clipped_fits(text: str, limit: int) -> None:
    assert len(clip(text, limit)) <= limit
    assert len(clip_start(text, limit)) <= limit
    assert clip(text, limit) == text or clip(text, limit).endswith("…")


@given(st.floats())
def test_figures_and_percent_take_any_number(value: float) -> None:
    assert figures(value)
    assert percent(value).startswith("under") or percent(value).endswith("%")


def test_the_end_of_a_name_is_kept() -> None:
    assert clip_start("encoder.layers.11.attention.query", 20) == "…11.attention.query"
    assert clip_start("short", 20) == "short"
