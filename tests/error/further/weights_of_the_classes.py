"""The weights of a loss stay on the CPU when the net moves (the meta device stands in for an accelerator)."""

from types import SimpleNamespace

import torch
import torch.nn as nn

EXPECT = {"code": "error/device-mismatch", "names": ["criterion", "weight"]}


def build(fixed=False):
    torch.manual_seed(3)
    device = torch.device("meta")
    counts = torch.tensor([90.0, 7.0, 3.0])
    class_weights = counts.sum() / counts
    criterion = nn.CrossEntropyLoss(weight=class_weights)
    if fixed:
        criterion = criterion.to(device)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).to(device)
    opt = torch.optim.Adam(net.parameters())

    def fit(epochs=1):
        for _ in range(epochs):
            inputs, labels = torch.rand(8, 3, 4, 4, device=device), torch.zeros(8, dtype=torch.long, device=device)
            opt.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, labels)
            loss.backward()

    return SimpleNamespace(trigger=fit)
