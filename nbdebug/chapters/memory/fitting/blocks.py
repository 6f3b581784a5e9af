"""Which parts of a model are alike, which are frozen: where remedies take hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclasses.dataclass(frozen=True)
class Row:
    """Blocks of one class that follow each other. kind: their class; paths: dotted names, in order; holder: of what
    holds them all ("" for the model itself), None where several do."""

    kind: str
    paths: tuple[str, ...]
    holder: str | None

    def each(self, every: int = 1) -> str:
        """The blocks as the user would write them."""
        if self.holder is None:
            each = f'[m for m in model.modules() if type(m).__name__ == "{self.kind}"]'
        elif self.holder and all(path.rpartition(".")[2].isdigit() for path in self.paths):
            each = f"model.{self.holder}"
        else:
            each = f"[{', '.join(f'model.{path}' for path in self.paths)}]"
        return f"{each}[::{every}]" if every > 1 else each


def rows(model: nn.Module) -> list[Row]:
    """Repeated blocks with parameters, those that hold most of them first; none inside of another's block, and no
    container around blocks."""
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        for name, child in module.named_children():
            if any(True for _ in child.parameters()) and any(True for _ in child.children()):
                found.setdefault(type(child).__name__, []).append(f"{path}.{name}" if path else name)
    sized = [
        (sum(p.numel() for path in paths for p in model.get_submodule(path).parameters()), kind, paths)
        for kind, paths in found.items()
        if len(paths) > 1
    ]
    inner = {
        path for _, _, paths in sized for path in paths if not isinstance(model.get_submodule(paths[0]), CONTAINERS)
    }
    kept: list[Row] = []
    for _, kind, paths in sorted(sized, key=lambda row: -row[0]):
        container = isinstance(model.get_submodule(paths[0]), CONTAINERS)
        if container and any(_within(other, paths) for other in inner):
            continue
        if not any(_within(paths[0], row.paths) for row in kept):
            holders = {path.rpartition(".")[0] for path in paths}
            kept.append(Row(kind, tuple(paths), holders.pop() if len(holders) == 1 else None))
    return kept


def _within(path: str, others: list[str] | tuple[str, ...]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def checkpointing(row: Row, every: int = 1) -> Callable[[nn.Module], None]:
    """A change that keeps of each block (or every second, third … one) what it is given alone, and computes it again in
    the backward."""

    def change(model: nn.Module) -> None:
        for path in row.paths[::every]:
            block = model.get_submodule(path)
            block.forward = functools.partial(_again, block.forward)

    return change


def _again(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def checkpoints(row: Row, every: int = 1) -> str:
    """The same as the user would write it."""
    return (
        "import functools\nfrom torch.utils.checkpoint import checkpoint\n"
        f"for block in {row.each(every)}:\n"
        "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    )


def freezing(row: Row) -> Callable[[nn.Module], None]:
    """A change that trains the last block and what comes behind it alone."""

    def change(model: nn.Module) -> None:
        for parameter in before_last(model, row):
            parameter.requires_grad_(False)

    return change


def before_last(model: nn.Module, row: Row) -> list[nn.Parameter]:
    """The parameters that are met before the last block, as they are declared."""
    last = f"{row.paths[-1]}."
    named = list(model.named_parameters())
    first = next((n for n, (name, _) in enumerate(named) if name.startswith(last)), 0)
    return [parameter for _, parameter in named[:first]]


def frozen(model: nn.Module) -> list[tuple[str, int]]:
    """Outermost modules of which nothing is trained, and the bytes of their parameters and buffers; the largest first.
    Not the model itself."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        parameters = list(module.parameters())
        inside = any(f"{path}.".startswith(f"{other}.") for other in found)
        if path and parameters and not inside and not any(p.requires_grad for p in parameters):
            found[path] = sum(t.numel() * t.element_size() for t in (*parameters, *module.buffers()))
    return sorted(found.items(), key=lambda pair: -pair[1])
