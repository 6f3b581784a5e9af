"""The step in float32, and beside every module call the same call in half precision, on the same inputs.

So each module is measured by itself, apart from the modules before it: whether its output is finite, how far it is off,
how much of it becomes zero. Those that stand out are suspects; the search proves them.
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
from nbdebug.observe.tensors import all_finite
from nbdebug.tools.precision.casting import CastCopies, device_of
from nbdebug.tools.precision.rules import Exact
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


ERRORS = (RuntimeError, TypeError, ValueError, KeyError, IndexError)
"""What a module may raise when it is called by itself in half precision: then it is not measured."""


@dataclasses.dataclass
class _ModuleCall:
    """A call of a module that runs: its inputs, the random numbers that it begins with, and the output of the same call
    in half precision."""

    args: tuple
    kwargs: dict
    rng: list[Any]
    output: list[Any] = dataclasses.field(default_factory=list)


class ReferenceRun:
    """Runs the reference with everything beside it. modules: a measurement for each that was called, in order of "
    "calls."""

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
        """The call in half precision goes first: the module may write into its inputs."""

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            call = _ModuleCall(tree_map(detached, args), tree_map(detached, kwargs), rng_states())
            with with_rng(call.rng), torch.no_grad(), contextlib.suppress(*ERRORS), self.copies.running():
                call.output = tree_leaves(self._half[name](*tree_map(cloned, args), **tree_map(cloned, kwargs)))
            self._running.append(call)

        return before

    def _after(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple, output: Any) -> None:
            call = self._running.pop()
            measurement = self.modules.setdefault(
                name,
                ModuleMeasurement(
                    name,
                    type(module).__name__,
                    not list(module.children()),
                    parameters=sum(p.numel() for p in module.parameters()),
                ),
            )
            measurement.calls += 1
            floats = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            self._sizes(measurement, floats)
            self._compare(measurement, floats, call.output)
            call.output = []
            for place, tensor in enumerate(floats):
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient(measurement, call, place))

        return after

    def _sizes(self, measurement: ModuleMeasurement, floats: list[torch.Tensor]) -> None:
        for tensor in floats:
            if (sizes := magnitudes(tensor, self.info.tiny)) is not None:
                measurement.largest = max(measurement.largest, sizes[0])
                measurement.smallest = min(measurement.smallest, sizes[1])
                measurement.tiny = max(measurement.tiny, sizes[2])

    def _compare(self, measurement: ModuleMeasurement, floats: list[torch.Tensor], beside: list[Any]) -> None:
        halves = [t for t in beside if isinstance(t, torch.Tensor) and t.is_floating_point()]
        for exact, rounded in zip(floats, halves):
            error = relative_error(exact, rounded)
            if error == math.inf:
                measurement.broken = True
            elif error is not None:
                measurement.error = max(measurement.error, error)

    def _gradient(
        self, measurement: ModuleMeasurement, call: _ModuleCall, place: int
    ) -> Callable[[torch.Tensor | None], None]:
        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is None:  # of several outputs of one op this one is not used
                return
            sizes = magnitudes(gradient, self.info.tiny)
            if sizes is not None:
                measurement.gradient = max(measurement.gradient, sizes[0])
                measurement.gradient_tiny = max(measurement.gradient_tiny, sizes[2])
            if not measurement.broken and sizes is not None and all_finite(gradient):
                with contextlib.suppress(*ERRORS):
                    measurement.broken = self._breaks_backward(measurement.name, call, place, gradient.detach())

        return arrived

    def _breaks_backward(self, name: str, call: _ModuleCall, place: int, gradient: torch.Tensor) -> bool:
        """Whether the module's own backward, in half precision, makes something that is not finite of this gradient."""
        args, kwargs = tree_map(_requiring_grad, call.args), tree_map(_requiring_grad, call.kwargs)
        module = self._half[name]
        with with_rng(call.rng), torch.enable_grad(), self.copies.running():
            output = module(*tree_map(cloned, args), **tree_map(cloned, kwargs))
        result = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()][place]
        if not result.requires_grad or not bool(result.isfinite().all()):
            return False
        sources = [
            t
            for t in (*tree_leaves((args, kwargs)), *module.parameters())
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        gradients = torch.autograd.grad(result, sources, gradient.to(result.dtype), allow_unused=True)
        return not all(bool(g.isfinite().all()) for g in gradients if g is not None)

    def suspects(self) -> list[str]:
        """The innermost modules that do harm by themselves: not those that only contain one."""
        guilty = [measurement.name for measurement in self.modules.values() if measurement.suspect]
        return [name for name in guilty if not any(other.startswith(name + ".") for other in guilty)]

    def broken(self) -> list[str]:
        """Those of the suspects that make something non-finite by themselves."""
        return [name for name in self.suspects() if self.modules[name].broken]


def relative_error(exact: torch.Tensor, rounded: torch.Tensor) -> float | None:
    """The 2-norm of the difference over that of the exact tensor, where that is finite; inf where the other is not
    finite there; None where nothing can be compared."""
    if exact.shape != rounded.shape or not exact.numel():
        return None
    sums = torch.zeros(3, dtype=torch.float64, device=exact.device)
    for one, other in zip(pieces(exact), pieces(rounded)):
        one, other = one.double(), other.double()
        fine = one.isfinite()
        one, off_by = torch.where(fine, one, 0.0), torch.where(fine, other - one, 0.0)
        sums += torch.stack([one.square().sum(), off_by.square().sum(), (~off_by.isfinite()).sum()])
    scale, error, broken = sums.tolist()
    return math.inf if broken else math.sqrt(error / scale) if scale > 0 else None


def magnitudes(tensor: torch.Tensor, tiny: float) -> tuple[float, float, float] | None:
    """The largest and the smallest magnitude, and the share below `tiny`, of what is finite and not zero; None of
    nothing."""
    found: list[torch.Tensor] = []
    for piece in pieces(tensor):
        sizes = piece.abs()
        known = (sizes > 0) & sizes.isfinite()
        ends = torch.where(known, sizes, 0.0).max(), torch.where(known, sizes, math.inf).min()
        found.append(torch.stack([*(end.double() for end in ends), (known & (sizes < tiny)).sum(), known.sum()]))
    rows = torch.stack(found).tolist() if found and tensor.numel() else []
    number = sum(row[3] for row in rows)
    if not number:
        return None
    return max(row[0] for row in rows), min(row[1] for row in rows), sum(row[2] for row in rows) / number


PIECE = 2**22
"""Elements that are compared at once: of the scores of a language model a copy in float64 would take gigabytes."""


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.detach().reshape(-1).split(PIECE)


def rng_states() -> list[tuple[Callable[[Any], Any], Any]]:
    """The state of every source of random numbers, each with what sets it."""
    return [(write, read()) for _, read, write in random_sources()]


@contextlib.contextmanager
def with_rng(entered: list[tuple[Callable[[Any], Any], Any]]) -> Iterator[None]:
    """The random numbers that a call began with, for the call beside it; then those that the step continues with."""
    now = rng_states()
    for write, state in entered:
        write(state)
    try:
        yield
    finally:
        for write, state in now:
            write(state)


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def cloned(value: Any) -> Any:
    """With memory of its own, so that a module that writes into its inputs changes nothing of the step."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _requiring_grad(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value


SECONDS = {"cpu": 2.0, "cuda": 0.5}
"""A float32 step may take so long, else float64 is left out: there it takes twice as long on a CPU and on a data
centre's GPU, and up to 64 times as long on a consumer GPU, which has few float64 units."""
SHARE = 0.25
"""Of the free memory, for weights and gradients in float64."""
LARGE = 2**30
"""Bytes that a float32 step takes on an accelerator from which only its forward runs in float64: what a backward needs
would take twice as much again."""


def compare_with_float64(copies: CastCopies, trials: HalfTrials, plain: TrialOutcome) -> Exact | str:
    """How far off float32 is from float64; or why that was not measured. plain: the float32 step's outcome."""
    why_not = _why_no_float64(copies, plain)
    if why_not:
        return why_not
    reference, errors = copies.reference(torch.float64), dict[str, float]()
    beside = dict(copies.reference(torch.float32).named_modules())
    running: list[list[Any]] = []
    with_backward = (plain.memory or 0) < LARGE
    for name, module in reference.named_modules():
        if name:
            module.register_forward_pre_hook(_before(beside[name], running), with_kwargs=True)
            module.register_forward_hook(_after(name, running, errors))
    try:
        outcome = trials.run(reference, backward=with_backward)
    except torch.OutOfMemoryError:
        return "there is not enough memory for it"
    if outcome.error:
        return f"the step raised {outcome.error[:160]}"
    if not outcome.finite:
        return "the step is not finite there"
    gradients = norm_off(plain, outcome) if with_backward else None
    return Exact(off(plain, outcome), gradients, outcome.seconds, errors)


def _why_no_float64(copies: CastCopies, plain: TrialOutcome) -> str:
    """Why float64 is left out; "" where it is not."""
    device = device_of(copies.model)
    if device.type not in SECONDS:
        return f"{device.type} may have no float64"
    if not plain.finite:
        return "the step is not finite in float32"
    if plain.seconds > SECONDS[device.type]:
        return f"a float32 step takes {plain.seconds:.1f} s, and float64 is slower"
    needed = 16 * sum(p.numel() for p in copies.model.parameters())
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        import psutil

        free = psutil.virtual_memory().available
    return "weights and gradients would take over a quarter of the free memory" if needed > SHARE * free else ""


def _before(beside: nn.Module, running: list[list[Any]]) -> Callable[..., None]:
    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        output: list[Any] = []
        args, kwargs = tree_map(detached, (args, kwargs))
        with with_rng(rng_states()), torch.no_grad(), contextlib.suppress(*ERRORS):
            output = tree_leaves(beside(*tree_map(cloned, args), **tree_map(cloned, kwargs)))
        running.append(output)

    return before


def _after(name: str, running: list[list[Any]], errors: dict[str, float]) -> Callable[..., None]:
    def after(module: nn.Module, args: tuple, output: Any) -> None:
        reference = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        outputs = [t for t in running.pop() if isinstance(t, torch.Tensor) and t.is_floating_point()]
        for exact, rounded in zip(reference, outputs):
            if (error := relative_error(exact, rounded)) is not None:
                errors[name] = max(errors.get(name, 0.0), error)

    return after
