"""Who holds memory at this moment: every live tensor, counted once for each storage, with its owner by name.

storages   the memory behind a tensor: its device, address and bytes, counted once however many tensors share it
contents   what is inside an object, read without running any of the user's code
names      from the user's names to all that they lead to: each storage gets its names, and one of them is its owner
inventory  what autograd has saved for a backward, by the tensor that keeps that graph; and all of these together,
           with what the allocators say and who refers to tensors without a name
report     the report of `mem()`
"""

from __future__ import annotations
