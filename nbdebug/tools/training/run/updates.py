"""What backward leaves in the gradients, and what the optimizer makes of it.

Before a backward: is there still a gradient from before the optimizer's last step? After it, and before the optimizer
steps: how large are the gradients? Around a step, now and then: how far does each parameter move, against its size?
With a GradScaler: were gradients made smaller while they still carried its scale?
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from nbdebug.observe.backward import Backward, EngineWatch, OptimizerWatch
from nbdebug.observe.locations import USER, kind_of, locate
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.tensors import read_scalars
from nbdebug.tools.training.facts import LayerFact, Mode, ScalerFact, Stale
from nbdebug.tools.training.probe_errors import ProbeErrors

MODES = "In which mode (train or eval) each module ran"


class Quiet:
    """A hook that stays out of copies of the model, and never stops the training by a fault of its own."""

    def __init__(self, tell: Callable[..., None], faults: ProbeErrors):
        self.tell = faults.quietly(MODES, tell)

    def __call__(self, *given: Any) -> None:
        self.tell(*given)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def sensitive(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that behave otherwise in eval mode, by name."""
    return {name: module for name, module in model.named_modules() if _is_sensitive(module)}


def _is_sensitive(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, _NormBase):
        return module.running_mean is not None
    return bool(getattr(module, "dropout", 0.0)) and isinstance(module, (nn.MultiheadAttention, nn.RNNBase))


class FlagWatch:
    """Counts, per sensitive module, the steps in which it ran in train mode, in eval mode, with and without gradients.

    evaluating: says whether validation batches are being read now; None where that cannot be known. paused: our own
    calls of the model are no part of the run.
    """

    def __init__(self, model: nn.Module, evaluating: Callable[[], bool | None], faults: ProbeErrors | None = None):
        self.model, self.evaluating, self.paused, self.faults = model, evaluating, False, faults or ProbeErrors()
        self.modules = sensitive(model)
        self.steps = 0
        self.counts = {name: dict.fromkeys(("trained", "evaluated", "train", "eval"), 0) for name in self.modules}
        self.switched: dict[str, int] = {}
        self.first: dict[str, bool] = {}
        self.seen: dict[str, set[tuple[bool, bool]]] = {name: set() for name in self.modules}
        self.functions: dict[str, tuple[str, ...]] = {}
        self.sites: dict[str, Any] = {}
        self._roots: set[bool] = set()
        self._rare: dict[str, list[int]] = {}  # steps in which a module ran in train mode without gradients
        self._handles: list[Any] = []

    def attach(self) -> None:
        for name, module in self.modules.items():
            tell = Quiet(lambda m, args, name=name: self._ran(name, m), self.faults)
            self._handles.append(module.register_forward_pre_hook(tell))
        self._handles.append(self.model.register_forward_pre_hook(Quiet(self._called, self.faults)))

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _called(self, module: nn.Module, args: Any) -> None:
        kind = "training" if torch.is_grad_enabled() else "evaluation"
        if not self.paused and kind == "training":
            self._roots.add(module.training)
        if not self.paused and kind not in self.functions:
            self.functions[kind], self.sites[kind] = calling()

    def _ran(self, name: str, module: nn.Module) -> None:
        if self.paused:
            return
        learning = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self.seen[name].add((module.training, learning))
        if not learning:
            evaluating = self.evaluating()
            if evaluating:
                self.counts[name]["train" if module.training else "eval"] += 1
            elif evaluating is None and module.training:
                steps = self._rare.setdefault(name, [])
                if not steps or steps[-1] != self.steps:
                    steps.append(self.steps)

    def stepped(self) -> None:
        """An optimizer has stepped: what ran with gradients since the last step was training."""
        for name, seen in self.seen.items():
            counts = self.counts[name]
            if (True, True) in seen:
                counts["trained"] += 1
                self.first.setdefault(name, True)
                self.switched.pop(name, None)  # it was only for a while
            elif (False, True) in seen:
                counts["evaluated"] += 1
                if counts["trained"]:
                    self.switched.setdefault(name, self.steps)
                self.first.setdefault(name, False)
            seen.clear()
        self.steps += 1

    @property
    def root_evaluated(self) -> bool:
        """Whether the model itself was in eval mode whenever it was called with gradients."""
        return self._roots == {False}

    def modes(self) -> tuple[Mode, ...]:
        return tuple(self._mode(name, module) for name, module in self.modules.items())

    def _mode(self, name: str, module: nn.Module) -> Mode:
        counts, rare = self.counts[name], len(self._rare.get(name, []))
        parent = self.model.get_submodule(name.rpartition(".")[0])
        owned = list(module.parameters()) or list(parent.parameters())
        train = counts["train"] + (rare if 0 < rare <= RARE * self.steps else 0)
        return Mode(
            name,
            type(module).__name__,
            counts["trained"],
            counts["evaluated"],
            self.switched.get(name),
            self.first.get(name) is False,
            train,
            counts["eval"],
            bool(owned) and not any(p.requires_grad for p in owned),
        )


RARE = 0.2
"""An evaluation happens in at most every fifth step. What runs without gradients in each step (the generator of a GAN
while its discriminator learns, a momentum encoder, a policy that collects data) is a part of training."""


def calling() -> tuple[tuple[str, ...], Any]:
    """The user's functions that are running, innermost first, and the innermost line of theirs."""
    stop = locate()
    if stop.user is None:
        return (), stop.site
    names, frame = [], stop.frame
    while frame is not None and frame.f_code.co_filename != _RUN:  # behind it is whoever asked us
        if kind_of(frame.f_code) == USER and not frame.f_code.co_name.startswith("<"):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return tuple(dict.fromkeys(names)), stop.user


_RUN = os.path.join(os.path.dirname(__file__), "watched.py")


PACE = 1.15
"""Steps at which every parameter is measured lie ever further apart, by this factor: some forty in a thousand."""
SHRUNK = 0.99
"""A gradient whose norm falls below this share of what backward left has been changed on purpose, not by rounding."""
LOOKED_AT = 20
"""Steps in which it is looked whether gradients that backward has filled are gone when the optimizer steps."""
SAME = 0.02
"""Divided by one constant (accumulation), norms keep their ratio to this; clipping brings them to one size instead."""

LOOK = "Gradients, updates and the order of backward, step and zero_grad"
SCALER = "Whether gradients are clipped before GradScaler unscales them"
REMEMBERED = 20_000
"""Calls of backward of which it is remembered who stepped behind them."""


class UpdateWatch:
    """Follows the optimizers' steps while attached. norms: total gradient norm before each step; rates: every
    group's learning rate at each; before, after: told around each step."""

    def __init__(
        self, model: nn.Module, optimizers: Iterable[Any], after: Any, read: Callable[[], int], faults: ProbeErrors
    ):
        self.read, self.used = read, list[int]()  # for each call of backward, the index of the batch that was read last
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.optimizers, self.after = list(optimizers), after
        self.norms: list[torch.Tensor] = []
        self.rates: list[list[float]] = []
        self.steps = 0
        self.stale_steps: dict[int, int] = {}
        self.steps_of: dict[int, int] = {}
        self.stale_names: dict[str, int] = {}
        self.functions: tuple[str, ...] = ()
        self.place: Any = None
        self.stepped_at: Any = None
        self.root: float | None = None  # the last loss, as backward was given it
        self.measured: dict[str, list[tuple[float, float, float]]] = {}
        self.scaling: list[tuple[float, float, float]] = []
        self.scalers: list[Snapshot] = []
        self._uncleared: dict[int, set[int]] = {}  # optimizer -> parameters not cleared since its last step
        self.emptied = self.backwards = 0
        self._filled: set[int] = set()  # optimizers for which the last backward left a gradient
        self._learnt: set[int] = set()  # optimizers since whose last step a backward has run
        self._next = 0
        self._kept: dict[str, torch.Tensor] = {}
        self._left: dict[int, float] = {}  # optimizer -> gradient norm that backward left
        self.stepped: list[list[int]] = []  # for each call of backward, the optimizers that stepped behind it
        self.roots: list[float] = []  # what the first of these calls were given
        self.changed: list[tuple[torch.Tensor, torch.Tensor]] = []  # norms behind backward, and before the step
        self._behind: dict[int, torch.Tensor] = {}  # optimizer -> the first of them
        self.waiting = [0, 0]  # how often an optimizer that had not stepped found its gradients gone; and still there
        self._scalers_met: dict[int, Any] = {}
        self._engine = EngineWatch(
            faults.quietly(LOOK, self._backward_began), faults.quietly(LOOK, self._backward_ended)
        )
        self._watch = OptimizerWatch(faults.quietly(LOOK, self._before), faults.quietly(LOOK, self._stepped))
        self._unscaled, self._scaled = faults.quietly(SCALER, self._unscaling), faults.quietly(SCALER, self._met)
        self._unscale: Any = None

    def attach(self) -> None:
        self._engine.attach()
        self._watch.attach()
        kind = torch.amp.GradScaler
        self._unscale = kind.unscale_, kind.scale
        kind.unscale_ = _told_first(kind.unscale_, self._unscaled)  # type: ignore[method-assign]
        kind.scale = _told_first(kind.scale, self._scaled)  # type: ignore[method-assign]

    def detach(self) -> None:
        self._engine.detach()
        self._watch.detach()
        if self._unscale is not None:
            torch.amp.GradScaler.unscale_, torch.amp.GradScaler.scale = self._unscale  # type: ignore[method-assign]
            self._unscale = None

    def _backward_began(self, call: Backward) -> None:
        if not call.accumulate:
            return
        if not self.functions:
            self.functions, self.place = calling()
        if call.roots[0].numel() == 1:
            scale = next((float(s.get_scale()) for s in self._scalers_met.values()), 1.0)
            self.root = float(call.roots[0].detach()) / scale
            self.roots += [self.root] * (len(self.roots) < LOOKED_AT)
        self._follow()
        parameters = self._by_id
        for key, waiting in self._uncleared.items():
            self._uncleared[key] = _uncleared(waiting, parameters)
            self._learnt.add(key)

    def _follow(self) -> None:
        """Another call of backward. Optimizers that did not step behind the last: are their gradients still there?"""
        if 0 < len(self.stepped) <= LOOKED_AT:
            for place, optimizer in enumerate(self.optimizers):
                if place not in self.stepped[-1]:
                    self.waiting[norm_of(optimizer) > 0] += 1
        if len(self.stepped) < REMEMBERED:
            self.stepped.append([])
            self.used.append(self.read() - 1)
        self.backwards += 1

    @property
    def _by_id(self) -> dict[int, torch.Tensor]:
        return {id(p): p for o in self.optimizers for g in o.param_groups for p in g["params"]}

    def _backward_ended(self, call: Backward, result: Any) -> None:
        if not call.accumulate:
            return
        self._behind = {id(o): total for o in self.optimizers if (total := _total(_gradients(o))) is not None}
        if self._scalers_met:
            self._left = {id(o): norm_of(o) for o in self.optimizers}
        self._filled = {id(o) for o in self.optimizers if self.steps < LOOKED_AT and norm_of(o) > 0}

    def _met(self, scaler: Any, *given: Any) -> None:
        if scaler.is_enabled() and id(scaler) not in self._scalers_met:
            self._scalers_met[id(scaler)] = scaler
            self.scalers.append(Snapshot.take((), (), devices=(), others=(scaler,)))

    def _unscaling(self, scaler: Any, optimizer: Any) -> None:
        left = self._left.get(id(optimizer))
        if left:
            self.scaling.append((left, norm_of(optimizer), float(scaler.get_scale())))

    def _before(self, optimizer: Any, place: Any) -> None:
        ours = next((o for o in self.optimizers if o is optimizer), None)
        if ours is None:
            return
        if self.stepped and self.backwards == len(self.stepped):
            self.stepped[-1].append(next(i for i, o in enumerate(self.optimizers) if o is optimizer))
        self.stepped_at = self.stepped_at or place.site
        waiting = self._uncleared.get(id(optimizer))
        if waiting and id(optimizer) in self._learnt:  # else its closure has yet to run: LBFGS
            self.stale_steps[id(optimizer)] = self.stale_steps.get(id(optimizer), 0) + 1
            for key in waiting:
                name = self.names.get(key, "a parameter outside the model")
                self.stale_names[name] = self.stale_names.get(name, 0) + 1
        self.rates.append([float(g["lr"]) for o in self.optimizers for g in o.param_groups])
        grads = _gradients(optimizer)
        total = _total(grads)
        if total is not None:
            self.norms.append(total)
            if id(optimizer) in self._behind and not self._scalers_met:
                self.changed.append((self._behind[id(optimizer)], total))
        if id(optimizer) in self._filled and (not grads or not float(self.norms[-1])):
            self.emptied += 1
        self._filled.clear()
        if self.steps >= self._next:
            self._measure_before(optimizer)

    def _measure_before(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self.names.get(id(p))
                if name is not None and p.grad is not None and not p.grad.is_sparse:
                    self._kept[name] = p.detach().clone()

    def _stepped(self, optimizer: Any) -> None:
        if all(o is not optimizer for o in self.optimizers):
            return
        self.steps_of[id(optimizer)] = self.steps_of.get(id(optimizer), 0) + 1
        self._learnt.discard(id(optimizer))
        self._uncleared[id(optimizer)] = {
            id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None and g["lr"] != 0
        }
        if self._kept:
            parameters = {
                self.names[id(p)]: p for g in optimizer.param_groups for p in g["params"] if id(p) in self.names
            }
            for name, before in self._kept.items():
                self._measure(name, before, parameters.get(name))
            self._kept = {}
            self._next = max(self.steps + 1, int(self.steps * PACE))
        self.steps += 1
        self.after()

    def _measure(self, name: str, before: torch.Tensor, now: torch.Tensor | None) -> None:
        if now is None or now.grad is None:
            return
        moved, size, grad = read_scalars(
            [torch.linalg.vector_norm(t.detach().float()) for t in (now.detach() - before, before, now.grad)]
        )
        self.measured.setdefault(name, []).append(
            (grad / now.numel() ** 0.5, size / now.numel() ** 0.5, moved / size if size else float("nan"))
        )

    def gradient_norms(self) -> tuple[float, ...]:
        return tuple(read_scalars(self.norms))

    def stale(self) -> Stale:
        """How often an optimizer stepped on gradients that held older ones; the worst optimizer counts."""
        shares = [(self.stale_steps.get(key, 0) / max(steps - 1, 1), steps) for key, steps in self.steps_of.items()]
        share, steps = max(shares, default=(0.0, 0))
        always = [n for n, count in self.stale_names.items() if count > 0.5 * max(steps - 1, 1)]
        return Stale(share, steps, self.emptied, tuple(always), self.functions)

    def scaled(self) -> ScalerFact | None:
        """Whether gradients were clipped before they were unscaled: smaller, and not by one constant."""
        if not self.scaling:
            return None
        shrunk = [(before, after) for before, after, _ in self.scaling if after < SHRUNK * before]
        ratios = [after / before for before, after in shrunk]
        constant = bool(ratios) and max(ratios) - min(ratios) < SAME * max(ratios) and len(ratios) > 2
        constant = constant and not all(_round(after) for _, after in shrunk)
        return ScalerFact(
            len(self.scaling),
            0 if constant else len(shrunk),
            statistics.median(b for b, _, _ in self.scaling),
            statistics.median(a for _, a, _ in self.scaling),
            self.scaling[-1][2],
        )

    def clipped(self) -> tuple[float | None, bool]:
        """(the largest norm that the loop lets pass, whether it changes gradients between backward and step). The norm
        is None where it changes them in another way than by bringing their norm down to one size."""
        before, after = (read_scalars([norms[side] for norms in self.changed]) for side in (0, 1))
        shrunk = [(b, a) for b, a in zip(before, after) if a < SHRUNK * b]
        others = any(a > b / SHRUNK for b, a in zip(before, after))
        if not shrunk or others:
            return None, others
        limit = statistics.median(a for _, a in shrunk)
        kept = all(abs(a - limit) <= SAME * limit for _, a in shrunk) and all(
            b <= limit * (1 + SAME) for b, a in zip(before, after) if a >= SHRUNK * b
        )
        return (limit if kept else None), True

    def layers(self, order: dict[str, tuple[str, int]]) -> tuple[LayerFact, ...]:
        """The layers that were measured, in the order of the forward pass: `order` gives name → (type, calls)."""
        found = []
        for name, (kind, calls) in order.items():
            own = [rows for n, rows in self.measured.items() if n.rpartition(".")[0] == name and not n.endswith("bias")]
            if own:
                rows = max(own, key=lambda r: r[0][1])
                found.append(
                    LayerFact(
                        name,
                        kind,
                        statistics.median(g for g, _, _ in rows),
                        rows[0][0],
                        statistics.median(w for _, w, _ in rows),
                        statistics.median(u for _, _, u in rows),
                        calls,
                        max(u for _, _, u in rows[:3]),
                    )
                )
        return tuple(found)


def _round(norm: float) -> bool:
    """Whether this is a limit that somebody typed, such as 1.0, 0.5 or 10: two digits, to a ten-thousandth."""
    return abs(norm - float(f"{norm:.1e}")) < 1e-4 * norm


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    return [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None and not p.grad.is_sparse]


def _total(grads: list[torch.Tensor]) -> torch.Tensor | None:
    """The total norm of these gradients, left on their device; None where there are none."""
    return (
        torch.linalg.vector_norm(torch.stack([n.float().to(grads[0].device) for n in torch._foreach_norm(grads)]))
        if grads
        else None
    )


def norm_of(*optimizers: Any) -> float:
    """The total norm of the gradients of these optimizers."""
    total = _total([grad for optimizer in optimizers for grad in _gradients(optimizer)])
    return 0.0 if total is None else float(total)


def _uncleared(keys: set[int], parameters: dict[int, torch.Tensor]) -> set[int]:
    """Those whose gradient is there and not all zero."""
    dense = [(k, g) for k in keys if k in parameters and (g := parameters[k].grad) is not None and not g.is_sparse]
    if not dense:
        return set()
    sizes = read_scalars([n.float() for n in torch._foreach_norm([g for _, g in dense])])
    return {k for (k, _), size in zip(dense, sizes) if size != 0}


def _told_first(original: Any, tell: Any) -> Any:
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell(self, *args)
        return original(self, *args, **kwargs)

    return watched
