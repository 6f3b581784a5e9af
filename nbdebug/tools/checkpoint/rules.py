"""What was read of a checkpoint, and of the objects that it is to be loaded into, as plain values, no tensors; and the
rules, from there to the causes for which it does not load, or loads into something else."""

from __future__ import annotations

import dataclasses
import linecache
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nbdebug.observe.state_keys import Rename
from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.text import count, listed, size

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
    """Something that a file would create by calling `name`: it was not created. It takes a state and items as the real
    one would."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state = {**(self.state if isinstance(self.state, dict) else {}), str(key): value}

    def append(self, value: Any) -> None:
        self.state = [*(self.state if isinstance(self.state, list) else []), value]


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


LOADING = "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html"
ADAPTERS = ("lora_", "adapter", "prompt_encoder", "prefix_encoder", "ia3_", "hada_")  # layers of fine-tuning
DANGEROUS = tuple(f"{m}." for m in "os posix nt subprocess sys builtins runpy socket shutil importlib".split())
"""Modules whose functions can do anything; no checkpoint needs them."""


def finding(
    facts: CheckpointFacts, code: str, title: str, fixes: Fix | list[Fix], keys: Iterable[str] = (), **evidence: Any
) -> Finding:
    """keys: the file's own names at fault. `_` in names of evidence is a space. Fixes that were tried come first."""
    whole = code if "/" in code else f"checkpoint/{code}"
    held: dict[str, Any] = {"keys": list(keys)} if keys else {}
    held |= {key.replace("_", " "): value for key, value in evidence.items() if value not in (None, "", (), [], 0)}
    own = (fixes,) if isinstance(fixes, Fix) else tuple(fixes)
    return Finding(whole, title, facts.where, held, tuple(facts.fixes.get(whole, ())) or own)


@rule(
    code="checkpoint/truncated-file",
    title="A checkpoint ends early, or is empty.",
    symptom="PytorchStreamReader failed reading zip archive: failed finding central directory; EOFError: Ran out of "
    "input; unexpected EOF; pickle data was truncated; SafetensorError: header too small; OSError: Invalid argument.",
    cause="A kill or a full disk while it was written; a download that stopped; two processes that wrote to one path.",
    confirm="`os.path.getsize(path)` beside that of another checkpoint; `zipfile.is_zipfile(path)` is False.",
    fix="Load the one before it. Write to another name, then rename: `torch.save(state, tmp); os.replace(tmp, path)`.",
    reference="https://docs.python.org/3/library/os.html#os.replace",
)
@rule(
    code="checkpoint/not-weights",
    title="A file with the name of a checkpoint holds something else.",
    symptom="UnpicklingError: invalid load key, 'v', '<' or '{'; Weights only load failed; header too large.",
    cause="A clone without Git LFS; a download of a page (a login, an error) or an archive; the path of the settings.",
    confirm="`open(path, 'rb').read(64)`: `version https://git-lfs` is a pointer, `<!DOCTYPE` a page.",
    fix="`git lfs pull` in the repository, or download the file itself.",
    reference="https://git-lfs.com",
)
def broken(facts: CheckpointFacts) -> Finding | None:
    """The file is not whole, or holds something else."""
    file, name = facts.file, facts.name
    if file.begins:
        title = f"{name} ({size(file.bytes)}) is {file.begins}, not weights"
        code = "!git lfs install && git lfs pull" if "LFS" in file.begins else f"# download {name} again"
        fix = Fix("Fetch the file itself.", code)
        if "TorchScript" in file.begins:
            fix = Fix("Take the weights out of it.", f"state = torch.jit.load({name!r}).state_dict()")
        return finding(facts, "not-weights", title, fix, path=name)
    if not file.fault:
        return None
    title = f"{name} is not whole: {file.fault}" + (f"; {facts.good} is whole" if facts.good else "")
    write = Fix("From now on write files whole or not at all.", "ckpt = nbdebug.Checkpoints('checkpoints', keep=3)")
    return finding(facts, "truncated-file", title, [*_instead(facts.good), write], path=name, size=size(file.bytes))


def _instead(good: str) -> list[Fix]:
    """Another checkpoint, which was read from end to end."""
    title = f"Load {good}, the newest that is whole, with weights that are finite."
    return [Fix(title, f"path = {good!r}", True, {"checked": f"{good}: 0 checksums differ, 0 NaN"})] if good else []


@rule(
    code="checkpoint/rotated-away",
    title="A pointer names a checkpoint that was deleted.",
    symptom="FileNotFoundError while resuming, from a file that lists the newest or best checkpoint.",
    cause="The rotation deleted the file, and what points to it (`latest`, an index, a link) was not written anew.",
    confirm="Read the pointer, and list the folder.",
    fix="Point to the newest file that is there, and delete only after the pointer is written.",
    reference=LOADING,
)
def rotated_away(facts: CheckpointFacts) -> Finding | None:
    if not facts.file.lost:
        return None
    lost = facts.file.lost
    gone, them = ("is not there any more", "it") if len(lost) == 1 else ("are not there any more", "them")
    title = f"{facts.name} {gone}" if lost == (facts.name,) else f"{listed(lost)} {gone}, and {facts.name} names {them}"
    fixes = _instead(facts.good) or Fix("Fetch these files, or load another.", "path = ...  # another checkpoint")
    return finding(facts, "rotated-away", title, fixes, path=facts.name, names=list(lost))


@rule(
    code="checkpoint/class-moved",
    title="A whole object was pickled, and its class is no longer where it was.",
    symptom="ModuleNotFoundError: No module named '…' or AttributeError: Can't get attribute '…' inside torch.load.",
    cause="`torch.save(model)` writes the module and name of the class, not its code. That was moved since.",
    confirm="The names that the report lists; `pickletools.dis` shows them too.",
    fix="Give the old name to the new module while loading: `sys.modules['old'] = new`; save `model.state_dict()`.",
    reference="https://docs.pytorch.org/docs/stable/notes/serialization.html",
)
def class_moved(facts: CheckpointFacts) -> Finding | None:
    moved = [one for one in facts.file.globals if one.missing]
    if not moved:
        return None
    one = min(moved, key=lambda each: (bool(each.path), not each.near))
    module, _, name = one.name.rpartition(".")
    what = f"there is no module `{module}`" if one.missing == "module" else f"`{module}` has no `{name}`"
    near, new = f"; `{one.near}` has a class `{name}` now" if one.near else "", one.near or "new_module"
    code = f"import sys\nimport {new}\n\nsys.modules[{module!r}] = {new}\n"
    code += f"model = torch.load({facts.name!r}, weights_only=False)\ntorch.save(model.state_dict(), 'weights.pt')"
    fix = Fix("Give the old name to the module that has the class now, load once, and save the state dict.", code)
    title = f"{facts.name} holds an object of `{one.name}`, and {what}{near}"
    keys, names = [each.path for each in moved if each.path], [each.name for each in moved]
    return finding(facts, "class-moved", title, fix, keys, names=names)


@rule(
    code="checkpoint/unsafe-pickle",
    title="The file holds objects that torch.load refuses, or that could run code.",
    symptom="UnpicklingError: Weights only load failed. … Unsupported global: GLOBAL argparse.Namespace …",
    cause="Since torch 2.6 `torch.load` takes tensors and plain values alone: a pickle can call any function.",
    confirm="`torch.serialization.get_unsafe_globals_in_checkpoint(path)` lists the names without loading.",
    fix="Save plain values (`vars(args)`). For a file of your own allow these classes by name: "
    "`torch.serialization.safe_globals([...])`. Never load a file of a stranger with `weights_only=False`.",
    reference="https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only",
)
def unsafe_pickle(facts: CheckpointFacts) -> Finding | None:
    refused = [one for one in facts.file.globals if not one.allowed and not one.missing]
    hostile = [one for one in refused if one.name.startswith(DANGEROUS)]
    if not refused or (not hostile and "weights_only=False" in facts.loads):
        return None
    paths = sorted({one.path for one in refused if one.path}, key=lambda path: path.count("."))
    keys = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]  # the outermost
    names, file = [each.name for each in hostile or refused], repr(facts.name)
    if hostile:
        title = f"{facts.name} would call {listed(names)} when it is loaded: weights never need that"
        what = "Do not load it. Get the weights as safetensors, or from their author again."
        fix = Fix(what, f"# not: torch.load({file}, weights_only=False)")
    else:
        at = f" at {listed(keys)}" if keys else ""
        title = f"{facts.name} holds {listed(names)}{at}, which torch.load refuses"
        code = "".join(f"import {module}\n" for module in sorted({name.rpartition(".")[0] for name in names}))
        code += f"\nwith torch.serialization.safe_globals([{', '.join(names)}]):\n    state = torch.load({file})"
        fix = Fix("If the file is your own: allow these names for this one file.", code)
    return finding(facts, "unsafe-pickle", title, fix, keys, names=names)


@rule(
    code="checkpoint/lexicographic-latest",
    title="The newest checkpoint was chosen by its name: 999 sorts behind 1000.",
    symptom="A resumed run repeats a stretch and overwrites its own files, since steps have one more digit.",
    cause="`sorted(paths)[-1]` compares text: 'step_999' is larger than 'step_1000', and 'epoch9' than 'epoch10'.",
    confirm="`sorted(paths)[-1]` beside the largest number in the names.",
    fix="Sort by the number, or write steps with leading zeros (`f'step_{step:07d}'`).",
    reference="https://docs.python.org/3/howto/sorting.html#key-functions",
)
def lexicographic_latest(facts: CheckpointFacts) -> Finding | None:
    numbered, mine = facts.numbered, facts.name
    newest = next(reversed(numbered), "")
    if not facts.chosen or mine != max(numbered, default="") or numbered[newest] == numbered[mine]:
        return None
    title = f"{mine} is the last by name; {newest} is the newest: step {numbered[newest]} after step {numbered[mine]}"
    by_number = "path = max(folder.iterdir(), key=lambda p: int(re.findall(r'\\d+', p.stem)[-1]))"
    fix = Fix("Take the largest number.", by_number)
    return finding(facts, "lexicographic-latest", title, fix, path=newest, taken=mine, newest=newest)


@rule(
    code="checkpoint/device-mapping",
    title="The tensors were saved on a device that this machine lacks.",
    symptom="RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
    cause="`torch.load` puts each tensor back on the device that it was saved from.",
    confirm="The devices that the report lists; they are read without loading.",
    fix="`torch.load(path, map_location='cpu')`, then `model.to(device)`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.load.html",
)
def device_mapping(facts: CheckpointFacts) -> Finding | None:
    lacking = facts.on_cards
    if not lacking or "map_location" in facts.loads:
        return None
    devices = sorted(set(lacking.values()))
    number = f"{count(len(lacking), 'tensor')} of {facts.name} {'lies' if len(lacking) == 1 else 'lie'}"
    title = f"{number} on {listed(devices)}, and this machine has no CUDA"
    fix = Fix("Map the tensors while loading.", f"state = torch.load({facts.name!r}, map_location='cpu')")
    return finding(facts, "device-mapping", title, fix, list(lacking), devices=devices)


@rule(
    code="checkpoint/prefix-module",
    title="The names begin with `module.`: they were saved from a DataParallel model, or are loaded into one.",
    symptom='Missing key(s) in state_dict: "conv.weight" … Unexpected key(s): "module.conv.weight".',
    cause="DataParallel and DistributedDataParallel hold the model as their child `module`: it stands in every name.",
    confirm="`next(iter(state))` beside `next(iter(model.state_dict()))`.",
    fix="Save `model.module.state_dict()`; for a file that is there, remove the prefix while loading.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
)
@rule(
    code="checkpoint/prefix-compiled",
    title="The names contain `_orig_mod.`: they were saved from a compiled model, or are loaded into one.",
    symptom='Missing key(s) in state_dict … Unexpected key(s): "_orig_mod.…".',
    cause="`torch.compile(model)` gives a wrapper that holds the model as `_orig_mod`.",
    confirm="`next(iter(state))` beside `next(iter(model.state_dict()))`.",
    fix="Save the model itself (or use `model.compile()`, which wraps nothing); remove the part while loading.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
)
@rule(
    code="checkpoint/prefix-wrapper",
    title="The names carry, or lack, the part of a wrapper.",
    symptom="Missing and unexpected keys that differ in their beginning; with strict=False, a model without weights.",
    cause="They were saved from within another module (a trainer, an adapter, a net with a head), or are loaded so.",
    confirm="`sorted(state)[:3]` beside `sorted(model.state_dict())[:3]`.",
    fix="Load into the module that the weights were saved from, or rename the keys while loading.",
    reference=LOADING,
)
def renamed(facts: CheckpointFacts) -> Finding | None:
    """One change of names makes them the model's. The page of renamed modules is in the chapter of errors."""
    change = facts.rename
    if change is None:
        return None
    old, new = change.pairs[0]
    what = f"{count(len(change.pairs), 'weight')} of {facts.name} with other names than the model's: {change.what}"
    title = f"{what} (`{old}` for `{new}`); strict=False would not load them, and say nothing"
    keys, matched = [old for old, _ in change.pairs], f"{len(change.pairs)} of {len(facts.own)}"
    return finding(facts, change.code, title, [], keys, matched=matched)


@rule(
    code="checkpoint/tied-weights-missing",
    title="A shared weight was saved under one of its names, and the model wants both.",
    symptom='Missing key(s) in state_dict: "lm_head.weight" from the very program that wrote the file.',
    cause="Two names of a model are one tensor (tied weights). The writer left out the second; the loader expects it.",
    confirm="`model.lm_head.weight is model.embed_tokens.weight`.",
    fix="`state['lm_head.weight'] = state['embed_tokens.weight']`; or `safetensors.torch.load_model`.",
    reference="https://huggingface.co/docs/safetensors/torch_shared_tensors",
)
def tied_weights_missing(facts: CheckpointFacts) -> Finding | None:
    pairs = facts.doubled
    if not pairs or len(pairs) < len(facts.missing) or "strict=False" in facts.loads:
        return None
    title = f"{facts.name} lacks {listed(pairs)}: the model ties it to `{next(iter(pairs.values()))}`, which is there"
    return finding(facts, "tied-weights-missing", title, [], tied=[f"{a} = {b}" for a, b in pairs.items()])


@rule(
    code="checkpoint/shape-changed",
    title="A layer has another size than the saved one.",
    symptom="size mismatch for head.weight: copying a param with shape [80, 6], the shape in current model is [14, 6].",
    cause="The model was built with other sizes: classes, vocabulary, width. strict=False does not help with sizes.",
    confirm="`state[name].shape` beside `model.state_dict()[name].shape`.",
    fix="Build the model with the sizes of the file; or leave these weights out and train the layers from their start.",
    reference=LOADING,
)
def shape_changed(facts: CheckpointFacts) -> Finding | None:
    wanted = facts.model or {}
    rows = {name: (list(facts.own[name].shape), list(wanted[name][0])) for name in facts.reshaped}
    if not rows:
        return None
    name, (there, here) = next(iter(rows.items()))
    what = f"{listed(facts.reshaped)} {'has' if len(rows) == 1 else 'have'} another size"
    title = f"{what}: `{name}` is {there} in {facts.name}, {here} in the model"
    shapes = {n: f"{a} saved, {b} wanted" for n, (a, b) in list(rows.items())[:6]}
    return finding(facts, "shape-changed", title, [], rows, shapes=shapes)


def mismatch(facts: CheckpointFacts) -> Finding | None:
    """Names that no single change explains. Its page is in the chapter of errors."""
    if facts.model is None or facts.rename is not None or not facts.own:
        return None
    part = all(any(mark in name for mark in ADAPTERS) for name in facts.own) and not facts.unexpected
    loose = "strict=False" in facts.loads
    missing = [n for n in facts.missing if not n.endswith("num_batches_tracked") and n not in facts.doubled]
    fits = not missing and (loose or not facts.unexpected)
    if part or fits or loose and len(facts.unexpected) < len(facts.own):
        return None
    random = f"{count(len(missing), 'weight')} would stay random ({listed(missing) or 'none'})"
    unknown = f"{count(len(facts.unexpected), 'name')} unknown ({listed(facts.unexpected) or 'none'})"
    title = f"{facts.name} does not fit the model: {random}, {unknown}"
    fix = Fix("See what is loaded and what is not.", f"print({facts.called}.load_state_dict(state, strict=False))")
    return finding(facts, "error/state-dict-mismatch", title, fix, facts.unexpected, missing=missing[:20])


@rule(
    code="checkpoint/dtype-changed",
    title="The weights were saved with fewer digits than the model has, and are cast without a word.",
    symptom="A file half as large as it was; a continued run leaves the curve of one that never stopped.",
    cause="It was taken from a half-precision copy, or cast. `load_state_dict` casts back, and the digits are gone.",
    confirm="`{v.dtype for v in state.values()}` beside `{p.dtype for p in model.parameters()}`.",
    fix="Save the weights in the type in which they are trained; keep a smaller file for inference beside it.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict",
)
def dtype_changed(facts: CheckpointFacts) -> Finding | None:
    if facts.model is None or not ({"optimizer", "step"} & set(facts.entries) or facts.wanted):
        return None  # weights alone in half precision are for inference, and usual
    both = {name: (tensor.dtype, facts.model[name][1]) for name, tensor in facts.own.items() if name in facts.model}
    cast = [name for name, (saved, own) in both.items() if DTYPES.get(saved, 9) < DTYPES.get(own, 0)]
    if not cast:
        return None
    small, large = both[cast[0]]
    number = f"{count(len(cast), 'weight')} of {facts.name} {'is' if len(cast) == 1 else 'are'}"
    title = f"{number} {small}; the model is {large}, and training goes on from rounded weights"
    entry = f"[{facts.entry!r}]" if facts.entry else ""
    fix = Fix(f"Save them as {large}.", f"state{entry} = model.state_dict()  # no .half() before torch.save")
    return finding(facts, "dtype-changed", title, fix, cast, saved=small, model=large)


@rule(
    code="checkpoint/nonfinite-weights",
    title="A saved weight is NaN or infinite.",
    symptom="The file loads without a word, and all outputs are NaN, black or empty.",
    cause="The run had diverged before it saved, a cast to half overflowed, or a conversion went wrong.",
    confirm="`[n for n, v in state.items() if not v.isfinite().all()]`.",
    fix="Go back to an earlier file. Check the weights before each save.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.isfinite.html",
)
def nonfinite_weights(facts: CheckpointFacts) -> Finding | None:
    bad = {n: t for n, t in facts.own.items() if t.spoiled and (t.nan or n not in facts.inf_in_model)}
    others = tuple(f"{facts.entries[role]}.".lstrip(".") for role in ("optimizer", "ema") if role in facts.entries)
    bad |= {path: t for path, t in facts.file.tensors() if others and path.startswith(others) and t.spoiled}
    if not bad:
        return None
    name, first = next(iter(bad.items()))
    held = " and ".join(f"{n} {word}" for n, word in ((first.nan, "NaN"), (first.inf, "infinite")) if n)
    more = f", and {count(len(bad) - 1, 'other tensor')}" if len(bad) > 1 else ""
    title = f"`{name}` of {facts.name} holds {held} of {count(math.prod(first.shape), 'value')}{more}"
    fixes = _instead(facts.good) or Fix("Load another, after a look at it.", "nbdebug.check_checkpoint('another.pt')")
    return finding(facts, "nonfinite-weights", title, fixes, list(bad), nan=first.nan, infinite=first.inf)


@rule(
    code="checkpoint/optimizer-mismatch",
    title="The saved optimizer has other parameters, or is of another kind.",
    symptom="ValueError: … parameter group that doesn't match the size …; or no error, and moments of another weight.",
    cause="Its state is numbered, not named. Layers were frozen, groups were made otherwise, or it is another class.",
    confirm="`[len(g['params']) for g in state['optimizer']['param_groups']]` beside `optimizer.param_groups`.",
    fix="Build the same groups in the same order, load, then `add_param_group` for what is new.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.load_state_dict.html",
)
def optimizer_mismatch(facts: CheckpointFacts) -> Finding | None:
    saved, own = facts.groups
    if not saved or not own:
        return None
    sizes = [listed([len(group.parameters) for group in groups], quote="") for groups in facts.groups]
    rates = [[group.rates for group in groups] for groups in facts.groups]
    kinds = [saved[0].settings - own[0].settings, own[0].settings - saved[0].settings]
    pairs = [pair for a, b in zip(saved, own) for pair in zip(a.parameters, b.parameters)]
    moved = [(name, there, here) for (_, there), (name, here) in pairs if there is not None and there != here]
    if sizes[0] != sizes[1]:
        title = f"The groups of the saved optimizer have other sizes: {sizes[0]} in {facts.name}, {sizes[1]} in yours"
    elif moved:
        name, there, here = moved[0]
        what = f"the state for `{name}` is {list(there)}, the parameter {list(here or ())}"
        title = f"The saved optimizer's parameters are in another order: {what}"
    elif rates[0] != rates[1] and sorted(rates[0]) == sorted(rates[1]):
        a, b = (listed([" ".join(f"{n:g}" for n in pair) for pair in one], quote="") for one in rates)
        what = f"learning rates and weight decays {a} in {facts.name}, {b} in yours"
        title = f"The groups of the saved optimizer are in another order: {what}; each gets the moments of another"
    elif all(kinds):
        what = f"its groups have {listed(sorted(kinds[0]))}, yours {listed(sorted(kinds[1]))}"
        title = f"The saved optimizer is of another kind: {what}"
    else:
        return None
    code = "old = torch.optim.AdamW(parameters_of_the_file)  # the same groups, in the same order\n"
    code += "old.load_state_dict(state)\nold.add_param_group({'params': new_parameters})"
    fix = Fix("Build it as it was saved, load, then add the new parameters.", code)
    keys, groups = [facts.entries["optimizer"]], f"{sizes[0]} in {facts.name}, {sizes[1]} in yours"
    return finding(facts, "optimizer-mismatch", title, fix, filter(None, keys), groups=groups)


def other_order(facts: CheckpointFacts, why: str, name: str, names: list[str], here: list[str]) -> Finding:
    """Proven by both runs. names, here: of the optimizer's parameters, in the order of the saved one and of this."""
    place = next(i for i, own in enumerate(here) if own != names[i])
    what = f"number {place} is `{here[place]}` in the resumed run, `{names[place]}` in the run that saved"
    title = f"The parameters of `{name}` are in another order: {what}, and each gets the moments of another. {why}"
    order = f"{name} = ...  # its groups and parameters in this order: {listed(names, 12, '')}"
    fix = Fix("Give them to the optimizer in the order of the run that saved.", order)
    own = facts.entries.get("optimizer", name)
    return finding(facts, "optimizer-mismatch", title, fix, [own], saved=names, here=here)


PARTS = {
    "optimizer": ("optimizer-missing", "the optimizer's state", "momentum and averages would begin at zero"),
    "scheduler": ("scheduler-missing", "the scheduler's state", "the learning rate would begin anew"),
    "scaler": ("scaler-missing", "the GradScaler's state", "its scale would begin anew, and steps would be skipped"),
    "ema": ("ema-missing", "the averaged weights", "the average would begin anew"),
    "sampler": ("sampler-not-resumed", "the position in the data", "the data would begin anew"),
    "step": ("step-missing", "the step", ""),
    "rng": ("rng-not-restored", "the random state", ""),
    "gradients": ("accumulation-not-resumed", "the gradients that are accumulated so far", ""),
    "model": ("error/state-dict-mismatch", "all weights and buffers", ""),
    "value": ("value-missing", "a value that the run goes on from", ""),
    "attribute": ("buffer-not-registered", "a tensor that its model keeps outside of the state dict", ""),
}
"""What a run has besides its weights: the code where it is missing, its words, and what that does."""
LINES = {
    "object": ("{thing}.state_dict()", "{thing}.load_state_dict({saved})"),
    "value": ("{thing}", "{thing} = {saved}"),
    "generator": ("{thing}.get_state()", "{thing}.set_state({saved})"),
    "Python generator": ("{thing}.getstate()", "{thing}.setstate({saved})"),
    "numpy generator": ("{thing}.bit_generator.state", "{thing}.bit_generator.state = {saved}"),
    "step": ("step + 1", "for step in range({saved}, steps):"),
    "gradients": (
        "[p.grad for p in {thing}.parameters()]",
        "for p, grad in zip({thing}.parameters(), {saved}):\n    p.grad = grad",
    ),
    "torch": ("torch.get_rng_state()", "torch.set_rng_state({saved})"),
    "Python": ("random.getstate()", "random.setstate({saved})"),
    "NumPy": ("np.random.get_state(legacy=True)", "np.random.set_state({saved})"),
    "cuda": ("torch.cuda.get_rng_state_all()", "torch.cuda.set_rng_state_all({saved})"),
}
"""How a state is read and set."""
GLOBAL = ("torch", "Python", "NumPy", "cuda")  # of these the global generators


@rule(
    code="checkpoint/optimizer-missing",
    title="The file has no optimizer state.",
    symptom="After each restart the loss jumps and needs hundreds of steps to come back.",
    cause="Momentum and Adam's averages were not saved; they begin at zero again, and Adam's first steps are large.",
    confirm="`'optimizer' in torch.load(path)`.",
    fix="Save and load `optimizer.state_dict()`.",
    reference=LOADING,
)
@rule(
    code="checkpoint/scheduler-missing",
    title="The file has no state of the scheduler.",
    symptom="After a restart the learning rate begins its warm-up or decay anew.",
    cause="The scheduler counts its own steps; a new one counts from zero.",
    confirm="`scheduler.last_epoch` after loading.",
    fix="Save and load `scheduler.state_dict()`.",
    reference="https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate",
)
@rule(
    code="checkpoint/scaler-missing",
    title="The file has no state of the GradScaler.",
    symptom="After a restart several steps are skipped until the scale is small enough again.",
    cause="A new scaler begins at 65,536 and finds its scale again by overflows.",
    confirm="`scaler.get_scale()` after loading.",
    fix="Save and load `scaler.state_dict()`.",
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
)
@rule(
    code="checkpoint/ema-missing",
    title="The file has no averaged weights (EMA).",
    symptom="After a restart validation is far below the run before; the training loss shows nothing.",
    cause="The average was not saved, and begins anew from the present or from random weights.",
    confirm="The entries that the report lists.",
    fix="Save and load the average as the model.",
    reference="https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema",
)
@rule(
    code="checkpoint/step-missing",
    title="The file does not say how far the run had come, or the run does not read it.",
    symptom="Each continuation begins with epoch 0: names of files, schedules and augmentation begin anew.",
    cause="The counter of the loop was not saved, or `range` begins at 0 whatever the file says.",
    confirm="`nbdebug.resume_proof(resumed, uninterrupted, path)`.",
    fix="Save `step + 1`, and begin the loop there.",
    reference=LOADING,
)
@rule(
    code="checkpoint/epoch-off-by-one",
    title="The file counts one epoch (or step) too few or too many.",
    symptom="Each restart adds an epoch to the run, and the learning rate comes one epoch late; or one is left out.",
    cause="`epoch` is saved at its end as it is, and the loop begins with what was saved: that epoch runs again. Where "
    "the loop adds one, too, to an `epoch + 1` in the file, one is left out.",
    confirm="`nbdebug.resume_proof(resumed, uninterrupted, path)`: it loads the file with one more, and compares.",
    fix="Save the epoch that comes next, `epoch + 1`, and begin the loop with it.",
    reference=LOADING,
)
@rule(
    code="checkpoint/rng-not-restored",
    title="The random states were not saved, and the run draws from them.",
    symptom="Weights, optimizer and data agree at the stop, and the losses part at once: dropout or noise is another.",
    cause="A new process begins with its seed; the run that never stopped has drawn many numbers since.",
    confirm="`nbdebug.resume_proof(resumed, uninterrupted, path)`; without dropout and shuffling both agree.",
    fix="Save and set `torch.get_rng_state()`, that of each card, `random.getstate()`, numpy's and each Generator's.",
    reference="https://docs.pytorch.org/docs/stable/notes/randomness.html",
)
@rule(
    code="checkpoint/accumulation-not-resumed",
    title="The run was saved within a window of accumulated gradients.",
    symptom="The first update after a restart is smaller than it should be; all that was saved agrees.",
    cause="Accumulated gradients are in no state dict: those before the stop are lost.",
    confirm="`nbdebug.resume_proof(build, step, at=…)` with a stop within a window, and one at its end.",
    fix="Save right after `optimizer.step()` and `zero_grad()`; or save the gradients and the place in the window.",
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation",
)
@rule(
    code="checkpoint/sampler-not-resumed",
    title="The position in the data was not saved.",
    symptom="After a restart within an epoch some rows come twice and others never; the counter of steps is right.",
    cause="A new sampler or loader begins its order at the first row.",
    confirm="`nbdebug.resume_proof(resumed, uninterrupted, path)` with the rows as values.",
    fix="Save the order and the position: a sampler with `state_dict`, or torchdata's StatefulDataLoader.",
    reference="https://meta-pytorch.org/data/main/stateful_dataloader_tutorial.html",
)
@rule(
    code="checkpoint/value-missing",
    title="A value that the run goes on from was not saved.",
    symptom="Weights, optimizer and data agree, and the losses part: a temperature, a patience begins anew. A "
    "model that is loaded guesses.",
    cause="A number or list of the loop's own is in no state dict: it is only saved where someone thinks of it. So is "
    "a vocabulary or a mean that is made from the data: where the model is used, these are others.",
    confirm="`nbdebug.resume_proof(build, step)` puts each value back alone, and names the one with which both agree.",
    fix="Write it into the file beside the step, and set it after the loading.",
    reference=LOADING,
)
@rule(
    code="checkpoint/buffer-not-registered",
    title="A tensor that the model computes with is in no state dict.",
    symptom="All keys match, and what the loaded model gives is noise; in the run that saved it was good.",
    cause="A codebook, a running mean or a drawn matrix that is a plain attribute (or a buffer with persistent=False) "
    "is left out by `state_dict()`: the loaded model has a fresh one.",
    confirm="`name in model.state_dict()`.",
    fix="`self.register_buffer(name, tensor)`; it is then saved, loaded and moved with the model.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer",
)
def missing_part(
    facts: CheckpointFacts, role: str = "optimizer", why: str = "", name: str = "", form: str = "", tried: int = 0
) -> Finding:
    """What a file lacks, or the loading leaves in it, and the lines that save it and put it back. role: of PARTS; name:
    the variable, or the global generators; form: of LINES, where the role does not tell it; tried: how many values of
    both runs agree so."""
    code, words, loss = PARTS[role]
    words = f"`{name}`, {words}" if role in ("value", "attribute") and name else words
    last = name.rpartition(".")[2]
    there = role in facts.entries or role == "value" and name and last in dict(walk(facts.file.tree))
    fails = f"holds {words}, and the run does not go on from it" if there else f"does not hold {words}"
    forms = [form or (role if role in LINES else "object")]
    if role == "rng" and not form:
        forms = [each for each in GLOBAL if each in (name or "torch, Python, NumPy")]
    lines, title = "", f"Save it, and put it back: {words}."
    if role == "gradients":
        lines = "# or save after optimizer.step(), not within a window\n"
    if role == "attribute":  # its values were put back, not these lines
        title, forms, tried = "Register it, so that it is saved and loaded.", [], 0
        lines = f"self.register_buffer({last!r}, {last})  # where its module sets self.{last}"
    for each in forms:
        thing = name or role
        key = f"{each}_rng" if each in GLOBAL else role if role == "gradients" else thing.rpartition(".")[2]
        read, write = (text.format(thing=thing, saved=f"state[{key!r}]") for text in LINES[each])
        lines += f"state[{key!r}] = {read}  # when saving\n{write}\n"
    after = {"tried": f"0 of {tried} values of both runs differ"} if tried else {}
    fix = Fix(title, lines.rstrip(), bool(tried) or None, after)
    evidence: dict[str, Any] = {"where": [name], "put back": name} if name else {}
    title = f"{facts.name} {fails}: {why or loss}"
    return finding(facts, code, title, fix, entries=sorted(facts.entries), **evidence)


def off_by_one(facts: CheckpointFacts, name: str, by: int, why: str, tried: int) -> Finding:
    """A counter in the file that is one behind (by: 1) or ahead (-1) of what comes next."""
    does = "that is over, so the resumed run repeats it" if by > 0 else "one too far, so the resumed run leaves one out"
    title = f"{facts.name} holds the `{name}` {does}: {why}"
    code = f"state[{name!r}] = {name} + 1  # when saving"
    if by < 0:
        code = f"for {name} in range(state[{name!r}], last):  # nothing added to it"
    after = {"experiment": f"with {name} {by:+d} in the file as it is loaded", "values that differ": f"0 of {tried}"}
    fix = Fix("Save what comes next, and begin with it.", code, None, after)  # the number was tried, not this line
    return finding(facts, "epoch-off-by-one", title, fix, where=[name])


def not_copied(facts: CheckpointFacts, file: str, line: int, why: str) -> Finding:
    """A state dict that was to keep the best weights, and followed the training. Its page is in the notebook's chapter.
    file, line: where it was taken."""
    text = linecache.getline(file, line).strip()
    title = f"{facts.name} holds the weights of the end, and not those that `{text}` was to keep: it copies none. {why}"
    code = re.sub(r"([\w.]+(?:\([^()]*\))?\.state_dict\(\))", r"copy.deepcopy(\1)", text)
    fix = Fix("Make a copy there.", f"import copy\n{code}")
    where = Where(file=file, line=line, text=text)
    return dataclasses.replace(finding(facts, "notebook/shared-object", title, fix, taken=text), where=where)


def left_in_mode(facts: CheckpointFacts, modules: str, mode: str, why: str, tried: int) -> Finding:
    """A model that was loaded, and predicts in the other mode. Its page is in the chapter of training. modules: those
    that are in it; mode: "eval" or "train", that of the run that never stopped."""
    code = "training/train-mode-in-eval" if mode == "eval" else "training/eval-mode-in-training"
    now = "train" if mode == "eval" else "eval"
    title = f"The model that {facts.name} was loaded into is in {now} mode ({modules}), which no file changes: {why}"
    after = {"tried": f"0 of {tried} values of both runs differ"}
    fix = Fix("Switch it after the loading.", f"model.load_state_dict(...)\nmodel.{mode}()", True, after)
    return finding(facts, code, title, fix, where=["model", mode])


ORDER = (
    class_moved, unsafe_pickle, lexicographic_latest, device_mapping, renamed, tied_weights_missing, shape_changed,
    mismatch, dtype_changed, nonfinite_weights, optimizer_mismatch,
)  # fmt: skip
"""What keeps a file from being opened comes before what is wrong in it."""


def name_all(facts: CheckpointFacts) -> Iterator[Finding]:
    """All causes, the first first. Of a file that does not open nothing more is asked."""
    broken_file = rotated_away(facts) or broken(facts)
    if broken_file is not None:
        yield broken_file
        return
    yield from filter(None, (check(facts) for check in ORDER))
    for role in PARTS if facts.file.tree is not None else ():
        loads = rf"{role[:3]}[\w.\[\]'\"]*\.load_state_dict|\[['\"]\w*{role[:3]}"
        asked = not facts.loads or re.search(loads, facts.loads.lower())  # it may be for weights alone
        if asked and role in facts.wanted and role not in facts.entries:
            yield missing_part(facts, role)
