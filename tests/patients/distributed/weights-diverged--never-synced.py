"""The last part of each accumulated batch is within no_sync as well: no backward reduces anything."""

from tests.distributed.events import facts_of

CODE = "distributed/weights-diverged"
NAMES = ("every backward is within no_sync", "with model.no_sync():")

SOURCE = """model = DistributedDataParallel(net)
for x in parts:
    with model.no_sync():
        model(x).sum().backward()
"""
MADE = {"k": "wrapper", "lines": [("train.py", 1, "<module>")]}
BACKWARD = {"k": "call", "op": "backward of DistributedDataParallel", "ranks": [0, 1]}


def weights(step, value):
    event = {"id": f"0/{step}/after", "step": step, "when": "after", "backwards": step + 1, "lr": [0.1]}
    values = {"values": {"weight": [value, 2.0]}, "lines": [("train.py", 1, "<module>")], "late": []}
    return {"k": "weights", **event, **values}


def sick():
    return facts_of({0: [MADE, weights(0, 1.0)], 1: [MADE, weights(0, 1.2)]}, SOURCE)


def healthy():
    log = [MADE, {**BACKWARD, "lines": [("train.py", 4, "<module>")]}, weights(0, 1.0)]
    return facts_of({0: log, 1: log}, SOURCE)
