"""From the books to the facts: which birth is to blame, and the chain from it to what went bad."""

from __future__ import annotations

import dataclasses

from nbdebug.chapters.nan.births import Record
from nbdebug.chapters.nan.facts import Birth, History, NanFacts
from nbdebug.chapters.nan.places import at_site, where_of
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.finding import Where

_PHASES = {
    "loss": "forward",
    "returned": "forward",
    "exception": "forward",
    "buffer": "forward",
    "gradient": "backward",
    "parameter": "optimizer",
}


def facts_of(probe: Probe, seen: Seen) -> NanFacts:
    """The facts of one fault."""
    flow = probe.flow
    chosen = [flow.births[i] for i in sorted(flow.births.ancestors(seen.origins))]
    culprit = _culprit(chosen)
    seen = _in_backward(seen, culprit)
    place = {b.index: n for n, b in enumerate(chosen)}
    used = probe.tape.ancestors(seen.position)
    births = tuple(_birth(probe, b, n, place, used) for n, b in enumerate(chosen))
    births = _with_phase(
        births,
        place[culprit.index],
        seen,
        flow.births.batch_size,
        {n for n, b in enumerate(chosen) if b.segment == culprit.segment},
    )
    run = probe.run
    history = History(
        tuple(run.losses),
        tuple(run.parameter_growth),
        tuple(run.input_growth),
        run.optimizer,
        run.learning_rate,
        run.optimizer_line,
        run.first_step,
    )
    return NanFacts(probe.step, seen.target, births, place[culprit.index], history)


def _in_backward(seen: Seen, culprit: Record) -> Seen:
    """A parameter updated by hand from a bad gradient: the fault showed in that gradient."""
    made = culprit.op
    if (
        seen.target.kind == "parameter"
        and made is not None
        and (made.during == "backward" or (made.during == "forward" and made.grad))
    ):
        return dataclasses.replace(seen, target=dataclasses.replace(seen.target, kind="gradient"))
    return seen


def culprit_of(probe: Probe, seen: Seen) -> Record:
    """The birth that is to blame, as the books keep it."""
    return _culprit([probe.flow.births[i] for i in sorted(probe.flow.births.ancestors(seen.origins))])


def _culprit(chosen: list[Record]) -> Record:
    """A parameter that was bad already, an input that was bad already, else the earliest birth that nobody intended."""
    unintended = [b for b in chosen if not b.intended] or chosen
    for role in ("parameter", "buffer", "input", "target"):
        outside = [b for b in unintended if b.memory is not None and b.memory.role == role]
        if outside:
            return outside[0]
    return unintended[0]


def _birth(probe: Probe, record: Record, index: int, place: dict[int, int], used: set[int]) -> Birth:
    scene = record.numbers
    external = record.memory.role if record.memory is not None else None
    return Birth(
        index=index,
        op=record.op.name if record.op else "",
        made=record.made,
        during=record.op.during if record.op else "forward",
        where=_where(record, used),
        operands=scene.operands,
        scalars=scene.scalars,
        parents=tuple(sorted(place[p] for p in record.parents if p in place)),
        intended=record.intended,
        external=external,
        name=record.memory.name if record.memory else "",
        whole=record.whole,
        custom=record.custom,
        after_model=record.after_model,
        earlier_step=record.step < probe.step,
        step=record.step,
        absorbed_by=tuple(sorted(record.absorbed_by)),
        bad_elements=record.bad,
        elements=_product(record.shape),
        dtype=record.dtype,
        shape=record.shape,
        factors=tuple(record.factors),
    )


def _where(record: Record, used: set[int]) -> Where:
    """The place of a birth. A tensor that came bad from outside: where it was given to the model, else the first line
    that read it for what went bad (`used`: the ops behind that)."""
    arrived = [set(rows) for index, rows in record.trail if index in used][-1:]
    rows = tuple(sorted(arrived[0] & set(record.rows or arrived[0]))) if arrived else ()
    if record.op is not None:
        return where_of(record.op, samples=rows or record.rows or record.folded)
    memory = record.memory
    assert memory is not None, "what no op made came from outside"
    place = Where(step=record.step, module=memory.module, op="", samples=rows or record.rows)
    if memory.role in ("parameter", "buffer"):
        return place
    readers = [op for op in record.readers if op.index in used] or record.readers
    return at_site(place, memory.entered or (readers[0].site if readers else None))


def _with_phase(
    births: tuple[Birth, ...], culprit: int, seen: Seen, batch: int | None, together: set[int]
) -> tuple[Birth, ...]:
    """The culprit's place says the phase in which the fault shows, and all rows of its batch that fail on its line."""
    birth = births[culprit]
    phase = _PHASES[seen.target.kind]
    if birth.external is not None:
        phase = "parameter" if birth.external in ("parameter", "buffer") else "input"
    same = [
        b
        for b in births
        if (b.where.file, b.where.line, b.op) == (birth.where.file, birth.where.line, birth.op)
        and not b.intended
        and b.external == birth.external
        and b.index in together
    ]
    rows = {r for b in same for r in b.where.samples or ()}
    samples = tuple(sorted(rows)) if rows and (batch is None or len(rows) < batch) else None
    where = dataclasses.replace(birth.where, phase=phase, samples=samples, step=_step(birth, seen))
    changed = dataclasses.replace(birth, where=where)
    return (*births[:culprit], changed, *births[culprit + 1 :])


def _step(birth: Birth, seen: Seen) -> int | None:
    """A gradient that went bad waits for its optimizer in later steps; everything else is dated by when it showed."""
    if seen.target.kind == "gradient" and birth.external is None and birth.during == "backward":
        return birth.where.step
    return seen.target.where.step


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
