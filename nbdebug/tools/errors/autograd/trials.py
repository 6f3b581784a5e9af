"""Fixes of errors of the graph, tried: the user's training is read again, with gradients and with the edited lines.

A missing gradient, a graph that is walked twice, a value changed in place: the error appears in `backward()`, and the
cure stands elsewhere. So the function is read from its beginning, or from the loop around, over some rounds. Without
the edit the error must appear again; with it no error may. Nothing of the user's is run (see `sandbox`).
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import linecache
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nbdebug.observe.frames import Frame
from nbdebug.observe.locations import cell_name
from nbdebug.observe.sources import (
    SCOPES,
    edit_of,
    function_at,
    functions,
    loops_around,
    names_loaded,
    nodes,
    nodes_of,
    parents,
    parse,
    source,
    statement_at,
    tree_of,
)
from nbdebug.observe.variables import (
    named_children,
    named_modules,
)
from nbdebug.report import Edit, Finding, Fix
from nbdebug.text import count
from nbdebug.tools.errors.autograd.functions import callee_word, first_line
from nbdebug.tools.errors.autograd.in_place import in_place_modules
from nbdebug.tools.errors.autograd.rules import INSIDE
from nbdebug.tools.errors.context import ErrorContext, calls_in, functions_around, statement
from nbdebug.tools.errors.sandbox import (
    DEEPEST,
    CannotRun,
    End,
    Returned,
    Run,
    TrialResult,
    continued,
    first_words,
    inserted,
    quiet,
    read_block,
)
from nbdebug.tools.errors.training import GRAD_MODES, ROUNDS, ROUNDS_OF_DATA, TRAINING_SECONDS, LoopEnd, TrainingSandbox


def cured(context: ErrorContext, finding: Finding) -> Finding:
    """A finding about the graph with each fix as an edit that cures, where one can be had: its text in the place of the
    cause's statement, of the failing one, or beside it; the program is read before and after it, with gradients, over
    some rounds of its loop. The error must appear without the edit, and not with it."""
    until, fixes = time.monotonic() + 4 * TRAINING_SECONDS, list[Fix]()
    for fix in finding.fixes:
        wanted = not any(done.verified for done in fixes) and (fix.verified is not False or fix.edit is not None)
        fixes.append(_tried(context, finding, fix, until) if wanted else fix)
    return dataclasses.replace(finding, fixes=tuple(sorted(fixes, key=lambda fix: not fix.verified)))


def _tried(context: ErrorContext, finding: Finding, fix: Fix, until: float) -> Fix:
    alone = context.message.startswith("optimizer got an empty")  # nothing is walked back then
    rounds = ROUNDS_OF_DATA if alone else 0
    for edit in [fix.edit] if fix.edit is not None else _placements(context, finding, fix.code):
        trial = retried(context, edit, rounds) if edit is not None and time.monotonic() < until else None
        if edit is not None and trial is not None and trial.worked:
            return Fix.of(fix.title, edit, True, {f"the {'program' if rounds else 'training'} then runs": trial.text})
        if trial is not None and fix.edit is not None:
            return dataclasses.replace(fix, verified=False, after={"it raised": trial.text, "runs": "1"})
    return fix


def _placements(context: ErrorContext, finding: Finding, code: str) -> Iterator[Edit | None]:
    """The places in which a fix may be meant to stand, the likeliest first."""
    where, frame = finding.where, context.users[0]
    failing = statement(frame)
    cause = statement_at(where.file, where.line) if where.file and where.line else None
    if failing is None:
        return
    yield from _with_gradients(where.file, cause, where.line)
    yield from _without_inference_mode(context, code)
    if code.endswith(INSIDE) and cause is not None and where.file == frame.site.file:
        yield _moved_inside(where.file, cause, frame.site.line)
    code = "\n".join(line.partition("   #")[0] for line in code.split("\n"))
    if "nn.functional." in code and "nn" not in {**frame.globals, **frame.names}:
        code = code.replace("nn.functional.", "torch.nn.functional.")
    tree = parse(code)
    if tree is None or not tree.body or "..." in code:
        return
    places = [(where.file, cause), (frame.site.file, failing)]
    around = _function_around(tree_of(frame.site.file) or ast.Module([], []), frame.site.line, frame)
    alike = [n for n in ast.walk(around) if isinstance(n, ast.stmt)] if around is not None else []
    yield from _reordered(frame, failing, alike, tree.body, code)
    for file, line in [*places, *((frame.site.file, line) for line in alike)]:
        if line is not None and file and _same_kind(line, tree.body[-1]):
            text = code
            if isinstance(line, ast.Return) and isinstance(tree.body[-1], ast.Expr):
                text = f"return {code}"
            rebuilt = _rebuilt_around(file, line, tree.body[-1])
            yield edit_of(file, {line: _indented(text, line), **rebuilt})
    yield from _as_loss(context, frame, failing, alike, tree.body, code)
    for file, line in places[::-1] if cause is not failing else places[1:]:
        if file and isinstance(line, (ast.Expr, ast.Assign, ast.AugAssign)):
            pad = "\n" + " " * line.col_offset
            yield edit_of(file, {line: "{raw}" + pad + _indented(code, line)})
            yield edit_of(file, {line: _indented(code, line) + pad + "{raw}"})


def _without_inference_mode(context: ErrorContext, code: str) -> Iterator[Edit | None]:
    """`no_grad` where the user's files turn inference mode on."""
    for frame in context.users if code.startswith("with torch.no_grad():\n    ...") else ():
        for node in nodes_of(frame.site.file):
            if isinstance(node, ast.Attribute) and node.attr == "inference_mode":
                yield edit_of(frame.site.file, {node: f"{ast.unparse(node.value)}.no_grad"})


def _moved_inside(file: str, line: ast.stmt, within: int) -> Edit | None:
    """A statement as the first of the loop around line `within` that begins after it."""
    around = [n for n in loops_around(file, within) if line.lineno < n.lineno]
    if not around or not isinstance(line, ast.Assign) or line.lineno != line.end_lineno:
        return None
    first = around[0].body[0]
    text = source(file, line)
    if "{}" in text or "{raw}" in text:
        return None  # these stand for other things in an edit
    return _tidy(edit_of(file, {line: "", first: f"{text}\n{' ' * first.col_offset}{{raw}}"}))


def _with_gradients(file: str | None, cause: ast.stmt | None, line: int | None) -> Iterator[Edit | None]:
    """The cause's statement out of its `no_grad`, its function without that decorator, `requires_grad = True`."""
    tree = tree_of(file) if file else None
    if tree is None or file is None or line is None:
        return
    lines = [text.rstrip("\n") for text in linecache.getlines(file)]
    inside = [n for n in nodes(tree) if isinstance(n, (ast.With, ast.FunctionDef))]
    inside = [n for n in inside if first_line(n) <= line <= (n.end_lineno or 0)]
    for node in sorted(inside, key=first_line, reverse=True):
        if isinstance(node, ast.With) and GRAD_MODES.get(callee_word(node.items[0].context_expr)) is False:
            depth, body = node.body[0].col_offset - node.col_offset, lines[node.body[0].lineno - 1 : node.end_lineno]
            new = "\n".join(text[depth:] if text[:depth].isspace() else text for text in body)
            old = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if len(node.items) == 1:
                yield Edit(file, node.lineno, node.end_lineno or 0, old, new, cell_name(file))
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if GRAD_MODES.get(callee_word(mark)) is False:
                old = "\n".join(lines[mark.lineno - 1 : node.lineno])
                new = "\n".join(lines[(mark.end_lineno or 0) : node.lineno])
                yield Edit(file, mark.lineno, node.lineno, old, new, cell_name(file))
    text = ast.unparse(cause) if cause is not None else ""
    if cause is not None and "requires_grad" in text:
        flags = [n for n in ast.walk(cause) if isinstance(n, ast.Constant) and n.value is False]
        yield edit_of(file, {flags[0]: "True"}) if len(flags) == 1 else None


def _reordered(
    frame: Frame, failing: ast.stmt, alike: list[ast.stmt], body: list[ast.stmt], code: str
) -> Iterator[Edit | None]:
    """The failing statement in a new text, without the earlier statements that are a part of it: a backward of two
    losses together, a step after all of them. And a sum of numbers, with a backward of what is added to it."""
    texts, names = {ast.unparse(n) for n in body}, {n.id for n in ast.walk(body[-1]) if isinstance(n, ast.Name)}
    parts: list[ast.stmt] = []
    for line in alike:
        base = getattr(getattr(getattr(line, "value", None), "func", None), "value", None)
        whole = isinstance(base, ast.Name) and base.id in names and callee_word(line.value) == "backward"  # type: ignore[attr-defined]
        if isinstance(line, ast.Expr) and line is not failing and (whole or ast.unparse(line) in texts):
            parts.append(line)
    if parts and isinstance(failing, ast.Expr) and isinstance(body[-1], ast.Expr):
        yield _tidy(edit_of(frame.site.file, {**dict.fromkeys(parts, ""), failing: _indented(code, failing)}))
    loss = getattr(getattr(getattr(failing, "value", None), "func", None), "value", None)
    for line in alike if isinstance(loss, ast.Name) else ():
        added = _added(line, loss.id)  # type: ignore[union-attr]
        if added is not None:
            if isinstance(added, ast.Name):
                yield edit_of(frame.site.file, {added: "{}.item()", loss: added.id})  # type: ignore[dict-item]
            else:
                name = next(n for n in ("loss", "term", "current") if n != loss.id and n not in frame.names)  # type: ignore[union-attr]
                first = f"{name} = {ast.unparse(added)}\n" + " " * line.col_offset + "{raw}"
                yield edit_of(frame.site.file, {line: first, added: f"{name}.item()", loss: name})  # type: ignore[dict-item]


def _added(line: ast.stmt, name: str) -> ast.expr | None:
    """The `x` of `total += x` and of `total = total + x`."""
    if isinstance(line, ast.AugAssign) and isinstance(line.op, ast.Add) and ast.unparse(line.target) == name:
        return line.value
    value = line.value if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name else None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and ast.unparse(value.left) == name:
        return value.right
    return None


def _tidy(edit: Edit | None) -> Edit | None:
    """Without the empty lines that deleted statements leave."""
    if edit is None:
        return None
    old = {line for line in edit.old.split("\n") if not line.strip()}
    new = [line for line in edit.new.split("\n") if line.strip() or line in old and not line]
    return dataclasses.replace(edit, new="\n".join(new))


def _rebuilt_around(file: str, line: ast.stmt, new: ast.stmt) -> dict[ast.AST, str]:
    """`torch.tensor(x)` becomes `x` where the new statement gives `x` its graph."""
    names = {ast.unparse(t) for t in new.targets} if isinstance(new, ast.Assign) else set()
    function = function_at(file, line.lineno)
    calls = calls_in(function)
    return {
        call: ast.unparse(call.args[0])
        for call in calls
        if callee_word(call) in ("tensor", "as_tensor", "float") and call.args and ast.unparse(call.args[0]) in names
        if not line.lineno <= call.lineno <= (line.end_lineno or 0)
    }


def _as_loss(
    context: ErrorContext, frame: Frame, failing: ast.stmt, alike: list[ast.stmt], body: list[ast.stmt], code: str
) -> Iterator[Edit | None]:
    """An expression as the value of the loss; a `target` in it is the tensor of whole numbers that the user has."""
    loss = getattr(getattr(getattr(failing, "value", None), "func", None), "value", None)
    if len(body) > 1 or not isinstance(body[0], ast.Expr) or callee_word(body[0].value) == "backward":
        return
    texts = [code]
    if re.search(r"\btarget\b", code) and "target" not in frame.names:
        lines = [
            n for n in alike if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == ast.unparse(loss or failing)
        ]
        made = {ast.unparse(t) for n in alike if isinstance(n, ast.Assign) for t in n.targets}
        used = {n.id for line in lines for n in ast.walk(line) if isinstance(n, ast.Name)} - made
        whole = [t.name for t in context.tensors() if t.dtype == "int64" and t.shape and t.name in used]
        texts = [re.sub(r"\btarget\b", name, code) for name in whole[:3]]
    lines = [
        n for n in alike if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == ast.unparse(loss or failing)
    ]
    for text in texts:
        for line in lines[-1:]:
            yield edit_of(frame.site.file, {line.value: text})


PAIRS = (["append", "append"], ["backward", "backward"])
"""Methods that another object may have in the new text of a line."""


def _same_kind(line: ast.stmt, new: ast.stmt) -> bool:
    """Whether a statement can be a new text of another: it gives the same names, or calls the same method."""
    if isinstance(line, ast.Return):
        return isinstance(new, (ast.Return, ast.Expr))
    if isinstance(line, ast.Assign) and isinstance(new, ast.Assign):
        names = [ast.unparse(t) for t in line.targets]
        again = names_loaded(new.value) & set(names) - names_loaded(line.value)  # what this line gives would be lost
        return names == [ast.unparse(t) for t in new.targets] and not again
    if isinstance(line, ast.Expr) and isinstance(new, ast.Expr):
        calls = [n.value.func if isinstance(n.value, ast.Call) else n.value for n in (line, new)]
        return ast.unparse(calls[0]) == ast.unparse(calls[1]) or [callee_word(c) for c in calls] in PAIRS
    return isinstance(line, ast.AugAssign) and ast.unparse(line.target) in ast.unparse(new)


def _indented(code: str, line: ast.stmt) -> str:
    return code.replace("\n", "\n" + " " * line.col_offset)


MOST_OFFERS = 2
"""Fixes that are no edits yet, of which one is looked for."""


def edits_tried(context: ErrorContext, finding: Finding) -> Finding:
    """A finding whose first fix that can be had as an edit, and was not tried yet, is: the program is read from before
    the error, where it must appear, then with the edit; else from the failing line on, with the edit. One that cures
    goes first."""
    fixes = list(finding.fixes)
    if any(fix.verified and fix.edit is not None for fix in fixes):
        return finding
    for at, fix in enumerate(fixes):
        if fix.verified is False or at >= MOST_OFFERS and fix.edit is None:
            continue
        for edit in [fix.edit] if fix.edit is not None else _as_assignment(context, fix.code):
            trial = _trial_of(context, edit, fix.edit is None) if edit is not None else None
            if edit is not None and trial is not None and trial.worked:
                cure = Fix.of(fix.title, edit, True, {**fix.after, "the program then runs": trial.text})
                return dataclasses.replace(finding, fixes=(cure, *fixes[:at], *fixes[at + 1 :]))
            if trial is not None and fix.edit is not None:
                fixes[at] = dataclasses.replace(fix, verified=False, after=trial.after)
            elif trial is None and edit is not None and fix.verified is None:  # as their own text, at least
                fixes[at] = Fix.of(fix.title, edit, None, fix.after)
    return dataclasses.replace(finding, fixes=tuple(fixes))


def _trial_of(context: ErrorContext, edit: Edit, strict: bool) -> TrialResult | None:
    """strict: from the failing line on, that must fail without the edit; what passes there, as a kernel of a card's
    does on the CPU, shows nothing."""
    trial = retried(context, edit, ROUNDS_OF_DATA)
    if trial is not None:
        return trial
    before = continued(context, None)
    if before is not None and before.worked or before is None and strict:
        return None
    return continued(context, edit)


def _as_assignment(context: ErrorContext, code: str) -> Iterator[Edit | None]:
    """A suggestion of a new value, `x = …`, as an edit: before the failing line; of an argument, as the first line of
    its function; of what only the line itself names (`batch.label`), in it; where `x` gets its value."""
    code = "\n".join(line.partition("   #")[0] for line in code.split("\n"))
    frame, line, tree = context.frame, context.line, parse(code)
    if tree is None or any(callee_word(call)[:1].isupper() for call in calls_in(tree)):  # weights that nobody trains
        return
    if all(ast.unparse(n.targets[0]) in ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign)):
        yield inserted(context, code)
    new = tree.body[0] if len(tree.body) == 1 else None
    if frame is None or line is None or not isinstance(new, ast.Assign) or not isinstance(new.targets[0], ast.Name):
        return
    name, scope = new.targets[0].id, next(iter(functions_around(tree_of(frame.site.file), line.lineno)), None)
    if isinstance(scope, ast.FunctionDef) and name in {a.arg for a in scope.args.args}:
        first = next((n for n in scope.body if not isinstance(getattr(n, "value", None), ast.Constant)), scope.body[-1])
        if first is not line:
            yield edit_of(frame.site.file, {first: f"{code}\n{' ' * first.col_offset}{{raw}}"})
    made = [n for n in ast.walk(scope or ast.Module([], [])) if isinstance(n, ast.Assign)]
    made = [n for n in made if name in map(ast.unparse, n.targets) and name not in names_loaded(n.value)]
    if len(made) == 1 and made[0].lineno < line.lineno and isinstance(new.value, ast.Call):
        own, text = ast.unparse(made[0].value), ast.unparse(new.value)
        yield edit_of(frame.site.file, {made[0].value: re.sub(rf"^({re.escape(own)}|{name})(?=\.)", "{}", text)})
    parts = [n for n in ast.walk(new.value) if isinstance(n, ast.Attribute) and n.attr == name]
    alike = [n for n in ast.walk(line) for part in parts if ast.unparse(n) == ast.unparse(part)]
    if alike and not any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(line)):
        yield edit_of(frame.site.file, dict.fromkeys(alike, f"({ast.unparse(new.value)})"))


def retried(
    context: ErrorContext, edit: Edit, rounds: int = 0, layers: Mapping[int | str, nn.Module] | None = None
) -> TrialResult | None:
    """The training with an edit: of the innermost function of the user's in which the error appears again without it,
    and which reads the edited lines. None where there is none. rounds: of the loop around the failing line, where what
    failed is no backward pass, which need not occur then. layers: what the edited lines make, by the id of the present
    layer."""
    swap = layers or _layers_of(context, edit)
    for frame in context.users[:DEEPEST]:
        for start in _starts(frame):
            before = _training(frame, start, None, rounds=rounds)
            if before is None or not _same_error(before[0], context):
                continue
            after = _training(frame, start, edit, swap, rounds)
            if after is None or not (after[2] or swap) or not (after[0] or after[1] or rounds):
                continue
            if after[0]:
                return TrialResult(False, after[0])
            if after[1]:
                return TrialResult(True, f"{count(after[1], 'backward pass', 'backward passes')} without an error")
            return TrialResult(True, f"from line {start} on without an error")
    return None


def _same_error(text: str, context: ErrorContext) -> bool:
    """Whether what was raised here is what the user saw; Python's version may have said more before or behind it."""
    whole = context.message or context.type
    same = text == whole.partition("\n")[0][:60] or len(text) > 12 and text.partition(" (expected")[0] in whole
    return text != "" and same


def _starts(frame: Frame) -> list[int]:
    """The lines from which a frame may be read again: the first of its function, then of each loop around its line."""
    tree, now = tree_of(frame.site.file), statement(frame)
    if tree is None or now is None:
        return []
    around, node, lines = parents(tree), now, [now.lineno]
    while not isinstance(node, (*SCOPES, ast.Module)):
        if isinstance(node, (ast.For, ast.While, ast.With, ast.Try, ast.If)):
            lines.append(node.lineno)
        node = around[id(node)]  # type: ignore[assignment]
    body = getattr(node, "body", None)
    return list(dict.fromkeys([*([body[0].lineno] if isinstance(body, list) else []), *reversed(lines)]))


def _layers_of(context: ErrorContext, edit: Edit) -> dict[int | str, nn.Module]:
    """The layers that an edited line makes without `inplace=True`, by the id of the present ones."""
    if "ModuleList(" in edit.old and "Sequential(" in edit.new:
        name = edit.old.partition("=")[0].rpartition(".")[2].strip()
        lists = [
            m for model in context.owners.models.values() for p, m in named_modules(model) if p.split(".")[-1] == name
        ]
        return {id(m): nn.Sequential(*named_children(m).values()) for m in lists if type(m) is nn.ModuleList}
    if "inplace=False" not in edit.new or "inplace=False" in edit.old:
        return {}
    layers: dict[int | str, nn.Module] = {}
    for change, part in in_place_modules(context):
        if change.where.file == edit.file and edit.line <= (change.where.line or 0) <= edit.end_line:
            layers[id(part)] = copy.copy(part)
            layers[id(part)].__dict__["inplace"] = False
    return layers


def _training(
    frame: Frame,
    start: int,
    edit: Edit | None,
    swap: Mapping[int | str, nn.Module] | None = None,
    rounds: int = 0,
) -> tuple[str, int, bool] | None:
    """(what it raised, how many backward passes it had, whether the edit was read) from a line of a frame's function
    on, past the failing line."""
    sandbox = TrainingSandbox(frame, edit, swap)
    sandbox.rounds = rounds or ROUNDS
    run = Run(time.monotonic() + TRAINING_SECONDS, sandbox)
    sandbox.run = run
    original = tree_of(frame.site.file)
    old = _function_around(original, frame.site.line, frame) if original is not None else None
    new, moved = old, 0
    if edit is not None and sandbox.tree is not None and edit.file == frame.site.file and _holds(old, edit.line):
        moved = edit.new.count("\n") - edit.old.count("\n") if edit.line < frame.site.line else 0
        new = _function_around(sandbox.tree, frame.site.line + moved, frame)
    sandbox.line += moved
    body = [n for n in getattr(new, "body", []) if (n.end_lineno or 0) >= start]
    behind = [n for n in getattr(old, "body", []) if n.lineno > frame.site.line]
    body = body[: len(body) - len(behind) + (1 if behind else 0)]
    inner = dataclasses.replace(frame, names=dict(frame.names), globals=dict(frame.globals))
    raised = ""
    enabled = torch.is_grad_enabled()
    with quiet():
        try:
            with torch.set_grad_enabled(enabled):
                read_block(run, body, inner, fresh=True)
        except (Returned, LoopEnd):
            pass
        except (CannotRun, End):
            return None
        except Exception as error:
            raised = first_words(error)[:60]
        finally:
            torch._C._set_grad_enabled(enabled)
    return raised, sandbox.calls, sandbox.covered


def _holds(function: Any, line: int) -> bool:
    """Whether a line is one of the function's own."""
    inner = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n is not function] if function else []
    at = first_line(function) if isinstance(function, ast.FunctionDef) else 0
    end = getattr(function, "end_lineno", None) or 10**9
    return at <= line <= end and not any(first_line(n) <= line <= (n.end_lineno or 0) for n in inner)


def _function_around(tree: ast.Module, line: int, frame: Frame) -> Any:
    if frame.site.function == "<module>":
        return tree
    if frame.site.function == "<lambda>":
        near = [n for n in functions(tree) if isinstance(n, ast.Lambda) and n.lineno <= line <= (n.end_lineno or 0)]
        body: list[ast.stmt] = [ast.copy_location(ast.Expr(n.body), n.body) for n in near]
        return ast.Module(body, []) if len(near) == 1 else None
    around = [
        n
        for n in functions(tree)
        if isinstance(n, ast.FunctionDef) and n.lineno <= line and n.name == frame.site.function
    ]
    return max(around, key=lambda n: n.lineno, default=None)
