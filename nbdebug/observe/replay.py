"""Replay: runs a recorded step again, with some of its ops replaced.

The ops go through autograd, so that a replaced op has its own derivative. An unchanged replay must give the step's own
results, bit for bit where the hardware allows; code that uses a replay as proof checks that first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_unflatten

from nbdebug.observe.locations import Site
from nbdebug.observe.ops import is_distributed, schema_of
from nbdebug.observe.recorder import Op
from nbdebug.observe.tape import (
    BackwardEntry,
    CallEntry,
    CannotReplay,
    ExternalTensor,
    Ref,
    Tape,
    TapeEntry,
    value_numbers,
)
from nbdebug.observe.tensors import PARAMETER, TARGET, StorageInfo, output_tensors, walk_tensors

_modes = torch._C._len_torch_dispatch_stack
_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types among an op's arguments that need no resolving."""
Patch = Callable[..., Any]
"""Replaces an op: called with the op's function, its args and its kwargs, it returns a result of the same form."""
Around = Callable[[Op, tuple, dict], Any]
"""Runs a forward op and inspects it: called with the op, its args and its kwargs, it returns the op's result."""


class Replay:
    """One replay. Its results: losses (roots of backward, in order), leaves and gradients by the leaf's number on the
    tape, changed (tensors from outside that the step changes, other than leaves).

    patches: by the op's index; inputs: changes to tensors from outside, by number; on_op: called with each op before
    it runs (None: backward); on_outside: called with each tensor from outside; on_backward: called with the losses
    before a backward (False) and after it (True); scale: a factor on the gradient that backward starts from; keep: a
    tensor whose replayed value is wanted, as `value`; models: by the names in recorded calls, which are repeated with
    the models' own parameters (these get the gradients); on_line: called with the line of each call and backward;
    around: runs each op that is not patched; during_engine: a context in which each backward runs; graph: False where
    no backward is to come, so that each value is freed after its last use.
    """

    def __init__(
        self,
        tape: Tape,
        patches: Mapping[int, Patch] | None = None,
        inputs: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] | None = None,
        on_op: Callable[[Op | None], None] | None = None,
        scale: float = 1.0,
        keep: Ref | None = None,
        on_outside: Callable[[int, torch.Tensor, ExternalTensor], None] | None = None,
        on_backward: Callable[[list[torch.Tensor], bool], None] | None = None,
        models: Mapping[str, Any] | None = None,
        on_line: Callable[[Site | None], None] | None = None,
        around: Around | None = None,
        during_engine: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        graph: bool = True,
    ):
        self.graph = graph
        self.tape, self.patches, self.inputs, self.on_op = tape, patches or {}, inputs or {}, on_op
        self.scale, self.keep, self.on_outside, self.on_backward = scale, keep, on_outside, on_backward
        self.models, self.on_line, self.around, self.during_engine = models, on_line, around, during_engine
        self.value: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []
        self._values: dict[int, torch.Tensor] = {}
        self._lost: dict[int, str] = {}  # values that a replay lacks, and why
        self.changed: dict[int, torch.Tensor] = {}
        self.leaves: dict[int, torch.Tensor] = {}
        self._generators: dict[int, torch.Generator] = {}
        self._position = 0
        if tape.last_uses is None or tape.last_uses[0] != len(tape.entries):
            tape.last_uses = len(tape.entries), _last_uses(tape)
        self._last_use = tape.last_uses[1]

    def run(self, stop_after: int | None = None, forward_only: bool = False) -> Replay:
        """Replay up to and including the entry `stop_after` (all if None). forward_only: where that is a backward, stop
        at its losses. Raises Unfit where an op can't be run again."""
        with _same_random(self.tape), _unwritten_as_nan(self.tape), torch.set_grad_enabled(self.graph):
            for position, entry in enumerate(self.tape.entries):
                self._position = position
                if isinstance(entry, BackwardEntry):
                    self._backward(entry, forward_only and position == stop_after)
                elif isinstance(entry, CallEntry):
                    self._call(entry)
                else:
                    self._op(entry)
                for number in self._last_use.get(position, ()):
                    if self.keep is None or number != self.keep.value:
                        self._values.pop(number, None)
                if position == stop_after:
                    break
        if self.keep is not None:
            self.value = self._tensor(self.keep).detach()
        self._values.clear()
        return self

    @property
    def gradients(self) -> dict[int, torch.Tensor]:
        return {n: leaf.grad for n, leaf in self.leaves.items() if leaf.grad is not None}

    def value_of(self, ref: Ref) -> torch.Tensor | None:
        """A tensor of the step as it is now; None where it is not there, or comes from outside and was not used yet."""
        return self._tensor(ref) if ref.value in self._values else None

    def _op(self, entry: TapeEntry) -> None:
        if entry.unfit:
            if entry.op is None or entry.op.func is None or not is_distributed(entry.op.func):
                raise CannotReplay(entry.unfit)
            for ref in entry.args:  # results of other processes: perhaps only logged, and no part of the loss
                self._lost[ref.value] = entry.unfit
                self._values.pop(ref.value, None)
            return
        args = tuple([self._resolve(a) for a in entry.args])
        kwargs = {k: self._resolve(v) for k, v in entry.kwargs.items()}
        if self.on_op:
            self.on_op(entry.op)
        if entry.grad:
            out = self._run(entry.op, args, kwargs)
        else:
            with torch.no_grad():
                out = self._run(entry.op, args, kwargs)
        if isinstance(out, torch.Tensor) and len(entry.results) == 1:
            outputs = [out]
        else:
            outputs = [t for _, t in walk_tensors(out if isinstance(out, (list, tuple)) else (out,))]
        for number, tensor in zip(entry.results, outputs, strict=False):
            if number is not None:
                self._values[number] = tensor

    def _run(self, op: Op, args: tuple, kwargs: dict) -> Any:
        patch = self.patches.get(op.index)
        if patch is not None:
            return patch(op.func, args, kwargs)
        return self.around(op, args, kwargs) if self.around else op.func(*args, **kwargs)

    def _call(self, entry: CallEntry) -> None:
        """Call a model again, in the same environment."""
        name, _, part = entry.model.partition("/")
        if self.models is None or name not in self.models:
            raise CannotReplay(f"the model `{name}` is not at hand")
        module = self.models[name].get_submodule(part)
        args, kwargs = tree_unflatten([self._resolve(leaf) for leaf in entry.leaves], entry.spec)
        self._report(entry.site)
        with entry.environment(module):
            out = module(*args, **kwargs)
        leaves = output_tensors(out)
        if len(leaves) != len(entry.results):
            raise CannotReplay("the model returned another number of values than in the step")
        for number, leaf in zip(entry.results, leaves, strict=True):
            if number is not None:
                self._values[number] = leaf

    def _report(self, site: Site | None) -> None:
        if self.on_op:
            self.on_op(None)
        if self.on_line:
            self.on_line(site)

    def _backward(self, entry: BackwardEntry, losses_only: bool) -> None:
        roots, seeds, inputs = (self._resolve(list(g)) for g in (entry.roots, entry.seeds, entry.inputs))
        self._report(entry.site)
        if entry.accumulate:
            self.losses += [r.detach() for r in roots]
            if self.scale != 1.0:
                seeds = [
                    torch.full_like(r, self.scale) if s is None else s * self.scale
                    for r, s in zip(roots, seeds, strict=True)
                ]
            if self.on_backward:
                self.on_backward(roots, False)
            if losses_only:
                return
        if not any(root.requires_grad for root in roots):
            raise CannotReplay("what backward started from was made out of sight, perhaps by compiled code")
        if entry.accumulate:
            with self.during_engine():
                torch.autograd.backward(
                    roots, seeds, retain_graph=entry.retain, create_graph=entry.create, inputs=inputs or None
                )
            if self.on_backward:
                self.on_backward(roots, True)
            return
        with self.during_engine():
            gradients = torch.autograd.grad(
                roots, inputs, seeds, retain_graph=entry.retain, create_graph=entry.create, allow_unused=True
            )
        for number, tensor in zip(entry.results, gradients, strict=True):
            if number is not None and tensor is not None:
                self._values[number] = tensor

    def _resolve(self, tree: Any) -> Any:
        kind = type(tree)
        if kind is Ref:
            return self._tensor(tree)
        if kind in _ATOMS:
            return tree
        if isinstance(tree, torch.Generator):
            return self._generator(tree)
        if isinstance(tree, dict):
            return {k: self._resolve(v) for k, v in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)([self._resolve(v) for v in tree])
        return tree

    def _tensor(self, ref: Ref) -> torch.Tensor:
        value = self._values.get(ref.value)
        if value is None:
            if ref.value in self._lost:
                raise CannotReplay(self._lost[ref.value])
            external = self.tape.externals.get(ref.value)
            if external is None:
                raise CannotReplay("it uses a tensor that was made out of sight")
            # getting it is no part of the step
            with _disable_current_modes() if _modes() else contextlib.nullcontext():
                value = self._values[ref.value] = self._from_outside(ref.value, external)
        if self.tape.later_leaves.get(ref.value, self._position + 1) <= self._position and not value.requires_grad:
            value.requires_grad_()
        if ref.view is not None:
            shape, strides, offset = ref.view
            begin = value.storage_offset() if ref.value in self.tape.externals else 0
            value = (value.detach() if ref.detached else value).as_strided(shape, strides, begin + offset)
        return value.detach() if ref.detached else value

    def _from_outside(self, number: int, external: ExternalTensor) -> torch.Tensor:
        if external.grad_of is not None:
            leaves = self.leaves if self.models is None else self.tape.leaves
            grad = leaves[external.grad_of].grad if external.grad_of in leaves else None
            if grad is None:
                raise CannotReplay("a gradient that it uses did not come again")
            return grad.detach()
        if external.leaf and self.models is not None:
            leaf = self.leaves[number] = self.tape.leaves[number]
            return leaf
        value = external.tensor.detach()
        if number in self.inputs:
            value = self.inputs[number](value)
        elif value.device != external.device:
            value = value.to(external.device)
        elif external.changed or self.patches:  # a replaced op may write where the step's own did not
            value = value.clone()
        if external.leaf:
            value = self.leaves[number] = value.requires_grad_()
        elif external.changed:
            self.changed[number] = value
        if self.on_outside:
            self.on_outside(number, value, external)
        return value

    def _generator(self, generator: torch.Generator) -> torch.Generator:
        original, state = self.tape.generators[id(generator)]
        if id(generator) not in self._generators:
            copy = self._generators[id(generator)] = torch.Generator(original.device)
            copy.set_state(state)
        return self._generators[id(generator)]


def _last_uses(tape: Tape) -> dict[int, list[int]]:
    """{position: numbers of the tensors that no later entry uses}. Leaves and changed tensors stay."""
    last = {number: position for position, entry in enumerate(tape.entries) for number in _uses(entry)}
    freed: dict[int, list[int]] = {}
    for number, position in last.items():
        external = tape.externals.get(number)
        if external is None or not (external.leaf or external.changed):
            freed.setdefault(position, []).append(number)
    return freed


def _uses(entry: TapeEntry | CallEntry | BackwardEntry) -> set[int]:
    if isinstance(entry, BackwardEntry):
        return value_numbers([entry.roots, entry.seeds, entry.inputs])
    return value_numbers(entry.leaves if isinstance(entry, CallEntry) else [entry.args, entry.kwargs])


@contextlib.contextmanager
def _unwritten_as_nan(tape: Tape) -> Iterator[None]:
    """Let `torch.empty` give NaN, where the tape says so: the values in that memory during the step are gone."""
    if not tape.unwritten_as_nan:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # with this torch fills such memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def _same_random(tape: Tape) -> Iterator[None]:
    """The random numbers of the recorded step; the user's own generators go on from where they were."""
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if tape.cuda_random else []
    torch.set_rng_state(tape.random)
    if tape.cuda_random:
        torch.cuda.set_rng_state_all(tape.cuda_random)
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def storages_of(tape: Tape) -> dict[int, StorageInfo]:
    """Each storage as the forward left it: which op wrote it last, which of parameters, inputs and targets flowed into
    it. Also records for each op the ops that made its operands."""
    keys = {number: key for key, numbers in tape.by_storage.items() for number in numbers}
    storages = {keys[n]: _outside(tape, keys[n], external) for n, external in tape.externals.items() if n in keys}
    for entry in tape.entries:
        if not isinstance(entry, TapeEntry) or entry.unfit:
            continue
        op = entry.op
        refs = _refs((*entry.args, *entry.kwargs.values()))
        inputs = [storage for ref in refs if (storage := storages.get(keys[ref.value])) is not None]
        op.inputs = tuple([storage.maker for storage in inputs if storage.maker is not None][:4])
        reach = 0
        for storage in inputs:
            reach |= storage.reach
        for number in entry.results:
            if number is not None:
                storages.setdefault(keys[number], StorageInfo(tape.storages[keys[number]], op, reach))
        for ref in _written(entry):
            changed = storages.get(keys[ref.value])
            if changed is not None:
                changed.maker, changed.reach = op, changed.reach | reach
    return storages


def _outside(tape: Tape, key: int, external: ExternalTensor) -> StorageInfo:
    known = external.storage
    if known is not None and known.role:
        info = StorageInfo(tape.storages[key], None, known.reach, known.role, known.name, known.module)
        info.entered = known.entered
        return info
    reach, role = (PARAMETER, "parameter") if external.leaf else (TARGET, "target")
    return StorageInfo(tape.storages[key], None, reach, role)


def _written(entry: TapeEntry) -> Iterator[Ref]:
    schema = schema_of(entry.op.func)
    if schema.writes:
        named = [*zip(schema.names, entry.args, strict=False), *entry.kwargs.items()]
        yield from _refs([value for name, value in named if name in schema.writes])


def _refs(values: Iterable[Any]) -> Iterator[Ref]:
    for value in values:
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _refs(value)
