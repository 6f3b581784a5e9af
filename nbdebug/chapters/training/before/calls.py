"""One forward and its loss, call by call: which function of torch was given what, where, and what it hangs on.

A TorchFunctionMode sees the calls as the user wrote them (cross_entropy, not its parts). Each tensor carries two sets
as bit masks: the parameters and the batch's tensors that its value hangs on. They follow the data, not autograd, so
that where the two differ the graph has been cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nbdebug.finding import Where
from nbdebug.observe.sites import Site, cell_name, locate, source_text
from nbdebug.observe.tensors import tensors_made

VIEWS = frozenset(
    {
        "view",
        "reshape",
        "permute",
        "transpose",
        "squeeze",
        "unsqueeze",
        "flatten",
        "unflatten",
        "contiguous",
        "__getitem__",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "clone",
        "view_as",
        "reshape_as",
        "expand",
        "t",
        "movedim",
        "swapaxes",
        "swapdims",
        "chunk",
        "split",
        "unbind",
        "select",
        "narrow",
        "cpu",
        "cuda",
        "T",
        "mT",
        "squeeze_",
        "unsqueeze_",
        "moveaxis",
        "type_as",
        "detach",
        "data",
    }
)
"""Ops behind which the values are still the same ones."""
GETTERS = frozenset({"data", "T", "mT", "H", "real", "imag", "grad"})
LEAVES_TORCH = frozenset({"numpy", "item", "tolist", "__array__", "__float__"})
"""What takes values out of torch, where neither autograd nor we can follow."""
LEARNS = frozenset(
    {
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "matmul",
        "__matmul__",
        "mm",
        "addmm",
        "bmm",
        "einsum",
        "bilinear",
        "gru",
        "lstm",
        "rnn_tanh",
        "rnn_relu",
        "multi_head_attention_forward",
        "__rmatmul__",
    }
)
"""Ops that multiply by weights."""


@dataclasses.dataclass
class Call:
    """One call. params, leaves: what its result hangs on; grad: autograd was on; made: root mean square of its result
    as it came (a later op may write over it)."""

    index: int
    op: str
    module: str
    inside: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: list[torch.Tensor]
    out: list[torch.Tensor]
    params: int
    leaves: int
    grad: bool
    site: Site | None
    made: float | None = None
    entered: tuple[Any, ...] | None = None

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def where(self) -> Where:
        """The user's own line."""
        place = Where(phase="forward", module=self.module, op=self.op)
        site = self.site
        return (
            place
            if site is None
            else dataclasses.replace(
                place, file=site.file, line=site.line, text=source_text(site), cell=cell_name(site.file)
            )
        )


@dataclasses.dataclass
class Dye:
    """What a tensor's value hangs on, and the call that made it."""

    params: int = 0
    leaves: int = 0
    maker: Call | None = None


class Calls(TorchFunctionMode):
    """Records while active. named: parameters by name, registered or not; batch: the batch's tensors.

    Keeps every tensor until it goes itself: an id must not be used again meanwhile.
    """

    def __init__(self, model: nn.Module, named: Iterable[tuple[str, torch.Tensor]], batch: Sequence[torch.Tensor]):
        super().__init__()
        self.model = model
        self.names = {id(m): n for n, m in model.named_modules()}
        self.parameters: list[tuple[str, torch.Tensor]] = []
        self.dyes: dict[int, Dye] = {}
        self.calls: list[Call] = []
        self.cuts: list[Call] = []
        self.leaks: list[Call] = []
        self.failed: Call | None = None  # the call that raised
        self.outputs: list[torch.Tensor] = []
        self.stack: list[str] = []
        self.kept: list[Any] = [batch]
        for name, parameter in named:
            self._adopt(name, parameter)
        for i, leaf in enumerate(batch):
            self.dyes.setdefault(id(leaf), Dye(leaves=1 << i))

    def _adopt(self, name: str, parameter: torch.Tensor) -> None:
        if id(parameter) not in self.dyes:
            self.dyes[id(parameter)] = Dye(params=1 << len(self.parameters))
            self.parameters.append((name, parameter))

    def hooks(self) -> list[Any]:
        """Handles of hooks that follow which module runs; to be removed by the caller. Scripted modules take none."""
        modules = [m for m in self.model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        return [
            handle
            for m in modules
            for handle in (
                m.register_forward_pre_hook(self._enter),
                m.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.names.get(id(module), ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()
        if not self.stack and output is not None:
            self.outputs += tensors_made(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = getattr(func, "__name__", "")
        if op == "__get__":
            op = getattr(getattr(func, "__self__", None), "__name__", "")
            if op not in GETTERS:
                return func(*args, **kwargs)
        before = None
        if op in LEARNS and (given := _tensors((args, kwargs))):
            before = self._entry(op, given)
        try:
            if op in ("cross_entropy", "nll_loss"):
                _refuse_as_on_cpu(args, kwargs)
            out = func(*args, **kwargs)
        except Exception:
            if self.failed is None:
                self.failed = Call(
                    len(self.calls),
                    op,
                    "",
                    False,
                    args,
                    kwargs,
                    _tensors((args, kwargs)),
                    [],
                    0,
                    0,
                    True,
                    locate().site,
                )
            raise
        self._note(op.strip("_") if op.endswith("_") and not op.startswith("__") else op, args, kwargs, out, before)
        return out

    def _note(self, op: str, args: Any, kwargs: Any, out: Any, entered: Any) -> None:
        made = _tensors(out) if op != "__setitem__" else _tensors(args[:1])
        given = _tensors((args, kwargs))
        if not made and op not in LEAVES_TORCH:
            return
        params, leaves = self._hangs_on(given)
        inside = bool(self.stack)
        call = Call(
            len(self.calls),
            op,
            self.stack[-1] if inside else "",
            inside,
            args,
            kwargs,
            given,
            made,
            params,
            leaves,
            torch.is_grad_enabled(),
            locate().site,
            entered=entered,
        )
        self.kept.append((args, kwargs, out))
        if not made:
            if params:
                self.leaks.append(call)
            return
        self.calls.append(call)
        if op in LEARNS and made[0].is_floating_point() and made[0].numel():
            call.made = rms(made[0])
        self._dye(call)
        if params and any(t.requires_grad for t in given) and not any(t.requires_grad for t in made):
            self.cuts.append(call)

    def _hangs_on(self, given: Iterable[torch.Tensor]) -> tuple[int, int]:
        params = leaves = 0
        for tensor in given:
            if tensor.is_leaf and tensor.requires_grad and id(tensor) not in self.dyes:
                self._adopt("", tensor)
            dye = self.dyes.get(id(tensor))
            if dye is not None:
                params, leaves = params | dye.params, leaves | dye.leaves
        return params, leaves

    def _dye(self, call: Call) -> None:
        for tensor in call.out:
            if any(tensor is p for p in call.given) and self._is_parameter(tensor):
                continue  # an op that gives a parameter back (an in-place look) makes nothing new
            if call.op in VIEWS and any(tensor is given for given in call.given):
                continue  # nor does `x.to(x.dtype)`, which gives x itself
            self.dyes[id(tensor)] = Dye(call.params, call.leaves, call)

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        dye = self.dyes.get(id(tensor))
        return dye is not None and dye.maker is None and bool(dye.params)

    def _entry(self, op: str, given: list[torch.Tensor]) -> tuple[Any, ...] | None:
        """Statistics by feature of a floating input that no weight has touched yet: (rms, mean, std, low, high)."""
        x = given[0]
        dye = self.dyes.get(id(x))
        if dye is None or dye.params or not dye.leaves or not x.is_floating_point() or x.dim() < 2 or not x.numel():
            return None
        return by_feature(x.detach(), 1 if op.startswith("conv") else x.dim() - 1)

    def dye(self, tensor: Any) -> Dye:
        return self.dyes.get(id(tensor), Dye()) if isinstance(tensor, torch.Tensor) else Dye()

    def maker(self, tensor: Any) -> Call | None:
        """The call that made the values of a tensor, past views of them; None for a leaf."""
        call = self.dye(tensor).maker
        while call is not None and call.op in VIEWS and call.given:
            call = self.dye(call.given[0]).maker
        return call

    def has(self, mask: int) -> list[int]:
        """The positions that a mask holds."""
        return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _refuse_as_on_cpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise IndexError for a label beyond the classes on an accelerator, as a CPU does: there the kernel's own
    assertion would make the device useless for the rest of the process."""
    given: Any
    target: Any
    given, target = (args[i] if len(args) > i else kwargs.get(key) for i, key in enumerate(("input", "target")))
    tensors = isinstance(given, torch.Tensor) and isinstance(target, torch.Tensor)
    if not tensors or target.device.type in ("cpu", "meta") or target.is_floating_point() or given.dim() < 1:
        return
    ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
    outside = ((target < 0) | (target >= given.shape[1 if given.dim() > 1 else 0])) & (target != ignored)
    if bool(outside.any()):
        raise IndexError(f"Target {int(target[outside].flatten()[0])} is out of bounds.")


def by_feature(x: torch.Tensor, dim: int) -> tuple[Any, ...]:
    """(rms, mean, std) as lists over one dimension, and the lowest and highest value of all."""
    others = [d for d in range(x.dim()) if d != dim]
    x = x.float()
    mean, std = x.mean(others), x.std(others, unbiased=False)
    return (
        (mean.square() + std.square()).sqrt().tolist(),
        mean.tolist(),
        std.tolist(),
        float(x.amin()),
        float(x.amax()),
    )


def rms(tensor: torch.Tensor) -> float:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:  # the gradient of an embedding with sparse=True: most of it is zero
        tensor = tensor.to_dense()
    return float(tensor.float().square().mean().sqrt())


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Tensors in nested tuples, lists and dicts, in order; quick for what torch's functions are given."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [t for part in tree for t in _tensors(part)]
    return [t for part in tree.values() for t in _tensors(part)] if isinstance(tree, dict) else []


Loss = Callable[[Any, Any], Any]
