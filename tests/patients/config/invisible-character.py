"""A path was copied from a chat, with a zero-width space in it."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/invisible-character", ("root", "U+200B")
TEXT = "root: pictures/train{}\n"


def settings(part):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.yaml"
    path.write_text(TEXT.format(part), encoding="utf-8")
    return SimpleNamespace(path=path, schema={"root": {"type": "str"}})


def sick():
    return settings("\u200b")


def healthy():
    return settings("")
