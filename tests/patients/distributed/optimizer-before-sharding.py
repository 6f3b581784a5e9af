"""The optimizer is made before fully_shard, and holds weights that the model has no more."""

from tests.distributed.events import facts_of

CODE, NAMES = (
    "distributed/optimizer-before-sharding",
    ("made 6 steps", "optimizer = torch.optim.SGD(model.parameters())"),
)

SOURCE = """optimizer = torch.optim.SGD(model.parameters())
fully_shard(model)
"""
STEPS = {"k": "loss", "id": 5, "bad": False, "value": "0.5", "lines": []}
IDLE = {"k": "idle", "steps": 6, "lines": [("train.py", 1, "<module>")]}


def sick():
    return facts_of({rank: [STEPS, IDLE] for rank in (0, 1)}, SOURCE)


def healthy():
    return facts_of({rank: [STEPS] for rank in (0, 1)}, SOURCE)
