"""check_environment on a machine with a card: its driver, NCCL, bfloat16, kernels, and a card that nothing uses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import nbdebug
from nbdebug.tools.environment.rules import serves

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_facts_of_a_card_its_driver_nccl_and_bfloat16() -> None:
    torch.zeros(1, device="cuda")
    report = nbdebug.check_environment()
    wrong = {"cpu-only-build", "gpu-arch-missing", "driver-too-old", "devices-hidden", "dtype-unsupported", "numpy-abi"}
    assert not wrong & {finding.code.partition("/")[2] for finding in report}, [finding.title for finding in report]
    machine, capability = report.facts["machine"], torch.cuda.get_device_capability()
    assert [tuple(card["capability"]) for card in machine["gpus"]][:1] == [capability]
    assert machine["gpus"][0]["name"] == torch.cuda.get_device_name()
    assert abs(machine["gpus"][0]["memory"] / torch.cuda.get_device_properties(0).total_memory - 1) < 0.1
    assert machine["driver"]["version"] and machine["driver"]["cuda"]
    build = machine["torch"]
    assert build["cuda"] == torch.version.cuda and build["bf16"] is torch.cuda.is_bf16_supported()
    assert any(serves(arch, capability) for arch in build["arch_list"])
    if torch.distributed.is_nccl_available():
        assert build["nccl"] == ".".join(map(str, torch.cuda.nccl.version()))
    rows = dict(report.frame("The machine").itertuples(index=False))
    assert torch.cuda.get_device_name() in rows["cards"] and "serves CUDA" in rows["driver"]
    assert rows["bfloat16 on the card"] == ("yes" if build["bf16"] else "no")


def test_a_run_that_asks_for_more_cards_or_an_older_machine_is_named() -> None:
    """What stands in the machine's own variables, such as a path to NVIDIA's package for older drivers, is left out,
    and so is what is wrong with it already."""
    torch.zeros(1, device="cuda")
    facts = dict(nbdebug.check_environment().facts["machine"]) | {"env": {}, "run": {"device": "cuda"}}
    own = {finding.code for finding in nbdebug.check_environment(facts=facts)}

    def codes(**parts: Any) -> set[str]:
        return {finding.code for finding in nbdebug.check_environment(facts=facts | parts)} - own

    number, newer = len(facts["gpus"]), torch.cuda.get_device_capability() >= (8, 0)
    assert codes(env={"CUDA_VISIBLE_DEVICES": ""}) == {"environment/devices-hidden"}
    assert codes(driver={"version": "450.80.02", "cuda": "11.0"}) == {"environment/driver-too-old"}
    old = [{"name": "old", "capability": [3, 0]}] * number
    assert codes(gpus=old) == {"environment/gpu-arch-missing"}
    bfloat16 = {"device": "cuda", "dtype": "bfloat16"}
    assert codes(run=bfloat16) == (set() if newer else {"environment/dtype-unsupported"})


SCRIPT = """
import torch
import nbdebug
assert not any("idle" in note for note in nbdebug.check_environment().notes), "no model is there yet"
model = torch.nn.Linear(3, 2)
first = nbdebug.check_environment()
assert not torch.cuda.is_initialized(), "looking made a context on the card"
assert any("A card is idle: `model` is on the processor" in note for note in first.notes), first.notes
model.to("cuda")
assert not any("idle" in note for note in nbdebug.check_environment().notes)
"""


def test_an_idle_card_is_told_and_no_context_is_made() -> None:
    """In a process of its own: a card that was used is not idle."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
