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
    """All problems of a set, one for each item. root: the folder, "" in memory; written: as the user has it, where that
    lies below the working folder; total: how many items were looked at, by kind ("picture", "row" …); expected: the
    fields that the user gave, and what is usual; form: the name of a file that was given alone, or the kind of a set in
    memory ("DataFrame", "Dataset", "select", "list"); separators: of the tables, by name; of COCO the key of the
    rows."""

    problems: tuple[Problem, ...] = ()
    root: str = ""
    written: str = ""
    total: Mapping[str, int] = dataclasses.field(default_factory=dict)
    expected: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    form: str = ""
    separators: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of(self, code: str) -> list[Problem]:
        return [problem for problem in self.problems if problem.code == code]


@dataclasses.dataclass(frozen=True)
class DataCure:
    """What helps, other than leaving the items out. each: text is what is done with each "picture", "caption", "sound",
    "file" or "folder" at fault, in a copy of all, or with each "table"; "": a suggestion. In the text <field> stands
    for what is expected, or usual in the set. guess: it is told only where it was tried and helps."""

    title: str
    text: str
    each: str = ""
    guess: bool = False


def part(name: str, row: str | int) -> str | int:
    """The item that is a row or a column. name: of the table, "" in memory."""
    return f"{name}#{row}" if name else row


HEADS = {
    "picture": "from PIL import Image, ImageOps",
    "caption": "",
    "file": "",
    "sound": "import numpy, soundfile",
    "folder": "import numpy\nfrom PIL import Image",
}
LOOPS = {
    "picture": "image = Image.open(root / name)",
    "caption": "caption = (target / name).with_suffix(<caption_extension>)\ndata = caption.read_bytes()",
    "file": "",
    "sound": "values, rate = soundfile.read(root / name, always_2d=True)",
    "folder": "image = Image.open(root / name).convert('RGB')",
}
"""What a converter imports, and how it opens each item. The folder is a copy already, and captions are read there."""
ROWS_OF = {
    ".csv": (
        "import pandas",
        "pandas.read_csv(source, dtype=str, keep_default_na=False<sep>)",
        "to_csv({}, index=False<sep>)",
    ),
    ".parquet": ("import pandas", "pandas.read_parquet(source)", "to_parquet({})"),
    ".feather": ("import pandas", "pandas.read_feather(source)", "to_feather({})"),
    ".jsonl": (
        "import pathlib",
        "[line for line in pathlib.Path(source).read_text('utf-8').split('\\n') if line.strip()]",
        "pathlib.Path({}).write_text('\\n'.join(rows), 'utf-8')",
    ),
    ".json": (
        "import json, pathlib",
        "json.loads(pathlib.Path(source).read_text('utf-8'))",
        "pathlib.Path({}).write_text(json.dumps(rows), 'utf-8')",
    ),
    ".npy": ("import numpy", "numpy.load(source)", "numpy.save({}, rows)"),
}
"""How the rows of a file are read and written again."""
TABLES = (".csv", ".parquet", ".feather")
GUESS = {"guess": True}
SAME = {".tsv": ".csv", ".pq": ".parquet", ".ndjson": ".jsonl", ".txt": ".jsonl"}


def fixes(code: str, items: Sequence[str | int], facts: DataFacts, cure: DataCure | None) -> tuple[Fix, ...]:
    """A converter, a suggestion and what is left out, as far as there are such."""
    bad = repr(list(items)) if len(items) <= SHOWN else f"list(report.frame().query(\"code == '{code}'\")['item'])"
    folder, in_tables = facts.root and not facts.form, facts.root and any("#" in str(item) for item in items)
    own: list[Fix] = []
    if cure is not None:
        text = "" if cure.each else cure.text
        if cure.each == "table" and in_tables:
            text = _of_tables(items, facts, cure.text)
        elif cure.each != "table" and cure.each and folder and not in_tables:
            text = _converter(cure, bad, facts)
        text = _expected(text, facts)
        own += [Fix(cure.title, text, after=GUESS if cure.guess else {})] if text and "<" not in text else []
    if in_tables:
        text = _of_tables(items, facts)
    elif folder:
        text = _paths(bad, facts, code == "data/color-shift")
    else:
        text = "" if facts.root else _in_memory(items, bad, facts)
    return (*own, *([Fix("Leave them out.", text)] if text else []))


def _expected(text: str, facts: DataFacts) -> str:
    for field in ("size", "mode", "caption_extension", "trigger", "sample_rate", "channels", "max_length", "label"):
        text = text.replace(f"<{field}>", repr(facts.expected[field]) if field in facts.expected else f"<{field}>")
    return text


def _paths(bad: str, facts: DataFacts, folder: bool) -> str:
    out = "not name.startswith(tuple(f'{one}/' for one in bad))" if folder else "name not in bad"
    return (
        f"import os, pathlib\nroot, bad = pathlib.Path({facts.written or facts.root!r}), {bad}\n"
        "files = [path for path in sorted(root.rglob('*')) if path.is_file()]\n"
        "names = [os.path.relpath(path, root).replace(os.sep, '/') for path in files]\n"
        f"paths = [root / name for name in names if {out}]"
    )


def _converter(cure: DataCure, bad: str, facts: DataFacts) -> str:
    """Copies of all, in a folder beside the notebook; those at fault are then written anew."""
    name = f"{os.path.basename(facts.root) or 'set'}_mended"
    loop = "for name in bad:"
    if cure.each == "folder":
        loop = "for name in [p.relative_to(root) for one in bad for p in (root / one).rglob('*') if p.is_file()]:"
    body = f"{LOOPS[cure.each]}\n{cure.text}".strip().replace("\n", "\n    ")
    return (
        f"import pathlib, shutil\n{HEADS[cure.each]}\n".replace("\n\n", "\n")
        + f"root, target = pathlib.Path({facts.written or facts.root!r}), pathlib.Path({name!r})\nbad = {bad}\n"
        + f"shutil.copytree(root, target)\n{loop}\n    {body}"
    )


def _of_tables(items: Sequence[str | int], facts: DataFacts, each: str = "") -> str:
    """Rows and columns of files, left out in copies beside the notebook; or what `each` does with the columns."""
    by_file: dict[str, tuple[list[int], list[str]]] = {}
    for item in map(str, items):
        name, _, part = item.rpartition("#")
        rows, columns = by_file.setdefault(name, ([], []))
        if part.isdigit():
            rows.append(int(part))
        else:
            columns.append(part)
    parts = []
    for name, (rows, columns) in by_file.items():
        stem, ending = os.path.splitext(name)
        source = os.path.normpath(os.path.join(facts.written or facts.root, name))
        written = f"{os.path.basename(stem)}_mended{ending}"
        form = SAME.get(ending.lower(), ending.lower())
        known = form in (TABLES if each else ROWS_OF) and (columns or "<columns>" not in each)
        if not known or (columns and form in (".json", ".npy")) or len(by_file) > SHOWN:
            return ""
        head, read, write = ROWS_OF[form]
        sep = facts.separators.get(name, ",")
        change = each or _left_out(form, rows, columns, sep)
        text = f"{head}\nsource = {source!r}\nrows = {read}\n{change}\n"
        text += (
            write.format(repr(written))
            if "pathlib" in head or "numpy" in head
            else f"rows.{write.format(repr(written))}"
        )
        parts.append(text.replace("<sep>", f", sep={sep!r}" if sep != "," else "").replace("<columns>", repr(columns)))
    return "\n".join(parts)


def _left_out(form: str, rows: list[int], columns: list[str], key: str) -> str:
    if form in TABLES:
        parts = ([f"index={rows}"] if rows else []) + ([f"columns={columns}"] if columns else [])
        return f"rows = rows.drop({', '.join(parts)})" + ".reset_index(drop=True)" * (form == ".feather")
    if form == ".npy":
        return f"rows = numpy.delete(rows, {rows}, 0)"
    own = f"rows[{key!r}]" if form == ".json" and key != "," else "rows"
    text = f"bad = {set(rows)}\n{own} = [row for number, row in enumerate({own}) if number not in bad]" if rows else ""
    if columns:
        text += (
            "\nimport json\nrows = [json.dumps({key: value for key, value in json.loads(row).items()"
            f" if key not in {columns}}}) for row in rows]"
        )
    return text.strip()


def _in_memory(items: Sequence[str | int], bad: str, facts: DataFacts) -> str:
    """`dataset` is what was checked; of several, by split, those with bad rows become others."""
    names = {str(item).rpartition("#")[0] if isinstance(item, str) and "#" in item else "" for item in items}
    parts = ["import torch"] if facts.form == "Dataset" else []
    for name in sorted(names):
        own = f"dataset[{name!r}]" if name else "dataset"
        listed = [item for item in items if not name or str(item).startswith(f"{name}#")]
        rows = [int(str(i).rpartition("#")[2]) for i in listed if str(i).rpartition("#")[2].isdigit()]
        columns = [str(i).rpartition("#")[2] for i in listed if not str(i).rpartition("#")[2].isdigit()]
        shown = "bad" if not name and len(rows) > SHOWN else str(rows)
        parts += [f"bad = {bad}"] if shown == "bad" else []
        kept = f"[i for i in range(len({own})) if i not in {shown}]"
        new = {
            "DataFrame": f"{own}.drop(columns={columns})" if columns else f"{own}.iloc[{kept}].reset_index(drop=True)",
            "Dataset": f"torch.utils.data.Subset({own}, {kept})",
            "select": f"{own}.select({kept})",
        }.get(facts.form, f"[{own}[i] for i in range(len({own})) if i not in {shown}]")
        parts.append(f"dataset = {{**dataset, {name!r}: {new}}}" if name else f"dataset = {new}")
    return "\n".join(parts)
