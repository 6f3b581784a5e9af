"""check_environment(): whether this machine, or another one, can do what a run asks of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nbdebug.report import Report, RuledOut, Table
from nbdebug.text import clip, count, listed, size
from nbdebug.tools.environment import rules
from nbdebug.tools.environment.rules import (
    FSDP,
    ORDER,
    PACKAGES,
    UNSEEDED,
    VARIABLES,
    EnvironmentFacts,
    dotted,
    version,
)


def check_environment(*, requirements: Any = None, facts: Mapping[str, Any] | None = None) -> Report:
    """Find what in this machine, its packages and its variables will stop a run, or slow it down.

    requirements: a requirements file, or a list of its lines, to be compared with what is installed here. facts:
    another machine's, as `python -m nbdebug facts` writes them there; also with a key `run`, what is asked for:
    `device`, `dtype`, `num_workers`, `prefetch_factor`, `batch_bytes`, `start_method`, `pin_memory`,
    `tokenizer_used_before_workers`, `backend`, `nodes`, `world_size`. Sizes are in bytes. A key that is not there is
    not known, or was not asked for.

    The tables of versions have a date, and are silent on what is newer. The report's table is a text for a bug report,
    without names of people, hosts or tokens. Raises TypeError where facts has another form, OSError where the file of
    requirements can't be opened.
    """
    own = facts is None
    raw = machine_facts() if facts is None else facts
    if not isinstance(raw, Mapping):
        raise TypeError(f"facts takes a dict as `python -m nbdebug facts` writes it; got {type(raw).__name__}.")
    unchecked: list[str] = []
    if isinstance(requirements, (str, pathlib.PurePath)):
        requirements = pathlib.Path(requirements).read_text(encoding="utf-8").splitlines()
    known = EnvironmentFacts.of(raw, tuple(_unmet(map(str, requirements or ()), unchecked)))
    findings = tuple(found for found in (check(known) for check in ORDER) if found is not None)
    compared = f"{count(len(known.packages), 'package')} compared, tables of {rules.DATE}"
    machine = Table("The machine", ("what", "value"), list(_rows(raw, known)))
    raised = Table("Warnings of this kernel", ("where", "warning", "write instead"), list(_warnings()) if own else [])
    if not known.run:
        unchecked.append("what your run asks for (workers, number type, backend): give facts with a key run")
    return Report(
        "check_environment()",
        findings,
        () if findings else (RuledOut("versions that don't go together", compared),),
        tuple(unchecked),
        (*(_notes(raw) if own else ()), *_precision(known)),
        "this machine" if own else "the machine of the facts",
        {"machine": dict(raw)},
        headline="" if findings else "No problem was found in this environment.",
        tables=tuple(table for table in (machine, raised) if table.rows),
        independent=True,
    )


def _unmet(lines: Iterable[str], unchecked: list[str]) -> Iterator[tuple[str, str]]:
    """(requirement, what is installed) of each that is not met here."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        unchecked.append("requirements: packaging is not installed (pip install 'torch-nbdebug[config]')")
        return
    texts = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    for text in (text for text in texts if text and not text.startswith("-")):
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            unchecked.append(f"the requirement {text!r}: it is none that can be compared")
            continue
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            have = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            have = ""
        if not have or not wanted.specifier.contains(have, prereleases=True):
            yield f"{wanted.name}{wanted.specifier}", have


def _notes(raw: Mapping[str, Any]) -> Iterator[str]:
    if (other := shell_python()) is not None:
        yield f"`python` in a shell is {other}, another installation than this kernel's: use %pip to install"
    for place, free in (raw.get("disk") or {}).items():
        if free < rules.LITTLE_DISK:
            yield f"{size(free)} of disk are left {'in this folder' if place == 'here' else 'for temporary files'}"
    left = raw.get("leftovers") or {"count": 0}
    if left["count"]:
        what = f"{count(left['count'], 'temporary file')} of processes that have ended"
        yield f"{what} ({size(left['bytes'])}) lie in /dev/shm (torch_*) and the folder of temporary files (pymp-*)"
    yield from _idle()
    shm = (raw.get("shm") or {}).get("size")
    if shm is not None and shm <= rules.DOCKER_SHM:
        yield f"/dev/shm has {size(shm)}: a loader with workers needs more (docker run --shm-size=8g)"


def _precision(known: EnvironmentFacts) -> Iterator[str]:
    """What two switches do here that are often copied from a program for another device."""
    chosen, torch = known.build.get("float32 products"), known.installed("torch")
    call = f"torch.set_float32_matmul_precision({chosen!r})"
    if known.device == "mps" or not known.device and known.build.get("mps") and not known.cards:
        if chosen not in (None, "highest"):
            yield f"{call} changes nothing on MPS: it acts on CUDA cards alone"
        types = [name for name, since in rules.MPS_AUTOCAST.items() if torch >= since]
        which = f"computes in {listed(types, quote='')}" + (", bfloat16 from macOS 14 on" if types[1:] else "")
        if torch:
            yield f"torch.autocast('mps') of torch {known.torch} " + (which if types else "does not exist (2.5 has it)")
    elif known.wants_cuda and known.is_cuda_build and chosen and (cards := [c for c in known.used if c.capability]):
        able = [card.capability >= rules.TF32 for card in cards]
        if chosen == "highest" and all(able):
            high = f"torch.set_float32_matmul_precision('high') lets {cards[0].name} use TF32"
            yield f"Products of float32 matrices are computed in full: {high}, faster, with 10 bits of mantissa"
        elif chosen != "highest" and not any(able):
            yield f"{call} changes nothing on {cards[0].name}: TF32 came with capability {dotted(rules.TF32)}"


def _warnings() -> Iterator[tuple[str, str, str]]:
    """(where, warning, what to write instead) of those that were raised in this kernel and have a rewrite. Python keeps
    each that it shows once."""
    for name, module in list(sys.modules.items()):
        for key in list(getattr(module, "__dict__", {}).get("__warningregistry__") or ()):
            if isinstance(key, tuple) and len(key) == 3:
                text = " ".join(str(key[0]).split())
                rewrite = next((new for pattern, new in rules.REWRITES if re.search(pattern, text)), None)
                if rewrite is not None:
                    yield f"{'a cell' if name == '__main__' else name}, line {key[2]}", clip(text, 160), rewrite


def _idle() -> Iterator[str]:
    """A card that nothing uses, beside models on the processor."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or torch.cuda.is_initialized():
        return
    main = vars(sys.modules["__main__"])
    models = [name for name, thing in list(main.items()) if isinstance(thing, torch.nn.Module)]
    where = {name: next((p.device.type for p in main[name].parameters()), "") for name in models}
    resting = [name for name, device in where.items() if device == "cpu" and not name.startswith("_")]
    if resting:
        verb = "is" if len(resting) == 1 else "are"
        yield f"A card is idle: {listed(resting)} {verb} on the processor ({resting[0]}.to('cuda') moves it)"


def _rows(raw: Mapping[str, Any], known: EnvironmentFacts) -> Iterator[tuple[str, str]]:
    """What a bug report needs."""
    build, driver = known.build, known.driver or {}
    yield "platform", f"Python {raw['python']} on {known.platform}" if raw.get("python") else known.platform or "?"
    parts = [known.torch or "not installed"]
    parts += [f"CUDA {build['cuda'] or 'none'}"] if "cuda" in build else []
    names = (("hip", "ROCm"), ("cudnn", "cuDNN"), ("nccl", "NCCL"))
    yield "torch", ", ".join([*parts, *(f"{name} {build[key]}" for key, name in names if build.get(key))])
    for key, name in rules.BUILD:
        value = build.get(key)
        if isinstance(value, dict):
            value = [f"{switch} {'on' if on else 'off'}" for switch, on in value.items()]
        if isinstance(value, bool):
            value = ("no", "yes")[value]
        if value not in (None, []):
            yield name, ", ".join(value) if isinstance(value, list) else str(value)
    yield "cards", listed([card.name for card in known.cards or ()], 8, "") or "none"
    if driver:
        yield "driver", f"{driver.get('version')}, serves CUDA {driver.get('cuda')}"
    if raw.get("memory"):
        yield "memory", f"{size(raw['memory'])}, {raw.get('cpus')} CPU cores"
    if known.shm is not None:
        yield "/dev/shm", size(known.shm)
    yield from ((name, value) for name, value in sorted(known.packages.items()) if name != "torch")
    yield from sorted(known.env.items())


SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)


def machine_facts() -> dict[str, Any]:
    """What `check_environment(facts=…)` takes, of this machine. What can't be found out is left out."""
    home, temporary, (cards, driver) = str(pathlib.Path.home()), tempfile.gettempdir(), _nvidia()
    variables = sorted((name, value) for name, value in os.environ.items() if re.match(VARIABLES, name))
    facts: dict[str, Any] = {
        "platform": sys.platform,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {},
        "env": {n: "(set)" if SECRET.search(n) else value.replace(home, "~") for n, value in variables},
        "gpus": cards,
        "driver": driver,
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts["packages"][name] = importlib.metadata.version(name)
    for part, ask in (
        ("memory", lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        ("interfaces", lambda: [name for _, name in socket.if_nameindex()]),
        ("shm", lambda: {"size": shutil.disk_usage("/dev/shm").total}),
        ("disk", lambda: {"here": shutil.disk_usage(".").free, "temporary": shutil.disk_usage(temporary).free}),
        ("leftovers", lambda: _leftovers(pathlib.Path("/dev/shm"), pathlib.Path(temporary))),
        ("torch", _torch),
    ):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            facts[part] = ask()
    return facts


def _leftovers(shared: pathlib.Path, temporary: pathlib.Path) -> dict[str, int]:
    """What ended processes have left behind: torch's shared tensors, and multiprocessing's folders of over a day."""
    shared_by = [(path, pathlib.Path("/proc", path.name.split("_")[1])) for path in shared.glob("torch_[0-9]*_*")]
    tensors = [path for path, process in shared_by if not process.exists()]
    folders = [path for path in temporary.glob("pymp-*") if time.time() - path.stat().st_mtime > 86_400]
    return {"count": len(tensors) + len(folders), "bytes": sum(path.stat().st_size for path in tensors)}


def _torch() -> dict[str, Any]:
    """Of torch's own version file; what it can do only where it is loaded, and no context is made to find out. Raises
    OSError where there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        raise FileNotFoundError("torch")
    build: dict[str, Any] = {}
    folder, torch = pathlib.Path(spec.origin).parent, sys.modules.get("torch")
    text = (folder / "version.py").read_text(encoding="utf-8")
    for key, name in (("version", "__version__"), ("cuda", "cuda"), ("hip", "hip")):
        if match := re.search(rf"^{name}\b[^=\n]*= *(?:'([^']*)'|\"([^\"]*)\"|None)", text, re.MULTILINE):
            build[key] = match[1] or match[2]
    there = [name for name, path in FSDP.items() if (folder / path).exists()]
    build["fsdp"] = [name for name in there if "_composable" not in name or name == there[0]]
    if torch is None:
        return build
    if arches := torch.cuda.get_arch_list():
        build["arch_list"] = arches
    cudnn, cuda, kernels = torch.backends.cudnn, torch.backends.cuda, ("flash", "mem_efficient", "cudnn", "math")
    seed = torch.initial_seed()
    build["mps"] = bool(torch.backends.mps.is_built())
    build["seed"] = None if seed == UNSEEDED else seed
    build["deterministic"] = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cuDNN deterministic": cudnn.deterministic,
        "cuDNN benchmark": cudnn.benchmark,
    }
    with contextlib.suppress(RuntimeError):  # torch tells neither where the newer switches by backend were set
        build["float32 products"] = torch.get_float32_matmul_precision()
        build["deterministic"]["TF32 in products"] = cuda.matmul.allow_tf32
    build["attention"] = [kernel for kernel in kernels if getattr(cuda, f"{kernel}_sdp_enabled", bool)()]
    if torch.cuda.is_initialized():  # asking for these makes a context on each card
        build["cudnn"] = cudnn.version()
        nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        build["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None
        build["bf16"] = torch.cuda.is_bf16_supported()
    return build


def _nvidia() -> tuple[list[dict[str, Any]], dict[str, str | None] | None]:
    """(the cards, the driver) that nvidia-smi shows."""
    query = ["--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits"]
    rows = [row.split(", ") for row in _output("nvidia-smi", *query).splitlines() if row.count(", ") >= 3]
    cards: list[dict[str, Any]] = []
    for *name, capability, memory, _ in rows:
        size = int(memory) * 2**20 if memory.isdecimal() else None
        cards.append({"name": ", ".join(name), "capability": [*version(capability)], "memory": size})
    if not rows:
        return cards, None
    served = re.search(r"CUDA (?:UMD )?Version *: *([\d.]+)", _output("nvidia-smi"))
    return cards, {"version": rows[0][-1].strip(), "cuda": served[1] if served else None}


def _output(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return ""


def shell_python() -> str | None:
    """The interpreter that `python` starts in a shell, where it is another installation than this one."""
    path = shutil.which("python") or shutil.which("python3")
    if path is None or pathlib.Path(path).parent == pathlib.Path(sys.executable).parent:
        return None
    return path.replace(str(pathlib.Path.home()), "~")
