"""The folder of the pictures has another name."""

import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/missing-path", ("data.root", "folder")
TEXT = '[data]\nroot = "{}"\n'


def settings(part):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.toml"
    path.write_text(TEXT.format(part), encoding="utf-8")
    return SimpleNamespace(path=path, schema={"data.root": {"type": "str", "exists": "folder"}})


def sick():
    return settings("pictures")


def healthy():
    return settings(".")
