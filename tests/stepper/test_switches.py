"""Autograd's switches inside of the step are those that were meant: entering inference mode would set them all."""

from __future__ import annotations

import torch
from torch import nn

from nbdebug.tools.stepper.step_through import step_through


def test_backward_is_to_run_in_the_steps_own_thread() -> None:
    seen = []

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(
                (torch._C._is_multithreading_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
            )
            return x

    dual = torch.autograd.forward_ad.dual_level()
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode(), dual):
        with context:
            step_through(Look(), torch.ones(2)).finish()
    assert [now[0] for now in seen] == [False] * 4
    assert [now[1:] for now in seen] == [(True, False), (False, False), (False, True), (True, False)]
    assert torch._C._is_multithreading_enabled()
