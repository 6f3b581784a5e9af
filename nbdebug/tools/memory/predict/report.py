"""The report of `fit`: does the step fit, what takes the memory, what would fit, what would help."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.report import Finding, Fix, Plot, Report, Table, Where
from nbdebug.text import listed, percent, size
from nbdebug.tools.memory.predict.job import FitRequest, Prediction
from nbdebug.tools.memory.predict.largest import Largest
from nbdebug.tools.memory.predict.remedies import PredictedRemedy

NOUNS = {"rows": "batch (rows)", "length": "sequence (positions)", "side": "image (pixels a side)"}
STATIC = ("parameters", "gradients", "optimizer state", "buffers")
FIXES = 3
MODULES = 40


@dataclasses.dataclass(frozen=True)
class Answer:
    """The numbers of the report. needs: bytes that have to be free, near the limit those that suffice; left: remedies
    that were not predicted; card: the GPU; how: how the numbers were obtained."""

    job: FitRequest
    prediction: Prediction
    limit: int | None
    fits: bool | None
    needs: int
    largest: tuple[Largest, ...]
    remedies: tuple[PredictedRemedy, ...]
    left: tuple[str, ...]
    card: str
    how: str
    seconds: float
    unchecked: tuple[str, ...] = ()


def report_of(answer: Answer, subject: str) -> Report:
    """The report of `fit`."""
    finding = () if answer.fits is not False else (_finding(answer),)
    return Report(
        "fit(model, batch, loss_fn)",
        finding,
        (),
        _unchecked(answer),
        tuple(_notes(answer)),
        subject,
        {"fit": _numbers(answer)},
        headline=_headline(answer),
        tables=_tables(answer),
        plots=(Plot("memory", _memory(answer)),),
    )


def _headline(answer: Answer) -> str:
    prediction = answer.prediction
    need = f"{size(answer.needs)}" + (
        f" ({size(prediction.peak)} allocated at most)" if prediction.reserved is not None else ""
    )
    if answer.fits is None:
        return f"A training step needs {need}."
    there = size(answer.limit or 0)
    if answer.fits:
        close = answer.needs > 0.95 * (answer.limit or 0)
        return f"It fits{', barely' if close else ''}: a training step needs {need} of {there}."
    return f"It does not fit: a training step needs {need}, and {there} are available."


def _finding(answer: Answer) -> Finding:
    """The cause is what takes most of it."""
    prediction = answer.prediction
    moving = sum(n for name, n in prediction.at_peak.items() if name not in STATIC)
    static = prediction.peak - moving
    code = "memory/activations-dominate" if moving >= static else "memory/optimizer-state-dominates"
    what = "activations and temporaries" if moving >= static else "parameters, gradients and optimizer state"
    title = (
        f"A step needs {size(answer.needs)} and {size(answer.limit or 0)} are available: {what} take "
        f"{size(max(moving, static))} of it."
    )
    step, phase = prediction.place
    module = max(prediction.modules, key=lambda name: prediction.modules[name], default="")
    at_peak = {name: size(count) for name, count in prediction.at_peak.items() if count > 0}
    evidence: dict[str, Any] = {"allocated at most": size(prediction.peak), "in step": step + 1, "memory": at_peak}
    if prediction.reserved is not None:
        evidence["reserved at most"] = size(prediction.reserved)
    return Finding(
        code,
        title,
        Where(phase=phase, module=module or None),
        evidence,
        tuple(_fix(r, answer.needs) for r in answer.remedies[:FIXES]),
    )


def _fix(remedy: PredictedRemedy, needs: int) -> Fix:
    after = {
        "note": f"{remedy.how}: {size(remedy.needs)} instead of {size(needs)}"
        + (", which fits" if remedy.fits else ", which alone is not enough" if remedy.fits is False else "")
        + f"; time: {remedy.time}"
        + ("; it changes what is learned" if remedy.alters else "")
    }
    return Fix(remedy.title, remedy.code, None, after)


def _memory(answer: Answer) -> dict[str, Any]:
    """The data of the picture."""
    prediction = answer.prediction
    parts = sorted(((n, c) for n, c in prediction.at_peak.items() if c > 0), key=lambda p: -p[1])
    if prediction.reserved is not None:
        parts.append(("reserved, not used", max(0, answer.needs - prediction.peak)))
    starts = {f"{phase} {step + 1}": first for (step, phase), first in _starts(prediction).items()}
    return {
        "parts": [list(p) for p in parts],
        "total": answer.needs,
        "limit": answer.limit,
        "course": [list(p) for p in prediction.course()],
        "events": starts,
        "title": "A training step, predicted",
    }


def _numbers(answer: Answer) -> dict[str, Any]:
    prediction = answer.prediction
    return {
        "peak": prediction.peak,
        "reserved": prediction.reserved,
        "limit": answer.limit,
        "fits": answer.fits,
        "at_peak": dict(prediction.at_peak),
        "place": list(prediction.place),
        "device": str(answer.job.device),
        "largest": {part.what: part.most for part in answer.largest},
        "seconds": answer.seconds,
        "how": answer.how,
        "remedies": [dataclasses.asdict(r) for r in answer.remedies],
    }


def _starts(prediction: Prediction) -> dict[tuple[int, str], int]:
    from nbdebug.tools.memory.predict.meta_trace import PHASES

    return {
        (step, PHASES[phase]): first
        for step, phase, first in prediction.trace.marks
        if PHASES[phase] in ("forward", "backward", "optimizer")
    }


def _tables(answer: Answer) -> list[Table]:
    prediction = answer.prediction
    at_peak = [
        [name, count, percent(count / max(1, prediction.peak))]
        for name, count in sorted(prediction.at_peak.items(), key=lambda p: -p[1])
        if count > 0
    ]
    tables: list[Table] = [
        Table(
            "What would help",
            ("remedy", "needs (bytes)", "saves (bytes)", "fits", "time", "how"),
            [[r.name, r.needs, r.saves, _yes(r.fits), f"{100 * (r.slower - 1):+.0f}%", r.how] for r in answer.remedies],
            "Needs: memory of a step with this remedy alone. Time: of a step, estimated. The code is in "
            "`report.facts['fit']['remedies']`.",
        ),
        Table(
            "At the peak",
            ("what for", "size (bytes)", "share"),
            at_peak,
            f"In the {prediction.place[1]} of step {prediction.place[0] + 1}.",
        ),
        Table(
            "The largest that fits",
            ("what", "now", "largest", "needs (bytes)"),
            [[NOUNS[p.what], p.now, p.most or "none", p.needs] for p in answer.largest],
        ),
        Table(
            "At the peak, by module",
            ("module", "size (bytes)"),
            [
                [name or "not in a module", count]
                for name, count in sorted(prediction.modules.items(), key=lambda p: -p[1])[:MODULES]
            ],
        ),
        Table(
            "By phase",
            ("step", "phase", "at most (bytes)"),
            [[step + 1, phase, most] for step, phase, most in prediction.phases if phase != "start"],
        ),
    ]
    first = [t for t in tables if t.rows]
    return first if answer.fits is False else sorted(first, key=lambda t: t.title != "At the peak")


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def _notes(answer: Answer) -> list[str]:
    job, notes = answer.job, [f"{answer.how}, in {answer.seconds:.1f} s; nothing of yours was changed."]
    if job.cuda:
        notes.append(
            f"GPU: {answer.card}. On an H200, predictions were right to 1% (allocated) and 10% (reserved). "
            "CUDA itself takes another 0.3 to 0.8 GiB."
        )
    if job.emulated:
        notes.append(
            "There is no GPU here: its kernels are chosen by torch's rules, not by a measurement. Less certain: "
            "workspaces (they differ between GPUs), attention with masks, and recurrent layers."
        )
    ops = {b.op for b in answer.prediction.trace.blocks}
    if job.cuda and any("convolution" in op for op in ops):
        notes.append("cuDNN chooses the workspaces of convolutions: the reserved peak is right to about 10%.")
    if answer.prediction.doubts:
        notes.append(f"Ops of other libraries, whose own memory is not counted: {listed(answer.prediction.doubts, 5)}.")
    for part in answer.largest:
        notes.append(
            f"The largest {NOUNS[part.what]} that fits: {part.most:,} (now {part.now:,})."
            if part.most
            else f"Not even the smallest {NOUNS[part.what]} fits."
        )
    return notes


def _unchecked(answer: Answer) -> tuple[str, ...]:
    unchecked = list(answer.unchecked)
    if answer.limit is None:
        unchecked.append('What fits: the available memory is not known; pass it, such as device_memory="24GiB"')
    if answer.left:
        unchecked.append(f"Remedies that were not predicted: {', '.join(answer.left)}")
    return tuple(unchecked)
