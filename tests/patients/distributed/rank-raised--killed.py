"""The kernel ends one of two processes: no error in Python, no end."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/rank-raised", ("rank 1", "SIGKILL", "loss.backward()")

SOURCE = """for batch in loader:
    loss = model(batch).mean()
    loss.backward()
"""
TORCHRUN = """
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_13:30:44
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 5578)
"""


def ranks(output):
    call = {"k": "call", "op": "backward of DistributedDataParallel", "ranks": [0, 1]}
    own = [{**call, "lines": [("train.py", 3, "<module>")]}] * 4
    return facts_of({0: own, 1: own}, SOURCE, output=output)


def sick():
    return ranks(TORCHRUN.format(-9))


def healthy():
    return ranks("rank 0 has saved the model\n")
