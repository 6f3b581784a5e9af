"""Facts about the cells that ran, the variables and the files, as plain names and numbers; and the rules, from there to
causes. What makes results wrong comes before what costs memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import count, listed, size

NOWHERE = Where()


@dataclasses.dataclass(frozen=True)
class StaleModule:
    """A module that differs from its file.

    module: "losses"; file: its base name. changed: functions ("dice", "Net.forward") and constants that differ, added
    ones included. names: names in the notebook that still refer to the old version, where the module itself was
    reloaded ("dice", "train.dice"); () where the module is old. imported: the statements that load the new version.
    where: the cell that imported it; first: the first one that did; again: the module had been imported before `where`;
    edited: the cell that wrote the file, if one did.
    """

    module: str
    file: str
    changed: tuple[str, ...]
    names: tuple[str, ...] = ()
    imported: str = ""
    where: Where = NOWHERE
    first: Where = NOWHERE
    again: bool = False
    edited: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class LeftBehind:
    """Trainable parameters of a model that no optimizer holds, because the model changed after the optimizer was
    created.

    missing: the parameters' names ("model.fc.weight"), all of them; of: how many the model trains. strangers: how many
    tensors the optimizer holds that no model among the variables has. how: "anew" (the model was created again), "part"
    (a part of it was replaced or added), "unfrozen". used: the optimizer was used since then, or the parameters have
    gradients. remade: the user's statement that creates the optimizer. where: the cell that changed the model; created:
    the optimizer's.
    """

    model: str
    optimizer: str
    missing: tuple[str, ...]
    of: int
    strangers: int
    how: str
    used: bool
    remade: str = ""
    where: Where = NOWHERE
    created: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class Redefined:
    """Objects of a class whose name now stands for another class. name: the class; instances: names of objects
    ("model", "model.blocks.0"), or of subclasses; subclasses: they are classes. changed: methods that differ; renewed:
    an object of the new class exists as well. evidence: what shows that it matters: "exception", "isinstance",
    "pickle", "super", or ""; message: the exception's message. used: the objects were used after the new definition.
    created: the cell that created the first of the objects; old: the cell of the old definition; where: of the new
    one."""

    name: str
    instances: tuple[str, ...]
    changed: tuple[str, ...] = ()
    subclasses: bool = False
    renewed: bool = False
    evidence: str = ""
    message: str = ""
    used: bool = False
    remade: str = ""
    module: str = "__main__"
    where: Where = NOWHERE
    old: Where = NOWHERE
    created: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class KeptOutput:
    """Memory that the shell alone holds, or a list of losses with their graphs. how: "output", "traceback" or "graph";
    name: "Out[2]"; bytes; what: "float32 (2560, 3072)". variable: the expression that was displayed ("features"), or
    the largest tensor in a traceback. statement: the one that tried to free it, or ""; deleted: it names this
    variable; freed: its place. where: the cell that displayed it, failed, or added it."""

    how: str
    name: str
    bytes: int
    what: str = ""
    variable: str = ""
    statement: str = ""
    deleted: bool = False
    freed: Where = NOWHERE
    where: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class RunTwice:
    """A statement that consumes its own result ran again. name: the variable; how: "used up" where that is an iterator
    of which nothing is left, "carried on" where it is a sum or a history that two runs share;
    times: how often the statement has been started;
    error: the class of the exception with which it failed, "" if it did not; renewal: the statement that makes the
    variable anew; where: the line, first: of its first run; fresh: of the renewal."""

    name: str
    statement: str
    times: int
    error: str = ""
    renewal: str = ""
    where: Where = NOWHERE
    first: Where = NOWHERE
    fresh: Where = NOWHERE
    how: str = ""
    proof: str = ""


@dataclasses.dataclass(frozen=True)
class Told:
    """A cause that needs no further words than its own. names: the variables at fault, first the one that is most;
    where: the cell that brings it in; fixes: (what to do, as code); links: (how it came about, where)."""

    code: str
    title: str
    names: tuple[str, ...]
    where: Where
    fixes: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, Where], ...] = ()


@dataclasses.dataclass(frozen=True)
class NotebookFacts:
    """All of these. cells: how many ran; objects: how many the variables lead to; notes: sentences; failed: what the
    last failure tells; told: what shows without one."""

    cells: int = 0
    objects: int = 0
    stale: tuple[StaleModule, ...] = ()
    untrained: tuple[LeftBehind, ...] = ()
    holders: tuple[Told, ...] = ()
    classes: tuple[Redefined, ...] = ()
    outputs: tuple[KeptOutput, ...] = ()
    notes: tuple[str, ...] = ()
    repeated: tuple[RunTwice, ...] = ()
    unchecked: tuple[str, ...] = ()
    failed: tuple[Told, ...] = ()
    told: tuple[Told, ...] = ()


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


def named(where: Where, otherwise: str = "a later cell") -> str:
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
    return _told(facts, "notebook/hooks-registered-twice")


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
        [Link(f"{one.file} was loaded by {named(one.first, 'an import')}", one.first)]
        if one.first.cell and (one.first != one.where)
        else []
    )
    chain += (
        [Link(f"{named(one.edited)} wrote {one.file} again", one.edited)]
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
        f"{named(one.where)} imported it again, which does not read the file: only a reload does"
        if one.again
        else "the notebook has not loaded it since then"
    )
    verb = "differ" if len(one.changed) > 1 else "differs"
    return f"{listed(one.changed, 4)} of `{one.module}` {verb} from {one.file}: the file was edited, and {how}"


def _title_of_names(one: StaleModule) -> str:
    are = "are" if len(one.names) > 1 else "is"
    return (
        f"{listed(one.names, 4)} in your notebook {are} from an earlier version of `{one.module}`: "
        f"{named(one.where, 'a later cell')} reloaded it, and a reload does not change the names that "
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


def memory_findings(facts: NotebookFacts) -> Iterator[Finding]:
    """One finding for each kind of holder: the largest of its kind, with the bytes of all."""
    for how, slug in SLUGS.items():
        limits = (
            (one, DELETED if one.deleted else REQUESTED if one.statement else UNREQUESTED) for one in facts.outputs
        )
        if outputs := [one for one, least in limits if one.how == how and one.bytes >= least]:
            one, total = max(outputs, key=lambda one: (one.deleted, one.bytes)), sum(one.bytes for one in outputs)
            title, names, fixes = _held(one, {"would be freed": size(total)})
            chain = [Link(f"{named(one.freed)} tried to free memory", one.freed)] if one.freed.cell else []
            evidence = {"bytes": one.bytes, "in_all": total, "what": one.what}
            yield finding(f"memory/{slug}", title, one.where, names, fixes, chain, **evidence)


def _held(one: KeptOutput, freed: dict[str, str]) -> tuple[str, list[str], list[Fix]]:
    """(the title, the names of the holder, the fixes) of memory that the shell keeps. freed: what a fix frees."""
    if one.how == "graph":
        fixes = [
            Fix("Keep the number, not the tensor.", f"{one.name}.append(loss.item())"),
            Fix("Detach the tensors in it from their graphs.", f"%free {one.name}"),
        ]
        return f"`{one.name}` keeps {size(one.bytes)}: tensors together with their autograd graphs", [one.name], fixes
    if one.how == "traceback":
        largest = f", mainly `{one.variable}`" if one.variable else ""
        title = (
            f"The traceback of the last failed cell holds {size(one.bytes)}: the variables of the calls that failed"
            + largest
            + (f", so `{one.statement}` ({named(one.freed)}) could not free them" if one.statement else "")
        )
        text = "Free the traceback; after that, %debug and %tb no longer work for it."
        return title, [one.name, one.variable, "traceback"], [Fix(text, "%free traceback", None, freed)]
    deleted = f", and `{one.statement}` ({named(one.freed)}) deleted only the variable" if one.deleted else ""
    what = f"`{one.variable}`" if 0 < len(one.variable) < 60 and "\n" not in one.variable else "a result"
    title = (
        f"`{one.name}` still holds {size(one.bytes)}: {named(one.where, 'a cell')} displayed {what}, and the notebook "
        f"keeps displayed values in `Out`{deleted}"
    )
    summary = f"{one.variable}.shape" if one.variable.isidentifier() else f"{one.variable or 'scores'};"
    fixes = [
        Fix("Free the outputs that the notebook keeps.", "%free outputs", None, freed),
        Fix("Display a summary, or end the line with a semicolon.", summary),
    ]
    return title, ["Out", one.name, one.variable], fixes


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
    return _told(facts, "notebook/setting-left-on")


def _left_behind(facts: NotebookFacts) -> Iterator[LeftBehind]:
    """Those that matter, without optimizers that lie in an object that has the old model itself."""
    stale = {one.names[0] for one in facts.holders}
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
        f"of `{one.model}`: {named(one.where)} {what} after `{one.optimizer}` was created, and the optimizer {state}"
    )
    chain = [Link(f"{named(one.created)} created `{one.optimizer}`", one.created)] if one.created.cell else []
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
        f"`{one.optimizer}` was created before {named(one.where)} changed `{one.model}`, and does not hold "
        f"{len(one.missing):,} of its {one.of:,} trained parameters. Before you train it, make the optimizer again."
    )


@rule(
    code="notebook/stale-reference",
    title="An object still uses a value that a later cell has replaced.",
    symptom="A cell was changed and run again (the model, the data set, the collate function, the optimizer), and "
    "nothing changes: the learning rate, the batches or the results stay as they were.",
    cause="A loader, a scheduler or a trainer keeps the object that it was created with. Assigning the name again "
    "changes only the name. Persistent workers keep their copy of the data set, and a file or a memo the results of "
    "the code of before.",
    confirm="`loader.dataset is dataset`, `scheduler.optimizer is optimizer`, `trainer.model is model`: False.",
    fix="Run the cells below it again, in order, so that whatever depends on the object is created again after it.",
    reference="https://docs.python.org/3/reference/executionmodel.html#naming-and-binding",
)
def stale_reference(facts: NotebookFacts) -> Finding | None:
    models = {link.model for link in _left_behind(facts)} | {one.name for one in facts.classes}
    return next((of_told(one) for one in facts.holders if one.names[1] not in models), None)


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
    title = f"`{first}` {what} an earlier definition of `{one.name}`: {named(one.where)} {again}, {_consequence(one)}"
    verb = "defined" if one.module == "__main__" else "imported"
    chain = [Link(f"{named(one.old)} {verb} `{one.name}` first", one.old)] if one.old.cell else []
    chain += (
        [Link(f"{named(one.created)} created `{first}`", one.created)]
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
    return _told(facts, "notebook/cells-out-of-order")


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
    return _told(facts, "notebook/name-shadowed")


@rule(
    code="notebook/cell-run-twice",
    title="A cell that consumes its own result ran again.",
    symptom='KeyError, or "not found in axis", at `table = table.drop(…)` or `y = table.pop(…)` that has worked '
    "before; 'list' object has no attribute 'split'. Or no error: inputs that are 255 times too small, labels that are "
    "all NaN, an augmentation that is applied twice.",
    cause="`x = f(x)` takes the present `x`. When its cell runs again, that is the result of the last run: the column "
    "is gone, the text is split already, an axis is added a second time, the pixels are divided by 255 twice. A list "
    "that another cell made gets the same rows once more; rows are shuffled again, and labels made before are not; "
    "`%timeit step()` trains the model many times.",
    confirm="Run the cell that makes the variable, then this one once: it works.",
    fix="Give the result another name (`features = table.drop(…)`), or make the variable in the same cell.",
    reference="https://docs.jupyter.org/en/latest/projects/architecture/content-architecture.html",
)
def cell_run_twice(facts: NotebookFacts) -> Finding | None:
    one = next(iter(facts.repeated), None)
    if one is None:
        return None
    first = "the first round of the loop" if one.first == one.where else named(one.first)
    times = "the second time" if one.times == 2 else f"for the {one.times}th time"
    title = (
        f"Nothing is left of `{one.name}` for `{one.statement}`: {first} has gone through it to its end"
        if one.how == "used up"
        else f"`{one.statement}` runs {times} on the same `{one.name}`, which still holds what "
        f"{named(one.first)} has put there: two runs are counted as one"
        if one.how == "carried on"
        else f"`{one.statement}` runs {times} on the same `{one.name}`: {named(one.first)} has already applied it, and "
        "it consumes its own result"
    )
    fixes = [Fix("Or give the result another name, so that the cell can run again.", f"{one.name}_new = …")]
    if one.how == "carried on":
        fixes = [Fix("Make it anew in the cell that adds to it.", one.renewal or f"{one.name} = …")]
    elif one.renewal:
        fixes.insert(
            0, Fix(f"Run {named(one.fresh)} again, which makes `{one.name}`, then this cell once.", one.renewal)
        )
    chain = [Link(f"{named(one.fresh)} makes `{one.name}`", one.fresh)] if one.renewal else []
    chain += [
        Link(
            f"{named(one.first)} {'adds to it' if one.how == 'carried on' else 'replaces it by the result'}", one.first
        ),
        Link(
            f"{named(one.where)} {'goes on with it' if one.how == 'carried on' else 'applies it again'}"
            + (f" ({one.error})" if one.error else ""),
            one.where,
        ),
    ]
    chain += [Link(one.proof)] if one.proof else []
    return finding(
        "notebook/cell-run-twice", title, one.where, [one.name], fixes, chain, times=one.times, statement=one.statement
    )


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
    return _told(facts, "notebook/shared-object")


def told(
    code: str, title: str, names: tuple[str, ...], fix: tuple[str, str], where: Where, used: Where = NOWHERE
) -> Told:
    """used: where a cell uses what it tells of."""
    return Told(code, title, names, where, (fix,), ((f"{named(used)} uses it", used),))


def _told(facts: NotebookFacts, code: str) -> Finding | None:
    return next((of_told(one) for one in (*facts.failed, *facts.told) if one.code == code), None)


def of_told(one: Told) -> Finding:
    chain = (Link(says, where) for says, where in one.links if where.cell)
    return finding(one.code, one.title, one.where, one.names, [Fix(*fix) for fix in one.fixes], chain)


CHECKS = (cell_run_twice, stale_import, class_redefined, not_in_optimizer, stale_reference)


def name_all(facts: NotebookFacts) -> list[Finding]:
    """The findings, most likely first; a cause that an exception proves comes before all others."""
    found = (f for check in CHECKS if (f := check(facts)) is not None)
    findings = [*map(of_told, facts.failed), *found, *map(of_told, facts.told)]
    proven = any(one.evidence == "exception" for one in facts.classes) or any(one.error for one in facts.repeated)
    findings.sort(key=lambda f: not (proven and f.code == "notebook/class-redefined"))
    return [*findings, *memory_findings(facts)]


def notes_of(facts: NotebookFacts) -> Iterator[str]:
    """Facts worth knowing that are no fault."""
    for one in facts.classes:
        if not matters(one) and one.changed and one.used:
            were = "were" if len(one.instances) > 1 else "was"
            differ = "differ" if len(one.changed) > 1 else "differs"
            yield (
                f"{listed(one.instances, 4)} {were} made by an earlier definition of `{one.name}` than that of "
                f"{named(one.where)}: {listed(one.changed, 4)} {differ}."
            )
    yield from facts.notes
