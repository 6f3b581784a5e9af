"""Rules over the ledger: parameters that are not trained though they should be, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbdebug.catalogue import rule
from nbdebug.chapters.training.facts import TrainingFacts
from nbdebug.chapters.training.facts_before import Before, Parameter
from nbdebug.chapters.training.rules.before_words import finding, line, listed, without
from nbdebug.finding import Finding, Fix

ADAPTERS = re.compile(
    r"(^|[._])(lora|adapter|ia3|soft_prompt|prompt_embeddings|prompt_learner|prefix_encoder)", re.IGNORECASE
)
"""Names that libraries give to what is added to a frozen model in order to be trained."""


@rule(
    code="training/frozen-parameters",
    title="Parameters that were meant to be trained are frozen.",
    symptom="The loss falls a little, as if only a part of the model learned; after training an adapter's second "
    "factor is still all zeros, or a new head is as it was made.",
    cause="`requires_grad` was set to False after the part was added (freezing the whole model comes first, adding "
    "comes second), or a pattern of names froze more than was meant. An optimizer that holds a frozen parameter "
    "says nothing.",
    confirm="`[n for n, p in model.named_parameters() if not p.requires_grad]`",
    fix="Freeze first, add the new part afterwards, or turn it on again: `p.requires_grad_(True)` for its parameters, "
    "before the optimizer is made.",
    reference="https://github.com/huggingface/transformers/issues/26098",
)
def frozen_parameters(facts: TrainingFacts) -> Finding | None:
    before = facts.before
    if before is None or not before.parameters:
        return None
    why, frozen = _frozen(before)
    if not frozen:
        return None
    names = [p.name for p in frozen]
    count = sum(p.elements for p in before.parameters if p.trained)
    total = sum(p.elements for p in before.parameters)
    title = f"{listed(names)} {'is' if len(names) == 1 else 'are'} frozen: {why}"
    return finding(
        "frozen-parameters",
        title,
        names,
        [_thaw(names)],
        module=frozen[0].module,
        frozen=names[:20],
        trained_elements=f"{count:,} of {total:,}",
        held_by_the_optimizer=f"{sum(bool(p.held) for p in frozen)} of {len(frozen)}",
        only_zeros=[p.name for p in frozen if p.zero] or None,
    )


def _frozen(before: Before) -> tuple[str, list[Parameter]]:
    """(why they ought to be trained, the parameters). A part frozen on purpose gives none of these reasons."""
    used = [p for p in before.parameters if p.used and not p.trained and p.registered]
    if used and not before.trained:
        return "no parameter of the model wants a gradient, so that nothing can learn", used
    multiplied = {w.name for w in before.weights}  # a first hidden state of zeros is none, and no fault
    zeros = {p.module for p in used if p.zero and p.dims > 1 and p.name in multiplied}
    if zeros:
        held = next(p.name for p in used if p.module in zeros and p.zero and p.name in multiplied)
        return (
            f"`{held}` holds nothing but zeros, which no training has left there, so that its part of the model "
            "does nothing and never will",
            [p for p in used if p.module in zeros],
        )
    added = [p for p in before.parameters if ADAPTERS.search(p.name)]
    if any(p in used and p.held for p in added) and not any(p.trained for p in added):
        return (
            "they look like a part that was added in order to be trained, the optimizer holds them, and none of them is"
        ), [p for p in added if p in used]
    last = [p for p in used if p.last and p.held and not p.normal]
    if any(p.fresh for p in last) and before.trained:
        return (
            "the output layer still has the random values that it was made with, the optimizer holds it, and what "
            "comes before it is trained"
        ), last
    return "", []


def _thaw(names: Sequence[str]) -> Fix:
    part = _common(names)
    return Fix(
        "Let them be trained, before the optimizer is made. If it was meant, take them out of the optimizer.",
        f"for name, p in model.named_parameters():\n    if {part!r} in name:\n        p.requires_grad_(True)",
    )


def _common(names: Sequence[str]) -> str:
    """A piece that all these names have, and that stands for them."""
    for word in ("lora_", "adapter", "prompt"):
        if all(word in name.lower() for name in names):
            return word
    return names[0].rpartition(".")[0] or names[0]


@rule(
    code="training/detached-graph",
    title="The graph is cut between the parameters and the loss.",
    symptom="The loss falls somewhat and stops. Some parameters are the same before and after training, though they "
    "are trained by name and the optimizer holds them; their `.grad` is None.",
    cause="`.detach()`, `.data`, `torch.no_grad()`, `torch.tensor(t)`, `.numpy()` or an op without a derivative "
    "(argmax, round) stands between them and the loss. The values pass, the gradient does not.",
    confirm="After `loss.backward()`: `[n for n, p in model.named_parameters() if p.grad is None]`",
    fix="Take the cut away. Where it is meant (a target, a teacher), leave these parameters out of the optimizer and "
    "call `requires_grad_(False)` on them.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.Tensor.detach.html",
)
def detached_graph(facts: TrainingFacts) -> Finding | None:
    before = facts.before
    if before is None or not before.cuts:
        return None
    cut = before.cuts[0]
    did = {
        "no_grad": f"`{cut.op}` runs under torch.no_grad()",
        "detach": f"`{cut.op}` cuts the graph",
        "left torch": f"`{cut.op}` takes the values out of torch",
    }.get(cut.how, f"`{cut.op}` has no derivative")
    names = list(cut.parameters)
    title = (
        f"{did}{line(cut.where)}: {listed(names, 3)} never get{'s' if len(names) == 1 else ''} a gradient, "
        f"though the loss hangs on {'it' if len(names) == 1 else 'them'}"
    )
    all_cut = [name for c in before.cuts for name in c.parameters]
    remedy = {
        "no_grad": "Compute it outside of torch.no_grad().",
        "detach": "Take the detach away.",
        "left torch": "Stay in torch: do the same with torch's own functions.",
    }.get(cut.how, "Use a function that has a derivative (softmax for argmax, a straight-through estimate for round).")
    code = {
        "detach": without(cut.where.text, cut.op) or f"# without {cut.op}",
        "no_grad": f"with torch.enable_grad():\n    {(cut.where.text or '...').strip()}",
        "left torch": "# torch's own functions: no .numpy(), float() or .item() on the way",
    }.get(
        cut.how,
        "soft = scores.softmax(-1)\nhard = (scores == scores.amax(-1, keepdim=True)).float()\n"
        "chosen = hard + soft - soft.detach()  # the value of the one, the gradient of the other",
    )
    return finding(
        "detached-graph",
        title,
        [*names, "forward"],
        [Fix(remedy, code)],
        place=cut.where,
        cut_by=cut.op,
        without_gradient=all_cut[:20],
        parameters=f"{len(all_cut)} of {len(before.trained)} trained ones",
    )


@rule(
    code="training/parameters-not-in-optimizer",
    title="The optimizer does not hold parameters that the loss hangs on.",
    symptom="The loss falls less than it should, or not at all. Gradients are there, and some weights never move.",
    cause="A part was added after the optimizer was made; only a part was handed over; layers stand in a plain Python "
    "list, which `model.parameters()` does not see; or the cell that makes the model ran again, and the "
    "optimizer still holds the old model's tensors.",
    confirm="`held = {id(p) for g in optimizer.param_groups for p in g['params']}`, then "
    "`[n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]`",
    fix="Make the optimizer last, from `model.parameters()`; keep layers in `nn.ModuleList`. If they are meant to stay "
    "as they are, call `requires_grad_(False)` on them: it saves their share of the backward too.",
    reference="https://github.com/pytorch/pytorch/issues/14467",
)
def parameters_not_in_optimizer(facts: TrainingFacts) -> Finding | None:
    before = facts.before
    if before is None:
        return None
    missing = [p for p in before.parameters if p.trained and p.reached and p.held is False]
    unseen = [p for p in before.parameters if not p.registered and p.reached and p.trained and not p.held]
    if unseen:
        return _unseen(unseen)
    if not missing:
        return None
    names = [p.name for p in missing]
    foreign = before.strangers
    if foreign is not None and foreign.alike:
        title = (
            f"The optimizer holds {foreign.count} tensors that are not this model's, and not {listed(names)}: the "
            "model was made anew after the optimizer"
        )
        fixes = [Fix("Make the optimizer again, after the model.", f"optimizer = torch.optim.{_optimizer(before)}")]
    else:
        trained = len([p for p in before.trained if p.registered])
        title = f"{len(names)} of {trained} trained parameters are in no optimizer and never change: {listed(names)}"
        own = [p for p in missing if not p.outside]
        fixes = [Fix("Hand all of them to the optimizer.", f"optimizer = torch.optim.{_optimizer(before, missing)}")]
        fixes += (
            [
                Fix(
                    "If that is meant, say so; their share of the backward is saved.",
                    "\n".join(f"model.get_parameter({p.name!r}).requires_grad_(False)" for p in own[:3]),
                )
            ]
            if own
            else []
        )
    return finding(
        "parameters-not-in-optimizer",
        title,
        [*names, "optimizer"],
        fixes,
        missing=names[:20],
        module=missing[0].module,
        elements_not_held=f"{sum(p.elements for p in missing):,} of {sum(p.elements for p in before.trained):,}",
    )


def _optimizer(before: Before, missing: Sequence[Parameter] = ()) -> str:
    """The user's own optimizer over all parameters, also those that the loss function brings along."""
    written = before.optimizer or "Adam(model.parameters(), lr=…)"
    owners = dict.fromkeys(p.name.partition(".")[0] for p in missing if p.outside)
    everything = "".join(f", *{owner}.parameters()" for owner in owners)
    return written.replace("model.parameters()", f"[*model.parameters(){everything}]") if owners else written


def _unseen(unseen: list[Parameter]) -> Finding:
    names = [p.name for p in unseen]
    container = names[0].split(".")
    at = next((i for i, part in enumerate(container) if part.isdigit()), len(container) - 1)
    path = ".".join(container[:at]) or names[0]
    title = (
        f"`{path}` is a plain Python container, so model.parameters() does not give its {len(names)} parameters "
        f"({listed(names, 2)}): no optimizer holds them"
    )
    fix = Fix("Keep the layers where the model can see them.", f"self.{path} = nn.ModuleList({path.split('.')[-1]})")
    return finding(
        "parameters-not-in-optimizer",
        title,
        [path, *names, "optimizer"],
        [fix],
        missing=names[:20],
        elements_not_held=f"{sum(p.elements for p in unseen):,}",
    )
