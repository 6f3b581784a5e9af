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
from collections.abc import Iterator
from typing import Any

PACKAGES = (
    "torch torchvision torchaudio torchtext numpy pandas scipy scikit-learn matplotlib numba pyarrow h5py "
    "opencv-python opencv-python-headless tensorflow pycocotools xformers triton flash-attn bitsandbytes transformers "
    "tokenizers huggingface-hub datasets accelerate peft trl diffusers safetensors deepspeed lightning "
    "pytorch-lightning timm ipython ipykernel jupyterlab"
).split()
VARIABLES = re.compile(
    r"CUDA_|NCCL_|GLOO_|TORCH_|PYTORCH_|TOKENIZERS_|OMP_|MKL_|HIP_|ROCR_|HSA_|NVIDIA_VISIBLE|TRANSFORMERS_|HF_HOME|HF_HUB_|"
    r"KMP_|OPENBLAS_|XLA_|MASTER_PORT|WORLD_SIZE|RANK|LOCAL_RANK|LD_LIBRARY_PATH|CUBLAS_|HUGGING_FACE_HUB_TOKEN"
)
FSDP = {
    "fully_shard (torch.distributed.fsdp)": "distributed/fsdp/_fully_shard",
    "fully_shard (torch.distributed._composable.fsdp)": "distributed/_composable/fsdp/fully_shard.py",
    "FullyShardedDataParallel": "distributed/fsdp/fully_sharded_data_parallel.py",
}
"""The interfaces of FSDP, of its second version and of its first, and torch's file of each."""
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)


def machine_facts() -> dict[str, Any]:
    """What `check_environment(facts=…)` takes, of this machine. What can't be found out is left out."""
    facts: dict[str, Any] = {
        "platform": sys.platform,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": dict(_packages()),
        "env": dict(_variables()),
    }
    with contextlib.suppress(OSError, ValueError, AttributeError):
        facts["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, AttributeError):
        facts["interfaces"] = [name for _, name in socket.if_nameindex()]
    with contextlib.suppress(OSError):
        facts["shm"] = {"size": shutil.disk_usage("/dev/shm").total}
    build = _torch()
    if build:
        facts["torch"] = build
    facts["gpus"], facts["driver"] = _nvidia()
    with contextlib.suppress(OSError):
        facts["disk"] = {
            "here": shutil.disk_usage(".").free,
            "temporary": shutil.disk_usage(tempfile.gettempdir()).free,
        }
    return facts


def _packages() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _variables() -> Iterator[tuple[str, str]]:
    home = str(pathlib.Path.home())
    for name, value in sorted(os.environ.items()):
        if VARIABLES.match(name):
            yield name, "(set)" if SECRET.search(name) else value.replace(home, "~")


def _torch() -> dict[str, Any]:
    """Of torch's own version file; its architectures where it is loaded."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return {}
    build: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        text = (pathlib.Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
        for key, name in (("version", "__version__"), ("cuda", "cuda"), ("hip", "hip")):
            match = re.search(rf"^{name}\b[^=\n]*= *(?:'([^']*)'|\"([^\"]*)\"|None)", text, re.MULTILINE)
            if match:
                build[key] = match[1] or match[2]
        there = [name for name, path in FSDP.items() if (pathlib.Path(spec.origin).parent / path).exists()]
        build["fsdp"] = [name for name in there if "_composable" not in name or name == there[0]]
    torch = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # where the newer switches by backend were set
            build["float32 products"] = torch.get_float32_matmul_precision()
        arches = torch.cuda.get_arch_list()
        build |= {"arch_list": arches} if arches else {}
        build["mps"] = bool(torch.backends.mps.is_built())
        build["cudnn"] = torch.backends.cudnn.version()
        build["deterministic"] = {
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "cuDNN deterministic": torch.backends.cudnn.deterministic,
            "cuDNN benchmark": torch.backends.cudnn.benchmark,
            "TF32 in products": torch.backends.cuda.matmul.allow_tf32,
        }
        kernels = ("flash", "mem_efficient", "cudnn", "math")
        on = {kernel: getattr(torch.backends.cuda, f"{kernel}_sdp_enabled", None) for kernel in kernels}
        build["attention"] = [kernel for kernel, enabled in on.items() if enabled is not None and enabled()]
        if torch.cuda.is_initialized():  # no context is made to find out
            build["nccl"] = (
                ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
            )
            build["bf16"] = torch.cuda.is_bf16_supported()
    return build


def _nvidia() -> tuple[list[dict[str, Any]], dict[str, str | None] | None]:
    """(the cards, the driver) that nvidia-smi shows."""
    query = ["--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits"]
    rows = [row.split(", ") for row in _output("nvidia-smi", *query).splitlines() if row.count(", ") >= 3]
    cards: list[dict[str, Any]] = []
    for *name, capability, memory, _ in rows:
        numbers = [int(part) for part in re.findall(r"\d+", capability)]
        cards.append(
            {
                "name": ", ".join(name),
                "capability": numbers,
                "memory": int(float(memory)) * 2**20 if memory.isdecimal() else None,
            }
        )
    if not rows:
        return cards, None
    served = re.search(r"CUDA Version: *([\d.]+)", _output("nvidia-smi"))
    return cards, {"version": rows[0][-1].strip(), "cuda": served[1] if served else None}


def _output(*command: str) -> str:
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def shell_python() -> str | None:
    """The interpreter that `python` starts in a shell, where it is another installation than this one."""
    path = shutil.which("python") or shutil.which("python3")
    if path is None or pathlib.Path(path).parent == pathlib.Path(sys.executable).parent:
        return None
    return path.replace(str(pathlib.Path.home()), "~")
