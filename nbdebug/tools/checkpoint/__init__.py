"""Checkpoints: will a file load, what is in it, and will a run that goes on from it be the same run?

    check_checkpoint   the public function: a file or a folder beside the model, the optimizer and the rest of a run
    formats            the probe: torch's files (zip and legacy), safetensors, indices of shards, folders
    rules              what was read, as plain values; the rules that name causes
    resume_proof       the public function: a resumed run beside the one that never stopped, and what was not saved
    run_state          the states among the variables of a run at one moment, and how they are put back
    checkpoints        `Checkpoints`: a folder whose last good file survives a kill at any moment and a full disk

Nothing that a file names is ever created or called, and no tensor of it is allocated to look at it.
"""

from __future__ import annotations
