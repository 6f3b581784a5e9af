"""On a real card: errors in the card's own words, and asserts that are told lines too late.

Each assert has a process of its own: after it nothing on the card works any more.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nbdebug

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is needed")

BEFORE = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import nbdebug

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 5)
    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))

def batches(token=0, label=0):
    tokens, labels = torch.arange(24).reshape(8, 3) % 10, torch.arange(8) % 5
    tokens[3, 1], labels[6] = token or tokens[3, 1], label or labels[6]
    return DataLoader(TensorDataset(tokens, labels), batch_size=8)

def train(loader):
    reader, criterion = Reader().cuda(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(reader.parameters(), lr=0.1)
    for tokens, kinds in loader:
        tokens, kinds = tokens.cuda(), kinds.cuda()
        loss = criterion(reader(tokens), kinds)
        loss.backward()
        optimizer.step()
        print(loss.item())

def pick():
    table, places = torch.randn(4, 3, device="cuda"), torch.randint(7, 9, (2, 3), device="cuda")
    picked = table.gather(0, places)
    return picked.sum().item()

def chances():
    odds = torch.full((4,), 1.5, device="cuda")
    loss = nn.functional.binary_cross_entropy(odds, torch.zeros(4, device="cuda"))
    return loss.item()
"""
AFTER = """
try:
    CALL
    print(json.dumps({"codes": ["no error"], "text": ""}))
except Exception as error:
    report = nbdebug.explain(error, names={})
    print(json.dumps({"codes": [f.code for f in report], "text": " ".join(str(report).split()),
                      "line": report.findings[0].where.text if report.findings else ""}), flush=True)
"""


def after_an_assert(folder: pathlib.Path, call: str, blocking: bool = False) -> dict[str, Any]:
    script = folder / "training_script.py"
    script.write_text(BEFORE + textwrap.dedent(AFTER).replace("CALL", call), encoding="utf-8")
    env = {"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **env, "PYTHONPATH": str(pathlib.Path(nbdebug.__file__).parents[1])},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[-1])


@pytest.mark.parametrize(
    ("call", "line", "words"),
    [
        ("train(batches(label=5))", "criterion(reader(tokens), kinds)", ["tensors[1][6]` is 5", "gives 5 classes"]),
        ("train(batches(token=12))", "self.words(tokens)", ["tensors[0][3, 1]` is 12", "has 10 rows"]),
    ],
)
def test_an_assert_is_traced_to_its_line(tmp_path: pathlib.Path, call: str, line: str, words: list[str]) -> None:
    said = after_an_assert(tmp_path, call)
    assert said["codes"] == ["error/index-out-of-range"], said
    assert line in said["line"]
    assert not [word for word in words if word not in said["text"]], said


@pytest.mark.parametrize("call", ["pick()", "chances()"])
def test_an_assert_without_a_copy_is_told_as_what_it_is(tmp_path: pathlib.Path, call: str) -> None:
    said = after_an_assert(tmp_path, call)
    assert said["codes"] == ["error/device-assert"], said
    assert "CUDA_LAUNCH_BLOCKING" in said["text"]


def test_with_every_kernel_waited_for(tmp_path: pathlib.Path) -> None:
    said = after_an_assert(tmp_path, "train(batches(label=5))", blocking=True)
    assert said["codes"] == ["error/index-out-of-range"], said


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offsets = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offsets


def explained(call: Any) -> tuple[list[str], str]:
    with pytest.raises(Exception) as caught:
        call()
    report = nbdebug.explain(caught.value, names={})
    return [f.code for f in report], " ".join(str(report).split())


def batch_left() -> None:
    net, x = nn.Linear(4, 2).cuda(), torch.ones(3, 4)
    net(x)


def model_left() -> None:
    net, x = nn.Conv2d(3, 4, 3), torch.ones(1, 3, 8, 8, device="cuda")
    net(x)


def attribute_left() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), Shifted()).cuda(), torch.ones(3, 4, device="cuda")
    net(x)


def labels_left() -> None:
    scores, labels = torch.randn(3, 4, device="cuda"), torch.tensor([0, 1, 2])
    nn.functional.cross_entropy(scores, labels)


def index_left() -> None:
    table, rows = torch.randn(3, 4), torch.tensor([0], device="cuda")
    table[rows]


def to_numpy() -> None:
    out = torch.ones(3, device="cuda")
    np.asarray(out)


def state_left() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    net.cuda()
    net(torch.ones(1, 4, device="cuda")).sum().backward()
    optimizer.step()


def dice_left() -> None:
    dice = torch.Generator()
    torch.randn(3, device="cuda", generator=dice)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (batch_left, ["`x` is on cpu", "x.to("]),
        (model_left, ["`net` is still on cpu", "net.to("]),
        (attribute_left, ["`self.offsets` is on cpu", "register_buffer"]),
        (labels_left, ["`labels` is on cpu"]),
        (index_left, ["`table` is on cpu", "`rows` is on cuda:0"]),
        (to_numpy, ["`out` is on cuda:0", ".cpu().numpy()"]),
        (state_left, ["`optimizer` keeps its `exp_avg` of `net.weight` on cpu"]),
        (dice_left, ["`dice`"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_two_devices_in_the_cards_own_words(call: Any, words: list[str]) -> None:
    codes, said = explained(call)
    assert codes == ["error/device-mismatch"], said
    assert not [word for word in words if word not in said], said


def half_inputs() -> None:
    net, x = nn.Conv2d(3, 4, 3).cuda(), torch.ones(1, 3, 8, 8, device="cuda").half()
    net(x)


def double_inputs() -> None:
    net, x = nn.Linear(4, 2).cuda(), torch.from_numpy(np.ones((3, 4))).cuda()
    net(x)


def small_labels() -> None:
    scores, labels = torch.randn(3, 4, device="cuda"), torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    nn.functional.cross_entropy(scores, labels)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (half_inputs, ["`x` is float16", "Tried, it works"]),
        (double_inputs, ["`x` is float64", "from_numpy"]),
        (small_labels, ["`labels` is int32", "labels.long()"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_dtypes_in_the_cards_own_words(call: Any, words: list[str]) -> None:
    codes, said = explained(call)
    assert codes == ["error/dtype-mismatch"], said
    assert not [word for word in words if word not in said], said


def loose_state() -> None:
    net, x = nn.GRU(4, 4, 2).cuda(), torch.ones(5, 2, 4, device="cuda")
    state = torch.zeros(2, 4, 2, device="cuda").transpose(1, 2)
    net(x, state)


def a_further_card() -> None:
    torch.zeros(1, device=f"cuda:{torch.cuda.device_count() + 3}")


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        (loose_state, "error/cudnn-not-supported", ["`state`", "contiguous"]),
        (a_further_card, "error/cuda-unavailable", ["visible"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_the_card_and_its_library_would_not_do(call: Any, code: str, words: list[str]) -> None:
    codes, said = explained(call)
    assert codes == [code], said
    assert not [word for word in words if word not in said], said
