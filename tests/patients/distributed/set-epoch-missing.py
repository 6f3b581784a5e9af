"""Three epochs in one order."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/set-epoch-missing", ("set_epoch", "2 epochs")

SOURCE = """loader = DataLoader(rows, sampler=DistributedSampler(rows))
"""


ONE = {"k": "pass", "backwards": 2, "complete": True, "shuffles": True, "loader": "0", "sampler": []}
LINES = {"lines": [("train.py", 1, "f")]}


def ranks(second):
    passes = [[0, 2, 4, 6], second]
    log = [{**ONE, **LINES, "id": f"0/{n}", "rows": rows} for n, rows in enumerate(passes)]
    return facts_of({0: log}, SOURCE)


def sick():
    return ranks([0, 2, 4, 6])


def healthy():
    return ranks([4, 0, 6, 2])
