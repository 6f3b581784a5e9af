"""A memory that holds bad values, and for each of their births the elements that come from it."""

from __future__ import annotations

import torch


class Spoiled:
    """A memory that holds bad values: one mask over all its elements for each birth that they come from."""

    __slots__ = ("elements", "masks", "size")

    def __init__(self, values: torch.Tensor):
        self.size = values.element_size()
        self.elements = values.untyped_storage().nbytes() // self.size
        self.masks: dict[int, torch.Tensor] = {}

    def view(self, flat: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The part of a mask that `values` shows."""
        if values.element_size() != self.size:  # seen as another dtype: complex as real, or bytes
            ratio = values.element_size() / self.size
            flat = flat.repeat_interleave(int(1 / ratio)) if ratio < 1 else flat.view(-1, int(ratio)).any(1)
        return flat.as_strided(values.shape, values.stride(), values.storage_offset())
