"""A rate of 3e-4 is text to PyYAML."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/wrong-type", ("optimizer.rate", "3.0e-4")
TEXT = "optimizer:\n  rate: {}\n  lr: 0.1\n"


def settings(part):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.yaml"
    path.write_text(TEXT.format(part), encoding="utf-8")
    return SimpleNamespace(path=path, schema=None)


def sick():
    return settings("3e-4")


def healthy():
    return settings("3.0e-4")
