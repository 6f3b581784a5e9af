"""On a real card: what `mem()` lists adds up to the allocator's own total, and nearly all of it has a name."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from nbdebug.tools.memory.inventory import ROUNDING, UNMET, held_memory
from nbdebug.tools.memory.mem import held_report

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is needed")
MIB = 1 << 20


def test_it_adds_up_to_the_allocators_total() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 10)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(512, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    history = [{"loss": net(torch.randn(512, 1024, device="cuda")).square().mean()} for _ in range(3)]
    odd = [torch.zeros(1000 + n, device="cuda") for n in range(100)]
    names = {"net": net, "optimizer": optimizer, "history": history, "odd": odd}
    held = held_memory({"net": net}, {"optimizer": optimizer}, names, device="cuda")
    allocated = torch.cuda.memory_allocated()
    listed = sum(holding.bytes for holding in held.holdings)
    assert listed == pytest.approx(allocated, rel=0.01)
    named = sum(h.bytes for h in held.holdings if h.kind != "unknown")
    unmet = sum(h.bytes for h in held.holdings if h.name == UNMET)
    print(
        f"allocated {allocated / MIB:.1f} MiB, listed {listed / MIB:.1f}, named {named / MIB:.1f}, unmet "
        f"{unmet / MIB:.1f}, rounding {sum(h.bytes for h in held.holdings if h.name == ROUNDING)} bytes"
    )
    (card,) = held.devices
    assert card.allocated == allocated and card.reserved == torch.cuda.memory_reserved()
    assert card.largest is not None and 0 <= card.largest <= card.reserved - card.allocated
    assert named + unmet >= 0.99 * allocated and unmet <= 80 * MIB, "what is not met are cuBLAS's workspaces"
    graphs = {h.name: h.bytes for h in held.holdings if h.kind == "graph"}
    assert min(graphs[f"graph of `history[{n}]['loss']`"] for n in range(3)) > 16 * MIB
    report = held_report(net, optimizer, names, device="cuda")
    assert report.plot("memory")["limit"] == torch.cuda.get_device_properties(0).total_memory or (
        report.plot("memory")["limit"] > 0
    )
    print(report)


def test_a_gap_in_what_is_reserved_is_told() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    keep = torch.zeros(8 * MIB, device="cuda")
    big = torch.zeros(64 * MIB, device="cuda")
    del big
    report = held_report(names={"keep": keep}, device="cuda:0")
    (card,) = report.facts["devices"]
    assert card["largest"] >= 256 * MIB and any("is not allocated" in note for note in report.notes)
