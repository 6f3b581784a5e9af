"""Memory: who holds it now, what a step needs and leaves behind, what would fit, and how to free it.

Read `facts` first: plain numbers, from which `rules/` name the cause. Then the questions:

mem           `mem()` and `mem(step)`, and their reports
 owners       from the user's names to all that they lead to: each storage gets its names, and one of them is its owner
 inventory    every live tensor with its owner, what autograd has saved, what the allocators say
 trace        one step under watch: which op allocated each piece of memory, and when nothing held it any longer
 holders      the containers that the user's names lead to, how long they are, what of them grows from scan to scan
 leaks        what every step adds: who holds it, which line stores it
 steps        the steps in order, and the facts that come of them: the peak, and what it is made of
 workers      a loader's data set of many small Python objects, and what each worker copies of it
fit, predict/ the peak of a training step, predicted with tensors that have no data, and what each remedy saves
oom           a failed allocation: what was requested, who held what, what would help
free          what the notebook itself keeps, and freeing what the user chooses
 reachability what memory an object leads to, for free, oom and the leaks
"""

from __future__ import annotations
