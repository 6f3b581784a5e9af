"""The width was changed, the heads were not."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/not-divisible", ("hidden_size", "num_attention_heads")
TEXT = '{{"hidden_size": {}, "num_attention_heads": 12}}'


def settings(part):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.json"
    path.write_text(TEXT.format(part), encoding="utf-8")
    return SimpleNamespace(path=path, schema=None)


def sick():
    return settings(128)


def healthy():
    return settings(144)
