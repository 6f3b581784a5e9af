"""Why did it fail? An exception is named by the chapter that knows it: memory that ran out, a step that a guard has
stopped, a module that has changed since its import, or one of the error chapter's own kinds.

Nothing of the user's runs again, and nothing is changed: what is said lies in the exception, in the frames of its
traceback and in the user's variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug import registry
from nbdebug.report import Finding, Fix, Link, Report, Symptom, Where
from nbdebug.text import clip, in_colour, module_name


class Page(str):
    """A page of the catalogue: plain text, as wide as the terminal; Markdown in a notebook."""

    rule: registry.Rule

    def _repr_markdown_(self) -> str:
        return self.rule.page()

    def __repr__(self) -> str:
        """The text, in colour where stdout is a terminal."""
        return self.rule.text(colour=in_colour(sys.stdout))


def explain(
    exc: BaseException | str | None = None, *, names: Mapping[str, Any] | None = None, shell: Any = None
) -> Any:
    """Say why an exception was raised, with the user's own names, shapes, dtypes, devices and lines.

    exc: the exception; a code such as "nan/overflow" gives its page of the catalogue instead, and a traceback or a
    message copied as text what its words alone show. Left out: the last
    failure of the notebook, or in a script the exception that is being handled. names: the user's variables; left out:
    the notebook's, or those that the caller sees. shell: IPython's; left out: the one that runs.

    Returns a Report (a Page for a code). An error that is not known has no finding: the report then holds the facts of
    the tensors in its frames. Runs none of the user's code and changes nothing.

    Raises ValueError for a code that does not exist, TypeError for what is neither exception nor code.
    """
    if isinstance(exc, str):
        return page(exc) if len(exc.split()) < 2 else _of_text(exc)
    if exc is not None and not isinstance(exc, BaseException):
        raise TypeError(f"explain takes an exception or a code such as 'nan/overflow'; got {type(exc).__name__}.")
    from nbdebug.observe import variables as shells

    shell = shells.running_shell() if shell is None else shell
    error = exc if exc is not None else sys.exc_info()[1] or shells.last_error()
    if error is None:
        return Report(
            "explain()",
            headline="Nothing has failed yet.",
            notes=("Ask after a cell that fails. A code, such as nan/overflow, gives the page of that cause.",),
        )
    if (said := _says_itself(error)) is not None:
        return Report("explain()", headline=said, symptoms=[Symptom(said)] * issubclass(type(error), SyntaxError))
    return _explained(error, _names(shell, sys._getframe(1)) if names is None else names, shell)


def _of_text(text: str) -> Report:
    """What the words of a copied traceback or message show."""
    from nbdebug.tools.errors.dispatch import MESSAGES, causes_of_text, contexts_of_text, hints

    with _quiet():
        try:
            causes = causes_of_text(text)
            contexts = contexts_of_text(text, {})
        except Exception as failed:
            return Report("explain(text)", headline="This text could not be read.", notes=(type(failed).__name__,))
    last = contexts[-1]
    notes = ["Only the words are known here: in the program itself, `explain()` sees the values, too.", *causes.notes]
    for finding in causes.findings[:1]:
        rule = registry.look_up(finding.code)
        page = (Fix(rule.fix, f"%explain {rule.code}   # its page"),)
        finding = dataclasses.replace(finding, fixes=finding.fixes or page)
        return Report("explain(text)", findings=(finding,), notes=tuple(notes))
    words = " ".join(f"{one.type}: {one.message}" for one in contexts)
    known = next((code for code, pattern in MESSAGES.items() if re.search(pattern, words, re.IGNORECASE)), "")
    pages = _pages_like(words) or ([registry.look_up(known)] if known else [])
    notes += itertools.islice(hints(last), 1)
    message = clip(" ".join(last.message.split()), 300)
    if not pages:
        headline = f"No cause is known for this {last.type}: {message}"
        return Report("explain(text)", headline=headline, symptoms=(Symptom(headline),), notes=tuple(notes))
    return Report("explain(text)", findings=(_by_page(pages[0], message, last.raised().where),), notes=tuple(notes))


def _by_page(rule: registry.Rule, message: str, where: Where) -> Finding:
    """What a page says of an error whose words stand in it."""
    return Finding(
        rule.code,
        f"By its words this is: {rule.title[:1].lower()}{rule.title[1:].rstrip('.')}",
        where,
        {"message": message, "how to confirm": rule.confirm},
        (Fix(rule.fix, f"%explain {rule.code}   # its page"),),
    )


def _pages_like(text: str) -> list[registry.Rule]:
    """The pages one of whose symptoms stands in a text, the longest first. What a symptom leaves open (…) may be
    anything."""
    pages: dict[str, tuple[int, registry.Rule]] = {}
    words = " ".join(text.split()).lower()
    for rule in registry.rules():
        for symptom in re.split(r"; |\. |`|, (?=[A-Z`])", " ".join(rule.symptom.split()).lower()):
            parts = [re.escape(part.strip(" .:")) for part in symptom.split("…")]
            if max(map(len, parts)) >= SHORTEST and re.search(".{0,80}".join(parts), words):
                pages[rule.code] = max(pages.get(rule.code, (0, rule)), (len(symptom), rule), key=lambda pair: pair[0])
    ranked = sorted(pages.values(), key=lambda pair: (pair[1].chapter in ("training", "nan"), -pair[0]))
    return [rule for _, rule in ranked]  # those of a training first raise nothing


SHORTEST = 18
"""Letters of a symptom, at least, that must stand in a text: shorter ones are words of any message."""


def _says_itself(error: BaseException) -> str | None:
    """A sentence for what needs no explanation."""
    kind = type(error)
    if issubclass(kind, SyntaxError):
        return f"The last failure is a {kind.__name__}: Python itself marks the place, and nothing has run."
    if issubclass(kind, (KeyboardInterrupt, SystemExit)):
        return f"The last cell was ended on purpose ({kind.__name__})."
    if kind.__name__ == "UsageError" and module_name(kind).startswith("IPython"):
        return "The last failure is a magic's own message: it says what the magic takes."
    return None


def page(code: str) -> Page:
    """The page of a cause. Raises ValueError, with the nearest codes, where there is none."""
    try:
        rule = registry.look_up(code)
    except KeyError as unknown:
        raise ValueError(unknown.args[0]) from None
    page = Page(rule.text())
    page.rule = rule
    return page


def _names(shell: Any, caller: Any) -> dict[str, Any]:
    from nbdebug.observe.variables import frame_variables

    return {**getattr(shell, "user_ns", {}), **caller.f_globals, **frame_variables(caller)}


def _explained(error: BaseException, names: Mapping[str, Any], shell: Any) -> Report:
    """The report on one exception. Whatever goes wrong in here is told, not raised."""
    try:
        with _quiet():
            return _left_by(error) or _explanation(error, names, shell)
    except Exception as failed:  # an explanation must never be a second error
        said = f"This {type(error).__name__} could not be explained."
        return Report(
            "explain()",
            headline=said,
            symptoms=(Symptom(said),),
            notes=(f"nbdebug failed while it read the frames ({type(failed).__name__}).",),
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No subclass of Tensor, and no mode that is still on, takes part in what is read."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes(), _children_wait():
        yield


@contextlib.contextmanager
def _children_wait() -> Iterator[None]:
    """torch asks at the end of every child process whether a loader's worker has died, and raises that in whatever line
    is running: not here, where such a death is explained. What came meanwhile is passed on afterwards."""
    number = getattr(signal, "SIGCHLD", None)  # Windows has none
    handler = signal.getsignal(number) if number is not None else None
    if number is None or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(number, lambda given, frame: came.append(given))
    try:
        yield
    finally:
        signal.signal(number, handler)
        if came:
            with contextlib.suppress(RuntimeError):  # torch's own: the death that has just been explained
                handler(number, None)


def _left_by(error: BaseException) -> Report | None:
    """What nbdebug itself has left with an exception of its own: the report of a guard."""
    from nbdebug.observe.frames import exception_chain

    for one in exception_chain(error):
        if module_name(type(one)).partition(".")[0] != "nbdebug":
            continue
        report, trip = getattr(one, "report", None), getattr(one, "trip", None)
        if isinstance(report, Report) and not report.ok:
            return report
        if trip is not None:
            look = "`error.trip.locate()` runs the step again and names the op, the line and the rows."
            return Report("explain()", symptoms=(Symptom(f"The guard stopped this step: {trip.sentence()}.", look),))
    return None


MEMORY = re.compile(r"memory|alloc|overflowed", re.IGNORECASE)
"""In the type or the message of each exception that means that memory ran out."""


def _explanation(error: BaseException, names: Mapping[str, Any], shell: Any) -> Report:
    from nbdebug.tools.errors.context import message_of
    from nbdebug.tools.errors.dispatch import find_causes, unknown_error

    memory: list[Report] = []

    def out_of_memory(candidate: BaseException) -> Finding | None:
        if not issubclass(type(candidate), MemoryError) and not MEMORY.search(
            f"{type(candidate).__name__}: {message_of(candidate)}"
        ):
            return None
        from nbdebug.tools.memory import oom

        if oom.is_out_of_memory(candidate):
            memory.append(oom.out_of_memory(candidate, names, shell=shell))
        return memory[-1].findings[0] if memory and memory[-1].findings else None

    def another_tools(candidate: BaseException) -> Finding | None:
        return out_of_memory(candidate) or _of_checkpoint(candidate, names)

    causes = find_causes(error, names, another_tools)
    stale = _of_notebook(error, names, shell, causes.notes) if _may_be_of_notebook(error) else ()
    weaker = ("error/module-not-found", "error/wrong-argument")
    chains = {one.code: (Link(one.title, one.where), *one.chain) for one in stale}
    told = {f.code for f in causes.findings}
    findings = (
        *(one for one in stale if one.code not in told),
        *(
            dataclasses.replace(f, chain=(*chains.get(f.code, ()), *f.chain))
            for f in causes.findings
            if not stale or f.code not in weaker
        ),
    )
    if not findings:
        report = unknown_error(error, names)
        own = [p for p in _pages_like(f"{type(error).__name__}: {message_of(error)}") if registry.added(p.code)]
        if own:
            return dataclasses.replace(report, findings=(_by_page(own[0], message_of(error), Where()),), symptoms=())
        return dataclasses.replace(report, notes=(*report.notes, *causes.notes))
    report = memory[0] if memory else Report("")
    return dataclasses.replace(report, question="explain()", findings=findings, notes=(*causes.notes, *report.notes))


def _of_checkpoint(error: BaseException, names: Mapping[str, Any]) -> Finding | None:
    """What `check_checkpoint` sees in the file that the failing line reads as weights."""
    from nbdebug.tools.errors.context import message_of

    if not WEIGHTS.search(f"{type(error).__name__}: {message_of(error)}"):
        return None
    from nbdebug.tools.errors.kinds.files import weights_path

    try:
        path, where = weights_path(error, names)
        if not path:
            return None
        from nbdebug.tools.checkpoint.check_checkpoint import check_checkpoint
        from nbdebug.tools.checkpoint.formats import ENDINGS

        suffix = pathlib.PurePath(path).suffix
        if suffix and suffix not in ENDINGS and issubclass(type(error), FileNotFoundError):
            return None
        report = check_checkpoint(path)
    except Exception:  # no such file, a hostile object in the frames: the kinds of the error chapter say what they can
        return None
    codes = ("truncated-file", "not-weights", "rotated-away", "unsafe-pickle")
    found = next((one for one in report if one.code.endswith(codes)), None)
    return found and dataclasses.replace(found, where=where, evidence={**found.evidence, "path": path})


WEIGHTS = re.compile(
    r"failed (?:reading zip archive|finding central directory)|Ran out of input|unexpected EOF|pickle data was "
    r"truncated|invalid load key|[Ii]nvalid header|header too (?:small|large)|[Mm]etadata ?[Ii]ncomplete|"
    r"incomplete metadata|not covering|^EOFError|Invalid argument|corrupted|BadZipFile|not a zip file|"
    r"FileNotFoundError|SafetensorError|unpickling stack underflow|could not (?:find MARK|convert string)|"
    r"Weights only load failed|storage has wrong byte"
)
"""In the type or the message of errors that reading a file of weights ends with."""


def _may_be_of_notebook(error: BaseException) -> bool:
    """Whether Python lacks a name, an attribute or an argument, or a cell, or a file of the user's, which may have been
    edited since its import, is in the traceback."""
    from nbdebug.observe.locations import USER, cell_name, kind_of

    kind = type(error)
    python = (NameError, AttributeError, TypeError, ImportError, LookupError, ValueError)
    if issubclass(kind, python) or "pickl" in kind.__name__.lower():
        return True
    at = BaseException.__dict__["__traceback__"].__get__(error)
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if cell_name(file) is not None or file.endswith(".py") and kind_of(at.tb_frame.f_code) == USER:
            return True
        at = at.tb_next
    return False


def _of_notebook(error: BaseException, names: Mapping[str, Any], shell: Any, notes: list[str]) -> tuple[Finding, ...]:
    """Where the notebook itself is the cause: what runs is not what the file or the cell says now."""
    from nbdebug.tools.notebook.check_notebook import notebook_causes

    try:
        return notebook_causes(error, names, shell)
    except Exception as failure:  # a fault of ours: the error itself is still explained
        notes.append(f"nbdebug could not check the notebook's cells here ({type(failure).__name__}).")
        return ()
