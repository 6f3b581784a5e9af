"""check_diffusion(): what is predicted, in all pairs of model and sampler; silent on one that has learnt nothing."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

import nbdebug
from tests.quality.diffusion import ALPHAS, denoising

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
