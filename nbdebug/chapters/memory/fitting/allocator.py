"""The caching allocator of torch's CUDA device, as a model: what a sequence of births and deaths makes it reserve.

Rules (c10/cuda/CUDACachingAllocator.cpp, default settings, one stream): sizes are rounded up to 512 bytes. Up to 1 MiB
comes from segments of 2 MiB; above, up to 10 MiB from segments of 20 MiB; above that a segment is the size rounded up
to 2 MiB. The smallest free piece that is large enough is taken; it is split where what is left over is at least 512
bytes (small) or more than 1 MiB (large), else the whole piece counts as allocated. Freed pieces join their free
neighbours. Where the card has no room for a segment, those that are wholly free are given back first."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

MIB = 1 << 20
UNIT, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB
SHARE = 2 * MIB


@dataclasses.dataclass(frozen=True)
class Reserved:
    """allocated, reserved: at most, in bytes; at: event of the allocated peak; failed: event at which the limit was
    met, or None; returned: bytes given back to the card to make room."""

    allocated: int
    reserved: int
    at: int
    failed: int | None = None
    returned: int = 0


class Piece:
    """A stretch of a segment."""

    __slots__ = ("address", "before", "free", "next", "size", "small")

    def __init__(self, address: int, size: int, small: bool):
        self.address, self.size, self.small, self.free = address, size, small, False
        self.before: Piece | None = None
        self.next: Piece | None = None


class Allocator:
    """limit: bytes that it may reserve; None for as many as it wants."""

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # free pieces: (size, address), sorted
        self.pieces: dict[int, Piece] = {}
        self.allocated = self.reserved = self.returned = 0
        self._address = 0

    def allocate(self, size: int) -> Piece | None:
        """A piece for so many bytes, or None where the limit does not let it."""
        size = max(UNIT, -(-size // UNIT) * UNIT)
        small = size <= SMALL
        pool = self.pools[small]
        at = bisect.bisect_left(pool, (size, -1))
        if at < len(pool):
            piece = self.pieces[pool.pop(at)[1]]
        else:
            segment = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE else -(-size // SHARE) * SHARE
            if self.limit is not None and self.reserved + segment > self.limit:
                self._give_back()
                if self.reserved + segment > self.limit:
                    return None
            piece = self._segment(segment, small)
        self._split(piece, size)
        piece.free = False
        self.allocated += piece.size
        return piece

    def free(self, piece: Piece) -> None:
        """Give a piece back to its pool."""
        self.allocated -= piece.size
        for other in (piece.before, piece.next):
            if other is not None and other.free:
                self._leave(other)
                piece = self._joined(*((other, piece) if other.address < piece.address else (piece, other)))
        piece.free = True
        bisect.insort(self.pools[piece.small], (piece.size, piece.address))

    def _segment(self, size: int, small: bool) -> Piece:
        piece = Piece(self._address, size, small)
        self._address += size + SHARE
        self.pieces[piece.address] = piece
        self.reserved += size
        return piece

    def _split(self, piece: Piece, size: int) -> None:
        left = piece.size - size
        if left < UNIT if piece.small else left <= SMALL:
            return
        rest = Piece(piece.address + size, left, piece.small)
        rest.before, rest.next, rest.free = piece, piece.next, True
        if piece.next is not None:
            piece.next.before = rest
        piece.next, piece.size = rest, size
        self.pieces[rest.address] = rest
        bisect.insort(self.pools[rest.small], (rest.size, rest.address))

    def _joined(self, first: Piece, second: Piece) -> Piece:
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.before = first
        del self.pieces[second.address]
        return first

    def _leave(self, piece: Piece) -> None:
        pool = self.pools[piece.small]
        del pool[bisect.bisect_left(pool, (piece.size, piece.address))]

    def _give_back(self) -> None:
        """Segments that are wholly free go back to the card."""
        for pool in self.pools.values():
            for size, address in list(pool):
                piece = self.pieces[address]
                if piece.before is None and piece.next is None:
                    pool.remove((size, address))
                    del self.pieces[address]
                    self.reserved -= size
                    self.returned += size


def replay(events: Sequence[int], sizes: Sequence[int], limit: int | None = None) -> Reserved:
    """What a sequence of births (number) and deaths (~number) makes the allocator reserve; it ends where it fails."""
    allocator = Allocator(limit)
    pieces: dict[int, Piece] = {}
    allocated = reserved = 0
    place = -1
    for at, number in enumerate(events):
        if number < 0:
            if (piece := pieces.pop(~number, None)) is not None:
                allocator.free(piece)
            continue
        piece = allocator.allocate(sizes[number])
        if piece is None:
            return Reserved(allocated, reserved, place, at, allocator.returned)
        pieces[number] = piece
        reserved = max(reserved, allocator.reserved)
        if allocator.allocated > allocated:
            allocated, place = allocator.allocated, at
    return Reserved(allocated, reserved, place, None, allocator.returned)
