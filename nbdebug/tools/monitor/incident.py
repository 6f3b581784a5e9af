"""`incident`: the reports of an afternoon as a page in five parts, for a team's folder: problem, facts, cause, cure,
prevention.

The page is written to be passed on: names of people and hosts, tokens and home folders are taken out of it.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import platform
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from nbdebug import registry
from nbdebug.patch import write_whole
from nbdebug.report import Finding, Fix, Report
from nbdebug.text import clip, figures

PARTS = ("Problem", "Facts", "Cause", "Cure", "Prevention")
MOST = 6
"""Causes that a page has."""
BEFORE = {
    "nan": "`%guard on` before long runs: it stops at the first value that is not finite, and names the op.",
    "training": "`%preflight` before each new model, data set or loss: it takes seconds.",
    "precision": "`%precision` before a change of the number type: it names the modules that must stay in float32.",
    "memory": "`%fit` before the first step, with the batch size of the run.",
    "error": "Ten steps on one batch before a long run; `%explain` names the line at once.",
    "notebook": "`%check_notebook` before a result counts; restart the kernel and run all.",
    "config": "`python -m nbdebug check-config FILE` in CI, before a run starts.",
    "checkpoint": "`%resume_proof` once for each program that trains, before it is needed.",
    "environment": "`python -m nbdebug check-environment` at the start of each job.",
    "data": "`python -m nbdebug check-data PATH` whenever the data change.",
    "speed": "`python -m nbdebug bottleneck train.py --json`, kept, and compared later with `--against`.",
    "quality": "`nbdebug.check_outputs` on a fixed set of prompts with each checkpoint.",
    "distributed": "`python -m nbdebug ranks train.py --nproc 2` on a small machine, before the large one.",
    "run": "`%monitor on` in long runs, and `python -m nbdebug read-log LOG` on their logs.",
}
"""What would have shown a chapter's causes earlier."""
SECRETS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[opsu]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|AKIA[A-Z0-9]{12,}"
    r"|xox[abp]-[\w-]{8,}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]+|[0-9a-f]{40})\b"
)
ASSIGNED = re.compile(
    r"(?i)\b([\w-]*(?:token|secret|password|passwd|api_?key|auth)[\w-]*['\"]?\s*[:=]\s*)(['\"]?)[^\s'\",;]{4,}\2"
)
HOMES = re.compile(r"(?i)(?:[A-Z]:\\Users\\|/(?:home|Users)/)[^/\\\s\"'`<>]+|/root(?=/)")
ADDRESS = re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b|\b(?:\d{1,3}\.){3}\d{1,3}\b")


@dataclasses.dataclass(frozen=True)
class GivenReport:
    """A report with the cell that gave it and the time, in seconds since the epoch."""

    cell: str
    when: float
    report: Report


def incident(reports: Iterable[Any] | None = None, *, title: str = "") -> Incident:
    """A page in five parts of what went wrong: problem, facts, cause, cure, prevention.

    reports: Reports, oldest first; left out: those that cells of this notebook gave, the last 50 of them. title: of the
    page; left out: the first cause. Returns a page that a notebook shows; `page.save("page.md")` writes it.
    Raises ValueError where no report has found anything, TypeError for what is no report.
    """
    if reports is None:
        from nbdebug.observe.variables import running_shell

        reports = session_reports(running_shell())
    given = [one if isinstance(one, GivenReport) else GivenReport("", 0.0, one) for one in reports]
    for one in given:
        if not isinstance(one.report, Report):
            raise TypeError(f"incident takes reports of nbdebug; got {type(one.report).__name__}.")
    told = [one for one in given if not one.report.ok]
    if not told:
        raise ValueError("No report of this session has found anything: there is no incident to write down.")
    return Incident(scrubbed(_markdown(given, told, title)))


def session_reports(shell: Any) -> list[GivenReport]:
    """The reports that cells of this session gave, oldest first."""
    panel = getattr(getattr(shell, "magics_manager", None), "registry", {}).get("NbdebugMagics")
    return list(panel.state.reports.kept) if panel is not None else []


class Incident:
    """The page. markdown: its text, which a notebook shows."""

    def __init__(self, markdown: str) -> None:
        self.markdown = markdown

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write the page as .md. Raises ValueError for any other ending."""
        path = pathlib.Path(path)
        if path.suffix != ".md":
            raise ValueError(f"An incident is saved as .md; got {path.name!r}.")
        write_whole(path, self.markdown)
        return path

    def __repr__(self) -> str:
        return self.markdown

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.markdown, "text/markdown": self.markdown}


def scrubbed(text: str) -> str:
    """The text without home folders, names of the user and the host, addresses and tokens."""
    text = ASSIGNED.sub(r"\1(secret)", SECRETS.sub("(secret)", text))
    home = str(pathlib.Path.home())
    text = text.replace(home, "~") if len(home) > 1 else text
    text = ADDRESS.sub("(address)", HOMES.sub("~", text))
    names = {os.environ.get(key, "") for key in ("USER", "LOGNAME", "USERNAME")} | {pathlib.Path.home().name}
    hosts = {socket.gethostname(), platform.node()}
    hosts |= {host.split(".")[0] for host in hosts}
    for words, shown in ((names, "(user)"), (hosts, "(host)")):
        for word in sorted(words, key=len, reverse=True):
            if len(word) > 1 and word not in COMMON:
                text = re.sub(rf"(?<![\w]){re.escape(word)}(?![\w])", shown, text)
    return text


COMMON = ("root", "user", "admin", "localhost", "home", "notebook", "python", "torch")
"""Words that tell nobody's name."""


# -- the five parts ---------------------------------------------------------------------------------------------------


def _markdown(given: Sequence[GivenReport], told: Sequence[GivenReport], title: str) -> str:
    findings = _findings(told)
    title = title or (findings[0][1].title if findings else told[0].report.sentence)
    parts = _problem(told), _facts(given), _causes(findings), _cures(findings, given), _prevention(findings)
    body = "\n\n".join(f"## {number}. {name}\n\n{text}" for number, (name, text) in enumerate(zip(PARTS, parts), 1))
    return f"# Incident: {_line(title, 160)}\n\n{body}\n"


def _findings(told: Sequence[GivenReport]) -> list[tuple[GivenReport, Finding]]:
    """The first finding of each code, in order."""
    first: dict[str, tuple[GivenReport, Finding]] = {}
    for one in told:
        for finding in one.report.findings[:3]:
            if finding.code not in first or not first[finding.code][1].fixes and finding.fixes:
                first[finding.code] = one, finding
    return list(first.values())[:MOST]


def _line(text: Any, most: int = 300) -> str:
    return clip(" ".join(str(text).split()), most)


def _problem(told: Sequence[GivenReport]) -> str:
    seen = dict.fromkeys(
        _line(text) for one in told for text in [s.what for s in one.report.symptoms] or [one.report.sentence]
    )
    when = [one.when for one in told if one.when]
    first = f"First seen {_clock(when[0])}." if when else ""
    cells = dict.fromkeys(one.cell for one in told if one.cell)
    where = f" Cells: {', '.join(list(cells)[:8])}." if cells else ""
    bullets = "\n".join(f"- {text}" for text in list(seen)[:MOST])
    return f"{bullets}\n\n{first}{where}".strip()


def _clock(when: float, form: str = "%Y-%m-%d, %H:%M UTC") -> str:
    return datetime.datetime.fromtimestamp(when, datetime.timezone.utc).strftime(form)


def _facts(given: Sequence[GivenReport]) -> str:
    rows = [("time", "cell", "asked", "verdict", "cause"), ("---",) * 5]
    for one in given[-20:]:
        code = one.report.findings[0].code if one.report.findings else ""
        time, asked = _clock(one.when, "%H:%M:%S") if one.when else "", f"`{_line(one.report.question, 60)}`"
        rows.append((time, one.cell, asked, one.report.verdict, code))
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in escaped)
    numbers = [
        f"- {finding.code}, {key}: {_value(value)}"
        for _, finding in _findings([one for one in given if not one.report.ok])
        for key, value in list(finding.evidence.items())[:5]
        if isinstance(value, (int, float, str)) and not isinstance(value, bool)
    ]
    return "\n\n".join(filter(None, [table, "\n".join(numbers[:15]), _versions()]))


def _value(value: Any) -> str:
    return figures(float(value)) if isinstance(value, (int, float)) else _line(value, 160)


def _versions() -> str:
    import importlib.metadata

    import nbdebug

    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "unknown"
    return f"Python {platform.python_version()}, torch {torch}, nbdebug {nbdebug.__version__}, {platform.system()}."


def _causes(findings: Sequence[tuple[GivenReport, Finding]]) -> str:
    if not findings:
        return "Not known: something is not well, and no report has named a cause."
    parts = []
    for _, finding in findings:
        place = f" ({finding.where.place})" if finding.where.place else ""
        text = f"**{finding.code}**{place}: {_line(finding.title)}"
        chain = "".join(f"\n  - {_line(link.what, 200)}" for link in finding.chain[:4])
        sure = f"\n\n  To be sure: {confirm}" if (confirm := _page(finding.code, "confirm")) else ""
        parts.append(f"- {text}{chain}\n\n  {_page(finding.code, 'cause')}{sure}")
    return "\n".join(parts)


def _page(code: str, part: str) -> str:
    try:
        return str(getattr(registry.look_up(code), part))
    except KeyError:
        return ""


def _cures(findings: Sequence[tuple[GivenReport, Finding]], given: Sequence[GivenReport]) -> str:
    parts = []
    for one, finding in findings:
        for fix in finding.fixes[:1]:
            parts.append(f"- {finding.code}: {_line(fix.title)} {_proof(fix)}\n\n{_code(fix.code)}")
        if not finding.fixes:
            parts.append(f"- {finding.code}: {_page(finding.code, 'fix')}")
        after = next((o for o in given if o.when > one.when and o.report.ok and _same(o.report, one.report)), None)
        if after is not None:
            where = f" ({after.cell})" if after.cell else ""
            parts.append(f"  Afterwards `{_line(after.report.question, 60)}` was healthy{where}.")
    return "\n".join(parts) or "None was tried."


def _same(one: Report, other: Report) -> bool:
    return one.question.split("(")[0].split()[:1] == other.question.split("(")[0].split()[:1]


def _proof(fix: Fix) -> str:
    words = {True: "Tried, it works.", False: "Tried, it did not help.", None: "A suggestion, not tried."}
    numbers = [f"{key}: {_value(v)}" for key, v in fix.after.items() if isinstance(v, (int, float))][:3]
    return words[fix.verified] + (f" ({'; '.join(numbers)})" if numbers and fix.verified is not None else "")


def _code(code: str) -> str:
    lines = "\n".join(f"  {line}" for line in code.strip("\n").splitlines()[:20])
    return f"  ```python\n{lines}\n  ```"


def _prevention(findings: Sequence[tuple[GivenReport, Finding]]) -> str:
    chapters = dict.fromkeys(finding.chapter for _, finding in findings)
    lines = [f"- {BEFORE[chapter]}" for chapter in chapters if chapter in BEFORE]
    return "\n".join(lines) or "- `%preflight` before a run, `%guard on` and `%monitor on` during it."
