"""One step of a training that runs, told by layer: hooks that come with the next forward and go with its update.

Each layer's output is summed up on its own device, and everything is read at once when the step is over, so that the
step waits only once. It ends before the update of the first optimizer that holds parameters of these models, when the
gradients are there, or where a model is called again after the step has not come to one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from nbdebug.exceptions import ShownAtUsersLine
from nbdebug.observe.tensors import output_tensors


@dataclasses.dataclass
class LayerSummary:
    """A layer in one step. shape, dtype: of its output (the first tensor); low, high, std: of the finite values of all
    its calls; nonfinite: how many values were not; gradient: the 2-norm over its own parameters, None without."""

    name: str
    kind: str
    calls: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    low: float | None = None
    high: float | None = None
    std: float | None = None
    nonfinite: int = 0
    gradient: float | None = None
    sums: list[torch.Tensor] = dataclasses.field(default_factory=list, repr=False)


class StepSummary:
    """See the module's docstring. models: by the user's names. callback: called once, in the thread that trains, with
    the layers in the order in which they were first called. After a fault of ours it gets no layers, and the fault as
    text; the training goes on."""

    def __init__(self, models: Mapping[str, nn.Module], callback: Callable[..., Any]):
        self.models, self.callback = dict(models), callback
        self.layers: dict[str, LayerSummary] = {}
        self._own = {id(p) for model in self.models.values() for p in model.parameters()}
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._about_to_step)]
        for title, model in self.models.items():
            for name, module in model.named_modules():
                if name == "" or not any(module.children()):
                    called = f"{title}.{name}".rstrip(".") if len(self.models) > 1 else name
                    self._handles.append(module.register_forward_hook(self._called(called, module)))

    def close(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()
        self.layers = {}

    def _called(self, name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, given: Any, made: Any) -> None:
            if not torch.compiler.is_compiling():
                seen = self.layers.setdefault(name, LayerSummary(name, type(module).__name__))
                seen.calls += 1
                try:
                    with _disable_current_modes(), torch.no_grad():
                        _sum_up(seen, output_tensors(made))
                except Exception as fault:
                    self._gave_up(fault)

        return hook

    def _gave_up(self, fault: Exception) -> None:
        if self._handles:
            self.close()
            self.callback([], f"{type(fault).__name__}: {fault}")

    def _about_to_step(self, optimizer: Any, *given: Any) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not self._handles or not self.layers or not held & self._own:
            return
        layers = list(self.layers.values())
        try:
            with _disable_current_modes(), torch.no_grad():
                self._gradients()
                _read(layers)
        except Exception as fault:
            self._gave_up(fault)
            return
        self.close()
        self.callback(layers)

    def _gradients(self) -> None:
        for title, model in self.models.items():
            for name, module in model.named_modules():
                seen = self.layers.get(f"{title}.{name}".rstrip(".") if len(self.models) > 1 else name)
                grads = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
                if seen is not None and grads:
                    norms = [
                        g.detach().to_dense().float().norm() if g.is_sparse else g.detach().float().norm()
                        for g in grads
                    ]
                    seen.gradient = float(torch.stack([n.to(norms[0].device) for n in norms]).norm())


def _sum_up(seen: LayerSummary, made: list[torch.Tensor]) -> None:
    """[low, high, sum, sum of squares, finite values, others] of each output, left on its device."""
    for out in made:
        values = out.detach()
        if not seen.shape:
            seen.shape, seen.dtype = tuple(values.shape), str(values.dtype).removeprefix("torch.")
        if (
            not values.is_floating_point()
            or not values.numel()
            or values.device.type == "meta"
            or values.layout is not torch.strided
        ):
            continue
        fine = values.isfinite()
        kept = torch.where(fine, values, 0).to(torch.float32)
        count = fine.sum().to(torch.float32)
        seen.sums.append(
            torch.stack(
                [
                    torch.where(fine, values, float("inf")).amin().float(),
                    torch.where(fine, values, float("-inf")).amax().float(),
                    kept.sum(),
                    kept.square().sum(),
                    count,
                    values.numel() - count,
                ]
            )
        )


def _read(layers: list[LayerSummary]) -> None:
    for seen in layers:
        rows = [row.tolist() for row in seen.sums]
        seen.sums = []
        count = sum(row[4] for row in rows)
        seen.nonfinite = int(sum(row[5] for row in rows))
        if count:
            mean = sum(row[2] for row in rows) / count
            seen.low, seen.high = min(row[0] for row in rows), max(row[1] for row in rows)
            seen.std = max(0.0, sum(row[3] for row in rows) / count - mean * mean) ** 0.5


class TrainingStopped(KeyboardInterrupt):
    """A training was asked to stop, and did so after a whole step."""

    _render_traceback_ = ShownAtUsersLine._render_traceback_


class StepEndCallback:
    """Calls `then` after the next step of any optimizer once it is begun, and once only. What that raises passes into
    the training; `cancel` before that takes it away."""

    def __init__(self, callback: Callable[[], Any]):
        self.callback = callback
        self._handle: Any = None

    def begin(self) -> None:
        """From here on: the very next step may be over at once, in another thread."""
        self._handle = register_optimizer_step_post_hook(self._over)

    def cancel(self) -> bool:
        """Whether it was still to come."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(KeyError):
                handle.remove()
        return handle is not None

    def _over(self, *stepped: Any) -> None:
        __tracebackhide__ = True
        if self.cancel():
            self.callback()


def stop_training() -> None:
    """What ends a training from inside of it."""
    raise TrainingStopped("Stopped after a whole step, as you asked: weights and optimizer state are those after it.")
