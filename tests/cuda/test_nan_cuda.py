"""The locator on a GPU: the backward runs in another thread there, and the step is located by replay.

Run by hand on a machine with a GPU; elsewhere these are skipped.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nbdebug

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STRATEGIES = ("auto", "trace")


class Block(nn.Module):
    def __init__(self, width: int, fault: str, remat: str):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fault, self.remat = fault, remat

    def mix(self, x, causal, level):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / q.size(-1) ** 0.5
        mixed = scores.masked_fill(causal, float("-inf")).softmax(-1) @ v
        y = self.out(mixed)
        if self.fault == "log":
            y = y + torch.log(level)[:, None, None]  # the log
        if self.fault == "sqrt":
            y = y + torch.sqrt(level)[:, None, None] * y.mean()  # the root
        if self.fault == "where":
            y = y + torch.where(y < 0, torch.exp(y * 1e3 * (level == 0)[:, None, None]), y)  # the branch
        return x + y

    def forward(self, x, causal, level):
        if not self.remat:
            return self.mix(x, causal, level)
        return checkpoint(self.mix, x, causal, level, use_reentrant=self.remat == "reentrant")


class Net(nn.Module):
    def __init__(self, fault: str, remat: str):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.level = nn.Linear(32, 1)
        self.blocks = nn.ModuleList(Block(32, fault if i == 1 else "", remat) for i in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        level = self.level(x.mean(1))[:, 0].abs() * (tokens[:, 0] != 7)
        causal = torch.ones(tokens.size(1), tokens.size(1), dtype=torch.bool, device=tokens.device).triu(1)
        for block in self.blocks:
            x = block(x, causal, level)
        return self.head(x)


def training(fault: str, remat: str = "", fused: bool = True, dtype=torch.bfloat16) -> SimpleNamespace:
    torch.manual_seed(0)
    model = Net(fault, remat).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    tokens = torch.randint(8, 50, (3, 6, 9))
    tokens[1, [2, 4], 0] = 7
    batches = iter(tokens)

    def step():
        batch = next(batches).cuda()
        with torch.autocast("cuda", dtype=dtype):
            scores = model(batch)
            loss = F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_fault(strategy):
    made = training("log")
    report = nbdebug.nan_trace(made.step, model=made.model, optimizer=made.optimizer, max_steps=3, strategy=strategy)
    finding = report.findings[0]
    assert (finding.code, finding.where.phase, finding.where.module, finding.where.op, finding.where.step) == (
        "nan/log-of-nonpositive",
        "forward",
        "blocks.1",
        "log",
        1,
    )
    assert "# the log" in finding.where.text
    assert finding.where.samples == (2, 4)
    assert finding.fixes[0].verified


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("remat", ["", "plain"])
def test_backward_fault(strategy, remat):
    made = training("sqrt", remat)
    report = nbdebug.nan_trace(made.step, model=made.model, optimizer=made.optimizer, max_steps=3, strategy=strategy)
    finding = report.findings[0]
    assert (finding.code, finding.where.phase, finding.where.module, finding.where.op, finding.where.step) == (
        "nan/sqrt-grad-at-zero",
        "backward",
        "blocks.1",
        "sqrt",
        1,
    )
    assert "# the root" in finding.where.text


def test_reentrant_checkpoint_live():
    made = training("sqrt", "reentrant")
    report = nbdebug.nan_trace(made.step, model=made.model, optimizer=made.optimizer, max_steps=3, strategy="trace")
    assert (report.findings[0].code, report.findings[0].where.op) == ("nan/sqrt-grad-at-zero", "sqrt")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropped_branch(strategy):
    made = training("where", dtype=torch.float16)
    report = nbdebug.nan_trace(made.step, model=made.model, optimizer=made.optimizer, max_steps=3, strategy=strategy)
    assert [f.code for f in report] in (["nan/where-grad"], ["nan/overflow"])
    assert report.findings[0].where.op == "exp"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_healthy_step_leaves_the_same_bits(strategy):
    plain, traced = training(""), training("")
    for _ in range(3):
        plain.step()
    report = nbdebug.nan_trace(
        traced.step, model=traced.model, optimizer=traced.optimizer, max_steps=3, strategy=strategy
    )
    assert report.ok
    for a, b in zip(plain.model.parameters(), traced.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scaler_skip_is_normal(strategy):
    torch.manual_seed(0)
    model = nn.Linear(16, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    x = torch.randn(8, 16, device="cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    report = nbdebug.nan_trace(step, model=model, optimizer=optimizer, max_steps=2, strategy=strategy)
    assert report.ok
    assert any("GradScaler" in note for note in report.notes)


def test_tensors_on_two_devices():
    torch.manual_seed(0)
    head, body = nn.Linear(8, 2), nn.Linear(4, 8).cuda()

    def step():
        x = torch.zeros(5, 4, device="cuda")
        h = body(x).cpu()
        loss = torch.log(head(h) * 0).sum()  # here
        loss.backward()
        return loss

    report = nbdebug.nan_trace(step, model={"body": body, "head": head})
    assert report.findings[0].code == "nan/log-of-nonpositive"
    assert "# here" in report.findings[0].where.text


def test_compiled_model_is_traced_in_eager():
    made = training("log")
    twin = copy.deepcopy(made.model)
    compiled = torch.compile(twin, backend="aot_eager")
    batch = torch.randint(8, 50, (6, 9), device="cuda")
    batch[[2, 4], 0] = 7

    def step():
        loss = compiled(batch).mean()
        loss.backward()
        return loss

    report = nbdebug.nan_trace(step, model=compiled)
    assert (report.findings[0].code, report.findings[0].where.module) == ("nan/log-of-nonpositive", "blocks.1")
