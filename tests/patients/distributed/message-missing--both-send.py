"""Both ranks send their edge before they receive the other's: gloo's send waits for a receiver."""

from tests.distributed.events import facts_of

CODE, NAMES = (
    "distributed/message-missing",
    ("Rank 0 sends message 1 to rank 1", "itself sends first", "dist.send(edge"),
)

SOURCE = """dist.send(edge, dst=other)
dist.recv(ghost, src=other)
"""


def message(way, peer, line):
    lines = [("train.py", line, "<module>")]
    return {"k": "message", "way": way, "peer": peer, "key": f"0/0/{peer}", "n": 0, "waits": True, "lines": lines}


def sick():
    return facts_of({0: [message("send", 1, 1)], 1: [message("send", 0, 1)]}, SOURCE)


def healthy():
    """One of them receives first."""
    first = [message("send", 1, 1), message("receive", 1, 2)]
    return facts_of({0: first, 1: [message("receive", 0, 2), message("send", 0, 1)]}, SOURCE)
