"""Reading batches and the loss on fixed ones, in train or eval mode, without the training noticing; and which classes
the model finds.

A loader draws its order from a generator of its own, its dataset may draw from others, and both may draw from the
global ones. The states of all that can be found are saved, and restored after a probe of ours; so are flags, buffers
and gradients. Whatever fails here is ours: the evaluation is given up, and the reason is kept.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, SequentialSampler

from nbdebug.observe.backward import graph_nodes
from nbdebug.observe.ops import RowsByNumber
from nbdebug.observe.snapshot import modes_put_back, random_sources
from nbdebug.observe.step_hooks import exchanged
from nbdebug.observe.tensors import output_tensors, tensors_in
from nbdebug.observe.variables import attributes, closure_variables
from nbdebug.process import can_fork, in_copy
from nbdebug.text import in_a_line, module_name
from nbdebug.tools.training.facts import TargetOrder

# -- reading batches ---------------------------------------------------------------------------------------------------


DEPTH = 5
"""loader → sampler → dataset → transform, or loss → its lines → their names → a function → its own: no generator that
we know is kept deeper than that."""
OTHERS = (torch.Tensor, nn.Module, str, bytes, type, ModuleType)
"""What holds none, or many things beside."""
MOST_BYTES, ACCELERATOR_BYTES = 256 << 20, 64 << 20
MOST_SECONDS = 20.0
SAVED_AS = ("_saved_self", "_saved_other", "_saved_target")
PACE = 1.15
"""Looks at a run are ever further apart, by this factor."""
SAVED = 2400
"""Batches: four for each step that an experiment has at most."""


def save_rng(*owners: Any) -> Callable[[], None]:
    """Save the state of every generator in reach of loaders (or of a loss function); the result restores them."""
    states: dict[Any, tuple[Callable[[Any], Any], Any]] = {}
    for owner in owners:
        for generator in _generators(owner):
            states[id(generator)] = _state(generator)
    for name, read, write in random_sources():
        states["global", name] = (write, read())

    def restore() -> None:
        for write, state in states.values():
            write(state)

    return restore


def save_torch_rng() -> Callable[[], None]:
    states = [(write, read()) for name, read, write in random_sources() if not name.startswith(("Python", "NumPy"))]

    def restore() -> None:
        for write, state in states:
            write(state)

    return restore


class SavedBatches:
    """batches: the first that were read; draws: for each, what puts torch's random numbers back; full: no more are."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.draws: list[Callable[[], None]] = []
        self._size = 0
        self.full = False
        self._last: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def add(self, batch: Any, draw: Callable[[], None] | None = None, own: bool = False) -> None:
        """Save it, where there is room: 256 MiB on the CPU; on an accelerator 64 MiB, of batches that can't be read
        again (own), else none. draw: puts the random numbers back that came after it, where they are not the present
        ones."""
        tensors, last = tensors_in(batch), self._last
        known = [(t, last[id(t)]) for t in tensors if id(t) in last]
        copies = {id(t): copy for t, (one, version, copy) in known if t is one and t._version == version}
        self._size += sum(t.numel() * t.element_size() for t in tensors if id(t) not in copies)
        room = MOST_BYTES if all(t.device.type == "cpu" for t in tensors) else ACCELERATOR_BYTES * own
        self.full = self.full or len(self.batches) >= SAVED or self._size > room
        if not self.full:
            copies |= {id(t): t.detach().clone() for t in tensors if id(t) not in copies}
            self._last = {id(t): (t, t._version, copies[id(t)]) for t in tensors}
            self.batches.append(tree_map_only(torch.Tensor, lambda t: copies[id(t)], batch))
            self.draws.append(draw or save_torch_rng())

    def at(self, indices: Sequence[int]) -> tuple[list[Any], list[Callable[[], None]]]:
        """The batches with these indices, and their draws; none where one of them was not saved."""
        if not all(0 <= i < len(self.batches) for i in indices):
            return [], []
        return [self.batches[i] for i in indices], [self.draws[i] for i in indices]


@contextlib.contextmanager
def preserve_rng(*owners: Any) -> Iterator[None]:
    """Inside, no random numbers are drawn that the user's loop would have drawn, and no warnings are shown: the loop
    itself will show them, at the user's own line."""
    restore = save_rng(*owners)
    try:
        with no_warnings():
            yield
    finally:
        restore()


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """No warnings inside: they would name lines of ours, once for each call."""
    rule: Any = ("ignore", None, Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, rule)  # by `warnings.simplefilter`, Python would forget which of the user's it has shown already
    try:
        yield
    finally:
        if rule in filters:
            filters.remove(rule)


def _state(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    """(what sets the state, the state)."""
    if isinstance(generator, torch.Generator):
        return generator.set_state, generator.get_state()
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if hasattr(generator, "bit_generator"):
        state = copy.deepcopy(generator.bit_generator.state)
        return lambda state: setattr(generator.bit_generator, "state", state), state
    return generator.set_state, generator.get_state()


def is_generator(value: Any) -> bool:
    """Of random numbers: torch's, Python's or NumPy's."""
    kind = type(value)  # isinstance would ask the object for its class
    of_numpy = module_name(kind).startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")
    return of_numpy or issubclass(kind, (torch.Generator, random.Random))


def _generators(owner: Any) -> Iterator[Any]:
    """Generators among the members of an object, and of those members' own, a few steps deep."""
    todo, visited = [(owner, 0)], set()
    while todo:
        item, depth = todo.pop()
        kind = type(item)  # and no isinstance: a class of the user's may answer that as it likes
        if id(item) in visited or depth > DEPTH or issubclass(kind, OTHERS):
            continue
        visited.add(id(item))
        if is_generator(item):
            yield item
        elif issubclass(kind, (list, tuple, dict)):
            base = dict if issubclass(kind, dict) else list if issubclass(kind, list) else tuple
            members = list(dict.values(item) if base is dict else base.__iter__(item))[:64]
            todo += [(member, depth + 1) for member in members]
        else:
            members = [*attributes(item).values()]
            if kind is FunctionType:
                members += closure_variables(item).values()
                members += [item.__globals__.get(name) for name in item.__code__.co_names]
            todo += [(member, depth + 1) for member in members]


@dataclasses.dataclass
class OpenPass:
    """A pass over a loader that was begun before its watch. read: batches of it so far; previous, batch: the last of
    them; draw: puts the random numbers back that came after it."""

    loader: Any
    read: int = 0
    previous: Any = None
    batch: Any = None
    draw: Callable[[], None] | None = None


class LoaderWatch:
    """Watches `train` and `val` being read. read: batches of `train` so far; passes: how often it was begun; per_pass:
    batches of its last whole pass; stopped_at: batches of the last pass, where it ended early; last, previous: the
    newest batches. save: called with each of these; validated_at: batches of `train` read when `val` was begun, each
    time; None where it can't be watched."""

    def __init__(self, train: Any, val: Any, save: Callable[..., None]):
        self.train, self.val, self.save = train, val, save
        self.read = self.passes = 0
        self.stopped_at: int | None = None
        self.last: Any = None
        self.previous: Any = None
        self.per_pass: int | None = None
        self.validated_at: list[int] | None = None
        self._whole: int | None = None
        self._open: list[Any] = []
        self._patched: list[tuple[type, Callable[[], None]]] = []

    def attach(self) -> None:
        for kind in {type(loader) for loader in (self.train, self.val) if loader is not None}:
            method = getattr(kind, "__iter__", None)
            if method is None or kind.__module__ == "builtins" or hasattr(kind, "__next__"):
                continue
            self._patched.append((kind, exchanged(kind, "__iter__", _watched_iter(method, self))))
            if type(self.val) is kind:
                self.validated_at = []

    def detach(self) -> None:
        while self._patched:
            self._patched.pop()[1]()

    def evaluating(self) -> bool | None:
        """Whether validation batches are being read; None where this is not known."""
        if self.val is None or not any(isinstance(self.val, kind) for kind, _ in self._patched):
            return None
        return any(is_loader(loader, self.val) for loader in self._open)

    def follow(self, loader: Any, batches: Iterator[Any], open_pass: OpenPass | None = None) -> Iterator[Any]:
        """The batches, one by one, with a note of each. open_pass: one that was begun before, and taken over."""
        of_train = is_loader(loader, self.train)
        count = 0 if open_pass is None else open_pass.read
        if open_pass is None:
            self._begin(loader, of_train)
        try:
            for batch in batches:
                if of_train and self.train is not None:
                    count += 1
                    self._note(batch, count)
                yield batch
            if of_train:
                self.per_pass, self.stopped_at = count, None
        finally:
            self._open.remove(loader)

    def take(self, batch: Any, draw: Callable[[], None] | None, own: bool = True) -> None:
        """Another batch. own: it came from no loader."""
        self.read += 1
        self.previous, self.last = self.last, batch
        self.save(batch, draw, own)

    def take_over(self, open_pass: OpenPass) -> None:
        """A pass that was begun before: of what was read, the last batch counts."""
        of_train = is_loader(open_pass.loader, self.train)
        self._begin(open_pass.loader, of_train)
        if of_train:
            self._note(open_pass.batch, open_pass.read, open_pass.draw)
            self.previous = open_pass.previous

    def _begin(self, loader: Any, of_train: bool) -> None:
        self._open.append(loader)
        self.passes += of_train
        with contextlib.suppress(Exception):  # the loader's own
            self._whole = len(loader) if of_train else self._whole
        if self.validated_at is not None and not of_train and is_loader(loader, self.val):
            self.validated_at.append(self.read)

    def _note(self, batch: Any, count: int, draw: Callable[[], None] | None = None) -> None:
        self.stopped_at = count
        if count == self._whole:  # a trainer that knows how many there are does not ask for one more
            self.per_pass, self.stopped_at = count, None
        self.take(batch, draw, own=False)


def preceded(original: Any, note: Any) -> Any:
    """A method that calls `note` first."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self, *args)
        return original(self, *args, **kwargs)

    return method


def same_values(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether these are the same numbers in the same shapes, and any at all."""
    one, other = list(some), list(others)
    return bool(one) and len(one) == len(other) and all(map(torch.equal, one, other))


def versions_of(model: nn.Module) -> list[tuple[int, float]]:
    """Version and norm of each parameter, which tell whether it was written to: what goes through `.data` has no new
    version."""
    return [(p._version, float(torch.linalg.vector_norm(p.detach().float()))) for p in model.parameters()]


class Copies:
    """Copies of the model by their names, without those that are given the model's own inputs: a teacher or a reference
    may well stay as it is. called: by these names, "" for the model itself. parts: of those in a model, beside another
    part of the same shapes: that model and the name of the other."""

    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self.parts: dict[str, tuple[nn.Module, str]] = {}
        self._means: dict[str, tuple[nn.Module, list[tuple[int, float]], list[torch.Tensor]]] = {}
        self._inputs: dict[str, list[torch.Tensor]] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Of variables, and of objects of the user's among them, the models with running statistics."""
        objects = [(name, thing) for name, thing in values.items() if not issubclass(type(thing), OTHERS)]
        inner = {f"{name}.{key}": v for name, thing in objects for key, v in attributes(thing).items()}
        known = {name: model for name, model in {**inner, **values}.items() if issubclass(type(model), nn.Module)}
        for name, model in list(known.items()):
            named = [(k if k.isidentifier() else f"get_submodule({k!r})", part) for k, part in model.named_children()]
            parts = {f"{name}.{key}": part for key, part in named if running_norms(part)}
            shapes = {key: [p.shape for p in part.parameters()] for key, part in parts.items()}
            pairs = [(a, b) for a in parts for b in parts if a != b and shapes[a] == shapes[b]]
            self.parts |= {one: (model, other) for one, other in reversed(pairs)}
            known |= {one: parts[one] for one, _ in pairs}
        for name, model in known.items():
            if norms := running_norms(model):
                self._means[name] = model, versions_of(model), [norm.running_mean.clone() for norm in norms]

    def stale(self, held: set[int]) -> dict[str, nn.Module]:
        """Those whose weights have changed, though no optimizer holds them (held: the ids of what they hold), and whose
        statistics have not."""
        known = {n: row for n, row in self._means.items() if held.isdisjoint(map(id, row[0].parameters()))}
        return {
            name: model
            for name, (model, versions, means) in known.items()
            if versions != versions_of(model)
            and same_values(means, (norm.running_mean for norm in running_norms(model)))
        }

    def called(self, name: str, args: Any) -> None:
        if self.models:
            self._inputs[name] = tensors_in(args)[:1]
            own = self._inputs.get("", [])
            for other in [name] if name else list(self.models):
                if same_values(own, self._inputs.get(other, [])):
                    self.models.pop(other, None)


class SoftTargets:
    """What a teacher tells of samples, beside their labels: in losses that have both. rows: of the second half of the
    looks so far, (label, teacher's answer, model's answer, a key for its inputs) of each sample."""

    def __init__(self) -> None:
        self._looks, self._next = list[list[tuple[int, int, int, int]]](), 0

    def note(self, loss: torch.Tensor, step: int, batch: Any) -> None:
        """Before a backward; seldom, since the whole graph is gone through."""
        if step < self._next:
            return
        self._next = max(step + 1, int(step * PACE))
        nodes = list(graph_nodes([loss.grad_fn]))
        for hard in (node for node in nodes if type(node).__name__ == "NllLossBackward0"):
            own, labels = hard._saved_self, hard._saved_target
            for node, soft in ((node, getattr(node, name, None)) for node in nodes for name in SAVED_AS):
                if not isinstance(soft, torch.Tensor) or soft.shape != own.shape or soft.requires_grad:
                    continue
                kind = type(node).__name__
                if kind.startswith("MseLoss") and _of_these(own, node) or kind.startswith("Mul") and _are_shares(soft):
                    columns = [t.tolist() for t in (labels, soft.argmax(1), own.argmax(1))]
                    x = next((t for t in tensors_in(batch) if t.dim() > 1 and len(t) == len(soft)), labels[:, None])
                    keys = [hash(row.tobytes()) for row in x.detach().cpu().float().numpy()]
                    self._looks.append([*zip(*columns, keys)])
                    return

    @property
    def rows(self) -> list[tuple[int, int, int, int]]:
        return [row for look in self._looks[len(self._looks) // 2 :] for row in look]


def _of_these(own: torch.Tensor, squares: Any) -> bool:
    """Whether the outputs that a mean of squares compares are the scores that the labels are compared with."""
    compared = [t for t in (squares._saved_self, squares._saved_target) if t.requires_grad]
    return any(bool((t.argmax(1) == own.argmax(1)).all()) for t in compared)


def _are_shares(t: torch.Tensor) -> bool:
    return bool((t >= 0).all()) and bool(((t.sum(1) - 1).abs() < 1e-3).all()) and float(t.amax(1).min()) < 1


NUMBERS, APART = 64, 0.5
"""Elements of a matrix from which on it is no accident that two have a cosine below that."""


class SetBack:
    """at: the steps that began with other weights than the step before had left, behind an evaluation. evaluated: there
    was one since. anew: the steps that began with weights that have nothing of those that the step before had left.
    Told by the smallest matrix that gets a gradient."""

    def __init__(self) -> None:
        self.at, self.anew, self.evaluated = list[int](), list[int](), False
        self._weight: torch.Tensor | None = None
        self._left: torch.Tensor | None = None

    def stepped(self, model: nn.Module) -> None:
        if self._weight is None:
            matrices = (p for p in model.parameters() if p.grad is not None and p.dim() > 1)
            self._weight = min(matrices, key=torch.Tensor.numel, default=None)
        self._left = None if self._weight is None else self._weight.detach().clone()
        self.evaluated = False

    def begun(self, step: int) -> None:
        if self._weight is not None and self._left is not None:
            now, left = self._weight.detach(), self._left
            same = bool(torch.isclose(now, left, rtol=0.0, atol=0.0, equal_nan=True).all())
            self.at += [step] * (self.evaluated and not same)
            if not same and now.numel() >= NUMBERS:
                self.anew += [step] * (abs(float(torch.cosine_similarity(now.flatten(), left.flatten(), 0))) < APART)
        self.evaluated = False


def _watched_iter(original: Any, watch: LoaderWatch) -> Any:
    def __iter__(self: Any) -> Any:
        batches = original(self)
        watched = is_loader(self, watch.train) or is_loader(self, watch.val)
        return watch.follow(self, batches) if watched else batches

    return __iter__


def is_loader(loader: Any, known: Any) -> bool:
    """Whether this is the loader that is known, or another one over the same data set, as a trainer makes for
    itself."""
    if loader is known or known is None:
        return loader is known
    return isinstance(loader, DataLoader) and loader.dataset is getattr(known, "dataset", None)


def samples_of(loader: Any) -> int | None:
    """How many samples its dataset has, where that can be told."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def batches_of(loader: Any, most: int, seconds: float = MOST_SECONDS, passes: bool = False) -> list[Any]:
    """The first `most` batches, as the user's loop would get them next, with all random numbers put back.

    passes: go on with further passes until there are `most`. Fewer where they would take more than 256 MiB or
    `seconds`. A loader that can be read only once (an iterator) gives none: reading it would take the batches away from
    the user.
    """
    if loader is None or is_iterator(loader):
        return []
    restore = save_rng(loader)
    batches: list[Any] = []
    size, until = 0, time.monotonic() + seconds
    iterator: Any = None
    try:
        while True:
            before = len(batches)
            for batch in (iterator := iter(loader)):
                batches.append(batch)
                size += sum(t.numel() * t.element_size() for t in tensors_in(batch))
                if len(batches) >= most or size > MOST_BYTES or time.monotonic() > until:
                    return batches
            if len(batches) == before or not passes:
                return batches
    finally:
        del iterator
        restore()


def is_iterator(loader: Any) -> bool:
    """Something that can be read only once: an iterator, or a stream that goes on where it was left, as a copy of the
    process shows. Nothing is taken from it."""
    if hasattr(type(loader), "__next__"):
        return True
    stream = getattr(loader, "dataset", loader)
    if hasattr(type(stream), "__getitem__") and not isinstance(stream, torch.utils.data.IterableDataset):
        return False
    if hasattr(type(stream), "__next__"):
        return True
    try:
        return can_fork() and bool(in_copy(lambda: _goes_on(loader), MOST_SECONDS))
    except Exception:  # the loader's own, which the loop will meet
        return False


def _goes_on(loader: Any) -> bool:
    """Whether a second pass begins otherwise than the first one. Only in a copy."""
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None  # its workers are the original's
    stream = getattr(loader, "dataset", loader)
    if iter(stream) is iter(stream):
        return True
    restore, first = save_rng(loader), next(iter(loader), None)
    restore()
    again = next(iter(loader), None)
    if first is None or again is None:
        return first is not None
    pairs = zip(tensors_in(first), tensors_in(again))
    return any(a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def targets_of(batch: Any) -> torch.Tensor | None:
    """The targets of a batch, where its form tells: the last member of a pair, or one of a dict's usual keys."""
    key = _target_key(batch)
    return batch[key] if key is not None and isinstance(batch[key], torch.Tensor) else None


def with_targets(batch: Any, targets: torch.Tensor) -> Any:
    """The same batch with these targets, where `targets_of` finds its own."""
    key = _target_key(batch)
    return {**batch, key: targets} if isinstance(key, str) else [*batch[:-1], targets]


def _target_key(batch: Any) -> str | int | None:
    if isinstance(batch, dict) or hasattr(type(batch), "keys"):
        return next((key for key in ("labels", "label", "targets", "target", "y") if key in batch), None)
    return -1 if isinstance(batch, (list, tuple)) and len(batch) > 1 else None


def shuffled(batches: Sequence[Any]) -> list[Any] | None:
    """The samples of these batches in a random order, in batches again. None where batches can't be taken apart into
    samples; raises RuntimeError or TypeError where samples of different batches do not fit together."""
    generator = torch.Generator().manual_seed(0)
    sizes = [_length(batch) for batch in batches]
    if None in sizes or len(batches) < 2:
        return None
    whole = _joined(list(batches))
    order = torch.randperm(sum(s or 0 for s in sizes), generator=generator, device="cpu")
    return [rows_of(whole, part) for part in order.split(sizes[0] or 1)]


def _length(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    members = list(batch.values()) if isinstance(batch, dict) else batch
    if not isinstance(members, (list, tuple)) or not members:
        return None
    sizes = {_length(member) for member in members}
    return sizes.pop() if len(sizes) == 1 else None


def _joined(batches: list[Any]) -> Any:
    one = batches[0]
    if isinstance(one, torch.Tensor):
        return torch.cat(batches)
    if isinstance(one, dict):
        return {key: _joined([b[key] for b in batches]) for key in one}
    return [_joined(list(members)) for members in zip(*batches)]


def rows_of(whole: Any, rows: torch.Tensor) -> Any:
    """These samples of a batch, in its form."""
    if isinstance(whole, torch.Tensor):
        return whole[rows.to(whole.device)]
    if isinstance(whole, dict):
        return {key: rows_of(value, rows) for key, value in whole.items()}
    return [rows_of(member, rows) for member in whole]


def takes_fewer_rows(model: nn.Module, loss_fn: LossFn, batch: Any, rows: int) -> bool:
    """Whether the loss can be asked of fewer samples than the `rows` of this batch. On a CPU it can: it raises at
    worst."""
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        return True
    with mode(model, training=False), preserve_rng(loss_fn), torch.no_grad(), RowsByNumber(model, rows) as watch:
        loss_fn(model, batch)
    return not watch.seen


def parts_of(batch: Any, most: int) -> list[Any]:
    """The samples of a batch in so many parts, of one size but for the last; the batch alone where it has none."""
    size = _length(batch)
    if size is None or size < 2 or most < 2:
        return [batch]
    return [rows_of(batch, rows) for rows in torch.arange(size, device="cpu").split(-(-size // most))]


# -- the loss on fixed batches -----------------------------------------------------------------------------------------


MOST = 8
"""Batches of one evaluation. Eight give a standard error of a third of the spread between batches."""
CLASSES = 1000
"""More kinds of labels than this are no classes but words."""
LABEL_LOSSES = {
    "cross_entropy": 0.0,
    "nll_loss": 0.0,
    "binary_cross_entropy_with_logits": 0.0,
    "binary_cross_entropy": 0.5,
}
"""The losses of labels, and from which value on an output means yes, where there is one output for each label."""

LossFn = Callable[[Any, Any], Any]
"""loss_fn(model, batch)."""


def loss_root(loss: Any) -> Any:
    """What to call backward on: the loss itself, or the first of a tuple or the "loss" of a dict that it came in."""
    while isinstance(loss, (tuple, list, dict)) or hasattr(loss, "loss"):
        loss = loss[0] if isinstance(loss, (tuple, list)) else loss["loss"] if isinstance(loss, dict) else loss.loss
    return loss


def loss_value(loss: Any) -> float:
    """The loss as a number."""
    loss = loss_root(loss)
    return float(loss.detach().float().mean()) if isinstance(loss, torch.Tensor) else float(loss)


@contextlib.contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """All modules in train or eval mode; buffers that a forward in train mode would move stay as they are."""
    with modes_put_back(model), spared_buffers(model.modules() if training else ()):
        for module in model.modules():
            module.training = training
        yield


@contextlib.contextmanager
def spared_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Copies in the place of these modules' buffers: a graph of the user's may still need the buffers as they are."""
    buffers = [(m, name, b) for m in dict.fromkeys(modules) for name, b in m._buffers.items() if b is not None]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in buffers}
    try:
        for module, name, buffer in buffers:
            module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


class FixedBatches:
    """Fixed batches of one loader, and their losses. error: why the loss could not be computed."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, batches: Sequence[Any], most: int | None = MOST):
        self.model, self.loss_fn, self.error = model, loss_fn, ""
        self.batches = list(batches if most is None else batches[:most])

    def losses(self, training: bool = False) -> list[float]:
        """One loss for each batch; none where there is no loss_fn or no batch, or where it failed."""
        try:
            return [] if self.error else self.losses_of(self.model, training)
        except Exception as error:  # the border: our evaluation failed, not the user's loop
            self.error = f"{type(error).__name__}: {error}"
            return []

    def losses_of(self, model: nn.Module, training: bool = False) -> list[float]:
        """The same for another model in its place. Whatever the loss raises passes, but for one that takes gradients
        itself, which it is given from then on."""
        if self.loss_fn is None or not self.batches:
            return []
        try:
            return self._losses(self.loss_fn, model, training)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
        with_gradients = under(self.loss_fn, torch.enable_grad)  # it takes some itself: of its input, for a penalty
        losses = self._losses(with_gradients, model, training)
        self.loss_fn = with_gradients
        return losses

    def _losses(self, loss_fn: LossFn, model: nn.Module, training: bool) -> list[float]:
        with preserve_rng(loss_fn), torch.no_grad(), mode(model, training):
            return [loss_value(loss_fn(model, batch)) for batch in self.batches]

    def mean(self) -> tuple[float, float] | None:
        """Mean loss in eval mode and its standard error; None where there is none."""
        losses = self.losses()
        return mean_and_error(losses) if losses else None


def running_norms(model: nn.Module) -> list[Any]:
    """The layers of batch normalization that have running statistics."""
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None]


def with_new_statistics(model: nn.Module, part: nn.Module, fixed: FixedBatches, others: FixedBatches) -> float | None:
    """The mean loss on these batches in eval mode, where the batch normalization of a part has the statistics of the
    others; None where there is none. Its own are put back."""
    norms = running_norms(part)
    loss_fn, momenta = fixed.loss_fn, [norm.momentum for norm in norms]
    if not norms or loss_fn is None or not fixed.batches:
        return None
    with preserve_rng(loss_fn), torch.no_grad(), mode(model, training=False), spared_buffers(norms):
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum, norm.training = None, True  # the mean of all
            for batch in others.batches:
                loss_fn(model, batch)
        finally:
            for norm, momentum in zip(norms, momenta):
                norm.momentum, norm.training = momentum, False
        return statistics.fmean(loss_value(loss_fn(model, batch)) for batch in fixed.batches)


def mean_and_error(losses: Sequence[float]) -> tuple[float, float]:
    mean = sum(losses) / len(losses)
    spread = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 and math.isfinite(mean) else 0.0
    return mean, spread


def under(loss_fn: LossFn, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> LossFn:
    """The same loss, computed inside of a context."""

    def loss(model: nn.Module, batch: Any) -> Any:
        with context():
            return loss_fn(model, batch)

    return loss


class OtherCalls(TorchFunctionMode):
    """Calls of torch whose result `replacement(name, func, args, kwargs)` gives, where that is not None."""

    def __init__(self, replacement: Callable[[str, Any, Any, Any], Any]):
        super().__init__()
        self.replacement = replacement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.replacement(getattr(func, "__name__", ""), func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is None else result


class LossInputs(TorchFunctionMode):
    """Records the scores and targets of the losses of labels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, torch.Tensor, str, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in LABEL_LOSSES:
            scores = args[0] if args else kwargs.get("input")
            target = args[1] if len(args) > 1 else kwargs.get("target")
            if isinstance(scores, torch.Tensor) and isinstance(target, torch.Tensor):
                self.calls.append((scores, target, name, kwargs.get("ignore_index", -100)))
        return func(*args, **kwargs)


def recalls(model: nn.Module, loss_fn: LossFn, batches: Sequence[Any]) -> Mapping[str, tuple[int, int]]:
    """class → (how many there are, how many are found); empty where the loss takes no labels."""
    counts: dict[str, tuple[int, int]] = {}
    outputs: list[Any] = []
    noting = model.register_forward_hook(lambda module, args, out: outputs.append(out))
    with noting, preserve_rng(loss_fn), torch.no_grad(), mode(model, training=False):
        for batch in batches:
            outputs.clear()
            with LossInputs() as inputs:
                loss_fn(model, batch)
            for scores, target, name, ignored in inputs.calls[:1]:
                own = [o for o in outputs if isinstance(o, torch.Tensor) and o.shape == scores.shape]
                _count(counts, [scores, *own], target, name, ignored)
    return counts if len(counts) <= CLASSES else {}


def _count(
    counts: dict[str, tuple[int, int]], scores: Sequence[torch.Tensor], target: torch.Tensor, name: str, ignored: int
) -> None:
    """Add one batch. A label counts as found where any of these scores, the loss's or the model's, predicts it."""
    labels = target.detach()
    if name.startswith("binary"):
        if labels.dim() == 2 and labels.shape[1] > 1:
            return  # several tags of one sample
        if not bool(((labels == 0) | (labels == 1)).all()):
            return
        labels, predictions = labels.long(), [(s.detach() > LABEL_LOSSES[name]).long() for s in scores]
    else:
        if target.is_floating_point() or scores[0].dim() < 2:
            return
        predictions = [s.detach().argmax(1) for s in scores]
    right = torch.stack([p.reshape(labels.shape) == labels for p in predictions]).any(0)
    for label in labels.unique().tolist()[: CLASSES + 1]:
        if label == ignored:
            continue
        own = labels == label
        there, hits = counts.get(str(label), (0, 0))
        counts[str(label)] = there + int(own.sum()), hits + int(right[own].sum())


def batch_size(batch: Any) -> int | None:
    """The first dimension that the batch's tensors share; None where they do not."""
    sizes = {t.shape[0] for t in output_tensors(batch) if t.dim()}
    return sizes.pop() if len(sizes) == 1 else None


@contextlib.contextmanager
def deterministic(model: nn.Module) -> Iterator[None]:
    """Normalization and dropout in eval mode; other modules as they are."""
    with_dropout = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)
    with modes_put_back(model):
        for module in model.modules():
            if "Norm" in type(module).__name__ or isinstance(module, with_dropout):
                module.training = False
        yield


def repeatable_loss(model: nn.Module, loss_fn: LossFn, batch: Any) -> float:
    """The loss of a batch, without dropout and with the same random numbers each time."""
    with deterministic(model), preserve_rng(loss_fn), torch.no_grad():
        torch.manual_seed(0)
        return loss_value(loss_fn(model, batch))


# -- the order of the targets ------------------------------------------------------------------------------------------


WORDS = 5000
"""Words of a vocabulary up to which rows are counted word by word."""
MANY, FEW = 10, 20
"""Of so many batches the most unlike one is left out when their order is judged, and one more of each twenty."""


def target_order(loader: Any, batches: Sequence[Any]) -> TargetOrder:
    """The order of the targets of these batches, one pass or a part of it."""
    known = [targets_of(batch) for batch in batches]
    targets = [t.detach().cpu() for t in known if t is not None and t.dim() in (1, 2) and len(t) > 1]
    sequential = isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler)
    unknown = TargetOrder(batches=len(batches), sequential=sequential)
    if len(targets) < 4 or len(targets) < len(batches):
        return unknown
    columns = [t.reshape(len(t), -1) for t in targets]
    if any(c.shape[1] != columns[0].shape[1] or c.shape[1] > 64 for c in columns):
        return unknown
    if targets[0].dim() == 2 and not targets[0].is_floating_point():
        columns = _word_counts(columns)
    labels = not columns[0].is_floating_point() and columns[0].shape[1] == 1
    classes = len(torch.cat(columns).unique()) if labels else None
    per_batch = statistics.median(len(c.unique()) for c in columns) if labels else None
    return TargetOrder(_spread(columns, classes), per_batch, classes, len(batches), sequential)


def _word_counts(columns: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of rows of words (or other labels), how often each is in a row; the numbers of words have no order."""
    kinds, at = torch.cat(columns).unique(return_inverse=True)
    if not 1 < len(kinds) <= WORDS or columns[0].shape[1] < 2:
        return columns
    counts = torch.zeros(len(at), len(kinds), device="cpu").scatter_add_(1, at, torch.ones(at.shape, device="cpu"))
    return list(counts.split([len(c) for c in columns]))


def _spread(columns: list[torch.Tensor], classes: int | None) -> float:
    """Variance between the batches' means over what a fair shuffle would give; for classes, of their shares."""
    if classes is not None and classes <= 1000:
        kinds = torch.cat(columns).unique()
        columns = [(c == kinds).double() for c in columns]
    means = torch.stack([c.double().mean(0) for c in columns])
    if len(means) >= MANY:  # some batches that are unlike all others are no order
        apart = (means - means.median(0).values).square().sum(1)
        usual = apart.argsort()[: -max(1, len(means) // FEW)].tolist()
        columns, means = [columns[i] for i in usual], means[usual]
    expected = torch.cat(columns).double().var(0) * statistics.fmean(1 / len(c) for c in columns)
    between = means.var(0)
    return float(between.sum() / expected.sum()) if float(expected.sum()) > 0 else 1.0


# -- what could not be measured ----------------------------------------------------------------------------------------


T = TypeVar("T")


class ProbeErrors:
    """What a probe of ours could not measure is no error of the user's loop: it makes a line of `unchecked`. A probe is
    called through `run`; a function that the watched code calls is wrapped by `wrap`. by_topic: what could not be
    measured → why; in the order in which it happened."""

    def __init__(self) -> None:
        self.by_topic: dict[str, str] = {}

    def run(self, topic: str, probe: Callable[[], T], default: Any) -> T:
        """What a probe returns; the default where it fails. topic: told to the user as that which is not known then."""
        try:
            return probe()
        except Exception as error:  # the border: this probe is ours
            self.by_topic.setdefault(topic, describe(topic, error))
            return default

    def wrap(self, topic: str, function: Callable[..., Any]) -> Callable[..., None]:
        """The same function, which keeps its errors from its caller. After one of them it is not called any more: half
        of a step is worse than none."""

        def guarded(*args: Any) -> None:
            if topic not in self.by_topic:
                self.run(topic, lambda: function(*args), None)

        return guarded

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self.by_topic.values())


def describe(topic: str, error: BaseException) -> str:
    """A probe that failed, in a sentence: what is not known, and why."""
    return f"{topic}: {in_a_line(error)}"
