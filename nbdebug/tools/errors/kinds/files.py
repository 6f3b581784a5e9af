"""Errors with files: which path is meant, and what the file's size and first bytes say of it. No more of a file is
read, and nothing of it is shown."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import pathlib
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug.observe.frames import Frame
from nbdebug.observe.variables import attributes
from nbdebug.report import Where
from nbdebug.tools.errors.context import COPIED, ErrorContext
from nbdebug.tools.errors.facts import Raised
from nbdebug.tools.errors.operands import raised_by_user
from nbdebug.tools.errors.rules.files import FileFacts
from nbdebug.tools.errors.values import operands, path_text

SURE = 0.6
"""How alike two names of files must be (difflib's ratio) to be shown side by side; nothing is changed by it."""
MOST = 2000
"""Entries of a folder that are compared."""
HEAD = 512
"""Bytes read at the start of a file."""
ROLES = "path filename file_path filepath path_or_buf filepath_or_buffer io fp f file stream fname name self".split()
"""Names under which libraries have the path or the open file, the surest first."""

IMAGE = re.compile(r"UnidentifiedImageError|cannot identify image file")
CUT_IMAGE = re.compile(
    r"image file is truncated|broken data stream when reading image|Truncated File Read|[Ii]mage is incomplete or "
    r"truncated|unrecognized data stream contents|broken PNG file|[Pp]remature end of (?:JPEG|data)"
)
SYNTAX = re.compile(
    r"^(?:JSONDecodeError|TOMLDecodeError|(?:Scanner|Parser|Composer|Constructor|Reader|MarkedYAML)Error)"
)
WEIGHTS = re.compile(r"[\\/]torch[\\/]serialization\.py$|[\\/]safetensors[\\/]|[\\/]pickle\.py$")
HUB: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("restricted", re.compile(r"GatedRepo|gated repo|is restricted|awaiting a review|must be authenticated")),
    (
        "offline",
        re.compile(
            r"couldn't connect to|[Oo]ffline ?mode|cannot find the requested files in the local cache|outgoing traffic "
            r"has been disabled|find the requested files in the (?:disk )?cache|Couldn't reach"
        ),
    ),
    (
        "repository",
        re.compile(
            r"is not a valid model identifier|Repository Not Found|RepositoryNotFound|EntryNotFound|Entry Not Found|"
            r"does not appear to have a file named|Can't load (?:tokenizer|the model|the configuration|config)|"
            r"404 Client Error|Dataset '?[\w./-]+'? doesn't exist|HFValidationError"
        ),
    ),
)
REPOSITORY = re.compile(r"(?:huggingface\.co/(?:api/)?(?:models/|datasets/)?|['\"`]|^)([\w.-]+/[\w.-]+)(?=['\"`/ ]|$)")


def detect_missing(context: ErrorContext) -> FileFacts | None:
    """The facts of a file or repository that is not there; None of any other error."""
    message = f"{context.type}: {context.message}"
    for what, pattern in HUB:
        if pattern.search(message) and "/" in message:
            named = REPOSITORY.search(context.message)
            return FileFacts(_raised(context), what, named[1] if named else "")
    if context.type != "FileNotFoundError":
        return None
    path = _path_of(context) or _quoted(context.message)
    if not path:
        return None
    facts = FileFacts(_raised(context), "missing", path, item=_item_of(context))
    copied = context.carried is not None and context.carried.where == COPIED  # perhaps on another machine
    return facts if copied else _placed(facts)


def detect_syntax(context: ErrorContext) -> FileFacts | None:
    """The facts of a text that a parser of JSON, YAML or TOML refuses; None of any other error."""
    kind = context.type
    if not SYNTAX.match(kind) or raised_by_user(context):
        return None
    facts = FileFacts(_raised(context), "syntax", _path_of(context), "JSON", item=_item_of(context))
    own = attributes(context.error) if context.carried is None else {}
    place = re.search(r"line (\d+),? column (\d+)", context.message)
    line, column = (int(place[1]), int(place[2])) if place else (None, None)
    if kind == "JSONDecodeError":
        text = own.get("doc")
        reason = re.sub(r": line \d+ column.*", "", context.message.partition("\n")[0])
        facts = _read(facts) if facts.path else facts
        empty = isinstance(text, (str, bytes)) and not text.strip()
        return dataclasses.replace(
            facts, line=line, column=column, reason=reason, bytes=0 if empty else facts.bytes or None
        )
    if kind == "TOMLDecodeError":
        reason = re.sub(r" \(at line.*", "", context.message)
        return dataclasses.replace(facts, format="TOML", line=line, column=column, reason=reason)
    mark, problem = own.get("problem_mark"), own.get("problem")
    around = own.get("context")
    if problem is None and place and "yaml" in f"{context.message} {facts.path}".lower():  # known as text alone
        reason = re.split(r"\s+in \"", context.message)[0]
        file = re.search(r'in "([^"<]+)"', context.message)
        path = facts.path or (file[1] if file else "")
        return dataclasses.replace(facts, format="YAML", path=path, line=line, column=column, reason=reason)
    if type(problem) is not str:
        return None
    places = attributes(mark) if mark is not None else {}
    line, column = places.get("line"), places.get("column")
    file = places.get("name")
    if not facts.path and type(file) is str and not file.startswith("<"):
        facts = dataclasses.replace(facts, path=file)
    return dataclasses.replace(
        facts,
        format="YAML",
        line=line + 1 if type(line) is int else None,
        column=column + 1 if type(column) is int else None,
        reason=problem,
        around=around if type(around) is str else "",
    )


def weights_path(error: BaseException, names: Mapping[str, Any]) -> tuple[str, Where]:
    """The file that torch, pickle or safetensors could not read as weights, or that is not there, and the user's line;
    "" for any other error."""
    context = ErrorContext.of(error, names)
    read = any(WEIGHTS.search(frame.site.file) for frame in context.trail) or context.type == "SafetensorError"
    path = _path_of(context) if read or context.type == "FileNotFoundError" and context.carried is None else ""
    return path, _raised(context).where


def detect_image(context: ErrorContext) -> FileFacts | None:
    """The facts of a file that does not open as an image; None of others."""
    if not IMAGE.search(f"{context.type}: {context.message}"):
        return None
    return _read(
        FileFacts(_raised(context), "image", _path_of(context) or _quoted(context.message), item=_item_of(context))
    )


def detect_cut_image(context: ErrorContext) -> FileFacts | None:
    """The facts of an image whose pixels end early; None of others."""
    if not CUT_IMAGE.search(context.message) or raised_by_user(context):
        return None
    return _read(FileFacts(_raised(context), "image", _path_of(context), item=_item_of(context)))


def _raised(context: ErrorContext) -> Raised:
    """The exception; no phase: what is at fault lies on the disk."""
    raised = context.raised()
    return dataclasses.replace(
        raised, where=dataclasses.replace(raised.where, phase=None, module=None, module_type=None)
    )


# -- which file ------------------------------------------------------------------------------------------------------


def _path_of(context: ErrorContext) -> str:
    """The file that failed: as the exception has it, as the libraries' frames have it, or the user's line."""
    slot: Any = OSError.__dict__["filename"]
    own = slot.__get__(context.error) if issubclass(type(context.error), OSError) and context.carried is None else None
    if path_text(own):
        return path_text(own)
    below = list(itertools.takewhile(lambda frame: not frame.users, reversed(context.trail)))
    paths = (path for frame in reversed(below) for path in _paths_in(frame))  # what the user's line called comes first
    return next(paths, "") or _users_path(context)


def _users_path(context: ErrorContext) -> str:
    """The path in the user's failing line, or an open file among the variables there."""
    for frame in context.users[:3]:
        for _, value in operands(frame, whole=True):
            if path_text(value):
                return path_text(value)
        if frame.where.text and (match := re.search(r"""['"]([^'"]+\.\w{1,12})['"]""", frame.where.text)):
            return match[1]
        for value in frame.names.values():
            if type(value) is not str and path_text(value):
                return path_text(value)
    return ""


def _paths_in(frame: Frame) -> Iterator[str]:
    for role in ROLES:
        value = frame.names.get(role)
        if path_text(value):
            yield path_text(value)
        elif role == "self" and value is not None:
            inside = attributes(value)
            yield from filter(
                None, (path_text(inside.get(name)) for name in ("filename", "fp", "file", "path", "name"))
            )


def _quoted(message: str) -> str:
    match = re.search(r"""['"]([^'"\n]+)['"]""", message)
    return match[1] if match and path_text(match[1]) else ""


INDICES = ("index", "idx", "i", "item", "key", "n")


def _item_of(context: ErrorContext) -> int | None:
    """The index that a data set's `__getitem__` was asked for."""
    for frame in reversed(context.trail):
        if frame.site.function == "__getitem__":
            value = next((frame.names[name] for name in INDICES if type(frame.names.get(name)) is int), None)
            if value is not None:
                return int(value)
    return None


# -- what is there ---------------------------------------------------------------------------------------------------

MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "lfs"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
)


def _read(facts: FileFacts) -> FileFacts:
    """The size of a file, and what its first bytes are."""
    try:
        about = os.stat(facts.path)
        if not facts.path or not stat.S_ISREG(about.st_mode):
            return facts
        with open(facts.path, "rb") as file:
            head = file.read(HEAD)
    except (OSError, ValueError):
        return facts
    return dataclasses.replace(facts, bytes=about.st_size, begins=_kind_of(head))


def _kind_of(head: bytes) -> str:
    for magic, kind in MAGIC:
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head and not head.strip(b"\0"):
        return "zeros"
    if re.match(rb"\s*<(!doctype|html|\?xml|head)", head, re.IGNORECASE):
        return "html"
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return "text" if text.strip() and all(c.isprintable() or c in "\r\n\t" for c in text) else ""


def _placed(facts: FileFacts) -> FileFacts:
    """With the folder on the way that exists, and what in it is nearly the missing name."""
    path = facts.path
    whole = os.path.abspath(path)
    folder, lacks = os.path.split(whole)
    while folder != os.path.dirname(folder) and not os.path.isdir(folder):
        folder, part = os.path.split(folder)
        lacks = f"{part}/{lacks}"
    first = lacks.partition("/")[0]
    try:
        names = sorted(os.listdir(folder))[:MOST]
    except OSError:
        names = []
    near = [name for name in names if name != first and name.lower().strip() == first.lower().strip()]
    near += [n for n in difflib.get_close_matches(first, names, 3, SURE) if n not in near]
    return dataclasses.replace(
        facts,
        folder=folder,
        lacks=lacks,
        near=tuple(near[:2]) if "/" not in lacks else tuple(f"{n}" for n in near[:1]),
        elsewhere=tuple(_elsewhere(path)) if not os.path.isabs(path) else (),
        relative=not os.path.isabs(path),
    )


def _elsewhere(path: str) -> Iterator[str]:
    """The same relative path below the folders above the working folder, and in the folders within it."""
    above = pathlib.Path.cwd()
    for level in range(1, 4):
        above = above.parent
        if (above / path).exists():
            yield os.path.join(*[os.pardir] * level, path)
    try:
        folders = [entry.name for entry in os.scandir() if entry.is_dir() and not entry.name.startswith(".")][:200]
    except OSError:
        return
    yield from (os.path.join(name, path) for name in sorted(folders) if os.path.exists(os.path.join(name, path)))
