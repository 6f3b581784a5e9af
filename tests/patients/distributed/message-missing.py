"""The first stage sends three batches; the second receives four."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/message-missing", ("Rank 1", "dist.recv(x, src=0)", "has sent 3")

SOURCE = """for n in range(3 if rank == 0 else 4):
    if rank == 0:
        dist.send(x, dst=1)
    else:
        dist.recv(x, src=0)
"""


def messages(way, peer, count, line, waits):
    event = {"k": "message", "way": way, "peer": peer, "key": f"0/0/{peer}", "waits": waits}
    return [{**event, "n": n, "lines": [("train.py", line, "<module>")]} for n in range(count)]


def sick():
    sender = [*messages("send", 1, 3, 3, False), {"k": "end", "code": 0}]
    return facts_of({0: sender, 1: messages("receive", 0, 4, 5, True)}, SOURCE)


def healthy():
    """The last message is there: the receiver may still be at work with it."""
    sender = [*messages("send", 1, 4, 3, False), {"k": "end", "code": 0}]
    return facts_of({0: sender, 1: messages("receive", 0, 4, 5, True)}, SOURCE)
