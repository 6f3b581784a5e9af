"""Ask nbdebug about one case, in a process of its own: `python -m tests.cases.asking CASE broken|repaired ANSWER.json`.

The answer is made before anybody reads EXPECT; this file never does. To cover a further kind, write a function that
takes the case's namespace and returns a Report, and give it a line in ASKERS. A further way to ask (`--by`) has a line
in WAYS.
"""

from __future__ import annotations

import ast
import json
import os
import pathlib
import sys
import tempfile
import time
import types
from typing import Any

import nbdebug


def ask_nan(ns: types.SimpleNamespace) -> nbdebug.Report:
    try:
        return nbdebug.nan_trace(ns.step, model=ns.model, optimizer=ns.optimizer, max_steps=ns.steps)
    except Exception as raised:  # the step's own exception passes through; the report then hangs on it
        if getattr(raised, "report", None) is None:
            raise
        return raised.report


def ask_guard(ns: types.SimpleNamespace) -> nbdebug.Report:
    """Train under the guard. `ns.changed`: what the bad step left otherwise than it had been, which must be nothing."""
    from torch.utils._python_dispatch import _disable_current_modes

    from nbdebug.observe.snapshot import Snapshot

    models = {} if ns.model is None else {"model": ns.model}
    with nbdebug.guard(models, ns.optimizer, on_trip="trace") as guard:
        for _ in range(ns.steps):
            with _disable_current_modes():  # our own copies are no part of what the user does between two steps
                before = Snapshot.take(models, ns.optimizer)
            try:
                ns.step()
            except nbdebug.NonFiniteStep as tripped:
                ns.changed = spoiled(before.differences(), ns.model)
                return tripped.report
        return guard.report()


def spoiled(names: list[str], model: Any) -> list[str]:
    """Of what differs, the weights, the buffers, the optimizer's state and its settings. Gradients are the step's."""
    members = () if model is None else [*model.named_parameters(), *model.named_buffers()]
    kept = {f"model.{name}" for name, _ in members}
    return [
        name
        for name in names
        if name in kept or name.startswith(("optimizer.state", "optimizer.param_groups")) and not name.endswith(".grad")
    ]


def ask_training(ns: types.SimpleNamespace) -> nbdebug.Report:
    return nbdebug.diagnose(
        ns.train,
        model=ns.model,
        optimizer=ns.optimizer,
        loss_fn=ns.loss_fn,
        train_loader=ns.train_loader,
        val_loader=ns.val_loader,
        scheduler=ns.scheduler,
        progress=False,
    )


def ask_preflight(ns: types.SimpleNamespace) -> nbdebug.Report:
    """What can be said before the run; half of the codes need one."""
    return nbdebug.preflight(
        ns.model, ns.train_loader, ns.loss_fn, optimizer=ns.optimizer, val_loader=ns.val_loader, scheduler=ns.scheduler
    )


def ask_memory(ns: types.SimpleNamespace) -> nbdebug.Report:
    """The step a few times over, with the user's variables at hand: the shell's in a notebook, else the rest."""
    from nbdebug.tools.memory.mem import mem

    own = {name: value for name, value in vars(ns).items() if name not in ("step", "steps", "cells", "user_ns")}
    try:
        return mem(
            ns.step,
            steps=min(ns.steps, 5),
            model=own.get("model") or {},
            optimizer=own.get("optimizer"),
            loader=own.get("loader"),
            names=getattr(ns, "user_ns", own),
            progress=False,
        )
    except Exception as raised:  # the step's own passes through; what was seen before it hangs on it
        if getattr(raised, "report", None) is None:
            raise
        return raised.report


def ask_precision(ns: types.SimpleNamespace) -> nbdebug.Report:
    return nbdebug.precision(
        ns.model, ns.batch, ns.loss_fn, ns.dtype, mode="cast", step=getattr(ns, "step", None), progress=False
    )


def ask_error(ns: types.SimpleNamespace) -> nbdebug.Report:
    """What is said of the error that the user saw; of a program that runs through, nothing."""
    names = {name: value for name, value in vars(ns).items() if name != "trigger"}
    try:
        try:
            ns.trigger()
        except (OSError, EOFError):  # of a worker that died: what torch says of it comes by a signal, a moment later
            time.sleep(0.5)
            raise
    except Exception as raised:
        return nbdebug.explain(raised, names=names)
    return nbdebug.Report("explain()")


def ask_notebook(ns: types.SimpleNamespace) -> nbdebug.Report:
    """The cells in a shell, one by one, as a notebook runs them; then what is said of the notebook, of the cell that
    failed, and of what the notebook holds: the first that has a finding."""
    from nbdebug.tools.memory.mem import held_report
    from tests.shell import of_cells

    with of_cells(ns.cells) as (shell, error):
        report = nbdebug.check_notebook(shell=shell)
        if not report.findings and error is not None:
            report = nbdebug.explain(error, shell=shell)
        return held_report(names=shell.user_ns, shell=shell) if not report.findings and error is None else report


def ask_config(ns: types.SimpleNamespace) -> nbdebug.Report:
    with tempfile.TemporaryDirectory() as folder:
        return nbdebug.check_config(ns.make(folder), schema=ns.schema)


def ask_checkpoint(ns: types.SimpleNamespace) -> nbdebug.Report:
    """The file beside what it is loaded into; of a failure without an error, the resumed run beside the other."""
    parts = {name: getattr(ns, name, None) for name in ("model", "optimizer", "scheduler", "scaler", "ema", "load")}
    with tempfile.TemporaryDirectory() as folder:
        path = ns.make(pathlib.Path(folder))
        if hasattr(ns, "resumed"):
            return nbdebug.resume_proof(
                ns.resumed, ns.uninterrupted, path, **{k: v for k, v in parts.items() if k != "load"}
            )
        return nbdebug.check_checkpoint(path, **parts)


def ask_environment(ns: types.SimpleNamespace) -> nbdebug.Report:
    return nbdebug.check_environment(facts=ns.probe())


def ask_data(ns: types.SimpleNamespace) -> nbdebug.Report:
    with tempfile.TemporaryDirectory() as folder:
        subject = ns.make(pathlib.Path(folder)) if ns.dataset is None else ns.dataset
        return nbdebug.check_data(subject, expected=ns.expected, progress=False)


def ask_speed(ns: types.SimpleNamespace) -> nbdebug.Report:
    names = {name: value for name, value in vars(ns).items() if name != "step"}
    return nbdebug.bottleneck(ns.step, loader=ns.loader, model=ns.model, optimizer=ns.optimizer, names=names)


def ask_quality(ns: types.SimpleNamespace) -> nbdebug.Report:
    """A reported perplexity; or what a model made, beside what it learnt from and what it is judged by."""
    if hasattr(ns, "logits"):
        return nbdebug.perplexity(
            ns.logits, ns.tokens, pad_id=ns.pad_id, reported=ns.evaluate, batch_size=ns.batch_size
        )
    outputs = getattr(ns, "texts", getattr(ns, "generated", None))
    return nbdebug.check_outputs(
        outputs, training=getattr(ns, "training", None), evaluation=getattr(ns, "evaluation", None)
    )


def ask_distributed(ns: types.SimpleNamespace) -> nbdebug.Report:
    """The script on two ranks, in a folder of its own. `statement`: the text at the line that is named."""
    from nbdebug.tools.distributed.launch import run_script

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "script.py"
        path.write_text(ns.script, encoding="utf-8")
        before = os.getcwd()
        os.chdir(folder)
        try:
            report = run_script(str(path), echo=False, limit=110)
        finally:
            os.chdir(before)
    ns.statement = statement_at(ns.script, report.findings[0].where.line) if report.findings else ""
    return report


def statement_at(text: str, line: int | None) -> str:
    """The smallest statement that a line is a part of; of one with a body its head."""
    best = (1, 0)
    for node in ast.walk(ast.parse(text)):
        if line is not None and isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            body = getattr(node, "body", None)
            last = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno or node.lineno
            best = (node.lineno, last) if best[0] <= node.lineno <= line <= last else best
    return "\n".join(text.split("\n")[best[0] - 1 : best[1]])


ASKERS = {
    "distributed": ask_distributed,
    "checkpoint": ask_checkpoint,
    "nan": ask_nan,
    "precision": ask_precision,
    "training": ask_training,
    "memory": ask_memory,
    "error": ask_error,
    "notebook": ask_notebook,
    "config": ask_config,
    "environment": ask_environment,
    "data": ask_data,
    "speed": ask_speed,
    "quality": ask_quality,
}
"""kind → the function that asks. A kind that is not here is skipped."""

WAYS = {"trace": ASKERS, "guard": {"nan": ask_guard}, "preflight": {"training": ask_preflight}}
"""How to ask: after it broke, or on guard while it runs."""

SIGNS = {
    "environment": {"probe"},
    "config": {"make", "use", "schema"},
    "checkpoint": {"make", "model", "optimizer"},
    "data": {"make", "dataset", "expected"},
    "precision": {"model", "batch", "loss_fn", "dtype"},
    "training": {"model", "optimizer", "loss_fn", "train_loader"},
    "error": {"trigger"},
    "distributed": {"script"},
    "notebook": {"cells"},
    "speed": {"model", "loader", "step"},
    "quality": {"logits", "tokens"},
    "memory": {"step", "steps"},
}
"""kind → what its namespaces hold at least; asked in this order, where the folder's name tells nothing."""


def kind_of(path: pathlib.Path, ns: types.SimpleNamespace) -> str:
    """The kind of a case: its folder's name, or else what its namespace holds."""
    if path.parent.name in {*SIGNS, *ASKERS}:
        return path.parent.name
    held = set(vars(ns))
    if held == {"model", "optimizer", "step", "steps"}:  # memory's may hold the same, but nearly always more
        return "nan"
    if "steps" in held:
        held.discard("loader")  # a memory case may show its loader; a speed case has no number of steps
    return next((kind for kind, signs in SIGNS.items() if signs <= held), "unknown")


def load(path: pathlib.Path) -> types.ModuleType:
    """The case as a module, under its own file name, so that source lines are those of the file. Writes no bytecode."""
    module = types.ModuleType("case")
    module.__file__ = str(path)
    sys.modules["case"] = module  # dataclasses and pickled classes look their module up
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


def answer_of(report: nbdebug.Report, path: pathlib.Path) -> dict[str, Any]:
    """A report in the form that judge.py takes. A line in another file than the case's own is no line of the case."""
    answer: dict[str, Any] = {"findings": len(report.findings), "text": str(report)}
    if not report.findings:
        return answer
    first, where = report.findings[0], report.findings[0].where
    own = where.file is not None and pathlib.Path(where.file).resolve() == path.resolve()
    samples = None if where.samples is None else list(where.samples)
    if where.cell is not None:  # "In [4]" is the fourth cell that ran
        answer["cell"] = int(where.cell[4:-1]) - 1
    if hasattr(report, "fp32_modules"):
        answer["fp32_modules"] = list(report.fp32_modules)
    return {
        **answer,
        "code": first.code,
        "phase": where.phase,
        "module": where.module,
        "op": where.op,
        "where": blamed(first),
        "step": where.step,
        "samples": samples,
        "file": where.file,
        "line": where.line if own else None,
        "rank": where.rank,
        **{name: first.evidence.get(name) for name in ("steps", "parameters", "variables")},
        "problems": [[one["key"], one["code"]] for one in report.facts.get("problems", ())],
        "items": {str(item): code for item, code in report.facts.get("items", {}).items()},
        "holder": list(first.evidence.get("holder", ())),
        "keys": list(first.evidence.get("keys", ())),
        "path": first.evidence.get("path"),
        "bottleneck": first.evidence.get("bottleneck"),
        "value": report.facts.get("value"),
    }


def blamed(finding: nbdebug.Finding) -> list[str]:
    """The names that a finding blames: modules, parameters, functions, arguments."""
    named = finding.evidence.get("where", ())
    return list(dict.fromkeys([*([named] if isinstance(named, str) else named), *filter(None, [finding.where.module])]))


def ask(path: pathlib.Path, fixed: bool, by: str = "trace") -> dict[str, Any]:
    """{"kind", "answer"}, or {"kind", "skipped": reason}, or {"kind", "error": message}."""
    kind = path.parent.name
    try:
        ns = load(path).build(fixed=True) if fixed else load(path).build()
        kind = kind_of(path, ns)
        if kind not in WAYS[by]:
            return {"kind": kind, "skipped": f"nbdebug does not cover {kind} yet"}
        answer = answer_of(WAYS[by][kind](ns), path)
        extra = {"changed": "changed", "statement": "line_text"}
        return {"kind": kind, "answer": answer | {key: getattr(ns, n) for n, key in extra.items() if hasattr(ns, n)}}
    except Exception as error:  # whatever goes wrong is this case's answer, not the runner's end
        return {"kind": kind, "error": f"{type(error).__name__}: {error}"}


def main(case: str, twin: str, out: str, by: str = "trace") -> None:
    pathlib.Path(out).write_text(json.dumps(ask(pathlib.Path(case), twin == "repaired", by)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
