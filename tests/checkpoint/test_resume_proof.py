"""resume_proof: loops of many kinds, sick in one thing and healthy; what was not saved is named, the rest is silent."""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import nbdebug
from tests.shell import started

ALL = bool(os.environ.get("NBDEBUG_ALL_TESTS"))
AT, STEPS = 5, 11
X = torch.randn(STEPS, 16, 6, generator=torch.Generator().manual_seed(3))


class Average:
    """A slow copy of the weights, kept by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            self.shadow[name].lerp_(value.detach(), 0.1)


class Rows(IterableDataset):
    """A stream that knows its place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self):
        while True:
            self.place += 1
            yield X[(self.place - 1) % len(X)]


class Noisy(Dataset):
    """Each item with noise of the worker that reads it."""

    def __len__(self) -> int:
        return AT

    def __getitem__(self, at: int) -> torch.Tensor:
        return X[at] + torch.randn(())


class Run:
    """A run with many parts; `uses` says which of them the loop needs, `lacks` what its file does not hold."""

    def __init__(self, uses: str, lacks: tuple[str, ...] = ()) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        drop = nn.Dropout(0.3) if uses == "dropout" else nn.Identity()
        norm = nn.BatchNorm1d(8) if uses == "buffers" else nn.Identity()
        self.uses, self.lacks, self.step, self.rows = uses, lacks, 0, Rows()
        self.model = nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), drop, nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.ema = Average(self.model)
        self.generator = torch.Generator().manual_seed(4)
        self.critic = nn.Linear(1, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.02)
        self._loader, self._batches = DataLoader(Noisy(), None, num_workers=2 * (uses == "workers")), iter(())
        self._stream = iter(self.rows)

    def batch(self) -> torch.Tensor:
        x = X[self.step % STEPS]
        if self.uses == "stream":
            return next(self._stream)
        if self.uses == "shuffle":  # a new order in each step
            return X[torch.randperm(STEPS, generator=self.generator)[0]]
        if self.uses == "workers":
            if self.step % AT == 0:
                self._batches = iter(self._loader)
            return next(self._batches)
        noise = {"python": random.random, "numpy": np.random.rand}.get(self.uses, float)
        return x + noise()

    def train(self) -> float:
        x = self.batch()
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        if self.uses == "scaler":
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            (loss / 4 if self.uses == "accumulation" else loss).backward()
            if self.uses != "accumulation" or self.step % 4 == 3:
                self.optimizer.step()
        if self.uses != "accumulation" or self.step % 4 == 3:
            self.optimizer.zero_grad()
        if self.uses == "two optimizers":
            (self.critic(self.model(x).detach()) - loss.detach()).square().mean().backward()
            self.critic_optimizer.step()
            self.critic_optimizer.zero_grad()
        self.scheduler.step()
        self.ema.update(self.model)
        self.step += 1
        if self.uses == "buffers":
            return self.model[1].running_mean.sum().item()
        return self.ema.shadow["0.weight"].sum().item() if self.uses == "ema" else loss.item()

    def save(self, path: str) -> None:
        names = ("model", "optimizer", "scheduler", "scaler", "critic", "critic_optimizer")
        state = {name: getattr(self, name).state_dict() for name in names}
        if "buffers" in self.lacks:
            state["model"] = dict(self.model.named_parameters())
        state |= {"ema": self.ema.shadow, "generator": self.generator.get_state(), "rng": torch.get_rng_state()}
        state |= {"step": self.step, "python": random.getstate(), "rows": self.rows.place}
        state["numpy"] = [v.tolist() if hasattr(v, "tolist") else v for v in np.random.get_state()]
        state["gradients"] = [p.grad for p in self.model.parameters()]
        torch.save({name: part for name, part in state.items() if name not in self.lacks}, path)

    def load(self, path: str) -> None:
        state = torch.load(path)
        for name in ("model", "optimizer", "scheduler", "scaler", "critic", "critic_optimizer"):
            if name in state:
                part = getattr(self, name)
                part.load_state_dict(state[name], **({"strict": False} if name == "model" else {}))
        self.ema.shadow = state.get("ema", self.ema.shadow)
        self.step = state.get("step", 0)
        self.rows.place = state.get("rows", 0)
        for parameter, gradient in zip(self.model.parameters(), state.get("gradients", ())):
            parameter.grad = gradient
        if "generator" in state:
            self.generator.set_state(state["generator"])
        if "rng" in state:
            torch.set_rng_state(state["rng"])
        if "python" in state:
            random.setstate(eval(repr(state["python"])))
        if "numpy" in state:
            np.random.set_state(tuple(state["numpy"]))


def proof(uses: str, lacks: tuple[str, ...] = (), **options) -> nbdebug.Report:
    options = {"at": AT, "steps": STEPS} | options
    return nbdebug.resume_proof(lambda: Run(uses, lacks), lambda run: run.train(), **options)


KINDS = {
    "dropout": ("rng", "rng-not-restored", "torch"),
    "scaler": ("scaler", "scaler-missing", "scaler"),
    "accumulation": ("gradients", "accumulation-not-resumed", "model"),
    "two optimizers": ("critic_optimizer", "optimizer-missing", "critic_optimizer"),
    "stream": ("rows", "sampler-not-resumed", "rows"),
    "buffers": ("buffers", "state-dict-mismatch", "model"),
}
if ALL:  # the kinds of most of these have patients
    KINDS |= {
        "shuffle": ("generator", "rng-not-restored", "generator"),
        "plain": ("optimizer", "optimizer-missing", "optimizer"),
        "counted": ("step", "step-missing", "step"),
        "scheduled": ("scheduler", "scheduler-missing", "scheduler"),
        "ema": ("ema", "ema-missing", "ema"),
        "workers": ("rng", "rng-not-restored", "torch"),
        "python": ("python", "rng-not-restored", "Python"),
        "numpy": ("numpy", "rng-not-restored", "NumPy"),
    }


@pytest.mark.parametrize("uses", KINDS)
def test_what_was_not_saved_is_named_and_the_whole_file_is_silent(uses) -> None:
    lacks, code, name = KINDS[uses]
    report = proof(uses, (lacks,))
    assert [finding.code.partition("/")[2] for finding in report] == [code], report
    assert name in str(report.findings[0].evidence["where"]) and "Both runs" in [table.title for table in report.tables]
    before = random.getstate(), torch.get_rng_state()
    report = proof(uses)
    assert report.ok and "equals the one that never stopped" in report.headline, report
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


class Loop(Run):
    """Goes on from values and buffers of its own, which are in no state dict."""

    def __init__(self, keeps: bool, uses: str) -> None:
        super().__init__("plain")
        self.keeps, self.uses = keeps, uses
        self.baseline, self.norms, self.buffer = 0.0, [1.0], deque(maxlen=4)
        self.dice, self.noise = random.Random(0), np.random.default_rng(0)

    def batch(self) -> torch.Tensor:
        x = X[self.step % STEPS]
        self.buffer.append(x)
        self.baseline, self.norms = self.baseline + 0.25, [*self.norms, 2.0]
        return {
            "buffer": sum(self.buffer), "baseline": x + self.baseline, "norms": x * sum(self.norms),
            "dice": x + self.dice.random(), "noise": x + self.noise.normal(),
        }[self.uses].float()  # fmt: skip

    def save(self, path: str) -> None:
        super().save(path)
        own = {"baseline": self.baseline, "norms": self.norms, "buffer": [*self.buffer]} if self.keeps else {}
        if self.keeps:
            own |= {"dice": self.dice.getstate(), "noise": self.noise.bit_generator.state}
        torch.save(torch.load(path, weights_only=False) | own, path)

    def load(self, path: str) -> None:
        super().load(path)
        state = torch.load(path, weights_only=False)
        if self.keeps:
            self.baseline, self.norms = state["baseline"], state["norms"]
            self.buffer.extend(state["buffer"])
            self.dice.setstate(state["dice"])
            self.noise.bit_generator.state = state["noise"]


LOOPS = {
    "baseline": "run.baseline = state['baseline']", "norms": "run.norms = state['norms']",
    "buffer": "run.buffer = state['buffer']", "dice": "run.dice.setstate(state['dice'])",
    "noise": "run.noise.bit_generator.state = state['noise']",
}  # fmt: skip


@pytest.mark.parametrize("uses", LOOPS if ALL else ["baseline", "dice"])
def test_a_value_of_the_loop_gets_the_lines_that_keep_it(uses) -> None:
    def ask(keeps: bool) -> nbdebug.Report:
        return nbdebug.resume_proof(lambda: Loop(keeps, uses), lambda run: run.train(), at=AT, steps=STEPS)

    (finding,) = ask(False)
    assert LOOPS[uses].replace("run.", "self.") in finding.fixes[0].code.replace("run.", "self."), finding.fixes
    assert ask(True).ok


def test_a_part_that_the_run_does_not_need_is_not_missed() -> None:
    assert proof("plain", ("rng", "python", "numpy", "generator", "scaler", "ema", "rows", "critic_optimizer")).ok


def test_a_run_without_methods_is_saved_whole_by_our_own_writer() -> None:
    def step(run):
        loss = run["net"](X[0]).square().mean() * torch.rand((), generator=run["dice"])
        run["opt"].zero_grad()
        loss.backward()
        run["opt"].step()

    def build():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(), nn.Linear(4, 1))
        return {"net": net, "opt": torch.optim.Adam(net.parameters()), "dice": torch.Generator()}

    assert nbdebug.resume_proof(build, step, at=3, steps=6).ok
    weights = (
        (lambda run, path: torch.save(run["net"].state_dict(), path)),
        (lambda run, path: run["net"].load_state_dict(torch.load(path))),
    )
    codes = {f.code for f in nbdebug.resume_proof(build, step, at=3, steps=6, save=weights[0], load=weights[1])}
    assert codes == {"checkpoint/optimizer-missing", "checkpoint/rng-not-restored"}
    with pytest.raises(ValueError, match="0 < at < steps"):
        nbdebug.resume_proof(build, step, at=6, steps=6)
    with pytest.raises(TypeError, match="no way to save"):
        nbdebug.resume_proof(lambda: [1], lambda run: None, at=3, steps=6)
    with pytest.raises(TypeError, match="needs step"):
        nbdebug.resume_proof(lambda: [1], at=3, steps=6)


def test_two_things_at_once_are_both_named() -> None:
    report = proof("dropout", ("rng", "optimizer"))
    assert {f.code for f in report} == {"checkpoint/rng-not-restored", "checkpoint/optimizer-missing"}


def test_a_run_that_does_not_repeat_says_so_first(tmp_path) -> None:
    torch.save({"model": nn.Linear(2, 1).state_dict()}, tmp_path / "run.pt")

    def anything(path=None):
        return [int.from_bytes(os.urandom(4), "little")]

    report = nbdebug.resume_proof(anything, anything, tmp_path / "run.pt")
    assert not report.ok and not report.findings and "does not repeat" in report.headline


@pytest.mark.parametrize("sick", [True, False])
def test_a_shuffled_loader_in_the_middle_of_its_epoch(sick, tmp_path) -> None:
    data = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(0)))

    def train(model, optimizer, skip, last):
        seen = []
        loader = DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(8))
        for place, (x,) in enumerate(loader):
            if place < skip:
                continue
            if place == last:
                break
            loss = model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    def fresh():
        torch.manual_seed(2)
        model = nn.Linear(3, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    model, optimizer = fresh()
    train(model, optimizer, 0, 5)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}
    torch.save(copy.deepcopy(state), tmp_path / "run.pt")

    def resumed(path):
        model, optimizer = fresh()
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return train(model, optimizer, 0, 7) if sick else train(model, optimizer, 5, 12)

    def uninterrupted():
        return train(*fresh(), 0, 12)[5:]

    report = nbdebug.resume_proof(resumed, uninterrupted, tmp_path / "run.pt")
    assert [f.code for f in report] == (["checkpoint/sampler-not-resumed"] if sick else [])
    assert not sick or "batch 0 of the other run" in report.findings[0].title


@pytest.mark.parametrize("form", ["a variable", "parts of a dict"])
def test_weights_kept_without_a_copy_are_those_of_the_end(form, tmp_path) -> None:
    x = X[:2].reshape(-1, 6)

    def fresh():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 1)

    def score(body, head):
        with torch.no_grad():
            return (head(body(x)) - 0.2 * x.sum(1, keepdim=True)).square().mean().item()

    def train(copied):
        body, head = fresh()
        optimizer, best, kept = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.5), 1e9, None
        for _ in range(12):
            loss = (head(body(x)) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if score(body, head) < best:
                best = score(body, head)
                if form == "a variable":
                    kept = nn.Sequential(body, head).state_dict()
                else:
                    kept = {"body": dict(body.state_dict()), "head": dict(head.state_dict())}
                kept = copy.deepcopy(kept) if copied else kept
        return best, kept

    def resumed(path):
        body, head, state = *fresh(), torch.load(path)
        if "body" in state:
            body.load_state_dict(state["body"])
            head.load_state_dict(state["head"])
        else:
            nn.Sequential(body, head).load_state_dict(state)
        return [score(body, head)]

    for copied, codes in ((False, ["notebook/shared-object"]), (True, [])):
        torch.save(train(copied)[1], tmp_path / "best.pt")
        report = nbdebug.resume_proof(resumed, lambda copied=copied: [train(copied)[0]], tmp_path / "best.pt")
        assert [f.code for f in report] == codes, report
        assert (
            copied or "deepcopy" in report.findings[0].fixes[0].code and "state_dict" in report.findings[0].where.text
        )


class Slow:
    """An average in an object of its own, whose rate depends on how often it was updated."""

    def __init__(self, model: nn.Module) -> None:
        self.module, self.updates = copy.deepcopy(model), 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for a, b in zip(self.module.parameters(), model.parameters()):
            a.data.lerp_(b.detach(), 1 / self.updates)


@pytest.mark.parametrize("reads", [("module", "updates"), ("updates",), ("module",), ()])
def test_an_average_in_an_object_among_the_parts_of_a_run(reads) -> None:
    def build():
        torch.manual_seed(1)
        model = nn.Linear(6, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "average": Slow(model)}

    def step(run):
        loss = run["model"](X[0]).square().mean()
        run["optimizer"].zero_grad()
        loss.backward()
        run["optimizer"].step()
        run["average"].update(run["model"])
        return run["average"].module(X[0]).sum().item()

    def save(run, path):
        slow = {"module": run["average"].module.state_dict(), "updates": run["average"].updates}
        torch.save({"model": run["model"].state_dict(), "optimizer": run["optimizer"].state_dict(), "slow": slow}, path)

    def load(run, path):
        state = torch.load(path)
        run["model"].load_state_dict(state["model"])
        run["average"] = Slow(run["model"])
        if "module" in reads:
            run["average"].module.load_state_dict(state["slow"]["module"])
        if "updates" in reads:
            run["average"].updates = state["slow"]["updates"]

    report = nbdebug.resume_proof(build, step, at=4, steps=8, save=save, load=load)
    codes = {"module": "checkpoint/ema-missing", "updates": "checkpoint/step-missing"}
    assert [f.code for f in report] == [code for part, code in codes.items() if part not in reads], report


def test_a_broken_file_is_told_before_anything_runs(tmp_path) -> None:
    (tmp_path / "run.pt").write_bytes(b"")
    report = nbdebug.resume_proof(lambda path: [], lambda: pytest.fail("it ran"), tmp_path / "run.pt")
    assert [f.code for f in report] == ["checkpoint/truncated-file"]


def test_the_users_error_comes_through_and_the_magic_answers(tmp_path) -> None:
    torch.save({"model": nn.Linear(2, 1).state_dict()}, tmp_path / "run.pt")
    with pytest.raises(KeyError, match="optimizer"):
        nbdebug.resume_proof(lambda path: torch.load(path)["optimizer"], lambda: [1], tmp_path / "run.pt")
    setup = (
        f"import torch\npath = {str(tmp_path / 'run.pt')!r}\ndef go_on(path): return [1, 2]\ndef whole(): return [1, 2]"
    )
    with started(setup) as book:
        assert book.run("%resume_proof go_on whole path").result.ok
        assert "UsageError" in book.run("%resume_proof go_on nothing path").printed
        assert "at=30" in book.run("%resume_proof go_on whole --at 30").printed


def gpt(dropout: float = 0.0, **arguments):
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=32,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=dropout,
            attn_pdrop=0,
            embd_pdrop=0,
        )
    )
    dice = torch.Generator().manual_seed(1)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (40, 8), generator=dice)]
    options = {
        "max_steps": 9,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "report_to": [],
        "learning_rate": 0.01,
    }
    folder = tempfile.mkdtemp()
    arguments = transformers.TrainingArguments(folder, logging_strategy="no", **options, **arguments)
    return transformers.Trainer(model, arguments, train_dataset=data)


def fitted(dropout: float = 0.0, shuffle: bool = False, weights: bool = False):
    pl = pytest.importorskip("pytorch_lightning")

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 1))

        def training_step(self, batch, place):
            return (self.net(batch[0]) - 1).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}

    pl.seed_everything(3)
    saving = pl.callbacks.ModelCheckpoint(tempfile.mkdtemp(), save_weights_only=weights)
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return (
        pl.Trainer(max_epochs=9, callbacks=[saving], **options),
        Net(),
        DataLoader(TensorDataset(X[0]), 4, shuffle=shuffle),
    )


class Accelerated:
    def __init__(self, *lacks: str) -> None:
        accelerate = pytest.importorskip("accelerate")
        accelerate.utils.set_seed(1)
        self.accelerator = accelerate.Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        parts = {"model": model, "optimizer": optimizer, "rate": rate}
        prepared = [self.accelerator.prepare(p) if name not in lacks else p for name, p in parts.items()]
        self.model, self.optimizer, self.rate = prepared
        self.step = 0

    def train(self) -> None:
        x = X[torch.randint(0, STEPS, ())]
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rate.step()


LIBRARIES = {
    "transformers": (lambda **k: nbdebug.resume_proof(lambda: gpt(**k), at=3, steps=7), {"dropout": 0.1}),
    "Lightning": (lambda **k: nbdebug.resume_proof(lambda: fitted(**k), at=8, steps=12), {}),
    "accelerate": (
        lambda lacks=(): nbdebug.resume_proof(lambda: Accelerated(*lacks), lambda run: run.train(), at=3, steps=7),
        {},
    ),
}
SICK = [
    ("transformers", {"save_only_model": True}, ["optimizer-missing", "scheduler-missing"]),
    ("transformers", {"ignore_data_skip": True}, ["sampler-not-resumed"]),
    ("Lightning", {"dropout": 0.3}, ["rng-not-restored"]),
    ("Lightning", {"shuffle": True}, ["rng-not-restored"]),
    ("Lightning", {"weights": True}, ["optimizer-missing"]),
    ("accelerate", {"lacks": ("rate",)}, ["scheduler-missing"]),
    ("accelerate", {"lacks": ("optimizer", "rate")}, ["optimizer-missing", "scheduler-missing"]),
]


@pytest.mark.skipif(not ALL, reason="minutes: with NBDEBUG_ALL_TESTS")
@pytest.mark.parametrize(("library", "fault", "codes"), SICK)
def test_the_saving_of_a_library(library, fault, codes) -> None:
    ask, options = LIBRARIES[library]
    assert [finding.code.partition("/")[2] for finding in ask(**fault)] == codes
    report = ask(**options)
    assert report.ok, report


def test_what_a_file_lacks_is_named_where_the_users_way_to_load_it_allows_that(tmp_path) -> None:
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def trained():
        model = network()
        model(5 + torch.arange(24.0).reshape(8, 3))
        return model

    def resumed(path):
        model = network()
        model.load_state_dict(torch.load(path), strict=False)
        return [model.eval()(torch.ones(2, 3)).sum().item()]

    torch.save(dict(trained().named_parameters()), tmp_path / "net.pt")
    report = nbdebug.resume_proof(
        resumed, lambda: [trained().eval()(torch.ones(2, 3)).sum().item()], tmp_path / "net.pt", model=network()
    )
    assert [f.code for f in report.findings] == ["error/state-dict-mismatch"]
    assert "running_mean" in report.findings[0].title


@pytest.mark.parametrize("switched", [False, True])
def test_a_loaded_model_that_predicts_in_train_mode(switched, tmp_path) -> None:
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def resumed(path):
        model = network()
        model.load_state_dict(torch.load(path))
        return (model.eval() if switched else model)(X[0]).flatten().tolist()

    torch.save(network().state_dict(), tmp_path / "net.pt")
    report = nbdebug.resume_proof(
        resumed, lambda: network().eval()(X[0]).flatten().tolist(), tmp_path / "net.pt", model=network()
    )
    assert [f.code for f in report] == ["training/train-mode-in-eval"] * (not switched), report
    assert switched or report.findings[0].fixes[0].code.endswith("model.eval()")
