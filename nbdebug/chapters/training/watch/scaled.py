"""A GradScaler over time in words: what is normal as a note, what is not as a finding. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from nbdebug.chapters.training.watch.scales import Scales
from nbdebug.finding import Finding, Fix, Where

LOWEST = 1.0
"""Below a scale of one the scaler makes gradients smaller than they are: float16 has no room even for the plain ones.
Healthy trainings hold 2^8 to 2^20 (seen); a loss that is a sum over the batch may come near one."""
OFTEN, AFTER, RECENT = 0.2, 30, 100
"""From the first step that was made on, a scaler that grows every `growth_interval` steps (2,000) leaves out one of
them at most for each time that it has grown. A fifth of the last 30 to 100 attempts, and twice what growing explains,
is no search for a scale any more: our choice."""


def size(scale: float) -> str:
    """A scale as people write it: 65536, 0.5, 2^40."""
    mantissa, power = math.frexp(scale)
    return f"2^{power - 1}" if mantissa == 0.5 and not -4 <= power <= 20 else f"{scale:g}"


def _who(scales: Scales, names: Sequence[str], layers: Sequence[str]) -> tuple[str, int, int]:
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


def notes(scales: Scales, names: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The scaler in a line, where there is one."""
    if not scales.attempts:
        return []
    course = (
        f"{size(scales.begun)} → {size(scales.last)}"
        if scales.begun != scales.last
        else f"{size(scales.last)} throughout"
    )
    if scales.begun == scales.last and scales.least != scales.most:
        course = f"{size(scales.last)}, between {size(scales.least)} and {size(scales.most)}"
    said = f"GradScaler: scale {course}; {scales.skipped:,} of {scales.attempts:,} steps skipped"
    layer, count, _ = _who(scales, names, layers)
    if layer:
        share = "all" if count == scales.skipped else f"{count:,}"
        said += f"; `{layer}` overflowed first" + f" in {share} of them" * (scales.skipped > 1)
    return [said + (": normal while it seeks its scale." if scales.skipped and not _gone_wrong(scales) else ".")]


def findings(scales: Scales, names: Sequence[str], layers: Sequence[str]) -> list[Finding]:
    """What is wrong with the scaler or with how it is used."""
    if scales.clipped_early():
        return [_clipped_early(scales)]
    return [_collapsed(scales, names, layers)] if _gone_wrong(scales) else []


def _collapses(scales: Scales) -> bool:
    """Whether the scale has fallen below one by itself, and stays there."""
    return scales.last < LOWEST <= scales.begun and scales.skipped > 0


def _recent(scales: Scales) -> list[bool]:
    """The last attempts since the first step that was made: whether each was left out."""
    return [skipped for _, _, skipped in scales.course.items[-min(scales.settled, RECENT) :]] if scales.settled else []


def _gone_wrong(scales: Scales) -> bool:
    recent = _recent(scales)
    explained = 1 + len(recent) / max(1, scales.growth or 2000)
    often = len(recent) >= AFTER and sum(recent) > max(OFTEN * len(recent), 2 * explained)
    return _collapses(scales) or often


def _collapsed(scales: Scales, names: Sequence[str], layers: Sequence[str]) -> Finding:
    (layer, count, nan), recent = _who(scales, names, layers), _recent(scales)
    if _collapses(scales):
        said = (
            f"GradScaler's scale has collapsed from {size(scales.begun)} to {size(scales.last)}; "
            f"{scales.skipped:,} of {scales.attempts:,} steps were skipped"
        )
    else:
        said = (
            f"GradScaler keeps leaving steps out: {sum(recent)} of the last {len(recent)}, {scales.skipped:,} of "
            f"all {scales.attempts:,}, at scales from {size(scales.least)} to {size(scales.most)}"
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


def _by_layer(scales: Scales, names: Sequence[str], layers: Sequence[str]) -> list[dict[str, Any]]:
    counts: dict[str, int] = {}
    for number, count in scales.first.items():
        layer = layers[number] or names[number]
        counts[layer] = counts.get(layer, 0) + count
    return [{"layer": layer, "steps": count} for layer, count in sorted(counts.items(), key=lambda c: -c[1])[:10]]


def _clipped_early(scales: Scales) -> Finding:
    before, after = (statistics.median(pair[side] for pair in scales.early) for side in (0, 1))
    scale = scales.last
    said = (
        f"Gradients are clipped before they are unscaled: from a norm of {before * scale:.3g} to "
        f"{after * scale:.3g} while they carry the scale {size(scale)}, in {scales.early_steps:,} of "
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


def picture(scales: Scales, most: int) -> dict[str, Any]:
    """The scale over steps, where it has moved or a step was left out: [step, scale], and the steps left out."""
    if not scales.skipped and scales.least >= scales.most:
        return {}
    known = scales.course.items
    thinned = known[:: -(-len(known) // most)] if len(known) > most else known
    return {
        "scale": [[step, scale] for step, scale, _ in thinned],
        "skipped": [step for step, _, skipped in known if skipped][-most:],
    }
