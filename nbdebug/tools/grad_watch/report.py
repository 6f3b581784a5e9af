"""A watch in words: what the numbers of a run show, as a report. No torch.

What is sure is a finding: gradients that are not finite, layers that vanish with depth, dead units, a spike of the
loss. What may be well meant (clipping, a plateau, a gap) is a note with its number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nbdebug.report import Finding, Fix, Plot, Report, RuledOut, Where
from nbdebug.text import listed
from nbdebug.tools.grad_watch.history import ScaleHistory
from nbdebug.tools.grad_watch.layers import Depth, depth_trend, faded_layers, heatmap, jumps, layer_series, levels
from nbdebug.tools.grad_watch.loss_analysis import Verdict

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


def depth_finding(seen: Depth) -> Finding:
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


def faded_finding(fell: Sequence[tuple[str, float]]) -> Finding:
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


def unit_findings(seen: Sequence[Any]) -> list[Finding]:
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


def loss_findings(verdicts: Sequence[Verdict]) -> list[Finding]:
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


LOWEST = 1.0
"""Below a scale of one the scaler makes gradients smaller than they are: float16 has no room even for the plain ones.
Healthy trainings hold 2^8 to 2^20 (seen); a loss that is a sum over the batch may come near one."""
OFTEN, AFTER, RECENT = 0.2, 30, 100
"""From the first step that was made on, a scaler that grows every `growth_interval` steps (2,000) leaves out one of
them at most for each time that it has grown. A fifth of the last 30 to 100 attempts, and twice what growing explains,
is no search for a scale any more: our choice."""


def scale_text(scale: float) -> str:
    """A scale as people write it: 65536, 0.5, 2^40."""
    mantissa, power = math.frexp(scale)
    return f"2^{power - 1}" if mantissa == 0.5 and not -4 <= power <= 20 else f"{scale:g}"


def _worst_layer(scales: ScaleHistory, names: Sequence[str], layers: Sequence[str]) -> tuple[str, int, int]:
    """The layer whose gradient was most often the first that was not finite: (layer, in how many steps, NaN in how
    many); ("", 0, 0) where none is known."""
    counts: dict[str, list[int]] = {}
    for number, count in scales.first.items():
        seen = counts.setdefault(layers[number] or names[number], [0, 0])
        seen[0], seen[1] = seen[0] + count, seen[1] + scales.nan[number]
    if not counts:
        return "", 0, 0
    layer = max(counts, key=lambda name: counts[name][0])
    return layer, counts[layer][0], counts[layer][1]


def scale_notes(scales: ScaleHistory, names: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The scaler in a line, where there is one."""
    if not scales.attempts:
        return []
    course = (
        f"{scale_text(scales.begun)} → {scale_text(scales.last)}"
        if scales.begun != scales.last
        else f"{scale_text(scales.last)} throughout"
    )
    if scales.begun == scales.last and scales.least != scales.most:
        course = f"{scale_text(scales.last)}, between {scale_text(scales.least)} and {scale_text(scales.most)}"
    said = f"GradScaler: scale {course}; {scales.skipped:,} of {scales.attempts:,} steps skipped"
    layer, count, _ = _worst_layer(scales, names, layers)
    if layer:
        share = "all" if count == scales.skipped else f"{count:,}"
        said += f"; `{layer}` overflowed first" + f" in {share} of them" * (scales.skipped > 1)
    return [said + (": normal while it seeks its scale." if scales.skipped and not _gone_wrong(scales) else ".")]


def scaler_findings(scales: ScaleHistory, names: Sequence[str], layers: Sequence[str]) -> list[Finding]:
    """What is wrong with the scaler or with how it is used."""
    if scales.clipped_early():
        return [_clipped_early(scales)]
    return [_collapsed(scales, names, layers)] if _gone_wrong(scales) else []


def _collapses(scales: ScaleHistory) -> bool:
    """Whether the scale has fallen below one by itself, and stays there."""
    return scales.last < LOWEST <= scales.begun and scales.skipped > 0


def _recent(scales: ScaleHistory) -> list[bool]:
    """The last attempts since the first step that was made: whether each was left out."""
    return [skipped for _, _, skipped in scales.course.items[-min(scales.settled, RECENT) :]] if scales.settled else []


def _gone_wrong(scales: ScaleHistory) -> bool:
    recent = _recent(scales)
    explained = 1 + len(recent) / max(1, scales.growth or 2000)
    often = len(recent) >= AFTER and sum(recent) > max(OFTEN * len(recent), 2 * explained)
    return _collapses(scales) or often


def _collapsed(scales: ScaleHistory, names: Sequence[str], layers: Sequence[str]) -> Finding:
    (layer, count, nan), recent = _worst_layer(scales, names, layers), _recent(scales)
    if _collapses(scales):
        said = (
            f"GradScaler's scale has collapsed from {scale_text(scales.begun)} to {scale_text(scales.last)}; "
            f"{scales.skipped:,} of {scales.attempts:,} steps were skipped"
        )
    else:
        said = (
            f"GradScaler keeps leaving steps out: {sum(recent)} of the last {len(recent)}, {scales.skipped:,} of "
            f"all {scales.attempts:,}, at scales from {scale_text(scales.least)} to {scale_text(scales.most)}"
        )
    if layer:
        said += f". The gradient of `{layer}` is the first that is not finite on the way back, in {count:,} of them" + (
            ", and it is NaN: no scale helps" if nan > count / 2 else ""
        )
    fixes = (
        Fix("Name the op that makes it.", "%nan_trace step()"),
        Fix("Or the modules that must stay in float32.", 'nbdebug.precision(model, batch, loss_fn, "float16")'),
        Fix("Or train in bfloat16, which has float32's range and needs no scaler.", "dtype=torch.bfloat16"),
    )
    evidence = {
        "where": [layer] if layer else ["scaler"],
        "scale at first": scales.begun,
        "lowest": scales.least,
        "last": scales.last,
        "steps": scales.attempts,
        "skipped": scales.skipped,
        "first not finite, by layer": _by_layer(scales, names, layers),
    }
    return Finding("nan/not-located", said + ".", Where(phase="backward", module=layer or None), evidence, fixes)


def _by_layer(scales: ScaleHistory, names: Sequence[str], layers: Sequence[str]) -> list[dict[str, Any]]:
    counts: dict[str, int] = {}
    for number, count in scales.first.items():
        layer = layers[number] or names[number]
        counts[layer] = counts.get(layer, 0) + count
    return [{"layer": layer, "steps": count} for layer, count in sorted(counts.items(), key=lambda c: -c[1])[:10]]


def _clipped_early(scales: ScaleHistory) -> Finding:
    before, after = (statistics.median(pair[side] for pair in scales.early) for side in (0, 1))
    scale = scales.last
    said = (
        f"Gradients are clipped before they are unscaled: from a norm of {before * scale:.3g} to "
        f"{after * scale:.3g} while they carry the scale {scale_text(scale)}, in {scales.early_steps:,} of "
        f"{scales.looked:,} steps; what the optimizer gets has norm {after:.3g}."
    )
    fix = Fix(
        "Unscale first, then clip.",
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
        f"torch.nn.utils.clip_grad_norm_(model.parameters(), {after * scale:.3g})\nscaler.step(optimizer)\n"
        "scaler.update()",
    )
    return Finding(
        "training/clip-before-unscale",
        said,
        Where(phase="backward"),
        {
            "where": ["clip_grad_norm_", "unscale_"],
            "norm before clipping": before * scale,
            "norm after": after * scale,
            "scale": scale,
            "steps": scales.looked,
            "clipped too early": scales.early_steps,
        },
        (fix,),
    )


def scale_picture(scales: ScaleHistory, most: int) -> dict[str, Any]:
    """The scale over steps, where it has moved or a step was left out: [step, scale], and the steps left out."""
    if not scales.skipped and scales.least >= scales.most:
        return {}
    known = scales.course.items
    thinned = known[:: -(-len(known) // most)] if len(known) > most else known
    return {
        "scale": [[step, scale] for step, scale, _ in thinned],
        "skipped": [step for step, _, skipped in known if skipped][-most:],
    }


QUESTION = "grad_watch(model, optimizer)"
TOO_OFTEN = 0.5
"""Where more than this share of the steps is clipped, clipping sets the size of the steps and not the learning rate
(Google's tuning playbook)."""
ENOUGH = 10
"""Steps before a share says anything."""
LOW, HIGH = -4.0, -1.5
"""log10 of the update ratios of healthy trainings (TheDeepChecker: -4 to -1; measured on the real change, by a fifth
of a decade to half of one lower)."""
STEPS, LAYERS, POINTS = 120, 40, 400
"""The most columns, rows and points of the picture."""


def report(watch: Any, subject: str) -> Report:
    """The report of a watch, at any time."""
    verdicts = watch.verdicts()
    found = [
        *_gradients(watch),
        *scaler_findings(*_scales(watch)),
        *unit_findings(watch.units),
        *loss_findings(verdicts),
    ]
    ruled_out = [r for r in (_no_bad(watch), _depth_is_even(watch), *_units_alive(watch)) if r]
    told = {f.title for f in found}
    notes = [
        *_steps_clipped(watch),
        *_strong(watch),
        *_jumps(watch),
        *_ratios(watch),
        *_zero(watch),
        *_other_notes(watch),
        *(v.said for v in verdicts if v.said not in told),
    ]
    return Report(
        QUESTION,
        tuple(found),
        tuple(ruled_out),
        tuple(_unchecked(watch)),
        tuple(notes),
        subject,
        headline=_headline(watch, found, verdicts),
        steps=watch.steps,
        plots=(Plot("gradients", picture(watch)),),
    )


def _headline(watch: Any, found: list[Finding], verdicts: Any) -> str:
    counted = f"{watch.steps:,} step{'s' * (watch.steps != 1)} watched"
    if watch.fault:
        return f"grad_watch stopped after {watch.steps:,} steps, because of a fault of its own."
    if not watch.steps:
        return "No step has been watched yet." if watch.active else "No step was watched."
    if found:
        return f"{counted}."
    urgent = [v.said for v in verdicts if v.kind in ("nan", "zero", "divergence", "spike", "oscillation")]
    return f"{counted}. {urgent[0]}" if urgent else f"{counted}: gradients finite in every layer."


# -- findings ---------------------------------------------------------------------------------------------------------


def _gradients(watch: Any) -> list[Finding]:
    """What is wrong with gradients: not finite, or fading with depth."""
    history, names = watch.history, watch.roster
    if history.bad:
        norms = [(t.step, t.before) for t in history.totals.items if t.before is not None]
        first = min(seen[0] for seen in history.bad.values())
        loss = next((t.loss for t in history.totals.items if t.step == first), None)
        start = _start(watch)
        return [
            nonfinite_gradients(
                {names.names[n]: tuple(seen) for n, seen in history.bad.items()},
                norms,
                history.measured,
                start[1] if start else None,
                loss,
            )
        ]
    if len(history.rows.items) < ENOUGH:
        return []
    seen = depth_trend(levels(names, history))
    if seen is not None:
        return [depth_finding(seen)]
    fell = faded_layers(layer_series(names, history))
    return [faded_finding(fell)] if fell else []


# -- what is ruled out, and what is worth knowing ---------------------------------------------------------------------


def _no_bad(watch: Any) -> RuledOut | None:
    if watch.history.bad or not watch.history.measured or scaler_findings(*_scales(watch)):
        return None
    count = len(watch.history.seen)
    return RuledOut("NaN or infinite gradients", f"none in {watch.history.measured:,} steps of {count:,} parameters")


def _depth_is_even(watch: Any) -> RuledOut | None:
    known = [level for _, level in levels(watch.roster, watch.history) if level > 0 and math.isfinite(level)]
    if len(known) < 2 or depth_trend(levels(watch.roster, watch.history)):
        return None
    return RuledOut(
        "A gradient that vanishes or explodes with depth",
        f"the layers' gradients lie within a factor of {max(known) / min(known):,.0f} of each other",
    )


def _units_alive(watch: Any) -> list[RuledOut]:
    found = []
    for kind in ("dead", "saturated"):
        shares = [seen.share for seen in watch.units if seen.kind == kind]
        if shares and max(shares) < MANY:
            found.append(RuledOut(f"{kind.capitalize()} units", f"at most {max(shares):.0%} of a layer's are"))
    return found


def _steps_clipped(watch: Any) -> list[str]:
    clipped, measured = watch.history.clipped, watch.history.measured
    if not clipped or watch.history.scales.clipped_early():
        return []
    share = clipped / measured
    totals = [t for t in watch.history.totals.items if t.clipped]
    cut = statistics.median(t.after / t.before for t in totals) if totals else 1.0
    said = f"{clipped:,} of {measured:,} steps ({share:.0%}) were clipped, typically to {cut:.2g} of their norm."
    if measured >= ENOUGH and share > TOO_OFTEN:
        norms = sorted(t.before for t in watch.history.totals.items if t.before is not None and math.isfinite(t.before))
        ninth = norms[int(0.9 * (len(norms) - 1))]
        said += (
            " Clipping then sets the size of the steps, not the learning rate: lower the rate, or clip at "
            f"{ninth:.3g}, the norm that nine in ten steps stay below."
        )
    return [said]


def _start(watch: Any) -> tuple[float, float] | None:
    """The norms of all gradients and of all weights in the first step in which both were measured."""
    row = next((r for r in watch.history.rows.items if r.weight is not None), None)
    if row is None or row.weight is None:
        return None
    pairs = [(g, w) for g, w in zip(row.before, row.weight) if math.isfinite(g) and math.isfinite(w)]
    return (math.hypot(*(g for g, _ in pairs)), math.hypot(*(w for _, w in pairs))) if pairs else None


def _strong(watch: Any) -> list[str]:
    start = _start(watch)
    if start is None or start[0] <= STRONG * start[1] or watch.history.bad:
        return []
    return [
        f"At the start the norm of all gradients is {start[0]:.3g}, {start[0] / max(start[1], 1e-12):,.0f} times "
        "that of the weights: inputs or targets are out of scale, or gradients grow on their way back "
        "(nbdebug.diagnose tells which)."
    ]


def _jumps(watch: Any) -> list[str]:
    found = jumps([(t.step, t.before) for t in watch.history.totals.items if t.before is not None and not t.skipped])
    if not found:
        return []
    step, times = max(found, key=lambda jump: jump[1])
    more = f", and in {len(found) - 1} more over 10 times" if len(found) > 1 else ""
    return [f"The norm of all gradients was {times:,.0f} times its median of the 20 steps before in step {step}{more}."]


def _ratios(watch: Any) -> list[str]:
    ratios = {
        n: math.log10(ratio)
        for n, ratio in watch.history.medians(5, "ratio").items()
        if ratio > 0 and watch.roster.matrix[n]
    }
    if not ratios:
        return []
    middle = statistics.median(ratios.values())
    said = (
        f"A step typically moves a weight by 10^{middle:.1f} of its norm (healthy trainings: 10^{LOW:g} to 10^{HIGH:g})"
    )
    worst = max(ratios, key=lambda n: abs(ratios[n] - (LOW + HIGH) / 2))
    far = not LOW <= ratios[worst] <= HIGH
    return [said + (f"; `{watch.roster.names[worst]}` by 10^{ratios[worst]:.1f}." if far else ", every layer alike.")]


def _zero(watch: Any) -> list[str]:
    history = watch.history
    names = [watch.roster.names[n] for n, count in history.zero.items() if count == history.seen[n] and count >= ENOUGH]
    return (
        [f"The gradient of {listed(names)} was exactly zero in every step: nothing in it is trained."] if names else []
    )


def _other_notes(watch: Any) -> list[str]:
    notes = []
    if unheld := watch.unheld:
        notes.append(f"No optimizer holds {listed(unheld)}, although gradients are asked for: not trained.")
    notes += scale_notes(*_scales(watch))
    if watch.updates_full:
        notes.append("Updates are no longer measured: the device had no room for a copy of the weights.")
    few = [s for s in watch.units if MANY <= s.share < MOST]
    notes += [f"{s.share:.0%} of the units of `{s.module}` are {s.kind}." for s in few[:3]]
    return notes + ([f"The live view has stopped: {watch.live_fault}."] if watch.live_fault else [])


def _scales(watch: Any) -> tuple[Any, list[str], list[str]]:
    return watch.history.scales, watch.roster.names, watch.roster.layers


def _unchecked(watch: Any) -> list[str]:
    said = [f"Everything after a fault of grad_watch's own ({watch.fault}); please report it."] if watch.fault else []
    if watch.units_why_not:
        said.append(f"Dead and saturated units: {watch.units_why_not}.")
    if watch.odd:
        said.append(f"{watch.odd} parameters of kinds that have no norm (quantised, lazy or wrapped ones).")
    if not watch.losses:
        said.append("The course of the loss: none was seen; `watch.loss(step, value)` tells it.")
    return said


# -- the picture ------------------------------------------------------------------------------------------------------


def glance(watch: Any, subject: str, layers: str) -> Report:
    """The steps so far as a picture, and the layers asked for in numbers: what a live view can show without waiting."""
    bad = [watch.roster.names[n] for n in list(watch.history.bad)]
    drawn = {**picture(watch, watch.active, layers), "asked": layers.strip()}
    steps = drawn["steps seen"]
    said = f"{steps:,} step{'s' * (steps != 1)} watched"
    said += f": gradients not finite in {listed(bad)}." if bad else " so far." if watch.active else "."
    return Report(QUESTION, subject=subject, headline=said, plots=(Plot("gradients", drawn),))


def picture(watch: Any, quick: bool = False, layers: str = "") -> dict[str, Any]:
    """What the views draw: norms of layers (those that match) over steps, totals and losses over steps. quick: of a
    long run not every step is looked at."""
    steps = watch.steps
    rows, losses = list(watch.history.rows.items), watch.told_losses(POINTS if quick else None)
    totals = [t for t in _subsample(list(watch.history.totals.items), POINTS) if t.before is not None]
    return {
        **heatmap(watch.roster, _subsample(rows, STEPS) if quick else rows, LAYERS, STEPS, layers),
        "totals": [[t.step, t.before, t.after] for t in totals],
        "clipped": [t.step for t in totals if t.clipped],
        "losses": _subsample([[step, value] for step, value, _ in losses if value is not None], POINTS),
        "validation": [[step, val] for step, _, val in losses if val is not None][-POINTS:],
        "parameters": len(watch.history.seen),
        "steps seen": steps,
        **scale_picture(watch.history.scales, POINTS),
    }


def _subsample(items: list[Any], most: int) -> list[Any]:
    return items[:: -(-len(items) // most)] if len(items) > most else items
