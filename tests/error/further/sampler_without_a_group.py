"""A sampler for several processes is made in a program that has one."""

from types import SimpleNamespace

from torch.utils.data import DistributedSampler

EXPECT = {"code": "error/nccl", "names": ["DistributedSampler", "init_process_group"]}


def loaders(cfg, data):
    kw = {"num_replicas": 1, "rank": 0} if cfg["single"] else {}
    return DistributedSampler(data, shuffle=True, **kw)


def build(fixed=False):
    cfg = {"single": fixed}
    return SimpleNamespace(trigger=lambda: list(loaders(cfg, list(range(6)))))
