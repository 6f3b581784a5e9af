"""The dropout is a percentage."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/out-of-range", ("model.dropout", "0.1")
TEXT = "model:\n  dropout: {}\n  lr: 0.1\n"


def settings(part):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.yaml"
    path.write_text(TEXT.format(part), encoding="utf-8")
    return SimpleNamespace(path=path, schema=None)


def sick():
    return settings(10)


def healthy():
    return settings(0.1)
