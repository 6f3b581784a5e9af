"""The causes of errors with what is read from the disk: a file that is not there, ends early or holds something else, a
module or a class that can't be found, a saved state that does not match."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nbdebug.observe.state_keys import Rename
from nbdebug.registry import rule
from nbdebug.report import Edit, Finding, Fix, Link, Where
from nbdebug.text import count, listed, size
from nbdebug.tools.errors.rules import Raised


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
    title = _HUB[facts.what].format(name=facts.name) if facts.what in _HUB else _missing_title(facts)
    evidence = facts.evidence() | ({"folder": facts.folder} if facts.folder else {})
    return Finding("error/file-not-found", title, facts.raised.where, evidence, _missing_fixes(facts))


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


# -- modules and classes -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModuleMissing:
    """what: "module" (does not exist here), "not a package" (another file has its name), "name" (the module
    lacks it), "submodule" (its package exists and lacks it; name: what the package has under that name instead),
    "circular", "relative" (import without a package), "class" (a pickled class is not where it was).

    module: the missing one; name: the missing name in it. pickled: a pickle file needs it; source: the call that loads,
    as the user wrote it; needed_by: the installed package that imports it. holders: loaded modules with a class of this
    name. files: where a file of this module is, relative to the working folder; folder: the one to add to sys.path.
    near: similar names. package: its name on PyPI, where that differs. elsewhere: the interpreter of another
    environment that has it. taken_by: the file that is imported in its place. python: the running interpreter. meant: a
    well-known module with a similar name that is not installed. project: the folder from which `pip install -e` makes
    the module importable. edit: the failing line behind one that gives the module its old name; complete: whether all
    classes that the file names are then found.
    """

    raised: Raised
    what: str
    module: str
    name: str = ""
    pickled: bool = False
    source: str = ""
    holders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    folder: str = ""
    near: tuple[str, ...] = ()
    package: str = ""
    elsewhere: str = ""
    taken_by: str = ""
    python: str = ""
    needed_by: str = ""
    meant: str = ""
    project: str = ""
    edit: Edit | None = None
    complete: int = 0


@rule(
    code="error/module-not-found",
    title="A module, or a class in it, can't be found.",
    symptom="No module named …, at an import or in torch.load; Can't get attribute … on <module '__main__'>; cannot "
    "import name …; attempted relative import with no known parent package.",
    cause="`torch.save` of a whole model stores its class by module and name, so the loading program needs that module "
    "under the same name. In other cases the package is not in this environment, has another name, or the file is in a "
    "folder that Python does not search.",
    confirm="`import sys; sys.path, sys.executable`; for a file, `python -m pickletools` shows the modules it names.",
    fix="Save `model.state_dict()` and build the model again. To load an existing file, make its class available under "
    "the old name. Otherwise install the package with `%pip install`, or add the folder to `sys.path`.",
    reference="https://docs.pytorch.org/docs/stable/notes/serialization.html",
)
def module_not_found(facts: Any) -> Finding | None:
    if not isinstance(facts, ModuleMissing):
        return None
    where = dataclasses.replace(facts.raised.where, phase=None)
    title = _module_title(facts)
    chain = tuple(Link(link) for link in _module_chain(facts))
    return Finding("error/module-not-found", title, where, _module_evidence(facts), tuple(_module_fixes(facts)), chain)


def _module_title(facts: ModuleMissing) -> str:
    module = f"`{facts.module}`"
    if facts.what == "relative":
        return (
            f"`from {facts.module or '.'} import …` is relative to the package of its file, and this file or cell "
            "is not in a package."
        )
    if facts.what == "circular":
        return f"{module} is imported before it is complete: it and another file import each other."
    if facts.what in ("name", "submodule"):
        return _lacks(facts)
    if facts.what == "class":
        where, holder = "the main program" if facts.module == "__main__" else module, _holder_phrase(facts)
        return f"The file was pickled with the class `{facts.name}` of {where}, which does not have it here{holder}."
    if facts.what == "not a package":
        return f"{module} can't be imported: {facts.taken_by or 'a single file'} has the name of its package."
    if facts.pickled:
        what = f"the class `{facts.module}.{facts.name}`" if facts.name else f"a class of the module {module}"
        holder = _holder_phrase(facts)
        return f"The file contains a whole object that needs {what}, but there is no module {module} here{holder}."
    if facts.files:
        return f"{module} is at {facts.files[0]}, in a folder that Python does not search."
    if facts.near:
        return f"There is no module {module}; there is `{facts.near[0]}`."
    if facts.meant and not facts.needed_by:
        return f"There is no module {module}; `{facts.meant}`, a similar name, is not installed here either."
    by = f", which `{facts.needed_by}` needs," if facts.needed_by else ""
    named = f" (its package is `{facts.package}`)" if facts.package else ""
    return f"{module}{by} is not installed in the Python environment of this kernel{named}."


def _lacks(facts: ModuleMissing) -> str:
    """A module that has no such name, a package that has no such module."""
    if facts.what == "name":
        near = f" It has `{facts.near[0]}`." if facts.near else ""
        return f"`{facts.module}` has no `{facts.name}`.{near}"
    parent, _, last = facts.module.rpartition(".")
    if facts.name:
        return f"`{facts.module}` is not a module: `{last}` is an object in `{parent}`. Import it from there."
    by = f", which `{facts.needed_by}` needs: their versions are not compatible" if facts.needed_by else ""
    near = f"; it has `{facts.near[0]}`" if facts.near else ""
    return f"`{parent}` is installed, but has no module `{last}`{by}{near}."


def _holder_phrase(facts: ModuleMissing) -> str:
    holders = [name for name in facts.holders if name != facts.module]
    return f"; `{holders[0]}` has a class of that name" if holders else ""


def _module_evidence(facts: ModuleMissing) -> dict[str, Any]:
    evidence = {
        "module": facts.module,
        "name": facts.name,
        "needed by": facts.source or facts.needed_by,
        "modules with a class of that name": ", ".join(facts.holders),
        "files of that name": ", ".join(facts.files),
        "similar names": ", ".join(facts.near),
        "package": facts.package,
        "installed for": facts.elsewhere,
        "imported in its place": facts.taken_by,
        "this kernel's Python": facts.python,
    }
    return {key: value for key, value in evidence.items() if value}


def _module_chain(facts: ModuleMissing) -> list[str]:
    links = []
    if facts.pickled:
        links += [
            "torch.save of a whole model stores only the name of its class: module and class must exist when it is "
            "loaded"
        ]
    if facts.elsewhere:
        links += [f"another environment on this machine has it: {facts.elsewhere}"]
    return links


# -- fixes -------------------------------------------------------------------------------------------------------


def _module_fixes(facts: ModuleMissing) -> list[Fix]:
    if facts.what == "relative":
        rest = facts.module.lstrip(".") or "module"
        return [Fix("Import it by its full name, with its folder on sys.path.", f"from {rest} import ...")]
    if facts.what == "circular":
        title = "Import it inside the function that uses it, or move what both files need into a third file."
        return [Fix(title, f"def build():\n    import {facts.module}\n    ...")]
    if facts.what == "name":
        return _for_name(facts)
    if facts.what == "submodule":
        return [_for_submodule(facts)]
    if facts.what == "not a package":
        title = "Rename the file that has the package's name, and restart the kernel."
        return [Fix(title, f"mv {facts.taken_by or facts.module + '.py'} my_{facts.module.partition('.')[0]}.py")]
    return _for_pickle(facts) if facts.pickled else _for_absent(facts)


def _for_absent(facts: ModuleMissing) -> list[Fix]:
    """For a module that is not there at all."""
    if facts.files:
        return [Fix("Add that folder to sys.path.", f"import sys\nsys.path.append({facts.folder!r})"), _for_good(facts)]
    if facts.near:
        return [Fix("Use the name that exists.", f"import {facts.near[0]}")]
    top = facts.module.partition(".")[0]
    if facts.meant and not facts.needed_by:
        title = (
            "If you mean that module, install it and correct the name. (A package with the misspelt name may be "
            "something else, or harmful.)"
        )
        return [Fix(title, f"%pip install {facts.meant}\nimport {facts.meant}")]
    if top in OWN_FOLDERS and not facts.needed_by:
        title = "It is probably a folder of the project itself, and no package: add the folder that contains it."
        return [Fix(title, f"import sys\nsys.path.append('path/of/the/project')   # the folder in which {top} lies")]
    title = "Install it with %pip, which uses this kernel's Python; !pip may use another one."
    return [Fix(title, f"%pip install {facts.package or top}")]


def _for_good(facts: ModuleMissing) -> Fix:
    """For every program that is started later, and not for this one alone."""
    if facts.project:
        return Fix("Or install the project once, as it stands, and restart.", f"%pip install -e {facts.project!r}")
    folder = facts.folder if facts.folder.startswith(("/", "~")) else f"$PWD/{facts.folder}".removesuffix("/.")
    title = "Or for all that is started from a shell (Jupyter, torchrun)."
    return Fix(title, f'export PYTHONPATH="{folder}:$PYTHONPATH"')


OWN_FOLDERS = frozenset(
    "src source lib libs core common util utils helper helpers tool tools script scripts app main train trainer "
    "training eval model models module modules layer layers net nets network networks loss losses data dataset "
    "datasets dataloader dataloaders config configs engine engines project code experiments".split()
)
"""Names that projects give their own folders; packages of these names on PyPI are something else."""


def _for_submodule(facts: ModuleMissing) -> Fix:
    parent, _, last = facts.module.rpartition(".")
    if facts.name:
        return Fix("Import it from its module.", f"from {parent} import {last}")
    if facts.near and not facts.needed_by:
        return Fix("Use the name that exists.", f"import {facts.near[0]}")
    top = parent.partition(".")[0]
    return Fix(
        "Print its version and its modules: modules are moved or removed between versions.",
        f"import importlib.metadata, pkgutil, {parent}\nprint(importlib.metadata.version({top!r}), "
        f"[module.name for module in pkgutil.iter_modules({parent}.__path__)])",
    )


def _for_name(facts: ModuleMissing) -> list[Fix]:
    if facts.near:
        return [Fix("Import the name that exists.", f"from {facts.module} import {facts.near[0]}")]
    code = (
        f"import {facts.module}\nprint({facts.module}.__file__, "
        f"getattr({facts.module}, '__version__', ''), dir({facts.module}))"
    )
    return [Fix("Print which file and version it is, and what it contains.", code)]


def _for_pickle(facts: ModuleMissing) -> list[Fix]:
    holder = next((name for name in facts.holders if name != facts.module), "")
    kind = facts.name or "Net"
    source = facts.source if facts.raised.type != "UnpicklingError" else ""  # its call leaves out weights_only=False
    load = f"model = {source or 'torch.load(path, weights_only=False)'}"
    fixes = []
    if facts.module == "__main__" and holder:
        code = f"from {holder} import {kind}\n{load}"
        fixes += [Fix("Import the class into the main program before you load the file.", code)]
    elif facts.what == "class" and facts.module == "__main__":
        code = f"class {kind}(nn.Module):\n    ...\n\n{load}"
        fixes += [Fix("Define the class here as it was in the notebook or script that saved it, then load.", code)]
    elif facts.edit is not None:
        after = {"classes and functions that the file names": f"{facts.complete} of {facts.complete} found"}
        after = after if facts.complete else {}
        title = "Register the module under its old name before you load the file."
        fixes += [Fix.of(title, facts.edit, bool(facts.complete) or None, after)]
    elif holder:
        code = f"import sys, {holder}\nsys.modules[{facts.module!r}] = {holder}\n{load}"
        fixes += [Fix("Register the module under its old name before you load the file.", code)]
    elif facts.files:
        fixes += [
            Fix("Add the folder of its file to sys.path.", f"import sys\nsys.path.append({facts.folder!r})\n{load}")
        ]
    else:
        code = f"# {facts.module.replace('.', '/')}.py beside this program\n{load}"
        fixes += [Fix("Add the file that defines the class, under its old name, then load.", code)]
    saved = Fix(
        "Then save only the weights: loading them needs no pickled class.",
        "torch.save(model.state_dict(), 'weights.pt')\n"
        f"model = {kind}()\nmodel.load_state_dict(torch.load('weights.pt'))",
    )
    return [*fixes, saved]


# -- saved states ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Resized:
    """One key with two shapes. argument: the layer's constructor argument for this size ("out_features"), with its two
    values; kind: the layer's class. transposed: the same sizes in reverse."""

    key: str
    saved: tuple[int, ...]
    model: tuple[int, ...]
    kind: str | None = None
    argument: str | None = None
    saved_size: int | None = None
    model_size: int | None = None

    @property
    def transposed(self) -> bool:
        return len(self.saved) > 1 and self.saved == self.model[::-1]


@dataclasses.dataclass(frozen=True)
class StateMismatch:
    """model, source: as the user wrote them ("model", "checkpoint['model']"); kind: the model's class. expression: the
    argument where that is not a name: `source` is then "state".

    missing, unexpected: keys, as torch lists them. resized: keys with two shapes. saved, expected: how many keys the
    saved state and the model have; both: keys in both, fitting: those with the same shape, too. inside: the entry of
    the argument that contains the state. renamed: the change of keys that fits best. unmatched: saved keys that still
    do not match after it; lacking: keys of the model that then get no value. argument: the model's own constructor
    argument for the size, with the size of the saved state. whole_model: a module was passed instead of its state;
    no_dict: the class of the argument, where that is neither a dict nor a module."""

    raised: Raised
    model: str
    kind: str
    source: str
    strict: bool = True
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    resized: tuple[Resized, ...] = ()
    saved: int | None = None
    expected: int | None = None
    both: int = 0
    fitting: int = 0
    inside: str | None = None
    renamed: Rename | None = None
    unmatched: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    argument: tuple[str, int] | None = None
    whole_model: bool = False
    no_dict: str = ""
    expression: str | None = None


@dataclasses.dataclass(frozen=True)
class OptimizerMismatch:
    """The state of another optimizer. saved, expected: how many parameters each group has; None: not a state at all,
    and keys are its keys."""

    raised: Raised
    optimizer: str
    kind: str
    source: str
    saved: tuple[int, ...] | None = None
    expected: tuple[int, ...] = ()
    inside: str | None = None
    keys: tuple[str, ...] = ()
    expression: str | None = None


STRANGE = 0.25
"""Share of the keys (of the file's or the model's, whichever has fewer) that must match for the file to be of a related
model. Our choice: two unrelated networks share names such as `conv1.weight`, seldom a quarter of them."""
SHOWN = 6
PATHS = ("str", "PosixPath", "WindowsPath", "Path")


@rule(
    code="error/state-dict-mismatch",
    title="The saved state does not match the model.",
    symptom="Error(s) in loading state_dict for …: missing keys, unexpected keys, or a size mismatch; of an optimizer: "
    "a different number of parameter groups.",
    cause="The file was saved from a wrapped model (DataParallel puts `module.` before each key, torch.compile "
    "`_orig_mod.`, a trainer `model.`), from one with other sizes (classes, vocabulary, width), or contains more "
    "than the state (`{'model': …, 'optimizer': …}`). `strict=False` ignores missing and unexpected keys, never sizes.",
    confirm="`sorted(state)[:5]` beside `sorted(model.state_dict())[:5]`; the shapes of the keys that both have.",
    fix="Remove the prefix, load the entry that contains the state, build the model with the sizes in the file, or "
    "leave out the entries that do not match and train these layers from scratch.",
    reference="https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
)
def state_dict_mismatch(facts: Any) -> Finding | None:
    if isinstance(facts, OptimizerMismatch):
        return _optimizers(facts)
    if not isinstance(facts, StateMismatch):
        return None
    fixes = tuple(_state_fixes(facts))
    return Finding(
        "error/state-dict-mismatch", _state_title(facts), at(facts), _state_evidence(facts), fixes, _state_chain(facts)
    )


def at(facts: Any) -> Where:
    """The user's line; a load is no phase of a training step."""
    return dataclasses.replace(facts.raised.where, phase=None)


def _state_title(facts: StateMismatch) -> str:
    source, model = f"`{facts.source}`", f"`{facts.model}`"
    if facts.no_dict or facts.whole_model or facts.inside is not None:
        return _place_title(facts, source, model)
    if _strange(facts):
        return (
            f"{source} is the state of another model: {model} ({facts.kind}, {count(facts.expected or 0, 'key')}) has "
            f"{facts.both} of its {count(facts.saved or 0, 'key')}."
        )
    if facts.renamed is not None:
        return _prefix_title(facts, source, model)
    if facts.resized:
        return _sizes_title(facts, source, model)
    if facts.missing and not facts.unexpected:
        return f"{model} has {count(len(facts.missing), 'key')} that {source} lacks: {listed(facts.missing)}."
    if facts.unexpected and not facts.missing:
        keys = count(len(facts.unexpected), "key")
        return f"{source} has {keys} that {model} does not have: {listed(facts.unexpected)}."
    return (
        f"The keys of {source} and {model} differ: {listed(facts.missing)} missing, {listed(facts.unexpected)} "
        "unexpected."
    )


def _place_title(facts: StateMismatch, source: str, model: str) -> str:
    """The argument is not the state; it may contain it."""
    if facts.no_dict in PATHS:
        return "`load_state_dict` got the path of a file, but takes the state that is in the file."
    if facts.no_dict:
        return f"`load_state_dict` got a `{facts.no_dict}`, but takes a dict of tensors."
    if facts.inside is None:
        return f"{source} is a whole model, but `load_state_dict` takes the state of a model."
    if facts.inside.endswith("state_dict()"):
        entry = facts.inside.partition(".")[0]
        return f"{source} holds the model itself, under `{entry}`, not its state."
    return f"{source} is the whole checkpoint: the state of {model} is its entry `{facts.inside}`."


def _prefix_title(facts: StateMismatch, source: str, model: str) -> str:
    change = facts.renamed
    assert change is not None
    if change.new and change.old:
        difference = f"begin with `{change.old}` where {model} has `{change.new}`"
    elif change.new:
        difference = f"lack the prefix `{change.new}` that the keys of {model} have"
    else:
        difference = f"have `{change.old}` before the names that {model} uses" if change.old else f"have {change.what}"
    rest = f"; after that change, {_fits(facts)} of {facts.saved} match" if facts.unmatched or facts.lacking else ""
    return f"The keys of {source} {difference}{rest}."


def _sizes_title(facts: StateMismatch, source: str, model: str) -> str:
    sizes = ", ".join(
        f"`{r.key}` is {list(r.saved)} in {source} and {list(r.model)} in {model}" for r in facts.resized[:2]
    )
    more = f" (and {len(facts.resized) - 2} more)" if len(facts.resized) > 2 else ""
    why = next(
        (
            f": saved with `{r.argument}={r.saved_size}`, built with {r.model_size}"
            for r in facts.resized
            if r.argument and not r.transposed
        ),
        "",
    )
    turned = "; the file has it transposed" if facts.resized[0].transposed and not why else ""
    return f"{sizes}{more}{why}{turned}."


def _strange(facts: StateMismatch) -> bool:
    fits = max(facts.both, _fits(facts) or 0)
    return bool(facts.saved and facts.expected) and fits < STRANGE * min(facts.saved or 0, facts.expected or 0)


def _state_evidence(facts: StateMismatch) -> dict[str, Any]:
    evidence: dict[str, Any] = {"model": f"{facts.model} ({facts.kind})", "state": facts.source}
    if facts.saved is not None:
        evidence |= {
            "keys in the file": facts.saved,
            "keys in the model": facts.expected,
            "the same key and shape": facts.fitting,
        }
    evidence |= {"missing keys": _keys(facts.missing), "unexpected keys": _keys(facts.unexpected)}
    if facts.resized:
        evidence["sizes"] = [
            {
                "key": r.key,
                "in the file": str(list(r.saved)),
                "in the model": str(list(r.model)),
                "argument": f"{r.kind}({r.argument}={r.saved_size})" if r.argument else "",
            }
            for r in facts.resized[:30]
        ]
    return {key: value for key, value in evidence.items() if value not in (None, "")}


def _state_chain(facts: StateMismatch) -> tuple[Link, ...]:
    links = []
    if facts.resized and (facts.inside or facts.renamed):
        links += [Link(_sizes_title(facts, f"`{facts.source}`", f"`{facts.model}`").rstrip("."))]
    if facts.renamed and facts.inside:
        links += [Link(_prefix_title(facts, f"`{_source(facts)}`", f"`{facts.model}`").rstrip("."))]
    if not facts.strict and facts.resized:
        links += [Link("strict=False ignores missing and unexpected keys, but a different size is still an error")]
    return tuple(links)


# -- fixes -------------------------------------------------------------------------------------------------------


def _state_fixes(facts: StateMismatch) -> list[Fix]:
    if facts.no_dict:
        source = facts.expression or facts.source
        code = f"{facts.model}.load_state_dict(torch.load({source if facts.no_dict in PATHS else 'path'}))"
        return [Fix("Read the file first." if facts.no_dict in PATHS else "Pass the state of a model.", code)]
    if _strange(facts):
        source = f"sorted({facts.expression or _source(facts)})[:10]"
        title = "Build the model that the file was saved from: its keys show which one."
        return [Fix(title, f"print({source}, sorted({facts.model}.state_dict())[:10])")]
    if facts.resized:
        return _for_sizes(facts)
    if facts.whole_model or facts.inside or facts.renamed:
        return [_placed(facts)]
    return [_not_strict(facts)]


def _source(facts: StateMismatch) -> str:
    return facts.source + (facts.inside or "") + (".state_dict()" if facts.whole_model else "")


def _prepared(facts: StateMismatch) -> tuple[list[str], str]:
    """(lines that select the entry and change the keys, the expression for the state after them)."""
    lines = [f"{facts.source} = {facts.expression}"] if facts.expression else []
    state, change = _source(facts), facts.renamed
    if change is None:
        return lines, state
    return [*lines, f"state = {{{change.text}: value for name, value in {state}.items()}}"], "state"


def _placed(facts: StateMismatch) -> Fix:
    """Load the right entry under the right keys, or into the part of the model that has them."""
    change = facts.renamed
    if (
        change is not None
        and change.new
        and not (change.old or facts.unmatched)
        and not any(key.startswith(change.new) for key in facts.lacking)
    ):
        part = "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in change.new.rstrip(".").split("."))
        lines = [f"{facts.source} = {facts.expression}"] if facts.expression else []
        code, after = "\n".join([*lines, f"{facts.model}{part}.load_state_dict({_source(facts)})"]), _after(facts)
        return Fix(
            f"Load it into the part of the model that it belongs to: `{change.new.rstrip('.')}`.", code, True, after
        )
    lines, state = _prepared(facts)
    whole = facts.whole_model or (facts.saved is not None and not facts.unmatched and not facts.lacking)
    lines = [*lines, f"{facts.model}.load_state_dict({state}{'' if whole else ', strict=False'})"]
    title = "Load the state itself." if facts.renamed is None else "Change the keys before loading."
    fits = _fits(facts)
    verified = None if fits is None else bool(fits)
    return Fix(title, "\n".join(lines), verified, _after(facts))


def _fits(facts: StateMismatch) -> int | None:
    """How many keys match with the change of keys; None where the state itself is not known."""
    return None if facts.saved is None else facts.saved - len(facts.unmatched)


def _after(facts: StateMismatch) -> dict[str, Any]:
    if (fits := _fits(facts)) is None:
        return {}
    result: dict[str, Any] = {"keys that then match, by name and shape": f"{fits} of {facts.saved}"}
    if facts.lacking:
        result["keys that keep their initial values"] = f"{len(facts.lacking)} of {facts.expected}"
    return result


def _for_sizes(facts: StateMismatch) -> list[Fix]:
    fixes = []
    lines, state = _prepared(facts)
    argued = next((r for r in facts.resized if r.argument and not r.transposed), None)
    if facts.argument is not None:
        name, size = facts.argument
        code = [f"{facts.model} = {facts.kind}({name}={size})", *lines, f"{facts.model}.load_state_dict({state})"]
        fixes.append(Fix("Build the model with the size in the file.", "\n".join(code)))
    elif argued is not None:
        title = f"Build the layer `{argued.key.rpartition('.')[0] or facts.model}` with the size in the file."
        fixes.append(Fix(title, f"{argued.kind}(..., {argued.argument}={argued.saved_size}, ...)"))
    turned = tuple(r.key for r in facts.resized if r.transposed)
    if len(turned) == len(facts.resized):
        code = [
            *lines,
            f"transposed = {turned!r}",
            f"state = {{key: value.t() if key in transposed else value for key, value in {state}.items()}}",
            f"{facts.model}.load_state_dict(state)",
        ]
        fixes.append(
            Fix("Transpose the matrices while loading.", "\n".join(code), True, {"keys that match": len(turned)})
        )
    fits = _fits(facts)
    if fits != 0:
        fixes.append(_skipping(facts, lines, state, fits))
    return fixes or [
        Fix(
            "Build the model with the sizes in the file.",
            "\n".join([*lines, f"print({{key: tuple(value.shape) for key, value in {state}.items()}})"]),
        )
    ]


def _skipping(facts: StateMismatch, lines: Sequence[str], state: str, fits: int | None) -> Fix:
    """Load the entries that match."""
    keys = tuple(r.key for r in facts.resized)
    code = [
        *lines,
        f"skipped = {keys!r}",
        f"fitting = {{key: value for key, value in {state}.items() if key not in skipped}}",
        f"{facts.model}.load_state_dict(fitting, strict=False)",
    ]
    after = {}
    if fits is not None:
        after = {"keys that then load": f"{fits} of {facts.saved}", "keys that keep their initial values": len(keys)}
    title = "Or leave out what does not match, and train these layers from scratch."
    return Fix(title, "\n".join(code), None if fits is None else True, after)


def _not_strict(facts: StateMismatch) -> Fix:
    lines, state = _prepared(facts)
    if facts.missing:
        title = f"Load the rest, if {listed(facts.missing)} may keep the initial values."
    else:
        title = "Load the rest, if the unexpected entries of the file are not needed."
    fits = {} if facts.saved is None else {"keys that then load": f"{facts.fitting} of {facts.saved}"}
    code = "\n".join([*lines, f"{facts.model}.load_state_dict({state}, strict=False)"])
    return Fix(title, code, bool(facts.fitting) if fits else None, fits)


# -- the optimizer's -----------------------------------------------------------------------------------------------


def _optimizers(facts: OptimizerMismatch) -> Finding:
    call = f"{facts.optimizer}.load_state_dict"
    assignment = f"{facts.source} = {facts.expression}\n" if facts.expression else ""
    if facts.saved is None:
        title = f"`{facts.source}` is not the state of an optimizer"
        title += f"; that is its entry `{facts.inside}`." if facts.inside else "."
        code = f"{assignment}{call}({facts.source}{facts.inside or '[...]'})"
        after = {"entries": len(facts.keys)} if facts.inside else {}
        fix = Fix("Load the optimizer's own entry.", code, True if facts.inside else None, after)
    else:
        title = (
            f"`{facts.source}` is the state of an optimizer with {_groups(facts.saved)}; `{facts.optimizer}` "
            f"({facts.kind}) has {_groups(facts.expected)}."
        )
        fix = Fix(
            "Build the optimizer as it was when the state was saved: the same parameters in the same groups and order, "
            "frozen ones included. Or load only the model, and start with a new optimizer state.",
            f"{assignment}{facts.optimizer} = torch.optim.{facts.kind}(model.parameters())   # as when it was saved\n"
            f"{call}({facts.source})",
        )
    evidence = {
        "optimizer": f"{facts.optimizer} ({facts.kind})",
        "parameters by group, saved": facts.saved,
        "parameters by group, here": facts.expected,
        "entries": ", ".join(facts.keys),
    }
    return Finding(
        "error/state-dict-mismatch", title, at(facts), {key: value for key, value in evidence.items() if value}, (fix,)
    )


def _groups(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return count(sizes[0], "parameter")
    return f"{len(sizes)} groups of {', '.join(map(str, sizes[:6]))} parameters"


def _keys(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
