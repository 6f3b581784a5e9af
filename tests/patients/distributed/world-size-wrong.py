"""Written for four cards, launched with two processes."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/world-size-wrong", ("world_size", "4")

SOURCE = """dist.init_process_group("gloo", rank=rank, world_size=4)
"""


def ranks(world):
    init = {"k": "init", "world": world, "own": 0, "by_argument": True, "lines": [("train.py", 1, "f")]}
    return facts_of({0: [init], 1: [{**init, "own": 1}]}, SOURCE)


def sick():
    return ranks(4)


def healthy():
    return ranks(2)
