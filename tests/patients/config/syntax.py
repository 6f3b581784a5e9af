"""Settings in JSON with a comma behind the last entry."""

import json
import pathlib
import tempfile
from types import SimpleNamespace

CODE, NAMES = "config/syntax", ("settings.json", "line 4")


def training(comma):
    path = pathlib.Path(tempfile.mkdtemp()) / "settings.json"
    path.write_text(f'{{\n  "rate": 0.1,\n  "rounds": 20{comma}\n}}\n')

    def read():
        with open(path) as file:
            return json.load(file)

    return SimpleNamespace(trigger=read)


def sick():
    return training(",")


def healthy():
    return training("")
