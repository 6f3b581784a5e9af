"""Failures between processes: those that one process on a CPU can meet, and the words of NCCL and gloo."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import nbdebug

CODE = "error/nccl"
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def explained(call):
    with pytest.raises(Exception) as caught:
        call()
    report = nbdebug.explain(caught.value, names={})
    return report, str(report)


def only(report):
    (finding,) = report.findings
    assert finding.code == CODE and finding.fixes
    return finding


def raising(error):
    def fails():
        raise error

    return fails


@pytest.fixture
def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def group(free_port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_no_launcher_and_no_group(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    report, said = explained(lambda: dist.init_process_group("gloo"))
    assert only(report) and "`RANK` is not set" in said and "torchrun" in said and "MASTER_PORT" in said
    report, said = explained(lambda: dist.all_reduce(torch.zeros(2)))
    assert only(report) and "before `init_process_group`" in said


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        report, said = explained(
            lambda: dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        )
        assert only(report) and f"port {port}" in said
        with socket.socket() as own:
            report, said = explained(lambda: own.bind(("127.0.0.1", port)))
            assert not report.findings, "a socket of the user's own"


def test_parameters_that_took_no_part_are_named(group) -> None:
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.extra = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    net = DistributedDataParallel(Net())

    def train():
        for _ in range(2):
            net(torch.zeros(1, 2)).sum().backward()

    report, said = explained(train)
    assert only(report) and "`extra.weight` and `extra.bias`" in said and "`net`" in said
    assert "net.module.extra.weight.requires_grad_(False)" in only(report).fixes[0].code


def test_a_group_that_is_started_twice(group) -> None:
    report, said = explained(
        lambda: dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
    )
    assert only(report) and "second time" in said and "is_initialized" in said


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "NCCL error in: ProcessGroupNCCL.cpp:1970, invalid usage, NCCL version "
            "2.20.5\nncclInvalidUsage: This usually "
            "reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and "
            "rank 0 both on CUDA "
            "device 18000",
            ["Rank 1 and rank 0", "set_device"],
        ),
        (
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, "
            "OpType=ALLREDUCE, NumelIn=1, NumelOut"
            "=1, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.",
            ["`allreduce`", "600 s"],
        ),
        ("Timed out waiting 1800000ms for recv operation to complete (gloo)", ["`recv`", "1800 s"]),
        ("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:4242", ["Another process ended"]),
        (
            "NCCL error: unhandled system error, NCCL version 2.19.3\nncclSystemError: System call failed",
            ["system error"],
        ),
        ("Timed out after 601 seconds waiting for clients. 1/2 clients joined.", ["1 of 2 processes"]),
        ("ProcessGroupNCCL is only supported with GPUs, no GPUs found!", ["no GPU", "gloo"]),
        (
            "DDP expects same model across all ranks, but Rank 1 has 4 params, while rank 0 has inconsistent 6 params.",
            ["rank 1 has 4", "rank 0 has 6"],
        ),
    ],
)
def test_what_the_libraries_say(message, words) -> None:
    report, said = explained(raising(RuntimeError(message)))
    assert only(report) and all(word in said for word in words), said


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("internal error in my parser"),
        ValueError("connection closed by user"),
        OSError(98, "Address already in use"),
        RuntimeError("Connection refused"),
    ],
)
def test_others_are_not_named_so(error) -> None:
    assert not explained(raising(error))[0].findings
