"""Rules over the ledger: parameters that are not trained though they should be, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.training.facts import Parameter, StaticFacts, TrainingFacts, Weight
from nbdebug.tools.training.rules.wording import finding, line, listed, short, without

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


def _frozen(before: StaticFacts) -> tuple[str, list[Parameter]]:
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


def _optimizer(before: StaticFacts, missing: Sequence[Parameter] = ()) -> str:
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


TIMES = 3.0
"""Deviation of a weight over that of He's scheme (SageMaker Debugger: ten times the variance). torch's own
initialisation is at 0.41, Glorot's at about 0.7, a trained layer's rarely above 2."""
SMALL = 0.1
"""… and below this part of it a signal fades by ten in each layer."""
FADED = 1e-3
"""Size of the signal at the last layer over that at the first, without normalisation."""
SURPRISED = 3.0
"""Loss at the start over that of guessing (TheDeepChecker allows twice)."""


@rule(
    code="training/bad-init",
    title="The initial weights keep the model from learning.",
    symptom="The loss starts far above guessing, or stays there; units of a layer stay copies of one another; the "
    "signal fades or grows from layer to layer.",
    cause="Weights drawn too large or too small for the layer's width, the same value in all, or zeros in two layers "
    "that follow each other, so that neither ever gets a gradient.",
    confirm="`w.std() * (w[0].numel() / 2) ** 0.5` is about 0.4 to 1.5 for each weight; `(w == w[:1]).all()` is False.",
    fix="`nn.init.kaiming_normal_(w, nonlinearity='relu')` for relu, `nn.init.xavier_uniform_(w)` for tanh; biases "
    "zero; zeros at most in the last layer of a branch.",
    reference="https://arxiv.org/abs/1502.01852",
)
def bad_init(facts: TrainingFacts) -> Finding | None:
    before = facts.before
    if before is None or not before.weights:
        return None
    for told in (_copies, _nothing, _too_large, _too_small):
        why, layers = told(before)
        if layers:
            names = [w.module or w.name for w in layers]
            fix = Fix(
                "Draw the weights for the layer's width.",
                "torch.nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')\ntorch.nn.init.zeros_(layer.bias)",
            )
            return finding(
                "bad-init",
                why,
                [*names, *(w.name for w in layers)],
                [fix],
                module=layers[0].module,
                deviation_over_the_scheme_s={w.name: w.std / w.scheme for w in before.weights[:12]},
                loss_at_the_start=before.loss,
                loss_of_guessing=_guess(before),
            )
    return None


def _names(layers: Sequence[Weight]) -> str:
    return listed(w.module or w.name for w in layers)


def _guess(before: StaticFacts) -> float | None:
    return next((call.guess for call in before.losses if call.guess), None)


def _copies(before: StaticFacts) -> tuple[str, Sequence[Weight]]:
    same = [w for w in before.weights if w.symmetric and w.hidden and w.trained]
    return (
        f"All units of {_names(same)} have the same weights and get the same gradient: they "
        "stay copies of one another, and the layer counts for a single unit",
        same,
    )


def _nothing(before: StaticFacts) -> tuple[str, Sequence[Weight]]:
    trained = [w for w in before.weights if w.trained and w.gradient is not None]
    zero = [w for w in trained if w.std == 0 and w.constant and w.hidden]
    stuck = (
        len(trained) > 1
        and zero
        and all(w.gradient == 0 for w in trained)
        and not any((u.dead or 0.0) > 0.9 for u in before.units if not zero)
    )
    return (
        f"Every weight gets a gradient of exactly zero: {_names(zero)} hold the same value "
        "throughout, and nothing passes",
        zero if stuck else [],
    )


def _too_large(before: StaticFacts) -> tuple[str, Sequence[Weight]]:
    wide = [w for w in before.weights if w.trained and w.std > TIMES * w.scheme]
    guess, loss = _guess(before), before.loss
    surprised = (
        guess is not None
        and loss is not None
        and not any(c.op == "mse_loss" for c in before.losses)
        and (loss > SURPRISED * guess)
    )
    if not wide or not surprised:
        return "", []  # where they only saturate an activation, that is the story to tell
    worst = max(wide, key=lambda w: w.std / w.scheme)
    return (
        f"The weights of {_names(wide)} start {worst.std / worst.scheme:.0f} times as large as their width allows "
        f"(deviation {short(worst.std)}, He's scheme {short(worst.scheme)}): the loss starts at "
        f"{short(loss or 0.0)}, "
        f"where guessing gives {short(guess or 0.0)}",
        wide,
    )


def _too_small(before: StaticFacts) -> tuple[str, Sequence[Weight]]:
    thin = [w for w in before.weights if w.trained and 0 < w.std < SMALL * w.scheme]
    first, last = before.weights[0], before.weights[-1]
    faded = first.came > 0 and last.came < FADED * first.came
    if len(thin) < 2 or not faded or before.norms:
        return "", []
    worst = min(thin, key=lambda w: w.std / w.scheme)
    return (
        f"The weights of {_names(thin)} start {worst.scheme / worst.std:.0f} times smaller than "
        f"their width allows: the signal fades from {short(first.came)} at the first layer to {short(last.came)} "
        "at the last",
        thin,
    )
