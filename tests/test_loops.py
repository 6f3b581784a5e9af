"""Trainings whose parts an object holds, and whose optimizer is made late: `tests/loops.py` has the whole table."""

from __future__ import annotations

import builtins
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.arguments import discover, part
from tests import loops
from tests.shell import started

OWN = """
import torch
from torch import nn
class Run:
    def __init__(self):
        self.net = nn.Linear(3, 1)
        self.optim = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.batches = torch.utils.data.DataLoader([(torch.ones(3), torch.ones(1))] * 8, batch_size=4)
        self.val_batches = torch.utils.data.DataLoader([(torch.ones(3), torch.ones(1))] * 8, batch_size=2)
    def compute_loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
run = Run()
stray = nn.Linear(2, 2)
"""
SAMPLE = [
    ("nan_trace", loops.NONFINITE[0]),
    ("guard", loops.NONFINITE[1]),
    ("preflight", loops.TRAINED[0]),
    ("explain", loops.RAISED[0]),
    ("diagnose", loops.TRAINED[0]),
]
"""Of the table what each time is tested: it takes half a minute."""


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    loops.quiet()


@pytest.mark.parametrize(("tool", "failure"), SAMPLE)
def test_the_answer_is_that_of_a_plain_loop(tool: str, failure: str, tmp_path: pathlib.Path) -> None:
    others = [loop for loop in loops.LOOPS if loop != "plain" and loops.available(loop)]
    for (_, _, loop), (same, difference) in loops.table([tool], others, tmp_path, [failure]).items():
        assert same, (loop, difference)


def test_the_parts_of_an_object_are_taken_by_the_expression_for_them() -> None:
    with started(OWN) as book:
        names = book.shell.user_ns
        run = names["run"]
        assert discover("optimizer", names) == {"run.optim": run.optim}
        assert part("train_loader", names) == ("run.batches", run.batches)
        assert part("val_loader", names) == ("run.val_batches", run.val_batches)
        name, loss = part("loss_fn", names)
        other = nn.Linear(3, 1)
        batch = torch.ones(2, 3), torch.ones(2, 1)
        assert name == "run.compute_loss" and run.net is not other
        assert torch.equal(loss(other, batch), nn.functional.mse_loss(other(batch[0]), batch[1]))
        assert run.net is not other, "another model takes its place for the time of a call"
        told = book.run("%guard on").printed
        assert "models `stray`, `run.net` and optimizer `run.optim`" in told


def test_the_functions_take_the_trainer_that_holds_the_model() -> None:
    with started(OWN) as book:
        run = book.shell.user_ns["run"]
    report = nbdebug.preflight(run)
    assert "a model of type Linear, trained by SGD" in report.subject and "loss_fn(model, batch)" in report.subject
    with nbdebug.guard(run) as guard, nbdebug.grad_watch(run) as watch:
        run.optim.zero_grad()
        run.compute_loss((torch.ones(4, 3), torch.ones(4, 1))).backward()
        run.optim.step()
    assert guard.steps == watch.steps == 1
    with pytest.raises(TypeError, match="got 'run'"):
        nbdebug.guard("run")


def test_a_model_that_computes_its_loss_itself_is_asked_for_it() -> None:
    class Labelled(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            out = super().forward(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    model = Labelled(2, 1)
    name, loss = part("loss_fn", {"model": model})
    batch = {"x": torch.ones(3, 2), "labels": torch.zeros(3, 1)}
    assert name == "model(**batch).loss" and torch.equal(loss(model, batch), model(**batch)["loss"])


def test_a_watch_waits_for_the_optimizer_and_takes_the_one_that_replaces_it() -> None:
    with started("import torch\nfrom torch import nn\nnet = nn.Linear(2, 1)\nother = nn.Linear(2, 1)") as book:
        book.run("""\
            def fit(model, steps=2, bad=False):
                opt = torch.optim.Adam(model.parameters())
                for _ in range(steps):
                    opt.zero_grad()
                    (model(torch.ones(4, 2)).mean() / (0 if bad else 1)).backward()
                    opt.step()
            """)
        assert "no optimizer yet" in book.run("%guard on --model net").printed
        assert "none yet" in book.run("%guard").result.subject
        book.run("fit(other)\nfit(net)\nfit(net, 3)")
        report = book.run("%guard").result
        assert report.steps == 5 and report.subject.endswith("taken at their first step: Adam")
        before = book.shell.user_ns["net"].weight.clone()
        done = book.run("fit(net, bad=True)")
        assert isinstance(done.error, nbdebug.NonFiniteStep), "the first step of a new optimizer is guarded"
        assert torch.equal(before, book.shell.user_ns["net"].weight)
        book.run("net = nn.Linear(2, 1)")
        assert "Your names stand for new objects" in book.run("fit(net)").printed
        assert isinstance(book.run("fit(net, bad=True)").error, nbdebug.NonFiniteStep)


def test_diagnose_finds_the_optimizer_in_the_loop_and_puts_everything_back() -> None:
    net = nn.Linear(2, 1)
    data = [(torch.randn(8, 2), torch.zeros(8, 1)) for _ in range(6)]
    made = []

    def train(callback: object) -> None:
        made.append(torch.optim.Adam(net.parameters(), lr=1e-2))
        for x, y in data:
            made[-1].zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            made[-1].step()

    before = net.weight.clone()
    report = nbdebug.diagnose(train, model=net, loss_fn=nn.MSELoss(), train_loader=data, progress=False)
    assert "trained by Adam" in report.subject and len(made) == 1 and not made[0].state
    assert torch.equal(before, net.weight)


@pytest.mark.parametrize("loop", ["transformers", "Lightning"])
def test_a_callback_guards_a_training(loop: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip(loops.NEEDS[loop])
    added = "trainer.add_callback" if loop == "transformers" else "trainer.callbacks.append"
    with loops.notebook(loop, loops.NONFINITE[0], tmp_path) as book:
        book.run(f"from nbdebug.integrations.{loop.lower()} import GuardCallback\nguarding = GuardCallback()")
        book.run(f"{added}(guarding)")
        done = book.run("train()")
        assert isinstance(done.error, nbdebug.NonFiniteStep)
        report = book.run("guarding.report()").result
        assert report.findings[0].code == "nan/log-of-nonpositive"
        assert [item.index for item in report.findings[0].where.items] == [13]
        book.run("Rows.__getitem__ = lambda self, i: (torch.ones(4), torch.ones(1))")
        assert book.run("train()").error is None
        assert book.run("guarding.report()").result.ok and not book.run("guarding.guard.active").result


def test_labels_that_are_all_ignored_are_told_in_the_users_terms(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert transformers.__version__
    with started(f"""
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        ids = torch.arange(6) + i
        return {{"input_ids": ids, "labels": ids if i != 5 else torch.full_like(ids, -100)}}
config = GPT2Config(vocab_size=20, n_positions=6, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        {tmp_path.as_posix()!r}, per_device_train_batch_size=1, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no", use_cpu=True, num_train_epochs=1,
    ),
    train_dataset=Texts(),
)
""") as book:
        state = torch.get_rng_state()
        name, loader = part("train_loader", book.shell.user_ns)
        assert name == "trainer.get_train_dataloader()" and len(loader) == 8
        assert torch.equal(state, torch.get_rng_state())
        finding = book.run("%%nan_trace\ntrainer.train()").result.findings[0]
    assert finding.code == "nan/all-labels-ignored" and "-100" in finding.title
    assert "transformers/loss" in str(finding.where.library) and finding.where.text == "trainer.train()"
    assert [item.index for item in finding.where.items] == [5] and "labels" in finding.fixes[0].code


def test_no_trainer_is_imported_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], builtins.__import__

    def importing(name: str, *more: Any, **named: Any) -> Any:
        asked.append(name.partition(".")[0])
        return real(name, *more, **named)

    with started(OWN) as book:
        monkeypatch.setattr(builtins, "__import__", importing)
        assert book.run("%guard on").error is None and book.run("%guard off").error is None
        assert part("loss_fn", book.shell.user_ns)[0] == "run.compute_loss"
    assert not {"transformers", "accelerate", "pytorch_lightning", "lightning"} & set(asked)


@pytest.mark.skipif(not loops.available("transformers"), reason="needs transformers")
def test_a_trainer_s_own_train_is_a_loop(tmp_path: pathlib.Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.linear(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    x = torch.randn(64, 8)
    rows = [{"x": row, "labels": label} for row, label in zip(x, (x @ torch.randn(8, 3)).argmax(1), strict=True)]
    options = {"learning_rate": 0.05, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    trainer = Trainer(Net(), TrainingArguments(str(tmp_path), **options), train_dataset=rows)
    before = nbdebug.preflight(trainer)  # its optimizer is still to be made
    assert before.verdict == "healthy" and "AdamW" in before.subject
    report = nbdebug.diagnose(trainer.train, progress=False)
    assert report.verdict == "healthy" and report.steps == 24
    assert not any("optimizer" in text for text in report.unchecked), "it has stepped, and was watched"
    assert nbdebug.preflight(trainer.train).verdict == "healthy"


@pytest.mark.skipif(not loops.available("transformers"), reason="needs transformers")
@pytest.mark.parametrize(
    ("rate", "epochs", "code", "told"),
    [
        (50.0, 4, "training/lr-too-high", "TrainingArguments(..., learning_rate=0.5)"),
        (0.01, 20, "training/overfit", "EarlyStoppingCallback(early_stopping_patience=3)"),
    ],
)
def test_what_a_trainer_needs_is_told_in_its_own_arguments(
    tmp_path: pathlib.Path, rate: float, epochs: int, code: str, told: str
) -> None:
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 3))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layers(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    x = torch.randn(128, 20)
    labels = (x[:, :3] + 1.5 * torch.randn(128, 3)).argmax(1)
    rows = [{"x": row, "labels": label} for row, label in zip(x, labels, strict=True)]
    options = {"lr_scheduler_type": "constant", "max_grad_norm": 0, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(
        str(tmp_path),
        learning_rate=rate,
        num_train_epochs=epochs,
        optim="sgd" if rate > 1 else "adamw_torch",
        use_cpu=True,
        **options,
    )
    trainer = Trainer(Net(), arguments, train_dataset=rows[:64], eval_dataset=rows[64:])
    report = nbdebug.diagnose(trainer.train, progress=False)
    assert report.findings[0].code == code
    assert told in report.findings[0].fixes[0].code


@pytest.mark.skipif(not loops.available("Lightning"), reason="needs Lightning")
def test_lightning_s_passes_are_counted_though_it_stops_at_the_last_batch() -> None:
    """It never asks for one batch more: all passes were taken for one, and its repeated samples for unseen ones."""
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 3))

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
            self.log("val_loss", self.training_step(batch, index))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    torch.manual_seed(0)
    x = torch.randn(128, 20)
    labels = (x[:, :3] + 1.5 * torch.randn(128, 3)).argmax(1)
    train = DataLoader(TensorDataset(x[:64], labels[:64]), 8, shuffle=True)
    val = DataLoader(TensorDataset(x[64:], labels[64:]), 32)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=20, enable_model_summary=False, accelerator="cpu", **quiet)
    model = Net()
    report = nbdebug.diagnose(lambda: trainer.fit(model, train, val), progress=False)
    assert [finding.code for finding in report.findings] == ["training/overfit"]
    assert 'EarlyStopping("val_loss")' in report.findings[0].fixes[0].code


def test_samples_that_a_loop_reads_again_are_none_that_it_has_not_seen() -> None:
    """A loop that leaves each pass early: no pass is whole, and the halves of an experiment must not share samples."""
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.randn(128, 20)
    labels = (x[:, :3] + 1.5 * torch.randn(128, 3)).argmax(1)
    train = DataLoader(TensorDataset(x[:64], labels[:64]), 8, shuffle=True)
    val = DataLoader(TensorDataset(x[64:], labels[64:]), 32)
    net = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 3))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)

    def loop() -> None:
        for _ in range(23):
            for index, (rows, answers) in enumerate(train):
                if index == 5:
                    break
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(rows), answers).backward()
                optimizer.step()

    report = nbdebug.diagnose(loop, model=net, train_loader=train, val_loader=val, progress=False)
    assert [finding.code for finding in report.findings] == ["training/overfit"]
