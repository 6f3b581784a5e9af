"""A Report as HTML: `render` gives a fragment for notebooks, `page` a whole page that stands alone.

JupyterLab strips inline <svg>, <style>, var(), role and aria-* from notebooks that it does not trust, so the fragment
is made of what it keeps: <img alt>, tables with captions and scopes, <details>, and plain style attributes. It must be
legible on white and on #212121 and cannot ask which it is on, so text keeps the page's own colour (paler by opacity
alone), and lines and grounds are half-transparent grey. Nothing is said by colour alone. Everything from the user goes
through `_e`, and what is endless is cut so that a report stays under 100 kB.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Sequence
from typing import Any

from nbdebug.report import Finding, Fix, Link, Report, Where
from nbdebug.text import count
from nbdebug.views import wording as words
from nbdebug.views.plots.marks import image

LIMIT = 95_000
"""Bytes of a fragment: what is endless is cut."""
OPEN = 4
"""Events, notes and less likely causes that are not folded."""
FAULT, FINE = "#d4564c", "#388c5e"
BAR = {"bad": FAULT, "good": FINE, "": "rgba(128,128,128,.5)"}
"""The line beside a report, by its tone; its words say the same."""
MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
CODE = f"{MONO};font-size:.92em;background:rgba(128,128,128,.13);border-radius:3px;padding:.1em .35em"
BLOCK = (
    f"{MONO};font-size:.92em;line-height:1.5;background:rgba(128,128,128,.11);border:0;border-radius:4px;"
    "padding:.55em .8em;margin:.35em 0 0;white-space:pre;overflow-x:auto;max-width:100%;box-sizing:border-box"
)
PALE = "opacity:.72"
SMALL = f"font-size:.88em;{PALE}"
HEAD = "margin:1.25em 0 .35em;font-weight:600"
MARKS = {"-": f"color:{FAULT}", "+": f"color:{FINE}"}
"""Old and new lines of an edit; the mark before each says it without colour."""


def render(report: Report) -> str:
    """A fragment for a notebook."""
    return _fitting(report, "p")


def page(report: Report) -> str:
    """A whole HTML page, light or dark as the reader's system is."""
    title = words.clean(report.findings[0].title if report.findings else words.headline(report) or words.NOTHING, 160)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_e(title.replace('`', ''))}</title>\n<style>\n:root{{color-scheme:light dark}}\n"
        "body{margin:0;padding:2.5rem 1.5rem;background:#fdfdfc;color:#24272b;"
        "font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}\n"
        "main{max-width:54rem;margin:0 auto}\n"
        "@media (prefers-color-scheme:dark){body{background:#212121;color:#dededc}}\n"
        f"</style>\n</head>\n<body>\n<main>\n{_fitting(report, 'h1')}\n</main>\n</body>\n</html>\n"
    )


def _fitting(report: Report, head: str) -> str:
    """The report with as many rows, and as much of long lines, as fit into LIMIT bytes."""
    for most in (30, 12, 5, 2, 1):
        drawn = _report(report, most, head)
        if len(drawn.encode()) <= LIMIT:
            break
    return drawn


def _report(report: Report, most: int, head: str) -> str:
    question = " · ".join(_sentence(words.clean(part, 300)) for part in (report.question, report.subject) if part)
    foot = f'<p style="{SMALL};margin:1.1em 0 0">{question}</p>' if question else ""
    body = _found(report, most, head) if report.findings else _silent(report, most, head)
    if not report.folded:
        body = body.replace("<details ", "<details open ")
    # The classes keep MathJax from reading $ in the user's own words.
    return (
        '<div class="mathjax_ignore tex2jax_ignore" style="max-width:54em;line-height:1.5;margin:.4em 0;'
        f"padding:.1em 0 .1em 1.1em;border-left:3px solid {BAR[words.tone(report)]};"
        'overflow-wrap:break-word">'
        f"{body}{foot}</div>"
    )


def _found(report: Report, most: int, head: str) -> str:
    first, *others = report.findings
    headline = words.headline(report)
    parts = [
        f'<p style="margin:.3em 0 .7em">{_sentence(headline)}</p>' if headline else "",
        _headline(first, words.of_first(report), head, most),
        _pictures(report),
        _chain(first, most),
    ]
    parts += [_fixes(first, most), _others(others, most, report)]
    folded = _numbers(first, report, most) + _rest(report, most) + _notes(report, most)
    return "".join(parts) + f'<div style="margin:1.25em 0 0">{folded}</div>'


def _silent(report: Report, most: int, head: str) -> str:
    texts = [words.examined(report), *words.symptoms(report), *(words.clean(n, 600) for n in report.notes[:OPEN])]
    more = report.notes[OPEN:]
    label = f'<p style="{SMALL};margin:0">{_e(report.verdict.capitalize())}</p>' if words.tone(report) else ""
    return (
        label
        + _title(words.headline(report) or words.NOTHING, head)
        + "".join(_p(_sentence(text)) for text in texts if text)
        + _fold(f"{count(len(more), 'more note')}", _list(more, most))
        + _pictures(report)
        + f'<div style="margin:.8em 0 0">{_listed(report, most, 1)}{_rest(report, most)}</div>'
    )


def _title(text: str, head: str) -> str:
    style = "font-size:1.3em;line-height:1.35;font-weight:600;margin:.1em 0 .5em"
    return f'<{head} style="{style}">{_sentence(text)}</{head}>'


def _headline(finding: Finding, word: str, head: str, most: int) -> str:
    kind = (
        f'<p style="{SMALL};margin:0"><span>{word}:</span> '
        f'<span style="{MONO}">{_e(words.clean(finding.code, 80))}</span></p>'
    )
    title = _title(words.clean(finding.title, 600), head)
    return kind + title + _source(finding.where, 12, most) + _spot(finding.where)


def _source(where: Where, lines: int, most: int) -> str:
    """The user's own line, under the name of its place."""
    place = words.place(where)
    named = f'<p style="{SMALL};margin:.6em 0 0">{_e(place)}</p>' if place else ""
    return named + (_block(where.text, lines, most) if where.text else "")


def _spot(where: Where) -> str:
    known = words.spot(where)
    if not known:
        return ""
    cell = "padding:.05em 1.6em 0 0;border:0;text-align:left;vertical-align:top;background:none;white-space:"
    wrap = ["normal" if h == "Module" or len(value) > 24 else "nowrap" for h, value in known]
    heads = "".join(f'<th scope="col" style="{cell}nowrap;font-weight:400;{SMALL}">{h}</th>' for h, _ in known)
    values = "".join(f'<td style="{cell}{w}">{_e(value)}</td>' for (_, value), w in zip(known, wrap))
    return _scroll(
        f'<table style="border-collapse:collapse;margin:.7em 0 0;border:0;font-size:1em">'
        f'<tr style="background:none">{heads}</tr><tr style="background:none">{values}</tr></table>'
    )


def _chain(finding: Finding, most: int) -> str:
    if not finding.chain:
        return ""
    events = [
        f'<li style="margin:0 0 .5em;padding-left:.2em">{_link(link, before, most)}</li>'
        for link, before in zip(finding.chain[:most], (None, *finding.chain))
    ]
    if len(finding.chain) <= OPEN or len(events) <= 2:
        listed = _ordered(events)
    else:  # the first and the last
        middle = _fold(count(len(events) - 4, "more event"), _ordered(events[2:-2], 3))
        listed = _ordered(events[:2]) + middle + _ordered(events[-2:], len(events) - 1)
    return f'<p style="{HEAD}">How it came about</p>{listed}{_more(len(finding.chain) - most)}'


def _ordered(items: Sequence[str], start: int = 1) -> str:
    return f'<ol start="{start}" style="margin:0;padding-left:1.5em">{"".join(items)}</ol>'


def _link(link: Link, before: Link | None, most: int) -> str:
    """What happened and where, unless the link before it was at the same place."""
    where = Where() if before and before.where == link.where else link.where
    source = words.clean_lines(where.text, 4, 40 * most) if where.text else []
    at = _e(words.stop(where))
    below = [f'<span style="{PALE}">{at}</span>'] if at else []
    below += [f'<code style="{CODE}">{_e(source[0])}</code>'] if len(source) == 1 else []
    below += [f'<span style="{PALE}">{_e(words.pairs(link.evidence))}</span>'] if link.evidence else []
    event = _sentence(words.clean(link.what, 400))
    event += f'<br><span style="font-size:.92em">{" &nbsp;".join(below)}</span>' if below else ""
    return event + (_block(where.text or "", 4, most) if len(source) > 1 else "")


def _fixes(finding: Finding, most: int) -> str:
    if not finding.fixes:
        return ""
    first, *others = (_fix(fix, most) for fix in finding.fixes[:most])
    more = "".join(others) + _more(len(finding.fixes) - most)
    return (
        f'<p style="{HEAD}">What to do</p>{first}{_fold(count(len(finding.fixes) - 1, "more fix", "more fixes"), more)}'
    )


def _fix(fix: Fix, most: int) -> str:
    colour = {True: f";color:{FINE}", False: f";color:{FAULT}"}.get(fix.verified, f";{PALE}")  # type: ignore[arg-type]
    seen = words.numbers_of(fix)
    proved = f": {_sentence(seen)}" if seen != "none" else ""
    return (
        f'<div style="margin:0 0 .9em">{_sentence(words.clean(fix.title, 400))}'
        f'{_change(fix, most)}<div style="font-size:.92em;margin:.35em 0 0">'
        f'<strong style="font-weight:600{colour}">{_sentence(words.verdict(fix))}</strong>{proved}</div></div>'
    )


def _change(fix: Fix, most: int) -> str:
    """The code of a fix; of an edit the old lines and the new ones, marked as a diff marks them."""
    if fix.edit is None:
        return _block(fix.code, 2 * most, most) if fix.code else ""
    lines = words.change(fix)[: 2 * most]
    drawn = [
        f'<span style="{MARKS.get(mark, "")}">{mark or " "} {_e(line[: 40 * most])}</span>' for mark, line in lines
    ]
    place = f'<p style="{SMALL};margin:.6em 0 0">{_e(words.clean(fix.edit.place, 160))}</p>'
    wrapped = BLOCK.replace("white-space:pre;", "white-space:pre-wrap;overflow-wrap:anywhere;")
    return f'{place}<pre style="{wrapped}">{chr(10).join(drawn)}</pre>'


def _others(findings: list[Finding], most: int, report: Report) -> str:
    if not findings:
        return ""
    drawn = [_other(f, most, report.independent) for f in findings[:most]]
    more = "".join(drawn[OPEN:]) + _more(len(findings) - most)
    folded = _fold(count(max(0, len(findings) - OPEN), "more cause"), more)
    return f'<p style="{HEAD}">{words.of_others(report)}</p>{"".join(drawn[:OPEN])}{folded}'


def _other(finding: Finding, most: int, with_change: bool) -> str:
    fixes = "".join(
        f'<p style="font-size:.92em;margin:.35em 0 0">{_sentence(words.clean(fix.title, 300))} '
        f'<span style="{PALE}">{_sentence(words.proof(fix))}</span></p>{_change(fix, most) if with_change else ""}'
        for fix in finding.fixes[:1]
    )
    return (
        f'<div style="margin:0 0 1em">{_sentence(words.clean(finding.title, 400))} '
        f'<span style="{MONO};{SMALL}">{_e(words.clean(finding.code, 80))}</span>'
        f"{_source(finding.where, 2, most)}{fixes}</div>"
    )


def _numbers(finding: Finding, report: Report, most: int) -> str:
    drawn = "".join(_table(t) for t in words.tables(finding.evidence, most))
    for _, histogram in report._pictures("histogram"):
        drawn += f'<div style="margin:.9em 0 .2em">{_p(_e(histogram.sentence()))}{_image(histogram)}</div>'
    return _fold("The numbers", drawn) + _listed(report, most, 0)


def _listed(report: Report, most: int, opened: int) -> str:
    """The tables that the report brings along: so many of them open, the others folded."""
    drawn = ""
    for place, (table, raw) in enumerate(words.report_tables(report, most)):
        note = _sentence(words.clean(raw.note, 600))
        below = f'<p style="{SMALL};margin:0 0 .4em">{note}</p>' if note else ""
        drawn += (
            _table(table) + below
            if (place < opened if raw.open is None else raw.open)
            else _fold(_e(table.caption), _table(dataclasses.replace(table, caption="")) + below)
        )
    return drawn


def _pictures(report: Report) -> str:
    drawn = ""
    for kind, picture in report._pictures(
        "times", "run", "memory", "ranges", "stepper", "gradients", "losses", "gallery"
    ):
        drawn += picture.html() if kind in ("stepper", "gallery") else _image(picture)
        if kind == "losses":
            drawn += _table(picture.table())
        elif kind == "gradients":
            drawn += _layers(picture)
    return f'<div style="margin:1em 0 0">{drawn}</div>' if drawn else ""


def _image(picture: Any) -> str:
    return image(picture.drawing(), picture.sentence())


def _layers(gradients: Any) -> str:
    """The layers of a gradient watch in numbers: open in a panel, which draws them again."""
    table = gradients.table(40 if gradients.pattern is None else 12)
    drawn = _table(table) if table.body else ""
    return (
        _fold("Layers in numbers", drawn)
        if gradients.pattern is None
        else f'<div style="margin:.6em 0 0">{drawn}</div>'
    )


def _rest(report: Report, most: int) -> str:
    out = tuple((words.clean(r.what, 300), words.clean(r.because, 300)) for r in report.ruled_out)
    table = (
        _table(words.TextTable("", ("What it is not", "Because"), out[:most], max(0, len(out) - most))) if out else ""
    )
    return _fold(f"Ruled out ({len(out)})", table) + _fold(
        f"Not checked ({len(report.unchecked)})", _list(report.unchecked, most)
    )


def _notes(report: Report, most: int) -> str:
    return _fold(f"Notes ({len(report.notes)})", _list(report.notes, most))


def _fold(summary: str, body: str) -> str:
    if not body:
        return ""
    return (
        f'<details style="margin:.25em 0"><summary style="cursor:pointer;{PALE}">{summary}</summary>'
        f'<div style="margin:.3em 0 .9em 1.05em">{body}</div></details>'
    )


def _table(table: words.TextTable) -> str:
    apart, size = (".7em", ".84em") if len(table.head) > 6 else ("1.5em", ".92em")  # else it is wider than the output
    cell = f"padding:.22em {apart} .22em 0;border:0;text-align:left;vertical-align:top;background:none"
    rule = "border-bottom:1px solid rgba(128,128,128,.25)"
    heads = "".join(f'<th scope="col" style="{cell};{rule};font-weight:400;{PALE}">{_e(h)}</th>' for h in table.head)
    lines = []
    for first, *others in table.body:
        cells = f'<th scope="row" style="{cell};font-weight:400;{_wrap(first)}">{_e(first)}</th>'
        cells += "".join(f'<td style="{cell};{_wrap(v)}">{_sentence(v)}</td>' for v in others)
        lines.append(f'<tr style="background:none">{cells}</tr>')
    caption = (
        f'<caption style="caption-side:top;text-align:left;padding:.4em 0 .1em;font-weight:600">'
        f"{_e(table.caption)}</caption>"
        if table.caption
        else ""
    )
    return _scroll(
        f'<table style="border-collapse:collapse;margin:0 0 .5em;border:0;font-size:{size}">{caption}'
        f'<thead><tr style="background:none">{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    ) + _more(table.more)


def _wrap(value: str) -> str:
    """A short cell, such as a size with its unit, stays in one line."""
    return "white-space:nowrap" if len(value) <= 14 else "max-width:34em;overflow-wrap:break-word"


def _list(texts: Sequence[str], most: int) -> str:
    if not texts:
        return ""
    items = "".join(f'<li style="margin:.15em 0">{_sentence(words.clean(s, 600))}</li>' for s in texts[:most])
    return f'<ul style="margin:0;padding-left:1.2em;font-size:.92em">{items}</ul>{_more(len(texts) - most)}'


def _more(left: int) -> str:
    return f'<p style="{SMALL};margin:.2em 0 0">… {left} more</p>' if left > 0 else ""


def _p(inner: str) -> str:
    return f'<p style="margin:.3em 0">{inner}</p>'


def _scroll(inner: str) -> str:
    return f'<div style="overflow-x:auto;max-width:100%">{inner}</div>'


def _block(code: str, lines: int, most: int) -> str:
    return f'<pre style="{BLOCK}">{_e(chr(10).join(words.clean_lines(code, lines, 40 * most)))}</pre>'


def _sentence(text: str) -> str:
    """A sentence; what stands in `backticks` is code."""
    return re.sub(r"`([^`]+)`", rf'<code style="{CODE}">\1</code>', _e(text))


def _e(text: str) -> str:
    return html.escape(text)
