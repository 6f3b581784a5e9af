"""Programs for two ranks, each with one fault, on gloo or NCCL: BACKEND and DEVICE stand for those. A rank calls
`fault()` at the moment of its fault."""

from __future__ import annotations

HEAD = """
import os, sys, time, pathlib
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("BACKEND")
rank, world = dist.get_rank(), dist.get_world_size()
if "DEVICE" == "cuda":
    torch.cuda.set_device(rank)
torch.manual_seed(0)
def fault():
    pathlib.Path(os.environ["NBDEBUG_FAULT"]).write_text(str(time.time()))
def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to("DEVICE")
def train(model, batches, after=lambda step: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        after(step)
rows = [torch.randn(8, 16, device="DEVICE") for _ in range(6)]
"""
FAULTS = {
    "hang": ("""
x = torch.ones(64, device="DEVICE")
for step in range(6):
    if rank == 1 and step == 4:
        fault()
        continue
    dist.all_reduce(x)
print(x.sum().item())
""", "collective-mismatch", 1, "if rank == 1 and step == 4"),
    "shape mismatch": ("""
for step in range(5):
    if step == 3:
        fault()
    x = torch.ones(64 + 64 * (step == 3) * rank, device="DEVICE")
    dist.all_reduce(x)
print(x.sum().item())
""", "collective-mismatch", None, "dist.all_reduce(x)"),
    "uneven steps": ("""
share = rows[: len(rows) - rank]
train(DDP(net()), share, lambda step: fault() if step == len(share) - 1 else None)
dist.barrier()
""", "uneven-steps", 1, "share = rows"),
    "exception": ("""
def check(step):
    if rank == 1 and step == 3:
        fault()
        raise ValueError("a row without a label")
train(DDP(net()), rows, check)
""", "rank-raised", 1, "raise ValueError"),
    "nan": ("""
if rank == 1:
    rows[3][2] = 0.0
model = DDP(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, batch in enumerate(rows):
    optimizer.zero_grad()
    scaled = batch / batch.norm(dim=1, keepdim=True)
    loss = model(scaled).square().mean()
    if rank == 1 and step == 3:
        fault()
    loss.backward()
    optimizer.step()
time.sleep(3)
""", "rank-nonfinite", 1, "loss = model(scaled)"),
    "wrong source": ("""
model = net()
fault()
for tensor in model.state_dict().values():
    dist.broadcast(tensor, src=rank)
torch.ones(1, device="DEVICE").item()
""", "collective-mismatch", None, "src=rank"),
    "forward on one rank (FSDP2)": ("""
from torch.distributed.fsdp import fully_shard
model = net()
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
def sample(step):
    if rank == 0 and step == 2:
        fault()
        print(model(rows[0]).sum().item())
train(model, rows, sample)
""", "collective-mismatch", 0, "if rank == 0 and step == 2"),
    "two groups in two orders": ("""
one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
x, y = torch.ones(8, device="DEVICE"), torch.ones(16, device="DEVICE")
for step in range(3):
    first, second = (one, two) if step < 2 or rank == 0 else (two, one)
    if step == 2:
        fault()
    dist.all_reduce(x, group=first)
    torch.cuda.is_available() and torch.cuda.synchronize()
    dist.all_reduce(y, group=second)
    torch.cuda.is_available() and torch.cuda.synchronize()
""", "collective-mismatch", None, "dist.all_reduce(x, group=first)"),
    "killed": ("""
def leave(step):
    if rank == 1 and step == 3:
        fault()
        os.kill(os.getpid(), 9)
train(DDP(net()), rows, leave)
""", "rank-raised", 1, ""),
}  # fmt: skip
"""Name → (program, code, rank, a part of the line)."""
