"""A value that backward needs was changed in place: the statement that did it."""

from __future__ import annotations

import dataclasses
import re

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.tools.errors.autograd.facts import (
    BackwardTwiceFacts,
    GraphHolder,
    InPlaceChange,
    InPlaceFacts,
    NoGradFacts,
)
from nbdebug.tools.errors.autograd.rules_wording import NOTES, at, cures, line, op, shaped, ticked, told, wants
from nbdebug.tools.errors.facts import NOWHERE

IN_PLACE = NOTES + "#in-place-operations-with-autograd"


@rule(
    code="error/inplace-modified",
    title="A tensor that the backward pass needs was changed in place.",
    symptom="`one of the variables needed for gradient computation has been modified by an inplace operation`, or `a "
    "leaf Variable that requires grad is being used in an in-place operation`.",
    cause="`+=`, `x[i] = …`, a method with an underscore, `inplace=True` or an `optimizer.step()` between a forward "
    "and its backward overwrote values that a derivative is computed from (a relu's own result, a weight).",
    confirm="`torch.autograd.set_detect_anomaly(True)` prints the forward line whose value is missing; the change "
    "comes after it.",
    fix="Write the result to a new tensor (`out = out + residual`), change parameters under `torch.no_grad()`, and "
    "call every backward() before the first step().",
    reference=IN_PLACE,
)
def inplace_modified(facts: InPlaceFacts) -> Finding | None:
    change = facts.change
    where = at(change.where, facts.raised) if change is not None else facts.raised.where
    if change is not None and change.module:
        where = dataclasses.replace(where, module=change.module)
    evidence: dict[str, object] = {}
    if facts.shape is not None:
        evidence["the tensor"] = f"{facts.dtype or 'tensor'} {list(facts.shape)}"
    if facts.version is not None:
        evidence |= {"its version now": facts.version, "when it was saved": facts.saved_version}
    if facts.saved_by:
        evidence["missed by the backward of"] = op(facts.saved_by).strip("`")
    if facts.module:
        evidence["next to module"] = facts.module
    if facts.others:
        evidence["would fit too"] = "; ".join(f"{c.text} ({c.where.place})" for c in facts.others)
    return Finding("error/inplace-modified", _title(facts), where, evidence, _fixes(facts), _chain(facts))


def _title(facts: InPlaceFacts) -> str:
    change = facts.change
    if facts.what == "saved":
        return _saved(facts, change)
    name = f"`{facts.parameter or facts.tensor or (change.target if change else 'a tensor')}`"
    statement = f"`{change.text}`" if change is not None else "An in-place op"
    return {
        "leaf": f"{statement} changes {name} in place, a leaf that wants a gradient: autograd can't follow that",
        "leaf view": f"{statement} writes into {name} in place, and that is (a view of) a leaf which wants a gradient",
        "view": f"{statement} changes {name} in place, one of several views of one tensor, or one made under no_grad",
        "expanded": f"{statement} writes to {name}, whose entries share memory (it was expanded)",
        "out": f"{statement} writes its result with `out=`, and autograd can't follow that",
        "inference": f"{statement} changes {name} in place, which was made under `torch.inference_mode()`",
    }[facts.what]


def _saved(facts: InPlaceFacts, change: InPlaceChange | None) -> str:
    whose = "its own result" if facts.own_result else "the old value"
    needs = f"the backward{' of ' + op(facts.saved_by) if facts.saved_by else ''} needs {whose}"
    if change is not None and change.how == "step":
        what = f"`{facts.parameter or facts.tensor}`" if facts.parameter or facts.tensor else "the weights"
        return f"`{change.text}` changed {what} between the forward and this `backward()`, and {needs}"
    if change is not None and change.how == "block" and facts.parameter:
        return f"`{change.text}` changed `{facts.parameter}` between the forward and this `backward()`, and {needs}"
    if change is not None and change.how == "module":
        return f"`{change.target}` is {change.text} and overwrites what it is given, but {needs}"
    if change is not None:
        return f"`{change.text}` changes `{change.target}` in place, but {needs}"
    name = (
        f"`{facts.parameter or facts.tensor}`"
        if facts.parameter or facts.tensor
        else (f"A tensor of shape {list(facts.shape)}" if facts.shape is not None else "A tensor")
    )
    return f"{name} was changed in place after the forward, but {needs}"


def _fixes(facts: InPlaceFacts) -> tuple[Fix, ...]:
    change = facts.change
    name = facts.tensor or (change.target if change is not None else "x")
    if change is not None and (change.how == "step" or change.how == "block" and facts.parameter):
        return (
            Fix(
                "Call every backward() before the weights change.",
                f"{facts.loss or 'loss'}.backward()   # all of them first\n{change.text}",
            ),
            Fix(
                "Or compute the second loss anew, after the change.",
                f"{facts.loss or 'loss'} = ...   # the forward again",
            ),
        )
    if facts.what in ("leaf", "leaf view"):
        return _leaf(facts, change, name)
    if facts.what == "expanded":
        return (Fix("Give it memory of its own first.", f"{name} = {name}.clone()"),)
    if facts.what == "inference":
        return (
            Fix("Copy it to an ordinary tensor first.", f"{name} = {name}.clone()"),
            Fix("Or make it under no_grad.", "with torch.no_grad():\n    ..."),
        )
    if change is None:
        return (
            Fix(
                "Let torch name the forward line whose value is missing; look for `+=`, `x[i] = …` and `_(` after it.",
                "with torch.autograd.set_detect_anomaly(True):\n    ...   # the step again",
            ),
        )
    if facts.what == "view" and "[" in change.target:
        return (Fix("Write to a new tensor.", "new = " + change.replacement.partition(" = ")[2]),)
    rows = (
        Fix(
            "Or collect the parts in a list, and join them once.",
            f"parts.append({change.operand})\n...\n{change.target} = torch.stack(parts)   # after the loop",
        ),
    ) * (change.how == "item" and change.text.count("=") == 1)
    return (
        Fix(
            "Write to a new tensor.",
            change.replacement or change.text,
            facts.fix_passes,
            {
                "backward": "passes" if facts.fix_passes else "fails",
                "tried on": f"{op(facts.saved_by).strip('`')} of random numbers of shape {list(facts.shape or ())}",
            }
            if facts.fix_passes is not None
            else {},
        ),
        *rows,
    )


def _leaf(facts: InPlaceFacts, change: InPlaceChange | None, name: str) -> tuple[Fix, ...]:
    inside = (change.text if change is not None else f"{name}.add_(...)").replace("\n", "\n    ")
    aside = Fix("If it is an update of the weights: let autograd look away.", f"with torch.no_grad():\n    {inside}")
    if change is None or change.how == "module":
        return (Fix("Give it a copy.", f"{name}.clone()"),)
    instead = change.replacement.replace("\n", "\n") if change.replacement else f"{name} = {name}.clone()"
    return (aside, Fix("If it is a part of the computation: write to a new tensor.", instead))


def _chain(facts: InPlaceFacts) -> tuple[Link, ...]:
    change, links = facts.change, []
    if facts.what != "saved":
        return ()
    if facts.saved_by:
        named = facts.parameter or facts.tensor
        kept = "its own result" if facts.own_result else f"`{named}`" if named else "what it was given"
        links.append(Link(f"the forward of {op(facts.saved_by)} saves {kept} for its derivative"))
    if change is not None and change.where.line is not None:
        links.append(Link(f"`{change.text}` overwrites it", change.where))
    return (*links, Link("`backward()` finds other values than were saved", facts.raised.where))


@rule(
    code="error/no-grad-path",
    title="No path leads from what was asked for a gradient back to a parameter.",
    symptom="`element 0 of tensors does not require grad and does not have a grad_fn`, `'float' object has no "
    "attribute 'backward'`, `.grad` is None, an optimizer with an empty parameter list.",
    cause="Somewhere between the parameters and the loss the graph ends: `.detach()`, `.item()`, `.data`, "
    "`torch.tensor(loss)`, an argmax, a comparison or a cast to whole numbers, a `no_grad` around it; or no "
    "parameter wants a gradient. `model.eval()` does not end it.",
    confirm="Print `x.requires_grad` for each step from the model's output to the loss: the first False stands behind "
    "the cut.",
    fix="Compute the loss on what the model gives, before it is cut: probabilities instead of the argmax, the tensor "
    "instead of its `.item()`; keep detached copies for metrics only.",
    reference=NOTES,
)
def no_grad_path(facts: NoGradFacts) -> Finding | None:
    title = _TITLES.get(facts.what, _loss)(facts)
    cut = facts.cut
    where = at(cut.where, facts.raised) if cut is not None else facts.raised.where
    evidence: dict[str, object] = shaped(facts.tensor)
    for name, some, whole in facts.counts:
        evidence[f"parameters of {name} that want a gradient"] = f"{some:,} of {whole:,}"
    if facts.eval_models:
        evidence["in eval mode"] = f"{ticked(facts.eval_models)}: innocent, eval() turns no gradient off"
    if facts.what in ("loss", "hook", "input"):
        evidence |= {f"{t.name}.requires_grad": t.requires_grad for t in facts.raised.tensors[:8]}
    return Finding("error/no-grad-path", title, where, evidence, cures(facts), _path_chain(facts))


def _loss(facts: NoGradFacts) -> str:
    name = f"`{facts.expression}`" if facts.expression else "the loss"
    if facts.cut is not None:
        return told(facts.cut, name)
    wanting = wants(facts)
    if facts.no_path:
        verb = "is" if len(wanting) == 1 else "are"
        aside = f", and {ticked(wanting)}, which could, {verb} not used" if wanting else ""
        return f"Nothing that {name} is computed from wants a gradient: no parameter takes part in it{aside}"
    return f"{name} has no `grad_fn`: its graph ends somewhere before it" + (
        f" ({ticked(wanting)} still {'has' if len(wanting) == 1 else 'have'} one)" if wanting else ""
    )


def _not_scalar(facts: NoGradFacts) -> str:
    shape = list(facts.tensor.shape) if facts.tensor is not None else None
    return f"`{facts.expression or 'the loss'}` has shape {shape}: `backward()` starts from one number"


def _not_a_tensor(facts: NoGradFacts) -> str:
    name = f"`{facts.expression}`" if facts.expression else "what `backward()` was called on"
    if facts.cut is not None:
        return told(facts.cut, name)
    if facts.type_name == "NoneType":
        giver = f": `{facts.producer}` returns nothing" if facts.producer else ""
        return f"{name} is None{giver}, so there is no loss to call `backward()` on"
    return f"{name} is a {facts.type_name}, not a tensor, so it has no `backward()`" + (
        f": it is what `{facts.producer}` gives" if facts.producer else ""
    )


def _input(facts: NoGradFacts) -> str:
    if facts.cut is not None:
        return told(facts.cut, f"`{facts.expression}`")
    return f"`{facts.expression}` does not require grad, so there is no gradient with respect to it"


def _unused(facts: NoGradFacts) -> str:
    return f"`{facts.expression}` is no part of what was differentiated: the result was not computed from it"


def _no_parameters(facts: NoGradFacts) -> str:
    if facts.untracked:
        name, what = facts.untracked[0]
        return f"The optimizer got no parameters: `{name}` is {what}, which `parameters()` does not see"
    if any(some == 0 for _, some, whole in facts.counts if whole):
        return "The optimizer got no parameters: those it could have are frozen (`requires_grad` is False)"
    return f"The optimizer got no parameters: `{facts.expression}` gives none"


def _not_a_leaf(facts: NoGradFacts) -> str:
    made = f", the result of `{facts.tensor.made_by}`" if facts.tensor is not None and facts.tensor.made_by else ""
    return f"`{facts.expression}` is no leaf{made}: an optimizer can only change tensors that nothing was computed for"


def _grad_is_none(facts: NoGradFacts) -> str:
    tensor, name = facts.tensor, f"`{facts.expression}`" + (f" (`{facts.parameter}`)" if facts.parameter else "")
    if tensor is not None and tensor.made_by:
        made = f"`{facts.expression}` is a result of `{tensor.made_by}`"
        return f"`{facts.expression}.grad` is None: {made}, and only leaves keep theirs"
    if tensor is not None and not tensor.requires_grad:
        return f"`{facts.expression}.grad` is None: {name} does not require grad"
    return f"`{facts.expression}.grad` is None: no `backward()` has reached {name} since its gradient was last cleared"


def _hook(facts: NoGradFacts) -> str:
    return _loss(facts)


def _inference(facts: NoGradFacts) -> str:
    return (
        f"`{facts.expression or 'a tensor'}` was made under `torch.inference_mode()`, and autograd can't use such a "
        "tensor later"
    )


_TITLES = {
    "loss": _loss,
    "not scalar": _not_scalar,
    "not a tensor": _not_a_tensor,
    "input": _input,
    "unused": _unused,
    "no parameters": _no_parameters,
    "not a leaf": _not_a_leaf,
    "grad is None": _grad_is_none,
    "hook": _hook,
    "inference": _inference,
}


def _path_chain(facts: NoGradFacts) -> tuple[Link, ...]:
    cut = facts.cut
    if cut is None:
        return ()
    links = []
    if cut.source and cut.kind not in ("block", "global", "frozen"):
        has = "wants none" if cut.kind == "checkpoint" else "has a gradient" if cut.sure else "may have a gradient"
        links.append(Link(f"`{cut.source}` {has}"))
    if cut.where.line is not None:
        to = f" `{cut.target}`" if cut.target else " the result"
        links.append(
            Link(
                f"`{cut.text}` ends the path{' for' + to if cut.kind != 'frozen' else ''}"
                f"{' in `' + cut.function + '`' if cut.function else ''}",
                cut.where,
            )
        )
    links.append(Link(f"`{facts.expression or 'the loss'}` is asked for a gradient", facts.raised.where))
    return tuple(links)


@rule(
    code="error/backward-twice",
    title="backward() went through a graph that an earlier backward() had freed.",
    symptom="`Trying to backward through the graph a second time`, from the second turn of a loop on, or at the second "
    "of two losses.",
    cause="A variable brings a graph along: a recurrent state kept from the turn before, a sum of losses, a list of "
    "old outputs, features computed once before the loop, or a tensor that two losses share.",
    confirm="`x.grad_fn` of each variable that lives longer than one turn: those that are not None carry a graph.",
    fix="`.detach()` the state between turns; compute inside the loop what is to be trained; add up losses that share "
    "a part and call backward() once. `retain_graph=True` hides the fault where a state is carried: the graph "
    "grows with each turn, and the next step() fails on changed weights.",
    reference=NOTES,
)
def backward_twice(facts: BackwardTwiceFacts) -> Finding | None:
    carriers = facts.holders
    first = carriers[0] if carriers else None
    alike = tuple(c.name for c in carriers if first is not None and c.how == first.how)
    where = at(first.write if first is not None else facts.first_backward, facts.raised)
    evidence: dict[str, object] = {"nodes in the graph of the loss": facts.nodes, "of them freed": facts.nodes_freed}
    for carrier in carriers[:4]:
        evidence[carrier.name] = f"shape {list(carrier.shape)}, made by {op(carrier.op or '?')}"
    if facts.first_backward.place:
        evidence["backward was called before"] = f"`{facts.first_loss}`{line(facts.first_backward)}"
    title = _twice_title(first, alike, facts)
    return Finding(
        "error/backward-twice", title, where, evidence, _twice_fixes(first, alike, facts), _twice_chain(first, facts)
    )


def _twice_title(first: GraphHolder | None, alike: tuple[str, ...], facts: BackwardTwiceFacts) -> str:
    loss = f"`{facts.loss}`" if facts.loss else "the loss"
    if first is None:
        return f"A part of the graph of {loss} was freed by an earlier `backward()`"
    names, one = ticked(alike), len(alike) == 1
    are, them = ("is", "it") if one else ("are", "them")
    turn = "run" if first.cell else "turn"
    of_others = {
        "iteration": f"{names} {'brings' if one else 'bring'} the graph of the {turn} before into this one, and its "
        "`backward()` has freed it",
        "sum": f"`{first.name}` adds up results with their graphs, and the `backward()` of the {turn} before has freed "
        "the old ones",
        "sometimes": f"{names} {are} computed in some turns only: in the others the graph is an old one, freed already",
        "again": f"`backward()` is called a second time on {loss}, which was computed once",
        "attribute": f"{names} {'keeps' if one else 'keep'} the graph of an earlier step, which its `backward()` has "
        "freed",
        "list": f"`{first.name}` keeps results of earlier {turn}s with their graphs, which `backward()` has freed",
        "each": f"All the losses go through `{first.name}`, whose graph the `backward()` of the first has freed",
        "once": f"{names} {are} computed once, and the first `backward()` has freed the graph behind {them}",
    }
    if first.how in of_others:
        return of_others[first.how]
    before = f"the `backward()` of `{facts.first_loss}`" if facts.first_loss else "an earlier `backward()`"
    return f"{loss} and an earlier loss both go through `{first.name}`, whose graph {before} has freed"


def _twice_fixes(first: GraphHolder | None, alike: tuple[str, ...], facts: BackwardTwiceFacts) -> tuple[Fix, ...]:
    loss = facts.loss or "loss"
    if first is None:
        return (Fix("Detach what is carried over from an earlier step.", "state = state.detach()"),)
    if first.how == "sum":
        added = "loss" if loss == first.name else loss
        return (
            Fix(
                "Sum numbers, not graphs; call backward on this turn's loss.",
                f"{added}.backward()\n{first.name} += {added}.item()",
            ),
            Fix("Or call backward once, on the whole sum, after the loop.", f"{first.name}.backward()"),
        )
    if first.how == "again":
        return (
            Fix("Compute the loss anew before each backward().", _text(first) or f"{loss} = ...   # the forward again"),
            Fix("Or keep the graph at all but the last call.", f"{loss}.backward(retain_graph=True)"),
        )
    if first.how == "each":
        over = re.sub(r"^for .* in |:$", "", first.read.text or "losses")
        return (
            Fix("Add them up and call backward once.", f"sum({over}).backward()"),
            Fix("Or keep the graph until the last of them.", f"{loss}.backward(retain_graph=True)"),
        )
    if first.how == "list":
        return (
            Fix("Keep the results without their graphs.", _detached(first)),
            Fix("Or empty it after each backward().", f"{first.name}.clear()"),
        )
    if first.how in ("once", "sometimes"):
        anew = Fix(
            "Compute it in each turn, if it is to be trained.",
            f"{_text(first) or first.name + ' = ...'}   # inside the loop",
        )
        aside = Fix("Or compute it without a graph, if it isn't.", f"with torch.no_grad():\n    {_text(first)}")
        off = Fix("Or cut it off, if it isn't.", f"{first.name} = {first.name}.detach()")
        return (anew, aside if first.object and _text(first) else off)
    if first.how == "shared":
        cut = re.sub(rf"\b{re.escape(first.name)}\b", f"{first.name}.detach()", first.read.text or first.name)
        apart = Fix(
            f"Cut it off in the first loss, if that is not to train what made `{first.name}` (a GAN's discriminator).",
            cut,
        )
        both = Fix(
            "Add both up and call backward once, if both train it.",
            f"({facts.first_loss or 'first_loss'} + {loss}).backward()",
        )
        return (
            *((apart, both) if facts.optimizers > 1 or not facts.first_loss else (both, apart)),
            Fix("Or keep the graph for the second loss.", f"{facts.first_loss or 'loss'}.backward(retain_graph=True)"),
        )
    if first.how == "attribute" and re.search(r"\.(append|extend|insert|add)\(", _text(first)):
        return (Fix("Empty it after each backward().", f"self.{first.name.rpartition('.')[2]}.clear()"),)
    return (
        Fix(
            "Cut it off between the turns: the value goes on, the graph does not.",
            "\n".join(_cut(c) for c in facts.holders if c.name in alike),
        ),
    )


def _cut(carrier: GraphHolder) -> str:
    name = carrier.name if carrier.how != "attribute" else "self." + carrier.name.rpartition(".")[2]
    return f"{name} = tuple(part.detach() for part in {name})" if carrier.container else f"{name} = {name}.detach()"


def _text(carrier: GraphHolder) -> str:
    return carrier.write.text or ""


def _detached(carrier: GraphHolder) -> str:
    text = _text(carrier)
    item = re.match(r"(\w+\[[^=]*\]) = ", text)
    if item:
        return f"{item[1]} = {item[1]}.detach()"
    if text.endswith(")") and ".append(" in text:
        return text[:-1] + ".detach())"
    return f"{carrier.name}.append(x.detach())"


def _twice_chain(first: GraphHolder | None, facts: BackwardTwiceFacts) -> tuple[Link, ...]:
    links = []
    if first is not None and first.write.line is not None:
        links.append(Link(f"`{first.name}` gets its value, and with it a graph", first.write))
    if first is not None and first.how in ("shared", "each"):
        links.append(Link("the losses are computed from it", first.read if first.how == "shared" else NOWHERE))
    if facts.first_backward.line is not None:
        links.append(
            Link(f"`backward()` on `{facts.first_loss}` frees what that graph has saved", facts.first_backward)
        )
    elif first is not None:
        links.append(Link("an earlier `backward()` frees what that graph has saved"))
    if (
        first is not None
        and first.read.line is not None
        and first.read != first.write
        and (first.read.line != facts.raised.where.line)
        and first.how not in ("shared", "each")
    ):
        links.append(Link(f"`{first.name}` goes into this {'run' if first.cell else 'turn'}'s computation", first.read))
    failed: Where = dataclasses.replace(facts.raised.where)
    return (*links, Link(f"`backward()` on `{facts.loss or 'the loss'}` comes to it again", failed))
