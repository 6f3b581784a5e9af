"""check_config(): what is wrong with the settings of a run, before it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nbdebug.report import Edit, Finding, Fix, Plot, Report, RuledOut, Table, Where
from nbdebug.text import clip, count
from nbdebug.tools.config.document import ConfigFacts, Document, Expectation, OneSetting, Setting, parsed, read
from nbdebug.tools.config.parsers import Flaw
from nbdebug.tools.config.rules import ORDER
from nbdebug.tools.config.schema_from import conventions, expectations, misspelt, violations
from nbdebug.tools.config.tables import CHOICES, CLASSES, GIVEN, INVISIBLE, RATES, TOTALS, WARMUPS

BY_NESTING = ("config/unknown-key", "config/duplicate-key")
"""Codes that may come of a bracket or an indentation that was mended as it was not meant."""


def check_config(
    path_or_mapping: Any,
    *,
    schema: Any = None,
    model: Any = None,
    optimizer: Any = None,
    loader: Any = None,
    checkpoint: Any = None,
) -> Report:
    """Find what is wrong with the settings of a run: where the file can't be read, and values that cannot be meant.

    path_or_mapping: a JSON, YAML or TOML file of at most 10 MB, or a dict, a dataclass (also TrainingArguments), a
    pydantic model, an argparse Namespace or an OmegaConf config. schema: what each key may be, as a JSON Schema, a
    dataclass, a pydantic model, a dict of dotted keys, each with `type` (int, float, str, bool, list, object), `min`,
    `max`, `below` (exclusive), `choices`, `multiple_of`, `less_than`, `at_most`, `not_with`, `when` (each another key),
    `exists` ("file" or "folder", seen from the folder of the file), or a path to one; `schema_from` drafts it. Without
    a schema it knows the usual names of the field, and is silent of all others. model, optimizer, loader: their own
    values are compared with the file's; checkpoint: the settings that were saved with one (a dict or a path).

    YAML is read as PyYAML's safe_load reads it (YAML 1.1); where YAML 1.2 sees another value, the report says so.
    Where the settings name a scheduler of torch, or of transformers where that is loaded, the planned learning rate is
    drawn. Nothing in the file is run. Raises OSError for a file that can't be opened, ValueError for one of another
    format, or too large, TypeError for an object without settings, ImportError where YAML is to be read without
    ruamel.yaml.
    """
    document = read(path_or_mapping)
    if with_schema := schema is not None:
        schema = getattr(read(schema).root, "plain", None) if isinstance(schema, (str, pathlib.Path)) else schema
    expected, closed = expectations(schema) if with_schema else ({}, False)

    def look(document: Document) -> tuple[Finding, ...]:
        others = list(_others(document, model, optimizer, loader, checkpoint))
        findings = _findings(document, expected, closed, others)
        return findings + tuple(_by_library(document, schema, {f.evidence["where"][0] for f in findings}))

    return _report(document, tuple(_tried(look(document), document, look)), with_schema)


def _findings(
    document: Document, expected: Mapping[str, Expectation], closed: bool, others: list[tuple[str, str, Any]]
) -> tuple[Finding, ...]:
    settings, near = document.settings, dict[str, str]()
    if not expected:
        expected, near = conventions(settings), misspelt(settings)
    absent, beside = _paths(document, expected)
    lines = tuple(document.mended.split("\n"))
    facts = ConfigFacts(
        document.file, document.format, settings, expected, closed, absent, beside, lines, near, tuple(others)
    )
    findings = [_syntax(document, flaw) for flaw in document.flaws]
    flawed, told = {flaw.line for flaw in document.flaws}, set[tuple[str, int | None]]()
    merges = document.format == "YAML" and "<<" in document.text
    for setting in settings.values():
        place = setting.name, setting.line
        found = next((f for f in (check(OneSetting(setting, facts)) for check in ORDER) if f is not None), None)
        if found is None or merges and place in told:
            continue  # it came in by `<<`, and was told where it stands
        if not (flawed and found.code in BY_NESTING or setting.line in flawed):
            findings.append(found)
            told.add(place)
    return tuple(findings)


def _by_library(document: Document, schema: Any, named: set[str]) -> Iterator[Finding]:
    """What jsonschema finds besides: patterns, lengths, conditions, keys that must stand together."""
    for key, code, message in violations(schema, document.root.plain) if document.root and not document.flaws else ():
        inside = f"{key}." if key else ""
        if not any(f"{other}.".startswith(inside) or inside.startswith(f"{other}.") for other in named):
            line = document.settings[key].line if key in document.settings else None
            where = Where(file=document.file, line=line, text=document.lines[line - 1].strip() if line else None)
            fix = Fix("See what the schema asks for.", f"# {key or 'the top'}: {clip(message, 100)}")
            title = f"{f'`{key}`' if key else 'The settings'}: {clip(message, 160)}"
            yield Finding(code, title, where, {"where": [key], "source": "the schema"}, (fix,))


def _paths(document: Document, expected: Mapping[str, Expectation]) -> tuple[dict[str, str | None], dict[str, str]]:
    """(paths that do not exist, with the same path without what is not seen at its ends where that one does; those with
    one of nearly the same name)."""
    absent, beside = dict[str, str | None](), dict[str, str]()
    folder = pathlib.Path(document.file).parent if document.file else pathlib.Path()

    def exists(path: str, kind: str) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return (folder / path).is_dir() if kind == "folder" else (folder / path).is_file()
        return False

    for key, setting in document.settings.items():
        value, kind = setting.value, expected[key].exists if key in expected else None
        if kind not in ("file", "folder") or not isinstance(value, str) or exists(value, kind):
            continue
        clean = value.strip("".join(INVISIBLE) + " \t\r\n")
        absent[key] = clean if clean and clean != value and exists(clean, kind) else None
        path = pathlib.PurePath(value)
        with contextlib.suppress(OSError, ValueError):
            names = [each.name for each in (folder / path.parent).iterdir()][:1000]
            for name in difflib.get_close_matches(path.name, names, n=1, cutoff=0.8):
                if exists(str(path.parent / name), kind):
                    beside[key] = (path.parent / name).as_posix()
    return absent, beside


def _syntax(document: Document, flaw: Flaw) -> Finding:
    """A fault of the text."""
    old, new = (text.split("\n")[flaw.line - 1] for text in (document.text, document.mended))
    fix = Fix(flaw.cure, _visible(old).strip() or "{}")
    if flaw.mended and document.file is not None and old != new:
        edit = Edit(document.file, flaw.line, flaw.line, old, new)
        fix = Fix.of(flaw.cure, edit) if new.strip() else dataclasses.replace(fix, edit=edit)
    name = pathlib.PurePath(document.file or "").name
    title = f"{name} is no {document.format} at line {flaw.line}, column {flaw.column}: {flaw.what}"
    where = Where(file=document.file, line=flaw.line, text=clip(_visible(old).strip(), 160) or None)
    evidence = {"where": [str(flaw.line)], "line": flaw.line, "column": flaw.column}
    return Finding("config/syntax", title, where, evidence, (fix,))


def _around(document: Document) -> Iterator[Table]:
    """The lines around each fault of the text, with a mark."""
    for at in [flaw.line for flaw in document.flaws][:5]:
        shown = ((n, line) for n, line in enumerate(document.lines, 1) if abs(n - at) < 3)
        rows = [(">" if n == at else "", n, clip(_visible(line), 100)) for n, line in shown]
        yield Table(f"Around line {at}", ("", "line", "text"), rows, open=True)


def _visible(line: str) -> str:
    """A line with its tabs and invisible characters shown."""
    return "".join(f"<U+{ord(c):04X}>" if c in INVISIBLE else "\u2192   " if c == "\t" else c for c in line)


def _tried(
    findings: tuple[Finding, ...], document: Document, look: Callable[[Document], tuple[Finding, ...]]
) -> Iterator[Finding]:
    """The findings, with each edit made on the text, and the text read and checked again. Faults of the text are mended
    all together."""
    before = {(f.code, str(f.evidence["where"])) for f in findings}
    for finding in findings:
        (fix,), at = finding.fixes, (finding.code, str(finding.evidence["where"]))
        edit, worked, after = fix.edit, None, {}
        if edit is not None and finding.code == "config/syntax":
            worked, after = document.root is not None or None, {"faults of the text with all mended lines": 0}
        elif edit is not None and edit.old == "\n".join(document.lines[edit.line - 1 : edit.end_line]):
            lines = [*document.lines[: edit.line - 1], *edit.new.split("\n"), *document.lines[edit.end_line :]]
            left = look(parsed("\n".join(lines).encode(), edit.file, f".{document.format.lower()}"))
            after = {"problems before": len(findings), "problems with this line": len(left)}
            keys = {(f.code, str(f.evidence["where"])) for f in left}
            hidden = {key for key in keys if finding.code == "config/duplicate-key" and key[1] == at[1]}
            worked = (at not in keys and keys - hidden <= before) or None  # the entry that stays may be wrong too
        fix = dataclasses.replace(fix, verified=worked, after=after if worked else {})
        yield dataclasses.replace(finding, fixes=(fix,))


# -- what the objects of the run say ----------------------------------------------------------------------------------


def _others(
    document: Document, model: Any, optimizer: Any, loader: Any, checkpoint: Any
) -> Iterator[tuple[str, str, Any]]:
    """(key, object, its value) of what differs. A name counts where one setting of the file has it."""
    config, groups = getattr(model, "config", None), getattr(optimizer, "param_groups", None) or []
    own = vars(config) if hasattr(config, "__dict__") else config if isinstance(config, Mapping) else {}
    sources: list[tuple[str, str, list[Any]]] = [(name, "model", [value]) for name, value in own.items()]
    for key in ("lr", "learning_rate", "weight_decay", "momentum"):
        at = key.replace("learning_rate", "lr")
        values = [group.get(f"initial_{at}", group[at]) for group in groups if at in group]
        sources += [(key, "optimizer", values)] if values else []
    for key in ("batch_size", "train_batch_size", "num_workers"):
        value = getattr(loader, key.removeprefix("train_"), None)
        sources += [(key, "loader", [value])] if value is not None else []
    for name, owner, values in sources:
        matches = [s for s in document.settings.values() if s.name == name and not s.section]
        plain = all(isinstance(v, (int, float, str, bool)) for v in values)
        if len(matches) == 1 and plain and not any(_same(matches[0].value, v) for v in values):
            yield matches[0].key, owner, values[0]
    saved = read(checkpoint).settings if checkpoint is not None else {}
    for key in document.settings.keys() & saved:
        if not document.settings[key].section and not _same(document.settings[key].value, saved[key].value):
            yield key, "checkpoint", saved[key].value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= 1e-9 * max(abs(a), abs(b))
    return bool(a == b) or not isinstance(a, (int, float, str, bool))


# -- the planned learning rate ----------------------------------------------------------------------------------------

LONGEST = 20_000
"""Steps of a schedule that are taken one by one."""


def planned_rates(settings: Mapping[str, Setting]) -> tuple[list[list[float]], str]:
    """([step, rate] of the scheduler that the settings name, why there are none): torch's by its class, transformers'
    by its type where transformers is loaded."""
    rates, totals, warmups = (
        [s.value for s in settings.values() if s.name in names and type(s.value) in (int, float) and s.value > 0]
        for names in (RATES, TOTALS.split(), WARMUPS.split())
    )
    for one in settings.values() if rates else ():
        if one.name not in CLASSES or not isinstance(one.value, str):
            continue
        inside = re.compile(re.escape(one.parent) + GIVEN)
        beside = {s.name: s.value for s in settings.values() if inside.fullmatch(s.parent)}
        warmup = next((s.value for s in settings.values() if s.name == "warmup_ratio"), 0) or next(iter(warmups), 0)
        try:
            scheduler, steps = _scheduler(one.value.rpartition(".")[2], beside, rates[0], totals, warmup)
        except Exception as error:  # torch or transformers refuse the arguments: that is worth a sentence
            return [], f"{one.value} refuses these settings: {clip(str(error), 120)}"
        if scheduler is not None:
            return _rates(scheduler, int(steps)), ""
    return [], ""


def _scheduler(name: str, beside: Mapping[str, Any], rate: float, totals: list[Any], warm: float) -> tuple[Any, float]:
    """The scheduler of a name, over an optimizer of no model, and for how many steps. warm: steps, or a share."""
    import torch  # only where there is a schedule

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cpu"))], lr=float(rate))
    kind = getattr(torch.optim.lr_scheduler, name, None)
    if isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        if "metrics" in inspect.signature(kind.step).parameters:
            return None, 0
        taken = inspect.signature(kind).parameters.keys() - {"optimizer", "verbose"}
        given = {key: value for key, value in beside.items() if key in taken}
        ends = [given[key] for key in ("T_max", "total_steps", "total_iters", "step_size") if key in given]
        ends += [max(given["milestones"])] if given.get("milestones") else []
        return kind(optimizer, **given), max([*totals[:1], *(end * 1.2 for end in ends[:1] if not totals)] or [100])
    transformers = sys.modules.get("transformers.optimization")
    if transformers is None or not totals or name not in CHOICES["lr_scheduler_type"][0].split() or "plateau" in name:
        return None, 0
    steps = math.ceil(totals[0] * warm) if warm < 1 else int(warm)
    return transformers.get_scheduler(name, optimizer, num_warmup_steps=steps, num_training_steps=totals[0]), totals[0]


def _rates(scheduler: Any, steps: int) -> list[list[float]]:
    """[step, rate] at 200 of the steps."""
    shown, rows = {round(place * (steps - 1) / 199) for place in range(200)}, []
    if hasattr(scheduler, "lr_lambdas"):
        return [[step, scheduler.base_lrs[0] * scheduler.lr_lambdas[0](step)] for step in sorted(shown)]
    for step in range(min(steps, LONGEST)):
        if step in shown:
            rows.append([step, scheduler.optimizer.param_groups[0]["lr"]])
        scheduler.optimizer.step()
        scheduler.step()
    return rows


def _report(document: Document, findings: tuple[Finding, ...], with_schema: bool) -> Report:
    name = pathlib.PurePath(document.file).name if document.file else document.format
    values = count(sum(not setting.section for setting in document.settings.values()), "value")
    unread = ["the values: the file can't be read further"] if document.root is None else []
    unknown = ["keys that only your program knows: give a schema (schema_from drafts one)"] if not with_schema else []
    rates, refused = planned_rates(document.settings)
    curve = {"curves of": "learning rate of each step", "curves": {"as planned": rates}}
    read_whole = RuledOut("a problem of the text", f"it was read as {document.format}, {values}")
    problems = [{"key": f.evidence.get("line", f.evidence["where"][0]), "code": f.code} for f in findings]
    return Report(
        "check_config()",
        findings,
        () if findings else (read_whole,),
        (*unread, *unknown),
        (f"No learning rate was drawn: {refused}.",) if refused else (),
        f"{name}: {document.format}, {values}",
        {"problems": problems},
        headline="" if findings else f"No problem was found in {name}.",
        tables=tuple(_around(document)),
        plots=(Plot("losses", curve),) if rates else (),
        independent=True,
    )
