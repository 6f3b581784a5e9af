"""What is known of a machine, as plain values; tables of which versions go together, each with the source to check it
by; and the rules: what will fail, or run slowly, once a run begins. What is not in a table is not known.

The tables of torchvision, torchaudio, triton, tokenizers, the drivers and the newest of xformers were compared with
their pages in 2026-11; those of torchtext, NumPy, the older xformers and the renamed variables were written down in
2025-11 without looking them up.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nbdebug.registry import declared, rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, listed, size

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


# -- the facts: a part that is None is not known, or was not asked for -------------------------------------------------


def version(text: object) -> Version:
    """(2, 2, 2) of "2.2.2+cu121"; () of what is none."""
    match = re.match(r"\d+(?:\.\d+)*", str(text or ""))
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def dotted(numbers: Version) -> str:
    return ".".join(map(str, numbers))


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU. capability: (8, 6); memory: bytes."""

    name: str
    capability: Version = ()
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class EnvironmentFacts:
    """See `check_environment` for the form of the dict that it is made of. cards: all in the machine; build: torch's;
    driver: empty where none is loaded; pins: (requirement, what is installed) of each that is not met."""

    platform: str = ""
    python: Version = ()
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    build: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cards: tuple[Card, ...] | None = None
    driver: Mapping[str, Any] | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interfaces: tuple[str, ...] | None = None
    shm: int | None = None
    run: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pins: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, facts: Mapping[str, Any], pins: tuple[tuple[str, str], ...] = ()) -> EnvironmentFacts:
        """Raises TypeError where a part has another form."""
        try:
            packages, build, env, run = (dict(facts.get(part) or {}) for part in ("packages", "torch", "env", "run"))
            names = {str(name).lower().replace("_", "-"): str(value) for name, value in packages.items()}
            if build.get("version"):
                names.setdefault("torch", str(build["version"]))
            gpus = facts.get("gpus")
            known = [(str(c["name"]), tuple(map(int, c.get("capability") or ())), c.get("memory")) for c in gpus or ()]
            cards = None if gpus is None else tuple(Card(*card) for card in known)
            driver = dict(facts["driver"] or {}) if "driver" in facts else None
            variables = {str(name): str(value) for name, value in env.items()}
            interfaces = None if facts.get("interfaces") is None else tuple(map(str, facts["interfaces"]))
            system, python = str(facts.get("platform") or ""), version(facts.get("python"))
            shm = (facts.get("shm") or {}).get("size")
            return cls(system, python, names, build, cards, driver, variables, interfaces, shm, run, pins)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            wanted = "facts takes a dict as `python -m nbdebug facts` writes it"
            raise TypeError(f"{wanted}; a part has another form: {error}") from None

    def installed(self, package: str) -> Version:
        return version(self.packages.get(package))

    @property
    def torch(self) -> str:
        return str(self.build.get("version") or self.packages.get("torch") or "")

    @property
    def device(self) -> str:
        """ "cuda", "mps", "cpu", or "" where none was asked for."""
        return str(self.run.get("device") or "").partition(":")[0]

    @property
    def wants_cuda(self) -> bool:
        """Asked for, or nothing asked for on a machine with a card."""
        return self.device == "cuda" or not self.device and bool(self.cards)

    @property
    def is_cuda_build(self) -> bool:
        return bool(self.build.get("cuda")) and not self.build.get("hip")

    @property
    def index(self) -> int:
        """Of "cuda:1"."""
        number = str(self.run.get("device") or "").partition(":")[2]
        return int(number) if number.isdecimal() else 0

    @property
    def hiding(self) -> str | None:
        """The variable that chooses among the cards, where one is set."""
        names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if self.build.get("hip") else ()
        return next((name for name in names or ("CUDA_VISIBLE_DEVICES",) if name in self.env), None)

    @property
    def visible(self) -> tuple[Card, ...]:
        """The cards that torch sees, in its order: the list ends at the first entry that is no card."""
        cards = list(self.cards or ())
        if self.env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            cards.sort(key=lambda card: card.capability, reverse=True)  # CUDA's own order: the fastest first
        if self.hiding is None:
            return tuple(cards)
        chosen: list[Card] = []
        entries = [entry.strip() for entry in self.env[self.hiding].split(",")]
        if len(set(entries)) < len(entries):
            return ()
        for entry in entries:
            if entry.lower().startswith(("gpu-", "mig-")):
                chosen += cards[len(chosen) : len(chosen) + 1]  # by its number of manufacture, which is not known here
            elif entry.isdecimal() and int(entry) < len(cards):
                chosen.append(cards[int(entry)])
            else:
                break
        return tuple(chosen)

    @property
    def processes(self) -> int:
        """Of this machine."""
        world, nodes = self.run.get("world_size") or 1, self.run.get("nodes") or 1
        return max(1, int(world) // max(1, int(nodes)))

    @property
    def used(self) -> tuple[Card, ...]:
        """The visible cards that the run computes on."""
        if self.processes > 1 or not self.device:
            return self.visible[: self.processes] if self.device else self.visible
        return self.visible[self.index : self.index + 1]

    @property
    def start_method(self) -> str:
        """Of the loader's workers: what was asked for, or Python's own way, which forks on Linux until 3.13."""
        forks = self.platform.startswith("linux") and self.python < (3, 14)
        return str(self.run.get("start_method") or ("fork" if forks else "another"))


# -- the rules ---------------------------------------------------------------------------------------------------------


def finding(code: str, title: str, blamed: list[str], *fixes: tuple[str, str], **evidence: Any) -> Finding:
    """fixes: (title, code) of each. `_` in names of evidence is a space."""
    rows = {name.replace("_", " "): value for name, value in evidence.items() if value not in (None, "", (), [])}
    own = tuple(Fix(what, text) for what, text in fixes)
    return Finding(f"environment/{code}", title, evidence={"where": blamed, **rows}, fixes=own)


def installed(facts: EnvironmentFacts, names: list[str]) -> str:
    """ "torchvision 0.20.1+cu124, torch 2.4.0+cu121"."""
    return ", ".join(f"{name} {facts.packages[name]}" for name in dict.fromkeys(names) if name in facts.packages)


def public(text: object) -> str:
    """ "2.2.2" of "2.2.2+cu121"."""
    return str(text).partition("+")[0]


WHEELS = "--index-url https://download.pytorch.org/whl"


@rule(
    code="environment/cpu-only-build",
    title="torch is a build without CUDA, on a machine with a card.",
    symptom="`Torch not compiled with CUDA enabled`, or `torch.cuda.is_available()` is False and the training is slow.",
    cause="The wheel has no CUDA part: Windows gets such by default, and another package may have replaced yours.",
    confirm="`torch.version.cuda` is None; the version may end in +cpu.",
    fix="Install torch again from the index of a CUDA version that the driver serves.",
    reference="https://pytorch.org/get-started/locally/",
)
def cpu_only_build(facts: EnvironmentFacts) -> Finding | None:
    cuda, driver = facts.build.get("cuda", "?"), facts.driver or {}
    if cuda or facts.build.get("hip") or not facts.wants_cuda or not facts.cards:
        return None
    cards = listed([card.name for card in facts.cards[:3]], quote="")
    title = f"torch {facts.torch} is built without CUDA; the machine has {cards}"
    fix = "Install the build with CUDA.", f"pip uninstall -y torch\npip install torch {WHEELS}/cu126"
    served = f"CUDA {driver['cuda']} and older" if driver.get("cuda") else None
    evidence = {"version": facts.torch, "driver": driver.get("version"), "driver serves": served}
    return finding("cpu-only-build", title, ["torch"], fix, **evidence)


@rule(
    code="environment/gpu-arch-missing",
    title="torch has no kernels for the card.",
    symptom="`no kernel image is available for execution on the device`, and a warning with the capability.",
    cause="Compiled kernels run on cards of their generation, of the same or a higher minor number; on no others.",
    confirm="`torch.cuda.get_arch_list()` and `torch.cuda.get_device_capability()`.",
    fix="For a newer card a newer torch, of a newer CUDA; for an old one the last torch that has its kernels.",
    reference="https://docs.nvidia.com/cuda/blackwell-compatibility-guide/",
)
def gpu_arch_missing(facts: EnvironmentFacts) -> Finding | None:
    arches = [str(arch) for arch in facts.build.get("arch_list") or ()]
    able = [card for card in facts.used if len(card.capability) > 1]
    lacking = [card for card in able if not any(serves(arch, card.capability) for arch in arches)]
    if not facts.is_cuda_build or not facts.wants_cuda or not arches or not lacking:
        return None
    needed = "sm_" + "".join(map(str, lacking[0].capability))
    title = f"torch {facts.torch} has no kernels for {lacking[0].name} ({needed}); it has {listed(arches, 12, '')}"
    fix = "Install the last torch that has it.", "pip install 'torch<2.8'"
    if lacking[0].capability > max(map(_capability, arches)):
        fix = "Install a newer torch, of a CUDA that knows the card.", f"pip install --upgrade torch {WHEELS}/cu128"
    evidence = {"needed": needed, "torch": facts.torch, "CUDA": facts.build["cuda"]}
    return finding("gpu-arch-missing", title, ["torch"], fix, **evidence)


def _capability(arch: str) -> tuple[int, ...]:
    digits = re.sub(r"\D", "", arch)
    return (int(digits[:-1]), int(digits[-1])) if len(digits) > 1 else ()


def serves(arch: str, capability: tuple[int, ...]) -> bool:
    """Whether kernels for `arch` run on a card: compiled ones (sm) within its generation, portable ones (compute) on
    all newer cards, and those with a letter on their own card alone (f: on its family)."""
    own = _capability(arch)
    if not own:
        return False
    if arch[-1] == "a":
        return own == capability[:2]
    if arch.startswith("compute"):
        return own <= capability[:2]
    return own[0] == capability[0] and own[1] <= capability[1]


@rule(
    code="environment/driver-too-old",
    title="The NVIDIA driver is older than torch's CUDA needs.",
    symptom="`The NVIDIA driver on your system is too old`, `CUDA driver version is insufficient`, or no card.",
    cause="Each major version of CUDA needs a driver of its generation or newer. Within one an older one serves.",
    confirm="`nvidia-smi` shows the driver, and the newest CUDA that it serves.",
    fix="Install a newer driver, or a torch built for the older CUDA.",
    reference="https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html",
)
def driver_too_old(facts: EnvironmentFacts) -> Finding | None:
    if not facts.is_cuda_build or not facts.wants_cuda or not facts.cards or facts.driver is None:
        return None
    built, name = version(facts.build["cuda"]), facts.torch
    if not facts.driver:
        title = f"No NVIDIA driver is loaded; torch {name} needs one for CUDA {dotted(built)}"
        return finding("driver-too-old", title, ["driver"], ("Install the driver.", "nvidia-smi"), torch=name)
    number, newest = version(facts.driver.get("version")), version(facts.driver.get("cuda"))
    row = DRIVERS.get(built[0]) if built else None
    least = row[facts.platform.startswith("win")] if row else ()
    old = newest[0] < built[0] if newest else () < number < least
    if not old or "compat" in facts.env.get("LD_LIBRARY_PATH", ""):  # NVIDIA's package for older drivers
        return None
    serves_up_to = f"serves CUDA up to {dotted(newest)}" if newest else f"is older than {dotted(least)}"
    title = f"The driver {facts.driver.get('version')} {serves_up_to}; torch {name} is built for CUDA {dotted(built)}"
    fixes = [(f"Install a driver of {dotted(least) if least else 'that CUDA'} or newer.", "nvidia-smi")]
    if newest:
        tag = "cu{}{}".format(*newest, 0)
        fixes.append(("Or install a torch for the older CUDA.", f"pip install torch {WHEELS}/{tag}"))
    return finding("driver-too-old", title, ["driver"], *fixes, CUDA_of_torch=dotted(built), tables_of=DATE)


@rule(
    code="environment/devices-hidden",
    title="A variable hides the cards that the run asks for.",
    symptom="`No CUDA GPUs are available`, `invalid device ordinal`, or a training on the processor, silently.",
    cause="CUDA_VISIBLE_DEVICES lists the cards that a process may see, by their number from 0. The list ends at the "
    "first entry that is no card; an empty one hides all.",
    confirm="`torch.cuda.device_count()` with and without the variable.",
    fix="Unset the variable, or list numbers that `nvidia-smi -L` shows.",
    reference="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars",
)
def devices_hidden(facts: EnvironmentFacts) -> Finding | None:
    name, cards, visible = facts.hiding, facts.cards or (), len(facts.visible)
    wanted = max(facts.processes, facts.index + 1) if facts.device else 1
    if name is None or not facts.wants_cuda or not visible < wanted <= len(cards):
        return None
    value, seen = facts.env[name], f"{visible} of {len(cards)} cards" if visible else "no card"
    title = f"{name}={value!r} leaves {seen} visible; the machine has {count(len(cards), 'card')}, numbered from 0"
    fix = "List the cards, or unset it.", f"export {name}={','.join(map(str, range(wanted)))}"
    return finding("devices-hidden", title, [name], fix, value=value, wanted=wanted)


@rule(
    code="environment/dtype-unsupported",
    title="The device has no instructions for the number type.",
    symptom="`Your setup doesn't support bf16/gpu`, `Cannot convert a MPS Tensor to float64 dtype`, or slow steps.",
    cause="bfloat16 came with capability 8.0 (Ampere), float8 with 8.9 (Ada); Apple's cards have no float64.",
    confirm="`torch.cuda.get_device_capability()`.",
    fix="Take float16 with a GradScaler on older cards, and float32 on MPS.",
    reference="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications",
)
def dtype_unsupported(facts: EnvironmentFacts) -> Finding | None:
    dtype = str(facts.run.get("dtype") or "").removeprefix("torch.")
    if facts.device == "mps" and dtype in ("float64", "double", "complex128"):
        fix = "Use float32.", "x = x.to(torch.float32)"
        return finding("dtype-unsupported", f"MPS has no {dtype}", [dtype], fix, device="mps")
    least = next((since for part, since in SINCE.items() if part in dtype), ())
    card = next((card for card in facts.used if () < card.capability < least), None)
    if card is None or not facts.is_cuda_build or facts.device != "cuda":
        return None
    title = f"{card.name} (capability {dotted(card.capability)}) has no {dtype}; it came with {dotted(least)}"
    fix = "Use float16 with a GradScaler.", "with torch.autocast('cuda', dtype=torch.float16):"
    return finding("dtype-unsupported", title, [dtype], fix, device=card.name, needed=f"capability {dotted(least)}")


@rule(
    code="environment/numpy-abi",
    title="A package is built for NumPy 1 and runs with NumPy 2.",
    symptom="`A module that was compiled using NumPy 1.x cannot be run in NumPy 2`, `Numpy is not available`, "
    "`numpy.dtype size changed`, often only when an array becomes a tensor.",
    cause="NumPy 2 changed the layout of its structures; packages with compiled parts must be built for it.",
    confirm="`pip list` shows both versions.",
    fix="Keep NumPy below 2, or install a newer release of the package.",
    reference="https://numpy.org/devdocs/dev/depending_on_numpy.html#numpy-2-0-specific-advice",
)
def numpy_abi(facts: EnvironmentFacts) -> Finding | None:
    old = {name: first for name, first in NUMPY_2.items() if () < facts.installed(name) < first}
    if facts.installed("numpy")[:1] != (2,) or not old:
        return None
    named = listed([f"{name} {public(facts.packages[name])}" for name in old], quote="")
    verb, names = "is" if len(old) == 1 else "are", ["numpy", *old]
    title = f"numpy {facts.packages['numpy']} is installed; {named} {verb} built for NumPy 1"
    newer = " ".join(f"'{name}>={dotted(first)}'" for name, first in old.items())
    fixes = ("Keep NumPy below 2.", "pip install 'numpy<2'"), ("Or install newer releases.", f"pip install {newer}")
    return finding("numpy-abi", title, names, *fixes, installed=installed(facts, names), tables_of=DATE)


@rule(
    code="environment/version-mismatch",
    title="Two packages are of releases that don't go together.",
    symptom="`operator torchvision::nms does not exist`, `undefined symbol`, an ImportError with a range of versions.",
    cause="Compiled packages are built for one torch; a later `pip install` has replaced one of the two.",
    confirm="`pip check`, and the table on the package's page.",
    fix="Install the two together, in one command.",
    reference="https://github.com/pytorch/vision#installation",
)
def version_mismatch(facts: EnvironmentFacts) -> Finding | None:
    problems = [*_partners(facts), *_ranges(facts)]
    for wanted, have in facts.pins:
        what, name = f"{wanted} is required; {have or 'nothing'} is installed", re.split(r"[^\w.-]", wanted)[0]
        problems.append((what, f"pip install '{wanted}'", [name]))
    if not problems:
        return None
    title, command, names = problems[0]
    more = listed([problem[0] for problem in problems[1:]], 5, "")
    fix, there = ("Install releases that go together.", command), installed(facts, names)
    return finding("version-mismatch", title, names, fix, installed=there, also=more, tables_of=DATE)


def _partners(facts: EnvironmentFacts) -> Iterator[tuple[str, str, list[str]]]:
    """(what, the command that mends it, the packages) of what is built for another torch."""
    torch, whole = facts.installed("torch"), public(facts.torch)
    for name, table in PARTNERS.items():
        have, wanted = facts.installed(name), table.get(dotted(torch[:2]))
        if not have or name == "triton" and not facts.platform.startswith("linux"):
            continue
        if wanted is not None and have[:2] != version(wanted):
            own = f"{name} {public(facts.packages[name])}"
            what = f"{own} is for another torch than {whole}, which goes with {name} {wanted}"
            yield what, f"pip install 'torch=={whole}' '{name}=={wanted}.*'", [name, "torch"]
        elif _other_cuda(facts.torch, facts.packages[name]):
            what = f"{name} {facts.packages[name]} and torch {facts.torch} are built for different CUDA versions"
            yield what, f"pip install --force-reinstall torch {name}", [name, "torch"]
    for name, table in BUILT_FOR.items():
        own = public(facts.packages.get(name, ""))
        wanted = table.get(own) or table.get(".".join(own.split(".")[:2]))
        if wanted is not None and torch and torch[:2] != version(wanted):
            what = f"{name} {own} is built for torch {wanted}; torch {whole} is installed"
            yield what, f"pip install {name} 'torch=={whole}'", [name, "torch"]


def _other_cuda(torch: str, other: str) -> bool:
    """Whether the tags of two wheels name different CUDA generations, or one none; a wheel without a tag tells
    nothing."""
    one, two = (re.fullmatch(r"[^+]*\+(?:cu(\d+)\d|(cpu))", whole) for whole in (torch, other))
    return one is not None and two is not None and one[1] != two[1]


def _ranges(facts: EnvironmentFacts) -> Iterator[tuple[str, str, list[str]]]:
    """What transformers needs of its own libraries."""
    have = facts.installed("transformers")
    for since, until, name, least, below in RANGES:
        other = facts.installed(name)
        if other and since <= have < until and not least <= other < below:
            span = f">={dotted(least)},<{dotted(below)}"
            needs = f"transformers {facts.packages['transformers']} needs {name} {span}"
            yield f"{needs}; {facts.packages[name]} is installed", f"pip install '{name}{span}'", [name, "transformers"]


@rule(
    code="environment/shared-memory-small",
    title="The workers' batches do not fit into shared memory.",
    symptom="`DataLoader worker is killed by signal: Bus error`, in a container, within the first batches.",
    cause="Batches of all workers x prefetch_factor lie in /dev/shm at once; a container gets 64 MB by default.",
    confirm="`df -h /dev/shm`.",
    fix="Start the container with more (--shm-size=8g, or --ipc=host), or take fewer workers.",
    reference="https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies",
)
def shared_memory_small(facts: EnvironmentFacts) -> Finding | None:
    workers, batch = (facts.run.get(name) or 0 for name in ("num_workers", "batch_bytes"))
    prefetch, each = facts.run.get("prefetch_factor") or 2, facts.processes
    needed = workers * prefetch * batch * each
    if facts.shm is None or needed <= facts.shm or facts.platform.startswith(("win", "darwin")):
        return None
    of = f" in each of {each} processes" if each > 1 else ""
    title = f"/dev/shm has {size(facts.shm)} (shm); {count(workers, 'worker')}{of} with {prefetch} batches of "
    title += f"{size(batch)} each need {size(needed)}"
    more = "Give the container more shared memory.", f"docker run --shm-size={-(-needed * 2 // 2**30)}g …"
    fewer = "Or take fewer workers.", f"DataLoader(…, num_workers={int(facts.shm // (prefetch * batch * each))})"
    evidence = {"num_workers": workers, "prefetch_factor": prefetch}
    return finding("shared-memory-small", title, ["shm", "num_workers"], more, fewer, **evidence)


@rule(
    code="environment/network-interface-missing",
    title="A variable names a network interface that this machine does not have.",
    symptom="`unhandled system error`, `no socket interface found`, `Unable to find address for: eth0`, or a hang.",
    cause="The variable was set for another machine, whose interface has another name.",
    confirm="`ip -br link` lists the interfaces.",
    fix="Name one that is there, or unset the variable.",
    reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname",
)
def network_interface_missing(facts: EnvironmentFacts) -> Finding | None:
    backend, there = str(facts.run.get("backend") or ""), facts.interfaces or ()
    several = bool(backend) or (facts.run.get("world_size") or 1) > 1 or not facts.run
    for name, kind in (("NCCL_SOCKET_IFNAME", "nccl"), ("GLOO_SOCKET_IFNAME", "gloo")):
        value = facts.env.get(name)
        asked = facts.interfaces is not None and several and (not backend or kind in backend)
        if not value or not asked or _interfaces(value, there, kind):
            continue
        title = f"{name}={value!r} fits no interface of this machine; it has {listed(there, 8, '')}"
        real = [one for one in there if not one.startswith(("lo", "docker", "veth", "br-"))] or [*there, ""]
        fix = "Name one that is there, or unset it.", f"export {name}={real[0]}"
        evidence = {"value": value, "interfaces": listed(there, 20, "")}
        return finding("network-interface-missing", title, [name], fix, **evidence)
    return None


def _interfaces(value: str, names: tuple[str, ...], kind: str) -> list[str]:
    """Those that the variable chooses. NCCL's is a list of beginnings, of whole names behind `=`, of all others behind
    `^`; Gloo's a list of whole names, each of which must be there."""
    if kind == "gloo":
        wanted = [part.strip() for part in value.split(",")]
        return wanted if set(wanted) <= set(names) else []
    others, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    parts = [part.strip() for part in value.split(",") if part.strip()]
    starts = tuple(part.split(":")[0] for part in parts)
    return [one for one in names if others != (one in parts if exact else one.startswith(starts))]


@rule(
    code="environment/tokenizers-fork",
    title="A tokenizer with threads runs before the loader's workers are forked.",
    symptom="`The current process just got forked, after parallelism has already been used`, or a loader that hangs.",
    cause="The tokenizers library has started threads; a forked process gets their locks, and not the threads.",
    confirm="The message goes when TOKENIZERS_PARALLELISM is false.",
    fix="Set TOKENIZERS_PARALLELISM=false before the first use, or start the workers by spawn.",
    reference="https://github.com/huggingface/tokenizers/issues/187",
)
def tokenizers_fork(facts: EnvironmentFacts) -> Finding | None:
    run, value = facts.run, facts.env.get("TOKENIZERS_PARALLELISM")
    if not run.get("tokenizer_used_before_workers") or not run.get("num_workers") or facts.start_method != "fork":
        return None
    if value is not None and value.strip().lower() in ("false", "0", "off", "no", "n", "f", ""):
        return None
    state, workers = f"is {value!r}" if value is not None else "is not set", count(run["num_workers"], "worker")
    title = f"TOKENIZERS_PARALLELISM {state}; the tokenizer is used before {workers} are forked"
    fix = "Set it before the first use.", 'os.environ["TOKENIZERS_PARALLELISM"] = "false"'
    return finding("tokenizers-fork", title, ["TOKENIZERS_PARALLELISM"], fix, start_method="fork")


@rule(
    code="environment/deprecated-variable",
    title="A variable has a new name.",
    symptom="A warning in every process at the start; later the setting has no effect.",
    cause="The library renamed its variable, and a launcher or an image still sets the old one.",
    confirm="`env | grep NAME`.",
    fix="Set the new name in the place of the old one.",
    reference="https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html",
)
def deprecated_variable(facts: EnvironmentFacts) -> Finding | None:
    old = [row for row in RENAMED if row[0] in facts.env and facts.installed(row[2]) >= row[3]]
    if not old:
        return None
    titles = [f"{a} is now {b}" for a, b, _, _ in old]
    title = f"{titles[0]}: {old[0][2]} renamed it in {dotted(old[0][3])}"
    fix = "Set the new name.", "\n".join(f"unset {a}; export {b}={facts.env[a]}" for a, b, _, _ in old)
    return finding("deprecated-variable", title, [row[0] for row in old], fix, also=listed(titles[1:], 9, ""))


@rule(
    code="environment/pin-memory-unsupported",
    title="Pinned memory is asked for where no CUDA card copies from it.",
    symptom="`'pin_memory' argument is set as true but not supported on MPS now`, or `but no accelerator is found`.",
    cause="It makes copies to a CUDA card faster. MPS shares its memory, and a processor has nothing to copy to.",
    confirm="The warning goes with pin_memory=False.",
    fix="Set pin_memory only where CUDA is used.",
    reference="https://docs.pytorch.org/docs/stable/data.html#memory-pinning",
)
def pin_memory_unsupported(facts: EnvironmentFacts) -> Finding | None:
    if not facts.run.get("pin_memory") or facts.device not in ("mps", "cpu"):
        return None
    built = facts.build.get("cuda") or facts.build.get("hip")
    if facts.device == "cpu" and built and (facts.cards or facts.cards is None):
        return None  # the card is there, though this run does not compute on it
    why = "MPS has none" if facts.device == "mps" else "there is no card to copy to"
    title = f"pin_memory is on for the device {facts.device}: {why}"
    fix = "Pin memory for CUDA alone.", "DataLoader(…, pin_memory=torch.cuda.is_available())"
    return finding("pin-memory-unsupported", title, ["pin_memory"], fix, device=facts.device)


ORDER = declared(__name__)
