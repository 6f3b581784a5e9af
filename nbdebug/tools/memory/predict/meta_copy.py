"""The user's model, batch and optimizer once more, of tensors that have no data; the user's own stay as they are.

The model is copied object by object, but wherever the copy meets a tensor it takes one without data (FakeTensorMode). A
model that refuses to be copied is used itself for the time of a prediction: its parameters and buffers are exchanged
and everything on its modules is put back as it was."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from nbdebug.observe.validation import wrong_type
from nbdebug.tools.memory.predict.job import mapped


class MetaCopy:
    """mode: the fake mode that all tensors without data belong to; device: where they pretend to lie."""

    def __init__(self, device: torch.device):
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the real one stays, so that its id does

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor without data like this one, always the same for the same one. What lies on a device, or in a model
        on the CPU that is predicted for a GPU, is on the requested device."""
        if isinstance(real, FakeTensor) and real.fake_mode is self.mode:
            return real
        if id(real) not in self.known:
            self.known[id(real)] = real, self._empty_copy(real)
        return self.known[id(real)][1]

    def _empty_copy(self, real: torch.Tensor) -> torch.Tensor:
        plain = real.detach()
        with self.mode, torch.no_grad():
            if isinstance(real, FakeTensor) or real.is_meta or real.layout != torch.strided:
                empty = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype, device=self.device)
            else:
                empty = self.mode.from_tensor(plain)
                if empty.device != self.device and empty.dim():
                    empty = torch.empty_strided(empty.size(), empty.stride(), dtype=empty.dtype, device=self.device)
                elif empty.device.type != self.device.type:
                    empty = torch.empty((), dtype=empty.dtype, device=self.device)
            if isinstance(real, nn.Parameter):
                return nn.Parameter(empty, requires_grad=real.requires_grad)
        return empty.requires_grad_(real.requires_grad)

    def batch(self, batch: Any) -> Any:
        """The batch without data, on the device."""
        return mapped(self.tensor, batch)

    def copied(self, model: nn.Module) -> nn.Module:
        """A copy of a model without data. Raises whatever a part of it raises that refuses to be copied."""
        memo: dict[int, Any] = {id(t): self.tensor(t) for t in (*model.parameters(), *model.buffers())}
        with _Copying(self):
            clone = copy.deepcopy(model, memo)
        for module in clone.modules():  # the user's hooks watch the user's tensors, not these
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                getattr(module, hooks).clear()
        return clone

    @contextlib.contextmanager
    def exchanged(self, model: nn.Module) -> Iterator[nn.Module]:
        """The user's own model with its tensors exchanged, for as long as this lasts."""
        saved = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
        try:
            for module, *_ in saved:
                for held in (module._parameters, module._buffers):
                    held.update({k: t if t is None else self.tensor(t) for k, t in held.items()})  # type: ignore[misc]
            yield model
        finally:
            for module, members, parameters, buffers in saved:
                module.__dict__.clear()
                module.__dict__.update(members)
                for held, before in ((module._parameters, parameters), (module._buffers, buffers)):
                    held.clear()
                    held.update(before)  # type: ignore[arg-type]

    def optimizer(self, source: Any, parameters: Iterable[torch.Tensor], cuda: bool) -> torch.optim.Optimizer | None:
        """The optimizer of the copy: of the same class with the same groups, or made by the class or partial
        given."""
        if source is None:
            return None
        if isinstance(source, torch.optim.Optimizer):
            clone = self._optimizer(source)
        else:
            clone = source([p for p in parameters if p.requires_grad])
            if not isinstance(clone, torch.optim.Optimizer):
                call, what = "fit(model, batch, loss_fn, optimizer=)", "what optimizer(parameters) makes"
                raise wrong_type(call, what, "a torch.optim.Optimizer", clone)
        for group in clone.param_groups:
            choose(group, cuda)
        return clone

    def _optimizer(self, source: torch.optim.Optimizer) -> torch.optim.Optimizer:
        clone = source.__class__.__new__(source.__class__)
        clone.__dict__.update(
            {k: copy.copy(v) if isinstance(v, dict) and "hooks" in k else v for k, v in vars(source).items()}
        )
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            clone.__dict__[name] = type(vars(source)[name])() if name in vars(source) else {}
        clone.param_groups = [
            {key: [self.tensor(p) for p in value] if key == "params" else _plain(value) for key, value in group.items()}
            for group in source.param_groups
        ]
        clone.state = collections.defaultdict(dict)
        for parameter, state in source.state.items():
            clone.state[self.tensor(parameter)] = (
                {k: self._state(v) for k, v in state.items()} if isinstance(state, dict) else state
            )
        return clone

    def _state(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() or value.device.type != "cpu":
            return self.tensor(value)
        with self.mode:
            return torch.tensor(1.0, dtype=value.dtype)  # a counter on the host: its value is read, and any will do


class _Copying(TorchFunctionMode):
    """While a model is copied, each tensor becomes one without data."""

    def __init__(self, meta: MetaCopy):
        super().__init__()
        self.meta = meta

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone) and isinstance(args[0], torch.Tensor):
            return self.meta.tensor(args[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def converting() -> Iterator[None]:
    """`model.cuda()`, `.to(...)` and `.half()` exchange the parameters. torch wants to change them in place, which
    those without data refuse."""
    usual = nn.Module._apply
    copies: dict[int, Any] = {}

    def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if not any(isinstance(t, FakeTensor) for t in (*module.parameters(), *module.buffers())):
            return usual(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        for held in (module._parameters, module._buffers):
            for key, old in held.items():
                if old is not None:
                    held[key] = _converted(old, fn, copies)  # type: ignore[assignment]
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = usual  # type: ignore[method-assign]


def _converted(old: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor], copies: dict[int, Any]) -> torch.Tensor:
    """Tied ones stay tied. copies: by id of the old one, which is held so that its id stays its own."""
    if id(old) not in copies:
        with torch.no_grad():
            new = fn(old)
        if new is not old and isinstance(old, nn.Parameter):
            new = nn.Parameter(new.detach(), old.requires_grad)
        copies[id(old)] = old, new
    return copies[id(old)][1]


def _plain(value: Any) -> Any:
    """A rate that is a tensor is read once: without data it could not be."""
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def choose(group: dict[str, Any], cuda: bool) -> None:
    """Which form of the step a group takes. torch takes the one of many tensors at once on a card, but does not know
    tensors without data as ordinary ones, so it is told."""
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return
    group["foreach"] = cuda and not group.get("differentiable", False)


def unwrapped(model: nn.Module) -> tuple[nn.Module, str]:
    """The user's model inside a compiled or parallel wrapper, and what was taken off."""
    notes: list[str] = []
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model, ", ".join(notes)
        notes.append(type(model).__name__)
        model = inner
