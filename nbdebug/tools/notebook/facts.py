"""Facts about the cells that ran, the variables and the files, as plain names and numbers."""

from __future__ import annotations

import dataclasses

from nbdebug.report import Where

NOWHERE = Where()


@dataclasses.dataclass(frozen=True)
class StaleModule:
    """A module that differs from its file.

    module: "losses"; file: its base name. changed: functions ("dice", "Net.forward") and constants that differ, added
    ones included. names: names in the notebook that still refer to the old version, where the module itself was
    reloaded ("dice", "train.dice"); () where the module is old. imported: the statements that load the new version.
    where: the cell that imported it; first: the first one that did; again: the module had been imported before `where`;
    edited: the cell that wrote the file, if one did.
    """

    module: str
    file: str
    changed: tuple[str, ...]
    names: tuple[str, ...] = ()
    imported: str = ""
    where: Where = NOWHERE
    first: Where = NOWHERE
    again: bool = False
    edited: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class LeftBehind:
    """Trainable parameters of a model that no optimizer holds, because the model changed after the optimizer was
    created.

    missing: the parameters' names ("model.fc.weight"), all of them; of: how many the model trains. strangers: how many
    tensors the optimizer holds that no model among the variables has. how: "anew" (the model was created again), "part"
    (a part of it was replaced or added), "unfrozen". used: the optimizer was used since then, or the parameters have
    gradients. remade: the user's statement that creates the optimizer. where: the cell that changed the model; created:
    the optimizer's.
    """

    model: str
    optimizer: str
    missing: tuple[str, ...]
    of: int
    strangers: int
    how: str
    used: bool
    remade: str = ""
    where: Where = NOWHERE
    created: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class Redefined:
    """Objects of a class whose name now stands for another class. name: the class; instances: names of objects
    ("model", "model.blocks.0"), or of subclasses; subclasses: they are classes. changed: methods that differ; renewed:
    an object of the new class exists as well. evidence: what shows that it matters: "exception", "isinstance",
    "pickle", "super", or ""; message: the exception's message. used: the objects were used after the new definition.
    created: the cell that created the first of the objects; old: the cell of the old definition; where: of the new
    one."""

    name: str
    instances: tuple[str, ...]
    changed: tuple[str, ...] = ()
    subclasses: bool = False
    renewed: bool = False
    evidence: str = ""
    message: str = ""
    used: bool = False
    remade: str = ""
    module: str = "__main__"
    where: Where = NOWHERE
    old: Where = NOWHERE
    created: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class KeptOutput:
    """Memory that the shell alone holds, or a list of losses with their graphs. how: "output", "traceback" or "graph";
    name: "Out[2]"; bytes; what: "float32 (2560, 3072)". variable: the expression that was displayed ("features"), or
    the largest tensor in a traceback. statement: the one that tried to free it, or ""; deleted: it names this
    variable; freed: its place. where: the cell that displayed it, failed, or added it."""

    how: str
    name: str
    bytes: int
    what: str = ""
    variable: str = ""
    statement: str = ""
    deleted: bool = False
    freed: Where = NOWHERE
    where: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class RunTwice:
    """A statement that consumes its own result ran again. name: the variable; how: "used up" where that is an iterator
    of which nothing is left, "carried on" where it is a sum or a history that two runs share;
    times: how often the statement has been started;
    error: the class of the exception with which it failed, "" if it did not; renewal: the statement that makes the
    variable anew; where: the line, first: of its first run; fresh: of the renewal."""

    name: str
    statement: str
    times: int
    error: str = ""
    renewal: str = ""
    where: Where = NOWHERE
    first: Where = NOWHERE
    fresh: Where = NOWHERE
    how: str = ""


@dataclasses.dataclass(frozen=True)
class Told:
    """A cause that needs no further words than its own. names: the variables at fault, first the one that is most;
    where: the cell that brings it in; fixes: (what to do, as code); links: (how it came about, where)."""

    code: str
    title: str
    names: tuple[str, ...]
    where: Where
    fixes: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, Where], ...] = ()


@dataclasses.dataclass(frozen=True)
class NotebookFacts:
    """All of these. cells: how many ran; objects: how many the variables lead to; notes: sentences; failed: what the
    last failure tells; told: what shows without one."""

    cells: int = 0
    objects: int = 0
    stale: tuple[StaleModule, ...] = ()
    untrained: tuple[LeftBehind, ...] = ()
    holders: tuple[Told, ...] = ()
    classes: tuple[Redefined, ...] = ()
    outputs: tuple[KeptOutput, ...] = ()
    notes: tuple[str, ...] = ()
    repeated: tuple[RunTwice, ...] = ()
    unchecked: tuple[str, ...] = ()
    failed: tuple[Told, ...] = ()
    told: tuple[Told, ...] = ()
