"""One step, traced allocation by allocation, and what several steps leave behind.

allocations  each piece of memory: when it was allocated and freed, by which op; live bytes over the events of a step;
             what the allocator itself measures meanwhile
trace        the step under watch: ops, modules, backward and optimizers report to the allocation log
peak         from the log to the facts of one step: the peak, and what it is made of
holders      the containers and variables that the user's names lead to, and how long they are
growth       from several scans of the holders to what grows with every step, or with every iteration of a cell's loop
source       the user's line that stores it, by a trace of one more step or by reading the source
leaks        these together: what every step adds, who holds it, which line stores it
run          the steps in order, and the facts that come of them; by name, what a single run has added
workers      a loader's data set of many small Python objects, and what each worker copies of it
report       from the facts to the report
"""

from __future__ import annotations
