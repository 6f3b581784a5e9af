"""A hook scales a gradient; its cell ran again with another factor, and the gradient is scaled by both."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/hooks-registered-twice", 2, ["layer", "register_hook"]


def notebook(between):
    hook = "handle = layer.weight.register_hook(lambda gradient: gradient * {})"
    return SimpleNamespace(
        cells=["import torch\nlayer = torch.nn.Linear(3, 2)", hook.format(0.2), between + hook.format(0.7)]
    )


def sick():
    return notebook("")


def healthy():
    return notebook("handle.remove()\n")
