"""The tensor arguments of the failing op, with the user's names, and where a value came from.

The innermost frame is often torch's: a Linear's `forward` with its `input`, a loss with `input` and `target`. The names
there give the role; the user's frames have the user's name for the same tensor. The operands of the user's line follow
after those of torch's frames.

Where a value came from is read from the user's sources, never run: `x` ← `for x, y in loader` ←
`TensorDataset(features, …)` ← `features = torch.from_numpy(values)`. The values of the names on the way are checked in
the frames, so that a wrong way (its tensor has another dtype or device) is left.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import Site, at_site, other_cells
from nbdebug.observe.sources import SCOPES, nodes, nodes_of, tree_of
from nbdebug.observe.variables import (
    MODULES_OWN,
    attributes,
    key_text,
    members,
    named_modules,
    named_parameters,
    registered,
)
from nbdebug.report import Where
from nbdebug.tools.errors.context import (
    UNKNOWN,
    ErrorContext,
    Key,
    bindings,
    callee_name,
    entries,
    expression,
    fact,
    functions_around,
    is_tensor,
    operands,
    parsed_expression,
    value_of,
    value_parts,
)
from nbdebug.tools.errors.rules import ArgumentFact, Raised, TensorFact

CALLS = ("_call_impl", "_wrapped_call_impl", "__call__", "_slow_forward")
"""Frames around a module's forward, which hold the same tensors under no name of their own."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
_TELLING = tuple(_TORCH + part for part in ("nn", "optim", "functional.py"))
"""Torch's frames whose variable names are roles; those of its inner parts (`_decomp`, `_refs`, `library`) are not."""
MOST = 60


@dataclasses.dataclass(frozen=True, eq=False)
class OpArgument:
    """A tensor argument of the failing op. name: as the user would write it, or what it is ("the input of `2`").
    role: its name in torch's function ("input", "weight", "target"), "" of the user's own operand. owner: the dotted
    name of the module whose parameter or buffer it is. known: the name is a variable's, an attribute's or a weight's.
    """

    value: torch.Tensor
    name: str
    role: str = ""
    owner: str | None = None
    known: bool = True

    def fact(self, *, read: bool = False) -> TensorFact:
        return fact(self.name, self.value, read=read)

    def plain(self, *, read: bool = False) -> ArgumentFact:
        return ArgumentFact(self.fact(read=read), self.role, self.owner, self.known)


def op_arguments(context: ErrorContext) -> list[OpArgument]:
    """The tensors of the failing op, each once: of torch's innermost function, of the module around it, then of the
    user's line. Empty where no name refers to one."""
    names, texts = OperandNames(context), argument_texts(context)
    arguments: dict[int, OpArgument] = {}
    for role, value in _library_tensors(context):
        if id(value) not in arguments and len(arguments) < MOST:
            one = names.argument(value, role)
            if not one.known and id(value) in texts:
                one = dataclasses.replace(one, name=texts[id(value)], known=True)
            arguments[id(value)] = one
    for text, value in (*operands(context.users[0]), *_stored(context.users[0])) if context.users else ():
        if is_tensor(value) and (id(value) not in arguments or not arguments[id(value)].known):
            role = arguments[id(value)].role if id(value) in arguments else ""
            arguments[id(value)] = dataclasses.replace(names.argument(value, role), name=text, known=True)
    return list(arguments.values())


def _stored(frame: Frame) -> Iterator[tuple[str, Any]]:
    """The value of `x[i] = y`: the failing expression is only `x[i]`."""
    target, tree = expression(frame), tree_of(frame.site.file)
    if not isinstance(target, ast.Subscript) or not isinstance(target.ctx, ast.Store) or tree is None:
        return
    for node in nodes(tree):
        if isinstance(node, ast.Assign) and any(
            (t.lineno, t.col_offset) == (target.lineno, target.col_offset) for t in node.targets
        ):
            value = value_of(node.value, frame)
            if value is not UNKNOWN:
                yield ast.unparse(node.value), value


def raised_facts(context: ErrorContext) -> Raised:
    """The plain part of an error, with two corrections: a data set's `__getitem__` is the input phase, and a
    model that is one module (a loss) has a name as well."""
    plain = context.raised()
    module, where = failing_module(context), plain.where
    if context.users and context.users[0].site.function in ("__getitem__", "__iter__"):
        where = dataclasses.replace(where, phase="input")
    if where.module == "" and module is not None and context.path(module) == "":
        where = dataclasses.replace(where, module=OperandNames(context).module(module))
    return dataclasses.replace(plain, where=where)


def raised_by_user(context: ErrorContext) -> bool:
    """Whether the user's own `raise` or `assert` raised the error: then the message is the user's, not torch's."""
    last = context.trail[-1] if context.trail else None
    return last is not None and last.users and isinstance(expression(last), (ast.Raise, ast.Assert))


def argument_texts(context: ErrorContext) -> dict[int, str]:
    """The arguments in the user's call of a function of torch's, as text: `encode(x)`."""
    below = library_frames(context)
    call = _call_of(context.users[0], below[-1]) if context.users and below else None
    if call is None or any(isinstance(arg, ast.Starred) for arg in call.args):
        return {}
    callee = below[-1]
    name = callee.site.function
    function = (
        type(callee.module).forward
        if callee.module is not None
        else getattr(nn.functional, name, getattr(nn.utils.rnn, name, None))
    )
    if callee.site.function == "__new__":
        names = ["data"]
    elif not callable(function) or callee.module is not None and callee.site.function != "forward":
        return {}
    else:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
    pairs = [*zip(names, call.args), *((k.arg or "", k.value) for k in call.keywords)]
    return {id(callee.names[name]): ast.unparse(node) for name, node in pairs if name in callee.names}


def _call_of(frame: Frame, callee: Frame) -> ast.Call | None:
    """The call in the failing line that called torch's function. `list(map(net, rows))` calls `list`, not the module;
    where Python knows only the line (before 3.11) the call is recognized by its callee."""
    ran = expression(frame)
    calls = [node for node in ast.walk(ran) if isinstance(node, ast.Call)] if ran is not None else []
    for call in calls:
        if (
            callee.module is not None
            and value_of(call.func, frame) is callee.module
            or (callee.module is None and callee_name(call) in (callee.site.function, "Parameter"))
        ):
            return call
    first = calls[0] if calls and frame.span is not None else None
    return first if first is not None and value_of(first.func, frame) is UNKNOWN else None


def _library_tensors(context: ErrorContext) -> Iterator[tuple[str, torch.Tensor]]:
    """(role, tensor) of torch's and the libraries' frames below the user's line, down to the innermost module's."""
    for frame in library_frames(context):
        for role, value in frame.names.items():
            if is_tensor(value):
                yield role, value
            elif type(value) in (list, tuple) and len(value) <= MOST:
                yield from ((f"{role}[{i}]", item) for i, item in enumerate(value) if is_tensor(item))
        if frame.module is not None:
            for role, value in members(frame.module).items():
                if is_tensor(value):
                    yield role, value
            return


def library_frames(context: ErrorContext) -> list[Frame]:
    """The frames below the user's innermost line, innermost first, without those that only pass a call on."""
    frames = []
    for frame in reversed(context.trail):
        if frame.users:
            break
        file = frame.site.file
        if frame.site.function not in CALLS and (file.startswith(_TELLING) or not file.startswith(_TORCH)):
            frames.append(frame)
    return frames


def failing_module(context: ErrorContext) -> nn.Module | None:
    """The innermost module whose method was running."""
    return next((frame.module for frame in reversed(context.trail) if frame.module is not None), None)


def is_instance(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """`isinstance` without code of the object: a `__class__` of the user's is ignored."""
    return issubclass(type(value), kinds)


def model_name(path: str, context: ErrorContext) -> str:
    """The name of the model that a dotted path begins with: "self.model" of "self.model.stem.0"."""
    return max(
        (name for name in context.owners.models if path == name or path.startswith((f"{name}.", f"{name}["))),
        key=len,
        default=path.split(".")[0],
    )


def weights(model: nn.Module, buffers: bool = False) -> list[torch.Tensor]:
    """The parameters of a model, each once; with its buffers if requested."""
    return [tensor for _, tensor in named_parameters(model, buffers=buffers)]


class OperandNames:
    """The user's names of tensors and modules, found by identity, never by comparing."""

    def __init__(self, context: ErrorContext):
        self.context = context
        self.variables: dict[int, str] = {}
        for name, value, _ in context.variables():
            for text, item in ((name, value), *_items(name, value)):
                if is_tensor(item):
                    self.variables.setdefault(id(item), text)
        self.weights: dict[int, tuple[str, str]] = {}
        self._modules: dict[int, str] | None = None
        self.failing = failing_module(context)
        self.foreign = any(not frame.site.file.startswith(_TORCH) for frame in library_frames(context))
        for model in context.owners.models.values():
            for name, part in named_modules(model):
                self._own(part, _plain(f"{self.module(model)}.{name}".rstrip(".")))
        if self.failing is not None:
            self._own(self.failing, self.module(self.failing))

    def _own(self, part: nn.Module, path: str) -> None:
        for table in ("_parameters", "_buffers"):
            for name, value in registered(part, table).items():
                if is_tensor(value):
                    self.weights.setdefault(id(value), (path, name))

    def argument(self, value: torch.Tensor, role: str) -> OpArgument:
        if id(value) in self.weights:
            owner, name = self.weights[id(value)]
            return OpArgument(value, f"{owner}.{name}", role, owner)
        if id(value) in self.variables:
            return OpArgument(value, self.variables[id(value)], role)
        whole = value._base if self.foreign and type(value) is torch.Tensor else None  # the library has flattened it
        if whole is not None and id(whole) in self.variables and whole.numel() == value.numel():
            sizes = ", ".join(map(str, value.shape))
            return OpArgument(value, f"{self.variables[id(whole)]}.reshape({sizes})", role)
        inner = f"`{self.module(self.failing)}`" if self.failing is not None else "the op"
        phrase = "the input of {}" if role in ("input", "x", "") else f"the {role} of {{}}"
        return OpArgument(value, phrase.format(inner), role, None, False)

    def module(self, module: Any) -> str:
        """`net.stages.3.1`; of an unregistered module its path ("net.blocks[1]") or its class."""
        path = self.context.owners.paths.get(id(module))
        hidden = self.unregistered(module)
        root = module is not None and any(module is m for m in self.context.owners.models.values())
        if path is not None and not (root and hidden):
            return self._visible(_plain(path))
        return hidden or path or type(module).__name__

    def _visible(self, path: str) -> str:
        """A model without a variable is named by its class, or `self` where its own method runs."""
        root, dot, rest = path.partition(".")
        model = self.context.owners.models.get(root)
        if (
            model is None
            or root != type(model).__name__
            or any(root in space for space in (self.context.names, *(frame.names for frame in self.context.users)))
        ):
            return path
        mine = any(frame.names.get("self") is model for frame in self.context.users)
        return f"self{dot}{rest}" if mine else path

    def unregistered(self, module: Any) -> str | None:
        """The path of a module in a plain list, tuple or dict of another module, which does not register it."""
        if self._modules is None:
            self._modules = {}
            for model in self.context.owners.models.values():
                for _, part in named_modules(model):
                    for name, value in attributes(part).items():
                        for text, item in _items(f"{self.context.owners.paths.get(id(part))}.{name}", value):
                            if name not in MODULES_OWN and issubclass(type(item), nn.Module):
                                self._modules.setdefault(id(item), text)
        return self._modules.get(id(module))


def _plain(path: str) -> str:
    """The path without the part that torch.compile adds."""
    return path.replace("._orig_mod", "")


def _items(name: str, value: Any) -> list[tuple[str, Any]]:
    """The items of an exact dict, list or tuple, by the text that gets them."""
    if type(value) is dict:
        return [(f"{name}[{key_text(key)}]", item) for key, item in [*value.items()][:MOST]]
    if type(value) in (list, tuple):
        return [(f"{name}[{i}]", item) for i, item in enumerate(value[:MOST])]
    return []


# -- where a value comes from ------------------------------------------------------------------------------------------


STEPS = 40


@dataclasses.dataclass(frozen=True)
class ExpressionBinding:
    """One binding on the way. name: what was bound ("features", "self.table", "return"); code: the text of its value;
    node: the same as syntax."""

    name: str
    code: str
    where: Where
    node: ast.expr = dataclasses.field(repr=False, compare=False)
    entry: bool = False  # it is one entry of the value, or a loop over it
    maker: ast.expr | None = dataclasses.field(default=None, repr=False, compare=False)  # the origin within `node`

    @property
    def phrase(self) -> str:
        code = self.code if len(self.code) <= 80 else self.code[:77] + "..."
        return f"`{self.name}` {'comes from' if self.entry else 'is'} `{code}`"


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """Where a name is looked up: a file, the line, the frame with the names there (None: no frame)."""

    file: str
    line: int
    frame: Frame | None


def origin_of(
    name: str,
    context: ErrorContext,
    is_origin: Callable[[ast.expr], bool],
    fits: Callable[[Any], bool] = lambda value: True,
    partial: bool = False,
) -> tuple[ExpressionBinding, ...]:
    """The way from the origin (the expression that set the dtype, the device …) to `name` in the user's innermost
    frame; the origin first. fits: whether a value on the way can be part of it. () where the sources don't show it;
    partial: as far as they do."""
    frame, node = context.frame, parsed_expression(name)
    if frame is None or node is None:
        return ()
    search = _OriginSearch(context, is_origin, fits)
    way = search.run(node, _Lookup(frame.site.file, frame.site.line, frame))
    return way or (search.longest if partial else ())


class _OriginSearch:
    """Breadth first over the bindings: the shortest way to an origin."""

    def __init__(self, context: ErrorContext, is_origin: Callable[[ast.expr], bool], fits: Callable[[Any], bool]):
        self.context, self.is_origin, self.fits = context, is_origin, fits
        self.longest: tuple[ExpressionBinding, ...] = ()

    def run(self, node: ast.expr, place: _Lookup) -> tuple[ExpressionBinding, ...]:
        todo: list[tuple[ast.expr, tuple[Key, ...], _Lookup, tuple[ExpressionBinding, ...]]] = [(node, (), place, ())]
        visited: set[tuple[str, str, tuple[Key, ...]]] = set()
        for _ in range(STEPS):
            if not todo:
                break
            node, path, place, way = todo.pop(0)
            for part, rest in self._parts(node, path):
                mark = (place.file, ast.unparse(part), rest)
                if mark in visited:
                    continue
                visited.add(mark)
                for binding, then, at in self._bindings(part, rest, place):
                    longer = (binding, *way)
                    maker = self._origin_in(binding.node, then)
                    if maker is not None:
                        return dataclasses.replace(binding, maker=maker), *way
                    todo.append((binding.node, then, at, longer))
                    self.longest = max(self.longest, longer, key=len)
        return ()

    def _origin_in(self, node: ast.expr, path: tuple[Key, ...]) -> ast.expr | None:
        """The part of an expression, or of its entry under the path, that is an origin."""
        return next(
            (inner for part, _ in entries(node, path) for inner in value_parts(part) if self.is_origin(inner)), None
        )

    def _parts(self, node: ast.expr, path: tuple[Key, ...]) -> Iterator[tuple[ast.expr, tuple[Key, ...]]]:
        """The names in an expression that its value, or its entry under the path, can come from."""
        for entry, rest in entries(node, path):
            for part in value_parts(entry):
                named = isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
                if named or isinstance(part, (ast.Name, ast.Call)):
                    yield part, rest

    def _bindings(
        self, node: ast.expr, path: tuple[Key, ...], place: _Lookup
    ) -> Iterator[tuple[ExpressionBinding, tuple[Key, ...], _Lookup]]:
        """What was bound to a name: (the binding, the path of the entry, where its names are looked up)."""
        if isinstance(node, ast.Call):
            yield from _returns(node, path, place)
            return
        live = value_of(node, place.frame) if place.frame is not None else UNKNOWN
        if live is not UNKNOWN and not path and not self.fits(live):
            return
        text = ast.unparse(node)
        if self._untouched(text, place, live):
            yield from self._argument(text, path, place, live)
            return
        for file, scope in _scopes(place, text):
            matches = [b for b in bindings(scope, text) if b[0].lineno <= place.line or scope is not _innermost(place)]
            for value, keys in _reaching(scope, matches, text, place.line):
                binding = ExpressionBinding(text, ast.unparse(value), where_of(file, value), value, bool(keys))
                yield binding, (*keys, *path), _Lookup(file, value.lineno, place.frame)
            if matches:
                return
        yield from self._argument(text, path, place, live)

    def _untouched(self, text: str, place: _Lookup, live: Any) -> bool:
        """Whether a parameter still is the caller's very object: what would bind it in the function has not run."""
        at = next((i for i, frame in enumerate(self.context.users) if frame is place.frame), None)
        shared = live is UNKNOWN or is_instance(live, (int, float, str, type(None)))  # one object for all of a value
        if at is None or at + 1 >= len(self.context.users) or shared:
            return False
        caller = self.context.users[at + 1]
        node = _passed(_innermost(place), expression(caller), text, _is_method(place))
        return node is not None and value_of(node, caller) is live

    def _argument(
        self, text: str, path: tuple[Key, ...], place: _Lookup, live: Any
    ) -> Iterator[tuple[ExpressionBinding, tuple[Key, ...], _Lookup]]:
        """A parameter of the function: the caller's expression for the very same object."""
        users = self.context.users
        at = next((i for i, frame in enumerate(users) if frame is place.frame), None)
        if at is None or at + 1 >= len(users):
            return
        caller = users[at + 1]
        node = _passed(_innermost(place), expression(caller), text, _is_method(place))
        value = UNKNOWN if node is None else value_of(node, caller)
        if node is None or value is UNKNOWN and not self._direct(place.frame, caller):
            return
        if value is not UNKNOWN and value is not live:
            return
        where = _Lookup(caller.site.file, caller.site.line, caller)
        if ast.unparse(node) == text:
            yield from self._bindings(node, path, where)
        else:
            yield ExpressionBinding(text, ast.unparse(node), caller.where, node), path, where

    def _direct(self, inner: Frame | None, caller: Frame) -> bool:
        """Whether only the call of a module is between the two frames."""
        places = {id(frame): i for i, frame in enumerate(self.context.trail)}
        between = self.context.trail[places[id(caller)] + 1 : places.get(id(inner), 0)]
        return all(frame.site.function in CALLS for frame in between)


def _is_method(place: _Lookup) -> bool:
    """Whether the innermost function is one of a class, so that its first parameter is the object."""
    function = _innermost(place)
    return any(
        isinstance(node, ast.ClassDef) and any(part is function for part in node.body) for node in nodes_of(place.file)
    )


def _passed(function: ast.AST | None, call: ast.AST | None, name: str, method: bool) -> ast.expr | None:
    """The argument that a call gives for a parameter of the function."""
    calls = [node for node in ast.walk(call) if isinstance(node, ast.Call)] if call is not None else []
    if not isinstance(function, SCOPES) or not calls:
        return None
    by_name = [node for node in calls if callee_name(node) == getattr(function, "name", None)]
    call = (by_name or calls)[0]
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if method or names[:1] in (["self"], ["cls"]) else names
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name not in names or names.index(name) >= len(call.args):
        return None
    arguments = call.args[: names.index(name) + 1]
    return None if any(isinstance(arg, ast.Starred) for arg in arguments) else arguments[-1]


def _returns(
    node: ast.Call, path: tuple[Key, ...], place: _Lookup
) -> Iterator[tuple[ExpressionBinding, tuple[Key, ...], _Lookup]]:
    """What a function of the same file returns; of a class what its items are."""
    name = callee_name(node)
    for definition in nodes_of(place.file):
        if not isinstance(definition, (ast.FunctionDef, ast.ClassDef)) or definition.name != name:
            continue
        body = (
            definition
            if isinstance(definition, ast.FunctionDef)
            else next((f for f in definition.body if isinstance(f, ast.FunctionDef) and f.name == "__getitem__"), None)
        )
        for inner in ast.walk(body) if body is not None else ():
            if isinstance(inner, ast.Return) and inner.value is not None:
                binding = ExpressionBinding(
                    f"{name}()", ast.unparse(inner.value), where_of(place.file, inner.value), inner.value
                )
                yield binding, path, _Lookup(place.file, inner.lineno, None)


def _scopes(place: _Lookup, text: str) -> Iterator[tuple[str, ast.AST]]:
    """Where a name can have been bound: the functions around the line, innermost first, the file, the other cells. An
    attribute of `self`: anywhere in the file."""
    tree = tree_of(place.file)
    if tree is None:
        return
    if not text.startswith("self."):
        for scope in functions_around(tree, place.line):
            yield place.file, scope
            if any(arg.arg == text for arg in ast.walk(scope.args) if isinstance(arg, ast.arg)):
                return  # a parameter: its value is the caller's
    yield place.file, tree
    for file in other_cells(place.file):
        other = tree_of(file)
        if other is not None:
            yield file, other


def _reaching(
    scope: ast.AST, matches: list[tuple[ast.expr, tuple[Key, ...]]], text: str, line: int
) -> Iterator[tuple[ast.expr, tuple[Key, ...]]]:
    """The bindings whose value can still be current. The last comes first; one that uses the name itself is followed by
    the one before it. A binding in a branch without the line comes later, and so does that of the line itself, which
    has run only in an earlier iteration of a loop."""
    later: list[tuple[ast.expr, tuple[Key, ...]]] = []
    for value, keys in reversed(matches):
        again = any(isinstance(n, (ast.Name, ast.Attribute)) and ast.unparse(n) == text for n in ast.walk(value))
        own = value.lineno <= line <= (value.end_lineno or 0)
        branch = any(
            isinstance(n, (ast.If, ast.Try))
            and n.lineno <= value.lineno <= (n.end_lineno or 0)
            and not (n.lineno <= line <= (n.end_lineno or 0))
            for n in ast.walk(scope)
        )
        if own or branch:
            later.append((value, keys))
            continue
        yield value, keys
        if not again:
            break
    yield from later


def _innermost(place: _Lookup) -> ast.AST | None:
    return next((scope for _, scope in _scopes(place, "")), None)


def where_of(file: str, node: ast.expr) -> Where:
    return at_site(Where(), Site(file, node.lineno, ""))
