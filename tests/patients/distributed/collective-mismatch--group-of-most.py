"""Two ranks of three make a group, and the third is not in that branch: it is the one beside the common path."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/collective-mismatch", ("Rank 2 leaves the common path", "if rank < 2:")

SOURCE = """if rank < 2:
    workers = dist.new_group([0, 1])
dist.all_reduce(x)
"""
PLACE = {"k": "place", "number": 1, "kind": "arm", "file": "train.py", "line": 1, "first": 2, "last": 2}


def call(op, line, *marks):
    return {"k": "call", "op": op, "lines": [("train.py", line, "<module>")], "m": list(marks), "ranks": [0, 1, 2]}


def sick():
    makes = [PLACE, call("new_group", 2, 1)]
    return facts_of({0: makes, 1: makes, 2: [PLACE, call("all_reduce", 3)]}, SOURCE)


def healthy():
    log = [PLACE, call("new_group", 2, 1), call("all_reduce", 3)]
    return facts_of({0: log, 1: log, 2: log}, SOURCE)
