"""explain() on a card: ranges of its tensors, a card that is still at work, and what NCCL itself says."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import nbdebug
from tests.shell import in_this_checkout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def failing(busy: bool):
    scores = torch.arange(6.0, device="cuda").view(2, 3)
    if busy:
        torch.cuda._sleep(2_000_000_000)  # about a second
    else:
        torch.cuda.synchronize()
    raise LookupError(f"nobody knows {list(scores.shape)}")


@pytest.mark.parametrize("busy", [False, True])
def test_ranges_are_read_only_from_a_card_that_is_at_rest(busy: bool) -> None:
    with pytest.raises(LookupError) as caught:
        failing(busy)
    report = nbdebug.explain(caught.value, names={})
    torch.cuda.synchronize()
    (row,) = [row for row in report.tables[0].rows if row[0] == "scores"]
    assert row[1:4] == ["[2, 3]", "float32", "cuda:0"] and row[4] == ("" if busy else "0 to 5")


def test_a_states_tensors_may_lie_on_the_card() -> None:
    model = torch.nn.Linear(2, 2).cuda()
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    (finding,) = nbdebug.explain(caught.value, names={}).findings
    assert finding.code == "error/state-dict-mismatch" and finding.fixes[0].verified


SCRIPT = """
import os, sys, torch, torch.distributed as dist, nbdebug
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")

def work(rank):
    dist.init_process_group("nccl", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(3, device="cuda:0"))   # both on one card
    torch.cuda.synchronize()

def main(rank):
    try:
        work(rank)
    except Exception as error:
        print("EXPLAINED", nbdebug.explain(error, names={}), flush=True)
        os._exit(0)

if __name__ == "__main__":
    import torch.multiprocessing as mp
    mp.spawn(main, nprocs=2)
"""


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_two_processes_on_one_card(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script)], env=in_this_checkout(), capture_output=True, text=True, timeout=180, check=False
    )
    assert "EXPLAINED" in done.stdout, done.stdout + done.stderr
    assert "Cause: error/nccl" in done.stdout and "same GPU" in done.stdout, done.stdout
