"""nbdebug from a shell: `python -m nbdebug demo | explain | catalogue | open | check-config | check-data | …`."""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import nbdebug
from nbdebug import registry
from nbdebug.report import Report
from nbdebug.text import count, in_colour
from nbdebug.tools.environment import machine

DEMO = "01_nan.ipynb"
EXPECTED = """what it is meant to be, such as '{"mode": "RGB", "caption_extension": ".txt"}'"""
CAUSE = re.compile(r"^(?:Cause|Most likely): \S+/\S+$", re.MULTILINE)
"""The line that every report with a finding has. The text above the report's next heading is its verdict."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nbdebug", description="Name the cause of a broken PyTorch training.")
    parser.add_argument("--version", action="version", version=f"nbdebug {nbdebug.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("demo", help="run the NaN notebook in a fresh kernel (half a minute) and print what was found")
    explain = commands.add_parser("explain", help="print the catalogue page of a cause")
    explain.add_argument("code", metavar="CODE", help="such as nan/overflow (overflow will do)")
    commands.add_parser("catalogue", help="list every cause that can be named")
    opened = commands.add_parser("open", help="print the report of a record that guard(..., record=PATH) wrote")
    opened.add_argument("path", metavar="PATH", help="the folder of the record; the run may still be going on")
    opened.add_argument("--save", metavar="FILE", help="write the report to FILE (.html, .json or .txt) instead")
    of_log = commands.add_parser(
        "read-log", help="what the log of a run shows, and on which line (exit status 1 on trouble)"
    )
    of_log.add_argument(
        "path", metavar="PATH", help="a log (text, JSON Lines, CSV, TensorBoard, ...), or a folder of them"
    )
    of_log.add_argument("--json", action="store_true", help="print the report as JSON")
    of_config = commands.add_parser(
        "check-config", help="what is wrong with files of settings (exit status 1 on problems)"
    )
    of_config.add_argument("paths", metavar="FILE", nargs="+", help="JSON, YAML or TOML")
    of_config.add_argument(
        "--schema", metavar="FILE", help="what each key may be, as a JSON Schema or a draft of schema_from"
    )
    of_checkpoint = commands.add_parser(
        "check-checkpoint", help="look at a checkpoint, or a folder of them, without loading"
    )
    of_checkpoint.add_argument("path", metavar="PATH", help="a file (.pt, .ckpt, .safetensors, ...), or a folder")
    of_data = commands.add_parser("check-data", help="what is wrong with a data set (exit status 1 on problems)")
    of_data.add_argument("path", metavar="PATH", help="a folder, a table, or a file of records")
    of_data.add_argument("--expected", metavar="JSON", default="{}", help=EXPECTED)
    of_data.add_argument("--save", metavar="FILE", help="write the report as well (.csv, .html, .json or .txt)")
    of_machine = commands.add_parser("check-environment", help="what will stop a run here (exit status 1 on problems)")
    of_machine.add_argument("--requirements", metavar="FILE", help="compared with what is installed")
    of_machine.add_argument("--facts", metavar="FILE", help="another machine's, as `facts` prints them there")
    of_machine.add_argument("--save", metavar="FILE", help="write the report as well (.html, .json or .txt)")
    for command in (of_config, of_checkpoint, of_data, of_machine, of_log):
        command.add_argument("--full", action="store_true", help="show all of the report")
    of_script = commands.add_parser("bottleneck", help="what makes a training script slow (exit status 1 on a cause)")
    of_script.add_argument("script", metavar="SCRIPT", help="run as it is, and ended after N steps")
    of_script.add_argument(
        "arguments", nargs="*", metavar="ARG", help="of the script; behind -- where they are options"
    )
    of_script.add_argument("--steps", type=int, default=20, metavar="N", help="steps that are timed (default 20)")
    of_script.add_argument("--goal", type=float, metavar="N", help="steps a second that you want")
    of_script.add_argument("--no-cures", action="store_true", help="try no cures: only time the steps")
    of_script.add_argument("--json", action="store_true", help="print the report as JSON, for --against")
    of_script.add_argument("--against", metavar="FILE", help="an earlier --json: exit status 1 where a step is slower")
    of_script.add_argument(
        "--slower-than", default="5%", metavar="SHARE", help="how much slower it may be (default 5%%)"
    )
    of_script.add_argument("--full", action="store_true", help="show all of the report")
    of_ranks = commands.add_parser(
        "ranks", help="which of several processes leaves the common path (status 1 on a fault)"
    )
    of_ranks.add_argument("script", metavar="SCRIPT", nargs="?", help="run as it is, on torchrun")
    of_ranks.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="of the script")
    of_ranks.add_argument("--nproc", type=int, default=2, metavar="N", help="processes (default 2)")
    of_ranks.add_argument("--full", action="store_true", help="show all of the report")
    of_ranks.add_argument("--check", action="store_true", help="no script: look at the ranks themselves")
    commands.add_parser("facts", help="print this machine's facts as JSON; needs no torch")
    args = parser.parse_args(arguments)
    if args.command == "check-config":
        files = [functools.partial(nbdebug.check_config, path, schema=args.schema) for path in args.paths]
        return max(print_check(check, args.full) for check in files)
    checks: dict[str, Callable[[], Report]] = {
        "check-data": lambda: data_of(args.path, args.expected, args.save),
        "read-log": lambda: nbdebug.read_log(args.path),
        "check-checkpoint": lambda: nbdebug.check_checkpoint(args.path),
        "check-environment": lambda: environment_of(args.requirements, args.facts, args.save),
        "ranks": lambda: ranks(args),
    }
    if args.command in checks:
        return print_check(checks[args.command], args.full, getattr(args, "json", False))
    if args.command == "facts":
        print(json.dumps(machine.machine_facts(), indent=1))
        return 0
    if args.command == "bottleneck":
        return bottleneck(args)
    if args.command == "demo":
        return demo()
    if args.command == "explain":
        return print_page(args.code)
    if args.command == "open":
        return print_record(args.path, args.save)
    if args.command == "catalogue":
        print(registry.listing())
        return 0
    parser.print_help()
    return 2


def data_of(path: str, expected: str, save: str | None) -> Report:
    """The report of a data set, written to a file as well where one is named."""
    report = nbdebug.check_data(path, expected=json.loads(expected))
    if save:
        report.save(save)
    return report


def bottleneck(args: argparse.Namespace) -> int:
    """Time a script; 1 where it has a cause, or is slower than an earlier run, 2 and the reason where it can't be."""
    from nbdebug.tools.speed import script

    try:
        earlier = script.load_times(args.against) if args.against else None
        limit = script.share_of(args.slower_than)
        report = script.bottleneck_of_script(args.script, args.arguments, args.steps, args.goal, not args.no_cures)
        compared = None if earlier is None else script.slower(report.facts["speed"], earlier, limit)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=1) if args.json else report.full() if args.full else report)
    if compared is None:
        return int(not report.ok)
    print(compared[1], file=sys.stderr if args.json else sys.stdout)
    return int(compared[0])


def ranks(args: argparse.Namespace) -> Report:
    """The report of a script on several processes, or of the processes alone."""
    from nbdebug.tools.distributed import check_ranks, launch

    script = check_ranks.__file__ if args.check else args.script
    if not script or args.nproc < 1:
        raise ValueError("ranks takes a script (or --check), and at least one process")
    return launch.run_script(str(script), args.arguments, args.nproc)


def environment_of(requirements: str | None, facts: str | None, save: str | None) -> Report:
    """The report of this machine, or of the facts in a file."""
    known = json.loads(pathlib.Path(facts).read_text(encoding="utf-8")) if facts else None
    report = nbdebug.check_environment(requirements=requirements, facts=known)
    if save:
        print(report.save(save), file=sys.stderr)
    return report


def print_check(check: Callable[[], Report], full: bool = False, as_json: bool = False) -> int:
    """A report, printed; 1 where it has a problem, 2 and the reason where there is nothing to check."""
    try:
        report = check()
    except (OSError, ValueError, TypeError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=1) if as_json else report.full() if full else report)
    return int(not report.ok)


def print_page(code: str) -> int:
    """The page of a cause; 2 and the nearest codes where there is none."""
    try:
        print(registry.look_up(code).text(colour=in_colour(sys.stdout)))
    except KeyError as unknown:
        print(unknown.args[0], file=sys.stderr)
        return 2
    return 0


def print_record(path: str, save: str | None = None) -> int:
    """The report of a record, printed or saved; 2 and the reason where `path` is no record, or `save` cannot be
    written."""
    try:
        report = nbdebug.open_record(path).report()
        print(report.save(save) if save else report)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def demo() -> int:
    """Execute the notebook in a temporary folder and print the verdict of each report in it. 1 when it does not run."""
    try:
        import nbclient
        import nbformat
    except ImportError as missing:
        print(f"The demo needs {missing.name}. Install it: pip install nbclient nbformat ipykernel", file=sys.stderr)
        return 2
    path = find_notebook()
    if path is None:
        print(f"{DEMO} is neither in the repository nor in the package.", file=sys.stderr)
        return 2
    print(f"Running {path.name} in a fresh kernel. This takes about half a minute.", file=sys.stderr)
    notebook = nbformat.read(path, as_version=4)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="nbdebug-demo-"))
    status = 0
    try:
        execute(notebook, folder)
    except nbclient.exceptions.CellExecutionError as error:
        print(error, file=sys.stderr)
        status = 1
    nbformat.write(notebook, folder / path.name)
    texts = list(verdicts(notebook))
    causes = count(len(texts), "cause")
    print("\n\n".join([*texts, f"{causes} named. The notebook as it ran: {folder / path.name}"]))
    return status


def find_notebook() -> pathlib.Path | None:
    """The notebook of a checkout, or the copy in an installed package."""
    package = pathlib.Path(nbdebug.__file__).parent
    places = (package.parent / "notebooks" / DEMO, package / "notebooks" / DEMO)
    return next((place for place in places if place.is_file()), None)


def execute(notebook: Any, folder: pathlib.Path) -> None:
    """Execute all cells, in a kernel that starts in `folder` and imports this very nbdebug."""
    import nbclient
    from tqdm.auto import tqdm

    root = str(pathlib.Path(nbdebug.__file__).parents[1])
    paths = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tqdm(total=len(notebook.cells), desc=DEMO, unit="cell", leave=False, disable=None) as bar:
        client = nbclient.NotebookClient(
            notebook,
            timeout=600,
            resources={"metadata": {"path": str(folder)}},
            extra_arguments=["--log-level=ERROR"],
            on_cell_start=lambda cell, cell_index: bar.update(cell_index - bar.n),
        )
        client.execute(env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths})  # the models are tiny


def verdicts(notebook: Any) -> Iterator[str]:
    """From each report in the outputs: the sentence, the code, the place."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            text = output.get("text") or output.get("data", {}).get("text/plain") or ""
            if CAUSE.search(text):
                yield re.split(r"\n\n(?=How it came about|What to do|Less likely|What +Value)", text)[0].rstrip()


if __name__ == "__main__":
    sys.exit(main())
