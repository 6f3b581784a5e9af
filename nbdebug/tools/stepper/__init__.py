"""A training step that is run layer by layer, and waits between them while the notebook stays alive.

    the caller's thread: a click, a method        a thread of the step's own
    ───────────────────────────────────────       ──────────────────────────────────────────────
    step_through(model, batch) ──────────────────▶ Caller: autocast, grad mode, modes, device, stream as in the caller
                                                   hooks: a layer begins, ends; its backward begins, ends
    Stepper.next(), into(), … ── a goal ─────────▶ Turns: run on until the goal says stop
    .at, .inputs, .outputs, report() ◀── a Stop ── Turns: wait
    abandon() ───────────────────────────────────▶ Abandoned is raised where it waits, and unwinds the step

Two threads, and only one of them has its turn. Random numbers and the process's switches are the step's while it runs,
and the caller's while it waits. At the end hooks go, the model is put back, and the thread ends.
"""

from __future__ import annotations
