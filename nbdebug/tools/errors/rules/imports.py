"""The causes of a failing import: which module or name is missing, what needs it, and where it could come from."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Edit, Finding, Fix, Link
from nbdebug.tools.errors.facts import Raised


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


def _evidence(facts: ModuleMissing) -> dict[str, Any]:
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


def _chain(facts: ModuleMissing) -> list[str]:
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


def _fixes(facts: ModuleMissing) -> list[Fix]:
    if facts.what == "relative":
        rest = facts.module.lstrip(".") or "module"
        return [Fix("Import it by its full name, with its folder on sys.path.", f"from {rest} import ...")]
    if facts.what == "circular":
        return [
            Fix(
                "Import it inside the function that uses it, or move what both files need into a third file.",
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
                "Rename the file that has the package's name, and restart the kernel.",
                f"mv {facts.taken_by or facts.module + '.py'} my_{facts.module.partition('.')[0]}.py",
            )
        ]
    return _for_pickle(facts) if facts.pickled else _for_absent(facts)


def _for_absent(facts: ModuleMissing) -> list[Fix]:
    """For a module that is not there at all."""
    if facts.files:
        return [Fix("Add that folder to sys.path.", f"import sys\nsys.path.append({facts.folder!r})"), _for_good(facts)]
    if facts.near:
        return [Fix("Use the name that exists.", f"import {facts.near[0]}")]
    top = facts.module.partition(".")[0]
    if facts.meant and not facts.needed_by:
        return [
            Fix(
                "If you mean that module, install it and correct the name. (A package with the misspelt name may be "
                "something else, or harmful.)",
                f"%pip install {facts.meant}\nimport {facts.meant}",
            )
        ]
    if top in OWN_FOLDERS and not facts.needed_by:
        return [
            Fix(
                "It is probably a folder of the project itself, and no package: add the folder that contains it.",
                f"import sys\nsys.path.append('path/of/the/project')   # the folder in which {top} lies",
            )
        ]
    return [
        Fix(
            "Install it with %pip, which uses this kernel's Python; !pip may use another one.",
            f"%pip install {facts.package or top}",
        )
    ]


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
    return [
        Fix(
            "Print which file and version it is, and what it contains.",
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
            Fix(
                "Import the class into the main program before you load the file.",
                f"from {holder} import {kind}\n{load}",
            )
        ]
    elif facts.what == "class" and facts.module == "__main__":
        fixes += [
            Fix(
                "Define the class here as it was in the notebook or script that saved it, then load.",
                f"class {kind}(nn.Module):\n    ...\n\n{load}",
            )
        ]
    elif facts.edit is not None:
        after = {"classes and functions that the file names": f"{facts.complete} of {facts.complete} found"}
        after = after if facts.complete else {}
        title = "Register the module under its old name before you load the file."
        fixes += [Fix.of(title, facts.edit, bool(facts.complete) or None, after)]
    elif holder:
        fixes += [
            Fix(
                "Register the module under its old name before you load the file.",
                f"import sys, {holder}\nsys.modules[{facts.module!r}] = {holder}\n{load}",
            )
        ]
    elif facts.files:
        fixes += [
            Fix("Add the folder of its file to sys.path.", f"import sys\nsys.path.append({facts.folder!r})\n{load}")
        ]
    else:
        fixes += [
            Fix(
                "Add the file that defines the class, under its old name, then load.",
                f"# {facts.module.replace('.', '/')}.py beside this program\n{load}",
            )
        ]
    saved = Fix(
        "Then save only the weights: loading them needs no pickled class.",
        "torch.save(model.state_dict(), 'weights.pt')\n"
        f"model = {kind}()\nmodel.load_state_dict(torch.load('weights.pt'))",
    )
    return [*fixes, saved]
