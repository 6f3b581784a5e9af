"""A head that the forward never uses."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/unused-parameters", ("boundary.weight", "boundary.bias")

SOURCE = """class Segment(nn.Module):
    def __init__(self):
        self.boundary = nn.Linear(8, 1)
"""


def ranks(text):
    error = {"k": "error", "type": "RuntimeError", "text": text, "lines": [("train.py", 3, "f")]}
    log = [{"k": "nograd", "id": "0/0", "names": ["boundary.weight", "boundary.bias"] if text else []}]
    return facts_of({rank: [*log, *([error] if text else [])] for rank in (0, 1)}, SOURCE)


def sick():
    return ranks("Expected to have finished reduction in the prior iteration before starting a new one.")


def healthy():
    return ranks("")
