"""A mean of the loss within join(): the rank that has run out of batches answers for the wrapper's calls alone."""

from tests.distributed.events import facts_of

CODE = "distributed/collective-mismatch"
NAMES = (
    "Within join() rank 0 calls all_reduce, its call 2",
    "rank 1 has run out",
    "dist.all_reduce(mean)",
    "when the join is over",
)

SOURCE = """with model.join():
    for batch in loader:
        mean = train(batch)
        dist.all_reduce(mean)
"""


def rank(calls):
    lines = [("train.py", 4, "<module>")]
    own = [{"k": "in_join", "id": 1, "n": n, "op": "all_reduce", "lines": lines} for n in range(calls)]
    return [*own, {"k": "ran_out", "id": 1, "n": calls, "lines": []}]


def sick():
    return facts_of({0: rank(2)[:2], 1: rank(1)}, SOURCE)


def healthy():
    return facts_of({0: rank(2), 1: rank(2)}, SOURCE)
