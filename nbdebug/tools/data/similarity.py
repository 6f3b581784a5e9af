"""Items beside items: equal ones in several splits, equal ones with two labels, near copies of pictures that survive
re-encoding, flips and small shifts, in one split or two, and folders whose colours are unlike those of the others.

A copy is not what looks alike but what looks alike *for this set*: two digits 1 are near each other, and so are all the
pages of a book. So the distance of a pair is compared with the distances to its other neighbours.
"""

from __future__ import annotations

import collections
import itertools
import statistics
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy

from nbdebug.text import clip, listed
from nbdebug.tools.data.cures import Problem
from nbdebug.tools.data.inventory import RANK
from nbdebug.tools.data.pictures import SIDE

FLAT = 4.0
"""Spread of the grey values below which a picture shows too little to be distinct from others."""
NEAR, RATIO = 0.12, 0.25
"""One minus the correlation of two thumbnails: at most so much, and so much of the distance to the other neighbours.
Of 4,000 pairs of JPEG (quality 30 to 95), flips, 5% brighter and shifts by 3%, the largest is 0.11. ImageHash's
hashes have one limit for all sets: phash within 8 of 64 bits finds 64% of photographs moved by 3% (this: all), and
calls 88 of 100 different faces copies (this: none)."""
SPARSE = 0.35
"""Distance to the other neighbours in sets of photographs. Among digits or faces 0.05 to 0.15, and less by chance."""
LEVELS = 2.0
"""Mean difference, of 255, of two thumbnails that are one picture encoded twice."""
MOST, MOST_WITHIN = 60_000, 20_000
"""Pictures of a set, and of one split, among which near copies are looked for."""
SAMPLE = 400
PIECE = 256
"""Pictures that are worked on at once, for the memory."""
ALIKE_AT_ALL = 0.7
"""Correlation of two small thumbnails that are worth a closer look."""
REACH = 2
RIVALS = 8
"""Originals that are near a picture, and are compared with it pixel by pixel."""


def equal_across_splits(items: Iterable[tuple[str, Any, str | int, str]], words: str) -> Iterator[Problem]:
    """Items whose contents stand in an earlier split, too. items: (split, digest or None, item, file)."""
    first: dict[Any, tuple[str, str | int]] = {}
    for split, digest, item, file in sorted(items, key=lambda one: RANK.get(one[0], 1)):
        before = first.setdefault(digest, (split, item)) if digest else (split, item)
        if before[0] != split:
            yield Problem("data/duplicate-across-splits", item, f"{words} {before[1]}", file)


def contradictions(items: Sequence[tuple[Any, str, Any]], most: float) -> Iterator[tuple[Any, Any]]:
    """(item, other item) of equal contents and two labels. items: (digest, label, item). Over `most` are meant."""
    groups = collections.defaultdict(list)
    for digest, label, item in items:
        groups[digest].append((label, item))
    bad = [group for group in groups.values() if len({label for label, _ in group}) > 1]
    for group in bad if sum(map(len, bad)) <= most * len(items) else ():
        for label, item in group:
            yield item, next(other for its, other in group if its != label)


def two_labels(rows: Sequence[tuple[Any, str, int]]) -> Iterator[tuple[int, str]]:
    """(row, detail) of rows with one input and two labels, if they are few. rows: (digest of input, label, row)."""
    labels = {row: label for _, label, row in rows}
    if len(set(labels.values())) <= max(20, len(rows) / 4):
        for row, other in contradictions(rows, 0.4):
            yield row, f"{clip(labels[row], 30)}; row {other} with the same input is {clip(labels[other], 30)}"


def label_variants(counts: Mapping[str, int], classes: int | None = None) -> dict[str, str]:
    """Spelling → the usual spelling of its class, where they differ by white space or width, by capitals (in words of
    three letters and more), or by accents, if the number of classes says that there are fewer."""
    if len(counts) in (0, classes) or len(counts) > max(20, sum(counts.values()) / 4):
        return {}
    levels = (1, 2) if classes is not None and classes < len(counts) else (1,)
    for level in levels:
        groups = collections.defaultdict(list)
        for text in counts:
            groups[_spelled(text, level)].append(text)
        if level == levels[-1] or len(groups) == classes:
            break
    usual = {key: max(texts, key=lambda t: (counts[t], t == t.strip())) for key, texts in groups.items()}
    return {text: usual[key] for key, texts in groups.items() for text in texts if text != usual[key]}


def _spelled(text: str, level: int) -> str:
    plain = " ".join(unicodedata.normalize("NFKC", text).split())
    plain = plain.casefold() if len(plain) > 2 else plain
    parts = unicodedata.normalize("NFKD", plain) if level > 1 else plain
    return "".join(sign for sign in parts if not unicodedata.combining(sign)) if level > 1 else plain


LEAST_BESIDE, MEANT = 20, 0.2
"""Items of a split whose copies are told, and the share of copies from which on they are meant."""
WORDS, CHARACTERS = 8, 60
"""Of a text that does not stand twice by chance: the one or the other."""


def is_long(value: Any) -> bool:
    return isinstance(value, str) and (len(value.split()) >= WORDS or len(value.strip()) >= CHARACTERS)


def repeated(rows: Sequence[tuple[Any, str, Any]]) -> Iterator[tuple[Any, Any]]:
    """(item, original) of copies within one split. rows: (digest of all of it, label, item), of those that are long
    enough. Copies that are many are meant: of all, or of a class that is drawn more often."""
    first: dict[Any, Any] = {}
    copies = [(label, item, first[digest]) for digest, label, item in rows if first.setdefault(digest, item) != item]
    sizes, own = (collections.Counter(one[i] for one in some) for some, i in ((rows, 1), (copies, 0)))
    for label, item, original in copies if LEAST_BESIDE <= len(rows) >= len(copies) / MEANT else ():
        if own[label] <= MEANT * sizes[label] or len(sizes) > max(20, len(rows) / 4):  # then labels are texts, too
            yield item, original


def balance(counts: Mapping[str, int], what: str, unit: str, classes: int | None = None) -> Iterator[str]:
    """In words, where classes are far from even, and which are not there. A long tail may be meant: it is no fault."""
    if not 1 < len(counts) <= max(20, sum(counts.values()) / 4):
        return
    (most, high), *_, (least, low) = sorted(counts.items(), key=lambda item: -item[1])
    if high >= 3 * low:
        yield f"The fullest of {len(counts):,} {what} is {most} ({high:,} {unit}), the emptiest {least} ({low:,})."
    classes = classes if all(label[:1].isdigit() for label in counts) else 0  # texts are numbered later
    if absent := sorted(set(map(str, range(classes or 0))) - {label.removesuffix(".0") for label in counts}, key=int):
        yield f"Labels without a {unit.rstrip('s')}: {listed(absent, quote='')}."


def distinct(images: Any) -> Any:
    """Whether each shows enough to be told from others."""
    pieces = (images[start : start + PIECE].reshape(-1, SIDE * SIDE) for start in range(0, len(images), PIECE))
    return numpy.concatenate([numpy.zeros(0, bool), *(piece.std(1, dtype="float32") > FLAT for piece in pieces)])


def _unit(images: Any) -> Any:
    """Thumbnails of half the side, without their mean, of length 1: their products are correlations."""
    boxes = images.reshape(len(images), SIDE // 2, 2, SIDE // 2, 2).mean((2, 4), dtype="float32")
    half = boxes.reshape(len(images), -1)
    half -= half.mean(1, keepdims=True)
    half /= numpy.maximum(numpy.sqrt(numpy.einsum("np,np->n", half, half)), 1e-6)[:, None]
    return half


def near_copies(images: Any, ranks: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """(picture, original, distance), nearest, where the original is of a lower rank, or the earlier of the same; once
    for each of the two. images: (N, SIDE, SIDE), grey; ranks: of each one's split."""
    rank = numpy.asarray(ranks)
    clear = distinct(images)
    for level in sorted(set(ranks)):
        queries = numpy.flatnonzero(clear & (rank == level))
        for originals, most in ((numpy.flatnonzero(clear & (rank < level)), MOST), (queries, MOST_WITHIN)):
            if len(queries) and 0 < len(originals) <= most and len(images) <= MOST:
                yield from _copies_of(images, queries, originals)


def _copies_of(images: Any, queries: Any, originals: Any) -> Iterator[tuple[int, int, float]]:
    """Copies among queries. originals: others, or the queries themselves; then an original is an earlier one."""
    keys = numpy.empty((len(originals), SIDE * SIDE // 4), dtype="float32")
    for start in range(0, len(originals), PIECE):
        keys[start : start + PIECE] = _unit(images[originals[start : start + PIECE]])
    usual, within, others = _usual_distance(keys), originals is queries, images[originals]
    if within and usual < SPARSE / 2:  # of digits in one font, some are equal by chance
        return
    for start in range(0, len(queries), PIECE // 4):
        some = queries[start : start + PIECE // 4]
        best: list[tuple[float, int, Any]] = [(ALIKE_AT_ALL, 0, None)] * len(some)
        for number, turned in enumerate(_flips(images[some])):
            products = _unit(turned) @ keys[: start + len(some) if within else None].T
            if within:
                products[:, start:][numpy.triu_indices(len(some))] = -1  # only earlier ones
            top = products.max(1)
            for i in numpy.flatnonzero(top > [value for value, _, _ in best]).tolist():
                nearest = numpy.argpartition(-products[i], min(RIVALS, products.shape[1]) - 1)[:RIVALS]
                best[i] = float(top[i]), number, nearest[numpy.argsort(-products[i][nearest], kind="stable")]
        for i, (_, number, nearest) in enumerate(best):
            if nearest is not None:
                turned = next(itertools.islice(_flips(images[some[i] : some[i] + 1]), number, None))[0]
                found = _near(turned, others, nearest, usual, keys, start + i if within else None)
                if found is not None:
                    yield int(some[i]), int(originals[found[0]]), found[1]


def _near(one: Any, others: Any, nearest: Any, usual: float, keys: Any, place: int | None) -> tuple[int, float] | None:
    """(place, distance) of that of which one is a copy. nearest: places that are looked at; place: its own, or None."""
    # moved further: in sets of patterns, some of the others fit by chance
    if aligned_distances(one, others[nearest[:2]]).min() > NEAR:
        return None
    if place is not None:  # later ones are neighbours, too
        nearest = numpy.argsort(-(keys @ _unit(one[None])[0]), kind="stable")[: RIVALS + 1]
        nearest = nearest[nearest != place]
    aligned = aligned_distances(one, others[nearest])
    order = numpy.argsort(aligned, kind="stable")
    best = next((o for o in order[:3] if place is None or nearest[o] < place), None)
    if best is None:
        return None
    distance = max(0.0, float(aligned[best]))
    # the third of the others is the measure: one or two may be further copies
    rival = float(aligned[order[3]]) if len(order) > 3 else usual
    pixels = float(numpy.abs(one.astype("float32") - others[nearest[best]]).mean())
    scale = min(usual, rival)
    most = min(NEAR, RATIO * scale * min(1.0, (scale / SPARSE) ** 2))
    is_copy = distance <= most or (pixels <= LEVELS and distance < min(0.004, rival / 8))
    return (int(nearest[best]), distance) if is_copy else None


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
    """One minus the largest correlation of a thumbnail's middle with each of the others (N, SIDE, SIDE), moved 6%."""
    inner = SIDE - 2 * REACH
    middle = one[REACH:-REACH, REACH:-REACH].astype("float32").ravel()
    middle -= middle.mean()
    windows = numpy.lib.stride_tricks.sliding_window_view(others.astype("float32"), (inner, inner), (1, 2))
    flat = windows.reshape(len(others), -1, inner * inner)
    spread = numpy.einsum("nsp,nsp->ns", flat, flat) - flat.sum(2) ** 2 / (inner * inner)
    below = numpy.sqrt(numpy.maximum(spread, 1e-3) * max(float(middle @ middle), 1e-3))
    return 1 - (flat @ middle / below).max(1)


LEAST = 5
"""Pictures of a folder that is judged."""
EFFECT = {True: 1.5, False: 3.0}
"""By how many spreads of the pictures a folder must differ: a split, or any other folder (which may be a class)."""
SIGNIFICANT, ALIKE = 6.0, 0.8
FLOORS = (0.004, 0.004, 3.0, 3.0)
NAMES = ("share of red", "share of blue", "brightness", "contrast")


def features(mean: Sequence[float], spread: float) -> tuple[float, ...]:
    """Of a picture: the shares of red and of blue, brightness, contrast."""
    total = max(1.0, sum(mean))
    return mean[0] / total, mean[2] / total, 0.299 * mean[0] + 0.587 * mean[1] + 0.114 * mean[2], spread


def shifted_folder(folders: Mapping[str, list[tuple[float, ...]]], splits: bool) -> tuple[str, str] | None:
    """(folder, what is unlike) of the one folder whose pictures are unlike those of all others, which are like each
    other. folders: the features of the pictures of each; splits: whether they are training, validation and test set."""
    large = {name: numpy.array(rows) for name, rows in folders.items() if len(rows) >= LEAST}
    if len(large) < 2 or (len(large) < 3 and not splits):
        return None
    moments = {name: _moments(rows) for name, rows in large.items()}
    worst: tuple[float, str, str] | None = None
    for name, own in moments.items():
        others = [n for n in large if n != name]
        rest = _moments(numpy.concatenate([large[n] for n in others]))
        effects = _gap(own, rest)
        feature = int(effects.argmax())
        effect = float(effects[feature])
        z = effect / (1 / own[2] + 1 / rest[2]) ** 0.5
        alike = max(ALIKE, effect / 4)
        clear = effect >= EFFECT[splits] and z >= SIGNIFICANT and (worst is None or effect > worst[0])
        if clear and all(_gap(moments[a], moments[b]).max() < alike for a, b in itertools.combinations(others, 2)):
            detail = f"{NAMES[feature]} {own[0][feature]:.3g} on average, {rest[0][feature]:.3g} in the others"
            worst = (effect, name, detail)
    if worst is not None and len(large) == 2:  # which of two is unlike cannot be seen: the training set is the measure
        name = next((n for n in large if "train" not in n.lower()), worst[1])
        return name, worst[2] if name == worst[1] else f"unlike {worst[1]}: there {worst[2]}"
    return worst[1:] if worst is not None else None


def _moments(rows: Any) -> tuple[Any, Any, int]:
    """(means, variances, number) of the features of pictures."""
    return rows.mean(0), rows.var(0), len(rows)


def _gap(one: tuple[Any, Any, int], other: tuple[Any, Any, int]) -> Any:
    """The difference of the means, in spreads of the pictures, by feature."""
    return abs(one[0] - other[0]) / numpy.maximum(((one[1] + other[1]) / 2) ** 0.5, FLOORS)
