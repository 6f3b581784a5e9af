"""What the frames of a running loop tell: the loss of a batch, where none was given (most loops have none); and where a
loop begins to train, and what, for those that make their own model or train several together.
At the loop's first `backward()` the frames on the stack tell how the loss came about: which `for` gave the batch, which
statements lie between that and `backward()`, and which of these the loss needs. They are compiled once more, under
their own file and lines, into a function of (model, batch); what they need beside the batch is as it was then.

    for x, y in loader:                     the batch
        optimizer.zero_grad()               not needed
        out = model(x.to(device))           needed
        loss = criterion(out, y.to(device)) needed
        loss.backward()                     the loss is `loss`

The frames of functions between the loop and `backward()` are followed by their arguments. Where no loader is read, the
batch is what the loop's own statements make before the model comes in, or the tensors that every step takes:

    x, y = get_batch()                      the batch is (x, y)
    loss = F.mse_loss(model(x), y)          needed

Where the result is not the loop's loss in value and graph, or needs nothing of the batch, there is none. Nor for a
policy gradient, which weights log-probabilities of drawn actions by what they brought: its value is no measure of what
was learned (https://spinningup.openai.com/en/latest/spinningup/rl_intro3.html); the reward is, where a variable has it.

`LoopStart` waits while the user's code runs. At the first call of a model with gradients the variables of the functions
on the stack tell the model, its optimizers and the loader that is being read; the watch begins there, before anything
was updated. Several models that the loop's optimizers train together (an encoder and a head, a GAN) become one
`JointModel` of the user's own modules.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import math
import operator
import os
import re
import statistics
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader

from nbdebug.arguments import Subject, around, discover, part, trains
from nbdebug.observe.backward import graph_leaves, graph_nodes
from nbdebug.observe.locations import USER, Site, code_kind, kind_of, locate, span_of, users_frames
from nbdebug.observe.sources import (
    CONTAINERS,
    function_at,
    is_next,
    name_of,
    names_loaded,
    names_stored,
    nodes_of,
    slice_of,
)
from nbdebug.observe.tensors import tensors_in
from nbdebug.observe.variables import attributes, closure_variables
from nbdebug.report import Edit
from nbdebug.text import module_name
from nbdebug.tools.training.evaluate import (
    LoaderWatch,
    OpenPass,
    loss_root,
    preserve_rng,
    save_rng,
    save_torch_rng,
    spared_buffers,
)
from nbdebug.tools.training.interventions import graph_signature
from nbdebug.trainers import held

CALLER = os.path.join(os.path.dirname(__file__), "probe.py")
"""What calls the loop: beyond it is whoever called diagnose."""
BATCH = ast.Name("__batch__", ast.Load())
DRAWS, LOGS = {"sample", "multinomial"}, {"log_prob", "log", "log_softmax", "logsumexp"}
"""What the user's code names that draws from a distribution, and takes the logarithm of its probabilities."""
BETWEEN = re.compile(r"(Neg|Mean|Sum|Add|Sub|Div|Mul|Stack|Cat|Unsafe|View|Reshape|Unsqueeze|Squeeze|Minimum|Clamp)")
"""Nodes between a loss and the products that it adds up."""
MOST_NODES, FIRST = 5000, 50
REWARD_NAMES = (re.compile("rew", re.I), re.compile("return|score", re.I), re.compile("^(r|rs|ret)$", re.I))
"""Names of what a step brought, the surest first."""
COUNTING = ("accumulate", "no_sync", "join")
"""Blocks of a distributed step, which count it and change nothing of the loss."""
SAME = 1e-3
"""Of the loss: what the order of a GPU's sums changes."""


class JointModel(nn.ModuleDict):
    """Several models of the user's that one loop trains: it is never called itself."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name.replace(".", "_"), model)


@dataclasses.dataclass
class LoopLoss:
    """`loop_loss(model, batch)`. site: the statement that backward is called in; text: the loss there; takes: of a loop
    that reads no loader, the variables that are the batch."""

    model: nn.Module
    parts: list[_Part]
    site: Site
    text: str
    takes: tuple[str, ...] = ()

    def batch(self, before: Mapping[CodeType, dict[str, Any]]) -> tuple[Any, ...] | None:
        """Of such a loop that is in a call of `backward()`: its batch. before: the variables of its functions at the
        step's first call of a model, since when a hidden state may have been replaced."""
        for frame in loop_frames(sys._getframe(1)):
            if (code := frame.f_code) is self.parts[0].loop:
                values = {**frame.f_globals, **frame.f_locals, **before.get(code, {})}
                return tuple(values.get(name) for name in self.takes)
        return None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        values: dict[str, Any] = {}
        objects = [v for part in self.parts for v in part.names.values()]
        objects += [v for thing in objects if _is_plain(thing) for v in vars(thing).values()]
        mine = self._stand_ins(self.model)
        others = [v for v in objects if issubclass(type(v), nn.Module) and id(v) not in mine]  # a teacher in train mode
        own = self._stand_ins(model)
        with self._standing_in(own), spared_buffers([m for other in others for m in other.modules()]):
            for part in self.parts:
                space: dict[str, Any] = {n: own.get(id(v), v) for n, v in part.names.items()}
                space |= {**values, "__batch__": batch}
                exec(part.code, space)
                values = space["__result__"]
        return values["__loss__"]

    def edited(self, edit: Edit) -> LoopLoss | None:
        """The same with an edit of its own lines; None where the edit is elsewhere."""
        parts = [part.edited(edit) for part in self.parts]
        changed = any(new is not old for new, old in zip(parts, self.parts))
        return dataclasses.replace(self, parts=parts) if changed else None

    def _stand_ins(self, model: nn.Module) -> dict[int, nn.Module]:
        """By the id of this model, and of each that it joins: what is called in its place."""
        pairs = zip(self.model.children(), model.children()) if isinstance(self.model, JointModel) else ()
        return {id(self.model): model, **{id(own): other for own, other in pairs}}

    @contextlib.contextmanager
    def _standing_in(self, own: Mapping[int, nn.Module]) -> Iterator[None]:
        """Another model where the user's functions and objects hold this one."""
        spaces: list[dict[str, Any]] = [part.globals for part in self.parts]
        spaces += [vars(v) for part in self.parts for v in part.names.values() if _is_plain(v)]
        places = [(s, n, v) for s in spaces for n, v in s.items() if own.get(id(v), v) is not v]
        named = any(id(v) in own for part in self.parts for v in part.names.values())
        if own[id(self.model)] is not self.model and not (named or places):
            raise LookupError("the loop's lines name no model that another one could stand in for")
        try:
            for space, name, value in places:
                space[name] = own[id(value)]
            yield
        finally:
            for space, name, value in places:
                space[name] = value

    def numbers(self) -> dict[str, float]:
        """The numbers that it takes as they were: a weight that grows with the steps would stand still."""
        names = [(i, *item) for i, part in enumerate(self.parts) for item in part.names.items()]
        return {f"{i} {name}": value for i, name, value in names if type(value) in (int, float)}


@dataclasses.dataclass
class _Part:
    """What one frame does for it. tree, code: set `__result__`, the arguments of the next frame or the loss; names:
    what the code takes from the frame; loop: the frame's own code."""

    tree: ast.Module
    code: CodeType
    names: dict[str, Any]
    globals: dict[str, Any]
    loop: CodeType

    def edited(self, edit: Edit) -> _Part:
        """With other lines in the place of a statement; itself where the edit is elsewhere."""
        if self.loop.co_filename != edit.file:
            return self
        new = _EditedLines(edit)
        tree = new.visit(copy.deepcopy(self.tree))
        return dataclasses.replace(self, tree=tree, code=_compiled(tree, edit.file, edit.line)) if new.done else self


class _EditedLines(ast.NodeTransformer):
    """Of several statements on a line each is exchanged for the one in its place: the others may train."""

    def __init__(self, edit: Edit) -> None:
        self.edit, self.done = edit, False
        self.old, self.new = (ast.parse(textwrap.dedent(text)).body for text in (edit.old, edit.new))

    def generic_visit(self, node: ast.AST) -> Any:
        lines = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        here = isinstance(node, ast.stmt) and lines == (self.edit.line, self.edit.end_line)
        at = next((i for i, old in enumerate(self.old) if here and ast.dump(old) == ast.dump(node)), None)
        if at is None:
            return super().generic_visit(node)
        self.done = True
        return self.new if len(self.old) == 1 else self.new[at] if len(self.new) == len(self.old) else node


def loop_loss(model: nn.Module, loader: Any) -> LoopLoss | None:
    """The loss of a loop that is in a call of `backward()`, unproved; None where its lines don't tell. loader: whose
    batches the loop reads, None where it reads none. Must be called on the loop's own stack."""
    frames = loop_frames(sys._getframe(1))
    call = _call_in(frames[0], "backward") if frames else None
    if call is None:
        return None
    wanted = _loss_of(call)
    takes: list[str] = []
    parts = _parts(frames, call, {"__loss__": wanted}, loader, takes)
    code = frames[0].f_code
    site = Site(code.co_filename, frames[0].f_lineno, code.co_name)
    return LoopLoss(model, parts, site, ast.unparse(wanted), tuple(takes)) if parts is not None else None


def proved(found: Any, model: nn.Module, batch: Any, value: float, graph: Counter[str]) -> bool:
    """Whether it gives the loop's own loss of a batch, in value (where no random numbers are in it) and graph, by this
    very model (a cell may make it anew), and changes nothing of the user's: a loss that counts or logs is run by the
    loop alone."""
    values, ran = [], list[nn.Module]()
    called = register_module_forward_pre_hook(lambda module, _: ran.append(module))
    before = _contents(found) if isinstance(found, LoopLoss) else []
    try:
        with preserve_rng(found), torch.enable_grad(), spared_buffers(model.modules()):
            for _ in range(2):
                loss = loss_root(found(model, batch))
                values.append(float(loss.detach()))
    finally:
        called.remove()
        changed = [(thing, old) for thing, old in before if _differs(thing, old)]
        for thing, old in changed:
            thing.clear()
            thing.extend(old) if isinstance(thing, list) else thing.update(old)
    if changed:
        return False
    if set(model.modules()).isdisjoint(ran) and set(model.parameters()).isdisjoint(graph_leaves(loss)):
        return False
    own = graph_signature(loss)
    more, less = own - graph, graph - own  # one node more in the loop's: that of a scaler
    same = abs(values[0] - value) <= SAME * abs(value) or values[0] != values[1]
    return not more and less.total() <= 1 and same


def _contents(found: LoopLoss) -> list[tuple[Any, Any]]:
    """(container, a copy) of the lists, dicts and sets in reach of its lines: the variables there, the attributes of
    objects of the user's, and what these hold."""
    values = [value for part in found.parts for value in part.names.values()]
    values += [vars(value) for value in values if _is_plain(value)]
    values += [v for value in values if type(value) is dict for v in value.values()]
    values += [part.globals for part in found.parts]
    held = {id(value): value for value in values if type(value) in CONTAINERS}
    return [(value, value.copy()) for value in held.values()]


def _differs(now: Any, before: Any) -> bool:
    """Whether a container holds other objects than before; a number counts by itself."""
    if type(now) is dict:
        return now.keys() != before.keys() or any(now[key] is not before[key] for key in before)
    return len(now) != len(before) or type(now) is list and any(a is not b for a, b in zip(now, before))


# -- frames ------------------------------------------------------------------------------------------------------------


def loop_frames(frame: FrameType | None) -> list[FrameType]:
    """The user's frames, the innermost first, up to the loop's own."""
    return list(users_frames(frame, (CALLER,)))


def calling_functions() -> tuple[tuple[str, ...], Any]:
    """The user's functions that are running, innermost first, and their innermost line."""
    stop = locate()
    if stop.user is None:
        return (), stop.site
    names, frame = [], stop.frame
    while frame is not None and frame.f_code.co_filename != CALLER:
        if kind_of(frame.f_code) == USER and not frame.f_code.co_name.startswith("<"):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return tuple(dict.fromkeys(names)), stop.user


def frame_variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a function, and the globals that it names."""
    space = frame.f_globals
    own = {} if frame.f_locals is space else frame.f_locals
    return {**{name: space[name] for name in frame.f_code.co_names if name in space}, **own}


def marks_in(frames: Iterable[FrameType]) -> dict[str, torch.Tensor]:
    """Variables of several flags (of two values, both of which occur), by their names."""
    flags = dict[str, torch.Tensor]()
    for name, value in ((n, v) for frame in frames for n, v in frame.f_locals.items()):
        kind = type(value)  # and no isinstance: a class of the user's may answer that as it likes
        numbers = kind in (list, tuple) and all(type(v) in (bool, int, float) for v in value[:MOST_NODES])
        array = module_name(kind) == "numpy" and kind.__name__ == "ndarray" and value.dtype.kind in "biuf"
        if not (numbers or array or issubclass(kind, torch.Tensor)):
            continue
        with contextlib.suppress(RuntimeError, ValueError, OverflowError):  # no tensor that has values, or too large
            found = torch.as_tensor(value[:MOST_NODES] if numbers else value, device="cpu" if numbers else None)
            if 1 < found.numel() < MOST_NODES and not found.requires_grad and len(found.unique()) == 2:
                flags.setdefault(name, found.detach().cpu())
    return flags


def _call_in(frame: FrameType, name: str) -> ast.Call | None:
    """The call of a function that a frame is in, or the one that gets it to call it (`optimizer.step(closure)`)."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    calls = [n for n in nodes_of(file) if isinstance(n, ast.Call) and n.lineno <= line <= (n.end_lineno or 0)]
    passed = [c for c in calls if any(isinstance(a, ast.Name) and a.id == name for a in c.args)]
    calls = [c for c in calls if name_of(c) == name] or passed
    span = span_of(frame.f_code, frame.f_lasti) if len(calls) > 1 else None
    if span is not None:
        calls = [c for c in calls if (c.lineno, c.end_lineno, c.col_offset, c.end_col_offset) == span] or calls
    return calls[0] if len(calls) == 1 else None


def _loss_of(call: ast.Call) -> ast.expr:
    """What backward starts from: of `scaler.scale(loss).backward()` and `accelerator.backward(loss)`, too."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, ast.Call) and name_of(owner) == "scale" and len(owner.args) == 1:
        return owner.args[0]
    return call.args[0] if call.args else owner or call


def _parts(
    frames: list[FrameType], call: ast.Call, wanted: Mapping[str, ast.expr], loader: Any, takes: list[str]
) -> list[_Part] | None:
    """What each frame does, from the loop's own to the first one, which is in `call`. wanted: name → expression; takes:
    gets the variables that are the batch of a loop without a loader."""
    frame, path = frames[0], _path_to(frames[0], call)
    places = [i for i, (node, _) in enumerate(path) if isinstance(node, (ast.For, ast.While))]
    space, whole = {**frame.f_globals, **frame.f_locals}, _flat(path)
    begins: list[ast.stmt] = []
    if loader is None:
        begins = _own_batch(frame, path, places, wanted, takes)
    else:
        targets = (
            (i, _batch_target(node, frame, loader)) for i in places[::-1] if isinstance(node := path[i][0], ast.For)
        )
        place, target = next(((i, t) for i, t in targets if t is not None), (0, None))
        begins = _drawn(whole) if target is None else [ast.Assign([target], BATCH), *_flat(path[place:])]
    if begins:
        part = _part(frame, begins, wanted)
        return [part] if part is not None else None
    outer = _call_in(frames[1], frame.f_code.co_name) if len(frames) > 1 and path else None
    if outer is None:
        return None
    needed = slice_of(whole, set().union(*map(names_loaded, wanted.values())), space)[1]
    arguments = _arguments(outer, frame, frames[1])
    if arguments is None:
        return None
    around = {**frames[1].f_globals, **frames[1].f_locals}
    free = {n for n in needed - arguments.keys() if _is_data(value := space.get(n)) and around.get(n) is value}
    arguments |= {name: ast.Name(name, ast.Load()) for name in free}
    before = _parts(frames[1:], outer, arguments, loader, takes)
    last = _part(frame, whole, wanted, set(arguments))
    return None if before is None or last is None else [*before, last]


def _arguments(call: ast.Call, frame: FrameType, caller: FrameType) -> dict[str, ast.expr] | None:
    """parameter → the expression that the call gives for it, which began the frame; of a closure, which something else
    calls, none."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if name_of(call) != code.co_name:
        return None if names else {}
    own = frame.f_locals.get(names[0]) if names and isinstance(call.func, ast.Attribute) else None
    positional = names[hasattr(type(own), code.co_name) :]
    given: list[ast.expr] = []
    for argument in call.args:
        if isinstance(argument, ast.Starred):
            members = _value(argument.value, caller)
            if not isinstance(members, (list, tuple)):
                return None
            given += [_entry(argument.value, i) for i in range(len(members))]
        else:
            given.append(argument)
    named = {str(k.arg): k.value for k in call.keywords if k.arg in names}
    for mapping in (k.value for k in call.keywords if k.arg is None):
        members = _value(mapping, caller)
        if not isinstance(members, dict):
            return None
        named |= {name: _entry(mapping, name) for name in members if name in names}
    return dict(zip(positional, given)) | named


def _entry(owner: ast.expr, key: Any) -> ast.expr:
    return ast.Subscript(owner, ast.Constant(key), ast.Load())


def _is_data(value: Any) -> bool:
    """Whether it is a tensor without a graph, an array, or holds one."""
    kind = type(value)
    values = dict.values(value) if issubclass(kind, dict) else value if issubclass(kind, (list, tuple)) else [value]
    arrays = any(hasattr(type(v), "__array_interface__") for v in values)
    return arrays or any(not t.requires_grad for t in tensors_in(value))


def _drawn(statements: list[ast.stmt]) -> list[ast.stmt]:
    """The statements from the last `x, y = next(batches)` on, which gets the batch there; none without one."""
    for place in reversed(range(len(statements))):
        for node in ast.walk(statements[place]):
            if isinstance(node, ast.Assign) and any(is_next(part) for part in ast.walk(node.value)):
                return [_FromBatch().visit(copy.deepcopy(node)), *statements[place + 1 :]]
    return []


class _FromBatch(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        return ast.copy_location(ast.Name("__batch__", ast.Load()), node) if is_next(node) else self.generic_visit(node)


def _path_to(frame: FrameType, call: ast.Call) -> list[tuple[ast.AST, list[ast.stmt]]]:
    """(node, its statements up to the one with the call) of each node around it, from the function inwards."""
    node: Any = function_at(frame.f_code.co_filename, frame.f_lineno)
    path: list[tuple[ast.AST, list[ast.stmt]]] = []
    while node is not None:
        bodies = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
        bodies += [handler.body for handler in getattr(node, "handlers", ())]
        known = [(b, i, s) for b in bodies if isinstance(b, list) for i, s in enumerate(b)]
        places = ((b, i) for b, i, s in known if any(part is call for part in ast.walk(s)))
        body, place = next(places, ([], 0))
        path += [(node, body[: place + 1])] * bool(body)
        node = body[place] if body and hasattr(body[place], "body") else None
    return path


def _flat(path: list[tuple[ast.AST, list[ast.stmt]]]) -> list[ast.stmt]:
    """What runs before the line, in order: the bodies around it, `with` blocks as such."""
    statements: list[ast.stmt] = []
    for node, body in reversed(path):
        statements = [*body[:-1], *statements] if statements else list(body)
        items = getattr(node, "items", ())
        items = [i for i in items if not isinstance(c := i.context_expr, ast.Call) or name_of(c) not in COUNTING]
        statements = [ast.With(items, statements or [ast.Pass()])] if items else statements
    return statements


def _batch_target(loop: ast.For, frame: FrameType, loader: Any) -> ast.expr | None:
    """The part of a loop's target that gets the loader's batch; None for another loop."""
    target, source = loop.target, loop.iter
    for _ in range(4):
        if not isinstance(source, ast.Call) or not source.args:
            break
        if name_of(source) == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            target = target.elts[1]
        elif name_of(source) == "zip" and isinstance(target, ast.Tuple) and len(target.elts) == len(source.args):
            mine = [i for i, a in enumerate(source.args) if _is_loader(_value(a, frame), loader)]
            if len(mine) != 1:
                return None
            target, source = target.elts[mine[0]], source.args[mine[0]]
            continue
        source = source.args[0]  # of a progress bar, too
    value = _value(source, frame)
    reads = _is_loader(value, loader) or any(_is_loader(v, loader) for v in attributes(value).values())
    return target if reads else None


def _value(node: ast.expr, frame: FrameType) -> Any:
    """The value of a name, an attribute or an entry; nothing of the user's is called."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return attributes(_value(node.value, frame)).get(node.attr)
    owner: Any = _value(node.value, frame) if isinstance(node, ast.Subscript) else None
    if isinstance(node, ast.Subscript) and type(owner) in (list, tuple, dict):
        with contextlib.suppress(LookupError, TypeError):
            return owner[_value(node.slice, frame)]
    return None


def _is_loader(value: Any, loader: Any) -> bool:
    data = getattr(loader, "dataset", None)
    return value is loader or data is not None and getattr(value, "dataset", None) is data


# -- statements --------------------------------------------------------------------------------------------------------


def _part(
    frame: FrameType, statements: list[ast.stmt], wanted: Mapping[str, ast.expr], given: set[str] | None = None
) -> _Part | None:
    """The code that gives what is wanted, of these statements only those that it needs. None where that needs nothing
    of the batch, or of what was given for the frame's parameters."""
    space = {**frame.f_globals, **frame.f_locals}
    needed = set().union(*map(names_loaded, wanted.values())) if wanted else set()
    kept, before = slice_of(statements, needed, space)
    if not before & (given or {"__batch__"}):
        return None
    result = ast.Dict([ast.Constant(name) for name in wanted], list(wanted.values()))
    module = ast.Module([*kept, ast.Assign([ast.Name("__result__", ast.Store())], result)], [])
    code = _compiled(module, frame.f_code.co_filename, frame.f_lineno)
    taken = before & space.keys() - (given or set())
    names = {n: space[n] for n in taken if getattr(space[n], "grad_fn", None) is None}  # no graph is kept alive
    return _Part(module, code, names, frame.f_globals, frame.f_code)


def _compiled(module: ast.Module, file: str, line: int) -> CodeType:
    """line: of what stands nowhere in the file."""
    for node in ast.walk(module):
        if isinstance(node, (ast.stmt, ast.expr)) and not hasattr(node, "lineno"):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
    return compile(module, file, "exec")


def _own_batch(
    frame: FrameType,
    path: list[tuple[ast.AST, list[ast.stmt]]],
    places: list[int],
    wanted: Mapping[str, ast.expr],
    takes: list[str],
) -> list[ast.stmt]:
    """The statements of a step that reads no loader, the batch first; none where it comes from further out. places: of
    the loops in the path. takes: gets the variables that are the batch: what the loops around, or the function's
    arguments and statements, give before the model comes in; where that is no tensor, the tensors from outside, too."""
    space, statements = {**frame.f_globals, **frame.f_locals}, _flat(path[places[-1] :] if places else path)
    needed = set().union(*map(names_loaded, wanted.values()))
    kept, _ = slice_of(statements, needed, space)
    rest = kept[next((i for i, statement in enumerate(kept) if _calls_model(statement, space)), len(kept)) :]
    _, before = slice_of(rest, needed, space)
    loads = [node for s in [*rest, *wanted.values()] for node in ast.walk(s) if isinstance(node, ast.Name)]
    at = operator.attrgetter("lineno", "col_offset")
    names = [n for n in dict.fromkeys(node.id for node in sorted(loads, key=at)) if n in before and n in space]
    code = frame.f_code
    given = set() if places else set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    if any(t.requires_grad for n in names if n in given and not _is_model(space[n]) for t in tensors_in(space[n])):
        return []
    around = [path[i][0] for i in places] or statements
    stores = [n for s in around for n in ast.walk(s) if isinstance(getattr(n, "ctx", None), ast.Store)]
    made = given.union(*map(names_stored, stores))
    own = [
        n for n in names if n in made and (tensors_in(space[n]) or _is_data(space[n]) or type(space[n]) in (int, float))
    ]
    if not any(_is_data(space[n]) for n in own):
        own += [
            n for n in names if issubclass(type(space[n]), torch.Tensor) and not space[n].requires_grad and n not in own
        ]
    takes += own
    batch = ast.Tuple([ast.Name(name, ast.Store()) for name in own], ast.Store())
    return [ast.Assign([batch], BATCH), *rest] if any(_is_data(space[n]) for n in own) else []


def _calls_model(statement: ast.stmt, space: Mapping[str, Any]) -> bool:
    """Whether a statement names a model, or what calls one: a function that names it, a method of what holds it."""
    for node in ast.walk(statement):
        value = space.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(value, types.FunctionType):
            named = [value.__globals__.get(name) for name in value.__code__.co_names]
            if any(map(_is_model, [*closure_variables(value).values(), *named])):
                return True
        elif _is_model(value):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = space.get(node.value.id)
            held = {name: v for name, v in attributes(owner).items() if _is_model(v)} if _is_plain(owner) else {}
            code = getattr(getattr(type(owner), node.attr, None), "__code__", None)
            if node.attr in held or code is not None and not held.keys().isdisjoint(code.co_names):
                return True
    return False


def _is_model(value: Any) -> bool:
    return issubclass(type(value), nn.Module) and any(True for _ in value.parameters())


def _is_plain(value: Any) -> bool:
    if issubclass(type(value), (nn.Module, type, types.ModuleType)):
        return False
    try:
        return type(vars(value)) is dict
    except Exception:  # the border: an object of the user's may answer nothing that it is asked
        return False


# -- losses that are no measure ----------------------------------------------------------------------------------------


def is_policy_gradient(loss: torch.Tensor, frames: Iterable[FrameType]) -> bool:
    """Whether the loss adds up products with unlike constants, and the code draws and takes logarithms; not where its
    value is another's, of a cost (`loss + (cost - loss).detach()`). Before its backward."""
    names = {name for frame in frames for code in _codes(frame) for name in code.co_names}
    node: Any = loss.grad_fn
    reports = type(node).__name__ == "AddBackward0" and any(added is None for added, _ in node.next_functions)
    return bool(names & DRAWS and names & LOGS) and not reports and len(set(_weights(loss))) > 1


def is_unweighted(loss: torch.Tensor, frames: Sequence[FrameType]) -> bool:
    """Whether it adds up log-probabilities of what is drawn, all alike, though a variable has the reward of each."""
    if not any({"sample", "log_prob"} <= set(code.co_names) for frame in frames for code in _codes(frame)):
        return False
    values = (_values(v) for f in frames for n, v in frame_variables(f).items() if REWARD_NAMES[0].search(n))
    return len(set(_term_factors(loss))) == 1 and any(len(set(rewards)) > 1 for rewards in values)


def trains_critic(loss: torch.Tensor, frames: Iterable[FrameType]) -> bool:
    """Whether a policy's loss multiplies log-probabilities by `returns - values` with the graph of the values: it then
    trains a critic that a term of its own trains, too. Before its backward."""
    names = {name for frame in frames for code in _codes(frame) for name in code.co_names}
    if not (names & DRAWS and names & LOGS):
        return False
    todo, known, others, led = [loss.grad_fn], set[Any](), set[Any](), list[set[Any]]()
    while todo and len(known) < MOST_NODES:
        node = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        following = [n for n, _ in node.next_functions]
        if type(node).__name__ == "MulBackward0" and None not in following:
            led += [led_by for one, other in (following, following[::-1]) if (led_by := _own_of_critic(one, other))]
        elif BETWEEN.match(type(node).__name__):
            todo += following
        else:
            others |= _variables(node)
    return any(own & others for own in led)


def _own_of_critic(actor: Any, critic: Any) -> set[Any]:
    """The parameters of a critic alone, where one factor has log-probabilities and the other a difference without."""
    logs = any("Log" in type(node).__name__ for node in graph_nodes([actor]))
    other = [type(node).__name__ for node in graph_nodes([critic])]
    differs = any(name in ("SubBackward0", "RsubBackward0") for name in other[:8])
    return _variables(critic) - _variables(actor) if logs and differs and not any("Log" in n for n in other) else set()


def _variables(node: Any) -> set[Any]:
    return {n.variable for n in graph_nodes([node]) if hasattr(n, "variable")}


def _codes(frame: FrameType) -> Iterator[CodeType]:
    """The code of a frame, of the functions that it names, and of the user's classes of its objects."""
    yield frame.f_code
    for value in frame_variables(frame).values():
        members = list(vars(type(value)).values())
        for function in (value, *members):
            code = getattr(function, "__code__", None) if type(function) is types.FunctionType else None
            if code is not None and code_kind(code) == USER:
                yield code


def _weights(loss: torch.Tensor) -> Iterator[float]:
    """The constants that are factors of what a loss adds up; not those of one number that is learned for all of them (a
    temperature)."""
    todo, known = list[Any]([loss.grad_fn]), set[Any]()
    while todo and len(known) < MOST_NODES:
        node = todo.pop()
        if node in known or not BETWEEN.match(type(node).__name__):
            continue
        known.add(node)
        following = [n for n, _ in node.next_functions]
        todo += following[: 1 if type(node).__name__ == "DivBackward0" else None]
        if type(node).__name__ == "MulBackward0" and len(following) == 2 and None in following:
            factor = node._saved_self if following[0] is None else node._saved_other
            sizes = [size.shape for size in (following[0] or following[1])._input_metadata]  # none of a leaf
            if isinstance(factor, torch.Tensor) and (factor.numel() == 1 or any(math.prod(size) > 1 for size in sizes)):
                yield from factor.detach().flatten()[:64].tolist()


def _term_factors(loss: torch.Tensor) -> list[float]:
    """What the loss multiplies each of its terms by, up to a positive factor, in their order."""
    todo: list[tuple[Any, torch.Tensor]] = [(loss.grad_fn, torch.ones(1, device="cpu"))]
    factors: list[float] = []
    for _ in range(MOST_NODES):
        if not todo:
            break
        node, factor = todo.pop()
        kind = type(node).__name__.removesuffix("Backward0")
        following = [n for n, _ in getattr(node, "next_functions", ())]
        if not BETWEEN.match(kind):
            factors += factor.tolist()
            continue
        if kind in ("Mul", "Div") and None in following or kind == "Div":
            constant = node._saved_self if following[0] is None else node._saved_other
            own = constant.detach().cpu().float().flatten() if isinstance(constant, torch.Tensor) else factor[:1]
            own = own.sign() if own.numel() == 1 and kind == "Div" else own
            factor = factor * own if len({1, len(own), len(factor)}) < 3 else factor
        apart = kind in ("Stack", "Cat") and len(factor) == len(following)
        for i, other in reversed([*enumerate(following)][: 1 if kind == "Minimum" else None]):
            negative = kind in ("Neg", "Rsub") or kind == "Sub" and i == 1
            todo += [(other, (factor[i : i + 1] if apart else factor) * (-1 if negative else 1))] * (other is not None)
    return factors


class RewardWatch:
    """name: the variable that holds what a step brought, "" for none; values: of each backward: a number, the mean of a
    tensor, the sum of a list, the newest entry of a list that grows on. slopes: of the first ones, the correlation of
    such a variable with what the loss multiplies each log-probability by: below 0, as the loss is minimized; 0 where it
    is unweighted. leads: see `trains_critic`."""

    def __init__(self, unweighted: bool = False, leads: bool = False) -> None:
        self.unweighted, self.leads = unweighted, leads
        self.name, self.values, self._last = "", list[float](), (0, 0)
        self.slopes: list[float] = []

    @classmethod
    def of(cls, loss: torch.Tensor, frames: Sequence[FrameType], reads: bool) -> RewardWatch | None:
        """Of a policy gradient; None where the loss is none. reads: whether the loop reads a loader."""
        leads = trains_critic(loss, frames)
        if leads or is_policy_gradient(loss, frames):
            return cls(leads=leads)
        return cls(unweighted=True) if not reads and is_unweighted(loss, frames) else None

    @property
    def slope(self) -> float | None:
        """The middle one; None where it is not known."""
        if self.unweighted:
            return 0.0
        return statistics.median(self.slopes) if len(self.slopes) >= 5 else None

    def note(self, names: Mapping[str, Any], loss: torch.Tensor) -> None:
        if len(self.values) < FIRST:
            factors = torch.tensor(_term_factors(loss), device="cpu")
            known = (_values(v) for n, v in names.items() if any(pattern.search(n) for pattern in REWARD_NAMES))
            rows = (torch.tensor(row, device="cpu") for row in known if len(row) == len(factors) > 3)
            slopes = [float(torch.corrcoef(torch.stack([row, factors]))[0, 1]) for row in rows]
            self.slopes += sorted((s for s in slopes if s == s), key=abs)[-1:]
        if not self.values:
            named = (n for pattern in REWARD_NAMES for n in names if pattern.search(n) and not n.startswith("_"))
            self.name = next((n for n in named if _number(names[n]) is not None), "")
        value: Any = names.get(self.name)
        length = len(value) if type(value) is list else 0
        before, self._last = self._last, (id(value), length)
        grown = length > 0 and before[0] == id(value) and length > before[1] > 0
        number = _number(value[-1] if grown else value)
        if number is not None:
            if grown and len(self.values) == 1:
                self.values.clear()  # it was the sum of a history
            self.values.append(number)


def _values(value: Any) -> list[float]:
    """A tensor's, an array's or a list's numbers; [] where it is something else."""
    if issubclass(type(value), (list, tuple)):
        numbers = [_number(v) for v in value[:MOST_NODES]]
        return [n for n in numbers if n is not None] if None not in numbers else []
    known = _number(value) is not None and not issubclass(type(value), (int, float, list))
    return torch.as_tensor(value).detach().cpu().flatten()[:MOST_NODES].tolist() if known else []


def _number(value: Any) -> float | None:
    kind = type(value)  # and no isinstance: an object of the user's may answer that as it likes
    if issubclass(kind, list):
        numbers = [_number(v) for v in value]
        return None if not numbers or None in numbers else float(sum(n for n in numbers if n is not None))
    if issubclass(kind, torch.Tensor) or hasattr(kind, "__array_interface__"):
        values = torch.as_tensor(value)
        known = values.numel() and not values.requires_grad and not values.is_complex()
        return float(values.double().mean()) if known else None
    return float(value) if issubclass(kind, (int, float)) and kind is not bool else None


@dataclasses.dataclass
class LoopSubject:
    """What a loop trains. names: the variables of the functions that were running; parts: (name, value) of its loaders,
    its scheduler and its loss."""

    subject: Subject
    names: dict[str, Any]
    parts: dict[str, tuple[str, Any]]

    @property
    def model(self) -> nn.Module:
        models = self.subject.models
        return next(iter(models.values())) if len(models) == 1 else JointModel(models)

    def part(self, kind: str) -> Any:
        return self.subject.optimizer if kind == "optimizer" else self.parts.get(kind, ("", None))[1]

    def __str__(self) -> str:
        return ", ".join([str(self.subject), *(f"{kind} `{name}`" for kind, (name, _) in self.parts.items() if name)])


class LoopStart:
    """found: called once, with what the loop trains, at its first call of it with gradients, on the loop's own stack;
    it may give the watch of the loaders, which then follows the open pass. Models that an optimizer trains are waited
    for; one that none trains is taken at its first call after a gradient has come, or its weights have changed. names:
    other variables of the user's, for the validation batches, the scheduler and the loss."""

    def __init__(self, names: Mapping[str, Any] | None = None) -> None:
        self.names = dict(names or {})
        self.found: Callable[[LoopSubject], LoaderWatch | None] = lambda subject: None
        self.restore_rng: Callable[[], None] = lambda: None
        self._passes: list[OpenPass] = []
        self._called: dict[int, list[tuple[int, bool]]] = {}
        self._watch: LoaderWatch | None = None
        self._busy = False

    @contextlib.contextmanager
    def waiting(self, found: Callable[[LoopSubject], LoaderWatch | None]) -> Iterator[None]:
        self.found, self._watch, self._busy = found, None, False
        self._passes.clear()
        self._called.clear()
        self.restore_rng = save_rng()
        own, call = DataLoader.__iter__, nn.Module.__call__

        def relayed(loader: Any) -> Iterator[Any]:
            return self._relayed(loader, own(loader))

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self._called_with_gradients(module)  # before the call: its hooks are looked up within
            return call(module, *args, **kwargs)

        with contextlib.ExitStack() as stack:
            stack.callback(setattr, DataLoader, "__iter__", own)
            DataLoader.__iter__ = relayed  # type: ignore[method-assign, assignment]
            stack.callback(setattr, nn.Module, "__call__", call)
            nn.Module.__call__ = called  # type: ignore[method-assign]
            self._end = stack.pop_all().close
        try:
            yield
        finally:
            self._end()

    def _relayed(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a pass; from the start on, followed by the watch."""
        now = OpenPass(loader)
        self._passes.append(now)
        try:
            for batch in batches:
                now.read, now.previous, now.batch, now.draw = now.read + 1, now.batch, batch, save_torch_rng()
                yield batch
                if self._watch is not None:
                    break
        finally:
            self._passes.remove(now)
        if self._watch is not None:
            yield from self._watch.follow(loader, batches, now)

    def _called_with_gradients(self, module: nn.Module) -> None:
        if self._busy or not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        self._busy = True
        try:
            subject = self._subject(module)
            if subject is not None:
                self._end()
                self._watch = self.found(subject)
                if self._watch is not None:
                    for each in self._passes:
                        self._watch.take_over(each)
        finally:
            self._busy = False

    def _subject(self, module: nn.Module) -> LoopSubject | None:
        names: dict[str, Any] = {}
        for frame in loop_frames(sys._getframe(1)):
            names = {**frame_variables(frame), **names}
        models = _each_once(discover("model", names) | held("model", names))
        models = {n: m for n, m in models.items() if any(True for _ in m.parameters())}
        parts = {id(p) for m in models.values() for p in m.modules() if p is not m}
        models = {n: m for n, m in models.items() if id(m) not in parts}
        mine = next((n for n, m in models.items() if any(p is module for p in m.modules())), None)
        if mine is None:
            return None
        optimizers = _each_once(discover("optimizer", names) | held("optimizer", names))
        optimizers = {n: o for n, o in optimizers.items() if any(trains(o, m) for m in models.values())}
        trained = {n: m for n, m in models.items() if any(trains(o, m) for o in optimizers.values())}
        state = [(p._version, p.grad is not None) for p in module.parameters()]
        if mine not in trained and self._called.setdefault(id(module), state) == state:
            return None  # features are taken from it, perhaps
        models = trained if mine in trained else {mine: models[mine]}
        return self._with_parts(Subject(models, optimizers, named=False), names)

    def _with_parts(self, subject: Subject, names: dict[str, Any]) -> LoopSubject:
        model = next(iter(subject.models.values()))
        known = around(model, {**self.names, **names})
        read = next((p.loader for p in reversed(self._passes)), None)
        train = next(((n, v) for n, v in discover("loader", known).items() if v is read), ("", read))
        if read is None:
            name, value = part("train_loader", around(model, names))
            train = (name, value) if isinstance(value, DataLoader) else ("", None)
        kinds = ("val_loader", "scheduler", *(("loss_fn",) if len(subject.models) == 1 else ()))
        parts = {"train_loader": train, **{kind: part(kind, known) for kind in kinds}}
        if parts["val_loader"][1] is train[1]:
            del parts["val_loader"]
        return LoopSubject(subject, names, parts)


def _each_once(things: Mapping[str, Any]) -> dict[str, Any]:
    first: dict[int, tuple[str, Any]] = {}
    for name, thing in things.items():
        first.setdefault(id(thing), (name, thing))
    return dict(first.values())
