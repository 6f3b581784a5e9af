"""One browser and one JupyterLab for all tests here; both are started when first asked for."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.views import gallery


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not pathlib.Path(gallery.CHROMIUM).exists():
        pytest.skip(f"no browser at {gallery.CHROMIUM}")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=gallery.CHROMIUM, args=gallery.ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A JupyterLab; see `lab.py`."""
    if importlib.util.find_spec("jupyterlab") is None:
        pytest.skip("jupyterlab is not installed")
    from tests.browser.lab import Lab

    started = Lab(tmp_path_factory.mktemp("lab"), browser)
    try:
        started.wait_ready()
        yield started
    finally:
        started.close()
