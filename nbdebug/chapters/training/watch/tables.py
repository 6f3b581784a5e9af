"""What a watch has seen as pandas tables."""

from __future__ import annotations

import math
from typing import Any

from nbdebug.chapters.training.watch.history import History

COLUMNS = ("step", "name", "norm", "norm_after", "weight_norm", "update_ratio")
TOTALS = ("step", "loss", "norm", "norm_after", "clipped", "skipped", "lr", "scale")


def frame(history: History, names: list[str]) -> Any:
    """A row for each step and parameter."""
    import pandas

    columns: dict[str, list[Any]] = {column: [] for column in COLUMNS}
    for row in history.rows.items:
        count = len(row.numbers)
        nothing = [math.nan] * count
        columns["step"] += [row.step] * count
        columns["name"] += [names[n] for n in row.numbers]
        columns["norm"] += row.before
        columns["norm_after"] += row.after
        columns["weight_norm"] += row.weight if row.weight is not None else nothing
        columns["update_ratio"] += row.ratio if row.ratio is not None else nothing
    return pandas.DataFrame(columns)


def totals(history: History) -> Any:
    """A row for each step."""
    import pandas

    rows = [(t.step, t.loss, t.before, t.after, t.clipped, t.skipped, t.lr, t.scale) for t in history.totals.items]
    table = pandas.DataFrame(rows, columns=list(TOTALS))
    return table.astype(dict.fromkeys(("loss", "norm", "norm_after", "lr", "scale"), float))
