"""`guard`: a watcher for every step of a training, so cheap that it stays on, and able to name the step that went bad.

Read it in this order. `guard.py` is the public function, the object that a person holds, and its report.
`step.py` finds where a step begins and ends, reads the result of each without a wait of the host, and is one step, and
a trip; `finite_check.py` computes, for each step, whether loss and gradients are finite. Where they are not,
`rollback.py` puts weights, buffers and optimizer state back bit for bit, `locate.py` runs the step again under
nan_trace's probe. `distributed.py` makes the ranks agree first. `record/` writes
all of this to a folder that a killed process leaves readable.
"""
