"""Usual kinds of models on a card, in a shell: a NaN is named with its line, and no tool gets in a healthy loop's way.

cuDNN's recurrent layers keep their weights in one storage and give gradients to some of their outputs alone; CTC takes
lengths on the CPU; a network of graphs reads rows by their numbers, which ends the process where there are fewer.
"""

from __future__ import annotations

import pathlib

import pytest
import torch

from tests.shell import started

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HEAD = """
import torch, math
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
dev = torch.device("cuda")
zero = torch.zeros(3, device=dev)
"""


MODELS = {
    section.split("\n", 1)[0]: section.split("\n", 1)[1].rstrip().split("\n--- ")
    for section in pathlib.Path(__file__).with_name("models.txt").read_text(encoding="utf-8").split("=== ")[1:]
}
"""By name: the lines that make the model, its optimizer and a batch; and the loss."""


def cell_of(name: str, fault: str = "") -> str:
    out = "out.logits" if name == "gpt2" else "out"
    planted = {
        "": "pass",
        "forward": "loss = loss / zero.sum()",
        "backward": f"loss = loss + ({out} - {out}.detach()).square().sum().sqrt()",
    }[fault]
    return f"""for it in range(12):
    opt.zero_grad()
    out = net({"x, labels=x" if name == "gpt2" else "x"})
    loss = {MODELS[name][1]}
    {planted}
    loss.backward()
    opt.step()
"""


def shell_of(name: str):
    return started(f"{HEAD}{MODELS[name][0]}\n")


@pytest.mark.parametrize("by", ["trace", "guard"])
@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("name", MODELS)
def test_a_nan_is_named(name: str, fault: str, by: str) -> None:
    with shell_of(name) as book:
        if by == "guard":
            book.run("%guard on")
            report = book.run(cell_of(name, fault)).error.report
            book.run("%guard off")
        else:
            report = book.run("%%nan_trace\n" + cell_of(name, fault)).result
    (finding,) = report.findings
    assert finding.code == {"forward": "nan/div-by-zero", "backward": "nan/sqrt-grad-at-zero"}[fault], report
    assert "loss = loss" in finding.where.text


TOOLS = ("nan_trace", "fit --memory 20GiB", "precision --dtype float16", "mem", "bottleneck", "diagnose")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", MODELS)
def test_a_tool_answers(name: str, tool: str) -> None:
    with shell_of(name) as book:
        done = book.run(f"%%{tool}\n{cell_of(name)}")
        assert done.error is None, done.error
        if tool.split()[0] in ("nan_trace", "mem"):
            assert done.result.verdict == "healthy", done.result
        assert not any("fault of nbdebug" in line for line in done.result.unchecked), done.result.unchecked
        assert book.run(cell_of(name)).error is None, "the card still works"
