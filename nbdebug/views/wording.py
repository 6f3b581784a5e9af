"""How values are written, the same in every view: numbers, batch rows, places, proofs, and the tables of the evidence.

Everything here gives plain strings that are safe to print: control characters, lone surrogates and marks that turn
the writing direction are shown as escapes, and what is endless is cut with "… N more". Escaping for HTML is the HTML
view's own.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from nbdebug.report import BYTES, Fix, Report, Table, Where
from nbdebug.text import clip, count, size

REASONS = ("reason", "because", "why", "why not", "note", "undecided")
"""Keys of `Fix.after` whose value is a sentence of its own."""


def clean(text: Any, limit: int = 400) -> str:
    """One line of printable text, cut at `limit` characters."""
    line = str(text)[: limit + 1]
    return clip(line if line.isprintable() else "".join(map(_printable, line)), limit)


def clean_lines(text: Any, most: int = 40, limit: int = 300) -> list[str]:
    """The lines of a piece of code, their common indentation taken off; "… N more lines" when there are too many."""
    code = str(text).strip("\n").split("\n")
    lines = [clean(line.expandtabs(4), limit + 40) for line in code[:most]]
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    left = [f"… {len(code) - most} more lines"] if len(code) > most else []
    return [*(clip(line[margin:].rstrip(), limit) for line in lines), *left]


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    if character in "\n\t\r\xa0":
        return " "
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def of_first(report: Report) -> str:
    """What the first finding is called."""
    return "Most likely" if len(report) > 1 and not report.independent else "Cause"


def of_others(report: Report) -> str:
    """The heading of the others."""
    return "Also" if report.independent else "Less likely"


def number(value: Any) -> str:
    """1234567 → "1,234,567"; 0.3141592 → "0.3142"; 1e-08 → "1e-8"."""
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return f"{whole:,}" if abs(whole) < 10**15 else f"about 2^{whole.bit_length()}"
    if not isinstance(value, numbers.Real):
        return f"{value:.4g}" if isinstance(value, complex) else clean(value)
    real = float(value)
    if not math.isfinite(real):
        return str(real)
    if 1e4 <= abs(real) < 1e6:
        return f"{real:,.0f}"
    head, mark, power = f"{real:.4g}".partition("e")
    return head + (f"e{int(power)}" if mark else "")


def in_words(value: Any, most: int = 8) -> str:
    """Any plain value in a few words."""
    if value is None:
        return "not known"
    if isinstance(value, bool) or type(value).__name__ == "bool":  # numpy's bool is no bool
        return "yes" if value else "no"
    if isinstance(value, numbers.Number):
        return number(value)
    if isinstance(value, Where):
        return place(value) or (f"module {clean(value.module)}" if value.module else "not known")
    if isinstance(value, Mapping):
        return pairs(value, most)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _listed([in_words(v, most) for v in list(value)[:most]], len(value))
    return clean(value)


def pairs(values: Mapping[str, Any], most: int = 8) -> str:
    """{"loss": 0.31, "gradients": "finite"} → "loss 0.31, gradients finite"."""
    known = [(k, v) for k, v in values.items() if v is not None]
    return clip(_listed([_pair(k, v) for k, v in known[:most]], len(known)), 600)


def _pair(key: Any, value: Any) -> str:
    if str(key) in REASONS:
        return clean(value)
    if value is True:
        return label(key)
    return f"{label(key)}: no" if value is False else f"{label(key)} {in_words(value)}"


def _listed(parts: list[str], total: int) -> str:
    return ", ".join(parts) + (f" and {total - len(parts)} more" if total > len(parts) > 0 else "") or "none"


def uncapitalized(phrase: str) -> str:
    """A phrase inside a sentence: "A bad batch" → "a bad batch"; a name stays as it is."""
    plain = phrase.partition(" ")[0] in ("A", "An", "The", "No", "Any", "All", "Every", "Too")
    return phrase[:1].lower() + phrase[1:] if plain else phrase


def label(key: Any) -> str:
    """A name made for programs, as words: "largest_finite" → "largest finite"."""
    return clean(str(key).replace("_", " "), 80)


def rows(samples: Iterable[int], most: int = 8) -> str:
    """Batch rows: (0, 1, 2, 3, 7) → "0–3, 7"."""
    runs: list[list[int]] = []
    for row in sorted({int(s) for s in samples}):
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs]
    left = sum(b - a + 1 for a, b in runs[most:])
    return ", ".join(parts[:most]) + (f" and {left} more" if left else "")


def place(where: Where) -> str:
    """ "In [7], line 4", or the name of the file and its line, or ""."""
    return clean(where.place, 120)


def module(where: Where) -> str:
    """ "head.ent (Entropy)", "the model itself (Net)"; "" for code in no module, and where it is not known."""
    if where.module is None:
        return ""
    kind = clean(where.module_type, 80) if where.module_type else ""
    if not where.module:
        return f"the model itself ({kind})" if kind else ""
    return clean(where.module, 160) + (f" ({kind})" if kind else "")


def stop(where: Where) -> str:
    """Where an event of a chain was: "In [7], line 4, head.ent (Entropy)"; in a package its own line in place of the
    module."""
    inside = f"in {clean(where.library, 160)}" if where.library else module(where)
    if where.module and inside == where.module and not place(where):
        return f"module {inside}"  # a name alone may be a number
    return ", ".join(part for part in (place(where), inside) if part)


def spot(where: Where) -> list[tuple[str, str]]:
    """What is known about a place beside its source line: pairs of a heading and a value."""
    op = clean(where.op, 80) if where.op else ""
    of_step = where.step is not None or where.phase or where.module is not None or where.op
    row = "Batch row" if of_step else "Sample"  # of a data set, or of what a model made
    known = [
        ("Step", "" if where.step is None else f"{where.step} (from 0)" if where.step else "0 (the first)"),
        ("Phase", clean(where.phase or "", 40)),
        ("Module", module(where)),
        ("Op", f"derivative of {op}" if op and where.phase == "backward" else op),
        (f"{row}{'s' * (len(where.samples or ()) != 1)}", rows(where.samples) if where.samples else ""),
        (f"Data set item{'s' * (len(where.items or ()) != 1)}", _items(where)),
        ("In", clean(where.library, 160) if where.library else ""),
        ("Rank", "" if where.rank is None else str(where.rank)),
    ]
    return [(head, value) for head, value in known if value]


def _items(where: Where, most: int = 4) -> str:
    """The items of the data set that the rows are: "13 (cats/tom.png), 20"."""
    items = where.items or ()
    left = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(clean(item, 120) for item in items[:most]) + left


SPAN = "tried on"
"""Key of `Fix.after`: what an edit was tried on, such as "the failing step and 2 more"."""


def verdict(fix: Fix) -> str:
    if "experiment" in fix.after:  # of another text, or of no text at all
        return f"A suggestion. In an experiment {clean(fix.after['experiment'])}"
    if fix.verified is None:
        return "Tried, undecided" if "undecided" in fix.after else "A suggestion, not tried"
    outcome = "it works" if fix.verified else "did not help"
    return f"Tried: this text, on {clean(fix.after[SPAN])}; {outcome}" if SPAN in fix.after else f"Tried, {outcome}"


def numbers_of(fix: Fix) -> str:
    """What was seen when it was tried, or why it was not: "loss 0.31, gradients finite"."""
    return pairs({key: value for key, value in fix.after.items() if key not in (SPAN, "experiment")})


def proof(fix: Fix) -> str:
    """ "Tried, it works: loss 0.31, gradients finite"."""
    seen = numbers_of(fix)
    return verdict(fix) + (f": {seen}" if seen != "none" else "")


def change(fix: Fix) -> list[tuple[str, str]]:
    """The code of a fix as (mark, line): "-" and "+" where it is an edit of the user's own lines, else ""."""
    if fix.edit is None:
        return [("", line) for line in clean_lines(fix.code, 60, 2000)] if fix.code else []
    return [(mark.strip(), clean(line.expandtabs(4), 2000)) for mark, line in fix.edit.changed()[:60]]


NOTHING = "Nothing was found."


def headline(report: Report) -> str:
    """The sentence above all: of a guard, how many steps it has watched and stopped; where no cause is known, what was
    seen that is not well; else ""."""
    parts = [report.headline]
    if report.symptoms and not report.findings and report.symptoms[0].what != report.headline:
        parts.append(f"{report.symptoms[0].what.rstrip('.')}; no known cause.")
    return clean(" ".join(part for part in parts if part), 600)


def symptoms(report: Report) -> list[str]:
    """The lines below the headline where no cause is known: what else was seen, and what to look at next."""
    if report.findings:
        return []
    look = dict.fromkeys(symptom.look for symptom in report.symptoms if symptom.look)
    lines = [*(f"Also: {s.what}" for s in report.symptoms[1:]), *(f"Next: {sentence}" for sentence in look)]
    return [clean(line, 600) for line in lines]


def tone(report: Report) -> str:
    """ "bad", "good" (seen to be healthy), or "" where a tool only shows facts."""
    return "bad" if not report.ok else "good" if report.examined else ""


def examined(report: Report) -> str:
    """What a report without findings has examined: "3 steps were checked. The loss went from 2.3 to 2.1."; or "". How
    many steps these are is in the headline where there is one."""
    losses = [v for v in report.losses if isinstance(v, numbers.Real)]
    steps = report.steps or len(losses)
    text = f"{count(steps, 'step was', 'steps were')} checked." if steps and not report.headline else ""
    if losses and all(math.isfinite(v) for v in losses):
        first, last = number(losses[0]), number(losses[-1])
        text += f" The loss was {first}." if len(losses) == 1 else f" The loss went from {first} to {last}."
    return text.strip()


@dataclasses.dataclass(frozen=True)
class TextTable:
    """Strings in rows. more: how many rows were left out."""

    caption: str
    head: tuple[str, ...]
    body: tuple[tuple[str, ...], ...]
    more: int = 0


def tables(evidence: Any, most: int = 30) -> list[TextTable]:
    """The evidence as tables: one of single values, then one for each value that is a table itself."""
    if not isinstance(evidence, Mapping):
        return [t for t in [_grid("Evidence", evidence, most)] if t]
    single, grids = [], []
    for key, value in evidence.items():
        grid = _grid(label(key).capitalize(), value, most)
        if grid:
            grids.append(grid)
        else:
            single.append((label(key), _evidence(key, value)))
    first = (
        [TextTable("Evidence", ("What", "Value"), tuple(single[:most]), max(0, len(single) - most))] if single else []
    )
    return first + grids[: min(6, most)]


def _evidence(key: Any, value: Any) -> str:
    """A value of the evidence; a shape as torch writes it: [16, 1568]."""
    if "shape" in str(key) and isinstance(value, (list, tuple)):
        return clean(list(value))
    if "shape" in str(key) and isinstance(value, Mapping):
        return clean(", ".join(f"{name} {_evidence(key, shape)}" for name, shape in value.items()))
    return in_words(value, 12)


def _grid(caption: str, value: Any, most: int) -> TextTable | None:
    """A table of a DataFrame, a list of dicts or a dict of dicts; None for anything else."""
    if all(hasattr(value, name) for name in ("columns", "index", "itertuples")):  # a DataFrame, known by what it can do
        records = [dict(zip(["", *value.columns], row)) for row in value.head(most).itertuples(index=True, name=None)]
    elif isinstance(value, Mapping) and value and all(isinstance(v, Mapping) for v in value.values()):
        records = [{"": key, **row} for key, row in list(value.items())[:most]]
    elif isinstance(value, (list, tuple)) and value and all(isinstance(v, Mapping) for v in value):
        records = list(value[:most])
    else:
        return None
    return _records(caption, records, len(value), min(160, 20 * most))


def _records(caption: str, records: list[Any], total: int, wide: int, columns: int = 10) -> TextTable:
    heads = list(dict.fromkeys(key for record in records for key in record))
    body = tuple(tuple(clip(_evidence(h, r[h]) if h in r else "", wide) for h in heads[:columns]) for r in records)
    head = tuple(label(h) for h in heads[:columns])
    if len(heads) > columns:
        head, body = (*head, f"{len(heads) - columns} more columns"), tuple((*row, "…") for row in body)
    return TextTable(caption, head, body, total - len(records))


def report_tables(report: Report, most: int) -> list[tuple[TextTable, Table]]:
    """So many tables of the report, each as strings with so many rows, and as it is."""
    return [(_cells(table, most), table) for table in report.tables if table.columns and table.rows][:most]


def _cells(table: Table, most: int) -> TextTable:
    columns = [str(c) for c in table.columns]
    head = tuple(label(c.removesuffix(BYTES).strip()) for c in columns)
    body = tuple(tuple(_cell(c, v, most) for c, v in zip(columns, row)) for row in table.rows[:most])
    return TextTable(clean(table.title, 160), head, body, max(0, len(table.rows) - most))


def _cell(column: str, value: Any, most: int) -> str:
    if value is None:
        return ""
    if column.endswith(BYTES) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return size(value)
    return clip(in_words(value), min(160, 20 * most))


def frame(report: Report, title: str | None = None) -> Any:
    """One table as a DataFrame, with raw numbers and all its rows; the first where no title is given.

    Raises ValueError when the report has no table, or none of this title."""
    import pandas  # only where somebody asks: a report is made and shown without it

    tables = [table for table in report.tables if table.columns and table.rows]
    if not tables:
        raise ValueError("This report holds no table.")
    titles = [table.title for table in tables]
    if title is not None and title not in titles:
        raise ValueError(f"No table is called {title!r}; there are {', '.join(map(repr, titles))}.")
    table = tables[titles.index(title) if title is not None else 0]
    return pandas.DataFrame([list(row) for row in table.rows], columns=list(table.columns))
