"""Where ranks part, and the line behind it.

Two ranks have parted for certain when their calls of one number differ, or when one has ended and another is in a call
that the first never made. A rank that only computes is slow, and no verdict. What led there is looked for in the marks
that the ranks have passed since their last common call.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nbdebug.tools.distributed.facts import CollectiveCall, Line, Place, RankLog, RanksFacts

STILL, PATIENCE = 1.0, 0.9
"""Seconds without an event, after which ranks that wait for each other are taken to wait for good; the part of the
timeout after which a rank that has not come is taken not to come."""
COMMUNICATES = re.compile(r"no_sync|backward|barrier|dist\.")
FILLS = ("append", "extend", "update", "add", "add_")
WRAPPERS = {"enumerate", "zip", "tqdm", "iter", "list", "reversed", "range", "len"}


class Parting(NamedTuple):
    """calls: what each of the ranks called as number n of the group; None for one that has ended without."""

    group: str
    n: int
    calls: Mapping[int, CollectiveCall | None]


class Departure(NamedTuple):
    """Who left the common path. place: the loop that ran out, or the arm that was taken; None where no mark tells."""

    rank: int | None
    line: Line | None
    place: Place | None = None


def partings(facts: RanksFacts) -> Iterator[Parting]:
    """The first certain one of each group, the group of the lowest name first; else where ranks wait for each other, in
    calls of groups of their own: the smallest of these, as others wait for its ranks."""
    late = {(call.group, call.n) for call, _ in waiting(facts, PATIENCE * facts.timeout())}
    for group in sorted({group for log in facts.ranks.values() for group in log.calls}):
        logs = facts.members(group)
        for n in range(facts.alike.get(group, 0), max((log.made(group) for log in logs.values()), default=0)):
            made = {rank: log.call(group, n) for rank, log in logs.items()}
            known = {r: c for r, c in made.items() if c or logs[r].has_left(group) or (group, n) in late}
            if len({call and call.key for call in known.values()}) > 1:
                yield Parting(group, n, known)
                return
    calls = {rank: call for rank in blocked(facts) if (call := pending(facts, facts.ranks[rank])) is not None}
    for own in sorted(calls.values(), key=lambda call: (len(facts.members(call.group)), call.group)):
        inside = {rank: call for rank in facts.members(own.group) if (call := calls.get(rank)) is not None}
        if len({call.key for call in inside.values()}) > 1:
            yield Parting(own.group, own.n, inside)
            return


def pending(facts: RanksFacts, log: RankLog) -> CollectiveCall | None:
    """The first call that a rank cannot leave, as a member of the group has not come to it."""
    calls = (call for own in log.calls.values() for call in own if call.waits and facts.absent(call))
    return min(calls, key=lambda call: call.order, default=None)


def waiting(facts: RanksFacts, seconds: float) -> Iterator[tuple[CollectiveCall, set[int]]]:
    """Calls in which a rank has waited longer, with the ranks that have not come and are still there."""
    for log in facts.ranks.values():
        call = pending(facts, log) if facts.now - log.time > seconds and not log.one("end") else None
        if call is not None and call is log.last:
            yield call, {r for r in facts.absent(call) if not facts.ranks[r].has_left(call.group)}


def blocked(facts: RanksFacts) -> set[int]:
    """The ranks that wait for each other, or for one that has left, and have written nothing for a second."""
    missing: dict[int, set[int]] = {}
    for rank, log in facts.ranks.items():
        if facts.over or facts.now - log.time > STILL:
            call, peer = pending(facts, log), facts.ranks.get(log.message["peer"]) if log.message else None
            if log.message is not None and peer is not None:
                missing[rank] = {peer.rank} if answers(log, peer) <= log.message["n"] else set()
            elif call is not None:
                missing[rank] = facts.absent(call)
    left = {rank for rank, log in facts.ranks.items() if log.has_left("all")}
    while freed := {rank for rank, others in missing.items() if not others & (missing.keys() | left)}:
        missing = {rank: others for rank, others in missing.items() if rank not in freed}
    return set(missing)


def answers(log: RankLog, peer: RankLog) -> int:
    """How many messages a peer has sent to a rank that waits for one of it, or has received of one that sends."""
    assert log.message is not None
    group, tag, _ = log.message["key"].split("/")
    way = "send" if log.message["way"] == "receive" else "receive"
    return peer.messages[way, f"{group}/{tag}/{log.rank}"]


def missing(facts: RanksFacts, parted: Parting) -> list[int]:
    """The ranks that have not come to the call and could still come."""
    return [r for r, call in parted.calls.items() if call is None and not facts.ranks[r].has_left(parted.group)]


def departures(facts: RanksFacts) -> Iterator[tuple[Parting, Departure]]:
    for parted in partings(facts):
        yield parted, departure(facts, parted)


def departure(facts: RanksFacts, parted: Parting) -> Departure:
    """Compares one rank of the larger side with one of the other; of a rank that has not come tells where it stands."""
    for rank in missing(facts, parted):
        stack = facts.ranks[rank].one("stack")
        return Departure(rank, stack["lines"][0] if stack and stack["lines"] else None)
    sides = {rank: call and call.key for rank, call in parted.calls.items()}
    (most, votes), *_ = Counter(sides.values()).most_common(1)  # of two equal sides that of the lower rank
    one, other = (facts.ranks[next(r for r, key in sides.items() if (key == most) is same)] for same in (True, False))
    windows = _windows(parted, one, other)
    for log, peer, mine, theirs in ((one, other, *windows), (other, one, *windows[::-1])):
        for number in dict.fromkeys(-mark for mark in mine if mark < 0):  # a loop ended, and the other made a turn more
            loop = facts.places.get(number)
            if loop is not None and -number not in theirs and theirs.count(number) > mine.count(number):
                left = [loop] if log.turns[number] < peer.turns[number] else _skipped(facts, loop, log, peer)
                left = _filled(facts, loop, log, peer) or left
                if left:
                    return Departure(log.rank, left[0].head, left[0])
    arms = sorted(_arms(facts, parted, (one, other), windows), key=lambda arm: arm[0])
    if arms:
        _, rank, place = arms[0]
        usual = 2 * votes > len(sides)  # what most ranks go through is the common path
        return Departure(other.rank if usual else rank, place.head, place)
    calls = [call for log in (other, one) if (call := parted.calls[log.rank]) is not None]
    lines = [call.lines[:1] for call in calls]
    return Departure(None if lines[1:] == lines[:1] else other.rank, next(iter(lines[0]), None))


def _windows(parted: Parting, one: RankLog, other: RankLog) -> tuple[list[int], list[int]]:
    """The marks of both since the last call in which they were at one place."""
    begin, group = (0, 0), parted.group
    for mine, theirs in zip(one.calls.get(group, ()), other.calls.get(group, ())):  # both begin at one number
        if mine.n >= parted.n or mine.lines != theirs.lines:
            break
        begin = (mine.at, theirs.at)
    ends = [call.at if (call := parted.calls[log.rank]) else log.marks for log in (one, other)]
    return one.window(begin[0], ends[0]), other.window(begin[1], ends[1])


def _skipped(facts: RanksFacts, loop: Place, log: RankLog, peer: RankLog) -> list[Place]:
    """In a loop that ran out after no fewer turns: the arms that this rank has taken more often, those that end a turn
    early first, then those that speak of communication."""
    inside = [p for p in facts.places.values() if p.kind == "arm" and loop.holds(p.head)]
    more = [place for place in inside if log.turns[place.number] > peer.turns[place.number]]
    return sorted(more, key=lambda place: (not jumps(facts, place), not COMMUNICATES.search(facts.body(place))))


def _filled(facts: RanksFacts, loop: Place, log: RankLog, peer: RankLog) -> list[Place]:
    """The arms in which the other rank has put more into what a loop goes over, by the time when this one left it."""
    tree, found = parsed(facts, loop.file), list[Place]()
    passed = Counter(log.trail[: len(log.trail) - log.trail[::-1].index(-loop.number)])
    names = {*names_in(getattr(statement(tree, loop.line), "iter", None))}
    for place in [p for p in facts.places.values() if p.kind == "arm" and p.file == loop.file]:
        if passed[place.number] < peer.trail.count(place.number) and not loop.holds(place.head):
            body = [statement(tree, line) for line in range(place.first, place.last + 1)]
            sets = [target for node in body for target in getattr(node, "targets", ()) if hasattr(target, "slice")]
            adds = [c.func for c in calls_in(*body) if getattr(c.func, "attr", "") in FILLS]
            found += [place] * any(names & {*names_in(part.value)} for part in (*sets, *adds))
    return found


def _arms(
    facts: RanksFacts, parted: Parting, logs: tuple[RankLog, RankLog], windows: tuple[list[int], list[int]]
) -> Iterator[tuple[tuple[int, int], int, Place]]:
    """(how unlikely, rank, arm) of each arm that one of them entered and the other did not."""
    for mine, log in enumerate(logs):
        call, theirs = parted.calls[log.rank], parted.calls[logs[1 - mine].rank]
        for nearness, number in enumerate(reversed(list(dict.fromkeys(windows[mine])))):
            place = facts.places.get(number)
            if place is None or place.kind != "arm" or number in windows[1 - mine]:
                continue
            inside = call is not None and any(place.holds(line) for line in call.lines)
            beyond = jumps(facts, place)
            rank = 0 if inside else 1 if beyond and theirs is not None else 2
            yield (rank, nearness), log.rank, place


def jumps(facts: RanksFacts, place: Place) -> bool:
    """Whether the arm leaves the loop's turn or the function."""
    return re.search(r"(?:^|:)\s*(?:break|continue|return|raise)\b", facts.body(place), re.MULTILINE) is not None


# -- where a value comes from -----------------------------------------------------------------------------------------


_parsed = functools.lru_cache(maxsize=64)(ast.parse)


def parsed(facts: RanksFacts, file: str) -> ast.Module:
    """The syntax of a file; of none where it can't be read."""
    with contextlib.suppress(SyntaxError):
        return _parsed(facts.sources.get(file, ""))
    return ast.Module([], [])


def over(tree: ast.AST, line: int, *kinds: type[ast.stmt]) -> list[Any]:
    """The statements over a line, of these kinds, from the outside in. (`observe.sources` has the same for files; it
    imports torch.)"""
    nodes: Any = [node for node in ast.walk(tree) if isinstance(node, kinds or ast.stmt)]
    own = [node for node in nodes if node.lineno <= line <= node.end_lineno]
    return sorted(own, key=lambda node: (node.lineno - node.end_lineno, node.col_offset))


def statement(tree: ast.AST, line: int) -> Any:
    """The innermost statement over a line; an empty one where there is none."""
    return [ast.Pass(), *over(tree, line)][-1]


def names_in(node: ast.AST | None) -> list[str]:
    """The names in an expression; of `self` what it holds: "self.rows"."""
    names = []
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == "self":
            names.append(f"self.{part.attr}")
        elif isinstance(part, ast.Name) and part.id != "self":
            names.append(part.id)
    return names


def calls_in(*nodes: ast.AST) -> list[ast.Call]:
    return [part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Call)]


def assignments(tree: ast.AST, name: str, before: int) -> list[ast.stmt]:
    """The statements that give a name its value, the last one above a line first."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.For))]
    own = [n for n in nodes if any(name in names_in(t) for t in getattr(n, "targets", None) or [n.target])]  # type: ignore
    return sorted(own, key=lambda node: (node.lineno >= before, -node.lineno if node.lineno < before else 0))


def value_of(node: ast.AST) -> Any:
    """What a statement gives to names; else the statement."""
    return getattr(node, "value", None) or getattr(node, "iter", None) or node


def of_rank(tree: ast.AST) -> set[str]:
    """Names whose value is a rank itself."""
    names = {"rank", "local_rank", "global_rank", "RANK", "LOCAL_RANK"}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for target, given in [(target, node.value) for node in nodes for target in node.targets]:
        parts = [getattr(each, "elts", [each]) for each in (target, given)]
        for name, value in zip(*parts) if len(parts[0]) == len(parts[1]) else ():
            if isinstance(value, ast.Call) and names_in(value.func) == ["int"] and value.args:
                value = value.args[0]
            own = isinstance(value, ast.Call) and speaks_of_rank(value.func, set()) or isinstance(value, ast.Name)
            own = own or isinstance(value, ast.Subscript) and "environ" in ast.dump(value)
            if own and speaks_of_rank(value, names) and isinstance(name, ast.Name):
                names.add(name.id)
    return names


def speaks_of_rank(node: ast.AST, names: set[str]) -> bool:
    calls = ("get_rank", "get_node_local_rank", "rank", "process_index")
    parts = list(ast.walk(node))
    named = any(getattr(part, "id", "") in names or getattr(part, "attr", "") in calls for part in parts)
    return named or any(isinstance(part, ast.Constant) and str(part.value).endswith("RANK") for part in parts)


def iterable_line(facts: RanksFacts, loop: Place, lines: Sequence[Line] = ()) -> Line:
    """Where what a loop goes over differs by rank; else where it was made; else the loop's own line. lines: the user's
    stack in the loop: an argument of the function around it comes from the line that called."""
    tree = parsed(facts, loop.file)
    head = statement(tree, loop.line)
    expression: Any = getattr(head, "iter", getattr(head, "test", None))
    for node in over(tree, loop.line, ast.Try):  # `except StopIteration` beside `next(source)`
        if loop.line in [handler.lineno for handler in node.handlers]:
            calls = [call for call in calls_in(*node.body) if names_in(call.func) == ["next"] and call.args]
            expression = calls[0].args[0] if calls else None
    if expression is None:
        return loop.head
    file, expression, line = _argument_of(facts, tree, loop, expression, lines)
    tree = parsed(facts, file)
    names = of_rank(tree)
    if speaks_of_rank(expression, names):
        return (file, line, "")
    chain = list(origins(tree, expression, line))
    split = [node for node in chain if speaks_of_rank(value_of(node), names)]
    return (file, (split or chain)[0].lineno if chain else line, "")


def _argument_of(
    facts: RanksFacts, tree: ast.Module, loop: Place, expression: ast.AST, lines: Sequence[Line]
) -> tuple[str, ast.AST, int]:
    """(file, argument, line) of the call that gave a function what its loop goes over; else of the loop itself."""
    depth = next((n for n, line in enumerate(lines) if loop.holds(line)), len(lines))
    for around in over(tree, loop.line, ast.FunctionDef)[-1:]:
        for file, line, _ in lines[depth + 1 : depth + 2]:
            for part in calls_in(statement(parsed(facts, file), line)):
                values = dict(zip([a.arg for a in around.args.args], part.args))
                values |= {k.arg: k.value for k in part.keywords if k.arg}
                for name in filter(values.__contains__, names_in(expression)):
                    if names_in(part.func)[-1:] == [around.name]:
                        return file, values[name], line
    return loop.file, expression, loop.line


def origins(tree: ast.AST, expression: ast.AST | None, line: int) -> Iterator[ast.stmt]:
    """The assignments that an expression comes from, the nearest first."""
    waiting, done = [(name, line) for name in names_in(expression)], set(WRAPPERS)
    while waiting:
        name, before = waiting.pop(0)
        for node in assignments(tree, name, before)[:1] if name not in done else ():
            yield node
            waiting += [(n, node.lineno) for n in names_in(value_of(node))]
        done.add(name)


def argument_line(facts: RanksFacts, line: Sequence[Any], word: str, keyword: str = "") -> Line:
    """The line of a part that mentions `word` in the statement at a line, or in what its arguments come from. keyword:
    only that argument."""
    tree, number = parsed(facts, line[0]), line[1]
    expressions: list[ast.AST] = [statement(tree, number)]
    if keyword:
        expressions = [k.value for call in calls_in(*expressions) for k in call.keywords if k.arg == keyword]
    chain = [origin for part in expressions for origin in origins(tree, part, number)]
    if keyword and chain and any(isinstance(part, ast.Name) for part in expressions):
        number = chain[0].lineno
    for inner in [inner for part in [*expressions, *chain] for inner in ast.walk(part)] if word else ():
        text = inner.value if isinstance(inner, ast.Constant) else getattr(inner, "arg", None)
        if isinstance(text, str) and word in text.lower().replace("-", "_"):
            return (line[0], inner.lineno, "")  # type: ignore[attr-defined]
    return (line[0], number, "")


def writes_at(facts: RanksFacts, error: Mapping[str, Any]) -> tuple[int | None, Line | None]:
    """The rank that is in an arm which the failed rank went past, and which speaks of the file that this has not found,
    by its name or by a variable of the failed line; the first line that does."""
    (file, line, _), gone = error["lines"][0], facts.ranks[error["rank"]].turns
    tree = parsed(facts, file)
    given = [name for name in names_in(statement(tree, line)) if name not in of_rank(tree)]
    names = [name for name in given if any(node.lineno < line for node in assignments(tree, name, line))]
    words = re.compile("|".join([re.escape(error["path"].rpartition("/")[2]), *(rf"\b{name}\b" for name in names)]))
    for rank, log in facts.ranks.items():
        stack = (log.one("stack") or {}).get("lines", ())
        arms = [p for n, p in facts.places.items() if p.kind == "arm" and log.turns[n] and not gone[n]]
        for arm in [arm for arm in arms if any(map(arm.holds, stack))]:
            for number in range(arm.first, arm.last + 1):
                if words.search(facts.text((arm.file, number))):
                    return rank, (arm.file, number, "")
    return None, None


def left_out_at(facts: RanksFacts, log: RankLog, parts: Sequence[str]) -> Line | None:
    """Where a rank's last step went past a part of the model, which has these attributes in its name: the branch that
    went past its use more often than in any step before; else one without marks; else, where steps before have used it,
    the use."""
    calls = [call for own in log.calls.values() for call in own if call.op.startswith("backward of")]
    calls.sort(key=lambda call: call.order)
    ends = [call.at for call in calls if call.lines[:1] == calls[-1].lines[:1]]  # of several models each has its line
    begin = [event["at"] for event in log.events.get("wrapper", ()) if event["at"] <= min(ends, default=0)]
    steps = [Counter(log.window(*pair)) for pair in itertools.pairwise([*begin[-1:], *ends])]
    numbers = {(place.file, place.kind, place.first): place.number for place in facts.places.values()}
    found: list[tuple[int, Line]] = []
    for file in facts.sources:
        nodes = ast.walk(parsed(facts, file))
        for scope in [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name != "__init__"]:
            uses = _uses(scope, parts)
            found += [(2, (file, use.lineno, "")) for use in uses if len(steps) > 1]
            for node in [node for node in ast.walk(scope) if uses and isinstance(node, (ast.If, ast.IfExp))]:
                arms: list[Any] = [arm if isinstance(arm, list) else [arm] for arm in (node.body, node.orelse)]
                loops = over(scope, node.lineno, ast.For, ast.While)[-1:]
                marks = [numbers.get((file, "arm", arm[0].lineno)) if arm else None for arm in arms]
                turn = [numbers.get((file, "loop", loop.body[0].lineno)) for loop in loops]
                if (past := _arm_past(node, arms, uses, loops)) is None:
                    continue
                own, other = marks[past], marks[1 - past]  # of an arm that is not written: the turns without the other
                taken = [step[own] if own else (step[turn[0]] if turn else 1) - step[other] for step in steps]  # type: ignore
                if own is other is None or taken and taken[-1] > max(taken[:-1], default=0):
                    found.append((int(own is other is None), (file, node.lineno, "")))
    return min(found, key=lambda each: each[0], default=(0, None))[1]


def _uses(scope: ast.AST, parts: Sequence[str]) -> list[Any]:
    """What a function reads of the attributes, and the calls of what it takes from them: `for layer in self.layers`."""
    read = {n for n in ast.walk(scope) if isinstance(n, ast.Attribute) and n.attr in parts and type(n.ctx) is ast.Load}
    takes = [n for n in ast.walk(scope) if isinstance(n, (ast.Assign, ast.For, ast.comprehension))]
    given = [getattr(n, "targets", None) or [n.target] for n in takes if read & {*ast.walk(value_of(n))}]  # type: ignore
    names = {name for targets in given for target in targets for name in names_in(target)}
    calls = [call for call in calls_in(scope) if names & {*names_in(call.func)} or read & {*ast.walk(call.func)}]
    return calls or [*read]


def _arm_past(node: ast.If | ast.IfExp, arms: list[Any], uses: list[Any], loops: list[Any]) -> int | None:
    """The number of the arm that goes past the uses: the other has one, or they come later and it leaves before."""
    inside = [[part for each in arm for part in ast.walk(each)] for arm in arms]
    used = [any(use in own for use in uses) for own in inside]
    if used[0] != used[1]:
        return used.index(False)
    for number, own in enumerate(inside if not used[0] else ()):
        leaves = [part for part in own if isinstance(part, (ast.Break, ast.Continue, ast.Return))]
        begin = loops[0].lineno if any(isinstance(part, ast.Break) for part in leaves) and loops else node.end_lineno
        if leaves and any(use.lineno > begin for use in uses):
            return number
    return None


def score_line(facts: RanksFacts, stack: Sequence[Line], shown: Line) -> Line | None:
    """Where what an evaluation has seen becomes the number that is shown; None where that number comes from elsewhere.
    stack: the user's lines at a forward of the evaluation, from the inside out; shown: the line that prints."""
    file, line, function = shown
    depth = next((n for n, each in enumerate(stack) if (each[0], each[2]) == (file, function)), None)
    tree = parsed(facts, file)
    printing = statement(tree, line)
    if depth is None:
        return None
    block = _around(tree, stack[depth][1], line)
    names, chain = _assigned(block), list(origins(tree, printing, line))
    if not names & {name for node in (printing, *chain) for name in names_in(value_of(node))}:
        return None
    while depth and not isinstance(block, BLOCKS):  # a function of the user's evaluates: it returns the score
        depth, chain = depth - 1, []
        file, number, _ = stack[depth]
        tree = parsed(facts, file)
        around = over(tree, number, ast.FunctionDef)[-1:]
        returns = [n.lineno for each in around for n in ast.walk(each) if isinstance(n, ast.Return)]
        if not returns:
            return (file, number, function)
        line = returns[-1]
        block = _around(tree, number, line)
    later = [node.lineno for node in chain if node.lineno > stack[depth][1] and names & set(names_in(value_of(node)))]
    return (file, later[0] if later else line, function)


BLOCKS = (ast.For, ast.While, ast.With, ast.If, ast.Try)


def _around(tree: ast.AST, line: int, beyond: int) -> ast.stmt:
    """The largest loop, branch or `with` around a line that does not reach another line; else the statement."""
    blocks = [block for block in over(tree, line, *BLOCKS) if not block.lineno <= beyond <= block.end_lineno]
    return next(iter(blocks), statement(tree, line))


def _assigned(block: ast.stmt) -> set[str]:
    """The names that a block gives a value, adds to or appends to."""
    stored = {n.id for n in ast.walk(block) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    filled = [c.func for c in calls_in(block) if getattr(c.func, "attr", "") in FILLS]
    return stored | {getattr(function.value, "id", "") for function in filled}  # type: ignore[attr-defined]
