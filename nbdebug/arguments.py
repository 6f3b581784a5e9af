"""Which model is meant? The one that was named, or else every one among the user's variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbdebug.text import listed

NOUNS = {"model": "model", "optimizer": "optimizer", "scaler": "GradScaler", "loader": "DataLoader"}
"""What can be looked for among the user's variables, and what an error calls it."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """The models and optimizers that a magic works with, by the user's names for them. named: the user named some of
    them; model_named: and the models among them."""

    models: dict[str, Any]
    optimizers: dict[str, Any]
    named: bool
    model_named: bool = False

    @classmethod
    def chosen(cls, models: list[str] | None, optimizers: list[str] | None, names: dict[str, Any]) -> Subject:
        """Those that were named, or else all that the user has. Raises ValueError for a wrong name."""
        return cls(
            evaluated("model", models, names) if models else discover("model", names),
            evaluated("optimizer", optimizers, names) if optimizers else discover("optimizer", names),
            named=bool(models or optimizers),
            model_named=bool(models),
        )

    @property
    def model(self) -> Any:
        """As `nan_trace` takes it: the only one, several by name, or None."""
        return _only(self.models) if len(self.models) == 1 else self.models or None

    @property
    def optimizer(self) -> Any:
        """As `nan_trace` takes it: the only one, a list of several, or None."""
        return _only(self.optimizers) if len(self.optimizers) == 1 else list(self.optimizers.values()) or None

    def one_model(self, magic: str, loss_fn: Any = None, how: str = "--model NAME") -> tuple[str, Any]:
        """(name, model) of the only one. A loss is a module too: where no model was named, `loss_fn` is not taken, and
        modules without parameters only where there is nothing else. how: to name it. Raises ValueError for none or
        several."""
        models = self.models
        if not self.model_named:
            models = {name: model for name, model in models.items() if model is not loss_fn}
            models = {name: model for name, model in models.items() if any(True for _ in model.parameters())} or models
        return one_of("model", models, magic, how)

    def __str__(self) -> str:
        parts = [_several(kind, taken) for kind, taken in (("model", self.models), ("optimizer", self.optimizers))]
        return " and ".join(parts) + ("" if self.named else " (found among your variables)")


def one_of(kind: str, things: Mapping[str, Any], magic: str, how: str) -> tuple[str, Any]:
    """(name, thing) of the only one of a kind. Raises ValueError for none or several, which says how to name it."""
    if len(things) == 1:
        return next(iter(things.items()))
    noun = NOUNS[kind]
    if not things:
        needs = f"{magic} needs {'an' if noun[0] in 'aeiou' else 'a'} {noun}"
        raise ValueError(f"{needs}, and none of your variables is one. Make it first, or name it: {how}")
    raise ValueError(f"{magic} needs one {noun}, and you have several: {listed(things, 8)}. Say which: {how}")


def _several(kind: str, taken: dict[str, Any]) -> str:
    """ "model `net`", "models `net`, `head`", or "no model"."""
    names = ", ".join(f"`{name}`" for name in taken)
    return f"{kind}{'s' if len(taken) > 1 else ''} {names}" if taken else f"no {kind}"


def _only(taken: dict[str, Any]) -> Any:
    return next(iter(taken.values()))


def _class_of(kind: str) -> type:
    import torch  # here, so that %load_ext nbdebug stays quick

    return {
        "model": torch.nn.Module,
        "optimizer": torch.optim.Optimizer,
        "scaler": torch.amp.GradScaler,
        "loader": torch.utils.data.DataLoader,
    }[kind]


def evaluated(kind: str, expressions: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """What the user named; a name may be an expression in the user's own namespace, such as trainer.model. Raises
    ValueError where it is nothing of this kind."""
    chosen = {}
    for text in expressions:
        try:
            chosen[text] = eval(text, names)
        except Exception:  # whatever it raises, it names no model
            chosen[text] = None
        if not isinstance(chosen[text], _class_of(kind)):
            noun, others = NOUNS[kind], discover(kind, names)
            there = f". Your {noun}s: {listed(others, 8)}." if others else ", and none of your variables is one."
            raise ValueError(f"--{kind} {text!r} names no {noun}{there}")
    return chosen


def discover(kind: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """The user's models, optimizers, scalers or loaders: each object once, at its first name, without parts of another
    model and without old outputs (`_`, `_7`). They are known by their type alone: no object of the user's is asked."""
    wanted = _class_of(kind)
    first: dict[int, tuple[str, Any]] = {}
    for name, value in names.items():
        if issubclass(type(value), wanted) and not name.startswith("_"):
            first.setdefault(id(value), (name, value))
    parts: set[int] = set()
    if kind == "model":
        parts = {id(part) for _, value in first.values() for part in value.modules() if part is not value}
    return {name: value for key, (name, value) in first.items() if key not in parts}
