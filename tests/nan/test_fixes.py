"""The fix is a text of the user's own, that text is what was tried, and pasted into the program it cures."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import pytest
import torch

import nbdebug
from nbdebug.observe.snapshot import Snapshot
from nbdebug.report import Edit
from tests.benchmarks.cure import PATIENTS, build

WITHOUT_A_LINE = {"compiled-differs", "not-located"}
SICK = [path for path in sorted(PATIENTS.glob("*.py")) if path.stem not in WITHOUT_A_LINE]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def program(folder, text, name="program"):
    """A file of a user's with `build()`, as a module."""
    path = pathlib.Path(folder) / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{name}_{abs(hash(str(path)))}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fix_of(training, **more):
    report = nbdebug.nan_trace(
        training.step, model=training.model, optimizer=training.optimizer, max_steps=training.steps, **more
    )
    return report.findings[0].fixes[0]


def mended(path, edit):
    lines = path.read_text(encoding="utf-8").split("\n")
    assert "\n".join(lines[edit.line - 1 : edit.end_line]) == edit.old
    lines[edit.line - 1 : edit.end_line] = edit.new.split("\n")
    return "\n".join(lines)


@pytest.mark.parametrize("path", SICK, ids=lambda path: path.stem)
def test_each_sick_patient_is_cured_by_its_fix_as_it_is_printed(path, tmp_path):
    fix = fix_of(build(path))
    assert fix.verified and fix.edit is not None and "\n".join(fix.code.split("\n")) == fix.edit.code
    (tmp_path / path.name).write_text(mended(path, fix.edit), encoding="utf-8")
    training = build(tmp_path / path.name)
    for _ in range(training.steps):
        assert torch.isfinite(training.step())
    assert all(bool(torch.isfinite(p).all()) for g in training.optimizer.param_groups for p in g["params"])


STEP = """
from types import SimpleNamespace
import torch
from torch import nn
{names}

def loss_of(h, s):
{body}

def build(values={values}):
    torch.manual_seed(0)
    model = nn.Linear(3, 3){dtype}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(4, 3){dtype}
    s = torch.tensor(values){dtype}
    def step():
        loss = loss_of(model(x), s)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss
    return SimpleNamespace(model=model, optimizer=optimizer, step=step, steps=1)
"""


def asked(folder, body, values=(1.0, 1.0, 0.0), dtype="", names=""):
    body = "\n".join(f"    {line}" for line in body.split("\n"))
    text = STEP.format(body=body, values=list(values), dtype=dtype, names=names)
    return fix_of(program(folder, text).build())


LINES = {
    "an operator in a longer line": (
        "return (h.exp() / 3 + (h * 0 + 1) / s).mean()",
        "(h * 0 + 1) / s.clamp_min(1e-6)",
    ),
    "a denominator of both signs": (
        "return (h / (s - 1)).mean()",
        "torch.where((s - 1).abs() < 1e-6, 1e-6, s - 1)",
    ),
    "a number of Python's": ("n = 0.0\nreturn (h / n).mean()", "(h / max(n, 1e-6))"),
    "an inverse": ("return (1 / (h * s)).mean()", "torch.where((h * s).abs() < 1e-6, 1e-6, h * s)"),
    "in place": ("y = h.abs() * s\ny.log_()\nreturn y.mean()", "y.clamp_min_(1e-8).log_()"),
    "a keyword": ("return torch.log(input=h.abs() * s).mean()", "torch.log(input=(h.abs() * s).clamp_min(1e-8))"),
    "a call over two lines": ("return torch.log(\n    h.abs() * s\n).mean()", "(h.abs() * s).clamp_min(1e-8)"),
    "one line of two": (
        "a = torch.sqrt(h.abs() * s)\nb = torch.sqrt(h.square() * s)\nreturn (a + b).mean()",
        "a = torch.sqrt((h.abs() * s).clamp_min(1e-12))\nb = torch.sqrt((h.square() * s).clamp_min(1e-12))",
    ),
    "one inside another": ("return torch.log(torch.log(s + 1).abs() * h.abs()).mean()", ".clamp_min(1e-8)"),
    "the determinant's log": (
        "return torch.logdet(torch.diag(s - 2) + 1e-3 * h[:3])",
        "torch.linalg.slogdet(torch.diag(s - 2) + 1e-3 * h[:3])[1]",
    ),
    "the log of a determinant of zero": (
        "return torch.logdet(torch.outer(s, s) + h.sum() * 0)",
        "torch.logdet((below := torch.outer(s, s) + h.sum() * 0) + torch.diag(1e-3 * torch.arange(below.size(-1))))",
    ),
    "both ends of a Beta": (
        "return torch.distributions.Beta(h.exp(), 2.0).log_prob(s).mean()",
        ".log_prob(s.clamp(1e-6, 1 - 1e-6))",
    ),
    "a library's function": (
        "return torch.nn.functional.kl_div(h.abs() * s, s.log()[None]).mean() * 0 + (s.log() * h).mean()",
        "",
    ),
}


@pytest.mark.parametrize("kind", LINES)
def test_only_the_expression_at_fault_is_rewritten(kind, tmp_path):
    if sys.version_info < (3, 11) and kind in ("an operator in a longer line", "a library's function"):
        pytest.skip("Python tells the columns of what runs from 3.11 on")
    body, expected = LINES[kind]
    values = (1.0, 2.0, 0.5) if kind == "a denominator of both signs" else (1.0, 1.0, 0.0)
    fix = asked(tmp_path, body, values)
    if kind == "a library's function":  # the logarithm of zero is in the line twice: no edit of the call alone helps
        assert fix.edit is None and "edits of your line helped" in fix.after["why not"], fix
    else:
        assert fix.edit is not None and expected in fix.code and fix.verified, fix


def test_constants_fit_the_dtype(tmp_path):
    fix = asked(tmp_path, "return torch.log(h.abs() * s).mean()", dtype=".half()")
    assert fix.verified and "clamp_min(1e-4)" in fix.code


IN_HALF = {
    "return (h @ h.T * 1e-6).sum()": "    return (h.float() @ h.T.float() * 1e-6).sum()",
    "return ((h.float() * 300) @ s[:, None]).float().sum() * 1e-6": '    with torch.autocast("cpu", enabled=False):\n',
    "return h.pow(2).sum() * 1e-6": "    return h.float().pow(2).sum() * 1e-6",
}
"""Under autocast: an op of its own, a cast of its own, an op that runs in what it is given."""


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("body", IN_HALF)
def test_what_float16_does_not_hold_is_computed_in_float32(body, again, tmp_path):
    factor = "1000" if again else "next(factors)"  # a generator, as of a loader: only the recorded step can tell then
    text = STEP.replace("loss_of(model(x), s)", f"loss_of(model({factor} * x), s)").replace(
        "        loss =", "        with torch.autocast('cpu', torch.float16): loss ="
    )
    text = text.replace("    def step", "    factors = (v for v in [1000])\n    def step")
    fix = fix_of(program(tmp_path, text.format(body=f"    {body}", values=[1.0, 1.0, 0.5], dtype="", names="")).build())
    assert fix.verified and IN_HALF[body] in fix.edit.new and ".float()" in fix.edit.new, fix
    assert ("recorded" in fix.after["tried on"]) is not again


def test_a_model_in_half_precision_gets_the_result_back_in_it(tmp_path):
    body = "y = (h * 500).square().sum(1).sqrt()\nreturn (y @ s.repeat(2)[:4]) * 0.01"
    fix = asked(tmp_path, body, (1.0, 1.0, 0.5), dtype=".half()")
    assert fix.verified and "y = ((h * 500).float()).square().sum(1).sqrt().half()" in fix.code, fix


def test_what_a_change_does_to_sound_values_is_told(tmp_path):
    fix = asked(tmp_path, "return torch.log((h * 0 + 1) * s).mean()", (1.0, 1e-12, 0.0))
    assert fix.verified and fix.after["finite values"] == "4 of 8 unchanged"


def test_a_step_that_does_not_repeat_is_tried_on_the_tape(tmp_path):
    made = program(tmp_path, STEP.format(body="    return (h * next(S)).abs().log().mean()", values=[1.0], dtype="",
                                         names="S = (v for v in [0.0, 1.0])")).build()  # fmt: skip
    fix = fix_of(made)
    assert fix.verified and fix.after["tried on"] == "the recorded step" and fix.edit is not None


def test_later_steps_are_a_part_of_the_trial(tmp_path):
    text = STEP.replace("loss = loss_of(model(x), s)", "loss = loss_of(model(x), s) / next(later)").replace(
        "    def step", "    later = iter([1.0, 0.0, 1.0])\n    def step"
    )
    made = program(tmp_path, text.format(body="    return torch.log(h.abs() * s).mean()", values=[1.0, 1.0, 0.0],
                                         dtype="", names="")).build()  # fmt: skip
    fix = fix_of(made)
    assert fix.verified is None and fix.edit is None, "the step behind it divides by zero"
    assert "did not help (step 1 behind it is bad)" in fix.after["why not"]


def test_everything_is_as_the_failing_step_has_left_it(tmp_path):
    text = STEP.replace("    def step", "    seen, batches = [], iter([1.0, 2.0, 3.0])\n    def step").replace(
        "        loss = ", "        seen.append(next(batches)); print('step')\n        loss = "
    ).replace("steps=1)", "steps=1, seen=seen, batches=batches)")  # fmt: skip
    text = text.format(body="    return torch.log(h.abs() * s).mean()", values=[1.0, 1.0, 0.0], dtype="", names="")
    plain, traced = (program(tmp_path, text, name).build() for name in ("plain", "traced"))
    plain.step()
    fixed = fix_of(traced)
    assert fixed.verified and traced.seen == plain.seen == [1.0] and next(traced.batches) == 2.0
    state = Snapshot.take(plain.model)
    for ours, theirs in zip(traced.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
        assert torch.equal(ours.grad.nan_to_num(7.0), theirs.grad.nan_to_num(7.0))
    assert not state.differences()
    assert "clamp_min" not in "".join(map(str, traced.step.__code__.co_names))


def test_without_a_trial_it_is_a_suggestion(tmp_path):
    fix = asked(tmp_path, "return (h.abs() * s).log().mean() + float(open(__file__).read()[:0] or 0)")
    assert fix.verified and fix.after["tried on"] == "the recorded step"  # a step that opens a file is not run again
    report = nbdebug.Report("ask()", (nbdebug.Finding("nan/x", "x", fixes=(nbdebug.Fix("Do.", "y"),)),))
    assert "A suggestion, not tried" in str(report) and "Tried" not in str(report)


def test_an_edit_names_its_lines():
    assert Edit("a/train.py", 3, 5, "x", "y").place == "train.py, lines 3 to 5"


def test_no_line_of_a_package_is_changed():
    """A parameter of torch's own layer that is not finite: its constructor stands in torch."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    torch.nn.init.constant_(model[1].weight, float("nan"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        optimizer.step()
        return loss

    report = nbdebug.nan_trace(step, model=model, optimizer=optimizer)
    assert all(fix.edit is None and not fix.verified for fix in report.findings[0].fixes)
