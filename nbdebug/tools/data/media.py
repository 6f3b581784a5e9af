"""Pictures, sounds, captions and masks of a folder, each beside what is expected, or beside the majority of the set."""

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy

from nbdebug.text import figures, percent, size
from nbdebug.tools.data import similarity
from nbdebug.tools.data.cures import Problem
from nbdebug.tools.data.expectation import SIXTEEN, DataExpectation
from nbdebug.tools.data.inventory import KINDS, RANK, Entry, FolderInventory, head
from nbdebug.tools.data.pictures import SIDE, pillow

MAJORITY, LEAST = 0.9, 10
"""Of pictures that are alike, where nothing is expected: the others are then named."""
SOUND_MAJORITY = 0.75
EXTREME = 10
"""By how much the shape of a picture, or the length of a sound, is unlike the usual one."""
CAPTION_LIMIT = 1 << 20
"""Bytes of a caption that is read."""
NUMBER = re.compile(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?")
CAPTIONED = 0.5
"""Of the pictures, that have a text file beside them: then a caption is meant for all."""
SHORT_CLASS, SHORT_PROMPT = 2, 5
"""Words of a caption that all pictures may have: "tabby cat"; with a trigger DreamBooth's one "a photo of zwx dog"."""
SCRIPTS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
"""Writing without spaces: Thai, Lao, Burmese, Khmer, Japanese, Chinese. Each character counts as a word."""
PAIRED = re.compile(
    r"(^|[^a-z])(hr|lr|x\d|gt|a|b|input\w*|target\w*|orig\w*|raw|clean|noisy|aug\w*|thumb\w*|small|large|images?|masks?|labels?)$"
)
"""Folders that hold versions of the same pictures, and no classes."""
SIDEWAYS = "mirrored and on its side", "on its side"
SAME_FORMATS = {"MPO": "JPEG", "DIB": "BMP"}
"""Pillow's formats that any reader of the other takes."""
TURNS = dict(enumerate(("mirrored", "upside down", "mirrored and upside down", *SIDEWAYS, *SIDEWAYS), 2))


def unread(entries: Sequence[Entry], wanted: DataExpectation) -> Iterator[Problem]:
    """Pictures and sounds that a loader of these endings passes over."""
    endings = wanted.extensions or ()
    kinds = {KINDS.get(ending.lower()) for ending in endings} & {"picture", "sound"} or {"picture", "sound"}
    for entry in entries if endings else ():
        if entry.kind in kinds and entry.ending not in endings:
            near = [ending for ending in endings if ending.lower() == entry.ending.lower()]
            detail = f"{entry.ending or 'no ending'} is not among {', '.join(endings)}"
            detail = f"the loader takes {near[0]}, and this is {entry.ending}" if near else detail
            yield entry.problem("unread-extension", detail)


def is_mask(entry: Entry, masks: str | None) -> bool:
    """Whether a picture lies in the folder of masks."""
    return masks is not None and f"/{masks.strip('/')}/" in f"/{entry.folder}/"


def picture_problems(entry: Entry, wanted: DataExpectation) -> Iterator[Problem]:
    """What one picture has by itself."""
    known, fault = entry.known, entry.known.get("fault")
    if fault not in (None, "unsupported"):
        yield entry.problem(fault, known["reason"])
    if fault == "unsupported" and entry.ending.lower() in (".jpg", ".jpeg", ".png", ".webp"):
        yield entry.problem("format-mismatch", f"named {entry.ending}, and it holds {known['reason']}")
    if "size" not in known:
        return
    width, height = known["size"]
    form = pillow()[0].registered_extensions().get(entry.ending.lower())
    if form and SAME_FORMATS.get(form, form) != SAME_FORMATS.get(known["format"], known["format"]):
        yield entry.problem("format-mismatch", f"named {entry.ending}, and it holds {known['format']}")
    turn = known.get("turn", 1)
    if turn in range(2, 9) and (wanted.size is None or wanted.size in ((width, height), (height, width))):
        yield entry.problem("exif-orientation", f"EXIF orientation {turn}: {TURNS[turn]}, stored as {width} x {height}")
    yield from (entry.problem(*fault) for fault in wanted.picture_faults((width, height), known["mode"]))


def by_majority(entries: Sequence[Entry], wanted: DataExpectation) -> Iterator[Problem]:
    """What is unlike nearly all others, where nothing is expected: sizes, modes, and pictures of a few pixels."""
    whole = [entry for entry in entries if "size" in entry.known]
    if len(whole) < LEAST:
        return
    if wanted.size is None and wanted.min_size is None:
        yield from _minority(whole, [_size(entry) for entry in whole], "wrong-image-size")
        usual = statistics.median_high(min(entry.known["size"]) for entry in whole)
        shape = statistics.median(width / height for width, height in (entry.known["size"] for entry in whole))
        for entry in whole:
            width, height = entry.known["size"]
            if not 1 / EXTREME < width / height / shape < EXTREME:
                yield entry.problem("wrong-image-size", f"{_size(entry)}; the usual shape is {shape:.2g} to 1", True)
            if min(entry.known["size"]) <= min(8, usual / 16):
                yield entry.problem("image-too-small", f"{_size(entry)}; the usual shorter side is {usual}", True)
    if wanted.mode is None:
        modes = ["I;16" if entry.known["mode"] in SIXTEEN else entry.known["mode"] for entry in whole]
        yield from _minority(whole, modes, "wrong-image-mode")


def _size(entry: Entry) -> str:
    """ "64 x 48"."""
    return " x ".join(map(str, entry.known["size"]))


def _minority(entries: Sequence[Entry], values: Sequence[str], code: str) -> Iterator[Problem]:
    usual, number = collections.Counter(values).most_common(1)[0]
    for entry, value in zip(entries, values if number >= MAJORITY * len(entries) else ()):
        if value != usual:
            yield entry.problem(code, f"{value}; {percent(number / len(entries))} of the pictures are {usual}", True)


def caption_ending(entries: Sequence[Entry], files: Mapping[str, Entry], wanted: DataExpectation) -> str | None:
    """The ending of captions: as expected, or that of the text files that half of the pictures have beside them."""
    if wanted.caption_extension:
        return wanted.caption_extension
    for ending in (".txt", ".caption"):
        there = [files[name] for entry in entries if (name := beside(entry, ending)) in files]
        texts = [head(file.path).decode("utf-8", "replace").split() for file in there[:: max(1, len(there) // 20)]]
        numbers = sum(bool(words) and all(NUMBER.fullmatch(word) for word in words) for words in texts)
        if len(there) >= max(3, CAPTIONED * len(entries)) and numbers <= len(texts) / 4:  # else they are boxes
            return ending
    return None


def beside(entry: Entry, ending: str) -> str:
    """The item of the file of the same name, with this ending."""
    return f"{entry.folder}/{entry.stem}{ending}".lstrip("/")


def captions(entries: list[Entry], files: dict[str, Entry], ending: str, wanted: DataExpectation) -> Iterator[Problem]:
    """The first problem of each caption, given to its picture; and one caption that nearly all pictures have."""
    texts: dict[str, list[Entry]] = collections.defaultdict(list)
    for entry in entries:
        file = files.get(beside(entry, ending))
        if fault := _caption(file, ending, wanted):
            yield entry.problem(*fault)
        elif file is not None:
            texts[" ".join(head(file.path, CAPTION_LIMIT).decode("utf-8-sig").lower().split())].append(entry)
    (usual, same), *others = sorted(texts.items(), key=lambda item: -len(item[1])) or [("", [])]
    short = SHORT_PROMPT if wanted.trigger else SHORT_CLASS
    classes = any(len(own) > 1 for _, own in others)
    if len(same) >= max(LEAST, MAJORITY * len(entries)) and _words(usual) > short and not classes:
        for entry in same:
            yield entry.problem("caption-same", f"{usual[:60]!r}, as {len(same):,} of {len(entries):,} have it", True)


def _words(text: str) -> int:
    """Signs of punctuation that stand alone are no words."""
    return sum(any(c.isalnum() or c == "&" for c in word) for word in SCRIPTS.sub(" x ", text).split())


def _caption(file: Entry | None, ending: str, wanted: DataExpectation) -> tuple[str, str] | None:
    if file is None:
        return "caption-missing", f"no file {ending} of the same name beside it"
    if file.bytes > CAPTION_LIMIT:
        return "oversized-file", f"its caption has {size(file.bytes)}; at most {size(CAPTION_LIMIT)} are read"
    data = head(file.path, CAPTION_LIMIT)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        coding = "it is UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "perhaps Windows-1252 or Latin-1"
        return "caption-encoding", f"byte 0x{data[error.start]:02x} at {error.start} is no UTF-8: {coding}"
    if "\x00" in text:
        return "caption-encoding", "it holds zero bytes, as UTF-16 without a mark does"
    text = text.replace("\u200b", "").strip()
    if not text:
        return "caption-empty", "white space alone" if data else "a file of 0 bytes"
    words = r"\s+".join(map(re.escape, (wanted.trigger or "").split()))
    if words and not re.search(rf"(?<!\w){words}(?!\w)", text, re.IGNORECASE):
        return "trigger-missing", f"{text[:60]!r} does not hold the word {wanted.trigger!r}"
    if wanted.min_words is not None and (number := _words(text)) < wanted.min_words:
        return "caption-too-short", f"{text[:60]!r}: {number} of at least {wanted.min_words} words"
    return None


def mask_problems(masks: Sequence[Entry], pictures: Sequence[Entry], wanted: DataExpectation) -> Iterator[Problem]:
    """Masks of another size than their picture, and with values that are no class."""
    by_stem = collections.defaultdict(list)
    for one in pictures:
        by_stem[one.stem].append(one)
    for mask in masks:
        fault = mask.known.get("fault")
        if fault not in (None, "unsupported"):
            yield mask.problem(fault, mask.known["reason"])
        if "size" not in mask.known or fault:
            continue
        bare = re.sub(r"[-_. ]?(mask|seg|segmentation|gt|label|labels|labelIds)s?$", "", mask.stem, flags=re.I)
        stem = mask.stem if mask.stem in by_stem else bare
        before, _, below = f"/{mask.folder}/".partition(f"/{(wanted.masks or '').strip('/')}/")
        pairs = [p for p in by_stem.get(stem, []) if f"/{p.folder}/".startswith(f"{before}/")]
        picture = max(pairs, key=lambda p: f"/{p.folder}/".endswith(f"/{below}"), default=None)
        if picture and picture.known.get("size", mask.known["size"]) != mask.known["size"]:
            yield mask.problem("mask-size-mismatch", f"{_size(mask)}; {picture.item} has {_size(picture)}")
            continue
        with pillow()[0].open(mask.path) as opened:
            values = numpy.asarray(opened)
        if values.ndim == 2 and (wrong := wanted.label_fault(numpy.unique(values).tolist())):  # else it is in colour
            yield mask.problem("label-out-of-range", f"values {wrong}")


def copies(entries: Sequence[Entry], thumbs: bytearray) -> Iterator[Problem]:
    """Copies outside of the training set, and near ones within a split, too, where they are few: many are meant (series
    of frames, rare classes drawn more often). thumbs: of those entries that have colours."""
    shown = [entry for entry in entries if "mean" in entry.known]
    images = numpy.frombuffer(thumbs, dtype="uint8").reshape(-1, SIDE, SIDE)
    if len({entry.split for entry in shown}) > 1:
        yield from equal_files(itertools.compress(shown, similarity.distinct(images)))
    within, sizes = [], collections.Counter(RANK[entry.split] for entry in shown)
    for one, other, distance in similarity.near_copies(images, [RANK[entry.split] for entry in shown]):
        copy, original = shown[one], shown[other]
        detail = f"a near copy of {original.item} (correlation {1 - distance:.3f})"
        if copy.split != original.split:
            yield copy.problem("duplicate-across-splits", detail)
        elif sizes[RANK[copy.split]] >= similarity.LEAST_BESIDE:
            within.append(copy.problem("duplicate-within-split", detail, True))
    if len(within) <= similarity.MEANT * len(shown):
        yield from within


def equal_files(entries: Iterable[Entry]) -> Iterator[Problem]:
    """Copies outside of the training set: of the same bytes, or of the same samples."""
    items = ((entry.split, entry.known.get("digest") or entry.digest, entry.item, entry.path) for entry in entries)
    return similarity.equal_across_splits(items, "the same contents as")


def conflicts(entries: Sequence[Entry]) -> Iterator[Problem]:
    """The same picture in two folders, where folders are classes."""
    folders = collections.Counter(entry.folder.rpartition("/")[2] for entry in entries)
    if len(folders) < 2 or any(PAIRED.search(name.lower()) for name in folders):
        return
    sizes = collections.Counter((entry.bytes, entry.split) for entry in entries)
    known = [entry.digest if sizes[entry.bytes, entry.split] > 1 else entry.item for entry in entries]
    labelled = [((digest, entry.split), entry.folder, entry) for digest, entry in zip(known, entries)]
    for entry, other in similarity.contradictions(labelled, 0.2):
        yield entry.problem("conflicting-labels", f"the same picture is {other.item}")


def colours(entries: Sequence[Entry], classes: bool) -> Iterator[Problem]:
    """The folder whose pictures are unlike those of its neighbours. classes: the folders are classes for sure."""
    children: dict[str, dict[str, list[tuple[float, ...]]]] = collections.defaultdict(dict)
    split_of: dict[str, str] = {}
    for entry in entries:
        name = entry.folder if "mean" in entry.known else ""
        while name:
            own = similarity.features(entry.known["mean"], entry.known["spread"])
            children[name.rpartition("/")[0]].setdefault(name, []).append(own)
            split_of[name] = entry.split if split_of.get(name, entry.split) == entry.split else ""
            name = name.rpartition("/")[0]
    parents = collections.defaultdict(set)
    for name in split_of:
        parents[name.rpartition("/")[2]].add(name.rpartition("/")[0])
    for folders in children.values():
        splits = {split_of[name] for name in folders}
        by_split = "" not in splits and len(splits) == len(folders)
        repeated = any(len(parents[name.rpartition("/")[2]]) > 1 for name in folders)
        shift = similarity.shifted_folder(folders, by_split) if by_split or not (classes or repeated) else None
        if shift is not None:
            yield Problem("data/color-shift", *shift)


def sound_problems(entries: Sequence[Entry], wanted: DataExpectation) -> Iterator[Problem]:
    """Sounds that do not open, of another rate or number of channels, silent ones, clipped ones."""
    whole = [entry.known for entry in entries if "rate" in entry.known]
    usual_rate = wanted.sample_rate or _usual([known["rate"] for known in whole])
    usual_channels = wanted.channels or _usual([known["channels"] for known in whole])
    for entry in entries:
        facts = entry.known
        if facts.get("fault") not in (None, "unsupported"):
            yield entry.problem(facts["fault"], facts["reason"])
        if "rate" not in facts:
            continue
        rate, channels = usual_rate or facts["rate"], usual_channels or facts["channels"]
        seconds = figures(facts["frames"] / max(1, facts["rate"]))
        named = SAME_FORMS.get(entry.ending[1:].upper(), entry.ending[1:].upper())
        other = named in SOUND_FORMS and facts["form"] != named
        for wrong, code, detail in (
            (other, "format-mismatch", f"named {entry.ending}, and it holds {facts['form']}"),
            (facts["rate"] != rate, "wrong-sample-rate", f"{facts['rate']:,} Hz in place of {rate:,} Hz"),
            (facts["channels"] != channels, "wrong-channels", f"{facts['channels']} in place of {channels}"),
            (facts["bad"], "nonfinite-values", f"{facts['bad']:,} samples are NaN or infinite"),
            (facts["frames"] and facts["peak"] == 0, "silent-audio", f"all of its {seconds} s are zero"),
            (facts["flat"] >= 3, "clipped-audio", f"{facts['flat']:,} flat peaks at full scale in {seconds} s"),
        ):
            if wrong:
                yield entry.problem(code, detail)


def _usual(values: Sequence[int]) -> int | None:
    value, number = (collections.Counter(values).most_common(1) or [(0, 0)])[0]
    return value if len(values) >= 4 and number >= SOUND_MAJORITY * len(values) else None


def remarks(inventory: FolderInventory) -> Iterator[str]:
    """What is worth knowing and no fault: lengths that are far apart, and class folders that are."""
    seconds = [e.known["frames"] / e.known["rate"] for e in inventory.of("sound") if e.known.get("frames")]
    if seconds and max(seconds) > EXTREME * min(seconds):
        yield f"The sounds last from {figures(min(seconds))} s to {figures(max(seconds))} s."
    folders = collections.Counter(e.folder for e in inventory.of("picture", "sound") if e.folder)
    if not any(entry.split for entry in inventory.entries):
        yield from similarity.balance(folders, "folders", "files")


BLOCK = 1 << 18
"""Frames that are read at once."""
MOST_SOUND_BYTES = 2 << 30
FULL = 0.98
"""Of full scale: where flat peaks are clipping. 8 bits have their highest value at 0.992."""
RUN = 3
"""Equal samples in a row that make a flat peak."""
EDGE = 0.002
"""By how much of full scale the sound rises to a flat peak. The top of a slow wave is flat, too, and round."""
SOUND_FORMS = {"WAV", "FLAC", "OGG", "MP3", "AIFF", "AU", "W64"}
SAME_FORMS = {"WAVE": "WAV", "WAVEX": "WAV", "RF64": "WAV", "OGA": "OGG", "OPUS": "OGG", "AIF": "AIFF", "MPEG": "MP3"}
"""Endings and formats of libsndfile that are one format."""


def soundfile() -> Any:
    """The module. Raises ImportError, with what to install, where it or its library is not there."""
    try:
        import soundfile as module
    except (ImportError, OSError):
        raise ImportError("soundfile is not installed (pip install 'torch-nbdebug[data]')") from None
    return module


def measure_sound(path: str) -> dict[str, Any]:
    """rate (Hz), channels, frames, peak (of full scale), flat (how many peaks are flat), form, bad (how many samples
    are not finite), digest (of the samples); fault (the code of its problem, or "unsupported") with its reason."""
    if os.path.getsize(path) > MOST_SOUND_BYTES:
        return {"fault": "oversized-file", "reason": f"over {MOST_SOUND_BYTES >> 30} GiB"}
    try:
        return _samples(path)
    except Exception as error:  # libsndfile's errors are RuntimeErrors of its own
        if path.lower().endswith((".m4a", ".aac", ".wma")):
            return {"fault": "unsupported", "reason": "a format that is not read here"}
        why = f"it does not open as a sound ({type(error).__name__})" if os.path.getsize(path) else "the file is empty"
        return {"fault": "corrupt-audio", "reason": why}


def _samples(path: str) -> dict[str, Any]:
    """What is known of the samples, block by block."""
    frames, peak, flat, bad = 0, 0.0, 0, 0
    digest = hashlib.blake2b(digest_size=16)
    with soundfile().SoundFile(path) as file:
        while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
            frames += len(block)
            digest.update(block.tobytes())
            finite = numpy.isfinite(block)
            bad += int((~finite).sum())
            block = numpy.where(finite, block, 0)
            high = float(abs(block).max())
            peak = max(peak, high)
            flat += sum(map(flat_peaks, block.T)) if high >= FULL else 0
        result = {"rate": file.samplerate, "channels": file.channels, "form": SAME_FORMS.get(file.format, file.format)}
        result |= {"frames": frames, "peak": peak, "flat": flat, "bad": bad, "digest": digest.hexdigest()}
        early = f"{frames:,} of {file.frames:,} frames" if frames < file.frames < 1 << 62 else ""
    promised, there = _bytes_of_samples(path)
    if there < promised - 1:
        early = f"{there:,} of {promised:,} bytes of samples are there"
    if frames and not early:
        return result
    return result | {"fault": "corrupt-audio", "reason": f"it ends early: {early}" if frames else "it holds no sample"}


def _bytes_of_samples(path: str) -> tuple[int, int]:
    """(bytes of samples that the head of a WAV promises, bytes that are there); (0, 0) where it promises nothing."""
    with open(path, "rb") as file:
        riff = file.read(12)[:4] == b"RIFF"
        while riff and len(chunk := file.read(8)) == 8:
            count = int.from_bytes(chunk[4:], "little")
            if chunk[:4] == b"data":
                return (count, os.path.getsize(path) - file.tell()) if count < 0xFFFFFFF0 else (0, 0)
            file.seek(count + count % 2, 1)
    return 0, 0


def flat_peaks(channel: Any) -> int:
    """How many runs there are of RUN and more equal samples at full scale, to which the sound rises in a step."""
    level = numpy.concatenate([[0.0], abs(channel), [0.0]])
    same = numpy.concatenate([[False], (channel[1:] == channel[:-1]) & (level[2:-1] >= FULL), [False]])
    edges = numpy.flatnonzero(same[1:] != same[:-1])
    starts, ends = edges[::2], edges[1::2]
    rise = level[starts + 1] - numpy.maximum(level[starts], level[ends + 2])
    return int(((ends - starts + 1 >= RUN) & (rise > EDGE)).sum())
