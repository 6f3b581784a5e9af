"""A memory that holds bad values, and for each of their births the elements that come from it."""

from __future__ import annotations

import torch

from nbdebug.observe.tensors import finite


class Spoiled:
    """A memory that holds bad values: one mask over all its elements for each birth that they come from. lone: the one
    birth of whatever is bad in it, where no mask has been made yet."""

    __slots__ = ("dtype", "elements", "lone", "masks", "size")

    def __init__(self, values: torch.Tensor, lone: int | None = None):
        self.size, self.dtype = values.element_size(), values.dtype
        self.elements = values.untyped_storage().nbytes() // self.size
        self.masks: dict[int, torch.Tensor] = {}
        self.lone = lone

    @property
    def births(self) -> set[int]:
        return set(self.masks) if self.lone is None else {self.lone}

    def settle(self, values: torch.Tensor) -> None:
        """Make the mask of a lone birth, of the memory that `values` lies in; to be called when its values change."""
        if self.lone is not None:
            whole = torch.empty(0, dtype=self.dtype, device=values.device)
            whole.set_(values.untyped_storage(), 0, (self.elements,), (1,))
            self.masks, self.lone = {self.lone: ~finite(whole)}, None

    def view(self, flat: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The part of a mask that `values` shows."""
        if values.element_size() != self.size:  # seen as another dtype: complex as real, or bytes
            ratio = values.element_size() / self.size
            flat = flat.repeat_interleave(int(1 / ratio)) if ratio < 1 else flat.view(-1, int(ratio)).any(1)
        return flat.as_strided(values.shape, values.stride(), values.storage_offset())
