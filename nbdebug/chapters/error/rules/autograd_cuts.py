"""The places at which a gradient's path ends: what is said of each, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable

from nbdebug.chapters.error.facts_autograd import Cut
from nbdebug.chapters.error.rules.autograd_words import indexed, ticked
from nbdebug.finding import Fix

CHOICES = ("argmax", "max", "topk", "argmin", "one_hot", "multinomial", "sort", ".indices")
"""Ops that pick classes: probabilities can stand for what they pick."""


def told(cut: Cut, name: str) -> str:
    """One sentence. name: what was asked for a gradient, in ticks."""
    got = f"`{cut.target}`" if cut.target else name
    behind = "" if got == name or cut.kind in ("global", "frozen") else f", so {name} has none"
    source = f"`{cut.source}`" if cut.source else "what it came from"
    if cut.kind == "block":
        return _block(cut, got) + behind
    if (
        cut.kind == "number"
        and not (cut.target or cut.written.startswith("return"))
        or not cut.written.endswith(cut.text)
        and cut.kind == "number"
        and (cut.written.endswith(("}", "]")) or "tensor(" in cut.written)
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


def _block(cut: Cut, got: str) -> str:
    if "decorated with" in cut.text:
        function = cut.text.partition(" ")[0]
        return f"{got} comes from `{function}`, which is decorated with `{cut.op}` and keeps no graph"
    where = f" in `{cut.function}`" if cut.function else ""
    return f"{got} is computed under `{cut.text.rstrip(':')}`{where}, which keeps no graph"


def cured(cut: Cut, asked: str) -> tuple[Fix, ...]:
    """What to write instead. asked: what was asked for a gradient."""
    to, source = cut.target or asked or "loss", cut.source or "scores"
    return _CURES[cut.kind](cut, to, source, f"{to} = " if cut.target or not cut.function else "")


def _whole(cut: Cut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
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


def _comparison(cut: Cut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
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


def _detached(cut: Cut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    what = (
        "Keep the tensor; take its number for the log only."
        if cut.kind == "number"
        else ("Leave the cut out; detach a copy for what is only shown.")
    )
    first = Fix(what, _without(cut, to))
    if ".append(" not in cut.written + (cut.where.text or ""):
        return (first,)
    return first, Fix("And join the tensors with stack, which keeps their graphs.", "torch.stack(...)")


def _rebuilt(cut: Cut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    several = source.startswith("[") or source.endswith("s")
    return (
        Fix(
            "Use the tensor itself; join several with stack, which keeps their graphs.",
            f"{to} = torch.stack({source})" if several else f"{to} = {source}",
        ),
    )


def _sampled(cut: Cut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    return (
        Fix(
            "Draw with the reparameterised form, where the distribution has one.",
            gets + cut.text.replace(".sample(", ".rsample("),
        ),
        Fix(
            "Or use the log-probability of the draw (REINFORCE).", f"loss = -({source}.log_prob({to}) * reward).mean()"
        ),
    )


def _checkpoint(cut: Cut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    newer = re.sub(r",? *use_reentrant=\w+", "", cut.text)[:-1] + ", use_reentrant=False)"
    return (
        Fix("Use its newer form, which needs no such input.", cut.written.replace(cut.text, newer)),
        Fix("Or let an input want a gradient.", f"{source}.requires_grad_()"),
    )


def _gradient(cut: Cut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    if not cut.text.endswith(")"):
        return (Fix("Ask for gradients that have a graph.", "loss.backward(create_graph=True)"),)
    return (Fix("Ask for gradients that have a graph.", f"{gets}{cut.text[:-1]}, create_graph=True)"),)


def _outside(cut: Cut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    if "decorated with" in cut.text:
        return (Fix("Call the model itself where it is to be trained; this function is for evaluation.", "model(x)"),)
    without = f"outside of `{cut.text.rstrip(':')}`" if cut.text.startswith("with ") else f"without {cut.text}"
    return (
        Fix(
            "Compute it outside of the block; keep the block for what is only evaluated.",
            f"{cut.written}   # {without}",
        ),
    )


def _everywhere(cut: Cut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    return (
        Fix("Turn gradients on again.", "torch.set_grad_enabled(True)"),
        Fix("And use a block from now on, which undoes itself.", "with torch.no_grad():\n    ..."),
    )


def _frozen(cut: Cut, to: str, source: str, gets: str) -> tuple[Fix, ...]:
    name = indexed(cut.names[-1]) if cut.names else "model"
    return (Fix("Let what is to be trained have a gradient again.", f"{name}.requires_grad_(True)"),)


_CURES: dict[str, Callable[[Cut, str, str, str], tuple[Fix, ...]]] = {
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


def _without(cut: Cut, to: str) -> str:
    """The statement without the op that cuts."""
    if "numpy" in cut.written:  # what comes after is to be written with torch's ops
        return f"{to} = {cut.source or cut.text}   # and torch's ops instead of NumPy's after it"
    call = cut.op if cut.op.startswith(".") else f".{cut.op}()"
    if call in cut.written:
        kept = cut.written.replace(".cpu()" + call, "").replace(call, "")
        return re.sub(r"torch\.(?:as_)?tensor\((.*)\)$", r"\1", kept)  # which would copy the value, without its graph
    if cut.source and cut.text in cut.written:
        inner = f"({cut.source})" if " " in cut.source and cut.text + "." in cut.written else cut.source
        return cut.written.replace(cut.text, inner)
    return f"{to} = {cut.source or cut.text}"
