"""The rule over a card that is not there, or that this torch can't use."""

from __future__ import annotations

from nbdebug.catalogue import rule
from nbdebug.chapters.error.facts_cuda import CardFacts
from nbdebug.finding import Finding, Fix


@rule(
    code="error/cuda-unavailable",
    title="CUDA is asked for, and this torch and this machine have none that fits.",
    symptom="Torch not compiled with CUDA enabled; Found no NVIDIA driver; no kernel image is available for execution "
    "on the device; invalid device ordinal; Attempting to deserialize object on a CUDA device.",
    cause="The installed torch is the CPU build, the driver is missing or older than the CUDA that torch was built "
    "for, the card is older or newer than the kernels in this build, fewer cards are visible than the number "
    "asked for, or a file keeps its tensors on a card that is not here.",
    confirm="`torch.__version__, torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count()`; "
    "`nvidia-smi`.",
    fix='Choose the device once (`device = "cuda" if torch.cuda.is_available() else "cpu"`), load with '
    "`map_location`, install the build of torch that fits the driver.",
    reference="https://pytorch.org/get-started/locally/",
)
def cuda_unavailable(facts: CardFacts) -> Finding | None:
    card = facts.card
    evidence = {
        "torch": card.torch,
        "built for CUDA": card.built or "none",
        "a card answers": card.available,
        "cards": card.count,
        "card": card.name or "none",
        "capability": card.capability or "not known",
        "kernels for": list(card.kernels),
        "CUDA_VISIBLE_DEVICES": "set" if facts.visible else "not set",
    }
    asks = f"`{facts.wanted}`" if facts.wanted else "this line"
    return Finding("error/cuda-unavailable", _title(facts, asks), facts.raised.where, evidence, _fixes(facts))


def _title(facts: CardFacts, asks: str) -> str:
    card = facts.card
    if facts.kind == "load":
        return f"The file keeps its tensors on a card, {asks} brings them back to it, and {_none(facts)}"
    if facts.kind == "not there":
        number = f"cuda:{facts.asked}" if facts.asked is not None else "a further card"
        last = f", the last of them cuda:{card.count - 1}" if card.count else ""
        return f"{asks[:1].upper() + asks[1:]} asks for {number}, and {card.count} cards are visible here{last}"
    if facts.kind == "no kernel":
        return (
            f"The card is {card.capability or 'of another kind'}, and this torch ({card.torch}) holds kernels for "
            f"{', '.join(card.kernels) or 'others'}"
        )
    if facts.kind == "old driver":
        return f"The driver is older than CUDA {card.built or 'of this torch'}, for which torch {card.torch} was built"
    return f"{asks[:1].upper() + asks[1:]} asks for CUDA, and {_none(facts)}"


def _none(facts: CardFacts) -> str:
    card = facts.card
    if not card.built:
        return f"this torch ({card.torch}) was built without it"
    if facts.kind == "no driver":
        return "no NVIDIA driver is found on this machine"
    if card.available and facts.asked is not None and facts.asked >= card.count:
        return f"{card.count} cards are visible here"
    return "no card answers" + (" (CUDA_VISIBLE_DEVICES is set)" if facts.visible else "")


def _fixes(facts: CardFacts) -> tuple[Fix, ...]:
    found = []
    if facts.kind == "load":
        found.append(Fix("Load onto the host, then move.", 'state = torch.load(path, map_location="cpu")'))
    elif facts.kind == "not there":
        found.append(Fix("Take a card that is there.", 'device = torch.device("cuda:0")'))
    elif facts.kind in ("no kernel", "old driver"):
        found.append(
            Fix(
                "Install the build of torch that fits: one for this driver's CUDA, of a release that knows the card.",
                "nvidia-smi   # the driver's CUDA stands in its first lines",
            )
        )
    else:
        found.append(
            Fix(
                "Choose the device once, and use it everywhere.",
                'device = "cuda" if torch.cuda.is_available() else "cpu"\nmodel.to(device)',
            )
        )
        found.append(
            Fix(
                "If this machine has a card: install the CUDA build of torch.",
                "nvidia-smi   # the driver's CUDA stands in its first lines",
            )
        )
    return tuple(found)
