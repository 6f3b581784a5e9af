"""check_data(): what is wrong with a data set, before anything is trained on it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import pathlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nbdebug.live import progress_bar
from nbdebug.report import Finding, Plot, Report, RuledOut, Table
from nbdebug.text import count, listed, size
from nbdebug.tools.data import cures, media, pictures, tables
from nbdebug.tools.data.cures import DataFacts, Problem
from nbdebug.tools.data.expectation import DataExpectation, expectation
from nbdebug.tools.data.inventory import Entry, FolderInventory, entry_of, inventory, split_of
from nbdebug.tools.data.rows import Rows, pulled, shared_inputs
from nbdebug.tools.data.rules import CODES, ORDER, first_of_each
from nbdebug.tools.data.similarity import Thumbnails

KINDS = ("images", "audio", "text", "tables", "rows")
MOST_ROWS = 200_000
"""Rows of a set in memory, or of a file of records, that are looked at."""
THUMBNAILS, THUMB = 12, 96
"""Pictures of the gallery, and their side in pixels: about 3 kB each."""
ABOUT = ("readme", "license", "notice", "classes", "labels", "names", "metadata", "info", "changelog")
"""Texts about a set, which may well be equal in all of its splits."""
PLAIN = (str, int, float, bool, type(None))
TRIED_FILES, TRIED_BYTES, TRIED_SECONDS = 2_000, 64 << 20, 20.0
"""Of a set whose cures are tried, and the time for all of them."""
LINE = 8 << 20
"""Bytes of one record."""


def check_data(
    path_or_dataset: Any,
    *,
    expected: Any = None,
    kind: str | None = None,
    splits: Mapping[str, str] | None = None,
    sample: int | None = None,
    workers: int | None = None,
    progress: bool = True,
    **fields: Any,
) -> Report:
    """Find what is wrong with a data set: files that do not open, captions, labels, tokens, columns, near copies …

    path_or_dataset: a folder (pictures with captions, classes or masks, sounds, texts, tables as CSV, Parquet or JSON
    Lines), one such file, a map-style Dataset, a list of rows, a DataFrame, a datasets.Dataset; or a dict of sets, by
    split. expected: what it is meant to be: a mapping with the fields of `DataExpectation` (size, mode, min_size,
    sample_rate, channels, extensions, caption_extension, min_words, trigger, columns, label, text, boxes, image,
    num_classes, ignore_index, masks, vocab_size, max_length, pad_id, eos_id), which may also be given by keyword; or a
    processor, a tokenizer or a model, which are asked. What is not said is judged against the set's own majority, or
    not at all. kind: look only at "images", "audio", "text", "tables" or "rows". splits: the split of each folder, by
    its path below the root, where the names do not tell. sample: look at so many items of each kind, drawn evenly.
    workers: processes that decode pictures (default: one a processor, where there are over 300; 0: none).

    Files are opened as untrusted and never changed; pickles are not opened. With Ctrl-C the report is that of what was
    looked at so far. `report.frame()` has a row for each problem: item, code, detail; `report.save("problems.csv")`
    writes them.

    Raises FileNotFoundError where there is no such path, TypeError for what is no data set, or for a field that is
    none, ValueError for a field that makes no sense.
    """
    wanted = expectation(expected, fields)
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind takes one of {', '.join(KINDS)}; got {kind!r}")
    if isinstance(path_or_dataset, (str, os.PathLike)):
        path = os.path.normpath(os.path.expanduser(os.fspath(path_or_dataset)))
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no {os.fspath(path_or_dataset)}")
        check: Check = FolderCheck(path, wanted, kind, splits, sample, workers, progress)
    else:
        check = MemoryCheck(path_or_dataset, wanted, sample, progress)
    try:
        check.run()
    except KeyboardInterrupt:
        check.unchecked.insert(0, "the rest of the set: it was interrupted")
    return check.report()


class Check:
    """A check that goes on. What it has is a report at any moment."""

    subject = ""
    dataset: Any = None

    def __init__(self, wanted: DataExpectation, sample: int | None, progress: bool) -> None:
        self.wanted, self.sample, self.progress = wanted, sample, progress
        self.problems: list[Problem] = []
        self.total: dict[str, int] = {}
        self.unchecked: list[str] = []
        self.notes: list[str] = []

    def run(self) -> None:
        raise NotImplementedError

    def sampled(self, items: Sequence[Any], what: str) -> Sequence[Any]:
        """So many of them, evenly; and a word about it."""
        if self.sample is None or len(items) <= self.sample:
            return items
        self.unchecked.append(f"{len(items) - self.sample:,} of {len(items):,} {what}: a sample was asked for")
        chosen = sorted(random.Random(0).sample(range(len(items)), self.sample))
        return [items[i] for i in chosen]

    def counted(self, noun: str, number: int = 1) -> None:
        self.total[noun] = self.total.get(noun, 0) + number

    def report(self) -> Report:
        problems = first_of_each(iter(self.problems), CODES)
        facts = DataFacts(problems, total=self.total, **self.circumstances())
        findings = tuple(finding for finding in (check(facts) for check in ORDER) if finding is not None)
        looked = (
            ", ".join(count(n, noun, "boxes" if noun == "box" else "") for noun, n in self.total.items() if n)
            or "nothing"
        )
        rows = [(_encodable(p.item), p.code, p.detail) for code in CODES for p in facts.of(code)]
        affected = (
            f"{count(len(problems), 'problem')} of {count(len(findings), 'kind')} in {looked}." if findings else ""
        )
        if not self.total and any("interrupted" in text for text in self.unchecked):
            affected = "It was interrupted before anything was looked at."
        healthy = f"No problem was seen in {looked}." if self.total else "There is nothing here that can be checked."
        summary = [(f.code, f.evidence["items"]) for f in findings]
        listing = [Table("Problems", ("item", "code", "detail"), rows, open=False)] if rows else []
        report = Report(
            "check_data()",
            findings,
            (RuledOut("a problem of the kinds in the catalogue", f"{looked} checked"),)
            if self.total and not findings
            else (),
            tuple(dict.fromkeys(self.unchecked)),
            tuple(self.notes),
            self.subject,
            {"items": {p.item: p.code for p in problems}, "looked at": dict(self.total)},
            headline=affected or healthy,
            tables=[*listing, *([Table("By kind", ("code", "items"), summary)] if len(summary) > 1 else [])],
            plots=self.gallery(problems),
            independent=True,
        )
        if findings and self.sample is None and not any("interrupted" in text for text in self.unchecked):
            names = {"report": report, "dataset": self.dataset}
            report = dataclasses.replace(report, findings=tuple(tried(findings, names, facts, self.again)))
        return report

    def circumstances(self) -> dict[str, Any]:
        """Fields of `DataFacts` that cures need."""
        raise NotImplementedError

    def anew(self, mended: Any) -> Check:
        """This check, of what a cure gave."""
        raise NotImplementedError

    def again(self, mended: Any) -> tuple[dict[str, int], int]:
        """(items by code, items that were looked at) of what a cure gave."""
        check = self.anew(mended)
        check.run()
        problems = first_of_each(iter(check.problems), CODES)
        return collections.Counter(problem.code for problem in problems), sum(check.total.values())

    def gallery(self, problems: Sequence[Problem]) -> tuple[Plot, ...]:
        """Thumbnails of the worst: of each kind in turn."""
        by_code: dict[str, list[Problem]] = {}
        for problem in problems:
            if problem.file:
                by_code.setdefault(problem.code, []).append(problem)
        turns = [p for i in range(THUMBNAILS) for own in by_code.values() for p in own[i : i + 1]]
        shown = [(p, drawn) for p in turns[: 3 * THUMBNAILS] if (drawn := thumbnail(p.file))][:THUMBNAILS]
        pictures_ = [{"name": str(p.item), "label": p.code.partition("/")[2], **drawn} for p, drawn in shown]
        return (Plot("gallery", {"title": "What these look like", "pictures": pictures_}),) if pictures_ else ()


# -- a folder ----------------------------------------------------------------------------------------------------------


class FolderCheck(Check):
    """All files of a folder, or one file."""

    def __init__(
        self,
        path: str,
        wanted: DataExpectation,
        kind: str | None,
        splits: Mapping[str, str] | None,
        sample: int | None,
        workers: int | None,
        progress: bool,
    ) -> None:
        super().__init__(wanted, sample, progress)
        self.kind, self.workers, self.splits = kind, workers, dict(splits or {})
        self.only = os.path.basename(path) if not os.path.isdir(path) else None
        self.root = path if self.only is None else os.path.dirname(path) or "."
        self.subject = f"{os.path.basename(os.path.abspath(path))}: {'a folder' if self.only is None else 'a file'}"
        self.known: dict[str, dict[str, Any]] = {}
        self.tables: list[tables.DataTable] = []
        self.coco: list[str] = []
        self.digest = functools.lru_cache(maxsize=None)(media.file_digest)

    def circumstances(self) -> dict[str, Any]:
        pictures_ = [known for known in self.known.values() if "mode" in known]
        sounds = [known for known in self.known.values() if "rate" in known]
        usual: dict[str, Any] = {}
        for field, own, key in (
            ("size", pictures_, "size"),
            ("mode", pictures_, "mode"),
            ("sample_rate", sounds, "rate"),
            ("channels", sounds, "channels"),
        ):
            values = collections.Counter(tuple(k[key]) if key == "size" else k[key] for k in own)
            usual.update((field, value) for value, _ in values.most_common(1))
        labels = [table.label for table in self.tables if table.label]
        below = self.only or os.path.normpath(self.root) != "."
        return {
            "root": os.path.abspath(self.root),
            "written": "" if os.path.isabs(self.root) or self.root.startswith("..") or not below else self.root,
            "form": self.only or "",
            "expected": {**usual, **({"label": labels[0]} if labels else {}), **self.wanted.stated()},
            "separators": {table.name: table.frame.attrs.get("separator", ",") for table in self.tables}
            | dict.fromkeys(self.coco, "annotations"),
        }

    def anew(self, mended: Any) -> Check:
        return FolderCheck(mended, self.wanted, self.kind, self.splits, None, 0, False)

    def run(self) -> None:
        files = self._inventory()
        self.problems += files.problems
        self.problems += media.unread(files.entries, self.wanted)
        passed = {p.item for p in self.problems if p.code == "data/unread-extension"}
        files.entries = [entry for entry in files.entries if entry.item not in passed]
        if not files.of("picture", "sound", "table", "records"):
            self.counted("file", len(files.entries) + len(passed))
        if self.kind in (None, "images"):
            self._pictures(files)
        if self.kind in (None, "audio"):
            self._sounds(files)
        if self.kind in (None, "text"):
            self._texts(files)
        if self.kind in (None, "tables"):
            self._tables(files)
        if self.kind in (None, "tables", "rows"):
            self._records(files)
        if self.kind in (None, "images", "tables"):
            self._boxes(files)
        self.problems += tables.shared_rows(self.tables)
        self._leftovers(files)

    def _inventory(self) -> FolderInventory:
        if self.only is None:
            return inventory(self.root, self.splits, self.wanted.extensions)
        whole = FolderInventory(self.root)
        entry = entry_of(os.path.join(self.root, self.only), self.only, whole, self.wanted.extensions or ())
        whole.entries = [entry] if entry is not None else []
        return whole

    def _pictures(self, files: FolderInventory) -> None:
        entries = list(self.sampled(files.of("picture"), "pictures"))
        if not entries:
            return
        try:
            pictures.pillow()
        except ImportError as error:
            self.unchecked.append(f"{count(len(entries), 'picture')}: {error}")
            return
        thumbs = Thumbnails()
        with progress_bar("check_data", "pictures", len(entries), wanted=self.progress) as bar:
            for place, known in pictures.measure_all([e.path for e in entries], self.workers, True, bar.update):
                if "thumb" in known:
                    thumbs.add(place, known.pop("thumb"))
                self.known[entries[place].item] = known
                self.counted("picture")
                if not media.is_mask(entries[place], self.wanted.masks):
                    self.problems += media.picture_problems(entries[place], known, self.wanted)
        masks = [e for e in entries if media.is_mask(e, self.wanted.masks)]
        own = [e for e in entries if not media.is_mask(e, self.wanted.masks)]
        self.problems += media.by_majority(own, self.known, self.wanted)
        self.problems += media.mask_problems(masks, own, self.known, self.wanted)
        self._captions(own, files)
        if thumbs.places and not masks:
            self.problems += media.copies(entries, thumbs, self.digest)
            if not self._caption_ending(own, files) and not self.wanted.boxes:
                self.problems += media.conflicts(entries, self.digest)
        self.problems += media.colours(own, self.known, self.wanted.num_classes is not None)
        other = [item for item, known in self.known.items() if known.get("fault") == "unsupported"]
        if other:
            self.unchecked.append(f"{listed(other)}: {self.known[other[0]]['reason']} (pip install pillow-heif)")

    def _caption_ending(self, entries: Sequence[Entry], files: FolderInventory) -> str | None:
        by_item = {entry.item: entry for entry in files.entries}
        return media.caption_ending(entries, by_item, self.wanted)

    def _captions(self, entries: Sequence[Entry], files: FolderInventory) -> None:
        by_item = {entry.item: entry for entry in files.entries}
        ending = media.caption_ending(entries, by_item, self.wanted)
        if ending is None:
            return
        self.problems += media.captions(entries, by_item, ending, self.wanted)
        self.counted("caption", sum(e.ending == ending for e in files.entries))
        alone = media.orphans(entries, by_item, ending) if self.sample is None else []
        if alone:
            self.notes.append(
                f"{count(len(alone), 'file')} {ending} without a picture of the same name: {listed(alone)}."
            )

    def _sounds(self, files: FolderInventory) -> None:
        entries = list(self.sampled(files.of("sound"), "sounds"))
        if not entries:
            return
        if media.soundfile() is None:
            self.unchecked.append(
                "sounds other than WAV: soundfile is not installed (pip install 'torch-nbdebug[data]')"
            )
        done: list[Entry] = []
        with progress_bar("check_data", "sounds", len(entries), wanted=self.progress) as bar:
            try:
                for entry in entries:
                    self.known[entry.item] = media.measure_sound(entry.path)
                    done.append(entry)
                    self.counted("sound")
                    bar.update(1)
            finally:
                self.problems += media.sound_problems(done, self.known, self.wanted)
        self.problems += media.equal_files(
            done, lambda e: self.known[e.item].get("digest") if self.known[e.item].get("peak") else None
        )
        if self.wanted.caption_extension:
            self._captions(done, files)

    def _texts(self, files: FolderInventory) -> None:
        """Texts that are no captions: of several splits."""
        beside = {(e.folder, e.stem) for e in files.of("picture", "sound")}
        entries = [e for e in files.of("text") if (e.folder, e.stem) not in beside and e.bytes]
        entries = [e for e in entries if e.stem.lower() not in ABOUT]
        if len(entries) < 4 or files.of("picture", "sound"):
            return
        self.counted("text", len(entries))
        self.problems += media.equal_files(entries, self.digest)

    def _tables(self, files: FolderInventory) -> None:
        for entry in files.of("table"):
            try:
                frame = tables.read(entry)
            except ImportError:
                self.unchecked.append(f"{entry.item}: it needs pyarrow (pip install pyarrow)")
                continue
            except Exception as error:  # pandas raises many
                self.problems.append(Problem("data/unreadable-file", entry.item, f"no table: {_first_line(error)}"))
                continue
            if frame.attrs.get("cut"):
                self.unchecked.append(f"{entry.item}: rows beyond the first {len(frame):,}")
            self._table(frame, entry)

    def _table(self, frame: Any, entry: Entry) -> None:
        table = tables.DataTable(frame, entry.item, self.wanted, self.root, entry.split)
        self.tables.append(table)
        self.counted("row", table.row_count)
        self.problems += table.problems()
        self.notes += tables.remarks(table)

    def _boxes(self, files: FolderInventory) -> None:
        """Files of boxes in the forms of COCO and YOLO."""
        names = {entry.item.rpartition("/")[2] for entry in files.of("picture")}
        for entry in files.of("json") if names else ():
            with contextlib.suppress(ValueError, RecursionError, OSError, AttributeError, TypeError):
                value = json.loads(pathlib.Path(entry.path).read_bytes()) if entry.bytes <= 64 << 20 else None
                if isinstance(value, dict) and {"images", "annotations"} <= set(value):
                    self.coco.append(entry.item)
                    self.counted("box", len(value["annotations"]))
                    self.problems += tables.coco_problems(entry.item, value, names)
        stems = {entry.stem for entry in files.of("picture")}
        beside = [
            e for e in files.of("text") if e.stem in stems and e.ending == ".txt" and e.bytes < media.CAPTION_LIMIT
        ]
        rows = {}
        for entry in beside:
            lines = pathlib.Path(entry.path).read_bytes().decode("utf-8", "replace").split("\n")
            rows[entry.item] = tables.yolo_rows([line for line in lines if line.strip()])
        full = [own for own in rows.values() if own]
        unit = sum(max(map(abs, row[1:])) <= 1.5 for own in full for row in own)
        if len(full) >= 3 and all(own is not None for own in rows.values()) and unit > sum(map(len, full)) / 2:
            for item, own in rows.items():
                self.counted("box", len(own or ()))
                self.problems += tables.yolo_problems(item, own or (), self.wanted.num_classes)

    def _records(self, files: FolderInventory) -> None:
        sets = []
        for entry in files.of("records", "json", "array"):
            rows = Rows(self.wanted, entry.item, entry.split)
            plain: list[Mapping[str, Any]] = []
            for number, value, fault in records(entry):
                if fault and number < 0:
                    self.problems.append(Problem("data/unreadable-file", entry.item, fault))
                elif fault:
                    self.problems.append(Problem("data/item-fails", rows.item(number), fault))
                elif isinstance(value, (dict, list)):
                    rows.add(number, value)
                    if isinstance(value, dict) and all(isinstance(v, PLAIN) for v in value.values()):
                        plain.append(value)
            if plain and len(plain) == rows.count:  # a table that is written as records
                import pandas

                self._table(pandas.DataFrame(plain), entry)
            elif rows.count:
                self.problems += rows.end()
                self.counted("row", rows.count)
                sets.append(rows)
        self.problems += shared_inputs([rows for rows in sets if rows.split])

    def _leftovers(self, files: FolderInventory) -> None:
        for kind, why in (
            ("pickle", "pickles are never opened"),
            ("archive", "archives are not opened"),
        ):
            some = [entry.item for entry in files.of(kind)]
            if some:
                self.unchecked.append(f"{listed(some)}: {why}")
        if files.hidden:
            self.notes.append(
                f"{count(files.hidden, 'entry', 'entries')} with names such as .DS_Store were passed over."
            )
        if sentence := media.balance(files):
            self.notes.append(sentence)


def _encodable(item: str | int) -> str | int:
    """A name that was no UTF-8 on the disk can't be written as it is."""
    return item.encode("utf-8", "backslashreplace").decode() if isinstance(item, str) else item


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def records(entry: Entry) -> Iterator[tuple[int, Any, str]]:
    """(row, value, fault) of each line of JSON, or of each element of a JSON list of objects."""
    if entry.kind == "array":
        yield from _array_rows(entry)
        return
    if entry.kind == "json":
        if entry.bytes <= 64 << 20:
            with contextlib.suppress(ValueError, RecursionError, OSError):
                values = json.loads(pathlib.Path(entry.path).read_bytes())
                if isinstance(values, list) and values and all(isinstance(v, dict) for v in values):
                    yield from ((number, value, "") for number, value in enumerate(values[:MOST_ROWS]))
        return
    with open(entry.path, "rb") as file:
        number = 0
        while (line := file.readline(LINE)) and number < MOST_ROWS:
            if len(line) >= LINE and not line.endswith(b"\n"):
                yield -1, None, f"line {number + 1} is over {LINE >> 20} MiB long"
                return
            if not line.strip():
                continue
            try:
                yield number, json.loads(line), ""
            except (ValueError, RecursionError) as error:
                yield number, None, f"no JSON: {_first_line(error)}"
            number += 1


def _array_rows(entry: Entry) -> Iterator[tuple[int, Any, str]]:
    """The rows of an array of NumPy: of whole numbers, token ids. It is mapped, not read; one of objects is not."""
    import numpy

    try:
        values = numpy.load(entry.path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # it may be of objects, torn, or no array
        yield -1, None, f"no array of numbers: {_first_line(error)}"
        return
    name = "input_ids" if values.dtype.kind in "iu" and values.ndim == 2 else "input"
    for number in range(min(len(values), MOST_ROWS) if values.ndim else 0):
        yield number, {name: numpy.asarray(values[number])}, ""


# -- in memory ---------------------------------------------------------------------------------------------------------


class MemoryCheck(Check):
    """A set in memory, or several by their splits."""

    def __init__(self, dataset: Any, wanted: DataExpectation, sample: int | None, progress: bool) -> None:
        super().__init__(wanted, sample, progress)
        by_split = isinstance(dataset, Mapping) and dataset and all(_is_set(part) for part in dataset.values())
        self.sets: dict[str, Any] = dict(dataset) if by_split else {"": dataset}
        for part in self.sets.values():
            if not _is_set(part):
                raise TypeError(
                    f"check_data takes a path, a list, a DataFrame or a set with a length; got {type(part).__name__}"
                    + (" (check_loader reads streams)" if hasattr(part, "__iter__") else "")
                )
        self.dataset = dataset
        self.subject = f"{type(dataset).__name__} with {sum(map(len, self.sets.values())):,} rows"

    def circumstances(self) -> dict[str, Any]:
        part = next(iter(self.sets.values()))
        form = "select" if callable(getattr(part, "select", None)) else "Dataset"
        form = "DataFrame" if hasattr(part, "itertuples") else "list" if isinstance(part, (list, tuple)) else form
        return {"form": form, "expected": self.wanted.stated()}

    def anew(self, mended: Any) -> Check:
        return MemoryCheck(mended, self.wanted, None, False)

    def run(self) -> None:
        if all(hasattr(part, "itertuples") for part in self.sets.values()):
            whole = [tables.DataTable(part, name, self.wanted, "", split_of(name)) for name, part in self.sets.items()]
            for table in whole:
                self.problems += table.problems()
                self.notes += tables.remarks(table)
                self.counted("row", table.row_count)
            self.problems += tables.shared_rows(whole)
            return
        done = [self._rows(name, part) for name, part in self.sets.items()]
        self.problems += shared_inputs([rows for rows in done if rows.split])

    def _rows(self, name: str, dataset: Any) -> Rows:
        rows = Rows(self.wanted, name, split_of(name) or name)
        indices = self.sampled(range(min(len(dataset), MOST_ROWS)), "rows")
        if len(dataset) > MOST_ROWS:
            self.unchecked.append(f"rows beyond the first {MOST_ROWS:,}")
        with progress_bar("check_data", "rows", len(indices), wanted=self.progress) as bar, same_random_numbers():
            try:
                for index, value, code, reason in pulled(dataset, indices):
                    if code:
                        self.problems.append(Problem(code, rows.item(index), reason))
                    else:
                        rows.add(index, value)
                    self.counted("row")
                    bar.update(1)
            finally:
                self.problems += rows.end()
        return rows

    def gallery(self, problems: Sequence[Problem]) -> tuple[Plot, ...]:
        """The first ten items as the set gives them, augmented where it does that."""
        dataset = next(iter(self.sets.values()))
        if hasattr(dataset, "itertuples"):
            return ()
        shown = []
        with same_random_numbers():
            for index in range(min(10, len(dataset))):
                with contextlib.suppress(Exception):
                    if drawn := drawn_item(dataset[index]):
                        shown.append({"name": str(index), "label": "", **drawn})
        return (
            (Plot("gallery", {"title": "The first items, as the set gives them", "pictures": shown}),) if shown else ()
        )


def _is_set(value: Any) -> bool:
    rows = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return rows and not isinstance(value, (str, bytes, Mapping))


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """The generators of Python, NumPy and torch are as before afterwards: augmentation draws from them."""
    import numpy

    python, own = random.getstate(), numpy.random.get_state()
    torch = __import__("sys").modules.get("torch")
    state = torch.random.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(own)
        if torch is not None:
            torch.random.set_rng_state(state)


# -- thumbnails --------------------------------------------------------------------------------------------------------


def thumbnail(path: str) -> dict[str, Any] | None:
    """A picture of a file for the gallery; None where it does not decode."""
    Image, ImageFile = pictures.pillow()

    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True  # what is there of it
    try:
        size = tables.picture_size(path)
        if size is None or size[0] * size[1] > 50_000_000:
            return None
        with Image.open(path) as picture:
            return _drawn(picture)
    except Exception:
        return None
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def drawn_item(item: Any) -> dict[str, Any] | None:
    """The picture of an item of a set, where it holds one."""
    Image = pictures.pillow()[0]

    from nbdebug.tools.data.rows import Row, array, picture_shape

    for value in list(Row(item, DataExpectation()).fields.values())[:4]:
        if type(value).__module__.startswith("PIL."):
            return _drawn(value)
        if picture_shape(value) is not None:
            values = array(value).astype("float64")
            values = values.transpose(1, 2, 0) if values.shape[0] in (1, 3, 4) else values
            low, high = float(values.min()), float(values.max())
            scaled = ((values - low) / ((high - low) or 1) * 255).astype("uint8")
            return _drawn(Image.fromarray(scaled[..., 0] if scaled.shape[2] == 1 else scaled[..., :3]))
    return None


def _drawn(picture: Any) -> dict[str, Any]:
    """JPEG in base64 for HTML, and a few colours for figures."""
    import base64

    small = picture.convert("RGB")
    small.thumbnail((THUMB, THUMB))
    data = io.BytesIO()
    small.save(data, "JPEG", quality=70)
    tiny = small.copy()
    tiny.thumbnail((20, 20))
    wide = tiny.size[0]
    colours = ["#" + bytes(c).hex() for c in zip(*[iter(tiny.tobytes())] * 3)]
    rows = [colours[i : i + wide] for i in range(0, len(colours), wide)]
    return {"jpeg": base64.b64encode(data.getvalue()).decode(), "size": list(small.size), "rows": rows}


# -- cures are tried -------------------------------------------------------------------------------------------------


def tried(
    findings: Sequence[Finding],
    names: Mapping[str, Any],
    facts: DataFacts,
    again: Callable[[Any], tuple[Mapping[str, int], int]],
) -> list[Finding]:
    """The findings with their fixes tried. names: what the code may use (`report`, `dataset`); again: from a folder or
    a set to (how many items have each code, how many were looked at). A converter that does not help is left out."""
    from nbdebug.process import CopyFailed, can_copy, in_copy

    root = pathlib.Path(facts.root)
    why = "" if can_copy() else "it is tried in a copy of the process, which can't be made here"
    if facts.root and not why:
        found = [root / facts.form] if facts.form else (path for path in root.rglob("*") if path.is_file())
        files = list(itertools.islice(found, TRIED_FILES + 1))
        whole = sum(path.stat().st_size for path in files)
        if len(files) > TRIED_FILES or whole > TRIED_BYTES:
            why = f"sets of up to {TRIED_FILES:,} files and {size(TRIED_BYTES)} are tried"
    outcomes: dict[tuple[str, str], tuple[bool | None, dict[str, Any]]] = {}
    if not why:
        deadline = time.monotonic() + TRIED_SECONDS
        try:
            outcomes = in_copy(lambda: _outcomes(findings, names, facts, again, deadline), TRIED_SECONDS + 10)
        except (CopyFailed, RuntimeError) as error:
            why = str(error)
    result = []
    for finding in findings:
        fixes_ = []
        for fix in finding.fixes:
            worked, after = outcomes.get((finding.code, fix.code), (None, {"not tried": why} if why else {}))
            if worked is not False and (worked or fix.after is not cures.GUESS):
                fixes_.append(dataclasses.replace(fix, verified=worked, after=after))
        result.append(dataclasses.replace(finding, fixes=tuple(fixes_)))
    return result


def _outcomes(
    findings: Sequence[Finding],
    names: Mapping[str, Any],
    facts: DataFacts,
    again: Callable[[Any], tuple[Mapping[str, int], int]],
    deadline: float,
) -> dict[tuple[str, str], tuple[bool | None, dict[str, Any]]]:
    """What became of each text, by its code and text. It runs in the copy, in a folder of its own each time."""
    result: dict[tuple[str, str], tuple[bool | None, dict[str, Any]]] = {}
    total, cwd = sum(facts.total.values()), os.getcwd()
    for finding in findings:
        for fix in finding.fixes:
            if time.monotonic() > deadline or not _stands_alone(fix.code):
                continue
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                scope = dict(names)
                if facts.written:  # a path as the user writes it leads to the same place from here
                    first = pathlib.Path(facts.written, facts.form).parts[0]
                    pathlib.Path(first).symlink_to(pathlib.Path(cwd, first))
                try:
                    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
                        exec(compile(fix.code, "<cure>", "exec"), scope)  # our own text
                    codes, looked = again(scope["dataset"] if not facts.root else _outcome(scope, facts, folder))
                except Exception:
                    result[finding.code, fix.code] = False, {}
                    continue
                finally:
                    os.chdir("/")
            before, left = int(finding.evidence["items"]), codes.get(finding.code, 0)
            after = {"after it": f"{count(left, 'item')} of {before:,} at fault in {looked:,} checked"}
            result[finding.code, fix.code] = (left == 0 and 2 * looked >= total - before), after
    return result


def _stands_alone(text: str) -> bool:
    """Suggestions use names of the user's program."""
    return "\nroot" in text or "\nsource = " in text or "dataset = " in text


def _outcome(scope: Mapping[str, Any], facts: DataFacts, folder: str) -> str:
    """The folder to check again: the one that was written, or links to the paths and to the tables that were."""
    if "target" in scope:
        return os.path.join(folder, scope["target"])
    root = pathlib.Path(facts.root)
    linked = pathlib.Path(folder, "links", root.name or "set")
    mended = {name: pathlib.Path(folder, name) for name in os.listdir(folder)}
    everything = [root / facts.form] if facts.form else [path for path in root.rglob("*") if path.is_file()]
    kept: list[pathlib.Path] = scope.get("paths", everything)
    for path in kept:
        link = linked / os.path.relpath(path, scope["root"] if "paths" in scope else root)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(mended.get(f"{path.stem}_mended{path.suffix}", path.absolute()))
    return str(linked)
