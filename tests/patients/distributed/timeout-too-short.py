"""Rank 0 prepares the data for seven seconds; rank 1 waits for it for five, as the group is made."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/timeout-too-short", ("timeout=timedelta(seconds=5)", "Rank 1 gives up", "after 7 s")

SOURCE = """dist.init_process_group("gloo", timeout=timedelta(seconds=5))
dist.barrier()
"""
INIT = {"k": "init", "t": 0.0, "world": 2, "timeout": 5.0, "lines": [("train.py", 1, "<module>")]}
BARRIER = {"k": "call", "op": "barrier", "ranks": [0, 1], "lines": [("train.py", 2, "<module>")]}
LATE = "Timed out waiting 5000ms for recv operation to complete"


def ranks(comes):
    error = {"k": "error", "type": "RuntimeError", "peer": True, "lines": BARRIER["lines"], "step": 0}
    waits = [{**INIT, "own": 1}, {**BARRIER, "t": 1.0}]
    works = [{**INIT, "own": 0}, {**BARRIER, "t": comes}]
    if comes > 6:
        waits.append({**error, "t": 6.0, "text": LATE})
        works.append({**error, "t": comes, "text": "Connection closed by peer"})
    return facts_of({0: works, 1: waits}, SOURCE)


def sick():
    return ranks(comes=8.0)


def healthy():
    return ranks(comes=4.0)
