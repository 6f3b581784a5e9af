"""Something without a gradient was asked for one: which op, which block or which frozen module ended the path."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.error.facts_autograd import NoGradFacts
from nbdebug.chapters.error.rules.autograd_cures import cures
from nbdebug.chapters.error.rules.autograd_cuts import told
from nbdebug.chapters.error.rules.autograd_words import NOTES, at, shaped, ticked, wants
from nbdebug.finding import Finding, Link


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
    if facts.evaluating:
        evidence["in eval mode"] = f"{ticked(facts.evaluating)}: innocent, eval() turns no gradient off"
    if facts.what in ("loss", "hook", "input"):
        evidence |= {f"{t.name}.requires_grad": t.requires_grad for t in facts.raised.tensors[:8]}
    return Finding("error/no-grad-path", title, where, evidence, cures(facts), _chain(facts))


def _loss(facts: NoGradFacts) -> str:
    name = f"`{facts.asked}`" if facts.asked else "the loss"
    if facts.cut is not None:
        return told(facts.cut, name)
    wanting = wants(facts)
    if facts.plain:
        verb = "is" if len(wanting) == 1 else "are"
        aside = f", and {ticked(wanting)}, which could, {verb} not used" if wanting else ""
        return f"Nothing that {name} is computed from wants a gradient: no parameter takes part in it{aside}"
    return f"{name} has no `grad_fn`: its graph ends somewhere before it" + (
        f" ({ticked(wanting)} still {'has' if len(wanting) == 1 else 'have'} one)" if wanting else ""
    )


def _not_scalar(facts: NoGradFacts) -> str:
    shape = list(facts.tensor.shape) if facts.tensor is not None else None
    return f"`{facts.asked or 'the loss'}` has shape {shape}: `backward()` starts from one number"


def _not_a_tensor(facts: NoGradFacts) -> str:
    name = f"`{facts.asked}`" if facts.asked else "what `backward()` was called on"
    if facts.cut is not None:
        return told(facts.cut, name)
    if facts.kind == "NoneType":
        giver = f": `{facts.giver}` returns nothing" if facts.giver else ""
        return f"{name} is None{giver}, so there is no loss to call `backward()` on"
    return f"{name} is a {facts.kind}, not a tensor, so it has no `backward()`" + (
        f": it is what `{facts.giver}` gives" if facts.giver else ""
    )


def _input(facts: NoGradFacts) -> str:
    if facts.cut is not None:
        return told(facts.cut, f"`{facts.asked}`")
    return f"`{facts.asked}` does not require grad, so there is no gradient with respect to it"


def _unused(facts: NoGradFacts) -> str:
    return f"`{facts.asked}` is no part of what was differentiated: the result was not computed from it"


def _no_parameters(facts: NoGradFacts) -> str:
    if facts.untracked:
        name, what = facts.untracked[0]
        return f"The optimizer got no parameters: `{name}` is {what}, which `parameters()` does not see"
    if any(some == 0 for _, some, whole in facts.counts if whole):
        return "The optimizer got no parameters: those it could have are frozen (`requires_grad` is False)"
    return f"The optimizer got no parameters: `{facts.asked}` gives none"


def _not_a_leaf(facts: NoGradFacts) -> str:
    made = f", the result of `{facts.tensor.made_by}`" if facts.tensor is not None and facts.tensor.made_by else ""
    return f"`{facts.asked}` is no leaf{made}: an optimizer can only change tensors that nothing was computed for"


def _grad_is_none(facts: NoGradFacts) -> str:
    tensor, name = facts.tensor, f"`{facts.asked}`" + (f" (`{facts.parameter}`)" if facts.parameter else "")
    if tensor is not None and tensor.made_by:
        made = f"`{facts.asked}` is a result of `{tensor.made_by}`"
        return f"`{facts.asked}.grad` is None: {made}, and only leaves keep theirs"
    if tensor is not None and not tensor.requires_grad:
        return f"`{facts.asked}.grad` is None: {name} does not require grad"
    return f"`{facts.asked}.grad` is None: no `backward()` has reached {name} since its gradient was last cleared"


def _hook(facts: NoGradFacts) -> str:
    return _loss(facts)


def _inference(facts: NoGradFacts) -> str:
    return (
        f"`{facts.asked or 'a tensor'}` was made under `torch.inference_mode()`, and autograd can't use such a "
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


def _chain(facts: NoGradFacts) -> tuple[Link, ...]:
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
    links.append(Link(f"`{facts.asked or 'the loss'}` is asked for a gradient", facts.raised.where))
    return tuple(links)
