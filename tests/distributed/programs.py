"""Healthy programs for several ranks: each runs as a script under `nbdebug.rank`, and as a cell of %%ranks. nbdebug
stays silent."""

from __future__ import annotations

HEAD = """
import contextlib, copy, io, os, tempfile
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()
"""
PROGRAMS = {
    "rank 0 logs, validates and saves": """
model = DDP(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(rows)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if rank == 0:
        print("epoch", epoch, loss.item())
        with torch.no_grad():
            print(sum(loss_of(model.module, batch).item() for batch in DataLoader(rows, batch_size=8)))
        torch.save(model.module.state_dict(), os.path.join(tempfile.gettempdir(), f"nbdebug-healthy-{os.getpid()}.pt"))
        os.unlink(os.path.join(tempfile.gettempdir(), f"nbdebug-healthy-{os.getpid()}.pt"))
    dist.barrier()
""",
    "no_sync in accumulation": """
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False))
for number, batch in enumerate(loader):
    last = number % 2 == 1
    with contextlib.nullcontext() if last else model.no_sync():
        loss_of(model, batch).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
""",
    "uneven batches within join": """
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
with model.join():
    for n in range(4 + rank):
        optimizer.zero_grad()
        loss_of(model, rows[4 * n : 4 * n + 4]).backward()
        optimizer.step()
with model.join():  # a call of one's own is well where no rank runs out
    for n in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, rows[4 * n : 4 * n + 4])
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
""",
    "a pipeline of two stages": """
stage = nn.Linear(4, 4) if rank == 0 else nn.Linear(4, 2)
optimizer = torch.optim.SGD(stage.parameters(), lr=1e-2)
for n in range(4):
    optimizer.zero_grad()
    x, y = rows[4 * n : 4 * n + 4]
    if rank == 0:
        out = stage(x)
        dist.send(out.detach(), dst=1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, src=1)
        out.backward(gradient)
    elif rank == 1:
        x = torch.empty(4, 4)
        dist.irecv(x, src=0).wait()
        x.requires_grad_()
        (stage(x) - y).square().mean().backward()
        dist.isend(x.grad, dst=0).wait()
    optimizer.step()
""",
    "groups of some ranks": """
groups = [dist.new_group([member]) for member in range(world)]
both = dist.new_group(list(range(world)))
total = torch.ones(3) * rank
for n in range(3):
    dist.all_reduce(total, group=groups[rank])
    if rank == 0:
        dist.all_reduce(total, group=groups[0])
    dist.all_reduce(total, group=both)
""",
    "fully_shard": """
from torch.distributed.fsdp import fully_shard
model = net()
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for n in range(4):
    optimizer.zero_grad()
    loss_of(model, rows[4 * (2 * n + rank) : 4 * (2 * n + rank) + 4]).backward()
    optimizer.step()
""",
    "gradients reduced by hand": """
model = net()
for tensor in model.state_dict().values():
    dist.broadcast(tensor, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
for n in range(3):
    optimizer.zero_grad()
    loss_of(model, rows[8 * n + 4 * rank : 8 * n + 4 * rank + 4]).backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()
    optimizer.step()
""",
    "weights averaged every third step": """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for n in range(9):
    optimizer.zero_grad()
    loss_of(model, rows[(2 * n + rank) % 28 : (2 * n + rank) % 28 + 4]).backward()
    optimizer.step()
    if n % 3 == 2:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= world
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = net()
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=1e-2), DataLoader(rows, batch_size=4, shuffle=True))
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
    mean = accelerator.gather(loss.detach()).mean()
    accelerator.print("epoch", epoch, mean.item())
    accelerator.wait_for_everyone()
""",
    "a GAN: two models, two optimizers": """
generator, critic = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 1))
optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, critic)]
for n in range(3):
    noise, real = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * n + rank)), rows[4 * n : 4 * n + 4][0]
    optimizers[1].zero_grad()
    (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    (-critic(generator(noise)).mean()).backward()
    optimizers[0].step()
""",
    "early stop by a flag of rank 0": """
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
torch.manual_seed(rank)  # for augmentation: the weights are there
for n in range(20):
    optimizer.zero_grad()
    loss = loss_of(model, (rows[0:8][0] + 0.1 * torch.randn(8, 4), rows[0:8][1]))
    loss.backward()
    optimizer.step()
    stop = torch.tensor(float(n == 5 and rank == 0))
    dist.broadcast(stop, src=0)
    if stop:
        break
""",
    "a stream that is split by rank": """
class Stream(IterableDataset):
    def __iter__(self):
        for n in range(rank, 32, world):
            yield rows[n]
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = DataLoader(Stream(), batch_size=4)
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
""",
    "a metric of all ranks": """
model = DDP(net(), gradient_as_bucket_view=True, static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for n in range(3):
    optimizer.zero_grad()
    loss_of(model, rows[8 * n + 4 * rank : 8 * n + 4 * rank + 4]).backward()
    optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        value = loss_of(model.module, rows[16 * rank : 16 * rank + 16])
    every = [None] * world
    dist.all_gather_object(every, value.item())
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    model.train()
    if rank == 0:
        print("validation", value.item() / world, every)
""",
    "a branch for some ranks, with find_unused_parameters": """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = net(), net()
    def forward(self, x):
        return self.one(x) if rank == 0 else self.two(x)
model = DDP(Two(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for n in range(3):
    optimizer.zero_grad()
    loss_of(model, rows[8 * n : 8 * n + 8]).backward()
    optimizer.step()
""",
    "a scheduler by the mean, its loss in a file, an error that all handle": """
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
alone = dist.new_group([rank], use_local_synchronization=True) if rank == 0 else None
for n in range(6):
    try:
        int("no number")
    except ValueError:
        dist.barrier()
    optimizer.zero_grad()
    loss = loss_of(model, rows[4 * n + 2 * rank : 4 * n + 2 * rank + 2])
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    plateau.step(mean.item() / world)
    if alone is not None:
        dist.all_reduce(mean.clone(), group=alone)
model.eval()
with torch.no_grad():
    value = loss_of(model.module, rows[16 * rank : 16 * rank + 16])
dist.all_reduce(value)
if rank == 0:
    with open(os.path.join(tempfile.gettempdir(), f"nbdebug-healthy-{os.getpid()}.txt"), "w") as file:
        file.write(f"{value.item() / world:.4f}")
    os.unlink(file.name)
""",
    "buffers, an average of weights on rank 0, a sharded optimizer": """
from torch.distributed.optim import ZeroRedundancyOptimizer
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
average = copy.deepcopy(model.module) if rank == 0 else None
for n in range(3):
    optimizer.zero_grad()
    loss_of(model, rows[8 * n + 4 * rank : 8 * n + 4 * rank + 4]).backward()
    optimizer.step()
    if average is not None:
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.module.parameters()):
                mean.lerp_(p, 0.1)
""",
}
