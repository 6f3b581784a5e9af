"""`python -m tests.benchmarks.nan`: what finding a NaN costs, in step times, with nbdebug and with other tools."""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import sys

import torch

from tests.benchmarks.timing import Row, measure
from tests.benchmarks.tools import TOOLS
from tests.benchmarks.training import SIZES, Training


def machine(device: str) -> str:
    """Which card or processor, and which torch."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        models = [line.split(":", 1)[1].strip() for line in _cpu_facts() if line.startswith("model name")]
        name = models[0] if models else platform.processor() or platform.machine()
        name += f", {torch.get_num_threads()} thread"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def _cpu_facts() -> list[str]:
    facts = pathlib.Path("/proc/cpuinfo")
    return facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []


def cells(row: Row) -> list[str]:
    """One line of the table."""
    named = [row.named.get(fault, "not asked") or "nothing" for fault in ("forward", "backward")]
    if row.skipped:
        return [row.tool.name, "–", "–", "–", row.skipped, ""]
    low, high = row.middle_half
    return [row.tool.name, f"{row.ratio:.2f}", f"{low:.2f}–{high:.2f}", f"{row.first:.2f} s", *named]


def table(rows: list[Row]) -> str:
    heads = [
        "tool",
        "step times",
        "middle half",
        "first call",
        "names of a NaN made in the forward",
        "names of a NaN made in the backward",
    ]
    lines = [heads, *map(cells, rows)]
    widths = [max(len(line[n]) for line in lines if not (n > 3 and line[1] == "–")) for n in range(len(heads))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.nan", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, help="of the model (default: small on a CPU, gpt2 on a card)")
    parser.add_argument("--repeats", type=int, metavar="N", help="pairs of steps a tool (default 5, on a card 15)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the numbers to this file, too")
    args = parser.parse_args(arguments)
    on_card = args.device == "cuda"
    repeats = args.repeats if args.repeats is not None else 15 if on_card else 5
    if repeats < 1:
        parser.error(f"--repeats is at least 1; got {repeats}")
    if on_card and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA card")
    if not on_card:
        torch.set_num_threads(1)
    training = Training(SIZES[args.size or ("gpt2" if on_card else "small")], args.device)
    rows, steps = measure(training, TOOLS, repeats, lambda line: print(line, file=sys.stderr, flush=True))
    parameters = sum(p.numel() for p in training.model.parameters())
    print(
        f"{machine(args.device)}\n{training.size}, {parameters:,} parameters\n"
        f"bare step: {1000 * statistics.median(steps):.1f} ms "
        f"({'time that passed' if on_card else 'processor time'}, median of {len(steps)}); "
        f"each ratio: median of {repeats} pairs\n\n{table(rows)}"
    )
    if args.json:
        numbers = {
            "machine": machine(args.device),
            "size": str(training.size),
            "repeats": repeats,
            "bare_step_s": steps,
            "rows": [row.to_dict() for row in rows],
        }
        args.json.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
