"""The weights before fine-tuning are kept to go back to them; they are the model's own, and go along with it."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/shared-object", 1, ["before", "net"]
TUNE = "for _ in range(2):\n    adam.zero_grad()\n    net(torch.ones(3, 2)).square().mean().backward()\n    adam.step()"


def notebook(kept):
    setup = "import copy, torch\nnet = torch.nn.Linear(2, 1)\nadam = torch.optim.Adam(net.parameters(), lr=0.1)"
    return SimpleNamespace(cells=[setup, f"before = {kept}", TUNE, "back = net.load_state_dict(before);"])


def sick():
    return notebook("net.state_dict()")


def healthy():
    return notebook("copy.deepcopy(net.state_dict())")
