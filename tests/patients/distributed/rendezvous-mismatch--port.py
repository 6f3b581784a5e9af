"""The script sets a port of its own, and torchrun has made the store at another: nobody answers."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/rendezvous-mismatch", ("29500", "41233", 'os.environ["MASTER_PORT"]')

SOURCE = """os.environ["MASTER_PORT"] = "29500"
dist.init_process_group("gloo")
"""


def ranks(port):
    init = {"k": "init", "world": 2, "launcher": "127.0.0.1:41233", "address": f"127.0.0.1:{port}"}
    init["lines"] = [("train.py", 2, "<module>")]
    return facts_of({rank: [{**init, "own": rank}] for rank in (0, 1)}, SOURCE)


def sick():
    return ranks(29500)


def healthy():
    return ranks(41233)
