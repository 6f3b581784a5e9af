"""bottleneck(): what makes a training slow, the user's line, and the step's time with the cure in place; and the report
of it: a step by its parts, the dearest lines, the cures that were tried. Below, the watch over every step from now on,
and a report beside an earlier one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nbdebug.arguments import Subject, discover, part
from nbdebug.interrupts import interruptible, uninterrupted
from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.step_hooks import StepHook
from nbdebug.observe.validation import check_count, check_step, models_of, names_used_by, needed, optimizers_of
from nbdebug.report import Plot, Report, RuledOut, Symptom, Table, Where
from nbdebug.robust_stats import longer, rank_correlation
from nbdebug.text import clip, count, duration, figures, percent
from nbdebug.tools.speed import cures, rules
from nbdebug.tools.speed.clock import Clock, Training, apart, branch_line, run
from nbdebug.tools.speed.rules import DATA, PHASES, SpeedCure, SpeedFacts, WorkShare, middle_half

CALL = "bottleneck(step, model=, optimizer=)"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
"""A line of the user's in torch's words on a guard."""
SECONDS = 10.0
"""For the steps themselves, of which at least six run."""
MANY = 9
"""Steps from which on a trend is looked for."""
WARM, OWN, RECENT = 5, 40, 40
"""Steps that warm up, those that are the run's own measure, and the last ones that are compared with them."""
SLOWER = 1.5
"""Times that the last steps take, see `longer`."""
LONGEST = 10_000
"""Steps whose times are kept."""


def bottleneck(
    step_or_train: Any,
    *,
    loader: Any = None,
    model: Any = None,
    optimizer: Any = None,
    steps: int = 20,
    goal: float | None = None,
    try_cures: bool = True,
    names: Mapping[str, Any] | None = None,
) -> Report:
    """Where a training's time goes, which cause makes it slow, and how fast it is with the cure in place.

    step_or_train: a step of no arguments, a step of a batch (then with its loader), a loop of many steps, or a trainer
    of transformers; it runs `steps` steps, and trains as it always does: a loop is ended after them. loader: whose
    batches the step takes, or a DataLoader that it reads; model, optimizer: one, or several in a list or a dict. Left
    out, they are searched among `names`, the user's variables (default: those of the caller), and what the step uses.
    goal: steps a second that are wanted. try_cures: try the cures, each for a few seconds, in a copy of the process.

    All times are seconds. Verdicts rest on counts, and on shares and ratios within this run. On a CPU, reads of single
    values by the host are named with their count, as what a GPU would wait for. What the step raises passes unchanged;
    raises TypeError or ValueError for arguments that make no sense.
    """
    caller = sys._getframe(1)
    near = {**caller.f_globals, **caller.f_locals} if names is None else dict(names)
    check_count(steps, "steps")
    if goal is not None and not (isinstance(goal, (int, float)) and goal > 0):
        raise ValueError(f"goal is a number of steps a second above zero; got {goal!r}.")
    call, whole = loop_of(step_or_train)
    around = {**near, **names_used_by(call)}
    takes_batch = not whole and len(needed(call)) == 1
    if takes_batch and loader is None:
        loader = part("train_loader", around)[1]
        if loader is None:
            raise TypeError(
                "bottleneck needs the loader whose batches the step takes: bottleneck(step, loader=loader)."
            )
    if not takes_batch:
        check_step(call, "bottleneck")
    models = discover("model", around) if model is None else models_of(model, CALL, around)
    optimizers = discover("optimizer", around) if optimizer is None else optimizers_of(optimizer, CALL, around)
    training = Training(call, models, optimizers, loader if takes_batch else None, whole, around)
    subject = str(Subject(models, optimizers, model is not None))
    return time_training(training, "bottleneck(step)", subject, steps, goal, try_cures)


def loop_of(thing: Any) -> tuple[Callable[..., Any], bool]:
    """(what is called, whether it is a whole loop)."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is not None and isinstance(thing, trainer):
        return thing.train, True
    return thing, False


@interruptible
def time_training(
    training: Training, question: str, subject: str, steps: int = 20, goal: float | None = None, try_cures: bool = True
) -> Report:
    """What `bottleneck()` and the magics do, once it is known what is meant: the steps by the clock, the ops of some in
    a copy, and the experiments that decide."""
    facts = SpeedFacts()
    seen = apart(training, lambda: cures.observe(training))
    clock = run(training, steps, SECONDS, looking=True)
    _clocked(facts, clock)
    kinds = {name: {p.device.type for p in model.parameters()} for name, model in training.models.items()}
    facts.device = next((kind for found in kinds.values() for kind in found if kind != "cpu"), "cpu")
    facts.cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts.on_cpu = tuple(name for name, found in kinds.items() if found == {"cpu"})
    own = seen is None and torch.cuda.is_initialized() and not training.whole
    if own:  # where a step can't be wound back: three more of the user's own
        seen = cures.observe(training)
    for name, value in (seen or {}).items():
        setattr(facts, name, value)
    if seen is None:
        facts.unchecked.append("The ops of a step: they are followed in a copy of the process, which failed")
    elif not own:
        _trend(facts, training, len(clock.steps))
    if facts.device == "cuda" and rules.PROFILER not in clock.modes:  # there is one at a time
        facts.kernels = cures.kernels(training) if own else apart(training, lambda: cures.kernels(training))
    if facts.share(DATA) > rules.WAITS:
        users = {*clock.lines, *clock.update}
        facts.places["loader"] = cures.line_with(re.compile(r"\bDataLoader *\("), users, Where(phase="input"))
        found = apart(training, lambda: cures.loading_line(training))
        facts.places[DATA] = found if found is not None and found.line else facts.places["loader"]
    if try_cures:
        _try(facts, training, clock)
    return report_of(facts, question, subject, goal)


def _clocked(facts: SpeedFacts, clock: Clock) -> None:
    facts.steps, facts.ran = tuple(clock.steps[1:] or clock.steps), len(clock.steps)
    whole = sum(clock.lines.values()) or 1.0
    dearest = sorted(clock.lines.items(), key=lambda each: -each[1])
    facts.lines = tuple(WorkShare(at_site(Where(), site), t / whole) for site, t in dearest[:20])
    facts.workers, facts.backwards, facts.eval_batches = clock.workers, clock.backwards, clock.eval_batches
    facts.saves, facts.validations = max(clock.writes.values(), default=0), len(clock.validations)
    ends = {label: max(seconds, key=seconds.__getitem__, default=None) for label, seconds in clock.places.items()}
    if clock.validations:
        ends["validating"] = branch_line(clock.validations[-1], clock.update)
    facts.places = {label: at_site(Where(), site) for label, site in ends.items()}
    facts.modes = clock.modes
    for mode in clock.modes:
        if mode in cures.TURNED_ON:
            users = {*clock.lines, *clock.update}
            facts.places[mode] = cures.line_with(cures.TURNED_ON[mode], users, Where(phase="forward"))
    if clock.recompiles:
        reasons = tuple(reason.split("\n")[0][:160] for reason, _ in clock.recompiles)
        text, caller = clock.recompiles[-1]
        guard = re.sub(r"^\d+/\d+: ", "", text.split("\n")[0]).split("  #")[0].strip()
        value = re.match(r"(?:L\[')?([\w.]+)(?:'\])? ==", guard)
        inside = [Site(file, int(line), function) for file, line, function in _FRAME.findall(text)][-1:]
        site = (inside or caller) if guard.startswith(("self.", "L['self']")) else (caller or inside)
        where = at_site(Where(phase="forward"), next(iter(site), None))
        facts.recompiles = rules.Recompiles(where, reasons, value[1] if value else "")


def _trend(facts: SpeedFacts, training: Training, ran: int) -> None:
    """Steps that grow: by their time, and then by what they do."""
    times = [step.total - step.phases.get(DATA, 0.0) for step in facts.parted]
    if len(facts.steps) < MANY or facts.recompiles is not None:
        return
    block = max(len(times) // 6, 1 if facts.device == "cuda" else 2)
    lows = [min(times[i : i + block]) for i in range(0, len(times) - block + 1, block)]  # what else runs only adds
    ratio = min(lows[-2:]) / max(min(lows[:2]), 1e-9)
    if ratio < 1.25 or rank_correlation(lows) < 0.6:
        return
    late = apart(training, lambda: cures.observe(training, first=ran if training.whole else 0))
    if late is not None and facts.work and late["work"]:
        before, after = facts.work, late["work"]
        what = max(after, key=lambda name: after[name] / max(before[name], 1))
        facts.slower = rules.Slower(late["largest"], ratio, what, before[what], after[what])


def _try(facts: SpeedFacts, training: Training, clock: Clock) -> None:
    """The experiments that decide, one for each cause that comes into question, until one is left; then what else there
    is to try."""
    facts.trying = True
    while (cause := rules.name_cause(facts)) is not None:
        trial = cures.trial_of(cause, facts)
        if trial is None or facts.cure(trial.name) is not None:
            break
        facts.cures.append(dataclasses.replace(cures.try_cure(training, trial, facts), code=cause.code))
    facts.trying = False
    if facts.share(DATA) > rules.WAITS and facts.workers == 0:
        facts.cures.append(cures.with_workers(training, 2, facts.seconds()))
    cause = rules.name_cause(facts)
    if cause is None or (cause.code == "speed/host-sync" and facts.device == "cpu"):
        found = cures.beside(training, clock, facts)
        if found is not None:
            facts.beside, cure = found
            facts.cures.append(dataclasses.replace(cure, code=cause.code if cause else "speed/bookkeeping"))
            cause = rules.name_cause(facts)
    if cause is None:
        half = cures.SpeedTrial("autocast to bfloat16", cures.autocast, seconds=1.0)
        cuda = [cures.SpeedTrial("TF32", cures.tf32, seconds=1.0)] if facts.device == "cuda" else []
        trials = (half, *cuda, cures.twice_the_batch(facts)) if facts.backwards else ()
        tried = [cures.try_cure(training, each, facts) for each in trials]
        facts.cures += [cure for cure in tried if cure.measured is not None]
    elif cause.code == "speed/small-kernels" and facts.loop is not None:  # no change of ours: it is the user's text
        saved = facts.loop.of_time * (1 - 1 / facts.loop.gain) * (facts.share("forward") + facts.share("backward"))
        why = f"its ops alone: {figures(facts.loop.gain)} times as fast, measured"
        facts.cures.append(SpeedCure("the loop as one op", 1 / (1 - saved), why_not=why))


def report_of(facts: SpeedFacts, question: str, subject: str, goal: float | None = None) -> Report:
    found = rules.name_cause(facts)
    tables = [table for table in (cures_table(facts), lines_table(facts), phases_table(facts)) if table.rows]
    return Report(
        question,
        (found,) if found is not None else (),
        ruled_out=() if found is not None else tuple(ruled_out(facts)),
        unchecked=tuple(facts.unchecked),
        notes=tuple(notes(facts, goal)),
        subject=subject,
        facts={"speed": plain(facts)},
        headline="" if found is not None else headline(facts),
        steps=len(facts.steps),
        tables=tables,
        plots=(picture(facts, found.evidence["bottleneck"] if found is not None else ""),) if facts.steps else (),
    )


def rate(facts: SpeedFacts) -> str:
    """ "21 steps a second (336 samples)"."""
    seconds = facts.seconds()
    if not seconds:
        return "no step ended"
    samples = statistics.median(step.samples for step in facts.steps)
    rows = f" ({figures(samples / seconds)} samples)" if samples else ""
    return f"{figures(1 / seconds)} {'step' if 1 / seconds == 1 else 'steps'} a second{rows}"


def headline(facts: SpeedFacts) -> str:
    if not facts.steps:
        return "No step was seen."
    work, busy = sum(facts.share(phase) for phase in ("forward", "backward", "optimizer")), facts.busy
    if min(work, 1.0 if busy is None else busy) < 0.5:
        return f"No single cause makes it slow: {rate(facts)}."
    share = f"{percent(work)} of the time is the model's own work"
    if busy is not None:
        share = f"the GPU works {percent(busy)} of the time"
    return f"No bottleneck was found: {share} (compute-bound), {rate(facts)}."


def phases_table(facts: SpeedFacts) -> Table:
    """A step by its parts: median, spread (the middle half of the steps), share of all time."""
    rows = [
        [name, duration(median), f"{duration(low)} to {duration(high)}", percent(share)]
        for name, median, low, high, share in parts(facts)
    ]
    columns = ("part", "median", "middle half of the steps", "of all time")
    return Table("A step by its parts", columns, rows, f"{count(len(facts.steps), 'step')}, {rate(facts)}", open=False)


def parts(facts: SpeedFacts) -> list[tuple[str, float, float, float, float]]:
    """(name, median, ends of the middle half, share of all time) of each part that takes time."""
    times = {phase: [step.phases.get(phase, 0.0) for step in facts.parted] for phase in PHASES}
    return [(p, *middle_half(times[p]), facts.share(p)) for p in PHASES if facts.share(p) >= 0.001]


def picture(facts: SpeedFacts, bottleneck: str) -> Plot:
    """bottleneck: of the finding, "" without one."""
    slow = {"loader": DATA, "transfer": "copy", "sync": "synchronisation"}.get(bottleneck, bottleneck)
    title = f"A step takes {duration(facts.seconds())}: {rate(facts)}"
    return Plot("times", {"title": title, "parts": [list(row) for row in parts(facts)], "slow": slow})


def cures_table(facts: SpeedFacts) -> Table:
    columns = ("cure", "predicted", "measured", "loss without", "loss with")
    losses = [[figures(loss, 4) for loss in cure.losses or ()] or ["", ""] for cure in facts.cures]
    rows = [[c.name, times(c.predicted), times(c.measured) or c.why_not, *two] for c, two in zip(facts.cures, losses)]
    note = "times as fast as without it, steps with and without in turn, on a copy; the last loss without and with it"
    return Table("What was tried", columns, rows, note, open=True)


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{figures(ratio, 2)}x"


def lines_table(facts: SpeedFacts) -> Table:
    dear = [line for line in facts.lines if line.share >= 0.01]
    rows = [[line.where.place, clip(line.where.text or "", 60), percent(line.share)] for line in dear]
    note = "looked at every 5 ms, while the steps ran"
    return Table("Your dearest lines", ("place", "line", "of all time"), rows, note)


def ruled_out(facts: SpeedFacts) -> Iterator[RuledOut]:
    if not facts.steps:
        return
    waiting = f"{percent(facts.share(DATA))} of the time is waiting (from {percent(rules.WAITING)} on)"
    yield RuledOut("loader-bound", waiting)
    if not facts.unchecked:
        yield RuledOut("redundant-work", f"{percent(facts.repeated.share)} of the work repeats an earlier one")
        yield RuledOut("wrong-dtype", f"{percent(facts.double.share)} of the work is in float64")
    reads = max((each.per_step for each in facts.reads), default=0.0)
    yield RuledOut("host-sync", f"{count(round(reads), 'read')} a step at one line")
    if facts.loop is not None:
        batched = f"one batch would be {figures(facts.loop.gain, 2)} times as fast (from {rules.BATCHED:g} on)"
        yield RuledOut("small-kernels", batched)
    for phase, code in (("saving", "checkpoint-too-often"), ("validating", "eval-too-often")):
        if facts.share(phase):
            yield RuledOut(code, f"{percent(facts.share(phase))} of the time")


def notes(facts: SpeedFacts, goal: float | None) -> Iterator[str]:
    seconds = facts.seconds()
    if goal and seconds:
        reached = 1 / seconds >= goal
        said = "reached" if reached else "not reached"
        yield f"Goal: {figures(goal)} steps a second; {said} with {figures(1 / seconds)}."
    if facts.kernels is not None and facts.busy is not None:
        yield f"The GPU works {percent(facts.busy)} of a step, in {figures(round(facts.kernels[0]))} kernels."
    if facts.device == "cpu":
        yield "Measured on a CPU. A GPU makes the model's part shorter, and what it waits for as long as here."


def plain(facts: SpeedFacts) -> dict[str, Any]:
    """What `--json` prints and `--against` compares."""
    return {
        "seconds": facts.seconds(),
        "steps": [dict(step.phases) for step in facts.parted],
        "samples": statistics.median([step.samples for step in facts.steps] or [0]),
        "shares": {phase: facts.share(phase) for phase in PHASES if facts.share(phase)},
        "device": facts.device,
        "busy": facts.busy,
        "cures": [dataclasses.asdict(cure) for cure in facts.cures],
    }


# -- every step from now on -------------------------------------------------------------------------------------------


class SpeedWatch:
    """%bottleneck --watch: between two updates of one optimizer lies a step: one reading of the clock each, and nothing
    else of torch is touched. told: called once with a sentence when steps have become slower. times: seconds of the
    last steps."""

    def __init__(self, told: Callable[[str], Any] = str) -> None:
        self.told, self.steps = told, 0
        self.times: collections.deque[float] = collections.deque(maxlen=LONGEST)
        self.own: list[float] = []
        self.slow_since: int | None = None
        self._last: float | None = None
        self._optimizer: int | None = None
        self._hook: StepHook | None = None

    @uninterrupted
    def attach(self) -> SpeedWatch:
        self._hook = StepHook(self._after_update, after=True)
        return self

    @uninterrupted
    def detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizer = self._optimizer or id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        last, self._last = self._last, time.perf_counter()
        if last is None:
            return
        self.times.append(self._last - last)
        self.steps += 1
        if WARM < self.steps <= WARM + OWN:
            self.own.append(self.times[-1])
        elif self.steps % RECENT == 0:
            self._compare()

    def _compare(self) -> None:
        if self.steps < WARM + OWN + RECENT or self.ratio() < SLOWER:
            self.slow_since = None
        elif self.slow_since is None:
            self.slow_since = self.steps - RECENT
            self.told(self.sentence())

    def ratio(self) -> float:
        """How many times longer the last steps take than the run's own first ones: the smaller of two measures."""
        return longer(self.own, list(self.times)[-RECENT:]) if self.own else 1.0

    def sentence(self) -> str:
        recent = statistics.median(list(self.times)[-RECENT:])
        return (
            f"Steps have become slower since step {self.slow_since:,}: {duration(recent)} each, "
            f"{figures(self.ratio())} times the first ones."
        )

    def report(self) -> Report:
        """The times so far, and whether the last steps are slower than the run's own."""
        times = list(self.times)
        if not times:
            return Report("%bottleneck --watch", headline="No step was seen yet.")
        middle, low, high = middle_half(times)
        slow = self.slow_since is not None
        headline = f"{count(self.steps, 'step')}, {duration(middle)} each: {figures(1 / middle)} steps a second."
        last = [["a step", middle, low, high, 1.0]]
        return Report(
            "%bottleneck --watch",
            headline=headline,
            symptoms=(Symptom(self.sentence(), "%bottleneck step() now, beside a fresh run."),) if slow else (),
            steps=self.steps,
            plots=(Plot("times", {"title": f"A step takes {duration(middle)}", "parts": last}),),
            facts={"times": times[-1000:]},
        )


# -- a report and an earlier one --------------------------------------------------------------------------------------


def share_of(text: str) -> float:
    """ "5%" or "0.05" as a share. Raises ValueError for what is none."""
    with contextlib.suppress(ValueError):
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 <= value < 100:
            return value
    raise ValueError(f"a share is written as 5% or 0.05; got {text!r}")


def slower(now: Mapping[str, Any], earlier: Mapping[str, Any], limit: float) -> tuple[bool, str]:
    """Whether a step takes longer by more than this share than in an earlier report (`--json`), and a sentence. Raises
    ValueError for a report without steps."""
    before, after = ([sum(step.values()) for step in one["steps"]] for one in (earlier, now))
    if not before or not after:
        raise ValueError("a report without steps can't be compared")
    grown = longer(before, after) - 1 > limit
    names = sorted({name for one in (earlier, now) for step in one["steps"] for name in step})
    old, new = ({n: statistics.median(s.get(n, 0.0) for s in one["steps"]) for n in names} for one in (earlier, now))
    most = max(names, key=lambda name: new[name] - old[name], default="")
    was, now_is = statistics.median(before), statistics.median(after)
    change = f"{figures(now_is / was)} times the earlier step: {duration(was)}, now {duration(now_is)}"
    where = f"; most of it in {most}" if grown and most else ""
    return grown, f"{change} (limit {percent(limit)} longer){where}."


def load_times(path: str) -> Mapping[str, Any]:
    """The times in a file that `--json` wrote. Raises ValueError where it holds none."""
    held = None
    with contextlib.suppress(ValueError):  # of a file that is no JSON
        held = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    times = held.get("facts", {}).get("speed") if isinstance(held, dict) else None
    if not isinstance(times, dict) or not isinstance(times.get("steps"), list):
        raise ValueError(f"{path} is no report of `nbdebug bottleneck --json`")
    return times
