"""What was read of a checkpoint, and of the objects that it is to be loaded into: plain values, no tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug.report import Fix, Where

STEP = re.compile(
    r"(?:^|_)(?:step|steps|epoch|iter|iteration|iter_num|it|global_step|update|updates|batch)$", re.IGNORECASE
)
"""Names under which a run keeps how far it has come."""
SCHEDULER = ("last_epoch", "_step_count")
"""Counters of torch's schedulers."""
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Floating types and their bytes: a smaller one keeps fewer digits."""


@dataclasses.dataclass
class SavedTensor:
    """A tensor of a file: its name's place is that in the tree. storage: what holds its bytes; offset: in elements.

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


class SavedObject:
    """Something that a file would create by calling `name`: it was not created. `state` is what it would be given."""

    def __init__(self, name: str, args: Any = (), state: Any = None) -> None:
        self.name, self.args, self.state = name, args, state


@dataclasses.dataclass(frozen=True)
class SavedGlobal:
    """A function or class that a pickle names. path: the dotted place of the first object made by it. allowed: by
    `weights_only=True`. missing: "module" or "name" where it can't be imported; near: modules that have its name."""

    name: str
    path: str = ""
    allowed: bool = True
    missing: str = ""
    near: tuple[str, ...] = ()


@dataclasses.dataclass
class SavedFile:
    """A file as it was read. format: zip, legacy, pickle, safetensors, index or "". fault: why it does not open or is
    not whole, "" where it is; begins: what it is instead of weights ("lfs", "html", "text")."""

    path: str
    bytes: int = 0
    format: str = ""
    fault: str = ""
    begins: str = ""
    tree: Any = None
    globals: tuple[SavedGlobal, ...] = ()
    lost: tuple[str, ...] = ()
    """Files that an index or a pointer names and that are not there."""
    within: str = ""
    """The entry of the tree that is this file's own, where the others are of the files beside it."""

    def walk(self) -> Iterator[tuple[str, Any]]:
        """(dotted path, value) of all entries, those above first."""
        yield from walk(self.tree)

    @property
    def step(self) -> int | None:
        """How far the run had come when this was saved: the largest number under such a name near the top."""
        return max((number for _, number in self.steps()), default=None)

    def spoiled(self) -> bool:
        """Whether a tensor holds values that are not finite."""
        tensors = (value for _, value in self.walk() if isinstance(value, SavedTensor))
        return any(tensor.nan or tensor.inf and not tensor.mask for tensor in tensors)

    def steps(self) -> Iterator[tuple[str, int]]:
        """(path, number) of the counters near the top. A scheduler's own are none of them: it is not always there."""
        for path, value in self.walk():
            last = path.rpartition(".")[2]
            if type(value) is int and path.count(".") < 2 and STEP.search(last) and last not in SCHEDULER:
                yield path, value


def walk(tree: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in nested dicts, lists, tuples and objects."""
    if path:
        yield path, tree
    if depth > 40:
        return
    if isinstance(tree, SavedObject):
        tree = {"": tree.state} if not isinstance(tree.state, Mapping) else tree.state
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
class Sibling:
    """Another checkpoint of the same run in the folder."""

    name: str
    step: int | None


@dataclasses.dataclass
class CheckpointFacts:
    """A file beside what it is loaded into. model: name → (shape, dtype), None where no model was given; tied: names of
    the model that share one tensor. own: tensors of the file that are its weights, by name; entry: where they lie (""
    at the top). chosen: whether the user named the file, and not its folder."""

    file: SavedFile
    name: str
    siblings: tuple[Sibling, ...] = ()
    chosen: bool = True
    good: Sibling | None = None
    """The newest of the others that is whole and finite; looked for where this one is not."""
    entry: str = ""
    own: Mapping[str, SavedTensor] = dataclasses.field(default_factory=dict)
    model: Mapping[str, tuple[tuple[int, ...], str]] | None = None
    inf_in_model: frozenset[str] = frozenset()
    tied: tuple[tuple[str, ...], ...] = ()
    rename: Rename | None = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    """Which of optimizer, scheduler, scaler and ema the user gave, or sampler."""
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Role → path of the entry that has it: optimizer, scheduler, scaler, ema, rng, sampler, step."""
    groups: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Sizes of the optimizer's parameter groups: the file's, the user's."""
    moments: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    """(name of the parameter, shape of its saved state, its own shape) where they differ."""
    settings: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Settings of a group that only the file's optimizer has, and only the user's."""
    rates: tuple[tuple[tuple[float, float], ...], ...] = ()
    """(learning rate, weight decay) of each group: the file's, the user's, where they are the same in another order."""
    configs: tuple[tuple[str, Any, Any], ...] = ()
    """(name, the file's value, the model's) of settings that differ."""
    cuda: bool = False
    called: str = "model"
    """The user's name of the model."""
    loads: str = ""
    """The text of the user's loading, "" where it is not known."""
    where: Where = dataclasses.field(default_factory=Where)
    fixes: Mapping[str, tuple[Fix, ...]] = dataclasses.field(default_factory=dict)
    """Fixes that were tried, by the code that they are for."""

    @property
    def doubled(self) -> dict[str, str]:
        """Names that the file lacks, each with the one that the model ties to it and the file has."""
        pairs = [(name, next((n for n in group if n in self.own), "")) for group in self.tied for name in group]
        return {name: other for name, other in pairs if other and name in self.missing}

    @property
    def is_loose(self) -> bool:
        """Whether the user's loading passes over names that do not fit."""
        return "strict=False" in self.loads.replace(" ", "")
