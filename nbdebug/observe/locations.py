"""Source locations: which line of the user's code runs an op.

A tensor op is reached through many frames: the user's line, perhaps a library's, then torch's. Walking outwards from
the op, the first frame that is neither torch's nor Python's own is the line to show; a line of the user's own files
takes precedence over one of an installed library. During backward there is no such line: the engine runs, and the op
belongs to the forward line whose derivative it computes. A user's line inside backward (a custom Function, a hook, a
recomputation) is found as usual.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import itertools
import linecache
import marshal
import os
import re
import sys
import sysconfig
from collections.abc import Container, Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch

import nbdebug
from nbdebug.observe.variables import is_packages_file, running_shell
from nbdebug.report import Where

USER, LIBRARY, SKIP, OPTIMIZER, ENGINE = range(5)

_TORCH = os.path.dirname(torch.__file__) + os.sep
_CHECKPOINT = _TORCH + os.path.join("utils", "checkpoint.py")
_OURS = os.path.dirname(nbdebug.__file__) + os.sep
_REPLAY = os.path.join(_OURS, "observe", "replay.py")
_STDLIB = tuple(
    {os.path.realpath(sysconfig.get_path(k)) + os.sep for k in ("stdlib", "platstdlib")}
    | {sysconfig.get_path(k) + os.sep for k in ("stdlib", "platstdlib")}
)
_COMPILED = (".pyx", ".pxi", ".pxd", ".so", ".pyd", ".c", ".cpp", ".rs")
"""Ends of the file names that compiled code gives to its frames: where they lie is not known, and no line is shown."""
_GENERATED = ("<frozen", "<eval_with_key>", "<decorator-gen-", "<attrs generated", "<stringsource>")
_kinds: dict[int, tuple[int, CodeType]] = {}
"""By the id of a code, which is held so that the id stays its own: the hash of a code is that of all its instructions,
and took most of the time of a walk along a stack."""


class Site(NamedTuple):
    """A source line: file, line number, name of the function around it."""

    file: str
    line: int
    function: str


class StackLines(NamedTuple):
    """The lines on a call stack. user: the user's line; library: the innermost line of an installed package inside it
    (or inside autograd's engine); optimizer: a torch optimizer runs between the two; frame: of the innermost line;
    call: the user's code and the instruction in it that runs."""

    user: Site | None
    library: Site | None
    optimizer: bool
    frame: FrameType | None
    call: tuple[CodeType, int] | None = None

    @property
    def site(self) -> Site | None:
        return self.user or self.library


def kind_of(code: CodeType) -> int:
    """Whose code this is: USER, LIBRARY, SKIP (torch, Python itself, nbdebug), OPTIMIZER or ENGINE."""
    file = code.co_filename
    if file.startswith(_TORCH):
        if code.co_name == "_engine_run_backward":
            return ENGINE
        return OPTIMIZER if file.startswith(_TORCH + "optim" + os.sep) else SKIP
    if file == _REPLAY and code.co_name == "run":
        return ENGINE  # what runs in a replay does not belong to the line that started the replay
    if file.startswith((_OURS, *_GENERATED)) or file in ("<string>", "<__array_function__ internals>"):
        return SKIP
    if is_packages_file(file) or file.endswith(_COMPILED):
        return LIBRARY
    return SKIP if file.startswith(_STDLIB) else USER


def code_kind(code: CodeType) -> int:
    """The same, found once for each code."""
    known = _kinds.get(id(code))
    if known is None:
        known = _kinds[id(code)] = kind_of(code), code
    return known[0]


def users_frames(frame: FrameType | None, until: Container[CodeType | str] = ()) -> Iterator[FrameType]:
    """The frames of the user's own code, the innermost first, up to one whose code, or file, is in `until`."""
    while frame is not None and frame.f_code not in until and frame.f_code.co_filename not in until:
        if code_kind(frame.f_code) == USER:
            yield frame
        frame = frame.f_back


def is_users_file(file: str) -> bool:
    """Whether a file, or a cell, is the user's own, and no package's."""
    return not (file.startswith((_TORCH, _OURS, *_STDLIB)) or is_packages_file(file))


def locate() -> StackLines:
    """The lines on the caller's stack, from the inside out to the user's line."""
    frame: FrameType | None = sys._getframe(1)
    library, inner, optimizer = None, None, False
    while frame is not None:
        code = frame.f_code
        kind = code_kind(code)
        if kind == USER:
            return StackLines(site_of(frame), library, optimizer, inner or frame, (code, frame.f_lasti))
        if kind == ENGINE:
            return StackLines(None, library, optimizer, inner)
        if kind == LIBRARY and library is None:
            library, inner = site_of(frame), frame
        elif kind == OPTIMIZER:
            optimizer = True
        frame = frame.f_back
    return StackLines(None, library, optimizer, inner)


def is_recomputation(frame: FrameType | None) -> bool:
    """Whether a frame that runs during backward belongs to a checkpointed forward that is recomputed."""
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def site_of(frame: FrameType) -> Site:
    """The line at which a frame stands; 0 where Python does not know."""
    return Site(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def span_of(code: CodeType, instruction: int) -> tuple[int, int, int, int] | None:
    """(line, end line, column, end column) of the expression that an instruction belongs to, columns in bytes; None
    where Python does not know (before 3.11)."""
    positions = getattr(code, "co_positions", None)
    if positions is None or instruction < 0:
        return None
    span = next(itertools.islice(positions(), instruction // 2, None), None)
    return None if span is None or None in span else span


_MAGIC = re.compile(
    r"get_ipython\(\)\.run_(line|cell)_magic\('([^']*)', ((?:'(?:[^'\\]|\\.)*')|(?:\"(?:[^\"\\]|\\.)*\")).*\)"
)


def source_text(site: Site | None) -> str | None:
    """The text of the line, without its indentation, a magic as it was typed; None when there is no source to read."""
    return (_MAGIC.sub(_as_typed, linecache.getline(site.file, site.line).strip()) or None) if site else None


def edited_since_import(file: str) -> bool:
    """Whether a module's file is not what was imported: lines of it are then not the lines that run.

    By the bytecode that Python has cached at the import; False where there is none, or none of this process's version.
    """
    cached = _bytecode_of(file, len(sys.modules))
    try:
        status = os.stat(file) if cached else None
        return status is not None and _differs(file, cached or "", status.st_mtime_ns, status.st_size)
    except OSError:
        return False


@functools.lru_cache(maxsize=256)
def _bytecode_of(file: str, loaded: int) -> str | None:
    """loaded: how many modules there are, so that the answer is looked for again when there are more."""
    for module in list(sys.modules.values()):
        space = ModuleType.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else {}
        if space.get("__file__") == file:
            spec = space.get("__spec__")
            return getattr(spec, "cached", None) if type(getattr(spec, "loader", None)) is SourceFileLoader else None
    return None


@functools.lru_cache(maxsize=256)
def _differs(file: str, cached: str, written: int, size: int) -> bool:
    """written: in nanoseconds; with the size it tells when to look again."""
    try:
        with open(cached, "rb") as opened:
            head, body = opened.read(16), opened.read()
        noted = int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")
        if int.from_bytes(head[4:8], "little") or noted == (written // 10**9 & 0xFFFFFFFF, size & 0xFFFFFFFF):
            return False
        with open(file, "rb") as opened:
            return bool(marshal.loads(body) != compile(opened.read(), file, "exec", dont_inherit=True))
    except (EOFError, TypeError, ValueError, SyntaxError) as error:  # SyntaxError: it is being edited just now
        return isinstance(error, SyntaxError)


def _as_typed(match: re.Match[str]) -> str:
    """IPython compiles `%mem step()` as a call: the user wrote the magic."""
    return f"{'%' if match[1] == 'line' else '%%'}{match[2]} {ast.literal_eval(match[3])}".rstrip()


def cell_name(file: str) -> str | None:
    """ "In [7]" when `file` is a cell of the running notebook, else None."""
    match = re.match(r"<ipython-input-(\d+)-", file)
    if match:
        return f"In [{match[1]}]"
    names = _shell_cells()
    return f"In [{names[file]}]" if file in names else None


def other_cells(file: str) -> list[str]:
    """The files of the notebook's other cells, the newest first; [] where `file` is no cell. linecache keeps those of
    every shell that the process had: only the cells of the one that runs are asked for, where it ran this one."""
    if cell_name(file) is None:
        return []
    here = _shell_cells()
    others = [other for other in list(linecache.cache) if type(other) is str and other != file]
    numbers = {
        other: int(name[4:-1])
        for other in others
        if (other in here or file not in here) and (name := cell_name(other)) is not None
    }
    return sorted(numbers, key=numbers.__getitem__, reverse=True)


def _shell_cells() -> dict[str, int]:
    """The files of the running shell's cells, with their numbers."""
    return getattr(getattr(running_shell(), "compile", None), "_filename_map", {})


def at_site(where: Where, site: Site | StackLines | None) -> Where:
    """The same place with its line filled in, where that is known."""
    site = site.site if isinstance(site, StackLines) else site
    if site is None:
        return where
    cell, text = cell_name(site.file), source_text(site)
    if cell is None and edited_since_import(site.file):
        text = "# the file was edited after its import: the line that runs is not the one that stands there now"
    return dataclasses.replace(where, file=site.file, line=site.line, text=text, cell=cell)


_SKIPPED = frozenset({"RESUME", "CACHE", "NOP"})


def code_fingerprint(code: CodeType) -> tuple[Any, ...]:
    """The instructions of a code object and of those nested in it, as plain values: equal code, equal fingerprint."""
    names = (code.co_name, code.co_argcount, code.co_kwonlyargcount, code.co_varnames, code.co_freevars)
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _SKIPPED]
    names_of_calls = (
        i.opname.replace("LOAD_METHOD", "LOAD_ATTR") for i in instructions
    )  # of `nn.Linear(…)`: autoreload's
    return *names, tuple([(name, _comparable(i.argval)) for name, i in zip(names_of_calls, instructions)])


def same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects have equal fingerprints; at once where they were compiled from the same text."""

    def parts(code: CodeType) -> tuple[Any, ...]:
        names = (code.co_name, code.co_argcount, code.co_kwonlyargcount, code.co_names, code.co_varnames)
        return *names, code.co_freevars, len(code.co_consts), code.co_code

    def same_constant(a: Any, b: Any) -> bool:
        return type(a) is type(b) and (same_code(a, b) if isinstance(a, CodeType) else repr(a) == repr(b))

    if parts(one) == parts(other) and all(map(same_constant, one.co_consts, other.co_consts)):
        return True
    return code_fingerprint(one) == code_fingerprint(other)


def _comparable(value: Any) -> Any:
    if isinstance(value, CodeType):
        return code_fingerprint(value)
    return value if type(value) in (str, int, type(None)) else (type(value).__name__, repr(value))
