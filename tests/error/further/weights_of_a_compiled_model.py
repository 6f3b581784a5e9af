"""The weights of a compiled model are loaded into a plain one; the wrong prefix is taken off."""

from types import SimpleNamespace

import torch
from torch import nn

EXPECT = {"code": "error/state-dict-mismatch", "names": ["_orig_mod."], "also": ["checkpoint/prefix-compiled"]}


class GPT(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(9, n), "h": nn.ModuleList([nn.Linear(n, n) for _ in range(2)])}
        )
        self.lm_head = nn.Linear(n, 9, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight


def build(fixed=False):
    torch.manual_seed(0)
    sd = {f"_orig_mod.{k}": v for k, v in GPT(6).state_dict().items()}
    checkpoint = {"model": sd, "model_args": {"n": 6}, "iter_num": 10, "best_val_loss": 1.0}

    def sample():
        model = GPT(**checkpoint["model_args"])
        state_dict = checkpoint["model"]
        unwanted_prefix = "_orig_mod." if fixed else "module."
        for k, _v in list(state_dict.items()):
            if k.startswith(unwanted_prefix):
                state_dict[k[len(unwanted_prefix) :]] = state_dict.pop(k)
        model.load_state_dict(state_dict)
        return model.eval()

    return SimpleNamespace(trigger=sample)
