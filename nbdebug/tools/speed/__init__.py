"""Speed: where a training's time goes, which cause makes it slow, and how fast it is with the cure in place.

bottleneck   of a step, a loop or a script: the steps by the clock, their ops in a copy, the experiments that decide;
             the report: the sentence, the table of a step, the cures, the dearest lines; also every step from now
             on, and a report against an earlier one
clock        whose time each moment of a step is; the user's lines on the stack; it calls the user's step or loop, or an
             experiment with it in a copy of the process
ops          the ops of a few steps: repeated, double, small, waited for, over an input that only grew
cures        experiments: the same steps with one thing changed and without, in turn
rules        what was seen, as plain numbers; the rules that name causes
"""

from __future__ import annotations
