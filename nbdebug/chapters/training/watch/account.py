"""A watch in words: what the numbers of a run show, as a report. No torch.

What is sure is a finding: gradients that are not finite, layers that vanish with depth, dead units, a spike of the
loss. What may be well meant (clipping, a plateau, a gap) is a note with its number.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from nbdebug.chapters.training.watch import named, scaled
from nbdebug.chapters.training.watch.depth import against_itself, along, jumps
from nbdebug.chapters.training.watch.layers import courses, heat, levels
from nbdebug.finding import Finding, Report, RuledOut

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
    found = [*_gradients(watch), *scaled.findings(*_scales(watch)), *named.units(watch.units), *named.losses(verdicts)]
    facts = {"steps": watch.steps, "headline": _headline(watch, found, verdicts), "watch": picture(watch)}
    ruled_out = [r for r in (_no_bad(watch), _depth_is_even(watch), *_units_alive(watch)) if r]
    told = {f.title for f in found}
    notes = [
        *_steps_clipped(watch),
        *_strong(watch),
        *_jumps(watch),
        *_ratios(watch),
        *_zero(watch),
        *_odd(watch),
        *(v.said for v in verdicts if v.said not in told),
    ]
    return Report(QUESTION, tuple(found), tuple(ruled_out), tuple(_unchecked(watch)), tuple(notes), subject, facts)


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
            named.not_finite(
                {names.names[n]: tuple(seen) for n, seen in history.bad.items()},
                norms,
                history.measured,
                start[1] if start else None,
                loss,
            )
        ]
    if len(history.rows.items) < ENOUGH:
        return []
    seen = along(levels(names, history))
    if seen is not None:
        return [named.by_depth(seen)]
    fell = against_itself(courses(names, history))
    return [named.faded(fell)] if fell else []


# -- what is ruled out, and what is worth knowing ---------------------------------------------------------------------


def _no_bad(watch: Any) -> RuledOut | None:
    if watch.history.bad or not watch.history.measured or scaled.findings(*_scales(watch)):
        return None
    count = len(watch.history.seen)
    return RuledOut("NaN or infinite gradients", f"none in {watch.history.measured:,} steps of {count:,} parameters")


def _depth_is_even(watch: Any) -> RuledOut | None:
    known = [level for _, level in levels(watch.roster, watch.history) if level > 0 and math.isfinite(level)]
    if len(known) < 2 or along(levels(watch.roster, watch.history)):
        return None
    return RuledOut(
        "A gradient that vanishes or explodes with depth",
        f"the layers' gradients lie within a factor of {max(known) / min(known):,.0f} of each other",
    )


def _units_alive(watch: Any) -> list[RuledOut]:
    found = []
    for kind in ("dead", "saturated"):
        shares = [seen.share for seen in watch.units if seen.kind == kind]
        if shares and max(shares) < named.MANY:
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
    if start is None or start[0] <= named.STRONG * start[1] or watch.history.bad:
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
        [f"The gradient of {named.listed(names)} was exactly zero in every step: nothing in it is trained."]
        if names
        else []
    )


def _odd(watch: Any) -> list[str]:
    notes = []
    if unheld := watch.unheld:
        notes.append(f"No optimizer holds {named.listed(unheld)}, although gradients are asked for: not trained.")
    notes += scaled.notes(*_scales(watch))
    if watch.updates_full:
        notes.append("Updates are no longer measured: the device had no room for a copy of the weights.")
    few = [s for s in watch.units if named.MANY <= s.share < named.MOST]
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
    said += f": gradients not finite in {named.listed(bad)}." if bad else " so far." if watch.active else "."
    return Report(QUESTION, subject=subject, facts={"headline": said, "watch": drawn})


def picture(watch: Any, quick: bool = False, layers: str = "") -> dict[str, Any]:
    """What the views draw: norms of layers (those that match) over steps, totals and losses over steps. quick: of a
    long run not every step is looked at."""
    steps = watch.steps
    rows, losses = list(watch.history.rows.items), watch.told_losses(POINTS if quick else None)
    totals = [t for t in _thin(list(watch.history.totals.items), POINTS) if t.before is not None]
    return {
        **heat(watch.roster, _thin(rows, STEPS) if quick else rows, LAYERS, STEPS, layers),
        "totals": [[t.step, t.before, t.after] for t in totals],
        "clipped": [t.step for t in totals if t.clipped],
        "losses": _thin([[step, value] for step, value, _ in losses if value is not None], POINTS),
        "validation": [[step, val] for step, _, val in losses if val is not None][-POINTS:],
        "parameters": len(watch.history.seen),
        "steps seen": steps,
        **scaled.picture(watch.history.scales, POINTS),
    }


def _thin(items: list[Any], most: int) -> list[Any]:
    return items[:: -(-len(items) // most)] if len(items) > most else items
