"""A head that the forward never uses; a branch of it that has nothing to do with that is taken in some steps."""

from tests.distributed.events import facts_of

CODE, NAMES = "distributed/unused-parameters", ("boundary.weight", "boundary.bias", "self.boundary = nn.Linear(8, 1)")

SOURCE = """class Segment(nn.Module):
    def __init__(self):
        self.boundary = nn.Linear(8, 1)

    def forward(self, x):
        if self.training and random.random() < 0.5:
            return self.inside(x)
        return self.inside(self.drop(x))
"""
ARM = {"k": "place", "number": 1, "kind": "arm", "file": "train.py", "line": 6, "first": 7, "last": 7}
BACKWARD = {"k": "call", "op": "backward of DistributedDataParallel", "ranks": [0, 1]}


def ranks(text):
    error = {"k": "error", "type": "RuntimeError", "text": text, "lines": [("train.py", 3, "f")]}
    log = [{"k": "nograd", "id": "0/0", "names": ["boundary.weight", "boundary.bias"] if text else []}]
    begin = [ARM, {"k": "wrapper", "lines": []}, BACKWARD, {**BACKWARD, "m": [1]}]
    return facts_of({rank: [*begin, *log, *([error] if text else [])] for rank in (0, 1)}, SOURCE)


def sick():
    return ranks("Expected to have finished reduction in the prior iteration before starting a new one.")


def healthy():
    return ranks("")
