"""diagnose without a loss_fn: the loss of a batch from the lines of loops as people write them, or none."""

from __future__ import annotations

import copy
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbdebug
from tests.shell import started
from tests.training.healthy import KINDS


class Forward(nn.Module):
    """A classifier with a softmax too many where it is sick."""

    def __init__(self, sick: bool) -> None:
        super().__init__()
        self.sick = sick
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        out = self.head(self.body(x))
        return out.softmax(-1) if self.sick else out


def setting(sick: bool = True) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    x = torch.randn(256, 6)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    model = Forward(sick)
    return model, torch.optim.Adam(model.parameters(), lr=3e-3), DataLoader(TensorDataset(x, y), 32, shuffle=True)


def inline(model: Any, optimizer: Any, loader: Any) -> Any:
    def train(callback: Any) -> None:
        losses = []
        for _ in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                callback(len(losses), losses[-1])

    return train


def step_function(model: Any, optimizer: Any, loader: Any) -> Any:
    criterion = nn.CrossEntropyLoss()

    def train_step(inputs: Any, targets: Any, *, scale: float = 1.0) -> float:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = scale * criterion(outputs, targets)
        (loss / 1).backward()
        optimizer.step()
        return loss.item()

    def train(callback: Any) -> None:
        for epoch in range(4):
            for i, (x, y) in enumerate(loader):
                callback(i + epoch * 8, train_step(x.float(), targets=y))

    return train


def class_of_ones_own(model: Any, optimizer: Any, loader: Any) -> Any:
    class Trainer:
        def __init__(self) -> None:
            self.net, self.opt, self.loaders, self.seen = model, optimizer, {"train": loader}, 0

        def loss(self, batch: Any) -> Any:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def fit(self, callback: Any, phase: str = "train") -> None:
            for _ in range(4):
                for batch in self.loaders[phase]:
                    self.opt.zero_grad()
                    total = self.loss(batch)
                    self.seen += len(batch[0])
                    total.backward()
                    self.opt.step()
                    callback(self.seen, total.item())

    return Trainer().fit


def scaler_and_accumulation(model: Any, optimizer: Any, loader: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def train(callback: Any) -> None:
        step = 0
        for _ in range(4):
            for i, batch in enumerate(loader):
                with torch.autocast("cpu", enabled=False):
                    outputs = []
                    for rows in batch[0].chunk(2):
                        outputs.append(model(rows))
                    loss = F.cross_entropy(torch.cat(outputs), batch[1]) / 2
                scaler.scale(loss).backward()
                if i % 2:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    callback(step, loss.item())
                    step += 1

    return train


def dictionary_and_branch(model: Any, optimizer: Any, loader: Any) -> Any:
    def collate(rows: Any) -> Any:
        return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}

    loader.collate_fn = collate

    def train(callback: Any) -> None:
        step = 0
        for _ in range(4):
            for batch in loader:
                batch = {name: value.clone() for name, value in batch.items()}
                out = model(batch["x"])
                if out.dim() > 2:
                    out = out.flatten(1)
                loss, _accuracy = F.cross_entropy(out, batch["y"]), 0
                optimizer.zero_grad(); loss.backward(); optimizer.step()  # fmt: skip # noqa: E702
                callback(step, loss.item())
                step += 1

    return train


LOOPS = [inline, step_function, class_of_ones_own, scaler_and_accumulation, dictionary_and_branch]


def diagnosed(model: Any, optimizer: Any, loader: Any, train: Any, **more: Any) -> Any:
    return nbdebug.diagnose(train, model=model, optimizer=optimizer, train_loader=loader, progress=False, **more)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_tells_its_loss_and_the_cause_is_named(loop: Any) -> None:
    parts = setting()
    report = diagnosed(*parts, loop(*parts))
    assert [f.code for f in report] == ["training/double-softmax"]
    assert "is your loop's own" in " ".join(report.notes) and not any("no loss_fn" in u for u in report.unchecked)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_run_keeps_its_bits(loop: Any) -> None:
    """What is tried between backward and step changes no weight, buffer or random number of the run."""
    ends = []
    for watched in (False, True):
        parts = setting(sick=False)
        torch.manual_seed(5)
        if watched:
            assert diagnosed(*parts, loop(*parts), keep=True).verdict == "healthy"
        else:
            loop(*parts)(lambda step, loss: None)
        ends.append([*copy.deepcopy(parts[0].state_dict()).values(), torch.get_rng_state()])
    assert all(map(torch.equal, *ends))


def of_two_losses(model: Any, optimizer: Any, loader: Any) -> Any:
    def train(callback: Any) -> None:
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            (model.head.weight.square().sum() * 1e-4).backward()
            optimizer.step()
            callback(step, 1.0)

    return train


def of_a_weight_that_grows(model: Any, optimizer: Any, loader: Any) -> Any:
    def train(callback: Any) -> None:
        step = 0
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y) + step / 100 * model.head.weight.square().sum()
                loss.backward()
                optimizer.step()
                callback(step, loss.item())
                step += 1

    return train


def of_a_graph_that_is_kept(model: Any, optimizer: Any, loader: Any) -> Any:
    def train(callback: Any) -> None:
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    return train


def of_other_batches(model: Any, optimizer: Any, loader: Any) -> Any:
    x, y = loader.dataset.tensors

    def train(callback: Any) -> None:
        for step in range(8):
            next(iter(loader))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[:32]), y[:32])
            loss.backward()
            optimizer.step()
            callback(step, loss.item())

    return train


@pytest.mark.parametrize("loop", [of_two_losses, of_a_weight_that_grows, of_a_graph_that_is_kept])
def test_a_loop_that_does_not_tell_has_none(loop: Any) -> None:
    parts = setting(sick=False)
    report = diagnosed(*parts, loop(*parts))
    assert not report.findings and any("no loss_fn" in text for text in report.unchecked)


def test_the_batches_are_those_that_are_trained_on_not_those_that_are_read() -> None:
    parts = setting(sick=False)
    report = diagnosed(*parts, of_other_batches(*parts))
    assert report.ok and not any("no loss_fn" in text for text in report.unchecked)
    assert "batch is your loop's own" in " ".join(str(report.full()).split())


def test_a_cell_with_the_loop_alone() -> None:
    """The commonest notebook: no loss among the variables, a loop at the top of a cell."""
    setup = """
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(0)
        x = torch.randn(256, 6)
        y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4), nn.Softmax(dim=1))
        opt = torch.optim.Adam(net.parameters(), lr=3e-3)
        batches = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    """
    cell = """
        %%diagnose
        running = 0.0
        for epoch in range(4):
            for xb, yb in batches:
                opt.zero_grad()
                loss = F.cross_entropy(net(xb), yb)
                loss.backward()
                opt.step()
                running += loss.item()
    """
    with started(textwrap.dedent(setup)) as book:
        report = book.run(cell).result
    assert [f.code for f in report] == ["training/double-softmax"] and report.findings[0].fixes[0].verified
    assert "`loss` of In [3], line" in " ".join(report.notes)


def test_a_cell_that_makes_its_model_anew_is_not_called_well() -> None:
    setup = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        net = nn.Linear(6, 1)
        opt = torch.optim.Adam(net.parameters(), lr=3e-3)
        batches = DataLoader(TensorDataset(torch.randn(64, 6), torch.randn(64, 1)), 32)
    """
    cell = """
        %%diagnose
        net = nn.Linear(6, 1)
        other = torch.optim.Adam(net.parameters(), lr=3e-3)
        for xb, yb in batches:
            other.zero_grad()
            loss = (net(xb) - yb).square().mean()
            loss.backward()
            other.step()
    """
    with started(textwrap.dedent(setup)) as book:
        report = book.run(cell.replace("%%diagnose", "%%diagnose --model net")).result
    assert report.verdict == "not well, no cause known" and "another model" in str(report)


@pytest.mark.parametrize(
    ("layer", "made"), [("nn.LSTM(8, 8)", "nn.LSTM(8, 8, batch_first=True)"), ("", "nn.TransformerEncoderLayer(8, 2, ")]
)
def test_a_layer_that_takes_the_batch_second_is_made_anew(layer: str, made: str) -> None:
    encoder = "nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 1)"
    setup = f"""
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(0)
        x = torch.randint(0, 12, (192, 5))
        y = x[:, 0] % 3
        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.words = nn.Embedding(12, 8)
                self.layer = {layer or encoder}
                self.head = nn.Linear(8, 3)
            def forward(self, x):
                out = self.layer(self.words(x))
                return self.head((out[0] if isinstance(out, tuple) else out)[:, 0])
        tagger = Tagger()
        opt = torch.optim.Adam(tagger.parameters(), lr=3e-3)
        batches = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    """
    cell = """
        %%diagnose
        for xb, yb in batches:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(tagger(xb), yb)
            loss.backward()
            opt.step()
    """
    with started(textwrap.dedent(setup)) as book:
        report = book.run(cell).result
    (fix,) = report.findings[0].fixes
    assert report.findings[0].code == "training/batch-mixing" and made in fix.code and "batch_first=True" in fix.code
    assert fix.verified


LOOP = """
    %%diagnose
    for epoch in range(5):
        for xb, yb in batches:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(xb), yb)
            loss.backward()
            opt.step()
"""
FAULTS = {
    "zero-grad-missing": ("            opt.zero_grad()\n", "", "+         opt.zero_grad()"),
    "gradients-cleared-before-step": ("            opt.step()\n", "", "+         opt.step()"),
    "lr-too-high": ("lr=0.05", "lr=5.0", "lr="),
    "scheduler-order": (
        "            opt.step()\n",
        "            opt.step()\n            sched.step()\n",
        "sched.step()",
    ),
}


@pytest.mark.parametrize("slug", FAULTS)
def test_a_loop_at_the_top_of_a_cell_runs_again_as_edited(slug: str) -> None:
    setup = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(0)
        y = torch.randint(0, 4, (512,))
        x = 2 * torch.randn(4, 10)[y] + torch.randn(512, 10)
        batches = DataLoader(TensorDataset(x, y), 32, shuffle=True)
        net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.1)
    """
    old, new, seen = FAULTS[slug]
    with started(textwrap.dedent(setup.replace(old, new))) as book:
        before = book.run("[p.detach().clone() for p in net.parameters()]").result
        report = book.run(LOOP.replace(old, new)).result
        after = book.run("list(net.parameters())").result
    assert [f.code for f in report] == [f"training/{slug}"]
    fix = report.findings[0].fixes[0]
    assert fix.verified and fix.edit is not None and seen.strip("+ ") in fix.edit.new
    assert all(map(torch.equal, before, after))


def test_a_loss_that_keeps_a_record_is_left_to_the_loop() -> None:
    """What is tried would stand in the user's own history."""
    model, optimizer, loader = setting()

    class Trainer:
        def __init__(self) -> None:
            self.net, self.history, self.calls = model, [], 0

        def loss(self, batch: Any) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.history.append(loss.item())
            self.calls += 1
            return loss

        def fit(self, callback: Any) -> None:
            for batch in loader:
                optimizer.zero_grad()
                loss = self.loss(batch)
                loss.backward()
                optimizer.step()

    trainer = Trainer()
    report = diagnosed(model, optimizer, loader, trainer.fit)
    assert any("no loss_fn" in text for text in report.unchecked)
    assert len(trainer.history) == trainer.calls == len(loader)


def test_a_penalty_over_an_error_that_is_all_but_gone_is_no_fault() -> None:
    report = nbdebug.diagnose(KINDS["steps_by_closure"]().train, progress=False)
    assert report.verdict == "healthy", report


def test_other_variables_beside_a_loop_without_a_loader_do_not_end_its_watch() -> None:
    """The marks of ends are looked for among them: arrays of text and dates, numbers too large for a tensor, and an
    object that raises at whatever it is asked."""

    class Mute:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(256, 4)
    y = x.sum(1, keepdim=True)

    def train() -> None:
        names, days = np.array(["a", "b"]), np.array(["2020-01-01"], dtype="datetime64[D]")  # noqa: F841
        things, large = np.array([None, {}], dtype=object), [10**30, 2]  # noqa: F841
        mute, reward = Mute(), Mute()  # noqa: F841
        for _ in range(20):
            for i in range(0, 256, 32):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x[i : i + 32]), y[i : i + 32])
                loss.backward()
                optimizer.step()

    report = nbdebug.diagnose(train, progress=False)
    assert report.verdict == "healthy" and not any("Error" in text for text in report.unchecked), report
