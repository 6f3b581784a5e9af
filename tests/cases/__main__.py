"""`python -m tests.cases FOLDER... [--json] [--by guard]`: a table of cases and the score; exit 0 if all are right."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter

from tests.cases.asking import WAYS
from tests.cases.running import Result, run


def row(result: Result) -> str:
    """One line of the table: the verdict, the case, and what was wrong."""
    verdict = {True: "right", False: "WRONG", None: "skipped"}[result.ok]
    return f"{verdict:8}{result.twin:10}{result.case:44}{remark(result)}".rstrip()


def remark(result: Result) -> str:
    """Why a row is not right: the reason, the error, or each wrong part with what was wanted."""
    if result.ok:
        return str(result.got.get("code", ""))
    if "skipped" in result.got or "error" in result.got:
        return result.got.get("skipped") or result.got["error"]
    if result.expected is None:
        return f"said {result.got.get('code')} of a repaired program"
    if not result.got.get("findings"):
        return f"silent, wanted {result.expected['code']}"
    wrong = [
        f"{part}: {result.got.get(part)!r}, wanted {result.expected[part]!r}"
        for part, ok in result.right.items()
        if not ok and part in result.expected
    ]
    if result.right.get("intact") is False:
        moved = result.got.get("changed")
        wrong.append("never tripped" if moved is None else "the bad step changed " + ", ".join(moved))
    return "; ".join(wrong)


def score(results: list[Result]) -> str:
    """The last lines: broken named, repaired silent, the parts, what was skipped."""
    lines = []
    for twin, word in (("broken", "named"), ("repaired", "silent")):
        judged = [r for r in results if r.twin == twin and r.ok is not None]
        lines.append(f"{twin}: {sum(bool(r.ok) for r in judged)} of {len(judged)} {word}")
    parts = Counter(part for r in results if r.twin == "broken" for part in r.right)
    good = Counter(part for r in results if r.twin == "broken" for part, ok in r.right.items() if ok)
    if parts:
        lines.append("parts: " + ", ".join(f"{part} {good[part]}/{parts[part]}" for part in parts))
    for reason, count in Counter(r.got["skipped"] for r in results if r.ok is None).items():
        lines.append(f"skipped: {count} ({reason})")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cases", description="Judge nbdebug on folders of cases.")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a folder of cases (or one case file)")
    parser.add_argument("--json", action="store_true", help="print a list of results instead of the table")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="seconds for each case (default 120)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many at a time (default 2)")
    parser.add_argument(
        "--by",
        choices=list(WAYS),
        default="trace",
        help="trace: nan_trace is asked (the default); guard: the case is trained under the guard",
    )
    args = parser.parse_args(arguments)
    results = []
    try:
        for result in run(args.folders, args.limit, args.jobs, args.by):
            results.append(result)
            print(row(result), file=sys.stderr if args.json else sys.stdout, flush=True)
    except FileNotFoundError as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps([dataclasses.asdict(r) for r in results], indent=1, default=list))
    else:
        print(f"\n{score(results)}")
    judged = [r for r in results if r.ok is not None]
    return 0 if judged and all(r.ok for r in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
