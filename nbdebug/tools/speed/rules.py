"""What was seen of a training's time, as plain numbers and places, no tensors, all times in seconds; and the rules,
from there to the one cause that makes it slow. The first that holds answers.

Counts and ratios within one run alone: another program on the machine makes all parts of a step slower. The thresholds
are those of a trial on 27 trainings with their healthy twins; where an experiment can tell, it decides.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.registry import declared, rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.text import count, duration, figures, percent

NOWHERE, DATA = Where(), "waiting for data"
ANOMALY, PROFILER, BLOCKING = "anomaly detection", "a profiler", "CUDA_LAUNCH_BLOCKING"
DETERMINISTIC = "deterministic mode"
DEBUG_MODES = {
    ANOMALY: "torch.autograd.set_detect_anomaly(False)",
    PROFILER: "profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1))",
    DETERMINISTIC: "torch.use_deterministic_algorithms(False)",
    BLOCKING: 'os.environ.pop("CUDA_LAUNCH_BLOCKING", None)  # before torch is imported',
}
"""Torch's modes for debugging, and what to write in a training."""
FREE = 4
"""Steps in a row that a GPU runs without a wait of ours."""
PHASES = (
    DATA,
    "copy",
    "forward",
    "backward",
    "optimizer",
    "synchronisation",
    "communication",
    "saving",
    "validating",
    "rest",
)
"""The parts of a step. forward: from the batch to backward, with the loss (without a backward, all); rest: what comes
after backward and is none of the others."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """One step, with the wait for its batch. phases: seconds by the names of PHASES; samples: rows of its batch;
    compiled, started: whether torch.compile worked, or a loader started workers, in it; synced: whether the GPU was
    waited for at each border."""

    phases: Mapping[str, float]
    samples: int = 0
    compiled: bool = False
    started: bool = False
    synced: bool = False

    @property
    def total(self) -> float:
        return sum(self.phases.values())


@dataclasses.dataclass(frozen=True)
class Reads:
    """Values that the host reads at one line. per_step: how many; graph_free: how many of them without gradients;
    calls: of models without gradients in a step."""

    where: Where
    per_step: float
    graph_free: float = 0.0
    calls: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recompiles:
    """Compilations after the first of the same function. reasons: torch's own words; value: what changed, if known."""

    where: Where
    reasons: tuple[str, ...]
    value: str = ""


@dataclasses.dataclass(frozen=True)
class LongerInput:
    """A model that is called again and again with an input that keeps all of the last one. first, last: seconds of the
    first and the last call; lengths: of the input there."""

    where: Where
    calls: int
    first: float
    last: float
    lengths: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A Python loop whose iterations do not need one another. ops: a step; share: of the forward's ops; of_time: of
    their time; gain: how many times faster its ops are in one batch, measured; elements: the median size of results."""

    where: Where
    iterations: int
    ops: int
    share: float
    gain: float
    elements: int
    of_time: float = 0.0


@dataclasses.dataclass(frozen=True)
class WorkShare:
    """A part of the time at a place. share: of all of it, or of the step's op time; of_forward: of what is neither
    backward nor optimizer; what: in words."""

    where: Where
    share: float
    what: str = ""
    of_forward: float = 0.0


NOTHING = WorkShare(NOWHERE, 0.0)


@dataclasses.dataclass(frozen=True)
class EmbeddingTable:
    """A weight of which a batch reads some rows, with a dense gradient. rows, read: all of them, and those with a
    gradient that is not zero; of_weights: of the elements of all weights; of_backward: of the backward's op time, to
    fill its gradient."""

    where: Where
    rows: int
    read: int
    of_weights: float
    of_backward: float


@dataclasses.dataclass(frozen=True)
class Slower:
    """Steps that grow. ratio: of the last third of the steps to the first; what grew, from which number to which."""

    where: Where
    ratio: float
    what: str
    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class SpeedCure:
    """A change that was tried, or foretold. predicted, measured: how many times faster, None where not known; losses:
    of the same step without and with it; why_not: why it was not tried; code: of the cause that it decides about."""

    name: str
    predicted: float | None = None
    measured: float | None = None
    losses: tuple[float, float] | None = None
    why_not: str = ""
    code: str = ""


@dataclasses.dataclass
class SpeedFacts:
    """steps: those that count (the first warms up), of `ran`. cards: GPUs that could be used; on_cpu: models without a
    weight on one; kernels: of a step, their number and seconds on a GPU, None where not known. lines: where the time
    ends, the dearest first; places: the user's line of a phase or a mode, where known. modes: how often
    backward began in a mode for debugging. slower: steps that grow; double: work in
    float64; repeated: work that was done before; beside: work without which the weights
    become the same; work: "elements" that the "ops" of a step gave, {} where
    not all of them were seen; largest: the line that gave most of them. trying: an experiment that was not made yet
    counts as one that proves, so that the rules name what to try."""

    steps: tuple[StepTimes, ...] = ()
    ran: int = 0
    device: str = "cpu"
    cards: int = 0
    on_cpu: tuple[str, ...] = ()
    kernels: tuple[float, float] | None = None
    lines: tuple[WorkShare, ...] = ()
    places: dict[str, Where] = dataclasses.field(default_factory=dict)
    workers: int = 0
    saves: int = 0
    validations: int = 0
    eval_batches: int = 0
    backwards: int = 0
    reads: tuple[Reads, ...] = ()
    recompiles: Recompiles | None = None
    growth: LongerInput | None = None
    loop: Loop | None = None
    double: WorkShare = NOTHING
    repeated: WorkShare = NOTHING
    slower: Slower | None = None
    table: EmbeddingTable | None = None
    beside: WorkShare = NOTHING
    attention: WorkShare = NOTHING
    work: Mapping[str, int] = dataclasses.field(default_factory=dict)
    largest: Where = NOWHERE
    modes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    cures: list[SpeedCure] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)
    trying: bool = False

    @property
    def parted(self) -> tuple[StepTimes, ...]:
        """The steps that tell the phases: on a GPU those that were synchronised."""
        return tuple(step for step in self.steps if step.synced) or self.steps

    @property
    def busy(self) -> float | None:
        """The share of a step in which the GPU works, None where not known."""
        return min(self.kernels[1] / self.seconds(), 1.0) if self.kernels is not None and self.steps else None

    def seconds(self, phase: str | None = None) -> float:
        """The median of a step, or of a phase of it. The host runs ahead of a GPU: there rows of steps count."""
        free = [step.total for step in self.steps if not step.synced]
        if phase is not None:
            values = [step.phases.get(phase, 0.0) for step in self.parted]
        elif len(free) < len(self.steps) and free:
            values = [statistics.fmean(free[i : i + FREE]) for i in range(0, max(len(free) - FREE, 0) + 1, FREE)]
        else:
            values = [step.total for step in self.steps]
        return statistics.median(values) if values else 0.0

    def share(self, phase: str) -> float:
        """Of the time of all steps together: what happens every few steps counts as often as it happens."""
        whole = sum(step.total for step in self.parted)
        return sum(step.phases.get(phase, 0.0) for step in self.parted) / whole if whole else 0.0

    def faster(self, phase: str, part: float) -> float:
        """How many times faster a step is without this part of a phase. A GPU works as long without the host's."""
        whole = statistics.fmean(step.total for step in self.parted)
        least = self.kernels[1] if self.kernels is not None and phase in (DATA, "copy", "saving") else 0.0
        left = max(whole * (1 - part * self.share(phase)), least)
        return max(self.seconds() / left, 1.0) if left else 1.0

    def cure(self, name: str) -> SpeedCure | None:
        return next((cure for cure in self.cures if cure.name == name), None)

    def gained(self, name: str, unknown: float = math.inf) -> float:
        """How many times as fast the steps were with this cure; `unknown` where it was not measured."""
        cure = self.cure(name)
        if cure is None or cure.measured is None:
            return math.inf if cure is None and self.trying else unknown
        return cure.measured


TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
HALF = 0.5
WAITING = 0.55
"""Of a step's time: broken trainings wait 85 to 94% of it for data, healthy ones at most 33%."""
WAITS = 0.3
"""Of the time: from here on an experiment has to tell whether the data are what is slow."""
SAVING = 0.4
"""Of the time: a training that saves every few hundred steps spends hardly any."""
RECOMPILES = 3
READS = 5
BATCHED = 3.0
"""Times faster in one op: loops that should be one op gained 6 to 7, a loop that is none 1.5."""
GROWN = 1.3
"""Of the work (ops and elements) of a late step over an early one."""
COPIES = 0.4
"""Of a step's time, spent in copies to the GPU."""
REPEATED, REMEMBERED = 0.3, 1.5
"""Of a step's work, and times faster with equal results remembered: less than half of it is enough where both hold."""
BUSY = 0.9
"""Of a step the kernels' share: above it a GPU waits for nothing, though the host waits for each of them."""
IDLE, MORE_ROWS = 0.3, 1.6
"""Of a step the kernels' share, under which a GPU has little to do; rows a second of a step with twice the rows."""
LAUNCH = 60e-6
"""Seconds of a step for each of its kernels: eager torch starts one in 10 to 20 microseconds, with its backward."""
FEW_ROWS, SPARSE = 0.1, "sparse gradients of the embedding"
"""Of an embedding's rows the share that a step reads, up to which it is far less than what is updated."""
WITHOUT_LINE, STAYING = "without this line", "workers that stay"
WORTH_MOVING = 0.01
"""Seconds that a step computes on the CPU: to start the hundred kernels of a small model takes a GPU nearly as long."""


def middle_half(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of the middle half of the values; of fewer than four, of all."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 3 else (min(values), 0.0, max(values))
    return statistics.median(values), max(low, 0.0), high


def finding(
    facts: SpeedFacts, code: str, bottleneck: str, title: str, where: Where, *fixes: Fix, **evidence: Any
) -> Finding:
    """bottleneck: the part of the step that is slow. `_` in names of evidence is a space. The cure that was tried is
    evidence, too: "2.1 times as fast (2.3 predicted)"."""
    rows = {"bottleneck": bottleneck} | {key.replace("_", " "): value for key, value in evidence.items() if value}
    for cure in facts.cures:
        if cure.code == code and cure.measured is not None:
            predicted = f" ({figures(cure.predicted)} predicted)" if cure.predicted else ""
            rows[cure.name] = f"{figures(cure.measured)} times as fast{predicted}"
    return Finding(code, title, where, rows | ({"a step": duration(facts.seconds())} if facts.steps else {}), fixes)


def tried(why: str, code: str, gained: float) -> Fix:
    """A fix whose steps were so many times as fast; infinitely many: nobody knows."""
    after = {"times as fast": figures(gained)} if gained < math.inf else {}
    return Fix(why, code, bool(after) or None, after)


@rule(
    code="speed/compile-recompiles",
    title="torch.compile compiles the same function again in most steps.",
    symptom="Steps of a compiled model take many times as long as those of the plain one, for dozens of steps; then a "
    "warning about `recompile_limit` may come.",
    cause="The compiled code is valid for the values that its guards note. A number that changes each step (a "
    "counter, a weight of the loss, a Python float), or a length, fails its guard each time.",
    confirm='`TORCH_LOGS="recompiles" python train.py` prints each guard that failed.',
    fix="Give the value as a tensor (`torch.tensor(weight)`), keep counters out of the compiled part, pad lengths to a "
    "few sizes, or use `torch.compile(..., dynamic=True)` for shapes.",
    reference="https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html",
)
def compile_recompiles(facts: SpeedFacts) -> Finding | None:
    seen = facts.recompiles
    if seen is None or len(seen.reasons) < max(2, min(RECOMPILES, len(facts.steps) / 2)):
        return None
    value = f"`{seen.value}` has another value each time" if seen.value else "a guard fails each time"
    recompiled, name = count(len(seen.reasons), "time"), seen.value or "value"
    title = f"torch.compile compiled again {recompiled} in {count(facts.ran, 'step')}: {value}"
    why = "Give what changes as a tensor: its value is then no part of the compiled code."
    fix = Fix(why, f"{name} = torch.tensor({name})")
    return finding(
        facts, "speed/compile-recompiles", "forward", title, seen.where, fix,
        guard=seen.reasons[-1], recompiled=recompiled,
    )  # fmt: skip


@rule(
    code="speed/debug-mode",
    title="Anomaly detection, a profiler or another aid to debugging is on while the model trains.",
    symptom="Steps take many times as long as they should, forward as well as backward, and no line stands out.",
    cause="`set_detect_anomaly(True)` has each op of the forward keep the stack that called it, and looks for NaN in "
    "all that backward computes. A profiler (`torch.profiler.profile`, `emit_nvtx`) notes each op. "
    "`CUDA_LAUNCH_BLOCKING=1` has the host wait for each kernel; deterministic algorithms are slower ones, and fill "
    "new memory. It was turned on for a search, and never off.",
    confirm="The same steps without it: `bottleneck` runs them. `torch.is_anomaly_enabled()` inside of the loop.",
    fix="Take it out. Where a NaN is looked for, `nan_trace(step)` runs one step; else put `detect_anomaly()` around "
    "that step alone. Profile a few steps, with a `schedule`.",
    reference=f"{TUNING}#disable-debugging-apis",
)
def debug_mode(facts: SpeedFacts) -> Finding | None:
    for mode, code in DEBUG_MODES.items():
        least, unknown = (1.3, 0.0) if mode == DETERMINISTIC else (1.1, math.inf)  # often on for good reasons
        seen, gained = facts.modes.get(mode, 0), facts.gained(f"without {mode}", unknown)
        costs = gained >= least if mode != BLOCKING else facts.busy is not None and facts.busy < BUSY
        if costs and seen >= max(2, HALF * facts.backwards):
            title = f"{mode[0].upper()}{mode[1:]} is on in {seen:,} of {count(facts.backwards, 'step')}"
            where, fix = facts.places.get(mode, NOWHERE), tried("Train without it.", code, gained)
            return finding(facts, "speed/debug-mode", "forward", title, where, fix, mode=mode)
    return None


@rule(
    code="speed/loader-bound",
    title="Training waits for its data most of the time.",
    symptom="The accelerator idles between short peaks; a faster one changes nothing, more workers do.",
    cause="Items are read, decoded or put together one after the other in the process that trains, and the step itself "
    "is short against that.",
    confirm="The same step on one batch again and again: `bottleneck` runs it and prints how much faster it is.",
    fix="Do once what need not be done for each item (parse a file, tokenize, build a table), use tensors in place of "
    "Python loops, and load with workers: `num_workers=4, persistent_workers=True, pin_memory=True`.",
    reference="https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading",
)
def loader_bound(facts: SpeedFacts) -> Finding | None:
    starts = [step for step in facts.parted if step.started]
    anew = sum(step.phases.get(DATA, 0.0) for step in starts) / (sum(step.total for step in facts.parted) or 1.0)
    if anew >= WAITS and (gained := facts.gained(STAYING)) >= 1.3:
        title = f"Workers are started anew for each epoch: {percent(anew)} of the time, {count(len(starts), 'time')}"
        fix = tried("Let them stay.", "DataLoader(..., persistent_workers=True)", gained)
        where = facts.places.get("loader", NOWHERE)
        return finding(facts, "speed/loader-bound", "loader", title, where, fix, workers_started=len(starts))
    share, proof = facts.share(DATA), "the same batch again"
    least = 1.5 if facts.device != "cpu" else 1 / (1 - WAITING)  # the usual steps ran in turn with it
    whole = statistics.median(step.total for step in facts.parted) if facts.steps else 0.0
    waiting, gained = facts.seconds(DATA), facts.gained(proof, 0.0)
    most = min(share, waiting / (whole or 1.0) + 0.05) >= WAITING  # else only the epochs' first steps wait
    # pairs of steps tell more than one row of them, but workers load on while a step has its batch again
    proven = gained > least and share > WAITS or (most and gained > 1.2 and facts.workers > 0)
    if not (most if gained == 0 else proven):
        return None
    waits = f"A step waits {duration(waiting)} of {duration(whole)} for its batch"
    title = f"{waits}: {percent(share)} of the time goes into loading"
    where, others = facts.places.get(DATA, NOWHERE), "Load in other processes while the step runs"
    work = where.text if where != facts.places.get("loader") else None  # the loader's own line does none
    fixes = [Fix("Do this work once, before training, or in one tensor op.", work or "# in the data set")]
    workers = {cure.name: cure.measured or 0.0 for cure in facts.cures if cure.name.startswith("num_workers")}
    best = max(workers, key=workers.__getitem__, default="")
    if best and workers[best] > 1.2:  # what was measured stands before what is only likely
        fixes.insert(0, Fix(f"{others}: {workers[best]:.2g} times as fast here.", f"DataLoader(..., {best})", True))
    elif facts.workers == 0:
        fixes.append(Fix(f"{others}.", "DataLoader(..., num_workers=4, persistent_workers=True)"))
    return finding(
        facts, "speed/loader-bound", "loader", title, where, *fixes,
        waiting=percent(share), workers=str(facts.workers),
    )  # fmt: skip


@rule(
    code="speed/checkpoint-too-often",
    title="Saving takes more time than training.",
    symptom="Steps per second depend on the disk; every few steps take many times as long as the others.",
    cause="The whole state is written every step, or every few.",
    confirm="The same steps with saving left out: `bottleneck` runs them.",
    fix="Save by time or every few hundred steps, and what is needed to resume alone.",
    reference="https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html",
)
def checkpoint_too_often(facts: SpeedFacts) -> Finding | None:
    share, where = facts.share("saving"), facts.places.get("saving", NOWHERE)
    if share < SAVING or facts.saves < 2:
        return None
    title = f"Saving takes {percent(share)} of the time: {count(facts.saves, 'file')} in {count(facts.ran, 'step')}"
    fix = Fix("Save every few hundred steps.", f"if step % 500 == 0:\n    {where.text or 'torch.save(...)'}")
    return finding(
        facts, "speed/checkpoint-too-often", "rest", title, where, fix,
        saving=percent(share),
    )  # fmt: skip


@rule(
    code="speed/transfer-bound",
    title="Batches travel to the GPU longer than it works on them.",
    symptom="The GPU idles at the start of each step; a smaller batch or pinned memory changes the rate.",
    cause="The copy comes from pageable memory, or of data that the GPU could keep or make itself, and nothing else "
    "runs meanwhile.",
    confirm="The step on a batch that is on the GPU already: `bottleneck` runs it.",
    fix="`DataLoader(..., pin_memory=True)` with `.to(device, non_blocking=True)`; send uint8 and convert there; keep "
    "on the GPU what does not change.",
    reference="https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
)
def transfer_bound(facts: SpeedFacts) -> Finding | None:
    share, where = facts.share("copy"), facts.places.get("copy", NOWHERE)
    if facts.device == "cpu" or share < COPIES:
        return None
    fix = Fix("Copy from pinned memory, while the GPU works.", "batch = batch.to(device, non_blocking=True)")
    return finding(
        facts, "speed/transfer-bound", "transfer", f"Copies to the GPU take {percent(share)} of a step", where, fix,
        copies=percent(share),
    )  # fmt: skip


@rule(
    code="speed/eval-too-often",
    title="Validation takes more time than training.",
    symptom="Training became several times slower with the validation set; its curve has a point every step or two.",
    cause="The whole validation set is run every step, or every few.",
    confirm="The same steps with validation left out: `bottleneck` runs them.",
    fix="Validate once an epoch or every few hundred steps, or on a part of the set.",
    reference=TUNING,
)
def eval_too_often(facts: SpeedFacts) -> Finding | None:
    share, where = facts.share("validating"), facts.places.get("validating", NOWHERE)
    if share < HALF or not facts.backwards or facts.validations < 2:
        return None
    often = f"{count(facts.validations, 'time')} in {count(facts.ran, 'step')}"
    text = where.text or "validate()"
    code = f"if step % 200 == 0:\n    {text}" + "\n    ...  # and the rest of the validation" * text.endswith(".eval()")
    return finding(
        facts, "speed/eval-too-often", "rest", f"Validation takes {percent(share)} of the time: it ran {often}", where,
        Fix("Validate every few hundred steps.", code),
        validating=percent(share),
    )  # fmt: skip


def table_cost(facts: SpeedFacts) -> float:
    """The share of a step in which all rows of an embedding are updated, and its gradient is filled."""
    table = facts.table
    if table is None:
        return 0.0
    return facts.share("optimizer") * table.of_weights + facts.share("backward") * table.of_backward


@rule(
    code="speed/dense-embedding-update",
    title="Each step updates all rows of a large embedding, of which a batch reads few.",
    symptom="A step takes as long for a small batch as for a large one, and longer with a larger vocabulary; most of "
    "it is the optimizer.",
    cause="The gradient of an embedding is dense, with zeros for all rows that were not read. Backward fills it, and "
    "the optimizer goes through all rows and their moments.",
    confirm="`(weight.grad != 0).any(1).float().mean()` after backward: the share of rows that a step needs.",
    fix="`nn.Embedding(..., sparse=True)`, its weight in `torch.optim.SparseAdam` (or `SGD`), all others in their own "
    "optimizer. A row's moments then stand still while nobody reads it.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html",
)
def dense_embedding_update(facts: SpeedFacts) -> Finding | None:
    table, gained = facts.table, facts.gained(SPARSE)
    if table is None or table.read > FEW_ROWS * table.rows:
        return None
    cost = table_cost(facts)
    if cost < (HALF if gained == math.inf and not facts.trying else WAITS) or gained < 1.3:
        return None
    read = f"{figures(table.read)} of {count(table.rows, 'row')}"
    title = f"{percent(cost)} of a step goes over all rows of an embedding, of which it needs {read}"
    return finding(
        facts, "speed/dense-embedding-update", "optimizer", title, table.where,
        tried("Give it sparse gradients.", "nn.Embedding(..., sparse=True)", gained),
        Fix("Only some optimizers take these.", "table_optimizer = torch.optim.SparseAdam([embedding.weight])"),
        rows_needed=read,
    )  # fmt: skip


@rule(
    code="speed/slowing-down",
    title="Every step does more work than the one before.",
    symptom="Steps per second fall during the run; a restart makes it fast again.",
    cause="A list, a graph or a tensor grows with each step, and each step goes over all of it.",
    confirm="Ops and elements of an early and of a late step, which the report counts.",
    fix="Detach what is kept, keep a running value or the last few in place of all.",
    reference=TUNING,
)
def slowing_down(facts: SpeedFacts) -> Finding | None:
    seen = facts.slower
    if seen is None or seen.after < GROWN * seen.before:
        return None
    times = f"{figures(seen.ratio)} times"
    work = f"{figures(seen.after)} {seen.what} in place of {figures(seen.before)}"
    return finding(
        facts, "speed/slowing-down", "forward",
        f"Steps become slower: the last ones take {times} the first ones, with {work}", seen.where,
        Fix("Keep a running value, or the last few.", "total = 0.9 * total + 0.1 * value.detach()"), slower=times,
    )  # fmt: skip


@rule(
    code="speed/no-kv-cache",
    title="Each new token runs the model over the whole text again.",
    symptom="The first tokens come quickly, each later one takes longer; training at that length is fast.",
    cause="The keys and values (or the state) of earlier tokens are thrown away, and computed again for every token.",
    confirm="Time of the first and of the last token. `nbdebug.generation(model, ids)` compares both ways.",
    fix="Give the model the newest token and its cache: `past_key_values`, `use_cache=True`, the state of an RNN.",
    reference="https://huggingface.co/docs/transformers/cache_explanation",
)
def no_kv_cache(facts: SpeedFacts) -> Finding | None:
    seen = facts.growth
    if seen is None:
        return None
    calls = f"{count(seen.calls, 'call')}, with {seen.lengths[0]} to {seen.lengths[1]} positions"
    title = f"The model runs over all earlier tokens again for each new one: {calls}"
    kept = "Keep what the model returns for earlier tokens, and give it the newest token."
    fix = Fix(kept, "out, past = model(newest, past)")
    return finding(
        facts, "speed/no-kv-cache", "forward", title, seen.where, fix,
        first_call=duration(seen.first), last_call=duration(seen.last),
        positions_computed_again=percent(1 - 2 / (seen.calls + 1)),
    )  # fmt: skip


@rule(
    code="speed/redundant-work",
    title="Most of the time goes into what was computed before.",
    symptom="A step takes several times as long as its newest part needs.",
    cause="A computation with equal inputs and unchanged weights stands inside a loop or in every step, or data are "
    "copied without need: `store = torch.cat([store, rows])` copies the whole store for a few rows.",
    confirm="The report names the line all of whose ops have equal inputs to earlier ones.",
    fix="Compute it once before the loop and use the result; compute what never changes before training.",
    reference=TUNING,
)
def redundant_work(facts: SpeedFacts) -> Finding | None:
    seen, proof = facts.repeated, "equal results remembered"
    proven = facts.gained(proof, 0.0) >= REMEMBERED
    if seen.where.line is None or seen.share < (REPEATED if proven else HALF):
        return None
    # the pairs of a loop share their members: nothing can be lifted out of it, all can be one op
    if facts.gained(proof) < 1.1 or (not proven and small_kernels(facts) is not None):
        return None
    what = "repeats what was computed before, with equal inputs" if seen.what == "computed again" else "only copies"
    fix = Fix("Do it once before the loop, and use the result.", f"{seen.where.text}  # before the loop")
    if seen.what == "joined again":
        what = "copies a store as a whole, to join a few rows to it"
        fix = Fix("Write into a table that is large enough from the start.", "table[count : count + len(new)] = new")
    title = f"{percent(seen.share)} of a step's work {what}"
    return finding(
        facts, "speed/redundant-work", "forward", title, seen.where, fix, repeated=percent(seen.share)
    )  # fmt: skip


@rule(
    code="speed/wrong-dtype",
    title="The model computes in double precision.",
    symptom="Steps take twice as long as before (on a GPU up to 64 times), and memory doubles; results agree.",
    cause="One float64 array (numpy's default) made a tensor float64, and the model was cast to agree with it.",
    confirm="Dtypes of the weights and of what the loader gives; the step in float32: `bottleneck` runs it.",
    fix="Cast the data once where they come in: `torch.from_numpy(table).float()`, and leave the model in float32.",
    reference="https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch-dtype",
)
def wrong_dtype(facts: SpeedFacts) -> Finding | None:
    seen = facts.double
    if seen.share < HALF or facts.gained("float32") < 1.1:
        return None
    return finding(
        facts, "speed/wrong-dtype", "forward", f"{percent(seen.share)} of a step's work is done in float64", seen.where,
        Fix("Compute in float32: cast the data where they come in.", "x = torch.from_numpy(table).float()"),
        in_float64=percent(seen.share),
    )  # fmt: skip


@rule(
    code="speed/cpu-device",
    title="The model computes on the CPU, and a GPU is there.",
    symptom="The GPU's monitor shows nothing; all cores are busy.",
    cause="The model, or a part of it, was never moved: `.to(device)` of a tensor gives a copy that has to be used.",
    confirm="`next(model.parameters()).device`.",
    fix="`model.to('cuda')` before the optimizer is made, and `batch.to('cuda')` in the loop.",
    reference="https://docs.pytorch.org/docs/stable/notes/cuda.html",
)
def cpu_device(facts: SpeedFacts) -> Finding | None:
    computing = sum(map(facts.seconds, ("forward", "backward", "optimizer")))
    if not facts.cards or not facts.on_cpu or computing < WORTH_MOVING:
        return None
    name = facts.on_cpu[0]
    title = f"`{name}` computes on the CPU, and {count(facts.cards, 'GPU')} can be used"
    fix = Fix("Move the model before the optimizer is made.", f"{name}.to('cuda')")
    return finding(facts, "speed/cpu-device", "forward", title, Where(module=name), fix, GPUs=facts.cards)


@rule(
    code="speed/small-kernels",
    title="A Python loop computes in many small ops what one op could.",
    symptom="A larger batch takes as much longer as it is larger; the GPU is in use all the time and draws no power.",
    cause="Samples, heads, moments or terms of a loss are handled one by one, and each op has a cost of its own that "
    "outweighs its work.",
    confirm="The loop's own ops in one batch: `bottleneck` times both.",
    fix="Let one op run over all of them: broadcasting, `einsum`, `reduction='none'`, `torch.vmap`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.vmap.html",
)
def small_kernels(facts: SpeedFacts) -> Finding | None:
    loop = facts.loop
    if loop is None or loop.gain < BATCHED:
        return None
    runs = f"A loop of {count(loop.iterations, 'iteration')} runs {count(loop.ops, 'small op')} a step"
    title = f"{runs}, which do not need one another"
    fix = Fix("Run them as one op over all.", "torch.vmap(body)(stacked)  # or broadcasting, einsum, reduction='none'")
    return finding(
        facts, "speed/small-kernels", "forward", title, loop.where, fix,
        ops=loop.ops, of_the_forward=percent(loop.share), elements_of_an_op=loop.elements,
        in_one_batch=f"{figures(loop.gain)} times as fast (these ops, measured)",
    )  # fmt: skip


@rule(
    code="speed/communication-bound",
    title="The processes wait for one another's gradients.",
    symptom="Two GPUs are hardly faster than one; the GPUs' use drops at the end of each backward.",
    cause="Collectives take longer than the work that they could hide behind.",
    confirm="The step inside `model.no_sync()`.",
    fix="Accumulate gradients over some batches (`no_sync`), larger batches, bf16 gradients, a faster interconnect.",
    reference="https://docs.pytorch.org/docs/stable/notes/ddp.html",
)
def communication_bound(facts: SpeedFacts) -> Finding | None:
    share = facts.share("communication")
    if share < HALF:
        return None
    fix = Fix("Exchange gradients every few batches.", "with model.no_sync(): loss.backward()")
    return finding(
        facts, "speed/communication-bound", "sync", f"Collectives take {percent(share)} of a step", NOWHERE, fix,
        communication=percent(share),
    )  # fmt: skip


@rule(
    code="speed/host-sync",
    title="The step reads single values, and the GPU waits each time.",
    symptom="The GPU is half idle though no data are waited for; a profile shows the host in cudaStreamSynchronize.",
    cause="`.item()`, `float(t)`, `if t:`, `print(t)` or `.cpu()` in a loop: the host waits for all that was asked of "
    "the GPU before, and the GPU then waits for the host.",
    confirm='`torch.cuda.set_sync_debug_mode("warn")` names each line.',
    fix="Keep the values as tensors, stack them, and read once every few steps.",
    reference="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization",
)
def host_sync(facts: SpeedFacts) -> Finding | None:
    def of_calls(reads: Reads) -> bool:  # what a model without gradients answers is read, once a call
        return reads.graph_free >= reads.per_step - 0.5 and reads.per_step <= 1.5 * reads.calls

    reads = next((each for each in facts.reads if each.per_step >= READS and not of_calls(each)), None)
    on_cpu, proof = facts.device == "cpu", "reads dropped"
    if reads is None or (not on_cpu and facts.gained(proof) < 1.03):
        return None
    number = figures(round(reads.per_step))
    effect = " (a GPU would wait for each; here it costs little)" if on_cpu else ""
    if facts.gained(WITHOUT_LINE, 0.0) >= REMEMBERED and not facts.trying:
        effect = f", and is {figures(facts.gained(WITHOUT_LINE))} times as fast without `{facts.beside.where.text}`"
    return finding(
        facts, "speed/host-sync", "sync", f"The host reads {number} values a step at one line{effect}", reads.where,
        Fix("Collect tensors, and read them together, now and then.", "values = torch.stack(values).tolist()"),
        reads_a_step=number,
    )  # fmt: skip


@rule(
    code="speed/bookkeeping",
    title="Most of a step goes into work beside the training.",
    symptom="The model's own work is short, yet steps are slow; a larger GPU changes nothing.",
    cause="Histograms, printing, metrics over all that was seen, an average of the weights, `gc.collect()` or a copy "
    "of the weights: it is done in each step, though no weight depends on it.",
    confirm="The same steps without this line: `bottleneck` runs them, and compares the weights bit by bit.",
    fix="Do it every few hundred steps, or once an epoch; keep tensors, and work them out later.",
    reference=TUNING,
)
def bookkeeping(facts: SpeedFacts) -> Finding | None:
    seen = facts.beside
    if seen.where.line is None or facts.gained(WITHOUT_LINE, 0.0) < REMEMBERED:
        return None
    title = f"{percent(seen.share)} of the time goes into a line without which the weights become the same"
    fix = Fix("Do it every few hundred steps.", f"if step % 200 == 0:\n    {seen.where.text}")
    return finding(facts, "speed/bookkeeping", "rest", title, seen.where, fix, of_the_time=percent(seen.share))


@rule(
    code="speed/slow-attention",
    title="Attention runs as plain matrix products.",
    symptom="Time and memory grow with the square of the length, far above other models of that size.",
    cause="The fused kernels take not every call: float32, a mask of their own, a head size or a GPU that they do not "
    "know make torch fall back to the products.",
    confirm="`torch.backends.cuda.can_use_flash_attention(params, debug=True)` says why a kernel refuses.",
    fix="bf16 or fp16 (autocast), `is_causal=True` in place of a causal mask, head sizes that are a multiple of 8.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
)
def slow_attention(facts: SpeedFacts) -> Finding | None:
    seen = facts.attention
    if seen.share < HALF or facts.gained("fused attention") < 1.1:
        return None
    fix = Fix("Cast to bfloat16 or float16.", "with torch.autocast('cuda', torch.bfloat16): ...")
    if seen.what.startswith("the fused"):
        fix = Fix("Let them run: leave out what switches them off.", "torch.backends.cuda.enable_flash_sdp(True)")
    return finding(
        facts, "speed/slow-attention", "forward", f"Attention runs as plain products: {seen.what}", seen.where, fix,
        calls=percent(seen.share),
    )  # fmt: skip


@rule(
    code="speed/launch-bound",
    title="The batch is too small for the GPU.",
    symptom="The GPU idles, nothing is waited for, and a batch of twice the size takes the same time.",
    cause="Starting a kernel takes longer than running it on so few rows.",
    confirm="Twice the batch in the same time: `bottleneck` runs it.",
    fix="A larger batch (`%fit` tells which fits), `torch.compile(model, mode='reduce-overhead')`.",
    reference=TUNING,
)
def launch_bound(facts: SpeedFacts) -> Finding | None:
    busy, kernels, more = facts.busy, facts.kernels, facts.gained("twice the batch", 0.0)
    if facts.device == "cpu" or busy is None or kernels is None or busy > IDLE:
        return None
    if (more or MORE_ROWS) < MORE_ROWS or facts.seconds() > LAUNCH * kernels[0]:
        return None
    title = f"The GPU works {percent(busy)} of a step, and waits for {figures(round(kernels[0]))} kernels to be started"
    return finding(
        facts, "speed/launch-bound", "forward", title, NOWHERE,
        Fix("Train with a larger batch.", "DataLoader(..., batch_size=2 * batch_size)"),
        Fix("Start all kernels at once.", "model = torch.compile(model, mode='reduce-overhead')"),
    )  # fmt: skip


def name_cause(facts: SpeedFacts) -> Finding | None:
    """The rules in their order: what hides the rest comes first. Of a training that waits for its data the step hardly
    matters."""
    return next((found for check in declared(__name__) if (found := check(facts)) is not None), None)
