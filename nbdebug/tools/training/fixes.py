"""Fixes that are tried before training: one batch is trained on as it is, and once more with the fix.

Both times begin at the same weights, use the same optimizer and take the same steps; then everything is put back. One
batch says whether a fault keeps the model from learning; it does not say how good the model gets.

    fix_for    the fix of a finding as something that can be done: a change of the model, or calls that are patched
    attempt    the two trainings, and what they say
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from nbdebug.observe.locations import locate, users_frames
from nbdebug.observe.snapshot import Snapshot
from nbdebug.observe.sources import edit_of, edited_functions, nodes_of
from nbdebug.report import Edit, Finding, Where
from nbdebug.text import count, figures, listed
from nbdebug.tools.training.edits import MODEL, as_batch_first, as_identity, in_loss
from nbdebug.tools.training.evaluate import LossFn, describe, loss_root, preserve_rng
from nbdebug.tools.training.loop_frames import LoopLoss
from nbdebug.tools.training.one_step import GETTERS, hidden_parameters, leaves_of
from nbdebug.tools.training.retrain import wants_closure
from nbdebug.tools.training.signals import tensors_at
from nbdebug.tools.training.static_facts import Attempt, LossCall, OverfitResult, StaticFacts

STEPS = 100
SECONDS = 6.0
"""For one of the two trainings."""
BETTER = 0.7
"""The fix helps where the loss ends at this share of what it ends at without, or where the batch is memorized in this
share of the steps; as for experiments on whole runs."""
FALLS = 0.9
"""A loss above this share of the first one: nothing of the batch has been learned."""
RATE = 3e-3
"""Of Adam, where the user's own optimizers show nothing, or where there are none."""
READ = 64
"""Batches whose mean and deviation stand for those of the training set."""

WHY_NOT = {
    "batch-mixing": "only you know which dimensions were meant",
    "class-imbalance": "one batch does not show what weights do for the rare classes",
    "leakage": "it changes what validation says, not what the model learns",
    "preprocessing-mismatch": "it changes what validation says, not what the model learns",
    "same-seed-workers": "one batch does not show what augmentation is worth",
    "unshuffled-data": "one batch does not show the order of the batches; %diagnose tries it on a whole run",
    "zero-loss": "only you know which outputs and targets should be compared",
}
"""Causes whose fix one batch can't show."""

Replacement = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""The result in place of `func(*args, **kwargs)`."""
Change = Callable[[nn.Module, Sequence[torch.optim.Optimizer]], None]


# Patched calls


class PatchedCalls(TorchFunctionMode):
    """Calls of torch that give another result. ops: names as torch has them, without the underscore of an op in place;
    all where there are none. where: only calls from this line; all where it has none. count: of patched calls."""

    def __init__(self, ops: Iterable[str], where: Where, replacement: Replacement):
        super().__init__()
        self.ops, self.where, self.replacement, self.count = frozenset(ops), where, replacement, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (not self.ops or op_name(func) in self.ops) and self._on_line():
            self.count += 1
            return self.replacement(func, args, kwargs)
        return func(*args, **kwargs)

    def _on_line(self) -> bool:
        if self.where.line is None:
            return True
        site = locate().site
        return site is not None and (site.file, site.line) == (self.where.file, self.where.line)


def op_name(func: Any) -> str:
    """The name of an op; that of the attribute where one is read (`tensor.data`)."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        return owner if owner in GETTERS else name
    return name if name.startswith("__") else name.rstrip("_")


def first_argument(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An op's first argument, as a replacement of its result: the op does nothing then."""
    return args[0] if args else kwargs.get("input")


def changed_argument(place: int, name: str, change: Callable[[Any], Any]) -> Replacement:
    """The same call with another argument: `change` gets the one that stands at this place, or has this name."""

    def call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if len(args) > place:
            args = (*args[:place], change(args[place]), *args[place + 1 :])
        else:
            kwargs = {**kwargs, name: change(kwargs[name])}
        return func(*args, **kwargs)

    return call


def _log_of(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


# Fixes


@dataclasses.dataclass(frozen=True)
class TrainingFix:
    """how: the change, in words. edit: the user's own functions run with this text, or, with a change or a patch
    beside it, the text that has the same effect when the model is made again; patch: calls that give another
    result (a fresh mode each time); change: done once to the model and its optimizers; batch: another batch in place of
    the first. own: only the user's own optimizers show
    it; raises: without it the loss raises (on a GPU, for good); comparable: losses with and without it are."""

    how: str
    edit: Edit | None = None
    patch: Callable[[], PatchedCalls | BatchFirst] | None = None
    change: Change | None = None
    batch: Any = None
    own: bool = False
    raises: bool = False
    comparable: bool = True


def fix_for(
    finding: Finding, static: StaticFacts, model: nn.Module, train: Sequence[Any], leaves: Sequence[int]
) -> TrainingFix | str:
    """The fix, or why it can't be tried. train: batches of the training set; leaves: positions of the inputs in
    them."""
    slug = finding.code.partition("/")[2]
    if slug in ("double-softmax", "wrong-output-activation"):
        return _without_activation(_loss_call(finding, static), model)
    if slug == "missing-log-softmax":
        return _with_log_softmax(_loss_call(finding, static))
    if slug == "input-not-normalized":
        in_place = static.reread in ("written", "shared")
        return "it is the dataset that has to read anew" if in_place else _standardized(train, leaves)
    if slug in ("dead-relu", "bad-init", "saturated-activation"):
        names = [str(name) for name in finding.evidence.get("where", ())]
        return TrainingFix(
            f"with new initial weights in {listed(names[:2])}",
            change=lambda model, _: _draw_weights(model, names, slug == "saturated-activation"),
        )
    if slug == "frozen-parameters":
        return _unfrozen(set(finding.evidence.get("frozen", ())), static)
    fix = {
        "wrong-loss-shape": _same_shape,
        "label-out-of-range": _counted_from_zero,
        "parameters-not-in-optimizer": _in_the_optimizer,
        "detached-graph": _attached,
    }.get(slug)
    return fix(static) if fix is not None else WHY_NOT.get(slug, "one batch does not show it")


def edit_fixes(
    finding: Finding,
    static: StaticFacts,
    model: nn.Module,
    loss_fn: LossFn,
    train: Sequence[Any],
    leaves: Sequence[int],
) -> Iterator[TrainingFix]:
    """The same as edits of the user's own lines, the gentlest first. loss_fn, train, leaves: with the batches of the
    training set, and the positions of the inputs in them."""
    slug = finding.code.partition("/")[2]
    if slug == "input-not-normalized" and static.reread not in ("written", "shared"):
        yield from _standardized_call(model, loss_fn, train, leaves)
    call = _loss_call(finding, static)
    for edit in in_loss(slug, static, call, model):
        alike = slug not in ("missing-log-softmax",)
        yield TrainingFix("this text", edit, raises=slug == "label-out-of-range", comparable=alike)
    name = call.activation_where.module if call is not None and call.target_sum is None else None
    if call is not None and name and slug in ("double-softmax", "wrong-output-activation"):
        for edit in as_identity(model.get_submodule(name), call.where.file or ""):
            yield TrainingFix(f"a model without {name}", edit, change=lambda model, _: _bypass(model, name))
    layer = static.mixing.layer if slug == "batch-mixing" and static.mixing is not None else ""
    for edit in as_batch_first(model.get_submodule(layer), finding.where.file or "") if layer else ():
        how = f"a model with the batch first in {layer}"
        yield TrainingFix(how, edit, patch=lambda: BatchFirst(model, type(model.get_submodule(layer))))


class BatchFirst:
    """Inside, all layers of a class take the batch as their first dimension."""

    count = 1

    def __init__(self, model: nn.Module, kind: type):
        layers = [part for module in model.modules() if type(module) is kind for part in module.modules()]
        self.layers = [part for part in layers if getattr(part, "batch_first", None) is False]

    def __enter__(self) -> BatchFirst:
        return self._set(True)

    def __exit__(self, *error: Any) -> None:
        self._set(False)

    def _set(self, first: bool) -> BatchFirst:
        for layer in self.layers:
            layer.batch_first = first  # type: ignore[assignment]
        return self


def _loss_call(finding: Finding, static: StaticFacts) -> LossCall | None:
    """The loss function's call at the finding's line, or else the first."""
    line = (finding.where.file, finding.where.line)
    here = [
        call
        for call in static.loss_calls
        if line in ((call.where.file, call.where.line), (call.activation_where.file, call.activation_where.line))
    ]
    return next(iter([*here, *static.loss_calls]), None)


def _without_activation(call: LossCall | None, model: nn.Module) -> TrainingFix | str:
    if call is None:
        return "no call of a loss function was found"
    if call.target_sum is not None:
        return _with_sigmoid(call)
    if call.activation == "cosine_similarity" or call.bounded:
        return "a whole run shows it"
    module = dict(model.named_modules()).get(call.activation_where.module or "")
    if module is not None and type(module).__module__ == "torch.nn.modules.activation":
        name = call.activation_where.module or ""
        return TrainingFix(
            f"without `{name}`, the {type(module).__name__}", change=lambda model, _: _bypass(model, name)
        )
    if call.activation and call.activation_where.line is not None:
        op, where = call.activation, call.activation_where
        return TrainingFix(f"without the `{op}`", patch=lambda: PatchedCalls({op}, where, first_argument))
    if not call.probabilities:
        return "the op that makes the output can't be told from other calls"

    scores = changed_argument(0, "input", _log_of)
    return TrainingFix(
        "with the scores behind these probabilities", patch=lambda: PatchedCalls({call.op}, call.where, scores)
    )


def _with_sigmoid(call: LossCall) -> TrainingFix | str:
    if call.activation != "softmax" or call.activation_where.line is None:
        return "the op that makes the output can't be told from other calls"
    return TrainingFix(
        "with a sigmoid in place of the softmax",
        patch=lambda: PatchedCalls(
            {"softmax"}, call.activation_where, lambda func, args, kwargs: first_argument(func, args, kwargs).sigmoid()
        ),
    )


def _bypass(model: nn.Module, name: str) -> None:
    """Make a module return its input. The hook goes when the state is put back."""
    model.get_submodule(name).register_forward_hook(lambda module, args, out: args[0])


def _with_log_softmax(call: LossCall | None) -> TrainingFix | str:
    if call is None:
        return "no call of a loss function was found"
    if call.softmax_dim is not None and call.activation and call.activation_where.line is not None:
        op, where = call.activation, call.activation_where

        def over_classes(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
            return getattr(torch, op)(first_argument(func, args, kwargs), 1)

        return TrainingFix("over the classes", patch=lambda: PatchedCalls({op}, where, over_classes), comparable=False)

    def log_softmax(output: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(output, 1 if call.op == "nll_loss" and output.dim() > 1 else -1)

    logs = changed_argument(0, "input", _log_of if call.probabilities else log_softmax)
    return TrainingFix(
        "with log-probabilities", patch=lambda: PatchedCalls({call.op}, call.where, logs), comparable=False
    )


def _same_shape(static: StaticFacts) -> TrainingFix | str:
    broadcast = next(iter(static.broadcasts), None)
    if broadcast is None:
        return "only you know which of these numbers belong together"
    if math.prod(broadcast.output) != math.prod(broadcast.target):
        return "outputs and targets differ in size: only you know which of them belong together"

    def alike(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        a, b = first_argument(func, args, kwargs), args[1] if len(args) > 1 else kwargs.get("target")
        if broadcast.output not in (tuple(a.shape), tuple(b.shape)):
            return func(*args, **kwargs)
        place = (1, "target") if tuple(a.shape) == broadcast.output else (0, "input")
        return changed_argument(*place, lambda t: t.reshape(broadcast.output))(func, args, kwargs)

    return TrainingFix(
        "with targets in the shape of the outputs", patch=lambda: PatchedCalls({broadcast.op}, broadcast.where, alike)
    )


def _counted_from_zero(static: StaticFacts) -> TrainingFix | str:
    call = next(call for call in static.loss_calls if call.outside)
    if not call.from_one:
        return "an output for more classes is another model"

    shifted = changed_argument(1, "target", lambda target: torch.where(target > 0, target - 1, target))
    return TrainingFix(
        "with labels counted from 0", patch=lambda: PatchedCalls({call.op}, call.where, shifted), raises=True
    )


def _in_the_optimizer(static: StaticFacts) -> TrainingFix | str:
    if not static.has_optimizer:
        return "no optimizer was given"
    lacking = [p for p in static.parameters if p.trained and p.reached and not p.held]
    names = [p.name for p in lacking if not (p.plain and p.outside)]
    if not names:
        return "it is a variable, of which an optimizer may be given any"
    return TrainingFix(
        f"with {listed(names, 2)} added to the optimizer",
        change=lambda model, optimizers: _add(model, optimizers, names),
        own=True,
    )


def _unfrozen(frozen: set[str], static: StaticFacts) -> TrainingFix | str:
    """frozen: names; all that the forward uses where nothing is trained."""
    names = [p.name for p in static.parameters if not p.trained and p.used and (p.name in frozen or not static.trained)]

    def unfreeze(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for name in names:
            model.get_parameter(name).requires_grad_(True)
        _add(model, optimizers, names)

    return TrainingFix(f"with {listed(names, 2)} trained", change=unfreeze) if names else "no frozen parameter is used"


def _add(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: Sequence[str]) -> None:
    """Add parameters to the first optimizer, where none holds them."""
    known = {**dict(hidden_parameters(model)), **dict(model.named_parameters())}
    held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    missing = [p for p in {id(known[n]): known[n] for n in names if n in known}.values() if id(p) not in held]
    if optimizers and missing:
        optimizers[0].add_param_group({"params": missing})


def _attached(static: StaticFacts) -> TrainingFix | str:
    alone = next((call for call in static.wrong_calls if call.kind == "normalized alone"), None)
    if alone is not None:
        return TrainingFix(
            f"without the `{alone.op}`", patch=lambda: PatchedCalls({alone.op}, alone.where, first_argument)
        )
    cut = static.detached[0]
    if cut.how == "no_grad":
        return TrainingFix(
            "with gradients enabled throughout", patch=lambda: PatchedCalls((), Where(), _with_gradients)
        )
    if cut.how != "detach" or cut.where.line is None:
        return "only you know what to compute in its place"
    return TrainingFix(
        f"without the `{cut.op}`", patch=lambda: PatchedCalls({"detach", "data"}, cut.where, first_argument)
    )


def _with_gradients(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    with torch.enable_grad():
        return func(*args, **kwargs)


def _standardized(train: Sequence[Any], leaves: Sequence[int]) -> TrainingFix | str:
    scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for leaf in leaves:
        tensors = [t for batch in train[:READ] for t in tensors_at(batch, [leaf])]
        if tensors and all(t.is_floating_point() and t.dim() > 1 for t in tensors):
            scales[leaf] = _moments(torch.cat([t.flatten(0, 0) for t in tensors]))
    if not scales:
        return "the inputs are not floating point numbers when they leave the loader"
    by_tensor = {id(t): scales[leaf] for leaf in scales for t in tensors_at(train[0], [leaf])}

    def standardize(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in by_tensor:
            return tensor
        mean, std = by_tensor[id(tensor)]
        return ((tensor - mean) / std).to(tensor.dtype)

    return TrainingFix(
        "with inputs of mean 0 and deviation 1", batch=tree_map_only(torch.Tensor, standardize, train[0])
    )


def _moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation by channel (images) or by feature, shaped to be subtracted."""
    feature = 1 if x.dim() > 3 else x.dim() - 1
    others = [d for d in range(x.dim()) if d != feature]
    std = x.float().std(others, unbiased=False, keepdim=True)
    return x.float().mean(others, keepdim=True), torch.where(std > 0, std, torch.ones_like(std))


MOST_FEATURES, ALIKE = 12, 10.0
"""Features that are scaled each by its own numbers in a line; deviations that one number is enough for."""


def _standardized_call(
    model: nn.Module, loss_fn: LossFn, train: Sequence[Any], leaves: Sequence[int]
) -> Iterator[TrainingFix]:
    """The inputs scaled where the model is called, by the mean and the deviation of the training set as numbers."""
    places: list[tuple[str, int, dict[str, Any], Any]] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        for frame in itertools.islice(users_frames(sys._getframe(1)), 1):
            names = {**frame.f_globals, **frame.f_locals}
            places.append((frame.f_code.co_filename, frame.f_lineno, names, args[0] if args else None))

    with model.register_forward_pre_hook(note), preserve_rng(loss_fn), torch.no_grad():
        loss_fn(model, train[0])
    if len(places) != 1 or not isinstance(places[0][3], torch.Tensor):
        return
    file, line, names, given = places[0]
    alike = [leaf for leaf in leaves if any(t is given for t in tensors_at(train[0], [leaf]))]
    tensors = [t for batch in train[:READ] for t in tensors_at(batch, alike[:1])]
    if not tensors or not all(t.is_floating_point() and t.dim() > 1 and t.device.type == "cpu" for t in tensors):
        return
    mean, std = (moment.flatten() for moment in _moments(torch.cat(tensors)))
    if given.dim() == 2 and len(std) <= MOST_FEATURES and float(std.max()) > ALIKE * float(std.min()):
        center, scale = (f"torch.tensor([{', '.join(f'{v:.4g}' for v in part.tolist())}])" for part in (mean, std))
    else:
        whole = torch.cat([t.flatten() for t in tensors]).float()
        center, scale = f"{float(whole.mean()):.4g}", f"{float(whole.std()):.4g}"
    called = [n for n in nodes_of(file) if isinstance(n, ast.Call) and n.args and isinstance(n.func, ast.Name)]
    called = [n for n in called if names.get(n.func.id) is model or n.func.id == MODEL]  # type: ignore[attr-defined]
    if len(called) == 1 and called[0].lineno <= line <= (called[0].end_lineno or 0) and "torch" in names:
        edit = edit_of(file, {called[0].args[0]: f"({{}} - {center}) / {scale}"})  # validation goes through it, too
        yield from [TrainingFix("this text", edit)] if edit is not None else ()


def _draw_weights(model: nn.Module, names: Sequence[str], squashing: bool) -> None:
    """Draw the weights of these modules for their width, with biases of zero."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    torch.manual_seed(0)
    weights = [(getattr(modules[n], "weight", None), getattr(modules[n], "bias", None)) for n in names if n in modules]
    weights += [(parameters[name], None) for name in names if name in parameters and not name.endswith("weight")]
    for weight, bias in weights:
        if isinstance(weight, torch.Tensor) and weight.dim() > 1 and weight.requires_grad:  # never what is pretrained
            with torch.no_grad():
                (nn.init.xavier_uniform_(weight) if squashing else nn.init.kaiming_normal_(weight, nonlinearity="relu"))
                if isinstance(bias, torch.Tensor):
                    bias.zero_()


# Attempts


def attempt(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_fn: LossFn,
    batch: Any,
    fix: TrainingFix,
    deadline: float,
) -> Attempt:
    """Try a fix: with the user's own optimizers, then, where these show nothing, with Adam over all trained parameters.
    Model and optimizers are as before afterwards. deadline: by the monotonic clock."""
    start = Snapshot.take(model, optimizers)
    result: Attempt | None = None
    for own in (True, False):
        if (
            (own and not optimizers)
            or (not own and fix.own)
            or (result is not None and (result.verified or time.monotonic() > deadline))
        ):
            continue
        later = _FixTrial(model, optimizers if own else None, loss_fn, batch, start, deadline).compare(fix)
        if result is None or later.verified is not None:
            result = later
    return result or Attempt(fix.how, why="there is no optimizer to try it with")


@dataclasses.dataclass
class _FixTrial:
    """One optimizer: the batch trained on as it is, and with the fix. optimizers: None for Adam."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer] | None
    loss_fn: LossFn
    batch: Any
    start: Snapshot
    deadline: float

    def compare(self, fix: TrainingFix) -> Attempt:
        name = "Adam" if self.optimizers is None else " and ".join(type(o).__name__ for o in self.optimizers)
        rate = RATE if self.optimizers is None else largest_rate(self.optimizers)
        attempt = Attempt(fix.how, f"{name} at {rate:g}")
        try:
            as_is = [] if fix.raises else self._train(None)
        except Exception:  # a loss that refuses its targets has no course
            as_is = []
        compares = fix.comparable and as_is and math.isfinite(as_is[-1]) and not memorized(as_is)
        try:
            fixed = self._train(fix, below=as_is[-1] if compares else math.inf)
        except Exception as error:  # the fix is no fix here, and the report says so
            return dataclasses.replace(attempt, as_is=tuple(as_is), why=describe("tried, and it fails", error))
        verified, why = verdict(as_is, fixed, fix.comparable)
        attempt = dataclasses.replace(attempt, as_is=tuple(as_is), fixed=tuple(fixed), edit=fix.edit)
        return dataclasses.replace(attempt, verified=verified, why=why)

    def _train(self, fix: TrainingFix | None, below: float = math.inf) -> list[float]:
        """below: a loss that the course is compared with: one that starts far above it must have time to get there."""
        until = min(self.deadline, time.monotonic() + SECONDS)
        edit = None if fix is None or fix.change is not None or fix.patch is not None else fix.edit
        loss_fn = self.loss_fn
        changed = loss_fn.edited(edit) if edit is not None and isinstance(loss_fn, LoopLoss) else None
        self.start.restore()
        try:
            with contextlib.nullcontext(1) if edit is None else edited_functions(edit) as exchanged:
                if not exchanged and changed is None:
                    raise LookupError("the functions around these lines can't be exchanged")
                if fix is not None and fix.change is not None:
                    fix.change(self.model, self.optimizers or ())
                optimizers = self.optimizers
                if optimizers is None:
                    optimizers = [torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=RATE)]
                batch = self.batch if fix is None or fix.batch is None else fix.batch
                return train_on(
                    self.model, optimizers, patched(changed or loss_fn, fix), batch, STEPS, until, BETTER * below
                )
        finally:
            self.start.restore()


def patched(loss_fn: LossFn, fix: TrainingFix | None) -> LossFn:
    """The same loss, in which calls give the results that the fix wants. Raises LookupError where there are none."""
    if fix is None or fix.patch is None:
        return loss_fn
    patch = fix.patch

    def loss_with_it(model: Any, batch: Any) -> Any:
        with patch() as calls:
            loss = loss_fn(model, batch)
        if not calls.count:
            raise LookupError("the call to replace did not happen again")
        return loss

    return loss_with_it


def verdict(as_is: Sequence[float], fixed: Sequence[float], comparable: bool = True) -> tuple[bool | None, str]:
    """(whether the fix helps, "") or (None, why that can't be said)."""
    steps, end = len(fixed) - 1, fixed[-1]
    falls = math.isfinite(end) and end < FALLS * fixed[0]
    if not as_is:
        return falls, ""  # without the fix there is no loss at all
    if not comparable:
        endless = as_is[-1] < 0 or not math.isfinite(as_is[-1]) or as_is[-1] > FALLS * as_is[0] > 0
        if memorized(fixed) and end >= 0:
            return True, ""
        if falls and endless:
            return True, ""
        return None, f"{count(steps, 'step')} on one batch show no difference"
    neither = f"the model does not learn one batch either way in {count(steps, 'step')}"
    if not math.isfinite(as_is[-1]) or end <= BETTER * as_is[-1]:
        return (True, "") if falls else (None, neither)
    if memorized(as_is) and memorized(fixed):
        if steps <= BETTER * (len(as_is) - 1):
            return True, ""
        return None, (
            f"the model memorizes one batch either way, in {count(len(as_is) - 1, 'step')} as it is and in {steps} "
            "with the fix: a whole run shows whether it helps"
        )
    return (False, "") if falls else (None, neither)


# One batch, trained on alone

MEMORIZED = 0.1
"""Share of the first loss that is left of a batch that counts as memorized (TheDeepChecker: at most 5% error after
1,000 steps)."""
ALONE_STEPS = 200
ALONE_SECONDS = 8.0
"""For one try."""
RATES = (1e-3, 1e-2)
"""Of Adam."""

_Try = tuple[str, float, list[float]]
"""The optimizer, its rate, the losses."""


def overfit_batch(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_fn: LossFn,
    batch: Any,
    deadline: float,
    floor: float,
) -> OverfitResult | None:
    """Tries on copies of copies; None where the model can't be copied or nothing is trained. deadline: by the
    monotonic clock; a try ends there. floor: the lowest loss that can be."""
    tries: list[_Try] = []
    if optimizers:
        own = " and ".join(type(o).__name__ for o in optimizers)
        tries.append((own, largest_rate(optimizers), _try(model, optimizers, None, loss_fn, batch, deadline)))
    for rate in RATES:
        if not (tries and memorized(tries[-1][2], floor)) and (not tries or time.monotonic() < deadline):
            tries.append(("Adam", rate, _try(model, (), rate, loss_fn, batch, deadline)))
    if not tries or not all(math.isfinite(losses[0]) and losses[0] > 0 for _, _, losses in tries):
        return None
    rows = tuple((name, rate, losses[0], losses[-1], len(losses) - 1) for name, rate, losses in tries)
    return OverfitResult(rows, memorized(tries[-1][2], floor), *_in_sentences(tries, bool(optimizers), floor))


def _try(
    model: nn.Module, optimizers: Sequence[Any], rate: float | None, loss_fn: LossFn, batch: Any, deadline: float
) -> list[float]:
    model, optimizers = copy.deepcopy((model, list(optimizers)))
    if rate is not None:
        optimizers = [torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)]
    return train_on(model, optimizers, loss_fn, batch, ALONE_STEPS, min(deadline, time.monotonic() + ALONE_SECONDS))


def _in_sentences(tries: Sequence[_Try], own: bool, floor: float) -> tuple[str, str]:
    """(the result, what to do next), in sentences."""
    name, rate, losses = tries[0]
    fell = f"from {figures(losses[0])} to {figures(losses[-1])} in {count(len(losses) - 1, 'step')}"
    if memorized(losses, floor):
        return (
            f"The model memorizes one batch with {name} at {rate:g}: the loss falls {fell}",
            "Model, loss and gradients work together; look at data and schedule next.",
        )
    _, last_rate, last = tries[-1]
    if own and memorized(last, floor):
        return (
            f"The model does not memorize one batch with your {name} at {rate:g} (the loss goes {fell}), but does with "
            f"Adam over all trained parameters at {last_rate:g} (down to {figures(last[-1])} in "
            f"{count(len(last) - 1, 'step')})",
            "It can learn the batch: look at the learning rate, and at the parameters in the optimizer.",
        )
    best = min((losses[-1] for _, _, losses in tries if math.isfinite(losses[-1])), default=math.inf)
    return (
        f"The model does not memorize one batch: the loss goes {fell} with {name} at {rate:g}, and no lower than "
        f"{figures(best)} with Adam",
        "Either this loss has a floor (noise, smoothed labels, a bound), the model is too small even for one batch, or "
        "output and loss do not fit each other: print outputs beside targets.",
    )


def train_on(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_fn: LossFn,
    batch: Any,
    steps: int,
    until: float,
    below: float = math.inf,
) -> list[float]:
    """The loss of one batch before the first step and after each: `steps` of them, fewer where it is not finite any
    more, where next to nothing is left of it (and it is `below` that), or when it is `until` by the monotonic clock."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    members = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    losses: list[float] = []

    def closure() -> Any:  # for an optimizer that computes the loss itself
        return torch.tensor(_loss_and_gradients(model, loss_fn, batch, members), device="cpu")

    while True:
        losses.append(_loss_and_gradients(model, loss_fn, batch, members))
        value, first = losses[-1], losses[0]
        if not math.isfinite(value) or 0 <= value <= min(MEMORIZED * first / 2, below) or len(losses) > steps:
            return losses
        if time.monotonic() > until:
            return losses
        for optimizer in optimizers:
            optimizer.step(closure if wants_closure(optimizer) else functools.partial(float, value))


def _loss_and_gradients(model: nn.Module, loss_fn: LossFn, batch: Any, members: Sequence[torch.Tensor]) -> float:
    """The loss of the batch; its gradients go into the members alone."""
    with torch.enable_grad():
        root = loss_root(loss_fn(model, batch))
        loss = root if root.dim() == 0 else root.float().mean()
        reached = {id(leaf) for leaf in leaves_of(loss)}
        taken = [p for p in members if id(p) in reached]
        grads = torch.autograd.grad(loss, taken, allow_unused=True) if taken else ()
    for p in members:
        p.grad = None
    for p, grad in zip(taken, grads):
        p.grad = grad.to_dense() if grad is not None and grad.is_sparse else grad  # Adam takes no sparse ones
    return float(loss.detach())


def memorized(losses: Sequence[float], floor: float = 0.0) -> bool:
    """floor: the lowest loss that can be."""
    return bool(losses) and math.isfinite(losses[-1]) and losses[-1] - floor <= MEMORIZED * (losses[0] - floor)


def largest_rate(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    return max((float(g.get("lr") or 0.0) for o in optimizers for g in o.param_groups), default=0.0)
