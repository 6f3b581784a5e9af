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


SPAWNS = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
def run(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["FREE_PORT"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    loss = torch.ones(3)
    for step in range(3):
        dist.all_reduce(loss)
        if step < LAST or rank == 0:
            dist.barrier()
    dist.destroy_process_group()
def start_by_hand():
    ranks = [mp.Process(target=run, args=(rank, 2)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
if __name__ == "__main__":
    START
    print("both have ended")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", ["mp.spawn(run, args=(2,), nprocs=2)", "start_by_hand()"])
@pytest.mark.parametrize("last", [2, 3])
def test_a_script_that_starts_its_ranks_itself(tmp_path, monkeypatch, start: str, last: int) -> None:
    """By spawn, and by fork (or what Python has in its place): sick with two barriers on rank 1, healthy with three."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("FREE_PORT", str(free.getsockname()[1]))
    status, text = ranks(tmp_path, SPAWNS.replace("START", start).replace("LAST", str(last)))
    if last == 3:
        assert status == 0 and "both have ended" in text and "2 ranks, 14 collectives compared" in text, text
    else:
        assert status == 1 and "distributed/collective-mismatch" in text and "train.py, line 9" in text, text


@pytest.mark.timeout(300)
def test_a_rank_that_does_not_come_to_the_groups_making(tmp_path) -> None:
    """A line tells where it stands while the others still wait; the verdict comes before the timeout of 30 min."""
    early = "import sys, torch.distributed as dist, os\nif os.environ['RANK'] == '1':\n    sys.exit(0)\n"
    status, text = ranks(tmp_path, early + "dist.init_process_group('gloo')\n")
    assert status == 1 and "distributed/collective-mismatch" in text and "train.py, line 2" in text, text


def test_what_a_rank_does_that_the_others_wait_for_is_told_once(tmp_path, capsys) -> None:
    import json
    import time

    from nbdebug.tools.distributed.launch import Comparer

    init = {"k": "init", "world": 2, "own": 0, "timeout": 20.0, "lines": [], "t": time.time() - 11}
    call = {"k": "call", "op": "init_process_group", "g": "start", "lines": [("a.py", 3, "f")], "t": time.time() - 11}
    stack = {"k": "stack", "lines": [("a.py", 2, "f")], "stack": []}
    for rank, events in ((0, [init, call]), (1, [stack])):
        (tmp_path / f"rank-{rank}.0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    comparer = Comparer(tmp_path, 2)
    comparer.read()
    comparer.notice()
    comparer.notice()
    text = capsys.readouterr().err
    assert text.count("a.py, line 2") == 1 and "rank 1" in text and (tmp_path / "ask-1").exists(), text


def test_ranks_that_are_started_after_others_are_compared_among_themselves(tmp_path) -> None:
    """A script that calls spawn twice: the second ranks end after fewer calls, and what was found before is kept."""
    import json

    from nbdebug.tools.distributed.launch import Comparer, report_of

    start, end = {"k": "start", "pid": 1}, {"k": "end", "code": 0}
    call = {"k": "call", "op": "barrier", "ranks": [0, 1], "lines": []}
    saved = {"k": "file", "id": "a/0", "path": "a", "lines": [("a.py", 1, "f")]}
    for digests, found in ((("x", "x"), 0), (("x", "y"), 1)):
        comparer = Comparer(tmp_path, 0)
        for rank, digest in enumerate(digests):
            first = [start, call, call, {**saved, "digest": digest}, end]
            for part, events in ((0, first), (1, [start, call, end])):
                text = "".join(json.dumps(event) + "\n" for event in events)
                (tmp_path / f"rank-{rank}.{part}.jsonl").write_text(text)
        comparer.read()
        comparer.facts.over = True
        report = report_of(comparer.facts, "ranks")
        assert len(report.findings) == found and len(comparer.facts.ranks[0].calls["0"]) == 1, report


WAITS = "import os, pathlib, time\npathlib.Path(f'{os.getpid()}.pid').touch()\ntime.sleep(600)\n"
STARTS_AND_WAITS = """
import multiprocessing, os  # MASTER_PORT would be set here
def run():
    exec(TEXT)
if __name__ == "__main__":
    for _ in range(2):
        multiprocessing.Process(target=run).start()
    run()
""".replace("TEXT", repr(WAITS))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("script", "started"), [(WAITS, 2), (STARTS_AND_WAITS, 3)], ids=["torchrun", "by hand"])
def test_a_launcher_that_is_killed_leaves_no_rank(tmp_path, script: str, started: int) -> None:
    import time

    from nbdebug.tools.distributed.launch import alive

    (tmp_path / "train.py").write_text(script)
    launcher = subprocess.Popen([sys.executable, "-m", "nbdebug", "ranks", "train.py"], cwd=tmp_path)
    while len(processes := [int(path.stem) for path in tmp_path.glob("*.pid")]) < started:
        assert launcher.poll() is None
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    while any(map(alive, processes)):  # until the test's time is over
        time.sleep(0.1)


def test_the_arms_of_an_expression_that_communicates_are_marked() -> None:
    from types import SimpleNamespace

    from nbdebug.tools.distributed.marks import MARK, Trail, compiled

    places: list = []
    code = compiled(b"x = dist.barrier() if rank else 'none'\ny = 1 if rank else 2\n", "train.py", places.append)
    for rank, value in ((0, "none"), (1, "met")):
        trail, names = Trail(), {"rank": rank, "dist": SimpleNamespace(barrier=lambda: "met")}
        exec(code, names | {MARK: trail.mark}, names)
        assert names["x"] == value and trail.passed == [places[1 - rank].number]
    assert [place.line for place in places] == [1, 1]


def test_a_fault_of_ours_is_told_and_nothing_is_compared() -> None:
    from nbdebug.tools.distributed.launch import report_of
    from tests.distributed.events import facts_of

    facts = facts_of({0: [{"k": "fault", "error": "TypeError: no"}], 1: []})
    report = report_of(facts, "nbdebug ranks train.py")
    assert not report.findings and not report.ok and "TypeError: no" in str(report)


def test_a_long_run_is_held_in_part_and_still_judged(monkeypatch) -> None:
    """Calls that all ranks have made alike go, with marks and events; a parting after them keeps its numbers."""
    from nbdebug.tools.distributed import facts as limits
    from nbdebug.tools.distributed.launch import report_of

    for name, most in (("CALLS", 50), ("MARKS", 300), ("EVENTS", 40)):
        monkeypatch.setattr(limits, name, most)
    loop = {"k": "place", "number": 1, "kind": "loop", "file": "train.py", "line": 1, "first": 2, "last": 3}
    call = {"k": "call", "op": "all_reduce", "lines": [("train.py", 2, "<module>")], "m": [1], "ranks": [0, 1]}
    facts = limits.RanksFacts(2, sources={"train.py": "for x in rows:\n    reduce()\n    step()\n"})
    steps = 4 * limits.MARKS
    for n in range(steps):
        for rank in (0, 1) if n < steps - 5 else (0,):
            facts.add(rank, loop if n == 0 else call)
            facts.add(rank, {"k": "loss", "id": n, "bad": False, "value": "1.0", "lines": []})
        if n % 20 == 0:
            facts.forget()
    facts.add(1, {"k": "end", "m": [-1]})
    held = facts.ranks[0]
    assert len(held.calls["0"]) < 3 * limits.CALLS and len(held.events["loss"]) < 5 * limits.EVENTS
    assert len(held.trail) < 3 * limits.MARKS and held.made("0") == steps - 1
    (finding,) = report_of(facts, "ranks").findings
    assert finding.code == "distributed/uneven-steps" and finding.evidence["steps"] == {0: steps - 1, 1: steps - 6}


def test_the_agents_files_are_removed_once_read(tmp_path, monkeypatch) -> None:
    from nbdebug.rank import shared_folder
    from nbdebug.tools.distributed import agent
    from nbdebug.tools.distributed.launch import Comparer

    monkeypatch.setattr(agent, "PART", 1000)
    rank, comparer = agent.Agent(tmp_path, 0), Comparer(tmp_path, 1)
    for n in range(100):
        rank.write("loss", id=n, bad=False, value="1.0", lines=[])
        comparer.read()
    assert len(comparer.facts.ranks[0].events["loss"]) == 100 and len(list(tmp_path.iterdir())) <= 2
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = shared_folder()
    assert folder == shared_folder() and folder.stat().st_mode & 0o077 == 0 == folder.parent.stat().st_mode & 0o077


def test_the_collectives_of_a_step_are_counted_on_copies(monkeypatch) -> None:
    import torch
    import torch.distributed as dist

    import nbdebug

    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x = torch.nn.Linear(300, 300), torch.ones(2, 300)
        state = torch.get_rng_state()
        report = nbdebug.check_ranks(model=model, step=lambda model: model(x).square().mean().backward())
        assert torch.equal(torch.get_rng_state(), state) and model.weight.grad is None
        assert report.facts["collectives"] == [("all_reduce", 1, 300 * 301 * 4)] and len(report.facts["tried"]) == 4
        assert "Tried on copies" in str(report.full()) and "NCCL_P2P_DISABLE" in str(report.full()), report
        effects = dict(report.frame("Variables that are set on this rank")[["name", "effect"]].itertuples(index=False))
        assert "not to keep" in effects["NCCL_IB_DISABLE"], effects
    finally:
        dist.destroy_process_group()


def test_the_precision_of_both_kinds_of_fsdp() -> None:
    """buffer_dtype is told for what it is, where the parameters are in half precision."""
    import torch
    from torch.distributed.fsdp import MixedPrecision

    from nbdebug.tools.distributed.check_ranks import differences, precision, remarks

    model, half = torch.nn.Linear(2, 2), torch.bfloat16
    notes = []
    for policy in (
        MixedPrecision(param_dtype=half, buffer_dtype=torch.float32),
        MixedPrecision(param_dtype=half, reduce_dtype=torch.float32, buffer_dtype=half),
        MixedPrecision(buffer_dtype=torch.float32),
        MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16),
    ):
        model.mixed_precision = policy  # as FullyShardedDataParallel keeps it
        facts = {"host": "a", "precision": "; ".join(sorted({one for one in precision(model) if one}))}
        notes.append((facts["precision"], len(remarks(facts)), len(differences([facts]))))
    assert notes == [
        ("param bfloat16, buffer float32", 1, 0),
        ("param bfloat16, reduce float32, buffer bfloat16", 0, 0),
        ("buffer float32", 0, 0),
        ("param float16, reduce float16", 0, 1),
    ]
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        second = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        assert "param bfloat16, reduce float32" in precision(second)
    finally:
        dist.destroy_process_group()


def test_an_error_of_all_ranks_is_looked_for_in_one_process() -> None:
    from nbdebug.tools.distributed.launch import report_of
    from tests.distributed.events import facts_of

    error = {"k": "error", "type": "ValueError", "text": "no rows", "lines": [("train.py", 2, "<module>")], "t": 1.0}
    for ranks, fixes in (({0: [error], 1: [error]}, 2), ({0: [error], 1: []}, 1)):
        (finding,) = report_of(facts_of(ranks), "ranks").findings
        assert finding.code == "distributed/rank-raised" and len(finding.fixes) == fixes
        assert ("--nproc 1" in finding.fixes[-1].code) is (fixes == 2)


def test_hang_watch_shows_the_users_lines_alone(tmp_path) -> None:
    import torch.distributed as dist

    from nbdebug.tools.distributed.hang_watch import _Watch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inside, lines = _Watch(1.0).place()
    finally:
        dist.destroy_process_group()
    assert not inside and "_Watch(1.0).place()" in lines and "_pytest" not in lines


LOSS = """
import sys, torch
w = torch.ones(4, requires_grad=True)
def share(x):
    return x / x.sum(1, keepdim=True)
def go(agent):
    x = torch.ones(3, 4)
    x[1] = 0.0
    parts = share(x) * w
    loss = parts.mean()
    frame = sys._getframe(); trace = agent.locate(frame, frame.f_lineno + 1)
    loss.backward()
    return trace
"""


def test_the_lines_of_a_bad_loss_are_traced_on_their_rank(tmp_path, monkeypatch) -> None:
    """What was changed in place is not made anew."""
    import importlib

    from nbdebug.tools.distributed.agent import Agent

    (tmp_path / "loss_of_a_rank.py").write_text(LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    trace = importlib.import_module("loss_of_a_rank").go(Agent(tmp_path, 0))
    assert trace["code"] == "nan/div-by-zero" and trace["line"][1] == 5, trace


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([{"share": "0 of 2"}, {"share": "1 of 2"}], ""),
        ([{"share": "0 of 1"}, {"share": "0 of 1"}], "share 0 of 1 and 0 of 1"),
        ([{"order": "seed 0, epoch 0"}, {"order": "seed 0, epoch 2"}], "order differs"),
        ([{"batches": None}, {"batches": None}], ""),
        ([{"variables": "NCCL_ALGO=Ring"}, {}], "variables differs"),
        ([{"index": "0", "free": 9e9}, {"index": "1", "free": 2e9}], "Rank 1 has"),
        ([{"index": "0", "free": 9e9}, {"index": "0", "free": 9e9}], "one card"),
    ],
)
def test_what_the_ranks_are_asked_before_training(ranks, told) -> None:
    from nbdebug.tools.distributed.check_ranks import differences

    symptoms = [symptom.what for symptom in differences([{"host": "a", **rank} for rank in ranks])]
    assert len(symptoms) == bool(told) and all(told in text for text in symptoms), symptoms


ABORTS = """
import atexit, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(3):
    dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    ABORT
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("abort", ["os.abort()", "atexit.register(os.abort)"])
def test_a_rank_that_is_aborted_after_its_work_is_no_fault_of_the_program(tmp_path, abort: str) -> None:
    """As torch's own threads may do where the interpreter ends. One that is aborted in its work is told."""
    status, text = ranks(tmp_path, ABORTS.replace("ABORT", abort))
    if abort == "os.abort()":
        assert status == 1 and "distributed/rank-raised" in text and "SIGABRT" in text, text
    else:
        assert status == 0 and "All ranks had come to the end of the script; then rank 1 ended with" in text, text


RACE = """
import json, os, time, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    time.sleep(1)
    with open("vocab.json", "w") as file:
        json.dump([1, 2], file)
BARRIER
with open("vocab.json") as file:
    vocab = json.load(file)
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_a_file_that_another_rank_has_not_written_yet(tmp_path) -> None:
    """The failed rank waits for it, and runs its line once more. A file that nobody writes is the rank's own error."""
    status, text = ranks(tmp_path, RACE.replace("BARRIER", ""))
    assert status == 1 and "distributed/barrier-missing" in text and "train.py, line 9" in text, text
    assert "line 6" in text and "runs through" in text, text
    (tmp_path / "vocab.json").unlink()
    status, text = ranks(tmp_path, RACE.replace("BARRIER", "dist.barrier()"))
    assert status == 0, text
    (tmp_path / "vocab.json").unlink()
    status, text = ranks(tmp_path, RACE.replace("BARRIER", "").replace('"vocab.json", "w"', '"other.json", "w"'))
    assert status == 1 and "distributed/rank-raised" in text and "barrier-missing" not in text, text


TWICE = """
import torch, torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
dist.init_process_group("gloo")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x
model = nn.parallel.DistributedDataParallel(Net())
for step in range(3):
    model(torch.randn(2, 4)).sum().backward()
"""


@pytest.mark.timeout(300)
def test_an_error_of_a_rank_is_explained_on_that_rank(tmp_path) -> None:
    status, text = ranks(tmp_path, TWICE)
    assert status == 1 and "explain: " in text and "use_reentrant" in text, text


SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
SHARD = [fully_shard(model[0]), fully_shard(model)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_an_optimizer_that_is_made_before_fully_shard(tmp_path) -> None:
    lines = SHARDED.split("\n")
    lines[6:8] = lines[7:5:-1]
    status, text = ranks(tmp_path, "\n".join(lines))
    assert status == 1 and "distributed/optimizer-before-sharding" in text and "train.py, line 7" in text, text
    status, text = ranks(tmp_path, SHARDED)
    assert status == 0, text
