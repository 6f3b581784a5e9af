"""The facts of this machine, with the standard library alone: `python -m nbdebug facts` needs no torch.

No name of a person, a host or a token is among them: variables are taken by their beginnings, and paths lose the home.
"""

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
from typing import Any

from nbdebug.tools.environment.facts import version
from nbdebug.tools.environment.tables import FSDP, PACKAGES, UNSEEDED, VARIABLES

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
