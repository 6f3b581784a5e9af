"""The user's own loop, run once under light watch: losses, batches, the mode of each module while it runs, what
backward leaves in the gradients, and what the optimizer does with it.

`with LoopRun.watched() as callback:` keeps the raw record of what runs inside. Nothing that is watched changes what the
loop computes: the same weights come out, bit for bit. Evaluations on fixed batches happen inside the callback, and take
at most half as long as the loop itself.

Before a backward: is there still a gradient from before the optimizer's last step? After it, and before the optimizer
steps: how large are the gradients? Around a step, now and then: how far does each parameter move, against its size?
With a GradScaler: were gradients made smaller while they still carried its scale?
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from nbdebug.arguments import running_trainer
from nbdebug.observe.backward import Backward, CarriedScale, ClipWatch, EngineWatch, OptimizerWatch, graph_nodes
from nbdebug.observe.locations import USER, kind_of
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.step_hooks import Patches, StepHook, SteppingOptimizers, exchanged
from nbdebug.observe.tensors import read_scalars
from nbdebug.tools.training.evaluate import (
    Copies,
    FixedBatches,
    LoaderWatch,
    ProbeErrors,
    SavedBatches,
    SetBack,
    SoftTargets,
    preceded,
    preserve_rng,
    same_values,
    save_torch_rng,
    versions_of,
)
from nbdebug.tools.training.facts import BatchEvaluation, LayerFact, ModuleMode, ScalerFact, StaleGradients
from nbdebug.tools.training.interventions import graph_signature
from nbdebug.tools.training.loop_frames import (
    JointModel,
    LoopLoss,
    RewardWatch,
    calling_functions,
    frame_variables,
    loop_frames,
    loop_loss,
    marks_in,
    proved,
)
from nbdebug.tools.training.one_step import FrozenParts, is_fresh
from nbdebug.tools.training.outputs import LOOKS, FirstLosses
from nbdebug.tools.training.retrain import wants_closure

# -- modes, gradients and updates --------------------------------------------------------------------------------------


RARE = 0.2
"""An evaluation happens in at most every fifth step. What runs without gradients in each step (the generator of a GAN
while its discriminator learns, a momentum encoder, a policy that collects data) is a part of training."""
UPDATE_PACE = 1.15
"""Steps at which every parameter is measured are ever further apart, by this factor: some forty in a thousand."""
SHRUNK = 0.99
"""A gradient whose norm falls below this share of what backward left has been changed on purpose, not by rounding."""
FIRST_STEPS = 20
"""Steps in which it is checked whether gradients that backward has filled are gone when the optimizer steps."""
SAME = 0.02
"""Divided by one constant (accumulation), norms keep their ratio to this; clipping brings them to one size instead."""
TARGETED = re.compile("BinaryCrossEntropy|MseLoss")
"""Nodes of losses whose targets may be one label for all of a batch, as those of a discriminator are."""
REMEMBERED = 20_000
"""Calls of backward of which it is noted which optimizers stepped after them."""

MODES = "In which mode (train or eval) each module ran"
ORDER = "Gradients, updates and the order of backward, step and zero_grad"
LOSS = "The loss of a batch, by your loop's own lines"
FIRST = "What the first losses are made of"
SCALER = "Whether gradients are clipped before GradScaler unscales them"


# Modes


class ModeHook:
    """A hook that stays out of copies of the model, and never stops the training by an error of its own."""

    def __init__(self, note: Callable[..., None], errors: ProbeErrors):
        self.note = errors.wrap(MODES, note)

    def __call__(self, *args: Any) -> None:
        self.note(*args)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, _NormBase):
        return module.running_mean is not None
    return bool(getattr(module, "dropout", 0.0)) and isinstance(module, (nn.MultiheadAttention, nn.RNNBase))


class ModeWatch:
    """Counts, for each module that behaves differently in eval mode, the steps in which it ran in train mode, in eval
    mode, with and without gradients.

    evaluating: says whether validation batches are being read now; None where that is not known. paused: our own
    calls of the model are no part of the run.
    """

    def __init__(self, model: nn.Module, evaluating: Callable[[], bool | None], errors: ProbeErrors):
        self.model, self.evaluating, self.paused, self.errors = model, evaluating, False, errors
        self.modules = {name: module for name, module in model.named_modules() if _depends_on_mode(module)}
        self.steps = 0
        self.counts = {name: Counter[str]() for name in self.modules}
        self.switched_at, self.trained_first = dict[str, int](), dict[str, bool]()
        self.ran: dict[str, set[tuple[bool, bool]]] = {name: set() for name in self.modules}
        self.functions: dict[str, tuple[str, ...]] = {}
        self.sites: dict[str, Any] = {}
        self._roots: set[bool] = set()
        self._rare: dict[str, list[int]] = {}  # steps in which a module ran in train mode without gradients
        self._handles: list[Any] = []

    def attach(self) -> None:
        for name, module in self.modules.items():
            hook = ModeHook(lambda m, args, name=name: self._module_runs(name, m), self.errors)
            self._handles.append(module.register_forward_pre_hook(hook))
        self._handles.append(self.model.register_forward_pre_hook(ModeHook(self._model_runs, self.errors)))

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _model_runs(self, module: nn.Module, args: Any) -> None:
        kind = "training" if torch.is_grad_enabled() else "evaluation"
        if not self.paused and kind == "training":
            self._roots.add(module.training)
        if not self.paused and kind not in self.functions:
            self.functions[kind], self.sites[kind] = calling_functions()

    def _module_runs(self, name: str, module: nn.Module) -> None:
        if self.paused:
            return
        learning = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self.ran[name].add((module.training, learning))
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
        for name, ran in self.ran.items():
            counts = self.counts[name]
            if (True, True) in ran:
                counts["train_steps"] += 1
                self.trained_first.setdefault(name, True)
                self.switched_at.pop(name, None)  # it was only for a while
            elif (False, True) in ran:
                counts["eval_steps"] += 1
                if counts["train_steps"]:
                    self.switched_at.setdefault(name, self.steps)
                self.trained_first.setdefault(name, False)
            elif ran:  # without gradients, as a teacher does
                counts["apart" if (True, False) in ran else "quiet"] += 1
            ran.clear()
        self.steps += 1

    @property
    def root_evaluated(self) -> bool:
        """Whether the model itself was in eval mode whenever it was called with gradients."""
        return self._roots == {False}

    def facts(self) -> tuple[ModuleMode, ...]:
        return tuple(self._fact(name, module) for name, module in self.modules.items())

    def _fact(self, name: str, module: nn.Module) -> ModuleMode:
        counts, rare = self.counts[name], len(self._rare.get(name, []))
        own = list(module.parameters()) or list(self.model.get_submodule(name.rpartition(".")[0]).parameters())
        frozen = bool(own) and not any(p.requires_grad for p in own)
        return ModuleMode(
            name,
            type(module).__name__,
            counts["train_steps"] + counts["apart"] * frozen,
            counts["eval_steps"],
            self.switched_at.get(name),
            self.trained_first.get(name) is False or frozen and 2 * counts["quiet"] > self.steps,
            counts["train"] + (rare if 0 < rare <= RARE * self.steps else 0),
            counts["eval"],
            frozen,
            getattr(module, "momentum", None),
        )


# Gradients and updates


class UpdateWatch:
    """Follows backward and the optimizers' steps while attached.

    norms: total gradient norm before each step; rates: every group's learning rate at each; root: the last loss, as
    backward got it. used, stepped: for each call of backward, the index of the batch that was read last, and the
    optimizers that stepped after it; roots, signatures: the losses of the first of these calls, and their graphs.
    changed: gradient norms after backward, and before the step; waiting: how often an optimizer that had not stepped
    found its gradients gone, and still there. after_step is called after each step, read gives the number of batches
    read; begun, ended: called before the first calls of backward, and after each. taken: where there are no optimizers
    yet, each that trains the model is taken when it first steps, added to the list, and passed to this.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Any],
        after_step: Callable[[], None],
        read: Callable[[], int],
        errors: ProbeErrors,
        taken: Callable[[Any], None] | None = None,
        begun: Callable[[Backward], None] | None = None,
        ended: Callable[[], None] | None = None,
    ):
        self.begun, self.ended = begun, ended
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.optimizers, self.after_step, self.read = optimizers, after_step, read
        self.taken = None if optimizers else taken
        self.norms: list[torch.Tensor] = []
        self.rates: list[list[float]] = []
        self.steps = self.empty_steps = self.backwards = 0
        self.stale_steps: dict[int, int] = {}  # by the optimizer's id, as in the next
        self.steps_of: dict[int, int] = {}
        self.fed: set[int] = set()  # optimizers that have found gradients
        self.stale_names: dict[str, int] = {}
        self.functions: tuple[str, ...] = ()
        self.backward_site: Any = None
        self.step_site: Any = None
        self.labels: set[float] = set()
        self.root: float | None = None
        self.roots: list[float] = []
        self.signatures: list[Counter[str]] = []
        self.used: list[int] = []
        self.stepped: list[list[int]] = []
        self.changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waiting = [0, 0]
        self.measured: dict[str, list[tuple[float, float, float]]] = {}
        self.scaling: list[tuple[float, float, float]] = []
        self.carried, self.clips = CarriedScale(), ClipWatch()
        self.scalers: list[Snapshot] = []
        self._uncleared: dict[int, set[int]] = {}  # optimizer -> parameters not cleared since its last step
        self._filled: set[int] = set()  # optimizers for which the last backward left a gradient
        self._ready: set[int] = set()  # optimizers since whose last step a backward has run
        self._next = 0
        self._closures: dict[int, list[int]] = {}  # optimizer -> calls of its closure, those on old gradients
        self._inside: tuple[Any, FrameType | None] = None, None  # the optimizer that is in its step; its closure
        self._before_step: dict[str, torch.Tensor] = {}
        self._left: dict[int, float] = {}  # optimizer -> gradient norm that backward left
        self._norm_after_backward: dict[int, torch.Tensor] = {}
        self._live_scalers: dict[int, Any] = {}
        self._engine = EngineWatch(errors.wrap(ORDER, self._backward_begins), errors.wrap(ORDER, self._backward_ended))
        self._steps = OptimizerWatch(errors.wrap(ORDER, self._step_begins), errors.wrap(ORDER, self._stepped))
        self._unscales, self._scales = (errors.wrap(SCALER, f) for f in (self._unscale_begins, self._scale_begins))
        self._patches = Patches()

    def attach(self) -> None:
        for watch in (self._engine, self._steps, self.clips):
            watch.attach()
        kind = torch.amp.GradScaler
        for name, note in (("unscale_", self._unscales), ("scale", self._scales)):
            self._patches.set(kind, name, preceded(getattr(kind, name), note))

    def detach(self) -> None:
        for watch in (self._engine, self._steps, self.clips):
            watch.detach()
        self._patches.undo()

    def _backward_begins(self, call: Backward) -> None:
        if not call.accumulate:
            return
        if not self.functions:
            self.functions, self.backward_site = calling_functions()
        if call.roots[0].numel() == 1:
            scale = next((float(s.get_scale()) for s in self._live_scalers.values()), 1.0)
            self.root = float(call.roots[0].detach()) / scale
            self.roots += [self.root] * (len(self.roots) < FIRST_STEPS)
        if len(self.signatures) < FIRST_STEPS:
            self.signatures.append(graph_signature(call.roots[0]))
            for node in graph_nodes([call.roots[0].grad_fn]):
                if TARGETED.match(type(node).__name__):
                    self.labels |= set(node._saved_target.unique()[:3].tolist())
        if self.begun is not None:
            self.begun(call)
        if self._inside[0] is not None:
            self._note_closure(*self._inside)
        self._note_backward()
        parameters = {id(p): p for o in self.optimizers for g in o.param_groups for p in g["params"]}
        for key, waiting in self._uncleared.items():
            self._uncleared[key] = _with_gradient(waiting, parameters)
            self._ready.add(key)

    def _note_closure(self, optimizer: Any, last: FrameType | None) -> None:
        """A backward within a step: are the gradients of the closure's last call still there? One call of it may go
        backward several times, to accumulate."""
        called = (f for f in loop_frames(sys._getframe(1)) if f.f_back and kind_of(f.f_back.f_code) != USER)
        frame = next(called, None)
        if frame is not last:
            calls = self._closures.setdefault(id(optimizer), [0, 0])
            calls[0] += 1
            calls[1] += norm_of(optimizer) != 0  # NaN, too
        self._inside = optimizer, frame

    def _note_backward(self) -> None:
        """Another call of backward. Optimizers that did not step after the last: are their gradients still there?"""
        if 0 < len(self.stepped) <= FIRST_STEPS:
            for place, optimizer in enumerate(self.optimizers):
                if place not in self.stepped[-1]:
                    self.waiting[norm_of(optimizer) > 0] += 1
        if len(self.stepped) < REMEMBERED:
            self.stepped.append([])
            self.used.append(self.read() - 1)
        self.backwards += 1

    def _backward_ended(self, call: Backward, result: Any) -> None:
        if not call.accumulate:
            return
        norms = {id(o): _total(_gradients(o)) for o in self.optimizers}
        self._norm_after_backward = {key: norm for key, norm in norms.items() if norm is not None}
        if self._live_scalers:
            self._left = {id(o): norm_of(o) for o in self.optimizers}
            self.carried.backward_ended(self._left)
        self._filled = {id(o) for o in self.optimizers if self.steps < FIRST_STEPS and norm_of(o) > 0}
        if self.ended is not None:
            self.ended()

    def _scale_begins(self, scaler: Any, *args: Any) -> None:
        if scaler.is_enabled():
            self.carried.scaling(scaler)
        if scaler.is_enabled() and id(scaler) not in self._live_scalers:
            self._live_scalers[id(scaler)] = scaler
            self.scalers.append(Snapshot.take((), (), devices=(), others=(scaler,)))

    def _unscale_begins(self, scaler: Any, optimizer: Any) -> None:
        self.carried.unscaling(optimizer)
        if left := self._left.get(id(optimizer)):
            self.scaling.append((left, norm_of(optimizer), float(scaler.get_scale())))

    def _step_begins(self, optimizer: Any, place: Any) -> None:
        number = self._number(optimizer)
        if number is None:
            return
        self._inside = optimizer, None
        if self.stepped and self.backwards == len(self.stepped):
            self.stepped[-1].append(number)
        self.step_site = self.step_site or place.site
        stale = self._uncleared.get(id(optimizer))
        if stale and id(optimizer) in self._ready:  # else its closure has yet to run: LBFGS
            self.stale_steps[id(optimizer)] = self.stale_steps.get(id(optimizer), 0) + 1
            for key in stale:
                name = self.names.get(key, "a parameter outside the model")
                self.stale_names[name] = self.stale_names.get(name, 0) + 1
        self.rates.append([float(g["lr"]) for o in self.optimizers for g in o.param_groups])
        grads = _gradients(optimizer)
        total, has = _total(grads), any(p.grad is not None for g in optimizer.param_groups for p in g["params"])
        if has and (total is None or self.steps > FIRST_STEPS or float(total)):
            self.fed.add(id(optimizer))
        self.carried.stepping(optimizer, norm_of)
        if total is not None:
            self.norms.append(total)
            if id(optimizer) in self._norm_after_backward and not self._live_scalers:
                self.changed.append((self._norm_after_backward[id(optimizer)], total))
        if id(optimizer) in self._filled and (not grads or not float(self.norms[-1])):
            self.empty_steps += 1
        self._filled.clear()
        if self.steps >= self._next:
            self._save_weights(optimizer)

    def _number(self, optimizer: Any) -> int | None:
        """Which one of ours is about to step; None for another's."""
        number = next((i for i, o in enumerate(self.optimizers) if o is optimizer), None)
        if number is not None or self.taken is None:
            return number
        if not any(id(p) in self.names for group in optimizer.param_groups for p in group["params"]):
            return None
        self.optimizers.append(optimizer)
        self.taken(optimizer)
        return len(self.optimizers) - 1

    def _save_weights(self, optimizer: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            name = self.names.get(id(p))
            if name is not None and p.grad is not None and not p.grad.is_sparse:
                self._before_step[name] = p.detach().clone()

    def _stepped(self, optimizer: Any) -> None:
        if all(o is not optimizer for o in self.optimizers):
            return
        self._inside = None, None
        self._filled.clear()  # what a closure left was used
        self.steps_of[id(optimizer)] = self.steps_of.get(id(optimizer), 0) + 1
        self._ready.discard(id(optimizer))
        self._uncleared[id(optimizer)] = {
            id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None and g["lr"] != 0
        }
        if self._before_step:
            parameters = {
                self.names[id(p)]: p for g in optimizer.param_groups for p in g["params"] if id(p) in self.names
            }
            for name, before in self._before_step.items():
                self._measure(name, before, parameters.get(name))
            self._before_step = {}
            self._next = max(self.steps + 1, int(self.steps * UPDATE_PACE))
        self.steps += 1
        self.after_step()

    def _measure(self, name: str, before: torch.Tensor, now: torch.Tensor | None) -> None:
        """Root mean square of gradient and weight, and update over weight."""
        if now is None or now.grad is None:
            return
        moved, size, grad = read_scalars(
            [torch.linalg.vector_norm(t.detach().float()) for t in (now.detach() - before, before, now.grad)]
        )
        self.measured.setdefault(name, []).append(
            (grad / now.numel() ** 0.5, size / now.numel() ** 0.5, moved / size if size else float("nan"))
        )

    # What it comes to

    def gradient_norms(self) -> tuple[float, ...]:
        return tuple(read_scalars(self.norms))

    @property
    def unused(self) -> int:
        """Of the first calls of backward, those on a batch of their own whose gradients no step has used."""
        alone = len(self.optimizers) == 1 and len(set(self.used[:FIRST_STEPS])) == len(self.used[:FIRST_STEPS])
        return self.waiting[0] if alone and not self.waiting[1] and not wants_closure(self.optimizers[0]) else 0

    def stale_gradients(self) -> StaleGradients:
        """How often an optimizer stepped on gradients that held older ones; the worst optimizer counts."""
        shares = [(self.stale_steps.get(key, 0) / max(steps - 1, 1), steps) for key, steps in self.steps_of.items()]
        shares += [(old / max(calls - 1, 1), calls) for calls, old in self._closures.values()]
        share, steps = max(shares, default=(0.0, 0))
        usual = [name for name, count in self.stale_names.items() if count > 0.5 * max(steps - 1, 1)]
        return StaleGradients(share, steps, self.empty_steps, tuple(usual), self.functions)

    def scaler_fact(self) -> ScalerFact | None:
        """Whether gradients were clipped before they were unscaled: smaller, and not by one constant; or never were."""
        if not self.scaling:
            first = next(iter(self.carried.steps), None)
            return None if first is None else ScalerFact(0, 0, first[0], first[0], first[1], len(self.carried.steps))
        shrunk = [(before, after) for before, after, _ in self.scaling if after < SHRUNK * before]
        ratios = [after / before for before, after in shrunk]
        constant = bool(ratios) and max(ratios) - min(ratios) < SAME * max(ratios) and len(ratios) > 2
        constant = constant and not all(_is_round(after) for _, after in shrunk)
        before, after = (statistics.median(row[side] for row in self.scaling) for side in (0, 1))
        return ScalerFact(len(self.scaling), 0 if constant else len(shrunk), before, after, self.scaling[-1][2])

    def clip_limit(self) -> tuple[float | None, bool]:
        """(the largest norm that the loop lets pass, whether it changes gradients between backward and step). The norm
        is None where it changes them in another way than by limiting their norm."""
        before, after = (read_scalars([norms[side] for norms in self.changed]) for side in (0, 1))
        shrunk = [(b, a) for b, a in zip(before, after) if a < SHRUNK * b]
        others = any(a > b / SHRUNK for b, a in zip(before, after))
        if not shrunk or others:
            return None, others
        limit = statistics.median(a for _, a in shrunk)
        clipped = all(abs(a - limit) <= SAME * limit for _, a in shrunk) and all(
            b <= limit * (1 + SAME) for b, a in zip(before, after) if a >= SHRUNK * b
        )
        return (limit if clipped else None), True

    def layers(self, order: dict[str, tuple[str, int]]) -> tuple[LayerFact, ...]:
        """The layers that were measured, in the order of the forward pass: `order` gives name → (type, calls)."""
        layers = []
        for name, (kind, calls) in order.items():
            own = [rows for n, rows in self.measured.items() if n.rpartition(".")[0] == name and not n.endswith("bias")]
            if own:
                rows = max(own, key=lambda r: r[0][1])
                gradients, weights, updates = zip(*rows)
                layers.append(
                    LayerFact(
                        name,
                        kind,
                        statistics.median(gradients),
                        gradients[0],
                        statistics.median(weights),
                        statistics.median(updates),
                        calls,
                        max(updates[:3]),
                    )
                )
        return tuple(layers)


def norm_of(*optimizers: Any) -> float:
    """The total norm of the gradients of these optimizers."""
    total = _total([grad for optimizer in optimizers for grad in _gradients(optimizer)])
    return 0.0 if total is None else float(total)


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    return [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None and not p.grad.is_sparse]


def _total(grads: list[torch.Tensor]) -> torch.Tensor | None:
    """The total norm of these gradients, left on their device; None where there are none."""
    return (
        torch.linalg.vector_norm(torch.stack([n.float().to(grads[0].device) for n in torch._foreach_norm(grads)]))
        if grads
        else None
    )


def _with_gradient(keys: set[int], parameters: dict[int, torch.Tensor]) -> set[int]:
    """The ids of the parameters whose gradient is there and not all zero."""
    dense = [(k, g) for k in keys if k in parameters and (g := parameters[k].grad) is not None and not g.is_sparse]
    if not dense:
        return set()
    sizes = read_scalars([n.float() for n in torch._foreach_norm([g for _, g in dense])])
    return {k for (k, _), size in zip(dense, sizes) if size != 0}


def _ids(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _is_round(norm: float) -> bool:
    """Whether this is a limit that somebody typed, such as 1.0, 0.5 or 10: two digits, to a ten-thousandth."""
    return abs(norm - float(f"{norm:.1e}")) < 1e-4 * norm


# -- the loop under watch ----------------------------------------------------------------------------------------------


TAKEN = 8
"""Batches of a loop without a loader on which its course is measured: its first ones."""
KEPT = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
PACE = 1.12
"""Evaluations are ever further apart, by this factor: some forty in a thousand steps."""
SHARE = 0.5
"""Evaluations may take this share of the loop's time."""


class LoopRun:
    """One run. losses, step_numbers: from the callback; read_at, backward_at: batches read and calls of backward by
    then; rate_at: every group's learning rate; seconds: without our evaluations; end: the last loss on fixed batches,
    finite or not (NaN also where it is not known). evaluations: the course on fixed batches. on_step: called with each
    step's loss, for a progress bar; taken: with each optimizer that is first seen when it steps, where there were none
    before. learned: called where the loss of a batch is taken from the loop's own lines, which are then loss_fn: where
    there was none, it takes no such batch, or is only guessed and gives another loss. stepping: all optimizers that
    stepped, by id; graphs: calls with gradients, by the model's id; rewards: of a policy gradient; names: models,
    optimizers and schedulers by the loop's own names; takes_own: its batches come from no loader; marks: see
    `marks_in`, of the first batches then."""

    def __init__(
        self,
        model: Any,
        optimizers: list[Any],
        train_loader: Any,
        val_loader: Any,
        scheduler: Any,
        on_train: FixedBatches,
        on_val: FixedBatches,
        errors: ProbeErrors,
        on_step: Callable[[int, float], None] | None = None,
        taken: Callable[[Any], None] | None = None,
        learned: Callable[[], None] | None = None,
        guessed: bool = False,
    ):
        self.model, self.scheduler, self.guessed = model, scheduler, guessed
        self.loss_fn: LoopLoss | None = None
        self.learned = learned
        self._candidate: LoopLoss | None = None
        self._own: tuple[LoopLoss, Any] | None = None
        self.on_train, self.on_val, self.errors = on_train, on_val, errors
        self.on_step = errors.wrap("The progress bar", on_step) if on_step is not None else None
        self.saved, self.set_back = SavedBatches(), SetBack()
        save = errors.wrap("Which batches were read (experiments read others)", self.saved.add)
        self.reading = LoaderWatch(train_loader, val_loader, save)
        self.modes = ModeWatch(model, self.reading.evaluating, errors)
        self.updates = UpdateWatch(
            model, optimizers, self._stepped, lambda: self.reading.read, errors, taken, self._begun, self._ended
        )
        self.loaders = train_loader, val_loader
        self.losses, self.step_numbers = list[float](), list[int]()
        self.read_at, self.backward_at = list[int](), list[int]()
        self.rate_at, self.evaluations = list[list[float]](), list[BatchEvaluation]()
        self.names, self.stepping = dict[str, Any](), SteppingOptimizers()
        self.takes_own = self._drawn = False
        self.rewards: RewardWatch | None = None
        self._others: dict[str, tuple[nn.Module, list[tuple[int, float]]]] = {}
        self.copies, self.soft, self.first_losses, self.end = Copies(), SoftTargets(), FirstLosses(), math.nan
        self.frozen = FrozenParts(model)
        self._calls, self.graphs, self._hooks = Counter[str](), Counter[int](), list[Any]()
        self._draw: Callable[[], None] | None = None
        self._before: dict[CodeType, dict[str, Any]] = {}
        self.metrics, self.schedule_calls = list[float](), list[int]()
        self.has_callback, self._next, self.trainer = False, 0, ""
        self.seconds = self._ours = self._began = 0.0
        self._unwatch_scheduler: Callable[[], None] = lambda: None
        self.marks: list[dict[str, torch.Tensor]] = []

    @property
    def adversaries(self) -> bool:
        """Whether several optimizers have stepped, each after a backward of its own, as those of a GAN do."""
        alone = {row[0] for row in self.updates.stepped if len(row) == 1}
        return len(self.stepping) > 1 and (self.updates.backwards > 1.5 * len(self.losses) or len(alone) > 1)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Callable[..., None]]:
        """Gives the callback, while the user's loop runs. Its exceptions pass unchanged, with every hook taken away."""
        parts: dict[str, Any] = {
            "the order of reading the loaders": self.reading,
            "the mode of each module": self.modes,
            "each backward and each step": self.updates,
        }
        began = time.perf_counter()
        hooks: list[Any] = [StepHook(self.stepping.note)]
        try:
            for topic, part in parts.items():
                self.errors.run(f"What {topic} shows", part.attach, None)
            self._watch_scheduler()
            self._draw = save_torch_rng()
            for model in self.model.children() if isinstance(self.model, JointModel) else (self.model,):
                hooks.append(model.register_forward_pre_hook(ModeHook(self._model_called, self.errors)))
            self._evaluate()
            yield self.callback
            self._evaluate(last=True)
        finally:
            for hook in (*hooks, *self._hooks):
                hook.remove()
            for part in reversed(parts.values()):
                part.detach()
            self._unwatch_scheduler()
            self.seconds = time.perf_counter() - began - self._ours

    def callback(self, step: int, loss: Any, *more: Any, **named: Any) -> None:
        """What the user's loop calls after each step."""
        if not self.has_callback:  # the notes until then are of the same steps
            self.has_callback = True
            for notes in (self.step_numbers, self.losses, self.read_at, self.backward_at, self.rate_at):
                notes.clear()
        self._note(int(step), float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss))

    def _stepped(self) -> None:
        """An optimizer has stepped. A loop that calls no callback is followed by this."""
        self.modes.stepped()
        self.frozen.look()
        self.set_back.stepped(self.model)
        known = self.backward_at[-1] if self.backward_at else 0
        # once for all optimizers
        if not self.has_callback and self.updates.root is not None and self.updates.backwards > known:
            self._note(len(self.losses), self.updates.root)

    def _note(self, step: int, loss: float) -> None:
        self.step_numbers.append(step)
        self.losses.append(loss)
        self.read_at.append(self.reading.read)
        self.backward_at.append(self.updates.backwards)
        self.rate_at.append(self.updates.rates[-1] if self.updates.rates else [])
        if len(self.losses) >= self._next:
            self._evaluate()
        if self.on_step is not None:
            self.on_step(len(self.losses), self.losses[-1])

    def _begun(self, call: Backward) -> None:
        """Before a backward: which lines of the loop made the loss. Of a loop with another backward beside the first
        one, or with numbers in its loss that change, there is no loss of a batch."""
        self.set_back.begun(len(self.losses))
        first, frames = self.updates.backwards == 0, loop_frames(sys._getframe(1))
        if first:
            self.trainer = running_trainer(sys._getframe(1))
            for values in map(frame_variables, reversed(frames)):
                self.names |= {n: v for n, v in values.items() if issubclass(type(v), KEPT)}
                self.copies.add(values)
            self.takes_own = not self.reading.read
            self._watch_others()
        self.soft.note(call.roots[0], self.updates.backwards, self.reading.last)
        if self.updates.backwards < FIRST_STEPS and self.rewards is None:
            self.rewards = RewardWatch.of(call.roots[0], frames, bool(self.reading.read))
        looks = self.rewards is not None or self.updates.backwards < LOOKS
        names = {n: v for frame in reversed(frames) for n, v in frame_variables(frame).items()} if looks else {}
        self.errors.run(FIRST, lambda: self.first_losses.note(names, call.roots[0]), None)
        if self.rewards is not None:
            self.learned, self.takes_own = None, False
            self._forget_loss()
            self.rewards.note(names, call.roots[0])
        if self.learned is None:
            return
        wanted = self.on_train.loss_fn is None or bool(self.on_train.error) or self.takes_own or self.guessed
        early = self.updates.backwards < FIRST_STEPS and (wanted if first else self.loss_fn)
        loader = None if self.takes_own else self.loaders[0]
        found = self.errors.run(LOSS, lambda: loop_loss(self.model, loader), None) if early else self.loss_fn
        if first:
            self._candidate = None if call.retain else found
            if loader is not None and not call.retain:  # what the loop makes of the loader's batches, perhaps
                own = self.errors.run(LOSS, lambda: loop_loss(self.model, None), None)
                self._own = None if own is None or (batch := own.batch(self._before)) is None else (own, batch)
            self.takes_own = self.takes_own and self._candidate is not None
        elif early and (found is None or self._changes(found)):
            self._forget_loss()
        if self.takes_own and found is not None:
            self._take(found.batch(self._before))

    def _watch_others(self) -> None:
        """Models that are not trained may follow the one that is: of a DQN's target, a mean teacher."""
        own = {id(p): p for p in self.model.parameters()}
        for name, model in self.names.items():
            parameters = [] if not isinstance(model, nn.Module) else list(model.parameters())
            if parameters and own.keys().isdisjoint(map(id, parameters)):
                self._others[name] = model, versions_of(model)
                note = functools.partial(self._other_called, name)
                self._hooks.append(model.register_forward_hook(ModeHook(note, self.errors)))
                if same_values(parameters, own.values()):
                    self.copies.models[name] = model

    def _other_called(self, name: str, model: nn.Module, args: Any, out: Any) -> None:
        self._calls[name] += 1
        self.copies.called(name, args)

    @property
    def still(self) -> dict[str, nn.Module]:
        """Copies of the model that are called in each step, with other inputs than it, and stay as they were."""
        often = {n: m for n, m in self.copies.models.items() if self._calls[n] > self.updates.backwards // 2}
        return {n: m for n, m in often.items() if versions_of(m) == self._others[n][1]}

    @property
    def moving(self) -> dict[str, nn.Module]:
        """Those of which each step takes values, and whose weights have changed."""
        often = [n for n in self._others if self._calls[n] > self.updates.backwards // 2]
        return {n: m for n in often if versions_of(m := self._others[n][0]) != self._others[n][1]}

    @property
    def unheld(self) -> dict[str, nn.Module]:
        """Those that get gradients and stay as they were made, or frozen: no optimizer that steps holds them."""
        held, found = self._held(), {}
        for name, (model, versions) in self._others.items():
            own = [p for p in model.parameters() if p.grad is not None and bool(p.grad.any())]
            still = held and versions == versions_of(model)
            if still and own and held.isdisjoint(map(id, own)) and all(is_fresh(p) for p in own if p.dim() > 1):
                found[name] = model
        return found | self.frozen.left(held)

    @property
    def one_label(self) -> float | None:
        """What all losses of adversaries that have both stepped take for their target; None where they differ."""
        first = set().union(*self.updates.stepped[:FIRST_STEPS])
        known = self.adversaries and len(first) > 1 and len(self.updates.labels) == 1
        return next(iter(self.updates.labels)) if known else None

    def _held(self) -> set[int]:
        return set().union(*map(_ids, self.stepping.values()))

    def _forget_loss(self) -> None:
        self.loss_fn = self.on_train.loss_fn = self.on_val.loss_fn = None
        self.evaluations.clear()

    def _take(self, batch: Any) -> None:
        """A batch that was read from no loader. The first ones are those on which the course is measured."""
        if batch is None:
            self._forget_loss()
            return
        self.reading.take(batch, self._draw)
        if len(self.marks) < FIRST_STEPS:
            self.marks.append(marks_in(loop_frames(sys._getframe(1))))
        self._drawn = False
        if 0 < self.updates.backwards < TAKEN and len(self.saved.batches) > self.updates.backwards:
            self.on_train.batches.append(self.saved.batches[-1])

    def _model_called(self, module: Any = None, args: Any = ()) -> None:
        """The random numbers and variables of a step without a loader are those before its first call of a model."""
        if torch.is_grad_enabled() and not self.modes.paused:
            self.graphs[id(module)] += 1
            self.copies.called("", args)
        self.set_back.evaluated |= not (self.modes.paused or torch.is_grad_enabled())
        if self._drawn or self.modes.paused or self.saved.full or not torch.is_grad_enabled():
            return
        self._draw, self._drawn = save_torch_rng(), self.takes_own or not self.updates.backwards
        frames = loop_frames(sys._getframe(1)) if self._drawn else ()
        self._before = {
            f.f_code: {n: v for n, v in f.f_locals.items() if not (issubclass(type(v), torch.Tensor) and v.grad_fn)}
            for f in frames
        }

    def _ended(self) -> None:
        """After a backward, when its graph is gone: the first one's lines are tried, and nothing was updated yet."""
        found, self._candidate = self._candidate, None
        own, self._own = self._own, None
        guessed, self.guessed = self.guessed, False
        if self.learned is None or not self.updates.roots or not (found or own or guessed):
            return
        self.modes.paused = True
        batches = self.reading.last, self.reading.previous  # which it is where the loop's own reader is one ahead
        if guessed and not self.takes_own and self._proves(self.on_train.loss_fn, *batches):
            pass  # the criterion among the variables is the loop's loss
        elif found is not None and self._proves(found, *batches):
            self._learn(found)
        elif own is not None and (guessed or not self.on_train.loss_fn) and self._proves(*own):
            self.takes_own, self.reading.train = True, None
            self._clear_batches()
            self._take(own[1])
            self._learn(own[0])
        else:
            if guessed:
                self._forget_loss()
            if self.takes_own:
                self.takes_own = False
                self._clear_batches()
        self.modes.paused = False

    def _clear_batches(self) -> None:
        self.reading.read = 0
        for notes in (self.saved.batches, self.saved.draws, self.marks):
            notes.clear()

    def _learn(self, found: LoopLoss) -> None:
        self.loss_fn = self.on_train.loss_fn = self.on_val.loss_fn = found
        self.on_train.error = self.on_val.error = ""
        if self.takes_own:
            self.on_train.batches, self.on_val.batches = list(self.saved.batches), []
        if self.learned is not None:
            self.learned()
        self._evaluate()

    def _proves(self, loss_fn: Any, *batches: Any) -> bool:
        known = self.updates.roots[0], self.updates.signatures[0]
        proofs = [functools.partial(proved, loss_fn, self.model, b, *known) for b in batches if b is not None]
        proves = any(self.errors.run(LOSS, proof, False) for proof in proofs)
        if proves:
            self.errors.by_topic.pop(LOSS, None)
        return proves

    def _changes(self, found: LoopLoss) -> bool:
        known = self.loss_fn
        return known is None or found.site != known.site or found.numbers() != known.numbers()

    def _watch_scheduler(self) -> None:
        """By its class: what stands on the scheduler itself goes into its state_dict, and can't be saved."""
        if self.scheduler is None:
            return
        own = type(self.scheduler).step

        def note(metric: Any) -> None:
            self.schedule_calls.append(self.updates.steps)
            if isinstance(metric, (int, float, torch.Tensor)):
                self.metrics.append(float(metric))

        guarded = self.errors.wrap("When the scheduler is stepped, and with which value", note)

        @functools.wraps(own)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler is self.scheduler:
                guarded(kwargs.get("metrics", args[0] if args else None))
            return own(scheduler, *args, **kwargs)

        self._unwatch_scheduler = exchanged(type(self.scheduler), "step", step)

    def _evaluate(self, last: bool = False) -> None:
        step = len(self.losses)
        if self.takes_own and self.updates.backwards < TAKEN and not last:
            return
        self._next = max(step + 1, int(step * PACE))
        began = time.perf_counter()
        self._began = self._began if step else began
        elapsed = began - self._began if step else 1.0
        if step and not last and self._ours > SHARE * elapsed:
            return
        self.modes.paused = True
        try:
            neither: Any = None, None
            train, val = self.errors.run("The loss on fixed batches along the run", self._means, neither)
        finally:
            self.modes.paused = False
        self._ours += time.perf_counter() - began
        self.end = math.nan if train is None else train[0]
        if train is not None and math.isfinite(train[0]):
            self.evaluations.append(BatchEvaluation(step, train[0], val[0] if val else None, val[1] if val else 0.0))

    def _means(self) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
        with preserve_rng(*self.loaders):
            return self.on_train.mean(), self.on_val.mean()
