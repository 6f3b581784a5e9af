"""The findings of a watch, each with its numbers and what to do. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.chapters.training.watch.depth import Depth
from nbdebug.chapters.training.watch.record import Verdict
from nbdebug.finding import Finding, Fix, Where

MANY = 0.2
"""A fifth of a layer's units is worth a word (torchdiag warns there)."""
MOST = 0.7
"""So many of a layer's units dead or saturated are a fault (AutoTrainer; SageMaker Debugger and torchdiag take half,
which narrow layers of healthy models reach)."""
GREW = 100.0
"""A norm that had grown so many times before it was infinite has exploded."""
STRONG = 10.0
"""Norm of all gradients over that of all weights, at the start. Healthy trainings have 0.05 to 3, with large targets 10
and more."""


def listed(names: Sequence[str], most: int = 3) -> str:
    """ "`a`, `b` and 4 more"."""
    said = ", ".join(f"`{name}`" for name in names[:most])
    return said + (f" and {len(names) - most} more" if len(names) > most else "")


def not_finite(
    bad: Mapping[str, tuple],
    norms: Sequence[tuple[int, float]],
    measured: int,
    weights: float | None = None,
    loss: float | None = None,
) -> Finding:
    """Gradients that are NaN or infinite. bad: by parameter its first bad step, how many, the value; weights: the norm
    of all weights at the start; loss: that of the first bad step."""
    first = min(step for step, _, _ in bad.values())
    there = [name for name, (step, _, _) in bad.items() if step == first]
    nan = any(math.isnan(bad[name][2]) for name in there)
    before = [norm for step, norm in norms if step < first and math.isfinite(norm)]
    usual = statistics.median(before) if before else 0.0
    grew = bool(before) and usual > 0 and max(before[-5:]) > GREW * usual
    strong = bool(before) and weights is not None and max(before[-5:]) > STRONG * weights
    said = f"From step {first} on the gradient of {listed(there)} is {'NaN' if nan else 'infinite'}"
    said += f", later also that of {len(bad) - len(there)} more" if len(bad) > len(there) else ""
    if grew:
        said += f"; the norm had grown from {usual:.3g} to {max(before[-5:]):.3g} before"
    elif strong and weights is not None:
        said += (
            f"; the norm of all gradients had been {max(before[-5:]):.3g} before, "
            f"{max(before[-5:]) / max(weights, 1e-12):,.0f} times that of the weights"
        )
    elif loss is not None:
        said += (
            ", though the loss of that step is finite: it goes wrong in the backward"
            if math.isfinite(loss)
            else f", and so is the loss ({loss}): it goes wrong in the forward"
        )
    table = [
        {"parameter": name, "first bad step": step, "bad steps": count, "value": str(value)}
        for name, (step, count, value) in sorted(bad.items(), key=lambda item: item[1][0])
    ]
    fixes: tuple[Fix, ...] = (Fix("Name the op that made it.", "%nan_trace step()  # or %guard on, before the loop"),)
    if grew or strong:
        fixes = (
            Fix(
                "Clip the gradients, and lower the learning rate.",
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            ),
            *fixes,
        )
    evidence = {"steps measured": measured, "norms before": before[-5:], "parameters": table, "where": there}
    phase = "forward" if loss is not None and not math.isfinite(loss) else "backward"
    return Finding(
        "training/exploding-gradients" if grew or strong else "nan/not-located",
        said + ".",
        Where(step=first, phase=phase, module=there[0].rpartition(".")[0]),
        evidence,
        fixes,
    )


def by_depth(seen: Depth) -> Finding:
    """The gradient vanishes or explodes towards the first layer."""
    times = f"10^{seen.decades:.0f}"
    vanishes = seen.kind == "vanishes"
    size = "smaller" if vanishes else "larger"
    said = (
        f"The gradient {seen.kind} with depth: from {seen.last:.1e} in the last layers to {seen.first:.1e} in the "
        f"first ({times} times {size}), most of it between `{seen.at[0]}` and `{seen.at[1]}`."
    )
    fix = (
        Fix(
            "Give it a way around each layer, and keep its size.",
            "nn.ReLU or nn.GELU in place of sigmoid or tanh; x = x + layer(norm(x)); nn.init.kaiming_normal_(w)",
        )
        if vanishes
        else Fix(
            "Start with smaller weights, normalise between the layers, and clip.",
            "nn.init.xavier_normal_(w); nn.LayerNorm(width) behind the layer; "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        )
    )
    return Finding(
        f"training/{'vanishing' if vanishes else 'exploding'}-gradients",
        said,
        Where(module=seen.layer),
        {
            "first layers": seen.first,
            "last layers": seen.last,
            "decades": seen.decades,
            "where": list(dict.fromkeys([seen.layer, *seen.at])),
        },
        (fix,),
    )


def faded(fell: Sequence[tuple[str, float]]) -> Finding:
    """Layers whose gradient has fallen against their own past, while the others' has not."""
    name, times = max(fell, key=lambda item: item[1])
    said = (
        f"The gradient of {listed([n for n, _ in fell])} is {times:,.0f} times smaller than it was, and that of "
        "the other layers is not."
    )
    return Finding(
        "training/vanishing-gradients",
        said,
        Where(module=name),
        {"times smaller": dict(fell), "where": [n for n, _ in fell]},
        (
            Fix(
                "Look at what stands between it and the loss: dead or saturated units, or weights near zero.",
                "watch.frame.query(f'name.str.startswith({name!r})')".replace("{name!r}", repr(name)),
            ),
        ),
    )


def units(seen: Sequence[Any]) -> list[Finding]:
    """Layers of which half of the units or more are dead or saturated: the worst of each kind, with the others in
    it."""
    found = []
    for kind, code in (("dead", "training/dead-relu"), ("saturated", "training/saturated-activation")):
        worst = sorted((s for s in seen if s.kind == kind and s.share >= MOST), key=lambda s: -s.share)
        if not worst:
            continue
        most = worst[0]
        what = "give zero for every sample" if kind == "dead" else "stand where their slope is under 1% of its largest"
        said = (
            f"{most.share:.0%} of the {most.units} units of `{most.module}` ({most.type}) {what}, in "
            f"{most.batches} batches one after another: no gradient comes through them."
        )
        fix = (
            Fix(
                "Lower the learning rate, and start with biases of zero; or let a little through.",
                "nn.LeakyReLU(0.01) in place of nn.ReLU()",
            )
            if kind == "dead"
            else Fix(
                "Keep what goes in small: normalise before it, and start with smaller weights.",
                "nn.LayerNorm(width) before the activation; nn.init.xavier_normal_(weight)",
            )
        )
        table = [{"module": s.module, "units": s.units, "share": s.share, "batches": s.batches} for s in worst]
        where = [name for s in worst for name in (s.module, s.feeds) if name]
        found.append(
            Finding(
                code, said, Where(module=most.module, module_type=most.type), {"layers": table, "where": where}, (fix,)
            )
        )
    return found


def losses(verdicts: Sequence[Verdict]) -> list[Finding]:
    """The verdicts on the loss that are faults for sure."""
    found = []
    for verdict in verdicts:
        where = Where(step=verdict.step)
        if verdict.kind == "spike":
            fix = Fix(
                "Look at the batch of that step; clip the gradients, or leave such a step out.",
                "nbdebug.guard(model, optimizer, max_grad_norm=1.0, skip_above=…)",
            )
            found.append(Finding("training/loss-spike", verdict.said, where, verdict.evidence, (fix,)))
        elif verdict.kind == "zero" and verdict.evidence.get("from the start"):
            fix = Fix(
                "Look at what the loss compares: one class only, all targets ignored, a mask of zeros?",
                "nbdebug.preflight(model, loader, loss_fn)",
            )
            found.append(Finding("training/zero-loss", verdict.said, where, verdict.evidence, (fix,)))
    return found
