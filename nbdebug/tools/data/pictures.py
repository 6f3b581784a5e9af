"""Pictures decoded to their end: format, size, mode, turn, colours and a thumbnail. `python -m` of this file is one of
the processes that do so where there are many: paths come in on stdin, a line of JSON goes out for each.

In processes of their own a picture that crashes a decoder, or never ends, costs one process and is named.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
FORMATS = {
    "JPEG": "jpg jpeg jpe jfif jif",
    "MPO": "jpg jpeg jpe mpo",
    "PNG": "png apng",
    "BMP": "bmp",
    "DIB": "dib bmp",
    "GIF": "gif",
    "WEBP": "webp",
    "TIFF": "tif tiff",
    "PPM": "ppm pgm pbm pnm pfm",
    "JPEG2000": "jp2 j2k jpx",
    "TGA": "tga",
    "AVIF": "avif",
    "ICO": "ico",
}
ENDINGS = {
    ending: {name for name, own in FORMATS.items() if ending in own.split()}
    for own in FORMATS.values()
    for ending in own.split()
}
EARLY = (
    "truncat",
    "unexpected end",
    "ended",
    "premature",
    "not enough",
    "eof",
    "unpack requires",
    "broken data stream",
)
TEXTS = (
    (b"<!doctype", "a page of HTML"),
    (b"<html", "a page of HTML"),
    (b"version https://git-lfs", "a pointer of Git LFS"),
)
OTHERS = ((b"ftypheic", "HEIC"), (b"ftypheif", "HEIF"), (b"ftypmif1", "HEIF"), (b"ftypavif", "AVIF"))


def pillow() -> tuple[Any, Any]:
    """Pillow's Image and ImageFile. Raises ImportError, with what to install."""
    try:
        from PIL import Image, ImageFile
    except ImportError:
        raise ImportError("Pillow is not installed (pip install 'torch-nbdebug[data]')") from None
    return Image, ImageFile


def measure(path: str, wanted: bool = True) -> dict[str, Any]:
    """What is known of a picture: format, size, mode, turn (the EXIF tag), frames; fault ("", "corrupt", "truncated",
    "large", "unsupported") with a reason; mean and spread of the colours, and a grey thumbnail in base64.

    wanted: whether the colours and the thumbnail are. Nothing of the user's Pillow is changed afterwards."""
    Image, ImageFile = pillow()

    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _measured(path, wanted)
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before


def _measured(path: str, wanted: bool) -> dict[str, Any]:
    Image = pillow()[0]

    try:
        picture = Image.open(path)
    except Exception as error:  # a plugin may raise anything
        return _unopened(path, error)
    with picture:
        result: dict[str, Any] = {"format": picture.format, "size": picture.size, "mode": picture.mode, "turn": 1}
        frames = min(int(getattr(picture, "n_frames", 1) or 1), 16) if picture.format in ("GIF", "TIFF", "WEBP") else 1
        if picture.size[0] * picture.size[1] > MOST_PIXELS:
            pixels = f"{picture.size[0]:,} x {picture.size[1]:,} pixels in {os.path.getsize(path):,} bytes"
            return result | {"fault": "large", "reason": f"{pixels}: Pillow refuses it as a decompression bomb"}
        try:
            for frame in range(frames):
                picture.seek(frame)
                picture.load()
            picture.seek(0)
        except Exception as error:
            return result | _undecoded(path, picture.format or "", error)
        with contextlib.suppress(Exception):  # tags may be anything
            result["turn"] = int(picture.getexif().get(0x0112, 1))
        if not _ends(path, picture.format or ""):
            return result | {"fault": "truncated", "reason": "the end of the file is missing"}
        return result | (_colours(picture) if wanted else {})


def _unopened(path: str, error: Exception) -> dict[str, Any]:
    with open(path, "rb") as file:
        first = file.read(512).lstrip().lower()
    if not first:
        return {
            "fault": "corrupt",
            "reason": "the file is empty" if not os.path.getsize(path) else "it holds white space",
        }
    text = next((what for begin, what in TEXTS if first.startswith(begin)), None)
    other = next((what for mark, what in OTHERS if mark in first[:16]), None)
    if other:
        return {"fault": "unsupported", "reason": f"{other}, which this Pillow does not read"}
    if text is None and first[:4] == b"\x00\x05\x16\x07":
        text = "the notes of macOS on a file (AppleDouble)"
    if text is None and not first.strip(b"\x00"):
        text = "zeros"
    why = f"it holds {text}" if text else f"it does not open as a picture ({type(error).__name__})"
    return {"fault": "corrupt", "reason": why}


def _undecoded(path: str, form: str, error: Exception) -> dict[str, Any]:
    words = f"{type(error).__name__} {error}".lower()
    early = any(word in words for word in EARLY) or not _ends(path, form)
    reason = (
        f"after {os.path.getsize(path):,} bytes"
        if early
        else f"it opens, but its pixels do not decode ({type(error).__name__})"
    )
    return {"fault": "truncated" if early else "corrupt", "reason": reason}


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


def _colours(picture: Any) -> dict[str, Any]:
    import numpy

    small = picture.reduce(max(1, min(picture.size) // (4 * SIDE))) if picture.mode not in ("P", "1") else picture
    if small.mode.startswith(("I", "F")):
        values = numpy.asarray(small, dtype=numpy.float64)
        low, high = float(values.min()), float(values.max())
        values = (values - low) * (255 / (high - low) if high > low else 1.0)
        small = (
            type(picture).fromarray(values.astype("uint8")) if hasattr(type(picture), "fromarray") else _grey(values)
        )
    small = small.convert("RGB").resize((SIDE, SIDE), 4)  # 4: the mean of each box
    pixels = numpy.asarray(small).reshape(-1, 3).astype("float32")
    grey = (pixels @ numpy.array([0.299, 0.587, 0.114], "float32") + 0.5).astype("uint8")
    values, number = grey.astype("float32"), len(pixels)
    spread = max(0.0, float(values @ values) / number - (float(values.sum()) / number) ** 2) ** 0.5
    return {
        "mean": [round(float(v) / number, 3) for v in numpy.ones(number, "float32") @ pixels],
        "spread": round(spread, 3),
        "thumb": base64.b64encode(grey).decode(),
    }


def _grey(values: Any) -> Any:
    Image = pillow()[0]

    return Image.fromarray(values.astype("uint8"))


# -- many of them -----------------------------------------------------------------------------------------------------


def measure_all(
    paths: Sequence[str], workers: int | None, wanted: bool, done: Callable[[int], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(place, measures) of each path, in any order. workers: processes, 0 for none; None: as many as there are
    processors where there are over ALONE pictures. done: called with the number of pictures since the last call."""
    if workers is None:
        workers = (
            0
            if len(paths) <= ALONE
            else max(
                1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
            )
        )
    if workers == 0:
        for place, path in enumerate(paths):
            yield place, _safely(path, wanted)
            done(1)
        return
    with Pool(workers, wanted) as pool:
        for place, result in pool.run(paths):
            yield place, result
            done(1)


def _safely(path: str, wanted: bool) -> dict[str, Any]:
    try:
        return measure(path, wanted)
    except (OSError, MemoryError) as error:
        return {"fault": "unreadable", "reason": getattr(error, "strerror", None) or type(error).__name__}


class Pool:
    """Processes that decode pictures; all of them are ended with the block."""

    def __init__(self, workers: int, wanted: bool) -> None:
        self.workers, self.wanted = workers, wanted
        self.processes: list[subprocess.Popen[str]] = []
        self.answered: dict[int, float] = {}  # of each process that works: when it answered last
        self.closed = threading.Event()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]

    def run(self, paths: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        ahead = max(1, min(AHEAD, len(paths) // (4 * self.workers)))
        waiting: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for start in range(0, len(paths), ahead):
            waiting.put(list(range(start, min(start + ahead, len(paths)))))
        results: queue.Queue[list[tuple[int, dict[str, Any]]]] = queue.Queue(maxsize=16)
        for _ in range(self.workers):
            threading.Thread(target=self._feed, args=(paths, waiting, results), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        left = len(paths)
        while left:
            answers = results.get()
            left -= len(answers)
            yield from answers

    def _watch(self) -> None:
        """End the process that has not answered for too long: its thread then names the picture."""
        while not self.closed.wait(1.0):
            for process in self.processes:
                if time.monotonic() - self.answered.get(process.pid, math.inf) > PATIENCE:
                    process.kill()

    def _start(self) -> subprocess.Popen[str]:
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "nbdebug.tools.data.pictures", str(int(self.wanted))]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # Ctrl-C is for the process that asks
        )
        self.processes.append(process)
        return process

    def _feed(self, paths: Sequence[str], waiting: Any, results: Any) -> None:
        """The life of a thread: one process, which has several paths ahead of its answers."""
        process: subprocess.Popen[str] | None = None
        while not self.closed.is_set():
            try:
                places = waiting.get_nowait()
            except queue.Empty:
                break
            process = process or self._start()
            answers: list[tuple[int, dict[str, Any]]] = []
            try:
                assert process.stdin is not None and process.stdout is not None
                self.answered[process.pid] = time.monotonic()
                process.stdin.write("".join(json.dumps(paths[place]) + "\n" for place in places))
                process.stdin.flush()
                while len(answers) < len(places) and (line := process.stdout.readline()):
                    self.answered[process.pid] = time.monotonic()
                    known = {sys.intern(key): value for key, value in json.loads(line).items()}
                    answers.append((places[len(answers)], known))
            except (OSError, ValueError):
                pass
            if len(answers) < len(places):  # the first without an answer has ended the process
                place, *rest = places[len(answers) :]
                reason = f"the decoder crashed, or took over {PATIENCE:g} s"
                answers.append((place, {"fault": "corrupt", "reason": reason}))
                if rest:
                    waiting.put(rest)
                process = None
            else:
                self.answered.pop(process.pid, None)
            results.put(answers)


def main(wanted: bool) -> None:
    """Answer each path on stdin with a line of JSON, within 4 GiB of memory."""
    with contextlib.suppress(Exception):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    for line in iter(sys.stdin.readline, ""):
        print(json.dumps(_safely(json.loads(line), wanted)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "1")
