"""What is not the tensor that was meant: a tuple, a dict or None in its place, a tensor that NumPy can't take, an
iterator at its end. The object is found in the frames by its class, and the entries of it are tried on copies."""

from __future__ import annotations

import ast
import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.observe.frames import Frame
from nbdebug.observe.sources import edit_of
from nbdebug.observe.variables import attributes, class_attribute, key_text, named_children
from nbdebug.report import Edit, Link
from nbdebug.tools.errors.autograd.functions import function_source
from nbdebug.tools.errors.context import ErrorContext, fact, is_tensor
from nbdebug.tools.errors.facts import TriedFix
from nbdebug.tools.errors.operands import OperandNames, library_frames, raised_by_user, raised_facts
from nbdebug.tools.errors.origin import ExpressionBinding, origin_of
from nbdebug.tools.errors.rules.objects import AttachedFacts, IteratorFacts, ObjectFacts
from nbdebug.tools.errors.sandbox import rerun
from nbdebug.tools.errors.syntax import callee_name
from nbdebug.tools.errors.values import UNKNOWN, expression, operands, statement, value_of

ARGUMENT = re.compile(
    r"(\w+)\(\): argument '\w+'(?: \(position \d+\))? must be (?:Tensor|tuple of Tensors), not ([\w.]+)"
)
ATTRIBUTE = re.compile(r"'([\w.]+)' object has no attribute '(?!backward')(\w+)'")  # of a loss: see no_grad
INDEX = re.compile(r"(tuple|list) indices must be integers or slices, not (?:tuple|str)")
OPERAND = re.compile(r"unsupported operand type\(s\) for (\S+): '([\w.]+)' and '([\w.]+)'")
COMBINATION = re.compile(r"(\w+)\(\) received an invalid combination of arguments - got \(([\w.]+)")
ELEMENT = re.compile(r"expected Tensor as element \d+ in argument \d+, but got ([\w.]+)")
SLICE = re.compile(r"unhashable type: 'slice'|KeyError: slice")
MESSAGES = (ARGUMENT, ATTRIBUTE, INDEX, OPERAND, COMBINATION, ELEMENT, SLICE)
BEST = ("logits", "last_hidden_state", "out", "output", "prediction_logits", "sample", "x", "image", "images", "loss")
"""Entries of a dict that are tried first: the main result in transformers, torchvision and diffusers."""
MOST = 12
MOVES = ("to", "cuda", "cpu")


def detect(context: ErrorContext) -> ObjectFacts | None:
    """The facts of an object in the place of a tensor; None of any other error."""
    message = context.message
    if raised_by_user(context) or not any(pattern.search(message) for pattern in MESSAGES):
        return None
    kinds, need, taker = _wanted(message)
    if need.startswith("`.") and not hasattr(torch.Tensor, need.strip("`.")):
        return None
    found = next(_objects(context, kinds), None)
    if found is None:
        return None
    text, value = found
    if value is None:
        return _nothing(context, text)
    maker, source, way = _maker(context, text, value)
    entries = _entries(text, value)
    facts = ObjectFacts(
        raised_facts(context),
        text or (source[0] if source else ""),
        type(value).__name__,
        tuple(fact(name, tensor) for name, tensor in entries),
        need,
        _taker(context, value) or taker,
        maker,
        source[1] if source else "",
        inner=bool(source) and not text,
        way=way,
    )
    whole = _whole_dict(context, value)
    if whole is not None:
        return dataclasses.replace(facts, **whole)
    cures, edits = _cures(context, text, value, entries, need)
    return dataclasses.replace(facts, cures=cures, edits=edits)


def _wanted(message: str) -> tuple[tuple[str, ...], str, str]:
    """(the classes that the object may have, what was wanted of it, the function that got it)."""
    if match := ARGUMENT.search(message):
        return (match[2].rpartition(".")[2],), "a tensor", match[1]
    if match := ATTRIBUTE.search(message):
        return (match[1].rpartition(".")[2],), f"`.{match[2]}`", ""
    if match := INDEX.search(message):
        return (match[1],), "a tensor, which has several axes", ""
    if match := OPERAND.search(message):
        return tuple(kind for kind in (match[2], match[3]) if kind not in ("Tensor", "int", "float")), "a tensor", ""
    if match := COMBINATION.search(message):
        return (match[2].rpartition(".")[2],), "a tensor", match[1]
    if match := ELEMENT.search(message):
        return (match[1].rpartition(".")[2],), "a tensor", ""
    return ("dict",), "a tensor, which has several axes", ""


def _objects(context: ErrorContext, kinds: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """(text, object) of what can be meant, the surest first: of the message's class, and with tensors in it."""

    def fits(value: Any) -> bool:
        return type(value).__name__ in kinds and bool(_entries("it", value))

    own = AttributeError.__dict__["obj"].__get__(context.error) if type(context.error) is AttributeError else UNKNOWN
    named = [(text, value) for frame in context.users[:1] for text, value in operands(frame)]
    yield from ((text, value) for text, value in named if fits(value) and (own is UNKNOWN or value is own))
    if own is None and "NoneType" in kinds:
        yield from ((t, None) for t, value in named if value is None and _is_receiver(t, context.users[0]))
    texts = {id(value): text for text, value in reversed(named)}
    passed = (value for frame in library_frames(context) for value in frame.names.values())
    yield from ((texts.get(id(value), ""), value) for value in passed if fits(value))
    if fits(own):
        yield "", own


def _is_receiver(text: str, frame: Frame) -> bool:
    """Whether an attribute of this text is what the failing expression asks for."""
    node = expression(frame)
    return any(
        isinstance(n, ast.Attribute) and ast.unparse(n.value) == text for n in ast.walk(node or ast.Module([], []))
    )


def _entries(text: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in an object, by the text that gets them; [] of what is no container of tensors."""
    kind = type(value)
    pairs: list[tuple[str, Any]] = []
    if issubclass(kind, tuple):
        names = class_attribute(value, "_fields")
        items = tuple.__iter__(value)
        pairs = [
            (f"{text}.{names[i]}" if type(names) is tuple and i < len(names) else f"{text}[{i}]", item)
            for i, item in zip(range(MOST), items)
        ]
    elif kind is list:
        pairs = [(f"{text}[{i}]", item) for i, item in enumerate(value[:MOST])]
    elif issubclass(kind, dict):
        pairs = [(f"{text}[{key_text(key)}]", item) for key, item in list(dict.items(value))[:MOST]]
    elif issubclass(kind, collections.UserDict):
        inside = attributes(value).get("data")
        pairs = [(f"{text}[{key_text(k)}]", v) for k, v in list(inside.items())[:MOST]] if type(inside) is dict else []
    elif class_attribute(value, "__dataclass_fields__") is not None:
        pairs = [(f"{text}.{name}", item) for name, item in list(attributes(value).items())[:MOST]]
    return [(name, item) for name, item in pairs if is_tensor(item)]


def _nothing(context: ErrorContext, text: str) -> ObjectFacts | None:
    """The facts of None, where what made it is a function of the user's that returns nothing."""
    maker, _, way = _maker(context, text, None)
    if not maker or not way:
        return None
    call = ast.parse(maker, mode="eval").body
    for frame in context.users:
        function = value_of(call.func, frame) if isinstance(call, ast.Call) else UNKNOWN
        if issubclass(type(function), nn.Module):
            function = class_attribute(function, "forward")
        source = function_source(function) if function is not UNKNOWN else None
        if source is not None:
            if source.returned():
                return None
            need = ATTRIBUTE.search(context.message)
            return ObjectFacts(
                raised_facts(context), text, "NoneType", need=f"`.{need[2]}`" if need else "", maker=maker, way=way
            )
    return None


def _maker(context: ErrorContext, text: str, value: Any) -> tuple[str, tuple[str, str] | None, tuple[Link, ...]]:
    """(the user's call that made the object, (path, class) of the module that did, the way from there)."""
    for frame in reversed(context.trail):  # within a Sequential the layer before made it
        inside = list(named_children(frame.module).values()) if type(frame.module) is nn.Sequential else []
        now = frame.names.get("module")
        at = next((i for i, child in enumerate(inside) if child is now), 0)
        if frame.names.get("input") is value and at:
            return "", (OperandNames(context).module(inside[at - 1]), type(inside[at - 1]).__name__), ()

    def is_origin(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and callee_name(node) not in ("iter", "next", "enumerate", "to")

    way = origin_of(text, context, is_origin, lambda live: live is value) if text else ()
    if not way:
        return "", None, ()
    binding: ExpressionBinding = way[0]
    call = binding.maker or binding.node
    for frame in context.users:
        module = value_of(call.func, frame) if isinstance(call, ast.Call) else UNKNOWN
        if issubclass(type(module), nn.Module):
            source = (OperandNames(context).module(module), type(module).__name__)
            return ast.unparse(call), source, tuple(Link(b.phrase, b.where) for b in way)
    return ast.unparse(call), None, tuple(Link(b.phrase, b.where) for b in way)


def _taker(context: ErrorContext, value: Any) -> str:
    """The module of torch's that got the object."""
    for frame in library_frames(context):
        if frame.module is not None and any(item is value for item in frame.names.values()):
            return OperandNames(context).module(frame.module)
    return ""


def _whole_dict(context: ErrorContext, value: Any) -> dict[str, Any] | None:
    """Where a dict was passed whole to a module whose `forward` takes its keys: the fields that say so."""
    entries = _entries("it", value)
    keys = [re.sub(r"^it\[['\"](.*)['\"]\]$", r"\1", name) for name, _ in entries]
    if not keys or not (issubclass(type(value), (dict, collections.UserDict))):
        return None
    for frame, caller in zip(context.users, context.users[1:]):
        module, node = frame.module, expression(caller)
        code = getattr(class_attribute(module, "forward"), "__code__", None) if module is not None else None
        if code is None or not isinstance(node, ast.Call) or len(node.args) != 1 or frame.site.function != "forward":
            continue
        takes = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        mine = tuple(key for key in keys if key in takes)
        if not mine or value_of(node.args[0], caller) is not value:
            continue
        more = tuple(key for key in keys if key not in takes)
        name = ast.unparse(node.args[0])
        if more and not code.co_flags & 8:  # no **kwargs
            new = ", ".join(f"{key}={name}[{key!r}]" for key in mine)
        else:
            new = f"**{name}"
        return {
            "name": name,
            "taker": OperandNames(context).module(module),
            "keywords": mine,
            "others": more,
            "cures": (TriedFix(f"{ast.unparse(node.func)}({new})"),),
            "edits": (edit_of(caller.site.file, {node.args[0]: new}),),
            "raised": dataclasses.replace(
                raised_facts(context), where=dataclasses.replace(caller.where, phase="forward")
            ),
        }
    return None


def _cures(
    context: ErrorContext, text: str, value: Any, entries: list[tuple[str, torch.Tensor]], need: str
) -> tuple[tuple[TriedFix, ...], tuple[Edit | None, ...]]:
    """The entry that the line can go on with, as an edit of it, tried on copies: the first that works."""
    frame = context.users[0] if context.users else None
    node = _node_of(frame, text, value) if frame is not None and text else None
    if need.strip("`.") in MOVES and frame is not None and text:
        return _moves(frame, text, value)
    ranked = sorted(
        entries, key=lambda pair: next((i for i, k in enumerate(BEST) if k in pair[0].split(text or "it")[-1]), 99)
    )
    plain: list[tuple[str, torch.Tensor]] = []
    for name, tensor in ranked[:4]:
        trial = rerun(context, {id(value): tensor.detach()})
        if trial is not None and not trial.worked:
            continue
        edit = edit_of(frame.site.file, {node: "{}" + name.removeprefix(text)}) if frame is not None and node else None
        if trial is not None:
            return (
                TriedFix(name if text else "out, state = …", True if edit else None, trial.after if edit else {}),
            ), (edit,)
        plain.append((name, tensor))
    if not plain or not text:
        return (), ()
    name = plain[0][0]
    edit = edit_of(frame.site.file, {node: "{}" + name.removeprefix(text)}) if frame is not None and node else None
    return (TriedFix(name),), (edit,)


def _moves(frame: Frame, text: str, value: Any) -> tuple[tuple[TriedFix, ...], tuple[Edit | None, ...]]:
    """`batch.to(device)` of a list or a dict: each entry is moved."""
    call = expression(frame)
    while isinstance(call, (ast.Expr, ast.Assign, ast.Return)):
        call = call.value
    if isinstance(call, ast.Attribute):
        around = [n for n in ast.walk(statement(frame) or call) if isinstance(n, ast.Call) and n.func is call]
        call = around[0] if around else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return (), ()
    arguments = ", ".join(ast.unparse(a) for a in [*call.args, *(k.value for k in call.keywords)])
    move = f"{call.func.attr}({arguments})"
    if issubclass(type(value), (dict, collections.UserDict)):
        code = f"{{key: entry.{move} for key, entry in {text}.items()}}"
    else:
        code = f"[entry.{move} for entry in {text}]"
    return (TriedFix(code),), (edit_of(frame.site.file, {call: code}),)


def _node_of(frame: Frame, text: str, value: Any) -> ast.expr | None:
    """The expression of this text in the failing line."""
    for root in (expression(frame), statement(frame)):
        for node in ast.walk(root) if root is not None else ():
            if (
                isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
                and isinstance(node.ctx, ast.Load)
                and ast.unparse(node) == text
                and value_of(node, frame) is value
            ):
                return node
    return None


# -- NumPy -----------------------------------------------------------------------------------------------------------

ATTACHED = re.compile(r"Can't call numpy\(\) on Tensor that requires grad")


def detect_attached(context: ErrorContext) -> AttachedFacts | None:
    """The facts of a tensor of a graph that NumPy was to read; None of any other error."""
    if not ATTACHED.search(context.message) or not context.users:
        return None
    frame = context.users[0]
    own = [f.names["self"] for f in context.trail if f.site.function == "__array__" and is_tensor(f.names.get("self"))]
    named = [
        (text, value)
        for text, value in operands(frame)
        if is_tensor(value) and value.requires_grad and (not own or value is own[-1])
    ]
    node = expression(frame)
    call = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    direct = call is not None and callee_name(node) == "numpy"  # type: ignore[arg-type]
    value = named[0][1] if named else own[-1] if own else None
    text = ast.unparse(call) if direct and call is not None else named[0][0] if named else ""
    at = call if direct else _node_of(frame, text, value) if text else None
    facts = AttachedFacts(raised_facts(context), text, fact(text, value) if value is not None else None)
    if at is None:
        return facts
    off = value is None or value.device.type == "cpu"
    cut = ".detach()" if off else ".detach().cpu()"
    edit = edit_of(frame.site.file, {at: "{}" + cut})
    worked, after = None, {}
    converts = direct or bool(own)  # what failed is the conversion itself, by `.numpy()` or for NumPy's own function
    if converts and type(value) in (torch.Tensor, nn.Parameter) and value is not None and value_of(at, frame) is value:
        array = value.detach().cpu().numpy()
        worked, after = True, {"result": f"{array.dtype} array {list(array.shape)}"}
    return dataclasses.replace(facts, cure=TriedFix(f"{text}{cut}", worked, after), edit=edit)


# -- iterators -------------------------------------------------------------------------------------------------------


def detect_exhausted(context: ErrorContext) -> IteratorFacts | None:
    """The facts of an iterator without a further item; None of any other error."""
    stopped = context.type == "StopIteration" or "generator raised StopIteration" in context.message
    for frame in context.users if stopped else ():
        node = expression(frame)
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and callee_name(n) == "next"] if node else []
        if not calls or not calls[0].args:
            continue
        inside = calls[0].args[0]
        value = value_of(inside, frame)
        fresh = isinstance(inside, ast.Call) and callee_name(inside) == "iter"
        source = ast.unparse(inside.args[0]) if fresh and isinstance(inside, ast.Call) and inside.args else ""
        drawn = attributes(value).get("_num_yielded") if value is not UNKNOWN else 0 if fresh else None
        if not source:
            way = origin_of(ast.unparse(inside), context, lambda n: False, partial=True)
            made = [n for b in way for n in ast.walk(b.node) if isinstance(n, ast.Call) and callee_name(n) == "iter"]
            source = ast.unparse(made[-1].args[0]) if made and made[-1].args else ""
        name = ast.unparse(inside)
        return IteratorFacts(
            context.raised(),
            name,
            source,
            type(value).__name__ if value is not UNKNOWN else "",
            drawn if type(drawn) is int else None,
            _started_again(frame, name, source),
        )
    return None


def _started_again(frame: Frame, name: str, source: str) -> Edit | None:
    """The statement with `next`, which makes the iterator again where it ends."""
    line = statement(frame)
    if not source or not isinstance(line, (ast.Assign, ast.Expr)) or not name.isidentifier():
        return None
    text = ast.unparse(line)
    pad = " " * line.col_offset
    new = f"try:\n{pad}    {text}\n{pad}except StopIteration:\n{pad}    {name} = iter({source})\n{pad}    {text}"
    return edit_of(frame.site.file, {line: new})
