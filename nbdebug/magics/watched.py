"""What %guard or %grad_watch watches, by the user's names for it, and whether these names still stand for it.

In a notebook the cell that makes the model is run again and again. A watch keeps the model that it was given, so that
after such a cell it watches one that nobody trains any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from nbdebug.subject import Subject, found


@dataclasses.dataclass(frozen=True)
class Watched:
    """Models, optimizers and at most one gradient scaler. names: those of them that the notebook's variables hold.
    magic: what turns it on."""

    subject: Subject
    scalers: dict[str, Any]
    names: dict[str, Any]
    magic: str = "%guard on"

    @classmethod
    def chosen(cls, args: Any, names: dict[str, Any], variables: dict[str, Any], magic: str = "%guard on") -> Watched:
        """Those that `args` names, or else all among `names`. Raises ValueError where that is none, or not clear."""
        subject = Subject.chosen(args.model, args.optimizer, names)
        missing = [kind for kind, taken in (("model", subject.models), ("optimizer", subject.optimizers)) if not taken]
        if missing:
            wanted = " ".join(f"--{kind} NAME" for kind in missing)
            raise ValueError(
                f"There is no {' and no '.join(missing)} among your variables. Make it first, or name it: "
                f"{magic} {wanted} (NAME may be an expression, such as trainer.{missing[0]})."
            )
        scalers = (
            {}
            if not hasattr(args, "scaler")
            else (_named_scaler(args.scaler, names) if args.scaler else _found_scaler(names))
        )
        taken = {**subject.models, **subject.optimizers, **scalers}
        held = {
            name: thing for name, thing in taken.items() if "(" not in name and _value(name, variables) is thing
        }  # a call makes it anew
        return cls(subject, scalers, held, magic)

    @property
    def scaler(self) -> Any:
        return next(iter(self.scalers.values()), None)

    @property
    def things(self) -> str:
        """ "model `net` and optimizer `opt`, with the GradScaler `scaler`"."""
        scalers = "".join(f", with the GradScaler `{name}`" for name in self.scalers)
        return f"{dataclasses.replace(self.subject, named=True)}{scalers}"

    def __str__(self) -> str:
        return self.things + ("" if self.subject.named else " (found among your variables)")

    def outdated(self, variables: dict[str, Any]) -> str:
        """What to say where names stand for other objects than those that are watched; "" where all is well."""
        lost = ", ".join(f"`{name}`" for name in self._lost(variables))
        who = "The guard" if self.magic == "%guard on" else "It"
        return lost and (
            f"{lost}: made anew or deleted since {self.magic}. {who} still watches what was there before "
            f"and sees nothing of a training with what is there now. Type {self.magic} again."
        )

    def _lost(self, variables: dict[str, Any]) -> Iterator[str]:
        for name, thing in self.names.items():
            now = _value(name, variables)
            renamed = now is None and any(value is thing for value in variables.values())
            if now is not thing and not renamed and not _wraps(now, thing):
                yield name


def _value(name: str, variables: dict[str, Any]) -> Any:
    """What the user's expression stands for; None where it stands for nothing."""
    try:
        return eval(name, variables)
    except Exception:  # whatever it raises, it is not the thing that is looked for
        return None


def _wraps(new: Any, old: Any) -> bool:
    """`net = torch.compile(net)` and `opt = accelerator.prepare(opt)` still train what is watched."""
    parts = [*new.modules()] if callable(getattr(new, "modules", None)) else []
    return any(part is old for part in [*parts, *getattr(new, "__dict__", {}).values()])


def _scalers(names: dict[str, Any]) -> dict[str, Any]:
    import torch  # here, so that %load_ext nbdebug stays quick

    there = {
        id(value): (name, value)
        for name, value in reversed(names.items())
        if isinstance(value, torch.amp.GradScaler) and not name.startswith("_")
    }
    return dict(reversed(there.values()))


def _found_scaler(names: dict[str, Any]) -> dict[str, Any]:
    """The one that is enabled. One that is not enabled does nothing, with the guard or without."""
    enabled = {name: scaler for name, scaler in _scalers(names).items() if scaler.is_enabled()}
    if len(enabled) > 1:
        raise ValueError(
            f"There are several gradient scalers among your variables: {', '.join(enabled)}. "
            f"Say which one this training uses: %guard on --scaler {next(iter(enabled))}"
        )
    return enabled


def _named_scaler(name: str, names: dict[str, Any]) -> dict[str, Any]:
    import torch

    scaler = _value(name, names)
    if not isinstance(scaler, torch.amp.GradScaler):
        there = ", ".join(_scalers(names)) or "none"
        raise ValueError(f"--scaler {name!r} names no GradScaler. Among your variables there is: {there}.")
    return {name: scaler}


def candidates(kind: str, names: dict[str, Any]) -> list[str]:
    """The names that may follow --model, --optimizer or --scaler."""
    return [*(_scalers(names) if kind == "scaler" else found(kind, names))]
