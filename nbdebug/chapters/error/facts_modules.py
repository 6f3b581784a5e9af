"""What a failing import shows: which module or name is missing, who asks for it, and where it could come from."""

from __future__ import annotations

import dataclasses

from nbdebug.chapters.error.facts import Raised


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
