"""The causes of failures between processes: which requirement of NCCL, gloo or DDP is not met."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Edit, Finding, Fix
from nbdebug.text import listed
from nbdebug.tools.errors.facts import Raised


@dataclasses.dataclass(frozen=True)
class Collective:
    """what: one of KINDS in kinds/distributed.py. values: those in the message (rank, port, operation, seconds, …).

    present, missing: the environment variables that a launcher sets; backend: of the process group, "" without one;
    rank, world: as they were set. cards: the number of GPUs that this process sees. version: NCCL's. unused: parameters
    of the wrapped model that got no gradient; model: its name. tensors: those of the user's line, each "name on
    device". edit: the failing line behind one that makes a group of this process; runs: whether the call then runs."""

    raised: Raised
    what: str
    values: tuple[tuple[str, str], ...] = ()
    present: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    backend: str = ""
    rank: str = ""
    world: str = ""
    cards: int = 0
    version: str = ""
    unused: tuple[str, ...] = ()
    model: str = ""
    tensors: tuple[str, ...] = ()
    edit: Edit | None = None
    runs: bool | None = None

    def value(self, key: str) -> str:
        return dict(self.values).get(key, "")


LOG = Fix("Turn on the library's log, and run again.", "NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ...")
RUN = "torchrun --nproc-per-node={count} train.py"


@rule(
    code="error/nccl",
    title="The processes of a distributed training failed to communicate.",
    symptom="NCCL error …, unhandled system error, invalid usage; Watchdog caught collective operation timeout; "
    "Expected to have finished reduction; Default process group has not been initialized; Address already in use.",
    cause="Two processes use the same GPU, one of them ended or took another branch than the others, the launcher's "
    "variables are not set, or a part of the model got no gradient, for which the other ranks wait.",
    confirm="`NCCL_DEBUG=INFO` prints the log of NCCL; `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares the collectives of "
    "all ranks. The first rank that failed shows the cause; the others only lost the connection to it.",
    fix="`torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` before anything on the GPU; start with torchrun; run "
    "the same number of steps and the same branches on all ranks; set `find_unused_parameters=True` where parts of the "
    "model are not used.",
    reference="https://docs.pytorch.org/docs/stable/distributed.html",
)
def nccl(facts: Any) -> Finding | None:
    if not isinstance(facts, Collective):
        return None
    where = dataclasses.replace(facts.raised.where, rank=int(facts.rank) if facts.rank.isdigit() else None)
    return Finding("error/nccl", _title(facts), where, _evidence(facts), tuple(_fixes(facts)))


def _title(facts: Collective) -> str:
    value = facts.value
    if facts.what == "duplicate gpu":
        return f"Rank {value('rank')} and rank {value('other')} use the same GPU; NCCL needs one for each process."
    if facts.what == "unused parameters":
        which = f": {listed(facts.unused)}" if facts.unused else ""
        return (
            f"Parameters of `{facts.model or 'the model'}` got no gradient in the last step, and "
            f"DistributedDataParallel waits for them{which}."
        )
    if facts.what == "environment":
        return f"The variable `{value('variable')}` is not set: the program was not started by torchrun."
    if facts.what == "port in use":
        port = f" {value('port')}" if value("port") else ""
        return f"The port{port} of the process group is in use, usually by an earlier run that has not ended."
    if facts.what == "other models":
        if value("parameter"):
            return (
                f"The model differs between ranks: parameter {value('parameter')} has sizes {value('sizes')} here, but "
                "not on rank 0."
            )
        return (
            f"The model differs between ranks: rank {value('rank')} has {value('mine')} parameters, but rank "
            f"{value('other')} has {value('theirs')}."
        )
    if facts.what == "joined":
        return f"Only {value('there')} of {value('all')} processes joined the group; the others did not start."
    if facts.what == "timeout":
        return _timeout(facts)
    if facts.what == "cpu tensor":
        tensors = f" ({', '.join(facts.tensors)})" if facts.tensors else ""
        device = value("device") or "the CPU"
        return f"The group's backend does not support tensors on {device}{tensors}: NCCL is for GPUs."
    return SENTENCES[facts.what]


SENTENCES = {
    "marked twice": "DistributedDataParallel got a gradient twice in one backward: a parameter is used by two "
    "forwards, or a reentrant checkpoint runs a block again.",
    "no group": "A collective was called before `init_process_group`.",
    "twice": "`init_process_group` was called a second time in this process: a cell was run again.",
    "not built": "This build of torch has no NCCL: it is a CPU build, or for another system.",
    "no gpu": "The backend is NCCL, but this process sees no GPU.",
    "mismatch": "The ranks called different collectives: they ran different branches of the code.",
    "refused": "The process at MASTER_ADDR and MASTER_PORT can't be reached: it has not started, or has ended.",
    "closed": "Another process ended, and this one lost its connection: the first failure is on another rank.",
    "usage": "NCCL was used incorrectly: usually two ranks use one GPU, or their tensors differ.",
    "system": "NCCL got a system error: network, shared memory, or a process that has ended.",
    "cuda": "NCCL got a CUDA error: usually an earlier failure on this GPU, or no free memory.",
    "internal": "NCCL failed internally, most often because another rank failed first.",
}
"""The titles without numbers."""


def _timeout(facts: Collective) -> str:
    operation = facts.value("operation").lower() or facts.value("what")
    limit = facts.value("limit") or facts.value("waited")
    after = f" within {int(limit) / 1000:g} s" if limit else ""
    return (
        f"Not every rank called the same {f'`{operation}`' if operation else 'collective'}{after}: one of them has "
        "ended, has fewer steps, or took another branch."
    )


def _evidence(facts: Collective) -> dict[str, Any]:
    evidence = {
        **{f"message: {key}": value for key, value in facts.values},
        "backend": facts.backend,
        "this rank": facts.rank,
        "processes": facts.world,
        "GPUs that this process sees": facts.cards,
        "NCCL": facts.version,
        "set": ", ".join(facts.present),
        "not set": ", ".join(facts.missing),
        "parameters without a gradient": ", ".join(facts.unused),
        "tensors": ", ".join(facts.tensors),
    }
    return {key: value for key, value in evidence.items() if value != ""}


# -- fixes -------------------------------------------------------------------------------------------------------


def _fixes(facts: Collective) -> list[Fix]:
    count = max(1, facts.cards)
    if facts.what in ("duplicate gpu", "usage"):
        return [
            Fix(
                "Select a GPU for each process before its first use of CUDA.",
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
            ),
            LOG,
        ]
    if facts.what == "no group":
        return _without_group(facts)
    if facts.what == "unused parameters":
        name = facts.model or "model"
        return [
            Fix(
                "Freeze the unused parameters, or use them in the loss.",
                "\n".join(f"{name}.module.{part}.requires_grad_(False)" for part in facts.unused[:5])
                or f"{name}.module.unused.requires_grad_(False)",
            ),
            Fix(
                "Or let DDP find unused parameters in each step (a little slower).",
                f"{name} = DistributedDataParallel({name}.module, find_unused_parameters=True)",
            ),
        ]
    if facts.what in ("environment", "joined"):
        return [
            Fix("Start it with torchrun, which sets all of these variables.", RUN.format(count=count)),
            Fix(
                "In a notebook, with a single process: set the variables first.",
                "os.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_ADDR='127.0.0.1', "
                "MASTER_PORT='29501')",
            ),
        ]
    if facts.what == "port in use":
        return [
            Fix(
                "Let torchrun find a free port.",
                f"torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nproc-per-node={count} train.py",
            ),
            Fix("Or end the earlier run.", "pgrep -af torchrun   # then: kill PID"),
        ]
    if facts.what in ("no gpu", "not built", "cpu tensor"):
        moved = facts.tensors[0].partition(" on ")[0] if facts.tensors else "x"
        return [
            Fix("On the CPU: use gloo.", "torch.distributed.init_process_group('gloo')"),
            Fix(
                "With GPUs: move the tensor to the GPU of this process.",
                f"{moved} = {moved}.to(f'cuda:{{local_rank}}')",
            ),
        ]
    return [
        *SIMPLE.get(
            facts.what,
            (
                Fix(
                    "Find the first error among the ranks: it is the cause of the others.",
                    "torchrun --log-dir=logs --redirects=3 ... train.py",
                ),
            ),
        ),
        LOG,
    ]


def _without_group(facts: Collective) -> list[Fix]:
    """By a launcher's variables where there are any; else a group of this process alone."""
    launched = Fix(
        "Initialize the group first, in a run that torchrun has started.",
        f"torch.distributed.init_process_group({'nccl' if facts.cards else 'gloo'!r})   # "
        + RUN.format(count=max(1, facts.cards)),
    )
    alone = "In one process: make a group of it alone."
    if facts.rank:
        return [launched]
    if facts.edit is not None:
        return [
            Fix.of(
                alone, facts.edit, facts.runs, {"the call then runs, in a group of": "1 process"} if facts.runs else {}
            )
        ]
    code = "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
    return [Fix(alone, code), launched]


SIMPLE: dict[str, tuple[Fix, ...]] = {
    "twice": (
        Fix(
            "Initialize it once.",
            "if not torch.distributed.is_initialized():\n    torch.distributed.init_process_group('nccl')",
        ),
    ),
    "marked twice": (
        Fix(
            "Use the non-reentrant checkpoint, and call backward once for each forward.",
            "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        ),
    ),
    "other models": (
        Fix(
            "Build the same model on every rank: the same configuration and vocabulary.",
            "print(rank, sum(p.numel() for p in model.parameters()))",
        ),
    ),
    "timeout": (
        Fix(
            "Run the same number of steps on all ranks.",
            "DataLoader(dataset, sampler=DistributedSampler(dataset, drop_last=True), drop_last=True)",
        ),
        Fix(
            "If one rank is only slow (for example, it writes a checkpoint): wait longer.",
            "torch.distributed.init_process_group('nccl', timeout=datetime.timedelta(minutes=60))",
        ),
    ),
    "mismatch": (
        Fix(
            "Call collectives on all ranks or on none.",
            "if rank == 0:\n    save(model)\ntorch.distributed.barrier()   # outside the if",
        ),
    ),
    "system": (
        Fix(
            "Set the network interface; in a container, increase the shared memory.",
            "NCCL_SOCKET_IFNAME=eth0 torchrun ...   # docker run --shm-size=8g",
        ),
    ),
}
"""Fixes without names of the user's."""
