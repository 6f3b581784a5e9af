"""Rules for objects that were made from what a later cell has replaced: models, loaders, classes."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.notebook.facts import LeftBehind, NotebookFacts, Redefined, StaleHolder
from nbdebug.chapters.notebook.rules.words import cell, finding, listed
from nbdebug.finding import Finding, Fix, Link


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
    title = f"`{first}` {what} the `{one.name}` of before: {cell(one.where)} {again}, {_so(one)}"
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
        _remakes(one, first),
        chain,
        objects=list(one.instances[:20]),
        methods_that_differ=list(one.changed[:20]),
    )


def matters(one: Redefined) -> bool:
    """Whether it is sure to do harm: an error shows it, or old objects are used and the class is not the same, or its
    name is asked for; objects of the new class beside them mean that the user keeps the old ones on purpose."""
    return one.seen == "exception" or one.used and not one.renewed and bool(one.changed or one.seen)


def _so(one: Redefined) -> str:
    if one.seen == "exception":
        return "so super() and pickle do not take it for one of the class that has the name now"
    if one.changed:
        return f"and what is new in {listed(one.changed)} is not in it"
    return {
        "isinstance": f"so isinstance(…, {one.name}) and the like say False",
        "super": f"so super({one.name}, self) refuses it",
        "pickle": "so pickle refuses it",
    }[one.seen]


def _remakes(one: Redefined, first: str) -> list[Fix]:
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
