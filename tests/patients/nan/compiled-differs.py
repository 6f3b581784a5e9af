"""A model is finite in eager and NaN when compiled. Its backend swaps softmax for a faster one that leaves out the
subtraction of the maximum, which overflows once the scores are large.
"""

from types import SimpleNamespace

import torch
from torch import nn

CODE, PHASE, MODULE, OP, LINE = "nan/compiled-differs", "forward", None, None, "compiled(clip)"
SAMPLES, STEP = None, 1


def quick_softmax(scores, dim):
    e = torch.exp(scores)
    return e / e.sum(dim, keepdim=True)


def quick_backend(graph, inputs):
    for node in graph.graph.nodes:
        if node.target is torch.softmax:
            node.target = quick_softmax
    graph.recompile()
    return graph


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.gesture = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, clip):
        return self.gesture(torch.softmax(self.score(clip), -1) * clip)


def training(backend):
    torch.manual_seed(59)
    torch.compiler.reset()
    model = Gate()
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    clips, gestures = torch.randn(3, 5, 6), torch.randint(0, 3, (3, 5))
    clips[1] *= 200
    batches = iter(zip(clips, gestures, strict=True))

    def step():
        clip, gesture = next(batches)
        loss = nn.functional.cross_entropy(compiled(clip), gesture)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=compiled, optimizer=optimizer, step=step, steps=3)


def sick():
    return training(quick_backend)


def healthy():
    return training("eager")
