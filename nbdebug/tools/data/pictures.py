"""Pictures decoded to their end: format, size, mode, turn, colours and a thumbnail. `python -m` of this file is one of
the processes that do so where there are many: paths come in on stdin, a line of JSON goes out for each.

In processes of their own a picture that crashes a decoder, or never ends, costs one process and is named.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import faulthandler
import itertools
import json
import os
import pathlib
import queue
import subprocess
import sys
import unittest.mock
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

SIDE = 32
"""Of a thumbnail, in pixels."""
MOST_PIXELS = 2 * (1024**3 // 12)
"""Pillow refuses a picture of more: 179 million (PIL.Image.MAX_IMAGE_PIXELS twice)."""
ALONE = 300
"""Up to so many pictures are decoded in this process: others take 0.3 s to start."""
AHEAD = 32
"""Paths that a process is given at once: it must not wait for the one that asks."""
PATIENCE = 60.0
"""Seconds for one file, then its process is ended."""
EARLY = "truncat|unexpected end|ended|premature|not enough|eof|unpack requires|broken data stream".split("|")
"""Words of an error that comes of a file that ends early."""
CONTENTS = {
    b"<!doctype": "a page of HTML",
    b"<html": "a page of HTML",
    b"version https://git-lfs": "a pointer of Git LFS",
    b"\x00\x05\x16\x07": "the notes of macOS on a file (AppleDouble)",
}
"""What stands in files that are no pictures, by their first bytes."""
OTHERS = {b"ftypheic": "HEIC", b"ftypheif": "HEIF", b"ftypmif1": "HEIF", b"ftypavif": "AVIF"}


def pillow() -> tuple[Any, Any]:
    """Pillow's Image and ImageFile. Raises ImportError, with what to install."""
    try:
        from PIL import Image, ImageFile
    except ImportError:
        raise ImportError("Pillow is not installed (pip install 'torch-nbdebug[data]')") from None
    return Image, ImageFile


def measure(path: str) -> dict[str, Any]:
    """What is known of a picture: format, size, mode, turn (the EXIF tag); fault (the code of its problem, or
    "unsupported") with a reason; mean and spread of the colours, and a grey thumbnail in base64.
    A JPEG is read to its end, and drawn at a smaller scale. Nothing of the user's Pillow is changed afterwards."""
    Image, ImageFile = pillow()

    no_limit = unittest.mock.patch.object(Image, "MAX_IMAGE_PIXELS", None)
    with no_limit, unittest.mock.patch.object(ImageFile, "LOAD_TRUNCATED_IMAGES", False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _measured(path, Image)
        except (OSError, MemoryError) as error:
            return {"fault": "unreadable-file", "reason": getattr(error, "strerror", None) or type(error).__name__}


def _measured(path: str, Image: Any) -> dict[str, Any]:
    try:
        picture = Image.open(path)
    except Exception as error:  # a plugin may raise anything
        return _unopened(path, error)
    with picture:
        result: dict[str, Any] = {"format": picture.format, "size": picture.size, "mode": picture.mode, "turn": 1}
        frames = min(int(getattr(picture, "n_frames", 1) or 1), 16) if picture.format in ("GIF", "TIFF", "WEBP") else 1
        if picture.size[0] * picture.size[1] > MOST_PIXELS:
            pixels = f"{picture.size[0]:,} x {picture.size[1]:,} pixels in {os.path.getsize(path):,} bytes"
            return result | {"fault": "oversized-file", "reason": f"{pixels}: Pillow refuses a decompression bomb"}
        try:
            picture.draft(None, (4 * SIDE, 4 * SIDE))
            for frame in range(frames):
                picture.seek(frame)
                picture.load()
            picture.seek(0)
        except Exception as error:
            words = f"{type(error).__name__} {error}".lower()
            if any(word in words for word in EARLY) or not _ends(path, picture.format or ""):
                return result | {"fault": "truncated-image", "reason": f"after {os.path.getsize(path):,} bytes"}
            why = f"it opens, but its pixels do not decode ({type(error).__name__})"
            return result | {"fault": "corrupt-image", "reason": why}
        with contextlib.suppress(Exception):  # tags may be anything
            result["turn"] = int(picture.getexif().get(0x0112, 1))
        if not _ends(path, picture.format or ""):
            return result | {"fault": "truncated-image", "reason": "the end of the file is missing"}
        return result | _colours(picture, Image)


def _unopened(path: str, error: Exception) -> dict[str, Any]:
    with open(path, "rb") as file:
        whole = file.read(512)
    first = whole.lstrip().lower()
    other = next((what for mark, what in OTHERS.items() if mark in first[:16]), None)
    if other:
        return {"fault": "unsupported", "reason": f"{other}, which this Pillow does not read"}
    text = next((what for begin, what in CONTENTS.items() if first.startswith(begin)), "")
    if not text and not first.strip(b"\x00"):
        text = "zeros" if first else "white space"
    why = f"it holds {text}" if text else f"it does not open as a picture ({type(error).__name__})"
    return {"fault": "corrupt-image", "reason": why if whole else "the file is empty"}


def _ends(path: str, form: str) -> bool:
    """Whether the mark at the end of a PNG or a JPEG is there. libjpeg fills up what is missing, and says nothing."""
    mark = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}.get(form)
    if mark is None:
        return True
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        count = file.tell()
        file.seek(max(0, count - (1 << 16)))
        tail = file.read()
        if mark in tail or count <= len(tail):
            return mark in tail
        file.seek(0)  # what follows the picture may be long: a video, a second picture
        return count > (64 << 20) or mark in file.read()


def _colours(picture: Any, Image: Any) -> dict[str, Any]:
    small = picture.reduce(max(1, min(picture.size) // (4 * SIDE))) if picture.mode not in ("P", "1") else picture
    if small.mode.startswith(("I", "F")):
        values = numpy.asarray(small, dtype=numpy.float64)
        low, high = float(values.min()), float(values.max())
        small = Image.fromarray(((values - low) * (255 / ((high - low) or 255))).astype("uint8"))
    small = small.convert("RGB").resize((SIDE, SIDE), 4)  # 4: the mean of each box
    pixels = numpy.asarray(small).reshape(-1, 3).astype("float32")
    grey = (pixels @ numpy.array([0.299, 0.587, 0.114], "float32") + 0.5).astype("uint8")
    mean, spread = [round(float(v), 3) for v in pixels.mean(0)], round(float(grey.std()), 3)
    return {"mean": mean, "spread": spread, "thumb": base64.b64encode(grey).decode()}


def measure_all(paths: Sequence[str], workers: int | None) -> Iterator[dict[str, Any]]:
    """The measures of each path, in order. workers: processes, 0 for none (None: of over ALONE, one a processor)."""
    if workers is None:
        affinity = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count() or 1))
        workers = 0 if len(paths) <= ALONE else min(8, len(affinity(0)))
    if workers == 0:
        yield from map(measure, paths)
        return
    decoders = Decoders()
    ahead = max(1, min(AHEAD, len(paths) // (4 * workers)))
    pieces = [paths[start : start + ahead] for start in range(0, len(paths), ahead)]
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        yield from itertools.chain.from_iterable(pool.map(decoders.measures, pieces))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        decoders.end()


class Decoders:
    """Processes that decode pictures, as many as there are threads that ask."""

    def __init__(self) -> None:
        self.idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self.all: list[subprocess.Popen[str]] = []
        self.ended = False

    def measures(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """Of each path, in this order: a process has several ahead, and need not wait for the one that asks."""
        answers: list[dict[str, Any]] = []
        while len(answers) < len(paths) and not self.ended:
            try:
                process = self.idle.get_nowait()
            except queue.Empty:
                process = self._start()
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write("".join(json.dumps(path) + "\n" for path in paths[len(answers) :]))
                process.stdin.flush()
                while len(answers) < len(paths) and (line := process.stdout.readline()):
                    answers.append({sys.intern(key): value for key, value in json.loads(line).items()})
            if len(answers) < len(paths):  # the first without an answer has ended the process
                reason = f"the decoder crashed, or took over {PATIENCE:g} s"
                answers.append({"fault": "corrupt-image", "reason": reason})
            else:
                self.idle.put(process)
        return answers

    def _start(self) -> subprocess.Popen[str]:
        paths = os.pathsep.join([str(pathlib.Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", "nbdebug.tools.data.pictures"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is for the process that asks
        )
        self.all.append(process)
        return process

    def end(self) -> None:
        self.ended = True
        for process in self.all:
            process.kill()
            with contextlib.suppress(OSError, ValueError):
                process.communicate()


def main() -> None:
    """Answer each path on stdin with a line of JSON, within 4 GiB of memory; end at one that takes too long."""
    with contextlib.suppress(Exception):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    for line in iter(sys.stdin.readline, ""):
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        answer = json.dumps(measure(json.loads(line)))
        faulthandler.cancel_dump_traceback_later()
        print(answer, flush=True)


if __name__ == "__main__":
    main()
