"""An import, or a file's pickle, that asks for a module or a class that is not there: who asks, and where it could "
"be."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from nbdebug.chapters.error.facts_modules import ModuleMissing
from nbdebug.chapters.error.looks.places import (
    PIP,
    WELL_KNOWN,
    files_of,
    importable,
    other_environments,
    package_of,
    submodules,
)
from nbdebug.chapters.error.operands import expression
from nbdebug.chapters.error.scene import Scene
from nbdebug.observe.named import is_users
from nbdebug.observe.sites import source_text

MODULE = re.compile(r"No module named '?([\w.]+)'?(?:; '([\w.]+)' is not a package)?")
NAME = re.compile(r"cannot import name '(\w+)' from (partially initialized module )?'?([\w.]+)'?(?: \((.*?)\))?")
PARTIAL = re.compile(r"partially initialized module '([\w.]+)'.*has no attribute '(\w+)'")
RELATIVE = re.compile(r"attempted relative import (?:with no known parent package|beyond top-level package)")
CLASS = re.compile(r"Can't get attribute '([\w.]+)' on <module '([\w.]+)'|module '([\w.]+)' has no attribute '(\w+)'")
REFUSED = re.compile(r"Unsupported (?:global|class)[^:]*: GLOBAL ([\w.]+)\.(\w+) was not an allowed global")
LOADS = re.compile(r"[\\/]torch[\\/](serialization|_weights_only_unpickler)\.py$|[\\/]pickle\.py$")
SURE = 0.8
"""How alike (difflib's ratio) a name must be to be offered: one letter in five may differ. Our choice."""


def look(scene: Scene) -> ModuleMissing | None:
    said, kind = scene.message, scene.type
    if kind in ("ModuleNotFoundError", "ImportError") and (found := MODULE.search(said)):
        return _missing(scene, found[1], found[2])
    if kind == "ImportError" and (found := NAME.search(said)):
        return _name(scene, found[3], found[1], bool(found[2]))
    if kind == "ImportError" and RELATIVE.search(said):
        return ModuleMissing(scene.raised(), "relative", _imported(scene), python=_python())
    if kind == "UnpicklingError" and (found := REFUSED.search(said)) and not _there(found[1]):
        return dataclasses.replace(
            _missing(scene, found[1], None),
            name=found[2],
            pickled=True,
            source=_source(scene),
            holders=_holders(found[2]),
        )
    if kind == "AttributeError" and (found := PARTIAL.search(said)):
        return ModuleMissing(scene.raised(), "circular", found[1], found[2], python=_python())
    if kind == "AttributeError" and (found := CLASS.search(said)) and (found[1] or _unpickling(scene)):
        module, name = (found[2], found[1]) if found[1] else (found[3], found[4])
        if not _unpickling(scene) and scene.carried is None and not _loading(scene):
            return None
        return ModuleMissing(
            scene.raised(),
            "class",
            module,
            name,
            True,
            _source(scene),
            _holders(name),
            near=_near(name, vars(sys.modules[module]) if module in sys.modules else ()),
            python=_python(),
        )
    return None


def _there(module: str) -> bool:
    """Whether a module could be imported; nothing is imported for it."""
    top = module.partition(".")[0]
    if module in sys.modules:
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def _missing(scene: Scene, module: str, taken: str | None) -> ModuleMissing:
    asked = _asked_for(scene)
    name = asked[1] if asked and asked[0] == module else ""
    files, folder = files_of(module, _beside(scene))
    top = module.partition(".")[0]
    if not taken and not asked and not files and (inside := _submodule(module)) is not None:
        parent, name, near = inside
        return ModuleMissing(
            scene.raised(),
            "submodule",
            module,
            name,
            near=near,
            taken_by=_file_of(parent),
            python=_python(),
            asked_by=_asking_library(scene),
        )
    return ModuleMissing(
        scene.raised(),
        "not a package" if taken else "module",
        module,
        name,
        bool(asked),
        _source(scene) if asked else "",
        _holders(name) if name else (),
        files,
        folder,
        () if files else _near(top, importable()),
        package_of(module),
        other_environments(top),
        _file_of(taken) if taken else "",
        _python(),
        _asking_library(scene),
        next(iter(() if top in WELL_KNOWN else _near(top, WELL_KNOWN)), ""),
    )


def _submodule(module: str) -> tuple[str, str, tuple[str, ...]] | None:
    """(package, what it has under this name that is no module, modules nearly of this name), where the package itself
    was imported and lacks the module."""
    parent, _, last = module.rpartition(".")
    held = vars(sys.modules[parent]) if parent in sys.modules else {}
    if held.get("__file__") is None or package_of(module) == PIP.get(module, "-"):
        return None  # a namespace, whose parts are installed one by one
    near = _near(last, submodules(held.get("__path__")))
    alike = [
        name
        for name in list(sys.modules)
        if name.startswith(f"{parent.partition('.')[0]}.") and name.rpartition(".")[2] == last and name != module
    ]
    return parent, last if last in held else "", (*(f"{parent}.{name}" for name in near), *sorted(alike, key=len)[:1])


def _name(scene: Scene, module: str, name: str, partial: bool) -> ModuleMissing:
    there = sys.modules.get(module)
    return ModuleMissing(
        scene.raised(),
        "circular" if partial else "name",
        module,
        name,
        near=_near(name, vars(there)) if there is not None else (),
        taken_by=_file_of(module),
        python=_python(),
    )


def _python() -> str:
    return f"{os.path.basename(sys.executable)} {sys.version_info.major}.{sys.version_info.minor}"


def _asked_for(scene: Scene) -> tuple[str, str] | None:
    """(module, class) that an unpickler was asked for; ("", "") where it did not say which; None where none runs."""
    for frame in reversed(scene.trail):
        if frame.site.function == "find_class" and LOADS.search(frame.site.file):
            module = frame.names.get("mod_name", frame.names.get("module"))
            name = frame.names.get("name")
            return (module, name) if type(module) is str and type(name) is str else None
    return ("", "") if _unpickling(scene) or _loading(scene) else None


def _unpickling(scene: Scene) -> bool:
    return any(LOADS.search(frame.site.file) for frame in scene.trail)


def _loading(scene: Scene) -> bool:
    """Whether the innermost line is a call of `load` or `loads`, whose C code leaves no frame."""
    inner = [frame for frame in scene.trail if "importlib" not in frame.site.file][-1:]
    return bool(inner and re.search(r"\bload(s|_build)?\(", source_text(inner[0].site) or ""))


def _load_call(scene: Scene) -> ast.Call | None:
    for frame in scene.users:
        node = expression(frame)
        for part in ast.walk(node) if node is not None else ():
            if isinstance(part, ast.Call) and (getattr(part.func, "attr", None) or getattr(part.func, "id", "")) in (
                "load",
                "loads",
                "read_pickle",
            ):
                return part
    return None


def _source(scene: Scene) -> str:
    """The call that loads, as the user wrote it."""
    call = _load_call(scene)
    return ast.unparse(call) if call is not None else ""


def _imported(scene: Scene) -> str:
    """What the user's failing line imports: ".models"."""
    for frame in scene.users:
        node = expression(frame)
        if isinstance(node, ast.ImportFrom):
            return "." * node.level + (node.module or "")
    return ""


def _asking_library(scene: Scene) -> str:
    """The installed package that needs the module, where the user's own line imports that one."""
    asker = next((frame for frame in reversed(scene.trail) if "importlib" not in frame.site.file), None)
    if asker is None or asker.users:
        return ""
    name = str(asker.globals.get("__name__", "")).partition(".")[0]
    return "" if name == "__main__" else name


def _holders(name: str) -> tuple[str, ...]:
    """The user's modules that have a class of this name."""
    found = []
    for module_name, module in reversed(list(sys.modules.items())):  # the latest import is the likeliest
        if type(module) is types.ModuleType and name and "." not in name:
            held = vars(module).get(name)
            if isinstance(held, type) and (module_name == "__main__" or is_users(module_name) or _made_by_hand(module)):
                found.append(module_name)
    return tuple(found[:5])


def _made_by_hand(module: Any) -> bool:
    """A module that no file stands behind and that is none of Python's own."""
    held = vars(module)
    return held.get("__file__") is None and held.get("__spec__") is None


def _file_of(module: str) -> str:
    held = vars(sys.modules[module]) if module in sys.modules else {}
    file = held.get("__file__")
    return os.path.relpath(file) if type(file) is str and file.startswith(os.getcwd()) else file or ""


def _beside(scene: Scene) -> Iterator[str]:
    """The folders of the user's own files in the traceback."""
    for frame in scene.users:
        folder = os.path.dirname(frame.site.file)
        if folder and os.path.isdir(folder):
            yield folder


def _near(asked: str, there: Any) -> tuple[str, ...]:
    names = [name for name in there if type(name) is str and name != asked and not name.startswith("_")]
    return tuple(difflib.get_close_matches(asked, names, n=2, cutoff=SURE))
