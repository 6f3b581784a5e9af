"""Rules: from the facts of a machine to what will fail, or run slowly, once a run begins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix
from nbdebug.text import count, listed, size
from nbdebug.tools.environment import versions
from nbdebug.tools.environment.facts import EnvironmentFacts
from nbdebug.tools.environment.versions import DATE, dotted, local, public, version


def finding(code: str, title: str, fixes: Fix | list[Fix], blamed: list[str], **evidence: Any) -> Finding:
    """`_` in names of evidence is a space."""
    rows = {name.replace("_", " "): value for name, value in evidence.items() if value not in (None, "", (), [])}
    own = (fixes,) if isinstance(fixes, Fix) else tuple(fixes)
    return Finding(f"environment/{code}", title, evidence={"where": blamed, **rows}, fixes=own)


def installed(facts: EnvironmentFacts, names: list[str]) -> str:
    """ "torchvision 0.20.1+cu124, torch 2.4.0+cu121"."""
    return ", ".join(f"{name} {facts.packages[name]}" for name in dict.fromkeys(names) if name in facts.packages)


def torch_of(facts: EnvironmentFacts) -> str:
    return str(facts.build.get("version") or facts.packages.get("torch") or "")


INSTALL = "https://pytorch.org/get-started/locally/"
WHEELS = "--index-url https://download.pytorch.org/whl"


@rule(
    code="environment/cpu-only-build",
    title="torch is a build without CUDA, on a machine with a card.",
    symptom="`Torch not compiled with CUDA enabled`, or `torch.cuda.is_available()` is False and the training is slow.",
    cause="The wheel has no CUDA part: on Windows that is what an index gives by default, and another package may have "
    "replaced the wheel with CUDA by one without.",
    confirm="`torch.version.cuda` is None; the version may end in +cpu.",
    fix="Install torch again from the index of a CUDA version that the driver serves.",
    reference=INSTALL,
)
def cpu_only_build(facts: EnvironmentFacts) -> Finding | None:
    if "cuda" not in facts.build or facts.build.get("cuda") or facts.build.get("hip") or not facts.wants_cuda:
        return None
    if not facts.cards:
        return None
    name, driver = torch_of(facts), facts.driver or {}
    cards = listed([card.name for card in facts.cards[:3]], quote="")
    title = f"torch {name} is built without CUDA; the machine has {cards}"
    fix = Fix("Install the build with CUDA.", f"pip uninstall -y torch\npip install torch {WHEELS}/cu126")
    served = f"CUDA {driver['cuda']} and older" if driver.get("cuda") else None
    return finding(
        "cpu-only-build", title, fix, ["torch"], version=name, driver=driver.get("version"), driver_serves=served
    )


@rule(
    code="environment/gpu-arch-missing",
    title="torch has no kernels for the card.",
    symptom="`no kernel image is available for execution on the device` at the first computation; a warning at the "
    "start names the card's capability.",
    cause="A wheel holds compiled kernels for some architectures. They run on cards of the same generation, of the "
    "same or a higher minor number; other cards need another wheel.",
    confirm="`torch.cuda.get_arch_list()` and `torch.cuda.get_device_capability()`.",
    fix="For a newer card install a newer torch, of a newer CUDA; for an old one the last torch that has its "
    "architecture.",
    reference="https://docs.nvidia.com/cuda/blackwell-compatibility-guide/",
)
def gpu_arch_missing(facts: EnvironmentFacts) -> Finding | None:
    arches = [str(arch) for arch in facts.build.get("arch_list") or ()]
    if not facts.is_cuda_build or not facts.wants_cuda or not arches:
        return None
    for card in facts.used:
        if len(card.capability) < 2 or any(serves(arch, card.capability) for arch in arches):
            continue
        needed = "sm_" + "".join(map(str, card.capability))
        name = torch_of(facts)
        newest = max((_capability(arch) for arch in arches), default=())
        newer = card.capability > newest
        title = f"torch {name} has no kernels for {card.name} ({needed}); it has {listed(arches, 12, '')}"
        fix = Fix("Install the last torch that has it.", "pip install 'torch<2.8'")
        if newer:
            advice = "Install a newer torch, of a CUDA version that knows the card."
            fix = Fix(advice, f"pip install --upgrade torch {WHEELS}/cu128")
        cuda = facts.build["cuda"]
        return finding("gpu-arch-missing", title, fix, ["torch"], needed=needed, torch=name, CUDA=cuda)
    return None


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
    symptom="`The NVIDIA driver on your system is too old`, `CUDA driver version is insufficient for CUDA runtime "
    "version`, or no card is seen at all.",
    cause="Each major version of CUDA needs a driver of its generation or a newer one. Within one major version an "
    "older driver serves.",
    confirm="`nvidia-smi` shows the driver, and the newest CUDA that it serves.",
    fix="Install a newer driver, or a torch built for the older CUDA.",
    reference="https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html",
)
def driver_too_old(facts: EnvironmentFacts) -> Finding | None:
    if not facts.is_cuda_build or not facts.wants_cuda or not facts.cards or not facts.driver_known:
        return None
    built, name = version(facts.build["cuda"]), torch_of(facts)
    if facts.driver is None:
        title = f"No NVIDIA driver is loaded; torch {name} needs one for CUDA {dotted(built)}"
        return finding("driver-too-old", title, [Fix("Install the driver.", "nvidia-smi")], ["driver"], torch=name)
    number, newest = version(facts.driver.get("version")), version(facts.driver.get("cuda"))
    row = versions.DRIVERS.get(built[0]) if built else None
    least = row[facts.platform.startswith("win")] if row else ()
    old = newest[0] < built[0] if newest else bool(least and number and number < least)
    if not old or "compat" in facts.env.get("LD_LIBRARY_PATH", ""):  # NVIDIA's package for older drivers
        return None
    serves_up_to = f"serves CUDA up to {dotted(newest)}" if newest else f"is older than {dotted(least)}"
    title = f"The driver {facts.driver.get('version')} {serves_up_to}; torch {name} is built for CUDA {dotted(built)}"
    fixes = [Fix(f"Install a driver of {dotted(least) if least else 'that CUDA'} or newer.", "nvidia-smi")]
    if newest:
        tag = f"cu{newest[0]}{newest[1] if len(newest) > 1 else 0}"
        fixes.append(Fix("Or install a torch for the older CUDA.", f"pip install torch {WHEELS}/{tag}"))
    return finding("driver-too-old", title, fixes, ["driver"], CUDA_of_torch=dotted(built), tables_of=DATE)


@rule(
    code="environment/devices-hidden",
    title="A variable hides the cards that the run asks for.",
    symptom="`No CUDA GPUs are available`, a training that falls back to the processor without a word, `invalid "
    "device ordinal`.",
    cause="CUDA_VISIBLE_DEVICES lists the cards that a process may see, by their number from 0. The list ends at the "
    "first entry that is no card; an empty one hides all.",
    confirm="`torch.cuda.device_count()` with and without the variable.",
    fix="Unset the variable, or list numbers that `nvidia-smi -L` shows.",
    reference="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars",
)
def devices_hidden(facts: EnvironmentFacts) -> Finding | None:
    name, cards = facts.hiding, facts.cards or ()
    if name is None or not cards or not facts.wants_cuda:
        return None
    visible = len(facts.visible)
    wanted = max(facts.processes, facts.index + 1) if facts.device else 1
    if visible >= wanted or wanted > len(cards):
        return None
    value = facts.env[name]
    seen = "no card" if not visible else f"{visible} of {len(cards)} cards"
    title = f"{name}={value!r} leaves {seen} visible; the machine has {count(len(cards), 'card')}, numbered from 0"
    right = ",".join(map(str, range(wanted)))
    return finding(
        "devices-hidden",
        title,
        [Fix("List the cards, or unset it.", f"export {name}={right}")],
        [name],
        value=value,
        wanted=wanted,
    )


@rule(
    code="environment/dtype-unsupported",
    title="The device has no instructions for the number type.",
    symptom="`Your setup doesn't support bf16/gpu`, `Cannot convert a MPS Tensor to float64 dtype`, or a step that is "
    "several times slower than in float32.",
    cause="bfloat16 came with the capability 8.0 (Ampere), float8 with 8.9 (Ada); Apple's cards have no float64. torch "
    "imitates some of them slowly, and refuses others.",
    confirm="`torch.cuda.get_device_capability()`.",
    fix="Take float16 with a GradScaler on older cards, and float32 on MPS.",
    reference="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications",
)
def dtype_unsupported(facts: EnvironmentFacts) -> Finding | None:
    dtype = str(facts.run.get("dtype") or "").removeprefix("torch.")
    if facts.device == "mps" and dtype in ("float64", "double", "complex128"):
        return finding(
            "dtype-unsupported",
            f"MPS has no {dtype}",
            [Fix("Use float32.", "x = x.to(torch.float32)")],
            [dtype],
            device="mps",
        )
    least = (
        versions.FLOAT8
        if "float8" in dtype or "fp8" in dtype
        else versions.BFLOAT16
        if dtype in ("bfloat16", "bf16")
        else None
    )
    if least is None or facts.build.get("hip") or not facts.is_cuda_build or facts.device != "cuda":
        return None
    card = next((card for card in facts.used if card.capability and card.capability < least), None)
    if card is None:
        return None
    title = f"{card.name} (capability {dotted(card.capability)}) has no {dtype}; it came with {dotted(least)}"
    fix = Fix("Use float16 with a GradScaler.", "with torch.autocast('cuda', dtype=torch.float16):")
    return finding("dtype-unsupported", title, fix, [dtype], device=card.name, needed=f"capability {dotted(least)}")


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
    numpy = facts.installed("numpy")
    if not numpy or numpy[0] != 2:
        return None
    old = {name: first for name, first in versions.NUMPY_2.items() if () < facts.installed(name) < first}
    if not old:
        return None
    named = listed([f"{name} {public(facts.packages[name])}" for name in old], quote="")
    title = (
        f"numpy {facts.packages['numpy']} is installed; {named} {'is' if len(old) == 1 else 'are'} built for NumPy 1"
    )
    newer = " ".join(f"'{name}>={dotted(first)}'" for name, first in old.items())
    fixes = [Fix("Keep NumPy below 2.", "pip install 'numpy<2'")]
    fixes.append(Fix("Or install newer releases.", f"pip install {newer}"))
    names = ["numpy", *old]
    return finding("numpy-abi", title, fixes, names, installed=installed(facts, names), tables_of=DATE)


@rule(
    code="environment/version-mismatch",
    title="Two packages are of releases that don't go together.",
    symptom="`operator torchvision::nms does not exist`, `undefined symbol` at an import, an ImportError that names a "
    "range of versions.",
    cause="Packages with compiled parts are built for one release of torch. A later `pip install` of something else "
    "has replaced one of the two.",
    confirm="`pip check`, and the table on the package's page.",
    fix="Install the two together, in one command.",
    reference="https://github.com/pytorch/vision#installation",
)
def version_mismatch(facts: EnvironmentFacts) -> Finding | None:
    problems = [*_torch_partners(facts), *_triton(facts), *_hub(facts), *_pins(facts)]
    if not problems:
        return None
    title, command, names = problems[0]
    more = listed([problem[0] for problem in problems[1:]], 5, "")
    fix, there = Fix("Install releases that go together.", command), installed(facts, names)
    return finding("version-mismatch", title, fix, names, installed=there, also=more, tables_of=DATE)


Mismatch = tuple[str, str, list[str]]
"""(what, the command that mends it, the packages)."""


def _torch_partners(facts: EnvironmentFacts) -> Iterator[Mismatch]:
    torch, whole = facts.installed("torch"), torch_of(facts)
    for name in ("torchvision", "torchaudio"):
        have, wanted = facts.installed(name), versions.partner(name, torch)
        if have and wanted is not None and have[:2] != version(wanted):
            own = f"{name} {public(facts.packages[name])}"
            what = f"{own} is built for another torch than {public(whole)}, which goes with {name} {wanted}"
            yield what, f"pip install 'torch=={public(whole)}' '{name}=={wanted}.*'", [name, "torch"]
        elif have and _other_cuda(whole, facts.packages[name]):
            what = f"{name} {facts.packages[name]} and torch {whole} are built for different CUDA versions"
            yield what, f"pip install --force-reinstall torch {name}", [name, "torch"]
    for name, table in versions.BUILT_FOR.items():
        have_text = public(facts.packages.get(name, ""))
        wanted = table.get(have_text) or table.get(".".join(have_text.split(".")[:2]))
        if wanted is not None and torch and torch[:2] != version(wanted):
            what = f"{name} {have_text} is built for torch {wanted}; torch {public(whole)} is installed"
            yield what, f"pip install {name} 'torch=={public(whole)}'", [name, "torch"]


def _other_cuda(torch: str, other: str) -> bool:
    """Whether the tags of two wheels name different CUDA generations, or one none; a wheel without a tag tells
    nothing."""
    one, two = local(torch), local(other)
    tags = [re.fullmatch(r"cu(\d+)\d|(cpu)", tag) for tag in (one, two)]
    return all(tags) and tags[0][1] != tags[1][1]  # type: ignore[index]


def _triton(facts: EnvironmentFacts) -> Iterator[Mismatch]:
    torch, triton = facts.installed("torch"), facts.installed("triton")
    wanted = versions.TRITON.get(dotted(torch[:2]))
    if triton and wanted is not None and facts.platform.startswith("linux") and triton[:2] != version(wanted):
        what = f"triton {public(facts.packages['triton'])} is installed; torch {public(torch_of(facts))} needs {wanted}"
        yield what, f"pip install 'triton=={wanted}.*'", ["triton", "torch"]


def _hub(facts: EnvironmentFacts) -> Iterator[Mismatch]:
    transformers, tokenizers = facts.installed("transformers"), facts.installed("tokenizers")
    limits, own = versions.tokenizers_range(transformers), f"transformers {facts.packages.get('transformers')}"
    if limits is not None and tokenizers and not limits[0] <= tokenizers < limits[1]:
        span = f">={dotted(limits[0])},<{dotted(limits[1])}"
        what = f"{own} needs tokenizers {span}; {facts.packages['tokenizers']} is installed"
        yield what, f"pip install 'tokenizers{span}'", ["tokenizers", "transformers"]
    hub = facts.installed("huggingface-hub")
    if (4, 20) <= transformers < (5,) and hub >= (1,):
        what = f"{own} needs huggingface-hub below 1.0; {facts.packages['huggingface-hub']} is installed"
        yield what, "pip install 'huggingface-hub<1.0'", ["huggingface-hub", "transformers"]


def _pins(facts: EnvironmentFacts) -> Iterator[Mismatch]:
    for wanted, have in facts.pins:
        what, name = f"{wanted} is required; {have or 'nothing'} is installed", re.split(r"[^\w.-]", wanted)[0]
        yield what, f"pip install '{wanted}'", [name]


@rule(
    code="environment/shared-memory-small",
    title="The workers' batches do not fit into shared memory.",
    symptom="`DataLoader worker is killed by signal: Bus error`, in a container, within the first batches.",
    cause="Workers hand over batches through /dev/shm. A container gets 64 MB of it by default; workers x "
    "prefetch_factor batches lie there at once.",
    confirm="`df -h /dev/shm`.",
    fix="Start the container with more (--shm-size=8g, or --ipc=host), or take fewer workers.",
    reference="https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies",
)
def shared_memory_small(facts: EnvironmentFacts) -> Finding | None:
    workers, batch = facts.run.get("num_workers") or 0, facts.run.get("batch_bytes")
    prefetch = facts.run.get("prefetch_factor") or 2
    if facts.shm is None or not batch or not workers or facts.platform.startswith(("win", "darwin")):
        return None
    needed = workers * prefetch * batch
    if needed <= facts.shm:
        return None
    title = (
        f"/dev/shm has {size(facts.shm)} (shm); {count(workers, 'worker')} with {prefetch} batches of "
        f"{size(batch)} each need {size(needed)}"
    )
    fitting = max(0, int(facts.shm // (prefetch * batch)))
    fixes = [
        Fix("Give the container more shared memory.", f"docker run --shm-size={-(-needed * 2 // 2**30)}g …"),
        Fix("Or take fewer workers.", f"DataLoader(…, num_workers={fitting})"),
    ]
    return finding(
        "shared-memory-small", title, fixes, ["shm", "num_workers"], num_workers=workers, prefetch_factor=prefetch
    )


@rule(
    code="environment/network-interface-missing",
    title="A variable names a network interface that this machine does not have.",
    symptom="`NCCL error: unhandled system error`, `no socket interface found`, `Unable to find address for: "
    "eth0`, or a start that hangs.",
    cause="The variable was set for another machine, whose interface has another name.",
    confirm="`ip -br link` lists the interfaces.",
    fix="Name one that is there, or unset the variable.",
    reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname",
)
def network_interface_missing(facts: EnvironmentFacts) -> Finding | None:
    if facts.interfaces is None:
        return None
    backend = str(facts.run.get("backend") or "")
    several = bool(backend) or (facts.run.get("world_size") or 1) > 1
    for name, kind in (("NCCL_SOCKET_IFNAME", "nccl"), ("GLOO_SOCKET_IFNAME", "gloo")):
        value = facts.env.get(name)
        if not value or not several and facts.run or backend and kind not in backend:
            continue
        if _interfaces(value, facts.interfaces, kind):
            continue
        title = f"{name}={value!r} fits no interface of this machine; it has {listed(facts.interfaces, 8, '')}"
        real = [one for one in facts.interfaces if not one.startswith(("lo", "docker", "veth", "br-"))] or list(
            facts.interfaces
        )
        fix = Fix("Name one that is there, or unset it.", f"export {name}={real[0] if real else ''}")
        return finding(
            "network-interface-missing", title, fix, [name], value=value, interfaces=listed(facts.interfaces, 20, "")
        )
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
    chosen = [
        one for one in names if any(one == part if exact else one.startswith(part.split(":")[0]) for part in parts)
    ]
    return [one for one in names if one not in chosen] if others else chosen


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
    method = run.get("start_method") or ("fork" if facts.platform.startswith("linux") else "spawn")
    if not run.get("tokenizer_used_before_workers") or not run.get("num_workers") or method != "fork":
        return None
    if value is not None and value.strip().lower() in ("false", "0", "off", "no", "n", "f", ""):
        return None
    state = f"is {value!r}" if value is not None else "is not set"
    title = (
        f"TOKENIZERS_PARALLELISM {state}; the tokenizer is used before {count(run['num_workers'], 'worker')} are forked"
    )
    fix = Fix("Set it before the first use.", 'os.environ["TOKENIZERS_PARALLELISM"] = "false"')
    return finding("tokenizers-fork", title, fix, ["TOKENIZERS_PARALLELISM"], start_method=method)


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
    old = [row for row in versions.RENAMED if row[0] in facts.env and facts.installed(row[2]) >= row[3]]
    if not old:
        return None
    _, _, package, since = old[0]
    titles = [f"{a} is now {b}" for a, b, _, _ in old]
    title = f"{titles[0]}: {package} renamed it in {dotted(since)}"
    lines = [f"unset {a}" + (f"; export {b}={facts.env[a]}" if "TOKEN" not in a else "") for a, b, _, _ in old]
    fix = Fix("Set the new name.", "\n".join(lines))
    return finding("deprecated-variable", title, fix, [row[0] for row in old], also=listed(titles[1:], 9, ""))


@rule(
    code="environment/pin-memory-unsupported",
    title="Pinned memory is asked for where no CUDA card copies from it.",
    symptom="`'pin_memory' argument is set as true but not supported on MPS now`, or `but no accelerator is found`.",
    cause="Pinned memory makes copies to a CUDA card faster. MPS shares its memory, and a processor has nothing "
    "to copy to.",
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
    fix = Fix("Pin memory for CUDA alone.", "DataLoader(…, pin_memory=torch.cuda.is_available())")
    title = f"pin_memory is on for the device {facts.device}: {why}"
    return finding("pin-memory-unsupported", title, fix, ["pin_memory"], device=facts.device)


ORDER = (
    cpu_only_build,
    driver_too_old,
    devices_hidden,
    gpu_arch_missing,
    dtype_unsupported,
    numpy_abi,
    version_mismatch,
    shared_memory_small,
    network_interface_missing,
    tokenizers_fork,
    deprecated_variable,
    pin_memory_unsupported,
)
