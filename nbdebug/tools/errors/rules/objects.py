"""The causes of errors with objects that are not the tensor that was meant: a tuple, a dict or nothing in its place, a
tensor that NumPy can't take, an iterator at its end."""

from __future__ import annotations

import dataclasses

from nbdebug.registry import rule
from nbdebug.report import Edit, Finding, Fix, Link
from nbdebug.text import count, listed
from nbdebug.tools.errors.facts import Raised, TensorFact, TriedFix


@dataclasses.dataclass(frozen=True)
class ObjectFacts:
    """An object in the place of a tensor.

    name: the user's text for it, or where `inner`, within a Sequential, the layer that returns it; kind: its class
    ("tuple", "NoneType"); entries: the tensors in it, by the text that gets them; need: what was wanted of it
    ("a tensor", "`.shape`"); taker: the module or function that got it; maker: the user's text that made it ("rnn(x)");
    source: the class of the module that made it ("GRU"). keywords: it is a dict, and these of its keys are parameters
    of the module that got it whole; others: its other keys. cures: what gets a tensor out of it; edits: the same, as
    changes of the user's line. way: the bindings that led there.
    """

    raised: Raised
    name: str
    kind: str
    entries: tuple[TensorFact, ...] = ()
    need: str = "a tensor"
    taker: str = ""
    maker: str = ""
    source: str = ""
    keywords: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    cures: tuple[TriedFix, ...] = ()
    edits: tuple[Edit | None, ...] = ()
    inner: bool = False
    way: tuple[Link, ...] = ()


@rule(
    code="error/not-a-tensor",
    title="A tuple, a list, a dict or None is used as if it were a tensor.",
    symptom="must be Tensor, not tuple; tuple indices must be integers or slices, not tuple; 'dict' object has no "
    "attribute 'shape'; 'list' object has no attribute 'to'; 'NoneType' object has no attribute 'mean'.",
    cause="Recurrent layers and attention return a tuple (output, state); models of transformers return an object with "
    "`logits`; a batch is a dict or a list; a `forward` without `return` gives None.",
    confirm="`type(out)`, and `[type(part) for part in out]`.",
    fix="Unpack it where it is made: `out, state = rnn(x)`; take the entry: `out['logits']`; pass a dict of arguments "
    "as `model(**batch)`; return the result.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.GRU.html",
)
def not_a_tensor(facts: ObjectFacts) -> Finding:
    evidence: dict[str, object] = {"type": facts.kind}
    if facts.entries:
        evidence["entries"] = [{"entry": e.name, "dtype": e.dtype, "shape": list(e.shape)} for e in facts.entries[:6]]
    evidence["message"] = facts.raised.message.partition("\n")[0][:300]
    fixes = tuple(_object_fixes(facts))
    return Finding("error/not-a-tensor", _object_title(facts), facts.raised.where, evidence, fixes, facts.way)


def _object_title(facts: ObjectFacts) -> str:
    name = f"`{facts.name}`" if facts.name else "A value"
    if facts.kind == "NoneType":
        return f"{name} is None: `{facts.maker}` returns nothing"
    made = f": `{facts.source}` returns" if facts.source else ""
    inside = listed((entry.name.removeprefix(facts.name) or entry.name for entry in facts.entries), 3)
    if facts.inner:
        return f"{name} ({facts.source}) returns a {facts.kind}, but `{facts.taker}`, which gets it, needs a tensor"
    of = f"{made or ' of'} {count(len(facts.entries), 'tensor')} ({inside})" if facts.entries else ""
    if facts.keywords:
        return (
            f"{name} is a {facts.kind} and is passed whole, but `{facts.taker}` takes its entries as arguments "
            f"({listed(facts.keywords)})"
        )
    taker = f"`{facts.taker}` needs" if facts.taker else "this line needs"
    return f"{name} is a {facts.kind}, but {taker} {facts.need}{of}"


def _object_fixes(facts: ObjectFacts) -> list[Fix]:
    if facts.kind == "NoneType":
        return [Fix("Return the result at its end.", "return out   # the last line of its forward")]
    fixes = []
    for cure, edit in zip(facts.cures, (*facts.edits, *[None] * len(facts.cures))):
        title = "Pass its entries as arguments." if facts.keywords else "Take the tensor out of it."
        if "for " in cure.code:
            title = "Move each of its tensors."
        if edit is not None:
            fixes.append(Fix.of(title, edit, cure.worked, cure.after))
        else:
            fixes.append(Fix(title, cure.code, cure.worked, cure.after))
    if facts.inner:
        code = "class Output(nn.Module):\n    def forward(self, result):\n        return result[0]"
        fixes = [Fix("Put a module between the two that takes the output out of it.", code)]
    return fixes or [Fix("Look at what it holds.", f"[type(part) for part in {facts.name or 'value'}]")]


@dataclasses.dataclass(frozen=True)
class AttachedFacts:
    """A tensor of a graph that NumPy was to read. by: the user's text of the call; cure, edit: the tried rewrite."""

    raised: Raised
    name: str = ""
    tensor: TensorFact | None = None
    cure: TriedFix | None = None
    edit: Edit | None = None


@rule(
    code="error/attached-to-graph",
    title="NumPy is given a tensor that belongs to an autograd graph.",
    symptom="Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead; also from plt.plot, "
    "np.array and sklearn's metrics, which call it.",
    cause="NumPy does not record gradients, so torch refuses to hand out the values of a tensor that has a history: an "
    "output of the model outside no_grad, or a parameter.",
    confirm="`x.requires_grad` is True.",
    fix="`x.detach().cpu().numpy()`; where nothing is trained, run the model within `torch.no_grad()`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.Tensor.detach.html",
)
def attached_to_graph(facts: AttachedFacts) -> Finding:
    tensor, made = facts.tensor, ""
    if tensor is not None:
        parameter = "it is a parameter" if tensor.kind == "parameter" else "it requires a gradient"
        made = f": it is the result of `{tensor.made_by}` in a graph" if tensor.made_by else f": {parameter}"
    evidence = {"tensor": str(tensor) if tensor else None, "message": facts.raised.message.partition("\n")[0][:300]}
    fixes = []
    if facts.cure is not None and facts.edit is not None:
        fixes.append(Fix.of("Detach it first.", facts.edit, facts.cure.worked, facts.cure.after))
    else:
        fixes.append(Fix("Detach it first.", facts.cure.code if facts.cure else f"{facts.name or 'x'}.detach()"))
    fixes.append(Fix("Or compute it without a graph.", "with torch.no_grad():\n    ...   # the forward"))
    subject = f"`{facts.name}`" if facts.name else "A tensor"
    return Finding(
        "error/attached-to-graph",
        f"{subject} can't be given to NumPy{made}",
        facts.raised.where,
        {key: value for key, value in evidence.items() if value},
        tuple(fixes),
    )


@dataclasses.dataclass(frozen=True)
class IteratorFacts:
    """An iterator at its end. name: the user's text for it; source: what it was made from ("loader"); kind: its class;
    drawn: how many items it gave, None where that is not known; edit: the statement with a new start."""

    raised: Raised
    name: str = ""
    source: str = ""
    kind: str = ""
    drawn: int | None = None
    edit: Edit | None = None


@rule(
    code="error/iterator-exhausted",
    title="next() is called on an iterator that has no item left.",
    symptom="StopIteration, without a message, at `next(batches)`; RuntimeError: generator raised StopIteration.",
    cause="An iterator goes through its items once. After as many batches as the loader has, or at once where the data "
    "set is empty or a generator was used up before, there is nothing left.",
    confirm="`len(loader)`, and how often `next` is called; `next(batches, None)` gives None at the end.",
    fix="Loop with `for batch in loader`, or start again: `except StopIteration: batches = iter(loader)`.",
    reference="https://docs.python.org/3/library/exceptions.html#StopIteration",
)
def iterator_exhausted(facts: IteratorFacts) -> Finding:
    name = f"`{facts.name}`" if facts.name else "The iterator"
    source = f"`{facts.source}`" if facts.source else ""
    if facts.drawn == 0:
        title = f"{source or name} gives no item at all: it is empty, or was used up before"
    elif facts.drawn:
        title = f"{name} has given all its {count(facts.drawn, 'item')}{f' of {source}' if source else ''}, and `next` "
        title += "is called once more"
    else:
        title = f"{name} has no item left{f': it goes once through {source}' if source else ''}"
    evidence = {"iterator": facts.kind, "items given": facts.drawn}
    fixes = [Fix("Loop over it: the loop ends with the items.", f"for batch in {facts.source or 'loader'}:\n    ...")]
    if facts.edit is not None:
        fixes.insert(0, Fix.of("Start again where it ends.", facts.edit))
    return Finding(
        "error/iterator-exhausted",
        title,
        facts.raised.where,
        {key: value for key, value in evidence.items() if value not in (None, "")},
        tuple(fixes),
    )
