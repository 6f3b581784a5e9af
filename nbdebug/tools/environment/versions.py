"""Which versions go together: tables, each with the source to check it by. What is not in a table is not known.

The tables of torchvision, torchaudio, triton, tokenizers, the drivers and the newest of xformers were compared with
their pages in 2026-11; those of torchtext, NumPy, the older xformers and the renamed variables were written down in
2025-11 without looking them up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Version = tuple[int, ...]

DATE = "2025-11"
"""The month up to which the tables know releases."""
TORCHVISION_OFFSET = 15
LAST_2 = {"torchvision": 13, "torchaudio": 10}
"""torch 2.k goes with torchvision 0.(15 + k) and torchaudio 2.k, up to these k (torchvision's page on PyPI and
https://docs.pytorch.org/audio/2.11.0/installation.html, looked up in 2026-11: torchaudio 2.11 goes with all later)."""
BEFORE_2: Mapping[str, Mapping[int, int]] = {
    "torchvision": {4: 5, 5: 6, 6: 7, 7: 8, 8: 9, 9: 10, 10: 11, 11: 12, 12: 13, 13: 14},
    "torchaudio": {8: 8, 9: 9, 10: 10, 11: 11, 12: 12, 13: 13},
}
"""torch 1.k: the same packages' 0.minor."""
BUILT_FOR: Mapping[str, Mapping[str, str]] = {
    "torchtext": {"0.14": "1.13", "0.15": "2.0", "0.16": "2.1", "0.17": "2.2", "0.18": "2.3"},
    "xformers": {
        "0.0.22.post7": "2.1",
        "0.0.23": "2.1",
        "0.0.23.post1": "2.1",
        "0.0.24": "2.2",
        "0.0.25": "2.2",
        "0.0.25.post1": "2.2",
        "0.0.26.post1": "2.3",
        "0.0.27": "2.3",
        "0.0.27.post1": "2.4",
        "0.0.27.post2": "2.4",
        "0.0.28": "2.4",
        "0.0.28.post1": "2.4",
        "0.0.28.post2": "2.5",
        "0.0.28.post3": "2.5",
        "0.0.29": "2.5",
        "0.0.29.post1": "2.5",
        "0.0.29.post2": "2.6",
        "0.0.29.post3": "2.6",
        "0.0.30": "2.7",
        "0.0.31": "2.7",
        "0.0.33.post1": "2.9",
        "0.0.33.post2": "2.9",
    },
}
"""The torch that a release's wheels are built for (its own metadata: https://github.com/pytorch/text#installation,
https://github.com/facebookresearch/xformers/releases)."""
TRITON = {
    "2.1": "2.1",
    "2.3": "2.3",
    "2.6": "3.2",
    "2.7": "3.3",
    "2.8": "3.4",
    "2.9": "3.5",
    "2.11": "3.6",
    "2.12": "3.7",
}
"""torch's own requirement of triton on Linux, looked up in 2026-11: https://github.com/pytorch/builder/pull/1533 (2.1),
https://github.com/pytorch/pytorch/pull/127290 (2.3), the metadata of torch 2.6.0 on PyPI, the lists of vLLM 0.10 in
spack/spack-packages (2.7), .ci/docker/triton_version.txt of pytorch (2.8), pinned pairs in public projects (2.9),
https://github.com/NixOS/nixpkgs/pull/519925 (2.11, 2.12). No source was found for 2.2, 2.4, 2.5, 2.10 and 2.13."""
TOKENIZERS = (
    ((4, 24), (0, 11, 1), (0, 14)),
    ((4, 34), (0, 0), (999,)),
    ((4, 35), (0, 14), (0, 19)),
    ((4, 40), (0, 19), (0, 20)),
    ((4, 45), (0, 20), (0, 21)),
    ((4, 47), (0, 21), (0, 22)),
    ((4, 56), (0, 22), (0, 23, 1)),
    ((5, 1), (0, 0), (999,)),
)
"""From this transformers on: tokenizers from, and below; looked up in 2026-11 in the metadata of transformers 4.55.4,
4.56.2 and 5.0.0 on PyPI and, for the others, in py_transformers/package.py of spack/spack-packages."""
NUMPY_2: Mapping[str, Version] = {
    "torch": (2, 3),
    "pandas": (2, 2, 2),
    "scipy": (1, 13),
    "scikit-learn": (1, 4, 2),
    "matplotlib": (3, 8, 4),
    "numba": (0, 60),
    "pyarrow": (16,),
    "h5py": (3, 11),
    "opencv-python": (4, 10),
    "opencv-python-headless": (4, 10),
    "tensorflow": (2, 18),
    "pycocotools": (2, 0, 8),
}
"""The first release of each whose wheels run with NumPy 2 (https://github.com/numpy/numpy/issues/26191, of which only a
part could be read in 2026-11: that OpenCV had released; the rows were written down in 2025-11)."""
DRIVERS: Mapping[int, tuple[Version, Version]] = {
    11: ((450, 80, 2), (452, 39)),
    12: ((525, 60, 13), (528, 33)),
    13: ((580, 65, 6), (580, 88)),
}
"""The oldest driver of each major CUDA version, on Linux and on Windows
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""
RENAMED: tuple[tuple[str, str, str, Version], ...] = (
    ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "torch", (2, 2)),
    ("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT", "torch", (2, 2)),
    ("NCCL_DESYNC_DEBUG", "TORCH_NCCL_DESYNC_DEBUG", "torch", (2, 2)),
    ("NCCL_ENABLE_TIMING", "TORCH_NCCL_ENABLE_TIMING", "torch", (2, 2)),
    ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "torch", (2, 9)),
    ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "torch", (2, 9)),
    ("TRANSFORMERS_CACHE", "HF_HOME", "transformers", (4, 36)),
    ("PYTORCH_TRANSFORMERS_CACHE", "HF_HOME", "transformers", (4, 36)),
    ("PYTORCH_PRETRAINED_BERT_CACHE", "HF_HOME", "transformers", (4, 36)),
    ("HF_HUB_ENABLE_HF_TRANSFER", "HF_XET_HIGH_PERFORMANCE", "huggingface-hub", (1, 0)),
)
"""(old name, new name, the package that renamed it, since): torch's ProcessGroupNCCL.hpp and its notes on CUDA, the
transformers' hub.py, huggingface_hub/constants.py."""
BFLOAT16, FLOAT8 = (8, 0), (8, 9)
"""The first compute capability with the type's own instructions
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications)."""


TF32 = (8, 0)
"""The first compute capability whose products of float32 matrices can use TF32, 10 bits of mantissa
(https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere)."""
MPS_AUTOCAST = {"float16": (2, 5), "bfloat16": (2, 6)}
"""The first torch whose autocast has the type on MPS: https://github.com/pytorch/pytorch/pull/99272 and
https://github.com/pytorch/pytorch/pull/139390 (macOS 14); accelerate asks for the same versions."""
HALF_ON_CPU = (2, 1)
"""Before this torch, products of float16 matrices were not implemented for the processor (addmm_impl_cpu_)."""


def version(text: object) -> Version:
    """(2, 2, 2) of "2.2.2+cu121"; () of what is none."""
    match = re.match(r"\d+(?:\.\d+)*", str(text or ""))
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def public(text: object) -> str:
    """ "2.2.2" of "2.2.2+cu121"."""
    return str(text).partition("+")[0]


def local(text: object) -> str:
    """ "cu121" of "2.2.2+cu121", "" where there is none."""
    return str(text).partition("+")[2]


def partner(package: str, torch: Version) -> str | None:
    """The release ("0.19") of torchvision or torchaudio that goes with a torch; None where the tables don't know."""
    if len(torch) < 2:
        return None
    major, minor = torch[:2]
    if major == 2 and minor <= LAST_2.get(package, -1):
        return f"0.{TORCHVISION_OFFSET + minor}" if package == "torchvision" else f"2.{minor}"
    known = BEFORE_2.get(package, {}).get(minor) if major == 1 else None
    return f"0.{known}" if known is not None else None


def tokenizers_range(transformers: Version) -> tuple[Version, Version] | None:
    """(from, below) of the tokenizers that a transformers takes; None where the table does not know."""
    known = [row for row in TOKENIZERS if row[0] <= transformers[:2]]
    if not known or known[-1][2] == (999,):
        return None
    return known[-1][1], known[-1][2]


def dotted(numbers: Version) -> str:
    return ".".join(map(str, numbers))
