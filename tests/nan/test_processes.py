"""A step with collectives: an answer on each rank, and no collective that runs once more on one rank only."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import nbdebug


def rank(number: int, port: int, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 1), torch.rand(4, 3)
    level = torch.tensor(0.0 if number else 1.0)

    def step():
        factor = level.log()
        dist.all_reduce(factor)
        loss = (model(x) * factor).mean()
        loss.backward()
        return loss

    report = nbdebug.nan_trace(step, model=model)
    counted = torch.ones(1)
    dist.all_reduce(counted)  # a collective that had run once more would have taken this one's place
    torch.save([report.findings[0].code, report.findings[0].where.op, counted.item()], f"{out}/{number}.pt")
    dist.destroy_process_group()


def test_each_rank_answers_and_none_is_out_of_step(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank, args=(port, str(tmp_path)), nprocs=2)
    here, there = (torch.load(tmp_path / f"{n}.pt") for n in (1, 0))
    assert here == ["nan/log-of-nonpositive", "log", 2.0]
    assert there[2] == 2.0
