"""What a recorded step's memories are made of, read off the tape: no op is run again for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nbdebug.observe.schema import schema_of
from nbdebug.observe.tape import Entry, Held, Ref, Tape
from nbdebug.observe.tensors import PARAMETER, TARGET, Memory


def memories_of(tape: Tape) -> dict[int, Memory]:
    """Each memory as the forward left it: who wrote it last, which of parameters, inputs and targets flowed into it.
    Also notes for each op the ops that made its operands."""
    where = {number: memory for memory, numbers in tape.by_memory.items() for number in numbers}
    found = {where[n]: _outside(tape, where[n], held) for n, held in tape.held.items() if n in where}
    for entry in tape.entries:
        if not isinstance(entry, Entry) or entry.unfit:
            continue
        op = entry.op
        refs = _refs((*entry.args, *entry.kwargs.values()))
        given = [memory for ref in refs if (memory := found.get(where[ref.value])) is not None]
        op.inputs = tuple([memory.maker for memory in given if memory.maker is not None][:4])
        reach = 0
        for memory in given:
            reach |= memory.reach
        for number in entry.results:
            if number is not None:
                found.setdefault(where[number], Memory(tape.alive[where[number]], op, reach))
        for ref in _written(entry):
            changed = found.get(where[ref.value])
            if changed is not None:
                changed.maker, changed.reach = op, changed.reach | reach
    return found


def _outside(tape: Tape, memory: int, held: Held) -> Memory:
    known = held.memory
    if known is not None and known.role:
        made = Memory(tape.alive[memory], None, known.reach, known.role, known.name, known.module)
        made.entered = known.entered
        return made
    return Memory(tape.alive[memory], None, PARAMETER if held.leaf else TARGET, "parameter" if held.leaf else "target")


def _written(entry: Entry) -> Iterator[Ref]:
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
