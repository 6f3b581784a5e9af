"""The schedule has the name of another library."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/invalid-choice", ("schedule", "cosine")
TEXT = '{{"schedule": "{}"}}'


def settings(part):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.json"
    path.write_text(TEXT.format(part), encoding="utf-8")
    return SimpleNamespace(path=path, schema={"schedule": {"type": "str", "choices": ["cosine", "linear"]}})


def sick():
    return settings("cosine_decay")


def healthy():
    return settings("cosine")
