"""%check_outputs, %check_adapter, %check_diffusion and the numbers of one model and of two, as they are typed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.error import UsageError

from tests.shell import Notebook, started

SETUP = """
import random
from tests.quality import outputs
from tests.quality.adapters import network, trained
rng = random.Random(3)
train = [outputs.sentence(rng, 16) for _ in range(60)]
long = [text for text in train if len(text.split()) > 8]
replies = ["What? " + outputs.sentence(rng, 16) for _ in range(6)] + ["What? " + long[0]]
prompts = ["What? "] * 7
run = network()
model, base, opt = run.model, run.base, run.optimizer
"""


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with started(SETUP) as book:
        yield book


def test_they_ask_the_functions_of_the_same_names(notebook: Notebook) -> None:
    done = notebook.run("%check_outputs replies --training train --prompts prompts")
    assert done.error is None and done.result.findings[0].where.samples == (6,)
    assert done.result.question == "%check_outputs replies --training train --prompts prompts"
    done = notebook.run("%check_outputs --evaluation train[:3] --training train")
    assert done.result.findings[0].code == "quality/evaluation-overlap"
    report = notebook.run("%check_adapter --base base").result
    assert "before training" in report.headline and report.question == "%check_adapter --base base"
    notebook.run("file = 'none.bin'")
    for line in ("%check_outputs", "%check_outputs 3", "%check_adapter model --saved file", "%check_adapter opt"):
        assert isinstance(notebook.run(line).error, UsageError), line


def test_a_denoiser_its_sampler_and_its_noise(notebook: Notebook) -> None:
    notebook.run("from tests.quality.diffusion import *; run = denoising('epsilon', 'sample'); net = run.model")
    notebook.run("step = training_step(net, offset=0.2)")
    done = notebook.run("%check_diffusion net run.schedule run.clean --prediction sample --step step")
    assert done.error is None and done.result.findings[0].code == "quality/prediction-type"
    assert "an offset of" in done.result.notes[-1] and done.result.question.startswith("%check_diffusion net run")
    done = notebook.run("%check_diffusion net ALPHAS run.clean --prediction epsilon")
    assert not done.result.findings and "predicts the noise" in done.result.headline
    for line in ("%check_diffusion net", "%check_diffusion net ALPHAS run.clean --prediction score"):
        assert isinstance(notebook.run(line).error, UsageError), line


def test_numbers_of_one_model_and_of_two(notebook: Notebook) -> None:
    notebook.run("import torch, nbdebug; ids = torch.randint(1, 9, (6, 5)); logits = torch.zeros(6, 5, 9)")
    done = notebook.run("%perplexity logits ids --pad-id 0 --reported 9.0")
    assert abs(done.result.facts["value"] - 9) < 1e-6 and done.result.question.startswith("%perplexity logits ids")
    notebook.run("near = lambda output, x: abs(output - x)")
    done = notebook.run("%compare [1.0]*8 [2.0]*8 [1.5]*4+[1.0]*4 near --lower --seeds 2")
    assert done.error is None and done.result.question.startswith("%compare")
    for line in ("%compare ids ids", "%perplexity nothing ids", "%compare [1.0] [1.0]*2 [1.0] near"):
        assert "rror" in notebook.run(line).printed, line
