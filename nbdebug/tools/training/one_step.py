"""One forward and one backward, recorded call by call, without leaving gradients behind; and the parameter table.

Each call knows which parameters and which tensors of the batch its outputs depend on. Gradients come from
`torch.autograd.grad`, so that no `.grad` is touched, neither the model's nor that of anything else that the loss
depends on.

The table has each parameter by name, whether it is trained, used, reached by the loss, held by an optimizer; and where
the graph is cut between trained parameters and the loss.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from nbdebug.observe.backward import graph_leaves, graph_nodes
from nbdebug.observe.locations import Site, at_site, is_users_file, locate
from nbdebug.observe.sources import nodes_of
from nbdebug.observe.tensors import output_tensors
from nbdebug.observe.validation import names_used_by
from nbdebug.observe.variables import closure_variables
from nbdebug.report import Where
from nbdebug.tools.training.evaluate import LossFn, deterministic, loss_root, preserve_rng
from nbdebug.tools.training.static_facts import DetachedAt, ForeignTensors, Parameter, StaticFacts, WrongCall

VIEWS = frozenset(
    "view reshape permute transpose squeeze unsqueeze flatten unflatten contiguous __getitem__ to float double half "
    "bfloat16 type clone view_as reshape_as expand t movedim swapaxes swapdims chunk split unbind select narrow cpu "
    "cuda T mT squeeze_ unsqueeze_ moveaxis type_as detach data".split()
)
"""Ops that keep the values of their input."""
GETTERS = frozenset({"data", "T", "mT", "H", "real", "imag", "grad"})
LEAVES_TORCH = frozenset({"numpy", "item", "tolist", "__array__", "__float__"})
"""Ops that take values out of torch, where neither autograd nor nbdebug can follow."""
WEIGHTED_OPS = frozenset(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d matmul __matmul__ mm addmm bmm "
    "einsum bilinear gru lstm rnn_tanh rnn_relu multi_head_attention_forward __rmatmul__".split()
)
"""Ops that multiply by weights."""
RECURRENT = frozenset("gru lstm rnn_tanh rnn_relu gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell".split())
CONTAINERS = (list, tuple, dict, set, deque)
DEPTH = 4
"""Of containers in containers that are searched for parameters."""


@dataclasses.dataclass
class StepGraph:
    """gradients: by id of the leaf, None where it got none; reached: ids of the leaves that autograd leads to; silent:
    nodes of the user's own Functions that got a gradient and gave nothing but zeros."""

    calls: Calls
    loss: torch.Tensor
    value: float
    reached: set[int]
    gradients: dict[int, torch.Tensor | None]
    silent: list[Any] = dataclasses.field(default_factory=list)


def calls_for(model: nn.Module, batch: Any) -> Calls:
    """A recorder for one forward of this batch."""
    return Calls(model, [*model.named_parameters(), *hidden_parameters(model)], output_tensors(batch))


def record(calls: Calls, loss_fn: LossFn, batch: Any) -> Any:
    """Call the loss function and record. The user's own exceptions pass; `calls.failed` then tells where."""
    try:
        with modules_followed(calls.model, calls.enter, calls.leave), calls:
            return loss_fn(calls.model, batch)
    finally:
        calls.stack.clear()


@contextlib.contextmanager
def modules_followed(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Inside, these are called before and after each module's forward. Scripted modules take no hooks."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                stack.enter_context(module.register_forward_pre_hook(enter))
                stack.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


def step_graph(calls: Calls, loss_fn: LossFn, batch: Any) -> StepGraph:
    """The loss of one batch and its gradients. Raises TypeError where loss_fn returns no tensor."""
    with torch.enable_grad():
        root = loss_root(record(calls, loss_fn, batch))
    if not isinstance(root, torch.Tensor):
        raise TypeError(
            "loss_fn has to return a tensor (or a tuple, dict or object that holds it); it returned "
            f"{type(root).__name__}"
        )
    loss = root if root.dim() == 0 else root.float().mean()
    leaves, silent = list(leaves_of(loss)), list[Any]()
    with contextlib.ExitStack() as hooks:
        for node in own_functions(loss):
            hooks.callback(node.register_hook(functools.partial(_note_silent, silent, node)).remove)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
    gradients: dict[int, torch.Tensor | None] = {id(leaf): grad for leaf, grad in zip(leaves, grads)}
    calls.retained.append((root, loss, leaves))
    return StepGraph(calls, root, float(loss.detach()), {id(leaf) for leaf in leaves}, gradients, silent)


def own_functions(output: torch.Tensor) -> Iterator[Any]:
    """The nodes behind this tensor whose derivative the user has written."""
    for node in graph_nodes([output.grad_fn]):
        if issubclass(type(node), torch.autograd.function.BackwardCFunction) and is_users_file(_backward(node)[0]):
            yield node


def _backward(node: Any) -> tuple[str, int]:
    """The file of such a Function's backward, and its last line; ("", 0) where it is not in Python."""
    code = getattr(getattr(getattr(node, "_forward_cls", None), "backward", None), "__code__", None)
    return ("", 0) if code is None else (code.co_filename, max(line for *_, line in code.co_lines() if line))


def own_backwards(model: nn.Module) -> Iterator[WrongCall]:
    """The user's modules in a model with a `backward(self, grad)` that gives a gradient: autograd calls that of a
    torch.autograd.Function, never a module's; and no line of its file does."""
    for name, module in model.named_modules():
        code = getattr(getattr(type(module), "backward", None), "__code__", None)
        if not name or code is None or code.co_argcount < 2 or not is_users_file(code.co_filename):
            continue
        nodes = list(nodes_of(code.co_filename))
        called = (n.func for n in nodes if isinstance(n, ast.Call) and n.args)
        own = next((n for n in nodes if isinstance(n, ast.FunctionDef) and n.lineno == code.co_firstlineno), None)
        gives = own is not None and any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(own))
        if gives and not any(isinstance(f, ast.Attribute) and f.attr == "backward" for f in called):
            where = at_site(Where(phase="backward", module=name), Site(code.co_filename, code.co_firstlineno, ""))
            yield WrongCall("own backward", "backward", where, (name, type(module).__name__))


def _note_silent(silent: list[Any], node: Any, given: Sequence[Any], got: Sequence[Any]) -> None:
    """After a backward of the user's own: whether it got a gradient (its outputs') and gave zeros (its inputs')."""
    got, given = ([t for t in grads if isinstance(t, torch.Tensor)] for grads in (got, given))
    if given and any(bool(t.any()) for t in got) and not any(bool(t.any()) for t in given):
        silent.append(node)


def leaves_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves that require a gradient and that autograd reaches from the loss."""
    if loss.grad_fn is None:
        if loss.requires_grad:
            yield loss
        return
    yield from graph_leaves(loss)


def hidden_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters in plain lists, tuples and dicts of a model, and its tensors that require a gradient and are none,
    with their names: `model.parameters()` does not give them."""
    known = {id(p) for p in model.parameters()}
    inside = {id(m) for m in model.modules()}
    return [
        pair
        for name, module in model.named_modules()
        for key, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items()
        if not key.startswith("_") and issubclass(type(value), (*CONTAINERS, torch.Tensor))
        for pair in _in_container(f"{name}.{key}" if name else key, value, known, inside, 0)
    ]


def _in_container(
    name: str, value: Any, known: set[int], inside: set[int], depth: int
) -> Iterator[tuple[str, torch.Tensor]]:
    kind = type(value)  # isinstance would ask the object for its class
    if issubclass(kind, nn.Module):
        if id(value) not in inside:
            for own, parameter in value.named_parameters(prefix=name):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    yield own, parameter
    elif issubclass(kind, torch.Tensor):
        if value.requires_grad and value.is_leaf and id(value) not in known:
            known.add(id(value))
            yield name, value
    elif issubclass(kind, CONTAINERS) and depth < DEPTH:
        base: Any = next(base for base in CONTAINERS if issubclass(kind, base))  # a subclass may iterate in its own way
        pairs = dict.items(value) if base is dict else enumerate(base.__iter__(value))
        for key, member in pairs:
            yield from _in_container(f"{name}.{key}", member, known, inside, depth + 1)


def plain_leaves(names: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Among variables, tensors that require a gradient and are no nn.Parameter, with their names."""
    found: list[tuple[str, torch.Tensor]] = []
    known: set[int] = set()
    for name, value in list(names.items() if isinstance(names, Mapping) else names):
        if issubclass(type(value), (*CONTAINERS, torch.Tensor)):
            found += [pair for pair in _in_container(name, value, known, set(), 0) if not _is_parameter(pair[1])]
    return found


def _is_parameter(tensor: torch.Tensor) -> bool:
    return issubclass(type(tensor), nn.Parameter)


class PlainLeaves:
    """Tensors of a model and of a loop's variables that require a gradient and are no nn.Parameter, as they are at the
    start of a run. left: after it, the names of those that backward fills, and that nobody moves or clears: a loop
    that steps by hand, or looks at these gradients, does."""

    def __init__(self, model: nn.Module, names: Mapping[str, Any]):
        own = [pair for pair in hidden_parameters(model) if not _is_parameter(pair[1])]
        functions = [value for value in names.values() if type(value) in (types.FunctionType, types.MethodType)]
        names = {n: v for used in (*map(names_used_by, functions), names) for n, v in used.items()}
        self.start = [(n, t, t.detach().clone(), t.grad, _version(t)) for n, t in (*own, *plain_leaves(names))]
        self.left = frozenset[str]()

    def look(self, backwards: int) -> None:
        """The run is over: it went backward so many times."""
        self.left = frozenset(
            name
            for name, tensor, values, grad, version in self.start
            if tensor.grad is not None
            and (grad is None or tensor.grad is grad)
            and backwards / 2 <= _version(tensor) - version + 1 <= backwards + 1
            and bool(tensor.grad.any())
            and torch.equal(tensor.detach(), values)
        )

    def restore(self) -> None:
        """Values and gradients as they were."""
        with torch.no_grad():
            for _, tensor, values, grad, _ in self.start:
                tensor.copy_(values)
                tensor.grad = grad

    def judged(self, static: StaticFacts) -> StaticFacts:
        """Without those that are trained in another way, or not at all meant to be."""
        table = tuple(p for p in static.parameters if not p.plain or p.held or p.name in self.left)
        return dataclasses.replace(static, parameters=table)


class FrozenParts:
    """Modules whose parameters are all frozen at the start of a run. woken: those that have gradients in it."""

    def __init__(self, model: nn.Module):
        parts = {name: list(module.parameters()) for name, module in model.named_modules() if name}
        self.parts = {n: own for n, own in parts.items() if own and not any(p.requires_grad for p in own)}
        self.versions = {n: [p._version for p in own] for n, own in self.parts.items()}
        self.modules, self.woken = dict(model.named_modules()), set[str]()

    def look(self) -> None:
        """An optimizer has stepped. A trainer may clear the gradients before the run is over."""
        for name, own in self.parts.items():
            if name not in self.woken and all(
                p.requires_grad and p.grad is not None and bool(p.grad.any()) for p in own
            ):
                self.woken.add(name)

    def left(self, held: Collection[int]) -> dict[str, nn.Module]:
        """Those that nothing has changed; held: the ids of what optimizers hold. Without parts of one that is given."""
        found = dict[str, nn.Module]()
        for name, own in self.parts.items():
            inner = any(name.startswith(f"{part}.") for part in found)
            still = [p._version for p in own] == self.versions[name] and not any(id(p) in held for p in own)
            if held and name in self.woken and still and not inner:
                found[name] = self.modules[name]
        return found


def _version(tensor: torch.Tensor) -> int:
    """How often something was written into its gradient in place: each backward adds to it."""
    return 0 if tensor.grad is None else tensor.grad._version


@dataclasses.dataclass
class OpCall:
    """One call. params, leaves: bit masks of what its outputs depend on; grad: autograd was on; checkpoint: it was off
    because of a reentrant checkpoint; output_rms: root mean square of its output when it was made (a later op may write
    over it); input_stats: see `by_feature`."""

    index: int
    op: str
    module: str
    inside: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    params: int
    leaves: int
    grad: bool
    site: Site | None
    output_rms: float | None = None
    input_stats: tuple[Any, ...] | None = None
    checkpoint: bool = False

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def where(self) -> Where:
        """The user's own line."""
        return at_site(Where(phase="forward", module=self.module, op=self.op), self.site)


@dataclasses.dataclass
class Dependence:
    """Bit masks of the parameters and the batch's tensors that a value depends on, and the call that made it."""

    params: int = 0
    leaves: int = 0
    maker: OpCall | None = None


class Calls(TorchFunctionMode):
    """Records the calls of torch's functions while active. named: parameters by name, registered or not; batch: the
    batch's tensors. entered: what modules were given. detached: calls that cut trained parameters off; left_torch:
    those that take their values out.

    Keeps every tensor as long as it lives itself: an id must not be used again meanwhile.
    """

    def __init__(self, model: nn.Module, named: Iterable[tuple[str, torch.Tensor]], batch: Sequence[torch.Tensor]):
        super().__init__()
        self.model = model
        self.names = {id(m): n for n, m in model.named_modules()}
        self.parameters: list[tuple[str, torch.Tensor]] = []
        self.dependences: dict[int, Dependence] = {}
        self.calls: list[OpCall] = []
        self.detached: list[OpCall] = []
        self.left_torch: list[OpCall] = []
        self.failed: OpCall | None = None  # the call that raised
        self.outputs: list[torch.Tensor] = []
        self.stack, self.entered = list[str](), list[torch.Tensor]()
        self.retained: list[Any] = [batch]
        for name, parameter in named:
            self._adopt(name, parameter)
        for i, leaf in enumerate(batch):
            self.dependences.setdefault(id(leaf), Dependence(leaves=1 << i))

    def _adopt(self, name: str, parameter: torch.Tensor) -> None:
        if id(parameter) not in self.dependences:
            self.dependences[id(parameter)] = Dependence(params=1 << len(self.parameters))
            self.parameters.append((name, parameter))

    def enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.names.get(id(module), ""))
        self.entered += _tensors(args)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()
        if not self.stack and output is not None:
            self.outputs += output_tensors(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = getattr(func, "__name__", "")
        if op == "__get__":
            op = getattr(getattr(func, "__self__", None), "__name__", "")
            if op not in GETTERS:
                return func(*args, **kwargs)
        stats = self._input_stats(op, _tensors((args, kwargs))) if op in WEIGHTED_OPS else None
        try:
            if op in ("cross_entropy", "nll_loss"):
                _refuse_as_on_cpu(args, kwargs)
            out = func(*args, **kwargs)
        except Exception:  # whatever an op of the user's raises: it is noted, and passes
            if self.failed is None:
                inputs, site = _tensors((args, kwargs)), locate().site
                self.failed = OpCall(len(self.calls), op, "", False, args, kwargs, inputs, [], 0, 0, True, site)
            raise
        self._note(op.strip("_") if op.endswith("_") and not op.startswith("__") else op, args, kwargs, out, stats)
        return out

    def _note(self, op: str, args: Any, kwargs: Any, out: Any, stats: Any) -> None:
        outputs = _tensors(out) if op != "__setitem__" else _tensors(args[:1])
        inputs = _tensors((args, kwargs))
        if not outputs and op not in LEAVES_TORCH:
            return
        params, leaves = self._masks(inputs)
        module = self.stack[-1] if self.stack else ""
        call = OpCall(
            len(self.calls),
            op,
            module,
            bool(self.stack),
            args,
            kwargs,
            inputs,
            outputs,
            params,
            leaves,
            torch.is_grad_enabled(),
            locate().site,
            input_stats=stats,
        )
        self.retained.append((args, kwargs, out))
        if not outputs:
            if params:
                self.left_torch.append(call)
            return
        self.calls.append(call)
        if op in WEIGHTED_OPS and outputs[0].is_floating_point() and outputs[0].numel():
            call.output_rms = rms(outputs[0])
        self._propagate(call)
        if params and any(t.requires_grad for t in inputs) and not any(t.requires_grad for t in outputs):
            call.checkpoint = not call.grad and in_reentrant_checkpoint()
            self.detached.append(call)

    def _masks(self, inputs: Iterable[torch.Tensor]) -> tuple[int, int]:
        params = leaves = 0
        for tensor in inputs:
            if tensor.is_leaf and tensor.requires_grad and id(tensor) not in self.dependences:
                self._adopt("", tensor)
            dependence = self.dependences.get(id(tensor))
            if dependence is not None:
                params, leaves = params | dependence.params, leaves | dependence.leaves
        return params, leaves

    def _propagate(self, call: OpCall) -> None:
        for tensor in call.outputs:
            known = self.dependences.get(id(tensor))
            parameter = known is not None and known.maker is None and known.params
            if parameter and any(tensor is p for p in call.inputs):
                continue  # an op that returns a parameter itself makes nothing new
            if call.op in VIEWS and any(tensor is t for t in call.inputs):
                continue  # nor does `x.to(x.dtype)`, which returns x itself
            self.dependences[id(tensor)] = Dependence(call.params, call.leaves, call)

    def _input_stats(self, op: str, inputs: list[torch.Tensor]) -> tuple[Any, ...] | None:
        """Of a floating input that no weight has touched yet, `by_feature`."""
        x = inputs[0] if inputs else None
        dependence = self.dependence(x)
        if x is None or dependence.params or not dependence.leaves:
            return None
        if not x.is_floating_point() or x.dim() < 2 or not x.numel():
            return None
        return by_feature(x.detach(), 1 if op.startswith("conv") else x.dim() - 1)

    def dependence(self, tensor: Any) -> Dependence:
        return self.dependences.get(id(tensor), Dependence()) if isinstance(tensor, torch.Tensor) else Dependence()

    def maker(self, tensor: Any) -> OpCall | None:
        """The call that made the values of a tensor, past views of them; None for a leaf."""
        call = self.dependence(tensor).maker
        while call is not None and call.op in VIEWS and call.inputs:
            call = self.dependence(call.inputs[0]).maker
        return call

    def positions(self, mask: int) -> list[int]:
        """The positions of the bits that are set."""
        return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _refuse_as_on_cpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise IndexError for a label beyond the classes on an accelerator, as a CPU does: there the kernel's own
    assertion would make the device useless for the rest of the process."""
    output: Any
    target: Any
    output, target = (args[i] if len(args) > i else kwargs.get(key) for i, key in enumerate(("input", "target")))
    tensors = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    if not tensors or target.device.type in ("cpu", "meta") or target.is_floating_point() or output.dim() < 1:
        return
    ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
    outside = ((target < 0) | (target >= output.shape[1 if output.dim() > 1 else 0])) & (target != ignored)
    if bool(outside.any()):
        raise IndexError(f"Target {int(target[outside].flatten()[0])} is out of bounds.")


def in_reentrant_checkpoint() -> bool:
    """Whether the innermost reason why autograd is off is `torch.utils.checkpoint` in its reentrant form."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.utils.checkpoint.CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Tensors in nested tuples, lists and dicts, in order; quick for the arguments of torch's functions."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [t for part in tree for t in _tensors(part)]
    return [t for part in tree.values() for t in _tensors(part)] if isinstance(tree, dict) else []


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


def has_nonfinite(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return False
    values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
    return not math.isfinite(float(values.float().abs().sum()))


# -- the parameter table -----------------------------------------------------------------------------------------------


DETACHES = frozenset({"detach", "detach_", "data"})
FLAT = frozenset("round floor ceil trunc sign sgn heaviside fix".split())
"""Ops through which autograd goes with a derivative of zero."""
ROUND_DEVIATIONS = (0.001, 0.01, 0.02, 0.05, 0.1, 1.0)
"""Deviations that people type (0.02 is that of BERT and GPT; 1 that of torch's Embedding)."""


def parameter_table(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: StepGraph, of_loss: Mapping[int, str]
) -> tuple[Parameter, ...]:
    """One row for each parameter that the model has or that the loss reaches under a name. of_loss: names of
    those of the loss function, by id."""
    own = {id(p) for p in model.parameters()}
    held: dict[int, tuple[float, bool]] = {}
    for optimizer in optimizers:
        members = [p for g in optimizer.param_groups for p in g["params"]]
        idle = not any(id(p) in step.reached for p in members) and any(p.requires_grad for p in members)
        for group in optimizer.param_groups:
            held |= {id(p): (float(group.get("lr") or 0.0), idle) for p in group["params"]}
    used = {id(t) for call in step.calls.calls for t in call.inputs}
    last, modules = _output_parameters(step.calls), dict(model.named_modules())
    inputs, rows = _inputs(step.calls), []
    for name, p in step.calls.parameters:
        plain = not _is_parameter(p)
        outside = not name
        if not (name := name or of_loss.get(id(p), "")):
            continue
        if plain and (id(p) in inputs[outside] or p._backward_hooks):
            continue
        module, _, key = name.rpartition(".")
        gradient = step.gradients.get(id(p))
        rate, idle = held.get(id(p), (None, False))
        rows.append(
            Parameter(
                name,
                module,
                p.numel(),
                p.dim(),
                p.requires_grad,
                (id(p) in held) if optimizers else None,
                id(p) in used,
                id(p) in step.reached,
                None if gradient is None else rms(gradient),
                rate,
                idle,
                not bool(p.detach().any()) if p.numel() else False,
                "Norm" in type(modules.get(module)).__name__,
                id(p) in own or id(p) in of_loss,
                id(p) in last,
                key == "weight" and is_fresh(p),
                id(p) in of_loss,
                plain,
            )
        )
    return tuple(rows)


def _inputs(calls: Calls) -> tuple[set[int], set[int]]:
    """The ids of leaves that are no parameters: those whose gradients the loss itself asks for, and states of
    recurrent layers; and of variables, those too that a module is called with."""
    asked = {id(t) for call in calls.calls if call.op == "grad" for t in call.inputs}
    for state in (t for call in calls.calls if call.op in RECURRENT for t in call.inputs[1:3]):
        asked |= {id(calls.parameters[i][1]) for i in calls.positions(calls.dependence(state).params)}
    return asked, asked | {id(t) for t in calls.entered}


def _output_parameters(calls: Calls) -> set[int]:
    """The ids of the parameters of the last op with weights in the model: those that make its output."""
    ids = {id(p) for _, p in calls.parameters}
    for call in reversed(calls.calls):
        own = {id(t) for t in call.inputs if id(t) in ids}
        if call.inside and call.op in WEIGHTED_OPS and own:
            return own
    return set()


def loss_parameters(loss_fn: Any, model: nn.Module) -> dict[int, str]:
    """id → name of the parameters that a loss function reaches by itself: of a criterion in a variable, an attribute
    or a closure, or its own; and of tensors there that require a gradient. Those of the model are left out."""
    known = {id(p) for p in model.parameters()}
    names: dict[int, str] = {}
    for name, value in _members(loss_fn):
        if issubclass(type(value), nn.Parameter):
            names.setdefault(id(value), name)
        elif issubclass(type(value), nn.Module) and value is not model:
            for own, parameter in value.named_parameters(prefix=name):
                names.setdefault(id(parameter), own)
    names |= {id(tensor): name for name, tensor in plain_leaves(_members(loss_fn))}
    known |= {id(p) for _, p in hidden_parameters(model)}
    return {key: name for key, name in names.items() if key not in known}


def _members(loss_fn: Any) -> Iterator[tuple[str, Any]]:
    """Attributes, closure variables and globals that a loss function uses, with their names."""
    if isinstance(loss_fn, nn.Module):
        yield "loss_fn", loss_fn
        return
    function = getattr(loss_fn, "__func__", loss_fn)
    for part in getattr(loss_fn, "parts", ()):  # the lines of a loop that make its loss
        yield from getattr(part, "names", {}).items()
    owner = getattr(loss_fn, "__self__", None)
    if owner is not None:
        yield from list(getattr(owner, "__dict__", {}).items())
    if not isinstance(function, types.FunctionType):
        yield from list(getattr(function, "__dict__", {}).items())
        return
    yield from closure_variables(function).items()
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def held_elsewhere(
    table: Sequence[Parameter],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    of_loss: Mapping[int, str],
) -> tuple[Parameter, ...]:
    """The table, in which `held` is None (not known) where an optimizer that is alive and was not given holds the
    parameter. It is looked for only where one is missing."""
    missing = {p.name for p in table if p.held is False and p.trained}
    if not missing:
        return tuple(table)
    others = [
        o
        for o in gc.get_objects()
        if issubclass(type(o), torch.optim.Optimizer) and all(o is not own for own in optimizers)
    ]
    held = {id(p) for o in others for g in o.param_groups for p in g["params"]}
    known = {name: key for key, name in of_loss.items()}
    known |= {name: id(p) for name, p in (*hidden_parameters(model), *model.named_parameters())}
    return tuple(
        dataclasses.replace(p, held=None) if p.name in missing and known.get(p.name) in held else p for p in table
    )


def optimizer_code(optimizers: Sequence[Any]) -> str:
    """ "SGD(model.parameters(), lr=0.1)", of the first optimizer; "" where there is none."""
    if not optimizers:
        return ""
    group = optimizers[0].param_groups[0]
    rate = group.get("initial_lr", group.get("lr"))
    return f"{type(optimizers[0]).__name__}(model.parameters(), lr={float(rate or 0.0):g})"


def is_fresh(weight: torch.Tensor) -> bool:
    """Whether the values fit a distribution from which initial weights are drawn: uniform within 1 / sqrt(fan_in), as
    torch draws those of Linear and Conv layers, or normal with a deviation that recipes use. Trained weights go beyond
    that bound, and have heavier tails than a bell."""
    if weight.dim() < 2 or weight.numel() < 16:
        return False
    values = weight.detach().float()
    bound, top, std = 1 / math.sqrt(weight[0].numel()), float(values.abs().max()), float(values.std())
    uniform = 0.85 * bound <= top <= 1.0001 * bound and abs(std * math.sqrt(3) / bound - 1) < 0.25
    return uniform or _is_normal(values, std)


def _is_normal(values: torch.Tensor, std: float) -> bool:
    """Normal, by mean, deviation and kurtosis, each to four standard errors."""
    n, fan_in, fan_out = values.numel(), values[0].numel(), values.shape[0] * values[0].numel() / values.shape[1]
    if n < 200 or std <= 0:
        return False
    usual = (*ROUND_DEVIATIONS, math.sqrt(2 / fan_in), math.sqrt(1 / fan_in), math.sqrt(2 / (fan_in + fan_out)))
    scaled = (values - values.mean()) / std
    return (
        min(abs(std / known - 1) for known in usual) < 4 / math.sqrt(2 * n)
        and abs(float(values.mean())) < 4 * std / math.sqrt(n)
        and abs(float(scaled.pow(4).mean()) - 3) < 4 * math.sqrt(24 / n)
    )


def detached_places(
    step: StepGraph, table: Sequence[Parameter], has_optimizer: bool, loss: Callable[[], float]
) -> tuple[DetachedAt, ...]:
    """Where the graph ends for trained parameters whose values reach the loss and which autograd does not reach. loss:
    the loss again, to see whether values that were taken out of torch come back into it."""
    calls = step.calls
    position = {name: i for i, (name, _) in enumerate(calls.parameters)}
    others_learn = any(p.reached and p.held for p in table)  # the loss of one optimizer of several
    lost = {
        position[p.name]
        for p in table
        if p.name in position
        and p.trained
        and p.used
        and not p.reached
        and (p.held or not has_optimizer)
        and not (p.idle and others_learn)
    }
    alive = calls.dependence(step.loss).params
    places: list[DetachedAt] = []
    for call in calls.detached:
        cut_off = {i for i in lost if call.params >> i & 1 and alive >> i & 1}
        if cut_off:
            places.append(detached_at(calls, call, cut_off))
            lost -= cut_off
    harmless: list[set[int]] = []  # values that were only printed or counted
    for call in calls.left_torch:
        cut_off = {i for i in lost if call.params >> i & 1}
        if not cut_off or cut_off in harmless:
            continue
        if not loss_depends_on([calls.parameters[i][1] for i in sorted(cut_off)], loss):
            harmless.append(cut_off)
        else:
            places.append(_place(calls, call, "left torch", cut_off))
            lost -= cut_off
    places += [*_flat_places(step, table), *_silent_backward(step, table, loss), *_dropped_losses(step, table)]
    return tuple(sorted(places, key=lambda place: -len(place.parameters)))


def _without_slope(step: StepGraph, table: Sequence[Parameter]) -> set[int]:
    """The positions of parameters that autograd reaches, and which get zeros alone, where others get more."""
    gradients = {p.name: p.gradient for p in table if p.trained and p.reached and p.held is not False}
    zero = {i for i, (name, _) in enumerate(step.calls.parameters) if gradients.get(name) == 0.0}
    return zero if any(gradients.values()) else set()


def _silent_backward(step: StepGraph, table: Sequence[Parameter], loss: Callable[[], float]) -> Iterator[DetachedAt]:
    """A backward of the user's own that gives zeros for whatever it gets, though the loss changes with what is behind
    it."""
    zero, calls = _without_slope(step, table) if step.silent else set[int](), step.calls
    position = {id(p): i for i, (_, p) in enumerate(calls.parameters)}
    for function, group in itertools.groupby(step.silent, lambda node: node._forward_cls):
        nodes = list(group)
        leaves = (id(node.variable) for node in graph_nodes(nodes) if hasattr(node, "variable"))
        behind = zero.intersection(position[leaf] for leaf in leaves if leaf in position)
        if own := {i for i in behind if loss_depends_on([calls.parameters[i][1]], loss)}:
            file, line = _backward(nodes[0])
            where = at_site(Where(phase="backward", op=function.__name__), Site(file, line, "backward"))
            names = tuple(calls.parameters[i][0] for i in sorted(own))
            yield DetachedAt(f"{function.__name__}.backward", "backward", names, where)


def _flat_places(step: StepGraph, table: Sequence[Parameter]) -> list[DetachedAt]:
    """Steps such as round, whose derivative is zero everywhere, behind which all gradients are exactly zero."""
    calls, zero = step.calls, _without_slope(step, table)
    flat = [call for call in calls.calls if call.op in FLAT and call.grad and call.params]
    for call in flat:
        behind = set(calls.positions(call.params))
        if any(t.requires_grad for t in call.outputs) and behind <= zero:
            return [_place(calls, call, "flat", behind)]
    return []


def at_bound(step: StepGraph) -> Where | None:
    """Where no parameter gets anything but zeros: the last op before the loss that moved each of its values to a bound,
    where its slope is zero."""
    if any(g is not None and bool(g.any()) for g in step.gradients.values()):
        return None
    for call in reversed(step.calls.calls):
        pair = [t for tensors in (call.inputs[:1], call.outputs[:1]) for t in tensors]
        if call.op in BOUNDING and call.params and len(pair) == 2 and pair[0].shape == pair[1].shape:
            return call.where if bool((pair[0] != pair[1]).all()) else None
    return None


def _dropped_losses(step: StepGraph, table: Sequence[Parameter]) -> Iterator[DetachedAt]:
    """A single number, with its graph, of parameters that have no other effect, and which never comes into the loss."""
    calls = step.calls
    alive = calls.dependence(step.loss).params
    lost = {p.name for p in table if p.trained and p.used and p.held and not (p.reached or p.idle)}
    lost_at = {i for i, (name, _) in enumerate(calls.parameters) if name in lost and not alive >> i & 1}
    for call in calls.calls:
        number = len(call.outputs) == 1 == call.outputs[0].numel() and call.outputs[0].requires_grad
        if number and call.leaves and (own := lost_at.intersection(calls.positions(call.params))):
            yield _place(calls, call, "dropped", own)
            lost_at -= own


def detached_at(calls: Calls, call: OpCall, cut_off: set[int]) -> DetachedAt:
    """The place of a call that cuts parameters off, given by position."""
    how = "checkpoint" if call.checkpoint else "no_grad" if not call.grad else ""
    own = {**dict.fromkeys(DETACHES, "detach"), "grad": "no graph"}
    return _place(calls, call, how or own.get(call.op, "no gradient"), cut_off)


def _place(calls: Calls, call: OpCall, how: str, cut_off: set[int]) -> DetachedAt:
    names = tuple(calls.parameters[i][0] for i in sorted(cut_off))
    return DetachedAt(call.op, how, names, dataclasses.replace(call.where, op=call.op))


def loss_depends_on(parameters: Sequence[torch.Tensor], loss: Callable[[], float]) -> bool:
    """Whether the loss changes when these are changed: then their values reach it, whatever autograd knows. loss: the
    loss, with the same random numbers each time. The parameters are put back."""
    values = [p.detach().clone() for p in parameters]
    before = loss()
    try:
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.9).add_(0.01)
        return abs(loss() - before) > 1e-6 * max(abs(before), 1e-6)
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, values):
                p.copy_(value)


BOUNDING = frozenset("clamp clip clamp_min clamp_max relu relu6 hardtanh".split())
"""Ops that give a bound for what is beyond it, and other values as they are."""
CANCELS = frozenset(
    "sub __sub__ rsub __rsub__ div __truediv__ true_divide softmax log_softmax softmin normalize layer_norm batch_norm "
    "group_norm instance_norm".split()
)
"""Ops that give a constant where both operands are the same, or a dimension has a single entry."""


def cancelled(model: nn.Module, loss_fn: LossFn, batch: Any, names: Collection[str]) -> DetachedAt | None:
    """The op in which what these parameters make comes to a constant, whatever their values; None where none does.
    Raises what the loss raises; the parameters are put back."""
    own = [p for name, p in model.named_parameters() if name in names]
    values, runs = [p.detach().clone() for p in own], list[Calls]()
    try:
        for factor in (1.0, 0.9):
            with torch.no_grad():
                for p in own:
                    p.mul_(factor)
            runs.append(calls_for(model, batch))
            with deterministic(model), preserve_rng(loss_fn), torch.enable_grad():
                torch.manual_seed(0)
                record(runs[-1], loss_fn, batch)
    finally:
        with torch.no_grad():
            for p, value in zip(own, values):
                p.copy_(value)
    first, second = (calls.calls for calls in runs)
    mask = sum(1 << i for i, (name, _) in enumerate(runs[0].parameters) if name in names)
    for a, b in zip(first, second) if [c.op for c in first] == [c.op for c in second] else ():
        moved = [not _alike(x, y) for x, y in zip((*a.outputs, *a.inputs), (*b.outputs, *b.inputs))]
        constant = a.op in CANCELS and a.params & mask and any(moved) and not any(moved[: len(a.outputs)])
        if constant and not _is_saturated(a.op, a.outputs[0]) and bool(a.outputs[0].isfinite().any()):
            at = runs[0].positions(a.params & mask)
            return dataclasses.replace(detached_at(runs[0], a, set(at)), how="cancels")
    return None


def _is_saturated(op: str, output: torch.Tensor) -> bool:  # of a single entry, one number would be all there is
    return "softm" in op and bool(output.detach().min() != output.detach().max())


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a.detach().double(), b.detach().double(), 1e-6, 1e-7))


def foreign_tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: StepGraph
) -> ForeignTensors | None:
    """Tensors in the optimizers that do not belong to the model and that this loss does not reach."""
    own = {id(p): p for _, p in step.calls.parameters} | {id(p): p for p in model.parameters()}
    members = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    held = {id(p) for p in members}
    foreign = [p for p in members if id(p) not in own and id(p) not in step.reached]
    if not foreign:
        return None
    waiting = Counter(tuple(p.shape) for key, p in own.items() if key not in held and p.requires_grad)
    alike = sum((Counter(tuple(p.shape) for p in foreign) & waiting).values())
    return ForeignTensors(len(foreign), alike)
