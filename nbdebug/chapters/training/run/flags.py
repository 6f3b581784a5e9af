"""In which mode does each dropout and each batch normalisation run, and who called it?

Hooks on the modules that behave otherwise in eval mode, and on the model itself. A call with gradients belongs to
training; one without belongs to an evaluation when validation batches are being read, or when such calls are rare.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from nbdebug.chapters.training.facts_run import Mode
from nbdebug.chapters.training.run.faults import Faults
from nbdebug.observe.sites import USER, kind_of, locate

MODES = "In which mode (train or eval) each module ran"


class Quiet:
    """A hook that stays out of copies of the model, and never stops the training by a fault of its own."""

    def __init__(self, tell: Callable[..., None], faults: Faults):
        self.tell = faults.quietly(MODES, tell)

    def __call__(self, *given: Any) -> None:
        self.tell(*given)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def sensitive(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that behave otherwise in eval mode, by name."""
    return {name: module for name, module in model.named_modules() if _is_sensitive(module)}


def _is_sensitive(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, _NormBase):
        return module.running_mean is not None
    return bool(getattr(module, "dropout", 0.0)) and isinstance(module, (nn.MultiheadAttention, nn.RNNBase))


class FlagWatch:
    """Counts, per sensitive module, the steps in which it ran in train mode, in eval mode, with and without gradients.

    evaluating: says whether validation batches are being read now; None where that cannot be known. paused: our own
    calls of the model are no part of the run.
    """

    def __init__(self, model: nn.Module, evaluating: Callable[[], bool | None], faults: Faults | None = None):
        self.model, self.evaluating, self.paused, self.faults = model, evaluating, False, faults or Faults()
        self.modules = sensitive(model)
        self.steps = 0
        self.counts = {name: dict.fromkeys(("trained", "evaluated", "train", "eval"), 0) for name in self.modules}
        self.switched: dict[str, int] = {}
        self.first: dict[str, bool] = {}
        self.seen: dict[str, set[tuple[bool, bool]]] = {name: set() for name in self.modules}
        self.functions: dict[str, tuple[str, ...]] = {}
        self.sites: dict[str, Any] = {}
        self._roots: set[bool] = set()
        self._rare: dict[str, list[int]] = {}  # steps in which a module ran in train mode without gradients
        self._handles: list[Any] = []

    def attach(self) -> None:
        for name, module in self.modules.items():
            tell = Quiet(lambda m, args, name=name: self._ran(name, m), self.faults)
            self._handles.append(module.register_forward_pre_hook(tell))
        self._handles.append(self.model.register_forward_pre_hook(Quiet(self._called, self.faults)))

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _called(self, module: nn.Module, args: Any) -> None:
        kind = "training" if torch.is_grad_enabled() else "evaluation"
        if not self.paused and kind == "training":
            self._roots.add(module.training)
        if not self.paused and kind not in self.functions:
            self.functions[kind], self.sites[kind] = calling()

    def _ran(self, name: str, module: nn.Module) -> None:
        if self.paused:
            return
        learning = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self.seen[name].add((module.training, learning))
        if not learning:
            evaluating = self.evaluating()
            if evaluating:
                self.counts[name]["train" if module.training else "eval"] += 1
            elif evaluating is None and module.training:
                steps = self._rare.setdefault(name, [])
                if not steps or steps[-1] != self.steps:
                    steps.append(self.steps)

    def stepped(self) -> None:
        """An optimizer has stepped: what ran with gradients since the last step was training."""
        for name, seen in self.seen.items():
            counts = self.counts[name]
            if (True, True) in seen:
                counts["trained"] += 1
                self.first.setdefault(name, True)
                self.switched.pop(name, None)  # it was only for a while
            elif (False, True) in seen:
                counts["evaluated"] += 1
                if counts["trained"]:
                    self.switched.setdefault(name, self.steps)
                self.first.setdefault(name, False)
            seen.clear()
        self.steps += 1

    @property
    def root_evaluated(self) -> bool:
        """Whether the model itself was in eval mode whenever it was called with gradients."""
        return self._roots == {False}

    def modes(self) -> tuple[Mode, ...]:
        return tuple(self._mode(name, module) for name, module in self.modules.items())

    def _mode(self, name: str, module: nn.Module) -> Mode:
        counts, rare = self.counts[name], len(self._rare.get(name, []))
        parent = self.model.get_submodule(name.rpartition(".")[0])
        owned = list(module.parameters()) or list(parent.parameters())
        train = counts["train"] + (rare if 0 < rare <= RARE * self.steps else 0)
        return Mode(
            name,
            type(module).__name__,
            counts["trained"],
            counts["evaluated"],
            self.switched.get(name),
            self.first.get(name) is False,
            train,
            counts["eval"],
            bool(owned) and not any(p.requires_grad for p in owned),
        )


RARE = 0.2
"""An evaluation happens in at most every fifth step. What runs without gradients in each step (the generator of a GAN
while its discriminator learns, a momentum encoder, a policy that collects data) is a part of training."""


def calling() -> tuple[tuple[str, ...], Any]:
    """The user's functions that are running, innermost first, and the innermost line of theirs."""
    stop = locate()
    if stop.user is None:
        return (), stop.site
    names, frame = [], stop.frame
    while frame is not None and frame.f_code.co_filename != _RUN:  # behind it is whoever asked us
        if kind_of(frame.f_code) == USER and not frame.f_code.co_name.startswith("<"):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return tuple(dict.fromkeys(names)), stop.user


_RUN = os.path.join(os.path.dirname(__file__), "watched.py")
