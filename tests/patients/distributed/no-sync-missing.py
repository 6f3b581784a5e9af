"""Eight small batches a step, each of them reduced."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/no-sync-missing", ("no_sync", "8 times")

SOURCE = """(loss / PARTS).backward()
"""


def ranks(reductions):
    log = [{"k": "step", "id": f"0/{n}", "synced": {"train.py:1": reductions}} for n in range(3)]
    return facts_of({0: log, 1: log}, SOURCE)


def sick():
    return ranks(8)


def healthy():
    return ranks(1)
