"""Errors in `backward()`: their facts, the words for them, and the rules: a value changed in place, no path to a
parameter, a graph walked twice."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

from nbdebug.registry import rule
from nbdebug.report import Edit, Finding, Fix, Link, Where
from nbdebug.text import listed
from nbdebug.tools.errors.rules import NOWHERE, Raised, TensorFact, as_code


@dataclasses.dataclass(frozen=True)
class GraphCut:
    """A place at which the gradient's path ends. kind: "detached", "number", "whole numbers", "comparison", "rebuilt",
    "sampled", "gradient" (one without a graph of its own), "checkpoint" (no input of it requires a gradient), "block"
    (no_grad around it), "global" (gradients are off everywhere), "frozen" (no parameter requires one).

    op: as the user calls it ("argmax", ".item()"). text: the expression. source: what the path came from. target: the
    variable that gets the result, and has no gradient. function: around it, "" for a cell. sure: whether the source is
    known to have a gradient. names: of what is frozen. statement: the one in which it happens.
    """

    kind: str
    op: str
    text: str = ""
    source: str | None = None
    target: str | None = None
    function: str = ""
    where: Where = NOWHERE
    sure: bool = True
    names: tuple[str, ...] = ()
    statement: str = ""


@dataclasses.dataclass(frozen=True)
class NoGradFacts:
    """A gradient was requested of something that has none.

    what: "loss" (backward on it), "not scalar", "not a tensor", "input" (autograd.grad's), "unused" (likewise, and not
    reached), "no parameters", "not a leaf" (given to an optimizer), "grad is None", "hook" (on a tensor without one),
    "inference". expression: that of which it was requested, as the user wrote it. tensor: its facts. type_name: of what
    is no tensor. no_path: nothing that it was computed from ever had a gradient. eval_models: in eval mode, which turns
    no gradient off. counts: parameters that require a gradient and all, of each model. untracked: what no optimizer or
    parent knows ("self.blocks"). mean: the loss reduced to one number, where that was tried. producer: the function
    that returned what is no tensor. parameter: its name. edit: the line that makes the first
    untracked list, with one that registers its modules; or that computes the loss, with its mean."""

    raised: Raised
    what: str
    expression: str = ""
    tensor: TensorFact | None = None
    type_name: str | None = None
    cut: GraphCut | None = None
    no_path: bool = False
    eval_models: tuple[str, ...] = ()
    counts: tuple[tuple[str, int, int], ...] = ()
    untracked: tuple[tuple[str, str], ...] = ()
    mean: float | None = None
    producer: str | None = None
    parameter: str | None = None
    edit: Edit | None = None


@dataclasses.dataclass(frozen=True)
class GraphHolder:
    """A variable that holds a graph which an earlier backward has freed.

    how: "iteration" (gets its value in one iteration of a loop, read in the next), "sum" (added to in each iteration),
    "sometimes" (computed in some iterations), "attribute" (of an object), "list" (in a container), "once" (computed
    before the loop), "shared" (two losses were computed from it), "each" (all those of a list), "again" (the same
    loss). op: of its last node. write, read: the lines. container, object: it is a container, or another object that
    holds the tensors. cell: what runs again is a cell, no loop. made: the statements that make it with its graph.
    """

    name: str
    how: str
    shape: tuple[int, ...] = ()
    op: str | None = None
    write: Where = NOWHERE
    read: Where = NOWHERE
    container: bool = False
    object: bool = False
    cell: bool = False
    made: str = ""


@dataclasses.dataclass(frozen=True)
class BackwardTwiceFacts:
    """A graph was walked a second time. loss: as the user wrote it. holders: of the freed graph, the likeliest first.
    first_backward: where backward was called before on the same graph, as far as the source shows it; first_loss: what
    it was called on. nodes: of the loss's graph, with those freed among them. optimizers: how many there are: two train
    two things."""

    raised: Raised
    loss: str = ""
    holders: tuple[GraphHolder, ...] = ()
    first_backward: Where = NOWHERE
    first_loss: str = ""
    nodes: int = 0
    nodes_freed: int = 0
    optimizers: int = 0


@dataclasses.dataclass(frozen=True)
class InPlaceChange:
    """An in-place change. text: the statement. target: what it changes ("out"). how: "statement", "method", "item",
    "out", "module" (an activation with inplace=True), "step" (an optimizer), "block" (in no_grad). op: its node in the
    graph. operand: what it puts in ("residual"). replacement: the statement without the change, as code. module: the
    dotted name of the module in whose forward it stands. function: around it."""

    text: str
    target: str
    how: str
    op: str
    operand: str | None = None
    replacement: str = ""
    module: str | None = None
    function: str = ""
    where: Where = NOWHERE


@dataclasses.dataclass(frozen=True)
class InPlaceFacts:
    """Something that backward needs was changed in place.

    what: "saved" (detected in backward), "leaf", "leaf view", "view", "expanded", "out", "inference" (refused at once).
    saved_by: the op whose derivative needs the old value ("Relu"); own_result: it is that op's own result. shape,
    version, saved_version: what torch says of the tensor. parameter: its name where it is one; module: of that op.
    change: the likeliest statement; others: further ones that would fit. fix_passes: whether backward passes without
    the change, on random numbers of that shape. loss: what backward was called on. edit: the change's statement without
    the change, or of a leaf within no_grad; copied: the forward's lines that read it, on a copy; weight: what it
    changes is a parameter, which is never computed anew."""

    raised: Raised
    what: str
    saved_by: str = ""
    own_result: bool = False
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    version: int | None = None
    saved_version: int | None = None
    parameter: str | None = None
    tensor: str | None = None
    module: str | None = None
    change: InPlaceChange | None = None
    others: tuple[InPlaceChange, ...] = ()
    fix_passes: bool | None = None
    loss: str = ""
    edit: Edit | None = None
    copied: Edit | None = None
    weight: bool = False


NODE_WORDS = {
    "Addmm": "a Linear",
    "Convolution": "a convolution",
    "CudnnConvolution": "a convolution",
    "NativeBatchNorm": "batch norm",
    "CudnnBatchNorm": "batch norm",
    "NativeLayerNorm": "layer norm",
    "MkldnnRnnLayer": "the recurrent layer",
    "CopySlices": "an item assignment",
    "Mm": "a matrix product",
    "Bmm": "a matrix product",
    "T": "a transpose",
    "Mul": "a product",
    "Div": "a division",
    "Pow": "a power",
}


def cause_where(cause: Where, raised: Raised) -> Where:
    """The line of the cause, else the line that failed; the phase is that of the failure."""
    where = cause if cause.line is not None else raised.where
    return dataclasses.replace(where, phase=raised.where.phase, module=where.module or raised.where.module)


def op_words(node: str) -> str:
    """An op by the name of its node: "NativeBatchNorm" → "batch norm", "Relu" → "`relu`"."""
    small = "".join("_" + c.lower() if c.isupper() else c for c in node).strip("_")
    return NODE_WORDS.get(node, f"`{small}`")


def no_grad_title(facts: NoGradFacts) -> str:
    tensor, name = facts.tensor, f"`{facts.expression}`" if facts.expression else "the loss"
    if facts.what in ("loss", "hook"):
        return _loss_title(facts, name)
    if facts.what == "not scalar":
        shape = list(tensor.shape) if tensor is not None else None
        return f"{name} has shape {shape}, but `backward()` needs a scalar"
    if facts.what == "not a tensor":
        return _not_a_tensor_title(facts)
    if facts.what == "input":
        missing = f"{name} does not require grad, so there is no gradient with respect to it"
        return cut_title(facts.cut, name) if facts.cut is not None else missing
    if facts.what == "unused":
        return f"{name} is not part of the graph: the outputs were not computed from it"
    if facts.what == "no parameters":
        frozen = any(some == 0 for _, some, whole in facts.counts if whole)
        why = (
            "those that it could get are frozen (`requires_grad` is False)"
            if frozen
            else f"`{facts.expression}` is empty"
        )
        if facts.untracked:
            why = "`{}` is {}, which `parameters()` does not see".format(*facts.untracked[0])
        return f"The optimizer got no parameters: {why}"
    if facts.what == "not a leaf":
        op = f" but the result of `{tensor.made_by}`" if tensor is not None and tensor.made_by else ""
        return f"{name} is not a leaf{op}: an optimizer can only update leaf tensors"
    if facts.what == "grad is None":
        return _none_grad_title(facts)
    name = name if facts.expression else "a tensor"
    return f"{name} was made under `torch.inference_mode()`, and autograd can't use such a tensor later"


def _loss_title(facts: NoGradFacts, name: str) -> str:
    if facts.cut is not None:
        return cut_title(facts.cut, name)
    others = _with_graph(facts)
    one = len(others) == 1
    if facts.no_path:
        unused = f", and {listed(others)}, which {'has' if one else 'have'} one, {'is' if one else 'are'} not used"
        return f"Nothing that {name} is computed from has a gradient: no parameter takes part in it" + (
            unused if others else ""
        )
    still = f" ({listed(others)} still {'has' if one else 'have'} one)" if others else ""
    return f"{name} has no `grad_fn`: its graph ends somewhere before it{still}"


def _with_graph(facts: NoGradFacts) -> list[str]:
    """The user's variables that still have a gradient, without parameters."""
    return [tensor.name for tensor in facts.raised.tensors if tensor.requires_grad and tensor.made_by]


def _not_a_tensor_title(facts: NoGradFacts) -> str:
    name = f"`{facts.expression}`" if facts.expression else "what `backward()` was called on"
    if facts.cut is not None:
        return cut_title(facts.cut, name)
    if facts.type_name == "NoneType":
        producer = f": `{facts.producer}` returns nothing" if facts.producer else ""
        return f"{name} is None{producer}, so there is no loss to call `backward()` on"
    producer = f": it is the result of `{facts.producer}`" if facts.producer else ""
    return f"{name} is a {facts.type_name}, not a tensor, so it has no `backward()`{producer}"


def _none_grad_title(facts: NoGradFacts) -> str:
    tensor, name = facts.tensor, f"`{facts.expression}`" + (f" (`{facts.parameter}`)" if facts.parameter else "")
    start = f"`{facts.expression}.grad` is None: "
    if tensor is not None and tensor.made_by:
        return start + f"`{facts.expression}` is a result of `{tensor.made_by}`, and only leaves keep their gradient"
    if tensor is not None and not tensor.requires_grad:
        return start + f"{name} does not require grad"
    return start + f"no `backward()` has reached {name} since its gradient was last cleared"


def cut_title(cut: GraphCut, name: str) -> str:
    """One sentence on a cut. name: of what a gradient was requested, in backticks."""
    target = f"`{cut.target}`" if cut.target else name
    source = f"`{cut.source}`" if cut.source else "its input"
    end = "" if target == name or cut.kind in ("global", "frozen") else f", so {name} has none"
    function = f" in `{cut.function}`" if cut.function else ""
    if cut.kind == "block" and "decorated with" in cut.text:
        decorated = f"`{cut.text.partition(' ')[0]}`, which is decorated with `{cut.op}` and records no graph"
        return f"{target} comes from {decorated}{end}"
    if cut.kind == "block":
        return f"{target} is computed under `{cut.text.rstrip(':')}`{function}, which records no graph{end}"
    # a number that is not itself the target, but goes into more of the statement
    collects = cut.statement.endswith(("}", "]")) or "tensor(" in cut.statement
    named = cut.target or cut.statement.startswith("return")
    if cut.kind == "number" and (not named or collects and not cut.statement.endswith(cut.text)):
        return f"{name} has no gradient: `{cut.op}` in `{cut.text}` returns only the value of {source}, not its graph"
    call = cut.op if cut.op.startswith(".") else f".{cut.op}()"
    sentences = {
        "whole numbers": f"{target} has no gradient: `{cut.text}` returns integers, and `{cut.op}` has no derivative",
        "comparison": f"{target} has no gradient: `{cut.text}` is true or false, and a comparison has no derivative",
        "detached": f"{target} has no gradient: `{call}` in `{cut.text}` cuts it off from {source}",
        "number": f"{target} is a plain number without a graph: `{cut.op}` in `{cut.text}` returns only the value of "
        f"{source}",
        "rebuilt": f"{target} has no gradient: `{cut.text}` creates a new tensor from the values, without the graph of "
        f"{source}",
        "sampled": f"{target} has no gradient: `{cut.text}` draws a sample without one",
        "checkpoint": f"{target} has no gradient: `{cut.text}` passes none, because none of its inputs requires one",
        "gradient": f"{target} is a gradient without a graph: `{cut.text}` records one only with `create_graph=True`",
        "global": f"{name} has no graph: gradients are off everywhere, because `{cut.op}` was called and never undone",
        "frozen": f"{name} has no gradient: all parameters of {listed(cut.names)} are frozen (`requires_grad=False`)",
    }
    return sentences[cut.kind] + end


def cut_chain(facts: NoGradFacts) -> tuple[Link, ...]:
    cut = facts.cut
    if cut is None:
        return ()
    links = []
    if cut.source and cut.kind not in ("block", "global", "frozen"):
        none = "requires no gradient" if cut.kind == "checkpoint" else ""
        links.append(Link(f"`{cut.source}` {none or ('has a gradient' if cut.sure else 'may have a gradient')}"))
    if cut.where.line is not None:
        target = "" if cut.kind == "frozen" else f" of `{cut.target}`" if cut.target else " of the result"
        function = f" in `{cut.function}`" if cut.function else ""
        links.append(Link(f"`{cut.text}`{function} ends the gradient path{target}", cut.where))
    name = f"`{facts.expression}`" if facts.expression else "the loss"
    links.append(Link(f"a gradient of {name} is requested", facts.raised.where))
    return tuple(links)


def no_grad_fixes(facts: NoGradFacts) -> tuple[Fix, ...]:
    """Fixes for error/no-grad-path, with the user's own names."""
    cut, name = facts.cut, facts.expression or "loss"
    if cut is not None and facts.what != "inference":
        target = cut.target or facts.expression or "loss"
        assignment = f"{target} = " if cut.target or not cut.function else ""
        return _CUT_FIXES.get(cut.kind, _plain_cut_fixes)(cut, target, cut.source or "scores", assignment)
    if facts.what == "loss" and facts.no_path:
        used = [*_with_graph(facts), "model(x)"][0]
        loss = name if name.isidentifier() else "loss"
        return (Fix("Compute it from the model's output.", f"{loss} = loss_fn({used}, target)"),)
    if facts.what in _FIXES:
        return _FIXES[facts.what](facts, name)
    if facts.what == "not scalar":
        after = {"the mean": facts.mean, "shape": []} if facts.mean is not None else {}
        first = Fix("Reduce it to a scalar.", f"{name}.mean().backward()", True if after else None, after)
        if facts.edit is not None:  # what reads the loss later gets a scalar, too
            whole = Fix.of("Reduce it to a scalar where it is computed.", facts.edit)
            return whole, dataclasses.replace(first, title="Or for the backward alone.", verified=None, after={})
        return first, Fix("Or give a weight to each of its elements.", f"{name}.backward(torch.ones_like({name}))")
    return _texts(facts.what, name)


def _texts(what: str, name: str) -> tuple[Fix, ...]:
    texts = _TEXTS.get(what, _TEXTS[""])
    return tuple(Fix(title, code.replace("{name}", name)) for title, code in texts.items())


def _not_a_tensor_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.type_name == "NoneType":
        producer = f"`{facts.producer}`" if facts.producer else "the function that computes it"
        return (Fix("Return the loss.", f"return loss   # at the end of {producer}"),)
    if facts.type_name in ("tuple", "list"):
        return (
            Fix(f"Take the loss out of the {facts.type_name}.", f"{name}[0].backward()"),
            Fix("Or sum its items.", f"sum({name}).backward()"),
        )
    if facts.type_name in ("dict", "OrderedDict"):
        return (Fix("Sum the losses in it.", f"sum({name}.values()).backward()"),)
    return (Fix("Keep the loss a tensor: no float(), .item() or NumPy before backward().", f"print(type({name}))"),)


def _no_parameters_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.untracked:
        path, what = facts.untracked[0]
        attribute = path.rpartition(".")[2]
        title = f"Keep the modules in a Module{'Dict' if 'dict' in what else 'List'}."
        if facts.edit is not None:
            return (Fix.of(title, facts.edit),)
        if "dict" in what:
            return (Fix("Keep the modules in a ModuleDict.", f"self.{attribute} = nn.ModuleDict(...)"),)
        if "modules" in what:
            return (Fix("Keep the modules in a ModuleList.", f"self.{attribute} = nn.ModuleList(...)"),)
        return (Fix("Make it a parameter.", f"self.{attribute} = nn.Parameter(...)"),)
    code = "for name, p in model.named_parameters():\n    print(name, p.requires_grad)"
    return (Fix("Print the parameters, and unfreeze those to train.", code),)


def _none_grad_fixes(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.tensor is not None and facts.tensor.made_by:
        return (Fix("Let it keep its gradient, before backward().", f"{name}.retain_grad()"),)
    if facts.tensor is not None and not facts.tensor.requires_grad:
        return _texts("input", name)
    return (Fix("Call backward() first, and skip what has no gradient.", f"if {name}.grad is not None:\n    ..."),)


_TEXTS = {
    "input": {"Let it require a gradient before the forward.": "{name}.requires_grad_()"},
    "unused": {
        "Differentiate with respect to the very tensor that went in, not a copy made before or after.": "y = f({name})"
        "\ntorch.autograd.grad(y.sum(), {name})",
        "Or allow unused inputs: their gradient is then None.": "torch.autograd.grad(..., allow_unused=True)",
    },
    "not a leaf": {
        "Make the finished value a leaf, and give that to the optimizer.": "{name} = {name}.detach().requires_grad_()"
    },
    "inference": {
        "Use no_grad where the result is used in training later.": "with torch.no_grad():\n    ...",
        "Or clone it to a normal tensor.": "{name} = {name}.clone()",
    },
    "": {"Print which tensors on the way still have a gradient.": "print({name}.requires_grad, {name}.grad_fn)"},
}
"""Fixes with the name of the tensor alone: title → code."""
_FIXES: dict[str, Callable[[NoGradFacts, str], tuple[Fix, ...]]] = {
    "not a tensor": _not_a_tensor_fixes,
    "no parameters": _no_parameters_fixes,
    "grad is None": _none_grad_fixes,
}

PICKS_CLASSES = ("argmax", "max", "topk", "argmin", "one_hot", "multinomial", "sort", ".indices")
"""Ops that pick classes: probabilities can replace what they pick."""


def _integer_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    if cut.op not in PICKS_CLASSES:
        return (Fix("Keep floating-point numbers.", _without_cut(cut, target)),)
    soft = cut.text.replace("argmax(", "softmax(")
    if cut.op != "argmax" or soft in (cut.text, f"{source}.softmax()"):
        source = re.sub(r"\.(topk|max|min|sort)\(.*$", "", source)
        soft = f"{source}.softmax(-1)   # over the classes"
    title = "Use probabilities where the loss needs a gradient, and keep the argmax for the metric."
    return (
        Fix(title, assignment + soft),
        Fix("Or use a loss that takes the scores themselves.", f"nn.functional.cross_entropy({source}, target)"),
    )


def _comparison_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    left, sign, right = cut.text.partition(f" {cut.op} ")
    if not sign or cut.op not in (">", ">=", "<", "<="):
        left, right = source, "0.5"
    if cut.op.startswith("<"):
        left, right = right, left
    soft = f"{assignment}torch.sigmoid(({left} - {right}) / 0.1)"
    return (
        Fix("Use a soft threshold (a steep sigmoid) where the loss needs a gradient.", soft),
        Fix("Or compute the loss on the values before the threshold.", source),
    )


def _detached_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    title = "Keep the graph here; detach a copy where the value is only displayed."
    if cut.kind == "number":
        title = "Keep the tensor; take its number for the log only."
    first = Fix(title, _without_cut(cut, target))
    if ".append(" not in cut.statement + (cut.where.text or ""):
        return (first,)
    return first, Fix("And join the tensors with stack, which keeps their graphs.", "torch.stack(...)")


def _new_tensor_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    several = source.startswith("[") or source.endswith("s")
    value = f"torch.stack({source})" if several else source
    code = cut.statement.replace(cut.text, value) if cut.text and cut.text in cut.statement else f"{target} = {value}"
    return (Fix("Use the tensor itself; join several with stack, which keeps their graphs.", code),)


def _block_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    if "decorated with" in cut.text:
        return (Fix("Call the model itself to train it; this function is for evaluation.", "model(x)"),)
    outside = f"outside of `{cut.text.rstrip(':')}`" if cut.text.startswith("with ") else f"without {cut.text}"
    title = "Compute it outside of the block; keep the block for evaluation."
    return (Fix(title, f"{cut.statement}   # {outside}"),)


_CUT_FIXES: dict[str, Callable[[GraphCut, str, str, str], tuple[Fix, ...]]] = {
    "whole numbers": _integer_fixes,
    "comparison": _comparison_fixes,
    "detached": _detached_fixes,
    "number": _detached_fixes,
    "rebuilt": _new_tensor_fixes,
    "block": _block_fixes,
}


def _plain_cut_fixes(cut: GraphCut, target: str, source: str, assignment: str) -> tuple[Fix, ...]:
    newer = re.sub(r",? *use_reentrant=\w+", "", cut.text)[:-1] + ", use_reentrant=False)"
    graph = f"{assignment}{cut.text[:-1]}, create_graph=True)" if cut.text.endswith(")") else ""
    frozen = as_code(cut.names[-1]) if cut.names else "model"
    reinforce = f"loss = -({source}.log_prob({target}) * reward).mean()"
    texts = {
        "sampled": {
            "Draw a reparameterized sample, where the distribution has one.": assignment
            + cut.text.replace(".sample(", ".rsample("),
            "Or use the log-probability of the sample (REINFORCE).": reinforce,
        },
        "checkpoint": {
            "Use its newer form, which needs no such input.": cut.statement.replace(cut.text, newer),
            "Or let an input require a gradient.": f"{source}.requires_grad_()",
        },
        "gradient": {"Request gradients that have a graph.": graph or "loss.backward(create_graph=True)"},
        "global": {
            "Turn gradients on again.": "torch.set_grad_enabled(True)",
            "From now on, use a block: it restores the setting at its end.": "with torch.no_grad():\n    ...",
        },
        "frozen": {"Unfreeze what should be trained.": f"{frozen}.requires_grad_(True)"},
    }
    return tuple(Fix(title, code) for title, code in texts[cut.kind].items())


def _without_cut(cut: GraphCut, target: str) -> str:
    """The statement without the op that cuts."""
    if "numpy" in cut.statement:  # what comes after is to be written with torch's ops
        return f"{target} = {cut.source or cut.text}   # and torch's ops instead of NumPy's after it"
    call = cut.op if cut.op.startswith(".") else f".{cut.op}()"
    if call in cut.statement:
        rest = cut.statement.replace(".cpu()" + call, "").replace(call, "")
        return re.sub(r"torch\.(?:as_)?tensor\((.*)\)$", r"\1", rest)  # which would copy the value, without its graph
    if cut.source and cut.text in cut.statement:
        inner = f"({cut.source})" if " " in cut.source and cut.text + "." in cut.statement else cut.source
        return cut.statement.replace(cut.text, inner)
    return f"{target} = {cut.source or cut.text}"


NOTES = "https://pytorch.org/docs/stable/notes/autograd.html"


@rule(
    code="error/inplace-modified",
    title="A tensor that the backward pass needs was changed in place.",
    symptom="`one of the variables needed for gradient computation has been modified by an inplace operation`, or `a "
    "leaf Variable that requires grad is being used in an in-place operation`.",
    cause="`+=`, `x[i] = …`, a method with an underscore, `inplace=True` or an `optimizer.step()` between a forward "
    "and its backward overwrote values from which a derivative is computed (the output of a relu, a weight).",
    confirm="`torch.autograd.set_detect_anomaly(True)` prints the forward line that saved the value; the change comes "
    "after it.",
    fix="Write the result to a new tensor (`out = out + residual`), change parameters under `torch.no_grad()`, and "
    "call every backward() before the first step().",
    reference=NOTES + "#in-place-operations-with-autograd",
)
def inplace_modified(facts: InPlaceFacts) -> Finding | None:
    change = facts.change
    where = cause_where(change.where, facts.raised) if change is not None else facts.raised.where
    if change is not None and change.module:
        where = dataclasses.replace(where, module=change.module)
    evidence: dict[str, object] = {}
    if facts.shape is not None:
        evidence["tensor"] = f"{facts.dtype or 'tensor'} {list(facts.shape)}"
    if facts.version is not None:
        evidence |= {"its version now": facts.version, "its version when saved": facts.saved_version}
    if facts.saved_by:
        evidence["needed by the backward of"] = op_words(facts.saved_by).strip("`")
    if facts.module:
        evidence["nearest module"] = facts.module
    if facts.others:
        evidence["other candidates"] = "; ".join(f"{c.text} ({c.where.place})" for c in facts.others)
    return Finding(
        "error/inplace-modified", _inplace_title(facts), where, evidence, _inplace_fixes(facts), _inplace_chain(facts)
    )


def _inplace_title(facts: InPlaceFacts) -> str:
    change = facts.change
    if facts.what == "saved":
        return _overwritten_title(facts, change)
    name = f"`{facts.parameter or facts.tensor or (change.target if change else 'a tensor')}`"
    statement = f"`{change.text}`" if change is not None else "An in-place op"
    return {
        "leaf": f"{statement} changes {name} in place, a leaf that requires a gradient: autograd can't record that",
        "leaf view": f"{statement} writes into {name} in place, which is a leaf that requires a gradient, or a view of "
        "one",
        "view": f"{statement} changes {name} in place, one of several views of one tensor, or a view made under "
        "no_grad",
        "expanded": f"{statement} writes to {name}, whose elements share memory (it was expanded)",
        "out": f"{statement} writes its result with `out=`, and autograd can't record that",
        "inference": f"{statement} changes {name} in place, which was made under `torch.inference_mode()`",
    }[facts.what]


def _overwritten_title(facts: InPlaceFacts, change: InPlaceChange | None) -> str:
    of = f" of {op_words(facts.saved_by)}" if facts.saved_by else ""
    needs = f"the backward{of} needs {'its original output' if facts.own_result else 'the old value'}"
    name = facts.parameter or facts.tensor
    if change is None:
        shape = f" of shape {list(facts.shape)}" if facts.shape is not None else ""
        return f"{f'`{name}`' if name else f'A tensor{shape}'} was changed in place after the forward, but {needs}"
    if change.how == "step" or change.how == "block" and facts.parameter:
        what = f"`{name}`" if name else "the weights"
        return f"`{change.text}` changed {what} between the forward and this `backward()`, and {needs}"
    if change.how == "module":
        return f"`{change.target}` is {change.text} and overwrites its input, but {needs}"
    return f"`{change.text}` changes `{change.target}` in place, but {needs}"


def _inplace_fixes(facts: InPlaceFacts) -> tuple[Fix, ...]:
    change, loss = facts.change, facts.loss or "loss"
    name = facts.tensor or (change.target if change is not None else "x")
    if change is not None and (change.how == "step" or change.how == "block" and facts.parameter):
        return (
            Fix(
                "Call every backward() before the weights change.",
                f"{loss}.backward()   # all of them first\n{change.text}",
            ),
            Fix("Or compute the second loss again, after the change.", f"{loss} = ...   # the forward again"),
        )
    if facts.what in ("leaf", "leaf view"):
        return _leaf_fixes(facts, change, name)
    if facts.what in ("expanded", "inference"):
        return _copy_fixes(facts, name)
    if change is None:
        title = "Let torch print the forward line that saved the value; look for `+=`, `x[i] = …` and `_(` after it."
        return (Fix(title, "with torch.autograd.set_detect_anomaly(True):\n    ...   # the step again"),)
    new = "Write the result to a new tensor."
    if facts.what == "view" and "[" in change.target:
        return (Fix(new, "new = " + change.replacement.partition(" = ")[2]),)
    trial: dict[str, object] = {}
    if facts.fix_passes is not None:
        on = f"{op_words(facts.saved_by).strip('`')} of random numbers of shape {list(facts.shape or ())}"
        trial = {"backward": "passes" if facts.fix_passes else "fails", "tried on": on}
    code = change.replacement or change.text
    if facts.parameter and "." in change.target:  # a module refuses a plain tensor in the place of its parameter
        name = change.target.rpartition(".")[2]
        code = f"{name} = {change.target}.clone()   # and change and use this copy"
    first = Fix(new, code, None if facts.fix_passes else facts.fix_passes, {} if facts.fix_passes else trial)
    if facts.edit is not None and not (facts.parameter and "." in change.target):
        first = Fix.of(new, facts.edit, facts.fix_passes, trial)
    return first, *_other_inplace_fixes(facts, change)


def _other_inplace_fixes(facts: InPlaceFacts, change: InPlaceChange) -> Iterator[Fix]:
    if facts.copied is not None:
        yield Fix.of("Let the forward read a copy of it.", facts.copied)
    if change.how == "item" and change.text.count("=") == 1:
        code = f"parts.append({change.operand})\n...\n{change.target} = torch.stack(parts)   # after the loop"
        yield Fix("Or collect the parts in a list, and stack them once.", code)


def _copy_fixes(facts: InPlaceFacts, name: str) -> tuple[Fix, ...]:
    """For elements that share memory, and tensors made under inference_mode."""
    copied = f"{name} = {name}.clone()"
    if facts.parameter or facts.weight:  # a module refuses a plain tensor in the place of its parameter
        copied = f"{name} = torch.nn.Parameter({name}.detach().clone())"
    if facts.what == "expanded":
        return (Fix("Clone it first, so that each element has its own memory.", copied),)
    return (
        Fix("Clone it to a normal tensor first.", copied),
        Fix("Or make it under no_grad.", "with torch.no_grad():\n    ..."),
    )


def _leaf_fixes(facts: InPlaceFacts, change: InPlaceChange | None, name: str) -> tuple[Fix, ...]:
    if change is None or change.how == "module":
        return (Fix("Pass a copy of it.", f"{name}.clone()"),)
    inside = change.text.replace("\n", "\n    ")
    title = "If this updates the weights: do it under no_grad."
    update = Fix(title, f"with torch.no_grad():\n    {inside}")
    if facts.edit is not None:
        update = Fix.of(title, facts.edit, facts.fix_passes, {"runs on a copy": "1 time"} if facts.fix_passes else {})
    if facts.weight:  # a module keeps its parameters: another tensor in their place is refused
        return (update,)
    code = change.replacement or f"{name} = {name}.clone()"
    return (update, Fix("If it is part of the computation: write the result to a new tensor.", code))


def _inplace_chain(facts: InPlaceFacts) -> tuple[Link, ...]:
    change, links = facts.change, []
    if facts.what != "saved":
        return ()
    if facts.saved_by:
        name = facts.parameter or facts.tensor
        saved = "its output" if facts.own_result else f"`{name}`" if name else "an input"
        links.append(Link(f"the forward of {op_words(facts.saved_by)} saves {saved} for its derivative"))
    if change is not None and change.where.line is not None:
        links.append(Link(f"`{change.text}` overwrites it", change.where))
    return (*links, Link("`backward()` finds that the saved tensor was changed", facts.raised.where))


@rule(
    code="error/non-scalar-backward",
    title="backward() is called on a loss of several values.",
    symptom="grad can be implicitly created only for scalar outputs.",
    cause="`reduction='none'` gives a loss for each sample; it was weighted or masked, and not reduced afterwards. "
    "DataParallel gives one loss for each card.",
    confirm="`loss.shape` is not `torch.Size([])`.",
    fix="Reduce it where it is computed: `loss = (criterion(scores, labels) * weight).mean()`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html",
)
@rule(
    code="error/no-grad-path",
    title="No path in the graph leads from the loss back to a parameter.",
    symptom="`element 0 of tensors does not require grad and does not have a grad_fn`, `'float' object has no "
    "attribute 'backward'`, `.grad` is None, an optimizer with an empty parameter list.",
    cause="Somewhere between the parameters and the loss the graph ends: `.detach()`, `.item()`, `.data`, "
    "`torch.tensor(loss)`, an argmax, a comparison or a cast to integers, a `no_grad` around it; or no parameter "
    "requires a gradient. `model.eval()` does not end it.",
    confirm="Print `x.requires_grad` for each step from the model's output to the loss: the first False is right after "
    "the cut.",
    fix="Compute the loss from the model's output before it is cut: from probabilities instead of the argmax, from the "
    "tensor instead of its `.item()`; keep detached copies for metrics only.",
    reference=NOTES,
)
def no_grad_path(facts: NoGradFacts) -> Finding | None:
    where = cause_where(facts.cut.where, facts.raised) if facts.cut is not None else facts.raised.where
    evidence: dict[str, object] = {}
    if (tensor := facts.tensor) is not None:
        evidence |= {
            tensor.name: str(tensor),
            "requires_grad": tensor.requires_grad,
            "grad_fn": tensor.made_by or "none",
        }
    for name, some, whole in facts.counts:
        evidence[f"parameters of {name} that require a gradient"] = f"{some:,} of {whole:,}"
    if facts.eval_models:
        evidence["in eval mode"] = f"{listed(facts.eval_models)}: not the cause, eval() turns no gradient off"
    if facts.what in ("loss", "hook", "input"):
        evidence |= {f"{t.name}.requires_grad": t.requires_grad for t in facts.raised.tensors[:8]}
    code = "error/non-scalar-backward" if facts.what == "not scalar" else "error/no-grad-path"
    return Finding(code, no_grad_title(facts), where, evidence, no_grad_fixes(facts), cut_chain(facts))


@rule(
    code="error/backward-twice",
    title="backward() went through a graph that an earlier backward() had freed.",
    symptom="`Trying to backward through the graph a second time`, from the second iteration of a loop on, or at the "
    "second of two losses.",
    cause="A variable holds an old graph: a recurrent state from the previous iteration, a sum of losses, a list of "
    "old outputs, features computed once before the loop, or a tensor from which two losses are computed.",
    confirm="Print `x.grad_fn` of each variable that lives longer than one iteration: where it is not None, the "
    "variable holds a graph.",
    fix="`.detach()` the state between iterations; compute inside the loop what should be trained; add up losses that "
    "share a part and call backward() once. `retain_graph=True` hides the fault where a state is carried over: the "
    "graph grows with each iteration, and the next step() fails on changed weights.",
    reference=NOTES,
)
def backward_twice(facts: BackwardTwiceFacts) -> Finding | None:
    first = facts.holders[0] if facts.holders else None
    alike = tuple(holder for holder in facts.holders if first is not None and holder.how == first.how)
    where = cause_where(first.write if first is not None else facts.first_backward, facts.raised)
    evidence: dict[str, object] = {"nodes in the graph of the loss": facts.nodes, "nodes freed": facts.nodes_freed}
    for holder in facts.holders[:4]:
        evidence[holder.name] = f"shape {list(holder.shape)}, the result of {op_words(holder.op or '?')}"
    if facts.first_backward.place:
        on = f"`{facts.first_loss}` " if facts.first_loss else ""
        evidence["earlier backward"] = f"{on}({facts.first_backward.place})"
    title = _twice_title(first, [holder.name for holder in alike], facts)
    fixes = _twice_fixes(first, alike, facts)
    return Finding("error/backward-twice", title, where, evidence, fixes, _twice_chain(first, facts))


def _twice_title(first: GraphHolder | None, alike: list[str], facts: BackwardTwiceFacts) -> str:
    loss = f"`{facts.loss}`" if facts.loss else "the loss"
    if first is None:
        return f"A part of the graph of {loss} was freed by an earlier `backward()`"
    names, one = listed(alike), len(alike) == 1
    are, their = ("is", "its") if one else ("are", "their")
    period = "run" if first.cell else "iteration"
    before = f"the `backward()` of `{facts.first_loss}`" if facts.first_loss else "an earlier `backward()`"
    return {
        "iteration": f"{names} {'carries' if one else 'carry'} the graph of the previous {period} into this one, but "
        f"the `backward()` of the previous {period} has freed it",
        "sum": f"`{first.name}` adds up results with their graphs, and the `backward()` of the previous {period} has "
        "freed the old ones",
        "sometimes": f"{names} {are} computed in some iterations only: in the others the graph is an old one, already "
        "freed",
        "again": f"`backward()` is called a second time on {loss}, which was computed once",
        "attribute": f"{names} {'keeps' if one else 'keep'} the graph of an earlier step, and the `backward()` of that "
        "step has freed it",
        "list": f"`{first.name}` keeps results of earlier {period}s with their graphs, which `backward()` has freed",
        "each": f"All losses are computed from `{first.name}`, and the `backward()` of the first has freed its graph",
        "once": f"{names} {are} computed once, and the first `backward()` has freed {their} graph",
        "shared": f"{loss} and an earlier loss are both computed from `{first.name}`, and {before} has freed its graph",
    }[first.how]


INSIDE = "   # inside the loop"
"""With this ends the code of a fix that is a statement of before the loop."""


def _twice_fixes(
    first: GraphHolder | None, alike: tuple[GraphHolder, ...], facts: BackwardTwiceFacts
) -> tuple[Fix, ...]:
    loss = facts.loss or "loss"
    if first is None:
        return (Fix("Detach what is carried over from an earlier step.", "state = state.detach()"),)
    text = first.write.text or ""
    if first.how == "sum":
        added = "loss" if loss == first.name else loss
        code = f"{added}.backward()\n{first.name} += {added}.item()"
        return (
            Fix("Sum numbers, not graphs; call backward on the loss of this iteration.", code),
            Fix("Or call backward once, on the whole sum, after the loop.", f"{first.name}.backward()"),
        )
    if first.how == "again":
        return (
            Fix(
                "Compute the loss again before each backward(), from the model on.",
                f"{first.made or text or f'{loss} = ...   # the forward again'}\n{loss}.backward()",
            ),
            Fix("Or retain the graph in all calls but the last.", f"{loss}.backward(retain_graph=True)"),
        )
    if first.how == "each":
        losses = re.sub(r"^for .* in |:$", "", first.read.text or "losses")
        return (
            Fix("Add them up and call backward once.", f"sum({losses}).backward()"),
            Fix("Or retain the graph until the last of them.", f"{loss}.backward(retain_graph=True)"),
        )
    if first.how == "list":
        return (
            Fix("Keep the results without their graphs.", _detached_insert(first)),
            Fix("Or clear it after each backward().", f"{first.name}.clear()"),
        )
    if first.how in ("once", "sometimes"):
        again = f"{first.made or text or first.name + ' = ...'}{INSIDE}"
        without = Fix("Detach it, if it should not be trained.", f"{first.name} = {first.name}.detach()")
        if first.object and text:
            without = Fix(
                "Compute it without a graph, if it should not be trained.", f"with torch.no_grad():\n    {text}"
            )
        return (Fix("Compute it in each iteration, if it should be trained.", again), without)
    if first.how == "shared":
        return _shared_fixes(first, facts, loss)
    if first.how == "attribute" and re.search(r"\.(append|extend|insert|add)\(", text):
        return (Fix("Clear it after each backward().", f"self.{first.name.rpartition('.')[2]}.clear()"),)
    title = "Detach it between iterations: the value is kept, the graph is not."
    names = ["self." + h.name.rpartition(".")[2] if h.how == "attribute" else h.name for h in alike]
    plain = [
        f"{n}.detach()" if not h.container else f"tuple(part.detach() for part in {n})" for n, h in zip(names, alike)
    ]
    return (Fix(title, "\n".join(f"{name} = {value}" for name, value in zip(names, plain))),)


def _shared_fixes(first: GraphHolder, facts: BackwardTwiceFacts, loss: str) -> tuple[Fix, ...]:
    name, first_loss = first.name, facts.first_loss
    detached = re.sub(rf"\b{re.escape(name)}\b", f"{name}.detach()", first.read.text or name)
    apart = Fix(
        f"Detach it in the first loss, if that should not train what computes `{name}` (as for a GAN's discriminator).",
        detached,
    )
    title = "Add both losses and call backward once, if both should train it."
    both = Fix(title, f"({first_loss or 'first_loss'} + {loss}).backward()")
    retain = Fix("Or retain the graph for the second loss.", f"{first_loss or 'loss'}.backward(retain_graph=True)")
    return (apart, both, retain) if facts.optimizers > 1 or not first_loss else (both, apart, retain)


def _detached_insert(holder: GraphHolder) -> str:
    text = holder.write.text or ""
    item = re.match(r"(\w+\[[^=]*\]) = ", text)
    if item:
        return f"{item[1]} = {item[1]}.detach()"
    if text.endswith(")") and ".append(" in text:
        return text[:-1] + ".detach())"
    return f"{holder.name}.append(x.detach())"


def _twice_chain(first: GraphHolder | None, facts: BackwardTwiceFacts) -> tuple[Link, ...]:
    links = []
    common = first is not None and first.how in ("shared", "each")
    if first is not None and first.write.line is not None:
        links.append(Link(f"`{first.name}` gets its value, and a graph with it", first.write))
    if first is not None and common:
        links.append(Link("the losses are computed from it", first.read if first.how == "shared" else NOWHERE))
    if facts.first_backward.line is not None:
        call = f"`backward()` on `{facts.first_loss}`" if facts.first_loss else "an earlier `backward()`"
        links.append(Link(f"{call} frees that graph", facts.first_backward))
    elif first is not None:
        links.append(Link("an earlier `backward()` frees that graph"))
    if (
        first is not None
        and not common
        and first.read.line not in (None, facts.raised.where.line)
        and first.read != first.write
    ):
        period = "run" if first.cell else "iteration"
        links.append(Link(f"this {period} computes with `{first.name}`", first.read))
    name = f"`{facts.loss}`" if facts.loss else "the loss"
    return (*links, Link(f"`backward()` on {name} reaches that graph again", facts.raised.where))
