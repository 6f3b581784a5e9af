"""A rank whose own loss is too large makes no step of the optimizer; the other one does."""

from tests.distributed.events import facts_of

CODE = "distributed/weights-diverged"
NAMES = ("rank 1 has left out a step of the optimizer", "if loss.item() < 4.0:", "Let all ranks decide alike")

SOURCE = """for x in rows:
    loss = model(x).square().mean()
    loss.backward()
    if loss.item() < 4.0:
        optimizer.step()
"""
PLACES = [
    {"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 1, "first": 2, "last": 5},
    {"k": "place", "number": 2, "kind": "arm", "file": "train.py", "line": 4, "first": 5, "last": 5},
]


def weights(step, backwards, value, marks):
    event = {"id": f"0/{step}/after", "step": step, "when": "after", "backwards": backwards, "m": marks}
    return {"k": "weights", **event, "values": {"weight": [value, 2.0]}, "late": [], "lr": [0.1], "lines": []}


def sick():
    alike = [*PLACES, weights(0, 1, 1.0, [1, 2])]
    other = weights(1, 3, 1.5, [1, 1, 2])
    return facts_of({0: [*alike, weights(1, 2, 1.25, [1, 2])], 1: [*alike, other]}, SOURCE)


def healthy():
    log = [*PLACES, weights(0, 1, 1.0, [1, 2]), weights(1, 3, 1.5, [1, 1, 2])]
    return facts_of({0: log, 1: log}, SOURCE)
