"""The gradients of a wrapped model are summed over the ranks by hand, too."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/reduced-twice", ("dist.all_reduce(p.grad)",)

SOURCE = """loss.backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
optimizer.step()
"""


def sick():
    twice = {"k": "gradients", "late": False, "lines": [("train.py", 3, "<module>")]}
    return facts_of({0: [twice], 1: [twice]}, SOURCE)


def healthy():
    return facts_of({0: [], 1: []}, SOURCE)
