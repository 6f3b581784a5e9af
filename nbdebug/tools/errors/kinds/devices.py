"""Two devices in one op: which tensor is on the wrong one, and why it was not moved with the others.

Between a GPU and the CPU, the GPU is the home device: tensors start on the CPU, so one there was not moved. The place
of the tensor shows why: an attribute that is not a buffer, a module in a plain list, a `.to` whose result was dropped.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from typing import Any

import torch
from torch import nn

from nbdebug.observe.locations import other_cells
from nbdebug.observe.sources import edit_of, nodes_of
from nbdebug.observe.variables import MODULES_OWN, attributes, class_attribute, named_modules
from nbdebug.report import Edit, Link, Where
from nbdebug.tools.errors.context import (
    ErrorContext,
    callee_name,
    is_tensor,
    kind_of_message,
    operands,
    parsed_expression,
    value_of,
    value_parts,
)
from nbdebug.tools.errors.kinds.dtypes import on_two_devices
from nbdebug.tools.errors.operands import (
    OpArgument,
    OperandNames,
    failing_module,
    is_instance,
    op_arguments,
    origin_of,
    raised_by_user,
    raised_facts,
    weights,
    where_of,
)
from nbdebug.tools.errors.rules import ArgumentFact, TriedFix, ValueOrigin, bracketed, is_plain
from nbdebug.tools.errors.rules.tensor_attributes import DeviceFacts
from nbdebug.tools.errors.sandbox import TrialResult, computed_operands, edited, rerun

MAKERS = frozenset(
    (
        "zeros ones empty full arange linspace eye rand randn randint randperm tensor as_tensor from_numpy Tensor "
        "FloatTensor LongTensor normal tril_indices triu_indices scalar_tensor"
    ).split()
)
"""Calls that create a tensor on the CPU by default."""
MOVES = ("to", "cuda", "cpu")


def reason(facts: DeviceFacts, odd: OpArgument, context: ErrorContext) -> DeviceFacts:
    """The facts with `why` and its details."""
    names = OperandNames(context)
    if odd.owner is not None:
        return _registered(facts, odd, context, names)
    attribute = _attribute(odd.value, context, names)
    if attribute is not None:
        owner, kind, name, module = attribute
        return dataclasses.replace(
            facts,
            why="attribute" if module else "holder",
            owner=owner,
            holder=kind,
            attribute=name,
            origin=_origin(odd, context),
        )
    line = _dropped(odd.name, context)
    if line is not None:
        return dataclasses.replace(facts, why="dropped", dropped=line)
    origin = _origin(odd, context)
    looped = origin is not None and any("comes from" in link.what for link in origin.way)
    created = origin is not None and bool(origin.call) and not looped and _runs(origin, context)
    why = "made" if created else "batch" if looped else "variable"
    source = "" if origin is None or created else _source(origin, odd, context)
    return dataclasses.replace(facts, why=why, origin=origin, source=source)


def _source(origin: ValueOrigin, odd: OpArgument, context: ErrorContext) -> str:
    """The only tensor on the odd device in the first binding on the way."""
    node = parsed_expression(origin.code)
    names = {
        ast.unparse(part)
        for part in (value_parts(node) if node is not None else ())
        if isinstance(part, (ast.Name, ast.Attribute))
        and is_tensor(value := value_of(part, context.users[0]))
        and value.device == odd.value.device
    }
    return names.pop() if len(names) == 1 and origin.code not in names else ""


def _registered(facts: DeviceFacts, odd: OpArgument, context: ErrorContext, names: OperandNames) -> DeviceFacts:
    """For a parameter or buffer: its model was never moved, its part was added later, or its module is unregistered."""
    owner = odd.owner or ""
    root = next(
        (model for name, model in context.owners.models.items() if owner == name or owner.startswith(f"{name}.")), None
    )
    if "[" in owner:
        place, _, _ = owner.partition("[")
        whole, _, attribute = place.rpartition(".")
        return dataclasses.replace(facts, why="list", owner=owner, holder=whole, attribute=attribute)
    if root is None:
        return dataclasses.replace(facts, why="model", owner=owner)
    counts = Counter(str(t.device) for t in weights(root, buffers=True))
    path, alone = names.module(root), set(counts) == {str(odd.value.device)}
    why = "model" if alone else "part"
    return dataclasses.replace(
        facts, why=why, counts=dict(counts), model=path, owner=path if alone else _highest(root, odd, path) or owner
    )


def _highest(root: nn.Module, odd: OpArgument, path: str) -> str | None:
    """The largest part of the model that is wholly on the odd device and holds the tensor."""
    for name, part in named_modules(root):
        inside = weights(part, buffers=True)
        if any(t is odd.value for t in inside) and all(t.device == odd.value.device for t in inside):
            return f"{path}.{name}".rstrip(".")
    return odd.owner


def _attribute(value: Any, context: ErrorContext, names: OperandNames) -> tuple[str, str, str, bool] | None:
    """(path, class, attribute, whether it is a module's) of an object that holds the tensor as a plain attribute."""
    for model in context.owners.models.values():
        for _, part in named_modules(model):
            for name, item in attributes(part).items():
                if item is value and name not in MODULES_OWN:
                    return names.module(part), type(part).__name__, name, True
    for frame in context.users:
        mine = frame.names.get("self")
        for name, item in (attributes(mine) if mine is not None else {}).items():
            if item is value:
                return "self", type(mine).__name__, name, issubclass(type(mine), nn.Module)
    return None


def _dropped(name: str, context: ErrorContext) -> Where | None:
    """The line with `x.to(device)` as a statement, which drops its result."""
    files = [frame.site.file for frame in context.users]
    for file in dict.fromkeys([*files, *(other_cells(files[0]) if files else [])]):
        for node in nodes_of(file):
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and ast.unparse(call.func) in [f"{name}.{move}" for move in MOVES]:
                return where_of(file, call)
    return None


def _origin(odd: OpArgument, context: ErrorContext) -> ValueOrigin | None:
    """The binding that created a tensor on the CPU."""
    device = odd.value.device

    def is_origin(node: ast.expr) -> bool:
        return callee_name(node) in MAKERS and not any(k.arg == "device" for k in getattr(node, "keywords", []))

    def fits(value: Any) -> bool:
        return value.device == device if is_tensor(value) else not is_instance(value, (int, float, str, torch.dtype))

    way = origin_of(odd.name, context, is_origin, fits, partial=True)
    if not way:
        return None
    name, code, call = way[0].name, way[0].code, callee_name(way[0].maker) if way[0].maker is not None else ""
    return ValueOrigin(name, code, call, way[0].where, tuple(Link(binding.phrase, binding.where) for binding in way))


def _runs(origin: ValueOrigin, context: ErrorContext) -> bool:
    """Whether the tensor was created in a running function, not in the data or the setup."""
    running = [f.site.function for f in context.users if f.site.file == origin.where.file]
    return any(
        isinstance(n, ast.FunctionDef)
        and n.name in running
        and n.lineno <= (origin.where.line or 0) <= (n.end_lineno or 0)
        for n in (nodes_of(origin.where.file) if origin.where.file and running else ())
    )


PATTERNS = {
    "numpy": r"can't convert \S+ device type tensor to numpy|'lengths' argument should be a 1D CPU",
    "generator": "device type for generator but found|Expected a .* generator device|generator device",
    "no data": "Cannot copy out of meta tensor|cannot be called on meta tensors",
    "parallel": "module must have its parameters and buffers on device",
    "two": "(?:to be|are|be) on the same device|at least two devices|is not on the expected device|"
    "to have the same device type|are not at the same device|different from other tensors on|"
    r"to have \w+ DeviceType, but got tensor with|Expected object of device type \w+ but got device type|"
    "is on CPU, but expected (?:it|them) to be on GPU|should be either on cpu or on the same device|"
    "all input tensors must be on the same device|Expected all tensors to be on the same",
}
"""The messages of torch's versions."""
SMALL = 2_000_000
"""Elements that are moved to try a fix."""


def detect(context: ErrorContext) -> DeviceFacts | None:
    """The facts of an error about devices; None of any other."""
    kind = kind_of_message(PATTERNS, context.message)
    if kind is None and on_two_devices(context.message) and "should be the same" in context.message:
        kind = "two"
    if kind is None or raised_by_user(context):
        return None
    module = failing_module(context)
    op = OperandNames(context).module(module) if module is not None else ""
    facts = DeviceFacts(raised_facts(context), kind, op=op)
    if kind == "generator":
        return _generator(facts, context)
    if kind == "parallel":
        return _parallel(facts, context)
    parts = op_arguments(context)
    if kind in ("numpy", "no data"):
        return _unreadable(facts, parts, context)
    parts += [OpArgument(value, text) for text, value in computed_operands(context, {part.name for part in parts})]
    devices = {str(part.value.device) for part in parts}
    if len(devices) < 2:
        parts = [*parts, *_variables(context, parts)]
    return _two(facts, parts, context)


def _variables(context: ErrorContext, parts: list[OpArgument]) -> list[OpArgument]:
    """The tensors of the innermost frame, where the failing line shows none."""
    visited, names = {id(part.value) for part in parts}, OperandNames(context)
    at = context.frame
    return [
        dataclasses.replace(names.argument(value, ""), name=name, known=True)
        for name, value, frame in context.variables()
        if frame is at and is_tensor(value) and id(value) not in visited
    ]


def _two(facts: DeviceFacts, parts: list[OpArgument], context: ErrorContext) -> DeviceFacts:
    state = _state(context)
    if state is not None:
        return dataclasses.replace(facts, why="state", **state)
    home = _home(parts, context)
    away = [p for p in parts if str(p.value.device) != home]
    there = [p for p in parts if str(p.value.device) == home]
    if not away:
        return dataclasses.replace(facts, home=home)
    away.sort(key=lambda p: (p.value.ndim == 0, not p.known))  # a scalar may be on the CPU
    # rather a tensor of the user's than a weight
    odd, partner = away[0], min(there, key=lambda p: (not p.known, p.owner is not None), default=None)
    target = _target(home, partner, context)
    also = tuple(p.plain() for p in away[1:] if is_plain(p.name) and p.value.ndim)
    facts = dataclasses.replace(
        facts, odd=odd.plain(), partner=partner.plain() if partner else None, home=home, target=target, also=also
    )
    facts = reason(facts, odd, context)
    return _cure(facts, odd, away, home, context)


def _home(parts: list[OpArgument], context: ErrorContext) -> str:
    """The home device: a GPU rather than the CPU, of two GPUs the one with most of the parameters."""
    devices = list(dict.fromkeys(str(p.value.device) for p in parts))
    counts = Counter(str(p.device) for model in context.owners.models.values() for p in weights(model))
    cards = [d for d in devices if d != "cpu"]
    if not cards:  # no variable is on the device in the message: that of the models
        named = re.findall(r"\b((?:cuda|mps|xpu|meta|hpu|npu)(?::\d+)?)\b", context.message)
        return next((d for d, _ in counts.most_common() if d != "cpu"), named[0] if named else "cpu")
    return max(cards, key=lambda d: counts[d])


def _target(home: str, partner: OpArgument | None, context: ErrorContext) -> str:
    """The user's expression for the home device: a variable, a tensor's device, a model's."""
    at = context.frame
    names = {**context.names, **at.globals, **at.names} if at is not None else dict(context.names)
    for name, value in names.items():  # what the failing line can see
        if type(value) is torch.device and str(value) in (home, home.partition(":")[0]):
            return name
    plain = partner is not None and partner.known and re.fullmatch(r"[\w.]+(\[[^\]]+\])*", partner.name)
    root = re.split(r"[.\[]", partner.name)[0] if partner is not None else ""
    if plain and at is not None and root not in names and "self" in at.names:
        module = at.names["self"]
        own = weights(module) if is_instance(module, nn.Module) else []
        if own and str(own[0].device) == home:
            return "next(self.parameters()).device"
    if partner is not None and plain and "[" not in (partner.owner or ""):
        return f"{partner.name}.device"
    models = context.owners.models
    near = [name for name in models if any(name in frame.names for frame in context.users)]
    for name in near or (list(models) if len(models) == 1 else []):
        model = models[name]
        first = next(iter(weights(model)), None)
        if first is not None and str(first.device) == home and name.isidentifier() and name != type(model).__name__:
            return f"next({name}.parameters()).device"
    return f'"{home}"'


def _registration(facts: DeviceFacts, context: ErrorContext) -> Edit | None:
    """The assignment that makes a buffer of a plain attribute, or a ModuleList of a plain list."""
    files = [frame.site.file for frame in context.users]
    for model in context.owners.models.values():
        for _, part in named_modules(model):
            code = getattr(class_attribute(part, "__init__"), "__code__", None)
            files += [code.co_filename] if type(part).__name__ == facts.holder and code is not None else []
    alike = [
        (file, node)
        for file in dict.fromkeys(files)
        for node in nodes_of(file)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{facts.attribute}"
    ]
    if len(alike) != 1:
        return None
    file, node = alike[0]
    if facts.why == "list":
        if isinstance(node.value, (ast.List, ast.ListComp)):
            return edit_of(file, {node.value: "nn.ModuleList({raw})"})
        return None
    return edit_of(file, {node: f'self.register_buffer("{facts.attribute}", {ast.unparse(node.value)})'})


def _cure(facts: DeviceFacts, odd: OpArgument, away: list[OpArgument], home: str, context: ErrorContext) -> DeviceFacts:
    """The failing op again after moving the odd tensor, and where that is not enough all others on its device."""
    code = f"{odd.name} = {odd.name}.to({facts.target})"
    module = failing_module(context)
    own = [
        p for p in (weights(module) if module is not None and odd.owner is not None else ()) if str(p.device) != home
    ]
    one = [odd.value, *own] + [p.value for p in away if p.value.data_ptr() == odd.value.data_ptr()]
    for moved in (one, [p.value for p in away]):
        trial = _moved(moved, home, context)
        if trial is None or trial.worked:
            mine = {p.name: f"to({facts.target})" for p in away if p.known and any(p.value is m for m in moved)}
            cure = (
                edited(context, code, mine, trial, kept=True)
                if odd.owner is None and facts.why not in ("attribute", "list")
                else TriedFix(code, None if trial is None else True, trial.after if trial is not None else {})
            )
            if facts.why in ("attribute", "list") and cure.edit is None:
                edit = _registration(facts, context)
                worked = None if trial is None else True
                cure = dataclasses.replace(cure, edit=edit, worked=worked) if edit is not None else cure
            return dataclasses.replace(facts, cure=cure, together=moved is not one and trial is not None)
    return dataclasses.replace(facts, cure=TriedFix(code))


def _moved(tensors: list[torch.Tensor], home: str, context: ErrorContext) -> TrialResult | None:
    if any(t.is_meta for t in tensors) or sum(t.numel() for t in tensors) > SMALL:
        return None
    try:
        swap: dict[int | str, torch.Tensor] = {id(t): t.detach().to(home) for t in tensors}
    except Exception:  # a device that is full or has failed: the fix is not tried
        return None
    return rerun(context, swap)


def _parallel(facts: DeviceFacts, context: ErrorContext) -> DeviceFacts:
    """DataParallel copies from its first device, so the module must be on it."""
    module = failing_module(context)
    devices = re.findall(r"device:? ([a-z]+(?::\d+)?)", context.message)
    counts = Counter(str(p.device) for p in (weights(module) if module is not None else ()))
    home = devices[0] if devices else ""
    target = f'"{devices[0]}"' if devices else "device"
    return dataclasses.replace(facts, why="model", owner=facts.op, home=home, counts=dict(counts), target=target)


def _state(context: ErrorContext) -> dict[str, Any] | None:
    """In an optimizer's step: a parameter whose state is on another device."""
    if not any(frame.site.file.startswith(torch.optim.__path__[0]) for frame in context.trail):
        return None
    names = OperandNames(context)
    for variable, optimizer in context.owners.optimizers.items():
        for parameter, state in dict.items(optimizer.state):
            for key, value in dict.items(state) if isinstance(state, dict) else ():
                if is_tensor(value) and value.ndim and value.device != parameter.device:
                    owner, name = names.weights.get(id(parameter), ("", "a parameter"))
                    whose = f"{owner}.{name}".strip(".")
                    fact = OpArgument(value, f"{variable}.state[{whose}][{key!r}]").fact()
                    partner = ArgumentFact(OpArgument(parameter, whose).fact(), owner=owner)
                    return {
                        "odd": ArgumentFact(fact),
                        "partner": partner,
                        "home": str(parameter.device),
                        "owner": variable,
                        "parameter": whose,
                        "attribute": str(key),
                    }
    return None


def _unreadable(facts: DeviceFacts, parts: list[OpArgument], context: ErrorContext) -> DeviceFacts | None:
    """A tensor whose values are needed on the CPU: it is on a GPU, or on meta, without values."""
    moves = [f.names.get("self") for f in context.trail if f.site.function in ("to", "cpu", "cuda", "_apply")]
    root: Any = next((thing for thing in moves if issubclass(type(thing), nn.Module)), None)
    if facts.kind == "no data" and root is not None:
        counts = Counter(str(p.device) for p in weights(root))
        name = OperandNames(context).module(root)
        return dataclasses.replace(facts, why="model", owner=name, home="meta", counts=dict(counts))
    device = "meta" if facts.kind == "no data" else None
    tensors = [p for p in parts if str(p.value.device) == device or device is None and p.value.device.type != "cpu"]
    tensors = tensors or [p for p in _variables(context, parts) if p.value.device.type != "cpu"]
    if not tensors:
        return facts if facts.kind == "numpy" else dataclasses.replace(facts, home="meta")
    odd = next((p for p in tensors if p.role == "lengths"), tensors[0])
    name = bracketed(odd.name) if odd.known else "lengths" if odd.role == "lengths" else "x"
    code = f"{name}.detach().cpu()" if odd.value.requires_grad else f"{name}.cpu()"
    return dataclasses.replace(
        facts, odd=odd.plain(), home="cpu", cure=TriedFix(code) if facts.kind == "numpy" else None
    )


def _generator(facts: DeviceFacts, context: ErrorContext) -> DeviceFacts:
    """Random numbers for a GPU from a generator of the CPU, or the reverse."""
    devices = re.findall(r"'(\w+)'", context.message)
    names = [text for frame in context.users for text, value in operands(frame) if type(value) is torch.Generator]
    loads = any(frame.site.file.endswith(("dataloader.py", "sampler.py")) for frame in context.trail)
    why = "loader" if loads else "variable"
    home = devices[0] if devices else ""
    target = f'"{devices[0]}"' if devices else "device"
    return dataclasses.replace(facts, why=why, home=home, attribute=names[0] if names else "", target=target)
