"""Where a stepper stops, what it shows there, and how it ends, without any widget."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.report import Finding, Report
from nbdebug.tools.stepper.step_through import Stepper, step_through
from tests.stepper.models import Block, Dividing, Photograph, Rooting, batch, bits, model, same


def walk(stepper: Stepper, how: str, most: int = 200) -> list[str]:
    """The places from here on, by one method."""
    places = []
    while not stepper.done and len(places) < most:
        getattr(stepper, how)()
        if stepper.at is not None:
            places.append(str(stepper.at))
    return places


def test_it_waits_before_the_model_and_into_goes_everywhere() -> None:
    stepper = step_through(model(), batch(), nn.MSELoss())
    assert (stepper.at.name, stepper.at.module_type, stepper.at.phase, stepper.at.depth, stepper.at.call) == (
        "",
        "Sequential",
        "before",
        0,
        1,
    )
    assert torch.equal(stepper.inputs[0], batch()[0]) and stepper.outputs == () and not stepper.done
    places = walk(stepper, "into")
    layers = ["0", "1", "1.0", "1.0.norm", "1.0.up", "1.0.drop", "1.1", "1.1.norm", "1.1.up", "1.1.drop", "2"]
    began = [p.split("`")[1] for p in places if p.startswith("before `")]
    assert began == [*layers, "loss_fn"]
    assert places.index("at the loss") == places.index("before the backward of `loss_fn` (MSELoss)") - 1
    back = [p.split("`")[1] for p in places if p.startswith("before the backward of `")]
    assert back == [
        "loss_fn",
        "2",
        "1",
        "1.1",
        "1.1.drop",
        "1.1.up",
        "1.1.norm",
        "1.0",
        "1.0.drop",
        "1.0.up",
        "1.0.norm",
        "0",
    ]
    assert len([p for p in places if p.startswith("after")]) == 2 * 13  # each layer, the model and the loss
    assert stepper.done and stepper.error is None and stepper.result.item() > 0


def test_next_goes_over_children_and_out_to_the_parent() -> None:
    stepper = step_through(model(), batch(), nn.MSELoss())
    stepper.into()
    seen = []
    for _ in range(4):
        stepper.next()
        seen.append(str(stepper.at))
    assert seen == [
        "after `0` (Linear)",
        "after `1` (Sequential)",
        "after `2` (Linear)",
        "after the model (Sequential)",
    ]
    stepper = step_through(model(), batch(), nn.MSELoss())
    stepper.run_to("1.0.up")
    stepper.out()
    assert str(stepper.at) == "after `1.0` (Block)"
    stepper.out()
    assert str(stepper.at) == "after `1` (Sequential)"
    stepper.run_to("loss")
    assert stepper.at.phase == "loss"
    stepper.next()
    assert str(stepper.at) == "before the backward of `loss_fn` (MSELoss)"  # backward is not run over unseen
    stepper.run_to("1.1")
    stepper.next()
    assert str(stepper.at) == "after the backward of `1.1` (Block)"
    stepper.next()
    assert str(stepper.at) == "after the backward of `1.0` (Block)"
    stepper.abandon()


def test_tensors_are_those_of_the_step() -> None:
    net, (x, y) = model(), batch()
    stepper = step_through(net, (x, y), nn.MSELoss(), restore=False)
    stepper.run_to("0")
    stepper.next()
    assert torch.equal(stepper.outputs[0], nn.functional.linear(x, net[0].weight, net[0].bias))
    stepper.run_to("2")
    assert stepper.at.phase == "before"
    stepper.run_to("2")
    came = stepper.inputs[0]
    stepper.next()
    went = dict(zip((row[1] for row in stepper.report().tables[0].rows[1:]), stepper.outputs))
    stepper.finish()
    assert torch.equal(went["weight"], net[2].weight.grad) and torch.equal(came.sum(0), net[2].bias.grad)
    assert stepper.inputs == () and stepper.at is None


def test_the_first_non_finite_is_the_innermost_that_makes_it_of_finite_inputs() -> None:
    stepper = step_through(model(Dividing(), Block()), batch(), nn.MSELoss())
    report = stepper.run_to_nonfinite()
    assert str(stepper.at) == "after `1.2` (Dividing)" and ", from finite inputs" in str(report)
    stepper.run_to_nonfinite()
    assert stepper.done  # what follows from it is not told as a fault of its own
    stepper = step_through(model(Rooting(), Block()), batch(), nn.MSELoss())
    stepper.run_to_nonfinite()
    assert str(stepper.at) == "after the backward of `1.2` (Rooting)"
    assert all(torch.isfinite(g).all() for g in stepper.inputs) and not torch.isfinite(stepper.outputs[0]).all()
    stepper.abandon()


@pytest.mark.parametrize(
    "loss_fn, phase",
    [(lambda m, b: (m(b[0]) * 0).log().sum(), "loss"), (lambda m, b: (m(b[0]) * 0).abs().sqrt().sum(), "backward")],
)
def test_what_is_made_outside_of_layers(loss_fn, phase) -> None:
    stepper = step_through(model(), batch(), loss_fn)
    stepper.run_to_nonfinite()
    assert stepper.at.phase == phase
    stepper.run_to_nonfinite()
    assert stepper.done


def test_a_batch_that_is_not_finite_and_a_healthy_step() -> None:
    x, y = batch()
    healthy = step_through(model(), (x, y), nn.MSELoss())
    healthy.run_to_nonfinite()
    assert healthy.done and "as before" in str(healthy)
    x[3, 1] = float("nan")
    stepper = step_through(model(), (x, y), nn.MSELoss())
    assert "1 NaN in `input`" in str(stepper)
    stepper.run_to_nonfinite()
    assert stepper.done


def test_a_mask_of_the_batch_that_leaves_nothing_to_a_row() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.weights = nn.Linear(4, 4), nn.Softmax(-1)

        def forward(self, x, mask):
            return self.weights(self.scores(x) + mask)

    mask = torch.zeros(3, 4)
    mask[0, :2] = -torch.inf
    healthy = step_through(Masked(), (torch.ones(3, 4), mask))
    healthy.run_to_nonfinite()
    assert healthy.done
    mask[1] = -torch.inf
    stepper = step_through(Masked(), (torch.ones(3, 4), mask))
    report = stepper.run_to_nonfinite()
    assert str(stepper.at) == "after `weights` (Softmax)" and "4 NaN in `output`" in str(report)
    assert ", from inputs with inf and no NaN" in " ".join(str(report).split())
    stepper.abandon()


def test_wrong_names_are_refused_and_nothing_moves() -> None:
    stepper = step_through(model(), batch())
    for pattern, said in [("nothing", "'nothing'"), ("", "got ''"), ("1.0.u", "1.0.up")]:
        with pytest.raises(ValueError, match=said):
            stepper.run_to(pattern)
    assert str(stepper.at) == "before the model (Sequential)"
    stepper.run_to("BatchNorm1d")
    assert stepper.at.name == "1.0.norm"
    stepper.run_to("1.0.norm")
    assert stepper.done  # none comes any more
    for wrong in ((3, batch()), (model(), batch(), 3)):
        with pytest.raises(TypeError, match="got 3"):
            step_through(*wrong)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, scale=None):
        return {"loss": (self.layer(self.layer(x)) * scale).mean(), "rest": [x]}


def test_a_layer_called_twice_and_other_forms_of_batches() -> None:
    stepper = step_through(Twice(), {"x": torch.ones(2, 4), "scale": torch.tensor(2.0)})
    assert [row[1] for row in stepper.report().tables[0].rows] == ["x", "scale"]
    stepper.run_to("layer")
    stepper.run_to("layer")
    assert stepper.at.call == 2 and "call 2" in str(stepper)
    places = walk(stepper, "into")
    assert "before the backward of `layer` (Linear), call 2" in places
    assert places.index("before the backward of `layer` (Linear), call 2") < places.index(
        "before the backward of `layer` (Linear)"
    )
    assert set(stepper.result) == {"loss", "rest"} and not stepper.result["loss"].requires_grad
    only_inputs = step_through(model(), batch())
    only_inputs.finish()
    assert only_inputs.result.shape == (16, 1) and "model(batch[0])" in str(only_inputs)


def test_the_users_exception_is_kept_and_explained() -> None:
    net = model()
    before = Photograph(net)
    stepper = step_through(net, (batch()[0][:, :3], None), lambda m, b: m(b[0]).sum())
    said = str(stepper.finish())
    assert isinstance(stepper.error, RuntimeError) and stepper.done and stepper.result is None
    assert "failed in `0` (Linear): RuntimeError: mat1 and mat2 shapes" in " ".join(said.split())
    assert "test_walking.py" in said and "m(b[0]).sum()" in said
    assert before.left() == []
    with pytest.raises(RuntimeError, match="mat1"):
        raise stepper.error


@pytest.mark.parametrize("known", [True, False])
def test_its_cause_is_named_where_it_is_known(monkeypatch, known: bool) -> None:
    def explain(error: Exception) -> Report:
        assert "mat1" in str(error)
        return Report("explain()", (Finding("error/shape-mismatch", "`0` takes 4"),)) if known else 1 / 0

    monkeypatch.setattr(nbdebug, "explain", explain)
    report = step_through(model(), batch()[0][:, :3]).finish()
    assert [f.code for f in report] == ["error/shape-mismatch"] * known and "mat1" in str(report)


def test_an_error_in_backward_names_the_layer_whose_backward_it_was() -> None:
    class Spoiling(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            y += 1
            return y

    stepper = step_through(Spoiling(nn.Linear(4, 4), nn.Sigmoid()), batch()[0], lambda m, b: m(b).sum())
    report = stepper.finish()
    assert "in the backward of `1` (Sigmoid)" in report.headline and not report.ok


@pytest.mark.parametrize(("loss", "well"), [(0.0, True), (math.nan, False), (math.inf, False)])
def test_a_step_that_returns_no_finite_loss_was_not_well(loss: float, well: bool) -> None:
    assert step_through(model(), batch()[0], lambda m, b: m(b).sum() + loss).finish().ok is well


def test_caught_exceptions_do_not_confuse_it() -> None:
    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrong, self.right = nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.wrong(x)
            except RuntimeError:
                return self.right(x)

    places = walk(step_through(Trying(), torch.ones(2, 4)), "into")
    assert places == [
        "before `wrong` (Sequential)",
        "before `wrong.0` (Linear)",
        "before `right` (Linear)",
        "after `right` (Linear)",
        "after the model (Trying)",
    ]


@pytest.mark.parametrize("how", ["into", "next", "finish", "run_to_nonfinite"])
def test_a_step_comes_to_the_same_bits_as_a_plain_one(how: str) -> None:
    plain, stepped = model(), model()
    torch.manual_seed(5)
    loss = nn.functional.mse_loss(plain(batch()[0]), batch()[1])
    loss.backward()
    wanted = bits(plain)
    torch.manual_seed(5)
    stepper = step_through(stepped, batch(), nn.MSELoss(), restore=False)
    while not stepper.done:
        torch.rand(3)  # the user looks at something between two layers
        getattr(stepper, how)()
    assert torch.equal(stepper.result, loss) and same(bits(stepped)[:-1], wanted[:-1])


def test_the_step_may_do_its_own_backward_or_none() -> None:
    def whole(m, b):
        loss = nn.functional.mse_loss(m(b[0]), b[1])
        loss.backward()
        return loss

    stepper = step_through(model(), batch(), whole, restore=False)
    assert any("backward" in place for place in walk(stepper, "into")) and stepper.error is None
    stepper = step_through(model(), batch(), nn.MSELoss(), backward=False)
    assert not any("backward" in place for place in walk(stepper, "into"))


def test_from_another_thread() -> None:
    """A front end may hear a click in a thread of its own."""
    stepper = step_through(model(), batch(), nn.MSELoss())
    clicks = [threading.Thread(target=stepper.next) for _ in range(3)]
    for click in clicks:
        click.start()
    for click in clicks:
        click.join()
    assert str(stepper.at) == "at the loss"
    stepper.abandon()
