"""Rules: from what the ranks wrote down to the one cause. The first that holds answers.

Those of the first half are certain while the run goes on, and end it; those of the second half are silent faults, of
which a finished run tells.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nbdebug.registry import declared, rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import clip, count, duration, listed, percent
from nbdebug.tools.distributed import paths
from nbdebug.tools.distributed.facts import VARIABLES, Place, RankLog, RanksFacts

DDP = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
DISTRIBUTED = "https://docs.pytorch.org/docs/stable/distributed.html"
OVERLAP, PADDED = 0.5, 0.1
"""Of the rows of a pass: ranks without samplers share nearly all; DistributedSamplers of one order give none out twice,
but to make the shares equal."""
ALIKE = 1e-6
"""Relative: weights that had the same updates are equal bit for bit."""
UNMET = 20
"""Seconds in init_process_group, without a rank that comes out of it; processes of a machine meet in less than one."""
IN_USE = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
UNFINISHED = "finished reduction in the prior iteration"
CHANGES = re.compile(
    r"\.(mul_|add_|copy_|zero_|fill_|data|load_state_dict|apply|step|zero_grad|sub_|div_)\b|init\.|\.grad\b|clip_grad"
)
"""What a line says that changes weights or gradients."""
ANY, STEP = re.compile(""), re.compile(r"\.step\(")
DECIDE = Fix(
    "Let all ranks decide alike.",
    "leave = torch.tensor(float(condition))\ndist.all_reduce(leave, op=dist.ReduceOp.MAX)\nif leave:\n    ...",
)
DIVIDES = re.compile(r"AVG|(div|mul)_?\(|/=? *\(?(float\()?\w*(world|size|rank|replica|process|get_)")
JOIN = "with model.join():\n    for batch in loader: ..."
LONGER = "A longer timeout only makes the wait longer: the call that is missing never comes."
FROM_LAUNCHER = Fix("Read it from the launcher.", 'dist.init_process_group("gloo")  # torchrun sets what it reads')


def at(facts: RanksFacts, line: Sequence[Any] | None, rank: int | None = None, step: int | None = None) -> Where:
    if not line:
        return Where(rank=rank, step=step)
    text = facts.text(line).strip() or None
    return Where(step=step, file=line[0], line=line[1], text=text, rank=rank)


def finding(code: str, title: str, where: Where, *fixes: Fix, chain: Iterable[Link] = (), **evidence: Any) -> Finding:
    """`_` in names of evidence is a space."""
    rows = {name.replace("_", " "): value for name, value in evidence.items() if value not in (None, "", (), [], {})}
    return Finding(f"distributed/{code}", title, where, rows, fixes, tuple(chain))


def first(lines: Sequence[Any] | None) -> Any:
    return lines[0] if lines else None


def cause(
    reference: str = DISTRIBUTED, **page: str
) -> Callable[[Callable[[RanksFacts], Iterator[Finding]]], Callable[[RanksFacts], Finding | None]]:
    """Declare a rule: what the function below yields first."""

    def declare(search: Callable[[RanksFacts], Iterator[Finding]]) -> Callable[[RanksFacts], Finding | None]:
        check = functools.wraps(search)(lambda facts: next(search(facts), None))
        return rule(reference=reference, **page)(check)

    return declare


def errors(facts: RanksFacts) -> list[dict[str, Any]]:
    """The ranks' own errors, the earliest first; those that come from another rank's end are left out."""
    return sorted((e for e in facts.all("error") if not e.get("peer")), key=lambda e: e.get("t", 0))


@cause(
    code="distributed/world-size-wrong",
    title="The group is made for another number of processes than was launched.",
    symptom="Nothing happens until the timeout, although each process is there; or each trains alone.",
    cause="`world_size` is a number of the machine that the program was written for, or a variable was overwritten.",
    confirm="Print `world_size` beside `os.environ['WORLD_SIZE']` before the group is made.",
    fix="Leave `rank` and `world_size` out: `init_process_group` reads what the launcher has set.",
)
def world_size_wrong(facts: RanksFacts) -> Iterator[Finding]:
    for init in facts.all("init"):
        world, launched = init["world"], facts.launched
        if launched and world not in (-1, launched):
            line = _given_at(facts, init, "world_size" if init.get("by_argument") else "", "WORLD_SIZE")
            title = f"The group is made for {count(world, 'process', 'processes')}; {launched} were launched"
            where = at(facts, line)
            yield finding("world-size-wrong", title, where, FROM_LAUNCHER, world_size=world, launched=launched)


def _given_at(facts: RanksFacts, event: dict[str, Any], argument: str, *variables: str) -> Any:
    """Where what a group is made with comes from: an argument of init_process_group, else an environment variable."""
    line = first(event["lines"])
    if line and argument:
        line = paths.argument_line(facts, line, argument) if argument in facts.text(line) else line
        return paths.argument_line(facts, line, "", argument)
    nodes: Any = ast.walk(paths.parsed(facts, line[0])) if line else ()
    return next(((line[0], n.lineno, "") for n in nodes if any(_sets(n, v) for v in variables)), line)


def _sets(node: ast.AST, variable: str) -> bool:
    """Whether a statement gives an environment variable a value, or takes it away."""
    parts: list[Any] = list(node.targets) if isinstance(node, (ast.Assign, ast.Delete)) else []
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("pop", "update", "setdefault"):
        parts = [*node.args, *node.keywords]
    return _speaks_of(variable, parts)


def _speaks_of(name: str, parts: Iterable[ast.AST]) -> bool:
    """Whether an attribute or a keyword of this name, or the text of it, stands in one of these."""
    inner = (each for part in parts for each in ast.walk(part))
    return any(name == getattr(each, kind, None) for each in inner for kind in ("attr", "arg", "value"))


@cause(
    code="distributed/env-incomplete",
    title="A process does not get the variables that a launcher sets.",
    symptom="`environment variable RANK expected, but not set`, a KeyError, or each process takes itself for rank 0.",
    cause="The script was started without torchrun, or it starts a program with an environment of its own making.",
    confirm="Print RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT at the start.",
    fix="Start with torchrun; pass `os.environ` on to what the script starts.",
    reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
)
def env_incomplete(facts: RanksFacts) -> Iterator[Finding]:
    for missing, line in _unset(facts):
        title = f"{listed(missing, 4, '')} {'is' if len(missing) == 1 else 'are'} not set where the group is made"
        fix = Fix("Pass the launcher's environment on.", "subprocess.run(command, env={**os.environ, 'NAME': 'value'})")
        if missing[0] not in VARIABLES:
            fix = Fix("Read what torchrun sets, or start with that other launcher.", 'rank = int(os.environ["RANK"])')
        yield finding("env-incomplete", title, at(facts, line), fix, variables=tuple(missing))


def _unset(facts: RanksFacts) -> Iterator[tuple[list[str], Any]]:
    """(the variables, a line) of a rank's own error, of what a rank has started, of a number that all ranks share."""
    for error in errors(facts):
        text = f"{error['type']}: {error['text']}"
        named = [v for v in VARIABLES if f"variable {v} expected" in text or f"KeyError: '{v}'" in text]
        named = named or re.findall(r"^KeyError: '([A-Z_]+(?:RANK|PROCID|LOCALID|WORLD_SIZE|NTASKS))'", text)
        if named and facts.ranks[error["rank"]].one("child") is None:
            own = [v for v in VARIABLES if v in named or v in error.get("unset", ())]
            missing = [*(v for v in named if v not in VARIABLES), *own]
            yield missing, _given_at(facts, error, "", *missing)
    if "expected, but not set" in facts.output or "KeyError" in facts.output:
        for child in facts.all("child"):
            if any(v in facts.output for v in child["missing"]) and child["lines"]:
                yield child["missing"], paths.argument_line(facts, child["lines"][0], "", "env")
    inits = [init["own"] for log in facts.ranks.values() if (init := log.one("init")) is not None]
    if len(inits) == len(facts.ranks) > 1 and len(set(inits)) == 1 and inits[0] >= 0:
        yield from (([unset["name"]], first(unset["lines"])) for unset in facts.all("unset"))


@cause(
    code="distributed/rendezvous-mismatch",
    title="The processes do not meet: they look for the group at other places, or two take the same rank.",
    symptom="`init_process_group` does not return on some ranks, or on all, until the timeout.",
    cause="A port or an address is set by hand and is not what the others, or the launcher, use; or `rank` is a "
    "number that two processes have (a local rank on two machines, a constant).",
    confirm="Print rank, MASTER_ADDR and MASTER_PORT in each process before the group is made.",
    fix="Leave the arguments out: `init_process_group` reads what the launcher has set.",
    reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
)
def rendezvous_mismatch(facts: RanksFacts) -> Iterator[Finding]:
    inits = {rank: log.events["init"][0] for rank, log in facts.ranks.items() if log.events.get("init")}
    for rank, title, of_rank in _unmet(facts, inits):
        init = inits[min(inits) if rank is None else rank]
        argument, variable = ("rank" if init.get("rank_by_argument") else "", "RANK")
        if not of_rank:
            argument, variable = ("init_method" if "://" in init.get("address", "") else "", "MASTER_PORT")
        where = at(facts, _given_at(facts, init, argument, variable), rank)
        yield finding("rendezvous-mismatch", title, where, FROM_LAUNCHER, timeout=LONGER)


def _unmet(facts: RanksFacts, inits: dict[int, dict[str, Any]]) -> Iterator[tuple[int | None, str, bool]]:
    """(rank, what is wrong, whether with the rank's number) of each process that does not find the others."""
    ports = {rank: init.get("address", "").rpartition(":")[2] for rank, init in inits.items()}
    for rank, init in inits.items():
        looks = f"Rank {rank} looks for the group at port {ports[rank]}, "
        if (launched := init.get("launcher", "").rpartition(":")[2]) not in ("", ports[rank]):
            yield rank, f"{looks}and the launcher is at {launched}", False
        for other in [other for other in inits if other < rank]:
            if (own := init["own"]) == inits[other]["own"] >= 0:
                wrong = rank if own == other else other
                yield wrong, f"Ranks {other} and {rank} both call themselves rank {own}", True
            if ports[other] != ports[rank]:
                yield rank, f"{looks}and rank {other} at {ports[other]}", False
    still = facts.now - max((log.time for log in facts.ranks.values()), default=facts.now)
    if inits and len(inits) == facts.launched and still > UNMET and not facts.all("joined"):
        places = listed([init.get("address") or "a store" for init in inits.values()], 2, "")
        yield None, f"No rank has come out of init_process_group for {UNMET} s: nobody answers at {places}", False


@cause(
    code="distributed/port-in-use",
    title="The address that a group is made at is taken.",
    symptom="`EADDRINUSE`, `address already in use`, at once or when a second program starts.",
    cause="Two launches use one port: two runs on a machine, or a distributed program that is started from a rank.",
    confirm="`ss -ltnp` shows who listens.",
    fix="`torchrun --standalone` takes a free port; so does port 0 of a socket.",
    reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
)
def port_in_use(facts: RanksFacts) -> Iterator[Finding]:
    for error in errors(facts):
        line, text = first(error["lines"]), error["text"]
        text += facts.output if "CalledProcessError" in error["type"] else ""
        if line is not None and IN_USE.search(text):
            part = paths.argument_line(facts, line, "port")
            part = part if part[1] != line[1] else _given_at(facts, error, "", "MASTER_PORT")
            fix = Fix("Let the launcher take a free port.", "torchrun --standalone --nproc-per-node=2 script.py")
            where, short = at(facts, part, error["rank"]), clip(error["text"], 160)
            yield finding("port-in-use", "The port is already in use", where, fix, error=short)


@cause(
    code="distributed/unused-parameters",
    title="Parameters get no gradient, and DistributedDataParallel waits for it.",
    symptom="`Expected to have finished reduction in the prior iteration`, or the ranks stand still in backward.",
    cause="A part of the model is not used in the forward, on all ranks or on some. Its gradient never comes, so the "
    "reduction never ends.",
    confirm="After a backward of the bare model, the parameters whose `grad` is None.",
    fix="Use the part in the loss, or leave it out; else `find_unused_parameters=True`, at the price of a walk.",
    reference=DDP,
)
def unused_parameters(facts: RanksFacts) -> Iterator[Finding]:
    failed = [error for error in errors(facts) if UNFINISHED in error["text"]]
    parted = next(paths.partings(facts), None)
    without = [event for event in facts.all("nograd") if event["names"]]
    ranks = list(dict.fromkeys(event["rank"] for event in without))
    names: list[str] = next((event["names"] for event in (*failed, *without) if event.get("names")), [])
    if not failed:
        calls = [*(parted.calls.values() if parted else ()), *(log.last for log in facts.ranks.values())]
        in_backward = any(call is not None and call.op.startswith("backward of") for call in calls)
        if parted is None or not in_backward or len(ranks) == len(facts.ranks):
            return
    if not names:
        return
    own = list(dict.fromkeys(error["rank"] for error in failed)) or ranks
    waits = [(log.one("stack") or {}).get("stack", ()) for rank, log in facts.ranks.items() if rank not in own]
    alone = {*ranks, *own} == {own[0]} and (ranks or any("_engine_run_backward" in str(stack) for stack in waits))
    lone = own[0] if alone and len(facts.ranks) > 1 else None
    title = f"{count(len(names), 'parameter')} without a gradient: {listed(names)}"
    use = Fix("Use the part in the forward, or take it out of the model.", f"# {names[0].rpartition('.')[0]}")
    search = "DistributedDataParallel(model, find_unused_parameters=True)"
    fixes = [use, Fix("Let the wrapper look for them.", search)]
    line = paths.left_out_at(facts, facts.ranks[own[0]], _attributes(names[0]))
    if line is not None:
        title += ", which the last step has left out"
        every = "Or call it in every step, and multiply what is left out by zero."
        fixes = [fixes[1], Fix(every, "x = x + keep * layer(x)  # 0 or 1")]
    title += f", on rank {lone} alone" if lone is not None else ""
    where = at(facts, line or _made_at(facts, names[0]), lone)
    yield finding("unused-parameters", title, where, *fixes, parameters=tuple(names))


def _attributes(parameter: str) -> list[str]:
    """The attributes in the name of a parameter that lead to its module; the last where it is the model's own."""
    module = parameter.split(".")[:-1] or [parameter]
    return [part for part in module if not part.isdigit()] or module


def _made_at(facts: RanksFacts, parameter: str, late: bool = False) -> Any:
    """Where the module of a parameter is made: below the line of the wrapper, where it came `late`; else that line."""
    begin = first([event["lines"][0] for event in facts.all("wrapper") if event["lines"]])
    kinds: list[Any] = [ast.Assign, *[ast.Call] * late]  # `model.add_module("head", …)`
    for part in _attributes(parameter):
        for file in facts.sources:
            low = begin[1] if late and begin and begin[0] == file else 0
            nodes: Any = [*ast.walk(paths.parsed(facts, file))]
            nodes = [n for kind in kinds for n in nodes if isinstance(n, kind) and n.lineno > low]
            for node in nodes:
                if _speaks_of(part, getattr(node, "targets", None) or node.args):
                    return file, node.lineno, ""
    return begin


def _unfrozen_at(facts: RanksFacts) -> Any:
    """The first line below the wrapper's that turns gradients on, else one above it, else its own."""
    begin, found = first([event["lines"][0] for event in facts.all("wrapper") if event["lines"]]), []
    for file in facts.sources:
        nodes: Any = ast.walk(paths.parsed(facts, file))
        for line in [(file, n.lineno, "") for n in nodes if getattr(n, "attr", "").startswith("requires_grad")]:
            if "False" not in facts.text(line):
                found.append((bool(begin) and file == begin[0] and line[1] < begin[1], line))
    return min(found, default=(False, begin))[1]


@cause(
    code="distributed/rank-nonfinite",
    title="The loss of one rank is not finite; its gradients spoil all.",
    symptom="One rank shows a finite loss, and from the next step on all show nan.",
    cause="Gradients are averaged over the ranks: a bad row in one rank's share reaches every weight.",
    confirm="Print the loss of each rank before backward.",
    fix="Mend the rank's data or the op that made the value (`nan_trace` on that rank's batch names it).",
    reference=DDP,
)
def rank_nonfinite(facts: RanksFacts) -> Iterator[Finding]:
    losses, failed = facts.all("loss"), [error for error in errors(facts) if error.get("nonfinite")]
    bad = min((e for e in losses if e["bad"]), key=lambda e: (e["id"], e["rank"]), default=None)
    if bad is not None and not all(e["bad"] for e in losses if e["id"] == bad["id"] and e is not bad):
        value, step, line = bad["value"], bad["id"], first(bad["lines"])
    elif len({error["rank"] for error in failed}) == 1:
        bad = failed[0]
        value, step, line = listed(bad["nonfinite"]), bad.get("step"), bad.get("blamed") or first(bad["lines"])
    else:
        return
    rank = bad["rank"]
    title = f"The loss of rank {rank} is {value} at step {step}, and finite on the others"
    where = at(facts, line, rank, step)
    diverged = weights_diverged(facts)
    if diverged is not None and (diverged.where.step or 0) < (step or 0):
        yield dataclasses.replace(diverged, chain=(Link(title, where),))  # what came of it
    if (trace := (_trace(facts, {"rank": rank, "id": step}) or {}).get("finding")) is not None:
        link = Link(f"nan_trace, on rank {rank}: {trace['title']}", at(facts, trace["line"], rank))
        yield finding("rank-nonfinite", title, where, chain=[link], loss=value, cause=trace["code"], op=trace["op"])
    code = f"if rank == {rank}:\n    print(nbdebug.nan_trace(step, model=model))"
    yield finding("rank-nonfinite", title, where, Fix("Look for the op on that rank.", code), loss=value)


@cause(
    code="distributed/barrier-missing",
    title="A rank reads a file before another rank has written it.",
    symptom="`No such file or directory` on some ranks, of a file that is there when one looks; the next start works.",
    cause="One rank alone writes, downloads or builds the file, and nothing makes the others wait for it.",
    confirm="Print the time where the file is written and where it is read.",
    fix="`dist.barrier()` after the one rank's work and before the first line that reads the file.",
)
def barrier_missing(facts: RanksFacts) -> Iterator[Finding]:
    for error in (error for error in errors(facts) if error.get("path") and error["lines"]):
        path, read, rank = error["path"], first(error["lines"]), error["rank"]
        came = facts.ranks[rank].one("came") or {"seconds": None, "runs": False}
        written = next((e for e in facts.all("file") if e["path"] == path and e["rank"] != rank), None)
        writer, line = (written["rank"], first(written["lines"])) if written else paths.writes_at(facts, error)
        if came["seconds"] is None and (written is not None or writer is None):
            continue  # it was there before, or nobody writes it
        by, name = "another process" if writer is None else f"rank {writer}", path.rpartition("/")[2]
        later = "" if came["seconds"] is None else f": it came {came['seconds']} s later"
        code = f"dist.barrier()  # on all ranks, when {name} is written\n{facts.text(read).strip()}"
        chain = [Link(f"{by} writes {name}", at(facts, line, writer))] if line else []
        fix, where = Fix("Let the others wait for it.", code), at(facts, read, rank)
        title = f"Rank {rank} reads {name} before {by} has written it{later}"
        afterwards = "runs through" if came["runs"] else None
        yield finding("barrier-missing", title, where, fix, chain=chain, path=path, the_same_line_then=afterwards)


def _trace(facts: RanksFacts, event: dict[str, Any]) -> dict[str, Any] | None:
    """What a rank has found out about its loss or its error."""
    wanted = event["rank"], event.get("id")
    return next((e for e in facts.all("trace") if (e["rank"], e["id"]) == wanted), None)


@cause(
    code="distributed/rank-raised",
    title="One rank has failed with an error of its own; the others wait for it.",
    symptom="A timeout, or `Connection closed by peer`, on all ranks but one.",
    cause="The other ranks are in a collective that the failed rank never reaches. What they print is no cause.",
    confirm="The first error by time, of all ranks' output.",
    fix="Mend that error. Where it can happen, let all ranks hear of it (an all_reduce of a flag).",
)
def rank_raised(facts: RanksFacts) -> Iterator[Finding]:
    failed = [error for error in errors(facts) if UNFINISHED not in error["text"]]
    for parted in paths.partings(facts) if facts.all("raised") and not failed else ():
        orders = {rank: call.order for rank, call in parted.calls.items() if call is not None}
        failed = [e for e in facts.all("raised") if orders.get(e["rank"]) == e["order"]]  # in `except` or `finally`
    for error in failed:
        rank, text = error["rank"], f"{error['type']}: {clip(error['text'].split(chr(10))[0], 160)}"
        who, fixes = f"Rank {rank}", [Fix("Ask what the error is about.", "nbdebug.explain(error)  # or %explain")]
        told, chain = (_trace(facts, error) or {}).get("finding") or {"code": None, "fixes": ()}, []
        if told["code"] is not None:
            chain = [Link(f"explain: {told['title']}", Where(rank=rank))]
            fixes = [Fix(*fix) for fix in told["fixes"]] or fixes
        if len(errors(facts)) == len(facts.ranks) > 1:
            who, rank = "Every rank", None
            alone = "All ranks have it: look first whether one process by itself has it, too."
            fixes.append(Fix(alone, "python -m nbdebug ranks --nproc 1 script.py"))
        where = at(facts, first(error["lines"]), rank, error.get("step"))
        title = f"{who} has failed: {text}"
        yield finding("rank-raised", title, where, *fixes, chain=chain, error=text, cause=told["code"])


@cause(
    code="distributed/uneven-steps",
    title="One rank has fewer batches than another.",
    symptom="The last step of an epoch never returns on one rank; the other has left the loop.",
    cause="The rows were shared out unevenly, or one rank drops some.",
    confirm="Print the number of batches on each rank.",
    fix="Share out evenly (DistributedSampler, drop_last), or train within `with model.join():`.",
    reference="https://docs.pytorch.org/tutorials/advanced/generic_join.html",
)
def uneven_steps(facts: RanksFacts) -> Iterator[Finding]:
    for parted, left in paths.departures(facts):
        by_hand = left.place is not None and "except StopIteration" in facts.text(left.place.head)
        if left.place is None or left.place.kind == "arm" and not by_hand:
            continue
        loops = [place for place in facts.places.values() if place.kind == "loop" and place.holds(left.place.head)]
        loop = min(loops, key=lambda place: place.last - place.first, default=left.place) if by_hand else left.place
        number, steps = loop.number, {}
        for rank, log in facts.ranks.items():  # as the rank has counted at its end, else as its marks show
            counts = (log.one("loops") or {}).get("loops", {})
            counted = 0 if log.turns[-number] else int(counts.get(str(number), counts.get(number, 0)))
            steps[rank] = max(log.turns[number], counted) - (by_hand and rank == left.rank)
        stacks = [call.lines for call in parted.calls.values() if call and any(map(loop.holds, call.lines))]
        where = at(facts, paths.iterable_line(facts, left.place, first(stacks) or ()), left.rank)
        numbers = ", ".join(f"rank {rank} has {n}" for rank, n in steps.items())
        title, chain = f"The ranks have unlike numbers of batches: {numbers}", waits(facts, parted)
        same = Fix("Give each rank the same number.", "DistributedSampler(rows, drop_last=True)")
        join = Fix("Or let those that have run out answer for the others.", JOIN)
        yield finding("uneven-steps", title, where, same, join, chain=chain, steps=steps, timeout=LONGER)


def turn(facts: RanksFacts, parted: paths.Parting) -> int | None:
    """The turn, from 0, of the loop around the call where the ranks part: one with a backward, else the innermost."""
    for rank, lines in [(rank, call.lines) for rank, call in parted.calls.items() if call is not None]:
        for line in reversed(lines):
            loops = [p for p in facts.places.values() if p.kind == "loop" and p.holds(line)]
            if loops:
                loop = max(loops, key=lambda place: (".backward(" in facts.body(place), place.first))
                return max(facts.ranks[rank].turns[loop.number] - 1, 0)
    return None


def waits(facts: RanksFacts, parted: paths.Parting) -> list[Link]:
    """What each rank does at the parting."""
    several, chain = len({call.group for call in parted.calls.values() if call}) > 1, []
    for rank, call in parted.calls.items():
        state = "is still elsewhere" if rank in paths.missing(facts, parted) else "has left"
        what = f"rank {rank} {state} after {count(parted.n, 'call')}"
        if call is not None:
            what = f"rank {rank} calls {call}{f' in group {call.group}' * several}, its number {call.n + 1}"
        chain.append(Link(what, at(facts, first(call.lines) if call is not None else None, rank)))
    return chain


@cause(
    code="distributed/collective-mismatch",
    title="The ranks do not make the same calls.",
    symptom="The program stands still until the timeout, or ends in an error about sizes or a closed connection.",
    cause="One rank has taken a branch with a collective in it (a reduction, a barrier, a forward of the wrapped model "
    "in training mode), has skipped one, or calls it with another shape or type.",
    confirm="The calls of each rank in order, as this report lists them.",
    fix="Make the call on all ranks, outside of the branch; on one rank alone use the bare model (`model.module`).",
)
def collective_mismatch(facts: RanksFacts) -> Iterator[Finding]:
    yield from _within_join(facts)
    for parted, left in paths.departures(facts):
        who, chain = f"Rank {left.rank} leaves the common path", waits(facts, parted)
        same = "value = validate()  # on all ranks\nif rank == 0:\n    print(value)"
        fix = Fix("Make the same calls on all ranks.", same)
        if left.rank is None:
            who = "The ranks part"
        elif left.rank in paths.missing(facts, parted):
            who = f"Rank {left.rank} does not come, in {percent(paths.PATIENCE)} of the timeout,"
        elif left.place is not None and paths.jumps(facts, left.place):
            who, fix = f"Rank {left.rank} takes a branch that leaves out calls of the others", DECIDE
        each = "; ".join(re.sub(",? (its number|after) .*", "", link.what).replace("left", "ended") for link in chain)
        title, where = f"{who} at call {parted.n + 1}: {each}", at(facts, left.line, left.rank, turn(facts, parted))
        yield finding("collective-mismatch", title, where, fix, chain=chain, timeout=LONGER)


def _within_join(facts: RanksFacts) -> Iterator[Finding]:
    """A call of a rank's own within `join()`, when another has run out there after fewer of them."""
    for out in facts.all("ran_out"):
        for call in facts.all("in_join"):
            if call["id"] == out["id"] and call["n"] >= out["n"]:
                who = f"rank {call['rank']} calls {call['op']}, its call {call['n'] + 1} there"
                title = f"Within join() {who}, and rank {out['rank']} has run out of batches"
                title += ": join answers for the wrapper's calls alone"
                after = Fix("Sum up on each rank, and reduce when the join is over.", "dist.all_reduce(total)")
                where = at(facts, first(call["lines"]), call["rank"])
                yield finding("collective-mismatch", title, where, after, timeout=LONGER)


@cause(
    code="distributed/timeout-too-short",
    title="One rank works for longer than the others may wait for it.",
    symptom="`Timed out waiting 5000ms`, a watchdog's timeout, at a barrier; on a small data set all is well.",
    cause="One rank prepares or saves alone, and the rest wait for it: no call is missing, it comes later.",
    confirm="The time of each rank's call, as this report lists it.",
    fix="`init_process_group(timeout=timedelta(minutes=60))`; or do the work before the group is made.",
)
def timeout_too_short(facts: RanksFacts) -> Iterator[Finding]:
    for error in sorted((e for e in facts.all("error") if e.get("peer")), key=lambda e: e["t"]):
        mine = facts.ranks[error["rank"]].last
        calls = [(r, log.call(mine.group, mine.n)) for r, log in facts.ranks.items()] if mine else []
        late = [
            (call.time, r) for r, call in calls if call and mine and call.time > error["t"] and call.key == mine.key
        ]
        waited, (came, rank) = error["t"] - mine.time if mine else 0.0, max(late, default=(0.0, 0))
        if mine is None or not late or waited < 0.8 * facts.timeout():
            continue
        who = f"Rank {error['rank']} gives up at its {mine.op} after {duration(waited)}, the group's timeout"
        title = f"{who}; rank {rank} was at work, and comes to it after {duration(came - mine.time)}"
        init = first((facts.ranks[rank].one("init") or {}).get("lines"))
        where = at(facts, paths.argument_line(facts, init, "timeout") if init else first(mine.lines))
        more = f"dist.init_process_group(..., timeout=timedelta(minutes={max(round((came - mine.time) / 20), 10)}))"
        chain = [Link(f"rank {r} calls {c.op}", at(facts, first(c.lines), r)) for r, c in calls if c]
        fix = Fix("Let the others wait for longer, or do that work before the group is made.", more)
        yield finding("timeout-too-short", title, where, fix, chain=chain)


@cause(
    code="distributed/message-missing",
    title="A rank waits for a message that no rank sends, or for its own to be received.",
    symptom="A pipeline stands still in `recv`, in `send`, or in the `wait()` of an `irecv`, until the timeout.",
    cause="The other rank has sent fewer messages than this one receives, or both send, or receive, first.",
    confirm="Count the sends and receives of both, for each tag.",
    fix="Make one send for each receive, in an order in which one side sends while the other receives.",
)
def message_missing(facts: RanksFacts) -> Iterator[Finding]:
    stuck = paths.blocked(facts)
    for rank, log in facts.ranks.items():
        wanted, other = log.message, facts.ranks.get(log.message["peer"]) if log.message else None
        if wanted is None or other is None or other is log or paths.answers(log, other) > wanted["n"]:
            continue
        both, back, (group, tag, _) = {rank, other.rank} <= stuck, other.message, wanted["key"].split("/")
        if not both and not other.has_left(group):
            continue
        receives, done = wanted["way"] == "receive", paths.answers(log, other)
        number = f"message {wanted['n'] + 1}" + (f" with tag {tag}" if tag != "0" else "")
        title = f"Rank {rank} waits for {number} of rank {other.rank}, which has sent {done}, and "
        if not receives:
            title = f"Rank {rank} sends {number} to rank {other.rank}, which has received {done}, and "
        title += "has ended" if not both else f"itself {back['way']}s first" if back else "waits itself"
        call = f"dist.{'send' if receives else 'recv'}(tensor, {'dst' if receives else 'src'}={rank})"
        fix = Fix("One send for each receive; of two ranks one receives first.", f"{call}  # on rank {other.rank}")
        events = ((rank, wanted), (other.rank, back if both else None))
        chain = [Link(f"rank {r} {e['way']}s", at(facts, first(e["lines"]), r)) for r, e in events if e]
        yield finding("message-missing", title, chain[0].where, fix, chain=chain, timeout=LONGER)


def death(facts: RanksFacts) -> tuple[RankLog, str, int] | None:
    """(rank, how, exit status or minus its signal) of the process that has ended without an error in Python, as
    torchrun or torch.multiprocessing.spawn tells."""
    died = re.search(r"Root Cause.*?\brank +: (\d+).*?exitcode +: (-?\d+)", facts.output, re.DOTALL)
    died = died or re.search(r"process (\d+) terminated with (?:signal|exit code) (\w+)", facts.output)
    log = facts.ranks.get(int(died[1])) if died else None
    if died is None or log is None or log.one("error"):
        return None
    names = {-each: each.name for each in signal.Signals}
    number = next((each for each, name in names.items() if name == died[2]), 0) or int(died[2])
    return log, f"signal {names.get(number, -number)}" if number < 0 else f"exit status {number}", number


def torn_down(facts: RanksFacts) -> str:
    """A sentence on a process that was aborted when all of the rank's work was done: the script had come to its end."""
    for log, how, number in filter(None, [death(facts)]):
        if number < 0 and log.finished():
            done = "All ranks had" if all(map(RankLog.finished, facts.ranks.values())) else f"Rank {log.rank} had"
            last = "what the process still closes then (the group's threads, for instance) has failed"
            return f"{done} come to the end of the script; then rank {log.rank} ended with {how}: {last}."
    return ""


def rank_killed(facts: RanksFacts) -> Finding | None:
    """A rank whose process ended in its work."""
    if torn_down(facts) or (died := death(facts)) is None:
        return None
    log, how, number = died
    fix = {
        -signal.SIGKILL: Fix("Ask the kernel: it kills where memory is short.", "dmesg | grep -i 'killed process'"),
        -signal.SIGSEGV: Fix("Let Python print where compiled code has crashed.", "export PYTHONFAULTHANDLER=1"),
        -signal.SIGABRT: Fix("Read the message of the compiled code.", "# in the output above"),
    }.get(number, Fix("Look for an exit of the program's own.", "os._exit"))
    line = first(log.last.lines) if log.last else None
    title = f"The process of rank {log.rank} has ended with {how} and no error in Python"
    return finding("rank-raised", title, at(facts, line, log.rank), fix, last_call=str(log.last or ""))


FATAL = (*declared(__name__), rank_killed)

# -- silent faults ----------------------------------------------------------------------------------------------------


@cause(
    code="distributed/weights-diverged",
    title="The ranks hold different weights.",
    symptom="No error. The result is worse the more processes there are; the saved model is that of one rank.",
    cause="The ranks began with different weights, or some gradients are not reduced: the wrapper's forward is passed "
    "by, parameters were added after it was made, or one rank alone changes weights.",
    confirm="`sum(p.double().sum() for p in model.parameters())` on each rank.",
    fix="Broadcast the weights at the start; call the wrapper itself; wrap after the model is whole.",
    reference=DDP,
)
def weights_diverged(facts: RanksFacts) -> Iterator[Finding]:
    for one, other in sorted(facts.pairs("weights"), key=lambda pair: (pair[0]["step"], pair[0]["when"] != "before")):
        theirs = other["values"]
        if apart := [n for n, value in one["values"].items() if n in theirs and not _alike(value, theirs[n])]:
            reason, line, rank, fix = _reason(facts, one, other, apart)
            title = f"The ranks' weights differ from step {one['step']} on ({count(len(apart), 'parameter')}): {reason}"
            where = at(facts, line, rank, one["step"])
            yield finding("weights-diverged", title, where, fix, parameters=tuple(apart), reason=reason)


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    near = ALIKE * max(abs(one[1]), abs(other[1]))
    return all(a == b or abs(a - b) <= near or a != a and b != b for a, b in zip(one, other))


def _reason(
    facts: RanksFacts, one: dict[str, Any], other: dict[str, Any], apart: list[str]
) -> tuple[str, Any, int | None, Fix]:
    late, before, line = [n for n in one["late"] if n in apart], one["when"] == "before", first(one["lines"])
    if late and len(late) == len(apart):
        whole = Fix("Wrap the model when it is whole.", "model = DistributedDataParallel(model)")
        if one.get("unfrozen"):  # the wrapper reduces what required a gradient when it was made
            whole = Fix("Wrap the model again.", "model = DistributedDataParallel(model.module)")
            return (
                f"{listed(late)} {'was' if len(late) == 1 else 'were'} unfrozen after the wrapper was made",
                _unfrozen_at(facts),
                None,
                whole,
            )
        return f"{listed(late)} came in after the wrapper was made", _made_at(facts, late[0], late=True), None, whole
    if (after := next((e["lines"] for e in facts.all("gradients") if e["late"]), None)) is not None:
        order = Fix("Reduce first.", "loss.backward()\nreduce_gradients(model)\noptimizer.step()")
        return "the gradients are reduced after the optimizer's step has used them", first(after), None, order
    broadcast = "for tensor in model.state_dict().values():\n    dist.broadcast(tensor, src=0)"
    begin = Fix("Begin with the same weights.", broadcast)
    seeds = [facts.ranks[e["rank"]].one("seed") for e in (one, other)]
    if before and seeds[0] and seeds[1] and seeds[0]["value"] != seeds[1]["value"]:
        return "they were made with seeds of their own", first(seeds[0]["lines"]), None, begin
    more = one.get("backwards", 0) - other.get("backwards", 0)
    arm = _arm_of_one(facts, one, other, ANY if more else CHANGES)
    if more:
        rank = (one if more > 0 else other)["rank"]
        steps = [place for place in facts.places.values() if place.kind == "arm" and STEP.search(facts.body(place))]
        smallest = min(steps, key=lambda place: place.last - place.first, default=None)
        place = arm[1].head if arm else smallest.head if smallest else line
        return f"rank {rank} has left out a step of the optimizer", place, rank, DECIDE
    if arm is not None:
        alike = Fix("Do the same on all ranks, or share the weights out afterwards.", broadcast)
        return f"rank {arm[0]} alone went through line {arm[1].line}", arm[1].head, arm[0], alike
    if one["lr"] != other["lr"]:
        if line and one["step"]:  # they were alike at first: `scheduler.step(loss)` goes by each rank's own number
            calls = (n for n in ast.walk(paths.parsed(facts, line[0])) if isinstance(n, ast.Call) and n.args)
            line = next(((line[0], n.lineno, "") for n in calls if getattr(n.func, "attr", "") == "step"), line)
        line = line and paths.argument_line(facts, line, "", "lr")
        code = "dist.all_reduce(loss, op=dist.ReduceOp.AVG)  # gloo: the sum, divided\nscheduler.step(loss)"
        return "their learning rates differ", line, None, Fix("Use one rate: a scheduler goes by a mean.", code)
    if (unreduced := _unreduced(facts, line)) is not None:
        return unreduced
    reason = "they were not the same when training began" if before else "their gradients are not the same"
    return reason, line, None, begin


def _unreduced(facts: RanksFacts, line: Any) -> tuple[str, Any, None, Fix] | None:
    """Why a wrapper has reduced nothing."""
    past = next((e["lines"] for e in facts.all("past") if e["lines"]), None)
    if past is not None:
        wrapper = Fix("Call the wrapper itself.", "output = model(batch)  # not model.module")
        return "the forward passes the wrapper by, so that no gradient is reduced", first(past), None, wrapper
    calls = [call for log in facts.ranks.values() for own in log.calls.values() for call in own]
    nodes = [(file, node) for file in facts.sources for node in ast.walk(paths.parsed(facts, file))]
    lines = [(file, node.lineno, "") for file, node in nodes if getattr(node, "attr", "") == "no_sync"]  # type: ignore
    if not lines or any(call.op.startswith("backward of") for call in calls):
        return None
    code = "with contextlib.nullcontext() if last else model.no_sync():\n    model(part).backward()"
    last = Fix("Leave the last part of each step out of no_sync.", code)
    return "every backward is within no_sync, so that no gradient is reduced", lines[0], None, last


def _arm_of_one(
    facts: RanksFacts, one: dict[str, Any], other: dict[str, Any], says: re.Pattern[str]
) -> tuple[int, Place] | None:
    """An arm that one rank alone entered before the weights differed, since they were last alike, and that speaks of
    weights, an optimizer or a model."""
    windows = []
    for event in (one, other):
        log = facts.ranks[event["rank"]]
        before = [e["at"] for e in log.events["weights"] if e["at"] < event["at"]]
        windows.append(log.window(before[-1] if before else 0, event["at"]))
    for event, mine, theirs in zip((one, other), windows, windows[::-1]):
        for place in (facts.places[number] for number in mine if number in facts.places and number not in theirs):
            if place.kind == "arm" and says.search(facts.body(place)):
                return int(event["rank"]), place
    return None


@cause(
    code="distributed/optimizer-before-sharding",
    title="The optimizer holds the weights of before the sharding.",
    symptom="The loss does not move: no error, and the optimizer steps.",
    cause="`fully_shard` puts new parameters in the place of the model's, and so does FSDP. An optimizer that was made "
    "before keeps the old ones, which no backward reaches.",
    confirm="`[p.grad is None for g in optimizer.param_groups for p in g['params']]` after a backward.",
    fix="Make the optimizer after the model is sharded.",
    reference="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
)
def optimizer_before_sharding(facts: RanksFacts) -> Iterator[Finding]:
    for event in facts.all("idle"):
        title = (
            f"The optimizer has made {count(event['steps'], 'step')}, and none of its parameters ever had a gradient"
        )
        code = "fully_shard(model)\noptimizer = torch.optim.AdamW(model.parameters())"
        fix = Fix("Make the optimizer after the model is sharded.", code)
        line = first(event["lines"])
        yield finding("optimizer-before-sharding", title, at(facts, line), fix, steps=event["steps"])


@cause(
    code="distributed/shared-file",
    title="The ranks write different contents to one file.",
    symptom="After a resume all ranks go on from the same place, or the file can't be read now and then.",
    cause="The path is the same on all ranks: the last one to write wins.",
    confirm="Print path and rank where the file is written.",
    fix="Put the rank into the name of what differs; write what is the same on one rank, then a barrier.",
    reference="https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
)
def shared_file(facts: RanksFacts) -> Iterator[Finding]:
    for one, other in facts.pairs("file"):
        if one["digest"] != other["digest"] and one["lines"]:
            name = one["path"].rpartition("/")[2]
            title = f"Ranks {one['rank']} and {other['rank']} write different contents to {name}"
            fix = Fix("Put the rank into the name.", 'path = f"state-{rank}.pt"')
            yield finding("shared-file", title, at(facts, one["lines"][0]), fix, path=one["path"])


@cause(
    code="distributed/missing-sampler",
    title="All ranks train on the same rows.",
    symptom="Twice the processes, the same time for an epoch, and the same curve as with one.",
    cause="The loader does not share the rows out: without a DistributedSampler, or with one of a wrong rank, seed or "
    "epoch, each rank draws from all of them.",
    confirm="Print the indices of the first batch on each rank.",
    fix="`DataLoader(rows, sampler=DistributedSampler(rows))`; a stream is split by rank and by worker.",
    reference="https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler",
)
def missing_sampler(facts: RanksFacts) -> Iterator[Finding]:
    shares, sampled = [], True
    for one, other in facts.pairs("pass"):
        if not one["backwards"] or not other["backwards"] or min(len(one["rows"]), len(other["rows"])) < 2:
            continue
        by = "rows" if one.get("data") == other.get("data") else "content"  # each rank may have a part of its own
        mine, theirs = set(map(str, one[by])), set(map(str, other[by]))
        if not mine or not theirs:
            return
        common = len(mine & theirs)
        shares.append((common / min(len(mine), len(theirs)), one))
        sampled &= by == "rows" and bool(one["sampler"]) and common > len(facts.ranks)
    if min((share for share, _ in shares), default=0.0) > (PADDED if sampled else OVERLAP):
        share, one = percent(shares[0][0]), shares[0][1]
        title = f"The ranks train on the same rows: {share} of one rank's are another's too"
        code = "sampler = DistributedSampler(rows)\nDataLoader(rows, batch_size=4, sampler=sampler)"
        if sampled:
            title += ", as their samplers do not share out one order"
            code = "DistributedSampler(rows)  # rank and num_replicas of the group, one seed and epoch on all ranks"
        where = at(facts, first(one["sampler"] if sampled else one["lines"]))
        yield finding("missing-sampler", title, where, Fix("Share the rows out.", code), rows_in_common=share)


@cause(
    code="distributed/split-differs",
    title="Each rank has split the rows in another way.",
    symptom="Validation is better than on new rows, the more so the more processes there are.",
    cause="`random_split` draws from a generator that each rank has seeded with a number of its own: rows that one "
    "rank holds out are trained by another.",
    confirm="Print the first indices of the split on each rank.",
    fix="`random_split(rows, sizes, generator=torch.Generator().manual_seed(0))`, the same on all ranks.",
)
def split_differs(facts: RanksFacts) -> Iterator[Finding]:
    for one, other in facts.pairs("pass"):
        if one.get("split") and other.get("split") and one["split"][0] != other["split"][0]:
            title = f"Ranks {one['rank']} and {other['rank']} have split the rows in unlike ways, and share them out"
            code = "random_split(rows, sizes, generator=torch.Generator().manual_seed(0))"
            fix = Fix("Draw the split with one seed on all ranks.", code)
            yield finding("split-differs", title, at(facts, first(one["split"][1])), fix)


@cause(
    code="distributed/set-epoch-missing",
    title="Every epoch has the same order.",
    symptom="The curve has the same bumps in each epoch, although the sampler shuffles.",
    cause="DistributedSampler shuffles by its seed and its epoch number; without `set_epoch` that stays 0.",
    confirm="Print the indices of the first batch of two epochs.",
    fix="`sampler.set_epoch(epoch)` before each pass.",
    reference="https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler",
)
def set_epoch_missing(facts: RanksFacts) -> Iterator[Finding]:
    for log in facts.ranks.values():
        passes: dict[str, list[dict[str, Any]]] = {}
        for one in log.events.get("pass", ()):
            if one["complete"] and one["backwards"] and one["shuffles"] and len(one["rows"]) > 3:
                passes.setdefault(one["loader"], []).append(one)
        for own in passes.values():
            if len(own) > 1 and all(one["rows"] == own[0]["rows"] for one in own):
                line = first(own[0]["sampler"]) or first(own[0]["lines"])
                title = f"{count(len(own), 'epoch')} went through the rows in one order, although the sampler shuffles"
                fix = Fix("Tell the sampler the epoch.", "for epoch in range(epochs):\n    sampler.set_epoch(epoch)")
                yield finding("set-epoch-missing", title, at(facts, line), fix, epochs=len(own))


@cause(
    code="distributed/no-sync-missing",
    title="Gradients are exchanged for each part of an accumulated batch.",
    symptom="Accumulation makes nothing faster, though the optimizer steps more rarely.",
    cause="DistributedDataParallel reduces in every backward, and only the sum of the last one is needed.",
    confirm="Backwards and optimizer steps, counted.",
    fix="All parts but the last within `with model.no_sync():`, forward included.",
    reference=DDP,
)
def no_sync_missing(facts: RanksFacts) -> Iterator[Finding]:
    for log in facts.ranks.values():
        steps = log.events.get("step", ())
        for place in {line for step in steps for line in step["synced"]}:
            numbers = [step["synced"].get(place, 0) for step in steps]
            often = [n for n in numbers if n > 1]
            if place and len(often) > 1 and len(often) * 2 > len(numbers):
                file, _, line = place.rpartition(":")
                title = f"Gradients are reduced {max(often)} times a step, and once would do"
                code = "with contextlib.nullcontext() if last else model.no_sync():\n    model(part).backward()"
                fix, where = Fix("Reduce in the last part alone.", code), at(facts, (file, int(line), ""))
                yield finding("no-sync-missing", title, where, fix, reductions_a_step=max(often))


@cause(
    code="distributed/reduced-twice",
    title="Gradients that the wrapper has averaged are reduced once more.",
    symptom="The rate seems to grow with the number of processes, or a step takes longer than it should.",
    cause="DistributedDataParallel averages the gradients in backward. A sum over the ranks afterwards multiplies them "
    "by the number of ranks; a mean changes nothing and costs the time of a reduction.",
    confirm="Compare `p.grad` before and after the reduction on one rank.",
    fix="Take the reduction out, or train the bare model.",
    reference=DDP,
)
def reduced_twice(facts: RanksFacts) -> Iterator[Finding]:
    for event in facts.all("gradients"):
        if not event["late"]:
            title = "Gradients that DistributedDataParallel has averaged over the ranks are reduced again"
            fix = Fix("Leave it to the wrapper.", "loss.backward()  # averages over the ranks\noptimizer.step()")
            yield finding("reduced-twice", title, at(facts, first(event["lines"])), fix)


@cause(
    code="distributed/gradients-not-averaged",
    title="The gradients of the ranks are added up, and never divided by their number.",
    symptom="One process trains well; with more the loss oscillates or grows, the sooner the more there are.",
    cause="`all_reduce` sums: each step is as many times larger as there are ranks.",
    confirm="Print a gradient's norm before and after the reduction.",
    fix="`p.grad /= world_size` after it, or `op=dist.ReduceOp.AVG` (NCCL); or DistributedDataParallel.",
)
def gradients_not_averaged(facts: RanksFacts) -> Iterator[Finding]:
    for event in facts.all("summed")[:1]:
        file, number, _ = line = first(event["lines"])
        near = "".join(facts.text((file, n)) for n in range(number - 12, number + 9))
        if (growth := facts.growth_of_loss()) and not DIVIDES.search(near):
            title = f"The gradients of {count(len(facts.ranks), 'rank')} are added up and not divided, and {growth}"
            code = f"{facts.text(line).strip()}\np.grad /= dist.get_world_size()"
            fix = Fix("Divide them by the number of ranks.", code)
            yield finding("gradients-not-averaged", title, at(facts, line), fix)


@cause(
    code="distributed/metric-not-reduced",
    title="A score is that of one rank's share of the rows.",
    symptom="The score jumps with the number of processes, and differs from that of one process on all rows.",
    cause="Each rank evaluates its own share, and one of them prints what it has seen.",
    confirm="Print the score on every rank.",
    fix="Sum what the score is made of over the ranks (hits and rows, not their ratio), then divide.",
)
def metric_not_reduced(facts: RanksFacts) -> Iterator[Finding]:
    for one, other in facts.pairs("score"):
        mine, theirs = set(one["digests"]), set(other["digests"])
        shown, common = one if one["prints"] else other, len(mine & theirs)
        by_one = bool(one["prints"]) != bool(other["prints"]) and not one["reduced"] and not other["reduced"]
        if not by_one or not mine or not theirs or common > OVERLAP * min(len(mine), len(theirs)):
            continue
        for line in filter(None, (paths.score_line(facts, shown["lines"], place) for place in shown["prints"])):
            title = f"Rank {shown['rank']} shows a score of its own rows: no rank hears of the others'"
            code = "totals = torch.tensor([hits, rows])\ndist.all_reduce(totals)\nscore = totals[0] / totals[1]"
            fix = Fix("Add up over the ranks, then divide.", code)
            yield finding("metric-not-reduced", title, at(facts, line), fix, batches_in_common=common)


SILENT = declared(__name__)[len(FATAL) - 1 :]


def name_cause(facts: RanksFacts) -> Finding | None:
    if facts.fault():
        return None  # a call may be missing in what is compared
    silent = SILENT if facts.over else ()
    return facts.before or next((cause for check in (*FATAL, *silent) if (cause := check(facts)) is not None), None)


def locates(facts: RanksFacts) -> bool:
    """Whether a rank still looks for what is behind its loss that is not finite, or behind its error."""
    return any(e.get("locates") and _trace(facts, e) is None for e in (*facts.all("loss"), *facts.all("error")))


def certain(facts: RanksFacts) -> bool:
    """Whether a verdict that ends the run can be given now. A rank's errors alone are left to torchrun, which ends the
    others by itself, unless these wait."""
    return not facts.fault() and any(check(facts) is not None for check in FATAL)
