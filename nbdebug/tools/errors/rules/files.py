"""The causes of errors with files: one that is not there, one that ends early, one that holds something else, and text
that breaks the rules of its format. What is read of a file is its size, its first and its last bytes."""

from __future__ import annotations

import dataclasses

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link
from nbdebug.text import listed, size
from nbdebug.tools.errors.facts import Raised


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """A file, or a repository of a hub, that an exception is about.

    what: "missing", "repository", "restricted" (a repository that asks for a login), "offline", "syntax", "image".
    path: as the user wrote it, "" where it is not known; format: "JSON", "YAML", "TOML". bytes: its size, None where
    there is no file. begins: what its first bytes are: "lfs" (a pointer of Git LFS), "html", "text", "zeros", or the
    format of an image, "" for others. line, column: of the fault, from 1; reason: in the words of the parser; around:
    what the parser was reading.

    folder: the nearest folder on the way that exists, absolute; lacks: the part below it that does not; near: the names
    there that are nearly the missing one; elsewhere: files of this name near the working folder; relative: the path
    counts from the working folder. item: the index of the data set's item.
    """

    raised: Raised
    what: str
    path: str = ""
    format: str = ""
    bytes: int | None = None
    begins: str = ""
    line: int | None = None
    column: int | None = None
    reason: str = ""
    around: str = ""
    folder: str = ""
    lacks: str = ""
    near: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    relative: bool = False
    item: int | None = None

    @property
    def name(self) -> str:
        return f"`{self.path}`" if self.path else "The file"

    def evidence(self) -> dict[str, object]:
        rows = {
            "path": self.path,
            "size": None if self.bytes is None else f"{self.bytes:,} bytes",
            "line": self.line,
            "column": self.column,
            "item of the data set": self.item,
            "message": self.raised.message.strip().partition("\n")[0][:300],
        }
        return {key: value for key, value in rows.items() if value not in (None, "")}


def _item(facts: FileFacts) -> str:
    return f" (item {facts.item} of the data set)" if facts.item is not None else ""


@rule(
    code="error/file-not-found",
    title="A file, a folder or a repository does not exist under this name.",
    symptom="FileNotFoundError: No such file or directory; … is not a local folder and is not a valid model "
    "identifier; 404 Client Error; Access to model … is restricted.",
    cause="A relative path counts from the folder in which the kernel was started, not from the file that holds it. A "
    "letter is different, the ending too; the folder was never made; a repository has another owner, or is private.",
    confirm="`pathlib.Path.cwd()`, `pathlib.Path(path).resolve()`, and `sorted(path.parent.iterdir())`.",
    fix="Build paths from a fixed folder, `pathlib.Path(__file__).parent / 'data'`, make the folders that are written "
    "to, and copy a repository's name from its page.",
    reference="https://docs.python.org/3/library/pathlib.html",
)
def file_not_found(facts: FileFacts) -> Finding:
    return Finding(
        "error/file-not-found",
        _HUB[facts.what].format(name=facts.name) if facts.what in _HUB else _missing_title(facts),
        facts.raised.where,
        facts.evidence() | ({"folder": facts.folder} if facts.folder else {}),
        _missing_fixes(facts),
    )


_HUB = {
    "repository": "{name} is no folder here, and no repository that can be read under this name: it has another owner "
    "or another spelling, or it is private",
    "restricted": "{name} is a repository that you may read only after you have accepted its terms and logged in",
    "offline": "{name} is not in the local cache, and the hub can't be reached from here",
}


def _missing_title(facts: FileFacts) -> str:
    start = f"{facts.name}{_item(facts)} does not exist"
    if facts.elsewhere:
        return f"{start} in {facts.folder}, but there is {listed(facts.elsewhere, 2)}"
    if facts.near:
        return f"{start}: {facts.folder} has {listed(facts.near, 2)}"
    if "/" in facts.lacks.strip("/"):
        return f"{start}: in {facts.folder} there is no folder `{facts.lacks.split('/')[0]}`"
    where = "the working folder, " if facts.relative else ""
    return f"{start}: {where}{facts.folder} has no `{facts.lacks}`" if facts.folder else start


def _missing_fixes(facts: FileFacts) -> tuple[Fix, ...]:
    if facts.what == "restricted":
        code = "import huggingface_hub\nhuggingface_hub.login()"
        return (Fix("Accept the terms on its page, then log in.", code),)
    if facts.what == "offline":
        code = f"huggingface-cli download {facts.path or 'OWNER/NAME'}"
        return (Fix("Download it once where there is a connection, into the same cache.", code),)
    if facts.what == "repository":
        code = f"import huggingface_hub\nhuggingface_hub.model_info({facts.path!r})"
        return (Fix("Copy the name from its page; of a private one, log in first. This asks the hub.", code),)
    if facts.elsewhere:
        return (Fix("Use the path of the file that is there.", repr(facts.elsewhere[0])),)
    if facts.near:
        head = facts.path[: len(facts.path) - len(facts.lacks)] if facts.path.endswith(facts.lacks) else ""
        return (Fix("Use the name that exists.", repr(head + facts.near[0])),)
    code = f"import pathlib\nsorted(pathlib.Path({facts.folder or '.'!r}).iterdir())"
    return (Fix("Look at what is there.", code),)


@rule(
    code="config/syntax",
    title="A text is not what its format allows: JSON, YAML or TOML.",
    symptom="JSONDecodeError: Expecting property name enclosed in double quotes; yaml.scanner.ScannerError: mapping "
    "values are not allowed here; TOMLDecodeError; often without the name of the file.",
    cause="A comma behind the last entry, single quotes or comments in JSON, a tab or another indentation in YAML, an "
    "empty file, a page of HTML in place of a download. The parser stops where it can't go on: the fault is there or "
    "just before.",
    confirm="Open the file at the line that the report names; `python -m json.tool FILE` checks JSON.",
    fix="Mend the line; of JSON Lines read each line by itself.",
    reference="https://docs.python.org/3/library/json.html#json.JSONDecodeError",
)
def syntax(facts: FileFacts) -> Finding:
    at = f", line {facts.line}" if facts.line else ""
    at += f", column {facts.column}" if at and facts.column else ""
    if facts.bytes == 0:
        title = f"{facts.name} is empty: {facts.format} needs at least one value"
    elif facts.begins == "html":
        title = f"{facts.name} holds a page of HTML, and not {facts.format}"
    else:
        around = f" ({facts.around})" if facts.around else ""
        title = f"{facts.name}{at} is no {facts.format}: {facts.reason}{around}"
    return Finding("config/syntax", title, facts.raised.where, facts.evidence(), _syntax_fixes(facts))


def _syntax_fixes(facts: FileFacts) -> tuple[Fix, ...]:
    if facts.bytes == 0 or facts.begins == "html":
        return (Fix("Write it again from its source.", f"# {facts.path or 'the file'}: write or download it again"),)
    if "Extra data" in facts.reason:
        code = f"rows = [json.loads(line) for line in open({facts.path or 'path'!r})]"
        return (Fix("If each line is a value of its own (JSON Lines): read line by line.", code),)
    hints = {
        "property name": "Remove the comma before the bracket that closes, and use double quotes.",
        "Illegal trailing comma": "Remove the comma before the bracket that closes.",
        "','": "Put a comma behind the entry before it.",
        "mapping values": "Give the line the indentation of its neighbours; quote a value that holds `: `.",
        "'\\t'": "Replace the tab by spaces.",
        "Expecting value": "Put a value there: JSON has no comments and no single quotes; it writes true, false, null.",
    }
    hint = next((text for key, text in hints.items() if key in facts.reason), "Mend that line, or the one before it.")
    code = f"# {facts.path or 'the file'}, line {facts.line}" if facts.line else f"# {facts.path or 'the file'}"
    return (Fix(hint, code),)


@rule(
    code="data/corrupt-image",
    title="A file of the data set does not open as an image.",
    symptom="PIL.UnidentifiedImageError: cannot identify image file; often in a loader's worker, hours into a run.",
    cause="The file is empty, is a page of HTML that a download saved, has another format than Pillow reads, or lost "
    "its first bytes.",
    confirm="`PIL.Image.open(path).verify()` for each file, before training.",
    fix="Remove or fetch again the files that do not open; check the whole folder once.",
    reference="https://pillow.readthedocs.io/en/stable/reference/Image.html#PIL.Image.Image.verify",
)
def corrupt_image(facts: FileFacts) -> Finding:
    holds = {"html": "it holds a page of HTML", "lfs": "it is a pointer of Git LFS", "text": "it holds text"}
    why = "it is empty" if facts.bytes == 0 else holds.get(facts.begins, "its first bytes are of no image format")
    if facts.begins in ("JPEG", "PNG", "GIF", "WebP", "BMP", "TIFF"):
        why = f"it begins as {facts.begins}, but the rest is damaged"
    title = f"{facts.name}{_item(facts)} is no image that can be opened: {why}"
    return Finding("data/corrupt-image", title, facts.raised.where, facts.evidence(), _image_fixes(facts), _to(facts))


@rule(
    code="data/truncated-image",
    title="An image of the data set ends early.",
    symptom="OSError: image file is truncated (… bytes not processed); broken data stream when reading image file; "
    "Truncated File Read.",
    cause="A download or a copy stopped. The header is whole, so the file opens; the pixels end early, which shows "
    "only when they are read.",
    confirm="`PIL.Image.open(path).load()` for each file, before training.",
    fix="Fetch these files again, or leave them out. `ImageFile.LOAD_TRUNCATED_IMAGES = True` fills the rest with "
    "grey, and the network learns that.",
    reference="https://pillow.readthedocs.io/en/stable/reference/ImageFile.html",
)
def truncated_image(facts: FileFacts) -> Finding:
    held = f" after {size(facts.bytes)}" if facts.bytes else ""
    title = f"{facts.name}{_item(facts)} opens as an image, but its pixels end early{held}"
    return Finding("data/truncated-image", title, facts.raised.where, facts.evidence(), _image_fixes(facts), _to(facts))


def _image_fixes(facts: FileFacts) -> tuple[Fix, ...]:
    folder = facts.path.replace("\\", "/").rpartition("/")[0] or "."
    code = (
        f"bad = []\nfor path in sorted(pathlib.Path({folder!r}).iterdir()):\n    try:\n        "
        "PIL.Image.open(path).load()\n    except OSError:\n        bad.append(path)"
    )
    return (
        Fix("Find all files that do not load, then fetch them again or leave them out.", code),
        Fix("Leave this one out.", f"# without {facts.path or 'that file'}"),
    )


def _to(facts: FileFacts) -> tuple[Link, ...]:
    return facts.raised.reached[-3:] if facts.item is not None else ()
