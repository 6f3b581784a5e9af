"""How things stood when a model was called, so that it can be called again in the same way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from nbdebug.observe.state import sources


class Surroundings:
    """How things stood when a model was called: random numbers, autocast, the train flag."""

    def __init__(self, model: nn.Module) -> None:
        self.random = [(write, read()) for _, read, write in sources()]
        kinds = {"cpu"} | {p.device.type for p in _first(model)}
        self.autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)]
        self.training = model.training

    @contextlib.contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        flags = {m: m.training for m in model.modules()} if model.training != self.training else {}
        if flags:
            model.train(self.training)
        for write, state in self.random:
            write(state)
        try:
            with contextlib.ExitStack() as stack:
                for kind, enabled, dtype in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                yield
        finally:
            for module, flag in flags.items():
                module.training = flag


def _first(model: nn.Module) -> Iterator[torch.Tensor]:
    parameter = next(model.parameters(), None)
    if parameter is not None:
        yield parameter
