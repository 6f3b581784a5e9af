"""From a watched run to facts: its course, its schedule, what is frozen, what could not be looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nbdebug.chapters.training.before.ledger import is_fresh
from nbdebug.chapters.training.facts_run import Frozen, RunFacts, Schedule
from nbdebug.chapters.training.run.sources import iter_is_itself
from nbdebug.chapters.training.run.watched import Watched
from nbdebug.finding import Where
from nbdebug.observe.sites import Site, cell_name, source_text


@dataclasses.dataclass
class Asked:
    """What the user gave."""

    model: Any
    optimizers: list[Any]
    loss_fn: Callable[[Any, Any], Any] | None
    train_loader: Any
    val_loader: Any
    scheduler: Any


def course(asked: Asked, run: Watched, order: dict[str, tuple[str, int]]) -> RunFacts:
    """What the watched run showed, as facts. order: the layers in the order of the forward pass."""
    flags, updates = run.flags, run.updates
    rates = tuple(max(row, default=0.0) for row in run.rate_at)
    functions = {**flags.functions, "backward": updates.functions}
    places = {
        name: _where(site)
        for name, site in (*flags.sites.items(), ("backward", updates.place), ("optimizer", updates.stepped_at))
        if site
    }
    return RunFacts(
        losses=tuple(run.losses),
        numbers=tuple(run.numbers),
        optimizer_steps=updates.steps,
        passes=run.reading.passes,
        seconds=run.seconds,
        optimizer=" and ".join(type(o).__name__ for o in asked.optimizers),
        optimizers=len(asked.optimizers),
        rates=rates,
        schedule=_schedule(asked, run),
        stale=updates.stale(),
        scaler=updates.scaled(),
        modes=flags.modes(),
        root_evaluated=flags.root_evaluated,
        functions=functions,
        places=places,
        layers=updates.layers(order),
        gradient_norms=updates.gradient_norms(),
        checkups=tuple(run.checkups),
        frozen=_frozen(asked, order),
        trained_elements=sum(p.numel() for p in asked.model.parameters() if p.requires_grad),
        samples=_samples(asked.train_loader),
        decay=_penalties(asked),
        batches_in_pass=run.reading.in_pass,
        unchecked=tuple(_unchecked(asked)),
    )


def _where(site: Site) -> Where:
    return Where(file=site.file, line=site.line, text=source_text(site), cell=cell_name(site.file))


def _schedule(asked: Asked, run: Watched) -> Schedule | None:
    scheduler = asked.scheduler
    if scheduler is None:
        return None
    planned = next(
        (
            getattr(scheduler, n)
            for n in ("T_max", "total_steps", "total_iters", "step_size", "T_0")
            if isinstance(getattr(scheduler, n, None), int)
        ),
        None,
    )
    groups = [g for o in asked.optimizers for g in o.param_groups]
    peak = max((float(g.get(key) or 0.0) for g in groups for key in ("initial_lr", "max_lr")), default=0.0)
    holder = getattr(scheduler, "optimizer", None)
    return Schedule(
        type(scheduler).__name__,
        len(run.schedule_calls),
        bool(run.schedule_calls) and run.schedule_calls[0] == 0 and run.updates.steps > 0,
        planned,
        peak,
        holder is not None and all(holder is not o for o in asked.optimizers),
        getattr(scheduler, "mode", None),
        tuple(run.metrics),
    )


def _frozen(asked: Asked, order: Iterable[str]) -> tuple[Frozen, ...]:
    """Parameters that the forward uses and that are not trained."""
    held = {id(p) for o in asked.optimizers for g in o.param_groups for p in g["params"]}
    used, found = set(order), []
    for name, p in asked.model.named_parameters():
        owner = name.rpartition(".")[0]
        if p.requires_grad or (used and owner not in used):
            continue
        normal = "Norm" in type(asked.model.get_submodule(owner)).__name__
        found.append(
            Frozen(name, not bool(p.detach().any()), id(p) in held, p.dim() > 1, p.numel(), normal, is_fresh(p))
        )
    return tuple(found)


def _samples(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def _penalties(asked: Asked) -> dict[str, float]:
    groups = [g for o in asked.optimizers for g in o.param_groups]
    dropouts = [float(m.p) for m in asked.model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd)]
    return {
        "weight decay": max((float(g.get("weight_decay") or 0.0) for g in groups), default=0.0),
        "dropout": max(dropouts, default=0.0),
    }


def _unchecked(asked: Asked) -> Iterable[str]:
    if asked.loss_fn is None:
        yield "Anything that needs the loss of a batch of our own (experiments, validation on the way): no loss_fn"
    if asked.train_loader is None or iter_is_itself(asked.train_loader):
        yield "Experiments: there is no train_loader that can be read again"
    if asked.val_loader is None:
        yield "Overfitting and evaluation: no val_loader given"
