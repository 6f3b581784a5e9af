"""What a data set should be: what the user says, and what a processor, a tokenizer or a model asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nbdebug.text import figures

NEVER = 1_000_000
"""A length that tokenizers without one give: transformers writes 1e30."""

SIXTEEN = ("I", "I;16", "I;16B", "I;16L", "I;16N")
"""Modes of one picture with 16 bits: which of them Pillow gives depends on its version."""


@dataclasses.dataclass(frozen=True)
class DataExpectation:
    """Each field may be None: the set is then judged against its own majority, or not at all.

    size: (width, height) of pictures; min_size: of the shorter side, in pixels; mode: Pillow's; sample_rate: in Hz;
    channels: of sounds, or of pictures as arrays; extensions: endings that the loader takes, as they stand;
    caption_extension: of the file beside each picture; min_words, trigger: of captions; columns: the numbers that are
    features; label, text, image: names of columns (keys of rows); boxes: four columns, x1 y1 x2 y2; num_classes;
    ignore_index: a label that the loss passes over; masks: the name of the folder that holds them; vocab_size,
    max_length, pad_id, eos_id, unk_id (of words that it does not know): of tokens; tokenizer: makes the ids of a text.
    """

    size: tuple[int, int] | None = None
    mode: str | None = None
    min_size: int | None = None
    sample_rate: int | None = None
    channels: int | None = None
    extensions: tuple[str, ...] | None = None
    caption_extension: str | None = None
    min_words: int | None = None
    trigger: str | None = None
    columns: tuple[str, ...] | None = None
    label: str | None = None
    text: str | None = None
    boxes: tuple[str, ...] | None = None
    image: str | None = None
    num_classes: int | None = None
    ignore_index: int | None = None
    masks: str | None = None
    vocab_size: int | None = None
    max_length: int | None = None
    pad_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    tokenizer: Callable[[str], Any] | None = None

    def stated(self) -> dict[str, Any]:
        """The fields that are there."""
        return {key: value for key, value in vars(self).items() if value is not None}

    def picture_faults(self, size: tuple[int, int], mode: str | None) -> Iterator[tuple[str, str]]:
        """(code, detail) of a picture of another size or mode. mode: None of one that has none, as an array."""
        width, height = size
        if self.size is not None and size != self.size:
            yield "wrong-image-size", f"{width} x {height} in place of {self.size[0]} x {self.size[1]}"
        if self.min_size is not None and min(size) < self.min_size:
            yield "image-too-small", f"{width} x {height}: the shorter side is under {self.min_size}"
        alike = mode in (None, self.mode) or (mode in SIXTEEN and self.mode in SIXTEEN)
        if self.mode is not None and not alike:
            yield "wrong-image-mode", f"{mode} in place of {self.mode}"

    def label_fault(self, labels: Iterable[float], ignored: int | None = None) -> str:
        """Labels that are no class, in words; "" where there are none. ignored: where no `ignore_index` is given."""
        classes, ignored = self.num_classes, ignored if self.ignore_index is None else self.ignore_index
        if classes is None:
            return ""
        bad = {v for v in labels if v == v and v != ignored and not (0 <= v < classes and v == int(v))}
        return f"{', '.join(map(figures, sorted(bad)[:6]))}; {classes} classes are 0 to {classes - 1}" if bad else ""


FIELDS = tuple(field.name for field in dataclasses.fields(DataExpectation))


def expectation(expected: Any, fields: Mapping[str, Any]) -> DataExpectation:
    """What the user gave: a mapping, a processor, a tokenizer, a model, several of these in a list; fields: by keyword.

    Raises TypeError for a field that is none, and ValueError for one that makes no sense."""
    values: dict[str, Any] = {}
    for one in expected if isinstance(expected, (list, tuple)) else [expected]:
        if isinstance(one, DataExpectation):
            values |= one.stated()
        else:
            values |= dict(one) if isinstance(one, Mapping) else demands(one)
    values |= {key: value for key, value in fields.items() if value is not None}
    unknown = [key for key in values if key not in FIELDS]
    if unknown:
        raise TypeError(f"check_data knows no field {unknown[0]!r}; there are {', '.join(FIELDS)}")
    for key in ("extensions", "columns", "boxes"):
        if values.get(key) is not None:
            values[key] = (values[key],) if isinstance(values[key], str) else tuple(values[key])
    size = values.get("size")
    if size is not None:
        values["size"] = (size, size) if isinstance(size, int) else tuple(int(side) for side in size)
    if len(values.get("size") or "12") != 2 or len(values.get("boxes") or "1234") != 4:
        raise ValueError("size takes (width, height), and boxes the names of four columns: x1, y1, x2, y2")
    if values.get("extensions"):
        values["extensions"] = tuple(f".{ending.removeprefix('.')}" for ending in values["extensions"])
    if values.get("caption_extension"):
        values["caption_extension"] = f".{values['caption_extension'].removeprefix('.')}"
    return DataExpectation(**values)


def demands(thing: Any) -> dict[str, Any]:
    """What a processor, a tokenizer or a model asks for, by its own attributes."""
    values: dict[str, Any] = {}
    parts = [getattr(thing, name, None) for name in ("tokenizer", "image_processor", "feature_extractor")]
    for part in [thing, *filter(None, parts)]:  # a processor of several kinds holds one for each
        if callable(getattr(part, "convert_ids_to_tokens", None)):
            longest = getattr(part, "model_max_length", None)
            values |= {"vocab_size": len(part), "max_length": longest if longest and longest < NEVER else None}
            values |= {f"{name}_id": getattr(part, f"{name}_token_id", None) for name in ("pad", "unk")}
            if values["unk_id"] in (getattr(part, f"{name}_token_id", None) for name in ("eos", "bos", "pad")):
                values["unk_id"] = None  # of one that spells what it does not know byte by byte
            values["tokenizer"] = part
        elif getattr(part, "sampling_rate", None):
            values["sample_rate"] = int(part.sampling_rate)
        elif getattr(part, "do_resize", None) is False and isinstance(getattr(part, "size", None), Mapping):
            values["size"] = (part.size["width"], part.size["height"]) if "width" in part.size else None
    config = getattr(thing, "config", None)
    for key, names in ("vocab_size", ["vocab_size"]), ("max_length", ["max_position_embeddings", "n_positions"]):
        number = next((n for n in (getattr(config, name, None) for name in names) if isinstance(n, int)), 0)
        if number > 0:
            values[key] = number
    if not values and callable(getattr(thing, "modules", None)):
        tables = [m for m in thing.modules() if type(m).__name__ == "Embedding"]
        values["vocab_size"] = max((m.num_embeddings for m in tables), default=None)
    return {key: value for key, value in values.items() if value is not None}
