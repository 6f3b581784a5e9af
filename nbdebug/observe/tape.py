"""The tape: a step recorded so that it can be run again without its Python code.

The loop around a step often can't be repeated: its loader has moved on. But the ops that ran, in order, with the
numbers and tensors that came from outside, are the step. This watcher records them; `replay` runs them again under
autograd, with the same random numbers, and with some ops replaced where that is wanted: so a fix is tried on the very
step that failed.

Only tensors from outside are kept (parameters are copied just before something changes them); what the step itself
computed is computed again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_unflatten

from nbdebug.observe.backward import Backward
from nbdebug.observe.locations import Site
from nbdebug.observe.ops import (
    Schema,
    argument_tensors,
    distributed_tensors,
    is_distributed,
    named_arguments,
    schema_of,
    written_tensors,
)
from nbdebug.observe.recorder import Op, Recorder
from nbdebug.observe.tensors import StorageInfo, dense, optional_storage_key, storage_key


class CannotReplay(Exception):
    """The recorded step can't be run again; the message says why."""


class _Unsupported(Exception):
    """A tensor that the tape can't hold."""


class Ref(NamedTuple):
    """A tensor of the tape. value: its number; view: (shape, strides, offset), if it is another view of that tensor's
    storage (of a tensor from outside, the offset counts from its beginning); detached: whether it is cut off from
    autograd."""

    value: int
    view: tuple | None = None
    detached: bool = False


class TapeEntry(NamedTuple):
    """One op: its arguments, the numbers of its outputs, whether autograd recorded it. unfit: why it can't be run
    again, or "" where it can."""

    op: Op
    args: Any
    kwargs: Any
    results: tuple[int | None, ...]
    grad: bool
    unfit: str = ""


class CallEntry(NamedTuple):
    """A call of a whole model, recorded instead of its ops: the model's name, the leaves of its arguments (`Ref`s for
    tensors) and their structure (spec), the numbers of the tensors that it returned (in the order of its leaves), the
    line that called it, and a context manager that restores random numbers, autocast and the train flag."""

    model: str
    leaves: tuple
    spec: Any
    results: tuple[int | None, ...]
    site: Site | None
    environment: Any

    @property
    def arguments(self) -> tuple[tuple, dict]:
        """(args, kwargs), with a `Ref` in place of each tensor."""
        return tree_unflatten(self.leaves, self.spec)


class BackwardEntry(NamedTuple):
    """A call of the engine: its arguments, the numbers of the gradients that it returned, its switches (`retain_graph`,
    `create_graph`, whether it fills `.grad`), and the line that called it."""

    roots: tuple[Ref, ...]
    seeds: tuple[Ref | None, ...]
    inputs: tuple[Ref, ...]
    results: tuple[int | None, ...]
    retain: bool
    create: bool
    accumulate: bool
    site: Site | None = None


class ExternalTensor:
    """A tensor from outside, as it was when the step first used it. changed: the step overwrites it later; grad_of: the
    number of the leaf whose gradient it is; storage: the recorder's record of its storage; device: where a replay wants
    it; offset: where in its storage it began."""

    __slots__ = ("changed", "device", "grad_of", "leaf", "offset", "storage", "tensor")

    def __init__(
        self, tensor: torch.Tensor, leaf: bool, grad_of: int | None = None, storage: StorageInfo | None = None
    ):
        self.tensor, self.leaf, self.changed, self.grad_of, self.storage = tensor, leaf, False, grad_of, storage
        self.device, self.offset = tensor.device, 0 if tensor.is_nested else tensor.storage_offset()

    def holds(self, view: tuple) -> bool:
        """Whether a (shape, strides, offset) of the storage lies in this tensor, which leaves no gaps. The weights of a
        layer may be parts of one storage, as cuDNN wants those of an RNN."""
        shape, strides, offset = view
        length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
        return self.offset <= offset and offset + length <= self.offset + self.tensor.numel()

    def to_host(self) -> None:
        """Keep a copy of what the step overwrites in the host's memory."""
        if self.changed:
            self.tensor = self.tensor.cpu()


class Tape:
    """A watcher that records one step at a time; `reset` begins the next."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.reset()

    def reset(self) -> None:
        self.entries: list[TapeEntry | CallEntry | BackwardEntry] = []
        self.externals: dict[int, ExternalTensor] = {}
        self.leaves: dict[int, torch.Tensor] = {}  # number -> the user's own tensor
        self.later_leaves: dict[int, int] = {}  # number -> the entry from which on it is a leaf of its own
        self.call_inputs: dict[Ref, torch.Tensor] = {}  # inputs of models that the step's own code made
        self._places: dict[tuple, list[list]] = {}
        self.by_storage: dict[int, list[int]] = {}  # storage's key -> numbers
        self.storages: dict[int, StorageWeakRef] = {}  # by the storage's key
        self._count = 0
        self.last_uses: tuple[int, dict[int, list[int]]] | None = (
            None  # for replays: (number of entries, what each frees)
        )
        self.transformed = False  # whether a model was called inside torch.func: its ops are entries of their own then
        self.unwritten_as_nan = False  # whether a replay fills the memory of `torch.empty` with NaN
        self.random = torch.get_rng_state()
        self.cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def ancestors(self, position: int) -> set[int]:
        """Indices of the ops that the entry at `position` depends on, through values and changed storage."""
        needed: set[int] = set()
        indices: set[int] = set()
        for n, entry in reversed(list(enumerate(self.entries[: position + 1]))):
            if isinstance(entry, BackwardEntry):
                if n == position or needed & set(entry.results):
                    needed |= value_numbers([entry.roots, entry.seeds])
                continue
            if isinstance(entry, CallEntry) or entry.unfit:
                continue
            inputs = value_numbers([entry.args, entry.kwargs])
            changes = schema_of(entry.op.func).writes
            if n == position or needed & set(entry.results) or (changes and needed & inputs):
                indices.add(entry.op.index)
                needed |= inputs
        return indices

    # -- recording ----------------------------------------------------------------------------------------------------

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> tuple | None:
        if op.during == "backward" or op.recomputed:
            return None
        if schema.random and isinstance(generator := kwargs.get("generator"), torch.Generator):
            self.generators.setdefault(id(generator), (generator, generator.get_state()))
        unfit = "it talks to other processes" if is_distributed(op.func) else ""
        try:
            refs = tuple([self._ref(a) for a in args]), {k: self._ref(v) for k, v in kwargs.items()}
        except _Unsupported as reason:
            refs, unfit = (args, kwargs), str(reason)
        if schema.writes:  # also by an op that can't be run again, as an update by a sparse gradient
            self._copy_externals(written_tensors(schema, args, kwargs))
        return *refs, unfit

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, saved: tuple | None) -> None:
        if saved is None:
            return
        if saved[2]:
            self.entries.append(
                TapeEntry(op, tuple(map(Ref, distributed_tensors(self, op, args, out))), {}, (), op.grad, saved[2])
            )
            return
        changed = {self._place(t) for t in written_tensors(schema, args, kwargs)} if schema.writes else ()
        grad = False if schema.base == "detach" else None
        results = tuple(
            [
                None if (place := self._place(t)) is None or place in changed else self._enter(t, grad, place)
                for t in argument_tensors(out if isinstance(out, (list, tuple)) else (out,), {})
            ]
        )
        self.entries.append(TapeEntry(op, saved[0], saved[1], results, op.grad))

    def call(self, model: str, leaves: tuple, spec: Any, out: list, site: Site | None, environment: Any) -> None:
        """Record a call of a whole model. leaves: of its arguments, as `references` gives them."""
        results = tuple([self._enter(t, t.requires_grad) if isinstance(t, torch.Tensor) else None for t in out])
        self.entries.append(CallEntry(model, leaves, spec, results, site, environment))

    def references(self, leaves: list) -> tuple:
        """A `Ref` for each tensor among these; a tensor that the tape can't hold stays as it is. Tensors that the
        step's own code made are kept in `call_inputs`."""
        refs = tuple([self.reference(leaf) for leaf in leaves])
        self.call_inputs |= {
            ref: leaf.detach()
            for ref, leaf in zip(refs, leaves, strict=True)
            if isinstance(ref, Ref) and ref.value not in self.externals
        }
        return refs

    def reference(self, leaf: Any) -> Any:
        """A `Ref` for a tensor; anything else, and a tensor that the tape can't hold, as it is."""
        try:
            return self._ref(leaf) if isinstance(leaf, torch.Tensor) else leaf
        except _Unsupported:
            return leaf

    def backward(self, call: Backward, result: Any) -> None:
        """Record a call of the engine, and the gradients that it made."""
        try:
            roots, seeds, inputs = (
                tuple(self._ref(t) for t in group) for group in (call.roots, call.seeds, call.inputs)
            )
        except _Unsupported as reason:
            self.entries.append(TapeEntry(Op(-1, None, "backward", 0), (), {}, (), False, str(reason)))
            return
        results: tuple = ()
        if not call.accumulate:
            results = tuple(self._enter(t, None) if isinstance(t, torch.Tensor) else None for t in result)
        self.entries.append(
            BackwardEntry(roots, seeds, inputs, results, call.retain, call.create, call.accumulate, call.stack.site)
        )
        for number, leaf in self.leaves.items():
            self._enter_gradient(leaf, number)

    def enter_gradients(self, leaves: list[torch.Tensor]) -> None:
        """Make the gradients of these leaves known, which a model's own backward has made."""
        for leaf in leaves:
            if leaf.grad is not None and isinstance(ref := self.reference(leaf), Ref):
                self._enter_gradient(leaf, ref.value)

    def _enter_gradient(self, leaf: torch.Tensor, number: int) -> None:
        grad = leaf.grad
        if grad is not None and dense(grad) is grad and self.find(grad) is None:
            entry = self._enter(grad, False)
            if entry is not None:
                self.externals[entry] = ExternalTensor(grad, False, grad_of=number)

    def overwritten(self, parameters: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters that an op of the step has written to, each with a copy of what it was before."""
        own = {optional_storage_key(p): p for p in parameters}
        keys = {number: key for key, numbers in self.by_storage.items() for number in numbers}
        before: dict[int, torch.Tensor] = {}
        for key in {keys[number] for number in self._written() if keys.get(number) in own}:
            for number in self.by_storage[key]:
                external = self.externals.get(number)
                if external is not None and external.changed and external.tensor.shape == own[key].shape:
                    before.setdefault(key, external.tensor)
        return [(own[key].data, tensor) for key, tensor in before.items()]

    def _written(self) -> set[int]:
        """The numbers of the tensors that the entries write to."""
        numbers = set()
        for entry in self.entries:
            if isinstance(entry, TapeEntry) and not entry.unfit and (writes := schema_of(entry.op.func).writes):
                named = named_arguments(schema_of(entry.op.func), entry.args, entry.kwargs)
                numbers |= value_numbers([value for name, value in named if name in writes])
        return numbers

    def _place(self, t: torch.Tensor) -> tuple | None:
        """The storage of a tensor and its view of it; None for a tensor without storage of its own."""
        try:
            key = t.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError, ValueError):
            return None
        if t.is_nested:  # it has no shape
            return key, t.dtype, str(t._nested_tensor_size().tolist()), str(t._nested_tensor_strides().tolist())
        return key, t.dtype, t.storage_offset(), t.shape, t.stride(), t.is_neg(), t.is_complex() and t.is_conj()

    def _enter(self, tensor: torch.Tensor, grad: bool | None, place: tuple | None = None) -> int | None:
        place = place or self._place(tensor)
        if place is None:
            return None
        number, self._count = self._count, self._count + 1
        self._places.setdefault(place, []).append([number, grad])
        same = self.by_storage.get(place[0])
        if same is None:
            # held weakly: else another storage could get the same key
            self.storages[place[0]] = StorageWeakRef(tensor.untyped_storage())
            self.by_storage[place[0]] = [number]
        else:
            same.append(number)
        return number

    def find(self, tensor: torch.Tensor, place: tuple | None = None) -> Ref | None:
        """The tape's reference to a tensor, or None if the step did not use it."""
        place = place or self._place(tensor)
        if place is None:
            return None
        known = self._places.get(place, ())
        for entry in reversed(known):
            if entry[1] is None:
                entry[1] = tensor.requires_grad
            if entry[1] == tensor.requires_grad:
                return Ref(entry[0])
        if known:
            known[-1][1] = (
                tensor.requires_grad or known[-1][1]
            )  # since overwritten in place with something that needs a gradient
            return Ref(known[-1][0], None, not tensor.requires_grad)
        same = self.by_storage.get(place[0])
        if not same or tensor.is_nested:
            return None
        view = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        if (outside := self.externals.get(same[0])) is None:
            return Ref(same[-1], view, not tensor.requires_grad)
        parts = [(n, held) for n in reversed(same) if (held := self.externals.get(n)) is not None]
        for number, held in parts if outside.leaf or outside.changed else ():  # else another part
            if held.holds(view):
                return Ref(number, (*view[:2], view[2] - held.offset), not tensor.requires_grad)
        return None

    def _ref(self, value: Any) -> Any:
        """An argument with a `Ref` in place of each tensor; a tensor that is new to the tape comes from outside."""
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (list, tuple)):
                return type(value)([self._ref(v) for v in value])
            return value
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise _Unsupported(f"it uses a tensor of layout {value.layout} or type {type(value).__name__}")
        place, grad = self._place(value), value.requires_grad
        if place is None:
            raise _Unsupported("it works on tensors without memory of their own (torch.func)")
        if leaf := grad and value.is_leaf:
            self._note_later_leaf(place)
        known = self.find(value, place)
        if known is None:
            number = self._enter(value, grad, place)
            assert number is not None
            self.externals[number] = ExternalTensor(
                value.detach(), leaf, storage=self.recorder.storages.get(storage_key(value))
            )
            if leaf:
                self.leaves[number] = value
            known = Ref(number)
        return known

    def _note_later_leaf(self, place: tuple) -> None:
        """Note a leaf that the step has made or used before as a tensor without a gradient."""
        known = self._places.get(place, ())
        if known and not known[-1][1] and not any(number in self.leaves for number, _ in known):
            known[-1][1] = True
            self.later_leaves[known[-1][0]] = len(self.entries)

    def _copy_externals(self, tensors: list[torch.Tensor]) -> None:
        """Copy the external tensors whose storage is about to change, all at once."""
        keys = {optional_storage_key(t) for t in tensors}
        numbers = {n for key in keys if key is not None for n in self.by_storage.get(key, ())}
        externals = [
            e for n in numbers if (e := self.externals.get(n)) is not None and not e.changed and e.grad_of is None
        ]
        copies = [torch.empty_like(e.tensor) for e in externals]
        if copies:
            torch._foreach_copy_(copies, [e.tensor for e in externals])
        for external, copy in zip(externals, copies, strict=True):
            external.tensor, external.changed = copy, True


def value_numbers(tree: Any) -> set[int]:
    """The numbers of the tensors in an entry's arguments."""
    if isinstance(tree, Ref):
        return {tree.value}
    if isinstance(tree, dict):
        tree = list(tree.values())
    return {v for item in tree for v in value_numbers(item)} if isinstance(tree, (list, tuple)) else set()
