"""Two learning rates are compared, and the second training goes on with the weights that the first has learned."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/stale-reference", 4, ["net", "fast"]
FIT = """def fit(net, lr):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(5):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()"""
NET = "torch.manual_seed(0)\nnet = torch.nn.Linear(3, 1)\n"


def notebook(again):
    setup = "import torch\nx = torch.randn(16, 3)"
    return SimpleNamespace(
        cells=[setup, FIT, NET, "slow = fit(net, 0.01)", again + "fast = fit(net, 0.1)", "print(slow, fast)"]
    )


def sick():
    return notebook("")


def healthy():
    return notebook(NET)
