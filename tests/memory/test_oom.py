"""The out-of-memory card: what it reads, whom it names, what it computes; with real failures of the CPU's allocator."""

from __future__ import annotations

import dataclasses
import gc
import json
import pathlib
import subprocess
import sys
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from nbdebug import Report, Where
from nbdebug.tools.memory.facts import FailedWork, Failure, Holding, RefusedRequest
from nbdebug.tools.memory.oom import is_out_of_memory, out_of_memory, refused_request
from nbdebug.tools.memory.rules.out_of_memory import best
from nbdebug.tools.memory.rules.out_of_memory import growth_per_step as growth
from nbdebug.tools.memory.rules.out_of_memory import out_of_memory as out_of_memory_rule

GIB = 1 << 30
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.11 GiB of which 1.50 GiB "
    "is free. Including non-PyTorch memory, this process has 57.60 GiB memory in use. 60.00 GiB allowed; Of the "
    "allocated memory 52.00 GiB is allocated by PyTorch, and 4.00 GiB is reserved by PyTorch but unallocated. If …"
)
LIMITED = """
import json, resource, sys
import torch
from torch import nn
from nbdebug.tools.memory.oom import out_of_memory

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
                                    for _ in range(6))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

torch.manual_seed(0)
net = Deep()
opt = torch.optim.AdamW(net.parameters())
def step(rows):
    x = torch.randn(rows, 256)
    loss = net(x).pow(2).mean()
    loss.backward()
    opt.step()
step(32)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)
try:
    step(20_000)
except RuntimeError as raised:
    report = out_of_memory(raised)
    print(json.dumps(report.to_dict()))
"""


def card(work: Any, **given: Any) -> Report:
    try:
        work()
    except (RuntimeError, MemoryError) as raised:
        return out_of_memory(raised, given.pop("names", {}), **given)
    raise AssertionError("it did not fail")


def rows(report: Report) -> dict[str, int]:
    return {row[0]: row[2] for table in report.tables for row in table.rows}


def test_a_message_of_cuda_is_read_whole() -> None:
    asked = refused_request(torch.OutOfMemoryError(CUDA))
    assert (asked.device, asked.bytes, asked.total) == ("cuda:1", 2 * GIB, int(79.11 * GIB))
    assert (asked.allowed, asked.allocated, asked.unused) == (60 * GIB, 52 * GIB, 4 * GIB)
    assert asked.free == int(1.5 * GIB) and asked.process == int(57.6 * GIB)


@pytest.mark.parametrize(
    "error, asked",
    [
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                "tried to allocate 327680000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            327680000,
        ),
        (
            RuntimeError(
                "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.00 GiB "
                "already allocated; 4.00 MiB free; 9.10 GiB reserved in total by PyTorch)"
            ),
            20 << 20,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (RuntimeError("Storage size calculation overflowed with sizes=[2147483648, 2147483648]"), 4 << 62),
        (MemoryError(), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "no"),
        (KeyError("memory"), "no"),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, asked: Any) -> None:
    assert is_out_of_memory(error) == (asked != "no")
    if asked != "no":
        assert refused_request(error).bytes == asked


def test_a_result_over_all_pairs_is_too_large_at_once() -> None:
    first = torch.randn(3001, 4)

    def match(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        n, m = len(left), len(right)
        return torch.zeros(n * m, n * m)

    report = card(lambda: match(first, first), names={"first": first})
    (finding,) = report.findings
    assert finding.code == "error/out-of-memory" and "at once" in finding.title and "9006001" in finding.title
    assert finding.where.text == "return torch.zeros(n * m, n * m)" and finding.where.phase == "forward"
    assert rows(report)["first"] == 3001 * 16, "a variable goes before a frame that shows the same tensor"
    assert "too large at once" in finding.evidence["growth from step to step"]
    assert finding.fixes and all(fix.after["saves"] for fix in finding.fixes)


def test_owners_by_name_module_and_attribute() -> None:
    class Store(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(16, 32)
            self.seen: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.lift(x)
            self.seen.append(torch.ones(1000))
            return torch.empty(1 << 50) + hidden

    net = nn.Sequential(Store())
    net[0].lift(torch.ones(4, 16)).sum().backward()
    report = card(lambda: net(torch.ones(64, 16)), names={"net": net})
    held = rows(report)
    assert held["net's parameters"] == held["net's gradients"] == 4 * (16 * 32 + 32)
    assert held["hidden in net.0.forward"] == 64 * 32 * 4 and held["x in net.0.forward"] == 64 * 16 * 4
    assert held["net.0.seen"] == 4000
    where = report.findings[0].where
    assert (where.module, where.module_type) == ("0", "Store")
    assert where.text == "return torch.empty(1 << 50) + hidden"


def test_what_is_kept_is_the_cause_when_it_outweighs_the_rest() -> None:
    model = nn.Linear(256, 256)
    losses = [model(torch.randn(4096, 256)).exp().mean() for _ in range(3)]

    def fail() -> None:
        raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {1 << 16} bytes.")

    report = card(fail, names={"model": model, "losses": losses})
    fix = report.findings[0].fixes[0]
    assert "losses" in fix.title and fix.code.startswith("%free losses") and "item()" in fix.code
    assert report.findings[0].evidence["kept without need"] not in ("", "0 bytes")


def test_growth_is_told_from_a_history() -> None:
    assert growth((100, 120, 140, 160)) == 20 and growth((100, 120, 110, 130)) is None and growth((100,)) is None
    report = card(lambda: bytearray(1 << 62), course=[GIB, 2 * GIB, 3 * GIB, 4 * GIB])
    assert "grew by 1.00 GiB a step" in report.findings[0].title
    flat = card(lambda: bytearray(1 << 62), course=[GIB] * 4)
    assert "none over 4 earlier steps" in flat.findings[0].evidence["growth from step to step"]


def test_an_earlier_failure_that_held_the_memory_is_told() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError(
            "CPU out of memory. Tried to allocate 64.00 MiB. It has a total capacity of 256.00 MiB of which 16.00 MiB "
            "is free. Of the allocated memory 240.00 MiB is allocated by PyTorch, and 0 bytes is reserved"
        )

    report = card(fail, names={"x": torch.zeros(1 << 20)})
    (finding,) = report.findings
    assert finding.title.startswith("A cell that failed earlier still held 236 MiB") and "%free traceback" in str(
        report
    )
    assert report.facts["failure"]["limit"] == 256 << 20 and report.facts["failure"]["free"] == 16 << 20


def test_remedies_are_computed_and_ranked() -> None:
    """From facts alone: what would be enough stands first, within these what costs least."""
    asked = RefusedRequest(
        "cuda:0", 2 * GIB, total=80 * GIB, free=GIB, allocated=60 * GIB, unused=3 * GIB, process=64 * GIB
    )
    work = FailedWork(
        batch=32,
        batched=40 * GIB,
        activations=48 * GIB,
        activations32=48 * GIB,
        training=True,
        grad=True,
        blocks=("layers", 12),
        parameters=4 * GIB,
        steps=3,
        optimizer="AdamW",
        through=0.5,
    )
    forward = Failure(
        "OutOfMemoryError", asked, Where(phase="forward", module="layers.5"), work=work, free=GIB, limit=80 * GIB
    )
    titles = [fix.title for fix in best(forward, 9)]
    assert titles[0].startswith("Let torch's allocator join") and titles[1].startswith("Other processes hold")
    assert "Batches of 8 rows instead of 32; 4 of them" in titles[2], "with the other half of the blocks still to come"
    assert [fix.after["saves"] for fix in best(forward, 4)] == ["3.00 GiB", "15.0 GiB", "31.5 GiB", "25.0 GiB"]
    found = out_of_memory_rule(forward)
    assert found is not None and found.title.startswith("3.00 GiB are free in torch's cache, but in pieces too small")

    update = dataclasses.replace(forward, asked=RefusedRequest("cuda:0", GIB), where=Where(phase="optimizer"))
    fixes = best(update, 9)
    assert "foreach=False" in fixes[0].code and fixes[0].after["saves"] == "4.00 GiB"
    assert "Adafactor" in fixes[1].code and not any("Batches" in fix.title for fix in fixes)

    held = (Holding("graph", "saved for backward", 5 * GIB),)
    evaluation = dataclasses.replace(
        update, held=held, where=Where(phase="forward"), work=dataclasses.replace(work, training=False)
    )
    assert "no_grad" in best(evaluation)[0].code and best(evaluation)[0].after["saves"] == "5.00 GiB"


def test_numpy_is_understood() -> None:
    report = card(lambda: numpy.empty(1 << 48))
    assert report.findings[0].evidence["asked for"] == "2048 TiB"


def test_nothing_outlives_the_report_and_nothing_of_the_users_runs() -> None:
    class Touchy:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

        def __repr__(self) -> str:
            raise AssertionError("shown")

    def work() -> None:
        big, touchy = torch.ones(1000), Touchy()
        seen.append(weakref.ref(big))
        torch.empty((1 << 50) * (len(big) if touchy is not None else 1))

    seen: list[weakref.ref[torch.Tensor]] = []
    report = card(work, names={"touchy": Touchy()})
    gc.collect()
    assert seen[0]() is None and "big in work" in str(report.full())
    json.dumps(report.to_dict(), allow_nan=False)


def test_other_errors_are_refused() -> None:
    with pytest.raises(ValueError, match="ran out; got KeyError"):
        out_of_memory(KeyError("x"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit of the address space is needed")
def test_a_step_that_does_not_fit_under_a_real_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["title"].startswith("After 1 step that fit") and finding["where"]["module"].startswith("blocks.")
    assert finding["evidence"]["batch"] == "20000 rows" and len(finding["fixes"]) == 3
    titles = " ".join(fix["title"] for fix in finding["fixes"])
    assert "Batches of" in titles and "bfloat16" in titles and "6 blocks" in titles
    assert all(fix["after"]["saves"].endswith("MiB") for fix in finding["fixes"])
