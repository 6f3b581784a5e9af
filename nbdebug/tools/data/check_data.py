"""check_data(): what is wrong with a data set, before anything is trained on it."""

from __future__ import annotations

import base64
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
import re
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy

from nbdebug.live import progress_bar
from nbdebug.report import Finding, Plot, Report, RuledOut, Table
from nbdebug.text import count, in_a_line, listed, size
from nbdebug.tools.data import cures, media, pictures, tables
from nbdebug.tools.data.cures import DataFacts, Problem, part
from nbdebug.tools.data.expectation import DataExpectation, expectation
from nbdebug.tools.data.inventory import JSON_LIMIT, Entry, FolderInventory, head, inventory, split_of
from nbdebug.tools.data.rows import Row, Rows, array, failure, picture_form
from nbdebug.tools.data.rules import ITEMS, first_of_each
from nbdebug.tools.data.similarity import balance, equal_across_splits, is_long

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
PIECE = 8 << 20
"""Bytes of one record, and values of a stream of tokens, that are read at once."""
Fault = tuple[str, str] | None


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
    if on_disk := isinstance(path_or_dataset, (str, os.PathLike)):
        path_or_dataset = os.path.normpath(os.path.expanduser(os.fspath(path_or_dataset)))
        if not os.path.exists(path_or_dataset):
            raise FileNotFoundError(f"there is no {path_or_dataset}")
    kind_of_check: type[Check] = FolderCheck if on_disk else MemoryCheck
    check = kind_of_check(path_or_dataset, wanted, sample, progress, kind, dict(splits or {}), workers)
    try:
        check.run()
    except KeyboardInterrupt:
        check.interrupted = True
        check.unchecked.insert(0, "the rest of the set: it was interrupted")
    return check.report()


@dataclasses.dataclass
class Check:
    """A check that goes on. What it has is a report at any moment. Fields: the arguments of check_data."""

    given: Any
    wanted: DataExpectation
    sample: int | None
    progress: bool
    kind: str | None
    splits: dict[str, str]
    workers: int | None

    def __post_init__(self) -> None:
        self.problems: list[Problem] = []
        self.tables: list[tables.DataTable] = []
        self.sets: list[Rows] = []
        self.files = FolderInventory()
        self.total: collections.Counter[str] = collections.Counter()
        self.unchecked: list[str] = []
        self.notes: list[str] = []
        self.subject, self.interrupted = "", False

    def run(self) -> None: ...

    def sampled(self, items: Sequence[Any], what: str) -> Sequence[Any]:
        """So many of them, evenly; and a word about it."""
        if self.sample is None or len(items) <= self.sample:
            return items
        self.unchecked.append(f"{len(items) - self.sample:,} of {len(items):,} {what}: a sample was asked for")
        return [items[i] for i in sorted(random.Random(0).sample(range(len(items)), self.sample))]

    def add_table(self, frame: Any, name: str, split: str, root: str = "") -> None:
        values, rows = frame.head(20).to_numpy().ravel(), Rows(self.wanted, name, split)
        if any(isinstance(value, (list, dict, numpy.ndarray)) for value in values):  # of tokens, of vectors
            for number, value in enumerate(frame.head(MOST_ROWS).to_dict("records")):
                rows.add(number, value)
            self.add_rows(rows)
            return
        table = tables.DataTable(frame, name, self.wanted, root, split)
        self.tables.append(table)
        self.total["row"] += table.row_count
        self.problems += table.problems()
        self.notes += tables.remarks(table)
        if self.wanted.text in table.names or any(map(is_long, values)):
            for number, record in enumerate(frame.to_dict("records")):
                rows.text(number, record, str(record.get(table.label, "")))
            self.problems += rows.end()

    def add_rows(self, rows: Rows) -> None:
        self.sets.append(rows)
        self.total["row"] += rows.count
        self.problems += rows.end()
        self.notes += balance(rows.labels, "labels", "rows", self.wanted.num_classes)

    def shared(self) -> None:
        """What a later split has of an earlier one."""
        self.problems += tables.shared_rows(self.tables)
        inputs = ((s.split, digest, part(s.name, i), "") for s in self.sets if s.split for i, digest, _ in s.inputs)
        self.problems += equal_across_splits(inputs, "the same input as")

    def report(self) -> Report:
        problems = first_of_each(self.problems)
        facts = DataFacts(problems, total=self.total, **self.circumstances())
        findings = tuple(finding for check in ITEMS.values() if (finding := check(facts)) is not None)
        counts = [count(n, noun, "boxes" if noun == "box" else "") for noun, n in self.total.items() if n]
        seen = ", ".join(counts) or "nothing"
        headline = f"No problem was seen in {seen}." if counts else "There is nothing here that can be checked."
        if findings:
            headline = f"{count(len(problems), 'problem')} of {count(len(findings), 'kind')} in {seen}."
        elif self.interrupted and not counts:
            headline = "It was interrupted before anything was looked at."
        rows = [(p.item, p.code, p.detail) for finding in findings for p in facts.of(finding.code)]
        listing = Table("Problems", ("item", "code", "detail"), rows, open=False)
        summary = Table("By kind", ("code", "items"), [(f.code, f.evidence["items"]) for f in findings])
        well = (RuledOut("a problem of the kinds in the catalogue", f"{seen} checked"),) * (not findings)
        report = Report(
            "check_data()",
            findings,
            well if counts else (),
            tuple(dict.fromkeys(self.unchecked)),
            tuple(self.notes),
            self.subject,
            {"items": {p.item: p.code for p in problems}, "looked at": dict(self.total)},
            headline=headline,
            tables=[listing, summary][: min(2, len(findings))],
            plots=self.gallery(problems),
            independent=True,
        )
        if findings and self.sample is None and not self.interrupted:
            report = dataclasses.replace(report, findings=tuple(self.tried(report, facts)))
        return report

    def circumstances(self) -> dict[str, Any]:
        """Fields of `DataFacts` that cures need."""
        raise NotImplementedError

    def tried(self, report: Report, facts: DataFacts) -> Iterator[Finding]:
        """The findings with their fixes tried. A guess that does not help is left out."""
        from nbdebug.process import can_fork, in_copy  # imports torch, which a sound folder needs not

        few = len(self.files.entries) <= TRIED_FILES and sum(e.bytes for e in self.files.entries) <= TRIED_BYTES
        why = "" if few else f"sets of up to {TRIED_FILES:,} files and {size(TRIED_BYTES)} are tried"
        if not can_fork():
            why = "it is tried in a copy of the process, which can't be made here"
        deadline = time.monotonic() + TRIED_SECONDS
        for finding in report.findings:
            fixes = []
            for fix in finding.fixes:
                worked, after = None, {"not tried": why} if why else {}
                outcome = functools.partial(self._outcome, finding, fix.code, report, facts)
                # suggestions use names of the user's program
                if not why and time.monotonic() < deadline and re.search("\nroot|\nsource|dataset = ", fix.code):
                    try:
                        worked, after = in_copy(outcome, TRIED_SECONDS)
                    except RuntimeError as error:  # CopyFailed is one, too
                        after = {"not tried": str(error)}
                if worked or (worked is None and fix.after is not cures.GUESS):
                    fixes.append(dataclasses.replace(fix, verified=worked, after=after))
            yield dataclasses.replace(finding, fixes=tuple(fixes))

    def _outcome(self, finding: Finding, text: str, report: Report, facts: DataFacts) -> tuple[bool, dict[str, Any]]:
        """Whether a text worked, and what was seen after it. It runs in the copy, in a folder of its own."""
        cwd = os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            if facts.root and not os.path.isabs(facts.root):  # as the user writes it: it leads to the same place
                first = pathlib.Path(facts.root, facts.form).parts[0]
                os.symlink(os.path.join(cwd, first), first)
            scope = {"report": report, "dataset": self.given}
            try:
                exec(compile(text, "<cure>", "exec"), scope)  # our own text
                given = self.mended(scope, facts, folder)
                check = dataclasses.replace(self, given=given, progress=False, workers=0)
                check.run()
            except Exception:  # a cure that raises is none: the report calls it a suggestion
                return False, {}
            finally:
                os.chdir(cwd)
        before, looked = int(finding.evidence["items"]), check.total.total()
        left = sum(problem.code == finding.code for problem in first_of_each(check.problems))
        after = {"after it": f"{count(left, 'item')} of {before:,} at fault in {looked:,} checked"}
        kept = check.total["picture"] > 0 or not self.total["picture"]  # to leave out all of them is no cure
        return left == 0 and kept and 2 * looked >= self.total.total() - before, after

    def mended(self, scope: dict[str, Any], facts: DataFacts, folder: str) -> Any:
        """What a cure gave. scope: its variables; folder: where it ran."""
        return scope["dataset"]

    def gallery(self, problems: Sequence[Problem]) -> tuple[Plot, ...]:
        """Thumbnails of the worst: of each kind in turn."""
        by_code = collections.defaultdict(list)
        for problem in filter(lambda one: one.file, problems):
            by_code[problem.code].append(problem)
        turns = [p for i in range(THUMBNAILS) for own in by_code.values() for p in own[i : i + 1]]
        shown = [(p, drawn) for p in turns[: 3 * THUMBNAILS] if (drawn := thumbnail(p.file))][:THUMBNAILS]
        named = [{"name": str(p.item), "label": p.code.partition("/")[2], **picture} for p, picture in shown]
        return (Plot("gallery", {"title": "What these look like", "pictures": named}),) if named else ()


class FolderCheck(Check):
    """All files of a folder, or one file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        path = self.given
        self.only = os.path.basename(path) if not os.path.isdir(path) else None
        self.root = path if self.only is None else os.path.dirname(path) or "."
        self.subject = f"{os.path.basename(os.path.abspath(path))}: {'a folder' if self.only is None else 'a file'}"
        self.coco: list[str] = []

    def circumstances(self) -> dict[str, Any]:
        usual: dict[str, Any] = {}
        for field, key in (("size", "size"), ("mode", "mode"), ("sample_rate", "rate"), ("channels", "channels")):
            values = collections.Counter(e.known[key] for e in self.files.entries if key in e.known)
            usual.update((field, value) for value, _ in values.most_common(1))
        usual.update(("label", table.label) for table in self.tables[::-1] if table.label)
        usual["missing"] = list({mark: None for table in self.tables for mark in table.marks})
        usual["meant"] = {text: meant for table in self.tables for text, meant in table.meant.items()}
        below = not os.path.isabs(self.root) and not self.root.startswith("..") and (self.only or self.root != ".")
        return {
            "root": self.root if below else os.path.abspath(self.root),
            "form": self.only or "",
            "expected": {**usual, **self.wanted.stated()},
            "options": {table.name: table.frame.attrs.get("options", "") for table in self.tables}
            | dict.fromkeys(self.coco, "annotations"),
        }

    def mended(self, scope: dict[str, Any], facts: DataFacts, folder: str) -> Any:
        """The folder that was written, or links to the paths and to the tables that were."""
        if "target" in scope:
            return os.path.join(folder, scope["target"])
        root = pathlib.Path(facts.root)
        linked = pathlib.Path(folder, "links", root.name or "set")
        new = {name: pathlib.Path(folder, name) for name in os.listdir(folder)}
        for path in scope.get("paths", [pathlib.Path(facts.root, entry.item) for entry in self.files.entries]):
            link = linked / path.relative_to(root)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(new.get(f"{path.stem}_mended{path.suffix}", path.absolute()))
        return str(linked)

    def run(self) -> None:
        self.files = files = inventory(self.given, self.splits, self.wanted.extensions or ())
        self.problems += files.problems
        unread = list(media.unread(files.entries, self.wanted))
        self.problems += unread
        files.entries = [entry for entry in files.entries if entry.item not in {p.item for p in unread}]
        if not files.of("picture", "sound", "table", "records"):
            self.total["file"] += len(files.entries) + len(unread)
        stages = {self._pictures: ["images"], self._sounds: ["audio"], self._texts: ["text"], self._tables: ["tables"]}
        stages |= {self._records: ["tables", "rows"], self._boxes: ["images", "tables"]}
        for stage, kinds in stages.items():
            if self.kind is None or self.kind in kinds:
                try:
                    stage()
                except ImportError as error:
                    self.unchecked.append(f"{stage.__name__.strip('_')}: {error}")
        self.shared()
        for kind, why in (("pickle", "pickles are never opened"), ("archive", "archives are not opened")):
            if some := [entry.item for entry in files.of(kind)]:
                self.unchecked.append(f"{listed(some)}: {why}")
        if files.hidden:
            self.notes.append(
                f"{count(files.hidden, 'entry', 'entries')} with names such as .DS_Store were passed over."
            )
        self.notes += media.remarks(files)

    def _pictures(self) -> None:
        entries = list(self.sampled(self.files.of("picture"), "pictures"))
        if not entries:
            return
        pictures.pillow()
        thumbs = bytearray()  # 1 kB of each picture that has colours
        with progress_bar("check_data", "pictures", len(entries), wanted=self.progress) as bar:
            for place, known in enumerate(pictures.measure_all([e.path for e in entries], self.workers)):
                if "thumb" in known:
                    thumbs += base64.b64decode(known.pop("thumb"))
                if "size" in known:
                    known["size"] = tuple(known["size"])
                entries[place].known.update(known)
                self.total["picture"] += 1
                if not media.is_mask(entries[place], self.wanted.masks):
                    self.problems += media.picture_problems(entries[place], self.wanted)
                bar.update(1)
        masks = [entry for entry in entries if media.is_mask(entry, self.wanted.masks)]
        own = [entry for entry in entries if not media.is_mask(entry, self.wanted.masks)]
        self.problems += media.by_majority(own, self.wanted)
        self.problems += media.mask_problems(masks, own, self.wanted)
        captioned = self._captions(own)
        if not masks:
            self.problems += media.copies(entries, thumbs)
            if not captioned and not self.wanted.boxes:
                self.problems += media.conflicts(entries)
        self.problems += media.colours(own, self.wanted.num_classes is not None)
        if other := [entry for entry in entries if entry.known.get("fault") == "unsupported"]:
            reason = f"{other[0].known['reason']} (pip install pillow-heif)"
            self.unchecked.append(f"{listed(entry.item for entry in other)}: {reason}")

    def _captions(self, entries: list[Entry]) -> bool:
        """Whether these have captions."""
        by_item = {entry.item: entry for entry in self.files.entries}
        ending = media.caption_ending(entries, by_item, self.wanted)
        if ending is None:
            return False
        self.problems += media.captions(entries, by_item, ending, self.wanted)
        self.total["caption"] += sum(e.ending == ending for e in self.files.entries)
        known = {media.beside(entry, ending) for entry in entries}
        alone = [e.item for e in self.files.entries if e.ending == ending and e.item not in known and not self.sample]
        if alone:
            self.notes.append(
                f"{ending} without a picture of the same name, {count(len(alone), 'file')}: {listed(alone)}."
            )
        return True

    def _sounds(self) -> None:
        entries = list(self.sampled(self.files.of("sound"), "sounds"))
        if not entries:
            return
        media.soundfile()
        done: list[Entry] = []
        with progress_bar("check_data", "sounds", len(entries), wanted=self.progress) as bar:
            try:
                for entry in entries:
                    entry.known.update(media.measure_sound(entry.path))
                    done.append(entry)
                    self.total["sound"] += 1
                    bar.update(1)
            finally:
                self.problems += media.sound_problems(done, self.wanted)
        heard = [entry for entry in done if entry.known.get("peak")]
        self.problems += media.equal_files(heard)
        if self.wanted.caption_extension:
            self._captions(done)

    def _texts(self) -> None:
        """Texts that are no captions: of several splits."""
        if self.files.of("picture", "sound"):
            return
        entries = [e for e in self.files.of("text") if e.bytes and e.stem.lower() not in ABOUT]
        if len(entries) >= 4:
            self.total["text"] += len(entries)
            self.problems += media.equal_files(entries)
            by_split = {entry.split: Rows(self.wanted) for entry in entries}
            for entry in entries:
                text = head(entry.path, media.CAPTION_LIMIT).decode("utf-8", "replace")
                by_split[entry.split].text(entry.item, {"text": text}, entry.folder)
            self.problems += itertools.chain.from_iterable(rows.end() for rows in by_split.values())

    def _tables(self) -> None:
        for entry in self.files.of("table"):
            try:
                frame = tables.read(entry)
            except ImportError:
                self.unchecked.append(f"{entry.item}: it needs pyarrow (pip install pyarrow)")
                continue
            except Exception as error:  # pandas raises many
                self.problems.append(entry.problem("unreadable-file", f"no table: {in_a_line(error)}"))
                continue
            if frame.attrs.get("cut"):
                self.unchecked.append(f"{entry.item}: rows beyond the first {len(frame):,}")
            self.add_table(frame, entry.item, entry.split, self.root)

    def _boxes(self) -> None:
        """Files of boxes in the forms of COCO and YOLO."""
        shown = self.files.of("picture")
        names, stems = {entry.item.rpartition("/")[2] for entry in shown}, {entry.stem for entry in shown}
        for entry in self.files.of("json") if shown else ():
            value = json_of(entry)
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                if isinstance(value, dict) and {"images", "annotations"} <= set(value):
                    self.coco.append(entry.item)
                    self.total["box"] += len(value["annotations"])
                    self.problems += tables.coco_problems(entry.item, value, names)
        rows = {}
        for entry in self.files.of("text"):
            if entry.stem in stems and entry.ending == ".txt" and entry.bytes < media.CAPTION_LIMIT:
                lines = pathlib.Path(entry.path).read_text("utf-8", "replace").split("\n")
                rows[entry.item] = tables.yolo_rows([line for line in lines if line.strip()])
        full = [own for own in rows.values() if own]
        unit = sum(max(map(abs, row[1:])) <= 1.5 for own in full for row in own)
        if len(full) >= 3 and None not in rows.values() and unit > sum(map(len, full)) / 2:
            for item, own in rows.items():
                self.total["box"] += len(own or ())
                self.problems += tables.yolo_problems(item, own or (), self.wanted)

    def _records(self) -> None:
        for entry in self.files.of("records", "json", "array"):
            rows = Rows(self.wanted, entry.item, entry.split)
            plain: list[Mapping[str, Any]] = []
            for number, value, fault in array_rows(entry, self.wanted) if entry.kind == "array" else records(entry):
                if fault is not None:
                    code, detail = fault
                    item = entry.item if code == "unreadable-file" else part(entry.item, number)
                    self.problems.append(Problem(f"data/{code}", item, detail))
                elif isinstance(value, (dict, list)):
                    rows.add(number, value)
                    if isinstance(value, dict) and all(isinstance(v, PLAIN) for v in value.values()):
                        plain.append(value)
            if plain and len(plain) == rows.count:  # a table that is written as records
                import pandas

                self.add_table(pandas.DataFrame(plain), entry.item, entry.split, self.root)
            elif rows.count:
                self.add_rows(rows)


def json_of(entry: Entry) -> Any:
    """The value of a JSON file; None where it can't be read, or is too large."""
    with contextlib.suppress(ValueError, RecursionError, OSError):
        return json.loads(pathlib.Path(entry.path).read_bytes()) if entry.bytes <= JSON_LIMIT else None


def records(entry: Entry) -> Iterator[tuple[int, Any, Fault]]:
    """(row, value, fault) of each line of JSON, or of each element of a JSON list of objects. fault: code, detail."""
    if entry.kind == "json":
        values = json_of(entry)
        if isinstance(values, list) and all(isinstance(v, dict) for v in values):
            yield from ((number, value, None) for number, value in enumerate(values[:MOST_ROWS]))
        return
    with open(entry.path, "rb") as file:
        lines = filter(bytes.strip, iter(lambda: file.readline(PIECE), b""))
        for number, line in enumerate(itertools.islice(lines, MOST_ROWS)):
            if len(line) >= PIECE and not line.endswith(b"\n"):
                yield number, None, ("unreadable-file", f"line {number + 1} is over {PIECE >> 20} MiB long")
                return
            try:
                yield number, json.loads(line), None
            except (ValueError, RecursionError) as error:
                yield number, None, ("item-fails", f"no JSON: {in_a_line(error)}")


def array_rows(entry: Entry, wanted: DataExpectation) -> Iterator[tuple[int, Any, Fault]]:
    """The rows of an array of NumPy: of whole numbers, token ids. It is mapped, not read; one of objects is not."""
    try:
        values = numpy.load(entry.path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # it may be of objects, torn, or no array
        yield 0, None, ("unreadable-file", f"no array of numbers: {in_a_line(error)}")
        return
    name = "input_ids" if values.dtype.kind in "iu" and values.ndim == 2 else "input"
    for number in range(min(len(values), MOST_ROWS) if values.ndim else 0):
        yield number, {name: numpy.asarray(values[number])}, None
    if values.dtype.kind in "iu" and values.ndim == 1 and wanted.vocab_size is not None:  # a stream of tokens
        for start in range(0, len(values), PIECE):
            piece = values[start : start + PIECE]
            for place in numpy.flatnonzero((piece < 0) | (piece >= wanted.vocab_size)).tolist():
                detail = f"id {piece[place]:,} in a vocabulary of {wanted.vocab_size:,}"
                yield start + place, None, ("token-out-of-vocabulary", detail)


class MemoryCheck(Check):
    """A set in memory, or several by their splits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.given
        by_split = isinstance(given, Mapping) and given and all(map(_is_set, given.values()))
        self.parts: dict[str, Any] = dict(given) if by_split else {"": given}
        for other in itertools.filterfalse(_is_set, self.parts.values()):
            hint = " (check_loader reads streams)" if hasattr(other, "__iter__") else ""
            what = "a path, a list, a DataFrame or a set with a length"
            raise TypeError(f"check_data takes {what}; got {type(other).__name__}{hint}")
        self.subject = f"{type(given).__name__} with {sum(map(len, self.parts.values())):,} rows"

    def circumstances(self) -> dict[str, Any]:
        first = next(iter(self.parts.values()))
        form = "select" if callable(getattr(first, "select", None)) else "Dataset"
        form = "DataFrame" if hasattr(first, "itertuples") else "list" if isinstance(first, (list, tuple)) else form
        return {"form": form, "expected": self.wanted.stated()}

    def run(self) -> None:
        from nbdebug.observe.snapshot import same_random_numbers

        with same_random_numbers():
            for name, one in self.parts.items():
                if hasattr(one, "itertuples"):
                    self.add_table(one, name, split_of(name))
                else:
                    self._rows(name, one)
        self.shared()

    def _rows(self, name: str, dataset: Any) -> None:
        rows = Rows(self.wanted, name, split_of(name) or name)
        indices = self.sampled(range(min(len(dataset), MOST_ROWS)), "rows")
        if len(dataset) > MOST_ROWS:
            self.unchecked.append(f"rows beyond the first {MOST_ROWS:,}")
        with progress_bar("check_data", "rows", len(indices), wanted=self.progress) as bar:
            try:
                for index in indices:
                    try:
                        value = dataset[index]
                    except Exception as error:
                        code, words = failure(error)
                        self.problems.append(Problem(code, part(name, index), words))
                        self.total["row"] += 1
                    else:
                        rows.add(index, value)
                    bar.update(1)
            finally:
                self.add_rows(rows)

    def gallery(self, problems: Sequence[Problem]) -> tuple[Plot, ...]:
        """The first ten items as the set gives them, augmented where it does that."""
        from nbdebug.observe.snapshot import same_random_numbers

        dataset = next(iter(self.parts.values()))
        if hasattr(dataset, "itertuples"):
            return ()
        shown = []
        with same_random_numbers():
            for index in range(min(10, len(dataset))):
                with contextlib.suppress(Exception):
                    if drawn := drawn_item(dataset[index]):
                        shown.append({"name": str(index), "label": "", **drawn})
        return (Plot("gallery", {"title": "The first items, as the set gives them", "pictures": shown}),) * bool(shown)


def _is_set(value: Any) -> bool:
    rows = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return rows and not isinstance(value, (str, bytes, Mapping))


def thumbnail(path: str) -> dict[str, Any] | None:
    """A picture of a file for the gallery; None where it does not decode."""
    Image, ImageFile = pictures.pillow()

    size = tables.picture_size(path)
    if size is None or size[0] * size[1] > 50_000_000:
        return None
    as_it_is = unittest.mock.patch.object(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # what is there of it
    with contextlib.suppress(Exception), as_it_is, Image.open(path) as picture:
        return _drawn(picture)
    return None


def drawn_item(item: Any) -> dict[str, Any] | None:
    """The picture of an item of a set, where it holds one."""
    for value in Row(item, DataExpectation()).fields.values():
        form = picture_form(value)
        if form is None:
            continue
        if form[1] is not None:
            return _drawn(value)
        values = numpy.nan_to_num(array(value).astype("float64"), posinf=0, neginf=0)
        values = values.transpose(1, 2, 0) if values.shape[0] == form[2] else values
        low, high = float(values.min()), float(values.max())
        scaled = ((values - low) / ((high - low) or 1) * 255).astype("uint8")
        return _drawn(pictures.pillow()[0].fromarray(scaled[..., 0] if form[2] == 1 else scaled[..., :3]))
    return None


def _drawn(picture: Any) -> dict[str, Any]:
    """JPEG in base64 for HTML, and a few colours for figures."""
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
