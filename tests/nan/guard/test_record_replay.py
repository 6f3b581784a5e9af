"""A step out of a record, run again with a model that was built afresh: the same answer, and nothing executed."""

from __future__ import annotations

import copy
import json
import pathlib
import random
import shutil

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import nbdebug
from nbdebug.tools.guard.record import pack as trip_folder
from nbdebug.tools.guard.record.pack import name_of, op_of
from tests.nan.judge import answer_of
from tests.nan.leftovers import assert_nothing_is_left


class Net(nn.Module):
    """Dropout, running statistics and an argument that is a dict: what a replay must have again."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(7, 3)
        self.register_buffer("offset", torch.full((3,), 0.5), persistent=False)

    def forward(self, x, options=None):
        return self.head(self.body(x)) * (options or {}).get("scale", 1.0) + self.offset


BAD = 4


def plain_loss(out, x, i):
    return torch.log((out - out.detach() * (i == BAD)).abs()[x[:, 0] > -9]).mean()


def unreplayable(out, x, i):
    return Custom.apply(out).mean() / (0.0 if i == BAD else 1.0)


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, g):
        return g * 2


def fresh(width: int = 5) -> Net:
    return Net(width)


def batch(i: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(i))


def train(
    path,
    loss=plain_loss,
    model: nn.Module | None = None,
    call=lambda net, x: net(x, {"scale": 1.5}),
    optimizer=None,
    **given,
):
    """Train until the guard stops it; returns the model and the error."""
    torch.manual_seed(3)
    net = fresh() if model is None else model
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.05)
    with (
        nbdebug.guard(net, optimizer, record=path, **{"on_trip": "raise", **given}),
        pytest.raises(nbdebug.NonFiniteStep) as caught,
    ):
        for i in range(BAD + 1):
            optimizer.zero_grad()
            x = batch(i)
            loss(call(net, x), x, i).backward()
            optimizer.step()
    return net, caught.value


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "run.nbdebug"


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert_nothing_is_left()


def first(report):
    finding = report.findings[0]
    return finding.code, finding.where, finding.title, repr(finding.evidence)  # a NaN is not equal to itself


# -- the same answer ---------------------------------------------------------------------------------------------------


def test_the_answer_is_that_of_the_process_that_trained(path) -> None:
    _, error = train(path)
    live = error.trip.locate()
    torch.manual_seed(99)
    model = fresh()
    before = {k: v.clone() for k, v in (*model.state_dict().items(), ("offset", model.offset))}
    drawn = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    found = nbdebug.open_record(path)
    assert found.trips[0].report is None and "cause was not searched for" in found.report().findings[0].title
    again = found.replay(model)
    assert again.findings[0].code == "nan/log-of-nonpositive" and first(again) == first(live)
    assert again.question == "open_record(run.nbdebug).replay(model)" and again.notes == live.notes
    assert [f.verified for f in again.findings[0].fixes] == [f.verified for f in live.findings[0].fixes]
    assert all(torch.equal(v, before[k]) for k, v in (*model.state_dict().items(), ("offset", model.offset)))
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()
    assert (drawn[2] == numpy.random.get_state()[1]).all()


def test_the_report_of_then_is_in_the_record(path) -> None:
    _, error = train(path, on_trip="trace")
    (trip,) = nbdebug.open_record(path).trips
    assert trip.folder == error.trip.folder and trip.folder.name == "trip-000004"
    assert first(trip.report)[:3] == first(error.report)[:3]
    assert first(nbdebug.open_record(path).report())[:3] == first(error.report)[:3]
    page = (trip.folder / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "nan/log-of-nonpositive" in page
    assert sorted(p.name for p in trip.folder.iterdir()) == [
        "report.html",
        "report.json",
        "step.json",
        "tensors.safetensors",
        "weights.safetensors",
    ]
    for name in ("report.json", "step.json"):
        json.loads((trip.folder / name).read_text(), parse_constant=pytest.fail)


def test_training_that_goes_on_has_the_first_three_written_down(path) -> None:
    torch.manual_seed(3)
    net = fresh()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with nbdebug.guard(net, optimizer, record=path, on_trip="record") as guard:
        for i in range(9):
            optimizer.zero_grad()
            x = batch(i)
            plain_loss(net(x), x, BAD if i % 2 else 0).backward()
            optimizer.step()
    assert guard.skipped == 4
    found = nbdebug.open_record(path)
    assert [t.step for t in found.trips] == [1, 3, 5] and not found.ok
    assert all(t.report.findings[0].code == "nan/log-of-nonpositive" for t in found.trips)
    assert str(found).startswith("4 of 9 steps on record dropped as not finite, the last of them step 5.")
    for n in (0, 1, -1):
        assert found.replay(fresh(), n).findings[0].where.step == found.trips[n].step


def test_random_numbers_of_every_kind_fall_as_they_did(path) -> None:
    """The bad value is made where three sources of random numbers say."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(5, 50)

        def forward(self, x):
            torch.rand(3)
            self.drawn = random.randrange(50), int(numpy.random.randint(50)), int(torch.randint(50, ()))
            if numpy.random.random() < 0.5:
                torch.rand(1)
            return F.dropout(self.line(x), 0.2)

    def loss(out, x, i):
        noise = torch.rand(out.shape, generator=generator)
        return ((out + noise) / (torch.ones(6, 50).index_fill(1, torch.tensor(model.drawn), float(i != BAD)))).mean()

    model, generator = Noisy(), torch.Generator().manual_seed(5)
    random.seed(7), numpy.random.seed(7)
    _, error = train(path, loss, model, lambda net, x: net(x))
    live, drawn = error.trip.locate(), model.drawn
    random.seed(1), numpy.random.seed(1)
    twin = Noisy()
    kept: list = []
    handle = twin.register_forward_hook(lambda m, a, o: kept.append(m.drawn))
    again = nbdebug.open_record(path).replay(twin)
    handle.remove()
    assert set(kept) == {drawn} and first(again) == first(live)


def test_a_loss_of_many_ops_and_parameters_of_its_own(path) -> None:
    """Views, in-place writes, a parameter in the loss, complex numbers, a gradient penalty, autocast, two calls."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.temperature = nn.Linear(5, 4), nn.Parameter(torch.tensor(0.7))

        def forward(self, x, *, y=None, flags=(True, None)):
            return {"out": self.line(x), "pair": (self.line(x if y is None else y), flags)}

    def call(net, x):
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            one = net(x, y=x[:, [0, 1, 2, 3, 4]] * 2, flags=(False, torch.float32))
        return x, one, net(x)

    def loss(given, x, i):
        x, one, two = given
        (slope,) = torch.autograd.grad(two["out"].sum(), x, create_graph=True)
        out = one["out"].float().t()[:2].reshape(-1)
        out = out.clone()
        out[0] = 0.0
        out[1:3].mul_(2.0)
        wave = torch.fft.rfft(two["pair"][0], dim=-1).abs().sum()
        zero = torch.zeros(3, dtype=torch.float64) if i == BAD else torch.ones(3, dtype=torch.float64)
        wanted = torch.tensor([1, 0, 3, 2, 1, 0])
        return (
            out.abs().add(1e-3).log().mean() * model.temperature
            + slope.square().sum()
            + wave * 1e-3
            + F.cross_entropy(two["out"], wanted, reduction="sum")
            + (1.0 / zero).mean()
            + sum(p.square().sum() for p in model.parameters()) * 1e-4
        )

    model = Pair()
    _, error = train(path, loss, model, call)
    live = error.trip.locate()
    again = nbdebug.open_record(path).replay(Pair())
    assert live.findings[0].code != "nan/not-located" and first(again) == first(live)


@pytest.mark.parametrize("fault", ["forward", "backward", "input", "weights"])
def test_faults_of_all_kinds(path, fault) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 4)

        def forward(self, x):
            hidden = torch.tanh(self.one(x))
            zero = 0.0 if fault == "forward" and x.abs().max() > 40 else 1.0
            return self.two(hidden / zero)

    def loss(out, x, i):
        return (out - out.detach()).square().sum(-1).sqrt().sum() if fault == "backward" and i == BAD else out.mean()

    def call(net, x):
        if torch.equal(x, batch(BAD)):
            if fault == "weights":
                with torch.no_grad():
                    net.two.weight[1, 2] = float("nan")
            x = (
                x * 50
                if fault == "forward"
                else x.index_fill(0, torch.tensor(3), float("nan"))
                if (fault == "input")
                else x
            )
        return net(x)

    _, error = train(path, loss, Deep(), call)
    live = error.trip.locate()
    again = nbdebug.open_record(path).replay(Deep())
    assert live.findings[0].code != "nan/not-located" and first(again) == first(live)
    assert answer_of(again) == answer_of(live)


def test_several_models(path) -> None:
    torch.manual_seed(3)
    models = {"gen": nn.Linear(5, 5), "judge": nn.Linear(5, 1)}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models.values()]
    guard = nbdebug.guard(models, optimizers, record=path, on_trip="raise")
    with guard, pytest.raises(nbdebug.NonFiniteStep) as caught:
        for i in range(4):
            out = models["judge"](models["gen"](batch(i)))
            (out.mean() / (i != 2)).backward() if i == 2 else out.mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    live = caught.value.trip.locate()
    twins = {"judge": nn.Linear(5, 1), "gen": nn.Linear(5, 5)}
    found = nbdebug.open_record(path)
    assert first(found.replay(twins)) == first(found.replay([twins["gen"], twins["judge"]])) == first(live)
    with pytest.raises(ValueError, match=r"has 2 models \(gen, judge\); replay got 1"):
        found.replay(twins["gen"])


def test_compiled_and_wrapped_names_fit_the_bare_model(path) -> None:
    model = nn.Sequential(torch.compile(nn.Linear(5, 3), backend="eager"), nn.Tanh())
    train(path, lambda out, x, i: out.mean() / (0.0 if i == BAD else 1.0), model, lambda net, x: net(x))
    again = nbdebug.open_record(path).replay(nn.Sequential(nn.Linear(5, 3), nn.Tanh()))
    assert again.findings[0].code == "nan/div-by-zero"


def test_an_update_that_makes_a_parameter_bad(path) -> None:
    """float16 and an eps that rounds to nothing: the step is finite, the update is not."""

    def half():
        return nn.Linear(5, 3).half()

    torch.manual_seed(3)
    net = half()
    net.weight.data.zero_()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    with nbdebug.guard(net, optimizer, record=path, on_trip="raise"), pytest.raises(nbdebug.NonFiniteStep) as caught:
        (net(torch.zeros(2, 5).half()).sum() * 0).backward()
        optimizer.step()
    assert caught.value.trip.reason == "parameter"
    found, twin = nbdebug.open_record(path), half()
    alone = found.replay(twin)
    assert alone.findings[0].code == "nan/not-located" and "pass `optimizer=`" in alone.notes[0]
    before = copy.deepcopy(twin.state_dict())
    mine = torch.optim.Adam(twin.parameters(), lr=0.1)
    again = found.replay(twin, optimizer=mine)
    assert again.findings[0].code == caught.value.trip.locate().findings[0].code == "nan/optimizer-eps-underflow"
    assert all(torch.equal(v, before[k]) for k, v in twin.state_dict().items()) and not mine.state


# -- what can't be had -------------------------------------------------------------------------------------------------


def test_weights_that_are_too_large_are_left_out_and_said(path, monkeypatch) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(trip_folder.shutil, "disk_usage", lambda p: real(p)._replace(free=600))
    net, error = train(path)
    found = nbdebug.open_record(path)
    assert "were free" in found.trips[0].no_weights and not (error.trip.folder / "weights.safetensors").exists()
    assert "Its weights are not in the record" in str(found)
    again = found.replay(net)  # which has them still
    assert first(again) == first(error.trip.locate())
    assert "The weights are those of your model" in again.notes[0]


def test_a_full_disk_takes_the_report_all_the_same(path, monkeypatch) -> None:
    def full(tensors, file):
        pathlib.Path(file).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trip_folder, "save_file", full)
    _, error = train(path, on_trip="trace")
    (trip,) = nbdebug.open_record(path).trips
    assert first(trip.report)[:3] == first(error.report)[:3] and "No space left" in trip.no_replay
    assert not list(trip.folder.glob("*.safetensors"))
    with pytest.raises(ValueError, match="can't be replayed from disk: its tensors could not be written"):
        nbdebug.open_record(path).replay(fresh())


def test_a_disk_that_takes_nothing_is_told_once_and_leaves_nothing(path, monkeypatch) -> None:
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trip_folder, "_write_json", full)
    with pytest.warns(RuntimeWarning, match="step 4, which was not finite, could not be saved"):
        _, error = train(path, on_trip="trace")
    assert error.trip.folder is None and error.report.findings[0].code == "nan/log-of-nonpositive"
    assert [p.name for p in path.iterdir()] == ["steps.jsonl"]
    found = nbdebug.open_record(path)
    assert not found.ok and found.report().findings[0].code == "nan/not-located"


class Mystery:
    """An object of the user's, which a file can't hold."""


SPARSE = torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda net, x: net(x, {"scale": 1.0, "by": Mystery()}), "`model` was given a Mystery"),
        (lambda net, x: net(x, {"scale": 1.0, ("a", 1): 2}), "`model` was given a dict"),
        (lambda net, x: net(x, {"scale": 1.0, "other": SPARSE}), "`model` was given a Tensor"),
    ],
)
def test_what_can_not_be_rebuilt_is_said(path, call, said) -> None:
    _, error = train(path, call=call, on_trip="trace")
    (trip,) = nbdebug.open_record(path).trips
    assert said in trip.no_replay and trip.report is not None
    assert error.report.findings[0].code == "nan/log-of-nonpositive", "live it is no matter"
    assert "It can't be replayed from disk" in str(nbdebug.open_record(path).report().full())
    with pytest.raises(ValueError, match=said.replace("`", ".")):
        nbdebug.open_record(path).replay(fresh())


def test_a_model_that_is_built_otherwise_is_named(path) -> None:
    train(path)
    found = nbdebug.open_record(path)
    with pytest.raises(ValueError, match=r"body\.0\.weight has shape \(7, 5\) in the record and \(7, 6\) in the model"):
        found.replay(fresh(6))
    with pytest.raises(ValueError, match=r"the record has no bias and weight; the model has no body\.0\.bias.* 5 more"):
        found.replay(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model must be"):
        found.replay("net")
    with pytest.raises(IndexError):
        found.replay(fresh(), 1)
    empty = nbdebug.open_record(path)
    empty.trips.clear()
    with pytest.raises(ValueError, match="no step to replay"):
        empty.replay(fresh())


def test_a_model_that_can_not_be_copied_is_said(path) -> None:
    class Stubborn(Net):
        def __deepcopy__(self, memo):
            raise TypeError("one of a kind")

    train(path)
    with pytest.raises(ValueError, match=r"can't be copied \(TypeError: one of a kind"):
        nbdebug.open_record(path).replay(Stubborn())


# -- a stranger's step -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_record(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("strangers") / "run.nbdebug"
    train(path)
    return path


def changed(record: pathlib.Path, into: pathlib.Path, change) -> pathlib.Path:
    """A copy of the record whose step.json was changed."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(record, into)
    file = into / "trip-000004" / "step.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    return into


def ops(data) -> list[dict]:
    return [entry for entry in data["tape"]["entries"] if "op" in entry]


def calls(data) -> list[dict]:
    return [entry for entry in data["tape"]["entries"] if "call" in entry]


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten.set_.source_Tensor",
        "aten._reshape_alias.default",
        "prims.add.default",
        "aten.add",
        "aten.__class__.mro",
        "aten.log.__call__",
        "os.system",
        "aten.resize_.default",
        "aten.nothing.default",
        "aten.log.default\n",
        7,
        None,
        "torchvision.nms.default",
        "aten.data.default",
    ],
)
def test_ops_that_a_record_may_not_ask_for(a_record, tmp_path, name) -> None:
    path = changed(a_record, tmp_path / "r", lambda data: ops(data)[0].update(op=name))
    with pytest.raises(ValueError, match=r"not among those|has no op"):
        nbdebug.open_record(path).replay(fresh())


@pytest.mark.parametrize(
    "change",
    [
        lambda data: ops(data)[0].update(kwargs={"dict": [["filename", "/etc/passwd"]]}),
        lambda data: ops(data)[0].update(args={"tuple": ["/etc/passwd"]}),
        lambda data: ops(data)[0].update(args={"tuple": [[["/etc/passwd"]]]}),
        lambda data: ops(data)[0].update(args={"tuple": [1] * 99}),
        lambda data: ops(data)[0].update(args={"dtype": "load"}),
        lambda data: ops(data)[0].update(args={"tuple": [{"layout": "ops.aten"}]}),
        lambda data: ops(data)[0].update(args={"tuple": [{"code": "1"}]}),
        lambda data: ops(data)[0].update(args={"tuple": [{"generator": 3}]}),
        lambda data: ops(data)[0].update(results="x"),
        lambda data: ops(data)[0].update(index=-1),
        lambda data: ops(data)[0].update(during="elsewhere"),
        lambda data: ops(data)[0].update(site=["a.py", 1]),
        lambda data: calls(data)[0].update(call="model/__init__"),
        lambda data: calls(data)[0].update(call="other"),
        lambda data: data["tape"].update(entries={}),
        lambda data: data["tape"].update(device="nowhere"),
        lambda data: data["tape"].update(held=[{"number": 77}]),
        lambda data: data["tape"]["held"].append({"number": 9, "leaf": True, "parameter": ["model", "head.x"]}),
        lambda data: calls(data)[0]["surroundings"]["random"][1].update(rest=[10**9, 0, 0.0]),
        lambda data: calls(data)[0]["surroundings"]["random"][0].update(rest=[3, "x"]),
        lambda data: calls(data)[0]["surroundings"].update(autocast=[["cpu", True, "save"]]),
    ],
)
def test_steps_that_make_no_sense_are_refused(a_record, tmp_path, change) -> None:
    path = changed(a_record, tmp_path / "r", change)
    with pytest.raises(ValueError, match="can't be read from"):
        nbdebug.open_record(path).replay(fresh())


def places(node, found=()) -> list[tuple]:
    """Every place in nested JSON, as a path of keys."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found, *(p for key, value in inner for p in places(value, (*found, key)))]


scraps = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 12),
    st.floats(),
    st.sampled_from(
        [
            "",
            "nan",
            "cpu",
            "x",
            [],
            {},
            {"ref": 3},
            {"ref": 1, "view": [[9], [1], 0]},
            {"tuple": []},
            {"dict": []},
            "aten.add_.Tensor",
            "aten.mul.Tensor",
            "float16",
            2**61,
            ["/dev/zero", 1, "f"],
            {"ref": 0, "detached": True},
        ]
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 10**6), scraps), min_size=1, max_size=3))
def test_a_step_that_was_tampered_with_is_replayed_or_refused(a_record, tmp_path, changes) -> None:
    def tamper(data) -> None:
        for n, scrap in changes:
            *way, last = (all_places := [p for p in places(data["tape"]) if p])[n % len(all_places)]
            node = data["tape"]
            for key in way:
                node = node[key]
            node[last] = copy.deepcopy(scrap)

    found = nbdebug.open_record(changed(a_record, tmp_path / "r", tamper))
    model = fresh()
    before = copy.deepcopy(model.state_dict())
    try:
        assert isinstance(found.replay(model), nbdebug.Report)
    except ValueError as reason:
        assert "can't be re" in str(reason)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_files_that_are_missing_damaged_or_links(a_record, tmp_path) -> None:
    for n, name in enumerate(("tensors.safetensors", "weights.safetensors", "step.json")):
        path = shutil.copytree(a_record, tmp_path / f"{n}")
        file = path / "trip-000004" / name
        whole = file.read_bytes()
        for data in (b"", b"\xff" * 64, whole[:-9], b"\x00" * len(whole)):
            file.write_bytes(data)
            with pytest.raises(ValueError, match="can't be re"):
                nbdebug.open_record(path).replay(fresh())
        file.unlink()
        with pytest.raises(ValueError, match=rf"lacks|{name} is missing"):
            nbdebug.open_record(path).replay(fresh())
        (tmp_path / "elsewhere").write_bytes(whole)
        file.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="is a link"):
            nbdebug.open_record(path).replay(fresh())


def test_a_line_of_a_file_that_is_no_source_is_not_read(a_record, tmp_path) -> None:
    """A report shows the line at fault, so a record could have any file read: only source is."""
    (tmp_path / "secret.txt").write_text("hunter2\n" * 400)

    def point(data) -> None:
        for entry in data["tape"]["entries"]:
            entry["site"] = [str(tmp_path / "secret.txt"), 1, "f"]

    said = nbdebug.open_record(changed(a_record, tmp_path / "r", point)).replay(fresh())
    assert "hunter2" not in str(said) and "hunter2" not in json.dumps(said.to_dict())


def test_every_op_that_may_be_written_can_be_read() -> None:
    assert name_of(torch.ops.aten.log.default) == "aten.log.default"
    for name in ("aten.log.default", "aten.__and__.Tensor", "aten._softmax.default", "aten._foreach_norm.Scalar"):
        assert name_of(op_of(name)) == name
    assert name_of(torch.ops.aten.set_.source_Tensor) is None and name_of(torch.ops.prims.add.default) is None
    assert name_of(torch.add) is None
