"""Fixes that are tried before training: one batch is learnt by heart as it is, and once more with the fix.

Both times begin at the same weights, use the same optimizer and take the same steps; then everything is put back. One
batch says whether a fault holds the learning up; whether the model gets good, it does not say.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from nbdebug.observe.locations import locate
from nbdebug.observe.snapshot import Snapshot
from nbdebug.report import Finding, Where
from nbdebug.tools.training.facts import Attempt, LossCall, StaticFacts
from nbdebug.tools.training.probe_errors import told
from nbdebug.tools.training.rules.wording import listed
from nbdebug.tools.training.static import signals as inputs
from nbdebug.tools.training.static.one_step import GETTERS, hidden_parameters
from nbdebug.tools.training.static.overfit_batch import Ask, learn, learnt, rate_of

Answer = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""What is given back for `func(*args, **kwargs)`."""


class PatchedCalls(TorchFunctionMode):
    """ops: names as torch has them, without the underscore of an op in place; all where there are none. where: only
    calls from this line; all where it has none. answered: how often."""

    def __init__(self, ops: Iterable[str], where: Where, answer: Answer):
        super().__init__()
        self.ops, self.where, self.answer, self.answered = frozenset(ops), where, answer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (not self.ops or name_of(func) in self.ops) and self._here():
            self.answered += 1
            return self.answer(func, args, kwargs)
        return func(*args, **kwargs)

    def _here(self) -> bool:
        if self.where.line is None:
            return True
        site = locate().site
        return site is not None and (site.file, site.line) == (self.where.file, self.where.line)


def name_of(func: Any) -> str:
    """The name of an op; that of the attribute where one is read (`tensor.data`)."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        return owner if owner in GETTERS else name
    return name if name.startswith("__") else name.rstrip("_")


def first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an op is given in the first place."""
    return args[0] if args else kwargs.get("input")


def with_first(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another one in the first place."""
    return ((value, *args[1:]), dict(kwargs)) if args else ((), {**kwargs, "input": value})


def with_second(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """… and in the second, the target of a loss."""
    return ((args[0], value, *args[2:]), dict(kwargs)) if len(args) > 1 else (args, {**kwargs, "target": value})


READ = 64
"""Batches whose mean and deviation stand for those of the training set."""
DROPPED = frozenset({"softmax", "softmin", "sigmoid", "hardsigmoid"})
"""What makes probabilities of scores."""

WHY_NOT = {
    "batch-mixing": "which dimensions were meant only you can say",
    "class-imbalance": "what weights do for the rare classes one batch does not show",
    "leakage": "it changes what validation says, and not what is learnt",
    "preprocessing-mismatch": "it changes what validation says, and not what is learnt",
    "same-seed-workers": "what augmentation is worth one batch does not show",
    "unshuffled-data": "the order of the batches one batch does not show; %diagnose tries it on a whole run",
    "zero-loss": "which outputs and targets were meant to be compared only you can say",
}

Change = Callable[[nn.Module, Sequence[torch.optim.Optimizer]], None]


@dataclasses.dataclass(frozen=True)
class TrainingFix:
    """how: what is done, in words. instead: the calls to answer otherwise (a fresh mode each time); change: done once
    to the model and its optimizers; batch: another batch in place of the one given. own: only the user's own optimizers
    show it; refused: without it the loss raises (on a card, for good); comparable: losses with and without it are."""

    how: str
    instead: Callable[[], PatchedCalls] | None = None
    change: Change | None = None
    batch: Any = None
    own: bool = False
    refused: bool = False
    comparable: bool = True


def remedy(
    finding: Finding, before: StaticFacts, model: nn.Module, train: Sequence[Any], leaves: Sequence[int]
) -> TrainingFix | str:
    """train: batches of the training set; leaves: positions of the inputs in them."""
    slug = finding.code.partition("/")[2]
    if slug in ("double-softmax", "wrong-output-activation"):
        return _without_activation(_blamed(finding, before), model)
    if slug == "missing-log-softmax":
        return _with_log_softmax(_blamed(finding, before))
    if slug == "input-not-normalized":
        return _standardized(train, leaves)
    if slug in ("dead-relu", "bad-init", "saturated-activation"):
        names = [str(name) for name in finding.evidence.get("where", ())]
        return TrainingFix(
            f"{listed(names[:2])} with fresh weights",
            change=lambda model, _: _drawn_anew(model, names, slug == "saturated-activation"),
        )
    made = {
        "wrong-loss-shape": _same_shape,
        "label-out-of-range": _counted_from_zero,
        "parameters-not-in-optimizer": _held,
        "detached-graph": _attached,
        "frozen-parameters": _thawed,
    }.get(slug)
    if made is not None:
        return made(finding, before)
    return WHY_NOT.get(slug, "one batch does not show it")


def _blamed(finding: Finding, before: StaticFacts) -> LossCall | None:
    """The call of a loss that a finding speaks of."""
    at = (finding.where.file, finding.where.line)
    here = [
        call
        for call in before.losses
        if at in ((call.where.file, call.where.line), (call.activation_where.file, call.activation_where.line))
    ]
    return next(iter([*here, *before.losses]), None)


def _without_activation(call: LossCall | None, model: nn.Module) -> TrainingFix | str:
    if call is None:
        return "no call of a loss function was seen"
    module = dict(model.named_modules()).get(call.activation_where.module or "")
    if module is not None and type(module).__module__ == "torch.nn.modules.activation":
        name = call.activation_where.module or ""
        return TrainingFix(
            f"without `{name}`, the {type(module).__name__}", change=lambda model, _: _passed_by(model, name)
        )
    if call.activation and call.activation_where.line is not None:
        name, at = call.activation, call.activation_where
        return TrainingFix(
            f"without the `{name}`", lambda: PatchedCalls({name}, at, lambda func, args, kwargs: first(args, kwargs))
        )
    if not call.probabilities:
        return "what makes the output could not be told from other calls"

    def scores(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        given = first(args, kwargs)
        args, kwargs = with_first(given.clamp_min(torch.finfo(given.dtype).tiny).log(), args, kwargs)
        return func(*args, **kwargs)

    return TrainingFix(
        "with the scores behind these probabilities", lambda: PatchedCalls({call.op}, call.where, scores)
    )


def _passed_by(model: nn.Module, name: str) -> None:
    """Have a module give back what it is given. The hook goes when the state is put back."""
    model.get_submodule(name).register_forward_hook(lambda module, args, out: args[0])


def _with_log_softmax(call: LossCall | None) -> TrainingFix | str:
    if call is None:
        return "no call of a loss function was seen"
    if call.across is not None and call.activation and call.activation_where.line is not None:
        name, at = call.activation, call.activation_where
        return TrainingFix(
            "over the classes",
            lambda: PatchedCalls({name}, at, lambda func, args, kwargs: getattr(torch, name)(first(args, kwargs), 1)),
            comparable=False,
        )

    def logs(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        given = first(args, kwargs)
        log = (
            given.clamp_min(torch.finfo(given.dtype).tiny).log()
            if call.probabilities
            else torch.log_softmax(given, 1 if call.op == "nll_loss" and given.dim() > 1 else -1)
        )
        args, kwargs = with_first(log, args, kwargs)
        return func(*args, **kwargs)

    return TrainingFix("with log-probabilities", lambda: PatchedCalls({call.op}, call.where, logs), comparable=False)


def _same_shape(finding: Finding, before: StaticFacts) -> TrainingFix | str:
    met = before.broadcasts[0]
    if torch.Size(met.output).numel() != torch.Size(met.target).numel():
        return "outputs and targets hold different numbers of elements: which belong together only you can say"

    def alike(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        a, b = first(args, kwargs), args[1] if len(args) > 1 else kwargs.get("target")
        if tuple(a.shape) == met.output:
            args, kwargs = with_second(b.reshape(a.shape), args, kwargs)
        elif tuple(b.shape) == met.output:
            args, kwargs = with_first(a.reshape(b.shape), args, kwargs)
        return func(*args, **kwargs)

    return TrainingFix("with targets in the shape of the outputs", lambda: PatchedCalls({met.op}, met.where, alike))


def _counted_from_zero(finding: Finding, before: StaticFacts) -> TrainingFix | str:
    call = next(call for call in before.losses if call.outside)
    if call.target_low is None or call.target_low < 1 or call.target_high != call.classes:
        return "an output for more classes is another model"

    def shifted(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        target = args[1] if len(args) > 1 else kwargs["target"]
        args, kwargs = with_second(torch.where(target > 0, target - 1, target), args, kwargs)
        return func(*args, **kwargs)

    return TrainingFix("with labels counted from 0", lambda: PatchedCalls({call.op}, call.where, shifted), refused=True)


def _held(finding: Finding, before: StaticFacts) -> TrainingFix | str:
    if not before.has_optimizer:
        return "no optimizer was given"
    names = [p.name for p in before.parameters if p.trained and p.reached and not p.held]
    return TrainingFix(
        f"{listed(names, 2)} added to the optimizer",
        change=lambda model, optimizers: _add(model, optimizers, names),
        own=True,
    )


def _thawed(finding: Finding, before: StaticFacts) -> TrainingFix | str:
    listed_names = set(finding.evidence.get("frozen", ()))
    names = [
        p.name for p in before.parameters if not p.trained and p.used and (p.name in listed_names or not before.trained)
    ]

    def thaw(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for name in names:
            model.get_parameter(name).requires_grad_(True)
        _add(model, optimizers, names)

    return TrainingFix(f"{listed(names, 2)} trained", change=thaw) if names else "no frozen parameter is used"


def _add(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: Sequence[str]) -> None:
    """Hand parameters to the first optimizer, where none holds them."""
    known = {**dict(hidden_parameters(model)), **dict(model.named_parameters())}
    held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    missing = [p for p in {id(known[n]): known[n] for n in names if n in known}.values() if id(p) not in held]
    if optimizers and missing:
        optimizers[0].add_param_group({"params": missing})


def _attached(finding: Finding, before: StaticFacts) -> TrainingFix | str:
    cut = before.cuts[0]
    if cut.how == "no_grad":
        return TrainingFix("with gradients on throughout", lambda: PatchedCalls((), Where(), _with_gradients))
    if cut.how != "detach" or cut.where.line is None:
        return "what to compute in its place only you can say"
    answer: Answer = lambda func, args, kwargs: first(args, kwargs)  # noqa: E731 (it is handed on, not called here)
    return TrainingFix(f"without the `{cut.op}`", lambda: PatchedCalls({"detach", "data"}, cut.where, answer))


def _with_gradients(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    with torch.enable_grad():
        return func(*args, **kwargs)


def _standardized(train: Sequence[Any], leaves: Sequence[int]) -> TrainingFix | str:
    scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for leaf in leaves:
        tensors = [t for batch in train[:READ] for t in inputs.picked(batch, [leaf])]
        if tensors and all(t.is_floating_point() and t.dim() > 1 for t in tensors):
            scales[leaf] = _moments(torch.cat([t.flatten(0, 0) for t in tensors]))
    if not scales:
        return "the inputs are no floating numbers when they leave the loader"
    chosen = {id(t): scales[leaf] for leaf in scales for t in inputs.picked(train[0], [leaf])}
    return TrainingFix(
        "with inputs of mean 0 and deviation 1",
        batch=tree_map_only(
            torch.Tensor,
            lambda t: ((t - chosen[id(t)][0]) / chosen[id(t)][1]).to(t.dtype) if id(t) in chosen else t,
            train[0],
        ),
    )


def _moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation by channel (pictures) or by feature, shaped to be taken off."""
    feature = 1 if x.dim() > 3 else x.dim() - 1
    others = [d for d in range(x.dim()) if d != feature]
    std = x.float().std(others, unbiased=False, keepdim=True)
    return x.float().mean(others, keepdim=True), torch.where(std > 0, std, torch.ones_like(std))


def _drawn_anew(model: nn.Module, names: Sequence[str], squashing: bool) -> None:
    """Weights of these modules for their width, biases zero."""
    parts = dict(model.named_modules())
    torch.manual_seed(0)
    for module in (parts[name] for name in names if name in parts):
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(weight, torch.Tensor) and weight.dim() > 1:
            with torch.no_grad():
                (nn.init.xavier_uniform_(weight) if squashing else nn.init.kaiming_normal_(weight, nonlinearity="relu"))
                if isinstance(bias, torch.Tensor):
                    bias.zero_()


STEPS = 100
SECONDS = 6.0
"""For one of the two times."""
BETTER = 0.7
"""The fix helps where the loss ends at this share of what it ends at without, or where the batch is learnt in this
share of the steps; as for experiments on whole runs."""
FALLS = 0.9
"""A loss above this share of the first one has not been learnt at all."""
RATE = 3e-3
"""Of Adam, where the user's own optimizers show nothing, or where there are none."""


def attempt(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    ask: Ask,
    batch: Any,
    remedy: TrainingFix,
    deadline: float = math.inf,
) -> Attempt:
    """Try a remedy: with the user's own optimizers, then, where these show nothing, with Adam over all trained
    parameters. Model and optimizers are as before afterwards. deadline: by the monotonic clock."""
    start = Snapshot.take(model, optimizers)
    found: Attempt | None = None
    for own in (True, False):
        if (
            (own and not optimizers)
            or (not own and remedy.own)
            or (found is not None and (found.verified or time.monotonic() > deadline))
        ):
            continue
        trying = _FixTrials(model, optimizers if own else None, ask, batch, start, deadline)
        later = trying.both(remedy)
        if found is None or later.verified is not None:
            found = later
    return found or Attempt(remedy.how, why="there is no optimizer to try it with")


@dataclasses.dataclass
class _FixTrials:
    """One optimizer: the batch learnt as it is, and with the remedy. optimizers: None for Adam."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer] | None
    ask: Ask
    batch: Any
    start: Snapshot
    deadline: float

    def both(self, remedy: TrainingFix) -> Attempt:
        named = "Adam" if self.optimizers is None else " and ".join(type(o).__name__ for o in self.optimizers)
        rate = RATE if self.optimizers is None else rate_of(self.optimizers)
        done = Attempt(remedy.how, f"{named} at {rate:g}")
        try:
            as_is = [] if remedy.refused else self._learn(None)
        except Exception:  # a loss that refuses its targets has no course
            as_is = []
        try:
            fixed = self._learn(remedy)
        except Exception as fault:  # the fix is no fix here: said so
            return dataclasses.replace(done, as_is=tuple(as_is), why=told("tried, and it fails", fault))
        verified, why = verdict(as_is, fixed, remedy.comparable)
        return dataclasses.replace(done, as_is=tuple(as_is), fixed=tuple(fixed), verified=verified, why=why)

    def _learn(self, remedy: TrainingFix | None) -> list[float]:
        until = min(self.deadline, time.monotonic() + SECONDS)
        self.start.restore()
        try:
            if remedy is not None and remedy.change is not None:
                remedy.change(self.model, self.optimizers or ())
            optimizers = [_adam(self.model)] if self.optimizers is None else self.optimizers
            batch = self.batch if remedy is None or remedy.batch is None else remedy.batch
            return learn(self.model, optimizers, _answered(self.ask, remedy), batch, STEPS, until)
        finally:
            self.start.restore()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE)


def _answered(ask: Ask, remedy: TrainingFix | None) -> Ask:
    """The same loss, in which calls are answered as the remedy wants. Raises LookupError where none of them is met."""
    if remedy is None or remedy.instead is None:
        return ask
    made = remedy.instead

    def asked(model: Any, batch: Any) -> Any:
        with made() as mode:
            loss = ask(model, batch)
        if not mode.answered:
            raise LookupError("the call to replace was not met again")
        return loss

    return asked


def verdict(as_is: Sequence[float], fixed: Sequence[float], comparable: bool = True) -> tuple[bool | None, str]:
    """(whether the fix helps, "") or (None, why that can't be said)."""
    steps, end = len(fixed) - 1, fixed[-1]
    falls = math.isfinite(end) and end < FALLS * fixed[0]
    if not as_is:
        return falls, ""  # without the fix there is no loss at all
    if not comparable:
        endless = as_is[-1] < 0 or not math.isfinite(as_is[-1]) or as_is[-1] > FALLS * as_is[0] > 0
        if learnt(fixed) and end >= 0:
            return True, ""
        return (True if falls and endless else None), "" if falls and endless else (
            f"{steps} steps on one batch show no difference"
        )
    if not math.isfinite(as_is[-1]) or end <= BETTER * as_is[-1]:
        return (True, "") if falls else (None, f"one batch is learnt neither way in {steps} steps")
    if learnt(as_is) and learnt(fixed):
        if steps <= BETTER * (len(as_is) - 1):
            return True, ""
        return None, (
            f"one batch is learnt by heart either way, in {len(as_is) - 1} steps as it is and in {steps} "
            "with the fix: whether it helps a whole run shows"
        )
    return (False, "") if falls else (None, f"one batch is learnt neither way in {steps} steps")
