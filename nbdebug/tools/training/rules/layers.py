"""Rules for parameters and single layers: parameters that are not trained though they should be, and why; initial
weights; layers that are dead, saturated or without a gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Where
from nbdebug.text import count, figures, listed, percent
from nbdebug.tools.training.facts import SmallFactor, TrainingFacts, TrainingRunFacts
from nbdebug.tools.training.rules import signs
from nbdebug.tools.training.rules.findings import (
    at_line,
    finding,
    submodule,
    tested_fix,
    without_call,
    wrong_call,
)
from nbdebug.tools.training.static_facts import DetachedAt, InitialWeight, Parameter, StaticFacts, UnitsFact

HE_INIT = (
    "Start with outputs around zero: no negative biases, He initialization.",
    "torch.nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')  # of a new layer, never of a pretrained one\n"
    "torch.nn.init.zeros_(layer.bias)",
)
"""Title and code of a fix, as of the next two."""
GLOROT_INIT = (
    "Bring the inputs of the activation to a size of about one.",
    "torch.nn.init.xavier_uniform_(layer.weight)\ntorch.nn.init.zeros_(layer.bias)",
)

# -- parameters and initial weights ------------------------------------------------------------------------------------


ADAPTERS = re.compile(
    r"(^|[._])(lora|adapter|ia3|soft_prompt|prompt_embeddings|prompt_learner|prefix_encoder)", re.IGNORECASE
)
"""Names that libraries give to what is added to a frozen model in order to be trained."""
ENOUGH = 200
"""Elements from which on values tell whether they are those of an initialization."""
TIMES = 3.0
"""Deviation of a weight over that of He's scheme (SageMaker Debugger: ten times the variance). torch's own
initialization is at 0.41, Glorot's at about 0.7, a trained layer's rarely above 2."""
PADDED = 0.3
"""Share of the time steps that are padding at the end."""
SMALL = 0.1
"""… and below this part of it a signal fades by ten in each layer."""
FLAT = 0.9
"""Share of the steps whose gradient is exactly zero."""
FADED = 1e-3
"""Size of the signal at the last layer over that at the first, without normalization."""
SURPRISED = 3.0
"""Loss at the start over that of guessing (TheDeepChecker allows twice)."""


@rule(
    code="training/frozen-parameters",
    title="Parameters are frozen that were meant to be trained, or trained that were meant to be frozen.",
    symptom="The loss falls a little, as if only a part of the model learned; after training, an adapter's second "
    "factor is still all zeros, or a new head still has its initial values.",
    cause="`requires_grad` was set to False after the part was added (the whole model has to be frozen first, then the "
    "part is added), or a pattern of names froze more than was meant. An optimizer does not complain about a frozen "
    "parameter. Or nothing is frozen: `module.requires_grad = False` only sets an attribute of the module.",
    confirm="`[n for n, p in model.named_parameters() if not p.requires_grad]`",
    fix="Freeze with `module.requires_grad_(False)`. "
    "Freeze first and add the new part afterwards, or unfreeze it: `p.requires_grad_(True)` for its parameters, "
    "before the optimizer is created.",
    reference="https://github.com/huggingface/transformers/issues/26098",
)
def frozen_parameters(facts: TrainingFacts) -> Finding | None:
    static = facts.static
    if static.never_frozen is not None:
        return _never_frozen(*static.never_frozen)
    fix = Fix("Leave padding_idx out, or give padding a number of its own.", "nn.Embedding(rows, width)")
    title = "Row {0} of a table is padding_idx{line}: it is zero and never learns, and {1} of the samples have it"
    if silent := wrong_call(static, "silent row", "frozen-parameters", title, ["padding_idx"], fix):
        return silent
    why, frozen = _frozen(static)
    if not frozen:
        return None
    names = [p.name for p in frozen]
    trained = sum(p.elements for p in static.parameters if p.trained)
    total = sum(p.elements for p in static.parameters)
    return finding(
        "frozen-parameters",
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} frozen: {why}",
        names,
        [_unfreeze(names)],
        module=frozen[0].module,
        evidence={
            "frozen": names[:20],
            "trained elements": f"{trained:,} of {total:,}",
            "held by the optimizer": f"{sum(bool(p.held) for p in frozen)} of {len(frozen)}",
            "only zeros": [p.name for p in frozen if p.zero] or None,
        },
    )


def _never_frozen(names: tuple[str, ...], where: Where) -> Finding:
    owner = names[0].rpartition(".")[0]
    part = next((o for o in (owner.partition(".")[0], owner) if all(n.startswith(f"{o}.") for n in names)), "")
    return finding(
        "frozen-parameters",
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} trained, though a line was to freeze them"
        f"{at_line(where)}: it has no effect on parameters",
        [part, *names, "requires_grad", "optimizer"],
        [
            Fix(
                "Freeze with the method, which reaches each parameter.",
                f"{submodule(part)}.requires_grad_(False)",
            )
        ],
        place=where,
        module=part,
        evidence={"trained": list(names[:20])},
    )


def _frozen(static: StaticFacts) -> tuple[str, list[Parameter]]:
    """(why they should be trained, the parameters). A part frozen on purpose gives none of these reasons."""
    used = [p for p in static.parameters if p.used and not p.trained and p.registered]
    if used and not static.trained:
        return "no parameter of the model requires a gradient, so nothing can learn", used
    multiplied = {w.name for w in static.weights}  # a first hidden state of zeros is none, and no fault
    fresh = [p for p in used if p.fresh and not p.normal]
    if fresh and static.trained and all(p.reached and p.gradient == 0 for p in static.trained):
        return "they still have random initial values, and no parameter that is trained has an effect on the loss", used
    zeros = [p for p in used if p.zero and p.dims > 1 and p.name in multiplied]
    if zeros:
        modules = {p.module for p in zeros}
        return (
            f"`{zeros[0].name}` holds nothing but zeros, which do not come from training, so its part of the model "
            "does nothing and never will",
            [p for p in used if p.module in modules],
        )
    added = [p for p in static.parameters if ADAPTERS.search(p.name)]
    idle = [p for p in added if p in used and (p.held or p.fresh)]
    if idle and not any(p.trained for p in added):
        held = "the optimizer holds them" if any(p.held for p in idle) else "they still have their initial values"
        return (f"by their names they were added in order to be trained, {held}, and none of them is trained"), [
            p for p in added if p in used
        ]
    last = [p for p in used if p.last and not p.normal]
    before = [p for p in static.parameters if p.used and p.dims > 1 and p.name.endswith("weight") and not p.last]
    learned = any(p.elements >= ENOUGH and not p.fresh and not p.normal for p in before)
    if any(p.fresh for p in last) and static.trained and (learned or any(p.held for p in last)):
        how = "layers before it have learned" if learned else "the optimizer holds it"
        return f"the output layer still has its random initial values, and {how}", last
    return "", []


def _unfreeze(names: Sequence[str]) -> Fix:
    """By a part of the name that all have: that of an adapter, or else their module."""
    part = next((w for w in ("lora_", "adapter", "prompt") if all(w in name.lower() for name in names)), "")
    part = part or names[0].rpartition(".")[0] or names[0]
    return Fix(
        "Unfreeze them before the optimizer is created. If they are frozen on purpose, take them out of the optimizer.",
        f"for name, p in model.named_parameters():\n    if {part!r} in name:\n        p.requires_grad_(True)",
    )


@rule(
    code="training/detached-graph",
    title="The graph is cut between the parameters and the loss.",
    symptom="The loss falls somewhat and stops. Some parameters are the same before and after training, though they "
    "require gradients and the optimizer holds them; their `.grad` is None.",
    cause="`.detach()`, `.data`, `torch.no_grad()`, `torch.tensor(t)`, `.numpy()` or an op without a derivative "
    "(argmax, round) is between them and the loss. The values pass, the gradient does not. Or the loss of a part is "
    "overwritten by that of the next; or a normalization over a single number lets nothing pass.",
    confirm="After `loss.backward()`: `[n for n, p in model.named_parameters() if p.grad is None]`",
    fix="Remove the cut. Where it is meant (a target, a teacher), leave these parameters out of the optimizer and call "
    "`requires_grad_(False)` on them.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.Tensor.detach.html",
)
def detached_graph(facts: TrainingFacts) -> Finding | None:
    title = "`{op}` normalizes single numbers{line}, in {sizes}: each less its own mean is 0, and no input passes"
    fix = Fix(
        "Leave it out, or normalize over several numbers.", "nn.Identity()  # or LayerNorm(width), behind a layer"
    )
    if alone := wrong_call(facts.static, "normalized alone", "detached-graph", title, ["forward"], fix):
        return alone
    severed = () if facts.run is None or facts.run.severed is None else (facts.run.severed,)
    trained = {layer.name for layer in facts.run.layers if layer.gradient} if facts.run is not None else set()
    own = (d for d in facts.static.detached if d.how != "dropped" or d.parameters[0].rpartition(".")[0] not in trained)
    places = (*(d for d in own if d.how != "mask"), *severed)
    if not places:
        return None
    cut = places[0]
    names = list(cut.parameters)
    one = len(names) == 1
    reason, title, code = {
        "no_grad": (
            f"`{cut.op}` runs under torch.no_grad()",
            "Compute it outside of torch.no_grad().",
            f"with torch.enable_grad():\n    {(cut.where.text or '...').strip()}",
        ),
        "detach": (
            f"`{cut.op}` cuts the graph",
            "Remove the detach.",
            without_call(cut.where.text, cut.op) or f"# without {cut.op}",
        ),
        "checkpoint": (
            "a reentrant checkpoint, none of whose inputs requires a gradient, runs its layers without autograd",
            "Use the form that is not reentrant.",
            "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        ),
        "left torch": (
            f"`{cut.op}` takes the values out of torch",
            "Stay in torch: do the same with torch's own functions.",
            "# torch's own functions: no .numpy(), float() or .item() on the way",
        ),
        "dropped": (
            f"what `{cut.op}` gives is overwritten, or never added to the loss",
            "Add up the losses of all parts.",
            "loss = loss + part  # in a loop: loss += part",
        ),
        "drawn": (
            "`.sample()` of a distribution passes no gradient to its parameters",
            "Draw with rsample(), which computes the number from the distribution's parameters.",
            (cut.where.text or "z = distribution.sample()").strip().replace(".sample(", ".rsample("),
        ),
        "number": (
            f"`{cut.op}` comes into the loss by its numbers alone, and has no loss of its own",
            "Add a loss that trains it, such as the critic's distance from the returns.",
            f"loss = policy_loss + 0.5 * (returns - {cut.op}).square().mean()",
        ),
        "cancels": (
            f"`{cut.op}` gives the same, whatever the weights before it are",
            "Take the other operand as a constant, as it was when the data were collected; let a softmax or a "
            "normalization run over a dimension with more than one entry.",
            "ratio = torch.exp(log_prob - stored_log_prob)  # scores.softmax(dim=1), of more than one column",
        ),
        "backward": (
            f"`{cut.op}` gives zeros for whatever gradient it gets",
            "Let the gradient pass where the values lie: compare its mask with the values that come in.",
            "return grad * (x.abs() <= 1)  # a straight-through estimate, for x from -1 to 1",
        ),
        "no graph": (
            f"`{cut.op}` without create_graph=True gives constants",
            "Keep the graph of the gradient.",
            "torch.autograd.grad(output, x, …, create_graph=True)",
        ),
    }.get(
        cut.how,
        (
            f"`{cut.op}` has a derivative of zero" if cut.how == "flat" else f"`{cut.op}` has no derivative",
            "Use a function that has a derivative (softmax for argmax, a straight-through estimate for round).",
            "soft = scores.softmax(-1)\nhard = (scores == scores.amax(-1, keepdim=True)).float()\n"
            "chosen = hard + soft - soft.detach()  # the value of the one, the gradient of the other",
        ),
    )
    cut_off, trained_ones = [name for d in places for name in d.parameters], len(facts.static.trained)
    what = "anything but zeros" if cut.how in ("flat", "cancels", "backward") else "a gradient"
    if places == severed and cut.how not in ("cancels", "dropped", "number"):
        what = "the gradient of this part of the loss"
    return finding(
        "detached-graph",
        f"{reason}{at_line(cut.where)}: {listed(names)} never get{'s' if one else ''} {what}"
        + f", though the loss depends on {'it' if one else 'them'}" * (cut.how not in ("dropped", "cancels")),
        [
            *names,
            "forward",
            "loss_fn",
            *([cut.how] if cut.how in ("checkpoint", "backward") else []),
            cut.op.partition(".")[0],
        ],
        [Fix(title, code)],
        place=cut.where,
        evidence={
            "cut by": cut.op,
            "without gradient": cut_off[:20],
            "trained parameters cut off": f"{len(cut_off)}" + (f" of {trained_ones}" if trained_ones else ""),
        },
    )


@rule(
    code="training/inverted-mask",
    title="The padding mask is the wrong way round.",
    symptom="What depends on single tokens is learned, what depends on several is not, or nothing is; the loss stops.",
    cause="In `key_padding_mask` True hides a place, in `scaled_dot_product_attention` it shows one, and a tokenizer's "
    "attention_mask is 1 at real tokens. Turned round, attention sees the padding alone.",
    confirm="Change a real token of one row in eval mode: the outputs of its other tokens must change.",
    fix="Invert the mask: `~mask`.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html",
)
def inverted_mask(facts: TrainingFacts) -> Finding | None:
    place = next((cut for cut in facts.static.detached if cut.how == "mask"), None)
    return None if place is None else _inverted(place)


@rule(
    code="training/shifted-twice",
    title="The labels are shifted twice: each output is to predict the token after the next.",
    symptom="A language model's loss falls, and stays far above that of others; it writes every second word.",
    cause="The data set gives labels that are one place on, and the loss (or the model, as those of transformers do) "
    "moves them on once more.",
    confirm="Print one row of the inputs beside the targets that the loss compares: `inputs[0, 1]` is `targets[0, 0]`.",
    fix="Shift once: give the labels as they stand to what shifts them itself, or leave out its shift.",
    reference="https://huggingface.co/docs/transformers/model_doc/gpt2",
)
def shifted_twice(facts: TrainingFacts) -> Finding | None:
    ahead = facts.static.ahead
    if ahead is None or not ahead.twice:
        return None
    return finding(
        "shifted-twice",
        "The targets are the inputs two places on, and the model reads forwards only: each output is to predict the "
        f"token after the next{at_line(ahead.where)}",
        ["loss_fn", "target", "train_loader"],
        [Fix("Shift once.", "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # labels: one place on")],
        place=ahead.where,
    )


@rule(
    code="training/wrong-softmax-dim",
    title="Attention weights sum to 1 along another dimension than they are used along.",
    symptom="The model learns, but less than it should; in a causal model the loss may be better than it can be, since "
    "each weight depends on later queries.",
    cause="The softmax of the scores runs over the queries, the heads or the samples, and not over the keys, which the "
    "product with the values adds up.",
    confirm="`weights.sum(-1)` is 1 everywhere.",
    fix="`scores.softmax(dim=-1)`, where the keys are the last dimension.",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
)
def wrong_softmax_dim(facts: TrainingFacts) -> Finding | None:
    title = "`{op}` of attention scores runs over dimension {}{line}, and the product with the values over dimension {}"
    fix = Fix("Let the weights of each query sum to 1.", "weights = scores.softmax(dim=-1)")
    return wrong_call(facts.static, "other axis", "wrong-softmax-dim", title, ["forward"], fix)


@rule(
    code="training/parameters-not-in-optimizer",
    title="The optimizer does not hold parameters that the loss depends on.",
    symptom="The loss falls less than it should, or not at all. Gradients are there, and some weights never move.",
    cause="A part was added after the optimizer was created; only a part was passed to it; `model.parameters()` sees "
    "neither layers in a plain list nor a tensor that is no nn.Parameter; or the cell that creates the model ran "
    "again, and the optimizer still holds the old model's tensors.",
    confirm="`held = {id(p) for g in optimizer.param_groups for p in g['params']}`, then "
    "`[n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]`",
    fix="Create the optimizer last, from `model.parameters()`; keep layers in `nn.ModuleList`. If they are meant to "
    "stay as they are, call `requires_grad_(False)` on them: it saves their share of the backward too.",
    reference="https://github.com/pytorch/pytorch/issues/14467",
)
def parameters_not_in_optimizer(facts: TrainingFacts) -> Finding | None:
    static = facts.static
    if facts.run is not None and facts.run.unheld:
        return _model_not_held(facts.run, static)
    reached = [p for p in static.parameters if p.trained and p.reached]
    plain = [p for p in reached if p.plain and p.held is False and not (p.outside and facts.run is None)]
    unregistered = [p for p in reached if not p.registered and not p.held and not p.plain]
    if unregistered or plain:
        return _unregistered(unregistered or plain, facts.run)
    missing = [p for p in reached if p.held is False and not p.plain]
    if not missing:
        return None
    names = [p.name for p in missing]
    if static.foreign is not None and static.foreign.alike:
        title = (
            f"The optimizer holds {count(static.foreign.count, 'tensor')} of another model, and not {listed(names)}: "
            "the model was created again after the optimizer"
        )
        fixes = [Fix("Create the optimizer again, after the model.", f"optimizer = torch.optim.{_optimizer(static)}")]
    else:
        trained = len([p for p in static.trained if p.registered])
        title = (
            f"{len(names)} of {count(trained, 'trained parameter')} {'is' if len(names) == 1 else 'are'} in no "
            f"optimizer and never change{'s' if len(names) == 1 else ''}: {listed(names)}"
        )
        fixes = [Fix("Pass all of them to the optimizer.", f"optimizer = torch.optim.{_optimizer(static, missing)}")]
        own = [p for p in missing if not p.outside]
        if own:
            code = "\n".join(f"model.get_parameter({p.name!r}).requires_grad_(False)" for p in own[:3])
            fixes.append(Fix("If they are meant to stay as they are, freeze them: the backward is faster then.", code))
    elements = sum(p.elements for p in missing), sum(p.elements for p in static.trained)
    return finding(
        "parameters-not-in-optimizer",
        title,
        [*names, "optimizer"],
        fixes,
        module=missing[0].module,
        evidence={"missing": names[:20], "elements not held": f"{elements[0]:,} of {elements[1]:,}"},
    )


def _model_not_held(run: TrainingRunFacts, static: StaticFacts) -> Finding:
    name, elements = next(iter(run.unheld.items()))
    what, fix = "keeps its random initial values: no optimizer that steps", "Pass them to the one that is to train it."
    code = f"torch.optim.Adam({name}.parameters(), lr=…)"
    if any(p.name.startswith(f"{name}.") and not p.trained for p in static.parameters):
        what = "never changes: it was frozen when the optimizer was made, and unfrozen later; no optimizer"
        fix = "Make the optimizer of all parameters (frozen ones stay as they are), or add them as you unfreeze them."
        code = f'optimizer.add_param_group({{"params": model.{name}.parameters()}})'
    title, blamed = f"`{name}` gets gradients and {what} holds its parameters", [name, "optimizer"]
    evidence, fixes = {"missing": list(run.unheld), "elements not held": f"{elements:,}"}, [Fix(fix, code)]
    return finding("parameters-not-in-optimizer", title, blamed, fixes, run=run, module=name, evidence=evidence)


def _optimizer(static: StaticFacts, missing: Sequence[Parameter] = ()) -> str:
    """The user's own optimizer over all parameters, including those that the loss function has itself."""
    code = static.optimizer or "Adam(model.parameters(), lr=…)"
    owners = dict.fromkeys(p.name.partition(".")[0] for p in missing if p.outside)
    everything = "".join(f", *{owner}.parameters()" for owner in owners)
    return code.replace("model.parameters()", f"[*model.parameters(){everything}]") if owners else code


def _unregistered(found: list[Parameter], run: TrainingRunFacts | None) -> Finding:
    """Layers in a plain list, tuple or dict; tensors of the model, or variables, that are no nn.Parameter."""
    names, plain, passes = [p.name for p in found], found[0].plain, 0 if run is None else run.backwards
    parts = names[0].split(".")
    end = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    path = names[0] if plain else ".".join(parts[:end]) or names[0]
    key = path.rpartition(".")[2]
    if plain:
        why = "what is no part of the model" if found[0].outside else "a tensor that is no nn.Parameter"
        title = f"No optimizer holds {listed(names)}, though they get gradients: model.parameters() leaves out {why}"
        title += f"; {count(passes, 'backward pass', 'backward passes')} left it as it was" * (passes > 0)
        fix = Fix("Make it an nn.Parameter.", f"self.{key} = nn.Parameter({key}.detach())")
        if found[0].outside:
            fix = Fix("Give it to the optimizer.", f'optimizer.add_param_group({{"params": [{key}]}})')
    else:
        title = f"`{path}` is a plain Python container, so model.parameters() does not give its "
        title += f"{count(len(names), 'parameter')} ({listed(names, 2)}): no optimizer holds them"
        fix = Fix("Keep the layers where the model can see them.", f"self.{path} = nn.ModuleList({key})")
    evidence = {"missing": names[:20], "elements not held": f"{sum(p.elements for p in found):,}"}
    return finding("parameters-not-in-optimizer", title, [path, *names, "optimizer"], [fix], evidence=evidence)


@rule(
    code="training/bad-init",
    title="The initial weights keep the model from learning.",
    symptom="The loss starts far above guessing, or stays there; units of a layer stay copies of one another; the "
    "signal fades or grows from layer to layer.",
    cause="Weights drawn too large or too small for the layer's width, the same value in all, or zeros in two layers "
    "that follow each other, so that neither ever gets a gradient.",
    confirm="`w.std() * (w[0].numel() / 2) ** 0.5` is about 0.4 to 1.5 for each weight; `(w == w[:1]).all()` is False.",
    fix="`nn.init.kaiming_normal_(w, nonlinearity='relu')` for ReLU, `nn.init.xavier_uniform_(w)` for tanh; biases "
    "zero; zeros at most in the last layer of a branch.",
    reference="https://arxiv.org/abs/1502.01852",
)
def bad_init(facts: TrainingFacts) -> Finding | None:
    static = facts.static
    if not static.weights:
        return None
    for fault in (_copies, _zeros, _too_large, _too_small):
        title, weights = fault(static)
        if weights:
            return finding(
                "bad-init",
                title,
                [*(w.module or w.name for w in weights), *(w.name for w in weights)],
                [_drawn(weights) if fault is _zeros else _smaller(weights)],
                module=weights[0].module,
                evidence={
                    "deviation over He's": {w.name: w.std / w.he_std for w in static.weights[:8]},
                    "loss at the start": static.loss,
                    "loss of guessing": _guess(static),
                },
            )
    return None


def _smaller(weights: Sequence[InitialWeight]) -> Fix:
    if weights[0].op != "embedding":
        return Fix("Draw the weights for the layer's width.", HE_INIT[1])
    code = f"torch.nn.init.normal_(model.get_parameter({weights[0].name!r}), std={figures(weights[0].he_std, 1)})"
    return Fix("Draw the rows of each table so small that a product of two is about 1.", code)


def _drawn(weights: Sequence[InitialWeight]) -> Fix:
    """The first of the two factors of an adapter, for instance: what is frozen beside it stays."""
    return Fix(
        "Draw the first of them at random; zeros are right in the last factor of a branch alone.",
        "\n".join(f"torch.nn.init.kaiming_uniform_(model.get_parameter({w.name!r}), a=5**0.5)" for w in weights[:4]),
    )


def _layers(weights: Sequence[InitialWeight]) -> str:
    return listed(w.module or w.name for w in weights)


def _guess(static: StaticFacts) -> float | None:
    return next((call.guess for call in static.loss_calls if call.guess), None)


def _copies(static: StaticFacts) -> tuple[str, Sequence[InitialWeight]]:
    same = [w for w in static.weights if w.symmetric and w.hidden and w.trained]
    return (
        f"All units of {_layers(same)} have the same weights and get the same gradient: they stay copies of one "
        "another, and the layer counts as a single unit",
        same,
    )


def _zeros(static: StaticFacts) -> tuple[str, Sequence[InitialWeight]]:
    """Of two matrices of zeros, the second of which is fed by the first, the first, though others learn; or all, where
    none does. A head of zeros behind a branch that ends in zeros is fed by more than the branch: it has a gradient."""
    trained = [w for w in static.weights if w.trained and w.gradient is not None]
    zero = [w for w in trained if w.constant and w.std == w.gradient == 0]
    fed = [(a, b) for a, b in pairwise(zero) if a.output_rms == b.input_rms == 0 and b.op != "embedding"]
    if fed:
        pairs = [f"{_layers(pair)} begin as zeros" for pair in fed[:2]]
        why = "each is a factor of the other's gradient: that of both is exactly zero, and stays so"
        return f"{', '.join(pairs)}{' …' * (len(fed) > 2)}, and {why}", [one for one, _ in fed]
    zero, stuck = [w for w in zero if w.hidden], len(trained) > 1 and all(w.gradient == 0 for w in trained)
    return (
        f"Every weight gets a gradient of exactly zero: all values of {_layers(zero)} are the same, and no gradient "
        "passes",
        zero if stuck else [],
    )


def _too_large(static: StaticFacts) -> tuple[str, Sequence[InitialWeight]]:
    large = [w for w in static.weights if w.trained and w.std > TIMES * w.he_std]
    guess, loss = _guess(static), static.loss
    regression = any(call.op == "mse_loss" for call in static.loss_calls)
    if not large or guess is None or loss is None or regression or loss <= SURPRISED * guess:
        return "", []  # where they only saturate an activation, that is the cause to name
    worst = max(large, key=lambda w: w.std / w.he_std)
    return (
        f"The weights of {_layers(large)} start {worst.std / worst.he_std:.0f} times as large as their width allows "
        f"(deviation {figures(worst.std)}, He's scheme {figures(worst.he_std)}): the loss starts at {figures(loss)}, "
        f"and guessing gives {figures(guess)}",
        large,
    )


def _too_small(static: StaticFacts) -> tuple[str, Sequence[InitialWeight]]:
    small = [w for w in static.weights if w.trained and 0 < w.std < SMALL * w.he_std]
    first, last = static.weights[0].input_rms, static.weights[-1].input_rms
    if len(small) < 2 or not (first > 0 and last < FADED * first) or static.normalized:
        return "", []
    worst = min(small, key=lambda w: w.std / w.he_std)
    return (
        f"The weights of {_layers(small)} start {worst.he_std / worst.std:.0f} times smaller than their width allows: "
        f"the signal fades from {figures(first)} at the first layer to {figures(last)} at the last",
        small,
    )


# -- single layers -----------------------------------------------------------------------------------------------------


WHOLE = 0.98
"""A layer in which no unit is alive passes no gradient; no experiment is needed to tell."""


@rule(
    code="training/dead-relu",
    title="A layer is dead: its units are zero for every sample.",
    symptom="The model predicts the same for every sample; the loss stays where a constant prediction leaves it; most "
    "gradients are exactly zero.",
    cause="A ReLU whose input is negative for every sample passes no gradient, so its weights never change again. A "
    "large negative bias does it at the start, a step that was too long does it later.",
    confirm="`(activation > 0).any(0).float().mean()` over some batches is the share of units that are alive.",
    fix="Initialize biases with zero and weights with He initialization; lower the learning rate where units die "
    "during training; or use LeakyReLU or GELU, which keep a slope.",
    reference="https://arxiv.org/abs/1903.06733",
)
def dead_relu(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is None:
        return _dead_before_training(facts.static)
    if not signs.flat_units_matter(run):
        return None
    early = bool(signs.dead(run.start_units))
    places = signs.dead(run.start_units) or signs.dead(run.end_units)
    if signs.units_died(run) and signs.lower_rate_helps(run):
        return None  # the learning rate killed it
    experiment = signs.rescaling(run)
    if signs.units_died(run) and not any(n.startswith("lr/") for n in run.experiments) and not signs.helps(experiment):
        return None  # nothing tells what killed it
    if not places or not (max(p.dead or 0.0 for p in places) >= WHOLE or signs.helps(experiment)):
        return None
    first = places[0]
    layer, share = first.layer or first.module, percent(first.dead or 0.0)
    title = (
        f"`{layer}` is dead {'from the start' if early else 'at the end of the run'}: {share} of its {first.units} "
        "units are zero after the ReLU for every sample"
    )
    if not early:
        before = next((u.dead for u in run.start_units if (u.module, u.op) == (first.module, first.op)), None)
        title += f" ({percent(before) if before else 'none'} of them at the start: the others died during training)"
    return finding(
        "dead-relu",
        title,
        _names(places),
        [tested_fix(*HE_INIT, experiment)],
        run=run,
        chain=[
            f"{share} of the units after `{layer}` are zero for every sample",
            "they pass no gradient, so the layers before them are not trained",
            _loss_stays(run),
        ],
        evidence=_by_layer(places, "dead"),
    )


def _dead_before_training(static: StaticFacts) -> Finding | None:
    """Over several batches, so that next to no gradient comes through."""
    dead = [u for u in static.units if (u.dead or 0.0) >= signs.DEAD and u.units > 1]
    if not dead:
        return None
    first = dead[0]
    layer = first.layer or first.module
    silent = [p.name for p in static.trained if p.reached and p.gradient == 0.0]
    title = (
        f"`{layer}` is dead before training begins: {percent(first.dead or 0.0)} of the {first.units} units after its "
        f"{first.op} are zero for every sample"
    )
    return finding(
        "dead-relu",
        title,
        _names(dead),
        [Fix(*HE_INIT)],
        chain=[title, f"no gradient passes: that of {listed(silent)} is exactly zero"] if silent else [],
        module=layer,
        evidence={
            "dead by layer": {u.layer or u.module: u.dead for u in dead},
            "without gradient": silent[:12] or None,
        },
    )


def _names(places: list[UnitsFact]) -> list[str]:
    return [name for place in places for name in (place.layer, place.module)]


def _by_layer(places: list[UnitsFact], what: str) -> dict[str, object]:
    return {f"{what}, by layer": {f"{p.layer or p.module} ({p.op})": getattr(p, what) for p in places[:8]}}


def _loss_stays(run: TrainingRunFacts) -> str:
    return f"the loss stays at {figures(signs.last_loss(run))} (first: {figures(signs.first_loss(run))})"


@rule(
    code="training/saturated-activation",
    title="A layer's activations are saturated.",
    symptom="The loss hardly moves; layers before the activation get gradients near zero, layers after it learn.",
    cause="Beyond ±3 the slope of tanh, beyond ±6 that of a sigmoid is below a hundredth of its maximum. Inputs or "
    "weights that are too large push values there at the start; a step that was too long does it later.",
    confirm="Plot a histogram of the activation: it piles up at -1 and 1 (tanh) or at 0 and 1 (sigmoid).",
    fix="Scale the inputs to about one, use Glorot initialization, normalize before the activation, or use ReLU.",
    reference="https://proceedings.mlr.press/v9/glorot10a.html",
)
def saturated_activation(facts: TrainingFacts) -> Finding | None:
    run, when = facts.run, "before training begins"
    if run is None:
        places = signs.saturated(facts.static.units)
    elif signs.flat_units_matter(run) and signs.helps(signs.rescaling(run)):
        early = signs.saturated(run.start_units)
        places, when = early or signs.saturated(run.end_units), "from the start" if early else "at the end of the run"
    else:
        return None
    if not places:
        return None
    first = places[0]
    layer, share = first.layer or first.module, percent(first.saturated or 0.0)
    chain = [
        f"{share} of the values of the {first.op} after `{layer}` are saturated",
        "it passes next to no gradient",
    ]
    return finding(
        "saturated-activation",
        f"`{layer}` saturates its {first.op} {when}: at {share} of the values the slope is below a hundredth of its "
        "maximum",
        _names(places),
        [Fix(*GLOROT_INIT) if run is None else tested_fix(*GLOROT_INIT, signs.rescaling(run))],
        run=run,
        module=layer,
        evidence={"saturated by layer": {u.layer or u.module: u.saturated for u in places}}
        if run is None
        else _by_layer(places, "saturated"),
        chain=[] if run is None else [*chain, _loss_stays(run)],
    )


@rule(
    code="training/vanishing-gradients",
    title="Gradients vanish before they reach the first layers.",
    symptom="The loss soon settles where predicting the mean of the targets leaves it; only the last layer's weights "
    "move.",
    cause="A sigmoid passes at most a quarter of the gradient, a tanh less than all of it: after several layers "
    "nothing is left. Weights that are too small, or a constant near zero behind an adapter, do the same; so does a "
    "loss that is flat where the model starts, as an IoU of boxes that don't meet.",
    confirm="Print the root mean square of each weight's gradient, from the last layer to the first: it shrinks by a "
    "factor in each.",
    fix="Use ReLU or GELU with He initialization, residual connections, or normalization between the layers.",
    reference="https://proceedings.mlr.press/v9/glorot10a.html",
)
def vanishing_gradients(facts: TrainingFacts) -> Finding | None:
    run = facts.run
    if run is not None and run.factor is not None and signs.helps(run.experiments.get("factor 1"), signs.MUCH_BETTER):
        return _scaled_down(run, run.factor)
    if run is None or not signs.learns_nothing(run) or signs.lower_rate_helps(run):
        return None
    norms = run.gradient_norms
    if len(norms) >= 20 and norms.count(0.0) > FLAT * len(norms) and signs.last_loss(run) > 0 and not signs.flat(run):
        return _flat_loss(run, facts.static.at_bound)
    experiment = run.experiments.get("relu")
    if run.optimizers > 1 and not signs.helps(experiment):
        return None  # the losses of adversaries need not fall
    weak = signs.vanishing(run, signs.VANISHES_SOMEWHAT if signs.helps(experiment) else signs.VANISHES)
    if not weak or facts.static.padding > PADDED:
        return _in_time(facts, run)
    strongest = max(run.layers, key=lambda layer: layer.first_gradient)
    times = strongest.first_gradient / weak[0].first_gradient
    title = (
        f"Gradients vanish on the way back: that of `{weak[0].name}` is {times:,.0f} times smaller than that of "
        f"`{strongest.name}`, and {_loss_stays(run)}"
    )
    squashing = any(units.saturated is not None for units in run.start_units)
    advice, code = "Draw the weights for the layers' width, or normalize between the layers.", HE_INIT[1]
    if squashing:
        advice = "Use ReLU with He initialization, or normalize between the layers."
        code = f"torch.nn.ReLU()  # in place of sigmoid and tanh\n{HE_INIT[1]}"
    fix = tested_fix(advice, code, experiment)
    return finding(
        "vanishing-gradients",
        title,
        [layer.name for layer in weak],
        [fix],
        run=run,
        evidence={
            "gradient, by layer": {layer.name: layer.first_gradient for layer in run.layers[:16]},
            "update over weight, by layer": {layer.name: layer.update for layer in run.layers[:16]},
        },
    )


def _scaled_down(run: TrainingRunFacts, small: SmallFactor) -> Finding:
    """A constant in the forward, such as alpha / rank of an adapter."""
    experiment, names = run.experiments["factor 1"], listed(small.parameters, 3)
    return finding(
        "vanishing-gradients",
        f"What {names} make is multiplied by {small.factor:g}{at_line(small.where)}, which leaves next to nothing of "
        f"it and of its gradient: the loss stays at {figures(experiment.end_as_is)}; without the factor the same steps "
        f"end at {figures(experiment.end_changed)}",
        [*small.parameters, small.where.module or "", "forward"],
        [
            tested_fix(
                "Let the factor be about 1 (an adapter's alpha of the size of its rank).", "scale = 1.0", experiment
            )
        ],
        run=run,
        place=small.where,
        evidence={"factor": small.factor},
    )


def _flat_loss(run: TrainingRunFacts, bound: Where | None) -> Finding:
    """Gradients of exactly zero, for all parameters. bound: the op whose bound all values were moved to."""
    zero, steps = run.gradient_norms.count(0.0), len(run.gradient_norms)
    advice = "Give the loss a slope there: GIoU for boxes that don't meet, no clamp of what is to be learned."
    fix = Fix(advice, "loss = torchvision.ops.generalized_box_iou_loss(boxes, targets).mean()")
    why = ""
    if bound is not None:
        why = f". `{bound.op}` moves all values to its bound{at_line(bound)}, where it has no slope"
        fix = Fix("Bound the output in evaluation alone, or by a function with a slope.", "output = output.sigmoid()")
    return finding(
        "vanishing-gradients",
        f"The loss has no slope where the model is: in {zero} of {count(steps, 'step')} the gradient of all parameters "
        f"is exactly zero, and {_loss_stays(run)}{why}",
        [
            *([bound.op or "", bound.module or "", "forward"] if bound is not None else []),
            "loss_fn",
            *run.stale.functions,
        ],
        [fix],
        run=run,
        place=bound or run.places.get("backward"),
        evidence={"steps with a gradient of zero": zero, "steps": steps},
    )


def _in_time(facts: TrainingFacts, run: TrainingRunFacts) -> Finding | None:
    """The same through the time steps of a sequence, where a network that sees all of them at once does learn."""
    gradient, reference = signs.vanishing_in_time(run), (run.reference or {}).get("train")
    loss = run.evaluations[-1].train if run.evaluations else None
    padding = facts.static.padding
    learned = reference is not None and loss is not None and reference < signs.MUCH_BETTER * loss
    if gradient is None or not (padding > PADDED or learned):
        return None
    title = (
        f"Gradients vanish on the way back through time: in `{gradient.module}` the gradient at the first of "
        f"{gradient.steps} time steps is {gradient.last / max(gradient.first, 1e-38):.1e} times smaller than at the "
        f"last, and {_loss_stays(run)}; "
    )
    if padding > PADDED:
        title += f"{percent(padding)} of the steps are padding at the end, which the last state has come through"
        advice = "Take the state after each sequence's own last step, or pack the sequences."
        fix = Fix(advice, "last = output[torch.arange(len(output)), lengths - 1]")
    else:
        title += f"a network that sees all time steps at once reaches {figures(reference or 0.0)}"
        fix = Fix(
            "Use a gated cell (GRU, LSTM), attention, or shorter sequences.",
            "torch.nn.GRU(...)  # in place of RNN",
            None,
            {"why not": "another cell changes more of the model than can be tried automatically"},
        )
    return finding(
        "vanishing-gradients",
        title,
        [gradient.module, *["padding"] * (padding > PADDED)],
        [fix],
        run=run,
        evidence={"gradient at the first time step": gradient.first, "at the last": gradient.last},
    )


def frozen_in_run(facts: TrainingFacts) -> Finding | None:
    """training/frozen-parameters, as a run shows it; the rule is declared beside what preflight sees of it."""
    run = facts.run
    if run is None or not run.frozen:
        return None
    if head := signs.frozen_head(facts):
        trained, owner = run.experiments[signs.HEAD_UNFROZEN], head[0].module
        return finding(
            "frozen-parameters",
            f"`{owner}`, the layer that makes the output, is frozen, and the layers before it are trained; "
            f"{_loss_stays(run)}",
            [f.name for f in head],
            [tested_fix("Train it.", f"{submodule(owner)}.requires_grad_(True)  # before the optimizer", trained)],
            module=owner,
            evidence={"frozen": [f.name for f in head], "trained elements": run.trained_elements},
        )
    if not signs.has_room(run):
        return None
    experiment, zeros = run.experiments.get("unfrozen"), [f for f in run.frozen if f.zero and f.dims > 1]
    matrices = [f for f in run.frozen if f.dims > 1]
    fresh = bool(matrices) and all(f.fresh for f in matrices)  # what has been trained is frozen on purpose
    held = ", and the optimizer holds them" * any(f.held for f in matrices)
    scaled = signs.helps(run.experiments.get("factor 1"), signs.MUCH_BETTER)  # what is trained is enough, without it
    if not zeros and not (fresh and not scaled and signs.helps(experiment)):
        return None
    owners = {f.module for f in zeros}
    blamed = [f.name for f in zeros] + [
        f.name for f in run.frozen if f not in zeros and (not zeros or f.module in owners)
    ]
    why = (
        f"`{zeros[0].name}` is frozen at zero, so that the part of the model that it belongs to does nothing"
        if zeros
        else f"{count(len(run.frozen), 'parameter')} with requires_grad=False (`{blamed[0]}` and others) still have "
        f"their random initial values{held}"
    )
    code = "\n".join(f"model.get_parameter({name!r}).requires_grad_(True)" for name in blamed[:4])
    return finding(
        "frozen-parameters",
        f"{why}; {_loss_stays(run)}",
        blamed,
        [tested_fix("Train them.", code, experiment)],
        run=run,
        evidence={
            "frozen": blamed[:12],
            "trained elements": run.trained_elements,
            "frozen elements": sum(f.elements for f in run.frozen),
        },
    )


def _inverted(cut: DetachedAt) -> Finding:
    names = list(cut.parameters)
    code, hides = ("mask = ~mask", "") if cut.op == "mask" else (f"{cut.op} = ~mask", ": True hides")
    return finding(
        "inverted-mask",
        f"The padding mask is the wrong way round{at_line(cut.where)}: {listed(names)} sees the padding alone, and no "
        "token",
        [*names, cut.op, "forward"],
        [Fix(f"Invert the mask{hides}.", code)],
        place=cut.where,
    )
