"""The samplers have a seed of their own on each rank: each shares out another order."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/missing-sampler", ("50%", "as their samplers", "seed=100 + rank")

SOURCE = """sampler = DistributedSampler(rows, seed=100 + rank)
loader = DataLoader(rows, sampler=sampler)
"""


def ranks(*rows):
    one = {"k": "pass", "backwards": 2, "complete": True, "shuffles": True, "loader": "0", "id": "0/0", "content": []}
    lines = {"lines": [("train.py", 2, "f")], "sampler": [("train.py", 1, "f")]}
    return facts_of({rank: [{**one, **lines, "rows": own}] for rank, own in enumerate(rows)}, SOURCE)


def sick():
    return ranks([0, 1, 2, 3, 4, 5, 6, 7], [9, 1, 2, 11, 4, 8, 10, 7])


def healthy():
    """Two rows stand twice, as 14 can't be shared out evenly by two in batches of 8."""
    return ranks([0, 2, 4, 6, 8, 10, 12, 1], [1, 3, 5, 7, 9, 11, 13, 0])
