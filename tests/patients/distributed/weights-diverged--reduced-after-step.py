"""Gradients are averaged by hand, behind the step that should use them."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/weights-diverged", ("reduced after the optimizer's step", "average(model)")

SOURCE = """loss.backward()
optimizer.step()
average(model)
"""
LATE = {"k": "gradients", "late": True, "lines": [("train.py", 3, "<module>")]}


def weights(value):
    event = {"id": "0/1/after", "step": 1, "when": "after", "backwards": 1, "late": [], "lr": [0.1], "lines": []}
    return {"k": "weights", **event, "values": {"weight": [value, 2.0]}}


def sick():
    return facts_of({0: [LATE, weights(1.0)], 1: [LATE, weights(1.5)]}, SOURCE)


def healthy():
    return facts_of({0: [weights(1.0)], 1: [weights(1.0)]}, SOURCE)
