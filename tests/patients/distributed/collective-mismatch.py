"""After a loop that both have run through, the first rank alone validates, with a reduction in it; the other waits at
the barrier."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/collective-mismatch", ("Rank 0 leaves the common path", "all_reduce", "if rank == 0:")

SOURCE = """for epoch in range(2):
    for batch in rows:
        seen += len(batch)
    if rank == 0:
        print(validate())
    dist.barrier()
"""


PLACES = [
    {"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 1, "first": 2, "last": 6},
    {"k": "place", "number": 2, "kind": "arm", "file": "train.py", "line": 4, "first": 5, "last": 5},
    {"k": "place", "number": 3, "kind": "loop", "file": "train.py", "line": 2, "first": 3, "last": 3},
]
REDUCE = {"k": "call", "op": "all_reduce", "shape": "[]", "dtype": "float32", "lines": [("train.py", 5, "<module>")]}
BARRIER = {"k": "call", "op": "barrier", "lines": [("train.py", 6, "<module>")]}


def sick():
    marks = [1, 3, 3, -3]
    return facts_of({0: [*PLACES, {**REDUCE, "m": [*marks, 2]}], 1: [*PLACES, {**BARRIER, "m": marks}]}, SOURCE)


def healthy():
    log = [*PLACES, {**REDUCE, "m": [1, 3, 3, -3, 2]}, BARRIER]
    return facts_of({0: log, 1: log}, SOURCE)
