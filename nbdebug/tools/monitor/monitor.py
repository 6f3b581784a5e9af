"""`monitor`: the machine beside the steps. A thread of its own looks once a second, and never touches the training.

What it costs is kept small: reading takes one or two thousandths of a second, the counter of steps one comparison.
Nothing is read from a card that NVIDIA's own library does not give: no work is put on it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nbdebug.interrupts import uninterrupted
from nbdebug.live import Live
from nbdebug.report import Finding, Plot, Report, RuledOut, Table
from nbdebug.text import count, figures, size
from nbdebug.tools.monitor.rules import MACHINE_RULES, SAMPLES, MachineFacts, MachineSample

KEPT = 7200
"""Samples that are kept: two hours at one a second; older ones are thinned out."""
POINTS = 240
CHILDREN_EVERY = 5
"""Samples: the memory of children (the loader's workers) is read anew."""
GIB = 2**30
REASONS = (
    (0x20 | 0x40, "heat"),  # software and hardware thermal slowdown
    (0x80, "power brake"),
    (0x08, "a slowdown of the hardware"),
)
"""NVIDIA's clock event reasons that a person can act on. A power cap alone (0x04) is how a busy card runs."""


def monitor(*, every: float = 1.0, folder: str | os.PathLike[str] = ".") -> Monitor:
    """Watch the machine beside a training until `close`, or the end of a with-block: card, processor, memory, disk and
    network, and the steps of the optimizer. every: seconds between two looks, 0.05 at the least; folder: whose disk.

    Returns a Monitor: `report()` so far, `frame` as a DataFrame, `live(show)` to draw meanwhile. The card needs
    nvidia-ml-py (`pip install torch-nbdebug[gpu]`); without it the rest is watched. Raises ValueError for other values.
    """
    if not 0.05 <= every < 86_400:
        raise ValueError(f"every is the number of seconds between two looks, at least 0.05; got {every!r}.")
    if not os.path.isdir(folder):
        raise ValueError(f"folder is the folder that the run writes to; {os.fspath(folder)!r} is none.")
    return Monitor(every, os.fspath(folder)).open()


class Monitor:
    """samples: in order. marks: (time, name) of what was found meanwhile. fault: why it has ended by itself, or "";
    cost: seconds of the processor that looking took in all."""

    def __init__(self, every: float, folder: str) -> None:
        self.every, self.folder = every, folder
        self.samples: list[MachineSample] = []
        self.marks: collections.deque[tuple[float, str]] = collections.deque(maxlen=20)
        self.steps, self.fault, self.cost = 0, "", 0.0
        self.began = time.time()
        self._optimizer: int | None = None
        self._hook: Any = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._machine = MachineSensors(folder)

    @property
    def active(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @uninterrupted
    def open(self) -> Monitor:
        """Begin to look."""
        from nbdebug.observe.step_hooks import StepHook  # imports torch

        self._hook = StepHook(self._after_update, after=True)
        self._thread = threading.Thread(target=self._run, name="nbdebug monitor", daemon=True)
        self._thread.start()
        return self

    @uninterrupted
    def close(self) -> Monitor:
        """End it, with a last look. May be called twice."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()
            self._end.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(timeout=5.0)
        if self._live is not None:
            view, self._live = self._live, None
            view.end()
        return self

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def mark(self, name: str) -> None:
        """Mark this moment in the picture."""
        self.marks.append((time.time(), str(name)[:30]))

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) == self._optimizer:
            self.steps += 1

    def _run(self) -> None:
        """The thread: a fault of ours ends it, and is told in the report."""
        try:
            self._machine.sample(0)  # the first look has nothing to compare with
            while not self._end.wait(self.every):
                self._look()
            self._look()
        except Exception as fault:  # the border: the training goes on
            self.fault = f"{type(fault).__name__}: {fault}"
        finally:
            self._machine.close()

    def _look(self) -> None:
        began = time.thread_time()
        self.samples.append(self._machine.sample(self.steps))
        if len(self.samples) > KEPT:
            self.samples[: KEPT // 2] = self.samples[: KEPT // 2 : 2]
        if self._live is not None:
            self._live.step_ended()
        self.cost += time.thread_time() - began

    # -- what is shown -------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> MachineFacts:
        return MachineFacts(list(self.samples), self._machine.host, self._machine.disk, self.folder)

    @property
    def frame(self) -> Any:
        """A DataFrame, one row a sample: time (seconds since the epoch), steps, and what MachineSample has."""
        import pandas

        return pandas.DataFrame([dataclasses.asdict(sample) for sample in self.samples])

    def live(self, show: Callable[[str], object]) -> Monitor:
        """Draw while the training runs, at most five times a second. show: called with HTML, as of grad_watch's."""
        if not callable(show):
            raise TypeError(f"live takes a function that shows HTML; got {show!r}.")
        self._live = Live(lambda: str(self.glance()._repr_mimebundle_()["text/html"]), show)
        return self

    def glance(self) -> Report:
        """The picture alone."""
        return Report("monitor()", headline=_headline(self), plots=_plots(self))

    def report(self) -> Report:
        """What was seen so far: verdicts only where they are certain."""
        facts = self.facts
        findings = [finding for check in MACHINE_RULES if (finding := check(facts)) is not None]
        return Report(
            "monitor()",
            tuple(findings),
            tuple(_ruled_out(facts, findings)),
            tuple(_unchecked(self)),
            tuple(_notes(self)),
            headline=_headline(self),
            independent=True,
            steps=self.steps,
            tables=[_table(facts)] if facts.samples else [],
            plots=_plots(self),
        )

    def figure(self) -> Any:
        """A matplotlib Figure of the courses. Raises ValueError before the second look."""
        return self.report().figure()

    def __repr__(self) -> str:
        return str(self.report())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.report()._repr_mimebundle_(include, exclude)


# -- the machine ------------------------------------------------------------------------------------------------------


class MachineSensors:
    """What the system says of itself. host, disk: sizes in bytes."""

    def __init__(self, folder: str) -> None:
        import psutil

        self.psutil, self.folder = psutil, folder
        self.process = psutil.Process()
        self.host = float(psutil.virtual_memory().total)
        self.disk = float(psutil.disk_usage(folder).total)
        self.card = CardSensors.first()
        self._count, self._children = 0, 0.0
        self._before: tuple[float, float, float] | None = None
        psutil.cpu_percent(percpu=True)

    def sample(self, steps: int) -> MachineSample:
        psutil = self.psutil
        now = time.time()
        cores = psutil.cpu_percent(percpu=True) or [math.nan]
        if self._count % CHILDREN_EVERY == 0:
            self._children = sum(self._memory_of(child) for child in self.process.children(recursive=True))
        self._count += 1
        read, sent = self._traffic(now)
        card = self.card.sample() if self.card is not None else {}
        return MachineSample(
            now,
            steps,
            own=self._memory_of(self.process) + self._children,
            free=float(psutil.virtual_memory().available),
            disk=float(psutil.disk_usage(self.folder).free),
            processor=sum(cores) / len(cores),
            core=max(cores),
            read=read,
            sent=sent,
            **card,
        )

    def _memory_of(self, process: Any) -> float:
        """Bytes of its own, without the pages of files and what it shares."""
        with contextlib.suppress(self.psutil.Error):  # it has ended meanwhile
            memory = process.memory_info()
            return float(memory.rss - getattr(memory, "shared", 0))
        return 0.0

    def _traffic(self, now: float) -> tuple[float, float]:
        """Bytes a second: of the disks, read and written, and of the network, both ways."""
        disk = net = math.nan
        with contextlib.suppress(Exception):  # not every system counts these
            counted = self.psutil.disk_io_counters()
            disk = float(counted.read_bytes + counted.write_bytes)
        with contextlib.suppress(Exception):
            counted = self.psutil.net_io_counters()
            net = float(counted.bytes_sent + counted.bytes_recv)
        before, self._before = self._before, (now, disk, net)
        if before is None or now <= before[0]:
            return math.nan, math.nan
        return (disk - before[1]) / (now - before[0]), (net - before[2]) / (now - before[0])

    def close(self) -> None:
        if self.card is not None:
            self.card.close()


class CardSensors:
    """The first card that this process can see, as NVIDIA's library tells it: no work is put on it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    @classmethod
    def first(cls) -> CardSensors | None:
        """None without a card, or without nvidia-ml-py."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml, _handle(pynvml))
        except Exception:  # no driver, no card: each raises its own
            return None

    def sample(self) -> dict[str, Any]:
        nvml, handle, values = self.nvml, self.handle, {}

        def take(name: str, read: Callable[[], Any]) -> None:
            with contextlib.suppress(Exception):  # a card need not have every sensor
                values[name] = read()

        take("card", lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        take("card_used", lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used))
        take("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        take("heat", lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)))
        take("throttled", lambda: _reason(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        return values

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.nvml.nvmlShutdown()


def _handle(nvml: Any) -> Any:
    """The card that torch calls cuda:0, by CUDA_VISIBLE_DEVICES: a number or an id."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first and not first.isdecimal():
        return nvml.nvmlDeviceGetHandleByUUID(first.encode())
    return nvml.nvmlDeviceGetHandleByIndex(int(first or 0))


def _reason(bits: int) -> str:
    return next((name for mask, name in REASONS if bits & mask), "")


# -- words and pictures -----------------------------------------------------------------------------------------------


def _headline(watch: Monitor) -> str:
    samples = list(watch.samples)
    if not samples:
        return "The machine was not looked at yet."
    last, seconds = samples[-1], samples[-1].time - watch.began
    rate = _rates(samples)
    length = f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} minutes"
    parts = [f"{count(watch.steps, 'step')} in {length}"]
    parts += [f"{figures(rate[-1][1])} steps a second now"] if watch.steps and rate else []
    parts += [f"card at {last.card:.0f}%"] if math.isfinite(last.card) else []
    parts += [f"processor at {last.processor:.0f}%", f"{size(last.own)} of memory here, {size(last.free)} free"]
    return "; ".join(parts) + "."


def _rates(samples: Sequence[MachineSample]) -> list[tuple[int, float]]:
    """Steps a second, between two looks."""
    return [
        (place, (b.steps - a.steps) / (b.time - a.time))
        for place, (a, b) in enumerate(itertools.pairwise(samples), 1)
        if b.time > a.time
    ]


def _plots(watch: Monitor) -> tuple[Plot, ...]:
    samples = list(watch.samples)
    if len(samples) < 2:
        return ()
    by_step = samples[-1].steps > 0
    start = samples[0].time

    def place(sample: MachineSample) -> float:
        return float(sample.steps) if by_step else sample.time - start

    apart = -(-len(samples) // POINTS)
    shown = samples[::apart]

    def course(name: str, unit: float = 1.0) -> list[list[float]]:
        pairs = [(place(s), getattr(s, name) / unit) for s in shown]
        return [[x, round(y, 4)] for x, y in pairs if math.isfinite(y)]

    rates = [[place(shown[n]), rate] for n, rate in _rates(shown)] if by_step else []
    panels = {
        "steps a second": {"speed": rates},
        "use in percent": {"card": course("card"), "processor": course("processor"), "busiest core": course("core")},
        "memory in GiB": {"memory of the card": course("card_used", GIB), "memory of this process": course("own", GIB)},
        "traffic in MB a second": {"disks": course("read", 1e6), "network": course("sent", 1e6)},
        "card": {"watts": course("power"), "degrees": course("heat")},
    }
    drawn = {name: {k: v for k, v in curves.items() if v} for name, curves in panels.items()}
    marks = [[_at(when, samples, place), name] for when, name in watch.marks]
    data = {
        "panels": {name: curves for name, curves in drawn.items() if curves},
        "axis": "step" if by_step else "second",
        "marks": marks,
    }
    return (Plot("losses", data),)


def _at(when: float, samples: Sequence[MachineSample], place: Callable[[MachineSample], float]) -> float:
    return place(next((s for s in samples if s.time >= when), samples[-1]))


COLUMNS = (
    ("card", "use of the card", 1.0, "%"),
    ("heat", "heat of the card", 1.0, " °C"),
    ("power", "power of the card", 1.0, " W"),
    ("processor", "processor", 1.0, "%"),
    ("core", "busiest core", 1.0, "%"),
    ("own", "memory of this process", GIB, " GiB"),
    ("free", "memory free", GIB, " GiB"),
    ("card_used", "memory of the card", GIB, " GiB"),
    ("disk", "disk free", GIB, " GiB"),
    ("read", "disks", 1e6, " MB/s"),
    ("sent", "network", 1e6, " MB/s"),
)


def _table(facts: MachineFacts) -> Table:
    """First, last, lowest and highest of each quantity."""
    rows = []
    for name, title, unit, ending in COLUMNS:
        values = [v / unit for s in facts.samples if math.isfinite(v := getattr(s, name))]
        if values:
            rows.append([title, *(f"{figures(v)}{ending}" for v in (values[0], values[-1], min(values), max(values)))])
    return Table("The machine", ("what", "at first", "now", "lowest", "highest"), rows, open=False)


def _ruled_out(facts: MachineFacts, findings: Sequence[Finding]) -> Iterator[RuledOut]:
    codes = {finding.code for finding in findings}
    samples = facts.samples
    if not samples:
        return
    if "run/disk-full" not in codes and math.isfinite(samples[-1].disk):
        yield RuledOut("a full disk", f"{size(samples[-1].disk)} are left")
    if "run/host-memory-grows" not in codes and facts.training:
        grown = samples[-1].own - facts.training[0].own
        said = f"{size(grown)} more than at the first step, {size(samples[-1].free)} free"
        yield RuledOut("memory that runs out soon", said)


def _unchecked(watch: Monitor) -> Iterable[str]:
    if watch.fault:
        yield f"Everything after an error in monitor itself ({watch.fault}); please report it."
    torch = sys.modules.get("torch")
    if watch._machine.card is None and torch is not None and torch.cuda.is_available():
        yield "The card: NVIDIA's library is missing. pip install nvidia-ml-py"
    looks = len(watch.facts.training)
    if looks < SAMPLES:
        yield f"How memory and card change: the run was too short ({count(looks, 'sample')}; it takes {SAMPLES})."


def _notes(watch: Monitor) -> Iterable[str]:
    if len(watch.samples) > 1:
        took = watch.cost / max(watch.samples[-1].time - watch.began, 1e-9)
        looks = count(len(watch.samples), "look")
        yield f"{looks}, one each {figures(watch.every)} s; they took {took:.2%} of the time of a core."
