"""check_outputs(): what is wrong with the pictures, texts, sounds or vectors that a model made. Of texts: loops, ends
that are cut off, copies of the training set; what is asked of pictures is in `images.py`."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from nbdebug.report import Plot, Report, RuledOut, Table
from nbdebug.text import clip, count, listed, percent
from nbdebug.tools.data.check_data import drawn_item
from nbdebug.tools.quality import images
from nbdebug.tools.quality.rules import Evidence, findings_of, repeated

SHOWN = 6
"""Pairs of the gallery."""
QUIET, FULL, FLAT, CLIPPED = 1e-4, 0.99, 3, (0.002, 0.4)
"""A sound is silent where its peak is below the first (80 dB under full scale); clipped where runs of so many equal
values at a peak that is nearly full scale make up a share of it between these two (a square wave is all peak)."""
BANDS, FRAMES, DECIBELS = 32, 32, 80.0
"""Of the small spectrogram by which sounds are compared: bands on a scale like the ear's, frames, and range."""
NEAR = 0.1
"""A vector is a copy where its distance to training is so much of the usual one between two training vectors."""


def check_outputs(
    generated: Any = None,
    *,
    training: Any = None,
    reference: Any = None,
    evaluation: Any = None,
    prompts: Sequence[str] | None = None,
    embed: Callable[[Any], Any] | None = None,
    sample_rate: int | None = None,
) -> Report:
    """Find what is wrong with what a model made, beside what it learnt from.

    generated: pictures (arrays or tensors (N, H, W, 3), (N, 3, H, W) or (N, H, W), uint8, or floats of 0 to 1 or -1 to
    1; a list of them or of PIL images), texts (a list of str; without the prompt), or vectors (N, D). training: what
    the model learnt from, in the same form: samples that repeat it are named, also flipped, moved, brighter, noisy or
    saved anew, by the training set's own distances. reference: what the outputs should look like in colour and
    sharpness (default: training). evaluation: rows of an evaluation set; those that stand in training are named.
    prompts: one for each text, which is cut off its beginning. embed: your own function, from all items to vectors
    (N, D), for things of another kind: its distances are then judged. sample_rate: these are sounds: (N, T), or a list
    of arrays (T) or (channels, T), floats of -1 to 1 or whole numbers; copies and collapse are judged by what their
    spectrograms show, beside silence and clipping.

    What needs a training set is not judged without one. `report.frame()` has a row for each sample that is named.
    Raises TypeError for what is neither, ValueError where nothing is given, or forms differ.
    """
    if generated is None and evaluation is None:
        raise ValueError("check_outputs takes what a model made, or evaluation= and training=")
    if evaluation is not None and training is None:
        raise ValueError("evaluation rows are compared with training=, which is missing")
    if prompts is not None and generated is not None:
        generated = [text.removeprefix(str(prompt)) for prompt, text in zip(prompts, generated, strict=True)]
    seen: list[Evidence] = []
    if sample_rate is not None:
        given = (generated, training, evaluation)
        seen += _sounds(*(None if some is None else sounds_of(some, sample_rate) for some in given))
    elif generated is not None:
        seen += _problems(generated, training, reference, embed)
    if evaluation is not None and sample_rate is None:
        pairs = _copies(_same_kind(evaluation, training, embed), evaluation, training, embed)
        seen += repeated("evaluation row", pairs, len(evaluation))
    rows = [(problem.code, row) for problem in seen for row in problem.samples]
    sizes = {"sample": generated, "training item": training, "evaluation row": evaluation}
    subject = ", ".join(count(len(given), noun) for noun, given in sizes.items() if given is not None)
    unchecked = [] if training is not None else ["copies of the training set: training= is not given"]
    return Report(
        "check_outputs()",
        findings_of(seen),
        () if seen else (RuledOut("what shows in the outputs themselves", subject),),
        tuple(unchecked),
        subject=subject,
        facts={"items": {row: code for code, row in reversed(rows)}},
        headline="" if seen else "No problem was found in these outputs.",
        tables=(Table("Samples", ("problem", "sample"), rows),) if rows else (),
        plots=tuple(_pairs(seen, generated, training)),
        independent=True,
    )


def _kind(given: Any, embed: Any) -> str:
    """ "texts", "pictures" or "vectors". Raises TypeError for anything else."""
    if embed is not None:
        return "vectors"
    if not hasattr(given, "__len__") or isinstance(given, (str, bytes)):
        raise TypeError(f"check_outputs takes pictures, texts or vectors; got {type(given).__name__}")
    if not hasattr(given, "shape") and len(given) and all(isinstance(one, str) for one in given):
        return "texts"
    if getattr(given, "ndim", 0) == 2:
        return "vectors"
    if images.pictures_of(given) is not None:
        return "pictures"
    raise TypeError(f"check_outputs takes pictures, texts or vectors; got a {type(given).__name__} of other things")


def _same_kind(one: Any, other: Any, embed: Any) -> str:
    kind = _kind(one, embed)
    if other is not None and _kind(other, embed) != kind:
        raise ValueError(f"both must be of one form: these are {kind}, those are {_kind(other, embed)}")
    return kind


def _problems(generated: Any, training: Any, reference: Any, embed: Any) -> Iterator[Evidence]:
    kind = _same_kind(generated, training, embed)
    if kind == "texts":
        yield from text_problems(list(generated), None if training is None else list(training))
    elif kind == "pictures":
        _same_kind(generated, reference, embed)
        known = [None if some is None else images.pictures_of(some) for some in (generated, training, reference)]
        yield from images.problems(known[0] or [], known[1], known[2])
    elif training is not None:
        yield from repeated("item", _near_vectors(generated, training, embed), len(generated))


def _copies(kind: str, some: Any, training: Any, embed: Any) -> list[tuple[int, int, float]]:
    if kind == "texts":
        return TrainingTexts(list(training)).copies(list(some))
    if kind == "pictures":
        return images.copies(images.pictures_of(some) or [], images.pictures_of(training) or [])
    return _near_vectors(some, training, embed)


def _near_vectors(generated: Any, training: Any, embed: Any) -> list[tuple[int, int, float]]:
    some, known = (_vectors(given, embed) for given in (generated, training))
    gaps = numpy.linalg.norm(some[:, None] - known[None], axis=2)
    own = numpy.linalg.norm(known[:, None] - known[None], axis=2)
    numpy.fill_diagonal(own, numpy.inf)
    usual = float(numpy.median(own.min(1))) if len(known) > 1 else 0.0
    pairs = [(row, int(gap.argmin()), float(gap.min())) for row, gap in enumerate(gaps) if gap.min() <= NEAR * usual]
    itself = float((own.min(1) <= NEAR * usual).mean())  # of training items that repeat another
    return pairs if len(pairs) > BEYOND * itself * len(some) else []


def _vectors(given: Any, embed: Any) -> Any:
    values = images.array_of(given if embed is None else embed(given)).astype("float64")
    if values.ndim != 2:
        raise ValueError(f"vectors are (N, D); got {values.shape}")
    return values


def sounds_of(given: Any, sample_rate: int) -> list[Any]:
    """Arrays (T) of float64, -1 to 1. Raises TypeError for what is no sound."""
    if sample_rate <= 0:
        raise ValueError(f"sample_rate takes samples per second; got {sample_rate!r}")
    sounds = []
    for row in given:
        values = images.array_of(row)
        if values.ndim not in (1, 2) or values.dtype.kind not in "iuf" or not values.size:
            raise TypeError(f"a sound is an array (T) or (channels, T); got {getattr(values, 'shape', type(row))}")
        scale = float(numpy.iinfo(values.dtype).max) if values.dtype.kind in "iu" else 1.0
        values = values.astype("float64") / scale
        sounds.append(values.mean(int(values.shape[1] < values.shape[0])) if values.ndim == 2 else values)
    return sounds


def _spectrogram(sound: Any) -> Any:
    """(BANDS, FRAMES, 3) uint8: the energy by band and time, in decibels under its peak, as a grey picture."""
    edges = numpy.linspace(0, len(sound), FRAMES + 1).astype(int)
    size = max(64, 2 * (len(sound) // FRAMES))
    bands = numpy.unique(numpy.geomspace(1, size // 2, BANDS + 1).astype(int))
    columns = []
    for start in edges[:-1]:
        part = sound[start : start + size]
        power = numpy.abs(numpy.fft.rfft(part * numpy.hanning(len(part)), size)) ** 2
        columns.append([power[a : max(b, a + 1)].mean() for a, b in itertools.pairwise(bands)])
    level = 10 * numpy.log10(numpy.array(columns).T + 1e-12)
    grey = numpy.clip((level - level.max()) / DECIBELS + 1, 0, 1) * 255
    return numpy.repeat(numpy.round(grey)[..., None], 3, 2).astype("uint8")


def _share_clipped(sound: Any) -> float:
    """The share of values that stand in flat runs at the peak."""
    peak = float(numpy.abs(sound).max())
    if peak < FULL:
        return 0.0
    flat = (numpy.abs(sound) > 0.999 * peak).astype(int)
    edges = numpy.flatnonzero(numpy.diff(numpy.concatenate([[0], flat, [0]])))
    runs = edges[1::2] - edges[::2]
    return float(runs[runs >= FLAT].sum() / len(sound))


def _sounds(
    generated: list[Any] | None, training: list[Any] | None, evaluation: list[Any] | None
) -> Iterator[Evidence]:
    known = None if training is None else [_spectrogram(sound) for sound in training]
    if generated is not None:
        tests: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
            ("silent", "silent", lambda sound: float(abs(sound).max()) < QUIET),
            ("clipped", "clipped: flat at full scale", lambda sound: CLIPPED[0] < _share_clipped(sound) < CLIPPED[1]),
        )
        for slug, words, holds in tests:
            rows = tuple(row for row, sound in enumerate(generated) if holds(sound))
            usual = sum(holds(sound) for sound in training or ()) / len(training) if training else 0.0
            if rows and len(rows) > BEYOND * usual * len(generated):
                title = f"{count(len(rows), 'sound')} of {len(generated)} {'is' if len(rows) == 1 else 'are'} {words}"
                yield Evidence(f"quality/{slug}", title, rows, {"in training": usual})
        audible = {row: _spectrogram(sound) for row, sound in enumerate(generated) if float(abs(sound).max()) >= QUIET}
        places, shown = list(audible), list(audible.values())
        pairs = images.copies(shown, known) if known and shown else []
        yield from repeated("sound", [(places[row], match, gap) for row, match, gap in pairs], len(places))
        for one in images.collapse(shown, known):
            title = f"{len(one.samples)} of {len(places)} samples are one sound"
            yield dataclasses.replace(one, title=title, samples=tuple(places[row] for row in one.samples))
    if evaluation and known:
        yield from repeated(
            "evaluation row", images.copies(list(map(_spectrogram, evaluation)), known), len(evaluation)
        )


def _pairs(seen: list[Evidence], generated: Any, training: Any) -> Iterator[Plot]:
    """Samples beside the training pictures that they repeat."""
    problem = next((one for one in seen if one.code == "quality/memorized"), None)
    if problem is None or "training picture" not in problem.values["pairs"][0]:
        return
    shown = []
    for pair in problem.values["pairs"][:SHOWN]:
        for name, rows, place in (
            ("sample", generated, pair["sample"]),
            ("training", training, pair["training picture"]),
        ):
            if drawn := drawn_item(rows[place]):
                shown.append({"name": f"{name} {place}", "label": "", **drawn})
    if shown:
        yield Plot("gallery", {"title": "Samples, each beside the training picture that it repeats", "pictures": shown})


WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
TIMES, SHORT_TIMES, CHARACTERS, SHORT = 4, 8, 48, 12
"""A loop: its part stands so many times at the end, a part of under SHORT characters more often, over so many
characters. Refrains and laughter are shorter, or something follows them."""
RUN, LEAST = 4, 8
"""Words of a run that two texts share, and of the shortest text of which a changed copy is looked for."""
LONG = 20
"""Words of a text that is equal to another one by no chance, in a set of one template."""
EQUAL = 5
"""Words of the shortest text that counts as a copy where it is equal: shorter replies are anybody's."""
SHARED, HALF = 0.8, 0.6
"""Share of the words, in order, that a copy has in common with its original; and of which a part of a longer text."""
BEYOND = 2.0
"""Texts and vectors that stand in training count where they are so many times as many as training's own repetitions."""
COMMON = 8
"""Training texts with the same run of words: beyond, it is a phrase of the field."""
END = re.compile(r"[.!?…。！？][\"'”’)\]*_`]*$|[)\]}>`;:\"”]$")
LIMIT, CUT = 0.85, 20
"""Share of the longest text's words at which a limit is met; words of the shortest text that is judged."""


def words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def loop(text: str) -> tuple[str, int] | None:
    """(part, times) where a text repeats a part up to its end; the end may be cut. None where it does not."""
    turned = text.rstrip()[::-1]
    match = _matches(turned)
    for period in range(1, len(turned) // TIMES + 1):
        whole = period + match[period]
        times = whole // period
        unit = turned[:period][::-1]
        least = TIMES if period >= SHORT else SHORT_TIMES
        if times >= least and whole >= CHARACTERS and any(map(str.isalnum, unit)):
            return text.rstrip()[-whole:][:period], times
    return None


def _matches(text: str) -> list[int]:
    """Of each place how many characters from there equal those from the beginning (the Z function)."""
    known, left, right = [0] * (len(text) + 1), 0, 0
    for i in range(1, len(text)):
        own = min(right - i, known[i - left]) if i < right else 0
        while i + own < len(text) and text[own] == text[i + own]:
            own += 1
        known[i] = own
        if i + own > right:
            left, right = i, i + own
    return known


class TrainingTexts:
    """Texts to look copies up in: by whole text, and by runs of words that few of them share."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.words = [words(text) for text in texts]
        self.whole: dict[tuple[str, ...], int] = {}
        self.runs: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
        for row, own in enumerate(self.words):
            self.whole.setdefault(tuple(own), row)
            for run in {tuple(own[i : i + RUN]) for i in range(len(own) - RUN + 1)}:
                self.runs[run].append(row)
        self.least = self._least()

    def _least(self) -> float:
        """How alike a copy must be: of a set whose texts are alike by nature (one template) only equal ones are."""
        step = max(1, len(self.words) // 60)
        rows = range(0, len(self.words), step)
        nearest = sorted(self.nearest(self.words[row], row)[1] for row in rows)
        usual = nearest[int(0.9 * len(nearest))] if nearest else 0.0
        return SHARED if usual < HALF else 2.0

    def nearest(self, own: list[str], without: int = -1) -> tuple[int, float]:
        """(row, share of the words in common) of the text that shares the most rare runs; -1 where none does."""
        votes: collections.Counter[int] = collections.Counter()
        for run in {tuple(own[i : i + RUN]) for i in range(len(own) - RUN + 1)}:
            rows = self.runs.get(run, ())
            if len(rows) <= COMMON:
                votes.update(row for row in rows if row != without and self.words[row] != own[:0])
        best = (-1, 0.0)
        for row, _ in votes.most_common(3):
            blocks = difflib.SequenceMatcher(None, own, self.words[row], autojunk=False).get_matching_blocks()
            share = sum(block.size for block in blocks if block.size > 1) / len(own)
            best = max(best, (row, share), key=lambda one: one[1])
        return best

    def match(self, text: str) -> tuple[int, float] | None:
        """(row, share) of the training text of which this one is a copy."""
        own = words(text)
        if len(own) >= EQUAL and tuple(own) in self.whole:
            return self.whole[tuple(own)], 1.0
        if len(own) < LEAST or self.least > 1:
            return None
        row, share = self.nearest(own)
        return (row, share) if row >= 0 and share >= self.least else None

    def copies(self, texts: Sequence[str]) -> list[tuple[int, int, float]]:
        """(row, training row, share) of each copy."""
        matches = [(row, self.match(text)) for row, text in enumerate(texts)]
        pairs = [(row, *match) for row, match in matches if match is not None]
        again = collections.Counter(map(tuple, self.words))
        usual = sum(n for n in again.values() if n > 1) / max(
            1, len(self.words)
        )  # of training texts that repeat another
        return pairs if len(pairs) > BEYOND * usual * len(texts) else []


def text_problems(texts: Sequence[str], training: Sequence[str] | None) -> Iterator[Evidence]:
    if training:
        learnt = TrainingTexts(training)
        pairs = learnt.copies(texts)
        by_chance = learnt.least > 1 and len(pairs) < 3 and all(len(words(texts[row])) < LONG for row, _, _ in pairs)
        shares = [] if by_chance else [(row, match, percent(share)) for row, match, share in pairs]
        yield from repeated("text", shares, len(texts))
    loops = {row: known for row, text in enumerate(texts) if (known := loop(text)) is not None}
    usual = sum(loop(text) is not None for text in training or ()) / len(training) if training else 0.0
    if loops and len(loops) / len(texts) > 3 * usual:
        first, (unit, times) = next(iter(loops.items()))
        title = f"{count(len(loops), 'text')} of {len(texts)} {'loops' if len(loops) == 1 else 'loop'} to the end: "
        title += f"text {first} says {clip(unit.strip(), 40)!r} {times} times"
        yield Evidence("quality/repetition", title, tuple(loops), {"parts": [part for part, _ in loops.values()]})
    yield from _same(texts, training)
    yield from _cut(texts, set(loops))


def _same(texts: Sequence[str], training: Sequence[str] | None) -> Iterator[Evidence]:
    """One text for most of the prompts, where the training set has no such text."""
    whole = collections.Counter(tuple(words(text)) for text in texts)
    most, times = whole.most_common(1)[0] if whole else ((), 0)
    usual = 0.0
    if training:
        usual = max(collections.Counter(tuple(words(text)) for text in training).values()) / len(training)
    if len(most) >= EQUAL and times >= max(4, len(texts) / 4) and times / len(texts) > 4 * usual:
        rows = tuple(row for row, text in enumerate(texts) if tuple(words(text)) == most)
        title = f"{times} of {len(texts)} texts are one text: {clip(texts[rows[0]], 60)!r}"
        yield Evidence("quality/mode-collapse", title, rows, {"alike": times})


def _cut(texts: Sequence[str], loops: set[int]) -> Iterator[Evidence]:
    """The longest ones end in the middle of a sentence, and the shorter ones do not: a limit cut them off. Limits are
    of tokens: words and characters are both tried for them."""
    for sizes, noun in (([len(words(text)) for text in texts], "words"), ([len(text) for text in texts], "characters")):
        limit = LIMIT * max(sizes, default=0)
        long = [row for row, size in enumerate(sizes) if size >= limit and row not in loops]
        long = [row for row in long if len(words(texts[row])) >= CUT]
        short = [row for row, size in enumerate(sizes) if size < limit]
        cut = tuple(row for row in long if not END.search(texts[row].rstrip()))
        whole = [row for row in short if END.search(texts[row].rstrip())]
        if len(cut) >= 3 and len(cut) >= 0.8 * len(long) and len(whole) >= max(3, 0.8 * len(short)):
            title = f"{len(cut)} of {len(texts)} texts end in the middle of a sentence, at about {max(sizes):,} {noun}"
            shown = listed([texts[row].rstrip()[-30:] for row in cut[:3]])
            yield Evidence("quality/truncated", title, cut, {noun: max(sizes), "ends": shown})
            return
