"""Distributed: several processes under observation; which of them leaves the common path, where and why.

launch        starts the ranks (`python -m nbdebug ranks`), or goes along with torchrun's; compares and ends them; the
              report: the sentence, who waits where, the stack of each rank
agent         in each rank: writes down what it does, in a file of its own, before it does it
marks         the user's script with marks in it: arms of branches, turns of loops; what the user's values say
facts, rules  the ranks' logs, as plain data; the rules that name causes
paths         where two ranks part; which line an argument or an iterable comes from
engines       cells on several processes (%%ranks): ipyparallel's engines, each a rank under an agent of its own
check_ranks   the public function before training
hang_watch    the public context manager for those who add a line

How the comparison grows (a plan; tests/distributed/test_tree.py simulates it): with 1,000 ranks no process reads 1,000
logs. Each rank chains a digest over its calls (number, op, shape, dtype) and writes one record a second into the store:
the number of calls of each group, and the digest at multiples of 64. A tree of comparers, one for 16 records, passes on
one record where all agree, else the two that differ; calls, lines and stacks are asked for from those two ranks alone.
256 ranks simulated: 87 kB a second through the store (340 bytes a rank; logs would be 400 kB a step), 33 ms of work.
"""

from __future__ import annotations
