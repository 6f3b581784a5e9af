"""`guard`: a watcher for every step of a training, so cheap that it stays on, and able to name the step that went bad.

Read it in this order. `guard.py` is the public function and the object that a person holds. `step_tracker.py` finds
where a step begins and ends, `step.py` is one step; `finite_check.py` computes, for each step, whether loss and
gradients are finite, and `pending_reads.py` reads the result without a wait of the host. Where they are not,
`rollback.py` puts weights, buffers and optimizer state back bit for bit, `locate.py` runs the step again under
nan_trace's probe, and `trip.py` and `report.py` are what a person gets. `distributed.py` makes the ranks agree first.
`record/` writes all of this to a folder that a killed process leaves readable.
"""
