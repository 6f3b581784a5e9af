"""The tools that are compared. Each is a context manager that attaches the tool to a training and gives a function: it
runs one step under the tool and returns what the tool names, in a few words ("" where it names nothing).

What is done once for a whole training (hooks) is done on attaching, outside the time that is measured; what is done for
each step (entering a mode, `nan_trace`) is inside.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import math
import pathlib
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

import nbdebug
from tests.benchmarks.training import Training

Run = Callable[[], str]


class Tool(NamedTuple):
    """fault: the fault under which it is timed; None: on a healthy step. package: what must be installed for it."""

    name: str
    watch: Callable[[Training], contextlib.AbstractContextManager[Run]]
    fault: str | None = None
    package: str = "torch"

    def missing(self) -> str:
        """Why this tool can't be run here, or ""."""
        return "" if importlib.util.find_spec(self.package) else f"skipped: {self.package} is not installed"


@contextlib.contextmanager
def bare(training: Training) -> Iterator[Run]:
    def run() -> str:
        training.step()
        return ""

    yield run


@contextlib.contextmanager
def nbdebugged(training: Training, strategy: str) -> Iterator[Run]:
    def run() -> str:
        given = {"model": training.model, "optimizer": training.optimizer, "strategy": strategy}
        return said(nbdebug.nan_trace(training.step, **given))

    yield run


def said(report: nbdebug.Report) -> str:
    """A finding in a few words: code, module, line, rows, what the fix did."""
    if not report.findings:
        return "; ".join(report.unchecked)
    finding = report.findings[0]
    tried = [fix for fix in finding.fixes if fix.verified is not None]
    outcome = "works" if any(fix.verified for fix in tried) else "does not work"
    fix = f"fix tried: {outcome}" if tried else "no fix tried"
    rows = "all rows" if finding.where.samples is None else f"row {', '.join(map(str, finding.where.samples))}"
    return ", ".join((finding.code, finding.where.module or "no module", finding.where.place, rows, fix))


@contextlib.contextmanager
def anomaly_mode(training: Training) -> Iterator[Run]:
    def run() -> str:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                with torch.autograd.detect_anomaly():
                    training.step()
            except RuntimeError as error:
                if "returned nan values" not in str(error):
                    raise
                lines = re.findall(r'File "([^"]+)", line (\d+)', "".join(str(w.message) for w in told))
                own = [f"{pathlib.Path(f).name}, line {n}" for f, n in lines if "torch" not in pathlib.Path(f).parts]
                return ", ".join([str(error).split("'")[1], *own[-1:]])
        return ""

    yield run


@contextlib.contextmanager
def hooked(training: Training) -> Iterator[Run]:
    """A hook that tests what each leaf module returns, and stops at the first bad one."""
    with contextlib.ExitStack() as hooks:
        for name, module in leaves(training.model):
            hooks.callback(module.register_forward_hook(functools.partial(_stop_if_bad, name)).remove)

        def run() -> str:
            try:
                training.step()
            except FloatingPointError as error:
                return str(error)
            return ""

        yield run


def leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if not list(module.children())]


def _stop_if_bad(name: str, module: nn.Module, given: tuple, out: torch.Tensor) -> None:
    if not torch.isfinite(out).all():
        raise FloatingPointError(name)


@contextlib.contextmanager
def module_trace(training: Training) -> Iterator[Run]:
    """The largest magnitude of each leaf module's output, measured together and read after the step."""
    outputs: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    called: list[str] = []
    copies: list[tuple[list[int], torch.Tensor]] = []

    def keep(name: str, module: nn.Module, given: tuple, out: torch.Tensor) -> None:
        outputs[out.dtype].append((len(called), out.detach()))
        called.append(name)

    def measure(*_: object) -> None:
        for named in outputs.values():  # tensors of one dtype at a time: mixed ones would be measured one by one
            sizes = torch.stack(torch._foreach_norm([t for _, t in named], ord=math.inf)).float()
            copy = torch.empty(sizes.shape, pin_memory=sizes.is_cuda)
            copies.append(([n for n, _ in named], copy.copy_(sizes, non_blocking=True)))
        outputs.clear()

    with contextlib.ExitStack() as hooks:
        for name, module in leaves(training.model):
            hooks.callback(module.register_forward_hook(functools.partial(keep, name)).remove)
        hooks.callback(training.model.register_forward_hook(measure).remove)

        def run() -> str:
            called.clear()
            copies.clear()
            training.step()
            training.wait()
            measured = ((n, s) for calls, sizes in copies for n, s in zip(calls, sizes.tolist(), strict=True))
            bad = [n for n, size in measured if not math.isfinite(size)]
            return called[min(bad)] if bad else ""

        yield run


@contextlib.contextmanager
def overflow_debugger(training: Training) -> Iterator[Run]:
    """transformers' debugger keeps no handles of its hooks: those that came are taken away again."""
    from transformers.debug_utils import DebugUnderflowOverflow

    before = {module: set(module._forward_hooks) for module in training.model.modules()}

    def run() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                training.step()
            except ValueError as error:
                if "inf/nan detected" not in str(error):
                    raise
                return re.findall(r"^ {18}(\S+) \S+$", printed.getvalue(), re.MULTILINE)[-1]
        return ""

    try:
        DebugUnderflowOverflow(training.model)
        yield run
    finally:
        for module, known in before.items():
            for number in set(module._forward_hooks) - known:
                del module._forward_hooks[number]


def _place(location: str | None) -> str:
    """ "…/train.py:31" → "train.py, line 31"."""
    return (location or "").rpartition("/")[2].replace(":", ", line ")


@contextlib.contextmanager
def torchlensed(training: Training) -> Iterator[Run]:
    """A forward alone. torchlens leaves torch's functions wrapped, which would slow what is measured after it."""
    import torchlens.debug
    from torchlens.backends.torch.wrappers import unwrap_torch

    def run() -> str:
        with training.casting():
            found = torchlens.debug.find_nan(training.model, [training.batch, training.keep])
        named = (found.func_name, found.module_address, _place(found.source_line))
        return ", ".join(part for part in named if part and found.found)

    try:
        yield run
    finally:
        unwrap_torch()


@contextlib.contextmanager
def sherlorched(training: Training) -> Iterator[Run]:
    import sherlorch

    def run() -> str:
        with sherlorch.trace(capture_stack=True) as tracker:
            tracker.watch(training.model, name="model")
            loss = training.step()
        culprits = tracker.diagnose(loss).culprits if tracker.has_issue(loss) else []
        parts = [(c.op_name, (c.module_path or "").removeprefix("model."), _place(c.location)) for c in culprits[:1]]
        return ", ".join(part for named in parts for part in named if part)

    yield run


TOOLS = (
    Tool("bare step again", bare),
    Tool("nbdebug, recording", functools.partial(nbdebugged, strategy="replay")),
    Tool("nbdebug, looking live", functools.partial(nbdebugged, strategy="trace")),
    Tool("nbdebug, answer on a NaN in the forward", functools.partial(nbdebugged, strategy="auto"), "forward"),
    Tool("nbdebug, answer on a NaN in the backward", functools.partial(nbdebugged, strategy="auto"), "backward"),
    Tool("module trace (foreach norm)", module_trace),
    Tool("isfinite hook on leaf modules", hooked),
    Tool("torch detect_anomaly", anomaly_mode),
    Tool("transformers DebugUnderflowOverflow", overflow_debugger, package="transformers"),
    Tool("sherlorch, with lines", sherlorched, package="sherlorch"),
    Tool("torchlens find_nan (a forward alone)", torchlensed, package="torchlens"),
)
