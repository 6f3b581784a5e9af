"""Two ranks on two GPUs (NCCL): each fault is named within 5 s, and nothing is left running."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import ranks
from tests.distributed.faults import FAULTS, HEAD

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", FAULTS)
def test_named(name: str) -> None:
    text, code, rank, line = FAULTS[name]
    report, fault, left = ranks.run(HEAD + text, "nccl")
    (finding,) = report.findings
    assert finding.code == f"distributed/{code}" and finding.where.rank == rank, report
    assert line in (finding.where.text or ""), report
    assert ranks.Timed.verdict - float(fault.read_text()) < 5 and not left, report
