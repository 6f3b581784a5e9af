# PYTHON_ARGCOMPLETE_OK
"""nbdebug from a shell: `python -m nbdebug run train.py | check PATH | explain CODE | open PATH | …`; see HELP."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import nbdebug
from nbdebug import registry
from nbdebug.arguments import discover
from nbdebug.report import Report
from nbdebug.text import count, figures, in_a_line, in_colour, refused, sentence
from nbdebug.tools.environment.check_environment import machine_facts

DEMO = "00_first_aid.ipynb"
RUN = """Run a script, unchanged, under the guard and the gradient watch. A step that is not finite is
stopped before it changes a weight, and its cause is named; an exception is explained below its
traceback; a record of every step is written. What nbdebug says goes to stderr, and the status is
the script's own."""
ON_TRIP = """a bad step: trace names its cause and raises (the default), raise only raises, record drops it, names
its cause and goes on, skip only drops it"""
EXPECTED = """what it is meant to be, such as '{"mode": "RGB", "caption_extension": ".txt"}'"""
CAUSE = re.compile(r"^(?:Cause|Most likely): \S+/\S+$", re.MULTILINE)
"""The line that every report with a finding has. The text above the report's next heading is its verdict."""


HELP = """Name the cause of a broken PyTorch training.

before a run:
  check PATH             look at a file or a folder, whatever it is
  check-config FILE      what is wrong with files of settings
  check-data PATH        what is wrong with a data set: pictures, captions, tables, tokens
  check-checkpoint PATH  will it load, and is it whole; nothing of it is executed
  check-environment      what will stop a run on this machine

a run:
  run SCRIPT             your script, unchanged, watched: a NaN is stopped and named, an error explained
  bottleneck SCRIPT      what makes it slow, by line
  ranks SCRIPT           several processes: which one leaves the common path

after a run:
  open PATH              the report of a record that `run` or guard(..., record=PATH) wrote
  read-log PATH          what a log shows, and on which line: text, JSON, CSV, TensorBoard, trainer_state.json
  explain -              why it failed: the page of a cause, or a traceback from stdin

further:
  catalogue              every cause that can be named
  facts                  this machine's facts as JSON; needs no torch
  demo                   run the first-aid notebook, and print what was found

nbdebug COMMAND --help has the options. Every check takes --json, and ends with 0 where all is well, 1 where something
was found, 2 where there was nothing to check. `run` ends with your script's own status.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    try:
        import argcomplete
    except ImportError:  # an extra: Tab in a shell
        pass
    else:
        argcomplete.autocomplete(parser)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args([part.replace("_", "-") for part in given[:1]] + given[1:])  # read_log, as the function
    if args.command is None:
        parser.print_help()
        return 2
    try:
        status = int(args.call(args) or 0)
        sys.stdout.flush()
    except BrokenPipeError:  # "| head" has read enough; what is left is not written at the exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a program that SIGPIPE ended
    except (OSError, ValueError) as error:
        print(sentence(error), file=sys.stderr)
        return 2
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(refused(message))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="nbdebug", usage="nbdebug COMMAND [options]", description=HELP, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"nbdebug {nbdebug.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="nbdebug", help=argparse.SUPPRESS)

    def command(name: str, call: Callable[[argparse.Namespace], object], about: str, *examples: str) -> Any:
        """A command. call: gives its exit status, or nothing for 0."""
        epilog = "\n".join(["examples:", *(f"  nbdebug {example}" for example in examples)]) if examples else None
        made = commands.add_parser(name, description=about, epilog=epilog, formatter_class=raw)
        made.set_defaults(call=call)
        return made.add_argument

    def printing(add: Any) -> Any:
        add("--full", action="store_true", help="show all of the report")
        add("--json", action="store_true", help="print the report as JSON")
        return add

    def check(name: str, report: Callable[..., Report | None], about: str, *examples: str) -> Any:
        """A command that prints a report. report: of its arguments, and of each of its paths where it takes several."""
        return printing(command(name, functools.partial(print_reports, report), about, *examples))

    add = check("check", check_any, "Look at a file or a folder, whatever it is.", "check run.yaml", "check runs/")
    add("paths", metavar="PATH", nargs="+", help="settings, a checkpoint, a log, a data set, or a folder of them")
    about = "What is wrong with files of settings."
    add = check("check-config", check_config, about, "check-config conf/*.yaml --schema s.json")
    add("paths", metavar="FILE", nargs="+", help="JSON, YAML or TOML")
    add("--schema", metavar="FILE", help="what each key may be, as a JSON Schema or a draft of schema_from")
    about = "Look at a checkpoint, or a folder of them, without loading it."
    add = check("check-checkpoint", lambda args: nbdebug.check_checkpoint(args.path), about)
    add("path", metavar="PATH", help="a file (.pt, .ckpt, .safetensors, ...), or a folder")
    add = check("check-data", check_data, "What is wrong with a data set.", "check-data photos/ --json")
    add("path", metavar="PATH", help="a folder, a table, or a file of records")
    add("--expected", metavar="JSON", default="{}", help=EXPECTED)
    add("--save", metavar="FILE", help="write the report as well (.csv, .html, .json or .txt)")
    add = check("check-environment", check_environment, "What will stop a run on this machine.")
    add("--requirements", metavar="FILE", help="compared with what is installed")
    add("--facts", metavar="FILE", help="another machine's, as `facts` prints them there")
    add("--save", metavar="FILE", help="write the report as well (.html, .json or .txt)")

    dropping = "run --on-trip record train.py      # drop a bad step, write it down, go on"
    add = command("run", run, RUN, "run train.py --lr 0.1", dropping)
    add("--record", metavar="PATH", help="the folder of the record (default: SCRIPT.nbdebug, numbered)")
    add("--no-record", action="store_true", help="write no record")
    add("--on-trip", choices=("trace", "raise", "record", "skip"), default="trace", help=ON_TRIP)
    add("--save", metavar="FILE", help="write the report of the run as well (.html, .json or .txt)")
    add("script", metavar="SCRIPT", help="run as it is, as __main__")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="of the script")
    about = "What makes a training script slow."
    add = printing(command("bottleneck", bottleneck, about, "bottleneck train.py -- --epochs 1"))
    add("script", metavar="SCRIPT", help="run as it is, and ended after N steps")
    add("arguments", nargs="*", metavar="ARG", help="of the script; behind -- where they are options")
    add("--steps", type=int, default=20, metavar="N", help="steps that are timed (default 20)")
    add("--goal", type=float, metavar="N", help="steps a second that you want")
    add("--no-cures", action="store_true", help="try no cures: only time the steps")
    add("--against", metavar="FILE", help="an earlier --json: exit status 1 where a step is slower")
    add("--slower-than", default="5%", metavar="SHARE", help="how much slower it may be (default 5%%)")
    add = check("ranks", ranks, "Which of several processes leaves the common path.", "ranks --nproc 4 train.py")
    add("script", metavar="SCRIPT", nargs="?", help="run as it is, on torchrun")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="of the script")
    add("--nproc", type=int, default=2, metavar="N", help="processes (default 2)")
    add("--check", action="store_true", help="no script: look at the ranks themselves")

    add = command("open", open_record, "The report of a record.", "open train.nbdebug")
    add("path", metavar="PATH", help="the folder of the record; the run may still be going on")
    add("--save", metavar="FILE", help="write the report to FILE (.html, .json or .txt) instead")
    about = "What the log of a run shows, and on which line."
    add = check("read-log", lambda args: nbdebug.read_log(args.path), about, "read-log train.log")
    add("path", metavar="PATH", help="a log (text, JSON Lines, CSV, TensorBoard, ...), or a folder of them")
    about = "The page of a cause; or why a run failed, from the words of its traceback."
    add = check("explain", explain, about, "explain nan/overflow", "explain - < train.log")
    add("--pages", metavar="FILE", action="append", default=[], help="pages of your own (add_pages)")
    add("code", metavar="CODE", help="such as nan/overflow (overflow will do); -: a traceback from stdin")
    add = command("catalogue", catalogue, "List every cause that can be named.")
    add("--pages", metavar="FILE", action="append", default=[], help="pages of your own (add_pages)")
    about = "This machine's facts as JSON, for check-environment elsewhere; needs no torch."
    command("facts", lambda args: print(json.dumps(machine_facts(), indent=1)), about)
    about = "Run the first-aid notebook in a fresh kernel, and print what was found."
    command("demo", lambda args: demo(), about)
    return parser


# -- the commands -----------------------------------------------------------------------------------------------------


def print_reports(report_of: Callable[..., Report | None], args: argparse.Namespace) -> int:
    """Print the report, or that of each path, several as a JSON list. 1 where one has a problem, 2 and the reason where
    there is nothing to check."""
    paths = getattr(args, "paths", None)
    status, plain = 0, []
    for given in [(args, path) for path in paths] if paths else [(args,)]:
        try:
            report = report_of(*given)
            saved = report.save(args.save) if report is not None and getattr(args, "save", None) else None
        except (OSError, ValueError, TypeError, ImportError) as error:
            print(sentence(error), file=sys.stderr)
            status = 2
            continue
        if report is None:  # it has printed a page
            continue
        if saved:
            print(saved, file=sys.stderr)
        status = max(status, int(not report.ok))
        if args.json:
            plain.append(report.to_dict())
        else:
            print(report.full() if args.full else report)
    if args.json and plain:
        print(json.dumps(plain if len(paths or ()) > 1 else plain[0], indent=1))
    return status


def check_any(args: argparse.Namespace, path: str) -> Report:
    from IPython.core.error import UsageError

    from nbdebug.magics.check import check_of

    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no file or folder {path}")
    try:
        return check_of(pathlib.Path(path))[1]()
    except UsageError as program:
        raise ValueError(str(program)) from None


def check_config(args: argparse.Namespace, path: str) -> Report:
    return nbdebug.check_config(path, schema=args.schema)


def check_data(args: argparse.Namespace) -> Report:
    report = nbdebug.check_data(args.path, expected=json.loads(args.expected))
    if not any(report.facts["looked at"].values()):
        raise ValueError(f"{args.path}: {report.headline}")
    return report


def check_environment(args: argparse.Namespace) -> Report:
    known = json.loads(pathlib.Path(args.facts).read_text(encoding="utf-8")) if args.facts else None
    return nbdebug.check_environment(requirements=args.requirements, facts=known)


def explain(args: argparse.Namespace) -> Report | None:
    """The page of a code, printed; of a text from stdin the report."""
    for path in args.pages:
        registry.add_pages(path)
    if args.code == "-":
        text = sys.stdin.read()
        if len(text.split()) < 2:
            raise ValueError("explain - takes a traceback or a message from stdin")
        return nbdebug.explain(f"{text.strip()}\n ")
    try:
        print(registry.look_up(args.code).text(colour=in_colour(sys.stdout)))
    except KeyError as unknown:
        raise ValueError(unknown.args[0]) from None
    return None


def catalogue(args: argparse.Namespace) -> None:
    for path in args.pages:
        registry.add_pages(path)
    print(registry.listing())


def run(args: argparse.Namespace) -> int:
    """A script, watched: its own status, or 2 where there is none."""
    record = "" if args.no_record else args.record or record_path(args.script)
    done = run_script(args.script, args.arguments, record=record, on_trip=args.on_trip)
    if done.explanation is not None:
        print(f"\n{done.explanation}\n", file=sys.stderr)
    print(summary_of(done, record), file=sys.stderr)
    if args.save and done.reports:
        print(done.reports[0].save(args.save), file=sys.stderr)
    return done.status


def bottleneck(args: argparse.Namespace) -> int:
    """Time a script; 1 where it has a cause, or is slower than an earlier run, 2 and the reason where it can't be."""
    from nbdebug.tools.speed.bottleneck import load_times, share_of, slower, time_training
    from nbdebug.tools.speed.clock import Training

    earlier = load_times(args.against) if args.against else None
    limit, script = share_of(args.slower_than), _found(args.script)

    def train() -> None:
        with _as_main(script, args.arguments) as module:
            _execute(script, module)

    training, question = Training(train, {}, {}, whole=True), f"nbdebug bottleneck {script.name}"
    report = time_training(training, question, "", args.steps, args.goal, not args.no_cures)
    status = print_reports(lambda args: report, args)
    if earlier is None:
        return status
    worse, sentence = slower(report.facts["speed"], earlier, limit)
    print(sentence, file=sys.stderr if args.json else sys.stdout)
    return int(worse)


def ranks(args: argparse.Namespace) -> Report:
    """The report of a script on several processes, or of the processes alone."""
    from nbdebug.tools.distributed import launch  # without torch, which each rank imports again

    script = pathlib.Path(launch.__file__).with_name("check_ranks.py") if args.check else args.script
    if not script or args.nproc < 1:
        raise ValueError("ranks takes a script (or --check), and at least one process")
    return launch.run_script(str(script), args.arguments, args.nproc)


def open_record(args: argparse.Namespace) -> None:
    report = nbdebug.open_record(args.path).report()
    print(report.save(args.save) if args.save else report)


# -- a script, watched ------------------------------------------------------------------------------------------------
#
# The script runs as `__main__`, with its own arguments, folder and status. Nothing of it names a model: the watches
# begin where a model with parameters to train is first called, for it and for the models beside it, and from then on
# nothing of ours stands in its calls. All that nbdebug says goes to stderr.


@dataclasses.dataclass
class ScriptRun:
    """What came of a script. status: its own exit status; guard, watch: None where no model was trained; error: what
    ended it; fault: why nothing could be watched, or ""."""

    status: int = 0
    guard: Any = None
    watch: Any = None
    error: BaseException | None = None
    explanation: Report | None = None
    fault: str = ""

    @property
    def reports(self) -> list[Report]:
        """Of what was seen, the most telling first."""
        known = [self.explanation] if self.explanation is not None else []
        return [*known, *(watch.report() for watch in (self.guard, self.watch) if watch is not None)]


def run_script(path: str, arguments: Sequence[str] = (), *, record: str = "", on_trip: str = "trace") -> ScriptRun:
    """Run a script as Python would, watched. record: the folder of the record ("": none). Its exceptions are written as
    Python writes them, with the explanation below. Raises FileNotFoundError where there is no such file."""
    script, run = _found(path), ScriptRun()
    with _as_main(script, arguments) as module, contextlib.ExitStack() as watches:
        begin = _beginning(run, watches, module, {"record": record or None, "on_trip": on_trip})
        watches.callback(_first_call(begin))
        try:
            _execute(script, module)
        except SystemExit as end:
            run.status = _status(end)
        except KeyboardInterrupt as end:
            run.status, run.error = 130, end
            _print_traceback(end)
        except BaseException as error:
            run.status, run.error = 1, error
            _print_traceback(error)
            if not getattr(error, "trip", None):  # the guard has shown its report
                run.explanation = nbdebug.explain(error, names=module.__dict__)
    return run


def _found(path: str) -> pathlib.Path:
    script = pathlib.Path(path)
    if not script.is_file():
        raise FileNotFoundError(f"no such script: {path}")
    return script


def _execute(script: pathlib.Path, module: types.ModuleType) -> None:
    exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)


@contextlib.contextmanager
def _as_main(script: pathlib.Path, arguments: Sequence[str]) -> Iterator[types.ModuleType]:
    """The script's own `__main__`, arguments and path of imports."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(script), __builtins__=__builtins__, __cached__=None)
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    sys.modules["__main__"], sys.argv = module, [str(script), *arguments]
    sys.path[:] = [str(script.resolve().parent), *(p for p in sys.path if p != "")]
    try:
        yield module
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before


def _first_call(begin: Callable[[Any], bool]) -> Callable[[], None]:
    """Call `begin` with each module that is called, until it is true; returns what ends that."""
    from torch import nn

    kind: Any = nn.Module
    original = kind.__call__

    def end() -> None:
        if kind.__call__ is called:
            kind.__call__ = original

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if kind.__call__ is called and begin(self):
            end()
        return original(self, *args, **kwargs)

    kind.__call__ = called
    return end


def _beginning(
    run: ScriptRun, watches: contextlib.ExitStack, module: types.ModuleType, options: dict[str, Any]
) -> Callable[[Any], bool]:
    import torch

    from nbdebug.observe.variables import named_parameters, user_variables

    def begin(model: Any) -> bool:
        """Watch this model and those beside it, where it is about to be trained; whether that is settled."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if not any(p.requires_grad for _, p in named_parameters(model)):
            return False
        try:
            names = {**module.__dict__, **_around(sys._getframe(2))}
            models = discover("model", user_variables(names))
            if not any(part is model for other in models.values() for part in other.modules()):
                models[type(model).__name__] = model
            trained = {n: m for n, m in models.items() if any(p.requires_grad for _, p in named_parameters(m))}
            optimizers = discover("optimizer", user_variables(names))
            run.guard = watches.enter_context(nbdebug.guard(trained, optimizers, **options))
            run.watch = watches.enter_context(nbdebug.grad_watch(trained, optimizers))
        except Exception as fault:  # the border: the script runs on, unwatched
            run.fault = in_a_line(fault)
        return True

    return begin


def _around(frame: Any) -> dict[str, Any]:
    """The variables of the user's functions that are running, the innermost last."""
    from nbdebug.observe.locations import USER, kind_of
    from nbdebug.observe.variables import frame_variables

    names: list[dict[str, Any]] = []
    while frame is not None:
        if kind_of(frame.f_code) == USER:
            names.append(frame_variables(frame))
        frame = frame.f_back
    return {name: value for own in reversed(names) for name, value in own.items()}


def _status(end: SystemExit) -> int:
    """As Python exits with it: a text is printed, and is 1."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    """As Python prints it, without the frames of nbdebug: of a step that the guard has stopped, the script's alone."""
    told = traceback.TracebackException.from_exception(error)
    hidden = [os.path.dirname(nbdebug.__file__)]
    if getattr(error, "trip", None):
        hidden.append(os.path.dirname(str(sys.modules["torch"].__file__)))
    told.stack[:] = [frame for frame in told.stack if not frame.filename.startswith(tuple(hidden))]
    print("".join(told.format()), end="", file=sys.stderr)


def summary_of(run: ScriptRun, record: str) -> str:
    """A few lines on the whole run, below what it has printed itself; the reports of what is not well."""
    if run.fault:
        return f"nbdebug: the run was not watched ({run.fault})."
    if run.guard is None:
        return "nbdebug: no model was trained, so nothing was watched."
    losses = [line.loss for line in run.guard.lines if line.loss is not None]
    last = f", last loss {figures(losses[-1])}" if losses else ""
    bad = f", {run.guard.bad} of them not finite" if run.guard.bad else ""
    lines = [f"nbdebug: {count(run.guard.steps, 'step')} watched{bad}{last}."]
    if record:
        lines.append(f"The record: {record} (python -m nbdebug open {record})")
    for report in (run.guard.report(), run.watch.report()):
        if not report.ok and run.error is None:
            return "\n".join([*lines, "", str(report)])
    return "\n".join(lines)


def record_path(script: str) -> str:
    """Where the record of a script goes by itself: train.nbdebug, train-2.nbdebug, …; of several ranks the same."""
    stem = pathlib.Path(script).stem
    if "RANK" in os.environ:
        return f"{stem}.nbdebug"
    number = 1
    while os.path.exists(path := f"{stem}{'' if number == 1 else f'-{number}'}.nbdebug"):
        number += 1
    return path


# -- the demo ----------------------------------------------------------------------------------------------------------


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
