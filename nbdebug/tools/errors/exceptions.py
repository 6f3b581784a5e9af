"""Which exception is meant: the root of a chain, the members of a group, and what was raised on their way out.

raise A from B              B is the root: it goes first
A while B was handled       A goes first where it is a failure of its own (the fallback failed, too); B where the
                            handler only rewords it
ExceptionGroup(B, C)        both, each with the group as what followed it
"""

from __future__ import annotations

import dataclasses
import linecache
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import SimpleNamespace, TracebackType
from typing import Any, cast

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import USER, Site, kind_of
from nbdebug.observe.variables import members

DEEPEST = 100
"""Links of one chain, and members of all groups, that are followed."""

EXPECTED = (ImportError, LookupError, AttributeError, StopIteration, NotImplementedError)
"""What a program handles on purpose (an optional package, a missing key): no cause of what fails after it."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An exception that may be the cause. led_to: what followed it, the nearest first; the last is what was seen."""

    error: BaseException
    led_to: tuple[BaseException, ...] = ()


def candidate_chains(error: BaseException) -> list[list[Candidate]]:
    """One list for each member of a group (one in all where there is no group): its candidates, in the order in which
    they are checked. Endless chains and cycles end after DEEPEST."""
    chains: list[list[Candidate]] = []
    todo: deque[Candidate] = deque([Candidate(error)])
    visited: set[int] = set()
    while todo and len(chains) < DEEPEST:
        start = todo.popleft()
        if id(start.error) in visited:
            continue
        visited.add(id(start.error))
        line, inside = _candidates(start)
        todo.extend(inside)
        if line:
            chains.append(line)
    return chains


def _candidates(start: Candidate) -> tuple[list[Candidate], list[Candidate]]:
    """The candidates along one chain; and the members of the group that it leads to, which are checked after them, or
    in their place where they only reword it."""
    parts: list[list[Candidate]] = [[]]
    one: Candidate | None = start
    while one is not None and sum(map(len, parts)) < DEEPEST:
        after = (one.error, *one.led_to)
        inside = group_members(one.error)
        if inside:
            return [candidate for part in parts[:-1] for candidate in part], [Candidate(m, after) for m in inside]
        parts[-1].insert(0, one)
        before, again = _before(one.error)
        if before is None or any(before is later for later in after):
            break
        if not again and issubclass(type(before), EXPECTED):
            break
        if not again:
            parts.append([])
        one = Candidate(before, after)
    return [candidate for part in parts for candidate in part], []


def group_members(error: BaseException) -> tuple[BaseException, ...]:
    """The exceptions of a group; () for another exception. Python 3.10 has no groups, but there is a backport."""
    kinds = [kind for kind in type(error).__mro__ if kind.__name__ == "BaseExceptionGroup"]
    slot: Any = kinds[0].__dict__.get("exceptions") if kinds else None
    if slot is None:
        return ()
    members = slot.__get__(error) if hasattr(type(slot), "__get__") and not isinstance(slot, tuple) else slot
    if type(members) not in (tuple, list):
        return ()
    return tuple(one for one in members if issubclass(type(one), BaseException))[:DEEPEST]


def _before(error: BaseException) -> tuple[BaseException | None, bool]:
    """The exception that this one followed, and whether this one only rewords it."""
    cause = _slot("__cause__", error)
    if cause is not None:
        return cause, True
    context = _slot("__context__", error)
    if context is None or _slot("__suppress_context__", error):
        return None, False
    return context, _raised_where_caught(error, context)


def _slot(name: str, error: BaseException) -> Any:
    return BaseException.__dict__[name].__get__(error)


def _raised_where_caught(error: BaseException, handled: BaseException) -> bool:
    """Whether a `raise` in the very function that caught the other exception made this one: another name for it. An op
    that failed there, or in what was called from there, is a failure of its own."""
    caught: TracebackType | None = _slot("__traceback__", handled)
    last: TracebackType | None = _slot("__traceback__", error)
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if caught is None or last is None or caught.tb_frame is not last.tb_frame:
        return False
    text = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip()
    return text.startswith("raise")


CAUGHT = re.compile(r"Caught (\w+) (in .*?)\.\n+Original Traceback \(most recent call last\):\n(.*)", re.DOTALL)
REMOTE = re.compile(r'^\s*"""\s*\nTraceback \(most recent call last\):\n(.*?)"""\s*$', re.DOTALL)
SPAWNED = re.compile(
    r"-- (Process \d+) terminated with the following error:\n\s*Traceback \(most recent call last\):"
    r"\n(.*)",
    re.DOTALL,
)
LAUNCHED = re.compile(
    r"rank\s*: (\d+).*?traceback\s*: Traceback \(most recent call last\):\n(.*?)(?:\n\s*={5,}|\Z)", re.DOTALL
)
DYNAMO = re.compile(r"got (\w+)\((?:'|\")(.*?)(?:'|\")\)\s*(?:\n|$)", re.DOTALL)
FROM_USER = re.compile(r"from user code:\s*\n(.*?)(?:\n\n|$)", re.DOTALL)
LINE = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
COMPILED = frozenset({"TorchRuntimeError", "InternalTorchDynamoError", "BackendCompilerFailed", "Unsupported"})


@dataclasses.dataclass(frozen=True)
class RemoteException:
    """type, message: of the exception as it was raised there; where: "in DataLoader worker process 0"; sites: the lines
    of its traceback, outermost first."""

    type: str
    message: str
    where: str
    sites: tuple[Site, ...]


def remote_exception(kind: str, message: str) -> RemoteException | None:
    """The exception of another process, or of the compiler, that this one reports; None where it reports none."""
    caught = CAUGHT.search(message)
    if caught is not None:
        name, text = _last(caught[3])
        inner = remote_exception(name, text)  # a worker of a worker
        sites = tuple(_sites(caught[3]))
        return RemoteException(name or caught[1], inner.message if inner else text, caught[2], sites)
    if kind == "_RemoteTraceback" or kind == "RemoteTraceback":
        remote = REMOTE.match(message)
        if remote is not None:
            return RemoteException(*_last(remote[1]), "in another process", tuple(_sites(remote[1])))
    if kind == "ProcessRaisedException" and (spawned := SPAWNED.search(message)) is not None:
        return RemoteException(*_last(spawned[2]), f"in {spawned[1].lower()}", tuple(_sites(spawned[2])))
    if kind == "ChildFailedError" and (launched := LAUNCHED.search(message)) is not None:
        return RemoteException(*_last(launched[2]), f"on rank {launched[1]}", tuple(_sites(launched[2])))
    return _compiled(message) if kind in COMPILED else None


SEPARATOR = re.compile(
    r"\n\s*(?:The above exception was the direct cause of|During handling of the above exception)[^\n]*\n"
)
IPYTHON = re.compile(
    r"^(?:File (\S+?):(\d+), in (?:[\w.<>]*\.)?([\w<>]+)|(?:Cell )?In ?\[(\d+)\],? line (\d+))", re.MULTILINE
)
COPIED = "in the text"
"""`RemoteException.where` of what is known as text alone."""
LAST = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Iteration|Interrupt|Exit|Warning))\b(?!\s*Traceback)(?:: ?(.*))?$"
)


def exceptions_of_text(text: str) -> list[RemoteException]:
    """The exceptions of a traceback that was copied as text, the root of a chain first; of a message alone one without
    lines. The formats are Python's and IPython's."""
    exceptions = []
    for part in SEPARATOR.split(text):
        lines = part.rstrip().split("\n")
        at = max((i for i, line in enumerate(lines) if LAST.match(line.strip())), default=None)
        match = LAST.match(lines[at].strip()) if at is not None else None
        kind = match[1].rpartition(".")[2] if match else ""
        message = "\n".join([match[2] or "", *lines[(at or 0) + 1 :]]).strip() if match else part.strip()
        inner = remote_exception(kind, message)
        sites = [*_sites(part)]
        for file, line, function, cell, cell_line in IPYTHON.findall(part):
            site = (f"<ipython-input-{cell}-text>", int(cell_line), "<module>") if cell else (file, int(line), function)
            sites.append(Site(*site))
        exceptions.append(inner or RemoteException(kind or "RuntimeError", message, COPIED, tuple(sites)))
    return exceptions


def _compiled(message: str) -> RemoteException | None:
    match, code = DYNAMO.search(message), FROM_USER.search(message)
    if match is None and code is None:
        return None
    kind, text = (match[1], match[2].replace("\\'", "'").replace("\\n", "\n")) if match else ("RuntimeError", message)
    return RemoteException(kind, text, "while torch.compile traced the code", tuple(_sites(code[1] if code else "")))


def _last(text: str) -> tuple[str, str]:
    """(type, message) at the end of a traceback: what follows its last indented line."""
    lines = text.rstrip().split("\n")
    ends = [i for i, line in enumerate(lines) if line.startswith("  ")]
    tail = "\n".join(lines[ends[-1] + 1 :] if ends else lines)
    while tail.startswith("    "):
        tail = tail.partition("\n")[2]
    match = re.match(r"([A-Za-z_][\w.]*)(?:: (.*))?", tail, re.DOTALL)
    return (match[1].rpartition(".")[2], (match[2] or "").strip()) if match else ("", tail.strip())


def _sites(text: str) -> Iterator[Site]:
    for file, line, function in LINE.findall(text):
        yield Site(file, int(line), function)


def with_remote_frames(carried: RemoteException, live: list[Frame]) -> list[Frame]:
    """The frames: those of this process, which still live, then those that are known from the text."""
    return [*live, *(_frame(site, live) for site in carried.sites)]


def _frame(site: Site, live: list[Frame]) -> Frame:
    code = cast(Any, SimpleNamespace(co_filename=site.file, co_name=site.function))
    return Frame(_self(site, live), site, kind_of(code) == USER, None, _globals(site.file))


def _globals(file: str) -> Mapping[str, Any]:
    """Of the module of that file, which this process may have imported as well."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == file:
            return vars(module)
    return {}


def _self(site: Site, live: list[Frame]) -> dict[str, Any]:
    """The data set, the sampler or the collate function of a loader that a live frame works with, where this line
    belongs to a method of its class."""
    for frame in reversed(live):
        loader = frame.names.get("self")
        for name in ("dataset", "_dataset", "collate_fn", "_collate_fn", "sampler", "batch_sampler"):
            thing = members(loader).get(name) if loader is not None else None
            for kind in type(thing).__mro__ if thing is not None else ():
                method = vars(kind).get(site.function)
                if getattr(getattr(method, "__code__", None), "co_filename", None) == site.file:
                    return {"self": thing}
    return {}
