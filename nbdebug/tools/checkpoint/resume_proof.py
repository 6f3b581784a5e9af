"""resume_proof(): does a run that was resumed go on as the one that never stopped? And if not, what was not saved?

Both runs are made in copies of this process. Where they part, each state of the other run is put back alone, until the
two agree: what had to be put back is what the file lacks, or what the loading does not read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nbdebug.process import can_copy, in_copy
from nbdebug.report import Finding, Report, RuledOut, Symptom, Table
from nbdebug.text import count, figures, listed
from nbdebug.tools.checkpoint.check_checkpoint import checkpoint_facts
from nbdebug.tools.checkpoint.facts import STEP, CheckpointFacts
from nbdebug.tools.checkpoint.rules import missing_part, name_all
from nbdebug.tools.checkpoint.run_state import ObservedRun, RunState, plain

CODES = {
    "optimizer": "optimizer-missing", "scheduler": "scheduler-missing", "scaler": "scaler-missing",
    "ema": "ema-missing", "rng": "rng-not-restored", "generator": "rng-not-restored",
    "sampler": "sampler-not-resumed", "step": "step-missing",
}  # fmt: skip
"""What had to be put back → the cause."""
AFTER = ("-missing", "sampler-not-resumed", "rng-not-restored")
"""Ends of codes that say what a run lacks: the runs decide about these."""
UNREADABLE = ("truncated-file", "not-weights", "rotated-away", "class-moved", "unsafe-pickle", "lexicographic-latest")
"""Ends of codes of files that nothing can go on from."""
Put = tuple[str, str]


def resume_proof(
    resumed: Callable[[Any], Any],
    uninterrupted: Callable[[], Any],
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    seconds: float = 120.0,
) -> Report:
    """Is a run that was resumed from this file the run that never stopped? Compared bit for bit.

    resumed: `resumed(path)` loads the file and trains on; it gives a list, such as the losses or the rows that it used.
    uninterrupted: `uninterrupted()` trains without a stop, and gives the same list, of the same steps. Both run in
    copies of this process (a fork), several times, each for at most so many seconds; nothing here changes. model,
    optimizer, …: as in `check_checkpoint`, which is asked first: a file that does not load is its finding.

    Where the two part, the states of the other run (optimizer, scheduler, scaler, averages, samplers, generators) are
    put back one by one, and the one with which both agree is named. Where the run does not repeat even without a stop,
    the report says so. Raises RuntimeError where this process can't be copied (Windows, or a GPU in use), and what the
    user's functions raise."""
    if not can_copy():
        raise RuntimeError("resume_proof copies this process, which needs fork and a GPU that is not in use yet.")
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema}
    facts = checkpoint_facts(path, **given, load=resumed)
    static = [one for one in name_all(facts) if not one.code.endswith(AFTER)]
    question, subject = "resume_proof(resumed, uninterrupted, path)", facts.name
    if any(one.code.endswith(UNREADABLE) for one in static):
        return Report(question, tuple(static), subject=subject)
    try:
        proof = _Proof(facts, lambda: resumed(path), uninterrupted, seconds)
    except Exception:
        if not static:
            raise
        return Report(question, tuple(static), subject=subject)
    if not proof.repeats:
        what = "The run that is not interrupted gives other values when it runs again."
        symptom = Symptom(what, "Seed it, and see torch.use_deterministic_algorithms.")
        headline = "This run does not repeat, even without a stop."
        return Report(question, subject=subject, symptoms=[symptom], headline=headline)
    number = len(proof.wanted)
    if proof.wanted == proof.values:
        because = f"{count(number, 'value')} of both runs are equal, bit for bit"
        headline = f"The resumed run equals the one that never stopped, in all {number} values."
        ruled_out = RuledOut("a run that goes on otherwise", because)
        return Report(question, (), (ruled_out,), subject=subject, headline=headline)
    findings = tuple(static or proof.findings())
    unknown = Symptom(proof.difference, "None of the states in the variables of your loop explains it alone.")
    pairs = enumerate(zip(proof.wanted, proof.values))
    rows = [(place, a, b) for place, (a, b) in pairs if not isinstance(a, (list, dict))]
    table = Table("Both runs", ("place", "uninterrupted", "resumed"), rows, open=True)
    report = Report(question, findings, subject=subject, tables=(table,))
    return report if findings else dataclasses.replace(report, symptoms=[unknown], headline=proof.difference)


class _Proof:
    """Both runs, and the runs with states put back."""

    def __init__(
        self, facts: CheckpointFacts, resumed: Callable[[], Any], uninterrupted: Callable[[], Any], seconds: float
    ) -> None:
        self.facts, self.resumed, self.seconds = facts, resumed, seconds
        first = self._run(ObservedRun(), uninterrupted)
        self.plainly = self._run(ObservedRun(), resumed)
        self.wanted, self.values = _list(first["values"]), _list(self.plainly["values"])
        self.at = first["backwards"] - self.plainly["backwards"]
        if self.at <= 0:
            self.at = facts.file.step or 0
        again = self._run(ObservedRun(self.at, take=True), uninterrupted)
        self.repeats = again["values"] == first["values"]
        self.state: RunState = again["state"]
        self.inputs = first["inputs"]

    def _run(self, observed: ObservedRun, function: Callable[[], Any]) -> dict[str, Any]:
        result: dict[str, Any] = in_copy(lambda: observed.run(function), self.seconds)
        return result

    @property
    def difference(self) -> str:
        """Where the two part, in a sentence."""
        place = next(
            (i for i, (a, b) in enumerate(zip(self.wanted, self.values)) if a != b),
            min(len(self.wanted), len(self.values)),
        )
        if place >= min(len(self.wanted), len(self.values)):
            return f"The resumed run gives {count(len(self.values), 'value')}, the other {len(self.wanted)}"
        a, b = self.wanted[place], self.values[place]
        numbers = (
            f": {figures(b, 6)} in place of {figures(a, 6)}"
            if isinstance(a, (int, float)) and isinstance(b, (int, float))
            else ""
        )
        return f"The resumed run parts from the other at its value {place}{numbers}"

    def findings(self) -> Iterator[Finding]:
        """What was not saved, or not put back."""
        for kind, name, proof in self._causes():
            role = "rng" if kind == "generator" else kind
            yield missing_part(self.facts, role, f"checkpoint/{CODES[kind]}", f"{self.difference}. {proof}", name)

    def _causes(self) -> Iterator[tuple[str, str, str]]:
        """(kind, name, how it was proven)."""
        other_inputs = self.plainly["inputs"] != self.inputs[self.at :]
        options = sorted(
            self.state.parts, key=lambda put: (put[0] in self.facts.entries, put[0] not in self._first(other_inputs))
        )
        options = [put for put in options if put[0] in CODES]
        if other_inputs:
            for put in [put for put in options if put[0] in ("sampler", "generator")]:
                if self._continues({put: self.state.parts[put]}):
                    kind, name = self._counter(put)
                    yield kind, name, f"With `{name}` put back, all batches after it are those of the other run"
                    return
        for early in (True, False):
            if self._agrees({}, early, True):
                yield "rng", self._generator(early), "With the states of the generators put back, all values agree"
                return
        for put in options:
            if self._agrees({put: self.state.parts[put]}):
                kind, name = self._counter(put)
                yield kind, name, f"With `{name}` put back alone, all {len(self.wanted)} values agree"
                return
        found = self._several(options)
        if found:
            yield from (
                (kind, name, f"With {count(len(found), 'state')} put back together, all values agree")
                for kind, name in found
            )
            return
        yield from self._by_the_data(other_inputs)

    def _counter(self, put: Put) -> Put:
        """An object of the user's that differs in a counter of steps alone is that counter."""
        there, here = self.state.parts[put], self._start().parts.get(put)
        if put[0] == "sampler" and isinstance(there, dict) and isinstance(here, dict):
            changed = [key for key in there if plain(there[key]) != plain(here.get(key))]
            if changed and all(type(there[key]) is int and STEP.search(key) for key in changed):
                return "step", f"{put[1]}.{changed[0]}"
        return put

    def _first(self, other_inputs: bool) -> tuple[str, ...]:
        return ("sampler", "generator") if other_inputs else ("optimizer", "scheduler", "scaler", "ema")

    def _several(self, options: list[Put]) -> list[Put]:
        """The smallest set of states with which both agree, where one is not enough."""
        needed: Mapping[Put, Any] = {put: self.state.parts[put] for put in options}
        if not needed or not self._agrees(needed, early=True, random=True):
            return []
        for put in options:
            fewer = {key: value for key, value in needed.items() if key != put}
            if self._agrees(fewer, early=True, random=True):
                needed = fewer
        chosen = list(needed)
        return chosen if self._agrees(needed) else [*chosen, ("rng", "")]

    def _by_the_data(self, other_inputs: bool) -> Iterator[tuple[str, str, str]]:
        """Causes that no state in a variable explains: a loop that counts from zero, an order that begins anew."""
        start = self._start()
        counters = {n: (v, start.counters[n]) for n, v in self.state.counters.items() if start.counters.get(n, v) != v}
        if counters and "step" not in self.facts.entries:
            name, (there, here) = max(counters.items(), key=lambda item: item[1][0] - item[1][1])
            yield "step", name, f"`{name}` begins at {here} where the other run has {there}"
        elif other_inputs and self.plainly["inputs"]:
            mark = self.plainly["inputs"][0]
            place = self.inputs.index(mark) if mark in self.inputs else None
            how = (
                f"its first batch is batch {place} of the other run, which is at batch {self.at}"
                if place is not None
                else "its batches are in another order"
            )
            yield "sampler", "", f"The data begins anew: {how}"
        elif counters:
            name, (there, here) = max(counters.items(), key=lambda item: item[1][0] - item[1][1])
            yield "step", name, f"`{name}` begins at {here} where the other run has {there}"

    def _start(self) -> RunState:
        state: RunState = self._run(ObservedRun(0, take=True), self.resumed)["state"]
        return state

    def _trial(self, put: Mapping[Put, Any], early: Mapping[str, Any], late: Mapping[str, Any]) -> dict[str, Any]:
        observed = ObservedRun(0, put=put)
        observed.early, observed.late = dict(early), dict(late)
        try:
            return self._run(observed, self.resumed)
        except Exception:  # a state that does not fit the object there: it is not the cause
            return {"values": None, "inputs": []}

    def _agrees(self, put: Mapping[Put, Any], early: bool = False, random: bool = False) -> bool:
        states = self.state.earlier if early else self.state.random
        given = states if random else {}
        result = self._trial(put, given if early else {}, {} if early else given)
        return result["values"] is not None and _list(result["values"]) == self.wanted

    def _continues(self, put: Mapping[Put, Any]) -> bool:
        """Whether all batches but the first, which was drawn before the state came back, are the other run's."""
        inputs = self._trial(put, {}, {})["inputs"]
        return len(inputs) > 1 and inputs[1:] == self.inputs[self.at + 1 :][: len(inputs) - 1]

    def _generator(self, early: bool) -> str:
        """Which of the global generators it is, where one alone is enough."""
        states = self.state.earlier if early else self.state.random
        for name, state in states.items():
            one = {name: state}
            result = self._trial({}, one if early else {}, {} if early else one)
            if result["values"] is not None and _list(result["values"]) == self.wanted:
                return name
        return listed(states, quote="")


def _list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]
