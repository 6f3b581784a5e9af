"""A cell that registers a hook for the feature norm is run a second time, and each norm is recorded twice."""

from types import SimpleNamespace

CODE, CELL, NAMES = "notebook/hooks-registered-twice", 3, ["encoder", "register_forward_hook"]
HOOK = "handle = encoder.register_forward_hook(lambda module, inputs, output: norms.append(output.norm().item()))"


def notebook(again):
    return SimpleNamespace(
        cells=[
            "import torch\nencoder, norms = torch.nn.Linear(3, 5), []",
            HOOK,
            "encoder(torch.ones(2, 3)).sum().item()",
            again,
            "encoder(torch.ones(2, 3)).sum().item()",
        ]
    )


def sick():
    return notebook(HOOK)


def healthy():
    return notebook(f"handle.remove()\n{HOOK}")
