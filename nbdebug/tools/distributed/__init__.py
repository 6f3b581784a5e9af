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
"""

from __future__ import annotations
