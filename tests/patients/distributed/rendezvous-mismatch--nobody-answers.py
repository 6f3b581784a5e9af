"""An address at which nobody listens: all ranks are in init_process_group, and none comes out of it."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/rendezvous-mismatch", ("10.0.0.7:29500", "init_process_group")

SOURCE = """dist.init_process_group("gloo", init_method="tcp://10.0.0.7:29500", rank=rank, world_size=2)
"""


def ranks(*more):
    init = {"k": "init", "world": 2, "address": "tcp://10.0.0.7:29500", "lines": [("train.py", 1, "<module>")]}
    logs = {rank: [{**init, "own": rank, "t": 100.0}, *more] for rank in (0, 1)}
    return facts_of(logs, SOURCE, now=130.0)


def sick():
    return ranks()


def healthy():
    return ranks({"k": "joined", "t": 101.0})
