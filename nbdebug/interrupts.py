"""What ends a step inside of code of ours, and how it passes: Ctrl-C, and the errors that nbdebug raises on purpose.

Python swallows an exception that is raised in a `__del__`, in the callback of a weak reference or of the garbage
collector. Records of a step die in great numbers, so that Ctrl-C often falls into one of these. While `Rescue` is
attached such a Ctrl-C is sent once more. `uninterrupted` holds it back until a change is complete, within
`interruptible` also where it comes as such a function begins, and `uncollected` keeps the collector itself from
running.

IPython omits frames that set `__tracebackhide__`, but never the innermost one, so a notebook would show the line in
nbdebug's hook that raised an error. It also lets an exception render itself: `ShownAtUsersLine` ends at the user's own
line. Nothing here imports IPython.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`: in each step
import _thread
import contextlib
import functools
import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from signal import SIGINT
from types import CodeType
from typing import Any, ClassVar, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Rescue:
    """While any of these is attached, a Ctrl-C that Python has swallowed comes again."""

    _attached: ClassVar[int] = 0
    _before: ClassVar[Callable[[Any], Any]]

    @classmethod
    def attach(cls) -> None:
        if not cls._attached:
            cls._before = sys.unraisablehook
            sys.unraisablehook = _swallowed
        cls._attached += 1

    @classmethod
    def detach(cls) -> None:
        cls._attached -= 1
        if not cls._attached and sys.unraisablehook is _swallowed:  # else somebody has wrapped it: it only passes on
            sys.unraisablehook = cls._before


def _swallowed(unraisable: Any) -> None:
    if Rescue._attached and issubclass(unraisable.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_thread.interrupt_main, ())  # not from here: it would be swallowed here again
    else:
        Rescue._before(unraisable)


_WHOLE: set[CodeType] = set()
"""The code of what must run whole. Python looks for a Ctrl-C as a function begins, before its first line: an `__exit__`
would be left undone."""
_postponed: list[int] = []
"""A Ctrl-C that came there: its signal, until that function has ended."""


class _Interruptible:
    """Within this block no Ctrl-C is lost, and none comes as what must run whole begins."""

    def __enter__(self) -> None:
        self._handler: Any = None
        Rescue.attach()
        try:
            if threading.get_ident() == threading.main_thread().ident and callable(now := _signal.getsignal(SIGINT)):
                self._handler = now
                _signal.signal(SIGINT, self._pressed)
        except KeyboardInterrupt:
            self.__exit__()
            raise

    def _pressed(self, number: int, frame: Any) -> None:
        __tracebackhide__ = True
        if frame is not None and frame.f_code in _WHOLE:
            _postponed.append(number)
        else:
            self._handler(number, frame)

    def __exit__(self, *error: object) -> None:
        __tracebackhide__ = True
        Rescue.detach()
        if self._handler is not None:
            if _signal.getsignal(SIGINT) == self._pressed:  # else the user's code has set its own
                _signal.signal(SIGINT, self._handler)
            if _postponed:
                self._handler(_postponed.pop(), sys._getframe())


_WHOLE.add(_Interruptible.__exit__.__code__)


def interruptible(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function during which no Ctrl-C is lost."""

    @functools.wraps(function)
    def rescued(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        __tracebackhide__ = True
        with _Interruptible():
            return function(*args, **kwargs)

    return rescued


class Uninterrupted:
    """Within this block Ctrl-C waits, to be raised at its end. For changes of the user's objects that must be complete,
    a moment each."""

    def __enter__(self) -> None:
        self._signals: list[int] = []
        self._handler: Any = None
        if threading.get_ident() == threading.main_thread().ident and callable(handler := _signal.getsignal(SIGINT)):
            _signal.signal(SIGINT, self._note)
            self._handler = handler
            while _postponed:
                self._signals.append(_postponed.pop())

    def _note(self, number: int, frame: Any) -> None:
        self._signals.append(number)

    def __exit__(self, *error: object) -> None:
        __tracebackhide__ = True
        handler, self._handler = self._handler, None
        if handler is not None:
            _signal.signal(SIGINT, handler)
            if self._signals:
                handler(self._signals[-1], sys._getframe())


def uninterrupted(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function that Ctrl-C does not leave half done."""

    @functools.wraps(function)
    def whole(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        __tracebackhide__ = True
        with Uninterrupted():
            return function(*args, **kwargs)

    _WHOLE.add(whole.__code__)  # type: ignore[attr-defined]
    return whole


def undone_by(name: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """A method that attaches something, whole or not at all: with Ctrl-C this other method takes it back."""

    def decorate(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(method)
        def attach(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            __tracebackhide__ = True
            try:
                with Uninterrupted():
                    return method(*args, **kwargs)
            except KeyboardInterrupt:
                getattr(args[0], name)()
                raise

        return attach

    return decorate


# -- errors raised from hooks ------------------------------------------------------------------------------------------


PACKAGES = ("nbdebug", "torch")
"""Packages whose frames at the end of a traceback are not the user's."""


class ShownAtUsersLine(Exception):
    """Raised from inside a hook, and shown in a notebook as if the user's call of torch had raised it."""

    def _render_traceback_(self) -> list[str]:
        """IPython calls this in place of its own rendering. `%tb` and `%debug` then end at the same line."""
        last, at = None, self.__traceback__
        while at is not None:
            if at.tb_frame.f_globals.get("__name__", "").split(".")[0] not in PACKAGES:
                last = at
            at = at.tb_next
        if last is not None:
            last.tb_next = None
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is None:
            return traceback.format_exception(self)
        return list(shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from running: with all of torch in memory, one run of it takes as long as a few
    steps, and it would free what is only looked at."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
