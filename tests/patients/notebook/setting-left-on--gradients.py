"""A cell looks at the gradients of one batch; the loop that follows clears them only after its steps."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/setting-left-on", 1, ["net", "zero_grad"]
LOOK = "(net(x) - 1).square().mean().backward()\nprint(net.weight.grad.norm())"
TRAIN = """for _ in range(4):
    loss = (net(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()"""


def notebook(look):
    setup = "import torch\nnet, x = torch.nn.Linear(3, 1), torch.randn(8, 3)\n"
    return SimpleNamespace(cells=[setup + "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)", look, TRAIN])


def sick():
    return notebook(LOOK)


def healthy():
    return notebook(f"{LOOK}\nnet.zero_grad()")
