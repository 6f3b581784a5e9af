"""The files of a record, and how they are opened: as files from a stranger.

    run.nbdebug/
    ├── steps.jsonl             the last steps, one line each; a header where a run begins and where a file begins
    ├── steps.000.jsonl …       the steps before, once a file has reached LIMIT bytes; the last KEPT of them
    ├── steps.rank1.jsonl …     the same of the other processes of a distributed run
    └── trip-000123[-rank1]/    a step that was not finite: its report, and what a replay needs

A record may come from another machine, or from somebody else. So only plain files of these names are opened, never a
link, which could lead out of the folder, and never more of a file than it can sensibly hold.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

LIMIT = 16 * 2**20
"""Bytes of a file of steps, about 120,000 of them, after which a new one is begun."""
FULL_FILES = 8
"""How many of the full files stay: with the current one, about a million steps."""
MOST_BYTES = 16 * LIMIT
"""No more of a file of steps is read: nothing that nbdebug writes comes near it."""

CURRENT = 10**9
"""The number of the file that is still being written: above every full one's."""
PART = ".part"
"""The ending of what is being written; it gets its name when it is whole."""

_STEPS = re.compile(r"steps(?:\.rank(\d{1,6}))?(?:\.(\d{3,9}))?\.jsonl", re.ASCII)
_TRIP = re.compile(r"trip-(\d{1,18})(?:-rank(\d{1,6}))?(?:-again(\d{1,6}))?", re.ASCII)
_PLAIN_ONLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not be waited for either


class StepsFile(NamedTuple):
    """The name of a file of steps. number: of a full one, from 0; the current one comes after all of these."""

    rank: int
    number: int
    name: str


class TripFolder(NamedTuple):
    """The name of a trip's folder. again: the step of this number has tripped so often before, in earlier runs."""

    step: int
    rank: int
    again: int
    name: str


def steps_name(rank: int, number: int | None = None) -> str:
    """The name of the file of steps: the current one, or a full one."""
    return "steps" + (f".rank{rank}" if rank else "") + ("" if number is None else f".{number:03d}") + ".jsonl"


def trip_name(step: int, rank: int, again: int = 0) -> str:
    return f"trip-{step:06d}" + (f"-rank{rank}" if rank else "") + (f"-again{again}" if again else "")


def is_foreign(folder: pathlib.Path) -> bool:
    """Whether the folder has contents, and nothing of a record among them."""
    names = os.listdir(folder)  # read once: other processes of the same run may be making theirs
    return bool(names) and not any(_STEPS.fullmatch(n) or _TRIP.fullmatch(n) or n.endswith(PART) for n in names)


def contents(folder: pathlib.Path) -> tuple[list[StepsFile], list[TripFolder], list[str]]:
    """The files of steps and the folders of trips, in order, and the names of links, which are not followed."""
    files, trips, links = [], [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            steps, trip = _STEPS.fullmatch(entry.name), _TRIP.fullmatch(entry.name)
            if (steps or trip) and entry.is_symlink():
                links.append(entry.name)
            elif steps and entry.is_file(follow_symlinks=False):
                number = CURRENT if steps[2] is None else int(steps[2])
                files.append(StepsFile(int(steps[1] or 0), number, entry.name))
            elif trip and entry.is_dir(follow_symlinks=False):
                trips.append(TripFolder(int(trip[1]), int(trip[2] or 0), int(trip[3] or 0), entry.name))
    return sorted(files), sorted(trips), sorted(links)


@contextlib.contextmanager
def open_plain(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A plain file, for reading. Raises OSError where it can't be opened, ValueError where it is a link or no file."""
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link; a record holds none, and it is not followed")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | _PLAIN_ONLY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a plain file")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            yield file
    finally:
        os.close(descriptor)


def read_plain(path: pathlib.Path, most: int) -> bytes:
    """The bytes of a plain file. Raises as `opened` does, and ValueError where it is larger than `most`."""
    with open_plain(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path.name} is larger than {most:,} bytes, which is more than nbdebug writes")
    return data
