"""Real architectures under the guard: silent, and three steps end as plain ones do, bit for bit."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import nbdebug

pytest.importorskip("transformers")
from tests.nan.leftovers import assert_nothing_is_left, hooks_of
from tests.nan.test_healthy_models import MODELS, built, differing, state, training


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", MODELS)
def test_silent_and_the_same_bits(name: str, capsys) -> None:
    model, batches = built(name)
    twin = copy.deepcopy(model)
    plain_step, plain_optimizer = training(twin, batches)
    torch.manual_seed(1)
    losses = [plain_step().item() for _ in range(3)]
    expected = state(twin, plain_optimizer)

    step, optimizer = training(model, batches)
    torch.manual_seed(1)
    capsys.readouterr()
    with warnings.catch_warnings(), nbdebug.guard(model, optimizer) as guard:
        warnings.filterwarnings("error", message=".*nbdebug.*")
        assert [step().item() for _ in range(3)] == losses
    assert guard.report().ok and guard.steps == 3 and guard.fault == "", guard.fault
    assert [line.loss for line in guard.lines] == pytest.approx(losses, rel=1e-5)
    assert not differing(expected, state(model, optimizer))
    assert hooks_of(model) == hooks_of(twin)
    assert capsys.readouterr().err == ""
    assert_nothing_is_left()


@pytest.mark.parametrize("name", MODELS)
def test_a_spoiled_weight_is_named_and_nothing_moves(name: str) -> None:
    """The weight at the middle of the model holds one NaN before the third step."""
    model, batches = built(name)
    step, optimizer = training(model, batches)
    with nbdebug.guard(model, optimizer), pytest.raises(nbdebug.NonFiniteStep) as caught:
        step()
        step()
        used = [(n, p) for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
        where, weight = next((n, p) for n, p in used[len(used) // 2 :] if p.dim() == 2 and "embed" not in n)
        with torch.no_grad():
            weight[0, 0] = float("nan")
        before = {k: v for k, v in state(model, optimizer).items() if k.startswith(("model.", "buffer.", "optimizer."))}
        before = copy.deepcopy(before)
        torch.manual_seed(3)  # a draw that drops no whole layer (wav2vec2)
        step()
    after = {k: v for k, v in state(model, optimizer).items() if k.startswith(("model.", "buffer.", "optimizer."))}
    assert set(before) == set(after)
    moved = [k for k, v in before.items() if not torch.equal(torch.nan_to_num(v), torch.nan_to_num(after[k]))]
    assert not moved
    (finding,) = caught.value.report.findings
    assert finding.code == "nan/parameter-nonfinite"
    assert finding.where.module == where.rpartition(".")[0] and finding.where.step == 2
