"""A value that the backward needs was changed in place: by which statement of the user's.

The node that misses its value is still in the graph, and so is what was computed with the changed one. Every in-place
statement of the functions that took part is weighed: whether it changes a variable that was made by the very op,
whether the graph has a node of its kind next to it, and whether it stands in the forward of the module to which the
nearest parameters belong."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from nbdebug.chapters.error.facts_autograd import Change, InPlaceFacts
from nbdebug.chapters.error.looks.autograd.calls import class_forward, outward, reached, trail
from nbdebug.chapters.error.looks.autograd.changes import Found, changes, in_place_modules, of_statement
from nbdebug.chapters.error.looks.autograd.graph import Saved, leaves, modified, nodes, op_of, roots
from nbdebug.chapters.error.looks.autograd.held import modules, parameters
from nbdebug.chapters.error.looks.autograd.source import Code, failing, value
from nbdebug.chapters.error.looks.autograd.stepped import optimizer_of, stepping
from nbdebug.chapters.error.looks.autograd.trying_in_place import tried
from nbdebug.chapters.error.looks.autograd.wanting import asked
from nbdebug.chapters.error.looks.autograd.weighing import Weighed, weigh
from nbdebug.chapters.error.operands import operands
from nbdebug.chapters.error.scene import Scene, is_tensor
from nbdebug.observe.named import attributes

SAVED = re.compile(
    r"modified by an inplace operation: \[\S*?(\w+)Tensor \[([\d, ]*)\]\](?:, which is output \d+ of "
    r"(\w+),)? is at version (\d+); expected version (\d+)"
)
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "ComplexFloat": "complex64"}
AT_ONCE = (
    (r"a leaf Variable that requires grad is being used in an in-place", "leaf"),
    (r"a view of a leaf Variable that requires grad is being used in an in-place", "leaf view"),
    (r"is a view (and|of a view).*modified inplace|A view was created in .* modified inplace", "view"),
    (r"refers? to a single memory location|some elements of the input tensor and the written-to tensor", "expanded"),
    (r"functions with out=\.\.\. arguments don't support automatic differentiation", "out"),
    (r"Inplace update to inference tensor", "inference"),
)


def look(scene: Scene) -> InPlaceFacts | None:
    if scene.type not in ("RuntimeError", "NotImplementedError"):
        return None
    said = SAVED.search(scene.message)
    if said:
        return _saved(scene, said)
    if "modified by an inplace operation" in scene.message:
        return _saved(scene, None)
    what = next((what for pattern, what in AT_ONCE if re.search(pattern, scene.message)), None)
    return _at_once(scene, what) if what else None


def _saved(scene: Scene, said: re.Match[str] | None) -> InPlaceFacts:
    """Seen in backward: the node that misses its value, and the statement that took it."""
    found = nodes(roots(scene))
    missing = _named(modified(found), said)
    shape = tuple(int(n) for n in said[2].split(",") if n.strip()) if said else None
    version = int(said[4]) if said else None
    leaf = missing.leaf if missing is not None else None
    names = {id(p): name for name, p in _parameters(scene)}
    holder = _owner(scene, missing)
    optimizer, step_change = None, None
    steps: tuple[str, ...] = ()
    if leaf is not None and id(leaf) in names:
        optimizer = optimizer_of(scene, leaf)
        step_change, steps = stepping(scene, leaf, earlier=True)
    against = Weighed(missing, found, shape, version, holder, leaf)
    weighed = [] if step_change is not None else weigh(_candidates(scene), against, scene)
    if step_change is None and not weighed and leaf is not None:
        step_change, steps = stepping(scene, leaf, earlier=False)
    if step_change is None and not weighed:
        alone = weigh(_elsewhere(scene), against, scene)
        weighed = alone if len(alone) == 1 else []
    saved_by = op_of(missing.node) if missing is not None else ""
    best = step_change or (weighed[0] if weighed else None)
    return InPlaceFacts(
        scene.raised(),
        "saved",
        saved_by,
        missing is not None and missing.made_by is missing.node,
        shape,
        DTYPES.get(said[1], said[1].lower()) if said else None,
        version,
        int(said[5]) if said else None,
        names.get(id(leaf)) if leaf is not None else None,
        _variable(scene, leaf),
        holder,
        best,
        tuple(weighed[1:4]),
        optimizer,
        steps,
        tried(best, saved_by, shape),
        _loss(scene),
    )


def _loss(scene: Scene) -> str:
    codes = trail(scene)
    of = asked(scene, codes[0], "loss") if codes else None
    return ast.unparse(of) if of is not None else ""


def _named(missing: list[Saved], said: re.Match[str] | None) -> Saved | None:
    """Of the nodes that miss a value the one that torch speaks of: of the named op, nearest to the loss."""
    op = (said[3] or "").rstrip("0123456789").removesuffix("Backward") if said else ""
    of_op = [s for s in missing if op and s.made_by is not None and op_of(s.made_by) == op]
    return next(iter(of_op or missing), None)


def _parameters(scene: Scene) -> list[tuple[str, torch.nn.Parameter]]:
    """(dotted name with the model's, parameter) of all models."""
    return [(f"{called}.{name}", p) for called, model in scene.owners.models.items() for name, p in parameters(model)]


def _owner(scene: Scene, missing: Saved | None) -> str | None:
    """The module nearest to the node that misses its value, by the parameters that it was computed from."""
    if missing is None:
        return None
    owners = {
        id(p): scene.path(part)
        for model in scene.owners.models.values()
        for part in modules(model)
        for p in (attributes(part).get("_parameters") or {}).values()
        if p is not None
    }
    return next((owners[id(leaf)] for leaf in leaves(missing.node) if id(leaf) in owners), None)


def _candidates(scene: Scene) -> list[tuple[Found | None, Change, Any]]:
    """(with its syntax, change, the module whose method it is) of all in-place changes at hand."""
    found: list[tuple[Found | None, Change, Any]] = []
    cells = [
        (cell, None)
        for code in trail(scene)
        for cell in outward(code)
        if isinstance(cell.node, ast.Module) and cell is not code
    ]
    for code, module in [*reached(scene), *cells]:
        for one in changes(code, scene.path(module) if module is not None else None):
            found.append((one, one.change, module))
    return found + [(None, change, part) for change, part in in_place_modules(scene)]


def _elsewhere(scene: Scene) -> list[tuple[Found | None, Change, Any]]:
    """The changes in the forwards of all module classes that the user has, where the module itself is gone."""
    spaces = [scene.names, *(frame.globals for frame in scene.users), *(frame.names for frame in scene.users)]
    kinds = {id(kind): kind for space in spaces for kind in space.values() if issubclass(type(kind), type)}
    codes = [code for kind in kinds.values() if (code := class_forward(kind)) is not None]
    return [(one, one.change, None) for code in codes for one in changes(code)]


def _variable(scene: Scene, leaf: Any) -> str | None:
    """The name of a tensor among the user's variables."""
    return next((name for name, thing, _ in scene.variables() if thing is leaf), None) if leaf is not None else None


def _at_once(scene: Scene, what: str) -> InPlaceFacts:
    """Refused on the spot: the failing statement itself changes it."""
    codes = trail(scene)
    for code in codes:
        statement = _statement(code)
        for one in of_statement(statement, code, scene.raised().where.module) if statement is not None else ():
            lies = value(one.node, code)
            names = {id(p): name for name, p in _parameters(scene)}
            tensor = lies if is_tensor(lies) else None
            return InPlaceFacts(
                scene.raised(),
                what,
                shape=tuple(tensor.shape) if tensor is not None else None,
                parameter=names.get(id(tensor)),
                tensor=one.change.target,
                change=one.change,
            )
    name, tensor = _given(scene, what)
    inside = next(
        (change for change, part in in_place_modules(scene) if any(frame.module is part for frame in scene.trail)), None
    )
    return InPlaceFacts(
        scene.raised(), what, shape=tuple(tensor.shape) if tensor is not None else None, tensor=name, change=inside
    )


def _given(scene: Scene, what: str) -> tuple[str | None, Any]:
    """The user's tensor that went in where torch's own code was refused."""
    for frame in scene.users:
        for text, thing in operands(frame):
            if is_tensor(thing) and (thing.is_leaf and thing.requires_grad if what.startswith("leaf") else True):
                return text, thing
    return None, None


def _statement(code: Code) -> Any:
    node = failing(code)
    if node is None or isinstance(node, ast.stmt):
        return node
    return next((n for n in code.source.around(node) if isinstance(n, ast.stmt)), None)
