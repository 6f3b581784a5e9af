"""Pictures that a model made, beside those that it learnt from: copies, collapse, colours, sharpness."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy

from nbdebug.text import listed, module_name
from nbdebug.tools.data.pictures import SIDE, pillow
from nbdebug.tools.data.similarity import near_copies
from nbdebug.tools.quality.rules import Evidence, repeated

CLUSTER, SHARE, LEAST = 0.4, 0.25, 4
"""Two samples are one picture where their distance is so much of the usual distance to a training picture's nearest
neighbour; a mode that has so much of the samples, and at least LEAST, is collapsed."""
SAME = 3.0
"""Mean distance, of 255, of two samples that are one picture where there is no training set to compare with."""
SHIFT, SURE = 3.0, 6.0
"""CIE 1976 units: of a shift that is seen beside the reference (a just noticeable difference is 2.3); and its standard
errors."""
ITSELF, ALIKE = 40, 4.0
"""Training pictures that are compared with the others: copies count where their share is over so many times as large
as among these, since the pictures of some sets are alike by nature."""
CLOSE_AS, LEAST_APART, NOISE, NOTHING_ALIKE = 0.4, 3.0, 12.0, 40.0
"""A copy differs from a training picture by at most so much of the least difference between two of these (of 255, root
mean square over colour thumbnails), which must be at least the second; by the third at most; and the value where
nothing is alike. Healthy sets of 15 kinds: 0.41 and more of the least difference."""
GAIN, RIVALS, MANY, FLATTEST = 0.6, 3, 20_000, 4.0
"""Contrast of a copy; training pictures that are compared closely; and most of them; contrast of a picture that shows
something."""
ENOUGH, APART, MOST_ALIKE = 50, 0.6, 500
"""Training pictures, and their largest correlation, from and up to which their mean is left out; most of them."""
FAINT = (8.0, 0.02)
"""Contrast below which rounding makes pictures alike, and the distance that is then needed."""
FEWEST = 8
"""Pictures on either side of which colours and sharpness are judged."""
SHARPNESS, BEYOND = 0.5, 0.9
"""The logarithm by which fine detail must differ, and the share of samples beyond the middle of the training set."""
VISIBLE = 2.55
"""Grain of less (of 255, in grey) lies 40 dB under the picture and is not seen."""


def pictures_of(given: Any) -> list[Any] | None:
    """Arrays (H, W, 3) of uint8: of arrays or tensors (N, H, W, 3), (N, 3, H, W), (N, H, W), of a list of such or of
    PIL images. Floats are 0 to 1, or -1 to 1 where one is negative. None where these are no pictures."""
    given = array_of(given) if hasattr(given, "detach") else given
    if getattr(given, "ndim", 3) not in (3, 4):
        return None
    rows = list(given)
    if not rows or isinstance(rows[0], str):
        return None
    first = array_of(rows[0])
    if first.ndim not in (2, 3) or first.dtype.kind not in "iufb":
        return None
    low = min((float(numpy.min(row)) for row in rows if not module_name(type(row)).startswith("PIL.")), default=0.0)
    return [_picture(row, low < 0) for row in rows]


def array_of(row: Any) -> Any:
    """A tensor, or what is like an array, as one of NumPy."""
    return numpy.asarray(row.detach().cpu() if hasattr(row, "detach") else row)


def _picture(row: Any, signed: bool) -> Any:
    if module_name(type(row)).startswith("PIL."):
        return numpy.asarray(row.convert("RGB"))
    values = array_of(row)
    if values.dtype.kind == "f":
        values = numpy.clip(numpy.round((values * 127.5 + 127.5) if signed else values * 255), 0, 255)
    if values.ndim == 2:
        values = values[..., None]
    if values.shape[2] not in (1, 3, 4) and values.shape[0] in (1, 3, 4):
        values = values.transpose(1, 2, 0)
    return numpy.repeat(values, 3, 2).astype("uint8") if values.shape[2] == 1 else values[..., :3].astype("uint8")


def thumbnails(pictures: list[Any], mode: str) -> Any:
    """(N, SIDE, SIDE) grey, or (N, SIDE, SIDE, 3)."""
    Image, size = pillow()[0], (SIDE, SIDE)
    return numpy.stack([numpy.asarray(Image.fromarray(p).convert(mode).resize(size, Image.BOX)) for p in pictures])


def copies(pictures: list[Any], training: list[Any]) -> list[tuple[int, int, float]]:
    """(sample, training picture, distance) of each that is a copy, for this set: also flipped, moved, brighter, noisy,
    of another size, or saved anew. By the correlation of grey thumbnails, and by what is left between two in colour."""
    known, some = thumbnails(training, "L"), thumbnails(pictures, "L")
    ranks = [0] * len(training) + [1] * len(pictures)
    pairs = list(near_copies(numpy.concatenate([known, some]), ranks))
    faint = {row + len(training) for row, picture in enumerate(some) if float(picture.std()) < FAINT[0]}
    pairs = [pair for pair in pairs if pair[0] not in faint or pair[2] < FAINT[1]]
    if pairs:
        step = max(2, len(training) // ITSELF)
        own = [int(row % step == 0) for row in range(len(training))]
        usual = len(list(near_copies(known, own))) / sum(own)
        if len(pairs) <= ALIKE * usual * len(pictures):
            return []
    known_pairs = {row - len(training): (match, distance) for row, match, distance in pairs}
    for row, match, distance in itertools.chain(_left_over(pictures, training), _beside_their_mean(pictures, training)):
        known_pairs.setdefault(row, (match, distance))
    return [(row, *pair) for row, pair in sorted(known_pairs.items())]


def _left_over(pictures: list[Any], training: list[Any]) -> Iterator[tuple[int, int, float]]:
    """(sample, training picture, difference of 255) of those that differ by far less than any two training pictures."""

    if len(training) < FEWEST or len(training) > MANY:
        return
    known, some = (thumbnails(part, "RGB").astype("float32") for part in (training, pictures))
    keys = _units(known)
    step = max(1, len(training) // ITSELF)
    own = min(_nearest(known[row], known, keys, row)[1] for row in range(0, len(training), step))
    if own < LEAST_APART:
        return
    limit = min(CLOSE_AS * own, NOISE)
    for row, picture in enumerate(some):
        match, left = _nearest(picture, known, keys)
        if left <= limit and picture.std() > FLATTEST:
            yield row, match, left / 255


def _beside_their_mean(pictures: list[Any], training: list[Any]) -> Iterator[tuple[int, int, float]]:
    """The same in sets of nearly one picture: by the correlation of what is left beside the mean picture and its
    brightness. In 391 healthy sets (60 samples, 20 to 60 modes) the nearest one had 0.57 of that gap, or more."""
    if not ENOUGH <= len(training) <= MANY:
        return
    known, some = (thumbnails(part, "RGB").reshape(len(part), -1) / 255 for part in (training, pictures))
    mean = known.mean(0)
    base = numpy.linalg.qr(numpy.stack([numpy.ones_like(mean), mean], 1))[0]
    units = [rest / numpy.maximum(numpy.linalg.norm(rest, axis=1, keepdims=True), 1e-6)
             for part in (known, some) for rest in [part - mean - (part - mean) @ base @ base.T]]  # fmt: skip
    own = max(numpy.sort(units[0] @ unit)[-2] for unit in units[0][:: max(1, len(training) // MOST_ALIKE)])
    for row, unit in enumerate(units[1] if own < APART else ()):
        alike = units[0] @ unit
        if 1 - alike.max() <= CLOSE_AS * (1 - own):
            yield row, int(alike.argmax()), float(1 - alike.max())


def _units(thumbs: Any) -> Any:
    flat = thumbs.reshape(len(thumbs), -1) - thumbs.mean((1, 2, 3))[:, None]
    return flat / numpy.maximum(numpy.linalg.norm(flat, axis=1, keepdims=True), 1e-6)


def _nearest(picture: Any, known: Any, keys: Any, without: int = -1) -> tuple[int, float]:
    """(training picture, root mean square of what is left) with the best flip, shift, gain and offset."""
    turns = (picture, picture[:, ::-1], picture[::-1])
    alike = numpy.stack([keys @ _units(turned[None])[0] for turned in turns])
    if without >= 0:
        alike[:, without] = -1
    best = (-1, NOTHING_ALIKE)
    for place in alike.argsort(axis=None)[: -RIVALS - 1 : -1]:
        turn, match = divmod(int(place), len(keys))
        if alike[turn, match] > 0.5:
            best = min(best, (match, _left(turns[turn], known[match])), key=lambda pair: pair[1])
    return best


def _left(one: Any, other: Any) -> float:
    best = NOTHING_ALIKE
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            a = one[max(0, dy) : SIDE + min(0, dy), max(0, dx) : SIDE + min(0, dx)]
            b = other[max(0, -dy) : SIDE + min(0, -dy), max(0, -dx) : SIDE + min(0, -dx)]
            a, b = a - a.mean(), b - b.mean()
            gain = float((a * b).sum() / max(float((b * b).sum()), 1e-6))
            if GAIN < gain < 1 / GAIN:
                best = min(best, float(((a - gain * b) ** 2).mean()) ** 0.5 / max(gain, 1.0))
    return best


def problems(generated: list[Any], training: list[Any] | None, reference: list[Any] | None) -> Iterator[Evidence]:
    yield from repeated("picture", copies(generated, training) if training else [], len(generated))
    yield from collapse(generated, training or reference)
    other = reference or training
    if other and min(len(other), len(generated)) >= FEWEST:
        yield from _colour(generated, other)
        yield from _sharpness(generated, other)


def _distances(some: Any, others: Any) -> Any:
    """(N, M) root mean squares of the differences of colour, of 255."""
    a, b = (x.reshape(len(x), -1).astype("float32") for x in (some, others))
    square = (a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2 * a @ b.T
    return numpy.sqrt(numpy.maximum(square, 0) / a.shape[1])


def collapse(generated: list[Any], training: list[Any] | None) -> Iterator[Evidence]:
    if len(generated) < LEAST:
        return
    own = thumbnails(generated, "RGB")
    limit = SAME
    if training and len(training) >= FEWEST:
        known = thumbnails(training[:2000], "RGB")
        gaps = _distances(known, known)
        numpy.fill_diagonal(gaps, numpy.inf)
        limit = CLUSTER * float(numpy.median(gaps.min(1)))
    near = _distances(own, own) < max(limit, 1e-3)
    middle = int(near.sum(1).argmax())
    rows = tuple(int(row) for row in numpy.flatnonzero(near[middle]))
    if len(rows) >= max(LEAST, SHARE * len(generated)):
        title = f"{len(rows)} of {len(generated)} samples are one picture: {listed(rows, 8, '')}"
        yield Evidence("quality/mode-collapse", title, rows, {"alike": len(rows), "distance of two pictures": limit})


def lab(pictures: list[Any]) -> Any:
    """(N, 3): the mean L*, a*, b* of each picture (sRGB, D65; a* and b* are 0 for grey)."""
    rgb = thumbnails(pictures, "RGB").astype("float64") / 255
    linear = numpy.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = numpy.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
    )
    xyz = linear @ to_xyz.T / to_xyz.sum(1)
    f = numpy.where(xyz > (6 / 29) ** 3, numpy.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    values = numpy.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)
    return values.mean((1, 2))


def _colour(generated: list[Any], other: list[Any]) -> Iterator[Evidence]:
    """A tint that all share: the mean of a* and b* beside the reference's, by its own error."""
    one, two = lab(generated), lab(other)
    shift = one.mean(0) - two.mean(0)
    error = numpy.sqrt(one.var(0, ddof=1) / len(one) + two.var(0, ddof=1) / len(two))
    size = math.hypot(shift[1], shift[2])
    along = shift[1:] / max(size, 1e-9)
    a, b = one[:, 1:] @ along, two[:, 1:] @ along
    sigma = math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)) or 1e-9
    if size < SHIFT or size < SURE * sigma:
        return
    name = tint(generated, other)
    rows = tuple(int(row) for row in numpy.flatnonzero(a > numpy.quantile(b, 0.95)))
    title = f"The samples lean to {name}: by {size:.1f} ± {1.96 * sigma:.1f} in a* and b*"
    values = {"where": [name], "L* a* b*": [float(v) for v in shift], "errors": [float(v) for v in error]}
    yield Evidence("quality/color-shift", title, rows, {**values, "beyond 95% of the reference": len(rows)})


def tint(generated: list[Any], other: list[Any]) -> str:
    """Which colour is too strong, or the opposite of the one that is too weak: by the gain of each channel."""
    means = [thumbnails(some, "RGB").reshape(-1, 3).mean(0) for some in (generated, other)]
    gain = numpy.log(numpy.maximum(means[0], 1)) - numpy.log(numpy.maximum(means[1], 1))
    gain -= gain.mean()
    most = int(numpy.abs(gain).argmax())
    return (("red", "green", "blue") if gain[most] > 0 else ("cyan", "magenta", "yellow"))[most]


def _fine(picture: Any) -> Any:
    """The Laplacian (H - 2, W - 2) of the grey picture: noise of deviation s gives it a variance of 20 s^2."""
    g = picture.astype("float32").mean(2)
    return 4 * g[1:-1, 1:-1] - g[:-2, 1:-1] - g[2:, 1:-1] - g[1:-1, :-2] - g[1:-1, 2:]


def _detail(picture: Any) -> float:
    """The logarithm of a picture's fine detail (the Laplacian) beside its contrast."""
    contrast = float(picture.astype("float32").mean(2).std())
    return math.log((float(_fine(picture).std()) + 0.5) / (contrast + 0.5))


def _grain(picture: Any) -> float:
    """The logarithm of the middle size of a picture's fine detail: noise in what is otherwise flat."""
    return math.log(float(numpy.median(numpy.abs(_fine(picture)))) + 1.0)


def _sharpness(generated: list[Any], other: list[Any]) -> Iterator[Evidence]:
    """Samples that are all softer, or all grainier, than the reference; of one size alone."""
    if {p.shape for p in generated} == {p.shape for p in other} and min(generated[0].shape[:2]) >= 8:
        found = (one for measure in (_detail, _grain) for one in _sharper(measure, generated, other))
        yield from itertools.islice(found, 1)


def _sharper(measure: Any, generated: list[Any], other: list[Any]) -> Iterator[Evidence]:
    one, two = (numpy.array(list(map(measure, pictures))) for pictures in (generated, other))
    gap, spread = float(numpy.median(one) - numpy.median(two)), float(numpy.subtract(*numpy.quantile(two, [0.9, 0.1])))
    sure = (numpy.sign(gap) * (one - numpy.median(two)) > 0).mean() >= BEYOND
    if abs(gap) < max(SHARPNESS, 1.2 * spread) or not sure or (gap < 0 and measure is _grain):
        return
    fine = [float(numpy.median([_fine(picture).var() for picture in pictures])) for pictures in (generated, other)]
    if gap > 0 and fine[0] - fine[1] < 20 * VISIBLE**2:
        return
    outside = one < two.min() if gap < 0 else one > two.max()
    rows = tuple(int(row) for row in numpy.flatnonzero(outside))
    code, words = ("blurred", "softer") if gap < 0 else ("noisy", "grainier")
    title = f"The samples are {words} than the reference: they have {math.exp(gap):.2f} times its fine detail"
    yield Evidence(f"quality/{code}", title, rows, {"fine detail, times the reference's": math.exp(gap)})
