"""The rules on errors in `backward()`: a value changed in place, no path to a parameter, a graph walked twice."""

from __future__ import annotations

import dataclasses
import re

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link
from nbdebug.text import listed
from nbdebug.tools.errors.autograd.facts import (
    BackwardTwiceFacts,
    GraphHolder,
    InPlaceChange,
    InPlaceFacts,
    NoGradFacts,
)
from nbdebug.tools.errors.autograd.rules_wording import cause_where, cut_chain, no_grad_fixes, no_grad_title, op_words
from nbdebug.tools.errors.facts import NOWHERE

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
    if change.how != "item" or change.text.count("=") != 1:
        return (first,)
    code = f"parts.append({change.operand})\n...\n{change.target} = torch.stack(parts)   # after the loop"
    return first, Fix("Or collect the parts in a list, and stack them once.", code)


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
    return (
        update,
        Fix(
            "If it is part of the computation: write the result to a new tensor.",
            change.replacement or f"{name} = {name}.clone()",
        ),
    )


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
    return Finding("error/no-grad-path", no_grad_title(facts), where, evidence, no_grad_fixes(facts), cut_chain(facts))


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
            Fix("Compute the loss again before each backward().", text or f"{loss} = ...   # the forward again"),
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
        again = f"{text or first.name + ' = ...'}   # inside the loop"
        without = Fix("Or detach it, if it should not.", f"{first.name} = {first.name}.detach()")
        if first.object and text:
            without = Fix("Or compute it without a graph, if it should not.", f"with torch.no_grad():\n    {text}")
        return (Fix("Compute it in each iteration, if it should be trained.", again), without)
    if first.how == "shared":
        return _shared_fixes(first, facts, loss)
    if first.how == "attribute" and re.search(r"\.(append|extend|insert|add)\(", text):
        return (Fix("Clear it after each backward().", f"self.{first.name.rpartition('.')[2]}.clear()"),)
    title = "Detach it between iterations: the value is kept, the graph is not."
    return (Fix(title, "\n".join(map(_detached_assignment, alike))),)


def _shared_fixes(first: GraphHolder, facts: BackwardTwiceFacts, loss: str) -> tuple[Fix, ...]:
    name, first_loss = first.name, facts.first_loss
    detached = re.sub(rf"\b{re.escape(name)}\b", f"{name}.detach()", first.read.text or name)
    apart = Fix(
        f"Detach it in the first loss, if that should not train what computes `{name}` (as for a GAN's discriminator).",
        detached,
    )
    both = Fix(
        "Add both losses and call backward once, if both should train it.",
        f"({first_loss or 'first_loss'} + {loss}).backward()",
    )
    retain = Fix("Or retain the graph for the second loss.", f"{first_loss or 'loss'}.backward(retain_graph=True)")
    return (apart, both, retain) if facts.optimizers > 1 or not first_loss else (both, apart, retain)


def _detached_assignment(holder: GraphHolder) -> str:
    name = holder.name if holder.how != "attribute" else "self." + holder.name.rpartition(".")[2]
    return f"{name} = tuple(part.detach() for part in {name})" if holder.container else f"{name} = {name}.detach()"


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
