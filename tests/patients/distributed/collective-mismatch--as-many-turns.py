"""One rank leaves out a reduction in one of as many turns, and no branch tells: the numbers of batches are alike."""

from tests.distributed.events import facts_of

CODE, NAMES = (
    "distributed/collective-mismatch",
    ("Rank 1 leaves the common path", "rank 1 has left after 2 calls", "model(batch).mean().backward()"),
)

SOURCE = """for batch in rows:
    model(batch).mean().backward()
"""
LOOP = {"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 1, "first": 2, "last": 2}
STEP = {"k": "call", "op": "backward of DistributedDataParallel", "lines": [("train.py", 2, "<module>")]}


def ranks(marks):
    log = [LOOP, *[{**STEP, "m": [1]}] * 3]
    steps = [{**STEP, "m": own} for own in marks]
    return facts_of({0: log, 1: [LOOP, *steps, {"k": "end", "m": [-1]}]}, SOURCE)


def sick():
    return ranks([[1], [1, 1]])


def healthy():
    return ranks([[1], [1], [1]])
