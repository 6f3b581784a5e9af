"""The causes of device errors: which tensor is on another device than the others, and why it was not moved."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import count
from nbdebug.tools.errors.facts import NOWHERE, ArgumentFact, Raised, TriedFix, ValueOrigin, as_code, is_plain


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """kind: "two" (two devices in one op), "numpy" (needs CPU memory), "generator", "no data" (the meta device),
    "parallel" (DataParallel's first device).

    why: the reason for the odd tensor's device:

        attribute   a plain attribute of a module: `.to` moves parameters and buffers
        holder      an attribute of an object that is not a module
        model       its whole module is there: never moved
        part        its module was created, or added, after the model was moved
        list        its module is in a plain list or dict, so it is not part of the model
        dropped     `x.to(device)` returns a new tensor, and the line does not keep it (dropped: that line)
        made        created in the running function, without a device
        batch       it comes from a loader, and nothing moves it
        state       the optimizer's state, from before the parameters were moved
        variable    anything else

    source: the tensor on the same device from which odd was computed; model: the one that odd belongs to.
    odd: the tensor to move; partner: another operand, on `home`; owner: the module that holds odd ("net.positions");
    holder: its class; target: the user's expression for the home device ("device", "x.device"); counts: parameters of
    odd's model by device; also: more tensors on odd's device, which must be moved with it where `together`; parameter:
    whose optimizer state it is.
    """

    raised: Raised
    kind: str
    why: str = "variable"
    odd: ArgumentFact | None = None
    partner: ArgumentFact | None = None
    home: str = ""
    op: str = ""
    owner: str = ""
    holder: str = ""
    attribute: str = ""
    target: str = ""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    also: tuple[ArgumentFact, ...] = ()
    together: bool = False
    source: str = ""
    model: str = ""
    dropped: Where = NOWHERE
    origin: ValueOrigin | None = None
    cure: TriedFix | None = None
    parameter: str = ""


BUFFERS = "https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer"


@rule(
    code="error/device-mismatch",
    title="An op gets tensors on two devices.",
    symptom="Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu; Input type "
    "(torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same; can't convert cuda:0 "
    "device type tensor to numpy.",
    cause="`model.to(device)` moves parameters and buffers of registered modules, in place. It does not move a tensor "
    "that is a plain attribute, modules in a plain list, the optimizer's state, or a tensor that `forward` creates "
    "without a device. `x.to(device)` returns a new tensor and does not move `x`.",
    confirm="`{name: p.device for name, p in model.named_parameters()}`, and `.device` of each operand.",
    fix="Register tensors with `register_buffer`, modules in an nn.ModuleList, create tensors with `device=x.device`, "
    "and keep the result: `x = x.to(device)`.",
    reference=BUFFERS,
)
def device_mismatch(facts: DeviceFacts) -> Finding | None:
    title = _title(facts)
    if title is None:
        return None
    parts = [part for part in (facts.odd, facts.partner, *facts.also) if part is not None]
    evidence = {
        "tensors": [
            {"tensor": p.name, "device": p.fact.device, "dtype": p.fact.dtype, "shape": list(p.fact.shape)}
            for p in parts
        ],
        "parameters by device": dict(facts.counts),
        "message": facts.raised.message.partition("\n")[0][:300],
    }
    if not facts.counts:
        del evidence["parameters by device"]
    return Finding("error/device-mismatch", title, facts.raised.where, evidence, _fixes(facts), _chain(facts))


def _title(facts: DeviceFacts) -> str | None:
    if facts.kind == "generator":
        return _generator(facts)
    if facts.why == "model" and facts.odd is None and facts.kind == "no data":
        return (
            f"`{facts.owner}` has {count(facts.counts.get('meta', 0), 'parameter')} on the meta device, with shapes "
            "but without values, so there is nothing to move"
        )
    if facts.why == "model" and facts.odd is None:
        return f"`{facts.owner}` is not on {facts.home}, from which DataParallel copies it"
    odd = facts.odd
    if odd is None:
        return None
    subject, device = odd.phrase[:1].upper() + odd.phrase[1:], odd.fact.device
    if facts.kind == "numpy" and "lengths" in facts.raised.message:
        return f"{subject} is on {device}, but pack_padded_sequence needs the lengths on the CPU"
    if facts.kind == "numpy":
        return f"{subject} is on {device}, but NumPy reads only CPU memory"
    if facts.kind == "no data":
        return f"{subject} is on the meta device: it has a shape, but no values"
    if facts.why in _TITLES:
        return _TITLES[facts.why](facts, odd)
    source = f" (computed from `{facts.source}`)" if facts.source and facts.why in ("variable", "batch") else ""
    others = (
        f"{facts.partner.phrase} is on {facts.partner.fact.device}"
        if facts.partner
        else f"the others are on {facts.home}"
    )
    return f"{subject}{source} is on {device}, but {others}" + _REASONS.get(facts.why, lambda facts: "")(facts)


def _generator(facts: DeviceFacts) -> str:
    if facts.why == "loader":
        return (
            f"The loader shuffles with a CPU generator, but random numbers must be generated on {facts.home} "
            "(`torch.set_default_device`)"
        )
    name = f"`{facts.attribute}`" if facts.attribute else "The generator"
    return f"{name} is on another device than {facts.home}, where the random numbers must be generated"


def _created(facts: DeviceFacts) -> str:
    call = facts.origin.call if facts.origin is not None else ""
    return f": `{call}` creates it on the CPU, because it gets no device"


def _model(facts: DeviceFacts, odd: ArgumentFact) -> str:
    partner = facts.partner
    return f"`{facts.owner}` is still on {odd.fact.device} (`{odd.name}`), but " + (
        f"{partner.phrase} is on {partner.fact.device}" if partner else f"the others are on {facts.home}"
    )


_TITLES: dict[str, Callable[[DeviceFacts, ArgumentFact], str]] = {
    "model": _model,
    "part": lambda facts, odd: (
        f"`{facts.owner}` is on {odd.fact.device}, but the rest of its model is on {facts.home}: it was added after "
        "the model was moved"
    ),
    "list": lambda facts, odd: (
        f"`{facts.owner}` is on {odd.fact.device}, but its input is on {facts.home}: `{facts.holder}` keeps it in a "
        f"plain container (`{facts.attribute}`), so it is not part of the model, and `.to` does not move it"
    ),
    "state": lambda facts, odd: (
        f"`{facts.owner}` keeps its `{facts.attribute}` of `{facts.parameter}` on {odd.fact.device}, but the "
        f"parameter is on {facts.home}: the model was moved after the optimizer had started or was loaded"
    ),
}
_REASONS: dict[str, Callable[[DeviceFacts], str]] = {
    "attribute": lambda facts: (
        f": `{facts.attribute}` is a plain attribute of `{facts.owner}` ({facts.holder}), and `.to` moves only "
        "parameters and buffers"
    ),
    "dropped": lambda facts: (
        f": `.to` returns a new tensor, and the line that calls it ({facts.dropped.place}) does not keep it"
    ),
    "made": _created,
    "batch": lambda facts: ": it comes from the loader, and nothing moves it",
    "holder": lambda facts: f": `{facts.holder}` is not a module, so nothing moves its `{facts.attribute}`",
}


def _fixes(facts: DeviceFacts) -> tuple[Fix, ...]:
    odd, cure = facts.odd, facts.cure
    worked, after = (cure.worked, dict(cure.after)) if cure is not None else (None, {})
    if worked and odd is not None and facts.why in ("attribute", "list", "model", "part"):
        after["with"] = f"{odd.name} on {facts.home}"
    if facts.kind in ("generator", "no data", "parallel"):
        return _without_cure(facts)
    if facts.kind == "numpy" and cure is not None:
        numpy = "" if "lengths" in facts.raised.message else ".numpy()"
        return (Fix("Copy it to the CPU first.", f"{cure.code}{numpy}"),)
    if odd is None:
        return ()
    container = "ModuleDict" if re.search(r"\[['\"]", facts.owner) else "ModuleList"
    code = {
        "attribute": f'self.register_buffer("{facts.attribute}", {facts.attribute})   # in {facts.holder}.__init__, '
        f"instead of self.{facts.attribute} = …",
        "model": f"{as_code(facts.owner)}.to({facts.target})",
        "part": f"{as_code(facts.owner)}.to({facts.target})",
        "list": f"self.{facts.attribute} = nn.{container}(self.{facts.attribute})   # in __init__",
        "state": f"for state in {facts.owner}.state.values():\n    for key, value in state.items():\n        "
        f"if torch.is_tensor(value) and value.ndim:\n            state[key] = value.to({facts.home!r})",
    }.get(
        facts.why,
        f"{odd.name} = {odd.name}.to({facts.target})"
        if is_plain(odd.name)
        else f"{odd.name}.to({facts.target})"
        if odd.known
        else f"x = x.to({facts.target})",
    )
    title = {
        "attribute": "Register it as a buffer: it is then moved and saved with its module.",
        "list": f"Keep the modules in an nn.{container}.",
        "dropped": "Keep the result of `.to`.",
        "state": "Move the state as well; better, move the model before you create or load the optimizer.",
        "made": "Move it.",
    }.get(facts.why, "Move it there before this line.")
    if facts.together:
        code = "\n".join(f"{part.name} = {part.name}.to({facts.target})" for part in (odd, *facts.also))
    if cure is not None and cure.edit is not None and facts.why not in ("model", "part", "state"):
        return (Fix.of(title, cure.edit, worked, after), *_others(facts, odd))
    first = Fix(title, code, worked, after)
    return (first, *_others(facts, odd))


def _others(facts: DeviceFacts, odd: ArgumentFact) -> list[Fix]:
    fixes = []
    origin = facts.origin
    if (
        facts.why == "made"
        and origin is not None
        and origin.code.endswith(")")
        and origin.code.count("(") == 1
        and (origin.call != "from_numpy" and facts.target)
    ):
        fixes.append(Fix("Or create it there.", f"{origin.name} = {origin.code[:-1]}, device={facts.target})"))
    if facts.source and facts.why in ("variable", "batch"):
        fixes.append(
            Fix(
                f"Or move `{facts.source}`, from which it is computed.",
                f"{facts.source} = {facts.source}.to({facts.target})",
            )
        )
    if facts.why == "part":
        root = facts.model or facts.owner.split(".")[0]
        fixes.append(Fix("Or move the whole model after its last part was added.", f"{root}.to({facts.target})"))
    if facts.also and not facts.together and facts.why not in ("model", "part", "list", "state"):
        lines = "\n".join(f"{p.name} = {p.name}.to({facts.target})" for p in facts.also[:6] if p.owner is None)
        fixes += [Fix(f"These are on {odd.fact.device} as well.", lines)] if lines else []
    return fixes


def _without_cure(facts: DeviceFacts) -> tuple[Fix, ...]:
    if facts.kind == "generator":
        code = (
            f"DataLoader(…, generator=torch.Generator(device={facts.target}))"
            if facts.why == "loader"
            else f"{facts.attribute or 'generator'} = torch.Generator(device={facts.target}).manual_seed(0)"
        )
        return (Fix("Create the generator on that device.", code),)
    if facts.kind == "parallel":
        return (Fix("Move the model before it is wrapped.", f"model = nn.DataParallel(model.to({facts.target}))"),)
    name = facts.owner or (facts.odd.name if facts.odd else "model")
    if facts.odd is not None:
        return (Fix("Create it on a device that has memory.", f'{name} = torch.empty_like({name}, device="cpu")'),)
    return (
        Fix(
            "Allocate memory for it, then load the weights.",
            f'{name}.to_empty(device="cpu")\n{name}.load_state_dict(state)   # or initialize it',
        ),
        Fix(
            "Or replace the weights without values by the loaded ones.",
            f"{name}.load_state_dict(state, assign=True)",
        ),
    )


def _chain(facts: DeviceFacts) -> tuple[Link, ...]:
    if facts.why == "dropped":
        return (Link("the result of this line is not kept", facts.dropped),)
    return facts.origin.way if facts.origin is not None else ()
