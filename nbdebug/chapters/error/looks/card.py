"""No card, a driver that is too old, a torch without CUDA or without kernels for this card."""

from __future__ import annotations

import ast
import os
import re

import torch

from nbdebug.chapters.error.facts_cuda import Card, CardFacts
from nbdebug.chapters.error.operands import expression
from nbdebug.chapters.error.scene import Scene
from nbdebug.chapters.error.syntax import called

WORDED: tuple[tuple[str, str], ...] = (
    ("load", r"Attempting to deserialize object on (?:a CUDA device|CUDA device)"),
    (
        "not built",
        r"Torch not compiled with CUDA enabled|PyTorch is not linked with support for cuda|"
        r"no CUDA-capable build|not compiled with CUDA support",
    ),
    ("no driver", r"Found no NVIDIA driver"),
    ("old driver", r"driver (?:on your system )?is too old|driver version is insufficient"),
    ("no kernel", r"no kernel image is available|is not compatible with the current PyTorch installation"),
    ("not there", r"invalid device ordinal|device(?:=\d+)?, num_gpus=|Invalid device id"),
    ("none", r"No CUDA GPUs are available|no CUDA-capable device is detected|CUDA unknown error"),
)


def look(scene: Scene) -> CardFacts | None:
    """The facts of an error about the card itself; None of any other."""
    kind = next((kind for kind, pattern in WORDED if re.search(pattern, scene.message)), None)
    if kind is None:
        return None
    numbers = re.findall(r"CUDA device (\d+)", scene.message) if kind == "load" else []
    wanted = expression(scene.users[0]) if scene.users else None
    asked = re.findall(r"cuda:(\d+)", ast.unparse(wanted)) if wanted is not None else []
    number = int(numbers[0]) if numbers else int(asked[0]) if asked else None
    text = ast.unparse(wanted) if isinstance(wanted, ast.expr) else ""
    text = text if len(text) <= 60 else f"{called(wanted)}(…)" if isinstance(wanted, ast.Call) else ""
    return CardFacts(scene.raised(), kind, card(), text, number, "CUDA_VISIBLE_DEVICES" in os.environ)


def card() -> Card:
    """What this torch is built for, and the first card, where one answers."""
    plain = Card(torch.__version__, torch.version.cuda or "")
    try:
        if not torch.cuda.is_available():
            return plain
        count = torch.cuda.device_count()
        major, minor = torch.cuda.get_device_capability(0)
        known = Card(
            plain.torch,
            plain.built,
            True,
            count,
            torch.cuda.get_device_name(0),
            f"sm_{major}{minor}",
            tuple(torch.cuda.get_arch_list()),
        )
    except Exception:  # a driver that answers no more: what this torch is still counts
        return plain
    try:
        free, total = torch.cuda.mem_get_info()
    except Exception:  # after a failed kernel the card says nothing
        return known
    return Card(known.torch, known.built, True, count, known.name, known.capability, known.kernels, free, total)
