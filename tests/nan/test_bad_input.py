"""Bad arguments and odd steps: a clear error or a correct report, never a traceback from inside nbdebug."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

from nbdebug import nan_trace
from tests.nan.leftovers import assert_nothing_is_left
from tests.nan.small import small

# --- arguments ---


@pytest.mark.parametrize("given", [None, 3, "train", torch.ones(1), [1, 2]])
def test_a_step_that_cannot_be_called(given):
    with pytest.raises(TypeError) as caught:
        nan_trace(given)
    assert "step" in str(caught.value)
    assert type(given).__name__.lower() in str(caught.value).lower() or repr(given)[:20] in str(caught.value)


def test_a_step_that_wants_arguments_says_what_is_wanted():
    with pytest.raises(TypeError, match="argument") as caught:
        nan_trace(lambda batch: batch)
    assert "step" in str(caught.value) or "lambda" in str(caught.value)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "3"])
def test_max_steps_must_be_a_positive_number(steps):
    with pytest.raises((TypeError, ValueError)) as caught:
        nan_trace(small().step, max_steps=steps)
    assert "max_steps" in str(caught.value)
    assert str(steps) in str(caught.value)


def test_an_unknown_strategy_names_those_that_exist():
    with pytest.raises(ValueError, match="strategy") as caught:
        nan_trace(small().step, strategy="guess")
    for word in ("guess", "auto", "trace", "bisect"):
        assert word in str(caught.value)


@pytest.mark.parametrize("model", [3, "net", [3], {"net": 3}, nn.Linear])
def test_a_model_of_the_wrong_type(model):
    with pytest.raises(TypeError, match="model"):
        nan_trace(small().step, model=model)


def test_an_optimizer_of_the_wrong_type():
    with pytest.raises(TypeError, match="optimizer"):
        nan_trace(small().step, optimizer="adam")


# --- steps that do odd things ---


def test_a_step_that_raises_keeps_its_own_exception():
    def step():
        raise LookupError("the user's own")

    with pytest.raises(LookupError, match="the user's own") as caught:
        nan_trace(step)
    assert innermost(caught).endswith("test_bad_input.py")


def test_an_index_error_of_a_bad_label_passes_through():
    model = nn.Linear(3, 4)
    with pytest.raises(IndexError):
        nan_trace(
            lambda: nn.functional.cross_entropy(model(torch.ones(2, 3)), torch.tensor([1, 9])).backward(), model=model
        )
    assert_nothing_is_left()


def test_no_gradient_anywhere():
    model = nn.Linear(3, 4)

    def step():
        with torch.no_grad():
            return model(torch.ones(2, 3)).mean()

    assert nan_trace(step, model=model).ok


def test_no_gradient_anywhere_and_a_nan():
    def step():
        return torch.log(torch.ones(2, 3) - 2).mean()

    report = nan_trace(step)
    assert not report.ok
    assert report.findings[0].where.op == "log"


def test_backward_without_a_graph_is_the_users_own_error():
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        nan_trace(lambda: torch.ones(3).sum().backward())
    assert "/torch/" in innermost(caught)


@pytest.mark.parametrize("returned", [None, 1.0, "done", [], {"loss": 2.0}, object()])
def test_a_step_that_does_no_work(returned):
    assert nan_trace(lambda: returned).ok


def test_a_model_on_meta():
    model = nn.Linear(3, 4, device="meta")
    try:
        report = nan_trace(lambda: model(torch.ones(2, 3, device="meta")).mean(), model=model)
    except (ValueError, NotImplementedError) as error:
        assert "meta" in str(error)
    else:
        assert report.ok
        assert any("meta" in text for text in (*report.unchecked, *report.notes))
    assert_nothing_is_left()


def test_an_empty_batch():
    model = nn.Linear(3, 4)

    def step():
        loss = model(torch.ones(0, 3)).square().sum()
        loss.backward()
        return loss

    assert nan_trace(step, model=model).ok


def test_an_empty_batch_and_its_mean():
    model = nn.Linear(3, 4)

    def step():
        loss = model(torch.ones(0, 3)).square().mean()
        loss.backward()
        return loss

    report = nan_trace(step, model=model)
    assert report.findings[0].code == "nan/empty-reduction"


def test_a_stream_that_ends_before_max_steps():
    batches = iter(torch.randn(2, 5, 3))
    model = nn.Linear(3, 4)

    def step():
        loss = model(next(batches)).square().mean()
        loss.backward()
        return loss

    report = nan_trace(step, model=model, max_steps=9)
    assert report.ok
    assert report.notes


def test_a_stream_that_is_empty_is_the_users_to_see():
    with pytest.raises(StopIteration):
        nan_trace(lambda: next(iter(())))


def test_names_that_hold_html_are_escaped(tmp_path):
    class Evil(nn.Module):
        def forward(self, x):
            return torch.log(x * 0)

    model = nn.Module()
    model.add_module("<script>alert(1)</script>", Evil())
    model.add_module("lin&'\"", nn.Linear(3, 4))
    inner, outer = model.get_submodule("lin&'\""), model.get_submodule("<script>alert(1)</script>")
    model.forward = lambda x: outer(inner(x)).mean()

    report = nan_trace(lambda: model(torch.ones(2, 3)), model=model)

    assert report.findings[0].where.module == "<script>alert(1)</script>"
    page = report.save(tmp_path / "report.html").read_text(encoding="utf-8")
    for shown in (page, report._repr_mimebundle_()["text/html"]):
        assert "<script>alert" not in shown
        assert "&lt;script&gt;" in shown


def test_a_step_that_is_a_method_or_an_object():
    made = small(sick=True)

    class Trainer:
        def __call__(self):
            return made.step()

        def one(self):
            return made.step()

    assert nan_trace(Trainer(), model=made.model).findings[0].where.op == "log"
    assert nan_trace(small(sick=True).step).findings[0].where.op == "log"
    made = small(sick=True)
    assert nan_trace(Trainer().one, model=made.model, optimizer=made.optimizer).findings[0].where.op == "log"


def innermost(caught: pytest.ExceptionInfo) -> str:
    """The file in which the exception was raised."""
    return traceback.extract_tb(caught.value.__traceback__)[-1].filename
