"""`stop_at`: a breakpoint on layers, and the handle on it."""

from __future__ import annotations

import contextvars
import difflib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

import torch
from torch import nn

from nbdebug.observe.modules import plain_name
from nbdebug.observe.validation import check_model
from nbdebug.report import Report
from nbdebug.text import count
from nbdebug.tools.breakpoints.condition import BreakpointHook, Condition, evaluating, is_fake
from nbdebug.tools.breakpoints.hooks import Forwards, OutputGradients
from nbdebug.tools.breakpoints.stop import StopEvent, at_prompt, main_waits, stop


class _EagerSwitch:
    """How many stops hold compiled code back, and torch's own switch for it."""

    count = 0
    switch: Any = None


def is_compiled(model: nn.Module) -> bool:
    """By `torch.compile(model)`, `model.compile()` or `@torch.compile` above a forward, as a whole or in a part."""
    return any(
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def force_eager() -> Callable[[], None]:
    """From now on compiled code runs uncompiled, everywhere; until what is returned has been called."""
    if not _EagerSwitch.count:
        _EagerSwitch.switch = torch.compiler.set_stance("force_eager")
    _EagerSwitch.count += 1
    done: list[bool] = []

    def release() -> None:
        if not done:
            done.append(True)
            _EagerSwitch.count -= 1
            if not _EagerSwitch.count:
                _EagerSwitch.switch.__exit__(None, None, None)
                _EagerSwitch.switch = None

    return release


_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
"""Their only part is the model: its layers go by their own names as well."""


def matching_layers(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The layers by name, in the model's order, each once: those whose dotted name the glob matches (`*` also matches
    dots), else those whose type is so named. "" is the model itself.

    Raises ValueError, with the nearest names, where there is none."""
    if not isinstance(pattern, str):
        raise ValueError(
            "pattern is a glob over layer names, such as 'layers.3*', or a layer's type, such as "
            f"'Dropout'; got {pattern!r}"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "The layers of a TorchScript model run outside Python, where nothing can stop them. Set "
            f"the stop in the model that it was made from; got a {type(model).__name__}"
        )
    named = list(_named(model))
    matches = [(name, module) for name, module in named if fnmatchcase(name, pattern)]
    matches = matches or [(name, module) for name, module in named if fnmatchcase(type(module).__name__, pattern)]
    if not matches:
        raise ValueError(
            f"No layer of this {type(model).__name__} has the name or the type {pattern!r}. {_nearest(pattern, named)}"
        )
    first: dict[int, tuple[str, nn.Module]] = {}
    for name, module in matches:
        first.setdefault(id(module), (name, module))
    return dict(first.values())


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every name of every layer. What `torch.compile` puts around a model is left out: it runs no hooks."""
    wrapped = type(model).__name__ in _WRAPPERS
    for raw, module in model.named_modules(remove_duplicate=False):
        if "_orig_mod" in module._modules:
            continue
        name = plain_name(raw)
        if wrapped and name.startswith("module."):
            yield name.removeprefix("module."), module
        yield name, module


def _nearest(pattern: str, named: list[tuple[str, nn.Module]]) -> str:
    names = list(dict.fromkeys([*(name for name, _ in named if name), *(type(module).__name__ for _, module in named)]))
    close = difflib.get_close_matches(pattern.strip("*"), names, n=5, cutoff=0.5)
    listed = ", ".join(map(repr, close or names[:8]))
    return f"Nearest: {listed}." if close else f"There are: {listed}{', …' * (len(names) > 8)}."


def label(name: str, module: nn.Module) -> str:
    """ "`layers.3` (Block)"; the model itself by its type alone."""
    return f"`{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


PHASES = ("forward", "backward")
_KEPT, _SHOWN = 100, 3
"""Records that are kept, the last ones, and those of them that are shown at once."""
_numbers = itertools.count(1)
_stops: weakref.WeakSet[LayerStop] = weakref.WeakSet()


def stop_at(
    model: nn.Module,
    pattern: str,
    *,
    when: str | Callable[..., Any] | None = None,
    phase: str = "forward",
    once: bool = True,
) -> LayerStop:
    """Stop training inside a layer: a breakpoint by the layer's name.

    model: the model, compiled or not. pattern: a glob over dotted names ("layers.3*"; `*` also matches dots), or a
    layer's type ("Dropout"); "" is the model itself. when: stop only where this holds, an expression or a function of
    any of `inp` (the layer's argument; a tuple where there are several that are not None), `out` (what it returns; a
    tuple with one entry that is not None counts as that entry), `grad`, `module`, `name`, `step` (calls of the model
    since the stop was set, from 0). An expression also sees the locals of the layer's forward and your variables.
    phase: "forward", or "backward": when the gradient of an output arrives, as `grad`, with that output as `out`.
    once: the stop is over after its first hit.

    In a forward it stops at its first line, or at its return where `when` asks for more than the input; in a layer of
    torch's own, such as nn.Linear, it stops in the line of yours that called it, and in backward in the line that
    called backward. With the debugger of JupyterLab or VS Code attached it stops there, else in ipdb where somebody
    can type; else it records the tensors there, in numbers, shows them and continues. `q` in ipdb ends the training
    with a KeyboardInterrupt. What a checkpoint computes again is no new forward. A compiled model runs uncompiled
    while the stop waits; where it is compiled later, set the stop again, in the compiled model. A layer that runs in
    another thread than the main one is recorded, unless debugpy is attached.

    Raises ValueError where the pattern names no layer, or for a wrong `when` or `phase`; SyntaxError for an invalid
    expression; TypeError where the model is no module.
    """
    return set_stop(model, pattern, when, phase, once, caller=sys._getframe(1))


def set_stop(
    model: nn.Module,
    pattern: str,
    when: Any,
    phase: str,
    once: bool,
    *,
    caller: FrameType | None = None,
    variables: dict[str, Any] | None = None,
    subject: str = "",
) -> LayerStop:
    """The same; variables: those that an expression sees, where it is not the caller's. subject: the user's words for
    the model."""
    check_model(model, "stop_at(model, pattern)")
    if phase not in PHASES:
        raise ValueError(f'phase is "forward" or "backward"; got {phase!r}')
    layers = matching_layers(model, pattern)
    condition = Condition(when, phase, caller, variables)
    return LayerStop(model, layers, pattern, condition, phase, once, subject or f"model ({type(model).__name__})")


def active() -> list[LayerStop]:
    """The stops that wait, in the order in which they were set."""
    return sorted((stop for stop in _stops if stop.active), key=lambda stop: stop.number)


class LayerStop:
    """A stop that waits in a model. names: of its layers; hits: how often it stopped; records: of the stops where
    nobody could type, Reports; active: whether it still waits; fault: of nbdebug's own, which has ended it.

    As a context manager it ends with the block."""

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        pattern: str,
        condition: Condition,
        phase: str,
        once: bool,
        subject: str,
    ):
        self.pattern, self.condition, self.phase, self.once, self.subject = pattern, condition, phase, once, subject
        self.number, self.names, self.hits, self.fault = next(_numbers), tuple(layers), 0, ""
        self.records: list[Report] = []
        self._calls = self._recorded = 0
        self._lock = threading.Lock()
        self._context: contextvars.Context | None = None
        self._layers = {name: label(name, module) for name, module in layers.items()}
        self._model = weakref.ref(model)
        root: Any = model._modules.get("_orig_mod", model)
        self._handles: list[Any] = [
            root.register_forward_pre_hook(BreakpointHook(self._began), prepend=True, with_kwargs=True)
        ]
        watch = (Forwards if phase == "forward" else OutputGradients)(self)
        for name, module in layers.items():
            self._handles += watch.attach(name, module)
        self._release: Callable[[], Any] = force_eager() if is_compiled(model) else lambda: None
        self.uncompiled = is_compiled(model)
        self._end = weakref.finalize(self, self._release)
        _stops.add(self)

    @property
    def active(self) -> bool:
        return bool(self._handles) and self._model() is not None

    @property
    def cleared(self) -> bool:
        """Whether it was taken away, by its hit or by the user; not where it went with its model."""
        return not self._handles

    @property
    def model(self) -> nn.Module | None:
        """The model that it waits in; None once that is gone."""
        return self._model()

    @property
    def step(self) -> int:
        """Calls of the model since the stop was set, from 0."""
        return max(self._calls - 1, 0)

    @property
    def question(self) -> str:
        more = f", when={self.condition}" if self.condition.when is not None else ""
        more += ', phase="backward"' if self.phase == "backward" else ""
        return f"stop_at(model, {self.pattern!r}{more}{'' if self.once else ', once=False'})"

    def clear(self) -> None:
        """Take the stop away, and every hook of it."""
        while self._handles:
            self._handles.pop().remove()
        self._release()

    remove = clear

    def __enter__(self) -> LayerStop:
        return self

    def __exit__(self, *raised: object) -> None:
        self.clear()

    def __repr__(self) -> str:
        layers = list(self._layers.values())
        more = f" and {len(layers) - 2} more" if len(layers) > 3 else ""
        text = f"stop {self.number} in the {self.phase} of {', '.join(layers[:2] if more else layers)}{more}"
        if self.condition.when is not None:
            text += f", when {self.condition}"
        ended = f"ended by a fault of nbdebug's own ({self.fault})" if self.fault else "over"
        state = ("waits" if self.once else "waits, for each hit") if self.active else ended
        calls = f"{count(self._calls, 'call')} of {self.subject}"
        return f"{text}: {state}; {count(self.hits, 'hit')} in {calls}{self._doubt()}"

    def _doubt(self) -> str:
        if self.uncompiled:
            return "; while it waits, compiled code runs uncompiled" if self.active else ""
        model = self._model()
        compiled_since = self.active and model is not None and is_compiled(model)
        return (
            "; the model was compiled after the stop was set: set it again, it does not work in compiled code"
            * compiled_since
        )

    # -- for the hooks ------------------------------------------------------------------------------------------------

    def _began(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch._C._current_autograd_node() is None and self.listens() and not is_fake(*args, *kwargs.values()):
            self._calls += 1
            if self.phase == "backward" and threading.current_thread() is threading.main_thread():
                self._context = contextvars.copy_context()

    def listens(self) -> bool:
        """Whether a hook has anything to do: not for what is called at a prompt of a stop, or by a condition."""
        return bool(self._handles) and not evaluating() and not at_prompt()

    def holds(self, values: dict[str, Any], frame: FrameType | None = None) -> bool:
        return self.condition.holds(values, frame)

    def border(self, call: Callable[..., None], *args: Any) -> None:
        """Call it; a fault of ours ends the stop and not the training."""
        __tracebackhide__ = True
        try:
            call(*args)
        except Exception as fault:
            self.fault = f"{type(fault).__name__}: {fault}"
            self.clear()
            print(
                f"nbdebug: {self.question} has ended by a fault of its own ({self.fault}). Training continues.",
                file=sys.stderr,
            )

    def stop(self, name: str, moment: str, step: int, values: dict[str, Any], frame: FrameType | None) -> None:
        """The layer is reached and the condition holds: stop, unless another thread was first."""
        with self._lock:
            if not self._handles:
                return
            self.hits += 1
            if self.once:
                self.clear()
        away = threading.current_thread() is not threading.main_thread()
        blocked = away and moment == "gradient" and self._context is not None and main_waits()
        report = stop(
            StopEvent(self._layers[name], moment, step, values, frame),
            self.question,
            self.subject,
            blocked,
            self._context if blocked else None,
        )
        if report is not None:
            self._keep(report)

    def _keep(self, report: Report) -> None:
        self.records = [*self.records, report][-_KEPT:]
        self._recorded += 1
        if self._recorded == _SHOWN and not self.once:
            report.notes += ("Later records are kept in .records and not shown.",)
        if self._recorded <= _SHOWN:
            report.show()
