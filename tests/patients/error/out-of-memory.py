"""All pairs of pairs at once: a table of nine million rows and as many columns, before a single one is looked at."""

from types import SimpleNamespace

import torch

CODE, PHASE, MODULE, OP, STEP, SAMPLES = "error/out-of-memory", "forward", None, None, None, None
LINE = "table = torch.zeros(pairs, pairs)"


def best_of_all_pairs(first, second):
    pairs = len(first) * len(second)
    table = torch.zeros(pairs, pairs)
    return table.argmax(1)


def best_row_by_row(first, second):
    return torch.cdist(first, second).argmax(1)


def sick():
    torch.manual_seed(0)
    first, second = torch.randn(3000, 4), torch.randn(3000, 4)
    return SimpleNamespace(trigger=lambda: best_of_all_pairs(first, second))


def healthy():
    torch.manual_seed(0)
    first, second = torch.randn(3000, 4), torch.randn(3000, 4)
    return SimpleNamespace(trigger=lambda: best_row_by_row(first, second))
