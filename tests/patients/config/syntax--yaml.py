"""One line of a block is indented with a tab."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/syntax", ("line 3", "tab")
TEXT = "model:\n  width: 8\n{}heads: 2\n"


def settings(part):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.yaml"
    path.write_text(TEXT.format(part), encoding="utf-8")
    return SimpleNamespace(path=path, schema=None)


def sick():
    return settings("\t")


def healthy():
    return settings("  ")
