"""A function in a copy of this process: what it does to models, generators and variables is gone when it ends.

The copy is a fork, so it begins with exactly the state that is here; nothing needs to be pickled on the way in, and
files that are open for reading stay where they are. It runs torch on one thread, because the threads of the original
are not copied. Of another process: whether it still runs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch


class CopyFailed(RuntimeError):
    """The copy gave no answer: it ran too long, or was ended."""


def alive(process: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def can_copy() -> bool:
    """Whether a copy of this process can use torch: not where a GPU is in use, whose state no fork can take along."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()


def in_copy(function: Callable[[], Any], seconds: float = 120.0) -> Any:
    """What `function()` gives, computed in a copy of this process. The value must be fit for pickle.

    Raises what the function raises (as a RuntimeError with its text where it can't be pickled), CopyFailed where it
    gave no answer within so many seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _answer(function, reading, writing)
    os.close(writing)
    with contextlib.suppress(OSError):  # it has done so itself
        os.setpgid(child, child)
    try:
        data = _read(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        _end(child)
    if not data:
        raise CopyFailed(f"the copy of the process gave no answer within {seconds:g} s, or was ended")
    worked, value = pickle.loads(data)  # our own bytes, of a moment ago
    if not worked:
        raise value
    return value


def _own_files() -> None:
    """In a fork: files that are open for reading get a position of their own, so that the original's stays."""
    import fcntl  # not on Windows, where there is no fork

    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError, ValueError):
            number = int(name)
            path = os.readlink(f"/proc/self/fd/{name}")
            if (
                not stat.S_ISREG(os.fstat(number).st_mode)
                or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            ):
                continue
            new = os.open(path, os.O_RDONLY)
            os.lseek(new, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(new, number)
            os.close(new)


def _answer(function: Callable[[], Any], reading: int, writing: int) -> None:
    """The life of the copy: it never returns, and runs none of what Python does at its end. It leads a group of
    processes, so that the workers of a loader go with it."""
    try:
        os.close(reading)
        os.setpgid(0, 0)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.stdout = sys.stderr = os.fdopen(silent, "w")  # a kernel's own would write to the notebook
        torch.set_num_threads(1)
        _own_files()
        try:
            answer = (True, function())
        except BaseException as error:
            answer = (False, error)
        try:
            data = pickle.dumps(answer)
            pickle.loads(data)
        except Exception:  # pickle raises what it likes, and so does a class of the user's: the reason goes as text
            reason = f"{type(answer[1]).__name__}: {answer[1]}" if not answer[0] else "its result can't be pickled"
            data = pickle.dumps((False, RuntimeError(reason)))
        with os.fdopen(writing, "wb") as out:
            out.write(len(data).to_bytes(8, "little") + data)
    finally:
        os._exit(0)


def _read(reading: int, until: float) -> bytes:
    """The answer, after its length: a worker of a loader may hold the pipe for longer. b"" where it is not whole."""
    data = bytearray()
    while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
        ready, _, _ = select.select([reading], [], [], max(until - time.monotonic(), 0))
        part = os.read(reading, 1 << 20) if ready else b""
        if not part:
            return b""
        data += part
    return bytes(data[8:])


def _end(child: int) -> None:
    done, _ = os.waitpid(child, os.WNOHANG)
    if not done:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of the group is left
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
