"""A whole model was kept where its state is wanted."""

from types import SimpleNamespace

from torch import nn

EXPECT = {"code": "error/state-dict-mismatch", "names": ["state", "state_dict"]}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)


def build(fixed=False):
    keep = {"best": Small().state_dict() if fixed else Small()}

    def restore(net):
        state = keep["best"]
        net.load_state_dict(state)
        return net

    return SimpleNamespace(trigger=lambda: restore(Small()))
