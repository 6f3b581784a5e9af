"""One rank leaves out a layer at random in its third step; the other waits in backward for its gradient."""

from tests.distributed.events import facts_of

CODE = "distributed/unused-parameters"
NAMES = ("layers.1.weight", "on rank 1 alone", "if self.training and random.random() < 0.1:", "keep * layer(x)")

SOURCE = """class Encoder(nn.Module):
    def __init__(self):
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        if self.training:
            x = self.drop(x)
        for layer in self.layers:
            if self.training and random.random() < 0.1:
                continue
            x = x + layer(x)
        return x
"""
PLACES = [
    {"k": "place", "number": 1, "kind": "arm", "file": "train.py", "line": 6, "first": 7, "last": 7},
    {"k": "place", "number": 2, "kind": "loop", "file": "train.py", "line": 8, "first": 9, "last": 11},
    {"k": "place", "number": 3, "kind": "arm", "file": "train.py", "line": 9, "first": 10, "last": 10},
]
BACKWARD = {"k": "call", "op": "backward of DistributedDataParallel", "ranks": [0, 1], "lines": [("train.py", 15, "f")]}
WHOLE, PART = ({**BACKWARD, "m": [1, 2, *turn, 2, -2]} for turn in ([], [2, 3]))
ERROR = {"k": "error", "type": "RuntimeError", "lines": [("train.py", 14, "f")], "names": ["layers.1.weight"]}
TEXT = "Expected to have finished reduction in the prior iteration before starting a new one."
WAITS = {"k": "stack", "lines": [("train.py", 15, "f")], "stack": ["autograd/graph.py, in _engine_run_backward"]}


def ranks(last, *after):
    begin = [*PLACES, {"k": "wrapper", "lines": []}, WHOLE, WHOLE]
    return facts_of({0: [*begin, WHOLE, WAITS], 1: [*begin, last, *after]}, SOURCE)


def sick():
    return ranks(PART, {**ERROR, "text": TEXT})


def healthy():
    return ranks(PART)
