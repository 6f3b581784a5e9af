"""%%ranks on two real processes: output by rank, errors and hangs end within seconds, the processes live on."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nbdebug.tools.distributed.engines import Engines
from nbdebug.tools.distributed.launch import alive
from tests.distributed.programs import HEAD, PROGRAMS
from tests.shell import Notebook, started

DDP = """%%ranks
from torch import nn
torch.manual_seed(0)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
def step():
    optimizer.zero_grad()
    ddp(torch.ones(4, 3) * (rank + 1)).square().mean().backward()
    optimizer.step()
step()
"""


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with started("lr = 0.1") as book:
        assert "needs processes" in book.run("%%ranks\n1").printed
        book.run("%ranks start 2")
        processes = book.shell.magics_manager.registry["RanksMagics"].engines.processes
        yield book
    assert len(processes) == 2 and not any(map(alive, processes)), "%unload_ext ends them"


@pytest.mark.timeout(120)
def test_cells_run_on_each_rank_and_survive_what_fails(book: Notebook) -> None:
    ran = book.run("%%ranks --send lr --fetch total\nimport torch, torch.distributed as dist\n"
                   "dist.init_process_group('gloo')\ntotal = torch.tensor(lr + rank)\ndist.all_reduce(total)\n"
                   "print('hello from', rank)")  # fmt: skip
    assert ran.error is None and ran.result is None, ran.shown
    assert "[rank 0] hello from 0" in ran.printed and "[rank 1] hello from 1" in ran.printed
    assert book.run("[round(t.item(), 3) for t in total]").result == [1.2, 1.2]

    for name in ("a pipeline of two stages", "groups of some ranks", "weights averaged every third step"):
        healthy = book.run(f"%%ranks\n{HEAD}{PROGRAMS[name]}")
        assert healthy.error is None and healthy.result is None, healthy.shown

    failed = book.run("%%ranks\nif rank == 1:\n    raise ValueError('bad row')\ndist.barrier()")
    assert type(failed.error).__name__ == "RemoteError" and "[rank 1] ValueError: bad row" in failed.printed
    assert "distributed/rank-raised" in failed.shown

    hung = book.run("%%ranks\nfor n in range(3 - rank):\n    dist.barrier()")
    assert hung.result.findings[0].code == "distributed/uneven-steps", hung.shown
    assert hung.result.findings[0].where.place == f"In [{book.shell.execution_count - 1}], line 2"

    unlike = book.run("%%ranks\nx = torch.ones(3 + rank)\ndist.all_reduce(x)")
    assert unlike.result.findings[0].code == "distributed/collective-mismatch", unlike.shown
    assert unlike.result.findings[0].where.line == 3

    within = book.run("%%ranks\ndist.barrier()\n%nan_trace torch.ones(2, requires_grad=True).mul(2).sum().backward()")
    assert within.error is None and within.shown.count("[rank") == 2, within.shown
    typo = book.run("%%ranks\nnothing_of_this_name")
    assert typo.result is None and "NameError" in typo.shown


@pytest.mark.usefixtures("no_gc_callbacks")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "cell",
    [
        "import time\nwhile True:\n    time.sleep(0.01)",
        "if rank:\n    dist.barrier()\nelse:\n    while True:\n        pass",
    ],
    ids=["all compute", "one waits"],
)
def test_an_interrupt_ends_the_cell_on_all_ranks_and_the_next_one_runs(book: Notebook, cell: str) -> None:
    engines = book.shell.magics_manager.registry["RanksMagics"].engines
    engines.run("import torch, torch.distributed as dist", "In [1]", lambda *_: None)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engines.run(cell, "In [2]", lambda *_: None)
    assert time.monotonic() - began < 12
    shown: list[str] = []
    after = engines.run("x = torch.ones(2)\ndist.all_reduce(x)\nprint(x.sum().item())", "In [3]",
                        lambda rank, kind, value: shown.append(value))  # fmt: skip
    assert not after.errors and shown == ["4.0", "4.0"]


@pytest.mark.timeout(120)
def test_ranks_that_wait_for_each_other_in_two_groups(book: Notebook) -> None:
    """The notebook frees them; of the errors that this makes a line is written, as torch's frames take seconds."""
    engines = book.shell.magics_manager.registry["RanksMagics"].engines
    waits = ("import torch, torch.distributed as dist\none, two = dist.new_group([0, 1]), dist.new_group([0, 1])\n"
             "for group in (one, two)[::1 - 2 * rank]:\n    dist.all_reduce(torch.ones(2), group=group)")  # fmt: skip
    outcome = engines.run(waits, "In [2]", lambda *_: None)
    assert outcome.report.findings[0].code == "distributed/collective-mismatch", outcome.report
    assert len(outcome.errors) == 2
    assert all(
        "Connection closed" in e.traceback and "distributed_c10d" not in e.traceback for e in outcome.errors.values()
    )


@pytest.mark.timeout(120)
def test_a_worker_that_has_copies_of_the_connections_holds_no_rank(book: Notebook) -> None:
    engines = book.shell.magics_manager.registry["RanksMagics"].engines
    reads = ("import torch, torch.distributed as dist\nfrom torch.utils.data import DataLoader\n"
             "for row in DataLoader(range(4), num_workers=1):\n    if rank == 1 and row == 2:\n"
             "        raise ValueError('bad row')\n    dist.all_reduce(torch.ones(2))")  # fmt: skip
    for number in (3, 4, 5):  # at once: the freed ranks of one cell are not those of the next
        outcome = engines.run(reads, f"In [{number}]", lambda *_: None)
        assert outcome.report.findings[0].code == "distributed/rank-raised" and len(outcome.errors) == 2, outcome.report


@pytest.mark.timeout(120)
def test_a_wrapped_model_goes_over_to_the_new_group(book: Notebook) -> None:
    book.run("%%ranks --send lr\nimport torch, torch.distributed as dist")
    assert book.run(DDP).result is None
    hung = book.run("%%ranks\nfor n in range(3 - rank):\n    step()")
    assert hung.result.findings[0].code == "distributed/uneven-steps", hung.shown
    apart = book.run("%%ranks\nwith torch.no_grad():\n    ddp.module.weight.add_(rank)\nstep()")
    assert apart.result.findings[0].code == "distributed/weights-diverged", apart.shown
    again = book.run("%%ranks\ndist.broadcast(ddp.module.weight.data, 0)\nfor _ in range(3):\n    step()")
    assert again.error is None and again.result is None, again.shown


def test_a_start_that_is_interrupted_leaves_nothing(monkeypatch) -> None:
    ended, folders = [], []

    def interrupted(count: int) -> None:
        raise KeyboardInterrupt

    def cluster(**settings: object) -> SimpleNamespace:
        folders.append(pathlib.Path(str(settings["profile_dir"])).parent)
        return SimpleNamespace(start_cluster_sync=interrupted, stop_cluster_sync=lambda: ended.append(True))

    monkeypatch.setitem(sys.modules, "ipyparallel", SimpleNamespace(Cluster=cluster))
    with pytest.raises(KeyboardInterrupt):
        Engines(2)
    assert ended and not folders[0].exists()


@pytest.mark.timeout(120)
@pytest.mark.skipif("NBDEBUG_ALL_TESTS" not in os.environ, reason="half a minute of starting processes")
def test_engines_of_the_users_own_cluster_in_two_sets(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As engines on two machines: each set has a launcher of its own, and connects to one controller."""
    import ipyparallel

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cluster = ipyparallel.Cluster(
        profile_dir=str(tmp_path / "profile_two"), cluster_id="", log_level=40, controller_ip="127.0.0.1", delay=0.1
    )
    cluster.start_controller_sync()
    try:
        for name in ("here", "there"):
            cluster.start_engines_sync(n=1, engine_set_id=name)
        cluster.connect_client_sync().wait_for_engines(2, interactive=False, timeout=60)
        engines = Engines(profile="two")
        shown: list[str] = []
        show = lambda rank, kind, value: shown.append(f"{rank} {value}")
        ran = engines.run("import torch, torch.distributed as dist\nx = torch.ones(2) * rank\ndist.all_reduce(x)\n"
                          "print(x.sum().item())", "In [1]", show)  # fmt: skip
        assert not ran.errors and ran.report is None and shown == ["0 2.0", "1 2.0"]
        hung = engines.run("for n in range(3 - rank):\n    dist.barrier()", "In [2]", show)
        assert hung.report is not None and hung.report.findings[0].code == "distributed/uneven-steps"
        processes = engines.processes
        engines.stop()
        assert all(map(alive, processes)), "the user's own engines go on"
        assert ipyparallel.Client(profile="two")[:].apply_sync(lambda: 3) == [3, 3]
    finally:
        cluster.stop_cluster_sync()
