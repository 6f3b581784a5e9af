"""Problems as plain values, and their cures as code: what is left out, or a converter that writes copies to a new
folder. The code stands alone and runs as it is printed: check_data tries it so."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.report import Fix

SHOWN = 8
"""Items that a cure lists; of more it takes them from `report.frame()`."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One item with one problem. code: as in the catalogue; item: a path below the root, a folder, `table.csv#row` or
    `table.csv#column`, or the number of a row; detail: what was measured, in a few words; file: the picture that shows
    it, a whole path, or ""; guess: by the majority alone, so that any other problem of the item comes first."""

    code: str
    item: str | int
    detail: str
    file: str = ""
    guess: bool = False


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """All problems of a set, one for each item. root: the folder as the user has it, "" in memory; total: items looked
    at, by kind ("picture" …); expected: what the user gave, and what is usual; form: the name of a file that was given
    alone, or the kind of a set in memory ("DataFrame", "Dataset", "select", "list"); options: how a CSV is read and
    written, as text, by its name; of COCO the key of the rows."""

    problems: tuple[Problem, ...] = ()
    root: str = ""
    total: Mapping[str, int] = dataclasses.field(default_factory=dict)
    expected: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    form: str = ""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of(self, code: str) -> list[Problem]:
        return [problem for problem in self.problems if problem.code == code]


@dataclasses.dataclass(frozen=True)
class DataCure:
    """What helps, other than leaving the items out. each: text is what is done with each "picture", "caption", "sound",
    "file" or "folder" at fault, in a copy of all, or with each "table"; "": a suggestion. In the text <field> stands
    for what is expected, or usual in the set. guess: it is told only where it was tried and helps."""

    text: str
    each: str = ""
    guess: bool = False


def part(name: str, row: str | int) -> str | int:
    """The item that is a row or a column. name: of the table, "" in memory."""
    return f"{name}#{row}" if name else row


EACH = {
    "picture": ("from PIL import Image, ImageOps\n", "image = Image.open(root / name)\n"),
    "caption": ("", "caption = (target / name).with_suffix(<caption_extension>)\ndata = caption.read_bytes()\n"),
    "file": ("", ""),
    "sound": ("import numpy, soundfile\n", "values, rate = soundfile.read(root / name, always_2d=True)\n"),
    "folder": ("import numpy\nfrom PIL import Image\n", "image = Image.open(root / name).convert('RGB')\n"),
}
"""What a converter imports, and how it opens each item. The folder is a copy already, and captions are read there."""
PANDAS = "import pandas"
CSV = PANDAS, "pandas.read_csv(source, dtype=str, keep_default_na=False<form>)", "rows.to_csv(<new>, index=False<form>)"
READ, WRITE = "pathlib.Path(source).read_text('utf-8')", "pathlib.Path(<new>).write_text({}, 'utf-8')"
LINES = "import pathlib", f"[s for s in {READ}.split('\\n') if s.strip()]", WRITE.format("'\\n'.join(rows)")
JSON = "import json, pathlib", f"json.loads({READ})", WRITE.format("json.dumps(rows)")
PARQUET = PANDAS, "pandas.read_parquet(source)", "rows.to_parquet(<new>)"
FEATHER = PANDAS, "pandas.read_feather(source)", "rows.to_feather(<new>)"
NUMPY = "import numpy", "numpy.load(source)", "numpy.save(<new>, rows)"
FORMS = {".csv": CSV, ".tsv": CSV, ".parquet": PARQUET, ".pq": PARQUET, ".feather": FEATHER}
FORMS |= {".jsonl": LINES, ".ndjson": LINES, ".txt": LINES, ".json": JSON, ".npy": NUMPY}
"""How the rows of a file are read and written again, by its ending."""
GUESS = {"guess": True}


def fixes(
    cure: DataCure | None, title: str, code: str, items: Sequence[str | int], facts: DataFacts
) -> tuple[Fix, ...]:
    """A converter, a suggestion (by this title) and what is left out, as far as there are such."""
    bad = repr(list(items)) if len(items) <= SHOWN else f"list(report.frame().query(\"code == '{code}'\")['item'])"
    in_tables = bool(facts.root) and any("#" in str(item) for item in items)
    texts: list[Fix] = []
    if cure is not None:
        text = "" if cure.each else cure.text
        if cure.each == "table" and in_tables:
            text = _of_tables(items, facts, cure.text)
        elif cure.each in EACH and facts.root and not facts.form and not in_tables:
            text = _converter(cure, bad, facts)
        for field, value in facts.expected.items():
            text = text.replace(f"<{field}>", repr(value))
        texts.append(Fix(title, "" if "<" in text else text, after=GUESS if cure.guess else {}))
    left_out = "Leave it out." if len(items) == 1 else "Leave them out."
    files = "" if facts.form else _paths(bad, facts, code == "data/color-shift")
    text = _of_tables(items, facts) if in_tables else files if facts.root else _in_memory(items, bad, facts)
    texts.append(Fix(left_out, text))
    return tuple(fix for fix in texts if fix.code)


def _paths(bad: str, facts: DataFacts, folder: bool) -> str:
    out = "not name.startswith(tuple(f'{one}/' for one in bad))" if folder else "name not in bad"
    return (
        f"import os, pathlib\nroot, bad = pathlib.Path({facts.root!r}), {bad}\n"
        "files = [path for path in sorted(root.rglob('*')) if path.is_file()]\n"
        "names = [os.path.relpath(path, root).replace(os.sep, '/') for path in files]\n"
        f"paths = [root / name for name in names if {out}]"
    )


def _converter(cure: DataCure, bad: str, facts: DataFacts) -> str:
    """Copies of all, in a folder beside the notebook; those at fault are then written anew."""
    head, opened = EACH[cure.each]
    name = f"{os.path.basename(facts.root) or 'set'}_mended"
    names = "bad"
    if cure.each == "folder":
        names = "[p.relative_to(root) for one in bad for p in (root / one).rglob('*') if p.is_file()]"
    body = f"{opened}{cure.text}".replace("\n", "\n    ")
    return (
        f"import pathlib, shutil\n{head}root, target = pathlib.Path({facts.root!r}), "
        f"pathlib.Path({name!r})\nbad = {bad}\nshutil.copytree(root, target)\nfor name in {names}:\n    {body}"
    )


def _by_table(items: Sequence[str | int]) -> dict[str, tuple[list[int], list[str]]]:
    """The rows and the columns at fault, by table (or split); "" for what is in memory alone."""
    result: dict[str, tuple[list[int], list[str]]] = {}
    for item in map(str, items):
        name, _, place = item.rpartition("#")
        rows, columns = result.setdefault(name, ([], []))
        if place.isdigit():
            rows.append(int(place))
        else:
            columns.append(place)
    return result


def _of_tables(items: Sequence[str | int], facts: DataFacts, each: str = "") -> str:
    """Rows and columns of files, left out in copies beside the notebook; or what `each` does with the columns."""
    parts = []
    by_file = _by_table(items)
    for name, (rows, columns) in by_file.items():
        stem, ending = os.path.splitext(os.path.basename(name))
        head, read, write = form = FORMS.get(ending.lower(), ("", "", ""))
        unknown = not head or (each and head != PANDAS) or (not columns and "<columns>" in each)
        if unknown or (columns and form in (JSON, NUMPY)) or len(by_file) > SHOWN:
            return ""
        options = facts.options.get(name, "")
        source = os.path.normpath(os.path.join(facts.root, name))
        change = each or _left_out(form, rows, columns, options)
        text = f"{head}\nsource = {source!r}\nrows = {read}\n{change}\n{write}"
        text = text.replace("<form>", options).replace("<columns>", repr(columns))
        parts.append(text.replace("<new>", repr(f"{stem}_mended{ending}")))
    return "\n".join(parts)


def _left_out(form: tuple[str, str, str], rows: list[int], columns: list[str], key: str) -> str:
    if form[0] == PANDAS:
        what = [f"{axis}={names}" for axis, names in (("index", rows), ("columns", columns)) if names]
        return f"rows = rows.drop({', '.join(what)})" + ".reset_index(drop=True)" * (form is FEATHER)
    if form is NUMPY:
        return f"rows = numpy.delete(rows, {rows}, 0)"
    own = f"rows[{key!r}]" if form is JSON and key else "rows"
    good = f"{own} = [row for number, row in enumerate({own}) if number not in bad]"
    text = f"bad = {set(rows)}\n{good}\n" if rows else ""
    if columns:
        kept = f"{{key: value for key, value in json.loads(row).items() if key not in {columns}}}"
        text += f"import json\nrows = [json.dumps({kept}) for row in rows]"
    return text.strip()


def _in_memory(items: Sequence[str | int], bad: str, facts: DataFacts) -> str:
    """`dataset` is what was checked; of several, by split, those with bad rows become others."""
    parts = ["import torch"] if facts.form == "Dataset" else []
    for name, (rows, columns) in sorted(_by_table(items).items()):
        own = f"dataset[{name!r}]" if name else "dataset"
        shown = "bad" if not name and len(rows) > SHOWN else str(rows)
        parts += [f"bad = {bad}"] if shown == "bad" else []
        kept = f"[i for i in range(len({own})) if i not in {shown}]"
        new = {
            "DataFrame": f"{own}.drop(columns={columns})" if columns else f"{own}.iloc[{kept}].reset_index(drop=True)",
            "Dataset": f"torch.utils.data.Subset({own}, {kept})",
            "select": f"{own}.select({kept})",
            "list": f"[{own}[i] for i in range(len({own})) if i not in {shown}]",
        }[facts.form]
        parts.append(f"dataset = {{**dataset, {name!r}: {new}}}" if name else f"dataset = {new}")
    return "\n".join(parts)
