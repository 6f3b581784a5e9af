"""A group is started in a program that torchrun did not start."""

import os
from types import SimpleNamespace

import torch.distributed as dist

EXPECT = {"code": "error/nccl", "names": ["RANK"], "also": ["distributed/env-incomplete"]}


def setup_distributed(args):
    for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        os.environ.pop(k, None)
    if not args.distributed:
        return 0, 1
    dist.init_process_group(args.backend, init_method="env://")
    return dist.get_rank(), dist.get_world_size()


def build(fixed=False):
    args = SimpleNamespace(distributed=not fixed, backend="gloo", lr=0.1)
    return SimpleNamespace(trigger=lambda: setup_distributed(args))
