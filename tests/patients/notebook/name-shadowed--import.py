"""A module was imported, and later the class of the same name from it; a function above still wants the module."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/name-shadowed", 1, ["datetime"]


def notebook(late):
    return SimpleNamespace(
        cells=[
            "import datetime\n\ndef stamp():\n    return datetime.datetime.now().isoformat()",
            late,
            "name = f'run-{stamp()}'",
        ]
    )


def sick():
    return notebook("from datetime import datetime, timedelta")


def healthy():
    return notebook("from datetime import timedelta")
