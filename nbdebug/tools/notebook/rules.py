"""The rules: from what cells left behind to causes, most likely first: what spoils results before what costs memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import size
from nbdebug.tools.notebook.facts import (
    KeptOutput,
    LeftBehind,
    ModeLeft,
    NotebookFacts,
    Redefined,
    StaleHolder,
    StaleModule,
)


def finding(
    code: str,
    title: str,
    where: Where,
    blamed: Iterable[str],
    fixes: Iterable[Fix],
    chain: Iterable[Link] = (),
    **evidence: Any,
) -> Finding:
    """blamed: the variables and modules at fault, the most telling first. `_` in names of evidence is a space."""
    names = [name for name in dict.fromkeys(blamed) if name]
    shown = {key.replace("_", " "): value for key, value in evidence.items() if value not in (None, "", (), [], 0)}
    key = "holder" if code.startswith("memory/") else "where"
    return Finding(code, title, where, {key: names, **shown}, tuple(fixes), tuple(chain))


def listed(names: Iterable[str], most: int = 4) -> str:
    """ "`a`, `b` and 3 more"."""
    names = list(names)
    shown = [f"`{name}`" for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most:,} more"
    return " and ".join(", ".join(shown).rsplit(", ", 1)) if len(shown) > 1 else "".join(shown)


def cell(where: Where, otherwise: str = "a later cell") -> str:
    """ "In [4]", or the file."""
    return where.cell or (where.place if where.line is not None else "") or otherwise


@rule(
    code="notebook/hooks-registered-twice",
    title="A hook is registered more than once: its cell ran again.",
    symptom="Each layer appears twice in a record of activations, counts are off by a whole factor, a gradient is "
    "scaled or clipped twice, and every forward is slower than before.",
    cause="`register_forward_hook` and its like add a hook each time they are called. The hooks of the run before stay "
    "until their handles' `remove()` is called, also where the handles are gone.",
    confirm="`len(module._forward_hooks)`; `%free` lists hooks that are there more than once.",
    fix="Keep the handles and remove them first in the same cell. `%free hooks` takes away all but the newest.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook",
)
def hooks_registered_twice(facts: NotebookFacts) -> Finding | None:
    if not facts.hooks:
        return None
    one = max(facts.hooks, key=lambda hook: len(hook.owners))
    others = [hook for hook in facts.hooks if hook is not one]
    root = one.owners[0].partition(".")[0]
    on = listed(one.owners, 3) if len(one.owners) > 1 or one.owners[0] != root else f"`{root}`"
    title = (
        f"The {one.word} `{one.hook}` is registered {_times(one.times)} on {on}: {cell(one.where)} called "
        f"{one.method} again, and nothing removed the hook of {cell(one.first, 'the run before')}"
    )
    chain = [Link(f"{cell(one.first)} registered it first", one.first)] if one.first.cell else []
    chain += [Link(f"so is the {hook.word} `{hook.hook}` on {listed(hook.owners)}", hook.where) for hook in others]
    code = (
        f"for handle in handles:  # those of the run before\n    handle.remove()\n"
        f"handles = [{root}.{one.method}({one.hook if one.hook.isidentifier() else 'hook'})]"
    )
    fixes = [
        Fix(
            "Remove the hooks that are too many; the newest stay.",
            "%free hooks",
            None,
            {"hooks that would go": sum((hook.times - 1) * len(hook.owners) for hook in facts.hooks)},
        ),
        Fix("In the cell, remove the old ones before new ones are registered.", code),
    ]
    return finding(
        "notebook/hooks-registered-twice",
        title,
        one.where,
        [*one.owners, root, one.method],
        fixes,
        chain,
        times=one.times,
        registered_on=list(one.owners[:20]),
    )


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


AUTORELOAD = Fix(
    "Or let IPython load edited files by itself, from the next cell on.", "%load_ext autoreload\n%autoreload 2"
)


@rule(
    code="error/stale-import",
    title="A file was edited after it was imported, and the notebook still runs the old version.",
    symptom="A mistake in a .py file is corrected, the import cell is run again, and the call gives the same wrong "
    "result or the same error as before. The traceback shows the new lines, which are not those that ran.",
    cause="Python loads a module once in a process. A further `import` looks it up and reads no file; `from m import "
    "f` binds the function object of that time, and a reload of `m` does not change what is bound.",
    confirm="`import inspect; inspect.getsource(m.f)` shows the file as it is now; `m.f.__code__.co_consts` what is "
    "loaded.",
    fix="`importlib.reload(m)`, then every `from m import f` again, then make the objects of its classes again. Or "
    "`%load_ext autoreload` and `%autoreload 2` in the first cell.",
    reference="https://ipython.readthedocs.io/en/stable/config/extensions/autoreload.html",
)
def stale_import(facts: NotebookFacts) -> Finding | None:
    if not facts.stale:
        return None
    one = min(facts.stale, key=lambda stale: not stale.where.cell)
    others = [stale for stale in facts.stale if stale is not one]
    title = _title_of_names(one) if one.names else _title_of_module(one)
    chain = (
        [Link(f"{one.file} was loaded by {cell(one.first, 'an import')}", one.first)]
        if one.first.cell and (one.first != one.where)
        else []
    )
    chain += (
        [Link(f"{cell(one.edited)} wrote {one.file} anew", one.edited)]
        if one.edited.cell and (one.edited.cell != one.where.cell)
        else []
    )
    chain += [Link(f"{other.file} has changed as well: {listed(other.changed)}", other.where) for other in others]
    fixes = [Fix("Load the file again, and what you took from it.", one.imported), AUTORELOAD]
    return finding(
        "error/stale-import",
        title,
        one.where,
        [one.module, *one.names, *one.changed],
        fixes,
        chain,
        module=one.module,
        changed=list(one.changed[:20]),
        old_in_the_notebook=list(one.names[:20]),
    )


def _title_of_module(one: StaleModule) -> str:
    how = (
        f"{cell(one.where)} imported it again, which reads no file: it takes reload"
        if one.again
        else "the notebook has not loaded it since"
    )
    return f"{listed(one.changed)} of `{one.module}` is not what {one.file} says now: the file was edited, and {how}"


def _title_of_names(one: StaleModule) -> str:
    are = "are" if len(one.names) > 1 else "is"
    return (
        f"{listed(one.names)} in your notebook {are} of the version of `{one.module}` before "
        f"{cell(one.where, 'its reload')} loaded it again: a reload leaves what `from {one.module} import …` has "
        "bound as it was"
    )


DELETED = 1 << 20
"""Bytes from which on it matters that a cell deleted the variable and nothing was freed; a smaller tensor is nobody's
reason for a `del`."""
WANTED = 8 << 20
"""Bytes, where a cell asked for memory in general (`gc.collect()`, `empty_cache()`)."""
UNASKED = 16 << 20
"""Bytes, where nobody has asked for them: no variable leads to them any more. Half of `MATTERS` of the memory chapter,
which speaks unasked, where this check is about what cells left behind."""
SHARE = 0.02
"""Of all that the notebook keeps; less is beside the point."""
SLUGS = {"output": "cell-output-held", "traceback": "traceback-held", "graph": "graph-retained"}


def memory_findings(facts: NotebookFacts) -> list[Finding]:
    """One finding for each kind of holder, largest first."""
    found = []
    for how in SLUGS:
        there = [one for one in facts.kept if one.how == how and one.bytes >= _least(one)]
        if there:
            found.append(
                _FINDINGS[how](max(there, key=lambda one: (one.deleted, one.bytes)), sum(one.bytes for one in there))
            )
    return found


def _least(one: KeptOutput) -> int:
    return DELETED if one.deleted else WANTED if one.wanted else UNASKED


def _output(one: KeptOutput, count: int) -> Finding:
    asked = f", and `{one.wanted}` ({cell(one.freed)}) took away the variable alone" if one.deleted else ""
    what = f"`{one.variable}`" if 0 < len(one.variable) < 60 and "\n" not in one.variable else "a result"
    title = (
        f"`{one.name}` still holds {size(one.bytes)}: {cell(one.where, 'a cell')} showed {what}, and the notebook "
        f"keeps what is shown in `Out`{asked}"
    )
    fixes = [
        Fix("Let go of what the notebook keeps.", "%free outputs", None, {"would come back": size(count)}),
        Fix(
            "Show a summary, or end the line with a semicolon.",
            f"{one.variable}.shape" if (one.variable.isidentifier()) else f"{one.variable or 'scores'};",
        ),
    ]
    return _memory_finding("output", one, title, ["Out", one.name, one.variable], fixes, count)


def _traceback(one: KeptOutput, count: int) -> Finding:
    most = f", `{one.variable}` above all" if one.variable else ""
    title = (
        f"The traceback of the last failed cell holds {size(one.bytes)}: the variables of the calls that failed"
        + most
        + (f", so `{one.wanted}` ({cell(one.freed)}) could not free them" if one.wanted else "")
    )
    return _memory_finding(
        "traceback",
        one,
        title,
        [one.name, one.variable, "traceback"],
        [
            Fix(
                "Let go of the traceback; %debug and %tb then no longer work for it.",
                "%free traceback",
                None,
                {"would come back": size(count)},
            )
        ],
        count,
    )


def _graph(one: KeptOutput, count: int) -> Finding:
    title = f"`{one.name}` keeps {size(one.bytes)}: tensors with the graphs that made them"
    return _memory_finding(
        "graph",
        one,
        title,
        [one.name],
        [
            Fix("Keep the number.", f"{one.name}.append(loss.item())"),
            Fix("Cut the graphs of those that are there off.", f"%free {one.name}"),
        ],
        count,
    )


def _memory_finding(how: str, one: KeptOutput, title: str, holder: list[str], fixes: list[Fix], count: int) -> Finding:
    chain = [Link(f"{cell(one.freed)} meant to free memory", one.freed)] if one.freed.cell else []
    return finding(
        f"memory/{SLUGS[how]}", title, one.where, holder, fixes, chain, bytes=one.bytes, in_all=count, what=one.what
    )


_FINDINGS = {"output": _output, "traceback": _traceback, "graph": _graph}


def mode_findings(facts: NotebookFacts) -> list[Finding]:
    """A finding for each mode that was left."""
    return [_MODE_FINDINGS[one.kind](one) for one in facts.modes]


def _eval(one: ModeLeft) -> Finding:
    title = (
        f"`{one.name}` trains in eval mode since {cell(one.where)}: it switched to eval(), and {cell(one.after)} "
        "trained on without train()"
    )
    return finding(
        "training/eval-mode-in-training",
        title,
        one.where,
        [one.name],
        [Fix("Switch back before you train, best at the top of the loop.", f"{one.name}.train()")],
        [Link(f"{cell(one.after)} trains it again", one.after)],
    )


def _grad(one: ModeLeft) -> Finding:
    title = (
        f"Gradients are off for the whole session since {cell(one.where)} called `{one.name}`, so what was "
        "computed since has no path for a backward"
    )
    return finding(
        "error/no-grad-path",
        title,
        one.where,
        [one.name],
        [
            Fix("Switch them on again.", "torch.set_grad_enabled(True)"),
            Fix("Where they are not needed, switch them off for a block alone.", "with torch.no_grad():\n    ..."),
        ],
        [Link(f"the last cell failed by it: {one.said}")],
    )


def _dtype(one: ModeLeft) -> Finding:
    title = (
        f"New tensors have another dtype since {cell(one.where)} called `{one.name}`: what was made before it and "
        "what was made after it do not go together"
    )
    return finding(
        "error/dtype-mismatch",
        title,
        one.where,
        [one.name],
        [
            Fix(
                "Set it back, or set it in the first cell, before anything is made.",
                "torch.set_default_dtype(torch.float32)",
            )
        ],
        [Link(f"the last cell failed by it: {one.said}")],
    )


_MODE_FINDINGS = {"eval": _eval, "grad": _grad, "dtype": _dtype}


def not_in_optimizer(facts: NotebookFacts) -> Finding | None:
    """training/parameters-not-in-optimizer, which the training chapter declares, as cells bring it about."""
    one = next((left for left in facts.left if left.used), None)
    if one is None:
        return None
    what = {
        "anew": f"made `{one.model}` anew",
        "part": f"gave `{one.model}` a new part",
        "unfrozen": f"turned gradients on in `{one.model}`",
    }[one.how]
    held = (
        f"keeps {one.strangers} tensors that no model of yours has any more"
        if one.strangers
        else "does not know of them"
    )
    updated = one.of - len(one.missing)
    title = (
        f"`{one.optimizer}` updates {f'only {updated}' if updated else 'none'} of the {one.of} trained parameters "
        f"of `{one.model}`: {cell(one.where)} {what} after `{one.optimizer}` was made, which {held}"
    )
    chain = [Link(f"{cell(one.made)} made `{one.optimizer}`", one.made)] if one.made.cell else []
    chain += [
        Link(f"the same holds for `{other.model}`", other.where)
        for other in facts.left
        if other is not one and other.used
    ]
    fixes = [
        Fix(
            "Make the optimizer again, after the model, and what holds it (a scheduler) after it.",
            one.remade or f"{one.optimizer} = torch.optim.AdamW({one.model}.parameters())",
        )
    ]
    return finding(
        "training/parameters-not-in-optimizer",
        title,
        one.where,
        [one.model, one.optimizer, *one.missing],
        fixes,
        chain,
        missing=list(one.missing[:20]),
        tensors_of_no_model=one.strangers,
    )


def renewal_note(one: LeftBehind) -> str:
    return (
        f"`{one.optimizer}` was made before {cell(one.where)} changed `{one.model}`, and holds none of "
        f"{len(one.missing)} of its {one.of} trained parameters. Before you train it, make the optimizer again."
    )


@rule(
    code="notebook/stale-reference",
    title="Something still holds what a later cell has replaced.",
    symptom="A cell was changed and run again (the model, the data set, the collate function, the optimizer), and "
    "nothing changes: the learning rate, the batches or the results are those of before.",
    cause="A loader, a scheduler or a trainer keeps the object that it was given. To give the name another value "
    "changes the name alone.",
    confirm="`loader.dataset is dataset`, `scheduler.optimizer is optimizer`, `trainer.model is model`: False.",
    fix="Run the cells below it again, in order: what is made from a thing is made anew after it.",
    reference="https://docs.python.org/3/reference/executionmodel.html#naming-and-binding",
)
def stale_reference(facts: NotebookFacts) -> Finding | None:
    models = {left.model for left in facts.left if left.used}
    one: StaleHolder | None = next((h for h in facts.holders if h.name not in models), None)
    if one is None:
        return None
    title = (
        f"`{one.holder}` was made from the `{one.name}` that {cell(one.where)} has replaced, and still uses that: "
        f"`{one.path}` is the old {one.kind}"
    )
    chain = [
        Link(f"{cell(one.made)} made `{one.holder}` from the `{one.name}` of that time", one.made),
        Link(f"{cell(one.used)} used `{one.holder}` since", one.used),
    ]
    fix = Fix(f"Make `{one.holder}` again.", one.remade or f"{one.holder} = …({one.name})")
    return finding("notebook/stale-reference", title, one.where, [one.holder, one.name, one.path], [fix], chain)


@rule(
    code="notebook/class-redefined",
    title="Objects are of a class that a later cell, or a reload, has defined again.",
    symptom="A changed method has no effect on the model at hand; isinstance says False of an object that was plainly "
    "made from that class; `super(type, obj): obj must be an instance or subtype of type`; pickle says `it's "
    "not the same object as __main__.Net`.",
    cause="To run a `class` statement again makes another class of the same name. Objects keep the class that they "
    "were made from; the name, which isinstance, super(Net, self) and pickle look up, stands for the new one.",
    confirm="`type(model) is Net` is False.",
    fix="Run the cells that make the objects again, after that of the class; `new.load_state_dict(model.state_dict())` "
    "takes the weights over. Inside methods write `super()` without arguments.",
    reference="https://docs.python.org/3/tutorial/classes.html#class-objects",
)
def class_redefined(facts: NotebookFacts) -> Finding | None:
    stale = {one.module for one in facts.stale}
    one = next((r for r in facts.classes if r.module not in stale and matters(r)), None)
    if one is None:
        return None
    first = one.instances[0]
    what = "is made from" if one.subclasses else "is an object of"
    again = (
        f"defined `{one.name}` again"
        if one.module == "__main__"
        else f"loaded `{one.module}` again, and with it another `{one.name}`"
    )
    title = f"`{first}` {what} the `{one.name}` of before: {cell(one.where)} {again}, {_consequence(one)}"
    had = "defined" if one.module == "__main__" else "imported"
    chain = [Link(f"{cell(one.old)} {had} `{one.name}` before", one.old)] if one.old.cell else []
    chain += [Link(f"{cell(one.made)} made `{first}`", one.made)] if one.made.cell and one.made != one.old else []
    chain += [Link(f"the same holds for {listed(one.instances[1:])}")] if len(one.instances) > 1 else []
    chain += [Link(f"the last cell failed by it: {one.said}")] if one.said else []
    return finding(
        "notebook/class-redefined",
        title,
        one.where,
        [*one.instances, one.name],
        _class_fixes(one, first),
        chain,
        objects=list(one.instances[:20]),
        methods_that_differ=list(one.changed[:20]),
    )


def matters(one: Redefined) -> bool:
    """Whether it is sure to do harm: an error shows it, or old objects are used and the class is not the same, or its
    name is asked for; objects of the new class beside them mean that the user keeps the old ones on purpose."""
    return one.seen == "exception" or one.used and not one.renewed and bool(one.changed or one.seen)


def _consequence(one: Redefined) -> str:
    if one.seen == "exception":
        return "so super() and pickle do not take it for one of the class that has the name now"
    if one.changed:
        return f"and what is new in {listed(one.changed)} is not in it"
    return {
        "isinstance": f"so isinstance(…, {one.name}) and the like say False",
        "super": f"so super({one.name}, self) refuses it",
        "pickle": "so pickle refuses it",
    }[one.seen]


def _class_fixes(one: Redefined, first: str) -> list[Fix]:
    fixes = [Fix(f"Make `{first}` again, from the class as it is now.", one.remade or f"{first} = {one.name}(…)")]
    if one.seen in ("exception", "super"):
        fixes.append(Fix("In its methods write super() without arguments: it needs no name.", "super().__init__()"))
    return fixes


@rule(
    code="notebook/cells-out-of-order",
    title="A cell ran before the one that defines what it needs.",
    symptom="NameError in a notebook that has worked before, often after a restart of the kernel.",
    cause="Cells run in the order in which they are started, wherever they stand. A name that a cell further down "
    "defines was there in the last session, and is not yet in this one.",
    confirm="The number beside the cell that defines the name is higher than that of the cell that failed.",
    fix="Move the cell that defines the name above the one that needs it, then restart the kernel and run all.",
    reference="https://docs.jupyter.org/en/latest/projects/architecture/content-architecture.html",
)
def out_of_order(facts: NotebookFacts) -> Finding | None:
    if not facts.early:
        return None
    one = facts.early[0]
    title = (
        f"{cell(one.where)} needs `{one.name}`, which {cell(one.defined)} has defined only after it: run "
        f"{cell(one.where)} again, and let its cell stand below"
    )
    fix = Fix(f"Move the cell that defines `{one.name}` above, then run the other again.", one.defined.text or one.name)
    return finding(
        "notebook/cells-out-of-order",
        title,
        one.where,
        [one.name],
        [fix],
        [Link(f"{cell(one.defined)} defines `{one.name}`", one.defined)],
    )


CHECKS = (
    stale_import,
    class_redefined,
    not_in_optimizer,
    hooks_registered_twice,
    stale_reference,
    out_of_order,
)


def name_all(facts: NotebookFacts) -> list[Finding]:
    """The findings, most likely first; a cause that an exception has shown stands before all others."""
    found = [*mode_findings(facts), *(f for check in CHECKS if (f := check(facts)) is not None)]
    shown = any(one.seen == "exception" for one in facts.classes)
    found.sort(key=lambda f: not (shown and f.code == "notebook/class-redefined"))
    return [*found, *memory_findings(facts)]


def notes_of(facts: NotebookFacts) -> Iterator[str]:
    """What is worth knowing and no fault."""
    yield from (renewal_note(one) for one in facts.left if not one.used)
    for one in facts.classes:
        if not matters(one) and one.changed and one.used:
            are = "are" if len(one.instances) > 1 else "is"
            yield (
                f"{listed(one.instances)} {are} of an earlier `{one.name}` than {cell(one.where)} defines: "
                f"{listed(one.changed)} differ."
            )
    yield from facts.notes
