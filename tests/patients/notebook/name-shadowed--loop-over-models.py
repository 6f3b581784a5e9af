"""A loop over other models takes the trained model's name; a later cell scores the last of them."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/name-shadowed", 2, ["net"]


def notebook(name):
    return SimpleNamespace(
        cells=[
            "import torch\nfrom torch import nn\nx, y = torch.randn(40, 4), torch.randn(40, 1)\n"
            "net = nn.Linear(4, 1)\nadam = torch.optim.Adam(net.parameters())",
            "for _ in range(3):\n    adam.zero_grad()\n"
            "    nn.functional.mse_loss(net(x), y).backward()\n    adam.step()",
            f"others = [nn.Linear(4, 1), nn.Linear(4, 1, bias=False)]\nfor {name} in others:\n    print({name})",
            "def score(net):\n    with torch.no_grad():\n"
            "        return nn.functional.mse_loss(net(x), y)\nprint(score(net))",
        ]
    )


def sick():
    return notebook("net")


def healthy():
    return notebook("other")
