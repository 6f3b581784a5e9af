"""The vocabulary: what nbdebug says when it answers.

    Report                      one answer to one question, with its verdict: one of VERDICTS
    ├── findings: Finding …     what is wrong, most likely first; empty means: nothing found
    │   ├── where: Where        step, phase, module, op, the user's own line, batch rows
    │   ├── chain: Link …       how it came about, in order: "the zero came from this relu", "log made -inf here", …
    │   ├── evidence            the numbers that prove it
    │   └── fixes: Fix …        what to write instead, and what was seen when it was tried
    ├── symptoms: Symptom …     what was seen that is not well, whether its cause is known or not (see verdict.py)
    ├── headline                one sentence above the findings, or in their place
    ├── ruled_out               what it is not, each with the number that rules it out
    ├── unchecked               what was not checked, and why
    ├── notes                   what is worth knowing and no fault ("GradScaler skipped step 3: normal")
    ├── tables: Table …         numbers in rows, raw (`report.frame()` gives them as a DataFrame)
    ├── plots: Plot …           pictures, each as the data that one file of views/plots draws
    └── facts                   further numbers, for programs

Everything here is plain data: names and numbers, no tensors, so that a report can be saved, compared and drawn
anywhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import pathlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PHASES = ("input", "parameter", "forward", "backward", "optimizer")
VERDICTS = FOUND, UNKNOWN, HEALTHY = "cause found", "not well, no cause known", "healthy"
PLOTS = ("histogram", "tree", "run", "losses", "memory", "ranges", "gradients", "stepper", "gallery", "times")
"""The kinds of pictures: the files of views/plots."""


@dataclasses.dataclass(frozen=True)
class LibraryLine:
    """A line of an installed package's code, and the function around it."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """ "transformers/loss/loss_utils.py, line 36, in fixed_cross_entropy"."""
        inside = re.split(r"(?:site|dist)-packages[\\/]", self.file)[-1].replace("\\", "/")
        return f"{inside}, line {self.line}, in {self.function}"


@dataclasses.dataclass(frozen=True)
class Item:
    """An item of a data set. index: as the sampler asks for it, of an iterable data set its position, from 0; name: its
    path or id, where the data set or the batch holds one."""

    index: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.index} ({self.name})" if self.name else str(self.index)


@dataclasses.dataclass(frozen=True)
class Where:
    """A place in a training run. Every field may be None: not known, or not applicable.

    step: 0-based. phase: one of PHASES. module: dotted name, "" for code in no module. op: ATen base name ("log").
    file, line, text: the user's own source line. cell: "In [7]" where the line stands in a notebook.
    samples: rows of the batch; None means all of them, or not known. library: the innermost line of a package that the
    user's line has called, where the op lies there. items: of the data set, one for each of the samples.
    """

    step: int | None = None
    phase: str | None = None
    module: str | None = None
    module_type: str | None = None
    op: str | None = None
    file: str | None = None
    line: int | None = None
    text: str | None = None
    cell: str | None = None
    samples: tuple[int, ...] | None = None
    rank: int | None = None
    library: LibraryLine | None = None
    items: tuple[Item, ...] | None = None

    @property
    def place(self) -> str:
        """The line as a person would say it: "In [7], line 4", "train.py, line 31", or ""."""
        if self.line is None:
            return ""
        name = self.cell or (pathlib.PurePath(self.file).name if self.file else "?")
        return f"{name}, line {self.line}"


@dataclasses.dataclass(frozen=True)
class Edit:
    """Lines of the user's that become other lines. line, end_line: the first and the last of them, from 1. old, new:
    their whole text, indentation included, without the last line break. cell: "In [7]" where they stand in a notebook.
    """

    file: str
    line: int
    end_line: int
    old: str
    new: str
    cell: str | None = None

    @property
    def place(self) -> str:
        """ "In [7], line 4", "train.py, lines 31 to 33"."""
        lines = f"line {self.line}" if self.line == self.end_line else f"lines {self.line} to {self.end_line}"
        return f"{self.cell or pathlib.PurePath(self.file).name}, {lines}"

    @property
    def code(self) -> str:
        """The new lines without their common indentation: what a `Fix` shows as its code."""
        return textwrap.dedent(self.new)

    def changed(self) -> list[tuple[str, str]]:
        """The lines as a unified diff shows them, without common indentation: (mark, line), mark "-", "+" or " "."""
        lines = textwrap.dedent(f"{self.old}\n{self.new}").split("\n")
        old = self.old.count("\n") + 1
        return [(line[0], line[2:]) for line in difflib.ndiff(lines[:old], lines[old:]) if line[0] in "-+ "]


@dataclasses.dataclass(frozen=True)
class Fix:
    """What the user would write. verified: True (tried, it helped), False (tried, it did not), None (not tried).

    after: the numbers seen when it was tried, or the reason why it was not. edit: the change itself, where it is one of
    the user's own lines; `code` is then its new text, and `verified` says that this text was tried.
    """

    title: str
    code: str
    verified: bool | None = None
    after: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    edit: Edit | None = None

    @classmethod
    def of(cls, title: str, edit: Edit, verified: bool | None = None, after: Mapping[str, Any] | None = None) -> Fix:
        """A fix that is an edit of the user's own lines."""
        return cls(title, edit.code, verified, after or {}, edit)


@dataclasses.dataclass(frozen=True)
class Link:
    """One event of a chain: what happened, said in one sentence, and where."""

    what: str
    where: Where = Where()
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One named cause. code: "chapter/what-is-wrong"; title: one sentence a person would say."""

    code: str
    title: str
    where: Where = Where()
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixes: tuple[Fix, ...] = ()
    chain: tuple[Link, ...] = ()

    @property
    def chapter(self) -> str:
        return self.code.split("/")[0]


@dataclasses.dataclass(frozen=True)
class RuledOut:
    """A cause that was looked for and is not there, with the number that says so."""

    what: str
    because: str


@dataclasses.dataclass(frozen=True)
class Symptom:
    """What was seen that is not well. what: a sentence with its numbers; look: what to look at next, in a sentence."""

    what: str
    look: str = ""


BYTES = "(bytes)"
"""The end of the name of a column that holds sizes."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of plain values, raw: a column whose name ends in "(bytes)" holds sizes in bytes.

    note: how to read the rows, in a sentence. open: whether HTML shows it unfolded; None: the first table of a report
    without findings is, the others are not.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    open: bool | None = None


@dataclasses.dataclass(frozen=True)
class Plot:
    """A picture. kind: one of PLOTS, the file of views/plots that draws it. data: plain, as that file takes it."""

    kind: str
    data: Mapping[str, Any]


HIDDEN = ("saver", "folded")
"""Fields of a Report that are no part of what it says."""


@dataclasses.dataclass
class Report:
    """The answer to one question. Iterating over it gives its findings.

    question: the call that was made, as a person would write it ("nan_trace(step)"). subject: which model and optimizer
    were taken, and from where. facts: further numbers (plain, JSON-able). saver: what `save_repro` calls, set by tools
    that can reproduce the fault alone; it may hold tensors, which go when the report goes. failed: something is wrong
    that has no named cause. independent: the findings are problems that stand side by side (of a file, a notebook), not
    answers of which one is the likeliest. steps: how many training steps were examined; losses: of these steps, as far
    as known.

    As text a report of one cause fits on a screen of 30 lines, and HTML folds the same: `report.full()` is the report
    with everything shown, and what the magics return with --full.
    """

    question: str
    findings: tuple[Finding, ...] = ()
    ruled_out: tuple[RuledOut, ...] = ()
    unchecked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    subject: str = ""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    saver: Any = dataclasses.field(default=None, repr=False, compare=False)
    headline: str = dataclasses.field(default="", kw_only=True)
    symptoms: Sequence[Symptom] = dataclasses.field(default=(), kw_only=True)
    independent: bool = dataclasses.field(default=False, kw_only=True)
    steps: int = dataclasses.field(default=0, kw_only=True)
    losses: Sequence[float] = dataclasses.field(default=(), kw_only=True)
    tables: Sequence[Table] = dataclasses.field(default=(), kw_only=True)
    plots: Sequence[Plot] = dataclasses.field(default=(), kw_only=True)
    folded: bool = dataclasses.field(default=True, kw_only=True, repr=False, compare=False)

    @property
    def verdict(self) -> str:
        """One of VERDICTS. A run is healthy where what was examined of it showed nothing else; a finding that says that
        the cause could not be located is none that was found."""
        if any(not finding.code.endswith("/not-located") for finding in self.findings):
            return FOUND
        return UNKNOWN if self.findings or self.symptoms else HEALTHY

    @property
    def ok(self) -> bool:
        """True for healthy alone."""
        return self.verdict == HEALTHY

    @property
    def sentence(self) -> str:
        """What it says, in one sentence: of its first finding, its first symptom, or its headline."""
        if self.findings:
            return self.findings[0].title
        return self.symptoms[0].what if self.symptoms else self.headline

    @property
    def examined(self) -> bool:
        """Whether anything was judged: a table of memory, or a stop in a layer, is neither healthy nor not."""
        return bool(self.steps or self.losses or self.ruled_out)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __bool__(self) -> bool:
        """A report is always true: `if report:` must not depend on `__len__`. Ask `report.ok`."""
        return True

    def full(self) -> Report:
        """This report with nothing left out of its text and nothing folded in its HTML: `print(report.full())`."""
        return dataclasses.replace(self, folded=False)

    def plot(self, kind: str) -> Mapping[str, Any]:
        """The data of the picture of this kind. Raises KeyError when the report has none."""
        for plot in self.plots:
            if plot.kind == kind:
                return plot.data
        raise KeyError(f"no picture of kind {kind!r}; there are {[plot.kind for plot in self.plots]}")

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, fit for `json.dumps`."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in HIDDEN}
        return {"verdict": self.verdict, "ok": self.ok, **json.loads(json.dumps(plain, default=_plain))}

    def save(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the report to `path`: `.html`, `.json` or `.txt`, or its first table as `.csv`. Raises ValueError for
        any other ending, and where there is no table."""
        path = pathlib.Path(path)
        writers = {
            ".html": lambda: self._view("html", "page"),
            ".txt": lambda: str(self.full()),
            ".json": lambda: json.dumps(_strict(self.to_dict()), indent=1, allow_nan=False),
            ".csv": lambda: self.frame().to_csv(index=False),
        }
        if path.suffix not in writers:
            raise ValueError(f"save takes a path ending in {', '.join(writers)}; got {path.name!r}")
        importlib.import_module("nbdebug.patch").write_whole(path, writers[path.suffix]())
        return path

    def save_repro(self, folder: str | pathlib.Path) -> pathlib.Path:
        """Write a script and a safetensors file that fail at the same op without the model. Returns the script's path.

        Raises ValueError when this report has nothing to reproduce.
        """
        if self.saver is None:
            raise ValueError(
                "This report holds nothing to reproduce: "
                + ("it has no finding." if not self.findings else "the failing op's operands were not kept.")
            )
        return self.saver(pathlib.Path(folder), self)

    @property
    def edit(self) -> Edit:
        """The first edit of the first finding that was tried and works. Raises ValueError where there is none."""
        fixes = self.findings[0].fixes if self.findings else ()
        for fix in fixes:
            if fix.edit is not None and fix.verified:
                return fix.edit
        reason = "no fix of it is a tried edit of a line of yours" if fixes else "it has no fix"
        raise ValueError(f"This report holds nothing to apply: {reason}.")

    def patch(self) -> str:
        """The first tried edit as a unified diff, for `patch -p0` or `git apply -p0`. Raises ValueError without one."""
        return str(importlib.import_module("nbdebug.patch").diff(self.edit))

    def apply(self, write: bool = False) -> None:
        """Make the first tried edit. In a notebook the mended cell is put below as a new one, which you run. For a file
        the diff is printed; only with write=True is the file written, and its old text is saved beside it.

        Raises ValueError where there is no such edit, or where the lines have changed since."""
        importlib.import_module("nbdebug.patch").apply(self.edit, write)

    def mended(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the checkpoint that was examined anew, with the names that the model has. Returns the new path.

        A path that ends as a file (new.pt, new.safetensors) gets all shards in one; one without an ending, for a folder
        of shards, of a model of transformers, or of torch.distributed.checkpoint, becomes a folder with the same files.
        Raises ValueError where that can't mend it, FileExistsError where there is a file: none is ever replaced."""
        tool = importlib.import_module("nbdebug.tools.checkpoint.checkpoints")
        return pathlib.Path(tool.write_mended(self.facts, pathlib.Path(path)))

    def show(self) -> None:
        """Display the report in a running notebook; elsewhere print it as text to stderr."""
        self._view("text", "show")

    def figure(self) -> Any:
        """A matplotlib Figure of the evidence. Raises ValueError when the report has nothing to draw."""
        return self._view("plots.figure", "draw")

    def frame(self, title: str | None = None) -> Any:
        """A table of the report as a pandas DataFrame, whole and with raw numbers (sizes in bytes): the one with this
        title, else the first. Raises ValueError when there is none."""
        return self._view("wording", "frame", title)

    def _pictures(self, *kinds: str) -> Iterator[tuple[str, Any]]:
        """(kind, picture) of the plots that can be drawn, of these kinds where some are named; see views/plots."""
        for plot in self.plots:
            if plot.kind in (kinds or PLOTS):
                picture = importlib.import_module(f"nbdebug.views.plots.{plot.kind}").read(plot.data)
                if picture is not None:
                    yield plot.kind, picture

    def _view(self, module: str, function: str, *more: Any) -> Any:
        """What a view gives. Views are imported on demand: asking a question must not import matplotlib."""
        return getattr(importlib.import_module(f"nbdebug.views.{module}"), function)(self, *more)

    def __str__(self) -> str:
        return self._view("text", "render")

    def __repr__(self) -> str:
        """The text, in colour where stdout is a terminal."""
        return self._view("text", "for_terminal")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._view("html", "render")}


def _plain(value: Any) -> Any:
    """What json asks for things that it does not know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def _strict(value: Any) -> Any:
    """Plain data with NaN and the infinities, which JSON lacks, as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: _strict(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_strict(inside) for inside in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
