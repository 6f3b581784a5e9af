"""The same failures in the loops that people have: `python -m tests.loops [TOOL ...]` prints the table.

Each failure is a change of one training (data set, model), which six loops run: a plain loop, a class of one's own,
transformers' Trainer, Lightning, accelerate, and a `fit()` in an imported file. A tool gets no argument. It passes
where it answers as in the plain loop: the same causes, the same line of the user's, the same item of the data set.
With `--cuda` model and batches are on a GPU, as the libraries have it there by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import pathlib
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from nbdebug.report import Report
from tests.shell import Notebook, started

TRAINING = """
import torch
from torch import nn
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i)).abs() + 0.1
        y = x.sum(0, keepdim=True) / 2
        {item}
        return x, y
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = []
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        {init}
    def forward(self, x):
        h = torch.relu(self.first(torch.log(x)))
        {forward}
        return self.last(h)
torch.manual_seed(0)
rows = Rows()
"""

FAILURES = {
    "a row that log refuses": {"item": "x = x - 5 if i == 13 else x"},
    "a label that is inf": {"item": "y = y * float('inf') if i == 21 else y"},
    "weights of zero": {"init": "[nn.init.zeros_(p) for p in self.parameters()]"},
    "shapes that broadcast": {"forward": "return self.last(h).squeeze(-1)"},
    "labels of a billion": {"item": "y = y * 1e9 if i % 5 == 0 else y"},
    "an inf gradient": {"forward": "h = h + torch.sqrt(self.last.bias * 0)"},
    "too large for float16": {"forward": "h = self.last.weight * (h * 3e5 @ torch.eye(8, device=h.device)) / 3e5"},
    "a sum too large for float16": {
        "forward": "h = h + (h * 0 + 3e4) @ torch.eye(8, device=h.device) @ torch.ones(8, 8, device=h.device) * 1e-9"
    },
    "a wide layer": {"init": "self.first, self.last = nn.Linear(4, 400), nn.Linear(400, 1)"},
    "many layers": {
        "init": "self.deep = nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)])",
        "forward": "h = self.deep(h)",
    },
    "outputs that are kept": {"forward": "self.kept.append(h)"},
    "graphs that are kept": {"forward": "self.kept += [(h * h).sum()]"},
    "a layer that does not fit": {"init": "self.last = nn.Linear(9, 1)"},
    "an index beyond the end": {"forward": "h = h[:, [0, 1, 2, 3, 4, 5, 6, 8]]"},
    "a large output": {"item": "self.x = torch.ones(2000, 2000)"},
    "a class that was run again": {},
    "a data set that was run again": {},
}

LOOPS = {
    "plain": """
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
criterion = nn.MSELoss()
def train():
    for x, y in loader:
        opt.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        opt.step()
""",
    "own class": """
class Experiment:
    def __init__(self):
        self.net = Net()
        self.optim = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.data = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    def compute_loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)
    def run(self):
        for batch in self.data:
            self.optim.zero_grad()
            loss = self.compute_loss(batch)
            loss.backward()
            self.optim.step()
exp = Experiment()
def train():
    exp.run()
""",
    "transformers": """
from transformers import Trainer, TrainingArguments
class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def forward(self, x, labels=None):
        out = self.net(x)
        return {{"loss": nn.functional.mse_loss(out, labels), "logits": out}}
def collate(items):
    return {{"x": torch.stack([x for x, _ in items]), "labels": torch.stack([y for _, y in items])}}
args = TrainingArguments(
    "{folder}", per_device_train_batch_size=8, num_train_epochs=1, learning_rate=0.01, optim="sgd",
    lr_scheduler_type="constant", max_grad_norm=0, report_to=[], save_strategy="no", logging_strategy="no",
    disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
)
trainer = Trainer(model=Labelled(), args=args, train_dataset=rows, data_collator=collate)
def train():
    trainer.train()
""",
    "Lightning": """
import pytorch_lightning as pl
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
module = Module()
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
trainer = pl.Trainer(
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    accelerator="cpu",
)
def train():
    trainer.fit(module, loader)
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net = Net()
net, opt, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), lr=0.01), torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
)
criterion = nn.MSELoss()
def train():
    for x, y in loader:
        opt.zero_grad()
        loss = criterion(net(x), y)
        accelerator.backward(loss)
        opt.step()
""",
    "fit() in a file": """
import sys
sys.path.insert(0, "{folder}")
from fitting_of_loops import fit
net = Net()
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
def train():
    fit(net, loader)
""",
}
FITTING = """
import torch
criterion = torch.nn.MSELoss()
def fit(net, loader, lr=0.01):
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    for x, y in loader:
        opt.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        opt.step()
"""
OWN_LOOPS = ("plain", "own class", "fit() in a file")
ON_A_CARD = {
    "net = Net()": "net = Net().cuda()",
    "net(x), y)": "net(x.cuda()), y.cuda())",
    "use_cpu=True": "use_cpu=False",
    'accelerator="cpu"': 'accelerator="gpu", devices=1',
    "Accelerator(cpu=True)": "Accelerator()",
}
"""What a loop on a GPU says otherwise; the first two are said by people, where no library moves model and batch."""


def on_a_card(loop: str, text: str) -> str:
    for said, instead in list(ON_A_CARD.items())[0 if loop in OWN_LOOPS else 2 :]:
        text = text.replace(said, instead)
    return text


NEEDS = {"transformers": "transformers", "Lightning": "pytorch_lightning", "accelerate": "accelerate"}

AGAIN = {
    "a class that was run again": f"class Net{TRAINING.partition('class Net')[2].partition('torch.manual')[0]}",
    "a data set that was run again": f"class Rows{TRAINING.partition('class Rows')[2].partition('class Net')[0]}",
}
NONFINITE = "a row that log refuses", "a label that is inf"
TRAINED = "weights of zero", "shapes that broadcast"
RAISED = "a layer that does not fit", "an index beyond the end"
TOOLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nan_trace": (NONFINITE, ("%%nan_trace\ntrain()",)),
    "guard": (NONFINITE, ("%guard on", "train()", "%guard off")),
    "grad_watch": (
        ("labels of a billion", "an inf gradient"),
        ("%grad_watch on", "train()", "%grad_watch off"),
    ),
    "preflight": (TRAINED, ("%preflight",)),
    "diagnose": (TRAINED, ("%%diagnose\ntrain()",)),
    "precision": (("too large for float16", "a sum too large for float16"), ("%precision",)),
    "mem": (("outputs that are kept", "graphs that are kept"), ("%%mem\ntrain()",)),
    "fit": (("a wide layer", "many layers"), ("%fit --memory 20KiB",)),
    "free": (("a layer that does not fit", "a large output"), ("train()", "rows.x", "%free")),
    "explain": (RAISED, ("train()", "%explain")),
    "stop_at": (
        NONFINITE,
        ("stop = %stop_at Linear --when 'not inp.isfinite().all() or inp.max() > 0'", "train()", "stop"),
    ),
    "step_through": (NONFINITE, ("step = %step_through", "step.next()", "step.inputs", "%step_through --abandon")),
    "check_notebook": (tuple(AGAIN), ("{again}", "train()", "%check_notebook")),
}
"""For each tool its failures, and the cells that ask it; the last report that a cell gives is the answer."""


@contextlib.contextmanager
def notebook(loop: str, failure: str, folder: pathlib.Path, card: bool = False) -> Iterator[Notebook]:
    """A shell in which a broken training stands ready."""
    slots = dict.fromkeys(("item", "init", "forward"), "pass") | FAILURES[failure]
    text, fitting = LOOPS[loop].format(folder=folder.as_posix()), FITTING
    if card:
        text, fitting = on_a_card(loop, text), on_a_card(loop, fitting)
    (folder / "fitting_of_loops.py").write_text(fitting)
    sys.modules.pop("fitting_of_loops", None)
    with started(TRAINING.format(**slots) + text) as book:
        yield book


def answer(tool: str, loop: str, failure: str, folder: pathlib.Path, card: bool = False) -> tuple[Any, str]:
    """(what is compared with the plain loop, an error of ours)."""
    given, fault = None, ""
    with notebook(loop, failure, folder, card) as book:
        for cell in TOOLS[tool][1]:
            if cell == "{again}":
                cell = AGAIN[failure].format(item="x = x * 2", init="pass", forward="h = h * 2")
            done = book.run(cell)
            if type(done.error).__name__ == "UsageError":
                return None, str(done.error)
            given = _essence(tool, done.result) or given
    return given, fault


def _essence(tool: str, result: Any) -> Any:
    if isinstance(result, Report):
        findings = [(f.code, _line(f.where), tuple(i.index for i in f.where.items or ())) for f in result.findings]
        held = [str(row[0]) for table in result.tables for row in table.rows] if tool == "free" else []
        return findings or [(row, None, ()) for row in held] or [("no cause", result.verdict, ())]
    if tool == "stop_at" and hasattr(result, "records"):
        return [("stopped", len(result.records) > 0, ())]
    if tool == "step_through" and isinstance(result, dict) | isinstance(result, (list, tuple)) and len(result):
        return [("inputs", "", ())]
    return None


def _line(where: Any) -> str | None:
    """The user's line, where it is one that all loops share: of the data set or the model."""
    return where.text if where.text and where.text in TRAINED_LINES else None


TRAINED_LINES = {line.strip() for line in TRAINING.splitlines()} | {t for f in FAILURES.values() for t in f.values()}


def _same(other: Any, plain: Any) -> bool:
    """The same causes, items, and lines."""
    if other is None or plain is None or len(other) != len(plain):
        return False
    pairs = zip(other, plain, strict=True)
    return all((a[0], a[2]) == (b[0], b[2]) and a[1] == b[1] for a, b in pairs)


def available(loop: str) -> bool:
    return loop not in NEEDS or importlib.util.find_spec(NEEDS[loop]) is not None


def table(
    tools: Iterable[str],
    loops: Iterable[str],
    folder: pathlib.Path,
    failures: Iterable[str] = tuple(FAILURES),
    card: bool = False,
) -> dict[tuple[str, str, str], tuple[bool, str]]:
    """{(tool, failure, loop): (whether it answers as in the plain loop, else what is different)}."""
    results = {}
    for tool in tools:
        for failure in [failure for failure in TOOLS[tool][0] if failure in failures]:
            if (
                card and failure == "an index beyond the end"
            ):  # a device-side assert: the process can't use the GPU again
                continue
            plain, fault = answer(tool, "plain", failure, folder, card)
            results[tool, failure, "plain"] = plain is not None and not fault, fault or str(plain)
            for loop in loops:
                other, fault = answer(tool, loop, failure, folder, card)
                same = _same(other, plain) and not fault
                results[tool, failure, loop] = same, "" if same else fault or f"{other}, in a plain loop {plain}"
    return results


def quiet() -> None:
    """Libraries say much while they train."""
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", help="default: all")
    parser.add_argument("--loop", action="append", help="default: all")
    parser.add_argument("--cuda", action="store_true", help="on a GPU")
    parser.add_argument("-v", action="store_true", help="also what was answered")
    args = parser.parse_args()
    quiet()
    loops = [loop for loop in args.loop or LOOPS if loop != "plain" and available(loop)]
    failed = total = 0
    print(f"{'':16}" + "".join(f"{loop:>16}" for loop in ("plain", *loops)))
    for tool in args.tools or TOOLS:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            results = table([tool], loops, pathlib.Path(folder), card=args.cuda)
        asked = [failure for failure in TOOLS[tool][0] if (tool, failure, "plain") in results]
        row = [[results[tool, failure, loop][0] for failure in asked] for loop in ("plain", *loops)]
        failed, total = failed + sum(not ok for cell in row for ok in cell), total + sum(map(len, row))
        print(
            f"{tool:16}"
            + "".join(f"{f'{sum(cell)} of {len(cell)}':>16}" for cell in row)
            + f"{time.perf_counter() - began:6.0f} s"
        )
        for (_, failure, loop), (ok, why) in results.items():
            if not ok or args.v and loop == "plain":
                print(f"    {loop}, {failure}: {why}")
        sys.stdout.flush()
    print(f"{total - failed} of {total} answers are those of a plain loop.")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
