"""`python -m tests.benchmarks.cure FOLDER... [--programs N] [--by guard]`: does the fix cure as it is printed?

For every case of kind nan, error or training in the folders, every nan or error patient of the tests, and N of the
random programs: nbdebug is asked, the edit of the first fix that it calls tried is made in a copy of the source, and
the copy runs without nbdebug. Cured: losses, gradients and parameters are finite in all of its steps; of kind error,
the program runs through; of kind training, the losses of its loop are finite and fall. Exit 1 where a fix called
tried has left a program broken.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import importlib.util
import math
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import types
import warnings
from typing import Any

import torch

PATIENTS = pathlib.Path(__file__).parents[1] / "patients"
KINDS = ("nan", "error")
FALLS = 0.8
"""The last tenth of a cured training's losses over its first three, at most."""
NEAR = 1.1
"""The same over the last tenth of its healthy twin's."""
NONE, CURED, BROKEN = "none offered", "cured", "still broken"


@dataclasses.dataclass
class Cured:
    """What became of one program. says: the verdict of the report on its own fix, and the reason where there is one."""

    name: str
    code: str
    verdict: str
    says: str = ""
    change: str = ""

    def row(self) -> str:
        return f"{self.verdict:13} {self.name:42} {self.code:32} {self.says or self.change}".rstrip()


def build(path: pathlib.Path, twin: bool = False) -> types.SimpleNamespace:
    """The broken program of a file, or its healthy twin, under its own name: a case, a patient or a random program."""
    spec = importlib.util.spec_from_file_location(f"program_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if hasattr(module, "sick"):
        return module.healthy() if twin else module.sick()
    return module.build(True) if twin else module.build()


def failure(path: pathlib.Path, steps: int) -> str:
    """Run the program without nbdebug; "" where all is finite, else what is not."""
    assert "nbdebug" not in sys.modules, "the program runs alone"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)  # a loader's workers start as in a program of its own
    made = build(path)
    if hasattr(made, "trigger"):
        try:
            made.trigger()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:160]
        return ""
    if hasattr(made, "train"):
        return does_not_learn(made) and does_not_learn(build(path), build(path, twin=True))
    models = [made.model] if isinstance(made.model, torch.nn.Module) else []
    optimizers = made.optimizer if isinstance(made.optimizer, (list, tuple)) else [made.optimizer]
    for number in range(steps):
        try:
            loss = made.step()
        except StopIteration:
            return ""
        except Exception as error:
            return f"step {number}: {type(error).__name__}: {error}"
        if loss is not None and not math.isfinite(float(loss)):
            return f"step {number}: the loss is {float(loss)}"
        parameters = [p for m in models for p in m.parameters()]
        parameters += [p for o in optimizers if o is not None for g in o.param_groups for p in g["params"]]
        for what, tensors in (
            ("gradient", [p.grad for p in parameters if p.grad is not None]),
            ("parameter", parameters),
        ):
            if not all(bool(torch.isfinite(t).all()) for t in tensors if t.layout is torch.strided):
                return f"step {number}: a {what} is not finite"
    return ""


def does_not_learn(made: Any, twin: Any = None) -> str:
    """Run the user's own loop; "" where its losses are finite and fall, or end near those of the healthy twin (the loss
    of two adversaries need not fall)."""
    losses: list[float] = []
    made.train(lambda step, loss, *more: losses.append(float(loss)))
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is not None:
        return f"step {bad}: the loss is {losses[bad]}"
    start, end = statistics.median(losses[:3]), statistics.fmean(losses[-max(1, len(losses) // 10) :])
    goal = FALLS * start
    if twin is not None:
        others: list[float] = []
        twin.train(lambda step, loss, *more: others.append(float(loss)))
        goal = max(goal, NEAR * statistics.fmean(others[-max(1, len(others) // 10) :]))
    return "" if end < goal else f"the loss goes from {start:.3g} to {end:.3g}"


def ask(path: pathlib.Path, by: str) -> tuple[Any, int]:
    """The report on the program, and how many steps it has."""
    from tests.cases.asking import WAYS

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)
    made = build(path)
    if hasattr(made, "trigger"):
        return dataclasses.replace(WAYS["trace"]["error"](made), saver=None), 1
    if hasattr(made, "train"):
        return dataclasses.replace(WAYS["trace"]["training"](made), saver=None), 0
    made.steps = getattr(made, "steps", 3)
    report = WAYS[by]["nan"](made)
    return dataclasses.replace(report, saver=None), made.steps


def examine(path: pathlib.Path, name: str, by: str, alone: concurrent.futures.Executor) -> Cured:
    """Ask, make the edit in a copy, run the copy. alone: a process in which nbdebug has never been imported."""
    report, steps = ask(path, by)
    if not report.findings:
        return Cured(name, "", NONE, "silent")
    finding = report.findings[0]
    fix = next((fix for fix in finding.fixes if fix.verified), None)
    if fix is None:
        tried = [str(fix.after.get("why not", "tried, did not help")) for fix in finding.fixes[:1]]
        return Cured(name, finding.code, NONE, *tried)
    if fix.edit is None or pathlib.Path(fix.edit.file) != path:
        return Cured(name, finding.code, BROKEN, f"called tried, and no edit of the program: {fix.code!r}")
    lines = path.read_text(encoding="utf-8").split("\n")
    old = "\n".join(lines[fix.edit.line - 1 : fix.edit.end_line])
    assert old == fix.edit.old, "the edit is of lines that are there"
    lines[fix.edit.line - 1 : fix.edit.end_line] = fix.edit.new.split("\n")
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / path.name
        copy.write_text("\n".join(lines), encoding="utf-8")
        reason = alone.submit(failure, copy, steps).result()
    change = fix.edit.code.strip().replace("\n", " ⏎ ")
    return Cured(name, finding.code, BROKEN if reason else CURED, f"{reason} with {change}" if reason else "", change)


def _batch(work: list[tuple[pathlib.Path, str]], by: str) -> list[Cured]:
    spawn, rows = multiprocessing.get_context("spawn"), []
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as alone:
        for path, name in work:
            try:
                rows.append(examine(path, name, by, alone))
            except Exception as error:
                rows.append(Cured(name, "", NONE, f"{type(error).__name__}: {error}"[:160]))
    return rows


def programs(number: int, folder: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
    """So many random programs with a fault, written to the folder."""
    from tests.nan.programs import make

    work = []
    for seed in range(number):
        program = make(seed)
        path = folder / f"program_{seed}.py"
        path.write_text(program.source, encoding="utf-8")
        work.append((path, f"{seed} {program.about.split(';')[0]}"))
    return work


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cure", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "folders", nargs="*", metavar="FOLDER", type=pathlib.Path, help="cases of kind nan, error or training, or files"
    )
    parser.add_argument("--patients", action="store_true", help="the patients of the tests, too")
    parser.add_argument("--programs", type=int, default=0, metavar="N", help="N random programs, too")
    parser.add_argument("--by", choices=("trace", "guard"), default="trace", help="who is asked (default: trace)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="programs at a time (default 2)")
    args = parser.parse_args(arguments)
    paths = [p for f in args.folders for p in (sorted(f.glob("*.py")) if f.is_dir() else [f])]
    if args.patients or not (paths or args.programs):
        kinds = {path.parent.name for path in paths if path.parent.name in KINDS} or KINDS
        paths += [path for kind in sorted(kinds) for path in sorted((PATIENTS / kind).glob("*.py"))]
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        work = [(path.resolve(), f"{path.parent.parent.name}/{path.stem}") for path in paths]
        work += programs(args.programs, pathlib.Path(folder))
        with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
            batches = [pool.submit(_batch, work[n :: 4 * args.jobs], args.by) for n in range(4 * args.jobs)]
            rows = []
            for batch in concurrent.futures.as_completed(batches):
                for row in batch.result():
                    rows.append(row)
                    print(row.row(), flush=True)
    counts = collections.Counter(row.verdict for row in rows)
    print(f"\n{len(rows)} programs: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in (CURED, BROKEN, NONE)))
    return 1 if counts[BROKEN] else 0


if __name__ == "__main__":
    raise SystemExit(main())
