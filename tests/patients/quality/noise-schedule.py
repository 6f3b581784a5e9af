"""The schedule is a cumulative sum, not a product."""

import torch

from tests.quality.diffusion import BETAS, denoising

CODE, NAMES = "quality/noise-schedule", ["alphas_cumprod"]


def sick():
    run = denoising("epsilon", "epsilon")
    run.schedule = {"betas": BETAS, "alphas_cumprod": 1 - torch.cumsum(BETAS, 0) / 11}
    return run


def healthy():
    return denoising("epsilon", "epsilon")
