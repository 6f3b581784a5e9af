"""The strategy "bisect" of `nan_trace`: find the fault by running the step again, few times, with one change each.

    repeat    run the step twice from the same state: it must come to the same bits, or a replay proves nothing
    modules   halve the module calls until one is left (guilty.py): log2(calls) runs
    ops       one run under the op tracer: the op, the line and the cause inside that module
    rows      replace rows of the batch (rows.py)

The tracer's answer is checked against the search's, which knows nothing of how the tracer thinks. Where they differ the
tracer is believed, since it follows every value, and the report says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.chapters.nan.guilty import ModuleSearch
from nbdebug.chapters.nan.repeat import StepDoesNotRepeat, differences
from nbdebug.chapters.nan.rows import Rows, RowSearch
from nbdebug.finding import Finding, Report
from nbdebug.observe.modules import ModuleNames
from nbdebug.observe.rerun import Call, Change, Rerun
from nbdebug.observe.state import Snapshot, comparable, sources

__all__ = ["StepDoesNotRepeat", "search"]


def search(
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
    hunt = _Search(step, models, optimizers, others)
    try:
        return hunt.answer(trace)
    except BaseException:
        hunt.before.restore()
        raise
    finally:
        hunt.bar.close()


class _Search:
    def __init__(self, step: Callable[[], Any], models: Mapping[str, nn.Module], optimizers: Any, others: Any):
        from tqdm.auto import tqdm  # here, because it looks for a notebook when it is imported

        self.step, self.models = step, dict(models)
        self.optimizers = list(optimizers.values()) if isinstance(optimizers, Mapping) else list(optimizers)
        self.names = ModuleNames(self.models)
        self.before = Snapshot.take(self.models, self.optimizers, others=others)
        self.replays = {"repeat": 0, "modules": 0, "ops": 0, "rows": 0}
        self.bar = tqdm(desc="nan_trace", unit=" runs", delay=2, leave=False)

    def answer(self, trace: Callable[[], Report]) -> Report:
        first, modules = self._repeat()
        event = first.first_bad_event
        if event is None:
            return Report(
                "nan_trace(step, strategy='bisect')", notes=(self._account(first),), facts={"replays": self.replays}
            )
        guilty = modules.find() if modules else None
        report = self._run("ops", trace)
        notes, findings = list(report.notes), report.findings
        facts: dict[str, Any] = {**report.facts, "replays": self.replays}
        if modules and modules.exact:
            notes += self._disagreement(report, guilty)
            facts["replays_point_at"] = self._name(guilty) or ""
        if findings:
            rows = self._rows(first, event, guilty, findings[0])
            notes += _about_rows(rows, findings[0].where.samples)
            findings = (_with_rows(findings[0], rows), *findings[1:])
            facts["rows"] = dataclasses.asdict(rows)
        if self.replays["rows"]:  # else the traced run was the last, which leaves everything where a plain one does
            self._run("plain", self.step)
        return dataclasses.replace(report, findings=findings, notes=(*notes, self._account(first)), facts=facts)

    def _run(self, stage: str, run: Callable[[], Any]) -> Any:
        """One run of the step, from the state at the beginning."""
        self.before.restore()
        result = run()
        self.replays[stage] = self.replays.get(stage, 0) + 1
        self.bar.update()
        return result

    def _replay(self, stage: str, change: Change | None = None, proof: bool = False) -> Rerun:
        rerun = Rerun(self.models, self._parameters, proof=proof, change=change)
        return self._run(stage, lambda: rerun.run(self.step))

    def _repeat(self) -> tuple[Rerun, ModuleSearch | None]:
        """The first run, and the search for the module if a loss or a gradient is bad. Raises StepDoesNotRepeat."""
        first = self._replay("repeat", proof=True)
        if first.error is not None:
            raise first.error
        random_first, event = _random_now(), first.first_bad_event
        modules = look = None
        if event is not None and first.events[event].what != "parameters":
            size = len({m for model in self.models.values() for m in model.modules()})
            modules = ModuleSearch(first, event, size, lambda change: self._replay("modules", change))
            look = modules.look(0)
        second = self._replay("repeat", look, proof=True)
        if reasons := list(differences(first, second, random_first, _random_now())):
            raise StepDoesNotRepeat(reasons) from second.error
        if modules is not None and look is not None:
            modules.saw(look, second)
        return first, modules

    def _rows(self, first: Rerun, event: int, guilty: Call | None, finding: Finding) -> Rows:
        """Rows of what the outermost call around the guilty one is given; for loss code, the last such call."""
        ended = first.ended[: first.events[event].ended]
        around = guilty or next((c for c in reversed(ended) if c.parent is None and c.batch), None)
        root = around.stack[0] if around else None
        return RowSearch(root, event, lambda change: self._replay("rows", change)).find(finding.where.samples)

    def _parameters(self) -> dict[str, torch.Tensor]:
        """All parameters by name, as they are now: a step may make new ones."""
        several = len(self.models) > 1
        found: dict[str, torch.Tensor] = {}
        for key, model in self.models.items():
            found |= model.named_parameters(key if several else "")
        known = set(map(id, found.values()))
        for g, group in enumerate(group for optimizer in self.optimizers for group in optimizer.param_groups):
            found |= {f"param_groups[{g}][{i}]": p for i, p in enumerate(group["params"]) if id(p) not in known}
        return found

    def _disagreement(self, report: Report, guilty: Call | None) -> list[str]:
        """What to say when the tracer's place is not the one that the replays point at, or inside it."""
        name = self._name(guilty)
        if report.ok:
            return [f"Replays point at {_place(name)}, but the op tracer judged that there is no fault."]
        where = report.findings[0].where
        if where.phase in ("input", "parameter", "optimizer") or _inside(where.module or "", name):
            return []
        return [
            f"Replays point at {_place(name)}, the op tracer at {_place(where.module or None)}. The tracer follows "
            "every value, so its answer is given here."
        ]

    def _name(self, call: Call | None) -> str | None:
        return self.names.of(call.module) if call else None

    def _account(self, first: Rerun) -> str:
        """The number of runs, in one sentence."""
        purposes = {
            "repeat": "to see that it repeats",
            "modules": f"to search {len(first.calls)} module calls",
            "ops": "under the op tracer",
            "rows": "to search the rows of the batch",
            "plain": "plain, at the end",
        }
        parts = [f"{n} {purposes[stage]}" for stage, n in self.replays.items() if n]
        return f"The step was run {sum(self.replays.values())} times: {', '.join(parts)}."


def _random_now() -> Any:
    return [comparable(read()) for _, read, _ in sources()]


def _place(module: str | None) -> str:
    return "code outside of modules" if module is None else f"`{module}`" if module else "the model's own code"


def _inside(module: str, guilty: str | None) -> bool:
    """Whether a finding's module is the guilty one or lies below it. "" is the model itself, and code outside of it."""
    return not module if not guilty else module == guilty or module.startswith(f"{guilty}.")


def _with_rows(finding: Finding, rows: Rows) -> Finding:
    if rows.at_fault is None:
        return finding
    return dataclasses.replace(finding, where=dataclasses.replace(finding.where, samples=rows.samples))


def _about_rows(rows: Rows, traced: tuple[int, ...] | None) -> list[str]:
    if rows.at_fault is None or rows.smallest is None:
        return [f"Rows of the batch were not told apart by replay: {rows.why}."]
    notes, few = [], _list(rows.smallest)
    if traced and rows.at_fault != tuple(sorted(traced)):
        notes.append(f"The op tracer saw the fault in rows {_list(traced)}; by replay it takes {_list(rows.at_fault)}.")
    if len(rows.smallest) == 1 < len(rows.at_fault):
        notes.append(f"Row {few} alone is enough to make the step fail.")
    elif len(rows.smallest) > 1:
        notes.append(f"Rows {few} make the step fail together; without any one of them it is finite.")
    return notes


def _list(rows: tuple[int, ...]) -> str:
    return ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
