"""One rank ends before the group is made; the other waits for it there."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/collective-mismatch", ("rank 1", "init_process_group", "if not rows:")

SOURCE = """if not rows:
    sys.exit(0)
dist.init_process_group("gloo")
"""
PLACE = {"k": "place", "number": 1, "kind": "arm", "file": "train.py", "line": 1, "first": 2, "last": 2}
INIT = {"k": "call", "op": "init_process_group", "g": "start", "lines": [("train.py", 3, "<module>")]}


def sick():
    return facts_of({0: [PLACE, INIT], 1: [{"k": "end", "code": 0, "m": [1]}]}, SOURCE)


def healthy():
    return facts_of({0: [PLACE, INIT], 1: [INIT]}, SOURCE)
