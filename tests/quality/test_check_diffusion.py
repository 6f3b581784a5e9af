"""check_diffusion(): what is predicted, in all pairs of model and sampler; silent on one that has learnt nothing."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

import nbdebug
from tests.quality.diffusion import ALPHAS, denoising, training_step

TYPES = ("epsilon", "sample", "v_prediction")


def test_each_pair_of_model_and_sampler() -> None:
    for own, taken in itertools.product(TYPES, TYPES):
        random = torch.random.get_rng_state()
        run = denoising(own, taken)
        report = nbdebug.check_diffusion(**vars(run))
        assert report.facts["prediction"] == own and run.model.training, report
        assert [f.code for f in report] == ["quality/prediction-type"] * (own != taken)
        assert torch.equal(random, torch.random.get_rng_state()) and len(report.frame()) == 10


def test_a_model_that_has_learnt_nothing_predicts_nothing() -> None:
    for rate in (0.0, 0.1):
        report = nbdebug.check_diffusion(**vars(denoising("epsilon", "v_prediction", rate)))
        assert not report.findings and report.facts["prediction"] is None


def test_schedules_in_several_forms() -> None:
    run = denoising("epsilon", None)
    scheduler = types.SimpleNamespace(alphas_cumprod=ALPHAS, config={"prediction_type": "v_prediction"})
    assert nbdebug.check_diffusion(run.model, scheduler, run.clean).findings
    report = nbdebug.check_diffusion(run.model, ALPHAS, run.clean)
    assert not report.findings and report.unchecked and "epsilon" in report.headline
    for wrong in (ALPHAS.flip(0), -ALPHAS, {"betas": ALPHAS, "alphas_cumprod": ALPHAS}):
        assert nbdebug.check_diffusion(run.model, wrong, run.clean).findings[0].code == "quality/noise-schedule"
    with pytest.raises(ValueError, match="prediction takes"):
        nbdebug.check_diffusion(run.model, ALPHAS, run.clean, prediction="score")
    with pytest.raises(ValueError, match="the model gives"):
        nbdebug.check_diffusion(lambda noisy, steps: noisy[:, 0], ALPHAS, run.clean)


def test_the_noise_of_a_training_step() -> None:
    run = denoising("epsilon", "epsilon")
    wide = run.clean.repeat(1, 1, 8) + torch.randn(32, 8, 1, generator=torch.Generator().manual_seed(1))

    def told(**noise: float) -> str:
        run.model.pattern = torch.zeros(8, 64)
        step = training_step(run.model, **noise)
        report = nbdebug.check_diffusion(run.model, ALPHAS, wide, prediction="epsilon", step=step)
        assert not run.model._forward_pre_hooks and not report.findings
        return report.notes[-1]

    assert told() == "The training step adds plain noise: no offset."
    assert abs(float(told(offset=0.1).rstrip(".").rpartition(" ")[2]) - 0.1) < 0.02
    assert told(adaptive=0.3).endswith("adaptive.")
    assert "a deviation of 1.5" in told(deviation=1.5)
    for step in (lambda clean: None, lambda clean: run.model(clean, torch.zeros(32).long())):
        report = nbdebug.check_diffusion(run.model, ALPHAS, wide, step=step)
        assert "not known" in report.notes[-1]
