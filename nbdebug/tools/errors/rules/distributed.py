"""What a failure between processes shows: which promise of the collective library was not kept, and by what."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.tools.errors.facts import Raised


@dataclasses.dataclass(frozen=True)
class Collective:
    """what: one of looks.nccl.KINDS. found: what the message itself says (rank, port, operation, seconds, …).

    present, missing: the environment variables that a launcher sets; backend: of the process group, "" where there is
    none; rank, world: as they were set. cards: how many GPUs this process sees. version: NCCL's. unused: parameters of
    the wrapped model that got no gradient; model: its name. tensors: those of the user's line, each "name on device".
    """

    raised: Raised
    what: str
    found: tuple[tuple[str, str], ...] = ()
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

    def value(self, key: str) -> str:
        return dict(self.found).get(key, "")


LOG = Fix(
    "Let the library say what it met, and run again.", "NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ..."
)
RUN = "torchrun --nproc-per-node={count} train.py"


@rule(
    code="error/nccl",
    title="The processes of a distributed training could not work together.",
    symptom="NCCL error …, unhandled system error, invalid usage; Watchdog caught collective operation timeout; "
    "Expected "
    "to have finished reduction; Default process group has not been initialized; Address already in use.",
    cause="Two processes took the same GPU, one of them ended or went another way than the others, the launcher's "
    "variables are not set, or a part of the model got no gradient and the others wait for it.",
    confirm="`NCCL_DEBUG=INFO` prints what NCCL met; `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares the collectives of all "
    "ranks. The first rank that failed says why; the others say that they lost it.",
    fix="`torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` before anything on the GPU; start with torchrun; the "
    "same "
    "number of steps and the same branches on every rank; `find_unused_parameters=True` for parts that sit out.",
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
        return f"Rank {value('rank')} and rank {value('other')} both use the same GPU; NCCL wants one for each process."
    if facts.what == "unused parameters":
        parts = ", ".join(f"`{name}`" for name in facts.unused[:3])
        more = f" and {len(facts.unused) - 3} more" if len(facts.unused) > 3 else ""
        which = f": {parts}{more}" if parts else ""
        return (
            f"Parameters of `{facts.model or 'the model'}` got no gradient in the last step, and "
            f"DistributedDataParallel waits for them{which}."
        )
    if facts.what == "environment":
        return f"The variable `{value('variable')}` is not set: the program was not started by torchrun."
    if facts.what == "port in use":
        port = f" {value('port')}" if value("port") else ""
        return f"The port{port} on which the processes meet is taken, as a rule by an earlier run that still lives."
    if facts.what == "other models":
        if value("parameter"):
            return (
                f"The model differs from rank to rank: parameter {value('parameter')} has sizes {value('sizes')} "
                f"here "
                "and others on rank 0."
            )
        return (
            f"The model differs from rank to rank: rank {value('rank')} has {value('mine')} parameters, rank "
            f"{value('other')} has {value('theirs')}."
        )
    if facts.what == "joined":
        return f"Only {value('there')} of {value('all')} processes came to the meeting point; the others never started."
    if facts.what == "timeout":
        return _timeout(facts)
    if facts.what == "cpu tensor":
        tensors = f" ({', '.join(facts.tensors)})" if facts.tensors else ""
        return (
            f"The group's backend has nothing for tensors on {value('device') or 'the CPU'}{tensors}: NCCL is for GPUs."
        )
    return SENTENCES[facts.what]


SENTENCES = {
    "marked twice": "DistributedDataParallel got a gradient twice in one backward: a parameter is used by two "
    "forwards, "
    "or a checkpointed block (reentrant) is run again.",
    "no group": "A collective was called before `init_process_group`.",
    "twice": "`init_process_group` was called a second time in this process: a cell was run again.",
    "not built": "This build of torch has no NCCL: it is for the CPU, or for another system.",
    "no gpu": "NCCL was asked for, and this process sees no GPU.",
    "mismatch": "The ranks called different collectives: they went different ways through the code.",
    "refused": "The process could not reach the one at MASTER_ADDR and MASTER_PORT: it has not started, or has ended.",
    "closed": "Another process ended, and this one lost its connection: the first failure is on another rank.",
    "usage": "NCCL was called in a way that it does not take: as a rule two ranks on one GPU, or tensors that differ.",
    "system": "NCCL met an error of the system: network, shared memory, or a process that has ended.",
    "cuda": "NCCL met an error of CUDA's: as a rule an earlier failure on this GPU, or no memory left.",
    "internal": "NCCL failed inside, most often because another rank had failed first.",
}
"""The sentence for what needs no number."""


def _timeout(facts: Collective) -> str:
    operation = facts.value("operation").lower() or facts.value("what")
    limit = facts.value("limit") or facts.value("waited")
    after = f" within {int(limit) / 1000:g} s" if limit else ""
    return (
        f"Not every rank came to the same {f'`{operation}`' if operation else 'collective'}{after}: one of them "
        f"had "
        "ended, had fewer steps, or went another way."
    )


def _evidence(facts: Collective) -> dict[str, Any]:
    evidence = {
        **{f"said: {key}": value for key, value in facts.found},
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


# -- what to do ----------------------------------------------------------------------------------------------------


def _fixes(facts: Collective) -> list[Fix]:
    count = max(1, facts.cards)
    if facts.what in ("duplicate gpu", "usage"):
        return [
            Fix(
                "Give each process its own GPU before anything is put on one.",
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
            ),
            LOG,
        ]
    if facts.what == "unused parameters":
        name = facts.model or "model"
        return [
            Fix(
                "Freeze what takes no part, or use it in the loss.",
                "\n".join(f"{name}.module.{part}.requires_grad_(False)" for part in facts.unused[:5])
                or f"{name}.module.unused.requires_grad_(False)",
            ),
            Fix(
                "Or let DDP look for such parts in each step (a little slower).",
                f"{name} = DistributedDataParallel({name}.module, find_unused_parameters=True)",
            ),
        ]
    if facts.what in ("environment", "joined"):
        return [
            Fix("Start it with torchrun, which sets them all.", RUN.format(count=count)),
            Fix(
                "In a notebook, with a single process: set them first.",
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
            Fix("With GPUs: put the tensor on this process's own.", f"{moved} = {moved}.to(f'cuda:{{local_rank}}')"),
        ]
    return [
        *SIMPLE.get(
            facts.what,
            (
                Fix(
                    "Look for the first error among the ranks: it is the cause of the others.",
                    "torchrun --log-dir=logs --redirects=3 ... train.py",
                ),
            ),
        ),
        LOG,
    ]


SIMPLE: dict[str, tuple[Fix, ...]] = {
    "no group": (
        Fix("Start the group first.", "torch.distributed.init_process_group('nccl')   # or 'gloo' on the CPU"),
    ),
    "twice": (
        Fix(
            "Start it once.",
            "if not torch.distributed.is_initialized():\n    torch.distributed.init_process_group('nccl')",
        ),
    ),
    "marked twice": (
        Fix(
            "Checkpoint without re-entering autograd, and one backward for each forward.",
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
            "Give every rank the same number of steps.",
            "DataLoader(dataset, sampler=DistributedSampler(dataset, drop_last=True), drop_last=True)",
        ),
        Fix(
            "Where one rank is merely slow (it writes a checkpoint, say): wait longer.",
            "torch.distributed.init_process_group('nccl', timeout=datetime.timedelta(minutes=60))",
        ),
    ),
    "mismatch": (
        Fix(
            "Call collectives on all ranks or on none.",
            "if rank == 0:\n    save(model)\ntorch.distributed.barrier()   # outside of the if",
        ),
    ),
    "system": (
        Fix(
            "Name the network interface; in a container, give more shared memory.",
            "NCCL_SOCKET_IFNAME=eth0 torchrun ...   # docker run --shm-size=8g",
        ),
    ),
}
"""Fixes that need no name of the user's."""
