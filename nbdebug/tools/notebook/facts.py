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
class StaleHolder:
    """An object that was created from a variable which a later cell has replaced, and used since then.

    holder: "loader"; path: the attribute with the old value ("loader.collate_fn"); name: the variable; kind: the type
    of the old value ("DataLoader", "function"). remade: the statement that creates the holder. where: the cell that
    replaced the variable; created: the cell that created the holder; used: a cell that used it since then."""

    holder: str
    path: str
    name: str
    kind: str
    remade: str = ""
    where: Where = NOWHERE
    created: Where = NOWHERE
    used: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class TwiceHook:
    """A hook that was registered more than once. owners: the modules, parameters or optimizers that have it; hook: the
    function's name; word: "forward hook"; method: "register_forward_hook"; times: how often on one owner. where: the
    cell of the second registration; first: of the first."""

    owners: tuple[str, ...]
    hook: str
    word: str
    method: str
    times: int
    where: Where = NOWHERE
    first: Where = NOWHERE


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
class TooEarly:
    """A cell failed because a name was missing that a later cell has defined, or an earlier one deleted. where: the
    failed cell's line; defined: the line that defines the name; deleted: the line that deleted it."""

    name: str
    where: Where = NOWHERE
    defined: Where = NOWHERE
    deleted: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class Shadowed:
    """A cell failed because a name no longer stands for what its line means. meant: "builtin", "function", "class",
    "module", or "import" (of a function or a class); kind: the class of the value that it has now; imported: the
    import; message: the exception's. where: the cell that gave it this value; failed: the line that failed."""

    name: str
    meant: str
    kind: str
    imported: str = ""
    message: str = ""
    where: Where = NOWHERE
    failed: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class RunTwice:
    """A statement that consumes its own result ran again. name: the variable; how: "used up" where that is an iterator
    of which nothing is left, "drawn" where it is a random split; times: how often the statement has been started;
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
class ModeLeft:
    """A mode that a cell left on. kind: "eval", "grad", "dtype", "device", "setting", or of one object "dtype-changed"
    and so on; name: the model, or the call; where: the cell that switched it on; after: the cell that went on training,
    or failed; message: the last exception's message."""

    kind: str
    name: str
    where: Where = NOWHERE
    after: Where = NOWHERE
    message: str = ""


@dataclasses.dataclass(frozen=True)
class SharedObject:
    """One object under two names that a cell changed through one of them. name: that one; other: the other ("model" of
    weights that are put back); statement: the change; weights: `name` is the model's own state dict. where: the cell
    that changed it, of weights the one that took them; used: the cell that uses the other, or puts the weights back."""

    name: str
    other: str
    statement: str
    weights: bool = False
    where: Where = NOWHERE
    used: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class NotebookFacts:
    """All of these. cells: how many ran; objects: how many the variables lead to; notes: sentences of their own."""

    cells: int = 0
    objects: int = 0
    stale: tuple[StaleModule, ...] = ()
    untrained: tuple[LeftBehind, ...] = ()
    holders: tuple[StaleHolder, ...] = ()
    hooks: tuple[TwiceHook, ...] = ()
    classes: tuple[Redefined, ...] = ()
    outputs: tuple[KeptOutput, ...] = ()
    early: tuple[TooEarly, ...] = ()
    modes: tuple[ModeLeft, ...] = ()
    notes: tuple[str, ...] = ()
    shadowed: tuple[Shadowed, ...] = ()
    repeated: tuple[RunTwice, ...] = ()
    unchecked: tuple[str, ...] = ()
    shared: tuple[SharedObject, ...] = ()
