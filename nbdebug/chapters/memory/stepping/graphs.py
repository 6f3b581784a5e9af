"""How far back a tensor's graph goes: a sum over all steps so far, or a state that is handed on, has a longer one
after every step."""

from __future__ import annotations

from typing import Any

MOST_NODES = 30_000
"""For one tensor; a longer graph than that has grown for long, or is that of a very large model."""
MOST_IN_ALL = 300_000


def grows_from(slots: list[Any]) -> None:
    """Set the `size` of each slot to the number of nodes in the graph of its tensor."""
    left = MOST_IN_ALL
    for slot in slots:
        slot.size = nodes_of(slot.thing, min(MOST_NODES, left))
        left = max(0, left - slot.size)


def nodes_of(tensor: Any, most: int = MOST_NODES) -> int:
    """How many nodes a backward from here would run through; at most `most` are counted."""
    first = tensor.grad_fn
    seen: set[Any] = set()
    todo = [first] if first is not None else []
    while todo and len(seen) < most:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [n for n, _ in node.next_functions if n is not None and n not in seen]
    return len(seen)
