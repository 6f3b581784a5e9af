"""The loss function has the name that a cell gives to its result, and the next cell calls that result."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/name-shadowed", 2, ["loss"]


def notebook(name):
    step = f"{name} = loss(net(x), y)\noptimizer.zero_grad()\n{name}.backward()\noptimizer.step()"
    return SimpleNamespace(
        cells=[
            "import torch\nfrom torch import nn\nx = torch.rand(20, 3)\ny = x[:, :1]",
            "net, loss = nn.Linear(3, 1), nn.MSELoss()\noptimizer = torch.optim.Adam(net.parameters())",
            step,
            "for _ in range(3):\n    " + step.replace("\n", "\n    "),
        ]
    )


def sick():
    return notebook("loss")


def healthy():
    return notebook("value")
