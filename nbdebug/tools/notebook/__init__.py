"""The notebook's own hazards: cells run in any order, and again, and the objects of earlier runs live on.

`import` does not reload an edited file; an optimizer holds the parameters of an earlier model; a hook is registered
again by each run of its cell; a class that is defined again is another class than that of the existing objects;
displayed values stay in memory. Nothing of this raises an error where it happens.

    check_notebook  the public function: facts, findings and notes as a report; and the causes of one exception
    cells           the cells that ran, in order: what each binds, deletes, calls and imports
    stale_code      modules whose file was edited after Python loaded it; objects of an earlier class statement
    stale_objects   optimizers, loaders, schedulers and trainers that use replaced objects
    left_on         duplicate hooks, eval mode, switches, shadowed names, memory of outputs; cells that ran too early
    repeats         cells that ran again on their own result
    flow            data flow between cells: what a line reads is not what it was written for
    rules           the facts as plain values; the rules that name causes

All of it is read from the shell's record of its cells, the variables and the files. None of the user's code runs,
nothing is changed, and it does not matter when nbdebug was loaded.
"""

from __future__ import annotations
