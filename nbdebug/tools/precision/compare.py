"""The step in float32, and beside every module call the same call in half precision, on the same inputs.

What a module does by itself to its values is seen so, apart from what others did before it: whether its output is
finite, how far it is off, how much of it is lost to zero. Those that stand out are suspects; the search proves them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from nbdebug.observe.snapshot import random_sources
from nbdebug.tools.precision.casting import CastCopies, device_of
from nbdebug.tools.precision.facts import Exact
from nbdebug.tools.precision.trial import HalfTrials, TrialOutcome, norm_off, off

WRONG = 0.03
"""Relative error of a module's output, by itself, from which it is a suspect: our choice, about eight roundings in
bfloat16 (2^-8 each); healthy modules were below 0.3%. A suspect is no verdict: the trials decide."""


@dataclasses.dataclass
class ModuleMeasurement:
    """What one module did in the step. largest, smallest: magnitudes of its float32 output, zeros left out; tiny: share
    of the output's values below the dtype's smallest normal number; error: of its half output, relative to the
    float32 one (2-norms); broken: its half output is not finite where the float32 one is; gradient, gradient_tiny: the
    same of the gradient that reached its output."""

    name: str
    kind: str
    leaf: bool
    calls: int = 0
    largest: float = 0.0
    smallest: float = math.inf
    tiny: float = 0.0
    error: float = 0.0
    broken: bool = False
    gradient: float = 0.0
    gradient_tiny: float = 0.0
    parameters: int = 0

    @property
    def suspect(self) -> bool:
        return self.broken or self.error > WRONG


FAULTS = (RuntimeError, TypeError, ValueError, KeyError, IndexError)
"""What a module may raise when it is called by itself in half precision: then nothing is known of it from here."""


@dataclasses.dataclass
class _ModuleCall:
    """A call of a module that runs: what it is given, the random numbers that it begins with, and what the same call
    has given in half precision."""

    args: tuple
    kwargs: dict
    random: list[Any]
    output: list[Any] = dataclasses.field(default_factory=list)


class ReferenceRun:
    """Runs the reference with everything beside it. modules: a Seen for each that was called, in order of calls."""

    def __init__(self, copies: CastCopies, trials: HalfTrials):
        self.copies = copies
        self.info = torch.finfo(copies.dtype)
        self.modules: dict[str, ModuleMeasurement] = {}
        reference = copies.reference(torch.float32)
        self._half = dict(copies.half().named_modules())
        self._running: list[_ModuleCall] = []
        for name, module in reference.named_modules():
            if name:
                module.register_forward_pre_hook(self._before(name), with_kwargs=True)
                module.register_forward_hook(self._after(name))
        self.outcome: TrialOutcome = trials.run(reference)
        self._half = {}
        self._running = []

    def _before(self, name: str) -> Callable[..., None]:
        """The call in half precision goes first: the module may write into what it is given."""

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            call = _ModuleCall(tree_map(detached, args), tree_map(detached, kwargs), numbers())
            with rewound(call.random), torch.no_grad(), contextlib.suppress(*FAULTS), self.copies.running():
                call.output = tree_leaves(self._half[name](*tree_map(own, args), **tree_map(own, kwargs)))
            self._running.append(call)

        return before

    def _after(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple, output: Any) -> None:
            call = self._running.pop()
            seen = self.modules.setdefault(
                name,
                ModuleMeasurement(
                    name,
                    type(module).__name__,
                    not list(module.children()),
                    parameters=sum(p.numel() for p in module.parameters()),
                ),
            )
            seen.calls += 1
            floats = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            self._sizes(seen, floats)
            self._compare(seen, floats, call.output)
            call.output = []
            for place, tensor in enumerate(floats):
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient(seen, call, place))

        return after

    def _sizes(self, seen: ModuleMeasurement, floats: list[torch.Tensor]) -> None:
        for tensor in floats:
            sizes = tensor.detach().abs()
            known = sizes[(sizes > 0) & sizes.isfinite()]
            if known.numel():
                seen.largest = max(seen.largest, float(known.max()))
                seen.smallest = min(seen.smallest, float(known.min()))
                seen.tiny = max(seen.tiny, float((known < self.info.tiny).double().mean()))

    def _compare(self, seen: ModuleMeasurement, floats: list[torch.Tensor], beside: list[Any]) -> None:
        halves = [t for t in beside if isinstance(t, torch.Tensor) and t.is_floating_point()]
        for wanted, got in zip(floats, halves):
            error = relative_error(wanted, got)
            if error == math.inf:
                seen.broken = True
            elif error is not None:
                seen.error = max(seen.error, error)

    def _gradient(self, seen: ModuleMeasurement, call: _ModuleCall, place: int) -> Callable[[torch.Tensor], None]:
        def arrived(gradient: torch.Tensor) -> None:
            sizes = gradient.detach().abs()
            known = sizes[(sizes > 0) & sizes.isfinite()]
            if known.numel():
                seen.gradient = max(seen.gradient, float(known.max()))
                seen.gradient_tiny = max(seen.gradient_tiny, float((known < self.info.tiny).double().mean()))
            if not seen.broken and known.numel() and bool(gradient.isfinite().all()):
                with contextlib.suppress(*FAULTS):
                    seen.broken = self._breaks_backward(seen.name, call, place, gradient.detach())

        return arrived

    def _breaks_backward(self, name: str, call: _ModuleCall, place: int, gradient: torch.Tensor) -> bool:
        """Whether the module's own backward, in half precision, makes something that is not finite of this gradient."""
        args, kwargs = tree_map(_wanting, call.args), tree_map(_wanting, call.kwargs)
        module = self._half[name]
        with rewound(call.random), torch.enable_grad(), self.copies.running():
            output = module(*tree_map(own, args), **tree_map(own, kwargs))
        made = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()][place]
        if not made.requires_grad or not bool(made.isfinite().all()):
            return False
        sources = [
            t
            for t in (*tree_leaves((args, kwargs)), *module.parameters())
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        gradients = torch.autograd.grad(made, sources, gradient.to(made.dtype), allow_unused=True)
        return not all(bool(g.isfinite().all()) for g in gradients if g is not None)

    def suspects(self) -> list[str]:
        """The innermost modules that do harm by themselves: not those that only hold one."""
        guilty = [seen.name for seen in self.modules.values() if seen.suspect]
        return [name for name in guilty if not any(other.startswith(name + ".") for other in guilty)]

    def broken(self) -> list[str]:
        """Those of the suspects that make something non-finite by themselves."""
        return [name for name in self.suspects() if self.modules[name].broken]


def relative_error(wanted: torch.Tensor, got: torch.Tensor) -> float | None:
    """The 2-norm of the difference over that of what is wanted, where that is finite; inf where the other is not
    finite there; None where nothing can be compared."""
    wanted, got = wanted.detach().double(), got.detach().double()
    if wanted.shape != got.shape or not wanted.numel():
        return None
    fine = wanted.isfinite()
    if not bool(got[fine].isfinite().all()):
        return math.inf
    scale = float(wanted[fine].norm())
    return float((got[fine] - wanted[fine]).norm()) / scale if scale > 0 else None


def numbers() -> list[tuple[Callable[[Any], Any], Any]]:
    """The state of every source of random numbers, each with what sets it."""
    return [(write, read()) for _, read, write in random_sources()]


@contextlib.contextmanager
def rewound(entered: list[tuple[Callable[[Any], Any], Any]]) -> Iterator[None]:
    """The random numbers that a call began with, for the call beside it; then those that the step goes on with."""
    now = numbers()
    for write, state in entered:
        write(state)
    try:
        yield
    finally:
        for write, state in now:
            write(state)


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def own(value: Any) -> Any:
    """Of its own memory, so that a module that writes into what it is given writes into nothing of the step."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _wanting(value: Any) -> Any:
    wanted = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if wanted else value


SECONDS = {"cpu": 2.0, "cuda": 0.5}
"""A float32 step may take so long, else float64 is left out: there it takes twice as long on a CPU and on a data
centre's card, and up to 64 times as long on a card for games, whose float64 units are few."""
SHARE = 0.25
"""Of the free memory, for weights and gradients in float64."""


def look(copies: CastCopies, trials: HalfTrials, plain: TrialOutcome) -> Exact | str:
    """What float64 says of float32; or why it was not asked. plain: the float32 step's outcome."""
    why_not = _too_much(copies, plain)
    if why_not:
        return why_not
    reference, errors = copies.reference(torch.float64), dict[str, float]()
    beside = dict(copies.reference(torch.float32).named_modules())
    running: list[list[Any]] = []
    for name, module in reference.named_modules():
        if name:
            module.register_forward_pre_hook(_before(beside[name], running), with_kwargs=True)
            module.register_forward_hook(_after(name, running, errors))
    try:
        outcome = trials.run(reference)
    except torch.OutOfMemoryError:
        return "there is no memory for it"
    if outcome.error:
        return f"the step raised {outcome.error[:160]}"
    if not outcome.finite:
        return "the step is not finite there"
    return Exact(off(plain, outcome), norm_off(plain, outcome), outcome.seconds, errors)


def _too_much(copies: CastCopies, plain: TrialOutcome) -> str:
    """Why float64 is left out; "" where it is not."""
    device = device_of(copies.model)
    if device.type not in SECONDS:
        return f"{device.type} may have none"
    if not plain.finite:
        return "the step is not finite in float32"
    if plain.seconds > SECONDS[device.type]:
        return f"a float32 step takes {plain.seconds:.1f} s already"
    wanted = 16 * sum(p.numel() for p in copies.model.parameters())
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        import psutil

        free = psutil.virtual_memory().available
    return "weights and gradients would take over a quarter of the free memory" if wanted > SHARE * free else ""


def _before(beside: nn.Module, running: list[list[Any]]) -> Callable[..., None]:
    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        output: list[Any] = []
        args, kwargs = tree_map(detached, (args, kwargs))
        with rewound(numbers()), torch.no_grad(), contextlib.suppress(*FAULTS):
            output = tree_leaves(beside(*tree_map(own, args), **tree_map(own, kwargs)))
        running.append(output)

    return before


def _after(name: str, running: list[list[Any]], errors: dict[str, float]) -> Callable[..., None]:
    def after(module: nn.Module, args: tuple, output: Any) -> None:
        wanted = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        got = [t for t in running.pop() if isinstance(t, torch.Tensor) and t.is_floating_point()]
        for exact, rounded in zip(wanted, got):
            if (error := relative_error(exact, rounded)) is not None:
                errors[name] = max(errors.get(name, 0.0), error)

    return after
