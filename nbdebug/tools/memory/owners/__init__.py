"""Who holds memory at this moment: every live tensor, counted once for each storage, with its owner by name.

names      storages, what is inside an object (read without running any of the user's code), and the walk from the
           user's names: each storage gets its names, and one of them is its owner
inventory  what autograd has saved for a backward, by the tensor that keeps that graph; and all of these together,
           with what the allocators say and who refers to tensors without a name
report     the report of `mem()`
"""

from __future__ import annotations
