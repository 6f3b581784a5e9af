"""A part that was frozen when the wrapper was made is unfrozen later: each rank trains it with gradients of its own."""

from tests.distributed.events import facts_of

CODE = "distributed/weights-diverged"
NAMES = ("body.weight", "unfrozen", "parameter.requires_grad = True", "Wrap the model again")

SOURCE = """model.body.requires_grad_(False)
wrapped = DistributedDataParallel(model)
for step, x in enumerate(rows):
    if step == 1:
        for parameter in model.body.parameters():
            parameter.requires_grad = True
    wrapped(x).sum().backward()
"""

MADE = {"k": "wrapper", "lines": [("train.py", 2, "<module>")]}


def weights(step, value):
    event = {"id": f"0/{step}/after", "step": step, "when": "after", "backwards": step + 1, "lr": [0.1]}
    values = {
        "values": {"body.weight": [value, 2.0], "head.weight": [1.0, 1.0]},
        "lines": [("train.py", 7, "<module>")],
    }
    return {"k": "weights", **event, **values, "late": ["body.weight"], "unfrozen": ["body.weight"]}


def sick():
    return facts_of({0: [MADE, weights(0, 1.0), weights(1, 1.1)], 1: [MADE, weights(0, 1.0), weights(1, 1.2)]}, SOURCE)


def healthy():
    log = [MADE, weights(0, 1.0), weights(1, 1.1)]
    return facts_of({0: log, 1: log}, SOURCE)
