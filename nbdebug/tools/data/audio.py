"""Sounds: rate, channels, silence, and peaks that are flat at full scale. With soundfile where it is there, else with
the standard library, which reads WAV alone."""

from __future__ import annotations

import hashlib
import os
import wave
from collections.abc import Iterator
from typing import Any

BLOCK = 1 << 18
"""Frames that are read at once."""
MOST_BYTES = 2 << 30
FULL = 0.98
"""Of full scale: where flat peaks are clipping. 8 bits have their highest value at 0.992."""
RUN = 3
"""Equal samples in a row that make a flat peak."""
EDGE = 0.002
"""By how much of full scale the sound rises to a flat peak. The top of a slow wave is flat, too, and round."""
FORMATS = {
    "wav": ("WAV", "WAVEX", "RF64"),
    "wave": ("WAV", "WAVEX", "RF64"),
    "flac": ("FLAC",),
    "ogg": ("OGG",),
    "oga": ("OGG",),
    "opus": ("OGG",),
    "mp3": ("MP3", "MPEG"),
    "aif": ("AIFF",),
    "aiff": ("AIFF",),
    "au": ("AU",),
    "w64": ("W64",),
}


def soundfile() -> Any:
    """The module; None where it is not installed, or its library is not."""
    try:
        import soundfile as module
    except (ImportError, OSError):
        return None
    return module


def measure(path: str) -> dict[str, Any]:
    """rate (Hz), channels, frames, peak (of full scale), flat (how many peaks are flat), form; fault ("", "corrupt",
    "unsupported", "large") with its reason; digest: of the samples, or None."""
    if os.path.getsize(path) > MOST_BYTES:
        return {"fault": "large", "reason": f"over {MOST_BYTES >> 30} GiB"}
    try:
        return _with_soundfile(path) if soundfile() is not None else _with_wave(path)
    except Exception as error:  # libsndfile's errors are RuntimeErrors of its own
        with open(path, "rb") as file:
            first = file.read(16)
        if path.lower().endswith((".m4a", ".aac", ".wma")) or (soundfile() is None and first[:4] != b"RIFF"):
            return {"fault": "unsupported", "reason": "a format that is not read here"}
        why = "the file is empty" if not first else f"it does not open as a sound ({type(error).__name__})"
        return {"fault": "corrupt", "reason": why}


def _with_soundfile(path: str) -> dict[str, Any]:
    with soundfile().SoundFile(path) as file:
        state = Samples(file.samplerate, file.channels)
        declared, form = file.frames, file.format
        while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
            state.add(block)
    return state.result(form, declared if declared < 1 << 62 else None, _declared_bytes(path))


def _with_wave(path: str) -> dict[str, Any]:
    import numpy

    with wave.open(path, "rb") as file:
        width, channels = file.getsampwidth(), file.getnchannels()
        state = Samples(file.getframerate(), channels)
        while data := file.readframes(BLOCK):
            data = data[: len(data) // (width * channels) * width * channels]
            if width == 1:
                values = (numpy.frombuffer(data, "u1").astype("float32") - 128) / 128
            elif width == 3:
                parts = numpy.frombuffer(data, "u1").reshape(-1, 3).astype("int32")
                whole = parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16
                values = ((whole ^ 0x800000) - 0x800000).astype("float32") / (1 << 23)
            else:
                values = numpy.frombuffer(data, f"<i{width}").astype("float32") / (1 << 8 * width - 1)
            state.add(values.reshape(-1, channels))
        return state.result("WAV", file.getnframes(), _declared_bytes(path))


def _declared_bytes(path: str) -> tuple[int, int] | None:
    """(bytes of samples that the head of a WAV promises, bytes that are there); None where it promises nothing."""
    with open(path, "rb") as file:
        if file.read(4) != b"RIFF":
            return None
        file.seek(12)
        while len(chunk := file.read(8)) == 8:
            count = int.from_bytes(chunk[4:], "little")
            if chunk[:4] == b"data":
                there = os.path.getsize(path) - file.tell()
                return (count, there) if count < 0xFFFFFFF0 else None
            file.seek(count + count % 2, 1)
    return None


class Samples:
    """What is known of the samples, block by block."""

    def __init__(self, rate: int, channels: int) -> None:
        self.rate, self.channels, self.frames = rate, channels, 0
        self.peak, self.flat, self.bad = 0.0, 0, 0
        self.digest = hashlib.blake2b(digest_size=16)

    def add(self, block: Any) -> None:
        import numpy

        self.frames += len(block)
        self.digest.update(block.tobytes())
        finite = numpy.isfinite(block)
        self.bad += int((~finite).sum())
        block = numpy.where(finite, block, 0)
        high = float(numpy.abs(block).max(initial=0))
        self.peak = max(self.peak, high)
        if high >= FULL:
            for channel in block.T:
                self.flat += sum(1 for _ in flat_peaks(channel))

    def result(self, form: str, declared: int | None, promised: tuple[int, int] | None) -> dict[str, Any]:
        result: dict[str, Any] = {
            "rate": self.rate,
            "channels": self.channels,
            "frames": self.frames,
            "peak": self.peak,
        }
        result |= {"flat": self.flat, "form": form, "bad": self.bad, "digest": self.digest.hexdigest()}
        if not self.frames:
            return result | {"fault": "corrupt", "reason": "it holds no sample"}
        if promised is not None and promised[1] < promised[0] - 1:
            share = f"{promised[1]:,} of {promised[0]:,} bytes of samples are there"
            return result | {"fault": "corrupt", "reason": f"it ends early: {share}"}
        if declared is not None and self.frames < declared:
            return result | {"fault": "corrupt", "reason": f"it ends early: {self.frames:,} of {declared:,} frames"}
        return result


def flat_peaks(channel: Any) -> Iterator[tuple[int, int]]:
    """(start, end) of runs of RUN and more equal samples at full scale, to which the sound rises in a step."""
    import numpy

    loud = numpy.abs(channel) >= FULL
    same = numpy.concatenate([[False], (channel[1:] == channel[:-1]) & loud[1:], [False]])
    edges = numpy.flatnonzero(same[1:] != same[:-1])
    for start, end in zip(edges[::2], edges[1::2]):
        level = abs(float(channel[start]))
        before = abs(float(channel[start - 1])) if start else 0.0
        after = abs(float(channel[end + 1])) if end + 1 < len(channel) else 0.0
        if end - start + 1 >= RUN and level - max(before, after) > EDGE:
            yield int(start), int(end)
