"""What the allocator itself says while a step runs: memory that an op takes for itself and gives back is no tensor.

On CUDA the allocator keeps the highest sum since it was last asked to forget it; asked after each op, it tells the
true peak and the op in which it came, workspaces included. The CPU's allocator keeps no such sum; there torch's own
profiler is asked, which is told of each allocation; but only where an op was met that takes memory for itself there.
It knows what was allocated since it runs, so it is there from the second step on, and believed from the third.
"""

from __future__ import annotations

from typing import Any

import torch

from nbdebug.chapters.memory.stepping.ledger import Ledger
from nbdebug.observe.record import Op
from nbdebug.observe.schema import Schema

OPAQUE = frozenset({"mkldnn_rnn_layer", "scaled_dot_product_flash_attention_for_cpu", "embedding_bag"})
"""Ops that take memory for themselves on the CPU; found by comparing the profiler's events with the ledger for some
forty layers. Convolutions do where oneDNN does not compute them."""
_profiling: Any = torch.autograd


class Meter:
    """A watcher. measured: by device the true peak of the step, the event after the op in which it came, the op, and
    what of it no tensor held. base: what was allocated when the step began, by device. Forgets the allocator's own
    peak, as `torch.cuda.reset_peak_memory_stats` does. profiled: a profiler of the user's own was at work; opaque: an
    op was met that takes memory for itself on the CPU."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.measured: dict[str, tuple[int, int, Op | None, int]] = {}
        self.base: dict[str, int] = {}
        self.profiled = self.opaque = False
        self._devices: list[int] = []

    def begin_step(self) -> None:
        self.measured, self.base = {}, {}
        self._devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        for number in self._devices:
            torch.cuda.reset_peak_memory_stats(number)
            self.base[f"cuda:{number}"] = torch.cuda.memory_allocated(number)

    def before(self, op: Op, schema: Schema, args: tuple, kwargs: dict) -> None:
        return None

    def after(self, op: Op, schema: Schema, args: tuple, kwargs: dict, out: Any, kept: Any) -> None:
        """Asked after the ledger has booked what the op made."""
        if self.ledger.step == 0:
            self.profiled = self.profiled or torch._C._autograd._profiler_enabled()
            self.opaque = self.opaque or _opaque(schema.base, out)
        if schema.view or (not self._devices and not torch.cuda.is_initialized()):
            return
        if not self._devices:
            self._devices = list(range(torch.cuda.device_count()))
        for number in self._devices:
            told = torch._C._cuda_memoryStats(number)["allocated_bytes"]["all"]
            name = f"cuda:{number}"
            if told["peak"] > self.measured.get(name, (0,))[0]:
                self.measured[name] = told["peak"], self.ledger.event, op, told["peak"] - told["current"]
                torch._C._cuda_resetPeakMemoryStats(number)


def _opaque(base: str, out: Any) -> bool:
    if base != "convolution" or not isinstance(out, torch.Tensor):
        return base in OPAQUE
    return out.device.type == "cpu" and (out.dtype is torch.float64 or not torch.backends.mkldnn.is_available())


class HostMeter:
    """The allocations of the CPU as the profiler is told of them, while it runs."""

    def __init__(self) -> None:
        self.runs = False

    def start(self) -> None:
        if self.runs or torch._C._autograd._profiler_enabled():
            return
        state = _profiling.ProfilerState.CPU
        _profiling._enable_profiler_legacy(
            _profiling.ProfilerConfig(state, False, True, False, False, False, torch._C._profiler._ExperimentalConfig())
        )
        self.runs = True

    def mark(self) -> None:
        """A new step begins."""
        if self.runs:
            with torch.autograd.profiler.record_function(STEP):
                pass

    def stop(self) -> tuple[int, str]:
        """How far memory rose above where the last step began, and the op in which it did; (0, "") where not known."""
        if not self.runs:
            return 0, ""
        self.runs = False
        events: list[Any] = [event for thread in _profiling._disable_profiler_legacy() for event in thread]
        marks = [n for n, event in enumerate(events) if event.kind() == "push" and event.name() == STEP]
        live = highest = 0
        inside: list[str] = []
        place = ""
        for event in events[marks[-1] if len(marks) > 1 else len(events) :]:
            kind = event.kind()
            if kind == "push":
                inside.append(event.name())
            elif kind == "pop" and inside:
                inside.pop()
            elif kind == "memory_alloc":
                live += event.cpu_memory_usage()
                if live > highest:
                    highest, place = live, inside[-1] if inside else ""
        return highest, place


STEP = "nbdebug: a step"
