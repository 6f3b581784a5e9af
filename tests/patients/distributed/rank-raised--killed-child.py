"""The kernel ends a process that torch.multiprocessing.spawn has started."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/rank-raised", ("rank 1", "SIGKILL", "loss.backward()")

SOURCE = """for batch in loader:
    loss = model(batch).mean()
    loss.backward()
"""


def ranks(output):
    call = {"k": "call", "op": "backward of DistributedDataParallel", "ranks": [0, 1]}
    own = [{**call, "lines": [("train.py", 3, "<module>")]}] * 4
    return facts_of({0: own, 1: own}, SOURCE, output=output)


def sick():
    return ranks("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL\n")


def healthy():
    return ranks("process 1 has saved the model\n")
