"""A run that counts tokens was stopped while it wrote how far it is."""

import json
from types import SimpleNamespace

CODE, NAMES = "data/unfinished-file", ("done.json",)


def training(sick):
    def make(folder):
        text = json.dumps({"lines": list(range(40))})
        (folder / "done.json").write_text(text[:60] if sick else text)
        return folder

    return SimpleNamespace(make=make, expected={})


def sick():
    return training(True)


def healthy():
    return training(False)
