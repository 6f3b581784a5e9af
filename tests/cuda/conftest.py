"""cuBLAS keeps a workspace of 32 MiB for each thread and stream that it worked in: not those of the tests before."""

import pytest
import torch


@pytest.fixture(autouse=True)
def no_workspaces_of_others():
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
