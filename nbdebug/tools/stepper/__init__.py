"""A training step that runs layer by layer, and waits between them while the notebook stays usable.

    the caller's thread: a click, a method        the step's own thread
    ───────────────────────────────────────       ──────────────────────────────────────────────
    step_through(model, batch) ──────────────────▶ CallContext: autocast, grad mode, modes, device, stream of the caller
                                                   Layers, NodeHooks: a layer or its backward begins, ends
    Stepper.next(), into(), … ── a goal ─────────▶ ThreadHandoff: run on until the goal is reached
    .at, .inputs, .outputs, report() ◀─ StepStop ─ ThreadHandoff: wait
    abandon() ───────────────────────────────────▶ Abandoned is raised where it waits, and unwinds the step

In reading order: `step_through` (the public function, Stepper, its report), `run` (the handoff, what the
threads share, goals, StepRun), `hooks` (layers and their backward), `events` (places, stops, tensors in numbers).

Only one of the two threads runs at a time. Random numbers and the process's switches are the step's while it runs, and
the caller's while it waits. At the end hooks are removed, the model is restored, and the thread ends.
"""

from __future__ import annotations
