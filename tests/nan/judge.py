"""Is an answer about a program right? What each part means is said in the cases' README; this judges the same parts."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Truth:
    """What is wrong with a program. Any member of a tuple is right; None means: not judged.

    rows: the rows at fault, whole. batch: the size of the batch; where all its rows are at fault, None says the same.
    """

    codes: tuple[str, ...] | None
    phase: tuple[str, ...]
    modules: tuple[str, ...] | None = None
    ops: tuple[str, ...] | None = None
    line: tuple[str, ...] | None = None
    rows: tuple[int, ...] | None = None
    step: tuple[int, ...] | None = None
    batch: int | None = None


def answer_of(report: Any) -> dict[str, Any]:
    """The first finding of a report, as a plain dict. own_fault: what the report says of a fault of nbdebug's own."""
    own = [text for text in report.unchecked if "nbdebug itself" in text]
    answer: dict[str, Any] = {"findings": len(report.findings)} | ({"own_fault": own} if own else {})
    if not report.findings:
        return answer
    finding = report.findings[0]
    where = {part: getattr(finding.where, part) for part in ("phase", "module", "op", "file", "line", "text", "step")}
    return answer | where | {"code": finding.code, "rows": finding.where.samples, "title": finding.title}


def judge(truth: Truth | None, answer: dict[str, Any], source: str) -> dict[str, bool]:
    """{part: right}; a healthy program has "silent", and "sound": nbdebug itself did not fail."""
    if truth is None:
        return {"silent": not answer.get("findings"), "sound": not ({"error", "own_fault"} & set(answer))}
    if answer.get("findings") != 1:
        return {"one finding": False}
    right = {"one finding": True, "phase": answer["phase"] in truth.phase}
    if truth.codes is not None:
        right["code"] = answer["code"] in truth.codes
    if truth.modules is not None:
        right["module"] = (answer["module"] or "") in truth.modules
    if truth.ops is not None:
        right["op"] = base_name(answer["op"]) in [base_name(op) for op in truth.ops]
    if truth.line is not None:
        shown = statement(source, answer["line"]) if answer["line"] else ""
        right["line"] = any(part in shown for part in truth.line)
    if truth.rows is not None:
        said = None if answer["rows"] is None else tuple(sorted(answer["rows"]))
        right["rows"] = said == truth.rows or (said is None and len(truth.rows) == truth.batch)
    if truth.step is not None:
        right["step"] = answer["step"] in truth.step
    return right


def base_name(op: str | None) -> str:
    """aten::_log_softmax_backward.default and log_softmax are one op."""
    name = re.split(r"::|aten\.", op or "")[-1].split(".")[0].strip("_")
    return re.sub("_(backward|forward)$", "", name)


def statement(source: str, line: int) -> str:
    """The smallest statement that holds the line; of a block, its head."""
    spans = [(line, line)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno
            if node.lineno <= line <= end:
                spans.append((node.lineno, end))
    spans = spans[1:] or spans
    first, last = min(spans, key=lambda span: span[1] - span[0])
    return "\n".join(source.splitlines()[first - 1 : last])
