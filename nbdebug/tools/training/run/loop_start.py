"""Where a loop begins to train, and what: for loops that make their own model, or train several together.

`LoopStart` waits while the user's code runs. At the first call of a model with gradients the variables of the functions
on the stack tell the model, its optimizers and the loader that is being read; the watch begins there, before anything
was updated. Several models that the loop's optimizers train together (an encoder and a head, a GAN) become one
`JointModel` of the user's own modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from nbdebug.arguments import Subject, around, discover, part, trains
from nbdebug.tools.training.run.evaluate import LoaderWatch, OpenPass, save_rng, save_torch_rng
from nbdebug.tools.training.run.loop_loss import JointModel, frame_variables, loop_frames
from nbdebug.trainers import held


@dataclasses.dataclass
class LoopSubject:
    """What a loop trains. names: the variables of the functions that were running; parts: (name, value) of its loaders,
    its scheduler and its loss."""

    subject: Subject
    names: dict[str, Any]
    parts: dict[str, tuple[str, Any]]

    @property
    def model(self) -> nn.Module:
        models = self.subject.models
        return next(iter(models.values())) if len(models) == 1 else JointModel(models)

    def part(self, kind: str) -> Any:
        return self.subject.optimizer if kind == "optimizer" else self.parts.get(kind, ("", None))[1]

    def __str__(self) -> str:
        return ", ".join([str(self.subject), *(f"{kind} `{name}`" for kind, (name, _) in self.parts.items() if name)])


class LoopStart:
    """found: called once, with what the loop trains, at its first call of it with gradients, on the loop's own stack;
    it may give the watch of the loaders, which then follows the open pass. Models that an optimizer trains are waited
    for; one that none trains is taken at its first call after a gradient has come, or its weights have changed. names:
    other variables of the user's, for the validation batches, the scheduler and the loss."""

    def __init__(self, names: Mapping[str, Any] | None = None) -> None:
        self.names = dict(names or {})
        self.found: Callable[[LoopSubject], LoaderWatch | None] = lambda subject: None
        self.restore_rng: Callable[[], None] = lambda: None
        self._passes: list[OpenPass] = []
        self._called: dict[int, list[tuple[int, bool]]] = {}
        self._watch: LoaderWatch | None = None
        self._busy = False

    @contextlib.contextmanager
    def waiting(self, found: Callable[[LoopSubject], LoaderWatch | None]) -> Iterator[None]:
        self.found, self._watch, self._busy = found, None, False
        self._passes.clear()
        self._called.clear()
        self.restore_rng = save_rng()
        own, call = DataLoader.__iter__, nn.Module.__call__

        def relayed(loader: Any) -> Iterator[Any]:
            return self._relayed(loader, own(loader))

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self._called_with_gradients(module)  # before the call: its hooks are looked up within
            return call(module, *args, **kwargs)

        with contextlib.ExitStack() as stack:
            stack.callback(setattr, DataLoader, "__iter__", own)
            DataLoader.__iter__ = relayed  # type: ignore[method-assign, assignment]
            stack.callback(setattr, nn.Module, "__call__", call)
            nn.Module.__call__ = called  # type: ignore[method-assign]
            self._end = stack.pop_all().close
        try:
            yield
        finally:
            self._end()

    def _relayed(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a pass; from the start on, followed by the watch."""
        now = OpenPass(loader)
        self._passes.append(now)
        try:
            for batch in batches:
                now.read, now.previous, now.batch, now.draw = now.read + 1, now.batch, batch, save_torch_rng()
                yield batch
                if self._watch is not None:
                    break
        finally:
            self._passes.remove(now)
        if self._watch is not None:
            yield from self._watch.follow(loader, batches, now)

    def _called_with_gradients(self, module: nn.Module) -> None:
        if self._busy or not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        self._busy = True
        try:
            subject = self._subject(module)
            if subject is not None:
                self._end()
                self._watch = self.found(subject)
                if self._watch is not None:
                    for each in self._passes:
                        self._watch.take_over(each)
        finally:
            self._busy = False

    def _subject(self, module: nn.Module) -> LoopSubject | None:
        names: dict[str, Any] = {}
        for frame in loop_frames(sys._getframe(1)):
            names = {**frame_variables(frame), **names}
        models = _each_once(discover("model", names) | held("model", names))
        models = {n: m for n, m in models.items() if any(True for _ in m.parameters())}
        parts = {id(p) for m in models.values() for p in m.modules() if p is not m}
        models = {n: m for n, m in models.items() if id(m) not in parts}
        mine = next((n for n, m in models.items() if any(p is module for p in m.modules())), None)
        if mine is None:
            return None
        optimizers = _each_once(discover("optimizer", names) | held("optimizer", names))
        optimizers = {n: o for n, o in optimizers.items() if any(trains(o, m) for m in models.values())}
        trained = {n: m for n, m in models.items() if any(trains(o, m) for o in optimizers.values())}
        state = [(p._version, p.grad is not None) for p in module.parameters()]
        if mine not in trained and self._called.setdefault(id(module), state) == state:
            return None  # features are taken from it, perhaps
        models = trained if mine in trained else {mine: models[mine]}
        return self._with_parts(Subject(models, optimizers, named=False), names)

    def _with_parts(self, subject: Subject, names: dict[str, Any]) -> LoopSubject:
        model = next(iter(subject.models.values()))
        known = around(model, {**self.names, **names})
        read = next((p.loader for p in reversed(self._passes)), None)
        train = next(((n, v) for n, v in discover("loader", known).items() if v is read), ("", read))
        if read is None:
            name, value = part("train_loader", around(model, names))
            train = (name, value) if isinstance(value, DataLoader) else ("", None)
        kinds = ("val_loader", "scheduler", *(("loss_fn",) if len(subject.models) == 1 else ()))
        parts = {"train_loader": train, **{kind: part(kind, known) for kind in kinds}}
        if parts["val_loader"][1] is train[1]:
            del parts["val_loader"]
        return LoopSubject(subject, names, parts)


def _each_once(things: Mapping[str, Any]) -> dict[str, Any]:
    first: dict[int, tuple[str, Any]] = {}
    for name, thing in things.items():
        first.setdefault(id(thing), (name, thing))
    return dict(first.values())
