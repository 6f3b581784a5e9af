"""The notebook's own hazards: cells run in any order and again, and what they made before lives on.

An edited file is not loaded again by `import`; a model made anew is not the one that the optimizer holds; a hook is
registered once more by each run of its cell; a class defined again is another class than that of the objects at hand;
what a cell has shown stays in memory. Nothing of this raises an error where it happens.

    statements  what a statement of Python binds, and what stands behind a magic
    cells       the cells that were run, in order, and what each of them binds, deletes, calls and imports
    loaded      what is loaded of a module, and what its file says now
    files       modules whose file says something else than what is loaded
    held        which parameters belong to which model, and what each optimizer holds
    renewed     models made anew while the optimizer keeps the old parameters
    uses        whether a variable was used since
    holders     loaders, schedulers, trainers made from what a later cell has replaced
    hooks       hooks that a cell, run again, has registered once more, and which cell that was
    classes     objects whose class has been defined again since they were made
    outputs     memory that only `Out` or a traceback holds, and whether the user meant to free it
    order       a name that was missing when a cell ran, and is there now
    modes       eval mode, gradients off, another default dtype, left by a cell and shown to do harm
    leftovers   settings and names that an earlier cell left behind: told as notes
    failed      what of all this explains one exception
    probe       all of these together, as facts

All is read from what lies there: the shell's own record of its cells, the variables, the files. No code of the user's
runs, nothing is changed, and it does not matter when nbdebug was loaded.
"""

from __future__ import annotations
