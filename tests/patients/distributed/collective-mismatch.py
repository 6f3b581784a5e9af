"""The first rank alone validates, with a reduction in it; the other waits at the barrier."""

from nbdebug.tools.distributed.facts import RanksFacts

CODE, NAMES = "distributed/collective-mismatch", ("rank 0", "all_reduce", "barrier", "if rank == 0:")

SOURCE = """for epoch in range(2):
    if rank == 0:
        print(validate())
    dist.barrier()
"""


PLACES = [
    {"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 1, "first": 2, "last": 4},
    {"k": "place", "number": 2, "kind": "arm", "file": "train.py", "line": 2, "first": 3, "last": 3},
]
REDUCE = {"k": "call", "op": "all_reduce", "shape": "[]", "dtype": "float32", "lines": [("train.py", 3, "<module>")]}
BARRIER = {"k": "call", "op": "barrier", "lines": [("train.py", 4, "<module>")]}


def sick():
    return RanksFacts.of({0: [*PLACES, {**REDUCE, "m": [1, 2]}], 1: [*PLACES, {**BARRIER, "m": [1]}]}, SOURCE)


def healthy():
    log = [*PLACES, {**REDUCE, "m": [1]}, BARRIER]
    return RanksFacts.of({0: log, 1: log}, SOURCE)
