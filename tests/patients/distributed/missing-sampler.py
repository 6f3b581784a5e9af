"""A plain shuffling loader on each rank."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/missing-sampler", ("100%", "DataLoader(rows, shuffle=True)")

SOURCE = """loader = DataLoader(rows, shuffle=True)
"""


ONE = {"k": "pass", "backwards": 2, "complete": True, "shuffles": False, "loader": "0", "sampler": []}
LINES = {"lines": [("train.py", 1, "f")]}


def ranks(*rows):
    return facts_of({rank: [{**ONE, **LINES, "id": "0/0", "rows": own}] for rank, own in enumerate(rows)}, SOURCE)


def sick():
    return ranks([0, 1, 2, 3], [3, 1, 2, 0])


def healthy():
    return ranks([0, 2, 4, 6], [1, 3, 5, 7])
