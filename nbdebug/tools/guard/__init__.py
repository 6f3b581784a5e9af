"""`guard`: a watcher for every step of a training, so cheap that it stays on, and able to name the step that went bad.

Read it in this order. `guard.py` is the public function and the object that a person holds. `step_tracker.py` tells
where a step begins and ends; `finite_check.py` asks, for each step, whether loss and gradients are finite, and
`pending_reads.py` reads the answer without a wait of the host. Where it is not, `rollback.py` puts weights, buffers
and optimizer state back bit for bit, `locate.py` replays the step and gives it to nan_trace's locator, and `trip.py`
is what is told of it. `distributed.py` makes the ranks agree first. `record/` writes all of this to a folder that a
killed process leaves readable.
"""
