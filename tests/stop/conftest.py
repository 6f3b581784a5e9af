"""Nobody can type at the tests of this folder, not even where they run in a terminal; the kernels' own are apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdebug.tools.breakpoints.stop_at import active


@pytest.fixture(autouse=True)
def nobody_types(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("nbdebug.tools.breakpoints.stop._can_ask", lambda: False)
    yield
    for stop in active():
        stop.clear()
