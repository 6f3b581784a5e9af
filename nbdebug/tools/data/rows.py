"""The rows of a data set in memory, or of a file of records: tokens, labels, tensors, pictures and boxes."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy

from nbdebug.text import clip, in_a_line, module_name, percent
from nbdebug.tools.data.cures import Problem, part
from nbdebug.tools.data.expectation import DataExpectation
from nbdebug.tools.data.similarity import is_long, label_variants, repeated, two_labels
from nbdebug.tools.data.tables import box_fault

TOKENS = ("input_ids", "ids", "token_ids", "tokens", "words", "input", "text_ids")
LABELS = ("labels", "label", "target", "targets", "ner_tags", "pos_tags", "tags", "y")
TEXTS = ("text", "sentence", "input")
MOST_TEXTS, UNKNOWN, UNKNOWN_OF_ONE, LEAST_TOKENS = 20_000, 0.15, 0.5, 10
"""Texts that are tokenized; of the tokens of a set, and of one text of so many, that are unknown: of words of English
4.8% are outside the list of Penn Treebank's, 2.6% outside WikiText-2's (Merity et al., 2016)."""
TORCH_IGNORES = -100
"""The label that torch's losses pass over where no other is set."""
NUMBERING = ("id", "idx", "index", "guid", "uid", "row")
"""Names of what numbers the rows, and is no input."""
ALIGNED = 0.5
"""Of the rows, that have as many labels as tokens: then each row is meant to. Summaries and translations are not."""
PILLOW_FAULTS = ("UnidentifiedImageError", "image file is truncated", "Truncated File Read", "broken data stream")


class Row:
    """One item: its fields by name, as they came; pictures: size, mode and channels of those, the label aside."""

    def __init__(self, value: Any, wanted: DataExpectation) -> None:
        several = isinstance(value, (tuple, list))
        numbers = several and all(isinstance(v, (int, float)) for v in value)
        if isinstance(value, Mapping):
            self.fields: dict[str, Any] = {str(key): part for key, part in value.items()}
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            self.fields = value._asdict()
        elif several and not (numbers and (len(value) != 2 or isinstance(value, list))):  # two are input and label
            names = ["input", *(f"part {i}" for i in range(1, len(value)))]
            self.fields = dict(zip(names if len(value) != 2 else ["input", "labels"], value))
            if len(value) == 2 and isinstance(value[1], Mapping):
                self.fields = {"input": value[0], **value[1]}
        elif hasattr(value, "__dataclass_fields__"):
            self.fields = dict(vars(value))
        else:
            self.fields = {"input": value}

        self.label_name = next((name for name in LABELS if name in self.fields), None)
        if wanted.label is not None:
            self.label_name = wanted.label if wanted.label in self.fields else None
        self.label = self.fields.get(self.label_name or "")
        tokens = (name for name in (wanted.text, *TOKENS) if _length(self.fields.get(name or "")) is not None)
        self.token_name = next(tokens, None)
        shape = ((name, picture_form(value)) for name, value in self.fields.items() if name != self.label_name)
        self.pictures = {name: form for name, form in shape if form is not None}


def array(value: Any) -> Any:
    """A number, a list of numbers, an array or a tensor as a numpy array; None for anything else, and for pictures."""
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    elif not isinstance(value, (int, float, list, tuple, numpy.ndarray, numpy.generic)):
        return None
    try:
        result = numpy.asarray(value)
    except (ValueError, TypeError, OverflowError):  # lists of several lengths
        return None
    return result if result.dtype.kind in "iufbc" else None


def whole_numbers(value: Any) -> list[int] | None:
    """A list of whole numbers, of one dimension."""
    if isinstance(value, (list, tuple)) and not value:
        return []
    values = array(value)
    return values.tolist() if values is not None and values.ndim == 1 and values.dtype.kind in "iu" else None


def _length(value: Any) -> int | None:
    if isinstance(value, (list, tuple)):
        return len(value)
    shape = getattr(value, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) == 1 else None


def failure(error: Exception) -> tuple[str, str]:
    """(code, words) of the error of an item that can't be made."""
    words = in_a_line(error)
    if PILLOW_FAULTS[0] in words:
        return "data/corrupt-image", words
    return "data/truncated-image" if any(mark in words for mark in PILLOW_FAULTS) else "data/item-fails", words


class Rows:
    """The rows of one set or file: judged as they come, and at the end by the small numbers that were noted."""

    def __init__(self, wanted: DataExpectation, name: str = "", split: str = "") -> None:
        self.wanted, self.name, self.split = wanted, name, split
        self.problems: list[Problem] = []
        self.count = 0
        self.aligned: list[tuple[int, int, int]] = []  # row, tokens, labels
        self.ends: list[tuple[int, int, int | None, bool]] = []  # row, length, last token, padded
        self.boxes: list[tuple[int, str]] = []  # row, what is wrong with the first bad box
        self.inputs: list[tuple[int, bytes, str]] = []  # row, digest of the input, label
        self.texts: list[tuple[bytes, str, str | int]] = []  # digest of all of a row with a long text, label, row
        self.unknown: list[tuple[str | int, int, int]] = []  # row, unknown tokens, tokens
        self.labels: collections.Counter[str] = collections.Counter()

    def problem(self, index: str | int, code: str, detail: str, guess: bool = False) -> None:
        self.problems.append(Problem(f"data/{code}", part(self.name, index), detail, guess=guess))

    def add(self, index: int, value: Any) -> None:
        row = Row(value, self.wanted)
        self.count += 1
        for check in (self._finite, self._tokens, self._label, self._picture, self._box, self._input):
            check(index, row)

    def _finite(self, index: int, row: Row) -> None:
        columns = self.wanted.columns
        for name, value in row.fields.items():
            if isinstance(value, str) and not value.strip() and name in (self.wanted.text, *TEXTS):
                self.problem(index, "empty-text", f"{name} is empty")
            if isinstance(value, (int, float)) and columns is not None and name not in (*columns, row.label_name):
                continue
            values = array(value)
            if values is not None and values.dtype.kind in "fc" and not numpy.isfinite(values).all():
                number = int((~numpy.isfinite(values)).sum())
                kind = "NaN" if numpy.isnan(values).any() else "infinite"
                self.problem(index, "nonfinite-values", f"{name}: {number:,} of {values.size:,} {kind}")
            elif value is None and name in (columns or ()):
                self.problem(index, "nonfinite-values", f"{name}: nothing")

    def _tokens(self, index: int, row: Row) -> None:
        name, wanted = row.token_name, self.wanted
        length = _length(row.fields[name]) if name else None
        if name is None or length is None:
            return
        labels = _length(row.label) if row.label_name and row.label_name != name else None
        if labels is not None:
            self.aligned.append((index, length, labels))
        if wanted.max_length is not None and length > wanted.max_length:
            self.problem(index, "sequence-too-long", f"{length:,} tokens for {wanted.max_length:,} positions")
        ids = whole_numbers(row.fields[name])
        if ids is None:
            return
        if wanted.vocab_size is not None and (bad := [t for t in ids if not 0 <= t < wanted.vocab_size]):
            numbers = ", ".join(f"{t:,}" for t in dict.fromkeys(bad[:4]))
            self.problem(index, "token-out-of-vocabulary", f"id {numbers} in a vocabulary of {wanted.vocab_size:,}")
        pad, mask = wanted.pad_id, whole_numbers(row.fields.get("attention_mask"))
        real = [t for i, t in enumerate(ids) if t != pad and (mask is None or i >= len(mask) or mask[i])]
        known = pad is not None or mask is not None or wanted.vocab_size is not None
        if not real and (known or (not ids and name != "input")):
            self.problem(index, "all-padding", f"{length:,} tokens, all of them padding" if ids else "no token")
            return
        self.unknown += [(index, sum(t == wanted.unk_id for t in real), len(real))]
        if wanted.eos_id is not None and ids:
            self.ends.append((index, length, real[-1] if real else None, len(real) < length))

    def _label(self, index: int, row: Row) -> None:
        values = None if row.label is None else array(row.label)
        if values is None or values.dtype.kind == "c" or (values.ndim and values.dtype.kind == "f"):
            return
        flat = values.reshape(-1)[:1_000_000].tolist()
        if fault := self.wanted.label_fault(flat, TORCH_IGNORES if values.ndim else None):
            self.problem(index, "label-out-of-range", fault)

    def _picture(self, index: int, row: Row) -> None:
        for size, mode, channels in row.pictures.values():
            if self.wanted.channels is not None and channels not in (None, self.wanted.channels):
                self.problem(index, "wrong-channels", f"{channels} in place of {self.wanted.channels}")
            for fault in self.wanted.picture_faults(size, mode):
                self.problem(index, *fault)

    def _box(self, index: int, row: Row) -> None:
        """The first bad box of a row. That all four are corners is known where the user says so, or most rows agree."""
        boxes = array(row.fields.get("boxes"))
        if self.wanted.boxes and all(name in row.fields for name in self.wanted.boxes):
            boxes = array([row.fields[name] for name in self.wanted.boxes])
        if boxes is None or boxes.size == 0 or boxes.shape[-1] != 4 or boxes.ndim > 2:
            return
        limit = next((size for size, _, _ in row.pictures.values()), self.wanted.size)
        limit = (1, 1) if boxes.dtype.kind == "f" and boxes.max() <= 1 else limit
        faults = (wrong for box in boxes.reshape(-1, 4).tolist()[:1000] if (wrong := box_fault(box, limit)))
        self.boxes.append((index, next(faults, "")))

    def _input(self, index: int, row: Row) -> None:
        """Note what the input is, so that equal ones can be compared."""
        digest = hashlib.blake2b(digest_size=16)
        names = [n for n in (self.wanted.columns or row.fields) if n in row.fields and n != row.label_name]
        names = [n for n in names if n.lower() not in NUMBERING]
        names = [self.wanted.text] if self.wanted.text in row.fields else names
        size = 0
        for name in names:
            data = _bytes(row.fields[name])
            digest.update(name.encode() + data)
            size += len(data)
        label = row.label
        plain = array(label)
        shown = str(plain.item()) if plain is not None and plain.ndim == 0 else label if isinstance(label, str) else ""
        self.labels.update([shown] * bool(shown))
        if size > 8:  # a single number is no input that is told from others
            self.inputs.append((index, digest.digest(), shown))
        self.text(index, row.fields, shown)

    def text(self, index: str | int, fields: Mapping[str, Any], label: str = "") -> None:
        """Note the texts of a row: whether a tokenizer knows them, and what they are, so that copies are seen."""
        texts = (value for n in (self.wanted.text, *TEXTS) if isinstance(value := fields.get(n or ""), str))
        text = next(texts, None)
        if text and self.wanted.tokenizer and self.wanted.unk_id is not None and len(self.unknown) < MOST_TEXTS:
            made = self.wanted.tokenizer(text[:1000])  # a part shows it
            ids = list(made["input_ids"] if isinstance(made, Mapping) else getattr(made, "ids", made))
            self.unknown.append((index, ids.count(self.wanted.unk_id), len(ids)))
        if any(map(is_long, fields.values())):
            own = [_bytes(v) for n, v in fields.items() if n.lower() not in NUMBERING and not n.startswith("Unnamed: ")]
            self.texts.append((hashlib.blake2b(b"\0".join(own), digest_size=16).digest(), label, index))

    def _unknown(self) -> None:
        """Texts that the tokenizer does not know: half of one, or too much of the set."""
        unknown, tokens = sum(own for _, own, _ in self.unknown), sum(length for _, _, length in self.unknown)
        of_set = unknown > UNKNOWN * tokens and tokens >= 10 * LEAST_TOKENS
        for index, own, length in self.unknown:
            if own >= (max(1, UNKNOWN * length) if of_set else max(UNKNOWN_OF_ONE * length, LEAST_TOKENS / 2)):
                self.problem(index, "unknown-tokens", f"{own:,} of {length:,}; {percent(unknown / tokens)} in all")

    def end(self) -> list[Problem]:
        self._ends()
        self._alignment()
        labelled = [(digest, label, index) for index, digest, label in self.inputs if label]
        meant = label_variants(collections.Counter(label for _, label, _ in labelled), self.wanted.num_classes)
        for _, label, index in labelled:
            if label in meant:
                self.problem(index, "label-variants", f"{label!r}, elsewhere {meant[label]!r}")
        for index, detail in two_labels(labelled):
            self.problem(index, "conflicting-labels", detail)
        for copy, original in repeated(self.texts):
            self.problem(copy, "duplicate-within-split", f"all of it stands in {original}, too", True)
        self._unknown()
        bad = [(index, wrong) for index, wrong in self.boxes if wrong]
        for index, wrong in bad if self.wanted.boxes or len(bad) < ALIGNED * len(self.boxes) else ():
            self.problem(index, "invalid-box", wrong)
        return self.problems

    def _ends(self) -> None:
        """The end token of each row that is padded; of rows of several lengths, of each that is not cut."""
        wanted = self.wanted
        if wanted.eos_id == wanted.pad_id:
            return
        longest = wanted.max_length or max((length for _, length, _, _ in self.ends), default=0)
        lengths = {length for _, length, _, _ in self.ends}
        for index, length, last, padded in self.ends:
            if last != wanted.eos_id and (padded or (len(lengths) > 1 and length < longest)):
                self.problem(index, "eos-missing", f"the last token before the padding is {last}, not {wanted.eos_id}")

    def _alignment(self) -> None:
        """As many labels as tokens, where that is the rule; or always so many fewer, which is a rule too, and wrong."""
        if not self.aligned:
            return
        gaps = collections.Counter(labels - tokens for _, tokens, labels in self.aligned)
        usual, number = gaps.most_common(1)[0]
        several = len({tokens for _, tokens, _ in self.aligned}) > 2
        always = usual != 0 and number >= 0.8 * len(self.aligned) and len(self.aligned) >= 5 and several
        if gaps[0] >= ALIGNED * len(self.aligned) or always:
            for index, tokens, labels in self.aligned:
                if tokens != labels:
                    self.problem(index, "labels-misaligned", f"{labels:,} labels for {tokens:,} tokens")


def picture_form(value: Any) -> tuple[tuple[int, int], str | None, int | None] | None:
    """((width, height), mode, channels) of a picture: an array has no mode, one of Pillow's no channels; else None."""
    if module_name(type(value)).startswith("PIL."):
        return tuple(value.size), value.mode, None
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) != 3:
        return None
    first, middle, last = shape
    if first in (1, 3, 4) and middle > 4 and last > 4:
        return (last, middle), None, first
    return ((middle, first), None, last) if last in (1, 3, 4) and first > 4 and middle > 4 else None


def _bytes(value: Any) -> bytes:
    values = array(value)
    if values is not None:
        return str(values.shape).encode() + values.tobytes()
    if isinstance(value, str):
        return " ".join(value.split()).encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return value
    if module_name(type(value)).startswith("PIL."):
        return f"{value.size}{value.mode}".encode() + value.tobytes()
    return clip(repr(value), 4000).encode("utf-8", "surrogatepass")
