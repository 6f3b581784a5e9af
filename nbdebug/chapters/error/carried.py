"""An exception that comes from elsewhere with its traceback as text: a loader's worker, a replica of DataParallel, a
compiled model, a process that was spawned or launched.

torch raises one of the same type, whose message is that text. What failed stands in its last lines, and its frames name
file, line and function. Their variables are gone; a method of the data set still has its `self`: the loader holds it.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

from nbdebug.chapters.error.lying import members
from nbdebug.observe.frames import Frame
from nbdebug.observe.sites import USER, Site, kind_of

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
class Carried:
    """type, message: of the exception as it was raised there; where: "in DataLoader worker process 0"; sites: the lines
    of its traceback, outermost first."""

    type: str
    message: str
    where: str
    sites: tuple[Site, ...]


def read(kind: str, message: str) -> Carried | None:
    """What an exception of this type says of another one; None where it is none of these."""
    caught = CAUGHT.search(message)
    if caught is not None:
        name, said = _last(caught[3])
        inner = read(name, said)  # a worker of a worker
        sites = tuple(_sites(caught[3]))
        return Carried(name or caught[1], inner.message if inner else said, caught[2], sites)
    if kind == "_RemoteTraceback" or kind == "RemoteTraceback":
        remote = REMOTE.match(message)
        if remote is not None:
            return Carried(*_last(remote[1]), "in another process", tuple(_sites(remote[1])))
    if kind == "ProcessRaisedException" and (spawned := SPAWNED.search(message)) is not None:
        return Carried(*_last(spawned[2]), f"in {spawned[1].lower()}", tuple(_sites(spawned[2])))
    if kind == "ChildFailedError" and (launched := LAUNCHED.search(message)) is not None:
        return Carried(*_last(launched[2]), f"on rank {launched[1]}", tuple(_sites(launched[2])))
    return _compiled(message) if kind in COMPILED else None


def _compiled(message: str) -> Carried | None:
    got, code = DYNAMO.search(message), FROM_USER.search(message)
    if got is None and code is None:
        return None
    kind, said = (got[1], got[2].replace("\\'", "'").replace("\\n", "\n")) if got else ("RuntimeError", message)
    return Carried(kind, said, "while torch.compile read the code", tuple(_sites(code[1] if code else "")))


def _last(text: str) -> tuple[str, str]:
    """(type, message) at the end of a traceback: what follows its last indented line."""
    lines = text.rstrip().split("\n")
    ends = [i for i, line in enumerate(lines) if line.startswith("  ")]
    tail = "\n".join(lines[ends[-1] + 1 :] if ends else lines)
    while tail.startswith("    "):
        tail = tail.partition("\n")[2]
    found = re.match(r"([A-Za-z_][\w.]*)(?:: (.*))?", tail, re.DOTALL)
    return (found[1].rpartition(".")[2], (found[2] or "").strip()) if found else ("", tail.strip())


def _sites(text: str) -> Iterator[Site]:
    for file, line, function in LINE.findall(text):
        yield Site(file, int(line), function)


def trail(carried: Carried, live: list[Frame]) -> list[Frame]:
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
