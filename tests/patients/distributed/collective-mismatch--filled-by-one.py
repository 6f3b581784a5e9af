"""A loop reduces all that was logged, and one rank has put in an entry more: the branch that puts it in is the line."""

from tests.distributed.events import facts_of

CODE = "distributed/collective-mismatch"
NAMES = ("Rank 1 leaves the common path at call 2", "if hits.any():", "step 0")

SOURCE = """for x in rows:
    scores = {"loss": loss(x)}; scores["loss"].backward()
    if hits.any():
        scores["hits"] = hits.mean()
    for value in scores.values():
        dist.all_reduce(value)
"""


def place(number, kind, line, first, last):
    return {
        "k": "place",
        "number": number,
        "kind": kind,
        "file": "train.py",
        "line": line,
        "first": first,
        "last": last,
    }


PLACES = [place(1, "loop", 1, 2, 6), place(2, "arm", 3, 4, 4), place(3, "loop", 5, 6, 6)]
REDUCE = {"k": "call", "op": "all_reduce", "lines": [("train.py", 6, "<module>")]}


def ranks(hits):
    one = [*PLACES, {**REDUCE, "m": [1, 2, 3]}, {**REDUCE, "m": [3]}]
    other = [*PLACES, {**REDUCE, "m": [1, 3]}, {"k": "end", "m": [-3, -1]}]
    return facts_of({0: one, 1: [*one] if hits else other}, SOURCE)


def sick():
    return ranks(hits=False)


def healthy():
    return ranks(hits=True)
