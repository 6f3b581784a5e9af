"""The step in float64, where it fits: how far off is float32 itself, as a whole and module by module?

Beside every module call of the float64 step the same call runs in float32, on the same inputs rounded to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from nbdebug.chapters.precision.copies import Copies, device_of
from nbdebug.chapters.precision.facts import Exact
from nbdebug.chapters.precision.measure import FAULTS, detached, numbers, own, relative_error, rewound
from nbdebug.chapters.precision.trial import Outcome, Trials, norm_off, off

SECONDS = {"cpu": 2.0, "cuda": 0.5}
"""A float32 step may take so long, else float64 is left out: there it takes twice as long on a CPU and on a data
centre's card, and up to 64 times as long on a card for games, whose float64 units are few."""
SHARE = 0.25
"""Of the free memory, for weights and gradients in float64."""


def look(copies: Copies, trials: Trials, plain: Outcome) -> Exact | str:
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


def _too_much(copies: Copies, plain: Outcome) -> str:
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
