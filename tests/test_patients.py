"""Every cause has a patient: a small training that is sick with it, and the same training, healed.

`tests/patients/nan/<slug>.py` holds CODE, PHASE, MODULE, OP, LINE, SAMPLES and STEP beside `sick()` and `healthy()`. A
rule must fire on the one and be silent on the other. MODULE, OP and LINE are None where no right answer exists.
`tests/patients/training/<slug>.py` holds CODE and WHERE: names of which any one is right to blame; RUN, where only a
run shows it;
`tests/patients/memory/<slug>.py` CODE, HOLDER and LINE: who keeps the memory, and where it is put there;
`tests/patients/error/<slug>.py` CODE and NAMES: what the explanation of the error must name;
`tests/patients/data/<slug>.py` CODE and NAMES: items that the report on the set must name;
`tests/patients/checkpoint/<slug>.py` CODE and NAMES: what is said of the file that `make(folder)` gives;
`tests/patients/quality/<slug>.py` CODE and NAMES: what is said of an evaluation, or of what a model made;
`tests/patients/run/<slug>.py` CODE and NAMES: what is said of a log, or of samples of a machine;
`tests/patients/speed/<slug>.py` CODE, BOTTLENECK (the part of the step that is slow) and LINE;
`tests/patients/notebook/<slug>.py` also CELL, from 0: the one of its cells that brings it in. How a patient is asked
depends on its chapter; one code is the guard's own, and causes that show before training are asked of preflight.
"""

import ast
import importlib.util
import os
import pathlib
import re
import tempfile
import time

import pytest
import torch

import nbdebug
from nbdebug import registry as catalogue
from nbdebug.tools.distributed.launch import report_of as ranks_report
from nbdebug.tools.memory.facts import MemoryFacts
from nbdebug.tools.memory.mem import mem
from nbdebug.tools.memory.mem import report_of as memory_report
from nbdebug.tools.monitor.rules import MACHINE_RULES
from nbdebug.tools.speed.bottleneck import report_of as speed_report
from nbdebug.tools.speed.rules import SpeedFacts
from tests.shell import of_cells

HERE = pathlib.Path(__file__).parent / "patients"
PATIENTS = sorted(HERE.glob("*/*.py"))


@pytest.fixture(params=PATIENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def patient(request):
    path = request.param
    spec = importlib.util.spec_from_file_location("patient_" + path.stem.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def traced(training):
    return nbdebug.nan_trace(
        training.step, model=training.model, optimizer=training.optimizer, max_steps=training.steps
    )


def guarded(training):
    with nbdebug.guard(training.model, training.optimizer, on_trip="raise") as guard:
        for _ in range(training.steps):
            try:
                training.step()
            except nbdebug.NonFiniteStep as tripped:
                return tripped.trip.locate()
        return guard.report()


def preflighted(training):
    return nbdebug.preflight(
        training.model,
        training.train_loader,
        training.loss_fn,
        optimizer=training.optimizer,
        val_loader=training.val_loader,
        scheduler=training.scheduler,
    )


def diagnosed(training):
    return nbdebug.diagnose(
        training.train,
        model=training.model,
        optimizer=training.optimizer,
        loss_fn=training.loss_fn,
        train_loader=training.train_loader,
        val_loader=training.val_loader,
        scheduler=training.scheduler,
        progress=False,
    )


def halved(training):
    return nbdebug.precision(
        training.model,
        training.batch,
        training.loss_fn,
        training.dtype,
        mode="cast",
        optimizer=getattr(training, "optimizer", None),
        progress=False,
    )


def remembered(training):
    if isinstance(training, MemoryFacts):  # of an allocator that this machine lacks
        return memory_report(training, "mem(step)", "")
    return mem(
        training.step,
        steps=training.steps,
        model=training.model or {},
        optimizer=training.optimizer,
        loader=getattr(training, "loader", None),
        names=training.names,
        progress=False,
    )


def timed(training):
    if isinstance(training, SpeedFacts):  # of GPUs, which this machine lacks
        return speed_report(training, "bottleneck(step)", "")
    names = {name: value for name, value in vars(training).items() if name != "step"}
    parts = {name: names.get(name) for name in ("model", "optimizer", "loader")}
    proven = names.pop("proven", False)  # by an experiment alone
    return nbdebug.bottleneck(training.step, **parts, steps=8, try_cures=proven, names=names)


def failed(training):
    """What is said of the error that the user saw."""
    try:
        try:
            training.trigger()
        except (OSError, EOFError):  # of a worker that died: what torch says of it comes by a signal, a moment later
            time.sleep(0.5)
            raise
    except Exception as error:
        return nbdebug.explain(error, names=getattr(training, "names", {}))
    return nbdebug.Report("explain()")


def configured(training):
    """Of a file that a program fails to read, what is said of the error; else what is said of the file."""
    return (
        failed(training)
        if hasattr(training, "trigger")
        else nbdebug.check_config(training.path, schema=training.schema)
    )


def run_as_cells(training):
    with of_cells(training.cells) as (shell, _):
        return nbdebug.check_notebook(shell=shell)


def opened(training):
    if hasattr(training, "trigger"):
        return failed(training)
    with tempfile.TemporaryDirectory() as folder:
        path = training.make(pathlib.Path(folder))
        if hasattr(training, "resumed"):
            return nbdebug.resume_proof(training.resumed, training.uninterrupted, path)
        parts = {name: value for name, value in vars(training).items() if name != "make"}
        return nbdebug.check_checkpoint(path, **parts)


def checked(training):
    """A set, or a loader; the error of a picture that a program reads."""
    if hasattr(training, "trigger"):
        return failed(training)
    if hasattr(training, "loader"):
        return nbdebug.check_loader(**vars(training))
    if hasattr(training, "dataset"):
        return nbdebug.check_data(training.dataset, expected=training.expected, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        return nbdebug.check_data(training.make(pathlib.Path(folder)), expected=training.expected, progress=False)


def outcome(training):
    """Of an evaluation, by the names of `perplexity`; of an adapter, or of what a model made, by those of its check."""
    parts = dict(vars(training))
    if "clean" in parts:
        return nbdebug.check_diffusion(**parts)
    if "metric" in parts:
        return nbdebug.compare(**parts)
    if "base" in parts:
        return nbdebug.check_adapter(parts.pop("model"), **parts)
    if "tokens" not in parts:
        return nbdebug.check_outputs(**parts)
    subject = parts.pop("model") if "model" in parts else parts.pop("logits")
    return nbdebug.perplexity(subject, parts.pop("tokens"), **parts)


def from_outside(training):
    """Of the text of a log, what is read in it; of a machine's samples, what they show."""
    if not isinstance(training, str):
        findings = (check(training) for check in MACHINE_RULES)
        return nbdebug.Report("monitor()", tuple(filter(None, findings)), steps=len(training.samples))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "train.log"
        path.write_text(training)
        os.utime(path, (time.time() - 90_000,) * 2)
        return nbdebug.read_log(path)


ASK = {
    "checkpoint": opened,
    "config": configured,
    "data": checked,
    "distributed": lambda training: ranks_report(training, "ranks"),
    "environment": lambda training: nbdebug.check_environment(facts=training.facts),
    "error": failed,
    "error/stale-import": run_as_cells,
    "memory": remembered,
    "nan": traced,
    "nan/not-located": guarded,
    "notebook": run_as_cells,
    "precision": halved,
    "quality": outcome,
    "run": from_outside,
    "speed": timed,
    "training": diagnosed,
}


BEFORE_TRAINING = {f"nbdebug.tools.training.rules.{name}" for name in ("data", "losses")} | {
    f"training/{code}"
    for code in (
        "batch-mixing",
        "frozen-parameters",
        "detached-graph",
        "parameters-not-in-optimizer",
        "bad-init",
        "label-out-of-range",
    )
}


def ask(patient, training):
    before = {patient.CODE, catalogue.look_up(patient.CODE).check.__module__} & BEFORE_TRAINING
    if before and not hasattr(patient, "RUN"):
        return preflighted(training)
    return ASK.get(patient.CODE, ASK[patient.CODE.split("/")[0]])(training)


def meets(wanted, name):
    """A blamed name meets a wanted one: the same, a part of it, or something inside of it."""
    return wanted == name or f".{wanted}." in f".{name}." or len(wanted) > 3 and wanted in name


def statement_at(path, line):
    """The source of the smallest statement that covers a line: a call may stand over several lines."""
    source = pathlib.Path(path).read_text(encoding="utf-8")
    covering = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno
    ]
    return ast.get_source_segment(source, min(covering, key=lambda node: node.end_lineno - node.lineno))


def test_sick_patient_gets_its_cause_and_only_that(patient):
    report = ask(patient, patient.sick())
    if patient.CODE.startswith("speed/") and not report.findings:  # what else runs on the machine can hide it once
        report = ask(patient, patient.sick())
    every_fix_is_shown_and_proven_by_numbers(report)

    assert [finding.code for finding in report] == [patient.CODE]
    where = report.findings[0].where
    if hasattr(patient, "WHERE"):
        blamed = [*report.findings[0].evidence["where"], where.module or ""]
        assert any(meets(wanted, name) for wanted in patient.WHERE for name in blamed), blamed
        return
    if hasattr(patient, "HOLDER"):
        assert report.findings[0].evidence["holder"][0] in patient.HOLDER
        same_line(patient, where)
        return
    if hasattr(patient, "BOTTLENECK"):
        assert report.findings[0].evidence["bottleneck"] == patient.BOTTLENECK
        same_line(patient, where)
        return
    if hasattr(patient, "CELL"):
        assert where.cell == f"In [{patient.CELL + 1}]"
    if hasattr(patient, "NAMES"):
        said = str(report.full())
        assert not [name for name in patient.NAMES if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", said)], said
        return
    assert where.phase == patient.PHASE
    assert where.step == patient.STEP
    assert where.samples == patient.SAMPLES
    assert patient.MODULE in (None, where.module)
    assert patient.OP in (None, where.op)
    same_line(patient, where)


def same_line(patient, where):
    if patient.LINE is not None:
        assert pathlib.Path(where.file) == pathlib.Path(patient.__file__)
        assert patient.LINE in statement_at(where.file, where.line)


def test_healthy_twin_is_left_in_peace(patient):
    report = ask(patient, patient.healthy())

    assert not report.findings, report.findings[0].title


def every_fix_is_shown_and_proven_by_numbers(report):
    fixes = report.findings[0].fixes

    assert fixes
    for fix in fixes:
        assert fix.code.strip()
        assert all(line.strip() in str(report.full()) for line in fix.code.splitlines())
        if report.findings[0].chapter == "training":  # called tried is a text alone, and the text that was run
            assert fix.verified is None or (fix.edit is not None and "tried on" in fix.after)
        if report.question == "check_data()":
            assert any(fix.verified for fix in fixes), "what it prints was run, and what it gave was checked again"
        if fix.verified is not None:
            assert any(re.search(r"\d", str(value)) for value in fix.after.values())


def code_of(path):
    """Further patients of one code are `<slug>--<kind>.py`."""
    return f"{path.parent.name}/{path.stem.partition('--')[0]}"


def test_patient_is_what_its_docstring_promises(patient):
    """The line that is to be named stands exactly once in the file, outside the constant that names it."""
    path = pathlib.Path(patient.__file__)

    assert code_of(path) == patient.CODE
    assert patient.__doc__.strip()
    if getattr(patient, "LINE", None) is not None:
        body = path.read_text(encoding="utf-8").split("\n\n\n", 1)[1]
        assert body.count(patient.LINE) == 1


def test_every_code_has_a_patient_and_every_patient_a_code():
    assert {code_of(path) for path in PATIENTS} == {rule.code for rule in catalogue.rules()}


def plain_run(training):
    """What is seen bad first when the training runs without nbdebug: (phase, step), or None."""
    modules = [training.model] if training.model is not None else []
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    if any(not torch.isfinite(t).all() for t in tensors):
        return "parameter", 0
    for step in range(training.steps):
        loss = training.step()
        parameters = [p for m in modules for p in m.parameters()]
        if not torch.isfinite(loss):
            return "forward", step
        if any(p.grad is not None and not torch.isfinite(p.grad).all() for p in parameters):
            return "backward", step
        if any(not torch.isfinite(p).all() for p in parameters):
            return "optimizer", step
    return None


@pytest.mark.parametrize(
    "patient", [p for p in PATIENTS if p.parent.name == "nan"], indirect=True, ids=lambda path: path.stem
)
def test_patient_fails_in_plain_torch_and_its_twin_does_not(patient):
    """The oracle: torch alone, without any tool, sees the failure at the same step, and none in the twin."""
    seen_as = {"input": "forward", "nan/lr-divergence": "forward", "nan/not-located": "forward"}
    phase = seen_as.get(patient.CODE, seen_as.get(patient.PHASE, patient.PHASE))

    assert plain_run(patient.sick()) == (phase, patient.STEP)
    assert plain_run(patient.healthy()) is None
