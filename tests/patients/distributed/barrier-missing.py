"""Rank 0 writes the table, rank 1 looks for it at once: it comes while rank 1, which has failed, waits for it."""

from tests.distributed.events import facts_of

CODE = "distributed/barrier-missing"
NAMES = (
    "before rank 0 has written it",
    "1.4 s later",
    "rows = torch.load(path)",
    "torch.save(table, path)",
    "dist.barrier()",
)

SOURCE = """if rank == 0:
    torch.save(table, path)
rows = torch.load(path)
"""
PATH = "/data/table.pt"
WRITES = {"k": "file", "id": f"{PATH}/0", "path": PATH, "digest": "a", "lines": [("train.py", 2, "<module>")]}


def failed(came):
    lines = [("train.py", 3, "<module>")]
    text = f"[Errno 2] No such file or directory: '{PATH}'"
    error = {"k": "error", "type": "FileNotFoundError", "text": text, "path": PATH, "lines": lines, "t": 1.0}
    return [error, {"k": "came", "seconds": came, "runs": came is not None}]


def sick():
    return facts_of({0: [WRITES], 1: failed(1.4)}, SOURCE)


def healthy():
    """A barrier before the reading: nothing fails."""
    barrier = {"k": "call", "op": "barrier", "ranks": [0, 1], "lines": [("train.py", 3, "<module>")]}
    return facts_of({0: [WRITES, barrier], 1: [barrier]}, SOURCE)
