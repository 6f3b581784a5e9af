"""The warm-up is longer than the training."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/inconsistent", ("warmup_steps", "max_steps")
TEXT = "train:\n  warmup_steps: {}\n  max_steps: 1000\n"


def settings(part):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.yaml"
    path.write_text(TEXT.format(part), encoding="utf-8")
    return SimpleNamespace(path=path, schema=None)


def sick():
    return settings(10000)


def healthy():
    return settings(100)
