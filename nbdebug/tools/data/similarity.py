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
Of 4,000 pairs of JPEG (quality 30 to 95), flips, 5% brighter and shifts by 3%, the largest is 0.11."""
SPARSE = 0.35
"""Distance to the other neighbours in sets of photographs. In a set of digits or of faces it is 0.05 to 0.15, and some
are much nearer than that by chance."""
LEVELS = 2.0
"""Mean difference, of 255, of two thumbnails that are one picture encoded twice."""
MOST = 60_000
"""Pictures among which near copies are looked for; beyond, only equal thumbnails are."""
SAMPLE = 400
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

        return numpy.frombuffer(bytes(self.data), dtype="uint8").reshape(-1, SIDE, SIDE)


def _spreads(images: Any) -> Any:
    import numpy

    return numpy.array([image.std(dtype="float32") for image in images])


def _unit(images: Any) -> Any:
    """Thumbnails of half the side, without their mean, of length 1: their products are correlations."""
    import numpy

    half = numpy.empty((len(images), SIDE * SIDE // 4), dtype="float32")
    for start in range(0, len(images), 1024):  # in pieces, for the memory
        some = images[start : start + 1024]
        boxes = some.reshape(len(some), SIDE // 2, 2, SIDE // 2, 2).mean((2, 4), dtype="float32")
        half[start : start + 1024] = boxes.reshape(len(some), -1)
    half -= half.mean(1, keepdims=True)
    length = numpy.linalg.norm(half, axis=1, keepdims=True)
    return half / numpy.maximum(length, 1e-6)


def near_copies(images: Any, ranks: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """(picture, original, distance) where the original is of a lower rank. images: (N, SIDE, SIDE), grey; ranks: of
    each one's split. Each picture is given once, with its nearest original."""
    import numpy

    rank = numpy.asarray(ranks)
    distinct = _spreads(images) > FLAT
    if len(images) > MOST:
        yield from _equal(images, rank, distinct)
        return
    units = _unit(images)
    for level in sorted(set(ranks))[1:]:
        queries = numpy.flatnonzero(distinct & (rank == level))
        originals = numpy.flatnonzero(distinct & (rank < level))
        if len(queries) and len(originals):
            yield from _copies_of(images, units, queries, originals)


def _equal(images: Any, rank: Any, distinct: Any) -> Iterator[tuple[int, int, float]]:
    first: dict[bytes, int] = {}
    for place in sorted((int(i) for i in range(len(images)) if distinct[i]), key=lambda i: rank[i]):
        before = first.setdefault(images[place].tobytes(), place)
        if rank[before] < rank[place]:
            yield place, before, 0.0


def _copies_of(images: Any, units: Any, queries: Any, originals: Any) -> Iterator[tuple[int, int, float]]:
    import numpy

    keys = units[originals]
    usual = _usual_distance(keys)
    for start in range(0, len(queries), 256):
        some = queries[start : start + 256]
        best = numpy.full(len(some), -1.0, dtype="float32")
        place, flip = numpy.zeros(len(some), dtype=int), numpy.zeros(len(some), dtype=int)
        for number, turned in enumerate(_flips(images[some])):
            products = _unit(turned) @ keys.T
            top = products.argmax(1)
            value = products[numpy.arange(len(some)), top]
            better = value > best
            best[better], place[better], flip[better] = value[better], top[better], number
        for i in numpy.flatnonzero(best > 0.7):
            turned = next(itertools.islice(_flips(images[some[i] : some[i] + 1]), int(flip[i]), None))
            products = (_unit(turned) @ keys.T)[0]
            nearest = [int(k) for k in numpy.argsort(-products, kind="stable")[:RIVALS]]
            if min(aligned_distance(turned[0], images[originals[k]]) for k in nearest[:2]) > NEAR:
                continue
            aligned = sorted((aligned_distance(turned[0], images[originals[k]]), int(originals[k])) for k in nearest)
            distance, original = aligned[0]
            # the third of the others is the measure: one or two may be further copies
            rival = aligned[3][0] if len(aligned) > 3 else usual
            pixels = float(numpy.abs(turned[0].astype("float32") - images[original]).mean())
            scale = min(usual, rival)
            most = min(NEAR, RATIO * scale * min(1.0, (scale / SPARSE) ** 2))
            if distance <= most or (pixels <= LEVELS and distance < min(0.004, rival / 8)):
                yield int(some[i]), original, distance


def _flips(images: Any) -> Iterator[Any]:
    yield from (images, images[:, :, ::-1], images[:, ::-1])


def _usual_distance(keys: Any) -> float:
    """How far the nearest neighbour is from a picture of the set, as a rule. Of one picture: 1."""
    some = keys[:: max(1, len(keys) // SAMPLE)][:SAMPLE]
    products = some @ keys.T
    products[products > 0.99999] = -1  # itself
    nearest = 1 - products.max(1)
    return float(statistics.median(nearest.tolist())) if len(keys) > 1 else 1.0


def aligned_distance(one: Any, other: Any, reach: int = 2) -> float:
    """One minus the largest correlation of two thumbnails over shifts of up to `reach` of their pixels (6%)."""
    import numpy

    a, best = one.astype("float32"), -1.0
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            left = a[max(0, dy) : SIDE + min(0, dy), max(0, dx) : SIDE + min(0, dx)]
            right = other[max(0, -dy) : SIDE + min(0, -dy), max(0, -dx) : SIDE + min(0, -dx)].astype("float32")
            left, right = left - left.mean(), right - right.mean()
            below = float(numpy.sqrt((left * left).sum() * (right * right).sum()))
            best = max(best, float((left * right).sum()) / below if below else -1.0)
    return 1 - best


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
