"""The rank is a constant: two processes call themselves rank 0, and the group waits for a rank 1."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/rendezvous-mismatch", ("rank 0", "rank=0", "rank 1")

SOURCE = """dist.init_process_group("gloo", rank=0, world_size=2)
"""


def ranks(first, second):
    init = {"k": "init", "world": 2, "rank_by_argument": True, "address": "localhost:29500"}
    init["lines"] = [("train.py", 1, "<module>")]
    return facts_of({0: [{**init, "own": first}], 1: [{**init, "own": second}]}, SOURCE)


def sick():
    return ranks(0, 0)


def healthy():
    return ranks(0, 1)
