"""Which versions go together, and what else is looked up: tables alone, each with the source to check it by. What is
not in a table is not known.

The tables of torchvision, torchaudio, triton, tokenizers, the drivers and the newest of xformers were compared with
their pages in 2026-11; those of torchtext, NumPy, the older xformers and the renamed variables were written down in
2025-11 without looking them up.
"""

from __future__ import annotations

from collections.abc import Mapping

Version = tuple[int, ...]
DATE = "2025-11"
"""The month up to which the tables know releases."""
PARTNERS: Mapping[str, Mapping[str, str]] = {
    "torchvision": {f"1.{k}": f"0.{k + 1}" for k in range(4, 14)} | {f"2.{k}": f"0.{k + 15}" for k in range(14)},
    "torchaudio": {f"1.{k}": f"0.{k}" for k in range(8, 14)} | {f"2.{k}": f"2.{k}" for k in range(11)},
    "triton": {"2.1": "2.1", "2.3": "2.3", "2.6": "3.2", "2.7": "3.3", "2.8": "3.4", "2.9": "3.5"}
    | {"2.11": "3.6", "2.12": "3.7"},
}
"""torch: the release that goes with it. torchvision's page on PyPI; torchaudio's 2.11 goes with all later torches
(https://docs.pytorch.org/audio/2.11.0/installation.html, both looked up in 2026-11). triton is torch's own requirement
on Linux, looked up in 2026-11: https://github.com/pytorch/builder/pull/1533 (2.1),
https://github.com/pytorch/pytorch/pull/127290 (2.3), the metadata of torch 2.6.0 on PyPI, the lists of vLLM 0.10 in
spack/spack-packages (2.7), .ci/docker/triton_version.txt of pytorch (2.8), pinned pairs in public projects (2.9),
https://github.com/NixOS/nixpkgs/pull/519925 (2.11, 2.12). No source was found for 2.2, 2.4, 2.5, 2.10 and 2.13."""
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
RANGES: tuple[tuple[Version, Version, str, Version, Version], ...] = (
    ((4, 24), (4, 34), "tokenizers", (0, 11, 1), (0, 14)),
    ((4, 35), (4, 40), "tokenizers", (0, 14), (0, 19)),
    ((4, 40), (4, 45), "tokenizers", (0, 19), (0, 20)),
    ((4, 45), (4, 47), "tokenizers", (0, 20), (0, 21)),
    ((4, 47), (4, 56), "tokenizers", (0, 21), (0, 22)),
    ((4, 56), (5, 1), "tokenizers", (0, 22), (0, 23, 1)),
    ((4, 20), (5,), "huggingface-hub", (0,), (1,)),
)
"""(transformers from, and below; what it needs, from, and below); looked up in 2026-11 in the metadata of transformers
4.55.4, 4.56.2 and 5.0.0 on PyPI and, for the others, in py_transformers/package.py of spack/spack-packages."""
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
UNSEEDED = 67280421310721
"""torch.initial_seed() where no seed was set (default_rng_seed_val of ATen/core/Generator.h)."""
SINCE: Mapping[str, Version] = {"bfloat16": (8, 0), "bf16": (8, 0), "float8": (8, 9), "fp8": (8, 9)}
"""The first compute capability with the type's own instructions
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications)."""


TF32 = (8, 0)
"""The first compute capability whose products of float32 matrices can use TF32, 10 bits of mantissa
(https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere)."""
MPS_AUTOCAST = {"float16": (2, 5), "bfloat16": (2, 6)}
"""The first torch whose autocast has the type on MPS: https://github.com/pytorch/pytorch/pull/99272 and
https://github.com/pytorch/pytorch/pull/139390 (macOS 14); accelerate asks for the same versions."""
LITTLE_DISK = 2 * 2**30
"""Bytes: a checkpoint of a small language model, with its optimizer's state, is as large."""
DOCKER_SHM = 64 * 2**20
"""Bytes of /dev/shm that Docker gives a container by default."""
PACKAGES = (
    "torch torchvision torchaudio torchtext numpy pandas scipy scikit-learn matplotlib numba pyarrow h5py "
    "opencv-python opencv-python-headless tensorflow pycocotools xformers triton flash-attn bitsandbytes transformers "
    "tokenizers huggingface-hub datasets accelerate peft trl diffusers safetensors deepspeed lightning "
    "pytorch-lightning timm ipython ipykernel jupyterlab"
).split()
VARIABLES = (
    r"CUDA_|NCCL_|GLOO_|TORCH_|PYTORCH_|TOKENIZERS_|OMP_|MKL_|HIP_|ROCR_|HSA_|NVIDIA_VISIBLE|TRANSFORMERS_|HF_HOME|HF_HUB_|"
    r"KMP_|OPENBLAS_|XLA_|MASTER_PORT|WORLD_SIZE|RANK|LOCAL_RANK|LD_LIBRARY_PATH|CUBLAS_|PYTHONHASHSEED|HUGGING_FACE_HUB_TOKEN"
)
FSDP = {
    "fully_shard (torch.distributed.fsdp)": "distributed/fsdp/_fully_shard",
    "fully_shard (torch.distributed._composable.fsdp)": "distributed/_composable/fsdp/fully_shard.py",
    "FullyShardedDataParallel": "distributed/fsdp/fully_sharded_data_parallel.py",
}
"""The interfaces of FSDP, of its second version and of its first, and torch's file of each."""
REWRITES = (
    (r"torch\.cuda\.amp\.autocast", "torch.amp.autocast('cuda')"),
    (r"torch\.cuda\.amp\.GradScaler", "torch.amp.GradScaler('cuda')"),
    (r"torch\.cpu\.amp\.autocast", "torch.amp.autocast('cpu')"),
    (r"pin_memory. argument is set as true", "DataLoader(…, pin_memory=torch.cuda.is_available())"),
    (r"lr_scheduler\.step\(\). before", "optimizer.step() first, then scheduler.step()"),
    (r"CUDA initialization|driver on your system is too old", "a newer driver, or torch built for an older CUDA"),
    (r"is not compatible with the current PyTorch installation", "a torch that has kernels for the card"),
    (r"use_reentrant parameter should be passed", "checkpoint(…, use_reentrant=False)"),
    (r"weights_only=False", "torch.load(path, weights_only=True)"),
    (r"`tokenizer` is deprecated", "Trainer(…, processing_class=tokenizer)"),
)
"""(words of a warning, what to write instead), as torch 2.13 and transformers 5 have them."""
BUILD: tuple[tuple[str, str], ...] = (
    ("fsdp", "FSDP"),
    ("deterministic", "switches"),
    ("attention", "attention kernels allowed"),
    ("bf16", "bfloat16 on the card"),
    ("seed", "torch's seed"),
)
"""(what the facts say of torch, its name in the report)."""
