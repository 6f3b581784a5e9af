"""One rank fails, and meets the others' backward in the barrier of `finally`: its error is the cause."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/rank-raised", ("Rank 1 has failed: KeyError: 7", "value = table[key]")

SOURCE = """try:
    value = table[key]
    loss(value).backward()
finally:
    dist.barrier()
"""


def call(op, line):
    return {"k": "call", "op": op, "lines": [("train.py", line, "<module>")], "ranks": [0, 1]}


RAISED = {"k": "raised", "type": "KeyError", "text": "7", "lines": [("train.py", 2, "<module>")]}


def sick():
    return facts_of({0: [call("backward", 3)], 1: [RAISED, call("barrier", 5)]}, SOURCE)


def healthy():
    """All ranks meet while they handle an error: nothing has parted."""
    log = [RAISED, call("barrier", 5)]
    return facts_of({0: log, 1: log}, SOURCE)
