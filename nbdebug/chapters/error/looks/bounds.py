"""Which entries of a tensor of indices are out of range."""

from __future__ import annotations

import torch

from nbdebug.chapters.error.facts_indices import Beyond
from nbdebug.chapters.error.scene import READ_AT_MOST


def beyond(index: torch.Tensor, least: int, most: int, spared: int | None = None) -> Beyond | None:
    """The entries of a tensor of indices outside of least … most; spared: a label that a loss leaves out. None where
    all are inside, or where the tensor can't be read (a failed device, meta, too large)."""
    whole = not index.dtype.is_floating_point and not index.dtype.is_complex
    if index.is_meta or not whole or not 0 < index.numel() <= READ_AT_MOST:
        return None
    try:
        with torch.no_grad():
            entries = index.detach().to("cpu", torch.int64)
            bad = (entries < least) | (entries > most)
            if spared is not None:
                bad &= entries != spared
            if not bad.any():
                return None
            place = tuple(int(i) for i in bad.nonzero()[0])
            kinds = tuple(int(v) for v in entries[bad].unique()[:6])
            return Beyond(
                int(entries[place]),
                place,
                int(bad.sum()),
                entries.numel(),
                int(entries.min()),
                int(entries.max()),
                kinds,
            )
    except RuntimeError:  # after a device-side assert no value can be read
        return None
