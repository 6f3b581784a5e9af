"""Rules: from what the ranks wrote down to the one cause. The first that holds answers.

Those of the first half are certain while the run goes on, and end it; those of the second half are silent faults, of
which a finished run tells.
"""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Iterable, Sequence
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import clip, count, listed, percent
from nbdebug.tools.distributed import paths
from nbdebug.tools.distributed.facts import CollectiveCall, Place, RanksFacts

DDP = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
DISTRIBUTED = "https://docs.pytorch.org/docs/stable/distributed.html"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OVERLAP = 0.5
"""Of the rows of a pass: ranks with samplers of their own share none, those without nearly all."""
ALIKE = 1e-6
"""Relative: weights that had the same updates are equal bit for bit."""
IN_USE = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
UNFINISHED = "finished reduction in the prior iteration"
LONGER = "A longer timeout only makes the wait longer: the call that is missing never comes."


def at(facts: RanksFacts, line: Sequence[Any] | None, rank: int | None = None, step: int | None = None) -> Where:
    if not line:
        return Where(rank=rank, step=step)
    text = facts.text(line).strip() or None
    return Where(step=step, file=line[0], line=line[1], text=text, rank=rank)


def finding(
    code: str, title: str, where: Where, fixes: Iterable[Fix], chain: Iterable[Link] = (), **evidence: Any
) -> Finding:
    """`_` in names of evidence is a space."""
    rows = {name.replace("_", " "): value for name, value in evidence.items() if value not in (None, "", (), [], {})}
    return Finding(f"distributed/{code}", title, where, rows, tuple(fixes), tuple(chain))


def first(lines: Sequence[Any] | None) -> Any:
    return lines[0] if lines else None


def errors(facts: RanksFacts) -> list[tuple[int, dict[str, Any]]]:
    """The ranks' own errors, the earliest first; those that come from another rank's end are left out."""
    own = [(r, e) for r, log in facts.ranks.items() for e in log.events.get("error", ()) if not e.get("peer")]
    return sorted(own, key=lambda item: item[1].get("t", 0))


@rule(
    code="distributed/world-size-wrong",
    title="The group is made for another number of processes than was launched.",
    symptom="Nothing happens until the timeout, although each process is there; or each trains alone.",
    cause="`world_size` is a number of the machine that the program was written for, or a variable was overwritten.",
    confirm="Print `world_size` beside `os.environ['WORLD_SIZE']` before the group is made.",
    fix="Leave `rank` and `world_size` out: `init_process_group` reads what the launcher has set.",
    reference=DISTRIBUTED,
)
def world_size_wrong(facts: RanksFacts) -> Finding | None:
    for log in facts.ranks.values():
        init = log.one("init")
        if init is None or init["world"] in (-1, facts.launched):
            continue
        line = first(init["lines"])
        if line and init.get("by_argument"):
            line = paths.argument_line(facts, line, "world_size") if "world_size" in facts.text(line) else line
            line = paths.argument_line(facts, line, "", "world_size")
        elif line:
            line = paths.find(facts, line[0], lambda n: _sets(n, "WORLD_SIZE")) or line
        title = f"The group is made for {count(init['world'], 'process', 'processes')}; {facts.launched} were launched"
        fix = Fix(
            "Read it from the launcher.", 'dist.init_process_group("gloo")  # RANK and WORLD_SIZE are set by torchrun'
        )
        return finding(
            "world-size-wrong", title, at(facts, line), [fix], world_size=init["world"], launched=facts.launched
        )
    return None


def _sets(node: ast.AST, variable: str) -> bool:
    """Whether a statement gives an environment variable a value, or takes it away."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        return any(isinstance(p, ast.Constant) and p.value == variable for t in node.targets for p in ast.walk(t))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("pop", "update", "setdefault")
    ):
        return any(isinstance(p, ast.Constant) and p.value == variable for a in node.args for p in ast.walk(a)) or (
            any(k.arg == variable for k in node.keywords)
        )
    return False


@rule(
    code="distributed/env-incomplete",
    title="A process does not get the variables that a launcher sets.",
    symptom="`environment variable RANK expected, but not set`, a KeyError, or each process takes itself for rank 0.",
    cause="The script was started without torchrun, or it starts a program with an environment of its own making.",
    confirm="Print RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT at the start.",
    fix="Start with torchrun; pass `os.environ` on to what the script starts.",
    reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
)
def env_incomplete(facts: RanksFacts) -> Finding | None:
    for rank, error in errors(facts):
        text = f"{error['type']}: {error['text']}"
        named = [
            v for v in VARIABLES if f"'{v}'" in text and error["type"] == "KeyError" or f"variable {v} expected" in text
        ]
        child = facts.ranks[rank].one("child")
        if named and child is None:
            missing = [v for v in VARIABLES if v in named or v in error.get("unset", ())]
            line = first(error["lines"])
            line = line and (paths.find(facts, line[0], lambda n, m=missing: any(_sets(n, v) for v in m)) or line)
            return _incomplete(facts, line, missing)
    if "expected, but not set" in facts.output or "KeyError" in facts.output:
        for log in facts.ranks.values():
            for child in log.events.get("child", ()):
                if child["missing"] and any(v in facts.output for v in child["missing"]) and child["lines"]:
                    return _incomplete(
                        facts, paths.argument_line(facts, child["lines"][0], "", "env"), child["missing"]
                    )
    inits = [init for log in facts.ranks.values() if (init := log.one("init")) is not None]
    if (
        len(inits) > 1
        and len(inits) == len(facts.ranks)
        and len({init["own"] for init in inits}) == 1
        and inits[0]["own"] >= 0
    ):
        unset = [e for log in facts.ranks.values() for e in log.events.get("unset", ())]
        if unset:
            return _incomplete(facts, first(unset[0]["lines"]), [unset[0]["name"]])
    return None


def _incomplete(facts: RanksFacts, line: Any, missing: list[str]) -> Finding:
    title = f"{listed(missing, 4, '')} {'is' if len(missing) == 1 else 'are'} not set where the group is made"
    fix = Fix("Pass the launcher's environment on.", "subprocess.run(command, env={**os.environ, 'NAME': 'value'})")
    return finding("env-incomplete", title, at(facts, line), [fix], variables=tuple(missing))


@rule(
    code="distributed/port-in-use",
    title="The address that a group is made at is taken.",
    symptom="`EADDRINUSE`, `address already in use`, at once or when a second program starts.",
    cause="Two launches use one port: two runs on a machine, or a distributed program that is started from a rank.",
    confirm="`ss -ltnp` shows who listens.",
    fix="`torchrun --standalone` takes a free port; so does port 0 of a socket.",
    reference="https://docs.pytorch.org/docs/stable/elastic/run.html",
)
def port_in_use(facts: RanksFacts) -> Finding | None:
    for rank, error in errors(facts):
        line = first(error["lines"])
        if line is None or not (
            IN_USE.search(error["text"]) or "CalledProcessError" in error["type"] and IN_USE.search(facts.output)
        ):
            continue
        part = paths.argument_line(facts, line, "port")
        if part[1] == line[1]:
            part = paths.find(facts, line[0], lambda n: isinstance(n, ast.Assign) and _sets(n, "MASTER_PORT")) or part
        fix = Fix("Let the launcher take a free port.", "torchrun --standalone --nproc-per-node=2 script.py")
        return finding(
            "port-in-use", "The port is already in use", at(facts, part, rank), [fix], error=clip(error["text"], 160)
        )
    return None


@rule(
    code="distributed/unused-parameters",
    title="Parameters get no gradient, and DistributedDataParallel waits for it.",
    symptom="`Expected to have finished reduction in the prior iteration`, or the ranks stand still in backward.",
    cause="A part of the model is not used in the forward, on all ranks or on some. Its gradient never comes, so the "
    "reduction never ends.",
    confirm="After a backward of the bare model, the parameters whose `grad` is None.",
    fix="Use the part in the loss, or leave it out; else `find_unused_parameters=True`, at the price of a walk.",
    reference=DDP,
)
def unused_parameters(facts: RanksFacts) -> Finding | None:
    failed = [(rank, e) for rank, e in errors(facts) if UNFINISHED in e["text"]]
    parted = paths.parting(facts)
    if not failed and parted is None:
        return None
    unused = {rank: first_unused(log.events.get("nograd", ())) for rank, log in facts.ranks.items()}
    if not failed:
        in_backward = (
            any(c is not None and c.op.startswith("backward of") for c in parted.calls.values()) if parted else False
        )
        stuck = [r for r, log in facts.ranks.items() if log.last and log.last.op.startswith("backward of")]
        if not in_backward and not stuck or not any(unused.values()) or all(unused.get(r) for r in facts.ranks):
            return None
    names = next((e["names"] for _, e in failed if e.get("names")), None) or next((u for u in unused.values() if u), [])
    if not names:
        return None
    with_error, without = {rank for rank, _ in failed}, [r for r, u in unused.items() if not u]
    alone = [r for r, u in unused.items() if u] if without and any(unused.values()) else []
    lone = alone[0] if len(alone) == 1 and len(with_error) < len(facts.ranks) else None
    line = _made_at(facts, names[0], lone is not None)
    title = f"{count(len(names), 'parameter')} without a gradient: {listed(names)}" + (
        f", on rank {lone} alone" if lone is not None else ""
    )
    fixes = [
        Fix("Use the part in the forward, or take it out of the model.", f"# {names[0].rpartition('.')[0]}"),
        Fix(
            "Let the wrapper look for unused parameters.", "DistributedDataParallel(model, find_unused_parameters=True)"
        ),
    ]
    return finding("unused-parameters", title, at(facts, line, lone), fixes, parameters=tuple(names))


def first_unused(events: Sequence[dict[str, Any]]) -> list[str]:
    return next((e["names"] for e in events if e["names"]), [])


def _made_at(facts: RanksFacts, parameter: str, of_one: bool = False, late: bool = False) -> Any:
    """Where the module of a parameter is made: below the line of the wrapper, where it came `late`; or the branch that
    speaks of it, where it concerns one rank alone. Else the line of the wrapper."""
    wrappers = [e["lines"][0] for log in facts.ranks.values() for e in log.events.get("wrapper", ()) if e["lines"]]
    begin = first(wrappers)
    module = parameter.split(".")[:-1] or [parameter]
    for part in [p for p in module if not p.isdigit()] or module:
        for file in facts.sources:
            low = begin[1] if late and begin and begin[0] == file else 0
            for wanted in (_branch_of,) * of_one + (_assigns,) + (_names,) * late:
                place = paths.find(facts, file, lambda n, f=wanted, p=part, low=low: n.lineno > low and f(n, p))
                if place:
                    return place
    return begin


def _branch_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, (ast.If, ast.IfExp)) and any(_is_attribute(part, name) for part in ast.walk(node))


def _assigns(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(_is_attribute(target, name) for target in node.targets)


def _names(node: ast.AST, name: str) -> bool:
    """`model.add_module("head", …)`"""
    return isinstance(node, ast.Call) and any(isinstance(a, ast.Constant) and a.value == name for a in node.args)


def _is_attribute(node: ast.AST, name: str) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(isinstance(part, ast.Attribute) and part.attr == name for part in parts)


@rule(
    code="distributed/rank-nonfinite",
    title="The loss of one rank is not finite; its gradients spoil all.",
    symptom="One rank shows a finite loss, and from the next step on all show nan.",
    cause="Gradients are averaged over the ranks: a bad row in one rank's share reaches every weight.",
    confirm="Print the loss of each rank before backward.",
    fix="Mend the rank's data or the op that made the value (`nan_trace` on that rank's batch names it).",
    reference=DDP,
)
def rank_nonfinite(facts: RanksFacts) -> Finding | None:
    losses = {rank: {e["id"]: e for e in log.events.get("loss", ())} for rank, log in facts.ranks.items()}
    bad = sorted((e["id"], rank) for rank, own in losses.items() for e in own.values() if e["bad"])
    if bad:
        step, rank = bad[0]
        others = [own[step] for r, own in losses.items() if r != rank and step in own]
        if others and not all(e["bad"] for e in others):
            event = losses[rank][step]
            trace = next((e["finding"] for e in facts.ranks[rank].events.get("trace", ()) if e["id"] == step), None)
            return _nonfinite(facts, rank, step, event["value"], first(event["lines"]), trace)
    for rank, error in errors(facts):
        if error.get("nonfinite") and not any(r != rank and e.get("nonfinite") for r, e in errors(facts)):
            line = error.get("blamed") or first(error["lines"])
            return _nonfinite(facts, rank, error.get("step"), listed(error["nonfinite"]), line)
    return None


def _nonfinite(
    facts: RanksFacts, rank: int, step: int | None, value: str, line: Any, trace: dict[str, Any] | None = None
) -> Finding:
    """trace: what nan_trace has found on that rank."""
    fix = Fix("Look for the op on that rank.", f"if rank == {rank}:\n    print(nbdebug.nan_trace(step, model=model))")
    title = f"The loss of rank {rank} is {value} at step {step}, and finite on the others"
    where = at(facts, line, rank, step)
    if trace is None:
        return finding("rank-nonfinite", title, where, [fix], loss=value)
    link = Link(f"nan_trace, on rank {rank}: {trace['title']}", at(facts, trace["line"], rank))
    return finding("rank-nonfinite", title, where, [], [link], loss=value, cause=trace["code"], op=trace["op"])


@rule(
    code="distributed/rank-raised",
    title="One rank has failed with an error of its own; the others wait for it.",
    symptom="A timeout, or `Connection closed by peer`, on all ranks but one.",
    cause="The other ranks are in a collective that the failed rank never reaches. What they print is no cause.",
    confirm="The first error by time, of all ranks' output.",
    fix="Mend that error. Where it can happen, let all ranks hear of it (an all_reduce of a flag).",
    reference=DISTRIBUTED,
)
def rank_raised(facts: RanksFacts) -> Finding | None:
    for rank, error in errors(facts):
        text = f"{error['type']}: {clip(error['text'].split(chr(10))[0], 160)}"
        if UNFINISHED in error["text"]:
            continue
        everywhere = len(errors(facts)) == len(facts.ranks) > 1
        fixes = [Fix("Ask what the error is about.", "nbdebug.explain(error)  # or %explain, in a notebook")]
        if everywhere:
            alone = "All ranks have it: look first whether one process by itself has it, too."
            fixes.append(Fix(alone, "python -m nbdebug ranks --nproc 1 script.py"))
        title = f"{'Every rank' if everywhere else f'Rank {rank}'} has failed: {text}"
        step = error.get("step")
        return finding(
            "rank-raised",
            title,
            at(facts, first(error["lines"]), None if everywhere else rank, step),
            fixes,
            error=text,
        )
    return None


@rule(
    code="distributed/uneven-steps",
    title="One rank has fewer batches than another.",
    symptom="The last step of an epoch never returns on one rank; the other has left the loop.",
    cause="The rows were shared out unevenly, or one rank drops some.",
    confirm="Print the number of batches on each rank.",
    fix="Share out evenly (DistributedSampler, drop_last), or train within `with model.join():`.",
    reference="https://docs.pytorch.org/tutorials/advanced/generic_join.html",
)
def uneven_steps(facts: RanksFacts) -> Finding | None:
    parted = paths.parting(facts)
    left = None if parted is None else paths.departure(facts, parted)
    if parted is None or left is None or left.kind != "loop" or left.place is None:
        return None
    steps = totals(facts, left.place)
    stacks = [call.lines for call in parted.calls.values() if call is not None]
    line = paths.iterable_line(facts, left.place, first(stacks) or ())
    numbers = ", ".join(f"rank {rank} has {n}" for rank, n in sorted(steps.items()))
    title = f"The ranks have unlike numbers of batches: {numbers or 'one has run out'}"
    fixes = [
        Fix("Give each rank the same number.", "DistributedSampler(rows, drop_last=True)"),
        Fix(
            "Or let those that have run out answer for the others.", "with model.join():\n    for batch in loader: ..."
        ),
    ]
    chain = waits(facts, parted)
    return finding("uneven-steps", title, at(facts, line, left.rank), fixes, chain, steps=steps, timeout=LONGER)


def totals(facts: RanksFacts, place: Place) -> dict[int, int]:
    """Turns of the loop by rank: as the rank has counted at its end, else as its marks show."""
    steps = {}
    for rank, log in facts.ranks.items():
        loops = (log.one("loops") or {}).get("loops", {})
        made = log.turns[place.number]
        steps[rank] = (
            made
            if log.turns[-place.number]
            else max(made, int(loops.get(str(place.number), loops.get(place.number, 0))))
        )
    return steps


def group_of(parted: paths.Parting, call: CollectiveCall) -> str:
    """Where the ranks are in calls of several groups, which one this is of."""
    several = len({each.group for each in parted.calls.values() if each}) > 1
    return f" in group {call.group}" if several else ""


def waits(facts: RanksFacts, parted: paths.Parting) -> list[Link]:
    """What each rank does at the parting."""
    chain = []
    for rank, call in sorted(parted.calls.items()):
        line = first(call.lines) if call is not None else None
        what = (
            f"rank {rank} calls {call}{group_of(parted, call)}, its number {call.n + 1}"
            if call
            else f"rank {rank} has left after {count(parted.n, 'call')}"
        )
        chain.append(Link(what, at(facts, line, rank)))
    return chain


@rule(
    code="distributed/collective-mismatch",
    title="The ranks do not make the same calls.",
    symptom="The program stands still until the timeout, or ends in an error about sizes or a closed connection.",
    cause="One rank has taken a branch with a collective in it (a reduction, a barrier, a forward of the wrapped model "
    "in training mode), has skipped one, or calls it with another shape or type.",
    confirm="The calls of each rank in order, as this report lists them.",
    fix="Make the call on all ranks, outside of the branch; on one rank alone use the bare model (`model.module`).",
    reference=DISTRIBUTED,
)
def collective_mismatch(facts: RanksFacts) -> Finding | None:
    parted = paths.parting(facts)
    if parted is None:
        return None
    left = paths.departure(facts, parted)
    each = "; ".join(
        f"rank {rank} " + (f"calls {call}{group_of(parted, call)}" if call else "has ended")
        for rank, call in sorted(parted.calls.items())
    )
    who = "The ranks part" if left.rank is None else f"Rank {left.rank} leaves the common path"
    fix = Fix(
        "Make the same calls on all ranks.", "value = validate()  # on all ranks\nif rank == 0:\n    print(value)"
    )
    if left.place is not None and left.kind == "arm" and paths.jumps(facts, left.place):
        who = f"Rank {left.rank} takes a branch that leaves out calls of the others"
        fix = Fix(
            "Let all ranks decide alike.",
            "leave = torch.tensor(float(condition))\ndist.all_reduce(leave, op=dist.ReduceOp.MAX)\nif leave:\n    ...",
        )
    title = f"{who} at call {parted.n + 1}: {each}"
    return finding(
        "collective-mismatch", title, at(facts, left.line, left.rank), [fix], waits(facts, parted), timeout=LONGER
    )


@rule(
    code="distributed/message-missing",
    title="A rank waits for a message that no rank sends.",
    symptom="A pipeline stands still in `recv`, or in the `wait()` of an `irecv`, until the timeout.",
    cause="The other rank has sent fewer messages than this one receives, or both wait for each other first.",
    confirm="Count the sends and receives of both, for each tag.",
    fix="Make one send for each receive, in an order in which one side sends while the other receives.",
    reference=DISTRIBUTED,
)
def message_missing(facts: RanksFacts) -> Finding | None:
    stuck = paths.blocked(facts)
    for rank, log in sorted(facts.ranks.items()):
        wanted = log.receives
        other = facts.ranks.get(wanted["peer"]) if wanted else None
        if wanted is None or other is None or other is log:
            continue
        group, tag, _ = wanted["key"].split("/")
        if other.sent[f"{group}/{tag}/{rank}"] > wanted["n"]:
            continue
        back, both = other.receives, {rank, other.rank} <= stuck
        if not both and not other.has_left(group):
            continue
        number, sent = wanted["n"] + 1, other.sent[f"{group}/{tag}/{rank}"]
        tagged = f" with tag {tag}" if tag != "0" else ""
        title = f"Rank {rank} waits for message {number}{tagged} of rank {other.rank}, which has sent {sent}"
        title += f", and waits {'for a message of its own' if back else 'itself'}" if both else " and has ended"
        fix = Fix("One send for each receive.", f"dist.send(tensor, dst={rank})  # on rank {other.rank}")
        chain = [Link(f"rank {rank} receives", at(facts, first(wanted["lines"]), rank))]
        if back is not None and both:
            chain.append(Link(f"rank {other.rank} receives", at(facts, first(back["lines"]), other.rank)))
        line = first(wanted["lines"])
        return finding("message-missing", title, at(facts, line, rank), [fix], chain, timeout=LONGER)
    return None


def rank_killed(facts: RanksFacts) -> Finding | None:
    """A rank whose process ended without an error in Python, as the launcher tells."""
    died = re.search(r"Root Cause.*?\brank +: (\d+).*?exitcode +: (-?\d+)", facts.output, re.DOTALL)
    log = facts.ranks.get(int(died[1])) if died else None
    if died is None or log is None or log.one("error"):
        return None
    number = int(died[2])
    known = {int(each): each.name for each in signal.Signals}
    how = f"signal {known.get(-number, -number)}" if number < 0 else f"exit status {number}"
    fix = {
        -signal.SIGKILL: Fix("Ask the kernel: it kills where memory is short.", "dmesg | grep -i 'killed process'"),
        -signal.SIGSEGV: Fix("Let Python print where compiled code has crashed.", "export PYTHONFAULTHANDLER=1"),
        -signal.SIGABRT: Fix("Read the message of the compiled code.", "# in the output above"),
    }.get(number, Fix("Look for an exit of the program's own.", "os._exit"))
    line = first(log.last.lines) if log.last else None
    title = f"The process of rank {log.rank} has ended with {how} and no error in Python"
    return finding("rank-raised", title, at(facts, line, log.rank), [fix], last_call=str(log.last or ""))


# -- silent faults ----------------------------------------------------------------------------------------------------


@rule(
    code="distributed/weights-diverged",
    title="The ranks hold different weights.",
    symptom="No error. The result is worse the more processes there are; the saved model is that of one rank.",
    cause="The ranks began with different weights, or some gradients are not reduced: the wrapper's forward is passed "
    "by, parameters were added after it was made, or one rank alone changes weights.",
    confirm="`sum(p.double().sum() for p in model.parameters())` on each rank.",
    fix="Broadcast the weights at the start; call the wrapper itself; wrap after the model is whole.",
    reference=DDP,
)
def weights_diverged(facts: RanksFacts) -> Finding | None:
    for one, other in sorted(facts.pairs("weights"), key=lambda pair: (pair[0]["step"], pair[0]["when"] != "before")):
        apart = [
            n for n, value in one["values"].items() if n in other["values"] and not _alike(value, other["values"][n])
        ]
        if not apart:
            continue
        reason, line, rank = _reason(facts, one, other, apart)
        title = f"The ranks' weights differ from step {one['step']} on ({count(len(apart), 'parameter')}): {reason}"
        code = "for tensor in model.state_dict().values():\n    dist.broadcast(tensor, src=0)"
        fixes = [Fix("Begin with the same weights.", code)]
        if one["when"] != "before":
            fixes.append(Fix("Call the wrapper itself.", "output = model(batch)  # not model.module"))
        return finding(
            "weights-diverged", title, at(facts, line, rank, one["step"]), fixes, parameters=tuple(apart), reason=reason
        )
    return None


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(
        a == b or abs(a - b) <= ALIKE * max(abs(one[1]), abs(other[1])) or a != a and b != b for a, b in zip(one, other)
    )


def _reason(
    facts: RanksFacts, one: dict[str, Any], other: dict[str, Any], apart: list[str]
) -> tuple[str, Any, int | None]:
    late = [n for n in one["late"] if n in apart]
    if late and len(late) == len(apart):
        return f"{listed(late)} came in after the wrapper was made", _made_at(facts, late[0], late=True), None
    if one["when"] == "before":
        seeds = [facts.ranks[e["rank"]].one("seed") for e in (one, other)]
        if seeds[0] and seeds[1] and seeds[0]["value"] != seeds[1]["value"]:
            return "they were made with seeds of their own", first(seeds[0]["lines"]), None
    arm = _arm_of_one(facts, one, other)
    if arm is not None:
        return f"rank {arm[0]} alone went through line {arm[1].line}", (arm[1].file, arm[1].line, ""), arm[0]
    if one["lr"] != other["lr"]:
        line = first(one["lines"])
        return "their learning rates differ", line and paths.argument_line(facts, line, "", "lr"), None
    past = next((e for log in facts.ranks.values() for e in log.events.get("past", ()) if e["lines"]), None)
    if past is not None:
        return "the forward passes the wrapper by, so that no gradient is reduced", first(past["lines"]), None
    if one["when"] == "before":
        return "they were not the same when training began", first(one["lines"]), None
    return "their gradients are not the same", first(one["lines"]), None


def _arm_of_one(facts: RanksFacts, one: dict[str, Any], other: dict[str, Any]) -> tuple[int, Place] | None:
    """An arm that one rank alone entered before the weights differed, since they were last alike, and that speaks of
    weights, an optimizer or a model."""
    windows = []
    for event in (one, other):
        log = facts.ranks[event["rank"]]
        before = [e["at"] for e in log.events["weights"] if e["at"] < event["at"]]
        windows.append(log.window(before[-1] if before else 0, event["at"]))
    for mine, event in ((0, one), (1, other)):
        for number in dict.fromkeys(windows[mine]):
            place = facts.places.get(number)
            if place is not None and place.kind == "arm" and number not in windows[1 - mine]:
                lines = facts.sources.get(place.file, "").split("\n")[place.first - 1 : place.last]
                if re.search(
                    r"\.(mul_|add_|copy_|zero_|fill_|data|load_state_dict|apply|step|zero_grad|sub_|div_)\b|init\.|\.grad\b|clip_grad",
                    "\n".join(lines),
                ):
                    return event["rank"], place
    return None


@rule(
    code="distributed/shared-file",
    title="The ranks write different contents to one file.",
    symptom="After a resume all ranks go on from the same place, or the file can't be read now and then.",
    cause="The path is the same on all ranks: the last one to write wins.",
    confirm="Print path and rank where the file is written.",
    fix="Put the rank into the name of what differs; write what is the same on one rank, then a barrier.",
    reference="https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
)
def shared_file(facts: RanksFacts) -> Finding | None:
    for one, other in facts.pairs("file"):
        if one["digest"] != other["digest"] and one["lines"]:
            name = one["path"].rpartition("/")[2]
            title = f"Ranks {one['rank']} and {other['rank']} write different contents to {name}"
            fix = Fix("Put the rank into the name.", 'path = f"state-{rank}.pt"')
            return finding("shared-file", title, at(facts, one["lines"][0]), [fix], path=one["path"])
    return None


def trained(facts: RanksFacts) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The passes of the ranks' loaders, side by side, in which there was a backward."""
    pairs = facts.pairs("pass")
    return [
        p for p in pairs if p[0]["backwards"] and p[1]["backwards"] and min(len(p[0]["rows"]), len(p[1]["rows"])) > 1
    ]


@rule(
    code="distributed/missing-sampler",
    title="All ranks train on the same rows.",
    symptom="Twice the processes, the same time for an epoch, and the same curve as with one.",
    cause="The loader does not share the rows out: without a DistributedSampler each rank draws from all of them.",
    confirm="Print the indices of the first batch on each rank.",
    fix="`DataLoader(rows, sampler=DistributedSampler(rows))`; a stream is split by rank and by worker.",
    reference="https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler",
)
def missing_sampler(facts: RanksFacts) -> Finding | None:
    shares = []
    for one, other in trained(facts):
        by = "rows" if one.get("data") == other.get("data") else "content"  # each rank may have a part of its own
        mine, theirs = set(map(str, one[by])), set(map(str, other[by]))
        if not mine or not theirs:
            return None
        shares.append((len(mine & theirs) / min(len(mine), len(theirs)), one))
    if not shares or min(share for share, _ in shares) <= OVERLAP:
        return None
    share, one = shares[0]
    line = first(one["lines"])
    title = f"The ranks train on the same rows: {percent(share)} of one rank's are another's too"
    fix = Fix(
        "Share the rows out.", "sampler = DistributedSampler(rows)\nDataLoader(rows, batch_size=4, sampler=sampler)"
    )
    return finding("missing-sampler", title, at(facts, line), [fix], rows_in_common=percent(share))


@rule(
    code="distributed/set-epoch-missing",
    title="Every epoch has the same order.",
    symptom="The curve has the same bumps in each epoch, although the sampler shuffles.",
    cause="DistributedSampler shuffles by its seed and its epoch number; without `set_epoch` that stays 0.",
    confirm="Print the indices of the first batch of two epochs.",
    fix="`sampler.set_epoch(epoch)` before each pass.",
    reference="https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler",
)
def set_epoch_missing(facts: RanksFacts) -> Finding | None:
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
                return finding("set-epoch-missing", title, at(facts, line), [fix], epochs=len(own))
    return None


@rule(
    code="distributed/no-sync-missing",
    title="Gradients are exchanged for each part of an accumulated batch.",
    symptom="Accumulation makes nothing faster, though the optimizer steps more rarely.",
    cause="DistributedDataParallel reduces in every backward, and only the sum of the last one is needed.",
    confirm="Backwards and optimizer steps, counted.",
    fix="All parts but the last within `with model.no_sync():`, forward included.",
    reference=DDP,
)
def no_sync_missing(facts: RanksFacts) -> Finding | None:
    for log in facts.ranks.values():
        steps = log.events.get("step", ())
        for place in {line for step in steps for line in step["synced"]}:
            numbers = [step["synced"].get(place, 0) for step in steps]
            often = [n for n in numbers if n > 1]
            if place and len(often) > 1 and len(often) * 2 > len(numbers):
                file, _, line = place.rpartition(":")
                title = f"Gradients are reduced {max(often)} times a step, and once would do"
                code = (
                    "with contextlib.nullcontext() if last else model.no_sync():\n    loss = ...\n    loss.backward()"
                )
                fix = Fix("Reduce in the last part alone.", code)
                return finding(
                    "no-sync-missing", title, at(facts, (file, int(line), "")), [fix], reductions_a_step=max(often)
                )
    return None


@rule(
    code="distributed/metric-not-reduced",
    title="A score is that of one rank's share of the rows.",
    symptom="The score jumps with the number of processes, and differs from that of one process on all rows.",
    cause="Each rank evaluates its own share, and one of them prints what it has seen.",
    confirm="Print the score on every rank.",
    fix="Sum what the score is made of over the ranks (hits and rows, not their ratio), then divide.",
    reference=DISTRIBUTED,
)
def metric_not_reduced(facts: RanksFacts) -> Finding | None:
    for one, other in facts.pairs("score"):
        mine, theirs = set(one["digests"]), set(other["digests"])
        prints = one["prints"] or other["prints"]
        if one["reduced"] or other["reduced"] or not mine or not theirs or bool(one["prints"]) == bool(other["prints"]):
            continue
        if len(mine & theirs) > OVERLAP * min(len(mine), len(theirs)):
            continue
        shown = one if one["prints"] else other
        line = next((place for p in prints if (place := paths.score_line(facts, shown["lines"], p)) is not None), None)
        if line is None:
            continue
        title = f"Rank {shown['rank']} shows a score of its own rows: no rank hears of the others'"
        code = "totals = torch.tensor([hits, rows])\ndist.all_reduce(totals)\nscore = totals[0] / totals[1]"
        fix = Fix("Add up over the ranks, then divide.", code)
        return finding("metric-not-reduced", title, at(facts, line), [fix], batches_in_common=len(mine & theirs))
    return None


FATAL = (
    world_size_wrong, env_incomplete, port_in_use, unused_parameters, rank_nonfinite, rank_raised, uneven_steps,
    collective_mismatch, message_missing, rank_killed,
)  # fmt: skip
SILENT = (weights_diverged, shared_file, missing_sampler, set_epoch_missing, no_sync_missing, metric_not_reduced)


def name_cause(facts: RanksFacts) -> Finding | None:
    if facts.fault():
        return None  # a call may be missing in what is compared
    silent = SILENT if facts.over else ()
    return next((cause for check in (*FATAL, *silent) if (cause := check(facts)) is not None), None)


def locates(facts: RanksFacts) -> bool:
    """Whether a rank still looks for the op that has made its loss not finite."""
    return any(
        any(e.get("locates") for e in log.events.get("loss", ())) and not log.events.get("trace")
        for log in facts.ranks.values()
    )


def certain(facts: RanksFacts) -> bool:
    """Whether a verdict that ends the run can be given now. A rank's errors alone are left to torchrun, which ends the
    others by itself, unless these wait."""
    return not facts.fault() and any(check(facts) is not None for check in FATAL)
