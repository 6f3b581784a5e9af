"""One step, traced allocation by allocation, and what several steps leave behind.

trace    the step under watch: ops, modules, backward and optimizers report to the allocation log: each piece of memory,
         when it was allocated and freed, by which op; what the allocator itself measures meanwhile
holders  the containers and variables that the user's names lead to, and how long they are
source   the user's line that stores what grows, by a trace of one more step or by reading the source
leaks    from several scans of the holders to what every step (or every iteration of a cell's loop) adds, who holds it,
         which line stores it
run      the steps in order, and the facts that come of them: the peak, and what it is made of; by name, what a single
         run has added
workers  a loader's data set of many small Python objects, and what each worker copies of it
"""

from __future__ import annotations
