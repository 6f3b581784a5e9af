"""Both ranks have six batches; one leaves out a step whose loss is bad, and its backward is missing at the end."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/collective-mismatch", ("Rank 1", "leaves out calls", "if loss.isnan():", "all_reduce(leave")

SOURCE = """for batch in batches:
    loss = model(batch).mean()
    if loss.isnan():
        continue
    loss.backward()
"""


PLACES = [
    {"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 1, "first": 2, "last": 5},
    {"k": "place", "number": 2, "kind": "arm", "file": "train.py", "line": 3, "first": 4, "last": 4},
]
STEP = {"k": "call", "op": "backward of DistributedDataParallel", "lines": [("train.py", 5, "<module>")], "m": [1]}


def sick():
    left = [STEP] * 2 + [{**STEP, "m": [1, 2, 1]}] + [STEP] * 2
    return facts_of(
        {0: [*PLACES, *[STEP] * 6], 1: [*PLACES, *left, {"k": "end", "m": [-1]}]},
        SOURCE,
    )


def healthy():
    log = [*PLACES, *[STEP] * 6, {"k": "end", "m": [-1]}]
    return facts_of({0: log, 1: log}, SOURCE)
