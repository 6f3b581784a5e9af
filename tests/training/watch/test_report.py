"""What a watch says and draws: findings with numbers and names, silence on healthy runs, tables, pictures, a live
view."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import xml.dom.minidom
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.live import Live
from nbdebug.tools.grad_watch.history import ThinnedSeries, depth_trend, faded_layers, jumps
from nbdebug.views import html
from nbdebug.views.plots import gradients as watch
from nbdebug.views.plots import marks as pixels
from nbdebug.views.plots.marks import svg
from tests.training.healthy import KINDS


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 40,
    change: Callable[[int], Any] = lambda i: 0,
    **options: Any,
) -> Any:
    """A watch over a small regression; `change(step)` runs between backward and the update."""
    torch.manual_seed(0)
    with nbdebug.grad_watch(model, optimizer, **options) as seen:
        for i in range(steps):
            x = torch.randn(64, 8)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            change(i)
            optimizer.step()
    assert seen.fault == "" and seen.steps == steps
    return seen


def network(activation: Callable[[], nn.Module] = nn.Tanh, depth: int = 3, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(8, width), activation()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def sgd(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_trainings_have_no_finding(kind: str) -> None:
    training = KINDS[kind]()
    with nbdebug.grad_watch(training.model, training.optimizer) as seen:
        training.train(lambda step, loss: seen.loss(step, loss))
    report = seen.report()
    assert seen.fault == "" and report.ok, report
    assert not {v.kind for v in seen.verdicts()} & {"nan", "zero", "spike", "divergence", "oscillation"}
    assert json.dumps(report.to_dict()) and len(html.render(report).encode()) < 100_000


def test_a_smoothed_loss_has_a_floor_and_comes_to_rest_on_it() -> None:
    def watched(loss_fn: Callable[[Any, Any], Any], steps: int = 500) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer, x = torch.optim.Adam(model.parameters(), lr=1e-2), torch.randn(256, 8)
        y = x[:, :4].argmax(1)
        with nbdebug.grad_watch(model, optimizer) as seen:
            for _ in range(steps):
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
        assert seen.fault == ""
        return [note for note in seen.report().notes if "flat" in note or "can't fall" in note]

    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
    (note,) = watched(smoothed)
    assert note.startswith("The loss can't fall below 0.349") and note.endswith("that is no plateau.")
    assert watched(smoothed, 5)[0].endswith("when every answer is right.")
    weighted = nn.CrossEntropyLoss(torch.ones(4), label_smoothing=0.1)
    summed = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")
    for other in (
        nn.CrossEntropyLoss(),
        weighted,
        summed,
        lambda out, y: smoothed(out, y) + 0.01 * out.square().mean(),
    ):
        assert not [note for note in watched(other) if "can't fall" in note]


def test_a_nan_gradient_is_named_with_its_step() -> None:
    model = network()
    poisoned = model[2].weight

    def poison(i: int) -> None:
        if i == 25:
            poisoned.register_hook(lambda g: g * math.nan)

    (finding,) = train(model, sgd(model), change=poison).report().findings
    assert finding.code == "nan/not-located" and finding.where.step == 26 and finding.evidence["where"][0] == "2.weight"
    assert "From step 26 on the gradient of `2.weight` is NaN" in finding.title


def test_an_explosion_is_told_from_a_nan() -> None:
    model = network(nn.Identity)
    (finding,) = (f for f in train(model, sgd(model, 0.5), 60).report().findings if "gradients" in f.code)
    assert finding.code == "training/exploding-gradients" and "had grown from" in finding.title


def test_a_gradient_that_vanishes_with_depth() -> None:
    model = network(nn.Sigmoid, 9)
    report = train(model, sgd(model)).report()
    (finding,) = report.findings
    assert finding.code == "training/vanishing-gradients" and finding.where.module == "0"
    assert "vanishes with depth" in finding.title


def test_a_gradient_that_explodes_with_depth() -> None:
    class Grow(nn.Module):
        """Passes on what it gets, and ten times the gradient."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 10 * x - 9 * x.detach()

    model = network(Grow, 9)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight)
    report = train(model, sgd(model, 0.0)).report()
    assert [f.code for f in report.findings] == ["training/exploding-gradients"]
    assert "explodes with depth" in report.findings[0].title


def test_a_layer_that_fades_against_its_own_past() -> None:
    flat = {"a": [1.0] * 60, "b": [2.0] * 60, "c": [1.0] * 40 + [1e-5] * 20}
    ((name, times),) = faded_layers(flat)
    assert name == "c" and times == pytest.approx(1e5, rel=0.01)
    together = {k: [v * 10 ** (-i / 6) for i, v in enumerate(vs)] for k, vs in flat.items() if k != "c"}
    assert faded_layers(together) == []


def test_depth_needs_order_not_only_distance() -> None:
    assert depth_trend([(str(i), 10.0**-i) for i in (0, 7, 1, 6, 2, 5)]) is None
    assert depth_trend([(str(i), 10.0 ** (i - 9)) for i in range(9)]).kind == "vanishes"  # type: ignore[union-attr]
    assert depth_trend([("a", 1e-9), ("b", 1.0), ("c", 1.0)]) is None
    assert depth_trend([("a", math.nan), ("b", 0.0)] * 4) is None


def test_jumps_of_the_norm() -> None:
    norms = [(i, 1.0 + 0.01 * i) for i in range(30)] + [(30, 40.0), (31, 1.3), (32, math.inf)]
    assert [(step, round(times)) for step, times in jumps(norms)] == [(30, 33)]
    assert jumps([(0, 1.0), (1, 100.0)]) == []


def test_dead_units() -> None:
    model = network(nn.ReLU)
    nn.init.constant_(model[2].bias, -50.0)
    report = train(model, sgd(model)).report()
    (finding,) = report.findings
    assert finding.code == "training/dead-relu" and finding.where.module == "3"
    assert finding.evidence["where"] == ["3", "2"] and "100% of the 16 units" in finding.title
    assert any("exactly zero in every step" in note and "`0.weight`" in note for note in report.notes)


def test_dead_channels_of_a_convolution() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 1))
    with torch.no_grad():
        model[0].bias[:6] = -50.0
    optimizer = sgd(model)
    with nbdebug.grad_watch(model, optimizer, activations_every=1) as seen:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 1, 8, 8)).square().mean().backward()
            optimizer.step()
        (units,) = seen.units
    assert (units.units, units.share, units.feeds) == (8, 0.75, "0")


def test_saturated_units_and_an_answer_that_may_be_sure() -> None:
    model = nn.Sequential(*network(nn.Tanh), nn.Sigmoid())
    with torch.no_grad():
        model[2].weight.mul_(1000)
    seen = train(model, sgd(model))
    (finding,) = seen.report().findings
    assert finding.code == "training/saturated-activation" and finding.where.module == "3"
    assert {u.module for u in seen.units} == {"1", "3"}


def test_losses_by_hand_and_by_themselves() -> None:
    model = network()
    seen = train(model, sgd(model))
    assert len(seen.losses) == 40 and seen.losses[0][1] == pytest.approx(seen.totals.loss[0])
    for step in range(60):
        seen.loss(step * 10, torch.tensor(2.3) if step != 50 else math.nan, val=2.5 if step % 10 == 0 else None)
    assert len(seen.losses) == 60 and seen.verdicts()[0].kind == "nan" and seen.verdicts()[0].step == 500
    assert "NaN at step 500" in str(seen.report())
    with pytest.raises(TypeError, match="a loss is a number"):
        seen.loss(0, "low")


def test_how_it_reads() -> None:
    model = network()
    report = train(model, sgd(model), change=lambda i: nn.utils.clip_grad_norm_(model.parameters(), 0.1)).report()
    text = str(report)
    assert text.startswith("40 steps watched: gradients finite in every layer.")
    assert "40 of 40 steps (100%) were clipped" in text and "lower the rate" in text
    assert "NaN or infinite gradients: none in 40 steps of 6 parameters" in str(report.full())
    assert "None" not in text and "nan" not in text.replace("finite", "")


def test_before_the_first_step() -> None:
    model = network()
    with nbdebug.grad_watch(model, sgd(model)) as seen:
        assert "No step has been watched yet." in str(seen) and seen.frame.empty and seen.totals.empty
        assert "No step has been watched yet" in seen.html()
        with pytest.raises(ValueError, match="nothing to draw"):
            seen.figure()


def test_tables() -> None:
    model = network()
    seen = train(model, sgd(model), 3)
    assert list(seen.frame) == ["step", "name", "norm", "norm_after", "weight_norm", "update_ratio"]
    assert list(seen.totals) == ["step", "loss", "norm", "norm_after", "clipped", "skipped", "lr", "scale"]
    assert len(seen.frame) == 18 and seen.totals.lr.tolist() == [0.01] * 3


def test_the_figure() -> None:
    model = network(depth=12)
    seen = train(model, sgd(model), change=lambda i: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    figure = seen.figure()
    texts = [text.get_text() for text in figure.axes[0].texts]
    wanted = {"loss", "after clipping", "gradient norm of each layer, first layer on top"}
    assert wanted <= set(texts) and any(text.startswith("gradient norm") for text in texts), texts
    assert {str(2 * i) for i in range(12)} <= set(texts)
    assert figure._repr_png_()[0].startswith(b"\x89PNG")


def test_the_html_is_one_picture_and_the_report() -> None:
    model = network()
    seen = train(model, sgd(model))
    bundle = seen._repr_mimebundle_()
    assert bundle["text/plain"] == str(seen.report())
    (picture,) = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)"', bundle["text/html"])
    drawn = xml.dom.minidom.parseString(base64.b64decode(picture[0]))
    assert drawn.documentElement.tagName == "svg" and "Gradient norms of 3 layers over 40 steps" in picture[1]
    assert "<script" not in bundle["text/html"] and len(bundle["text/html"]) < 100_000


def test_names_are_escaped_and_large_models_stay_small() -> None:
    names = {f'<b>"{i}"</b>': nn.Linear(2, 2) for i in range(150)}
    model = nn.Module()
    model.layers = nn.ModuleDict(names)
    optimizer = sgd(model)
    with nbdebug.grad_watch(model, optimizer) as seen:
        for _ in range(3):
            sum(layer(torch.ones(2, 2)).sum() for layer in model.layers.values()).backward()
            optimizer.step()
    page = seen._repr_mimebundle_()["text/html"]
    assert "<b>" not in page and len(page.encode()) < 100_000
    facts = seen.report().plot("gradients")
    assert len(facts["layers"]) <= 40 and len(facts["norms"]) == len(facts["layers"])


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"steps": [1], "layers": ["a"], "norms": [[1, 2]]},
        {"steps": ["x"], "layers": None, "norms": 4, "totals": [[1], "ab", [0, math.nan]]},
    ],
)
def test_facts_from_a_file_that_make_no_sense_draw_nothing(facts: dict) -> None:
    assert watch.read(facts) is None


def test_what_is_not_finite_is_said_in_words() -> None:
    seen = watch.read({"steps": [0, 1], "layers": ["a", "b"], "norms": [[0.5, "nan"], ["zero", None]]})
    assert seen is not None and seen.bad == ["a"] and "not finite in a" in seen.sentence()
    assert seen.colour("nan") == watch.BAD and seen.colour(None) is None and seen.colour("zero") == watch.ZERO
    assert "not finite in a" in svg(seen.drawing())


def test_pixels_are_a_png() -> None:
    data = pixels.png([["#ff0000", None], ["#00ff0080", "#ff0000"]])
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (2, 2)
    start = data.index(b"IDAT")
    assert zlib.decompress(data[start + 4 : start + 4 + struct.unpack(">I", data[start - 4 : start])[0]]) == bytes(
        [0, 0, 1, 0, 2, 0]
    )
    with pytest.raises(ValueError, match="one pixel"):
        pixels.png([])


def test_the_live_view_keeps_to_its_share() -> None:
    now, shown = [0.0], []

    def draw() -> str:
        now[0] += 0.05  # drawing takes 50 ms
        return "picture"

    live = Live(draw, shown.append, lambda: now[0])
    for _ in range(1000):
        now[0] += 0.01
        live.step_ended()
    assert shown == ["picture"] * live.pictures and 1 <= live.pictures <= 3  # 5 s apart: 1%
    live.end()
    assert live.pictures == len(shown)


def test_the_live_view_is_no_faster_than_five_times_a_second() -> None:
    now, shown = [0.0], []
    live = Live(lambda: "p", shown.append, lambda: now[0])
    for _ in range(100):
        now[0] += 0.01
        live.step_ended()
    assert 4 <= len(shown) <= 6


def test_the_live_view_ends_as_the_whole_run() -> None:
    model, shown = network(), []
    optimizer = sgd(model)
    with nbdebug.grad_watch(model, optimizer).live(shown.append) as seen:
        for _ in range(5):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    assert len(shown) >= 2 and "over 5 steps" in shown[-1] and shown[-1] == seen.html()
    with pytest.raises(TypeError, match="a function that shows"):
        seen.live("here")


def test_older_items_are_thinned() -> None:
    kept: ThinnedSeries[int] = ThinnedSeries(10)
    for i in range(1000):
        kept.append(i)
    assert kept.items[-10:] == list(range(990, 1000)) and len(kept.items) <= 20 and kept.items == sorted(kept.items)
