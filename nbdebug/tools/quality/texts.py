"""Texts that a model wrote: loops, ends that are cut off, and texts that stand in the training set."""

from __future__ import annotations

import collections
import difflib
import re
from collections.abc import Iterator, Sequence

from nbdebug.text import clip, count, listed, percent
from nbdebug.tools.quality.rules import Evidence

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
ALIKE, HALF = 0.8, 0.6
"""Share of the words, in order, that a copy has in common with its original; and of which a part of a longer text."""
BEYOND = 2.0
"""Texts that stand in training count where they are so many times as many as training's own repetitions."""
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
        return ALIKE if usual < HALF else 2.0

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


def problems(texts: Sequence[str], training: Sequence[str] | None) -> Iterator[Evidence]:
    if training:
        learnt = TrainingTexts(training)
        pairs = learnt.copies(texts)
        by_chance = learnt.least > 1 and len(pairs) < 3 and all(len(words(texts[row])) < LONG for row, _, _ in pairs)
        if pairs and not by_chance:
            rows = tuple(row for row, _, _ in pairs)
            title = f"{count(len(rows), 'text')} of {len(texts)} repeat texts of the training set"
            each = [
                {"sample": row, "training row": match, "words in common": percent(share)} for row, match, share in pairs
            ]
            yield Evidence("quality/memorized", title, rows, {"pairs": each})
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
