"""Calls that torch or Python refuses: an argument that is missing, unknown or of another kind, a module that is not
complete, calls in a wrong order, values of another number than the names for them.

What is called, and with what, stands in the failing line; what it takes is read from its code. A detector gives the
change of the user's line; `autograd.trials` reads the program with it."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import linecache
import re
from types import BuiltinFunctionType, BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import cell_name
from nbdebug.observe.sources import ATOMS, codes_of, edit_of, nodes_of, parents, source, tree_of, with_keyword
from nbdebug.observe.variables import attributes, class_attribute
from nbdebug.report import Edit, Fix
from nbdebug.text import module_name
from nbdebug.tools.errors.autograd.functions import function_source, unwrap
from nbdebug.tools.errors.context import (
    UNKNOWN,
    ErrorContext,
    callee_name,
    calls_in,
    expression,
    fact,
    is_tensor,
    operands,
    shape_of,
    statement,
    value_of,
)
from nbdebug.tools.errors.operands import OperandNames, library_frames, raised_by_user, raised_facts
from nbdebug.tools.errors.rules.calls import CallFacts

METHODS = (BuiltinFunctionType, BuiltinMethodType, MethodType, FunctionType, type(torch.Tensor.add))
MISSING = re.compile(r"(\w+)\(\) missing \d+ required (?:positional|keyword-only) arguments?: (.+)")
UNEXPECTED = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")
TOO_MANY = re.compile(r"(\w+)\(\) takes (?:from \d+ to )?(\d+) positional arguments? but (\d+) w")
MONITORED = re.compile(
    r"conditioned on metric `?([^\s`]+)`? which is not available|monitor='([^']+)'\) could not find the monitored key"
)
NO_LABELS = re.compile(r"did not return a loss from the inputs.*inputs it received are (.+?)\.?$", re.DOTALL)
NOT_ITERABLE = re.compile(r"'(\w+)' object is not (?:iterable|subscriptable)|for \S+: '(\w+)' and|'\w+' and '(\w+)'")
FLOAT = re.compile(
    r"slice indices must be integers|but got float|'float' object cannot be interpreted as an integer|"
    r"must be (?:int|tuple of ints), not float|indices must be integers or slices, not float"
)


def detect(context: ErrorContext) -> CallFacts | None:
    """The facts of a call that does not fit what it calls; None of any other error."""
    frame, node = context.frame, context.ran
    if frame is None or node is None or raised_by_user(context):
        return None
    call = next(iter(calls_in(node)), None)
    for found in (_signature, _of_trainer, _kind_of_argument, _whole_number, _of_torch):
        facts = found(context, frame, node, call)
        if facts is not None:
            return facts
    return None


def call_facts(context: ErrorContext, what: str, name: str = "", edit: Edit | None = None, **more: Any) -> CallFacts:
    """title: of the edit; more: further fields of the facts."""
    title = more.pop("title", "")
    fixes = (Fix.of(title, edit),) if edit is not None else ()
    return CallFacts(raised_facts(context), what, name, fixes=fixes, **more)


# -- the arguments that it takes ---------------------------------------------------------------------------------------


def _signature(context: ErrorContext, frame: Frame, node: ast.AST, call: ast.Call | None) -> CallFacts | None:
    """A missing argument, one of an unknown name, or one too many."""
    message = context.message
    match = MISSING.search(message) or UNEXPECTED.search(message) or TOO_MANY.search(message)
    if match is None or call is None:
        return None
    code = _code_of(context, frame, call, match[1])
    takes = _parameters(code) if code is not None else ()
    callee = ast.unparse(call.func)
    if UNEXPECTED.search(message):
        title, edit = _without(frame, call, match[2], takes)
        return call_facts(context, "unexpected", match[2], edit, title=title, callee=callee, takes=takes)
    if TOO_MANY.search(message):
        edit = _with_self(code) if takes[:1] != ("self",) and int(match[3]) == int(match[2]) + 1 else None
        what = "no self" if edit is not None else "too many"
        title = "Add `self`, the object itself."
        return call_facts(context, what, match[3], edit, title=title, callee=callee, takes=takes, value=match[2])
    missing = re.findall(r"'(\w+)'", match[2])
    title, edit = _filled(frame, call, missing)
    return call_facts(context, "missing", ", ".join(missing), edit, title=title, callee=callee, takes=takes)


def _code_of(context: ErrorContext, frame: Frame, call: ast.Call, name: str) -> CodeType | None:
    """The code of the function that was called: the user's own, or a module's `forward`."""
    last = context.trail[-1]
    if name in ("forward", "__init__") and last.module is not None:
        function = class_attribute(last.module, name)
    else:
        function = value_of(call.func, frame)
        function = vars(function).get("__init__") if issubclass(type(function), type) else function
        if issubclass(type(function), nn.Module):
            function = class_attribute(function, "forward")
    code = getattr(unwrap(function), "__code__", None)
    return code if type(code) is CodeType else None


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _without(frame: Frame, call: ast.Call, name: str, takes: tuple[str, ...]) -> tuple[str, Edit | None]:
    """The call without an argument that its function does not take, or with the name that was meant."""
    keyword = next((k for k in call.keywords if k.arg == name), None)
    present = {k.arg for k in call.keywords}
    if keyword is not None:
        near = difflib.get_close_matches(name, [t for t in takes if t not in present], n=1, cutoff=0.7)
        text = source(frame.site.file, call)
        value = source(frame.site.file, keyword.value)
        new = f"{near[0]}={value}" if near else ""
        changed = re.sub(rf"\b{name}\s*=\s*{re.escape(value)}" + ("" if near else r"\s*,?\s*"), lambda m: new, text)
        changed = changed if near else re.sub(r",\s*\)$", ")", changed)
        title = f"It is called `{near[0]}`." if near else "Leave it out."
        return title, edit_of(frame.site.file, {call: changed}) if takes and text.count(f"{name}=") == 1 else None
    for part in call.keywords:
        entries = value_of(part.value, frame) if part.arg is None else UNKNOWN
        inside = attributes(entries).get("data") if type(entries).__name__ == "BatchEncoding" else entries
        if type(inside) is dict and name in inside and takes:
            more = [key for key in inside if key not in takes]
            text = source(frame.site.file, part.value)
            test = f"!= {more[0]!r}" if len(more) == 1 else f"not in {tuple(more)!r}"
            new = f"{{key: value for key, value in {text}.items() if key {test}}}"
            return "Leave these entries out.", edit_of(frame.site.file, {part.value: new})
    return "", None


def _with_self(code: CodeType | None) -> Edit | None:
    """The head of a method, with `self`."""
    file = code.co_filename if code is not None else ""
    for node in nodes_of(file) if code is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name and node.lineno >= code.co_firstlineno:  # type: ignore[union-attr]
            around = parents(tree_of(file) or ast.Module([], [])).get(id(node))
            first = next(iter(node.args.args), None)
            if not isinstance(around, ast.ClassDef) or first is None or node.decorator_list:
                return None
            return edit_of(file, {first: "self, {raw}"})
    return None


def _filled(frame: Frame, call: ast.Call, missing: list[str]) -> tuple[str, Edit | None]:
    """The call with the missing arguments, where the one that it has contains them, or the optimizer says what they
    are."""
    file, only = frame.site.file, call.args[0] if len(call.args) == 1 and not call.keywords else None
    owner = value_of(call.func.value, frame) if isinstance(call.func, ast.Attribute) else UNKNOWN
    value: Any = value_of(only, frame) if only is not None else UNKNOWN
    if type(value) in (tuple, list) and len(value) == len(missing) + 1 and only is not None:
        return "Pass its entries one by one.", edit_of(file, {only: "*{}"})
    if type(value) is dict and only is not None and set(missing) <= set(value):
        return "Pass its entries as arguments.", edit_of(file, {only: "**{}"})
    if type(owner) is torch.optim.LBFGS:
        return "Give it the computation of the loss: it is repeated within one step.", _closure(frame, call)
    if type(owner) is torch.optim.lr_scheduler.ReduceLROnPlateau and not call.args:
        numbers = {
            n for n, v in frame.names.items() if type(v) in (int, float) or type(v) is torch.Tensor and v.numel() == 1
        }
        losses = [name for name in frame.names if "loss" in name and name in numbers]
        name = max(losses, key=lambda name: ("val" in name, "avg" in name or "mean" in name), default="")
        edit = edit_of(file, {call: f"{ast.unparse(call.func)}({name})"}) if name else None
        return "Give it the value that it watches.", edit
    return "", None


def _closure(frame: Frame, call: ast.Call) -> Edit | None:
    """The statements before `optimizer.step()`, from `zero_grad()` or the loss to its backward, as a closure."""
    file, step = frame.site.file, statement(frame)
    tree = tree_of(file)
    block = parents(tree).get(id(step)) if tree is not None and step is not None else None
    body = next(
        (b for part in ("body", "orelse") if isinstance(b := getattr(block, part, None), list) and step in b), []
    )
    before = body[: body.index(step)] if step in body else []
    texts = [ast.unparse(one) for one in before]
    backward = next((i for i, text in enumerate(texts) if text.endswith(".backward()")), None)
    if step is None or backward is None or not isinstance(step, ast.Expr):
        return None
    owner, loss = ast.unparse(call.func).rpartition(".")[0], texts[backward].removesuffix(".backward()")
    clears = [i for i, text in enumerate(texts) if text.endswith(".zero_grad()") and i < backward]
    made = [i for i, text in enumerate(texts[:backward]) if re.match(rf"{re.escape(loss)}\s*=[^=]", text)]
    first = min([*clears, *made], default=backward)
    if not loss.isidentifier() or not made or backward + 1 != len(before):
        return None
    pad, lines = " " * step.col_offset, linecache.getlines(file)[before[first].lineno - 1 : step.end_lineno]
    old = "".join(lines).rstrip("\n")
    body_lines = "".join(lines[: step.lineno - before[first].lineno]).rstrip("\n").split("\n")
    head = [] if clears else [f"{pad}    {owner}.zero_grad()"]
    new = [f"{pad}def closure():", *head, *(f"    {text}" if text else text for text in body_lines)]
    new += [f"{pad}    return {loss}", f"{pad}{loss} = {owner}.step(closure)"]
    return Edit(file, before[first].lineno, step.end_lineno or 0, old, "\n".join(new), cell_name(file))


# -- what is passed ----------------------------------------------------------------------------------------------------


def _kind_of_argument(context: ErrorContext, frame: Frame, node: ast.AST, call: ast.Call | None) -> CallFacts | None:
    """A module for its parameters, or a method that is not called."""
    file, message = frame.site.file, context.message
    if "is not callable" in message:
        return _called(context, frame, node)
    loop = statement(frame) if "'int' object is not iterable" in message else None
    if isinstance(loop, ast.For) and (callee_name(loop.iter) == "len" or type(value_of(loop.iter, frame)) is int):
        edit = edit_of(file, {loop.iter: "range({raw})"})
        return call_facts(context, "number", ast.unparse(loop.iter), edit, title="Count up to it.")
    if "'generator' and 'generator'" in message or "one of the params is Module.parameters" in message:
        return _generators(context, frame, node)
    for part in ast.walk(node) if NOT_ITERABLE.search(message) else ():
        if not isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)) or any(
            n.func is part for n in calls_in(node)
        ):
            continue
        value, method = value_of(part, frame), _is_method(part, frame)
        if f"'{'builtin_function_or_method' if method else type(value).__name__}'" not in message:
            continue
        if method or type(value) in METHODS:
            return call_facts(context, "method", ast.unparse(part), edit_of(file, {part: "{}()"}), title="Call it.")
        if issubclass(type(value), nn.Module) and call is not None and _takes_parameters(context):
            edit, callee = edit_of(file, {part: "{}.parameters()"}), ast.unparse(call.func)
            return call_facts(context, "module", ast.unparse(part), edit, title="Pass its parameters.", callee=callee)
    return None


def _generators(context: ErrorContext, frame: Frame, node: ast.AST) -> CallFacts | None:
    """`a.parameters() + b.parameters()`, or a list of them: the parameters in one list."""
    for part in ast.walk(node):
        parts = (
            part.elts if isinstance(part, ast.List) else [part.left, part.right] if isinstance(part, ast.BinOp) else []
        )
        if len(parts) > 1 and all(callee_name(one) in ("parameters", "named_parameters") for one in parts):
            new = f"[{', '.join('*' + source(frame.site.file, one) for one in parts)}]"
            edit = edit_of(frame.site.file, {part: new})
            return call_facts(context, "generators", ast.unparse(part), edit, title="Put them into one list.")
    return None


def _is_method(part: ast.expr, frame: Frame) -> bool:
    """Whether it is a method of a tensor: `x.size`."""
    if not isinstance(part, ast.Attribute):
        return False
    owner = value_of(part.value, frame)
    inner = owner is UNKNOWN and part.attr in ("numel", "size", "dim", "item")  # of a comprehension's own variable
    return inner or is_tensor(owner) and callable(getattr(torch.Tensor, part.attr, None))


def _called(context: ErrorContext, frame: Frame, node: ast.AST) -> CallFacts | None:
    """What is called and is no function: `x.shape()`, a loss whose name was given to its result."""
    match = re.search(r"'([\w.]+)' object is not callable", context.message)
    kind = match[1].rpartition(".")[2] if match is not None else ""
    plain = {"Size": "shape", "dtype": "dtype", "device": "device"}.get(kind, "?")
    calls = [
        n
        for n in calls_in(node)
        if type(value_of(n.func, frame)).__name__ == kind or getattr(n.func, "attr", "") == plain
    ]
    if not calls or kind not in ("Tensor", "Size", "dtype", "device", "int", "Parameter"):
        return None
    edit, func = None, calls[0].func
    if isinstance(func, ast.Attribute):
        key = f"[{ast.unparse(calls[0].args[0])}]" if calls[0].args else ""
        edit = edit_of(frame.site.file, {calls[0]: source(frame.site.file, func) + key})
    return call_facts(context, "called", ast.unparse(func), edit, title="Read it without a call.", value=kind)


def _takes_parameters(context: ErrorContext) -> bool:
    """Whether torch's function that failed is an optimizer or one that works on gradients."""
    return any(re.search(r"[\\/]torch[\\/](optim|nn[\\/]utils)[\\/]", frame.site.file) for frame in context.trail)


def _whole_number(context: ErrorContext, frame: Frame, node: ast.AST, call: ast.Call | None) -> CallFacts | None:
    """A float where a whole number is needed: `/` for `//`."""
    if not FLOAT.search(context.message):
        return None
    file = frame.site.file
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div):
            sides = [
                source(file, side) if not isinstance(side, ast.BinOp) else f"({source(file, side)})"
                for side in (part.left, part.right)
            ]
            title = "Divide whole numbers."
            return call_facts(
                context, "float", ast.unparse(part), edit_of(file, {part: " // ".join(sides)}), title=title
            )
    for text, value in operands(frame):
        named = [n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute)) and ast.unparse(n) == text]
        if type(value) is float and named:
            edit = edit_of(file, {named[0]: "int({raw})"})
            return call_facts(context, "float", text, edit, title="Make it a whole number.", value=f"{value:g}")
    return None


def _of_trainer(context: ErrorContext, frame: Frame, node: ast.AST, call: ast.Call | None) -> CallFacts | None:
    """A metric that a callback watches and nothing logs; a model that got no labels from a Trainer."""
    message, callee = context.message, callee_name(call) if call is not None else ""
    if (bare := NO_LABELS.search(message)) is not None:
        return call_facts(context, "labels", bare[1].replace(",", "`, `"), callee=callee)
    match = MONITORED.search(message)
    if match is None:
        return None
    name = match[1] or match[2]
    logged = [one for one in re.findall(r"[`']([\w./-]+)[`']", message[match.end() :]) if one not in (name, "monitor")]
    logged = [one for one in logged if not one[:1].isupper() and one != "log"]
    near = difflib.get_close_matches(name, logged, n=1, cutoff=0.5)
    given = [n.value for n in nodes_of(frame.site.file) if isinstance(n, ast.keyword) and n.arg == "monitor"]
    texts = [value for value in given if isinstance(value, ast.Constant) and value.value == name]
    edit = edit_of(frame.site.file, {texts[0]: repr(near[0])}) if near and len(texts) == 1 else None
    shown = ", ".join(f"`{one}`" for one in dict.fromkeys(logged)) or "nothing"
    return call_facts(context, "monitor", name, edit, title="Watch what is logged.", callee=callee, value=shown)


def _of_torch(context: ErrorContext, frame: Frame, node: ast.AST, call: ast.Call | None) -> CallFacts | None:
    """What torch's own functions and classes refuse."""
    file, message, line = frame.site.file, context.message, statement(frame)
    if call is None and not message.startswith("cannot assign"):
        return None
    if message.startswith("cannot assign 'torch.") and isinstance(line, ast.Assign):
        name, made = ast.unparse(line.targets[0]), "nn" if frame.globals.get("nn") is nn else "torch.nn"
        edit = edit_of(file, {line.value: made + ".Parameter({raw})"})
        return call_facts(context, "parameter", name, edit, title="Make it a parameter.")
    if call is None:
        return None
    callee, function = ast.unparse(call.func), value_of(call.func, frame)
    values = [value_of(arg, frame) for arg in call.args]
    if "is not a Module subclass" in message and len(values) == 1 and type(values[0]) in (list, tuple, type(UNKNOWN)):
        edit = edit_of(file, {call.args[0]: "*{raw}"})
        return call_facts(
            context, "layers", ast.unparse(call.args[0]), edit, title="Pass them one by one.", callee=callee
        )
    if "must be tuple of Tensors, not Tensor" in message:
        title = "Put the tensors into one tuple."
        return call_facts(context, "tuple", callee, _joined(frame, call, values), title=title, callee=callee)
    below = [f for f in context.trail if not f.users and f.site.function == "__init__"]
    tensors = any(is_tensor(value) for f in below for value in f.names.values())
    if issubclass(type(function), type) and issubclass(function, nn.Module) and call.args and tensors:
        inside = ", ".join(source(file, k) for k in call.keywords)
        given = ", ".join(source(file, arg) for arg in call.args)
        edit = edit_of(file, {call: f"{callee}({inside})({given})"})
        return call_facts(
            context, "class", ast.unparse(call.args[0]), edit, title="Make it, then call it.", callee=callee
        )
    if match := re.search(r"device string: '?(\w+)", message):
        text = next((n for n in ast.walk(node) if isinstance(n, ast.Constant) and n.value == match[1]), None)
        new = '"cuda" if torch.cuda.is_available() else "cpu"'
        edit = edit_of(file, {text: new}) if text is not None and match[1] in ("gpu", "GPU", "nvidia") else None
        return call_facts(context, "device", match[1], edit, title="torch's name for a GPU is cuda.")
    return _state(context, frame, call)


def _joined(frame: Frame, call: ast.Call, values: list[Any]) -> Edit | None:
    """`cat(a, b)` with its tensors in a tuple, along the axis in which they differ."""
    shapes = [shape_of(value) for value in values if is_tensor(value)]
    texts = [source(frame.site.file, arg) for arg in call.args]
    first, rest = texts[: len(shapes)], [*texts[len(shapes) :], *(source(frame.site.file, k) for k in call.keywords)]
    if len(shapes) < 2 or any(shape is None for shape in shapes):
        return None
    if not rest and callee_name(call) in ("cat", "concat") and len({len(shape) for shape in shapes if shape}) == 1:
        axes = range(len(shapes[0] or ()))
        fits = [d for d in axes if len({(*s[:d], *s[d + 1 :]) for s in shapes if s is not None}) == 1]
        rest = [f"dim={fits[0]}"] if fits[:1] not in ([], [0]) else []
    return edit_of(
        frame.site.file, {call: f"{ast.unparse(call.func)}({', '.join(['(' + ', '.join(first) + ')', *rest])})"}
    )


def _state(context: ErrorContext, frame: Frame, call: ast.Call) -> CallFacts | None:
    """One tensor as the state of an LSTM, which has two."""
    for below in library_frames(context):
        state = below.names.get("hx")
        if type(below.module) is nn.LSTM and is_tensor(state):
            text = ast.unparse(call.args[1]) if len(call.args) > 1 else ""
            simple = re.fullmatch(r"[\w.]+", text) is not None
            edit = edit_of(frame.site.file, {call.args[1]: f"({text}, torch.zeros_like({text}))"}) if simple else None
            callee = OperandNames(context).module(below.module)
            title = "Give both: the output's state and the cell's."
            return call_facts(context, "state", text, edit, title=title, callee=callee)
    return None


# -- a module that is not complete -------------------------------------------------------------------------------------

NO_FORWARD = re.compile(r'Module \[(\w+)\] is missing the required "forward"')
NO_INIT = re.compile(r"cannot assign \w+ before Module\.__init__\(\) call")


def detect_module(context: ErrorContext) -> CallFacts | None:
    """The facts of a module without a `forward`, or whose `__init__` does not begin with torch's; None of any other
    error."""
    frame = context.frame
    if frame is None or not (NO_FORWARD.search(context.message) or NO_INIT.search(context.message)):
        return None
    if NO_INIT.search(context.message):
        code = next((n for n in nodes_of(frame.site.file) if _is_function(n, frame, "__init__")), None)
        first = next(
            (n for n in getattr(code, "body", ()) if not isinstance(getattr(n, "value", None), ast.Constant)), None
        )
        pad = " " * first.col_offset if first is not None else ""
        edit = edit_of(frame.site.file, {first: f"super().__init__()\n{pad}{{raw}}"}) if first is not None else None
        kind = type(frame.names.get("self")).__name__
        return call_facts(context, "no init", kind, edit, title="Begin with torch's own `__init__`.")
    module = next((f.module for f in reversed(context.trail) if f.module is not None and not f.users), None)
    if module is None:
        return None
    if module_name(type(module)).startswith("torch."):
        path, edit = OperandNames(context).module(module), _as_sequential(context, frame, module)
        title = "A Sequential calls its layers one after the other."
        return call_facts(context, "container", path, edit, title=title, value=type(module).__name__)
    methods = [v for kind in type(module).__mro__ for v in vars(kind).values() if type(v) is FunctionType]
    for method in methods:
        if any(code.co_name == "forward" for code in codes_of(method.__code__)) and (edit := _outdented(method)):
            kind, title = type(module).__name__, "Indent it as the other methods are."
            return call_facts(context, "nested", kind, edit, title=title, value=method.__name__)
    own = [method.__name__ for method in methods if not hasattr(nn.Module, method.__name__)]
    near = difflib.get_close_matches("forward", [name.lower() for name in own], n=1, cutoff=0.7)
    name = next((name for name in own if near and name.lower() == near[0]), "")
    edit = _renamed(class_attribute(module, name), name) if name else None
    return call_facts(context, "misspelt", type(module).__name__, edit, title="Call it `forward`.", value=name)


NAMES = re.compile(
    r"(?:module|parameter|buffer) name (?:should be a (string)|can\\?'t (?:contain (\".\")|be (empty)))|"
    r"(attribute) '.*' already exists|(it is not a string)"
)


def detect_name(context: ErrorContext) -> CallFacts | None:
    """The facts of a name that a module can't give to one of its parts; None of any other error."""
    match, frame, last = NAMES.search(context.message), context.frame, context.trail[-1] if context.trail else None
    names = last.names if last is not None else {}
    owner: Any = names.get("self")
    key = names.get("name", names.get("key", UNKNOWN))
    if match is None or frame is None or last is None or not issubclass(type(owner), nn.Module):
        return None
    what = "text" if match[1] or match[5] else "dot" if match[2] else "empty" if match[3] else "attribute"
    callee = kind = type(owner).__name__
    if what == "attribute" and class_attribute(owner, str(key), UNKNOWN) is not UNKNOWN:
        what, home = "taken", next(each for each in type(owner).__mro__ if str(key) in vars(each))
        callee = home.__name__ if home is not nn.Module else "nn.Module"
    edit = _registered(frame, owner, str(key), last.site.function) if what == "attribute" else None
    facts = call_facts(context, what, str(key), edit, title="Register it from the start.", callee=callee, value=kind)
    code = _other_name(frame, what, key)
    if edit is None and code:
        fix = Fix("Give it another name, here and wherever it is read.", code)
        facts = dataclasses.replace(facts, fixes=(fix,))
    return facts


def _other_name(frame: Frame, what: str, key: Any) -> str:
    """A name in place of the expression of the failing line that gave it: the key of a dict, an index, an argument."""
    change = {"text": "str({})", "dot": '{}.replace(".", "_")', "taken": '{} + "_"'}.get(what, "")
    line = statement(frame) if change else None
    for part in ast.walk(line) if line is not None else ():
        nodes: list[Any] = part.keys if isinstance(part, ast.Dict) else []
        nodes = [part.key] if isinstance(part, ast.DictComp) else nodes
        if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store):
            nodes = [part.slice]
        name = callee_name(part) if isinstance(part, ast.Call) and part.args else ""
        given = part.args[0] if isinstance(part, ast.Call) and name else None
        nodes = [given] if name.startswith(("register_", "add_module")) else nodes
        values = [(node, value_of(node, frame)) for node in nodes if node is not None]
        for node in [n for n, value in values if value is UNKNOWN or type(value) is type(key) and value == key]:
            text = ast.unparse(node)
            new = change.format(text if isinstance(node, ATOMS) else f"({text})")
            if isinstance(node, ast.Constant):
                new = repr(f"{key}_" if what == "taken" else str(key).replace(".", "_"))
            return f"{new}   # in place of {text}"
        if name.endswith("Dict") and isinstance(given, ast.Name):
            return f"{{{change.format('key')}: part for key, part in {given.id}.items()}}"
    return ""


def _registered(frame: Frame, owner: nn.Module, name: str, function: str) -> Edit | None:
    """The line of the user's that made the attribute, with what registers it in its place."""
    lines = [n for n in nodes_of(frame.site.file) if isinstance(n, ast.Assign) and n.lineno < frame.site.line]
    lines = [n for n in lines if [f"self.{name}"] == [*map(ast.unparse, n.targets)]]
    if len(lines) != 1 or frame.names.get("self") is not owner:
        return None
    value = ast.unparse(lines[0].value)
    fits = value == "None" or function == "register_buffer"
    return edit_of(frame.site.file, {lines[0]: f"self.{function}({name!r}, {value})"}) if fits else None


def _is_function(node: ast.AST, frame: Frame, name: str) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and node.name == name
        and node.lineno <= frame.site.line <= (node.end_lineno or 0)
    )


def _renamed(function: Any, name: str) -> Edit | None:
    """The head of a method under the name `forward`."""
    code = function_source(function)
    if code is None:
        return None
    text = linecache.getline(code.source.file, code.node.lineno).rstrip("\n")
    new = re.sub(rf"\bdef\s+{name}\b", "def forward", text)
    return Edit(code.source.file, code.node.lineno, code.node.lineno, text, new, cell_name(code.source.file))


def _outdented(method: Any) -> Edit | None:
    """A `forward` that stands inside of a method, behind it instead, as a method of its own."""
    code = function_source(method)
    body = [] if code is None else getattr(code.node, "body", [])
    inner = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "forward"), None)
    if code is None or inner is None:
        return None
    file, first, last = code.source.file, inner.lineno, body[-1].end_lineno or 0
    lines = [linecache.getline(file, n) for n in range(first, last + 1)]
    size = (inner.end_lineno or 0) - first + 1
    own, rest = lines[:size], lines[size:]
    extra = inner.col_offset - code.node.col_offset
    moved = [line[extra:] if line.strip() else line for line in own]
    new = "".join([*rest, *["\n"][: len(rest)], *moved])
    return Edit(file, first, last, "".join(lines).rstrip("\n"), new.rstrip("\n"), cell_name(file))


def _as_sequential(context: ErrorContext, frame: Frame, module: nn.Module) -> Edit | None:
    """The line that makes a ModuleList, where the module that holds it is the user's: it makes a Sequential."""
    name = OperandNames(context).module(module).rpartition(".")[2]
    for node in nodes_of(frame.site.file) if type(module) is nn.ModuleList else ():
        target = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        call = getattr(node, "value", None)
        if target.rpartition(".")[2] == name and isinstance(call, ast.Call) and callee_name(call) == "ModuleList":
            func = ast.unparse(call.func).replace("ModuleList", "Sequential")
            return edit_of(frame.site.file, {call.func: func, **dict.fromkeys(call.args, "*{raw}")})
    return None


# -- calls in their order ----------------------------------------------------------------------------------------------

STEPS = re.compile(r"Tried to step \d+ times\. The specified number of total steps is (\d+)")


def detect_order(context: ErrorContext) -> CallFacts | None:
    """The facts of a GradScaler or a learning-rate schedule that is called too often, or before another call; None of
    any other error."""
    frame, message = context.frame, context.message
    node = expression(frame) if frame is not None else None
    call = next(iter(calls_in(node)), None)
    line = statement(frame) if frame is not None else None
    if frame is not None and line is not None and call is not None and "'initial_lr' is not specified" in message:
        given = ast.unparse(call.args[0] if call.args else call.keywords[0].value)
        pad, rate = " " * line.col_offset, 'group.setdefault("initial_lr", group["lr"])'
        edit = edit_of(frame.site.file, {line: f"for group in {given}.param_groups:\n{pad}    {rate}\n{pad}{{raw}}"})
        title = "Tell it the first rate (or load the optimizer's state, which has it)."
        return call_facts(context, "resumed", given, edit, title=title, callee=callee_name(call))
    if frame is None or call is None or line is None or not isinstance(call.func, ast.Attribute):
        return None
    owner, file = ast.unparse(call.func.value), frame.site.file
    if match := STEPS.search(message):
        rounds, edit = _rounds(frame, line, owner)
        title = "Plan as many steps as the loops make."
        return call_facts(context, "schedule", owner, edit, title=title, value=match[1], callee=rounds)
    if not any(re.search(r"[\\/]amp[\\/]grad_scaler\.py$", f.site.file) for f in context.trail):
        return None
    if "_scale is None" in message or "No inf checks were recorded" in message:
        backward = [n for n in _calls_near(frame, line, "backward") if "scale(" not in ast.unparse(n)]
        at = backward[-1].func.value if backward else None  # type: ignore[attr-defined]
        edit = edit_of(file, {at: f"{owner}.scale({{raw}})"}) if at is not None else None
        what = "unscaled" if at is not None or "_scale" in message else "no gradients"
        title = "Scale the loss before its backward."
        return call_facts(context, what, owner, edit, title=title, value=ast.unparse(at) if at is not None else "")
    if "has already been called" in message and isinstance(line, ast.Expr):
        late = call.func.attr == "step"
        updates = _calls_near(frame, line, "update", everywhere=True) if late else []
        added = edit_of(file, {line: f"{{raw}}\n{' ' * line.col_offset}{owner}.update()"}) if not updates else None
        edit = added if late else _deleted(file, line) if call.func.attr == "unscale_" else None
        if late:
            return call_facts(context, "no update", owner, edit, title="Update the scale behind each step.")
        return call_facts(context, "twice", owner, edit, title="Leave the second call out.", callee=call.func.attr)
    return call_facts(context, "late", owner, callee=call.func.attr) if "being called after step" in message else None


def _deleted(file: str, line: ast.stmt) -> Edit | None:
    """A statement of its own lines, deleted together with its line; not the first of a block."""
    lines = [text.rstrip("\n") for text in linecache.getlines(file)[line.lineno - 2 : line.end_lineno]]
    if len(lines) < 2 or lines[0].rstrip().endswith(":") or len(lines[0]) - len(lines[0].lstrip()) != line.col_offset:
        return None
    return Edit(file, line.lineno - 1, line.end_lineno or 0, "\n".join(lines), lines[0], cell_name(file))


def _calls_near(frame: Frame, line: ast.stmt, name: str, everywhere: bool = False) -> list[ast.Call]:
    """The calls of a method in the same function before a line, or everywhere in it, in their order."""
    tree = tree_of(frame.site.file)
    around: Any = line
    while tree is not None and not isinstance(around, (ast.FunctionDef, ast.Module)):
        around = parents(tree).get(id(around)) or tree
    found = [n for n in ast.walk(around) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    found = [n for n in found if everywhere or n.lineno <= line.lineno]
    return sorted((n for n in found if n.func.attr == name), key=lambda n: n.lineno)  # type: ignore[attr-defined]


def _rounds(frame: Frame, line: ast.stmt, owner: str) -> tuple[str, Edit | None]:
    """(how often the loops around a line run, as text, the edit of the schedule that plans so many steps)."""
    tree, texts = tree_of(frame.site.file), list[str]()
    around: Any = line
    while tree is not None and not isinstance(around, (ast.FunctionDef, ast.Module, ast.Lambda)):
        if isinstance(around, ast.For):
            inner = around.iter
            while callee_name(inner) in ("enumerate", "tqdm") and inner.args:  # type: ignore[attr-defined]
                inner = inner.args[0]  # type: ignore[attr-defined]
            plain = callee_name(inner) == "range" and len(inner.args) == 1  # type: ignore[attr-defined]
            texts.append(ast.unparse(inner.args[0]) if plain else f"len({ast.unparse(inner)})")  # type: ignore[attr-defined]
        around = parents(tree).get(id(around)) or tree
    text = " * ".join(reversed(texts))
    for node in nodes_of(frame.site.file) if texts else ():
        call = node.value if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == owner else None
        if isinstance(call, ast.Call) and any(k.arg == "total_steps" for k in call.keywords):
            return text, edit_of(frame.site.file, with_keyword(frame.site.file, call, "total_steps", text))
    return text, None


# -- values that are no probabilities ----------------------------------------------------------------------------------

CHANCES = re.compile(
    r"all elements of (input|target) should be between 0 and 1|probability tensor contains either|"
    r"invalid multinomial distribution|Expected parameter (probs|logits|loc|scale) "
)


def detect_chances(context: ErrorContext) -> CallFacts | None:
    """The facts of a tensor that should be made of probabilities; None of any other error."""
    match = CHANCES.search(context.message)
    frame, node = context.frame, context.ran
    call = next(iter(calls_in(node)), None)
    if match is None or frame is None or call is None:
        return None
    second = match[1] == "target"
    method = isinstance(call.func, ast.Attribute) and is_tensor(value_of(call.func.value, frame))
    arguments = [call.func.value, *call.args] if method else [*call.args, *(k.value for k in call.keywords)]  # type: ignore[attr-defined]
    role = match[2] or match[1] or "input"
    named = next((k.value for k in getattr(call, "keywords", ()) if k.arg == role), None)
    place = int(second or role == "scale")
    part = named or (arguments[place] if len(arguments) > place else None)
    within = [f for f in reversed(context.trail) if not f.users] if match[2] else library_frames(context)
    key = "value" if match[2] else role  # as the base class of distributions calls what it checks
    value: Any = next((f.names[key] for f in within if is_tensor(f.names.get(key))), UNKNOWN)
    value = value_of(part, frame) if value is UNKNOWN and part is not None else value
    if part is None or not is_tensor(value):
        return None
    tensor = fact(ast.unparse(part), value, read=True)
    callee = ast.unparse(call.func) if not method else call.func.attr  # type: ignore[attr-defined]
    if tensor.nonfinite or second or tensor.low is None:
        return call_facts(context, "chances", tensor.name, callee=callee, tensor=tensor, value=match[2] or "")
    if role == "scale":
        edit = edit_of(frame.site.file, {part: "torch.nn.functional.softplus({}) + 1e-6"})
        more = {"callee": callee, "tensor": tensor, "value": role}
        return call_facts(context, "chances", tensor.name, edit, title="Make it positive.", **more)
    of_two = match[1] == "input"
    title = "Make probabilities of the scores."
    edit = edit_of(frame.site.file, {part: "{}.sigmoid()" if of_two else "{}.softmax(-1)"})
    return call_facts(context, "chances", tensor.name, edit, title=title, callee=callee, tensor=tensor)


# -- the length of a data set ------------------------------------------------------------------------------------------


def detect_length(context: ErrorContext) -> CallFacts | None:
    """The facts of a data set that is empty, has no length, or another than its parts; None of any other error."""
    frame, message = context.frame, context.message
    node = expression(frame) if frame is not None else None
    calls = calls_in(node)
    if frame is None or not any("torch" in f.site.file for f in context.trail if not f.users):
        return None
    file = frame.site.file
    call = next((n for n in calls if callee_name(n) in ("DataLoader", "random_split")), None)
    dataset = next(
        (f.names[n] for f in context.trail for n in ("dataset", "data_source") if not f.users and n in f.names), None
    )
    name = ast.unparse(call.args[0]) if call is not None and call.args else type(dataset).__name__
    if "num_samples=0" in message:
        inside = dataset.tensors if type(dataset) is TensorDataset else ()
        texts = [text for f in context.users for text, value in f.names.items() if any(value is t for t in inside)]
        return call_facts(context, "empty", texts[0] if texts else name, value=type(dataset).__name__)
    if "with IterableDataset: expected unspecified shuffle" in message and call is not None:
        edit = edit_of(file, with_keyword(file, call, "shuffle", "False"))
        return call_facts(context, "stream", name, edit, title="It gives its samples in its own order: do not shuffle.")
    if "Sum of input lengths does not equal" in message and call is not None and len(call.args) > 1:
        return call_facts(context, "split", name, _rest(frame, call), title="Give the rest to the last part.")
    if re.search(r"has no len\(\)", message) and dataset is not None and f"'{type(dataset).__name__}'" in message:
        title = "Say how many samples there are."
        return call_facts(context, "no length", name, _with_length(dataset), title=title, value=type(dataset).__name__)
    return None


def _rest(frame: Frame, call: ast.Call) -> Edit | None:
    """The last of the lengths as what the others leave."""
    parts = call.args[1].elts if isinstance(call.args[1], (ast.List, ast.Tuple)) else []
    if len(parts) < 2:
        return None
    texts = [source(frame.site.file, part) for part in parts[:-1]]
    return edit_of(frame.site.file, {parts[-1]: " - ".join([f"len({source(frame.site.file, call.args[0])})", *texts])})


def _with_length(dataset: Any) -> Edit | None:
    """A `__len__` before `__getitem__`: as many samples as the sequence has that it takes them from."""
    code = function_source(class_attribute(dataset, "__getitem__"))
    index = code.positional[1] if code is not None and len(code.positional) > 1 else ""
    for node in ast.walk(code.node) if code is not None and index else ():
        own = (
            isinstance(node, ast.Subscript)
            and ast.unparse(node.slice) == index
            and ast.unparse(node.value).startswith("self.")
        )
        if own and code is not None and not code.node.decorator_list:
            pad = " " * code.node.col_offset
            new = f"def __len__(self):\n{pad}    return len({ast.unparse(node.value)})\n\n{pad}{{raw}}"  # type: ignore[attr-defined]
            return edit_of(code.source.file, {code.node: new})
    return None
