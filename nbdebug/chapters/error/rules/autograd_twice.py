"""A graph was walked a second time: the variable that brought it along."""

from __future__ import annotations

import dataclasses
import re

from nbdebug.catalogue import rule
from nbdebug.chapters.error.facts import NOWHERE
from nbdebug.chapters.error.facts_autograd import Carrier, TwiceFacts
from nbdebug.chapters.error.rules.autograd_words import NOTES, at, line, op, ticked
from nbdebug.finding import Finding, Fix, Link, Where


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
def backward_twice(facts: TwiceFacts) -> Finding | None:
    carriers = facts.carriers
    first = carriers[0] if carriers else None
    alike = tuple(c.name for c in carriers if first is not None and c.how == first.how)
    where = at(first.assigned if first is not None else facts.earlier, facts.raised)
    evidence: dict[str, object] = {"nodes in the graph of the loss": facts.nodes, "of them freed": facts.nodes_freed}
    for carrier in carriers[:4]:
        evidence[carrier.name] = f"shape {list(carrier.shape)}, made by {op(carrier.made_by or '?')}"
    if facts.earlier.place:
        evidence["backward was called before"] = f"`{facts.first}`{line(facts.earlier)}"
    title = _title(first, alike, facts)
    return Finding("error/backward-twice", title, where, evidence, _fixes(first, alike, facts), _chain(first, facts))


def _title(first: Carrier | None, alike: tuple[str, ...], facts: TwiceFacts) -> str:
    loss = f"`{facts.loss}`" if facts.loss else "the loss"
    if first is None:
        return f"A part of the graph of {loss} was freed by an earlier `backward()`"
    names, one = ticked(alike), len(alike) == 1
    are, them = ("is", "it") if one else ("are", "them")
    turn = "run" if first.cell else "turn"
    of_others = {
        "turn": f"{names} {'brings' if one else 'bring'} the graph of the {turn} before into this one, and its "
        "`backward()` has freed it",
        "sum": f"`{first.name}` adds up results with their graphs, and the `backward()` of the {turn} before has freed "
        "the old ones",
        "sometimes": f"{names} {are} computed in some turns only: in the others the graph is an old one, freed already",
        "again": f"`backward()` is called a second time on {loss}, which was computed once",
        "held": f"{names} {'keeps' if one else 'keep'} the graph of an earlier step, which its `backward()` has freed",
        "list": f"`{first.name}` keeps results of earlier {turn}s with their graphs, which `backward()` has freed",
        "each": f"All the losses go through `{first.name}`, whose graph the `backward()` of the first has freed",
        "once": f"{names} {are} computed once, and the first `backward()` has freed the graph behind {them}",
    }
    if first.how in of_others:
        return of_others[first.how]
    before = f"the `backward()` of `{facts.first}`" if facts.first else "an earlier `backward()`"
    return f"{loss} and an earlier loss both go through `{first.name}`, whose graph {before} has freed"


def _fixes(first: Carrier | None, alike: tuple[str, ...], facts: TwiceFacts) -> tuple[Fix, ...]:
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
            f"({facts.first or 'first_loss'} + {loss}).backward()",
        )
        return (
            *((apart, both) if facts.optimizers > 1 or not facts.first else (both, apart)),
            Fix("Or keep the graph for the second loss.", f"{facts.first or 'loss'}.backward(retain_graph=True)"),
        )
    if first.how == "held" and re.search(r"\.(append|extend|insert|add)\(", _text(first)):
        return (Fix("Empty it after each backward().", f"self.{first.name.rpartition('.')[2]}.clear()"),)
    return (
        Fix(
            "Cut it off between the turns: the value goes on, the graph does not.",
            "\n".join(_cut(c) for c in facts.carriers if c.name in alike),
        ),
    )


def _cut(carrier: Carrier) -> str:
    name = carrier.name if carrier.how != "held" else "self." + carrier.name.rpartition(".")[2]
    return f"{name} = tuple(part.detach() for part in {name})" if carrier.several else f"{name} = {name}.detach()"


def _text(carrier: Carrier) -> str:
    return carrier.assigned.text or ""


def _detached(carrier: Carrier) -> str:
    text = _text(carrier)
    item = re.match(r"(\w+\[[^=]*\]) = ", text)
    if item:
        return f"{item[1]} = {item[1]}.detach()"
    if text.endswith(")") and ".append(" in text:
        return text[:-1] + ".detach())"
    return f"{carrier.name}.append(x.detach())"


def _chain(first: Carrier | None, facts: TwiceFacts) -> tuple[Link, ...]:
    links = []
    if first is not None and first.assigned.line is not None:
        links.append(Link(f"`{first.name}` gets its value, and with it a graph", first.assigned))
    if first is not None and first.how in ("shared", "each"):
        links.append(Link("the losses are computed from it", first.read if first.how == "shared" else NOWHERE))
    if facts.earlier.line is not None:
        links.append(Link(f"`backward()` on `{facts.first}` frees what that graph has saved", facts.earlier))
    elif first is not None:
        links.append(Link("an earlier `backward()` frees what that graph has saved"))
    if (
        first is not None
        and first.read.line is not None
        and first.read != first.assigned
        and (first.read.line != facts.raised.where.line)
        and first.how not in ("shared", "each")
    ):
        links.append(Link(f"`{first.name}` goes into this {'run' if first.cell else 'turn'}'s computation", first.read))
    failed: Where = dataclasses.replace(facts.raised.where)
    return (*links, Link(f"`backward()` on `{facts.loss or 'the loss'}` comes to it again", failed))
