"""explain() itself: which exception of a chain or a group is meant, what is said of unknown ones, and that nothing of
the user's runs, shows or breaks it."""

from __future__ import annotations

import builtins
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nbdebug
from nbdebug import registry as catalogue
from nbdebug.tools.errors.context import candidate_chains

Group = getattr(builtins, "ExceptionGroup", None)
STATE = "error/state-dict-mismatch"
MISSING = "error/module-not-found"


def misfit():
    nn.Linear(2, 2).load_state_dict({"module.weight": torch.zeros(2, 2), "module.bias": torch.zeros(2)})


def no_labels():
    library = {}
    text = "def train(message):\n    raise ValueError(message)"  # as if it lay beside torch
    exec(compile(text, torch.__file__.replace("torch/__init__", "trainers/trainer"), "exec"), library)
    library["train"](
        "The model did not return a loss from the inputs, only the following keys: logits. "
        "For reference, the inputs it received are input_ids,attention_mask."
    )


def test_a_trainer_whose_rows_have_no_labels() -> None:
    with pytest.raises(ValueError) as caught_:
        no_labels()
    found = nbdebug.explain(caught_.value, names={}).findings[0]
    assert found.code == "error/wrong-argument"
    assert "got `input_ids`, `attention_mask` and no `labels`" in found.title


def no_module():
    import surely_not_there_zz  # noqa: F401


def caught(call, *given):
    try:
        call(*given)
    except BaseException as error:
        return error
    raise AssertionError("it should have failed")


def codes(error, **more):
    return [finding.code for finding in nbdebug.explain(error, names={}, **more)]


# -- which exception -----------------------------------------------------------------------------------------------


def test_what_an_error_was_raised_from_is_the_cause() -> None:
    def train():
        try:
            misfit()
        except RuntimeError as error:
            raise ValueError("step 3 failed") from error

    def run():
        try:
            train()
        except ValueError:
            raise SystemError("job failed")  # noqa: B904 (what follows while another is handled)

    report = nbdebug.explain(caught(run), names={})
    (finding,) = report.findings
    assert finding.code == STATE
    said = [link.what for link in finding.chain]
    assert any("`ValueError` followed from it: step 3 failed" in what for what in said)
    assert any("`SystemError` followed" in what for what in said)


def test_a_fallback_that_fails_is_a_failure_of_its_own() -> None:
    def optional():
        try:
            no_module()
        except ImportError:
            misfit()

    assert codes(caught(optional)) == [STATE]

    def unknown_fallback():
        try:
            misfit()
        except RuntimeError:
            return {}["no such key"]

    assert codes(caught(unknown_fallback)) == [STATE]

    def optional_and_unknown():
        try:
            no_module()
        except ImportError:
            return {}["no such key"]

    assert codes(caught(optional_and_unknown)) == [], "the package was optional"

    def needed():
        try:
            no_module()
        except ImportError:
            raise RuntimeError("please install it")  # noqa: B904

    assert codes(caught(needed)) == [MISSING]


def test_frames_around_the_place_that_caught_are_kept() -> None:
    def inner(weights):
        try:
            misfit()
        except RuntimeError as error:
            raise ValueError("no") from error

    def outer():
        pictures = torch.zeros(7, 3)
        inner(pictures)

    error = caught(outer)
    from nbdebug.tools.errors.context import ErrorContext

    candidate = candidate_chains(error)[0][0]
    scene = ErrorContext.of(candidate.error, {}, candidate.led_to)
    assert {"pictures", "weights"} <= {name for name, _, _ in scene.variables()}


@pytest.mark.skipif(Group is None, reason="exception groups came with Python 3.11")
def test_every_member_of_a_group_is_explained() -> None:
    group = Group("two", [caught(misfit), ValueError("no"), Group("deep", [caught(no_module)])])
    report = nbdebug.explain(caught(lambda: (_ for _ in ()).throw(group)), names={})
    assert [finding.code for finding in report] == [STATE, MISSING]
    assert "`ExceptionGroup` followed" in str(report)

    def wrapped():
        try:
            raise group
        except Group as inside:
            raise RuntimeError("tasks failed") from inside

    assert codes(caught(wrapped)) == [STATE, MISSING]


def test_what_fails_after_a_group_was_handled() -> None:
    def run():
        try:
            raise Group("g", [ValueError("x")])
        except Group:
            misfit()

    if Group is not None:
        assert codes(caught(run)) == [STATE]


def test_cycles_and_endless_chains_end() -> None:
    one, two = ValueError("a"), ValueError("b")
    one.__cause__, two.__cause__ = two, one
    assert codes(one) == []
    error = last = ValueError("0")
    for i in range(3000):
        last.__context__ = ValueError(str(i))
        last = last.__context__
    assert codes(error) == []


def test_an_error_with_a_report_of_nbdebugs_own() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nbdebug.guard(model, optimizer, on_trip="raise"):
        with pytest.raises(nbdebug.NonFiniteStep) as stopped:
            for x in (torch.ones(3, 2), torch.full((3, 2), float("nan"))):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        said = nbdebug.explain(stopped.value)
        assert "In step 1 " in str(said) and "trip.locate()" in str(said)
        located = stopped.value.trip.locate()
        assert nbdebug.explain(stopped.value).findings == located.findings != ()


CARRIED = """Traceback (most recent call last):
  File "/run/train.py", line 12, in main
    model.load_state_dict(state)
  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 2629, in load_state_dict
    raise RuntimeError(
RuntimeError: Error(s) in loading state_dict for Net:
\tMissing key(s) in state_dict: "a.weight".
"""


@pytest.mark.parametrize(
    ("kind", "text", "where"),
    [
        (
            "RuntimeError",
            f"Caught RuntimeError in replica 1 on device 1.\nOriginal {CARRIED}",
            "in replica 1 on device 1",
        ),
        ("ProcessRaisedException", f"\n\n-- Process 1 terminated with the following error:\n{CARRIED}", "in process 1"),
        (
            "ChildFailedError",
            f"train.py FAILED\n[0]:\n  rank      : 0 (local_rank: 0)\n  traceback : {CARRIED}\n=======\n",
            "on rank 0",
        ),
    ],
)
def test_errors_of_other_processes_are_read_from_their_text(kind, text, where) -> None:
    error = type(kind, (RuntimeError,), {})(text)
    report = nbdebug.explain(caught(lambda: (_ for _ in ()).throw(error)), names={})
    assert [finding.code for finding in report] == [STATE]
    assert where in str(report) and "a.weight" in str(report) and report.findings[0].where.place == "train.py, line 12"


# -- how it is asked -----------------------------------------------------------------------------------------------


def test_the_one_that_is_handled_the_last_one_and_none(monkeypatch) -> None:
    for name in ("last_value", "last_exc"):
        monkeypatch.delattr(sys, name, raising=False)
    assert "Nothing has failed" in str(nbdebug.explain())
    try:
        misfit()
    except RuntimeError:
        assert [finding.code for finding in nbdebug.explain()] == [STATE]
    monkeypatch.setattr(sys, "last_value", caught(no_module), raising=False)
    assert [finding.code for finding in nbdebug.explain()] == [MISSING]


def test_a_code_gives_its_page() -> None:
    page = nbdebug.explain("nan/overflow")
    rule = catalogue.look_up("nan/overflow")
    assert page == rule.text() == repr(page) and page._repr_markdown_() == rule.page()
    with pytest.raises(ValueError, match=r"nan/overflow"):
        nbdebug.explain("nan/overflw")
    with pytest.raises(TypeError, match="int"):
        nbdebug.explain(3)


@pytest.mark.parametrize(
    ("error", "word"),
    [(SyntaxError("bad"), "SyntaxError"), (KeyboardInterrupt(), "on purpose"), (SystemExit(1), "on purpose")],
)
def test_what_needs_no_explanation(error, word) -> None:
    assert word in str(nbdebug.explain(error))


# -- unknown errors ------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2, 2)

    def forward(self, x, mask=None):
        return self.fc2(x)


def test_an_unknown_error_gets_its_tensors_and_no_guess() -> None:
    def step():
        batch = {"image": torch.arange(6.0).view(2, 3), "ids": torch.tensor([1, 9])}
        bad = torch.tensor([1.0, float("nan")])
        password = "hunter2"
        raise LookupError(f"{len(batch)} {len(bad)} {len(password)}")

    report = nbdebug.explain(caught(step), names={})
    said = str(report)
    assert not report.findings and "No cause is known for this LookupError" in said and "hunter2" not in said
    assert report.frame().set_index("name")["values"].to_dict() == {
        "batch['image']": "0 to 5",
        "batch['ids']": "1 to 9",
        "bad": "1 to 1, 1 NaN or infinite",
    }
    assert report.verdict == "not well, no cause known" and "raise LookupError" in said


def test_an_unknown_error_lists_few_tensors_those_of_its_line_first() -> None:
    def step():
        losses = [torch.tensor(float(i)) for i in range(30)]
        others = {f"t{i}": torch.zeros(i) for i in range(30)}
        count, last = 0, torch.ones(3)
        return len(losses) + len(others) + last / (1 // count)

    names = list(nbdebug.explain(caught(step), names={}).frame()["name"])
    assert names[0] == "last" and len(names) <= 8
    assert [name for name in names if "[" in name] == ["losses[0]", "losses[1]", "others['t0']", "others['t1']"]


def wrong_name():
    picture = torch.zeros(3)
    return pictur + 1 if picture is not None else 0  # noqa: F821


def wrong_key():
    sample = {"image": torch.zeros(2), "label": 3}
    return sample["imagee"]


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (wrong_name, "`pictur` is not defined; `picture` is."),
        (wrong_key, "there is 'image'"),
        (lambda: Net()(torch.zeros(1, 2)), "`Net` has no `fc2`; its modules are `fc1`."),
        (lambda: Net()(), "`forward` takes (x, mask)."),
        (lambda: torch.zeros(2).sumn(), "it has `sum`."),
    ],
)
def test_plain_errors_get_the_name_that_was_perhaps_meant(call, hint) -> None:
    said = str(nbdebug.explain(caught(call), names={}))
    assert hint in said.replace("\n    ", " "), said


# -- nothing of the user's runs, shows or breaks it ----------------------------------------------------------------


class Hostile:
    """Whatever is asked of it is noted."""

    asked: list[str] = []

    def __getattr__(self, name):
        Hostile.asked.append(name)
        raise RuntimeError("asked")

    @property
    def shape(self):
        Hostile.asked.append("shape")
        return (1,)

    __repr__ = __str__ = __len__ = __bool__ = __iter__ = lambda self: Hostile.asked.append("called") or 1 / 0
    __eq__ = lambda self, other: Hostile.asked.append("==") or 1 / 0
    __hash__ = lambda self: Hostile.asked.append("hash") or 1 / 0


class HostileModule(nn.Module):
    def named_modules(self, *given, **more):
        Hostile.asked.append("named_modules")
        raise RuntimeError

    modules = children = named_parameters = parameters = state_dict = named_modules

    def extra_repr(self):
        Hostile.asked.append("extra_repr")
        return ""

    def forward(self, x):
        raise LookupError("inside")


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Hostile.asked.append(getattr(func, "__name__", "?"))
        raise RuntimeError("asked")


class HostileError(RuntimeError):
    args = property(lambda self: Hostile.asked.append("args"))
    message = property(lambda self: Hostile.asked.append("message"))
    report = property(lambda self: Hostile.asked.append("report"))

    __str__ = __repr__ = __getattr__ = lambda self, *given: Hostile.asked.append("str") or 1 / 0


def strange_tensors():
    freed = torch.zeros(1000)
    freed.untyped_storage().resize_(0)
    with torch.device("meta"):
        meta = torch.zeros(3)
    return [
        freed,
        meta,
        torch.zeros(2, 2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        nn.UninitializedParameter(),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(0),
        torch.zeros(3).as_subclass(Wrapped),
        torch.zeros(2, dtype=torch.bool),
        torch.tensor(float("nan")),
        torch.zeros(2, dtype=torch.float8_e5m2),
    ]


def step_among(things, error, depth):
    first = things[0] if things else None
    batch = {"one": things, "secret": "hunter2", 3: first}
    if depth:
        return step_among(things, error, depth - 1), batch
    raise error


@pytest.mark.parametrize(
    "error",
    [
        LookupError("x"),
        HostileError("y"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
        RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation"),
        IndexError("index out of range in self"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError('Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "a". '),
        RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"),
        RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float"),
        AttributeError("'Hostile' object has no attribute 'x'"),
        KeyError(Hostile),
        OSError(24, "Too many open files"),
        RuntimeError("stack expects each tensor to be equal size, but got [2] at entry 0 and [3] at entry 1"),
        TypeError("forward() missing 1 required positional argument: 'x'"),
        RuntimeError(
            "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  x"
        ),
        RuntimeError("Trying to backward through the graph a second time"),
    ],
    ids=lambda error: f"{type(error).__name__}",
)
def test_nothing_of_the_users_runs_and_nothing_breaks_it(error) -> None:
    Hostile.asked.clear()
    things = [Hostile(), HostileModule(), *strange_tensors()]
    raised = caught(step_among, things, error, 3)
    Hostile.asked.clear()
    report = nbdebug.explain(
        raised,
        names={"things": things, "model": things[1], "h": things[0], **{f"t{i}": t for i, t in enumerate(things)}},
    )
    said = str(report) + report._repr_mimebundle_()["text/html"]
    assert Hostile.asked == []
    assert "hunter2" not in said
    assert "could not be explained" not in said and "could not be read" not in said, said
    assert "nbdebug could not check for" not in said, said


def test_a_module_that_overrides_everything_still_has_its_line() -> None:
    model = HostileModule()
    error = caught(lambda: nn.Module.__call__(model, torch.zeros(2)))
    Hostile.asked.clear()
    said = str(nbdebug.explain(error, names={}))
    assert 'raise LookupError("inside")' in said and Hostile.asked == []


def test_endless_recursion_and_many_variables_take_under_a_second() -> None:
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(300))
            self.table = torch.zeros(2)

        def forward(self, x, n=0):
            return self.forward(x * 1, n + 1)

    error = caught(Deep(), torch.zeros(2))
    assert isinstance(error, RecursionError)
    names = {f"x{i}": torch.zeros(2) if i % 2 else [i] for i in range(10_000)}
    nbdebug.explain(error, names={})  # what is imported only once
    started = time.perf_counter()
    report = nbdebug.explain(error, names=names)
    print(f"{time.perf_counter() - started:.2f} s for {len(names)} variables and an endless recursion")
    assert not report.findings and "self.table" in str(report)


def test_a_traceback_that_was_cleared() -> None:
    import traceback

    error = caught(misfit)
    traceback.clear_frames(error.__traceback__)
    assert codes(error) == [STATE]
    assert codes(error.with_traceback(None)) == [STATE]


KINDS = (
    ValueError,
    RuntimeError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    ImportError,
    OSError,
    HostileError,
    StopIteration,
    AssertionError,
    UnicodeDecodeError,
    RecursionError,
    MemoryError,
)
PARTS = st.sampled_from(
    [
        "mat1 and mat2 shapes",
        "size mismatch for a.b: copying a param with shape torch.Size([1])",
        "(2x3",
        "got",
        "[",
        "DataLoader worker (pid 3)",
        "Caught",
        "in DataLoader worker process 0.\n",
        "CUDA error",
        "at dimension 1",
        "NCCL",
        "Original Traceback (most recent call last):\n",
        "No module named",
        "'",
        '"',
        "\n",
        "Double",
        "Float",
        "\0",
        "𝕏",
        "index 7 is out",
    ]
)
THINGS = (Hostile(), Hostile, torch.zeros(2), nn.Linear(1, 1), float, ..., [[]], {})
VALUES = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.integers(),
    st.floats(),
    st.binary(max_size=4),
    st.integers(0, len(THINGS) - 1).map(THINGS.__getitem__),
)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    words=st.lists(PARTS | st.text(max_size=8), max_size=6),
    given_=st.lists(VALUES, max_size=3),
    names=st.dictionaries(st.text(max_size=4), VALUES, max_size=4),
)
def test_no_exception_makes_it_raise(kind, words, given_, names) -> None:
    arguments = [" ".join(words), *given_] if words else given_
    try:
        made = kind(*arguments)
    except Exception:  # UnicodeDecodeError wants its own arguments
        made = ValueError(*arguments)
    Hostile.asked.clear()
    report = nbdebug.explain(caught(step_among, given_, made, 1), names=names)
    assert isinstance(report, nbdebug.Report) and str(report)
    assert "could not be explained" not in str(report)
    assert Hostile.asked == []
