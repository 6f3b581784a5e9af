"""The class cell is run again after a change to forward; the model at hand is still of the class before."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/class-redefined", 3, ["probe", "Probe", "forward"]
TEXT = (
    "class Probe(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.weight = torch.nn.Parameter(torch.ones(3))\n"
    "    def forward(self, x):\n        return (x * self.weight).sum(-1){}"
)


def notebook(again):
    return SimpleNamespace(
        cells=[
            "import torch",
            TEXT.format(""),
            "probe = Probe()",
            TEXT.format(".sigmoid()"),
            again,
            "out = probe(torch.ones(2, 3))",
        ]
    )


def sick():
    return notebook("x = torch.ones(2, 3)")


def healthy():
    return notebook("probe = Probe()")
