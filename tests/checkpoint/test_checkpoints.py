"""Checkpoints: a run that is stopped goes on as the one that was not; a kill or a full disk costs no good file."""

from __future__ import annotations

import os
import pathlib
import random
import resource
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.tools.checkpoint.formats import read_file


def parts(seed: int = 0) -> dict:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "generator": torch.Generator().manual_seed(seed),
    }


def train(run: dict, first: int, last: int) -> list[float]:
    losses = []
    for _ in range(first, last):
        x = torch.randn(8, 6, generator=run["generator"]) + random.random() + np.random.rand()
        loss = (run["model"](x) - x.sum(1, keepdim=True)).square().mean()
        run["optimizer"].zero_grad()
        loss.backward()
        run["optimizer"].step()
        run["scheduler"].step()
        losses.append(loss.item())
    return losses


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path) -> None:
    run = parts()
    train(run, 0, 7)
    nbdebug.Checkpoints(tmp_path, **run).save(7)
    expected = train(run, 7, 15)
    other = parts(seed=5)
    random.seed(1)
    start = nbdebug.Checkpoints(tmp_path, **other).resume()
    assert start == 7 and train(other, start, 15) == expected
    assert nbdebug.check_checkpoint(tmp_path, model=other["model"], optimizer=other["optimizer"]).ok


def test_it_keeps_the_newest_and_the_best_and_writes_at_multiples(tmp_path) -> None:
    ckpt = nbdebug.Checkpoints(tmp_path, keep=2, best="loss", every=5, **parts())
    for step, loss in zip(range(0, 60, 5), [9, 3, 1, 2, float("nan"), 4, 5, 6, 7, 8, 9, 2]):
        assert ckpt.save(step, loss=loss) is not None and ckpt.save(step + 1) is None
    assert [path.name for path in ckpt.paths()] == [
        "step_00000010.safetensors",
        "step_00000050.safetensors",
        "step_00000055.safetensors",
    ]
    assert nbdebug.Checkpoints(tmp_path / "none").resume() == 0


def test_settings_are_kept_and_the_bar_stands_where_the_run_does(tmp_path, capsys) -> None:
    config = {"rate": 0.1, "sizes": (4, 8), "name": "a"}
    nbdebug.Checkpoints(tmp_path, config=config, **parts()).save(7)
    assert read_file(tmp_path / "step_00000007.safetensors").tree["config"] == config
    assert list(nbdebug.Checkpoints(tmp_path, config=config, **parts()).steps(10)) == [7, 8, 9]
    assert "70%" in (bar := capsys.readouterr().err) and "7/10" in bar and "10/10" in bar
    other = {**config, "rate": 0.2, "warm_up": 5}
    with pytest.warns(UserWarning, match=r"other settings: rate 0.1 → 0.2 and warm_up None → 5"):
        assert nbdebug.Checkpoints(tmp_path, config=other, **parts()).resume() == 7
    assert nbdebug.Checkpoints(tmp_path, **parts()).resume() == 7


def test_a_torn_file_is_passed_over_and_another_model_is_refused(tmp_path) -> None:
    ckpt = nbdebug.Checkpoints(tmp_path, **parts())
    for step in (9, 10):
        path = ckpt.save(step)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.warns(UserWarning, match="is passed over"):
        assert ckpt.resume() == 9
    wide = nn.Linear(7, 1)
    with pytest.raises(ValueError, match="is not of this run"), pytest.warns(UserWarning):
        nbdebug.Checkpoints(tmp_path, model=wide).resume()


def test_no_changed_byte_gets_through(tmp_path) -> None:
    run = parts() | {"tied": nn.ParameterList([p := nn.Parameter(torch.randn(3).bfloat16()), p])}
    train(run, 0, 2)
    path = nbdebug.Checkpoints(tmp_path, **run).save(2, loss=float("nan"))
    whole, dice, seen = path.read_bytes(), random.Random(0), 0
    state = repr(read_file(path).tree)
    assert b"pickle" not in whole and nbdebug.check_checkpoint(path).ok
    table = whole.index(b'"nbdebug_checksum"')  # from here to the tensors: their shapes, dtypes and places
    tensors = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(8), *range(table, tensors, 3), *(dice.randrange(len(whole)) for _ in range(60))]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << dice.randrange(8)
        path.write_bytes(bytes(changed))
        held = read_file(path)
        assert held.fault or repr(held.tree) == state
        seen += bool(held.fault)
    assert seen > len(places) - 10


def test_the_model_is_saved_without_its_wrapper_and_odd_states_are_refused(tmp_path) -> None:
    model = nn.Linear(3, 2)
    nbdebug.Checkpoints(tmp_path, model=nn.DataParallel(torch.compile(model, backend="eager"))).save(1)
    assert nbdebug.check_checkpoint(tmp_path / "step_00000001.safetensors").frame("The weights")["name"][0] == "weight"

    random = {
        "torch": torch.get_rng_state(),
        "cuda": torch.zeros(16, dtype=torch.uint8),
        "cuda:1": torch.ones(16).byte(),
    }
    torch.save({"random": random, "net": model.state_dict()}, tmp_path / "random.pt")
    assert list(nbdebug.check_checkpoint(tmp_path / "random.pt").frame("The weights")["name"]) == ["weight", "bias"]
    (tmp_path / "random.pt").unlink()

    class Odd:
        def state_dict(self):
            return {"path": pathlib.PurePosixPath("runs")}

    with pytest.raises(TypeError, match=r"odd\.path holds an object of pathlib"):
        nbdebug.Checkpoints(tmp_path, odd=Odd()).save(2)
    with pytest.raises(TypeError, match="no state_dict"):
        nbdebug.Checkpoints(tmp_path, odd=3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.safetensors"]


def test_each_of_several_models_is_compared_before_any_is_filled(tmp_path) -> None:
    first, other = nn.Linear(2, 2), nn.Linear(2, 2)
    nbdebug.Checkpoints(tmp_path, generator=first, critic=nn.Linear(3, 3)).save(1)
    before = other.weight.clone()
    with pytest.raises(ValueError, match=r"not of this run: .*`critic` of step_00000001"):
        nbdebug.Checkpoints(tmp_path, generator=other, critic=nn.Linear(4, 3)).resume()
    assert torch.equal(other.weight, before)


def test_generators_of_each_kind_and_the_counter_of_a_scheduler_come_back(tmp_path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    run = {"dice": random.Random(3), "noise": np.random.default_rng(3), "model": nn.Linear(2, 2)}
    run["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])
    ckpt = nbdebug.Checkpoints(tmp_path, **run)
    ckpt.save(1)
    milestones, drawn = run["scheduler"].milestones, (run["dice"].random(), run["noise"].normal())
    ckpt.resume()
    assert (run["dice"].random(), run["noise"].normal()) == drawn
    assert run["scheduler"].milestones == milestones and list(run["scheduler"].milestones.elements()) == [2, 2, 4]


def saves_until_killed(folder: pathlib.Path, told: int) -> None:
    ckpt = nbdebug.Checkpoints(folder, keep=2, model=nn.Linear(300, 100))
    step = ckpt.resume()
    while True:
        step += 1
        try:
            ckpt.save(step)
        except OSError as error:  # the disk is full
            assert "last good checkpoint is" in str(error)
            os.write(told, b"0\n")
        else:
            os.write(told, f"{step}\n".encode())


def test_a_kill_at_any_moment_loses_nothing(tmp_path, kills: int = 20) -> None:
    """Also by hand: `python -m tests.checkpoint.test_checkpoints 300 [FOLDER]`. FOLDER may be a small disk (as root:
    `mount -t tmpfs -o size=600k tmpfs FOLDER`), which is filled up in every other round."""
    torch.set_num_threads(1)
    dice, last, torn, full = random.Random(7), 0, 0, 0
    ballast = tmp_path / "ballast"
    small = shutil.disk_usage(tmp_path).total < 2**20
    for turn in range(kills):
        ballast.write_bytes(b"")
        if small and turn % 2:
            ballast.write_bytes(bytes(max(shutil.disk_usage(tmp_path).free - dice.randrange(140_000), 0)))
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                saves_until_killed(tmp_path, writing)
            finally:
                os._exit(1)
        os.close(writing)
        told = os.read(reading, 64) if not turn else b""  # on a busy machine all others may end before they save
        time.sleep(dice.uniform(0.02, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reading, "rb") as lines:
            steps = [int(line) for line in (told + lines.read()).split()]
        last, full = max([last, *steps]), full + steps.count(0)
        ckpt = nbdebug.Checkpoints(tmp_path, model=nn.Linear(300, 100))
        torn += sum(bool(read_file(path).fault) for path in ckpt.paths())
        assert ckpt.resume() >= last, "a file that was said to be saved is lost"
        assert not list(tmp_path.glob(".*")), "half a file stayed"
    assert last > 0 and torn == 0
    print(f"{kills} kills, {last} saves, {full} refused by a full disk, {torn} torn, 0 lost")


def test_a_full_disk_leaves_the_last_good_file(tmp_path) -> None:
    child = os.fork()
    if not child:  # the limit on a file's size is the disk's end here; it holds for this process alone
        ok = 1
        try:
            torch.set_num_threads(1)
            model = nn.Linear(300, 100)
            ckpt = nbdebug.Checkpoints(tmp_path, keep=1, model=model)
            ckpt.save(1)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
            try:
                ckpt.save(2)
            except OSError as error:
                ok = int("last good checkpoint is step_00000001.safetensors" not in str(error) or ckpt.resume() != 1)
        finally:
            os._exit(ok)
    assert os.waitpid(child, 0)[1] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.safetensors"]


if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        test_a_kill_at_any_moment_loses_nothing(pathlib.Path(folder), int(sys.argv[1]))
