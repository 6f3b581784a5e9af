"""One rank waits for something else, and the timeout of the others is nearly over."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/collective-mismatch", ("rank 1", "init_process_group", "while not ready.exists():")

SOURCE = """if rank == 1:
    while not ready.exists():
        time.sleep(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
"""
INIT = {"k": "init", "world": 2, "own": 0, "timeout": 60.0, "lines": [("train.py", 4, "<module>")], "t": 100.0}
CALL = {"k": "call", "op": "init_process_group", "g": "start", "lines": [("train.py", 4, "<module>")], "t": 100.0}
STACK = {"k": "stack", "lines": [("train.py", 2, "<module>")], "stack": []}


def ranks(now):
    return facts_of({0: [INIT, CALL], 1: [STACK]}, SOURCE, now=now)


def sick():
    return ranks(156.0)


def healthy():
    return ranks(130.0)
