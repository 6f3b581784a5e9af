"""A record that never outgrows a fixed size: the last items whole, older ones thinned out. No torch."""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")


class Thinned(Generic[Item]):
    """A list that keeps its last `keep` items, and of older ones ever fewer: whenever it holds twice that, every second
    of the older half goes."""

    def __init__(self, keep: int):
        self.keep = keep
        self.items: list[Item] = []

    def append(self, item: Item) -> None:
        self.items.append(item)
        if len(self.items) > 2 * self.keep:
            older = len(self.items) - self.keep
            self.items[:older] = self.items[:older:2]
