"""A misspelt key leaves the default, without a word."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/unknown-key", ("train.warmpu", "warmup")
TEXT = "[train]\n{} = 10\nsteps = 100\n"


def settings(part):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.toml"
    path.write_text(TEXT.format(part), encoding="utf-8")
    return SimpleNamespace(path=path, schema={"train.warmup": {"type": "int"}, "train.steps": {"type": "int"}})


def sick():
    return settings("warmpu")


def healthy():
    return settings("warmup")
