"""The record of a guarded run on disk: a line a step, and a folder for each step that was not finite.

A line is written with one call of the system as soon as its step has ended, so what a killed process leaves is whole up
to its last line. Nothing here may disturb the training: once the record exists, an error is reported once, lines wait
in memory, and they are written when writing works again. What has been written is never touched: a line that was cut
off (a full disk) is ended by a newline, and written again as a whole.

A forked process (a worker of a DataLoader) has this object too, and must not write: its process number differs.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

from nbdebug import __version__
from nbdebug.tools.guard.record.files import (
    CURRENT,
    FULL_FILES,
    LIMIT,
    PART,
    StepLine,
    contents,
    encode,
    is_foreign,
    steps_name,
    strict,
)

WAITING = 10_000
"""Lines that are kept in memory while the disk does not take them; the oldest go first."""

_WAITING_MESSAGE = f"lines are kept in memory, the last {WAITING:,}, and written as soon as writing works again"
_FLAGS = (
    os.O_RDWR | os.O_APPEND | os.O_CREAT | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_BINARY", "O_NOFOLLOW"))
)


class RecordWriter:
    """Writes the record of one process.

    path: the record's folder; it is made where it is missing, and the record of an earlier run in it is continued.
    about: what the run is (names of models and optimizers, policy, world size), as plain data. rank: this process, of
    several. Raises TypeError or ValueError for a path that can't be a record, OSError where it can't be written;
    afterwards nothing raises.
    """

    def __init__(self, path: str | os.PathLike[str], about: Mapping[str, Any], rank: int | None = None):
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise TypeError(f"record takes the path of a folder, such as 'run.nbdebug'; got {path!r}")
        self.path = pathlib.Path(path).expanduser().absolute()  # a later change of directory must not move it
        self.rank, self.run = rank or 0, os.urandom(4).hex()
        self.lost = 0  # lines that had to be given up
        self._about = strict(about)
        self._waiting: collections.deque[bytes] = collections.deque(maxlen=WAITING)
        self._pid, self._fd, self._size, self._limit = os.getpid(), -1, 0, LIMIT
        self._identity: tuple[int, int] = (-1, -1)
        self._torn = False  # the file ends within a line
        self._warned: set[str] = set()
        self._start()

    # -- what the guard calls: none of these raises -------------------------------------------------------------------

    def line(self, line: StepLine) -> None:
        """Write one step; where that fails, keep it for later."""
        if os.getpid() != self._pid:
            return
        try:
            data = encode({"run": self.run, **line.to_json()})
        except Exception as error:
            self._warn("line", error, "a step could not be written")
            return
        try:
            self.lost += len(self._waiting) == WAITING
            self._waiting.append(data)
            self._write_waiting()
        except Exception as error:
            self._warn("line", error, _WAITING_MESSAGE)

    def trip(self, trip: Any, models: Mapping[str, Any] | None = None, history: Any = None) -> pathlib.Path | None:
        """Write a trip's folder; returns its path, or None where it could not be written.

        models: by the names that the trip's tape knows, in the state before the step; without them their weights are
        not written. history: the run until then, for the rules.
        """
        if os.getpid() != self._pid:
            return None
        from nbdebug.tools.guard.record.pack import write_trip  # imports safetensors, which a line does not wait for

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return write_trip(self.path, trip, self.run, self.rank, models, history)
        except Exception as error:
            self._warn("trip", error, f"step {getattr(trip, 'step', '?')}, which was not finite, could not be saved")
            return None

    def close(self) -> None:
        """Write what still waits, and close the file."""
        if os.getpid() == self._pid:
            try:
                self._write_waiting()
            except Exception as error:
                self._warn("line", error, "the last lines could not be written")
            self._pid = -1
        self._close_file()

    # -- lines --------------------------------------------------------------------------------------------------------

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        self._ensure_open()
        while self._waiting:
            self._write(self._waiting[0])
            self._waiting.popleft()
        if self.lost:
            self._write(encode({"run": self.run, "lost": self.lost, "time": time.time()}))
            self.lost = 0

    def _write(self, data: bytes) -> None:
        """All of `data`, in one call where the disk takes it. Raises OSError."""
        rest = memoryview(b"\n" + data if self._torn else data)
        self._torn = True  # until all of it is there
        while rest:
            try:
                count = os.write(self._fd, rest)
            except OSError:
                if bytes(rest) == b"\n":  # the line is whole, and the next one brings its end
                    return
                raise
            self._size += count
            rest = rest[count:]
        self._torn = False

    def _header(self, continued: bool) -> bytes:
        """The first line of a run, and of each further file of it."""
        return encode(
            {
                "header": 1,
                "run": self.run,
                "continued": continued,
                "nbdebug": __version__,
                "time": time.time(),
                "rank": self.rank,
                "pid": os.getpid(),
                "about": self._about,
            }
        )

    # -- the file -----------------------------------------------------------------------------------------------------

    @property
    def _current(self) -> pathlib.Path:
        return self.path / steps_name(self.rank)

    def _start(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"record takes a folder, and {self.path} is a file: give another path, or move it away")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if is_foreign(self.path):
                raise ValueError(
                    f"{self.path} is a folder with other files in it: give the record a folder of its "
                    "own, such as 'run.nbdebug'"
                )
            self._open()
            self._write(self._header(continued=False))
        except OSError as error:
            raise OSError(error.errno, f"The record can't be written: {error.strerror}", str(self.path)) from error

    def _ensure_open(self) -> None:
        """The file, if it is still there; else a new one, with the lines that the lost one had."""
        status = self._status()
        if status is None:  # somebody has closed all files of this process
            self.path.mkdir(parents=True, exist_ok=True)
            self._open()
            self._write(self._header(continued=True))
        elif status.st_nlink == 0:
            self._restore()
        elif self._size >= self._limit:
            self._rotate()

    def _status(self) -> os.stat_result | None:
        """What the system says of our file; None if the descriptor is closed, or is another file by now."""
        try:
            status = os.fstat(self._fd) if self._fd >= 0 else None
        except OSError:
            return None
        return status if status and (status.st_dev, status.st_ino) == self._identity else None

    def _open(self) -> None:
        """Open the file of steps at its end."""
        descriptor = os.open(self._current, _FLAGS, 0o644)
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            torn = size > 0 and (os.lseek(descriptor, -1, os.SEEK_END), os.read(descriptor, 1))[1] != b"\n"
        except BaseException:
            os.close(descriptor)
            raise
        self._use(descriptor, size, torn)

    def _use(self, descriptor: int, size: int, torn: bool) -> None:
        self._close_file()
        status = os.fstat(descriptor)
        self._fd, self._size, self._torn, self._identity = descriptor, size, torn, (status.st_dev, status.st_ino)

    def _close_file(self) -> None:
        if self._status() is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1

    def _restore(self) -> None:
        """The folder or the file was deleted. While it is open its bytes are still there: write them into a new one."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self._current.exists():  # somebody else has made it again
            self._open()
            self._write(self._header(continued=True))
        else:
            os.lseek(self._fd, 0, os.SEEK_SET)
            with os.fdopen(os.dup(self._fd), "rb") as old:
                self._replace(old.read())
        self._warn(
            "deleted",
            "it was deleted",
            "it was made again, with the lines of its last file; older files and "
            "the folders of steps that were not finite are gone, if there were any",
        )

    def _rotate(self) -> None:
        """Set the full file aside and begin a new one; the oldest goes. Where that fails, the full one is used on."""
        try:
            full = [f for f in contents(self.path)[0] if f.rank == self.rank and f.number != CURRENT]
            number = full[-1].number + 1 if full else 0
            self._replace(self._header(continued=True), aside=self.path / steps_name(self.rank, number))
        except OSError as error:
            self._limit = self._size + LIMIT
            self._warn("rotate", error, "the file of steps is full and could not be set aside; it grows on")
            return
        with contextlib.suppress(OSError):
            for file in full[: max(0, len(full) + 1 - FULL_FILES)]:
                (self.path / file.name).unlink()

    def _replace(self, data: bytes, aside: pathlib.Path | None = None) -> None:
        """A new current file that begins with `data`; it appears as a whole. aside: where the old one is moved to."""
        part = self.path / f".{steps_name(self.rank)}{PART}"
        descriptor = os.open(part, _FLAGS | os.O_TRUNC, 0o644)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if aside is not None:
                os.rename(self._current, aside)
            os.rename(part, self._current)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        self._use(descriptor, len(data), bool(data) and not data.endswith(b"\n"))
        self._limit = LIMIT

    # -- warnings -----------------------------------------------------------------------------------------------------

    def _warn(self, kind: str, error: Exception | str, what: str) -> None:
        """Warn once of each kind: in a long night each step would repeat it."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        message = f"nbdebug: the record {self.path} ({reason}): {what}. The training goes on."
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        except Exception:  # a program that turns warnings into errors
            with contextlib.suppress(Exception):
                print(message, file=sys.stderr)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what another process gets, knows where the record is and never writes."""
        return {**self.__dict__, "_fd": -1, "_pid": -1, "_waiting": collections.deque(maxlen=WAITING)}

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it may have no file yet, or Python may be about to end
            self._close_file()
