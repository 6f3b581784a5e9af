"""One rank can't read its file; the other waits, and fails when the first is gone."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/rank-raised", ("rank 1", "FileNotFoundError")

SOURCE = """rows = open(f"rows-{rank}.txt")
"""


def error(kind, text, peer):
    return {"k": "error", "type": kind, "text": text, "peer": peer, "lines": [("train.py", 1, "f")]}


def sick():
    own, other = (
        error("FileNotFoundError", "rows-1.txt", False),
        error("RuntimeError", "Connection closed by peer", True),
    )
    return facts_of({0: [other], 1: [own]}, SOURCE)


def healthy():
    return facts_of({0: [{"k": "end"}], 1: [{"k": "end"}]}, SOURCE)
