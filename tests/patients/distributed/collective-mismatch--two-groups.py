"""Two ranks reduce in two groups, one after the other; in the third step one of them begins with the second group."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/collective-mismatch", ("in group one", "in group two", "dist.all_reduce(x, group=first)")

SOURCE = """for step in range(3):
    first, second = groups if step < 2 or rank == 0 else groups[::-1]
    dist.all_reduce(x, group=first)
    dist.all_reduce(y, group=second)
"""


def calls(*groups):
    return [
        {"k": "call", "op": "all_reduce", "shape": "[3]", "dtype": "float32", "g": group, "ranks": [0, 1],
         "lines": [("train.py", 3 + n % 2, "<module>")]}
        for n, group in enumerate(groups)
    ]  # fmt: skip


def sick():
    return facts_of({0: calls(*["one", "two"] * 2, "one"), 1: calls(*["one", "two"] * 2, "two")}, SOURCE)


def healthy():
    """One rank is in a call, the other still computes."""
    return facts_of({0: calls(*["one", "two"] * 2, "one"), 1: calls(*["one", "two"] * 2)}, SOURCE)
