"""The strategy "bisect" of `nan_trace`: find the fault by running the step again, few times, with one change each.

    repeat    run the step twice from the same state: it must come to the same bits, or a replay proves nothing
    modules   halve the module calls until one is left (`ModuleBisection`): log2(calls) runs
    ops       one run under the op tracer: the op, the line and the cause inside that module
    rows      replace rows of the batch (`RowBisection`)

The tracer's answer is checked against the search's, which knows nothing of how the tracer works. Where they differ the
tracer is believed, since it follows every value, and the report says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nbdebug.bisection import ddmin, first_bad
from nbdebug.live import progress_bar
from nbdebug.observe.modules import ModuleNames
from nbdebug.observe.rerun import ModuleCall, Rerun, RerunChange, cut_gradient, has_nonfinite, map_tensors, repair
from nbdebug.observe.snapshot import Snapshot, comparable_state, random_sources
from nbdebug.observe.tensors import dense, finite, tensors_in
from nbdebug.report import Finding, Report, Symptom
from nbdebug.text import count
from nbdebug.tools.nan.rules.wording import numbered
from nbdebug.verdict import FINITE

CANDIDATES = 4
"""How many rows are tried as the healthy one."""
AT_MOST = 64
"""Replays spent on rows before the search gives up: with rows that interact the number grows with their square."""


def bisect(
    step: Callable[[], Any],
    models: Mapping[str, nn.Module],
    optimizers: Any = (),
    *,
    trace: Callable[[], Report],
    others: Iterable[Any] = (),
) -> Report:
    """Find what made `step` non-finite. Afterwards everything is where one plain step leaves it.

    `trace()` runs the step once under the op tracer, from the state that it finds, and reports what it saw. `others`:
    GradScalers and schedulers that the step uses. Raises StepDoesNotRepeat; the step's own exceptions pass through, and
    so does an interrupt. In all three cases everything is as it was before.
    """
    with progress_bar("nan_trace", "runs") as bar:
        search = _Search(step, models, optimizers, others, bar)
        try:
            return search.run(trace)
        except BaseException:
            search.before.restore()
            raise


class _Search:
    def __init__(
        self, step: Callable[[], Any], models: Mapping[str, nn.Module], optimizers: Any, others: Any, bar: Any
    ):
        self.step, self.models = step, dict(models)
        self.optimizers = list(optimizers.values()) if isinstance(optimizers, Mapping) else list(optimizers)
        self.names = ModuleNames(self.models)
        self.before = Snapshot.take(self.models, self.optimizers, others=others)
        self.replays = {"repeat": 0, "modules": 0, "ops": 0, "rows": 0}
        self.bar = bar

    def run(self, trace: Callable[[], Report]) -> Report:
        first, modules = self._repeat()
        event = first.first_bad_event
        if event is None:
            facts: dict[str, Any] = {"replays": self.replays}
            return Report("nan_trace(step, strategy='bisect')", notes=(self._counts(first),), facts=facts, steps=1)
        suspect = modules.find() if modules else None
        report = self._run_step("ops", trace)
        notes, findings = list(report.notes), report.findings
        facts = {**report.facts, "replays": self.replays}
        if modules and modules.exact:
            notes += self._disagreement(report, suspect)
            facts["replays_point_at"] = self._name(suspect) or ""
        if findings:
            rows = self._rows(first, event, suspect, findings[0])
            notes += _row_notes(rows, findings[0].where.samples)
            if rows.at_fault is not None:
                where = dataclasses.replace(findings[0].where, samples=rows.samples)
                findings = (dataclasses.replace(findings[0], where=where), *findings[1:])
            facts["rows"] = dataclasses.asdict(rows)
        else:
            what = "Run again, the step is not finite; under the op tracer nothing was."
            report = dataclasses.replace(report, symptoms=(*report.symptoms, Symptom(what, FINITE)))
        if self.replays["rows"]:  # else the traced run was the last, which leaves everything where a plain one does
            self._run_step("plain", self.step)
        return dataclasses.replace(report, findings=findings, notes=(*notes, self._counts(first)), facts=facts)

    def _run_step(self, stage: str, run: Callable[[], Any]) -> Any:
        """One run of the step, from the state at the beginning."""
        self.before.restore()
        result = run()
        self.replays[stage] = self.replays.get(stage, 0) + 1
        self.bar.update()
        return result

    def _replay(self, stage: str, change: RerunChange | None = None, proof: bool = False) -> Rerun:
        rerun = Rerun(self.models, self._parameters, proof=proof, change=change)
        return self._run_step(stage, lambda: rerun.run(self.step))

    def _repeat(self) -> tuple[Rerun, ModuleBisection | None]:
        """The first run, and the search for the module if a loss or a gradient is bad. Raises StepDoesNotRepeat."""
        first = self._replay("repeat", proof=True)
        if first.error is not None:
            raise first.error
        random_first, event = _random_now(), first.first_bad_event
        modules = intervention = None
        if event is not None and first.events[event].what != "parameters":
            size = len({m for model in self.models.values() for m in model.modules()})
            modules = ModuleBisection(first, event, size, lambda change: self._replay("modules", change))
            intervention = modules.intervention(0)
        second = self._replay("repeat", intervention, proof=True)
        if reasons := list(differences(first, second, random_first, _random_now())):
            raise StepDoesNotRepeat(reasons) from second.error
        if modules is not None and intervention is not None:
            modules.note(intervention, second)
        return first, modules

    def _rows(self, first: Rerun, event: int, suspect: ModuleCall | None, finding: Finding) -> BatchRows:
        """Rows of what the outermost call around the suspect is given; for loss code, the last such call."""
        ended = first.ended[: first.events[event].ended]
        around = suspect or next((c for c in reversed(ended) if c.parent is None and c.batch), None)
        root = around.stack[0] if around else None
        return RowBisection(root, event, lambda change: self._replay("rows", change)).find(finding.where.samples)

    def _parameters(self) -> dict[str, torch.Tensor]:
        """All parameters by name, as they are now: a step may make new ones."""
        several = len(self.models) > 1
        parameters: dict[str, torch.Tensor] = {}
        for name, model in self.models.items():
            parameters |= model.named_parameters(name if several else "")
        known = set(map(id, parameters.values()))
        for g, group in enumerate(group for optimizer in self.optimizers for group in optimizer.param_groups):
            parameters |= {f"param_groups[{g}][{i}]": p for i, p in enumerate(group["params"]) if id(p) not in known}
        return parameters

    def _disagreement(self, report: Report, suspect: ModuleCall | None) -> list[str]:
        """What to say when the tracer's place is not the one that the replays point at, or inside it."""
        name = self._name(suspect)
        if not report.findings:
            return [f"Replays point at {_place(name)}, but the op tracer found no fault."]
        where = report.findings[0].where
        module = where.module or ""  # "" is the model itself, and code outside of it
        inside = module == name or module.startswith(f"{name}.") if name else not module
        if where.phase in ("input", "parameter", "optimizer") or inside:
            return []
        return [
            f"Replays point at {_place(name)}, the op tracer at {_place(where.module or None)}. The tracer follows "
            "every value, so this report gives its answer."
        ]

    def _name(self, call: ModuleCall | None) -> str | None:
        return self.names.of(call.module) if call else None

    def _counts(self, first: Rerun) -> str:
        """The number of runs, in one sentence."""
        purposes = {
            "repeat": "to check that it repeats",
            "modules": f"to search {count(len(first.calls), 'module call')}",
            "ops": "under the op tracer",
            "rows": "to search the rows of the batch",
            "plain": "to leave the model where one step leaves it",
        }
        parts = [f"{n} {purposes[stage]}" for stage, n in self.replays.items() if n]
        return f"The step was run {count(sum(self.replays.values()), 'time')}: {', '.join(parts)}."


def _random_now() -> Any:
    return [comparable_state(read()) for _, read, _ in random_sources()]


def _place(module: str | None) -> str:
    return "code outside of modules" if module is None else f"`{module}`" if module else "the model's own code"


def _row_notes(rows: BatchRows, traced: tuple[int, ...] | None) -> list[str]:
    if rows.at_fault is None or rows.smallest is None:
        return [f"Replays could not tell the rows of the batch apart: {rows.why}."]
    notes = []
    if traced and rows.at_fault != tuple(sorted(traced)):
        notes.append(
            f"The op tracer found the fault in {numbered('row', traced)}; replays find it in "
            f"{numbered('row', rows.at_fault)}."
        )
    if len(rows.smallest) == 1 < len(rows.at_fault):
        notes.append(f"Row {rows.smallest[0]} alone is enough to make the step fail.")
    elif len(rows.smallest) > 1:
        few = numbered("row", rows.smallest)
        notes.append(f"{few.capitalize()} make the step fail together; without any one of them it is finite.")
    return notes


# -- does the step repeat? ---------------------------------------------------------------------------------------------


class StepDoesNotRepeat(RuntimeError):
    """Two runs of the step from the same state differ. `reasons` says in what, in plain words, the first one first."""

    def __init__(self, reasons: list[str]):
        self.reasons = tuple(reasons)
        super().__init__(
            f"This step does not repeat: {'; '.join(reasons)}. A search by replay needs a step that does the same each "
            "time it is called: take the batch outside of it, and draw random numbers with torch, numpy or random, "
            'whose state is restored for each replay. Or use strategy="trace", which runs the step once.'
        )


_ELSEWHERE = (
    "something else that it reads changed in between (a counter, a file, a generator of random numbers, a "
    "tensor that no named model or optimizer holds), or an operation is not deterministic on this device"
)


def differences(first: Rerun, second: Rerun, random_first: Any, random_second: Any) -> Iterator[str]:
    """What differs between two runs, in the order in which it would be the cause of the rest."""
    error = second.error
    if isinstance(error, StopIteration):
        yield "the second time it raised StopIteration: the iterator that it takes its batches from had run out"
    elif error is not None:
        yield f"the second time it raised {type(error).__name__}{f': {error}' if str(error) else ''}"
    for n, (a, b) in enumerate(zip(first.inputs, second.inputs, strict=False)):
        if a != b:
            yield "the model was given another batch the second time" + (f" (in its call {n + 1})" if n else "")
            break
    if error is None:
        if random_first != random_second:
            yield "the random numbers differ: it drew more of them, or fewer, or set a new seed"
        if [c.module for c in first.calls] != [c.module for c in second.calls]:
            counts = f"{len(first.calls)} calls, then {len(second.calls)}"
            yield f"it called other modules the second time, or in another order ({counts})"
        elif first.inputs == second.inputs:  # after another batch, other results are no news
            yield from _first_difference(first, second)


def _first_difference(first: Rerun, second: Rerun) -> Iterator[str]:
    """The first result that differs."""
    if [e.what for e in first.events] != [e.what for e in second.events]:
        yield "backward was called another number of times"
        return
    for a, b in zip(first.events, second.events, strict=True):
        names = sorted(n for n in {**a.prints, **b.prints} if a.prints.get(n) != b.prints.get(n))
        if names:
            which = f"the {a.what}" + (f" of {', '.join(names[:3])}" if a.what == "gradients" else "")
            batch = " although the model was given the same batch" if first.inputs else ""
            yield f"{which} came out differently{batch}: {_ELSEWHERE}"
            return


# -- modules -----------------------------------------------------------------------------------------------------------


class _OutOfRuns(Exception):
    """The number of replays allowed is used up."""


class ModuleBisection:
    """The search for one bad event of the run `first`. `replay(change)` runs the step again from the same state.

    It takes at most ceil(log2(modules)) + 1 replays. Where modules are called many times this may not be enough to come
    down to one call; then the answer is the innermost call around those that are left, and `exact` is False.
    """

    def __init__(self, first: Rerun, event: int, modules: int, replay: Callable[[RerunChange], Rerun]):
        self.event, self.replay = event, replay
        bad = first.events[event]
        self.ended, self.running = first.ended[: bad.ended], bad.running
        self.kind = CutGradients if bad.what == "gradients" else RepairOutputs
        self.runs_left = 1 + math.ceil(math.log2(max(modules, 1)))
        self.exact = True
        self._between = 0, len(self.ended)  # the first call with whose end it heals lies here, or is the second number
        self._interventions: dict[int, Intervention] = {}

    def find(self) -> ModuleCall | None:
        """The suspect; None for code outside of modules. Needs `note` of the run with `intervention(0)`."""
        try:
            number = first_bad(*self._between, self._heals_with)
        except _OutOfRuns:
            self.exact = False
            return _around(self.ended[self._between[0] : self._between[1] + 1], self._between[1] < len(self.ended))
        if number == len(self.ended):
            return self.running
        call, intervention = self.ended[number], self._interventions[number]
        origin = self._gradient_origin if self.kind is CutGradients else self._value_origin
        return origin(call, intervention)

    def _heals_with(self, last: int) -> bool:
        """Whether it heals when all calls up to the one that ends as number `last` are treated."""
        if not self.runs_left:
            raise _OutOfRuns
        low, high = self._between
        heals = self._finite_with(self.intervention(last + 1))
        self._between = (low, last) if heals else (last + 1, high)
        return heals

    def intervention(self, number: int, repair_inputs: bool = False) -> Intervention:
        """The change that treats all calls that end before call `number`, and checks what that call is given."""
        return self.kind(number, self.ended[number].stack if number < len(self.ended) else [], repair_inputs)

    def note(self, intervention: Intervention, run: Rerun) -> None:
        """Keep what a run with this intervention showed."""
        bad = run.events[self.event].bad if self.event < len(run.events) else frozenset()
        intervention.bad_parameters = {id(p) for name, p in run.parameters().items() if name in bad}
        self._interventions[intervention.number] = intervention

    def _finite_with(self, intervention: Intervention) -> bool:
        self.runs_left -= 1
        run = self.replay(intervention)
        self.note(intervention, run)
        return self.event < len(run.events) and not run.events[self.event].bad

    def _value_origin(self, call: ModuleCall, intervention: Intervention) -> ModuleCall | None:
        """The call itself, unless it was given something bad that matters: then the code that gave it."""
        giver = next((c for c in call.stack if c.start in intervention.bad_at), None)
        if giver is None:
            return call
        self.exact = self.runs_left > 0
        if self.exact and not self._finite_with(self.intervention(intervention.number, repair_inputs=True)):
            return call  # what it was given does not matter: repairing that does not help
        return giver.parent

    def _gradient_origin(self, call: ModuleCall, intervention: Intervention) -> ModuleCall | None:
        """The innermost call that passes bad gradients on: to what it was given, its parameters, or calls in it."""
        for c in reversed(call.stack):
            bad_parameter = any(id(p) in intervention.bad_parameters for p in c.module.parameters())
            if c.start in intervention.bad_inside or bad_parameter or c.start in intervention.bad_at:
                return c
        return None


def _around(calls: list[ModuleCall], all_inside: bool) -> ModuleCall | None:
    """The innermost call around some calls; None if there is none, or if what is meant may lie outside of all."""
    levels = zip(*(call.stack for call in calls), strict=False) if all_inside else ()
    common = [level[0] for level in levels if len({call.start for call in level}) == 1]
    return common[-1] if common else None


class Intervention(RerunChange):
    """All calls that end before call `number` are treated, and the calls of a stack are checked.

    bad_at: those that were given something bad, or passed back a bad gradient. bad_inside: those with a call inside at
    whose output a bad gradient arrived. bad_parameters: ids of parameters whose gradient was bad. (Calls by `start`.)
    """

    def __init__(self, number: int, stack: list[ModuleCall], repair_inputs: bool):
        super().__init__()
        self.number, self.repair_inputs = number, repair_inputs
        self.checked = {call.start for call in stack}
        self.bad_at: set[int] = set()
        self.bad_inside: set[int] = set()
        self.bad_parameters: set[int] = set()


class RepairOutputs(Intervention):
    """For a bad loss. A -inf alone is no sign of a fault: masks are made of it."""

    def enter(self, call: ModuleCall, args: tuple, kwargs: dict) -> Any:
        if call.start in self.checked and any(map(_has_nan_or_inf, tensors_in((args, kwargs)))):
            self.bad_at.add(call.start)
            return map_tensors((args, kwargs), repair) if self.repair_inputs else None
        return None

    def leave(self, call: ModuleCall, output: Any) -> Any:
        return map_tensors(output, repair) if call.end is not None and call.end < self.number else None


class CutGradients(Intervention):
    """For bad gradients. One that arrives at a cut counts as bad: the fault may have no parameter of its own."""

    def enter(self, call: ModuleCall, args: tuple, kwargs: dict) -> None:
        if call.start in self.checked:
            self.handles += [
                tensor.register_hook(lambda gradient: self._passed_back(call, gradient))
                for tensor in tensors_in((args, kwargs))
                if tensor.requires_grad
            ]

    def leave(self, call: ModuleCall, output: Any) -> Any:
        if call.end is None or call.end >= self.number:
            return None
        return map_tensors(output, lambda tensor: cut_gradient(tensor, lambda gradient: self._arrived(call, gradient)))

    def _passed_back(self, call: ModuleCall, gradient: torch.Tensor | None) -> None:
        if gradient is not None and has_nonfinite(gradient):
            self.bad_at.add(call.start)

    def _arrived(self, call: ModuleCall, gradient: torch.Tensor) -> None:
        if has_nonfinite(gradient):
            self.bad.add("the output of a module")
            self.bad_inside |= {c.start for c in call.stack[:-1]}


def _has_nan_or_inf(tensor: torch.Tensor) -> bool:
    values = dense(tensor)
    return values is not None and has_nonfinite(tensor) and bool((values[~finite(values)] != -math.inf).any())


# -- rows of the batch -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BatchRows:
    """The answer. at_fault: all rows that have a part in a failure; smallest: one set that is enough; both None when
    rows could not be told apart, and then `why` says why."""

    batch: int | None = None
    at_fault: tuple[int, ...] | None = None
    smallest: tuple[int, ...] | None = None
    why: str = ""

    @property
    def samples(self) -> tuple[int, ...] | None:
        """The rows to name: a proper part of the batch, or None."""
        return self.at_fault if self.at_fault and self.batch and len(self.at_fault) < self.batch else None


class RowBisection:
    """The search for one bad event. root: the outermost call that the batch enters; `replay(change)` runs the step."""

    def __init__(self, root: ModuleCall | None, event: int, replay: Callable[[RerunChange], Rerun]):
        self.root, self.event, self.replay = root, event, replay
        self.every = tuple(range(root.batch or 0)) if root else ()
        self.healthy, self.runs = 0, 0
        self._known = {self.every: True}  # whether it fails, by the rows that the batch is made of
        self._failed = False  # whether any replay did

    def find(self, hint: Sequence[int] | None = None) -> BatchRows:
        """`hint`: the rows that a look at the values found; if replays confirm them, fewer are needed."""
        batch = len(self.every)
        if batch < 2:
            return BatchRows(why="the model was not given a batch of several rows")
        try:
            if why := self._why_no_healthy([row for row in self.every if row not in (hint or ())]):
                return BatchRows(batch, why=why)
            at_fault, smallest = self._confirm(hint or ()) or self._search()
            if not self._failed and not self._run(self.every):
                return BatchRows(batch, why="the step did not fail again with the rows that it failed with")
        except _OutOfRuns:
            return BatchRows(batch, why=f"the search was given up after {count(self.runs, 'run')} of the step")
        return BatchRows(batch, at_fault, smallest)

    def _confirm(self, hint: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        rest = [row for row in self.every if row not in hint]
        if not hint or not self._fails(hint) or self._fails(rest):
            return None
        return tuple(sorted(hint)), tuple(ddmin(sorted(hint), self._fails))

    def _search(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sets, rest = [], self.every
        while self._fails(rest):
            sets.append(tuple(ddmin(rest, self._fails)))
            rest = tuple(row for row in rest if row not in sets[-1])
        return tuple(sorted(sum(sets, ()))), min(sets, key=len)

    def _why_no_healthy(self, rows: list[int]) -> str:
        """Try a few rows, spread over the batch, each in place of all. "" when one is healthy."""
        if not rows:
            return "the op tracer found the fault in every row"
        spread = list(dict.fromkeys(rows[i * len(rows) // CANDIDATES] for i in range(CANDIDATES)))
        for row in spread:
            self.healthy = row
            if not self._fails([]):
                return ""
        return f"the step also fails with row {' or '.join(map(str, spread))} in place of all other rows"

    def _fails(self, rows: Sequence[int]) -> bool:
        """Whether it fails when all but these rows are copies of the healthy one."""
        source = tuple(row if row in rows else self.healthy for row in self.every)
        if source not in self._known:
            self._known[source] = self._run(source)
        return self._known[source]

    def _run(self, source: tuple[int, ...]) -> bool:
        if self.runs == AT_MOST:
            raise _OutOfRuns
        self.runs += 1
        run = self.replay(_CopiedRows(self.root, source))
        bad = self.event < len(run.events) and bool(run.events[self.event].bad)
        self._failed = self._failed or bad
        return bad


class _CopiedRows(RerunChange):
    """Row i of the batch is a copy of row source[i], in every tensor that the outermost call is given."""

    def __init__(self, root: ModuleCall | None, source: tuple[int, ...]):
        super().__init__()
        self.root, self.source = root, source

    def enter(self, call: ModuleCall, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        return (
            map_tensors((args, kwargs), self._pick) if self.root is not None and call.start == self.root.start else None
        )

    def _pick(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or not tensor.dim() or tensor.shape[0] != len(self.source):
            return tensor
        return tensor.index_select(0, torch.tensor(self.source, device=tensor.device))
