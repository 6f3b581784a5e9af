"""What a watch measures agrees with the same measured plainly: norms before and after clipping, weights, updates."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
from torch import nn

import nbdebug
from tests.nan.guard.kinds import KINDS, Training

CLOSE = 1e-6


def plain(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_dense() if parameter.layout is not torch.strided else parameter


def norms(model: nn.Module) -> dict[str, float]:
    """Each gradient's norm in float64, one by one."""
    return {
        name: float(torch.linalg.vector_norm(plain(p.grad.detach()).double()))
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def row(frame: pd.DataFrame, step: int, column: str) -> dict[str, float]:
    part = frame[frame.step == step]
    return dict(zip(part.name, part[column]))


def assert_close(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=CLOSE, abs=1e-30), name


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_updates_with_every_optimizer(kind: str) -> None:
    training = Training(kind)
    wanted, moved = [], []
    hook = training.optimizer.register_step_pre_hook(lambda *given: wanted.append(norms(training.model)))
    with nbdebug.grad_watch(training.model, training.optimizer, ratios_every=1) as watch:
        for i in range(3):
            before = weights(training.model)
            training.step(i)
            moved.append((before, weights(training.model)))
    hook.remove()
    assert watch.fault == "" and watch.steps == 3
    frame = watch.frame
    assert set(frame.name) == {n for n, p in training.model.named_parameters() if p.grad is not None}
    for i, (before, after) in enumerate(moved):
        if not KINDS[kind].closure:
            assert_close(row(frame, i, "norm"), wanted[i])
            assert_close(row(frame, i, "norm_after"), wanted[i])
        for name, ratio in row(frame, i, "update_ratio").items():
            size = float(before[name].norm())
            assert row(frame, i, "weight_norm")[name] == pytest.approx(size, rel=CLOSE)
            step = float((after[name] - before[name]).norm())
            assert ratio == pytest.approx(step / size, rel=1e-4, abs=1e-6) if size else math.isnan(ratio)


def test_with_a_closure_the_gradients_are_those_where_the_step_starts() -> None:
    training = Training("LBFGS")
    wanted: list[dict[str, float]] = []
    loss = training.loss

    def watched(i: int) -> torch.Tensor:
        value = loss(i)
        value.register_hook(lambda g: None)
        return value

    training.loss = watched  # type: ignore[method-assign]
    with nbdebug.grad_watch(training.model, training.optimizer) as watch:
        for i in range(2):
            training.model.zero_grad()
            loss(i).backward()
            wanted.append(norms(training.model))
            training.model.zero_grad()
            training.step(i)
    for i in range(2):
        assert_close(row(watch.frame, i, "norm"), wanted[i])


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: nn.Module, i: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(i)
    loss = model(torch.randn(16, 6, generator=draw)).square().mean()
    loss.backward()
    return loss


CLIPS = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-4),
    "a new tensor": lambda m: [setattr(p, "grad", p.grad * 0.5) for p in m.parameters()],
    "one parameter": lambda m: m[0].weight.grad.mul_(0.1),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("backwards", [1, 3])
def test_before_and_after_clipping(clip: str, backwards: int) -> None:
    model, optimizer = network()
    with nbdebug.grad_watch(model, optimizer) as watch:
        for step in range(12):
            optimizer.zero_grad()
            for i in range(backwards):  # accumulated
                backward(model, i)
            before = norms(model)
            if step % 2:
                CLIPS[clip](model)
            after = norms(model)
            optimizer.step()
            assert_close(row(watch.frame, step, "norm"), before)
            assert_close(row(watch.frame, step, "norm_after"), after)
    totals = watch.totals
    assert list(totals.clipped) == [False, True] * 6 and watch.history.clipped == 6
    assert totals.norm.iloc[-1] == pytest.approx(math.sqrt(sum(v * v for v in before.values())), rel=CLOSE)
    assert any("6 of 12 steps (50%) were clipped" in note for note in watch.report().notes)


def test_clipping_through_data_is_noticed() -> None:
    """A write through `.data` leaves the version as it was: it is found at the first check, and seen from then on."""
    model, optimizer = network()
    with nbdebug.grad_watch(model, optimizer, ratios_every=4) as watch:
        for step in range(8):
            optimizer.zero_grad()
            backward(model)
            for p in model.parameters():
                p.grad.data.mul_(0.5)
            after = norms(model)
            optimizer.step()
            if step % 4 == 0 or step > 4:
                assert_close(row(watch.frame, step, "norm_after"), after)
    assert watch.totals.clipped.sum() >= 7


def test_nothing_is_measured_twice_where_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbdebug.tools.grad_watch import probe

    calls: list[int] = []
    real = probe.group_norms
    monkeypatch.setattr(probe, "group_norms", lambda given, wide: calls.append(len(given)) or real(given, wide))
    model, optimizer = network()
    with nbdebug.grad_watch(model, optimizer, ratios_every=0) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    assert watch.steps == 3 and [n for n in calls if n] == [6, 6, 6]


def test_large_tensors_are_measured_exactly() -> None:
    weight = nn.Parameter(torch.zeros(1_500_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    values = torch.randn(1_500_000)
    with nbdebug.grad_watch(None, optimizer) as watch:
        (weight * values).sum().backward()
        optimizer.step()
    assert watch.frame.norm[0] == pytest.approx(float(values.double().norm()), rel=CLOSE)
    assert watch.names == ["optimizer.param_groups[0]['params'][0]"]


def test_half_precision_and_complex_weights() -> None:
    half = nn.Parameter(torch.full((300,), 2.0, dtype=torch.float16))
    rotation = nn.Parameter(torch.randn(5, dtype=torch.complex64))
    optimizer = torch.optim.SGD([half, rotation], lr=1e-3)
    with nbdebug.grad_watch(None, optimizer, ratios_every=1) as watch:
        ((half * 5000).float().sum() + rotation.abs().square().sum()).backward()
        wanted = [half.grad.double().norm(), rotation.grad.abs().double().norm()]
        optimizer.step()
    assert list(watch.frame.norm) == pytest.approx([float(v) for v in wanted], rel=CLOSE)


def test_tied_weights_are_named_once_and_frozen_ones_not_at_all() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.cold = nn.Linear(4, 4).requires_grad_(False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cold(self.table(x)))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nbdebug.grad_watch(model, optimizer) as watch:
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()
    assert list(watch.frame.name) == ["table.weight"]


def test_what_no_optimizer_holds_is_told() -> None:
    model, _ = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with nbdebug.grad_watch(model, optimizer) as watch:
        backward(model)
        optimizer.step()
        assert watch.unheld == ["2.weight", "2.bias", "4.weight", "4.bias"]
    assert set(watch.frame.name) == {"0.weight", "0.bias"} and watch.unheld[0] == "2.weight"
    assert any("No optimizer has `2.weight`" in note for note in watch.report().notes)


def test_several_optimizers_make_one_step() -> None:
    model, _ = network()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2:].parameters())
    with nbdebug.grad_watch(model, [first, second]) as watch:
        for i in range(3):
            model.zero_grad()
            backward(model, i)
            wanted = norms(model)
            first.step()
            nn.utils.clip_grad_norm_(model[2:].parameters(), 1e-3)
            second.step()
            assert_close(row(watch.frame, i, "norm"), wanted)
    assert watch.steps == 3 and watch.history.clipped == 3


def test_optimizers_that_take_turns() -> None:
    """As in a GAN: the second steps once for two steps of the first; its backward fills the first one's gradients
    too."""
    model, _ = network()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2:].parameters(), lr=0.1)
    seen = []
    with nbdebug.grad_watch(model, {"one": first, "two": second}) as watch:
        for i in range(6):
            now = second if i % 3 == 2 else first
            now.zero_grad()
            backward(model, i)
            held = {id(p) for p in now.param_groups[0]["params"]}
            seen.append({n: v for n, v in norms(model).items() if id(dict(model.named_parameters())[n]) in held})
            now.step()
    frame = watch.frame
    assert watch.steps == 4 and watch.fault == ""  # 1, 1 2, 1, 1 2
    assert_close(row(frame, 0, "norm"), seen[0])
    assert_close(row(frame, 1, "norm"), {**seen[1], **seen[2]})


@pytest.mark.parametrize("unscale", [True, False])
def test_a_scale_is_divided_out(unscale: bool) -> None:
    model, optimizer = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    with nbdebug.grad_watch(model, optimizer) as watch:
        for step in range(3):
            optimizer.zero_grad()
            loss = backward(model, step)
            wanted = norms(model)
            optimizer.zero_grad()
            scaler.scale(
                model(torch.randn(16, 6, generator=torch.Generator().manual_seed(step))).square().mean()
            ).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            assert_close(row(watch.frame, step, "norm"), wanted)
            assert watch.totals.loss.iloc[step] == pytest.approx(loss.item(), rel=CLOSE)
    assert watch.history.clipped == (3 if unscale else 0)


def test_steps_that_a_scaler_skips_are_no_alarm() -> None:
    model, optimizer = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with nbdebug.grad_watch(model, optimizer) as watch:
        for step in range(60):
            optimizer.zero_grad()
            scaler.scale(1e4 * model(torch.ones(2, 6) + step).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert 0 < watch.steps < 60 and watch.history.bad == {} and watch.report().ok


def test_every_and_ratios_every() -> None:
    model, optimizer = network()
    with nbdebug.grad_watch(model, optimizer, every=2, ratios_every=4) as watch:
        for i in range(9):
            optimizer.zero_grad()
            backward(model, i)
            optimizer.step()
    frame = watch.frame
    assert watch.steps == 9 and sorted(set(frame.step)) == [0, 2, 4, 6, 8]
    assert sorted(set(frame[frame.update_ratio.notna()].step)) == [0, 4, 8]
    assert watch.totals.loss.notna().all()


def test_gradients_without_backward_are_measured_at_the_step() -> None:
    model, optimizer = network()
    with nbdebug.grad_watch(model, optimizer) as watch:
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            wanted = norms(model)
            optimizer.step()
    assert_close(row(watch.frame, 1, "norm"), wanted)


def test_a_loss_that_is_none_of_ours_is_not_seen() -> None:
    model, optimizer = network()
    other, its = network()
    with nbdebug.grad_watch(model, optimizer) as watch:
        for i in range(3):
            optimizer.zero_grad()
            its.zero_grad()
            loss = backward(model, i)
            (1000 * backward(other, i)).detach()
            its.step()
            optimizer.step()
            assert watch.totals.loss.iloc[i] == pytest.approx(loss.item())
    assert watch.steps == 3
