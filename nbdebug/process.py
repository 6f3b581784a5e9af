"""A function in a copy of this process: what it does to models, generators and variables is gone when it ends.

The copy is a fork, so it begins with exactly the state that is here; nothing needs to be pickled on the way in, and
files that are open for reading stay where they are. It runs torch on one thread, because the threads of the original
are not copied. No fork can compute on a GPU that is in use here, or run a backward where autograd has threads for GPUs:
there a fresh process stands in (`in_process`), which gets the function, what it refers to, and the random numbers by
pickle.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import io
import linecache
import marshal
import os
import pathlib
import pickle
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nbdebug.observe.snapshot import accelerators_in_use, random_states, set_random_states


class CopyFailed(RuntimeError):
    """The copy gave no answer: it ran too long, or was ended, or there can be none."""


class NeedsGpu(CopyFailed):
    """What was computed in a fork needed the GPU that is in use here."""


def can_fork() -> bool:
    """Whether a copy of this process can do what needs no GPU and no backward, such as reading data."""
    return hasattr(os, "fork")


def can_copy() -> bool:
    """Whether a copy of this process can train: not where a GPU is in use, whose state no fork can take along, or where
    autograd has begun its threads for GPUs, which it does at the first backward on a machine that has some."""
    return can_fork() and not torch.cuda.is_initialized() and not _autograd_threads()


def _autograd_threads() -> bool:
    """Linux alone tells the names of threads; elsewhere a GPU that is in use says enough."""
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            if path.read_text().startswith("pt_autograd"):
                return True
    return False


def in_copy(function: Callable[[], Any], seconds: float = 120.0) -> Any:
    """What `function()` gives, computed in a fork of this process. The value must be fit for pickle. Where a GPU is in
    use here, the fork sees none: a loader pins nothing, and what asks torch.cuda.is_available() goes to the CPU.

    Raises what the function raises (as a RuntimeError with its text where it can't be pickled), CopyFailed where it
    gave no answer within so many seconds, NeedsGpu (which is one)."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the copy waits for none
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
    return _result(data)


def _result(data: bytes) -> Any:
    worked, value = pickle.loads(data)  # our own bytes, of a moment ago
    if not worked:
        raise NeedsGpu(str(value)) if "in forked subprocess" in str(value) else value
    return value


def in_process(function: Callable[[], Any], seconds: float = 120.0) -> Any:
    """As `in_copy`, of what may need the GPU or a backward: in a fork where that will do, else in a fresh process.

    The latter gets the function and all that it refers to by cloudpickle (functions and classes of a notebook by their
    code), the classes of the notebook by name, its cells' lines, and torch's, NumPy's and Python's random numbers.
    Raises CopyFailed also for what can't be sent, such as a running generator."""
    if can_copy():
        return in_copy(function, seconds)
    with tempfile.TemporaryDirectory(prefix="nbdebug-process-") as folder:
        there, back = os.path.join(folder, "function"), os.path.join(folder, "answer")
        try:
            with open(there, "wb") as out:
                pickle.dump(sys.path, out)
                out.write(_sent((function, _surroundings())))
        except Exception as error:  # pickle raises what it likes
            raise CopyFailed(f"{type(error).__name__} as it was sent to a fresh process: {error}") from error
        try:
            _Server.running().ask(there, back, seconds)
        except BrokenPipeError:  # it has ended just now
            _Server.running(anew=True).ask(there, back, seconds)
        if not os.path.exists(back):
            raise CopyFailed(f"a fresh process gave no answer within {seconds:g} s, or was ended")
        return _result(pathlib.Path(back).read_bytes())


IDLE = 60.0
"""Seconds after which a server ends by itself."""
LIBRARIES = ("torch.", "nbdebug.", "transformers.", "accelerate.", "pytorch_lightning.", "lightning.")
"""Beginnings of what takes seconds to import: what is here of it, a server imports once."""


class _Server:
    """A process that has imported torch and used no GPU. It forks for each question, so that each begins fresh and at
    once; without fork each has a server of its own."""

    last: _Server | None = None

    def __init__(self) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        own = {"PYTHONPATH": paths, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}  # sets in the same order
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=can_fork(),
        )
        self._said()  # it has imported torch

    @classmethod
    def running(cls, anew: bool = False) -> _Server:
        if anew or cls.last is None or cls.last.process.poll() is not None:
            cls.last = cls()
        return cls.last

    def ask(self, there: str, back: str, seconds: float) -> None:
        """Have the function of the one file run, and its answer written to the other."""
        assert self.process.stdin is not None
        modules = [name for name in sys.modules if name.startswith(LIBRARIES)]
        self.process.stdin.write(pickle.dumps((there, back, modules)))
        self.process.stdin.flush()
        children, timer = [self.process.pid], threading.Timer(seconds, lambda: _kill(children[-1]))
        try:
            children.append(int(self._said() or self.process.pid))
            timer.start()
            self._said()
        except BaseException:  # Ctrl-C: what is said next is the answer to no question
            for child in reversed(children):
                _kill(child)
            raise
        finally:
            timer.cancel()

    def _said(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def _kill(process: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGKILL) if can_fork() else os.kill(process, signal.SIGTERM)


def serve() -> None:
    """The life of a server: it says that it is ready, then of each question the number of the process that answers it,
    and that it has ended. It ends with what it serves, or when nobody asks for a while."""
    questions, said = sys.stdin.buffer, os.fdopen(os.dup(1), "w")
    silent = os.open(os.devnull, os.O_RDWR)
    os.dup2(silent, 1)
    print("ready", file=said, flush=True)
    while not can_fork() or select.select([questions], [], [], IDLE)[0]:
        try:
            there, back, modules = pickle.load(questions)  # of our own process
        except EOFError:
            return
        for name in modules:
            with contextlib.suppress(Exception):  # it is only for speed
                importlib.import_module(name)
        child = os.fork() if can_fork() else 0
        if not child:
            if can_fork():
                os.setpgid(0, 0)
            print(os.getpid(), file=said, flush=True)
            os.dup2(silent, 0)
            try:
                answer_file(there, back)
            finally:
                os._exit(0)  # without fork this ends the server
        with contextlib.suppress(OSError):  # it has done so itself
            os.setpgid(child, child)
        os.waitpid(child, 0)
        _kill(child)  # what it has started
        print("ended", file=said, flush=True)


def _sent(thing: Any) -> bytes:
    """By cloudpickle, with the code of functions as it is: cloudpickle leaves out the files that it is from."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        dispatch_table = collections.ChainMap(
            {types.CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))}, cloudpickle.Pickler.dispatch_table
        )

    with io.BytesIO() as out, contextlib.ExitStack() as stack:
        for module in _from_nowhere():
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        Pickler(out).dump(thing)
        return out.getvalue()


def _is_found(name: str) -> bool:
    """Whether an import finds this module, were it not here yet; finders of old make no specs."""
    return any(f.find_spec(name, None) is not None for f in sys.meta_path if hasattr(f, "find_spec"))


def _from_nowhere() -> Iterator[types.ModuleType]:
    """Modules that no other process can import: they were loaded from a path, or made by hand."""
    folders = {os.path.abspath(path) for path in sys.path}
    for name, module in list(sys.modules.items()):
        if "." in name or name == "__main__" or type(module) is not types.ModuleType or module.__name__ != name:
            continue
        file = getattr(module, "__file__", None) or ""
        folder = os.path.dirname(os.path.dirname(file) if os.path.basename(file) == "__init__.py" else file)
        if folder not in folders and not _is_found(name):
            yield module


def _can_be_sent(thing: Any) -> bool:
    try:
        return bool(_sent(thing))
    except Exception:  # pickle raises what it likes
        return False


def _surroundings() -> dict[str, Any]:
    """What a function of the user's may meet beside what it refers to."""
    own, devices = vars(sys.modules["__main__"]).items(), accelerators_in_use()
    classes = {name: value for name, value in own if isinstance(value, type) and value.__module__ == "__main__"}
    try:
        _sent(classes)
    except Exception:  # some stay here; what needs them says so
        classes = {name: value for name, value in classes.items() if _can_be_sent(value)}
    return {
        "classes": classes,
        "cells": {name: lines for name, lines in linecache.cache.items() if not os.path.exists(name)},
        "devices": devices,
        "random": random_states(devices),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "precision": torch.get_float32_matmul_precision(),
    }


def answer_file(there: str, back: str) -> None:
    """In a fresh process: the function of the one file, and its answer in the other."""
    data = _dumped(functools.partial(_computed, there), _sent)
    with open(f"{back}.part", "wb") as out:
        out.write(data)
    os.replace(f"{back}.part", back)


def _computed(there: str) -> Any:
    """What the function of a file gives, with what it had around it."""
    try:
        with open(there, "rb") as file:
            sys.path[:] = pickle.load(file)
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            function, around = pickle.load(file)
    except Exception as error:
        raise CopyFailed(f"{type(error).__name__} as it came to a fresh process: {error}") from None
    vars(main).update(around["classes"])
    linecache.cache.update(around["cells"])
    torch.set_default_dtype(around["dtype"])
    if around["deterministic"]:  # it imports much
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = around["cudnn"]
    torch.set_float32_matmul_precision(around["precision"])
    set_random_states(around["random"], around["devices"])
    return function()


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
        if torch.cuda._is_in_bad_fork():
            torch.cuda.is_available = torch.accelerator.is_available = lambda *_: False
        data = _dumped(function, pickle.dumps)
        with os.fdopen(writing, "wb") as out:
            out.write(len(data).to_bytes(8, "little") + data)
    finally:
        os._exit(0)


def _dumped(function: Callable[[], Any], dumps: Callable[[Any], bytes]) -> bytes:
    """(whether it worked, what it gave or raised), pickled."""
    try:
        answer = (True, function())
    except BaseException as error:
        answer = (False, error)
    try:
        data = dumps(answer)
        pickle.loads(data)
    except Exception:  # pickle raises what it likes, and so does a class of the user's: the reason goes as text
        reason = f"{type(answer[1]).__name__}: {answer[1]}" if not answer[0] else "its result can't be pickled"
        data = pickle.dumps((False, RuntimeError(reason)))
    return data


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
