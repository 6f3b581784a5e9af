"""A second launch from a rank takes the port of the first."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/port-in-use", ("port", "EADDRINUSE")

SOURCE = """store = dist.TCPStore("127.0.0.1", port=29500)
"""


ERROR = {"k": "error", "type": "DistNetworkError", "text": "EADDRINUSE", "lines": [("train.py", 1, "f")]}


def sick():
    return facts_of({0: [ERROR], 1: []}, SOURCE)


def healthy():
    return facts_of({0: [{"k": "end"}], 1: [{"k": "end"}]}, SOURCE)
