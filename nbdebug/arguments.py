"""Which model is meant? The one that was named, or else every one among the user's variables."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Subject:
    """The models and optimizers that a magic works with, by the user's names for them."""

    models: dict[str, Any]
    optimizers: dict[str, Any]
    named: bool

    @classmethod
    def chosen(cls, models: list[str] | None, optimizers: list[str] | None, names: dict[str, Any]) -> Subject:
        """Those that were named, or else all that the user has. Raises ValueError for a wrong name."""
        return cls(
            _named("model", models, names) if models else found("model", names),
            _named("optimizer", optimizers, names) if optimizers else found("optimizer", names),
            named=bool(models or optimizers),
        )

    @property
    def model(self) -> Any:
        """As `nan_trace` takes it: the only one, several by name, or None."""
        return _only(self.models) if len(self.models) == 1 else self.models or None

    @property
    def optimizer(self) -> Any:
        """As `nan_trace` takes it: the only one, a list of several, or None."""
        return _only(self.optimizers) if len(self.optimizers) == 1 else list(self.optimizers.values()) or None

    def __str__(self) -> str:
        parts = [_several(kind, taken) for kind, taken in (("model", self.models), ("optimizer", self.optimizers))]
        return " and ".join(parts) + ("" if self.named else " (found among your variables)")


def _several(kind: str, taken: dict[str, Any]) -> str:
    """ "model `net`", "models `net` and `head`", or "no model"."""
    names = ", ".join(f"`{name}`" for name in taken)
    return f"{kind}{'s' if len(taken) > 1 else ''} {names}" if taken else f"no {kind}"


def _only(taken: dict[str, Any]) -> Any:
    return next(iter(taken.values()))


def _wanted(kind: str) -> type:
    import torch  # here, so that %load_ext nbdebug stays quick

    return torch.nn.Module if kind == "model" else torch.optim.Optimizer


def _named(kind: str, given: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """What the user named; a name may be an expression in the user's own namespace, such as trainer.model."""
    chosen = {}
    for name in given:
        try:
            chosen[name] = eval(name, names)
        except Exception:  # whatever it raises, it names no model
            chosen[name] = None
        if not isinstance(chosen[name], _wanted(kind)):
            there = ", ".join(found(kind, names)) or "none"
            raise ValueError(f"--{kind} {name!r} names no {kind}. Among your variables there is: {there}.")
    return chosen


def found(kind: str, names: dict[str, Any]) -> dict[str, Any]:
    """The user's models or optimizers, each object once, without parts of another model and without old outputs."""
    wanted = _wanted(kind)
    seen: dict[int, tuple[str, Any]] = {}
    for name, value in names.items():
        if isinstance(value, wanted) and not name.startswith("_"):
            seen.setdefault(id(value), (name, value))
    parts: set[int] = set()
    if kind == "model":
        parts = {id(part) for _, value in seen.values() for part in value.modules() if part is not value}
    return {name: value for key, (name, value) in seen.items() if key not in parts}
