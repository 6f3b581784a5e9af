"""%precision in a real shell: what it takes, what it says, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.shell import Notebook, completions, started

SETUP = """
import torch
from torch import nn

class Norm(nn.Module):
    def forward(self, x):
        wide = x * 300
        return wide / (wide * wide).sum(-1, keepdim=True).sqrt()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), Norm(), nn.Linear(8, 1))
batch = (torch.randn(16, 4), torch.randn(16, 1))
criterion = nn.MSELoss()
"""


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        yield book


def test_it_takes_what_is_among_the_variables_and_says_which(notebook: Notebook) -> None:
    done = notebook.run("report = %precision --mode cast")
    assert done.error is None
    report = notebook.shell.user_ns["report"]
    assert report.fp32_modules == ("1",)
    assert report.findings[0].where.cell == "In [2]" and "wide * wide" in report.findings[0].where.text
    for taken in ("model `net` (Sequential)", "batch `batch`", "loss `criterion`"):
        assert taken in report.subject
    assert "keep_fp32(model, ['1'])" in str(report)


def test_options_are_read_and_a_loader_gives_the_batch(notebook: Notebook) -> None:
    notebook.run("train_loader = [batch]; del batch")
    done = notebook.run("%precision --mode cast --dtype bfloat16 --tolerance 0.5")
    assert done.error is None and done.result.ok and "next(iter(train_loader))" in done.result.subject
    assert notebook.run("%precision --mode cast;").result is None


@pytest.mark.parametrize(
    "line, said",
    [
        ("%precision --dtype float8", "'float8'"),
        ("%precision --loss-fn nothing", "nothing"),
        ("%precision --batch rows", "'rows'"),
        ("%precision --model other", "other"),
        ("%precision --tolerance 0", "above zero; got 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(notebook: Notebook, line: str, said: str) -> None:
    done = notebook.run(line)
    assert type(done.error).__name__ == "UsageError" and said in str(done.error)


def test_help_and_completion(notebook: Notebook) -> None:
    assert "float32" in notebook.run("%precision -h").printed
    assert "--tolerance" in completions(notebook, "%precision --tol")


def test_ipythons_own_precision_still_does_what_it_did(notebook: Notebook) -> None:
    assert notebook.run("%precision 3\n3.14159").shown.strip().endswith("3.142")
    assert notebook.run("%precision %.2e\n314.159").shown.strip().endswith("3.14e+02")
    notebook.run("%unload_ext nbdebug")
    assert notebook.run("%precision 1\n3.14159").shown.strip().endswith("3.1")
    notebook.run("%load_ext nbdebug")
