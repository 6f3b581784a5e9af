"""resume_proof(): does a run that was resumed go on as the one that never stopped? And if not, what was not saved?

Both runs are made in copies of this process. Where they part, each state of the other run is put back alone, until the
two agree: what had to be put back is what the file lacks, or what the loading does not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nbdebug.observe.variables import children
from nbdebug.process import in_process
from nbdebug.report import Finding, Report, RuledOut, Symptom, Table
from nbdebug.text import count, figures, listed
from nbdebug.tools.checkpoint.check_checkpoint import checkpoint_facts
from nbdebug.tools.checkpoint.checkpoints import Checkpoints
from nbdebug.tools.checkpoint.rules import (
    STEP,
    CheckpointFacts,
    SavedFile,
    left_in_mode,
    missing_part,
    name_all,
    not_copied,
    off_by_one,
    other_order,
)
from nbdebug.tools.checkpoint.run_state import LIBRARIES, ObservedRun, Put, RunState, form, kinds, plain
from nbdebug.trainers import held, train_until

CONFIRMED = {"optimizer": "optimizer-mismatch", "model": "prefix|shape|dtype|nonfinite|state-dict"}
"""What had to be put back → the codes of `check_checkpoint` that say why."""
UNREADABLE = ("truncated-file", "not-weights", "rotated-away", "class-moved", "unsafe-pickle", "lexicographic-latest")
"""Ends of codes of files that nothing can go on from."""
Function = Callable[[ObservedRun], Any]


def resume_proof(
    build: Callable[..., Any],
    step: Callable[..., Any] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    at: int = 10,
    steps: int = 20,
    save: Callable[[Any, str], Any] | None = None,
    load: Callable[[Any, str], Any] | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    seconds: float = 120.0,
) -> Report:
    """Is a run that was stopped, saved, loaded and trained on the run that never stopped? Compared bit for bit.

    build: `build()` gives a run of yours: an object, or a dict or tuple of its parts, ready to train. step: `step(run)`
    trains one step, and may give a value. save, load: `save(run, path)` and `load(run, path)`, your own; where they are
    not given, the run's methods of these names, its Accelerator, or `nbdebug.Checkpoints`. A Trainer of transformers,
    or (Trainer, LightningModule, loader) of Lightning, needs no step: it saves and resumes by itself. at: the step
    of the stop; steps: the last. Losses, values, rows and, at the end, weights are compared.

    Or, of a file that is there, `resume_proof(resumed, uninterrupted, path)`: `resumed(path)` loads it and trains on,
    `uninterrupted()` trains without a stop; both give the same list, such as the losses or the rows. model, optimizer,
    …: as in `check_checkpoint`.

    All runs are made in copies of this process (forks; where a GPU is in use or there is no fork, fresh processes that
    get your functions by pickle), each for at most so many seconds; nothing here changes. Where the two part, the
    states of the other run (optimizer, scheduler, scaler, averages, samplers, generators, weights, gradients) are put
    back one by one, and the one with which both agree is named. Where the run does not repeat even without a stop, the
    report says so. Raises RuntimeError where what your functions use can't be sent to a fresh process (a running
    generator), ValueError for a stop outside the run, TypeError for a run without a way to save it, and what the user's
    functions raise."""
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema}
    if path is not None:
        if step is None:
            raise TypeError("resume_proof(resumed, uninterrupted, path) takes two functions of yours.")
        facts, other = checkpoint_facts(path, **parts, load=build), step
        static, question = tuple(name_all(facts)), "resume_proof(resumed, uninterrupted, path)"
        report = _proven(facts, static, question, (lambda _: build(path), lambda _: other()), seconds)
        if report.findings or not report.tables:
            return report
        left_out = tuple(name_all(checkpoint_facts(path, **parts)))  # which the user's own way to load it may allow
        return dataclasses.replace(report, findings=left_out, symptoms=[], headline="") if left_out else report
    if not 0 < at < steps:
        raise ValueError(f"The stop lies within the run: 0 < at < steps; got at={at}, steps={steps}.")
    with tempfile.TemporaryDirectory(prefix="nbdebug-proof-") as folder:
        run = _Run(build, step, save, load, at, steps, pathlib.Path(folder))
        place = _copied(run.write, seconds)
        facts, static = _copied(lambda: run.look(place), seconds)
        question = f"resume_proof(build{', step' if step else ''}, at={at}, steps={steps})"
        return _proven(facts, static, question, (lambda seen: run.resumed(place, seen), run.whole), seconds)


def _copied(function: Callable[[], Any], seconds: float) -> Any:
    """What the function gives in a copy of this process. What it imports there is imported here, for the next."""

    def run() -> tuple[Any, list[str]]:
        return function(), [name for name in sys.modules if name.startswith(("torch.", *LIBRARIES))]

    value, modules = in_process(run, seconds)
    for name in modules:
        with contextlib.suppress(Exception):  # it is only for speed
            importlib.import_module(name)
    return value


def _proven(
    facts: CheckpointFacts, static: tuple[Finding, ...], question: str, runs: tuple[Function, Function], seconds: float
) -> Report:
    """static: what is seen in the file alone; runs: the resumed one, and that without a stop."""
    report = Report(question, static, subject=facts.name)
    if any(one.code.endswith(UNREADABLE) for one in static):
        return report
    try:
        proof = _Proof(facts, static, *runs, seconds)
    except Exception:  # the user's own functions fail: what is wrong with the file says why, else the error is theirs
        if not static:
            raise
        return report
    if not proof.repeats:
        advice = "Seed it, and see torch.use_deterministic_algorithms."
        symptom = Symptom("The run that is not interrupted gives other values when it runs again.", advice)
        headline = "This run does not repeat, even without a stop."
        return dataclasses.replace(report, findings=(), symptoms=[symptom], headline=headline)
    if proof.wanted == proof.values:
        compared = listed([count(len(values), *KINDS[k]) for k, values in proof.wanted.items() if values], quote="")
        headline = f"The resumed run equals the one that never stopped, in all {compared}."
        ruled_out = RuledOut("a run that goes on otherwise", f"{compared} of both runs are equal, bit for bit")
        return dataclasses.replace(report, findings=(), ruled_out=(ruled_out,), headline=headline)
    findings = proof.findings()
    unknown = Symptom(proof.difference, "None of the states in the variables of your loop explains it alone.")
    a, b = (run["values"] or run.get("losses", []) for run in (proof.wanted, proof.values))
    rows = [(place, x, y) for place, (x, y) in enumerate(zip(a, b)) if not isinstance(x, (list, tuple, dict))]
    table = Table("Both runs", ("place", "uninterrupted", "resumed"), rows, open=True)
    report = dataclasses.replace(report, findings=findings, tables=(table,))
    return report if findings else dataclasses.replace(report, symptoms=[unknown], headline=proof.difference)


KINDS = {"rows": ("batch", "batches"), "losses": ("loss", "losses"), "values": ("value",), "weights": ("model",)}
"""What is compared, in the singular, and the plural that is none in -s."""


@dataclasses.dataclass
class _Run:
    """The user's run in the form of `build` and `step`, or a library's trainer: three ways to train it."""

    build: Callable[[], Any]
    step: Callable[[Any], Any] | None
    save: Callable[[Any, str], Any] | None
    load: Callable[[Any, str], Any] | None
    at: int
    steps: int
    folder: pathlib.Path

    def whole(self, seen: ObservedRun) -> dict[str, Any]:
        return {"values": self._train(self.build(), self.steps, seen)[self.at :]}

    def resumed(self, place: str, seen: ObservedRun) -> dict[str, Any]:
        run = self.build()
        if self.step is not None:
            self._pair(run)[1](place)
        return {"values": self._train(run, self.steps, seen, resume=place)}

    def write(self) -> str:
        """Train up to the stop, and save; the path of what was written."""
        run, path = self.build(), str(self.folder / "stopped.pt")
        self._train(run, self.at, save=path)
        if self.step is not None:
            self._pair(run)[0](path)
        there = sorted(self.folder.glob("checkpoint-*")) or sorted(self.folder.iterdir())
        if not there:
            raise FileNotFoundError(f"Nothing was saved at {path!r}, which your function was called with.")
        return str(there[-1]) if not os.path.exists(path) else path

    def look(self, place: str) -> tuple[CheckpointFacts, tuple[Finding, ...]]:
        """What `check_checkpoint` sees in it, beside the run's model and optimizer."""
        names = {"run": self.build()}
        try:
            model, own, new = (list(held(k, names).values()) for k in ("model", "optimizer", "new_optimizer"))
            one: dict[str, Any] = {k: v[0] for k, v in (("model", model), ("optimizer", own or new)) if len(v) == 1}
            facts = checkpoint_facts(place, load=self.load, **one)
        except FileNotFoundError:  # a form that is not known, such as a folder of the user's own: the runs decide alone
            return CheckpointFacts(SavedFile(place), pathlib.Path(place).name), ()
        static, facts.file.tree, facts.own = tuple(name_all(facts)), None, {}  # what is not needed is not sent
        return facts, static

    def _pair(self, run: Any) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
        """How this run is saved and loaded: by the user's functions, its methods, its Accelerator, or `Checkpoints`."""
        save, load = self.save, self.load
        if save is not None and load is not None:
            return lambda path: save(run, path), lambda path: load(run, path)
        known = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", ())
        accelerator = next((thing for _, thing in children("run", run) if isinstance(thing, known)), None)
        for owner, end in ((run, ""), (run, "_checkpoint"), (accelerator, "_state")):
            write, read = getattr(owner, f"save{end}", None), getattr(owner, f"load{end}", None)
            if write is not None and read is not None:
                return write, read
        found = kinds(dict(children("run", run))).items()
        parts = {re.sub(r"\W+|^run", "", n): part for (_, n), part in found if form(part) not in ("value", "values")}
        if not parts:
            raise TypeError("resume_proof finds no way to save this run: give save=… and load=…, of (run, path).")
        return lambda path: Checkpoints(path, **parts).save(self.at), lambda path: Checkpoints(path, **parts).resume()

    def _train(
        self, run: Any, last: int, seen: ObservedRun | None = None, save: str = "", resume: str | None = None
    ) -> list[Any]:
        """Train up to this step; the values of the steps."""
        if self.step is not None:
            return [self.step(run) for _ in range(self.at if resume else 0, last)]
        trainer, *others = run if isinstance(run, tuple) else (run,)
        if seen is not None:
            seen.trainer = trainer
        if not train_until(trainer, others, last, save, resume):
            name = type(trainer).__name__
            raise TypeError(f"resume_proof needs step=…, a function of the run; {name} is no trainer.")
        return []


class _Entries(dict):
    """What a file holds. asked: gets the names of the entries that were asked for, and are not there."""

    def __init__(self, entries: dict[Any, Any], asked: list[str]) -> None:
        super().__init__(entries)
        self.asked = asked

    def __contains__(self, name: object) -> bool:
        there = super().__contains__(name)
        if not there and isinstance(name, str):
            self.asked.append(name)
        return there

    def get(self, name: Any, default: Any = None) -> Any:
        _ = name in self
        return super().get(name, default)

    def pop(self, name: Any, *default: Any) -> Any:
        _ = name in self
        return super().pop(name, *default)


class _Proof:
    """Both runs, and the runs with states put back."""

    def __init__(
        self, facts: CheckpointFacts, static: tuple[Finding, ...], resumed: Function, other: Function, seconds: float
    ) -> None:
        self.facts, self.static, self.resumed, self.seconds = facts, static, resumed, seconds
        first = self._run(ObservedRun(), other)
        self.plainly = self._run(ObservedRun(), resumed)
        self.evaluates = not self.plainly["losses"]  # a forward with gradients is no training yet
        more = len(first["losses"]) - len(self.plainly["losses"])
        self.at, self.rows = more if more > 0 else facts.file.step or 0, first["rows"]
        self.past = max(len(self.rows) - len(self.plainly["rows"]), 0)
        self.wanted, self.values = self._compared(first, True), self._compared(self.plainly)
        again = self._run(ObservedRun(self.at, take=True, evaluates=self.evaluates), other)
        self.repeats = self._compared(again, True) == self.wanted
        self.state: RunState = again["state"]

    def _run(self, observed: ObservedRun, function: Function) -> dict[str, Any]:
        return dict(_copied(lambda: observed.run(function), self.seconds))

    def _compared(self, result: Mapping[str, Any], whole: bool = False) -> dict[str, list[Any]]:
        """What both runs must have in common, after the stop: all that was observed, or the values alone."""
        values = result["values"]
        if not isinstance(values, dict):
            return {"values": list(values) if isinstance(values, (list, tuple)) else [values]}
        past, at = (self.past, self.at) if whole else (0, 0)
        seen = [] if all(value is None for value in values["values"]) else values["values"]
        return {
            "rows": result["rows"][past:], "losses": result["losses"][at:], "values": seen, "weights": result["weights"]
        }  # fmt: skip

    @property
    def difference(self) -> str:
        """Where the two part, in a sentence, and what it costs."""
        kind = next(kind for kind, values in self.wanted.items() if values != self.values[kind])
        wanted, values = self.wanted[kind], self.values[kind]
        if kind == "weights":
            names = [n for a, b in zip(wanted, values) for n in a if a[n] != b.get(n)]
            return f"The weights at the end are others than those of the run that never stopped: {listed(names)}"
        parting = ((place, a, b) for place, (a, b) in enumerate(zip(wanted, values)) if a != b)
        place, a, b = next(parting, (-1, 0, 0))
        if place < 0:
            return f"The resumed run gives {count(len(values), *KINDS[kind])}, the other {len(wanted)}"
        both = isinstance(a, (int, float)) and isinstance(b, (int, float)) and kind != "rows"
        numbers = f": {figures(b, 6)} in place of {figures(a, 6)}" if both else ""
        return f"The resumed run parts from the other at its {KINDS[kind][0]} {place}{numbers}"

    def cost(self) -> str:
        """What the other way on does to the rest of the run, in a sentence."""
        parts = []
        if "rows" in self.wanted and self.wanted["rows"] != self.values["rows"]:
            after = self.values["rows"]
            twice, never = sum(m in self.rows[: self.past] for m in after), len({*self.wanted["rows"]} - {*after})
            parts.append(f"{count(twice, 'batch', 'batches')} of {len(after)} come again, {never} do not come")
        a, b = (run.get("losses") or run["values"] for run in (self.wanted, self.values))
        if a and b and all(isinstance(value, (int, float)) for value in [*a, *b]):
            parts.append(f"the mean loss is {figures(sum(b) / len(b), 4)} in place of {figures(sum(a) / len(a), 4)}")
        return "; ".join(parts)

    def findings(self) -> tuple[Finding, ...]:
        """What was not saved, or not put back, as the runs prove it: in words of `check_checkpoint` if it saw why."""
        counted = ("step-missing", "value-missing")  # a counter stands behind what it counts
        found = sorted(
            [*self._by_the_mode()] or [*self._by_the_counter()] or self._causes(),
            key=lambda one: one.code.endswith(counted),
        )
        static = (one for one in self.static if not one.code.endswith("-missing"))  # the runs decide
        return tuple(found) or tuple(static) or tuple(self._by_the_asking())

    def _cause(self, kind: str, name: str, proof: str, form: str = "") -> Finding:
        """What had to be put back. form: how it is set, of LINES."""
        because, cost = f"{self.difference}. {proof}", self.cost()
        evidence: dict[str, Any] = {"cost": cost} if cost else {}
        seen = [one for one in self.static if kind in CONFIRMED and re.search(CONFIRMED[kind], one.code)]
        if seen:
            one, evidence = seen[0], {"put back": name, "proof": because, **evidence}
        else:
            equal = sum(map(len, self.wanted.values())) if proof.endswith("both agree") else 0
            one = missing_part(self.facts, "rng" if kind == "generator" else kind, because, name, form, equal)
        if kind == "model" and not seen:  # weights or buffers
            there, here = self.state.parts["model", name], self._start.parts.get(("model", name), {})
            evidence["keys"] = [key for key in there if plain(there[key]) != plain(here.get(key))]
        return dataclasses.replace(one, evidence={**one.evidence, **evidence})

    def _causes(self) -> Iterator[Finding]:
        kept = {("kept", str(place)): state for place, state in self.state.kept.items()}
        if kept and self._helps(kept):
            file, line, _ = next(iter(self.state.kept))
            why = f"{self.difference}. With the weights of that moment both agree"
            yield not_copied(self.facts, file, line, why)
            return
        other_rows = self.plainly["rows"] != self.rows[self.past :]
        parts, data, entries = self.state.parts, ("sampler", "generator"), self.facts.entries
        options = [put for put in parts if put[0] not in ("early", "late", "input", "mode")]
        options.sort(key=lambda put: (put[0] == "model", put[0] in entries, (put[0] in data) is not other_rows))
        for put in options if other_rows else ():
            if put[0] in data and self._helps({put: parts[put]}, rows=True):
                how = f"With `{put[1]}` put back, all batches after it are those of the other run"
                yield from self._named(put, how, rows=True)
                return
        for when in ("early", "late"):
            states = {put: state for put, state in parts.items() if put[0] == when}
            if self._helps(states):
                alone = next((put[1] for put in states if self._helps({put: states[put]})), "")
                name = alone or listed([name for _, name in states], quote="")
                yield self._cause("rng", name, "With the states of the generators put back, both agree")
                return
        for put in options:
            if self._helps({put: parts[put]}):
                yield from self._named(put, f"With `{put[1]}` put back alone, both agree")
                return
        several = self._several(options)
        for put in several:
            how = f"With {count(len(several), 'state')} put back together, both agree"
            yield from self._named(put, how) if put[1] else [self._cause("rng", "", how)]
        known = any(re.search(code, one.code) for one in self.static for code in CONFIRMED.values())
        if not several and not known:  # the file itself shows no cause; the order of the data proves less
            yield from self._by_the_input() if self.evaluates else self._by_the_data(other_rows)

    def _named(self, put: Put, how: str, rows: bool = False) -> Iterator[Finding]:
        """A state as a cause. Of an object without `state_dict`: the value that is enough, else all that differ."""
        (kind, name), form = put, self.state.forms[put]
        saved, own = self.state.orders.get(put, []), self._start.orders.get(put, [])
        if saved != own and sorted(saved) == sorted(own):
            why = f"{self.difference}. With the moments of its own, each, both agree"
            yield other_order(self.facts, why, name, saved, own)
            return
        if kind == "attribute":
            tensors = self.state.parts[put]
            key = next((key for key in tensors if self._helps({put: {key: tensors[key]}})), ", ".join(tensors))
            yield self._cause(kind, f"{name}.{key}", f"With `{name}.{key}` put back alone, both agree", "attribute")
            return
        if form != "values":
            yield self._cause(kind, name, how, form if form != "object" else "")
            return
        there, here = self.state.parts[put], self._start.parts.get(put, {})
        changed = [key for key in there if plain(there[key]) != plain(here.get(key))]
        if changed and all(type(there[key]) is int and STEP.search(key) for key in changed):
            yield self._cause("step", f"{name}.{changed[0]}", how)
            return
        alone = [key for key in changed if len(changed) > 1 and self._helps({put: {key: there[key]}}, rows)]
        role = "value" if kind == "sampler" and not rows else kind
        yield from (self._cause(role, f"{name}.{key}", how, "value") for key in alone[:1] or changed)

    def _several(self, options: list[Put]) -> list[Put]:
        """The smallest set of states with which both agree, where one is not enough."""
        needed = {put: state for put, state in self.state.parts.items() if put[0] not in ("late", "input", "mode")}
        if not options or not self._helps(needed):
            return []
        for put in options:
            fewer = {key: state for key, state in needed.items() if key != put}
            if self._helps(fewer):
                needed = fewer
        chosen = {put: state for put, state in needed.items() if put[0] != "early"}
        return list(chosen) if self._helps(chosen) else [*chosen, ("rng", "")]

    def _by_the_mode(self) -> Iterator[Finding]:
        """The model is the same, and predicts in train mode where that of the other run does so in eval mode."""
        modes, now = (state.parts.get(("mode", ""), {}) for state in (self.state, self._start))
        other = [name for name in modes if name and modes[name] != now.get(name, modes[name])]
        if other and self.evaluates and self._helps({("mode", ""): modes}):
            equal, mode = sum(map(len, self.wanted.values())), "train" if modes[other[0]] else "eval"
            why = f"{self.difference}. In the mode of that run both agree"
            yield left_in_mode(self.facts, listed(other, 4), mode, why, equal)

    def _by_the_input(self) -> Iterator[Finding]:
        """The model is the same, and gets another input: which of the values that prepare it are others?"""
        put, here = ("input", ""), self._start.plain
        other = [n for n, v in self.state.plain.items() if n in here and plain(v) != plain(here[n])]
        other.sort(key=lambda name: (not isinstance(here[name], dict), hasattr(here[name], "grad")))
        if other and self._helps({put: self.state.parts.get(put)}):
            how = f"With the inputs of the other run put in, both agree, and `{other[0]}` is another than there"
            yield self._cause("value", other[0], how, "value")

    def _by_the_counter(self) -> Iterator[Finding]:
        """The resumed run is longer or shorter: does it equal the other with the file's counter one higher or lower?"""
        more = [len(self.values[k]) - len(wanted) for k, wanted in self.wanted.items() if k != "weights"]
        by = (max(more) > 0) - (min(more) < 0)
        name = self.facts.entries.get("step", "") if by else ""

        def counted(state: Any) -> Any:
            return {**state, name: state[name] + by} if type(dict(state).get(name)) is int else state

        try:
            agree = bool(name) and self._compared(self._run(ObservedRun(), self._loading(counted))) == self.wanted
        except Exception:  # the user's own functions, with a number that they do not know
            return
        tried, why = sum(map(len, self.wanted.values())), f"{self.difference}. With one {'more' if by > 0 else 'less'}"
        if agree:
            yield off_by_one(self.facts, name, by, f"{why} both agree", tried)

    def _loading(self, change: Callable[[dict[Any, Any]], Any]) -> Function:
        """The resumed run, with another dict than the file holds."""

        def resumed(seen: ObservedRun) -> Any:
            load = torch.load

            def changed(*args: Any, **kwargs: Any) -> Any:
                state = load(*args, **kwargs)
                return change(state) if type(state) is dict else state

            torch.load = changed  # in this copy of the process
            return self.resumed(seen)

        return resumed

    def _by_the_asking(self) -> Iterator[Finding]:
        """The loading asks the file for an entry that it does not hold, and goes on without."""
        asked: list[str] = []
        resumed = self._loading(lambda state: _Entries(state, asked))

        def names(seen: ObservedRun) -> list[str]:
            resumed(seen)
            return list(dict.fromkeys(asked))

        for name in self._run(ObservedRun(), names)["values"][:2]:
            one = self._cause("value", name, f"The loading asks for `{name}`, and goes on without it", "value")
            evidence = {key: value for key, value in one.evidence.items() if key != "put back"}
            yield dataclasses.replace(one, evidence=evidence)

    def _by_the_data(self, other_rows: bool) -> Iterator[Finding]:
        """Causes that no state in a variable explains: a loop that counts from zero, an order that begins anew."""
        here = self._start.counters
        counters = {n: (v, here[n]) for n, v in self.state.counters.items() if here.get(n, v) < v}
        mark, due = self.plainly["rows"][:1], self.rows[self.past : self.past + 1]  # the same: what differs is computed
        if other_rows and mark and mark != due and not (counters and "step" not in self.facts.entries):
            how = "its batches are in another order"
            if mark[0] in self.rows:
                at = self.rows.index(mark[0])
                how = f"its first batch is batch {at} of the other run, which is at batch {self.past}"
            yield self._cause("sampler", "", f"The data begins anew: {how}")
        elif counters:
            name, (there, now) = max(counters.items(), key=lambda item: item[1][0] - item[1][1])
            yield self._cause("step", name, f"`{name}` begins at {now} where the other run has {there}")

    @functools.cached_property
    def _start(self) -> Any:
        """The `RunState` of the resumed run where it goes on."""
        return self._run(ObservedRun(0, take=True, evaluates=self.evaluates), self.resumed)["state"]

    def _helps(self, states: Mapping[Put, Any], rows: bool = False) -> bool:
        """Whether both agree with these states put back. rows: in all batches but the first, drawn before."""
        try:
            orders = {("order", name): names for (_, name), names in self.state.orders.items()}
            run = ObservedRun(0, put={**orders, **states}, evaluates=self.evaluates)
            result = self._run(run, self.resumed) if states else {}
        except Exception:  # a state that does not fit the object there: it is not the cause
            return False
        if rows:
            later = result["rows"][1:]
            return bool(later) and later == self.rows[self.past + 1 :][: len(later)]
        return bool(result) and self._compared(result) == self.wanted
