"""Random programs with one planted fault each, or none: the exam of the NaN locator.

`make(seed)` gives the source of a small training and the truth about it; both are a pure function of the seed. A
program has nested modules (or none at all), about a third of which are decoys that absorb a non-finite value; the fault
sits in a module, in loss code, in a parameter, a buffer, or in some rows of a batch, and comes at step 0, 1 or 2.

    python -m tests.nan.programs --seeds 0:200            faulty programs: the score by part, and the seeds that failed
    python -m tests.nan.programs --seeds 0:200 --healthy  programs without a fault: silence is right
    python -m tests.nan.programs --show 17                the source and the truth of one
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import pathlib
import random
import sys
import tempfile
import time
import traceback
import zlib
from types import SimpleNamespace
from typing import Any

from tests.nan.judge import Truth, answer_of, judge
from tests.nan.plan import Program, draw


def make(seed: int, healthy: bool = False, probe: bool = False) -> Program:
    """The program of a seed. probe: two more lines around the one at fault tell `PROBE` what goes in and comes out."""
    return draw(random.Random(f"{seed}/{healthy}"), healthy, probe)


def load(program: Program, folder: str | pathlib.Path, **names: Any) -> SimpleNamespace:
    """Write the source to `folder`, run it and call its `build()`: a namespace with model, optimizer and step."""
    path = pathlib.Path(folder) / f"program_{zlib.crc32(program.source.encode()):08x}.py"
    path.write_text(program.source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses in the source look their module up
    vars(module).update(names)
    spec.loader.exec_module(module)
    made = module.build()
    made.path = path
    return made


@dataclasses.dataclass
class Result:
    seed: int
    right: dict[str, bool]
    expected: Truth | None
    got: dict[str, Any]

    @property
    def ok(self) -> bool:
        return all(self.right.values())

    def __str__(self) -> str:
        wrong = ", ".join(part for part, good in self.right.items() if not good)
        return f"seed {self.seed}: wrong in {wrong}\n    expected {self.expected}\n    got      {self.got}"


def examine(seed: int, healthy: bool = False) -> Result:
    """Ask nbdebug about the program of a seed."""
    import nbdebug

    program = make(seed, healthy)
    with tempfile.TemporaryDirectory() as folder:
        made = load(program, folder)
        try:
            report = nbdebug.nan_trace(
                made.step,
                model=made.model,
                optimizer=made.optimizer,
                max_steps=made.steps,
            )
            answer = answer_of(report)
        except Exception:
            answer = {"findings": 0, "error": traceback.format_exc(limit=-4)}
    right = judge(program.truth, answer, program.source)
    return Result(seed, right, program.truth, answer)


def score(results: list[Result]) -> str:
    """A line a part: how many are right of those that have it."""
    counts: dict[str, list[bool]] = collections.defaultdict(list)
    for result in results:
        counts["all"].append(result.ok)
        for part, good in result.right.items():
            counts[part].append(good)
    return "\n".join(f"{part:10} {sum(goods):4}/{len(goods)}" for part, goods in counts.items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nan.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:200", help="first:end, or numbers with commas")
    parser.add_argument("--healthy", action="store_true", help="programs without a fault")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one program and its truth")
    parser.add_argument("--quiet", action="store_true", help="the score and the seeds only")
    given = parser.parse_args(arguments)
    if given.show is not None:
        program = make(given.show, given.healthy)
        print(program.source, program.truth, sep="\n")
        return 0
    first, _, end = given.seeds.partition(":")
    seeds = range(int(first), int(end)) if end else [int(s) for s in given.seeds.split(",")]
    began, results = time.perf_counter(), []
    for seed in seeds:
        results.append(examine(seed, given.healthy))
        if not results[-1].ok and not given.quiet:
            print(f"[{make(seed, given.healthy).about}]", results[-1], flush=True)
    failed = [r for r in results if not r.ok]
    print(score(results))
    print(f"{time.perf_counter() - began:.0f} s; failing seeds: {','.join(str(r.seed) for r in failed) or 'none'}")
    kinds = collections.Counter(make(r.seed, given.healthy).about.split(";")[0] for r in failed)
    print("by kind:", ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or "none")
    return bool(failed)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    raise SystemExit(main())
