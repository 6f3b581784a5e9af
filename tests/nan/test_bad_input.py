"""Bad arguments, odd steps, interruptions: a clear error or a correct report, and nothing left behind."""

from __future__ import annotations

import gc
import traceback
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug import nan_trace


def small(sick: bool = False, **more) -> SimpleNamespace:
    """A model, an optimizer and a step; a sick one takes the logarithm of zero in the second row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scale = torch.tensor([1.0, 0.0 if sick else 1.0, 1.0, 1.0, 1.0])

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        level = (model(torch.randn(5, 3)).squeeze(-1).square() + 0.1) * scale
        loss = torch.log(level).mean()
        loss.backward()
        optimizer.step()
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, **more)


# --- arguments -------------------------------------------------------------------------------------------------------


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


# --- steps that do odd things ------------------------------------------------------------------------------------------


def test_a_step_that_raises_keeps_its_own_exception():
    def step():
        raise LookupError("the user's own")

    with pytest.raises(LookupError, match="the user's own") as caught:
        nan_trace(step)
    assert innermost(caught).endswith("test_bad_input.py")


def test_an_index_error_of_a_bad_label_passes_through():
    model = nn.Linear(3, 4)
    with pytest.raises(IndexError):
        nan_trace(lambda: nn.functional.cross_entropy(model(torch.ones(2, 3)), torch.tensor([1, 9])).backward(), model=model)
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


# --- nothing is left ---------------------------------------------------------------------------------------------------


def global_hooks() -> dict[str, list]:
    """Everything that torch keeps for the whole process and that a tracer might have put there."""
    from torch.optim import optimizer

    module = nn.modules.module
    found = {name: list(value) for name, value in vars(module).items() if name.startswith("_global_") and hasattr(value, "keys")}
    found |= {name: list(value) for name, value in vars(optimizer).items() if name.startswith("_global_") and hasattr(value, "keys")}
    found["dispatch"] = list(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
    found["function"] = list(torch.overrides._get_current_function_mode_stack())
    return found


PATCHABLE = {
    "run_backward": lambda: torch.autograd.graph._engine_run_backward,
    "autograd's": lambda: torch.autograd._engine_run_backward,
    "backward": lambda: torch.autograd.backward,
    "grad": lambda: torch.autograd.grad,
    "tensor.backward": lambda: torch.Tensor.backward,
    "item": lambda: torch.Tensor.item,
    "bool": lambda: torch.Tensor.__bool__,
    "float": lambda: torch.Tensor.__float__,
    "numpy": lambda: torch.Tensor.numpy,
    "from_numpy": lambda: torch.from_numpy,
    "call": lambda: nn.Module.__call__,
    "apply": lambda: torch.autograd.Function.apply.__func__,
    "scaler": lambda: torch.amp.GradScaler.step,
    "step": lambda: torch.optim.AdamW.step,
    "empty": lambda: torch.empty,
}
small()  # torch itself wraps an optimizer's step when the first one is made
BEFORE = {name: read() for name, read in PATCHABLE.items()}


def assert_nothing_is_left() -> None:
    assert not any(global_hooks().values()), global_hooks()
    assert {name: read() for name, read in PATCHABLE.items()} == BEFORE
    assert not torch.is_anomaly_enabled()
    assert torch.is_grad_enabled()
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


def hooks_of(model: nn.Module) -> int:
    return sum(len(value) for module in model.modules() for name, value in vars(module).items() if name.endswith("_hooks"))


@pytest.mark.parametrize("strategy", ["trace", "auto"])
@pytest.mark.parametrize("sick", [False, True])
def test_nothing_is_left_after_it_returns(sick, strategy):
    made = small(sick)
    report = nan_trace(made.step, model=made.model, optimizer=made.optimizer, strategy=strategy, max_steps=2)
    assert report.ok is not sick
    assert_nothing_is_left()
    assert hooks_of(made.model) == 0
    assert not made.optimizer._optimizer_step_pre_hooks and not made.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("when", ["before", "forward", "backward", "optimizer"])
def test_nothing_is_left_after_an_interruption(error, when):
    made = small()

    def interrupt(*given):
        raise error("stop")

    def step():
        if when == "before":
            interrupt()
        out = made.model(torch.randn(5, 3))
        if when == "forward":
            interrupt()
        if when == "backward":
            out.register_hook(interrupt)
        out.mean().backward()
        if when == "optimizer":
            made.optimizer.register_step_post_hook(interrupt)
        made.optimizer.step()

    with pytest.raises(error, match="stop"):
        nan_trace(step, model=made.model, optimizer=made.optimizer)
    assert_nothing_is_left()
    assert hooks_of(made.model) == 0


def test_after_an_interruption_restore_puts_everything_back():
    made = small()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    generator = torch.get_rng_state()

    def step():
        made.step()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nan_trace(step, model=made.model, optimizer=made.optimizer, restore=True)
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not made.optimizer.state


@pytest.mark.parametrize("sick", [False, True])
def test_the_model_ends_where_a_plain_step_leaves_it(sick):
    plain, traced = small(sick), small(sick)
    count = 1 if sick else 3
    torch.manual_seed(5)
    for _ in range(count):
        plain.step()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    nan_trace(traced.step, model=traced.model, optimizer=traced.optimizer, max_steps=count)
    assert torch.equal(torch.get_rng_state(), after)
    for (name, one), (_, other) in zip(plain.model.state_dict().items(), traced.model.state_dict().items()):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan()), name
    for one, other in zip(plain.model.parameters(), traced.model.parameters()):
        assert torch.equal(one.grad.nan_to_num(), other.grad.nan_to_num())


@pytest.mark.parametrize("sick", [False, True])
def test_restore_leaves_all_as_it_was(sick):
    made = small(sick)
    made.model[1].eval()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    flags, generator = [m.training for m in made.model.modules()], torch.get_rng_state()
    nan_trace(made.step, model=made.model, optimizer=made.optimizer, max_steps=2, restore=True)
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert [m.training for m in made.model.modules()] == flags
    assert not made.optimizer.state
    assert all(p.grad is None for p in made.model.parameters())


def tensors_alive() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter))


@pytest.mark.parametrize("sick", [False, True])
def test_no_tensor_outlives_the_report(sick):
    def once() -> None:
        made = small(sick)
        nan_trace(made.step, model=made.model, optimizer=made.optimizer)

    once()  # what is cached once for all does not count
    before = tensors_alive()
    for _ in range(3):
        once()
    assert tensors_alive() <= before


@pytest.mark.parametrize("sick", [False, True])
def test_the_report_keeps_neither_the_model_nor_its_graph(sick):
    made = small(sick)
    watched = [weakref.ref(made.model), weakref.ref(made.model[0].weight), weakref.ref(made.optimizer)]
    report = nan_trace(made.step, model=made.model, optimizer=made.optimizer)
    del made
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]
    assert report.ok is not sick


def test_a_graph_of_the_step_is_freed_when_the_step_is_over():
    held = []
    model = nn.Linear(3, 4)

    def step():
        out = model(torch.ones(2, 3)).square()
        held.append(weakref.ref(out.grad_fn))
        loss = out.mean()
        loss.backward()
        return loss.detach()

    nan_trace(step, model=model)
    gc.collect()
    assert held[0]() is None


def test_tracing_inside_tracing_is_refused_or_works():
    made = small(sick=True)
    inner: list[nbdebug.Report] = []

    def step():
        inner.append(nan_trace(made.step, model=made.model, optimizer=made.optimizer))
        return 1.0

    try:
        nan_trace(step)
    except RuntimeError as error:
        assert "nan_trace" in str(error)
    else:
        assert inner[0].findings[0].where.op == "log"
    assert_nothing_is_left()


def innermost(caught: pytest.ExceptionInfo) -> str:
    """The file in which the exception was raised."""
    return traceback.extract_tb(caught.value.__traceback__)[-1].filename
