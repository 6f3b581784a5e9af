"""What a failing import shows: which module or name is missing, who asks for it, and where it could come from."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link
from nbdebug.tools.errors.facts import Raised


@dataclasses.dataclass(frozen=True)
class ModuleMissing:
    """what: "module" (does not exist here), "not a package" (another file has taken its name), "name" (the module
    lacks it), "submodule" (its package is there and lacks it; name: what that has so called that is no module),
    "circular", "relative" (import without a package), "class" (a pickled class is not where it was).

    module: that is asked for; name: in it. pickled: it is a file's pickle that asks; source: the call that loads, as
    the user wrote it; asked_by: the installed package that imports it. holders: modules at hand that have a class of
    this name. files: where a file of this module lies, seen from the working folder; folder: the one to add to
    sys.path. near: names that are nearly this one. package: what pip calls it, where it has another name. elsewhere:
    the interpreter of another environment that has it. taken_by: the file that stands for the module. python: the
    interpreter that runs. meant: a well-known module, not installed, of nearly this name.
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
    asked_by: str = ""
    meant: str = ""


@rule(
    code="error/module-not-found",
    title="A module, or a class in it, is asked for and is not there.",
    symptom="No module named …, at an import or in torch.load; Can't get attribute … on <module '__main__'>; cannot "
    "import name …; attempted relative import with no known parent package.",
    cause="A whole model that was saved with torch.save names its class by module: the loading program must have that "
    "module under that name. Else: the package is not in this environment, has another name, or the file lies "
    "in a "
    "folder that Python does not search.",
    confirm="`import sys; sys.path, sys.executable`; for a file, `python -m pickletools` shows the modules it names.",
    fix="Save `model.state_dict()` and build the model anew. For a file that exists: give its class the old name "
    "while it "
    "is loaded. Else install the package with `%pip install`, or add the folder to `sys.path`.",
    reference="https://docs.pytorch.org/docs/stable/notes/serialization.html",
)
def module_not_found(facts: Any) -> Finding | None:
    if not isinstance(facts, ModuleMissing):
        return None
    where = dataclasses.replace(facts.raised.where, phase=None)
    return Finding(
        "error/module-not-found",
        _title(facts),
        where,
        _evidence(facts),
        tuple(_fixes(facts)),
        tuple(Link(link) for link in _chain(facts)),
    )


def _title(facts: ModuleMissing) -> str:
    module = f"`{facts.module}`"
    if facts.what == "relative":
        return (
            f"`from {facts.module or '.'} import …` is relative to the package around it, and this file or cell "
            "belongs to none."
        )
    if facts.what == "circular":
        return f"{module} is imported while it is still being read: it and another file import each other."
    if facts.what in ("name", "submodule"):
        return _lacks(facts)
    if facts.what == "class":
        where = "the main program" if facts.module == "__main__" else module
        return f"The file was pickled with a class `{facts.name}` of {where}, which has no such class here{_holder_phrase(facts)}."
    if facts.what == "not a package":
        return f"{module} can't be imported: {facts.taken_by or 'a single file'} has taken the name of its package."
    if facts.pickled:
        what = f"the class `{facts.module}.{facts.name}`" if facts.name else f"a class of the module {module}"
        return f"The file holds a whole object that needs {what}, and there is no module {module} here{_holder_phrase(facts)}."
    if facts.files:
        return f"{module} lies at {facts.files[0]}, in a folder that Python does not search."
    if facts.near:
        return f"There is no module {module}; there is `{facts.near[0]}`."
    if facts.meant and not facts.asked_by:
        return f"There is no module {module}; `{facts.meant}`, nearly the same name, is not installed here either."
    by = f", which `{facts.asked_by}` needs," if facts.asked_by else ""
    named = f" (its package is called `{facts.package}`)" if facts.package else ""
    return f"{module}{by} is not installed for the Python of this kernel{named}."


def _lacks(facts: ModuleMissing) -> str:
    """A module that has no such name, a package that has no such module."""
    if facts.what == "name":
        near = f" It has `{facts.near[0]}`." if facts.near else ""
        return f"`{facts.module}` has no `{facts.name}`.{near}"
    parent, _, last = facts.module.rpartition(".")
    if facts.name:
        return f"`{facts.module}` is no module: `{last}` is something in `{parent}`, to be imported from there."
    by = f", which `{facts.asked_by}` needs: the two versions don't fit" if facts.asked_by else ""
    near = f"; it has `{facts.near[0]}`" if facts.near else ""
    return f"`{parent}` is installed, and has no module `{last}`{by}{near}."


def _holder_phrase(facts: ModuleMissing) -> str:
    holders = [name for name in facts.holders if name != facts.module]
    return f"; `{holders[0]}` has a class of that name" if holders else ""


def _evidence(facts: ModuleMissing) -> dict[str, Any]:
    evidence = {
        "module": facts.module,
        "name": facts.name,
        "asked for by": facts.source or facts.asked_by,
        "modules with a class of that name": ", ".join(facts.holders),
        "files of that name": ", ".join(facts.files),
        "nearly the same name": ", ".join(facts.near),
        "package": facts.package,
        "found for": facts.elsewhere,
        "stands for it": facts.taken_by,
        "this kernel's Python": facts.python,
    }
    return {key: value for key, value in evidence.items() if value}


def _chain(facts: ModuleMissing) -> list[str]:
    links = []
    if facts.pickled:
        links += ["torch.save of a whole model stores its class by name only: module and class must be found again"]
    if facts.elsewhere:
        links += [f"another environment on this machine has it: {facts.elsewhere}"]
    return links


# -- what to do ----------------------------------------------------------------------------------------------------


def _fixes(facts: ModuleMissing) -> list[Fix]:
    if facts.what == "relative":
        rest = facts.module.lstrip(".") or "module"
        return [Fix("Import it by its own name, with its folder on the path.", f"from {rest} import ...")]
    if facts.what == "circular":
        return [
            Fix(
                "Import it where it is used, or move what both need into a third file.",
                f"def build():\n    import {facts.module}\n    ...",
            )
        ]
    if facts.what == "name":
        return _for_name(facts)
    if facts.what == "submodule":
        return [_for_submodule(facts)]
    if facts.what == "not a package":
        return [
            Fix(
                "Rename the file that has taken the name, and restart the kernel.",
                f"mv {facts.taken_by or facts.module + '.py'} my_{facts.module.partition('.')[0]}.py",
            )
        ]
    if facts.pickled:
        return _for_pickle(facts)
    if facts.files:
        return [Fix("Let Python search that folder.", f"import sys\nsys.path.append({facts.folder!r})")]
    if facts.near:
        return [Fix("Write the name of the one that is there.", f"import {facts.near[0]}")]
    top = facts.module.partition(".")[0]
    if facts.meant and not facts.asked_by:
        return [
            Fix(
                "If that is what you mean, install it, and mend the name. (What a package index has under a "
                "misspelt name is seldom what you want.)",
                f"%pip install {facts.meant}\nimport {facts.meant}",
            )
        ]
    return [
        Fix(
            "Install it for this kernel's Python: %pip does, !pip may install for another one.",
            f"%pip install {facts.package or top}",
        )
    ]


def _for_submodule(facts: ModuleMissing) -> Fix:
    parent, _, last = facts.module.rpartition(".")
    if facts.name:
        return Fix("Import it from its module.", f"from {parent} import {last}")
    if facts.near and not facts.asked_by:
        return Fix("Write the name of the one that is there.", f"import {facts.near[0]}")
    top = parent.partition(".")[0]
    return Fix(
        "Look at which version it is, and what that has: modules are moved and dropped between versions.",
        f"import importlib.metadata, pkgutil, {parent}\nprint(importlib.metadata.version({top!r}), "
        f"[found.name for found in pkgutil.iter_modules({parent}.__path__)])",
    )


def _for_name(facts: ModuleMissing) -> list[Fix]:
    if facts.near:
        return [Fix("Import what is there.", f"from {facts.module} import {facts.near[0]}")]
    return [
        Fix(
            "Look at what it has, and which version or file it is.",
            f"import {facts.module}\nprint({facts.module}.__file__, "
            f"getattr({facts.module}, '__version__', ''), dir({facts.module}))",
        )
    ]


def _for_pickle(facts: ModuleMissing) -> list[Fix]:
    holder = next((name for name in facts.holders if name != facts.module), "")
    kind = facts.name or "Net"
    source = facts.source if facts.raised.type != "UnpicklingError" else ""  # its call leaves out weights_only=False
    load = f"model = {source or 'torch.load(path, weights_only=False)'}"
    fixes = []
    if facts.module == "__main__" and holder:
        fixes += [
            Fix("Give the main program the class while the file is loaded.", f"from {holder} import {kind}\n{load}")
        ]
    elif facts.what == "class" and facts.module == "__main__":
        fixes += [
            Fix(
                "Define the class here as it was in the notebook or script that saved it, then load.",
                f"class {kind}(nn.Module):\n    ...\n\n{load}",
            )
        ]
    elif holder:
        fixes += [
            Fix(
                "Give the module its old name while the file is loaded.",
                f"import sys, {holder}\nsys.modules[{facts.module!r}] = {holder}\n{load}",
            )
        ]
    elif facts.files:
        fixes += [
            Fix("Let Python search the folder of its file.", f"import sys\nsys.path.append({facts.folder!r})\n{load}")
        ]
    else:
        fixes += [
            Fix(
                "Bring the file in which the class was defined, under its old name, then load.",
                f"# {facts.module.replace('.', '/')}.py beside this program\n{load}",
            )
        ]
    saved = Fix(
        "Then save the weights alone, which need no class to be loaded.",
        "torch.save(model.state_dict(), 'weights.pt')\n"
        f"model = {kind}()\nmodel.load_state_dict(torch.load('weights.pt'))",
    )
    return [*fixes, saved]
