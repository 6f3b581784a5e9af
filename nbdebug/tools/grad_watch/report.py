"""The report of a gradient watch: what its numbers show, in words and as a picture. No torch.

What is certain is a finding: gradients that are not finite or that vanish with depth, dead units, a spike of the loss.
What may be intended (clipping, a plateau, a gap) is a note with its number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.report import Finding, Fix, Plot, Report, RuledOut, Symptom, Where
from nbdebug.text import count, figures, listed, percent
from nbdebug.tools.grad_watch.history import (
    Depth,
    ScaleHistory,
    depth_trend,
    faded_layers,
    heatmap,
    jumps,
    layer_series,
    levels,
)
from nbdebug.verdict import Verdict, carried_scale, floor_note, floor_of, of_losses, smoothed_entropy

QUESTION = "grad_watch(model, optimizer)"
FIND_THE_OP = Fix(
    "Let the loop run under the tracer, with model and optimizer built again: it names the op that makes the value.",
    "%%nan_trace\n# the cell with the training loop; in a script: nbdebug.nan_trace(step)",
)
ENOUGH = 10
"""Fewer steps than these give no share and no trend."""
MANY = 0.2
"""Share of a layer's units that is worth a note (torchdiag warns there)."""
MOST = 0.7
"""Share of a layer's units, dead or saturated, that is a fault (AutoTrainer; SageMaker Debugger and torchdiag take
half, which narrow layers of healthy models reach)."""
GREW = 100.0
"""A norm that grew by this factor before it became infinite has exploded."""
STRONG = 10.0
"""Norm of all gradients over that of all weights, at the start. Healthy trainings have 0.05 to 3, with large targets 10
and more."""
LOW, HIGH = -4.0, -1.5
"""log10 of the update ratios of healthy trainings (TheDeepChecker: -4 to -1; measured on the real change, by a fifth
of a decade to half of one lower)."""
TOO_OFTEN = 0.5
"""Where more than this share of the steps is clipped, clipping sets the size of the steps and not the learning rate
(Google's tuning playbook)."""
LOWEST = 1.0
"""Below a scale of one the scaler makes gradients smaller than they are: float16 has no room even for the plain ones.
Healthy trainings hold 2^8 to 2^20 (measured); a loss that is a sum over the batch may come near one."""
OFTEN, AFTER, RECENT = 0.2, 30, 100
"""After its first successful step a scaler that grows every `growth_interval` steps (2,000) skips at most one step
for each time that it has grown. A fifth of the last 30 to 100 attempts, and twice what growing explains, is no search
for a scale any more: our choice."""
STEPS, LAYERS, POINTS = 120, 40, 400
"""The most columns, rows and points of the picture."""


def report(watch: Any, subject: str) -> Report:
    """The report of a watch, at any time."""
    floor, note = _floor(watch)
    verdicts = [v for v in watch.verdicts() if v.kind != "plateau" or v.evidence["level"] >= floor]
    findings = [
        *_gradients(watch),
        *scaler_findings(*_scales(watch)),
        *unit_findings(watch.units),
        *loss_findings(verdicts),
    ]
    findings.sort(key=lambda f: f.code != "precision/unscale-order")  # gradients that are too large follow from it
    ruled_out = [r for r in (_no_bad(watch), _depth_is_even(watch), *_units_alive(watch)) if r]
    symptoms = _symptoms(watch, floor)
    titles = {f.title for f in findings} | {symptom.what for symptom in symptoms}
    notes = [
        *_steps_clipped(watch),
        *_strong(watch),
        *_jumps(watch),
        *_ratios(watch),
        *_zero(watch),
        *note,
        *_other_notes(watch),
        *(v.said for v in verdicts if v.said not in titles),
    ]
    return Report(
        QUESTION,
        tuple(findings),
        tuple(ruled_out),
        tuple(_unchecked(watch)),
        tuple(notes),
        subject,
        headline=_headline(watch, findings),
        symptoms=symptoms,
        steps=watch.steps,
        plots=(Plot("gradients", picture(watch)),),
    )


def _symptoms(watch: Any, floor: float) -> list[Symptom]:
    """What is not well in the run so far, beside what a rule has named."""
    found = []
    if watch.fault or not watch.steps and not watch.active:
        found.append(Symptom(_headline(watch, []), "`%grad_watch on` starts a new watch."))
    run = of_losses(watch.losses, rates=watch.rates, several=watch.several, resumed=watch.resumed, at_floor=floor)
    return [*found, *run]


def _floor(watch: Any) -> tuple[float, list[str]]:
    """(the loss below which the run has come down to what smoothed labels leave, a note on it)."""
    share, classes = watch.smoothing
    if not classes:
        return 0.0, []
    lowest, near = floor_of(smoothed_entropy(share, classes), math.log(classes))
    end = statistics.median([loss for _, loss, _ in watch.losses if loss is not None][-20:])
    return near, [floor_note(lowest, share, classes, end if end < near else 0.0)]


def _headline(watch: Any, findings: list[Finding]) -> str:
    steps = count(watch.steps, "step")
    if watch.fault:
        return f"grad_watch stopped after {steps}, because of a fault of its own."
    if not watch.steps:
        return "No step has been watched yet." if watch.active else "No step was watched."
    return f"{steps} watched." if findings else f"{steps} watched: gradients finite in every layer."


def glance(watch: Any, subject: str, layers: str) -> Report:
    """The steps so far as a picture, and the numbers of these layers: what a live view can show without waiting."""
    bad = [watch.roster.names[n] for n in list(watch.history.bad)]
    data = {**picture(watch, watch.active, layers), "asked": layers.strip()}
    text = f"{count(data['steps seen'], 'step')} watched"
    text += f": gradients not finite in {listed(bad)}." if bad else " so far." if watch.active else "."
    symptoms = [Symptom(text)] * bool(bad)
    return Report(QUESTION, subject=subject, headline=text, symptoms=symptoms, plots=(Plot("gradients", data),))


def picture(watch: Any, quick: bool = False, layers: str = "") -> dict[str, Any]:
    """What the views draw: norms of layers (those that match) over steps, totals and losses over steps. quick: a
    long run is thinned out first."""
    steps = watch.steps
    rows, losses = list(watch.history.rows.items), watch.recorded_losses(POINTS if quick else None)
    totals = [t for t in _subsample(list(watch.history.totals.items), POINTS) if t.before is not None]
    return {
        **heatmap(watch.roster, _subsample(rows, STEPS) if quick else rows, LAYERS, STEPS, layers),
        "totals": [[t.step, t.before, t.after] for t in totals],
        "clipped": [t.step for t in totals if t.clipped],
        "losses": _subsample([[step, value] for step, value, _ in losses if value is not None], POINTS),
        "validation": [[step, val] for step, _, val in losses if val is not None][-POINTS:],
        "parameters": len(watch.history.measurements),
        "steps seen": steps,
        **scale_picture(watch.history.scales, POINTS),
    }


def _subsample(items: list[Any], most: int) -> list[Any]:
    return items[:: -(-len(items) // most)] if len(items) > most else items


# -- findings ---------------------------------------------------------------------------------------------------------


def _gradients(watch: Any) -> list[Finding]:
    """What is wrong with gradients: not finite, or fading with depth."""
    history, names = watch.history, watch.roster
    if history.bad:
        norms = [(t.step, t.before) for t in history.totals.items if t.before is not None]
        first = min(depth[0] for depth in history.bad.values())
        loss = next((t.loss for t in history.totals.items if t.step == first), None)
        start = _start(watch)
        return [
            nonfinite_gradients(
                {names.names[n]: tuple(depth) for n, depth in history.bad.items()},
                norms,
                history.measured,
                start[1] if start else None,
                loss,
            )
        ]
    if len(history.rows.items) < ENOUGH:
        return []
    depth = depth_trend(levels(names, history))
    if depth is not None:
        return [depth_finding(depth)]
    faded = faded_layers(layer_series(names, history))
    return [faded_finding(faded)] if faded else []


def _start(watch: Any) -> tuple[float, float] | None:
    """The norms of all gradients and of all weights in the first step in which both were measured."""
    row = next((r for r in watch.history.rows.items if r.weight is not None), None)
    if row is None or row.weight is None:
        return None
    pairs = [(g, w) for g, w in zip(row.before, row.weight) if math.isfinite(g) and math.isfinite(w)]
    return (math.hypot(*(g for g, _ in pairs)), math.hypot(*(w for _, w in pairs))) if pairs else None


def nonfinite_gradients(
    bad: Mapping[str, tuple],
    norms: Sequence[tuple[int, float]],
    measured: int,
    weights: float | None = None,
    loss: float | None = None,
) -> Finding:
    """Gradients that are NaN or infinite. bad: by parameter its first bad step, how many, the value; weights: the norm
    of all weights at the start; loss: that of the first bad step."""
    first = min(step for step, _, _ in bad.values())
    names = [name for name, (step, _, _) in bad.items() if step == first]
    nan = any(math.isnan(bad[name][2]) for name in names)
    before = [norm for step, norm in norms if step < first and math.isfinite(norm)]
    usual = statistics.median(before) if before else 0.0
    grew = bool(before) and usual > 0 and max(before[-5:]) > GREW * usual
    strong = bool(before) and weights is not None and max(before[-5:]) > STRONG * weights
    text = f"From step {first} on the gradient of {listed(names)} is {'NaN' if nan else 'infinite'}"
    text += f", later also that of {len(bad) - len(names)} others" if len(bad) > len(names) else ""
    if grew:
        text += f"; before that the norm had grown from {usual:.3g} to {max(before[-5:]):.3g}"
    elif strong and weights is not None:
        text += (
            f"; before that the norm of all gradients was {max(before[-5:]):.3g}, "
            f"{max(before[-5:]) / max(weights, 1e-12):,.0f} times that of the weights"
        )
    elif loss is not None:
        text += (
            ", though the loss of that step is finite: the error is in the backward"
            if math.isfinite(loss)
            else f", and the loss is {'NaN' if math.isnan(loss) else 'infinite'}: the error is in the forward"
        )
    table = [
        {"parameter": name, "first bad step": step, "bad steps": steps, "value": str(value)}
        for name, (step, steps, value) in sorted(bad.items(), key=lambda item: item[1][0])
    ]
    fixes: tuple[Fix, ...] = (FIND_THE_OP,)
    if grew or strong:
        fixes = (
            Fix(
                "Clip the gradients, and lower the learning rate.",
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            ),
            *fixes,
        )
    evidence = {"steps measured": measured, "norms before": before[-5:], "parameters": table, "where": names}
    phase = "forward" if loss is not None and not math.isfinite(loss) else "backward"
    return Finding(
        "training/exploding-gradients" if grew or strong else "nan/not-located",
        text + ".",
        Where(step=first, phase=phase, module=names[0].rpartition(".")[0]),
        evidence,
        fixes,
    )


def depth_finding(depth: Depth) -> Finding:
    """The gradient vanishes or explodes towards the first layer."""
    vanishes = depth.kind == "vanishes"
    size = "smaller" if vanishes else "larger"
    text = (
        f"The gradient {depth.kind} with depth: from {figures(depth.last, 2)} in the last layers to "
        f"{figures(depth.first, 2)} in the first ({figures(10**depth.decades, 2)} times {size}), "
        f"most of it between `{depth.at[0]}` and `{depth.at[1]}`."
    )
    fix = (
        Fix(
            "Add skip connections and normalisation, and use an activation that does not saturate.",
            "nn.ReLU or nn.GELU in place of sigmoid or tanh; x = x + layer(norm(x)); nn.init.kaiming_normal_(w)",
        )
        if vanishes
        else Fix(
            "Start with smaller weights, normalise between the layers, and clip.",
            "nn.init.xavier_normal_(w); nn.LayerNorm(width) after the layer; "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        )
    )
    return Finding(
        f"training/{'vanishing' if vanishes else 'exploding'}-gradients",
        text,
        Where(module=depth.layer),
        {
            "first layers": depth.first,
            "last layers": depth.last,
            "decades": depth.decades,
            "where": list(dict.fromkeys([depth.layer, *depth.at])),
        },
        (fix,),
    )


def faded_finding(faded: Sequence[tuple[str, float]]) -> Finding:
    """Layers whose gradient has fallen against their own past, while the others' has not."""
    name, times = max(faded, key=lambda item: item[1])
    text = (
        f"The gradient of {listed([n for n, _ in faded])} is {times:,.0f} times smaller than it was; those of the "
        "other layers are not."
    )
    return Finding(
        "training/vanishing-gradients",
        text,
        Where(module=name),
        {"times smaller": dict(faded), "where": [n for n, _ in faded]},
        (
            Fix(
                "Check the layers between it and the loss: dead or saturated units, or weights near zero.",
                "watch.frame.query(f'name.str.startswith({name!r})')".replace("{name!r}", repr(name)),
            ),
        ),
    )


def unit_findings(layers: Sequence[Any]) -> list[Finding]:
    """Layers of which half of the units or more are dead or saturated: the worst of each kind, with the others in
    it."""
    findings = []
    for kind, code in (("dead", "training/dead-relu"), ("saturated", "training/saturated-activation")):
        worst = sorted((s for s in layers if s.kind == kind and s.share >= MOST), key=lambda s: -s.share)
        if not worst:
            continue
        most = worst[0]
        what = "output zero for every sample" if kind == "dead" else "have a slope under 1% of the largest"
        text = (
            f"{most.share:.0%} of the {most.units} units of `{most.module}` ({most.type}) {what}, in "
            f"{count(most.batches, 'batch', 'batches')} in a row: no gradient passes through them."
        )
        fix = (
            Fix(
                "Lower the learning rate, and start with biases of zero; or use an activation with a slope below zero.",
                "nn.LeakyReLU(0.01) in place of nn.ReLU()",
            )
            if kind == "dead"
            else Fix(
                "Keep its inputs small: normalise before it, and start with smaller weights.",
                "nn.LayerNorm(width) before the activation; nn.init.xavier_normal_(weight)",
            )
        )
        table = [{"module": s.module, "units": s.units, "share": s.share, "batches": s.batches} for s in worst]
        where = [name for s in worst for name in (s.module, s.feeds) if name]
        findings.append(
            Finding(
                code, text, Where(module=most.module, module_type=most.type), {"layers": table, "where": where}, (fix,)
            )
        )
    return findings


def loss_findings(verdicts: Sequence[Verdict]) -> list[Finding]:
    """The verdicts on the loss that are certain faults."""
    findings = []
    for seen in verdicts:
        where = Where(step=seen.step)
        if seen.kind == "spike":
            fix = Fix(
                "Check the batch of that step; clip the gradients, or skip such a step.",
                "nbdebug.guard(model, optimizer, max_grad_norm=1.0, skip_above=…)",
            )
            findings.append(Finding("training/loss-spike", seen.said, where, seen.evidence, (fix,)))
        elif seen.kind == "zero" and seen.evidence.get("from the start"):
            fix = Fix(
                "Check what the loss compares: one class only, all targets ignored, a mask of zeros?",
                "nbdebug.preflight(model, loader, loss_fn)",
            )
            findings.append(Finding("training/zero-loss", seen.said, where, seen.evidence, (fix,)))
    return findings


# -- the scaler -------------------------------------------------------------------------------------------------------


def scaler_findings(scales: ScaleHistory, names: Sequence[str], layers: Sequence[str]) -> list[Finding]:
    """What is wrong with the scaler or with how it is used."""
    if scales.carried:
        return [carried_scale(len(scales.carried), *scales.carried[0])]
    if scales.clipped_early():
        return [_clipped_early(scales)]
    return [_collapsed(scales, names, layers)] if _gone_wrong(scales) else []


def _scales(watch: Any) -> tuple[Any, list[str], list[str]]:
    return watch.history.scales, watch.roster.names, watch.roster.layers


def _gone_wrong(scales: ScaleHistory) -> bool:
    recent = _recent(scales)
    explained = 1 + len(recent) / max(1, scales.growth or 2000)
    often = len(recent) >= AFTER and sum(recent) > max(OFTEN * len(recent), 2 * explained)
    return _collapses(scales) or often


def _collapses(scales: ScaleHistory) -> bool:
    """Whether the scale has fallen below one and is still there."""
    return scales.last < LOWEST <= scales.initial and scales.skipped > 0


def _recent(scales: ScaleHistory) -> list[bool]:
    """Of the last attempts since the first successful one, whether each was skipped."""
    return [skipped for _, _, skipped in scales.series.items[-min(scales.settled, RECENT) :]] if scales.settled else []


def _collapsed(scales: ScaleHistory, names: Sequence[str], layers: Sequence[str]) -> Finding:
    (layer, first, nan), recent = _worst_layer(scales, names, layers), _recent(scales)
    if _collapses(scales):
        text = (
            f"GradScaler's scale has collapsed from {scale_text(scales.initial)} to {scale_text(scales.last)}; "
            f"{scales.skipped:,} of {scales.attempts:,} steps were skipped"
        )
    else:
        text = (
            f"GradScaler keeps skipping steps: {sum(recent)} of the last {len(recent)}, {scales.skipped:,} of "
            f"all {scales.attempts:,}, at scales from {scale_text(scales.least)} to {scale_text(scales.most)}"
        )
    if layer:
        text += f". In {first:,} of them the gradient of `{layer}` is the first in the backward that is not finite" + (
            ", and it is NaN: no scale helps" if nan > first / 2 else ""
        )
    fixes = (
        FIND_THE_OP,
        Fix("Or find the modules that must stay in float32.", 'nbdebug.precision(model, batch, loss_fn, "float16")'),
        Fix("Or train in bfloat16, which has float32's range and needs no scaler.", "dtype=torch.bfloat16"),
    )
    evidence = {
        "where": [layer] if layer else ["scaler"],
        "scale at first": scales.initial,
        "lowest": scales.least,
        "last": scales.last,
        "steps": scales.attempts,
        "skipped": scales.skipped,
        "first not finite, by layer": _by_layer(scales, names, layers),
    }
    return Finding("nan/not-located", text + ".", Where(phase="backward", module=layer or None), evidence, fixes)


def _worst_layer(scales: ScaleHistory, names: Sequence[str], layers: Sequence[str]) -> tuple[str, int, int]:
    """The layer whose gradient was most often the first that was not finite: (layer, in how many steps, NaN in how
    many); ("", 0, 0) where none is known."""
    counts: dict[str, list[int]] = {}
    for number, steps in scales.first.items():
        entry = counts.setdefault(layers[number] or names[number], [0, 0])
        entry[0], entry[1] = entry[0] + steps, entry[1] + scales.nan[number]
    if not counts:
        return "", 0, 0
    layer = max(counts, key=lambda name: counts[name][0])
    return layer, counts[layer][0], counts[layer][1]


def _by_layer(scales: ScaleHistory, names: Sequence[str], layers: Sequence[str]) -> list[dict[str, Any]]:
    counts: dict[str, int] = {}
    for number, steps in scales.first.items():
        layer = layers[number] or names[number]
        counts[layer] = counts.get(layer, 0) + steps
    return [{"layer": layer, "steps": steps} for layer, steps in sorted(counts.items(), key=lambda c: -c[1])[:10]]


def _clipped_early(scales: ScaleHistory) -> Finding:
    before, after = (statistics.median(pair[side] for pair in scales.early) for side in (0, 1))
    scale = scales.last
    text = (
        f"Gradients are clipped before they are unscaled: from a norm of {before * scale:.3g} to "
        f"{after * scale:.3g} while they carry the scale {scale_text(scale)}, in {scales.early_steps:,} of "
        f"{count(scales.checked, 'step')}; the norm that reaches the optimizer is {after:.3g}."
    )
    fix = Fix(
        "Unscale first, then clip.",
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
        f"torch.nn.utils.clip_grad_norm_(model.parameters(), {after * scale:.3g})\nscaler.step(optimizer)\n"
        "scaler.update()",
    )
    return Finding(
        "training/clip-before-unscale",
        text,
        Where(phase="backward"),
        {
            "where": ["clip_grad_norm_", "unscale_"],
            "norm before clipping": before * scale,
            "norm after": after * scale,
            "scale": scale,
            "steps": scales.checked,
            "clipped too early": scales.early_steps,
        },
        (fix,),
    )


def scale_notes(scales: ScaleHistory, names: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The scaler in one sentence, where there is one."""
    if not scales.attempts:
        return []
    course = (
        f"{scale_text(scales.initial)} → {scale_text(scales.last)}"
        if scales.initial != scales.last
        else f"{scale_text(scales.last)} throughout"
    )
    if scales.initial == scales.last and scales.least != scales.most:
        course = f"{scale_text(scales.last)}, between {scale_text(scales.least)} and {scale_text(scales.most)}"
    text = f"GradScaler: scale {course}; {scales.skipped:,} of {scales.attempts:,} steps skipped"
    layer, first, _ = _worst_layer(scales, names, layers)
    if layer:
        share = "all" if first == scales.skipped else f"{first:,}"
        text += f"; `{layer}` overflowed first" + f" in {share} of them" * (scales.skipped > 1)
    return [text + (": normal while it looks for its scale." if scales.skipped and not _gone_wrong(scales) else ".")]


def scale_text(scale: float) -> str:
    """A scale as people write it: 65536, 0.5, 2^40."""
    mantissa, power = math.frexp(scale)
    return f"2^{power - 1}" if mantissa == 0.5 and not -4 <= power <= 20 else f"{scale:g}"


def scale_picture(scales: ScaleHistory, most: int) -> dict[str, Any]:
    """The scale over steps, where it has changed or a step was skipped: [step, scale], and the skipped steps."""
    if not scales.skipped and scales.least >= scales.most:
        return {}
    known = scales.series.items
    thinned = known[:: -(-len(known) // most)] if len(known) > most else known
    return {
        "scale": [[step, scale] for step, scale, _ in thinned],
        "skipped": [step for step, _, skipped in known if skipped][-most:],
    }


# -- ruled out, notes, not checked ------------------------------------------------------------------------------------


def _no_bad(watch: Any) -> RuledOut | None:
    if watch.history.bad or not watch.history.measured or scaler_findings(*_scales(watch)):
        return None
    because = (
        f"none in {count(watch.history.measured, 'step')} of {count(len(watch.history.measurements), 'parameter')}"
    )
    return RuledOut("NaN or infinite gradients", because)


def _depth_is_even(watch: Any) -> RuledOut | None:
    known = [level for _, level in levels(watch.roster, watch.history) if level > 0 and math.isfinite(level)]
    if len(known) < 2 or depth_trend(levels(watch.roster, watch.history)):
        return None
    return RuledOut(
        "A gradient that vanishes or explodes with depth",
        f"the layers' gradients lie within a factor of {max(known) / min(known):,.0f} of each other",
    )


def _units_alive(watch: Any) -> list[RuledOut]:
    ruled_out = []
    for kind in ("dead", "saturated"):
        shares = [layer.share for layer in watch.units if layer.kind == kind]
        if shares and max(shares) < MANY:
            ruled_out.append(RuledOut(f"{kind.capitalize()} units", f"at most {max(shares):.0%} of a layer's are"))
    return ruled_out


def _steps_clipped(watch: Any) -> list[str]:
    clipped, measured = watch.history.clipped, watch.history.measured
    if not clipped or watch.history.scales.clipped_early():
        return []
    share = clipped / measured
    totals = [t for t in watch.history.totals.items if t.clipped]
    cut = statistics.median(t.after / t.before for t in totals) if totals else 1.0
    text = f"{clipped:,} of {measured:,} steps ({share:.0%}) were clipped, typically to {percent(cut)} of their norm."
    if measured >= ENOUGH and share > TOO_OFTEN:
        norms = sorted(t.before for t in watch.history.totals.items if t.before is not None and math.isfinite(t.before))
        ninth = norms[int(0.9 * (len(norms) - 1))]
        text += (
            " Then clipping sets the size of the steps, not the learning rate: lower the rate, or clip at "
            f"{ninth:.3g}; the norm of nine in ten steps is below it."
        )
    return [text]


def _strong(watch: Any) -> list[str]:
    start = _start(watch)
    if start is None or start[0] <= STRONG * start[1] or watch.history.bad:
        return []
    return [
        f"At the start the norm of all gradients is {start[0]:.3g}, {start[0] / max(start[1], 1e-12):,.0f} times "
        "that of the weights: inputs or targets are too large, or gradients grow in the backward "
        "(nbdebug.diagnose says which)."
    ]


def _jumps(watch: Any) -> list[str]:
    spikes = jumps([(t.step, t.before) for t in watch.history.totals.items if t.before is not None and not t.skipped])
    if not spikes:
        return []
    step, times = max(spikes, key=lambda jump: jump[1])
    more = f"; it was over 10 times in {count(len(spikes) - 1, 'more step')}" if len(spikes) > 1 else ""
    return [f"In step {step} the norm of all gradients was {times:,.0f} times its median of the 20 steps before{more}."]


def _ratios(watch: Any) -> list[str]:
    ratios = {
        n: math.log10(ratio)
        for n, ratio in watch.history.medians(5, "ratio").items()
        if ratio > 0 and watch.roster.matrix[n]
    }
    if not ratios:
        return []
    middle = statistics.median(ratios.values())
    text = (
        f"A step typically changes a weight by {percent(10**middle)} of its norm "
        f"(healthy trainings: {percent(10**LOW)} to {percent(10**HIGH)})"
    )
    worst = max(ratios, key=lambda n: abs(ratios[n] - (LOW + HIGH) / 2))
    outside = not LOW <= ratios[worst] <= HIGH
    return [
        text
        + (f"; `{watch.roster.names[worst]}` by {percent(10 ** ratios[worst])}." if outside else ", in every layer.")
    ]


def _zero(watch: Any) -> list[str]:
    history = watch.history
    names = [watch.roster.names[n] for n, zeros in history.zero.items() if history.measurements[n] == zeros >= ENOUGH]
    return [f"The gradient of {listed(names)} was exactly zero in every step: not trained."] if names else []


def _other_notes(watch: Any) -> list[str]:
    notes = []
    if unheld := watch.unheld:
        notes.append(f"No optimizer has {listed(unheld)}, although `requires_grad` is set: not trained.")
    notes += scale_notes(*_scales(watch))
    if watch.updates_full:
        notes.append("Updates are no longer measured: the device had no memory for a copy of the weights.")
    few = [s for s in watch.units if MANY <= s.share < MOST]
    notes += [f"{s.share:.0%} of the units of `{s.module}` are {s.kind}." for s in few[:3]]
    return notes + ([f"The live view has stopped: {watch.live_fault}."] if watch.live_fault else [])


def _unchecked(watch: Any) -> list[str]:
    text = [f"Everything after an error in grad_watch itself ({watch.fault}); please report it."] if watch.fault else []
    if watch.units_why_not:
        text.append(f"Dead and saturated units: {watch.units_why_not}.")
    if watch.odd:
        text.append(f"{count(watch.odd, 'parameter')} without a norm (quantised, lazy or wrapped).")
    if not watch.losses:
        text.append("The loss over steps: no loss was recorded; `watch.loss(step, value)` records one.")
    return text
