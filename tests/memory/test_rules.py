"""The rules of the memory chapter at their thresholds, and what they say; no tensors."""

from __future__ import annotations

import dataclasses

import pytest

from nbdebug.report import Where
from nbdebug.tools.memory.facts import Device, HeldMemory, KeptByNotebook, Leak, LoaderWorkers, MemoryFacts, StepMemory
from nbdebug.tools.memory.rules import name_all
from nbdebug.tools.memory.rules.usage import detached

MIB, GIB = 1 << 20, 1 << 30


def codes(facts: MemoryFacts) -> list[str]:
    return [finding.code.partition("/")[2] for finding in name_all(facts)]


def step(**at_peak: int) -> StepMemory:
    named = {
        "parameters": 0,
        "gradients": 0,
        "optimizer state": 0,
        "activations": 0,
        **{name.replace("_", " "): count for name, count in at_peak.items()},
    }
    state = (("table.weight", named["optimizer state"]),) if named["optimizer state"] else ()
    return StepMemory(0, sum(named.values()), 0, named, state=state, backwards=1)


@pytest.mark.parametrize(
    ("step_", "wanted"),
    [
        (step(activations=200 * MIB, parameters=19 * MIB), ["activations-dominate"]),
        (step(activations=200 * MIB, parameters=21 * MIB), []),
        (step(activations=15 * MIB), []),
        (dataclasses.replace(step(activations=200 * MIB), backwards=0), []),
        (dataclasses.replace(step(activations=200 * MIB), total=80 * GIB), []),
        (step(optimizer_state=80 * MIB, parameters=40 * MIB, gradients=40 * MIB), ["optimizer-state-dominates"]),
        (step(optimizer_state=80 * MIB, parameters=40 * MIB, gradients=40 * MIB, activations=40 * MIB), []),
        (step(optimizer_state=20 * MIB, parameters=10 * MIB), []),
    ],
)
def test_the_peak(step_: StepMemory, wanted: list[str]) -> None:
    assert codes(MemoryFacts(step=step_)) == wanted


@pytest.mark.parametrize(
    ("growth", "wanted"),
    [
        (Leak("losses", "graph", 4, 3, grad=True, nodes=5, backward=True), ["graph-retained"]),
        (Leak("waiting", "graph", 4, 3, grad=True, emptied=True), []),
        (Leak("waiting", "graph", 4, 3, grad=True, emptied=True, backward=True), ["graph-retained"]),
        (Leak("logits", "graph", MIB, 3, grad=True, evaluation=True), ["eval-without-no-grad"]),
        (Leak("seen", "hook", 4, 3), []),
        (Leak("seen", "hook", 4, 3, grad=True), ["hook-held"]),
        (Leak("model.1._forward_hooks", "hook", 0, 3, items=1), ["hook-held"]),
        (Leak("errors", "exception", 100, 3), []),
        (Leak("errors", "exception", MIB, 3), ["traceback-held"]),
        (Leak("Out", "output", MIB, 3), ["cell-output-held"]),
        (Leak("crop", "cache", MIB, 3, items=4), ["cache-unbounded"]),
        (Leak("crop", "cache", MIB, 3, items=4, emptied=True), []),
        (Leak("rows", "list", MIB - 1, 3), []),
        (Leak("rows", "list", MIB, 3), ["cache-unbounded"]),
    ],
)
def test_what_is_left_behind(growth: Leak, wanted: list[str]) -> None:
    assert codes(MemoryFacts(growth=(growth,))) == wanted


@pytest.mark.parametrize(("growth", "by_lines"), [
    (Leak("rows", "list", MIB, 3, plain=MIB), True),
    (Leak("rows", "list", MIB, 3), False),
    (Leak("rows", "dict", MIB, 3, plain=MIB), False),
])  # fmt: skip
def test_text_that_is_collected_can_be_read_by_lines(growth: Leak, by_lines: bool) -> None:
    (finding,) = name_all(MemoryFacts(growth=(growth,)))
    assert any("file.readline()" in fix.code for fix in finding.fixes) is by_lines


def test_a_leak_is_told_and_not_the_peak_that_it_swells() -> None:
    growth = Leak("recorded", "hook", 3 * MIB, 3, grad=True)
    assert codes(MemoryFacts(step=step(activations=900 * MIB), growth=(growth,))) == ["hook-held"]


@pytest.mark.parametrize(
    ("workers", "wanted"),
    [
        (LoaderWorkers("d.rows", 10**5, 9 * MIB, 2), ["loader-workers-copy"]),
        (LoaderWorkers("d.rows", 10**5, 7 * MIB, 2), []),
        (LoaderWorkers("d.rows", 10**5, 9 * MIB, 2, measured=MIB), []),
        (LoaderWorkers("d.rows", 10**5, 9 * MIB, 2, measured=9 * MIB, packed=0), ["loader-workers-copy"]),
    ],
)
def test_workers(workers: LoaderWorkers, wanted: list[str]) -> None:
    assert codes(MemoryFacts(workers=workers)) == wanted


@pytest.mark.parametrize(
    ("kept", "wanted"),
    [
        (KeptByNotebook("output", "Out[3]", 33 * MIB), ["cell-output-held"]),
        (KeptByNotebook("output", "Out[3]", 31 * MIB), []),
        (KeptByNotebook("traceback", "sys.last_value", 40 * MIB), ["traceback-held"]),
        (KeptByNotebook("loss", "losses", 40 * MIB), ["graph-retained"]),
    ],
)
def test_what_a_notebook_keeps(kept: KeptByNotebook, wanted: list[str]) -> None:
    assert codes(MemoryFacts(notebook=(kept,))) == wanted


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ({"allocated": 10 * GIB, "largest": GIB}, ["fragmentation"]),
        ({"allocated": 15 * GIB, "largest": GIB}, []),
        ({"allocated": 10 * GIB, "largest": 6 * GIB}, []),
        ({"allocated": 10 * GIB, "peak_allocated": 19 * GIB}, []),
        ({"allocated": 10 * GIB, "peak_allocated": 11 * GIB}, ["fragmentation"]),
        ({"allocated": None}, []),
    ],
)
def test_fragmentation(device: dict, wanted: list[str]) -> None:
    told = Device("cuda:0", 0, reserved=20 * GIB, total=80 * GIB, **device)
    assert codes(MemoryFacts(now=HeldMemory(devices=(told,)))) == wanted
    small = dataclasses.replace(told, reserved=200 * MIB, allocated=100 * MIB, largest=MIB)
    assert codes(MemoryFacts(now=HeldMemory(devices=(small,)))) == []


@pytest.mark.parametrize(
    ("line", "fixed"),
    [
        ("losses.append(loss)", "losses.append(loss.detach())"),
        ("total_loss += loss", "total_loss += loss.detach()"),
        ("mean = 0.9 * mean + 0.1 * loss", "mean = (0.9 * mean + 0.1 * loss).detach()"),
        ("sum_ = sum_ + f(x)", "sum_ = sum_ + f(x).detach()"),
        ("kept[step] = a + b * c", "kept[step] = (a + b * c).detach()"),
        (
            "kept.append((loss, i))",
            "kept.append(tuple(part.detach() if torch.is_tensor(part) else part for part in (loss, i)))",
        ),
        ("if kept:", "kept = value.detach()"),
    ],
)
def test_the_fix_is_the_user_s_own_line(line: str, fixed: str) -> None:
    assert detached(Leak("kept", "graph", 1, 3, Where(text=line), chained=True)) == fixed


def test_a_state_of_several_parts_is_cut_part_by_part() -> None:
    growth = Leak(
        "stream['h']",
        "graph",
        1,
        3,
        Where(text="stream['h'] = hidden"),
        chained=True,
        names=("stream['h']", "stream['h'][0]"),
    )
    assert detached(growth) == "stream['h'] = tuple(part.detach() for part in hidden)"
