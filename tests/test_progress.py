"""Progress bars: gone at the end, and never red, however early the work ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tqdm.auto
import tqdm.notebook

from nbdebug import live
from nbdebug.live import progress_bar, progress_range


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[dict[str, object]]]]:
    """What each of a notebook's bars was told to show."""
    told: list[list[dict[str, object]]] = []

    class Bar(tqdm.notebook.tqdm):
        def __init__(self, *args: object, **options: object) -> None:
            self.told: list[dict[str, object]] = []
            told.append(self.told)
            super().__init__(*args, **options)

        def display(self, *args: object, **options: object) -> None:
            self.told.append(options)
            super().display(*args, **options)

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    monkeypatch.setattr(live, "DELAY", 0.0)
    yield told


def shown(bars: list[list[dict[str, object]]]) -> tuple[bool, bool]:
    """(whether any turned red, whether all were taken away)"""
    return any(o.get("bar_style") == "danger" for bar in bars for o in bar), all(bar[-1].get("close") for bar in bars)


def test_a_loop_that_ends_early_leaves_no_bar(bars: list[list[dict[str, object]]]) -> None:
    for number in progress_range(range(5), "mem", "steps"):
        if number == 2:
            break
    assert len(bars) == 1 and shown(bars) == (False, True)


def test_work_that_takes_fewer_steps_leaves_no_bar(bars: list[list[dict[str, object]]]) -> None:
    with progress_bar("preflight", "checks", 8) as bar:
        bar.update(3)
    with pytest.raises(ZeroDivisionError), progress_bar("fit", "predictions") as bar:
        bar.update(1 / 0)
    assert len(bars) == 2 and shown(bars) == (False, True)


def test_a_bar_that_nobody_wants_is_not_made(bars: list[list[dict[str, object]]]) -> None:
    assert list(progress_range(range(3), "mem", "steps", wanted=False)) == [0, 1, 2]
    assert not bars
