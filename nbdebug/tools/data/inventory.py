"""What lies in a folder: each file with its kind and its split, by names, sizes and first bytes alone."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import Any

from nbdebug.text import size
from nbdebug.tools.data.cures import Problem

ENDINGS = {
    "picture": "jpg jpeg jpe jfif png bmp dib gif webp tif tiff ppm pgm pbm pnm jp2 tga avif heic heif ico".split(),
    "sound": "wav wave flac ogg oga opus mp3 aif aiff aifc au w64 m4a aac wma".split(),
    "table": "csv tsv parquet pq feather".split(),
    "records": "jsonl ndjson".split(),
    "json": ["json"],
    "text": "txt caption captions lab md".split(),
    "array": ["npy"],
    "pickle": "pkl pickle pt pth joblib npz".split(),
    "archive": "zip tar tgz gz bz2 xz 7z rar zst".split(),
    "unfinished": "tmp part partial crdownload download incomplete".split(),
}
KINDS = {f".{ending}": kind for kind, endings in ENDINGS.items() for ending in endings}
PICTURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"II*\x00", b"MM\x00*")
SOUNDS = (b"fLaC", b"OggS")
"""The first bytes of files whose ending says nothing."""
SPLITS = {
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation"), "val"),
    **dict.fromkeys(("test", "testing", "tst", "holdout"), "test"),
}
HIDDEN = ("__MACOSX", "__pycache__", "Thumbs.db", "desktop.ini")
"""Names of what programs leave in folders, beside those that begin with a dot."""
RANK = {"train": 0, "": 1, "val": 2, "test": 3}
"""Which of two copies is the original: that in the training set, else the earlier one."""
JSON_LIMIT = 64 << 20
"""Bytes of a JSON file that is read to see whether it is whole."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A regular file. item: its path below the root, with slashes; ending: as it is, with the dot; known: measured."""

    path: str
    item: str
    kind: str
    bytes: int
    ending: str
    split: str = ""
    known: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def folder(self) -> str:
        return self.item.rpartition("/")[0]

    @property
    def stem(self) -> str:
        name = self.item.rpartition("/")[2]
        return name[: len(name) - len(self.ending)] if self.ending else name

    @functools.cached_property
    def digest(self) -> str:
        """Of its bytes."""
        result = hashlib.blake2b(digest_size=16)
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                result.update(block)
        return result.hexdigest()

    def problem(self, code: str, detail: str, guess: bool = False) -> Problem:
        return Problem(f"data/{code}", self.item, detail, self.path, guess)


@dataclasses.dataclass
class FolderInventory:
    """All files, in the order of their names; hidden: how many were passed over, whose names begin with a dot."""

    entries: list[Entry] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    hidden: int = 0

    def of(self, *kinds: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind in kinds]

    def unreadable(self, item: str, detail: str) -> None:
        self.problems.append(Problem("data/unreadable-file", item, detail))


def inventory(path: str, splits: dict[str, str], extensions: tuple[str, ...]) -> FolderInventory:
    """Walk the folder, or take the file. splits: the name of a split, by the beginning of an item; where there are
    none, splits are read off the names of folders, or else off the beginnings of the files' names."""
    result = FolderInventory()
    for place, item in _files(path, result) if os.path.isdir(path) else [(path, os.path.basename(path))]:
        try:
            info = os.stat(place)
        except OSError as error:
            link = f"a link to nothing ({os.readlink(place)})" if os.path.islink(place) else ""
            result.unreadable(item, link or error.strerror or "it can't be opened")
            continue
        if stat.S_ISREG(info.st_mode):
            ending = pathlib.PurePosixPath(item).suffix
            kind = KINDS.get(ending.lower()) or _kind(place, ending in extensions)
            result.entries.append(Entry(place, item, kind, info.st_size, ending))
        else:
            kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
            what = kinds.get(stat.S_IFMT(info.st_mode), "a device")
            result.unreadable(item, f"{what}, no file: to read it may wait for ever")
    names = _splits([entry.item for entry in result.entries], splits)
    result.entries = [dataclasses.replace(entry, split=split) for entry, split in zip(result.entries, names)]
    _unfinished(result)
    return result


def _kind(path: str, picture: bool) -> str:
    """The kind of a file by its first bytes. picture: its ending is one that the loader takes."""
    first = head(path, 16)
    form = first[8:12] if first.startswith(b"RIFF") else b""
    if first.startswith(SOUNDS) or form == b"WAVE":
        return "sound"
    return "picture" if picture or first.startswith(PICTURES) or form == b"WEBP" else "other"


def _files(root: str, result: FolderInventory) -> Iterator[tuple[str, str]]:
    """(path, item) of all that is no folder. A link to a folder is followed once; one to a folder above it never."""
    waiting: list[tuple[str, str, frozenset[tuple[int, int]]]] = [(root, "", frozenset())]
    visited: set[tuple[int, int]] = set()
    while waiting:
        folder, prefix, above = waiting.pop()
        try:
            info = os.stat(folder)
            names = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            result.unreadable(prefix[:-1] or ".", error.strerror or type(error).__name__)
            continue
        key = (info.st_dev, info.st_ino)
        if key in above:
            result.unreadable(prefix[:-1], "a link to a folder above it: a circle")
        if key in visited and info.st_ino:
            continue
        visited.add(key)
        folders = []
        passed_over = [e for e in names if e.name.startswith(".") or e.name in HIDDEN]
        result.hidden += len(passed_over)
        for entry in names:
            if entry in passed_over:
                continue
            if os.path.isdir(entry.path):
                folders.append((entry.path, f"{prefix}{entry.name}/", above | {key}))
            else:
                # a name that is no UTF-8 on the disk could not be written into a report
                yield entry.path, (prefix + entry.name).encode("utf-8", "backslashreplace").decode()
        if len(folders) > 1 and all(_has_pictures(path) for path, *_ in folders):  # one for each class
            for entry in (e for e in passed_over if os.path.isdir(e.path)):
                detail = "ImageFolder takes each folder for a class, and numbers those behind it one higher"
                result.problems.append(Problem("data/stray-class-folder", prefix + entry.name, detail, entry.path))
        waiting += reversed(folders)


def _has_pictures(folder: str) -> bool:
    """Whether the first files of a folder are pictures by their names."""
    try:
        with os.scandir(folder) as entries:
            first = [KINDS.get(pathlib.PurePath(e.name).suffix.lower()) for e in itertools.islice(entries, 10)]
    except OSError:
        return False
    return first.count("picture") > len(first) / 2


def head(path: str, count: int = 512) -> bytes:
    """The first bytes of a regular file; b"" where it can't be read."""
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError:
        return b""


def split_of(word: str) -> str:
    """train, val or test, where a name has such a word as a part: "train2017", "my-val", "images_test"."""
    for part in re.split(r"[^a-z]+", word.lower()):
        if part in SPLITS:
            return SPLITS[part]
    return ""


def _splits(items: list[str], splits: dict[str, str]) -> list[str]:
    """The split of each item; "" for all where there are not two of them."""
    if splits:
        begins = sorted(splits, key=len, reverse=True)
        return [next((splits[b] for b in begins if f"{item}/".startswith(b.rstrip("/") + "/")), "") for item in items]
    by_folder = [next(filter(None, (split_of(part) for part in item.split("/")[:-1])), "") for item in items]
    if len(set(by_folder) - {""}) > 1:
        return by_folder
    by_name = [split_of(item.rpartition("/")[2].rpartition(".")[0]) for item in items]
    return by_name if len(set(by_name) - {""}) > 1 else [""] * len(items)


def _unfinished(result: FolderInventory) -> None:
    """Files that a program has begun and not ended: names that say so, and JSON that ends early."""
    for entry in result.of("unfinished"):
        detail = f"left over under a temporary name, {size(entry.bytes)}"
        result.problems.append(entry.problem("unfinished-file", detail))
    for entry in result.of("json"):
        if entry.bytes > JSON_LIMIT:
            continue
        try:
            json.loads(pathlib.Path(entry.path).read_bytes())
        except (ValueError, RecursionError) as error:
            at_end = isinstance(error, json.JSONDecodeError) and not error.doc[error.pos :].strip(" \t\r\n\"\\'")
            if at_end or not entry.bytes or "Unterminated" in str(error):
                detail = f"JSON that ends early, after {size(entry.bytes)}" if entry.bytes else "it is empty"
                result.problems.append(entry.problem("unfinished-file", detail))
        except OSError as error:
            result.unreadable(entry.item, error.strerror or type(error).__name__)
