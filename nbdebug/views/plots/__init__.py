"""The pictures of a report: one file a kind of `Plot`, with what it shows and how it is drawn.

Each has `read(data)`, which gives the picture of plain data, or None where there is nothing in it to draw, and `image`,
which gives it as HTML. A file is imported only where a report has a picture of its kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from nbdebug.report import PLOTS, Report


def pictures(report: Report, *kinds: str) -> Iterator[tuple[str, Any, Any]]:
    """(kind, file, picture) of the report's plots that can be drawn, of these kinds where some are named."""
    for plot in report.plots:
        if plot.kind in (kinds or PLOTS):
            module = importlib.import_module(f"nbdebug.views.plots.{plot.kind}")
            picture = module.read(plot.data)
            if picture is not None:
                yield plot.kind, module, picture
