"""Rules: from the facts of a notebook to causes. What makes results wrong comes before what costs memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import count, listed, size
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
    """blamed: the variables and modules at fault, the most important first. `_` in names of evidence is a space."""
    names = [name for name in dict.fromkeys(blamed) if name]
    rows = {key.replace("_", " "): value for key, value in evidence.items() if value not in (None, "", (), [], 0)}
    key = "holder" if code.startswith("memory/") else "where"
    return Finding(code, title, where, {key: names, **rows}, tuple(fixes), tuple(chain))


def cell(where: Where, otherwise: str = "a later cell") -> str:
    """ "In [4]", or the file."""
    return where.cell or (where.place if where.line is not None else "") or otherwise


@rule(
    code="notebook/hooks-registered-twice",
    title="A hook is registered more than once: its cell ran again.",
    symptom="Each layer appears twice in a record of activations, counts are two or three times too high, a gradient "
    "is scaled or clipped twice, and every forward is slower than before.",
    cause="`register_forward_hook` and similar methods add a hook each time they are called. The hooks of the earlier "
    "run stay until `remove()` is called on their handles, even if the handles no longer exist.",
    confirm="`len(module._forward_hooks)`; `%free` lists hooks that are registered more than once.",
    fix="Keep the handles, and remove them at the top of the same cell. `%free hooks` removes all but the newest.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_hook",
)
def hooks_registered_twice(facts: NotebookFacts) -> Finding | None:
    if not facts.hooks:
        return None
    one = max(facts.hooks, key=lambda hook: len(hook.owners))
    others = [hook for hook in facts.hooks if hook is not one]
    root = one.owners[0].partition(".")[0]
    times = "twice" if one.times == 2 else f"{one.times} times"
    on = listed(one.owners) if len(one.owners) > 1 or one.owners[0] != root else f"`{root}`"
    title = (
        f"The {one.word} `{one.hook}` is registered {times} on {on}: {cell(one.where)} called "
        f"{one.method} again, and nothing removed the hook of {cell(one.first, 'the earlier run')}"
    )
    chain = [Link(f"{cell(one.first)} registered it first", one.first)] if one.first.cell else []
    chain += [
        Link(f"the same holds for the {hook.word} `{hook.hook}` on {listed(hook.owners, 4)}", hook.where)
        for hook in others
    ]
    code = (
        f"for handle in handles:  # of the earlier run\n    handle.remove()\n"
        f"handles = [{root}.{one.method}({one.hook if one.hook.isidentifier() else 'hook'})]"
    )
    fixes = [
        Fix(
            "Remove the duplicate hooks; the newest ones stay.",
            "%free hooks",
            None,
            {"hooks to remove": sum((hook.times - 1) * len(hook.owners) for hook in facts.hooks)},
        ),
        Fix("In the cell, remove the old hooks before it registers new ones.", code),
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


AUTORELOAD = Fix(
    "Or let IPython reload edited files automatically, from the next cell on.", "%load_ext autoreload\n%autoreload 2"
)


@rule(
    code="error/stale-import",
    title="A file was edited after it was imported, and the notebook still runs the old version.",
    symptom="A mistake in a .py file is corrected, the import cell is run again, and the call gives the same wrong "
    "result or the same error as before. The traceback shows the new lines, which are not the lines that ran.",
    cause="Python loads a module once per process. A second `import` finds the loaded module and does not read the "
    "file. `from m import f` binds the function that is loaded at that moment, and a reload of `m` does not change "
    "that name.",
    confirm="`import inspect; inspect.getsource(m.f)` shows the file as it is now; `m.f.__code__.co_consts` shows what "
    "is loaded.",
    fix="Run `importlib.reload(m)`, then every `from m import f`, then create the objects of its classes again. Or "
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
        [Link(f"{cell(one.edited)} wrote {one.file} again", one.edited)]
        if one.edited.cell and (one.edited.cell != one.where.cell)
        else []
    )
    chain += [Link(f"{other.file} has changed as well: {listed(other.changed, 4)}", other.where) for other in others]
    fixes = [Fix("Reload the file, and import its names again.", one.imported), AUTORELOAD]
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
        f"{cell(one.where)} imported it again, which does not read the file: only a reload does"
        if one.again
        else "the notebook has not loaded it since then"
    )
    verb = "differ" if len(one.changed) > 1 else "differs"
    return f"{listed(one.changed, 4)} of `{one.module}` {verb} from {one.file}: the file was edited, and {how}"


def _title_of_names(one: StaleModule) -> str:
    are = "are" if len(one.names) > 1 else "is"
    return (
        f"{listed(one.names, 4)} in your notebook {are} from an earlier version of `{one.module}`: "
        f"{cell(one.where, 'a later cell')} reloaded it, and a reload does not change the names that "
        f"`from {one.module} import …` has bound"
    )


DELETED = 1 << 20
"""Bytes. A cell deleted the variable and nothing was freed: from this size on it matters; nobody deletes a smaller
tensor for its memory."""
REQUESTED = 8 << 20
"""Bytes, where a cell tried to free memory in general (`gc.collect()`, `empty_cache()`)."""
UNREQUESTED = 16 << 20
"""Bytes, where no cell tried to free them: no variable leads to them any more. Half of `MATTERS` of the memory tool."""
SLUGS = {"output": "cell-output-held", "traceback": "traceback-held", "graph": "graph-retained"}


def memory_findings(facts: NotebookFacts) -> list[Finding]:
    """One finding for each kind of holder: the largest of its kind, with the bytes of all."""
    findings = []
    for how in SLUGS:
        outputs = [
            one
            for one in facts.outputs
            if one.how == how and one.bytes >= (DELETED if one.deleted else REQUESTED if one.statement else UNREQUESTED)
        ]
        if outputs:
            worst = max(outputs, key=lambda one: (one.deleted, one.bytes))
            findings.append(_FINDINGS[how](worst, sum(one.bytes for one in outputs)))
    return findings


def _output(one: KeptOutput, total: int) -> Finding:
    deleted = f", and `{one.statement}` ({cell(one.freed)}) deleted only the variable" if one.deleted else ""
    what = f"`{one.variable}`" if 0 < len(one.variable) < 60 and "\n" not in one.variable else "a result"
    title = (
        f"`{one.name}` still holds {size(one.bytes)}: {cell(one.where, 'a cell')} displayed {what}, and the notebook "
        f"keeps displayed values in `Out`{deleted}"
    )
    fixes = [
        Fix("Free the outputs that the notebook keeps.", "%free outputs", None, {"would be freed": size(total)}),
        Fix(
            "Display a summary, or end the line with a semicolon.",
            f"{one.variable}.shape" if (one.variable.isidentifier()) else f"{one.variable or 'scores'};",
        ),
    ]
    return _memory_finding("output", one, title, ["Out", one.name, one.variable], fixes, total)


def _traceback(one: KeptOutput, total: int) -> Finding:
    largest = f", mainly `{one.variable}`" if one.variable else ""
    title = (
        f"The traceback of the last failed cell holds {size(one.bytes)}: the variables of the calls that failed"
        + largest
        + (f", so `{one.statement}` ({cell(one.freed)}) could not free them" if one.statement else "")
    )
    return _memory_finding(
        "traceback",
        one,
        title,
        [one.name, one.variable, "traceback"],
        [
            Fix(
                "Free the traceback; after that, %debug and %tb no longer work for it.",
                "%free traceback",
                None,
                {"would be freed": size(total)},
            )
        ],
        total,
    )


def _graph(one: KeptOutput, total: int) -> Finding:
    title = f"`{one.name}` keeps {size(one.bytes)}: tensors together with their autograd graphs"
    return _memory_finding(
        "graph",
        one,
        title,
        [one.name],
        [
            Fix("Keep the number, not the tensor.", f"{one.name}.append(loss.item())"),
            Fix("Detach the tensors in it from their graphs.", f"%free {one.name}"),
        ],
        total,
    )


def _memory_finding(how: str, one: KeptOutput, title: str, holder: list[str], fixes: list[Fix], total: int) -> Finding:
    chain = [Link(f"{cell(one.freed)} tried to free memory", one.freed)] if one.freed.cell else []
    return finding(
        f"memory/{SLUGS[how]}", title, one.where, holder, fixes, chain, bytes=one.bytes, in_all=total, what=one.what
    )


_FINDINGS = {"output": _output, "traceback": _traceback, "graph": _graph}


@rule(
    code="notebook/setting-left-on",
    title="A cell has set something for the whole session, and a later cell fails because of it.",
    symptom="FloatingPointError, a warning that is raised as an error, `does not have a deterministic implementation`, "
    "in a cell that has worked before.",
    cause="`np.seterr(all='raise')`, `warnings.simplefilter('error')`, `torch.use_deterministic_algorithms(True)` hold "
    "for the process, not for the cell. They stay when the line is deleted.",
    confirm="`np.geterr()`, `warnings.filters`, `torch.are_deterministic_algorithms_enabled()`.",
    fix="Set it back, and use a block: `with np.errstate(all='raise'):`, `with warnings.catch_warnings():`.",
    reference="https://numpy.org/doc/stable/reference/generated/numpy.seterr.html",
)
def setting_left_on(facts: NotebookFacts) -> Finding | None:
    one = next((one for one in facts.modes if one.kind == "setting"), None)
    if one is None:
        return None
    back = {"np": "np.seterr(all='warn')", "torch": "torch.use_deterministic_algorithms(False)"}
    title = (
        f"{cell(one.where)} called `{one.name}`, which makes an error of what was none before, in all cells since then"
    )
    fix = Fix("Set it back.", back.get(one.name.partition(".")[0], "warnings.simplefilter('default')"))
    return _failed(one, "notebook/setting-left-on", title, [fix])


def mode_findings(facts: NotebookFacts) -> list[Finding]:
    """A finding for each mode that was left on."""
    return [_eval(one) if one.kind == "eval" else _switch(one) for one in facts.modes if one.kind != "setting"]


def _eval(one: ModeLeft) -> Finding:
    title = (
        f"`{one.name}` has been training in eval mode since {cell(one.where)}: that cell called eval(), and "
        f"{cell(one.after)} went on training without train()"
    )
    return finding(
        "training/eval-mode-in-training",
        title,
        one.where,
        [one.name],
        [Fix("Switch back before you train, ideally at the top of the loop.", f"{one.name}.train()")],
        [Link(f"{cell(one.after)} trains it again", one.after)],
    )


SWITCHES: dict[str, tuple[str, str, list[Fix]]] = {
    "grad": (
        "error/no-grad-path",
        "Gradients have been off for the whole session since {cell} called `{name}`: results computed since then have "
        "no graph for backward",
        [
            Fix("Switch them on again.", "torch.set_grad_enabled(True)"),
            Fix("Where they are not needed, switch them off for one block only.", "with torch.no_grad():\n    ..."),
        ],
    ),
    "dtype": (
        "error/dtype-mismatch",
        "New tensors have had another dtype since {cell} called `{name}`: tensors made before it and after it can't be "
        "combined",
        [Fix("Set it back, or set it in the first cell of all.", "torch.set_default_dtype(torch.float32)")],
    ),
    "device": (
        "error/device-mismatch",
        "New tensors have been on another device since {cell} called `{name}`: tensors made before it and after it "
        "can't be combined",
        [
            Fix("Set it back, and make the tensors since then again.", "torch.set_default_device('cpu')"),
            Fix("Where it is needed, set it for one block only.", "with torch.device('meta'):\n    ..."),
        ],
    ),
}
"""kind → the code, what to say, the fixes."""
CHANGED = {
    "dtype-changed": ("error/dtype-mismatch", "it has had another dtype since then"),
    "device-changed": ("error/device-mismatch", "it has been on another device since then"),
    "grad-changed": ("error/no-grad-path", "no gradient has reached it since then"),
    "attached-changed": ("error/attached-to-graph", "its gradients have been recorded since then"),
}
"""kind → the code, what has become of one object."""


def _switch(one: ModeLeft) -> Finding:
    if one.kind in SWITCHES:
        code, title, fixes = SWITCHES[one.kind]
        title = title.format(cell=cell(one.where), name=one.name)
    else:
        code, says = CHANGED[one.kind]
        title = f"`{one.name}` in {cell(one.where)} has changed the object itself, and no copy: {says}"
        owner, _, call = one.name.partition(".")
        fixes = [
            Fix("Make the object again, and call it on a copy there.", f"import copy\ncopy.deepcopy({owner}).{call}")
        ]
    return _failed(one, code, title, fixes)


def _failed(one: ModeLeft, code: str, title: str, fixes: list[Fix]) -> Finding:
    chain = [Link(f"{cell(one.after, 'the last cell')} failed because of it: {one.message}", one.after)]
    return finding(code, title, one.where, [one.name], fixes, chain)


def _left_behind(facts: NotebookFacts) -> Iterator[LeftBehind]:
    """Those that matter, without optimizers that lie in an object that has the old model itself."""
    stale = {one.holder for one in facts.holders}
    return (one for one in facts.untrained if one.used and one.optimizer.partition(".")[0] not in stale)


def not_in_optimizer(facts: NotebookFacts) -> Finding | None:
    """training/parameters-not-in-optimizer, a rule of the training tool, where a cell is the cause."""
    one = next(_left_behind(facts), None)
    if one is None:
        return None
    what = {
        "anew": f"created `{one.model}` again",
        "part": f"gave `{one.model}` a new part",
        "unfrozen": f"turned gradients on in `{one.model}`",
    }[one.how]
    state = (
        f"still holds {count(one.strangers, 'tensor')} that no model of yours uses"
        if one.strangers
        else "does not hold the new ones"
    )
    updated = one.of - len(one.missing)
    title = (
        f"`{one.optimizer}` updates {f'only {updated}' if updated else 'none'} of the {one.of} trained parameters "
        f"of `{one.model}`: {cell(one.where)} {what} after `{one.optimizer}` was created, and the optimizer {state}"
    )
    chain = [Link(f"{cell(one.created)} created `{one.optimizer}`", one.created)] if one.created.cell else []
    chain += [
        Link(f"the same holds for `{other.model}`", other.where)
        for other in facts.untrained
        if other is not one and other.used
    ]
    fixes = [
        Fix(
            "Create the optimizer again after the model, and then whatever holds it (a scheduler).",
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
        f"`{one.optimizer}` was created before {cell(one.where)} changed `{one.model}`, and does not hold "
        f"{len(one.missing):,} of its {one.of:,} trained parameters. Before you train it, make the optimizer again."
    )


@rule(
    code="notebook/stale-reference",
    title="An object still uses a value that a later cell has replaced.",
    symptom="A cell was changed and run again (the model, the data set, the collate function, the optimizer), and "
    "nothing changes: the learning rate, the batches or the results stay as they were.",
    cause="A loader, a scheduler or a trainer keeps the object that it was created with. Assigning the name again "
    "changes only the name.",
    confirm="`loader.dataset is dataset`, `scheduler.optimizer is optimizer`, `trainer.model is model`: False.",
    fix="Run the cells below it again, in order, so that whatever depends on the object is created again after it.",
    reference="https://docs.python.org/3/reference/executionmodel.html#naming-and-binding",
)
def stale_reference(facts: NotebookFacts) -> Finding | None:
    models = {link.model for link in _left_behind(facts)}
    one: StaleHolder | None = next((h for h in facts.holders if h.name not in models), None)
    if one is None:
        return None
    title = (
        f"`{one.holder}` still uses an earlier `{one.name}`, which {cell(one.where)} has replaced: `{one.path}` is the "
        f"old {one.kind}"
    )
    chain = [
        Link(f"{cell(one.created)} created `{one.holder}` from the earlier `{one.name}`", one.created),
        Link(f"{cell(one.used)} used `{one.holder}` since then", one.used),
    ]
    fix = Fix(f"Create `{one.holder}` again.", one.remade or f"{one.holder} = …({one.name})")
    return finding("notebook/stale-reference", title, one.where, [one.holder, one.name, one.path], [fix], chain)


@rule(
    code="notebook/class-redefined",
    title="Objects were made by an earlier definition of their class: a later cell, or a reload, has defined it again.",
    symptom="A changed method has no effect on the existing model; isinstance returns False for an object that was "
    "clearly made from that class; `super(type, obj): obj must be an instance or subtype of type`; pickle says `it's "
    "not the same object as __main__.Net`.",
    cause="Running a `class` statement again creates another class of the same name. Objects keep the class that they "
    "were made from; the name, which isinstance, super(Net, self) and pickle look up, refers to the new one.",
    confirm="`type(model) is Net` is False.",
    fix="Run the cells that create the objects again, after the cell of the class; "
    "`new.load_state_dict(model.state_dict())` copies the weights. Inside methods write `super()` without arguments.",
    reference="https://docs.python.org/3/tutorial/classes.html#class-objects",
)
def class_redefined(facts: NotebookFacts) -> Finding | None:
    stale = {one.module for one in facts.stale}
    one = next((r for r in facts.classes if r.module not in stale and matters(r)), None)
    if one is None:
        return None
    first = one.instances[0]
    what = "inherits from" if one.subclasses else "was made by"
    what = "is" if first.endswith(f"[{one.name}]") else what
    again = (
        f"defined `{one.name}` again"
        if one.module == "__main__"
        else f"reloaded `{one.module}`, and with it `{one.name}`"
    )
    title = f"`{first}` {what} an earlier definition of `{one.name}`: {cell(one.where)} {again}, {_consequence(one)}"
    verb = "defined" if one.module == "__main__" else "imported"
    chain = [Link(f"{cell(one.old)} {verb} `{one.name}` first", one.old)] if one.old.cell else []
    chain += (
        [Link(f"{cell(one.created)} created `{first}`", one.created)]
        if one.created.cell and one.created != one.old
        else []
    )
    chain += [Link(f"the same holds for {listed(one.instances[1:], 4)}")] if len(one.instances) > 1 else []
    chain += [Link(f"the last cell failed because of it: {one.message}")] if one.message else []
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
    """Whether it surely does harm: an error shows it, or old objects are used, and the class differs or a cell compares
    with its name. Where objects of the new class exist as well, the user keeps the old ones on purpose."""
    return one.evidence == "exception" or one.used and not one.renewed and bool(one.changed or one.evidence)


def _consequence(one: Redefined) -> str:
    if one.evidence == "exception":
        return "so super(), pickle and look-ups in tables do not take it for the new class"
    if one.changed:
        return f"and it does not have the changes in {listed(one.changed, 4)}"
    return {
        "isinstance": f"so checks such as isinstance(…, {one.name}) are False",
        "super": f"so super({one.name}, self) refuses it",
        "pickle": "so pickle refuses it",
    }[one.evidence]


def _class_fixes(one: Redefined, first: str) -> list[Fix]:
    fixes = [Fix(f"Create `{first}` again, from the new class.", one.remade or f"{first} = {one.name}(…)")]
    if one.evidence in ("exception", "super"):
        fixes.append(
            Fix(
                "In its methods write super() without arguments, which does not look up the name.", "super().__init__()"
            )
        )
    return fixes


@rule(
    code="notebook/cells-out-of-order",
    title="A cell ran before the one that defines what it needs, or after the one that deleted it.",
    symptom="NameError in a notebook that has worked before, often after a restart of the kernel.",
    cause="Cells run in the order in which you start them, not from top to bottom. A name that a cell further down "
    "defines existed in the last session, but does not exist yet in this one. One that a cell has deleted, to save "
    "memory, no longer exists for the cells above it.",
    confirm="The number beside the cell that defines the name is higher than that of the cell that failed.",
    fix="Move the cell that defines the name above the one that needs it, then restart the kernel and run all.",
    reference="https://docs.jupyter.org/en/latest/projects/architecture/content-architecture.html",
)
def out_of_order(facts: NotebookFacts) -> Finding | None:
    if not facts.early:
        return None
    one = facts.early[0]
    if one.deleted.cell:
        title = f"{cell(one.where)} needs `{one.name}`, which {cell(one.deleted)} has deleted"
        fix = Fix(f"Run {cell(one.defined)} again, and delete `{one.name}` below its last use.", one.defined.text or "")
        links = [
            Link(f"{cell(one.defined)} made `{one.name}`", one.defined),
            Link(f"{cell(one.deleted)} deleted it", one.deleted),
            Link(f"{cell(one.where)} needs it", one.where),
        ]
        return finding("notebook/cells-out-of-order", title, one.deleted, [one.name], [fix], links)
    title = (
        f"{cell(one.where)} needs `{one.name}`, which {cell(one.defined)} defined only later: run {cell(one.where)} "
        "again, and move it below"
    )
    fix = Fix(
        f"Move the cell that defines `{one.name}` up, then run the other one again.", one.defined.text or one.name
    )
    return finding(
        "notebook/cells-out-of-order",
        title,
        one.where,
        [one.name],
        [fix],
        [Link(f"{cell(one.defined)} defines `{one.name}`", one.defined)],
    )


@rule(
    code="notebook/name-shadowed",
    title="A variable has taken the name of a function or a module.",
    symptom="TypeError: 'Tensor' object is not callable, 'list' object is not callable; AttributeError: 'float' object "
    "has no attribute 'time'; in cells that have worked before. A restart of the kernel helps.",
    cause="`max, where = scores.max(1)`, `list = […]`, `time = time.time()`: from then on the name stands for this "
    "value in all cells. Deleting the line does not bring the name back, as the variable stays in the kernel.",
    confirm="`max` in a cell of its own shows what the name stands for.",
    fix="`del max` in one cell; give the variable another name. A module is imported again.",
    reference="https://docs.python.org/3/library/builtins.html",
)
def name_shadowed(facts: NotebookFacts) -> Finding | None:
    if not facts.shadowed:
        return None
    one = facts.shadowed[0]
    meant = {"builtin": "Python's own function", "import": "what was imported"}.get(one.meant, f"the {one.meant}")
    title = (
        f"`{one.name}` is no longer {meant} of this name: {cell(one.where)} gave the name to another value "
        f"(now: {one.kind}), and {cell(one.failed)} uses it"
    )
    code = one.imported or (
        f"del {one.name}" if one.meant in ("builtin", "method") else f"# run the cell with `{one.name}` again"
    )
    fixes = [
        Fix("Get it back.", code),
        Fix(f"Give the variable of {cell(one.where)} another name, so that it stays.", f"{one.name}_value = …"),
    ]
    chain = [
        Link(f"{cell(one.where)} gives `{one.name}` another value", one.where),
        Link(f"{cell(one.failed)} uses `{one.name}`: {one.message}", one.failed),
    ]
    return finding("notebook/name-shadowed", title, one.where, [one.name], fixes, chain, now_a=one.kind)


@rule(
    code="notebook/cell-run-twice",
    title="A cell that consumes its own result ran again.",
    symptom='KeyError, or "not found in axis", at `table = table.drop(…)` or `y = table.pop(…)` that has worked '
    "before; 'list' object has no attribute 'split'. Or no error: inputs that are 255 times too small, labels that are "
    "all NaN, an augmentation that is applied twice.",
    cause="`x = f(x)` takes the present `x`. When its cell runs again, that is the result of the last run: the column "
    "is gone, the text is split already, an axis is added a second time, the pixels are divided by 255 twice.",
    confirm="Run the cell that makes the variable, then this one once: it works.",
    fix="Give the result another name (`features = table.drop(…)`), or make the variable in the same cell.",
    reference="https://docs.jupyter.org/en/latest/projects/architecture/content-architecture.html",
)
def cell_run_twice(facts: NotebookFacts) -> Finding | None:
    one = next((one for one in facts.repeated if one.how != "drawn"), None)
    if one is None:
        return None
    times = "the second time" if one.times == 2 else f"for the {one.times}th time"
    title = (
        f"Nothing is left of `{one.name}` for `{one.statement}`: {cell(one.first)} has gone through it to its end"
        if one.how == "used up"
        else f"`{one.statement}` runs {times} on the same `{one.name}`: {cell(one.first)} has already applied it, and "
        "it consumes its own result"
    )
    fixes = [Fix("Or give the result another name, so that the cell can run again.", f"{one.name}_new = …")]
    if one.renewal:
        fixes.insert(
            0, Fix(f"Run {cell(one.fresh)} again, which makes `{one.name}`, then this cell once.", one.renewal)
        )
    chain = [Link(f"{cell(one.fresh)} makes `{one.name}`", one.fresh)] if one.renewal else []
    chain += [
        Link(f"{cell(one.first)} replaces it by the result", one.first),
        Link(f"{cell(one.where)} applies it again" + (f" ({one.error})" if one.error else ""), one.where),
    ]
    return finding(
        "notebook/cell-run-twice", title, one.where, [one.name], fixes, chain, times=one.times, statement=one.statement
    )


def split_drawn_again(facts: NotebookFacts) -> Finding | None:
    """training/leakage, a rule of the training tool, where a cell is the cause."""
    one = next((one for one in facts.repeated if one.how == "drawn"), None)
    if one is None:
        return None
    title = (
        f"`{one.name}` holds rows that the model was trained on: {cell(one.where)} drew the split again at random "
        f"after {cell(one.fresh)} had trained on that of {cell(one.first)}"
    )
    text = "Fix the split, so that the cell draws the same one again; then train a new model on it."
    fixes = [Fix(text, "torch.manual_seed(0)\n" + one.statement)]
    chain = [Link(f"{cell(one.fresh)} trained on the earlier split", one.fresh)]
    return finding("training/leakage", title, one.where, [one.name], fixes, chain, statement=one.statement)


@rule(
    code="notebook/shared-object",
    title="Two names stand for one object, and a cell has changed it for both.",
    symptom="The best weights are put back, and the score is that of the last epoch; the training set has lost its "
    "augmentation since the validation set was given another transform; a setting changed in one run shows in all.",
    cause="`best = model.state_dict()` and `small = base` copy nothing. Both parts of a `random_split` have one set.",
    confirm="`best['weight'].data_ptr() == model.weight.data_ptr()`, `small is base`, `train.dataset is val.dataset`.",
    fix="`copy.deepcopy(…)` where the second name is made; for a split, a data set for each transform.",
    reference="https://docs.pytorch.org/docs/stable/notes/serialization.html",
)
def shared_object(facts: NotebookFacts) -> Finding | None:
    if not facts.shared:
        return None
    one = facts.shared[0]
    title = (
        f"`{one.name}` is no copy of the weights of `{one.other}`, but the weights themselves: training changed them, "
        f"and {cell(one.used)} puts back what is there already"
        if one.weights
        else f"`{one.statement}` changes `{one.other}` as well, which {cell(one.used)} uses: both stand for one object"
    )
    copied = f"copy.deepcopy({one.statement.partition(' = ')[2]})" if one.weights else f"copy.deepcopy({one.other})"
    fix = Fix("Make a copy there.", f"import copy\n{one.name} = {copied}")
    chain = [Link(f"{cell(one.used)} uses it", one.used)]
    return finding("notebook/shared-object", title, one.where, [one.name, one.other], [fix], chain)


CHECKS = (
    name_shadowed,
    cell_run_twice,
    split_drawn_again,
    shared_object,
    setting_left_on,
    stale_import,
    class_redefined,
    not_in_optimizer,
    hooks_registered_twice,
    stale_reference,
    out_of_order,
)


def name_all(facts: NotebookFacts) -> list[Finding]:
    """The findings, most likely first; a cause that an exception proves comes before all others."""
    findings = [*mode_findings(facts), *(f for check in CHECKS if (f := check(facts)) is not None)]
    proven = any(one.evidence == "exception" for one in facts.classes) or any(one.error for one in facts.repeated)
    findings.sort(key=lambda f: not (proven and f.code == "notebook/class-redefined"))
    return [*findings, *memory_findings(facts)]


def notes_of(facts: NotebookFacts) -> Iterator[str]:
    """Facts worth knowing that are no fault."""
    yield from (renewal_note(one) for one in facts.untrained if not one.used)
    for one in facts.classes:
        if not matters(one) and one.changed and one.used:
            were = "were" if len(one.instances) > 1 else "was"
            differ = "differ" if len(one.changed) > 1 else "differs"
            yield (
                f"{listed(one.instances, 4)} {were} made by an earlier definition of `{one.name}` than that of "
                f"{cell(one.where)}: {listed(one.changed, 4)} {differ}."
            )
    yield from facts.notes
