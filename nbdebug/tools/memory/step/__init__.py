"""One step, followed allocation by allocation, and what several steps leave behind.

ledger.py     each piece of memory: its birth, its death, who made it; live bytes over the events of a step
follow.py     the step under watch: ops, modules, backward, optimizers tell the ledger
meter.py      what the allocator itself says while the step runs
peak.py       from the ledger to the facts of one step: the peak, and what it was made of
holders.py    the containers and variables in reach of the user's names, and how long they are
graphs.py     how far back a tensor's graph goes
growing.py    from several looks at them to what grows with every step
plain.py      how much memory Python objects take that are no tensors
behind.py     the holder of memory that no name leads to
put.py        the user's line that puts it there: one more step, traced line by line
source.py     the same by reading the source, and whether a holder is ever emptied
left.py       the three together: what every step leaves behind, who holds it, which line put it there
turns.py      the same of a loop that ran once, in a cell
stays.py      what a single run has added, by name
run.py        the steps in order, and the facts that come of them
records.py    a loader's data set of many small Python objects, and what a worker copies of it
account.py    from the facts to the report
"""

from __future__ import annotations
