"""The gradients of two ranks are added up by hand; the loss grows. The twin divides them."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/gradients-not-averaged", ("dist.all_reduce(p.grad)", "2 ranks", "from 1 to 50")

SOURCE = """for p in model.parameters():
    dist.all_reduce(p.grad)
    {}
optimizer.step()
"""


def ranks(then, last):
    losses = [{"k": "loss", "id": n, "bad": False, "value": "1.0" if n < 8 else str(last)} for n in range(20)]
    log = [{"k": "summed", "lines": [("train.py", 2, "<module>")]}, *losses]
    return facts_of({0: log, 1: log}, SOURCE.format(then))


def sick():
    return ranks("pass", last=50.0)


def healthy():
    return ranks("p.grad /= world", last=0.5)
