"""What was read of a checkpoint, and of the objects that it is to be loaded into: plain values, no tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug.report import Fix, Where

STEP = re.compile(r"(?:^|[_.])(?:steps?|epoch|iter|iteration|iter_num|it|updates?|batch)$", re.IGNORECASE)
"""Ends of the names under which a run keeps how far it has come."""
SCHEDULER = ("last_epoch", "_step_count")  # counters of torch's schedulers
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Floating types and their bytes: a smaller one keeps fewer digits."""


@dataclasses.dataclass
class SavedTensor:
    """A tensor of a file: its name is its place in the tree. storage: what holds its bytes; offset: in elements.

    nan, inf: how many elements are, None where it was not read. mask: whether all others are zeros and the infinite
    ones negative, as in a mask of attention. zero: whether all elements are zero."""

    dtype: str
    shape: tuple[int, ...]
    storage: str = ""
    offset: int = 0
    stride: tuple[int, ...] = ()
    location: str = "cpu"
    nan: int | None = None
    inf: int | None = None
    mask: bool = False
    zero: bool = False

    @property
    def spoiled(self) -> bool:
        """Whether it holds values that are not finite, and no mask."""
        return bool(self.nan or self.inf and not self.mask)


class SavedObject:
    """Something that a file would create by calling `name`: it was not created. `state` is what it would be given."""

    def __init__(self, name: str, args: Any = (), state: Any = None) -> None:
        self.name, self.args, self.state = name, args, state


@dataclasses.dataclass(frozen=True)
class SavedGlobal:
    """A function or class that a pickle names. path: the dotted place of the first object made by it. allowed: by
    `weights_only=True`. missing: "module" or "name" where it can't be imported; near: a module that has its name."""

    name: str
    path: str = ""
    allowed: bool = True
    missing: str = ""
    near: str = ""


@dataclasses.dataclass
class SavedFile:
    """A file as it was read. format: zip, legacy, pickle, safetensors, index, distributed or "". fault: why it does not
    open or is not whole, "" where it is; begins: what it is instead of weights ("a page of HTML"). lost: files that an
    index or a pointer names and that are not there. tree: its contents; in a folder those of the file itself are under
    "", beside those of the other files."""

    path: str
    bytes: int = 0
    format: str = ""
    fault: str = ""
    begins: str = ""
    tree: Any = None
    globals: tuple[SavedGlobal, ...] = ()
    lost: tuple[str, ...] = ()

    def tensors(self) -> Iterator[tuple[str, SavedTensor]]:
        """(dotted path, tensor) of all that it holds."""
        return ((path, value) for path, value in walk(self.tree) if isinstance(value, SavedTensor))

    @property
    def whole(self) -> bool:
        """Whether all of it is there, and finite."""
        return not (self.fault or self.lost or any(tensor.spoiled for _, tensor in self.tensors()))

    @property
    def executes(self) -> bool:
        """Whether loading would call what `weights_only=True` does not."""
        return not all(one.allowed for one in self.globals)

    def steps(self) -> dict[int, str]:
        """Number → path of the counters that tell how far the run had come; not those of a scheduler."""
        counters = [(path, value) for path, value in walk(self.tree) if type(value) is int and path.count(".") < 2]
        return {value: path for path, value in counters if STEP.search(path) and not path.endswith(SCHEDULER)}

    @property
    def step(self) -> int | None:
        """The largest of these numbers."""
        return max(self.steps(), default=None)


def walk(tree: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of all in nested dicts, lists, tuples and objects: first the tree itself, under ""."""
    yield path, tree
    if depth > 40:
        return
    if isinstance(tree, SavedObject):
        tree = {"": tree.state}
    pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in pairs:
        yield from walk(value, f"{path}.{key}" if path and key != "" else path or str(key), depth + 1)


@dataclasses.dataclass(frozen=True)
class Rename:
    """How names of the file become names of the model. code: of the cause; pairs: (file's, model's); text: the
    expression that gives the model's name of `name`."""

    code: str
    what: str
    pairs: tuple[tuple[str, str], ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Group:
    """A parameter group of an optimizer. parameters: name and shape, of saved ones that of their state, or None. rates:
    learning rate (before any schedule) and weight decay. settings: names of those that tell its kind."""

    parameters: list[tuple[str, tuple[int, ...] | None]]
    rates: tuple[Any, ...]
    settings: frozenset[str]


@dataclasses.dataclass
class CheckpointFacts:
    """A file beside what it is loaded into. chosen: whether the user named the file, and not its folder; siblings: name
    → step of the checkpoints beside it, the first first; good: the newest of them that is whole, if this one is not.

    own: its weights, by name; entry: where they lie. entries: role → path of the entry that has it (optimizer,
    scheduler, scaler, ema, rng, sampler, step). wanted: which of the roles the user gave.

    model: name → (shape, dtype); called: the user's name of it; tied: names of it that share one tensor; reshaped:
    names with another size. groups: the saved optimizer's, the user's. hollow: whether the saved one has no averages,
    though its kind keeps them. configs: (name, the file's value, the model's) of settings that differ. loads: the
    user's loading without its spaces, "" where it is not known; where: its line. fixes: by the code they are for."""

    file: SavedFile
    name: str
    siblings: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    chosen: bool = True
    good: str = ""
    entry: str = ""
    own: Mapping[str, SavedTensor] = dataclasses.field(default_factory=dict)
    entries: dict[str, str] = dataclasses.field(default_factory=dict)
    model: Mapping[str, tuple[tuple[int, ...], str]] | None = None
    called: str = "model"
    inf_in_model: frozenset[str] = frozenset()
    tied: tuple[tuple[str, ...], ...] = ()
    rename: Rename | None = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    groups: tuple[list[Group], list[Group]] = ([], [])
    hollow: bool = False
    configs: tuple[tuple[str, Any, Any], ...] = ()
    cuda: bool = False
    loads: str = ""
    where: Where = dataclasses.field(default_factory=Where)
    fixes: Mapping[str, tuple[Fix, ...]] = dataclasses.field(default_factory=dict)

    @property
    def numbered(self) -> dict[str, int]:
        """Those of the siblings whose step is known."""
        return {name: step for name, step in self.siblings.items() if step is not None}

    @property
    def doubled(self) -> dict[str, str]:
        """Names that the file lacks, each with the one that the model ties to it and the file has."""
        pairs = [(name, next((n for n in group if n in self.own), "")) for group in self.tied for name in group]
        return {name: other for name, other in pairs if other and name in self.missing}

    @property
    def on_cards(self) -> dict[str, str]:
        """Name → device of the weights that were saved on a card, where this machine has none."""
        return {n: t.location for n, t in self.own.items() if t.location.startswith("cuda") and not self.cuda}
