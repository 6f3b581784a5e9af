"""What is held at this moment: every live tensor, counted once for each storage, with its owner by name.

storages   the memory behind a tensor: where it lies, how much, counted once however many tensors show it
opened     what lies inside an object, read without running any of the user's code
claims     the names that lead to a storage, and which of them is its owner
naming     from the user's names to all that they lead to: each storage gets the names that lead to it
failed     what an exception keeps: the variables of its frames
graphs     what autograd has saved for a backward, and which tensor keeps that graph
unnamed    what the garbage collector says of tensors that no name leads to
devices    what the allocators and the system say
look       all of these together: `look(models, optimizers, names) -> Held`
account    the report of `mem()`
"""

from __future__ import annotations
