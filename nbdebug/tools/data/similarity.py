"""Pictures beside pictures: near copies that survive re-encoding, flips and small shifts, and folders whose colours are
unlike those of the others.

A copy is not what looks alike but what looks alike *for this set*: two digits 1 are near each other, and so are all the
pages of a book. So the distance of a pair is compared with the distances to its other neighbours.
"""

from __future__ import annotations

import base64
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nbdebug.tools.data.pictures import SIDE

FLAT = 4.0
"""Spread of the grey values below which a picture shows too little to be distinct from others."""
NEAR, RATIO = 0.12, 0.25
"""One minus the correlation of two thumbnails: at most so much, and so much of the distance to the other neighbours.
Of 4,000 pairs of JPEG (quality 30 to 95), flips, 5% brighter and shifts by 3%, the largest is 0.11. ImageHash's
hashes have one limit for all sets: phash within 8 of 64 bits finds 64% of photographs moved by 3% (this: all), and
calls 88 of 100 different faces copies (this: none)."""
SPARSE = 0.35
"""Distance to the other neighbours in sets of photographs. In a set of digits or of faces it is 0.05 to 0.15, and some
are much nearer than that by chance."""
LEVELS = 2.0
"""Mean difference, of 255, of two thumbnails that are one picture encoded twice."""
MOST = 60_000
"""Pictures among which near copies are looked for; beyond, only equal thumbnails are."""
SAMPLE = 400
PIECE = 256
"""Pictures that are worked on at once, for the memory."""
ALIKE_AT_ALL = 0.7
"""Correlation of two small thumbnails that are worth a closer look."""
REACH = 2
RIVALS = 8
"""Originals that are near a picture, and are compared with it pixel by pixel."""


class Thumbnails:
    """Grey thumbnails in one block of bytes, 1 kB each. places: of the pictures that have one."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.places: list[int] = []

    def add(self, place: int, encoded: str) -> None:
        self.data += base64.b64decode(encoded)
        self.places.append(place)

    def distinct(self) -> list[int]:
        """The places of the pictures that show enough to be told from others."""
        spread = _spreads(self.array())
        return [place for place, own in zip(self.places, spread) if own > FLAT]

    def array(self) -> Any:
        import numpy

        return numpy.frombuffer(self.data, dtype="uint8").reshape(-1, SIDE, SIDE)


def _spreads(images: Any) -> Any:
    import numpy

    pieces = (images[start : start + PIECE].reshape(-1, SIDE * SIDE) for start in range(0, len(images), PIECE))
    return numpy.concatenate([numpy.zeros(0, "float32"), *(piece.std(1, dtype="float32") for piece in pieces)])


def _unit(images: Any) -> Any:
    """Thumbnails of half the side, without their mean, of length 1: their products are correlations."""
    import numpy

    boxes = images.reshape(len(images), SIDE // 2, 2, SIDE // 2, 2).mean((2, 4), dtype="float32")
    half = boxes.reshape(len(images), -1)
    half -= half.mean(1, keepdims=True)
    half /= numpy.maximum(numpy.sqrt(numpy.einsum("np,np->n", half, half)), 1e-6)[:, None]
    return half


def near_copies(images: Any, ranks: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """(picture, original, distance) where the original is of a lower rank. images: (N, SIDE, SIDE), grey; ranks: of
    each one's split. Each picture is given once, with its nearest original."""
    import numpy

    rank = numpy.asarray(ranks)
    distinct = _spreads(images) > FLAT
    if len(images) > MOST:
        yield from _equal(images, rank, distinct)
        return
    for level in sorted(set(ranks))[1:]:
        queries = numpy.flatnonzero(distinct & (rank == level))
        originals = numpy.flatnonzero(distinct & (rank < level))
        if len(queries) and len(originals):
            yield from _copies_of(images, queries, originals)


def _equal(images: Any, rank: Any, distinct: Any) -> Iterator[tuple[int, int, float]]:
    first: dict[bytes, int] = {}
    for place in sorted((int(i) for i in range(len(images)) if distinct[i]), key=lambda i: rank[i]):
        before = first.setdefault(images[place].tobytes(), place)
        if rank[before] < rank[place]:
            yield place, before, 0.0


def _copies_of(images: Any, queries: Any, originals: Any) -> Iterator[tuple[int, int, float]]:
    import numpy

    keys = numpy.empty((len(originals), SIDE * SIDE // 4), dtype="float32")
    for start in range(0, len(originals), PIECE):
        keys[start : start + PIECE] = _unit(images[originals[start : start + PIECE]])
    usual = _usual_distance(keys)
    for start in range(0, len(queries), PIECE // 4):
        some = queries[start : start + PIECE // 4]
        best: list[tuple[float, int, Any]] = [(ALIKE_AT_ALL, 0, None)] * len(some)
        for number, turned in enumerate(_flips(images[some])):
            products = _unit(turned) @ keys.T
            top = products.max(1)
            for i in numpy.flatnonzero(top > [value for value, _, _ in best]).tolist():
                nearest = numpy.argpartition(-products[i], min(RIVALS, len(originals)) - 1)[:RIVALS]
                best[i] = float(top[i]), number, nearest[numpy.argsort(-products[i][nearest], kind="stable")]
        for i, (_, number, nearest) in enumerate(best):
            if nearest is None:
                continue
            turned = next(itertools.islice(_flips(images[some[i] : some[i] + 1]), number, None))
            aligned = aligned_distances(turned[0], images[originals[nearest]])
            if aligned[:2].min() > NEAR:  # moved further: in sets of patterns, some of the others fit by chance
                continue
            order = numpy.argsort(aligned, kind="stable")
            distance, original = max(0.0, float(aligned[order[0]])), int(originals[nearest[order[0]]])
            # the third of the others is the measure: one or two may be further copies
            rival = float(aligned[order[3]]) if len(order) > 3 else usual
            pixels = float(numpy.abs(turned[0].astype("float32") - images[original]).mean())
            scale = min(usual, rival)
            most = min(NEAR, RATIO * scale * min(1.0, (scale / SPARSE) ** 2))
            if distance <= most or (pixels <= LEVELS and distance < min(0.004, rival / 8)):
                yield int(some[i]), original, distance


def _flips(images: Any) -> Iterator[Any]:
    yield from (images, images[:, :, ::-1], images[:, ::-1])


def _usual_distance(keys: Any) -> float:
    """How far the nearest neighbour is from a picture of the set, as a rule. Of one picture: 1."""
    nearest: list[float] = []
    for one in keys[:: max(1, len(keys) // SAMPLE)][:SAMPLE]:
        products = keys @ one
        products[products > 0.99999] = -1  # itself
        nearest.append(1 - float(products.max()))
    return statistics.median(nearest) if len(keys) > 1 else 1.0


def aligned_distances(one: Any, others: Any) -> Any:
    """One minus the largest correlation of a thumbnail's middle with each of the others (N, SIDE, SIDE), moved by up to
    REACH of their pixels (6%)."""
    import numpy

    inner = SIDE - 2 * REACH
    middle = one[REACH:-REACH, REACH:-REACH].astype("float32").ravel()
    middle -= middle.mean()
    windows = numpy.lib.stride_tricks.sliding_window_view(others.astype("float32"), (inner, inner), (1, 2))
    flat = windows.reshape(len(others), -1, inner * inner)
    spread = numpy.einsum("nsp,nsp->ns", flat, flat) - flat.sum(2) ** 2 / (inner * inner)
    below = numpy.sqrt(numpy.maximum(spread, 1e-3) * max(float(middle @ middle), 1e-3))
    return 1 - (flat @ middle / below).max(1)


# -- colours by folder -------------------------------------------------------------------------------------------------

LEAST = 5
"""Pictures of a folder that is judged."""
EFFECT = {True: 1.5, False: 3.0}
"""By how many spreads of the pictures a folder must differ: a split, or any other folder (which may be a class)."""
SIGNIFICANT, ALIKE = 6.0, 0.8
FLOORS = (0.004, 0.004, 3.0, 3.0)


def features(mean: Sequence[float], spread: float) -> tuple[float, ...]:
    """Of a picture: the shares of red and of blue, brightness, contrast."""
    total = max(1.0, sum(mean))
    return mean[0] / total, mean[2] / total, 0.299 * mean[0] + 0.587 * mean[1] + 0.114 * mean[2], spread


NAMES = ("share of red", "share of blue", "brightness", "contrast")


def shifted_folder(folders: Mapping[str, list[tuple[float, ...]]], splits: bool) -> tuple[str, str] | None:
    """(folder, what is unlike) of the one folder whose pictures are unlike those of all others, which are like each
    other. folders: the features of the pictures of each; splits: whether they are training, validation and test set."""
    sizes = {name: len(rows) for name, rows in folders.items() if len(rows) >= LEAST}
    if len(sizes) < 2 or (len(sizes) < 3 and not splits):
        return None
    worst: tuple[float, str, str] | None = None
    for name in sizes:
        others = [n for n in sizes if n != name]
        gaps = [_gap(folders[name], [row for n in others for row in folders[n]], feature) for feature in range(4)]
        rest = [_gap(folders[a], folders[b], f) for a in others for b in others if a < b for f in range(4)]
        effect, z, feature, here, there = max((*gap[:2], f, *gap[2:]) for f, gap in enumerate(gaps))
        alike = all(gap[0] < max(ALIKE, effect / 4) for gap in rest)
        if effect >= EFFECT[splits] and z >= SIGNIFICANT and alike and (worst is None or effect > worst[0]):
            detail = f"{NAMES[feature]} {here:.3g} on average, {there:.3g} in the others"
            worst = (effect, name, detail)
    if worst is not None and len(sizes) == 2:  # which of two is unlike cannot be seen: the training set is the measure
        name = next((n for n in sizes if "train" not in n.lower()), worst[1])
        return name, worst[2] if name == worst[1] else f"unlike {worst[1]}: there {worst[2]}"
    return worst[1:] if worst is not None else None


def _gap(
    one: list[tuple[float, ...]], other: list[tuple[float, ...]], feature: int
) -> tuple[float, float, float, float]:
    """(difference of the means in spreads, in standard errors, the two means)."""
    a, b = [row[feature] for row in one], [row[feature] for row in other]
    here, there = statistics.fmean(a), statistics.fmean(b)
    spread = max(((statistics.pvariance(a) + statistics.pvariance(b)) / 2) ** 0.5, FLOORS[feature])
    effect = abs(here - there) / spread
    return effect, effect / (1 / len(a) + 1 / len(b)) ** 0.5, here, there
