"""Tables column by column: numbers that are none, columns that give the label away, labels, texts, boxes, copies."""

from __future__ import annotations

import codecs
import collections
import contextlib
import functools
import itertools
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy

from nbdebug.text import clip, figures, percent, size
from nbdebug.tools.data.cures import Problem, part
from nbdebug.tools.data.expectation import DataExpectation
from nbdebug.tools.data.inventory import Entry, head, split_of
from nbdebug.tools.data.pictures import pillow
from nbdebug.tools.data.similarity import balance, equal_across_splits, is_long, label_variants, two_labels

MOST_BYTES = 256 << 20
"""Of a table that is read whole; of a larger one the first rows are."""
FIRST_ROWS = 200_000
NUMERIC = 0.8
"""Of the values of a column that are numbers, where it is a column of numbers."""
ALIKE = 3
"""Texts of one form ("12,5", "<1") in a column of numbers that are no slips in single rows: all of it is so written."""
LABELS = ("label", "labels", "target", "targets", "class", "y")
LEAK = 0.985
"""Of each class, that a column alone gives right (leaving the row itself out): it is then no mere feature."""
FLOAT32 = 3.4028235e38
STRONG = 0.8
"""Where a further column gives so much, the classes of the set lie apart, and a good feature is no leak."""
MANY = 20
"""Values of a column that is judged by the order of its values, and of a label that is a number to be predicted."""
ROWS_FOR_LEAK = 30
NUMBERS = {"id", "idx", "index", "row", "rowid", "unnamed", "nr", "no", "number", "key", "uid"}
"""Words in names of columns that number the rows."""
TIMES = {"t", "time", "year", "month", "day", "date", "hour", "week", "step", "epoch", "timestamp", "rank", "quarter"}
"""Words in names of columns that count, and are meant to."""
MARKS = (32767.0, 32768.0, 2147483647.0, 2147483648.0)
"""Ends of integer types that stand for "not measured", as numbers of nines and 1e20 do; with either sign."""
SLACK = 1e-3
"""Of a picture's side, by which a box may lie beyond the edge: numbers are rounded in files."""
SPLIT_COLUMNS = ("split", "subset", "fold", "partition", "set", "phase")
"""Names of columns that hold the split of each row."""


def read(entry: Entry) -> Any:
    """A DataFrame with texts as they stand; its number of rows may be cut (`frame.attrs["cut"]`).

    Raises ValueError for a file that can't be read as a table, ImportError where pyarrow is wanting."""
    import pandas

    ending = entry.ending.lower()
    if ending in (".parquet", ".pq", ".feather"):
        if entry.bytes > MOST_BYTES:
            raise ValueError(f"{size(entry.bytes)}; tables are read up to {size(MOST_BYTES)}")
        return pandas.read_feather(entry.path) if ending == ".feather" else pandas.read_parquet(entry.path)
    first = head(entry.path, 1 << 20)
    if entry.bytes > 1 << 20 and b"\n" not in first:
        raise ValueError("its first line is over 1 MiB long")
    coding = _coding(first)
    top = first.decode(coding, "replace").partition("\n")[0]
    separator = "\t" if ending == ".tsv" else max(",;\t", key=lambda sign: (top.count(sign), sign == ","))
    form = {"sep": separator, "encoding": coding}
    rows = FIRST_ROWS if entry.bytes > MOST_BYTES else None
    frame = pandas.DataFrame()
    if first.strip():
        frame = pandas.read_csv(entry.path, **form, dtype=str, nrows=rows, encoding_errors="replace", index_col=False)
    usual = {"sep": ",", "encoding": "utf-8"}
    frame.attrs["options"] = "".join(f", {name}={own!r}" for name, own in form.items() if own != usual[name])
    frame.attrs["cut"] = rows is not None and len(frame) == rows
    return frame


def _coding(first: bytes) -> str:
    """The encoding of a text by its beginning: UTF-8, or UTF-16 where a mark says so, else Windows-1252."""
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(first)  # it may be cut within a character
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


class DataTable:
    """A DataFrame with the numbers of each column. name: of its items, "" in memory (rows are then numbers)."""

    def __init__(self, frame: Any, name: str, wanted: DataExpectation, root: str = "", split: str = "") -> None:
        self.frame, self.name, self.wanted, self.root, self.split = frame, name, wanted, root, split
        self.names = [str(column) for column in frame.columns]
        self.number_column = functools.cache(self._numbers)
        self.label = wanted.label if wanted.label in self.names else ""
        if wanted.label is None and wanted.columns is None:
            self.label = next((n for n in self.names if n.lower() in LABELS), "")
        self.features = [n for n in wanted.columns or () if n in self.names and n != self.label]
        self.row_count = len(frame)
        self.marks: dict[str, None] = {}  # as they stand in the file
        self.meant: dict[str, str] = {}  # other spellings of a label

    def column(self, name: str) -> Any:
        return self.frame.iloc[:, self.names.index(name)]

    def problem(self, code: str, place: str | int, detail: str) -> Problem:
        """place: the number of a row, or the name of a column."""
        return Problem(f"data/{code}", part(self.name, place), detail)

    def _numbers(self, name: str) -> Any:
        """The values of a column as float64, NaN where a text stands or nothing."""
        import pandas

        column = self.column(name)
        words = {str(v).strip().lower() for v in column.dropna().unique()[:3]}
        if words and words <= {"true", "false"}:
            column = column.map(lambda v: str(v).strip().lower() == "true", na_action="ignore")
        try:
            return pandas.to_numeric(column, errors="coerce").astype("float64").to_numpy()
        except (TypeError, ValueError):  # dates
            return numpy.full(self.row_count, numpy.nan)

    def problems(self) -> Iterator[Problem]:
        checks = [self._values, self._marks, self._labels, self._index_columns, self._leaks, self._conflicts]
        checks += [self._texts, self._boxes, self._files]
        return itertools.chain.from_iterable(check() for check in checks if self.row_count)

    @functools.cached_property
    def numeric(self) -> list[str]:
        """Columns of numbers: those that are features; without a word of which are, all that nearly are numbers."""
        names = [n for n in self.names if n not in (self.label, self.wanted.text, self.wanted.image)]
        if self.wanted.columns is not None:
            return [n for n in names if n in self.features]
        return [name for name in names if self._is_number(name)]

    def _is_number(self, name: str) -> bool:
        """Whether nearly all of what stands in the column is numbers."""
        there = int(self.column(name).notna().sum())
        return bool(there and numpy.isfinite(self.number_column(name)).sum() >= NUMERIC * there)

    def _values(self) -> Iterator[Problem]:
        number_label = [self.label] if self.label and self._is_number(self.label) else []
        for name in [*self.numeric, *number_label, *(b for b in self.wanted.boxes or () if b in self.names)]:
            column, values = self.column(name), self.number_column(name)
            missing = column.isna().to_numpy()
            texts = numpy.isnan(values) & ~missing
            is_text = column.map(lambda v: isinstance(v, str)).to_numpy()
            there = int((~missing).sum())
            rows = numpy.flatnonzero(texts & is_text & (name != self.label))
            written = [str(v) for v in column.iloc[rows]]
            alike = len(rows) >= ALIKE and len({re.sub(r"\d+", "0", text) for text in written}) == 1
            if len(rows) and (alike or len(rows) > max(3, (1 - NUMERIC) * there) or len(rows) == there):
                words = ", ".join(repr(clip(text, 20)) for text in dict.fromkeys(written[:20]))
                detail = f"text in {percent(len(rows) / there)} of its values: {clip(words, 80)}"
                detail += f", from row {rows[0]} to row {rows[-1]}"
                yield Problem("data/non-numeric", part(self.name, name), detail, guess=True)  # a leak comes first
                rows = rows[:0]
            for row in rows:
                yield self.problem("non-numeric", int(row), f"{name}: {clip(str(column.iloc[row]), 40)!r}")
            if missing.all():
                yield self.problem("nonfinite-values", name, "the column is empty")
                continue
            with numpy.errstate(invalid="ignore"):
                bad = missing | (numpy.abs(values) > FLOAT32) | (numpy.isnan(values) & ~texts)
            for row in numpy.flatnonzero(bad):
                value = "nothing" if missing[row] else figures(float(values[row]))
                yield self.problem("nonfinite-values", int(row), f"{name}: {value}")

    def _marks(self) -> Iterator[Problem]:
        """Numbers that stand for "not measured": in inputs, and in a label with decimals, which is no class."""
        measured = self.label and self._is_number(self.label) and (self.number_column(self.label) % 1 > 0).any()
        for name in [*self.numeric, *[self.label] * bool(measured)]:
            values = self.number_column(name)
            for row in numpy.flatnonzero(numpy.isin(values, sentinels(values))):
                self.marks.setdefault(str(self.column(name).iloc[row]))
                yield self.problem("sentinel-value", int(row), f"{name}: {figures(float(values[row]))}")

    def _labels(self) -> Iterator[Problem]:
        """Labels that are no class, or one that is written otherwise elsewhere."""
        if self.label and not self._is_number(self.label):
            labels = [v if isinstance(v, str) else "" for v in self.column(self.label)]
            self.meant = label_variants(collections.Counter(filter(None, labels)), self.wanted.num_classes)
            for row in [row for row, label in enumerate(labels) if label in self.meant]:
                detail = f"{labels[row]!r}, elsewhere {self.meant[labels[row]]!r}"
                yield self.problem("label-variants", row, detail)
        if not self.label or not self._is_number(self.label):
            return
        for row, value in enumerate(self.number_column(self.label).tolist()):
            if fault := self.wanted.label_fault([value]):
                yield self.problem("label-out-of-range", row, f"{self.label} is {fault}")

    def _index_columns(self) -> Iterator[Problem]:
        """The number of the row among the features."""
        for name in self.numeric:
            unnamed = name.startswith("Unnamed: ") or name in ("", "index", "level_0")
            if (self.wanted.columns is not None or unnamed) and self._counts_rows(name, unnamed):
                yield self.problem("index-column", name, "it counts the rows")

    def _counts_rows(self, name: str, unnamed: bool = False) -> bool:
        values = self.number_column(name)
        if len(values) < 8 or not numpy.isfinite(values).all() or (values != numpy.floor(values)).any():
            return False
        words = set(re.split(r"[_\-:\s]+", name.lower()))
        if len(numpy.unique(values)) < len(values) or TIMES & words:
            return False
        steps = numpy.diff(values)
        in_order = bool((steps == steps[0]).all()) and abs(steps[0]) == 1
        in_order |= len(values) >= 20 and bool((steps > 0).all()) and values[-1] - values[0] < 1.5 * len(values)
        shuffled = values.max() - values.min() == len(values) - 1
        return in_order or (shuffled and len(values) >= 20) or bool(words & NUMBERS) or unnamed

    def _leaks(self) -> Iterator[Problem]:
        """Columns that give the label."""
        if not self.label or self.row_count < ROWS_FOR_LEAK:
            return
        names = self.features or [n for n in self.names if n not in (self.label, self.wanted.text, self.wanted.image)]
        names = [n for n in names if n not in self.numeric or not self._counts_rows(n)]
        shares = {name: self._leak(name) for name in names} if len(names) > 1 else {}
        strong = any(STRONG <= share < LEAK for share in shares.values())
        for name, share in shares.items():
            ordered = self.column(name).nunique() > MANY
            if share >= LEAK and not (ordered and strong):  # where others are nearly as good, the classes lie apart
                detail = f"it alone gives {percent(min(share, 1))} of each class of {self.label} right"
                detail = f"its correlation with {self.label} is {share - 1:.5f}" if share > 1 else detail
                yield self.problem("target-leakage", name, detail)

    def _leak(self, name: str) -> float:
        """Of each class, what this column alone gives right by the other rows; of a regression 1 + its correlation."""
        label = self.column(self.label)
        there = label.notna().to_numpy()
        if label.nunique() > max(MANY, 0.1 * len(label)):
            return self._correlation(name, there)
        codes = label.astype("category").cat.codes.to_numpy()[there]
        if len(set(codes.tolist())) < 2:
            return 0.0
        try:
            groups = self.column(name)[there].astype("category").cat.codes.to_numpy()
        except TypeError:  # lists
            return 0.0
        recall = _recall(codes, _by_group(groups, codes))
        values = self.number_column(name)[there]
        finite = numpy.isfinite(values)
        if recall < LEAK and len(numpy.unique(values[finite])) > MANY:
            values = numpy.where(finite, values, values[finite].min() - 1)  # that nothing stands there may tell it, too
            recall = max(recall, _recall(codes, _by_neighbours(values, codes)))
        return recall

    def _correlation(self, name: str, there: Any) -> float:
        x, y = self.number_column(name), self.number_column(self.label)
        both = there & numpy.isfinite(x) & numpy.isfinite(y)
        if both.sum() < max(ROWS_FOR_LEAK, 0.9 * there.sum()) or len(numpy.unique(x[both])) < MANY:
            return 0.0
        ranks = [numpy.argsort(numpy.argsort(v[both])) for v in (x, y)]
        level = max(abs(float(numpy.corrcoef(a, b)[0, 1])) for a, b in ((x[both], y[both]), ranks))
        return 1 + level if level > 0.9995 else 0.0

    def inputs(self) -> list[str] | None:
        """The columns that are a row's input; None where it is not known, or where rows are equal by chance."""
        if self.wanted.text in self.names:
            return [self.wanted.text]
        names = self.features
        if not names:
            names = [n for n in self.names if n != self.label and (not self.label or n.lower() not in SPLIT_COLUMNS)]
            names = [n for n in names if n not in self.numeric or not self._counts_rows(n)]
        return names if names and self._coincidences(names) < 0.1 else None

    def _coincidences(self, names: Sequence[str]) -> float:
        """How many pairs of rows would be equal by chance, if the columns were independent."""
        chance = 1.0
        if any(self.column(name).map(is_long).mean() > 0.5 for name in names):  # texts are not equal by chance
            return 0.0
        for name in names:
            try:
                counts = self.column(name).value_counts(dropna=False).to_numpy()
            except TypeError:  # lists
                continue
            pairs = float((counts * (counts - 1)).sum())
            chance *= (pairs + 1) / max(1, self.row_count * (self.row_count - 1))
        return self.row_count**2 / 2 * chance * 20  # columns that go together make it larger

    def keys(self, names: Sequence[str]) -> list[str | None]:
        """Each row's input as one text, white space aside; None for an empty one."""
        columns = [[" ".join(str(v).split()) for v in self.column(name)] for name in names]
        joined = ["\x1f".join(parts) for parts in zip(*columns)]
        return [key if key.strip("\x1f ") not in ("", "nan", "None") else None for key in joined]

    def _conflicts(self) -> Iterator[Problem]:
        """Rows of one input and two labels."""
        names = self.inputs() if self.label else None
        if names:
            labels = [str(v).strip() for v in self.column(self.label)]
            keyed = [(key, labels[row], row) for row, key in enumerate(self.keys(names)) if key is not None]
            yield from (self.problem("conflicting-labels", row, detail) for row, detail in two_labels(keyed))

    def _texts(self) -> Iterator[Problem]:
        name = self.wanted.text
        if name not in self.names:
            return
        for number, value in enumerate(self.column(name)):
            if not isinstance(value, str) or not value.strip():
                yield self.problem("empty-text", number, f"{name} is empty")
        if not self.label or self._is_number(self.label):
            return
        # a label for each word: as many of them, where nearly all rows have
        words = [(len(str(t).split()), len(str(v).split())) for t, v in zip(self.column(name), self.column(self.label))]
        same = sum(a == b for a, b in words)
        if same >= NUMERIC * len(words) and max(b for _, b in words) > 1:
            for number, (a, b) in enumerate(words):
                if a != b:
                    yield self.problem("labels-misaligned", number, f"{b} labels for {a} words")

    def _boxes(self) -> Iterator[Problem]:
        boxes = self.wanted.boxes
        if not boxes or not all(name in self.names for name in boxes):
            return
        values = numpy.stack([self.number_column(name) for name in boxes], 1)
        finite = numpy.isfinite(values).all(1)
        unit = bool(finite.any() and values[finite].max() <= 1 and (values[finite] % 1).any())
        names = self.column(self.wanted.image) if self.wanted.image in self.names else None
        size = functools.cache(lambda name: picture_size(self._path(name) or "") or self.wanted.size)
        for row in numpy.flatnonzero(finite):
            limit = self.wanted.size if names is None else size(str(names.iloc[row]))
            if wrong := box_fault(values[row].tolist(), (1, 1) if unit else limit):
                yield self.problem("invalid-box", int(row), wrong)

    def _path(self, name: str) -> str | None:
        """The file that a row names: seen from the table's folder, or from the root."""
        below = os.path.join(self.root, os.path.dirname(self.name))
        return next((p for p in (os.path.join(f, name) for f in (below, self.root)) if os.path.isfile(p)), None)

    def _files(self) -> Iterator[Problem]:
        """Rows that name a picture which is not there."""
        if self.wanted.image not in self.names or not self.root:
            return
        names = [str(v) for v in self.column(self.wanted.image)]
        absent = {name for name in set(names) if self._path(name) is None}
        for row, name in enumerate(names if len(absent) < len(set(names)) else ()):
            if name in absent:
                yield self.problem("file-missing", row, f"{name} is not there")


def sentinels(values: Any) -> list[float]:
    """Numbers of a column that stand for "not measured": of a known form, far from all others, in at most half of the
    rows. Below a column that has nothing else below 0 two whole nines are enough; above the others, where a large value
    may be true, the distance is ten times their range, and the number stands there twice."""
    found, rest = list[float](), values[numpy.isfinite(values)]
    half = len(rest) / 2
    while len(found) < 4 and len(numpy.unique(rest)) > 8:
        ends = [(end, rest[rest != end], int((rest == end).sum())) for end in (float(rest.min()), float(rest.max()))]
        end = next((end for end, others, number in ends if number <= half and _is_mark(end, others, number)), None)
        if end is None:
            break
        found.append(end)
        rest = rest[rest != end]
    return found


def _is_mark(value: float, others: Any, number: int) -> bool:
    low, high = float(others.min()), float(others.max())
    text, spread = f"{abs(value):.10g}".replace(".", ""), high - low
    if not (abs(value) in MARKS or abs(value) >= 1e15 or len(text) > 1 + (value > 0) and {*text} == {"9"}):
        return False
    if value > 0:
        return value - high > 10 * spread and number > 1
    alone = low >= 0 and value == int(value) and number > 1
    return alone or low - value > (spread if low >= 0 else 3 * spread)


def _recall(codes: Any, guesses: Any) -> float:
    """The least share, over the classes of three and more rows, of their rows that is guessed right."""
    shares = [(guesses[codes == c] == c).mean() for c in set(codes.tolist()) if (codes == c).sum() > 2]
    return float(min(shares)) if len(shares) > 1 else 0.0


def _by_group(groups: Any, codes: Any) -> Any:
    """The most frequent class among the other rows of the same value; -1 where there are none."""
    width = int(codes.max()) + 1
    if (int(groups.max()) + 2) * width > 50_000_000:
        return numpy.full(len(codes), -1)
    table = numpy.zeros((int(groups.max()) + 2, width), dtype=numpy.int64)
    numpy.add.at(table, (groups, codes), 1)
    others = table[groups]
    others[numpy.arange(len(codes)), codes] -= 1
    return numpy.where(others.sum(1) > 0, others.argmax(1), -1)


def _by_neighbours(values: Any, codes: Any) -> Any:
    """The most frequent class of the two neighbours on each side, in the order of the values; -1 where that is even."""
    order = numpy.argsort(values, kind="stable")
    ordered = codes[order]
    padded = numpy.concatenate([ordered[2:0:-1], ordered, ordered[-2:-4:-1]])
    around = numpy.stack([padded[i : i + len(codes)] for i in (0, 1, 3, 4)], 1)
    votes = numpy.stack([(around == c).sum(1) for c in range(int(codes.max()) + 1)], 1)
    best = votes.argmax(1)
    own = around == ordered[:, None]  # at the edge of a class both on one side are of it
    even = numpy.where(own[:, :2].all(1) | own[:, 2:].all(1), ordered, -1)
    guesses = numpy.empty(len(codes), dtype=int)
    guesses[order] = numpy.where(votes.max(1) > 2, best, even)
    return guesses


def box_fault(box: Sequence[float], limit: tuple[int, int] | None, slack: float = 0.0) -> str:
    """What is wrong with x1, y1, x2, y2, or "". limit: (width, height); slack: how far a box may lie beyond them."""
    x1, y1, x2, y2 = box
    words = []
    if x2 <= x1 or y2 <= y1:
        words.append("no area" if x2 == x1 or y2 == y1 else "its corners are in the wrong order")
    if min(x1, y1) < -slack or (limit and (x2 > limit[0] + slack or y2 > limit[1] + slack)):
        words.append(f"beyond {f'{limit[0]} x {limit[1]}' if limit else 'the edge'}")
    shown = ", ".join(figures(v) for v in box)
    return f"({shown}): {' and '.join(words)}" if words else ""


def coco_problems(item: str, value: Mapping[str, Any], pictures: Collection[str]) -> Iterator[Problem]:
    """Boxes (x, y, width, height) beyond their picture or without an area, categories and pictures that are not there.
    value: a file in the form of COCO; pictures: the names of those that are there."""
    images = {image.get("id"): image for image in value["images"] if isinstance(image, dict)}
    categories = {one.get("id") for one in value.get("categories") or () if isinstance(one, dict)}
    names = {id_: str(image.get("file_name", "")) for id_, image in images.items()}
    absent = {id_ for id_, name in names.items() if name and name.rpartition("/")[2] not in pictures}
    for row, annotation in enumerate(value["annotations"]):
        box, of = annotation.get("bbox"), annotation.get("image_id")
        image, kind = images.get(of, {}), annotation.get("category_id")
        if of not in images:
            yield Problem("data/file-missing", f"{item}#{row}", f"there is no picture with the id {of}")
        elif of in absent and len(absent) < len(names):
            yield Problem("data/file-missing", f"{item}#{row}", f"{names[of]} is not there")
        elif categories and kind not in categories:
            yield Problem("data/label-out-of-range", f"{item}#{row}", f"category {kind} is none of {len(categories)}")
        if not isinstance(box, list) or len(box) != 4 or not all(isinstance(v, (int, float)) for v in box):
            continue
        sides: Any = (image.get("width"), image.get("height"))
        limit = sides if all(isinstance(side, int) for side in sides) else None
        if wrong := box_fault([box[0], box[1], box[0] + box[2], box[1] + box[3]], limit, 1.0):
            yield Problem("data/invalid-box", f"{item}#{row}", wrong)


def yolo_rows(lines: Sequence[str]) -> list[list[float]] | None:
    """The rows of a file in the form of YOLO: class, centre and size (or a polygon), from 0 to 1; None of another."""
    try:
        rows = [[float(word) for word in line.split()] for line in lines]
    except ValueError:
        return None
    return rows if all(len(row) >= 5 and row[0] == int(row[0]) for row in rows) else None


def yolo_problems(item: str, rows: Sequence[Sequence[float]], wanted: DataExpectation) -> Iterator[Problem]:
    for number, (kind, *box) in enumerate(rows):
        if fault := wanted.label_fault([kind]) or (f"{figures(kind)} is below 0" if kind < 0 else ""):
            yield Problem("data/label-out-of-range", f"{item}#{number}", f"class {fault}")
        corners = [box[0] - box[2] / 2, box[1] - box[3] / 2, box[0] + box[2] / 2, box[1] + box[3] / 2]
        if len(box) != 4:
            corners = [min(box[::2]), min(box[1::2]), max(box[::2]), max(box[1::2])]
        if wrong := box_fault(corners, (1, 1), SLACK):
            yield Problem("data/invalid-box", f"{item}#{number}", wrong)


def picture_size(path: str) -> tuple[int, int] | None:
    """From the head of the file alone; None of what is no picture."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's word on decompression bombs
        with pillow()[0].open(path) as picture:
            return picture.size
    return None


def shared_rows(tables: Sequence[DataTable]) -> Iterator[Problem]:
    """Rows that stand in an earlier split, too: of another table, or by the column that holds the split."""
    rows: list[tuple[str, Any, str | int, str]] = []
    for table in tables:
        column = next((n for n in table.names if n.lower() in SPLIT_COLUMNS), None)
        splits = [split_of(str(v)) for v in table.column(column)] if column else [table.split] * table.row_count
        names = [n for n in table.inputs() or () if n != column] if len(set(splits)) > 1 or table.split else []
        if names:
            keyed = enumerate(zip(splits, table.keys(names)))
            rows += [(split, key, part(table.name, row), "") for row, (split, key) in keyed if split]
    return equal_across_splits(rows, "the same input as")


def remarks(table: DataTable) -> Iterator[str]:
    """What is worth knowing and no fault: another encoding, constants."""
    if "encoding" in (options := table.frame.attrs.get("options", "")):
        yield f"{table.name}: no UTF-8. What reads it needs {options[2:]}."
    names = table.features or table.names
    if table.label:
        counts = collections.Counter(map(str, table.column(table.label).dropna()))
        yield from balance(counts, "labels", "rows", table.wanted.num_classes)
    constant = [n for n in table.names if n in names and table.column(n).astype(str).nunique() == 1]
    if constant and table.row_count > 1:
        yield f"{table.name or 'The table'}: the same value in all rows of {', '.join(f'`{n}`' for n in constant[:5])}."
