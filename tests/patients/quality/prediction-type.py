"""A model of v is sampled as one of the noise."""

from tests.quality.diffusion import denoising

CODE, NAMES = "quality/prediction-type", ["v_prediction", "epsilon"]


def sick():
    return denoising("v_prediction", "epsilon")


def healthy():
    return denoising("v_prediction", "v_prediction")
