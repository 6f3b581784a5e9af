"""A test finds the card as it would be at a start: without the tensors of the test before, which its traceback may keep
when it failed, and without cuBLAS's workspaces (32 MiB for each thread and stream that it worked in)."""

import gc
import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_of_others():
    if torch.cuda.is_available():
        for name in ("last_exc", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
