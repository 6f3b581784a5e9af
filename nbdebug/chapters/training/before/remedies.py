"""What is done to try the fix of a cause: calls that are answered otherwise, another batch, other weights or members.

`remedy(finding, …)` gives a Remedy, or the reason why this cause's fix can't be tried on one batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from nbdebug.chapters.training.before import inputs
from nbdebug.chapters.training.before.instead import Answer, Instead, first, with_first, with_second
from nbdebug.chapters.training.before.step import hidden_parameters
from nbdebug.chapters.training.facts_before import Before, LossCall
from nbdebug.chapters.training.rules.before_words import listed
from nbdebug.finding import Finding, Where

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
class Remedy:
    """how: what is done, in words. instead: the calls to answer otherwise (a fresh mode each time); change: done once
    to the model and its optimizers; batch: another batch in place of the one given. own: only the user's own optimizers
    show it; refused: without it the loss raises (on a card, for good); comparable: losses with and without it are."""

    how: str
    instead: Callable[[], Instead] | None = None
    change: Change | None = None
    batch: Any = None
    own: bool = False
    refused: bool = False
    comparable: bool = True


def remedy(
    finding: Finding, before: Before, model: nn.Module, train: Sequence[Any], leaves: Sequence[int]
) -> Remedy | str:
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
        return Remedy(
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


def _blamed(finding: Finding, before: Before) -> LossCall | None:
    """The call of a loss that a finding speaks of."""
    at = (finding.where.file, finding.where.line)
    here = [
        call
        for call in before.losses
        if at in ((call.where.file, call.where.line), (call.activation_where.file, call.activation_where.line))
    ]
    return next(iter([*here, *before.losses]), None)


def _without_activation(call: LossCall | None, model: nn.Module) -> Remedy | str:
    if call is None:
        return "no call of a loss function was seen"
    module = dict(model.named_modules()).get(call.activation_where.module or "")
    if module is not None and type(module).__module__ == "torch.nn.modules.activation":
        name = call.activation_where.module or ""
        return Remedy(f"without `{name}`, the {type(module).__name__}", change=lambda model, _: _passed_by(model, name))
    if call.activation and call.activation_where.line is not None:
        name, at = call.activation, call.activation_where
        return Remedy(
            f"without the `{name}`", lambda: Instead({name}, at, lambda func, args, kwargs: first(args, kwargs))
        )
    if not call.probabilities:
        return "what makes the output could not be told from other calls"

    def scores(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        given = first(args, kwargs)
        args, kwargs = with_first(given.clamp_min(torch.finfo(given.dtype).tiny).log(), args, kwargs)
        return func(*args, **kwargs)

    return Remedy("with the scores behind these probabilities", lambda: Instead({call.op}, call.where, scores))


def _passed_by(model: nn.Module, name: str) -> None:
    """Have a module give back what it is given. The hook goes when the state is put back."""
    model.get_submodule(name).register_forward_hook(lambda module, args, out: args[0])


def _with_log_softmax(call: LossCall | None) -> Remedy | str:
    if call is None:
        return "no call of a loss function was seen"
    if call.across is not None and call.activation and call.activation_where.line is not None:
        name, at = call.activation, call.activation_where
        return Remedy(
            "over the classes",
            lambda: Instead({name}, at, lambda func, args, kwargs: getattr(torch, name)(first(args, kwargs), 1)),
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

    return Remedy("with log-probabilities", lambda: Instead({call.op}, call.where, logs), comparable=False)


def _same_shape(finding: Finding, before: Before) -> Remedy | str:
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

    return Remedy("with targets in the shape of the outputs", lambda: Instead({met.op}, met.where, alike))


def _counted_from_zero(finding: Finding, before: Before) -> Remedy | str:
    call = next(call for call in before.losses if call.outside)
    if call.target_low is None or call.target_low < 1 or call.target_high != call.classes:
        return "an output for more classes is another model"

    def shifted(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        target = args[1] if len(args) > 1 else kwargs["target"]
        args, kwargs = with_second(torch.where(target > 0, target - 1, target), args, kwargs)
        return func(*args, **kwargs)

    return Remedy("with labels counted from 0", lambda: Instead({call.op}, call.where, shifted), refused=True)


def _held(finding: Finding, before: Before) -> Remedy | str:
    if not before.has_optimizer:
        return "no optimizer was given"
    names = [p.name for p in before.parameters if p.trained and p.reached and not p.held]
    return Remedy(
        f"{listed(names, 2)} added to the optimizer",
        change=lambda model, optimizers: _add(model, optimizers, names),
        own=True,
    )


def _thawed(finding: Finding, before: Before) -> Remedy | str:
    listed_names = set(finding.evidence.get("frozen", ()))
    names = [
        p.name for p in before.parameters if not p.trained and p.used and (p.name in listed_names or not before.trained)
    ]

    def thaw(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for name in names:
            model.get_parameter(name).requires_grad_(True)
        _add(model, optimizers, names)

    return Remedy(f"{listed(names, 2)} trained", change=thaw) if names else "no frozen parameter is used"


def _add(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: Sequence[str]) -> None:
    """Hand parameters to the first optimizer, where none holds them."""
    known = {**dict(hidden_parameters(model)), **dict(model.named_parameters())}
    held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    missing = [p for p in {id(known[n]): known[n] for n in names if n in known}.values() if id(p) not in held]
    if optimizers and missing:
        optimizers[0].add_param_group({"params": missing})


def _attached(finding: Finding, before: Before) -> Remedy | str:
    cut = before.cuts[0]
    if cut.how == "no_grad":
        return Remedy("with gradients on throughout", lambda: Instead((), Where(), _with_gradients))
    if cut.how != "detach" or cut.where.line is None:
        return "what to compute in its place only you can say"
    answer: Answer = lambda func, args, kwargs: first(args, kwargs)  # noqa: E731 (it is handed on, not called here)
    return Remedy(f"without the `{cut.op}`", lambda: Instead({"detach", "data"}, cut.where, answer))


def _with_gradients(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    with torch.enable_grad():
        return func(*args, **kwargs)


def _standardized(train: Sequence[Any], leaves: Sequence[int]) -> Remedy | str:
    scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for leaf in leaves:
        tensors = [t for batch in train[:READ] for t in inputs.picked(batch, [leaf])]
        if tensors and all(t.is_floating_point() and t.dim() > 1 for t in tensors):
            scales[leaf] = _moments(torch.cat([t.flatten(0, 0) for t in tensors]))
    if not scales:
        return "the inputs are no floating numbers when they leave the loader"
    chosen = {id(t): scales[leaf] for leaf in scales for t in inputs.picked(train[0], [leaf])}
    return Remedy(
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
