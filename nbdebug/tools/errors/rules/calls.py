"""The causes of calls that torch or Python refuses: the arguments, a module that is not complete, the order of the
calls, values that are no probabilities, the length of a data set, and objects that are not the tensor that was meant.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Edit, Finding, Fix, Link
from nbdebug.text import count, figures, listed
from nbdebug.tools.errors.rules import Raised, TensorFact, TriedFix


@dataclasses.dataclass(frozen=True)
class CallFacts:
    """A call that was refused. what: which of the sentences of its rule says why; name: the argument, object or module
    that it is about, as the user writes it; callee: what is called; takes: the names of its parameters; value: what
    stands there now ("7.5", "ModuleList"); tensor: the argument, where it is one."""

    raised: Raised
    what: str
    name: str = ""
    callee: str = ""
    takes: tuple[str, ...] = ()
    value: str = ""
    tensor: TensorFact | None = None
    fixes: tuple[Fix, ...] = ()


ARGUMENTS = {
    "missing": "`{callee}` is called without its argument `{name}`",
    "unexpected": "`{callee}` takes no argument `{name}`",
    "too many": "`{callee}` takes {value} arguments, the object itself counted, but gets {name}",
    "no self": "`{callee}` is a method without `self`, so the object itself is one argument too many",
    "module": "`{name}` is a module, but `{callee}` needs its parameters",
    "number": "`{name}` is a number, and a loop goes through several values",
    "generators": "`{name}` are generators, of which an optimizer takes one: their parameters belong into one list",
    "method": "`{name}` is a method, and is not called",
    "called": "`{name}` is a {value}, but is called like a function",
    "float": "`{name}` is a float, but a whole number is needed here",
    "parameter": "`{name}` is a parameter, but is given a plain tensor",
    "layers": "`{callee}` takes its layers one by one, but gets the list `{name}`",
    "tuple": "`{callee}` takes all its tensors in one tuple or list, but gets them one by one",
    "class": "`{callee}` is a class: it is made with its settings, and what is made is called with `{name}`",
    "device": "torch knows no device `{name}`",
    "monitor": "A callback watches `{name}`, which nothing has logged by then; logged are {value}",
    "labels": "The model got `{name}` and no `labels`, so it has no loss: a Trainer drops all other keys",
    "state": "`{callee}` is an LSTM, whose state is a pair, but gets the one tensor `{name}`",
}


@rule(
    code="error/wrong-argument",
    title="A call lacks an argument, or gets one that it does not take.",
    symptom="missing 1 required positional argument; got an unexpected keyword argument; takes 1 positional "
    "argument but 2 were given; object is not iterable; list is not a Module subclass; must be tuple of "
    "Tensors, not Tensor; 'float' object cannot be interpreted as an integer; "
    "'builtin_function_or_method' object is not subscriptable; cannot assign 'torch.FloatTensor' as "
    "parameter; Early stopping conditioned on metric … which is not available; The model did not return a loss.",
    cause="The call and what is called do not agree: a tokenizer gives an entry that the model has no argument "
    "for, `LBFGS.step` has no closure, an optimizer gets the model in place of its parameters, a loss is "
    "called before it is made, `/` makes a float.",
    confirm="`inspect.signature(model.forward)`, and the types of what is passed.",
    fix="Pass what it takes, in that form: `model.parameters()`, `nn.CrossEntropyLoss()(scores, labels)`, "
    "`nn.Sequential(*layers)`, `torch.cat((a, b))`, `n // 2`.",
    reference="https://docs.python.org/3/tutorial/controlflow.html#more-on-defining-functions",
)
def wrong_argument(facts: CallFacts) -> Finding:
    return _finding("error/wrong-argument", facts, ARGUMENTS)


MODULES = {
    "no init": "`{name}.__init__` assigns modules before `super().__init__()`, which makes the place for them",
    "misspelt": "`{name}` has no `forward`",
    "nested": "`{name}` has no `forward`: the one that you wrote is indented into `{value}`, where nobody can call it",
    "container": "`{name}` is a {value}: it holds modules, but has no `forward`, so it can't be called",
}


@rule(
    code="error/incomplete-module",
    title="A module has no forward, or was not initialized.",
    symptom='Module [Net] is missing the required "forward" function; cannot assign module before '
    "Module.__init__() call.",
    cause="`forward` is misspelt or indented into another function, a ModuleList is called as if it were a "
    "Sequential, or `__init__` does not begin with `super().__init__()`.",
    confirm="`'forward' in vars(type(model))`.",
    fix="Name the method `forward`; begin `__init__` with `super().__init__()`; call the modules of a list in "
    "a loop, or make it a Sequential.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html",
)
def incomplete_module(facts: CallFacts) -> Finding:
    misspelt = facts.what == "misspelt" and facts.value
    return _finding("error/incomplete-module", facts, MODULES, f", but `{facts.value}`" if misspelt else "")


NAMES = {
    "taken": "`{name}` is an attribute of {callee}, so this {value} can't have a part of that name",
    "attribute": "`{name}` is a plain attribute of this {callee} already, so nothing can be registered as that",
    "dot": "The name `{name}` has a dot, which separates a module from its parts",
    "empty": "The name of a part of a {callee} is empty",
    "text": "The key {name} of a {callee} is no text",
}


@rule(
    code="error/unusable-name",
    title="A module, parameter or buffer gets a name that it can't have.",
    symptom="KeyError: attribute 'type' already exists; module name can't contain \".\"; can't be empty string; "
    "module name should be a string. Got int.",
    cause="The parts of a module are its attributes. A key of a ModuleDict that comes from the data (a column `type`, "
    "a path, a number) may be the name of a method, or no name at all; `self.mask = None` before "
    '`register_buffer("mask", …)` takes the name, too.',
    confirm="`hasattr(nn.Module(), name)`.",
    fix='Put something before or behind each key, where it is made and where it is read: `f"col_{name}"`; replace '
    'dots; `register_buffer("mask", None)` where it has no value yet.',
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.ModuleDict.html",
)
def unusable_name(facts: CallFacts) -> Finding:
    return _finding("error/unusable-name", facts, NAMES)


ORDER = {
    "schedule": "`{name}` is planned for {value} steps, and `step()` is called once more",
    "resumed": "`{callee}` with `last_epoch` goes on from an earlier schedule, but the groups of `{name}` have no "
    "`initial_lr`: none was made for it, and no state was loaded",
    "unscaled": "`{name}.step` comes after a backward of a loss that `{name}` did not scale",
    "no gradients": "`{name}.step` finds no gradient: the parameters of this optimizer got none since the last update",
    "no update": "`{name}.step` is called again, but `{name}.update()` was not called since the last time",
    "twice": "`{name}.{callee}` is called twice for this optimizer before `{name}.update()`",
    "late": "`{name}.unscale_` comes after `{name}.step`, which has unscaled the gradients already",
}


@rule(
    code="error/call-order",
    title="A GradScaler or a learning-rate schedule is called too often, or before another call.",
    symptom="Attempted step but _scale is None; No inf checks were recorded for this optimizer; unscale_() has "
    "already been called on this optimizer since the last update(); Tried to step … times. The specified "
    "number of total steps is …; param 'initial_lr' is not specified in param_groups[0] when resuming.",
    cause="A scaler wants, once in each step: `scale(loss).backward()`, perhaps `unscale_`, `step`, `update`. A "
    "schedule with a planned end, such as OneCycleLR, takes no step beyond it.",
    confirm="Count the calls of `step()` in one epoch: `len(loader)`, times the epochs.",
    fix="Call them in this order; plan `total_steps=epochs * len(loader)`.",
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
)
def call_order(facts: CallFacts) -> Finding:
    planned = facts.what == "schedule" and facts.callee
    return _finding("error/call-order", facts, ORDER, f": the loops make {facts.callee}" if planned else "")


@rule(
    code="error/not-probabilities",
    title="Values that should be probabilities are not.",
    symptom="all elements of input should be between 0 and 1; probability tensor contains either `inf`, `nan` or "
    "element < 0; invalid multinomial distribution; Expected parameter probs (loc, scale) … to satisfy ….",
    cause="BCELoss and multinomial take probabilities, but get the scores of a layer; or the values are NaN already.",
    confirm="`x.min(), x.max(), x.isnan().any()`.",
    fix="Scores: `BCEWithLogitsLoss`, `scores.softmax(-1)`, `Categorical(logits=scores)`. NaN: `%nan_trace` "
    "finds where it begins.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.BCELoss.html",
)
def not_probabilities(facts: CallFacts) -> Finding:
    tensor, fixes = facts.tensor, facts.fixes
    assert tensor is not None
    ends = f"from {figures(tensor.low or 0)} to {figures(tensor.high or 0)}"
    needs = "a scale above 0" if facts.value == "scale" else "probabilities, from 0 to 1"
    title = f"`{facts.name}` goes {ends}, but `{facts.callee}` needs {needs}"
    if tensor.nonfinite or tensor.low is None:
        number = f"{tensor.nonfinite} of its values are NaN or infinite" if tensor.nonfinite else "can't be read"
        no = f"no {facts.value} of a distribution" if facts.value in ("loc", "scale") else "not made of probabilities"
        title = f"`{facts.name}` is {no}: {number}"
        fixes = (Fix("Find where the first NaN is made.", "%nan_trace step()"),)
    facts = dataclasses.replace(facts, fixes=fixes)
    return dataclasses.replace(_finding("error/not-probabilities", facts, {facts.what: title.replace("{", "{{")}))


LENGTHS = {
    "empty": "The data set `{name}` is empty: there is no sample to draw",
    "stream": "`{name}` gives its samples one after the other, so a loader can't shuffle them",
    "split": "The lengths of the parts of `{name}` do not add up to its own",
    "no length": "`{name}` ({value}) has no `__len__`, which a loader that shuffles needs",
}


@rule(
    code="error/dataset-length",
    title="A data set is empty, has no length, or another than is asked.",
    symptom="num_samples should be a positive integer value, but got num_samples=0; object of type … has no "
    "len(); Sum of input lengths does not equal the length of the input dataset; DataLoader with "
    "IterableDataset: expected unspecified shuffle option.",
    cause="A wrong folder, filter or ending leaves no sample; rounded lengths of a split miss one; a stream has "
    "no length.",
    confirm="`len(dataset)`.",
    fix="Look at what the data set is made from; give the rest to the last part: `[n, len(data) - n]`; "
    "shuffle a stream within itself.",
    reference="https://docs.pytorch.org/docs/stable/data.html",
)
def dataset_length(facts: CallFacts) -> Finding:
    return _finding("error/dataset-length", facts, LENGTHS)


ITERATORS = {
    "next": "`{name}` is a {value}, which can be gone through, but is no iterator: `next` needs `iter({name})`",
    "next method": "`{name}` is an iterator, which has no method `next` (that was Python 2's)",
    "index": "`{name}` is a {value}: it gives its batches one after the other and can't be indexed",
}


@rule(
    code="error/not-an-iterator",
    title="A loader is used as an iterator or a list.",
    symptom="'DataLoader' object is not an iterator; '_SingleProcessDataLoaderIter' object has no attribute 'next'; "
    "'DataLoader' object is not subscriptable.",
    cause="A loader makes a new iterator for each epoch. The iterator gives the batches; single samples are in "
    "the data set.",
    confirm="`iter(loader)`.",
    fix="The first batch: `next(iter(loader))`; one sample: `loader.dataset[i]`.",
    reference="https://docs.python.org/3/glossary.html#term-iterable",
)
def not_an_iterator(facts: CallFacts) -> Finding:
    return _finding("error/not-an-iterator", facts, ITERATORS)


UNPACKING = {
    "too many": "`{name}` gives {value} values, but there are {callee} names for them",
    "too few": "`{name}` gives {value} values, but there are {callee} names for them",
    "one state": "`{name}` returns its state as one tensor, but there are {callee} names for it",
    "nested": "`{name}` gives {value} values, of which one is a tuple, but there are {callee} names for them",
    "dict": "`{name}` is a dict: going through it gives its keys alone",
    "keys": "`{name}` is the text '{value}', a key: each batch of `{callee}` is a dict, which gives its keys",
    "keys of": "`{name}` is the text '{value}', a key: `{callee}` is a dict, and to unpack it gives its keys",
    "a dict": "`{name}` gives a dict with the keys {value}, and there are {callee} names for them",
    "parameters": "`{name}` gives the values alone, without their names",
    "number": "`{name}` gives the batches alone, without their number",
}


@rule(
    code="error/unpack-mismatch",
    title="The number of names is not that of the values, or the values are not those that were meant.",
    symptom="too many values to unpack (expected 2); not enough values to unpack (expected 3, got 2); 'str' "
    "object has no attribute 'to'; argument 'input' must be Tensor, not str.",
    cause="A data set gives one entry more than the loop has names for; an LSTM returns `out, (h, c)`; a batch "
    "or an output (transformers since 4.0) that is a dict gives its keys; `parameters()` gives no names; "
    "`enumerate` is missing.",
    confirm="`type(batch), len(batch)`.",
    fix="Write a name for each value, `_` for those that are not needed: `for images, labels, _ in loader`; "
    "take the entries of a dict by their keys.",
    reference="https://docs.python.org/3/tutorial/datastructures.html#tuples-and-sequences",
)
def unpack_mismatch(facts: CallFacts) -> Finding:
    return _finding("error/unpack-mismatch", facts, UNPACKING)


WRAPPED = {"": "`{name}` is a {value}, which has no `{callee}`: the object within it has"}


@rule(
    code="error/wrapped-object",
    title="An attribute is asked of a wrapper, but belongs to the object within it.",
    symptom="'DataParallel' object has no attribute …; 'DistributedDataParallel' object has no attribute …; "
    "'Subset' object has no attribute 'targets'; 'DataLoader' object has no attribute ….",
    cause="DataParallel, Subset and the like hold the model or the data set as `module` or `dataset`, and pass "
    "on only what they need themselves.",
    confirm="`type(model)`, `vars(subset)`.",
    fix="Ask what is within: `model.module.fc`, `subset.dataset.targets`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html",
)
def wrapped_object(facts: CallFacts) -> Finding:
    return _finding("error/wrapped-object", facts, WRAPPED)


COPIES = {
    "": "`{name}` belongs to an autograd graph, and `deepcopy` copies no graph",
    "inside": "`{name}` holds a tensor that belongs to an autograd graph, and `deepcopy` copies no graph",
    "attribute": "`{callee}` keeps `{name}`, a tensor of an autograd graph, and `deepcopy` copies no graph",
    "weight norm": "`{name}` is computed from other weights (weight_norm), and `deepcopy` copies no graph",
}


@rule(
    code="error/deepcopy-of-graph",
    title="deepcopy meets a tensor that belongs to an autograd graph.",
    symptom="Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment.",
    cause="A module keeps an output of its forward (`self.features = x`), or the old weight_norm a computed "
    "weight: that tensor has a history, which can't be copied.",
    confirm="`{n: v.grad_fn for n, v in vars(module).items() if torch.is_tensor(v)}`.",
    fix="Keep it without its graph: `self.features = x.detach()`; copy a tensor with `x.detach().clone()`; use "
    "`torch.nn.utils.parametrizations.weight_norm`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.Tensor.detach.html",
)
def deepcopy_of_graph(facts: CallFacts) -> Finding:
    return _finding("error/deepcopy-of-graph", facts, COPIES)


PICKLED = {
    "": "`{name}` is part of `{callee}`, and pickle can't store it ({value}): the whole model can't be saved",
    "whole": "`{callee}` holds what pickle can't store ({value}): the whole model can't be saved",
}


@rule(
    code="error/not-picklable",
    title="A model is saved whole, with a part that pickle can't store.",
    symptom="Can't pickle local object; Can't get local object; cannot pickle 'generator' object, in torch.save.",
    cause="`torch.save(model)` pickles the object with all that it holds. A lambda, a function within a "
    "function, a lock or an open file has no name under which it can be found again.",
    confirm="`vars(model)`.",
    fix="`torch.save(model.state_dict(), path)`; make the lambda a function of the file.",
    reference="https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
)
def not_picklable(facts: CallFacts) -> Finding:
    return _finding("error/not-picklable", facts, PICKLED)


def _finding(code: str, facts: CallFacts, titles: dict[str, str], more: str = "") -> Finding:
    title = titles[facts.what].format(name=facts.name, callee=facts.callee, value=facts.value) + more
    evidence: dict[str, Any] = {"takes": listed(facts.takes, 12)} if facts.takes else {}
    evidence["message"] = facts.raised.message.partition("\n")[0][:300]
    return Finding(code, title, facts.raised.where, evidence, facts.fixes)


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
        fixes.append(dataclasses.replace(cure, edit=edit).fix(title))
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
    title, where = f"{subject} can't be given to NumPy{made}", facts.raised.where
    return Finding(
        "error/attached-to-graph", title, where, {key: value for key, value in evidence.items() if value}, tuple(fixes)
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
