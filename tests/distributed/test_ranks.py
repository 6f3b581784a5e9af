"""`python -m nbdebug ranks` on two real processes (gloo): a healthy program ends as it would alone, a hang is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEALTHY = """
import copy, io, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group(backend="gloo")
torch.manual_seed(seed=0)
model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
ema = copy.deepcopy(model)
ddp = DDP(module=model, find_unused_parameters=False)
o = torch.optim.SGD(params=ddp.parameters(), lr=0.1)
for step in range(4):
    o.zero_grad()
    loss = ddp(torch.randn(6, 3, generator=torch.Generator().manual_seed(step * 2 + dist.get_rank()))).square().mean()
    torch.autograd.backward(tensors=loss)
    o.step()
    ema = copy.deepcopy(ddp.module)
    mean = loss.detach().clone()
    dist.all_reduce(tensor=mean, op=dist.ReduceOp.SUM)
    dist.broadcast(mean, src=0)
    out = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(tensor_list=out, tensor=mean)
if dist.get_rank() == 0:
    torch.save(obj=ddp.module, f=io.BytesIO()); torch.save(ddp.state_dict(), f=io.BytesIO())
    print("saved", float(mean))
dist.barrier()
dist.destroy_process_group()
"""
ABSENT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
loss = torch.ones(3)
for step in range(3):
    dist.all_reduce(loss)
    if step < 2 or dist.get_rank() == 0:
        dist.barrier()
dist.destroy_process_group()
"""


def ranks(folder, script: str) -> tuple[int, str]:
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "nbdebug", "ranks", "--nproc", "2", "train.py"]
    ended = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=280)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.timeout(300)
def test_a_healthy_program_is_not_disturbed(tmp_path) -> None:
    """Keywords of torch's own names, copies of the wrapped model, a model that is pickled."""
    status, text = ranks(tmp_path, HEALTHY)
    assert status == 0, text
    assert "saved" in text and "All ranks made the same calls" in text


@pytest.mark.timeout(300)
def test_the_absent_rank_is_named(tmp_path) -> None:
    status, text = ranks(tmp_path, ABSENT)
    assert status != 0, text
    assert "distributed/collective-mismatch" in text and "train.py, line 7" in text, text


def test_a_fault_of_ours_is_told_and_nothing_is_compared() -> None:
    from nbdebug.tools.distributed.facts import RanksFacts
    from nbdebug.tools.distributed.launch import report_of

    facts = RanksFacts.of({0: [{"k": "fault", "error": "TypeError: no"}], 1: []})
    report = report_of(facts, "nbdebug ranks train.py")
    assert not report.findings and not report.ok and "TypeError: no" in str(report)
