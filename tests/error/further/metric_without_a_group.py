"""A meter synchronizes over processes, and no group was started."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

EXPECT = {"code": "error/nccl", "names": ["init_process_group"]}


class SmoothedValue:
    def __init__(self, sync):
        self.count, self.total, self.sync = 0, 0.0, sync

    def update(self, v, n=1):
        self.count += n
        self.total += v * n

    def synchronize_between_processes(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64)
        if self.sync or dist.is_initialized():
            dist.barrier()
            dist.all_reduce(t)
        self.count, self.total = int(t[0]), t[1].item()


def build(fixed=False):
    def trigger():
        meters = {"loss": SmoothedValue(not fixed)}
        for i in range(3):
            meters["loss"].update(float(i))
        for m in meters.values():
            m.synchronize_between_processes()

    return SimpleNamespace(trigger=trigger)
