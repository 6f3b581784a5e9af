"""Nine batches on two ranks: one has five, the other four and has left."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/uneven-steps", ("rank 0 has 5, rank 1 has 4", "batches = rows[rank::2]")

SOURCE = """batches = rows[rank::2]
for batch in batches:
    model(batch).sum().backward()
"""


PLACES = [{"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 2, "first": 3, "last": 3}]
STEP = {"k": "call", "op": "backward of DistributedDataParallel", "lines": [("train.py", 3, "<module>")], "m": [1]}


def ranks(first, second):
    logs = {0: [*PLACES, *[STEP] * first], 1: [*PLACES, *[STEP] * second]}
    for log in logs.values():
        log.append({"k": "end", "m": [-1]})
    if first > second:
        logs[0].pop()
    return facts_of(logs, SOURCE)


def sick():
    return ranks(5, 4)


def healthy():
    return ranks(4, 4)
