"""The batch size stands twice in one section; the upper one was meant."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/duplicate-key", ("train.batch", "line 4")
TEXT = '{{\n  "train": {{\n    "batch": 16,\n    {}: 4\n  }}\n}}\n'


def settings(part):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.json"
    path.write_text(TEXT.format(part), encoding="utf-8")
    return SimpleNamespace(path=path, schema={"train.batch": {"type": "int", "min": 1}, "train.other": {"type": "int"}})


def sick():
    return settings('"batch"')


def healthy():
    return settings('"other"')
