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
from nbdebug.observe.sources import edit_of, function_at, nodes_of, source, tree_of
from nbdebug.observe.variables import attributes, class_attribute, key_text, members, named_children, named_modules
from nbdebug.report import Edit, Link
from nbdebug.text import listed, module_name
from nbdebug.tools.errors.autograd.functions import function_source
from nbdebug.tools.errors.context import (
    UNKNOWN,
    ErrorContext,
    callee_name,
    calls_in,
    expression,
    fact,
    is_tensor,
    operands,
    statement,
    value_of,
)
from nbdebug.tools.errors.kinds.calls import call_facts
from nbdebug.tools.errors.operands import (
    ExpressionBinding,
    OperandNames,
    argument_texts,
    library_frames,
    origin_of,
    raised_by_user,
    raised_facts,
)
from nbdebug.tools.errors.rules import TriedFix
from nbdebug.tools.errors.rules.calls import AttachedFacts, CallFacts, IteratorFacts, ObjectFacts
from nbdebug.tools.errors.sandbox import rerun

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
    text, value = next(_objects(context, kinds), ("", UNKNOWN))
    if value is UNKNOWN:
        return None
    if value is None:
        return _nothing(context, text)
    maker, source, way = _maker(context, text, value)
    if source is not None and not maker:
        text = ""  # what the user gave the Sequential is another value
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
    if match := OPERAND.search(message):
        return tuple(kind for kind in (match[2], match[3]) if kind not in ("Tensor", "int", "float")), "a tensor", ""
    if match := ATTRIBUTE.search(message):
        return (match[1].rpartition(".")[2],), f"`.{match[2]}`", ""
    if match := ARGUMENT.search(message) or COMBINATION.search(message):
        return (match[2].rpartition(".")[2],), "a tensor", match[1]
    if match := ELEMENT.search(message):
        return (match[1].rpartition(".")[2],), "a tensor", ""
    match = INDEX.search(message)
    return (match[1] if match else "dict",), "a tensor, which has several axes", ""


def _objects(context: ErrorContext, kinds: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """(text, object) of what can be meant, the surest first: of the message's class, and with tensors in it."""

    def fits(value: Any) -> bool:
        return type(value).__name__ in kinds and bool(_entries("it", value))

    own = AttributeError.__dict__["obj"].__get__(context.error) if type(context.error) is AttributeError else UNKNOWN
    named = [(text, value) for frame in context.users[:1] for text, value in operands(frame)]
    yield from ((text, value) for text, value in named if fits(value) and (own is UNKNOWN or value is own))
    if own is None and "NoneType" in kinds:
        ran = ast.walk(context.ran or ast.Module([], []))
        asked = {ast.unparse(n.value) for n in ran if isinstance(n, ast.Attribute)}
        yield from ((text, None) for text, value in named if value is None and text in asked)
    texts = {**argument_texts(context), **{id(value): text for text, value in reversed(named)}}
    passed = (value for frame in library_frames(context) for value in frame.names.values())
    yield from ((texts.get(id(value), ""), value) for value in passed if fits(value))
    if fits(own):
        yield "", own


def _entries(text: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in an object, by the text that gets them; [] of what is no container of tensors."""
    kind = type(value)
    pairs: list[tuple[str, Any]] = []
    if issubclass(kind, tuple):
        names = class_attribute(value, "_fields") or class_attribute(value, "__match_args__")
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
        new = f"**{name}"
        if more and not code.co_flags & 8:  # no **kwargs
            new = ", ".join(f"{key}={name}[{key!r}]" for key in mine)
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
    frame = context.frame
    node = _node_of(frame, text, value) if frame is not None and text else None
    if need.strip("`.") in MOVES and frame is not None and text:
        return _moves(frame, text, value)
    beside = [other.dtype for _, other in operands(frame, whole=True) if is_tensor(other)] if frame is not None else []

    def rank(pair: tuple[str, torch.Tensor]) -> tuple[int, bool]:
        main = next((i for i, k in enumerate(BEST) if k in pair[0].split(text or "it")[-1]), 99)
        return main, bool(beside) and pair[1].dtype not in beside

    stacked = _stacked(context, text, value, entries)
    if stacked is not None and frame is not None and node is not None:
        return (stacked,), (edit_of(frame.site.file, {node: stacked.code}),)
    plain: list[tuple[str, torch.Tensor]] = []
    for name, tensor in sorted(entries, key=rank)[:4]:
        trial = rerun(context, {id(value): tensor.detach()})
        if trial is not None and not trial.worked:
            continue
        edit = edit_of(frame.site.file, {node: "{}" + name.removeprefix(text)}) if frame is not None and node else None
        if trial is not None:
            worked, after = (True, trial.after) if edit else (None, {})
            return (TriedFix(name if text else "out, state = …", worked, after),), (edit,)
        plain.append((name, tensor))
    if not plain or not text:
        return (), ()
    name = plain[0][0]
    edit = edit_of(frame.site.file, {node: "{}" + name.removeprefix(text)}) if frame is not None and node else None
    return (TriedFix(name),), (edit,)


def _stacked(context: ErrorContext, text: str, value: Any, entries: list[tuple[str, torch.Tensor]]) -> TriedFix | None:
    """A list of tensors of one shape as one tensor, where the line can go on with it."""
    if type(value) is not list or not text or len(entries) < 2 or len({tensor.shape for _, tensor in entries}) > 1:
        return None
    if len(value) > MOST or len(entries) < len(value):
        return None
    trial = rerun(context, {id(value): torch.stack([tensor.detach() for _, tensor in entries])})
    return TriedFix(f"torch.stack({text})", True, trial.after) if trial is not None and trial.worked else None


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
            if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) or ast.unparse(node) != text:
                continue
            if isinstance(node, ast.Call) or isinstance(node.ctx, ast.Load) and value_of(node, frame) is value:
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
    if not named and own and (inside := _list_of(frame, own[-1])) is not None:
        part, text = inside
        edit = edit_of(frame.site.file, {part: f"[part.detach() for part in {text}]"})
        return AttachedFacts(raised_facts(context), text, fact(text, own[-1]), TriedFix(""), edit)
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


def _list_of(frame: Frame, tensor: torch.Tensor) -> tuple[ast.expr, str] | None:
    """The list in the failing line that holds a tensor."""
    for text, value in operands(frame):
        if type(value) in (list, tuple) and any(item is tensor for item in value):
            part = _node_of(frame, text, value)
            return (part, text) if part is not None else None
    return None


# -- iterators -------------------------------------------------------------------------------------------------------


def detect_exhausted(context: ErrorContext) -> IteratorFacts | None:
    """The facts of an iterator without a further item; None of any other error."""
    stopped = context.type == "StopIteration" or "generator raised StopIteration" in context.message
    for frame in context.users if stopped else ():
        node = expression(frame)
        calls = [n for n in calls_in(node) if callee_name(n) == "next"]
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
        kind = type(value).__name__ if value is not UNKNOWN else ""
        edit = _started_again(frame, name, source)
        return IteratorFacts(context.raised(), name, source, kind, drawn if type(drawn) is int else None, edit)
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


# -- loaders that are taken for iterators or lists ---------------------------------------------------------------------


def detect_no_iterator(context: ErrorContext) -> CallFacts | None:
    """The facts of a loader that is given to `next`, indexed, or asked for a method `next`; None of any other error."""
    frame, node = context.frame, context.ran
    whole = statement(frame) if frame is not None else None
    for part in ast.walk(node) if node is not None and frame is not None else ():
        what = code = ""
        changed: ast.AST = part
        if isinstance(part, ast.Subscript) and context.message.endswith("is not subscriptable"):
            base, what, key = part.value, "index", ast.unparse(part.slice)
            code = "next(iter({}))" if key == "0" else f"{{}}.dataset[{key}]"
        elif isinstance(part, ast.Call) and callee_name(part) == "next" and context.message.endswith("not an iterator"):
            base, what, code = part.args[0], "next", "next(iter({}))"
        elif isinstance(part, ast.Attribute) and part.attr == "next" and "has no attribute" in context.message:
            base, what, code = part.value, "next method", "next({})"
            changed = next((n for n in ast.walk(whole or part) if isinstance(n, ast.Call) and n.func is part), part)
        value = value_of(base, frame) if what and frame is not None else UNKNOWN
        loader = issubclass(type(value), torch.utils.data.DataLoader)
        if what and frame is not None and (loader or what == "next method" and hasattr(type(value), "__next__")):
            text = ast.unparse(base)
            edit, title = edit_of(frame.site.file, {changed: code.replace("{}", text)}), "Take it from an iterator."
            return call_facts(context, what, text, edit, title=title, value=type(value).__name__)
    return None


# -- values and the names for them -------------------------------------------------------------------------------------

UNPACK = re.compile(r"(too many|not enough) values to unpack \(expected (?:at least )?(\d+)(?:, got (\d+))?")
COUNTERS = re.compile(r"i|j|k|n|idx|index|step|it|num|number|batch_(i|idx|index|num)|iteration")


def detect_unpacking(context: ErrorContext) -> CallFacts | None:
    """The facts of an assignment or a loop with names for another number of values; None of any other error."""
    frame, match = context.frame, UNPACK.search(context.message)
    line = statement(frame) if frame is not None else None
    if match is None:
        return _keys_of_dict(context)
    if context.trail and not context.trail[-1].users or frame is None or line is None:
        return None
    node = expression(frame)
    loop = line if isinstance(line, (ast.For, ast.comprehension)) else None
    own = node if isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Store) else None
    target = own or (loop.target if loop is not None else line.targets[0] if isinstance(line, ast.Assign) else None)
    source_node = loop.iter if loop is not None else getattr(line, "value", None)
    if not isinstance(target, (ast.Tuple, ast.List)) or source_node is None:
        return None
    while isinstance(source_node, ast.Call) and callee_name(source_node) in ("enumerate", "tqdm"):
        source_node = source_node.args[0]  # the names that fail are the inner
    outer = loop.target if loop is not None else line.targets[0] if isinstance(line, ast.Assign) else target
    if own is not None and own is not outer and any(n is own for n in ast.walk(outer)):
        return _inner_unpacked(context, frame, own, outer, source_node, loop is not None)
    what, edit, title, number = _unpacked(frame, target, source_node, loop is not None, match)
    if not what:
        return None
    names = str(len(target.elts))
    return call_facts(context, what, ast.unparse(source_node), edit, title=title, callee=names, value=str(number))


def _inner_unpacked(
    context: ErrorContext, frame: Frame, inner: ast.Tuple | ast.List, outer: ast.expr, node: ast.expr, loop: bool
) -> CallFacts | None:
    """Names within names: a loop that wanted to count, the state of a GRU, which is one tensor."""
    file, name = frame.site.file, ast.unparse(node)
    first = ast.unparse(outer.elts[0]) if isinstance(outer, ast.Tuple) else ""
    if loop and COUNTERS.fullmatch(first):
        return call_facts(context, "number", name, edit_of(file, {node: "enumerate({raw})"}), title="Count them.")
    module = value_of(node.func, frame) if isinstance(node, ast.Call) else UNKNOWN
    if type(module) not in (nn.GRU, nn.RNN):
        return None
    tree = tree_of(file)
    later = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} if tree else set()
    unused = all(ast.unparse(part) not in later for part in inner.elts[1:])
    edit = edit_of(file, {inner: ast.unparse(inner.elts[0])}) if unused else None
    return call_facts(context, "one state", name, edit, title="Give it one name.", callee=str(len(inner.elts)))


def _unpacked(
    frame: Frame, target: ast.Tuple | ast.List, node: ast.expr, loop: bool, match: re.Match[str]
) -> tuple[str, Edit | None, str, Any]:
    """(what is wrong, the edit, what it does, how many values there are)."""
    file, value, first = frame.site.file, value_of(node, frame), ast.unparse(target.elts[0])
    if is_tensor(value) or type(value) is torch.Size or re.search(r"\.(shape|size\(\))$", ast.unparse(node)):
        return "", None, "", None  # of shapes, see there
    if loop and type(value) is dict:
        return "dict", edit_of(file, {node: "{}.items()"}), "Go through its entries.", ""
    named = {"parameters", "modules", "children", "buffers"}
    if loop and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in named:
        edit = edit_of(file, {node.func: source(file, node.func.value) + f".named_{node.func.attr}"})
        return "parameters", edit, "Ask for their names, too.", ""
    if match[1] == "too many" and not loop and (keys := _keys_of(node, frame, [])):
        names = [ast.unparse(part) for part in target.elts]
        taken = ", ".join(f"{'out' if i else '(out := {raw})'}[{key!r}]" for i, key in enumerate(names))
        edit = edit_of(file, {node: taken}) if {*names} <= {*keys} else None
        return "a dict", edit, "Take the entries by their keys.", listed(keys, 8)
    number = int(match[3]) if match[3] else _number_of(frame, node, loop)
    if loop and COUNTERS.fullmatch(first) and len(target.elts) in (2, (number or 0) + 1):
        inner = ", ".join(source(file, e) for e in target.elts[1:])
        inner = inner if len(target.elts) == 2 else f"({inner})"
        return "number", edit_of(file, {target: f"{first}, {inner}", node: "enumerate({raw})"}), "Count them.", ""
    if match[1] == "too many" and number is not None and number > len(target.elts):
        text = source(file, target)
        more = ", _" if number == len(target.elts) + 1 else ", *_"
        text = text[:-1].rstrip(", ") + more + text[-1] if text[:1] in "([" else text.rstrip(", ") + more
        return "too many", edit_of(file, {target: text}), "Give those that are not needed the name `_`.", number
    if match[1] == "not enough" and number is not None:
        module = value_of(node.func, frame) if isinstance(node, ast.Call) else UNKNOWN
        if type(module) is nn.LSTM and len(target.elts) == 3:
            out, *state = [source(file, part) for part in target.elts]
            return "nested", edit_of(file, {target: f"{out}, ({', '.join(state)})"}), "The state is a pair.", number
        return "too few", None, "", number
    return "", None, "", None


def _number_of(frame: Frame, node: ast.expr, loop: bool) -> int | None:
    """How many values an expression, or each item of a loader, has."""
    value: Any = value_of(node, frame)
    if issubclass(type(value), torch.utils.data.DataLoader):
        value = attributes(value).get("dataset")
        value = value.dataset if type(value) is torch.utils.data.Subset else value
        if type(value) is torch.utils.data.TensorDataset:
            return len(value.tensors)
        returned = _returned(class_attribute(value, "__getitem__"))
    elif loop:
        item: Any = value[0] if type(value) in (list, tuple) and value else None
        return len(item) if type(item) in (list, tuple) else None
    elif type(value) in (list, tuple):
        return len(value)
    else:
        function = value_of(node.func, frame) if isinstance(node, ast.Call) else None
        returned = _returned(
            class_attribute(function, "forward") if issubclass(type(function), nn.Module) else function
        )
    numbers = {len(one.elts) if isinstance(one, ast.Tuple) else None for one in returned}
    return numbers.pop() if len(numbers) == 1 else None


def _returned(function: Any) -> list[ast.expr]:
    code = function_source(function)
    return [node for node, _ in code.returned()] if code is not None else []


def _keys_of_dict(context: ErrorContext) -> CallFacts | None:
    """The key of a dict, which a loop over a loader, or an unpacking, took for its entry."""
    for frame in context.users:
        file, line = frame.site.file, frame.site.line
        texts = {n: v for n, v in operands(frame, whole=True) if type(v) is str and n.isidentifier()}
        for node in nodes_of(file) if texts else ():
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)] if target is not None else []
            name = next((n for n in names if n in texts), "")
            if not name or function_at(file, node.lineno) is not function_at(file, line):  # type: ignore[attr-defined]
                continue
            if isinstance(node, ast.For) and node.lineno <= line <= (node.end_lineno or 0):
                at = node.iter.args[0] if callee_name(node.iter) in ("enumerate", "tqdm") else node.iter  # type: ignore[attr-defined]
                loader = value_of(at, frame)
                dataset = (
                    attributes(loader).get("dataset") if issubclass(type(loader), torch.utils.data.DataLoader) else None
                )
                keys = _keys_returned(class_attribute(dataset, "__getitem__"))
                what, title, new = "keys", "Take the entries of each batch.", "(batch.values() for batch in {})"
            elif isinstance(node, ast.Assign) and isinstance(target, ast.Tuple) and node.lineno < line:
                at, keys = node.value, _keys_of(node.value, frame, [frame.names.get(n) for n in names])
                what, title, new = "keys of", "Take its entries.", "{}.values()"
            else:
                continue
            if texts[name] in keys:
                edit, text = edit_of(file, {at: new}), ast.unparse(at)
                return call_facts(context, what, name, edit, title=title, callee=text, value=texts[name])
    return None


def _keys_of(node: ast.expr, frame: Frame, values: list[Any]) -> list[Any]:
    """The keys of the dict that an expression gave, of which these values are the first; [] where it may be none. What
    a module returns is never a number of names."""
    value: Any = value_of(node, frame)
    if issubclass(type(value), (dict, collections.UserDict)):
        return list(value.keys())
    called = value_of(node.func, frame) if isinstance(node, ast.Call) else UNKNOWN
    if issubclass(type(called), nn.Module) and values and all(type(value) is str for value in values):
        return values
    return _keys_returned(called)


def _keys_returned(function: Any) -> list[Any]:
    """The keys of the dicts that a function returns."""
    if issubclass(type(function), nn.Module):
        function = class_attribute(function, "forward")
    keys: list[Any] = []
    for one in _returned(function):
        if isinstance(one, ast.Dict):
            keys += [key.value for key in one.keys if isinstance(key, ast.Constant)]
        elif isinstance(one, ast.Call) and callee_name(one) == "dict":
            keys += [keyword.arg for keyword in one.keywords if keyword.arg]
    return keys


# -- what is within a wrapper ------------------------------------------------------------------------------------------


def detect_wrapped(context: ErrorContext) -> CallFacts | None:
    """The facts of an attribute of the object within the one that was asked; None of any other error."""
    match = re.search(r"'[\w.]+' object has no attribute '(\w+)'", context.message)
    frame = context.frame
    node = expression(frame) if frame is not None and match is not None else None
    node = node.func if isinstance(node, ast.Call) else node
    if frame is None or match is None or not isinstance(node, ast.Attribute) or node.attr != match[1]:
        return None
    value, text, name = value_of(node.value, frame), ast.unparse(node.value), match[1]
    if not module_name(type(value)).startswith("torch.") or is_tensor(value):
        return None
    inside = {k: members(value).get(k) for k in ("module", "dataset", "optimizer", "base_optimizer")}
    owners = [
        k
        for k, part in inside.items()
        if part is not None and (name in members(part) or class_attribute(part, name, UNKNOWN) is not UNKNOWN)
    ]
    if len(owners) != 1:
        return None
    held, new = members(inside[owners[0]]).get(name), f"{{}}.{owners[0]}.{name}"
    if type(value) is torch.utils.data.Subset and is_tensor(held):
        new += "[{}.indices]"
    elif type(value) is torch.utils.data.Subset and type(held) is list and len(held) > max(value.indices, default=0):
        new = "[" + new + "[i] for i in {}.indices]"
    edit, kind = edit_of(frame.site.file, {node: new.replace("{}", text)}), type(value).__name__
    return call_facts(context, "", text, edit, title="Ask the object within.", callee=name, value=kind)


# -- copies of a graph -------------------------------------------------------------------------------------------------


def detect_copy(context: ErrorContext) -> CallFacts | None:
    """The facts of a tensor with a history in what is to be copied; None of any other error."""
    if "support the deepcopy protocol" not in context.message or not context.users:
        return None
    frame, last = context.users[0], context.trail[-1]
    tensor = last.names.get("self")
    node = expression(frame)
    copied = node.args[0] if isinstance(node, ast.Call) and node.args else None
    value: Any = value_of(copied, frame) if copied is not None else UNKNOWN
    if value is tensor and copied is not None:
        edit = edit_of(frame.site.file, {node: source(frame.site.file, copied) + ".detach().clone()"})  # type: ignore[dict-item]
        return call_facts(context, "", ast.unparse(copied), edit, title="Copy its values.")
    for model in [value] if issubclass(type(value), nn.Module) else context.owners.models.values():
        for path, part in named_modules(model):
            for name, held in attributes(part).items():
                if held is tensor:
                    callee = ".".join(filter(None, (OperandNames(context).module(model), path)))
                    what = "weight norm" if f"{name}_g" in attributes(part).get("_parameters", {}) else "attribute"
                    edit = _without_graph(part, name) if what == "attribute" else None
                    title = "Keep it without its graph."
                    return call_facts(context, what, f"{callee}.{name}", edit, title=title, callee=callee)
    return call_facts(context, "inside", ast.unparse(copied) if copied is not None else "The object")


def _without_graph(module: nn.Module, name: str) -> Edit | None:
    """The only assignment of a tensor to an attribute, in the methods of its class, with `detach()`."""
    methods = [function_source(value) for kind in type(module).__mro__ for value in vars(kind).values()]
    own = f"self.{name}"
    lines = [
        (code, line)
        for code in methods
        if code is not None
        for line in code.statements()
        if isinstance(line, ast.Assign) and [own] == [*map(ast.unparse, line.targets)]
        if not isinstance(line.value, ast.Constant)
    ]
    if len(lines) != 1:
        return None
    code, line = lines[0]
    reads = [(c, n) for c in methods if c is not None for n in ast.walk(c.node) if _reads(n, own)]
    if not reads:
        return edit_of(code.source.file, {line.value: "{}.detach()"})
    local = {n.id for n in ast.walk(code.node) if isinstance(n, ast.Name)} | {*code.positional}
    if name in local or any(c.node is not code.node or n.lineno <= line.lineno for c, n in reads):  # type: ignore[attr-defined]
        return None  # what is computed from it must keep its graph
    pad = " " * line.col_offset
    kept = f"{name} = {source(code.source.file, line.value)}\n{pad}{own} = {name}.detach()"
    return edit_of(code.source.file, {line: kept, **{n: name for _, n in reads}})


def _reads(node: ast.AST, text: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node) == text


# -- pickle ------------------------------------------------------------------------------------------------------------

REFUSED = re.compile(
    r"(?i)can't (?:pickle|get) local object '([\w.<>]+)'|cannot pickle '([\w.]+)' object|can't pickle <?(\w+)"
)


def detect_pickle(context: ErrorContext) -> CallFacts | None:
    """The facts of a module that `torch.save` can't store whole; None of any other error."""
    match, frame = REFUSED.search(context.message), context.frame
    call = expression(frame) if frame is not None else None
    saves = isinstance(call, ast.Call) and callee_name(call) == "save" and call.args
    if match is None or frame is None or not isinstance(call, ast.Call) or not saves:
        return None
    model = value_of(call.args[0], frame)
    if not issubclass(type(model), nn.Module):
        return None
    kinds = {group.rpartition(".")[2] for group in match.groups() if group}
    held = [
        f"{path}.{name}".lstrip(".")
        for path, part in named_modules(model)
        for name, value in attributes(part).items()
        if getattr(value, "__qualname__", "") == match[1] or type(value).__name__ in kinds
    ]
    text = ast.unparse(call.args[0])
    name = f"{text}.{held[0]}" if held else text
    edit = edit_of(frame.site.file, {call.args[0]: "{}.state_dict()"})
    title, value = (
        "Save the weights alone: they are loaded into a model that the code makes.",
        match[1] or match[2] or "",
    )
    return call_facts(context, "" if held else "whole", name, edit, title=title, callee=text, value=value)
