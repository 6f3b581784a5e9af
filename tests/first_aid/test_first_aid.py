"""first_aid(): each list on sick and healthy variables, what is left as it was, the log, what fits."""

from __future__ import annotations

import contextlib
import copy
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from nbdebug import first_aid
from nbdebug.tools.first_aid import first_aid as module
from nbdebug.tools.first_aid.procedures import CHECKLISTS, SYMPTOMS
from tests.shell import Notebook, started


@pytest.fixture(autouse=True)
def no_past(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(module, "LOG", [])
    monkeypatch.setattr(module, "last_error", lambda: None)
    monkeypatch.chdir(tmp_path)


def variables(**more: Any) -> dict[str, Any]:
    """A regression that learns: model, optimizer, loss_fn, train_loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.rand(64, 4)
    y = x.sum(1, keepdim=True) + 1

    def loss_fn(model: Any, batch: Any) -> Any:
        x, y = batch
        return F.mse_loss(model(x), y)

    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "train_loader": loader, **more}


def states(report: Any) -> list[str]:
    return [step["state"] for step in report.facts["steps"]]


@contextlib.contextmanager
def unchanged(names: dict[str, Any]) -> Iterator[None]:
    before = copy.deepcopy(names["model"].state_dict())
    state = copy.deepcopy(names["optimizer"].state_dict())
    numbers, own = torch.get_rng_state(), random.getstate()
    yield
    after = names["model"].state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert names["optimizer"].state_dict()["state"].keys() == state["state"].keys()
    assert torch.equal(torch.get_rng_state(), numbers) and random.getstate() == own
    assert all(p.grad is None for p in names["model"].parameters())


@pytest.mark.parametrize("symptom", [*SYMPTOMS, *CHECKLISTS])
def test_a_healthy_program_stays_silent_and_as_it_was(symptom: str) -> None:
    names = variables()
    with unchanged(names):
        report = first_aid(symptom, names=names)
    assert not report.findings and not report.symptoms, str(report)
    lines = str(report).splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    assert all(step["state"] in ("well", "needs", "not needed") for step in report.facts["steps"])
    assert "could not run" not in str(report)
    assert symptom != "hang" or "interrupt it" in str(report)


@pytest.mark.parametrize("symptom", [*SYMPTOMS, *CHECKLISTS])
def test_without_anything_each_step_says_what_it_needs(symptom: str) -> None:
    report = first_aid(symptom, names={})
    assert not report.findings and "could not run" not in str(report)
    assert len(report.facts["steps"]) == len({**SYMPTOMS, **CHECKLISTS}[symptom].steps)


def test_it_stops_at_the_first_cause_and_shows_that_report() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        x, y = batch
        return F.mse_loss(model((x - x.min()).log()), y)

    names = variables(loss_fn=loss_fn)
    with unchanged(names):
        report = first_aid("nan", names=names)
    assert [f.code for f in report] == ["nan/log-of-nonpositive"] and report.verdict == "cause found"
    assert states(report) == ["not needed", "cause", *["not reached"] * 5]
    text = str(report)
    assert "a cause was found in step 2 of 7" in text and "Cause: nan/log-of-nonpositive" in text
    assert len(text.splitlines()) <= 34
    assert "nan/log-of-nonpositive" in report._repr_mimebundle_()["text/html"]
    assert "not reached" not in states(first_aid("nan", names=names, all_steps=True))


def test_the_users_own_step_is_run_and_undone() -> None:
    names = variables()
    history: list[float] = []
    batches = iter(list(names["train_loader"]))
    model, optimizer = names["model"], names["optimizer"]

    def train_step() -> Any:
        x, y = next(batches)
        loss = F.mse_loss(model(x / (x * 0)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        return loss

    with unchanged(names):
        report = first_aid("nan", names={**names, "train_step": train_step, "history": history})
    assert report.verdict == "cause found" and report.tool.question == "%nan_trace train_step()"
    assert not history and len(list(batches)) == 8, "its iterator stands where it stood"


def test_an_error_of_the_users_own_step_is_the_cause_one_of_ours_is_none() -> None:
    names = variables()
    model = names["model"]

    def train_step(batch: Any) -> Any:
        return model(batch[0].T).mean()

    report = first_aid("nan", names={**names, "train_step": train_step})
    assert report.findings[0].code.startswith("error/"), str(report)
    odd = variables(train_loader=[{"a": torch.rand(2, 4)}], loss_fn=nn.MSELoss())
    report = first_aid("nan", names=odd)
    assert not report.findings and "could not run here" in str(report)


def test_what_keeps_it_from_learning() -> None:
    names = variables()
    names["optimizer"] = torch.optim.Adam(names["model"][0].parameters(), lr=0.01)
    names["model"][2].weight.requires_grad_(True)
    report = first_aid("not-learning", names=names)
    assert report.findings[0].code == "training/parameters-not-in-optimizer" and states(report)[0] == "cause"
    assert first_aid("plateau", names=variables()).ok


def test_a_loop_without_arguments_and_without_a_loss_fn_is_watched() -> None:
    names = variables()
    del names["loss_fn"]
    names["optimizer"] = optimizer = torch.optim.SGD(names["model"].parameters(), lr=20.0)
    model, loader = names["model"], names["train_loader"]

    def train() -> None:
        for _ in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()

    with unchanged(names):
        report = first_aid("not-learning", names={**names, "train": train})
    assert [f.code for f in report] == ["training/lr-too-high"] and states(report)[0] == "needs"


def test_a_loop_that_makes_its_own_model_is_watched() -> None:
    x, y = torch.randn(96, 5), torch.randn(96, 1)

    def train() -> None:
        model = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
        for _ in range(12):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()

    report = first_aid("not-learning", names={"train": train})
    assert [f.code for f in report] == ["training/lr-too-high"]


def test_after_a_crash_the_newest_checkpoint_is_looked_at_though_the_cause_is_known(monkeypatch, tmp_path) -> None:
    names = variables()
    (tmp_path / "runs").mkdir()
    torch.save(names["model"].state_dict(), tmp_path / "runs" / "step_10.pt")
    try:
        names["model"](torch.rand(2, 5))
    except RuntimeError as error:
        monkeypatch.setattr(module, "last_error", lambda error=error: error)
    report = first_aid("crash", names={**names, "folder": pathlib.Path("runs")})
    assert report.findings[0].code.startswith("error/")
    assert states(report)[:3] == ["cause", "needs", "well"] and states(report)[3] == "not reached"
    (tmp_path / "train.log").write_text("".join(f"step {i} loss {2 * 0.9**i + 0.1:.4f}\n" for i in range(40)))
    assert states(first_aid("crash", names={**names, "folder": pathlib.Path("runs")}))[:3] == ["cause", "well", "well"]


def test_what_is_watched_during_a_run_is_asked(tmp_path) -> None:
    names = variables()
    (tmp_path / "run.log").write_text("".join(f"step {i} loss {2 * 0.9**i + 0.1:.4f}\n" for i in range(40)))
    with nbdebug.grad_watch(names["model"]) as watch:
        for batch in names["train_loader"]:
            loss = names["loss_fn"](names["model"], batch)
            names["optimizer"].zero_grad()
            loss.backward()
            names["optimizer"].step()
    losses = [2.0, 1.0, 0.5, 0.3, 0.2, 0.15, 0.1]
    report = first_aid("during", names={**names, "watch": watch, "losses": losses})
    assert states(report)[:2] == ["well", "well"] and "8 steps" in str(report)
    report = first_aid("crash", names={**names, "log": "run.log"})
    assert dict(zip((s["what"] for s in report.facts["steps"]), states(report)))["The log up to the end"] == "well"


def test_the_log_tells_what_was_changed_and_asks_for_one_thing_at_a_time() -> None:
    names = variables()
    assert "Nothing was tried" in str(first_aid(log=True))
    first_aid("error", names=names)
    names["optimizer"].param_groups[0]["lr"] = 0.001
    assert "optimizer has lr 0.001 (was 0.01)" in str(first_aid("error", names=names).notes)
    names["train_loader"] = DataLoader(names["train_loader"].dataset, batch_size=16)
    names["optimizer"].param_groups[0]["lr"] = 0.1
    report = first_aid("error", names=names)
    assert "Change one at a time" in report.notes[0] and "batch size 16" in report.notes[0]
    log = first_aid(log=True)
    assert len(log.frame()) == 3 and "Before 3 more than one thing" in log.notes[0]
    assert first_aid("error", names=names).notes == ()


def test_it_says_which_list_fits() -> None:
    names = variables()
    assert first_aid(names=names).facts["fits"] == {}
    assert list(first_aid(names={**names, "losses": [1.0, float("nan")]}).facts["fits"]) == ["nan"]
    rising = [1.0 + 0.1 * i for i in range(40)]
    falling = [4.0 * 0.9**i + 0.1 for i in range(40)]
    assert list(first_aid(names={**names, "losses": rising}).facts["fits"]) == ["not-learning"]
    assert first_aid(names={**names, "losses": falling, "loss": torch.tensor(0.2)}).facts["fits"] == {}
    with torch.no_grad():
        names["model"][0].weight[0, 0] = float("nan")
    assert "model.0.weight" in str(first_aid(names=names))
    with pytest.raises(ValueError, match=r"no list 'fever'.*nan"):
        first_aid("fever", names={})


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with started("import torch\nmodel = torch.nn.Linear(3, 1)\nx = torch.rand(4, 3)") as book:
        yield book


def test_the_magics(notebook: Notebook, monkeypatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(module, "LOG", [])
    notebook.run("model(x.T)")
    assert "%first_aid error" in notebook.run("%first_aid").shown
    report = notebook.run("%first_aid error").result
    assert report.findings[0].code.startswith("error/") and report.tool.findings == report.findings
    assert notebook.run("%first_aid hang;").result is None
    assert len(notebook.run("%first_aid --log").result.frame()) == 2
    assert "UsageError" in notebook.run("%first_aid fever").printed
    assert "UsageError" in notebook.run("%checklist").printed
    assert states(notebook.run("%checklist after").result)[-1] == "well"


def test_a_loop_that_stands_in_a_cell_is_no_healthy_run(monkeypatch) -> None:
    with started("import torch") as book:
        book.run("""
            net = torch.nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.tensor([[1.0, -1.0], [0.5, 2.0]])
            losses = []
            for _ in range(3):
                opt.zero_grad()
                loss = net(x.log()).mean()
                loss.backward()
                opt.step()
                losses.append(loss.item())
        """)
        done = book.run("%first_aid nan")
        assert not done.result.ok and "%%nan_trace above it" in done.shown and "In [" in done.shown
        assert {"not well"} < {step["state"] for step in done.result.facts["steps"]}


def test_a_layer_without_a_line_of_its_own_is_named_where_it_was_made() -> None:
    with started("import torch; from torch import nn") as book:
        book.run("""
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), nn.Softmax(-1))
            criterion = nn.CrossEntropyLoss()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(256, 6)
            rows = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0))
            train_loader = torch.utils.data.DataLoader(rows, batch_size=32)
        """)
        for magic in ("%preflight", "%first_aid not learning"):
            finding = book.run(magic).result.findings[0]
            assert finding.code == "training/double-softmax" and "Sequential" in finding.where.text, finding.where
            assert finding.where.place in finding.title
