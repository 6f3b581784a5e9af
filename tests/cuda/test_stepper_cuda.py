"""The stepper on a card: the caller's device, stream, autocast and random numbers; backward waits in the step's own
thread, so that the caller can run a backward meanwhile; the same bits as a plain step.

Run by hand on a machine with a GPU; elsewhere these are skipped.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from nbdebug.tools.stepper.step_through import step_through
from tests.stepper.models import Photograph, threads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu_(self.up(self.norm(x)))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(64, 1)).cuda()


def batch(device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(256, 64, generator=generator).to(device), torch.randn(256, 1, generator=generator).to(device))


def loss_of(net: nn.Module, given: Any) -> torch.Tensor:
    return nn.functional.mse_loss(net(given[0]).float(), given[1])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("how", ["into", "finish"])
def test_the_bits_are_those_of_a_plain_step(how: str, half: bool) -> None:
    plain, stepped = model(), model()
    torch.manual_seed(5)
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        loss = loss_of(plain, batch())
        loss.backward()
    after = torch.cuda.get_rng_state()
    torch.manual_seed(5)
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        stepper = step_through(stepped, batch(), loss_of, restore=False)
    while not stepper.done:
        torch.rand(4, device="cuda")  # the caller's own numbers
        getattr(stepper, how)()
    assert stepper.error is None and not stepper._run.fault and torch.equal(stepper.result, loss)
    for a, b in zip(plain.parameters(), stepped.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert torch.equal(torch.cuda.get_rng_state(), after)


def test_the_caller_may_run_a_backward_while_the_steps_backward_waits() -> None:
    net, other = model(), model()
    stepper = step_through(net, batch(), loss_of)
    stepper.run_to("1")
    stepper.run_to("1")
    assert stepper.at.phase == "backward" and stepper.inputs[0].is_cuda
    loss_of(other, batch()).backward()
    torch.cuda.synchronize()
    assert all(p.grad is not None for p in other.parameters())
    stepper.finish()
    assert stepper.error is None and stepper.done


def allocated() -> int:
    """Bytes of tensors, without the workspace that cuBLAS keeps for each thread that has used it."""
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return int(torch.cuda.memory_allocated())


@pytest.mark.parametrize("end", ["abandon", "finish"])
def test_nothing_is_left(end: str) -> None:
    net = model()
    loss_of(net, batch()).backward()
    before, held = Photograph(net), allocated()
    given = batch()
    stepper = step_through(net, given, loss_of)
    stepper.run_to("2")
    stepper.run_to("2.up")
    stepper.run_to("2.up")
    getattr(stepper, end)()
    assert before.left() == [] and threads() == []
    del stepper, given
    assert allocated() <= held + 4096


def test_the_callers_stream_and_device() -> None:
    seen = []

    def loss_fn(net: nn.Module, given: Any) -> torch.Tensor:
        seen.append((torch.cuda.current_device(), torch.cuda.current_stream()))
        return loss_of(net, given)

    net, side = model(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        stepper = step_through(net, batch(), loss_fn)
    stepper.finish()
    assert stepper.error is None and seen == [(torch.cuda.current_device(), side)]
    if torch.cuda.device_count() > 1:
        with torch.cuda.device(1):
            stepper = step_through(net.to("cuda:1"), batch("cuda:1"), loss_fn)
        stepper.finish()
        assert stepper.error is None and seen[1][0] == 1 and torch.cuda.current_device() == 0


def test_a_batch_on_the_cpu_non_finite_values_and_deterministic_algorithms() -> None:
    net = model()
    with torch.no_grad():
        net[2].down.weight[3, 4] = float("inf")
    torch.use_deterministic_algorithms(True)
    try:
        stepper = step_through(net, batch("cpu"), nn.MSELoss())
        report = stepper.run_to_nonfinite()
    finally:
        torch.use_deterministic_algorithms(False)
    assert stepper.at.name == "2.down" and "parameter `weight` is not finite itself" in str(report)
    assert "cuda:0" in str(report) and not stepper._run.fault
    stepper.abandon()


def test_an_error_on_the_card_is_kept() -> None:
    stepper = step_through(model(), (batch()[0], torch.randn(256, 1)), loss_of)
    stepper.finish()
    assert isinstance(stepper.error, RuntimeError) and "device" in str(stepper.error) and threads() == []
