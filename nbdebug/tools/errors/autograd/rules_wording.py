"""Words that the rules on autograd share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from nbdebug.report import Fix, Where
from nbdebug.tools.errors.autograd.facts import GraphCut, NoGradFacts
from nbdebug.tools.errors.facts import Raised, TensorFact

NOTES = "https://pytorch.org/docs/stable/notes/autograd.html"
NODES = {
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


def at(known: Where, raised: Raised) -> Where:
    """The line of the cause, else the line that failed; the phase is that of the failure."""
    place = known if known.line is not None else raised.where
    return dataclasses.replace(place, phase=raised.where.phase, module=place.module or raised.where.module)


def line(where: Where) -> str:
    """` (train.py, line 3)`, or nothing."""
    return f" ({where.place})" if where.place else ""


def op(name: str) -> str:
    """An op by the name of its node: "NativeBatchNorm" → "batch norm", "Relu" → "`relu`"."""
    small = "".join("_" + c.lower() if c.isupper() else c for c in name).strip("_")
    return NODES.get(name, f"`{small}`")


def shaped(tensor: TensorFact | None) -> dict[str, object]:
    if tensor is None:
        return {}
    return {tensor.name: str(tensor), "requires_grad": tensor.requires_grad, "grad_fn": tensor.made_by or "none"}


def wants(facts: NoGradFacts) -> list[str]:
    """The user's variables that still have a gradient, without parameters."""
    return [t.name for t in facts.raised.tensors if t.requires_grad and t.made_by]


def indexed(path: str) -> str:
    """A module's path as code: "model.0.fc" → "model[0].fc"."""
    return re.sub(r"\.(\d+)", r"[\1]", path)


def ticked(names: tuple[str, ...] | list[str], most: int = 3) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


CHOICES = ("argmax", "max", "topk", "argmin", "one_hot", "multinomial", "sort", ".indices")
"""Ops that pick classes: probabilities can stand for what they pick."""


def told(cut: GraphCut, name: str) -> str:
    """One sentence. name: what was asked for a gradient, in ticks."""
    got = f"`{cut.target}`" if cut.target else name
    behind = "" if got == name or cut.kind in ("global", "frozen") else f", so {name} has none"
    source = f"`{cut.source}`" if cut.source else "what it came from"
    if cut.kind == "block":
        return _block(cut, got) + behind
    if (
        cut.kind == "number"
        and not (cut.target or cut.statement.startswith("return"))
        or not cut.statement.endswith(cut.text)
        and cut.kind == "number"
        and (cut.statement.endswith(("}", "]")) or "tensor(" in cut.statement)
    ):
        return f"{name} has no gradient: `{cut.op}` in `{cut.text}` takes the value out of {source}"
    call = cut.op if cut.op.startswith(".") else f".{cut.op}()"
    said = {
        "whole numbers": f"{got} has no gradient: `{cut.text}` gives whole numbers, and `{cut.op}` has no derivative",
        "comparison": f"{got} has no gradient: `{cut.text}` is true or false, which has no derivative",
        "detached": f"{got} has no gradient: `{call}` in `{cut.text}` cuts it off from {source}",
        "number": f"{got} is a plain number, without a graph: `{cut.op}` in `{cut.text}` takes it out of {source}",
        "rebuilt": f"{got} has no gradient: `{cut.text}` makes a new tensor of the values and forgets {source}",
        "sampled": f"{got} has no gradient: `{cut.text}` draws without one",
        "checkpoint": f"{got} has no gradient: `{cut.text}` passes none, because none of its inputs wants one",
        "gradient": f"{got} is a gradient without a graph: `{cut.text}` keeps none unless `create_graph=True`",
        "global": f"{name} has no graph: gradients are off everywhere, `{cut.op}` was called and never undone",
        "frozen": f"{name} has no gradient: all parameters of {ticked(cut.names)} are frozen (`requires_grad=False`)",
    }
    return said[cut.kind] + behind


def _block(cut: GraphCut, got: str) -> str:
    if "decorated with" in cut.text:
        function = cut.text.partition(" ")[0]
        return f"{got} comes from `{function}`, which is decorated with `{cut.op}` and keeps no graph"
    where = f" in `{cut.function}`" if cut.function else ""
    return f"{got} is computed under `{cut.text.rstrip(':')}`{where}, which keeps no graph"


def cured(cut: GraphCut, asked: str) -> tuple[Fix, ...]:
    """What to write instead. asked: what was asked for a gradient."""
    to, source = cut.target or asked or "loss", cut.source or "scores"
    return _CURES[cut.kind](cut, to, source, f"{to} = " if cut.target or not cut.function else "")


def _whole(cut: GraphCut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    if cut.op not in CHOICES:
        return (Fix("Stay with floating point numbers.", _without(cut, to)),)
    soft = cut.text.replace("argmax(", "softmax(")
    if cut.op != "argmax" or soft in (cut.text, f"{source}.softmax()"):
        source = re.sub(r"\.(topk|max|min|sort)\(.*$", "", source)
        soft = f"{source}.softmax(-1)   # over the classes"
    return (
        Fix("Use probabilities where the loss needs a gradient, and keep the argmax for the metric.", gets + soft),
        Fix("Or a loss that takes the scores themselves.", f"nn.functional.cross_entropy({source}, target)"),
    )


def _comparison(cut: GraphCut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    left, found, right = cut.text.partition(f" {cut.op} ")
    if not found or cut.op not in (">", ">=", "<", "<="):
        left, right = source, "0.5"
    if cut.op.startswith("<"):
        left, right = right, left
    soft = f"{gets}torch.sigmoid(({left} - {right}) / 0.1)"
    return (
        Fix("Use a soft threshold (a steep sigmoid) where the loss needs a gradient.", soft),
        Fix("Or compute the loss on the values before the threshold.", source),
    )


def _detached(cut: GraphCut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    what = (
        "Keep the tensor; take its number for the log only."
        if cut.kind == "number"
        else ("Leave the cut out; detach a copy for what is only shown.")
    )
    first = Fix(what, _without(cut, to))
    if ".append(" not in cut.statement + (cut.where.text or ""):
        return (first,)
    return first, Fix("And join the tensors with stack, which keeps their graphs.", "torch.stack(...)")


def _rebuilt(cut: GraphCut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    several = source.startswith("[") or source.endswith("s")
    return (
        Fix(
            "Use the tensor itself; join several with stack, which keeps their graphs.",
            f"{to} = torch.stack({source})" if several else f"{to} = {source}",
        ),
    )


def _sampled(cut: GraphCut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    return (
        Fix(
            "Draw with the reparameterised form, where the distribution has one.",
            gets + cut.text.replace(".sample(", ".rsample("),
        ),
        Fix(
            "Or use the log-probability of the draw (REINFORCE).", f"loss = -({source}.log_prob({to}) * reward).mean()"
        ),
    )


def _checkpoint(cut: GraphCut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    newer = re.sub(r",? *use_reentrant=\w+", "", cut.text)[:-1] + ", use_reentrant=False)"
    return (
        Fix("Use its newer form, which needs no such input.", cut.statement.replace(cut.text, newer)),
        Fix("Or let an input want a gradient.", f"{source}.requires_grad_()"),
    )


def _gradient(cut: GraphCut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    if not cut.text.endswith(")"):
        return (Fix("Ask for gradients that have a graph.", "loss.backward(create_graph=True)"),)
    return (Fix("Ask for gradients that have a graph.", f"{gets}{cut.text[:-1]}, create_graph=True)"),)


def _outside(cut: GraphCut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    if "decorated with" in cut.text:
        return (Fix("Call the model itself where it is to be trained; this function is for evaluation.", "model(x)"),)
    without = f"outside of `{cut.text.rstrip(':')}`" if cut.text.startswith("with ") else f"without {cut.text}"
    return (
        Fix(
            "Compute it outside of the block; keep the block for what is only evaluated.",
            f"{cut.statement}   # {without}",
        ),
    )


def _everywhere(cut: GraphCut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    return (
        Fix("Turn gradients on again.", "torch.set_grad_enabled(True)"),
        Fix("And use a block from now on, which undoes itself.", "with torch.no_grad():\n    ..."),
    )


def _frozen(cut: GraphCut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    name = indexed(cut.names[-1]) if cut.names else "model"
    return (Fix("Let what is to be trained have a gradient again.", f"{name}.requires_grad_(True)"),)


_CURES: dict[str, Callable[[GraphCut, str, str, str], tuple[Fix, ...]]] = {
    "whole numbers": _whole,
    "comparison": _comparison,
    "detached": _detached,
    "number": _detached,
    "rebuilt": _rebuilt,
    "sampled": _sampled,
    "checkpoint": _checkpoint,
    "gradient": _gradient,
    "block": _outside,
    "global": _everywhere,
    "frozen": _frozen,
}


def _without(cut: GraphCut, to: str) -> str:
    """The statement without the op that cuts."""
    if "numpy" in cut.statement:  # what comes after is to be written with torch's ops
        return f"{to} = {cut.source or cut.text}   # and torch's ops instead of NumPy's after it"
    call = cut.op if cut.op.startswith(".") else f".{cut.op}()"
    if call in cut.statement:
        kept = cut.statement.replace(".cpu()" + call, "").replace(call, "")
        return re.sub(r"torch\.(?:as_)?tensor\((.*)\)$", r"\1", kept)  # which would copy the value, without its graph
    if cut.source and cut.text in cut.statement:
        inner = f"({cut.source})" if " " in cut.source and cut.text + "." in cut.statement else cut.source
        return cut.statement.replace(cut.text, inner)
    return f"{to} = {cut.source or cut.text}"


def cures(facts: NoGradFacts) -> tuple[Fix, ...]:
    """Fixes for error/no-grad-path, with the user's own names."""
    if facts.cut is not None:
        return cured(facts.cut, facts.expression)
    name = facts.expression or "loss"
    if facts.what == "not scalar":
        tried = facts.mean is not None
        return (
            Fix(
                "Reduce it to one number.",
                f"{name}.mean().backward()",
                True if tried else None,
                {"the mean": facts.mean, "shape": []} if tried else {},
            ),
            Fix("Or say with which weights its entries are added up.", f"{name}.backward(torch.ones_like({name}))"),
        )
    if facts.no_path and facts.what == "loss":
        used = [*wants(facts), "model(x)"][0]
        loss = name if name.isidentifier() else "loss"
        return (Fix("Compute it from what the model gives.", f"{loss} = loss_fn({used}, target)"),)
    found = {
        "not a tensor": _not_a_tensor,
        "input": _input,
        "unused": _unused,
        "no parameters": _no_parameters,
        "not a leaf": _not_a_leaf,
        "grad is None": _grad_is_none,
        "inference": _inference,
    }
    return (
        found[facts.what](facts, name)
        if facts.what in found
        else (Fix("Print along the way who still has a gradient.", f"print({name}.requires_grad, {name}.grad_fn)"),)
    )


def _not_a_tensor(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.type_name == "NoneType":
        giver = f"`{facts.producer}`" if facts.producer else "the function that makes it"
        return (Fix("Return the loss.", f"return loss   # at the end of {giver}"),)
    if facts.type_name in ("tuple", "list"):
        return (
            Fix("Take the loss out of it.", f"{name}[0].backward()"),
            Fix("Or add up what it holds.", f"sum({name}).backward()"),
        )
    if facts.type_name in ("dict", "OrderedDict"):
        return (Fix("Add up the losses that it holds.", f"sum({name}.values()).backward()"),)
    return (Fix("Keep the loss a tensor: no float(), .item() or NumPy on its way.", f"print(type({name}))"),)


def _input(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (Fix("Ask for its gradient before the forward.", f"{name}.requires_grad_()"),)


def _unused(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (
        Fix(
            "Differentiate with respect to what went in (the very tensor, not a copy made before or after).",
            f"y = f({name})\ntorch.autograd.grad(y.sum(), {name})",
        ),
        Fix("Or allow for it: the gradient is None then.", "torch.autograd.grad(..., allow_unused=True)"),
    )


def _no_parameters(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.untracked:
        path, what = facts.untracked[0]
        attribute = path.rpartition(".")[2]
        if "dict" in what:
            return (Fix("Keep the modules in a ModuleDict.", f"self.{attribute} = nn.ModuleDict(...)"),)
        if "modules" in what:
            return (Fix("Keep the modules in a ModuleList.", f"self.{attribute} = nn.ModuleList(...)"),)
        return (Fix("Make it a parameter.", f"self.{attribute} = nn.Parameter(...)"),)
    return (
        Fix(
            "Look at what there is, and let it have a gradient.",
            "for name, p in model.named_parameters():\n    print(name, p.requires_grad)",
        ),
    )


def _not_a_leaf(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (
        Fix(
            "Make a leaf of the finished value, and give the optimizer that.",
            f"{name} = {name}.detach().requires_grad_()",
        ),
    )


def _grad_is_none(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    if facts.tensor is not None and facts.tensor.made_by:
        return (Fix("Ask it to keep its gradient, before backward().", f"{name}.retain_grad()"),)
    if facts.tensor is not None and not facts.tensor.requires_grad:
        return (Fix("Ask for its gradient before the forward.", f"{name}.requires_grad_()"),)
    return (Fix("Call backward() first, and pass over what has no gradient.", f"if {name}.grad is not None:\n    ..."),)


def _inference(facts: NoGradFacts, name: str) -> tuple[Fix, ...]:
    return (
        Fix("Use no_grad where the result goes into training later.", "with torch.no_grad():\n    ..."),
        Fix("Or copy it to an ordinary tensor.", f"{name} = {name}.clone()"),
    )
