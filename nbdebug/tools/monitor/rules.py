"""What a log, or the machine beside a run, shows for certain; and the facts of both, as plain numbers.

How the loss goes is `verdict`'s to judge, and the same as in every other tool. Here is what else a run can suffer from:
it was killed, it went on from something else than it had saved, its rate is zero, its machine is full.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.robust_stats import noise
from nbdebug.text import clip, count, figures, percent, size
from nbdebug.verdict import FEW, SURE

OF_LOSS = 0.1
"""A restart ends this share of the loss higher, at the least, to be one that lost something (as ROSE in verdict.py)."""
ZEROS, OF_ROWS = 10, 0.1
"""Rows with a rate of exactly zero, and their share, from which it is no schedule's first or last step."""
GREW = 10.0
"""Times: a rate that ends so far above its first value, and never fell, grows."""
SAMPLES = 30
"""Of the machine, before its course is judged."""
LEFT = 600.0
"""Seconds until memory or the disk is full, below which it is said; and at most AHEAD times what was watched."""
AHEAD = 5.0
FULL = 0.02
"""Of a disk that is left, and at most so many bytes: a checkpoint may not fit any more."""
FULL_BYTES = 2 * 2**30
THROTTLED = 0.5
"""Of the samples in which the card works."""
WORKS, IDLE, BUSY = 50.0, 20.0, 90.0
"""Percent: a card that works; one that idles; a processor core that is busy."""


@dataclasses.dataclass(frozen=True)
class Restart:
    """A run that goes on: step, line: where; from_step: the last one before. before, after: losses on either side, of
    the same steps where they were trained twice."""

    step: int
    from_step: int
    line: int
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def lost(self) -> bool:
        """Whether the loss is higher than before, by more than its noise."""
        if min(len(self.before), len(self.after)) < 3 or len(self.before) < FEW:
            return False
        values = [*map(math.isfinite, (*self.before, *self.after))]
        if not all(values):
            return False
        few = min(len(self.after), 5)
        low, high = statistics.median(self.before[-2 * FEW :]), statistics.median(self.after[:few])
        error = 1.253 * noise(self.before) * math.sqrt(1 / few + 1 / len(self.before))
        return high - low > max(SURE * error, OF_LOSS * abs(low)) and min(self.after[:few]) > low


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """One run of a log. losses, rates: (step, value); lines: of each step. unit: what a step is: "step", "epoch".

    killed: the line that says so. stopped: (place, planned, unit) where the log ends before the planned end, without a
    word, and has not grown for long. rounded: zero rates may be small ones, written with few digits."""

    file: str
    losses: Sequence[tuple[int, float]] = ()
    rates: Sequence[tuple[int, float]] = ()
    lines: dict[int, int] = dataclasses.field(default_factory=dict)
    unit: str = "step"
    restarts: Sequence[Restart] = ()
    killed: tuple[int, str] | None = None
    stopped: tuple[int, int, str] | None = None
    last_line: int = 0
    rounded: bool = False
    worse: bool = False

    def where(self, step: int | None = None, line: int | None = None, text: str | None = None) -> Where:
        line = line if line is not None or step is None else self.lines.get(step)
        return Where(file=self.file, line=line, text=text)


@dataclasses.dataclass(frozen=True)
class MachineSample:
    """The machine at one moment. time: seconds; steps: of the training so far; in percent: processor (all cores: 100),
    core (the busiest), card; in bytes: own (this process and its children), free (of the host), disk (free), card_free;
    heat in degrees, power in watts, throttled: the reason, or ""."""

    time: float
    steps: int
    own: float = math.nan
    free: float = math.nan
    disk: float = math.nan
    processor: float = math.nan
    core: float = math.nan
    card: float = math.nan
    card_used: float = math.nan
    power: float = math.nan
    heat: float = math.nan
    throttled: str = ""
    read: float = math.nan
    sent: float = math.nan


@dataclasses.dataclass(frozen=True)
class MachineFacts:
    """samples: in order; host, disk, card: sizes in bytes; folder: whose disk it is."""

    samples: Sequence[MachineSample]
    host: float = math.nan
    disk: float = math.nan
    folder: str = "."

    @property
    def training(self) -> list[MachineSample]:
        """The samples between the first step and the last."""
        if not self.samples or self.samples[-1].steps == 0:
            return []
        last = self.samples[-1].steps
        return [s for s in self.samples if s.steps > 0 and (s.steps < last or s is self.samples[-1])]


# -- logs -------------------------------------------------------------------------------------------------------------


@rule(
    code="run/killed",
    title="The run was killed from outside.",
    symptom="The log ends with Killed, SIGKILL, exitcode -9, CANCELLED or DUE TO TIME LIMIT, without a traceback.",
    cause="The system or the scheduler ended the process: no memory was left on the host, or the time of the job was "
    "over. Python has no say in it, so nothing of the run's own code could save anything.",
    confirm="`dmesg | grep -i 'killed process'` on that machine; `sacct -j JOB --format=State,MaxRSS,Elapsed` under "
    "Slurm.",
    fix="Resume from the newest checkpoint, and save more often than you can bear to lose. Where memory ran out: fewer "
    "workers, streams instead of lists. Where time did: ask for more, or chain jobs that resume.",
    reference="https://slurm.schedmd.com/sacct.html",
)
def killed(run: LoggedRun) -> Finding | None:
    if run.killed is None:
        return None
    line, text = run.killed
    limit = any(word in text.upper() for word in ("TIME LIMIT", "PREEMPT", "CANCELLED"))
    why = "the scheduler ended it" if limit else "the system killed it" if "Seg" not in text else "it crashed"
    fixes = (
        Fix("Resume from the newest whole checkpoint.", "%check_checkpoint CHECKPOINTS"),
        Fix("Watch the memory of the host in the next run.", "%monitor on"),
    )
    title = f"The run did not end by itself: {why} ({clip(text.strip(), 100)})"
    return Finding("run/killed", title, run.where(line=line, text=clip(text, 200)), {"line": text.strip()}, fixes)


@rule(
    code="run/stopped",
    title="The log ends before the run does.",
    symptom="The last line is a step in the middle: no error, no last word, and nothing has come since.",
    cause="The process was killed without a line, the terminal or notebook that held it was closed, the disk of the "
    "log is full, or the program hangs.",
    confirm="Is the process still there (`ps`, the scheduler's queue)? Then it hangs. Is there a newer checkpoint than "
    "the last line? Then only the log has ended.",
    fix="Where it hangs: `with nbdebug.hang_watch():` around the loop. Where it was killed: resume, and watch memory "
    "and disk with `%monitor on`. Start long runs so that they outlive the terminal (nohup, tmux, a job).",
    reference="https://docs.python.org/3/library/faulthandler.html",
)
def stopped(run: LoggedRun) -> Finding | None:
    if run.stopped is None or run.killed is not None:
        return None
    place, planned, unit = run.stopped
    title = f"The log ends at {unit} {place:,} of {planned:,}, without an error or a last word"
    fixes = (
        Fix("Resume from the newest whole checkpoint.", "%check_checkpoint CHECKPOINTS"),
        Fix("Watch the machine in the next run.", "%monitor on"),
    )
    evidence = {"last": place, "planned": planned, "share": percent(place / planned)}
    return Finding("run/stopped", title, run.where(line=run.last_line), evidence, fixes)


@rule(
    code="run/not-resumed",
    title="The run did not go on from where it had stopped.",
    symptom="The step number goes back, or a checkpoint is loaded, and the loss is higher than it was at these steps.",
    cause="Not all of the state was loaded: an older checkpoint, the weights without the optimizer, a schedule that "
    "begins again, or no weights at all (strict=False that matches nothing).",
    confirm="%resume_proof trains with and without a stop, and names what was not saved.",
    fix="Save and load model, optimizer, scheduler, scaler, random states and the step together.",
    reference="https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
)
def not_resumed(run: LoggedRun) -> Finding | None:
    lost = next((restart for restart in run.restarts if restart.lost), None)
    if lost is None:
        return None
    before = statistics.median(lost.before[-2 * FEW :])
    after = statistics.median(lost.after[:5])
    title = (
        f"The run goes on from {run.unit} {lost.step:,} with a loss of {figures(after)}; it had {figures(before)} there"
    )
    evidence = {"loss before": before, "loss after": after, "stopped at": lost.from_step, "goes on at": lost.step}
    fixes = (
        Fix("Find what was not saved, or not loaded.", "%resume_proof build step"),
        Fix("See what the file holds.", "%check_checkpoint CHECKPOINT --model model --optimizer optimizer"),
    )
    return Finding("run/not-resumed", title, run.where(lost.step, lost.line), evidence, fixes)


@rule(
    code="run/rate-zero",
    title="The learning rate is zero while the run goes on.",
    symptom="The log shows lr 0 for many steps, and the loss stays where it is.",
    cause="The schedule is over before the run: it counts steps where the run counts epochs, was made for fewer steps "
    "(accumulation, several ranks), or a resumed run began it anew beyond its end.",
    confirm="Compare the schedule's own number of steps with `len(loader) * epochs // accumulation`.",
    fix="Give the schedule the steps that the optimizer makes; or end the run where the schedule ends.",
    reference="https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate",
)
def rate_zero(run: LoggedRun) -> Finding | None:
    zeros = 0
    for _, rate in reversed(run.rates):
        if rate != 0:
            break
        zeros += 1
    if run.rounded or zeros < max(ZEROS, OF_ROWS * len(run.rates)):
        return None
    step = run.rates[-zeros][0]
    losses = [v for s, v in run.losses if s >= step and math.isfinite(v)]
    if len(losses) >= FEW:
        half = len(losses) // 2
        fell = statistics.median(losses[:half]) - statistics.median(losses[half:])
        if fell > max(SURE * 1.253 * noise(losses) * math.sqrt(4 / len(losses)), 0.02 * abs(losses[0])):
            return None  # it learns: another group, or another optimizer, has a rate
    share = zeros / len(run.rates)
    title = (
        f"The learning rate is 0 from {run.unit} {step:,} on, for {percent(share)} of the run: nothing is learnt there"
    )
    evidence = {"rows with a rate of 0": zeros, "of": len(run.rates), "largest rate": max(r for _, r in run.rates)}
    code = "steps = len(train_loader) * epochs // accumulation   # the schedule's total_steps"
    return Finding(
        "run/rate-zero", title, run.where(step), evidence, (Fix("Make the schedule as long as the run.", code),)
    )


@rule(
    code="run/rate-grows",
    title="The learning rate grows until the loss goes up.",
    symptom="The log shows a rate that is larger with each line, and a loss that turns and rises, or becomes NaN.",
    cause="The factor of the schedule is above one, a warm-up never ends (it counts other steps than the run makes), "
    "or the rate is multiplied anew in each step.",
    confirm="Print `scheduler.get_last_lr()` over the planned steps, without training.",
    fix="Let the rate fall after the warm-up: a factor below one, and as many steps as the run has.",
    reference="https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate",
)
def rate_grows(run: LoggedRun) -> Finding | None:
    rates = [(step, rate) for step, rate in run.rates if rate > 0 and math.isfinite(rate)]
    if len(rates) < ZEROS or not run.worse:
        return None
    falls = any(b[1] < a[1] for a, b in itertools.pairwise(rates))
    late = rates[3 * len(rates) // 4][1] < rates[-1][1]
    if falls or not late or rates[-1][1] < GREW * rates[0][1]:
        return None
    title = (
        f"The learning rate grows with each line, from {figures(rates[0][1])} to {figures(rates[-1][1])}, and the loss "
        "gets worse with it"
    )
    evidence = {"first rate": rates[0][1], "last rate": rates[-1][1]}
    code = "torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)   # below one"
    return Finding("run/rate-grows", title, run.where(rates[-1][0]), evidence, (Fix("Let the rate fall.", code),))


LOG_RULES = (killed, stopped, not_resumed, rate_zero, rate_grows)


# -- the machine ------------------------------------------------------------------------------------------------------


@rule(
    code="run/host-memory-grows",
    title="The memory of the host grows with every step, and is nearly used up.",
    symptom="The process takes more memory from step to step; then the system kills it (exitcode -9, Killed).",
    cause="Something is kept for each step: losses with their graphs, batches in a list, a cache without a limit, "
    "objects of Python in the workers.",
    confirm="`%mem step()` names what grows, and where it is made.",
    fix="Keep numbers (`loss.item()`), not tensors; bound the caches; stream what is read.",
    reference="https://docs.pytorch.org/docs/stable/notes/faq.html",
)
def host_memory_grows(machine: MachineFacts) -> Finding | None:
    samples = [s for s in machine.training if math.isfinite(s.own) and math.isfinite(s.free)]
    if len(samples) < SAMPLES:
        return None
    late = samples[len(samples) // 3 :]
    parts = [late[i * len(late) // 6 : (i + 1) * len(late) // 6] for i in range(6)]
    levels = [statistics.median(s.own for s in part) for part in parts]
    rises = [b - a for a, b in itertools.pairwise(levels)]
    first, last = late[0], late[-1]
    speed = (levels[-1] - levels[0]) / (5 / 6 * (last.time - first.time))
    if min(rises) <= 0 or min(rises) < 0.3 * max(rises) or speed <= 0:
        return None
    if first.free - last.free < 0.5 * (last.own - first.own):
        return None  # what the system can take back, such as the pages of a file
    left = last.free / speed
    if left > max(LEFT, 0.0) or left > AHEAD * (last.time - samples[0].time):
        return None
    steps = max(last.steps - first.steps, 1)
    per_step = speed * (last.time - first.time) / steps
    title = (
        f"This process takes {size(per_step)} more of the host's memory with each step; {size(last.free)} are left, "
        f"for about {count(max(int(last.free / per_step), 1), 'step')}"
    )
    evidence = {"of this process": size(last.own), "left": size(last.free), "seconds left": round(left)}
    return Finding(
        "run/host-memory-grows", title, Where(step=last.steps), evidence, (Fix("See what grows.", "%mem step()"),)
    )


@rule(
    code="run/disk-full",
    title="The disk is nearly full.",
    symptom="A checkpoint that is cut off, or `OSError: [Errno 28] No space left on device`, hours into the run.",
    cause="Checkpoints, logs and caches pile up on the disk that the run writes to.",
    confirm="`df -h .` and `du -sh *` in the run's folder.",
    fix="Keep the last few checkpoints only (`Checkpoints(folder, keep=3)`); move what is old; write elsewhere.",
    reference="https://docs.python.org/3/library/shutil.html#shutil.disk_usage",
)
def disk_full(machine: MachineFacts) -> Finding | None:
    samples = [s for s in machine.samples if math.isfinite(s.disk)]
    if not samples or not machine.disk > 0:
        return None
    left, first = samples[-1].disk, samples[0].disk
    seconds = samples[-1].time - samples[0].time
    speed = (first - left) / seconds if seconds > 0 else 0.0
    soon = (
        len(samples) >= SAMPLES
        and speed > 0
        and left / speed < min(LEFT, AHEAD * seconds)
        and first - left > left / AHEAD
    )
    if not soon and not (left < FULL * machine.disk and left < FULL_BYTES):
        return None
    title = f"The disk of {machine.folder} has {size(left)} left ({percent(left / machine.disk)})"
    title += f", and loses {size(speed * 60)} a minute" if soon else ""
    return Finding(
        "run/disk-full",
        title,
        Where(step=samples[-1].steps),
        {"left": size(left), "of": size(machine.disk)},
        (Fix("Keep the last checkpoints only.", "checkpoints = nbdebug.Checkpoints(folder, keep=3)"),),
    )


@rule(
    code="run/card-throttled",
    title="The card slows itself down.",
    symptom="Steps become slower while the card's use stays near 100%; its clock is below that of its kind.",
    cause="The card is too hot, or is given less power than it could use: cooling, a full rack, a power limit.",
    confirm="`nvidia-smi -q -d PERFORMANCE` names the reason.",
    fix="Clean and cool the machine; raise the limit where you may (`nvidia-smi -pl`). No setting of the training "
    "helps.",
    reference="https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",
)
def card_throttled(machine: MachineFacts) -> Finding | None:
    works = [s for s in machine.training if s.card >= WORKS]
    hot = [s for s in works if s.throttled]
    if len(works) < SAMPLES or len(hot) < THROTTLED * len(works):
        return None
    reason = statistics.mode(s.throttled for s in hot)
    last = hot[-1]
    heat = f", at {last.heat:.0f} degrees" if math.isfinite(last.heat) else ""
    power = f" and {last.power:.0f} W" if math.isfinite(last.power) else ""
    title = f"The card slows itself down in {percent(len(hot) / len(works))} of the samples: {reason}{heat}{power}"
    return Finding(
        "run/card-throttled",
        title,
        Where(step=last.steps),
        {"reason": reason, "samples": len(works), "slowed down": len(hot)},
        (Fix("Look at the reasons and the limits.", "!nvidia-smi -q -d PERFORMANCE,POWER"),),
    )


@rule(
    code="run/card-waits",
    title="The card idles while one core of the processor is busy.",
    symptom="The card's use is near 0%, and one core is at 100%, for most of the run.",
    cause="Python prepares the batches, reads values back, or starts many small operations, and the card waits for it.",
    confirm="`%bottleneck step()` says which part of the step it is, with the line.",
    fix="What %bottleneck names: workers for the loader, larger batches, no `.item()` in the loop.",
    reference="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
)
def card_waits(machine: MachineFacts) -> Finding | None:
    samples = [s for s in machine.training if math.isfinite(s.card) and math.isfinite(s.core)]
    waits = [s for s in samples if s.card < IDLE and s.core > BUSY]
    if len(samples) < SAMPLES or len(waits) < 0.8 * len(samples):
        return None
    card, core = (statistics.median(getattr(s, name) for s in samples) for name in ("card", "core"))
    title = f"The card is used for {card:.0f}% of the time, while one core of the processor is at {core:.0f}%: it waits"
    return Finding(
        "run/card-waits",
        title,
        Where(step=samples[-1].steps),
        {"card": f"{card:.0f}%", "busiest core": f"{core:.0f}%", "samples": len(samples)},
        (Fix("Find the part of the step, and its line.", "%bottleneck step()"),),
    )


MACHINE_RULES = (host_memory_grows, disk_full, card_throttled, card_waits)
"""Silent where nothing is certain."""
