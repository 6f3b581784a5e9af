"""Each rank saves its own place in the data under one name."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/shared-file", ("state.pt", "torch.save(state, path)")

SOURCE = """torch.save(state, path)
"""


def ranks(digests):
    written = {"k": "file", "id": "state.pt/0", "path": "runs/state.pt", "lines": [("train.py", 1, "f")]}
    return facts_of({rank: [{**written, "digest": digest}] for rank, digest in enumerate(digests)}, SOURCE)


def sick():
    return ranks("ab")


def healthy():
    return ranks("aa")
