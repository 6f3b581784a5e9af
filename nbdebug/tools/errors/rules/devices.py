"""What an error about devices needs: which tensor stayed behind, where the others are, and why it was not moved."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.tools.errors.facts import NOWHERE, ArgumentFact, Raised, TriedFix, ValueOrigin, as_code, is_plain


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """kind: "two" (devices met), "numpy" (wants the host's memory), "generator", "no data" (the meta device),
    "parallel" (DataParallel's first device).

    why the odd one is where it is:

        attribute   a plain attribute of a module: `.to` moves parameters and buffers
        holder      an attribute of an object that is no module
        model       all of its module is there: never moved
        part        its module is a part that was made, or put in, after the model was moved
        list        its module lies in a plain list or dict, so it is no part of the model
        dropped     `x.to(device)` gives a new tensor, and the line does not keep it (dropped: that line)
        made        made in the code that runs, without a device
        batch       it comes out of a loader, and nothing moves it
        state       the optimizer's state, from before the parameters were moved
        variable    anything else

    source: the tensor on the same device from which odd was made; model: the one that odd belongs to.
    odd: the tensor to move; met: one that it met, on `home`; owner: the module that holds odd ("net.positions");
    holder: its class; target: how the user can write the home device ("device", "x.device"); counts: parameters of the
    odd one's model by device; also: further tensors there, which have to be moved with it where `together`; parameter:
    whose optimizer state it is.
    """

    raised: Raised
    kind: str
    why: str = "variable"
    odd: ArgumentFact | None = None
    met: ArgumentFact | None = None
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
    title="An op is given tensors on two devices.",
    symptom="Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu; Input type "
    "(torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same; can't convert cuda:0 "
    "device type tensor to numpy.",
    cause="`model.to(device)` moves parameters and buffers of registered modules, in place. It reaches no tensor that "
    "is a plain attribute, no modules in a plain list, not the optimizer's state, and nothing that is made in "
    "`forward` without a device; and `x.to(device)` gives a new tensor and leaves `x` where it is.",
    confirm="`{name: p.device for name, p in model.named_parameters()}`, and `.device` of each operand.",
    fix="Register tensors with `register_buffer`, modules in an nn.ModuleList, make tensors with `device=x.device`, "
    "and keep the result: `x = x.to(device)`.",
    reference=BUFFERS,
)
def device_mismatch(facts: DeviceFacts) -> Finding | None:
    title = _title(facts)
    if title is None:
        return None
    parts = [part for part in (facts.odd, facts.met, *facts.also) if part is not None]
    evidence = {
        "tensors": [_row(part) for part in parts],
        "parameters by device": dict(facts.counts),
        "message": facts.raised.message.partition("\n")[0][:300],
    }
    if not facts.counts:
        del evidence["parameters by device"]
    return Finding("error/device-mismatch", title, facts.raised.where, evidence, _fixes(facts), _chain(facts))


def _row(part: ArgumentFact) -> dict[str, object]:
    return {"tensor": part.name, "device": part.fact.device, "dtype": part.fact.dtype, "shape": list(part.fact.shape)}


def _title(facts: DeviceFacts) -> str | None:
    if facts.kind == "generator":
        return _generator(facts)
    if facts.why == "model" and facts.odd is None:
        return (
            _no_data(facts)
            if facts.kind == "no data"
            else (f"`{facts.owner}` is not on {facts.home}, from where DataParallel copies it")
        )
    odd = facts.odd
    if odd is None:
        return None
    subject, device = odd.phrase[:1].upper() + odd.phrase[1:], odd.fact.device
    if facts.kind == "numpy" and "lengths" in facts.raised.message:
        return f"{subject} is on {device}, and pack_padded_sequence reads the lengths on the host"
    if facts.kind == "numpy":
        return f"{subject} is on {device}, and NumPy reads the host's memory alone"
    if facts.kind == "no data":
        return f"{subject} is on the meta device: it has a shape and no values"
    if facts.why in _WHOLE:
        return _WHOLE[facts.why](facts, odd)
    source = f" (made from `{facts.source}`)" if facts.source and facts.why in ("variable", "batch") else ""
    others = f"{facts.met.phrase} is on {facts.met.fact.device}" if facts.met else f"the others are on {facts.home}"
    return f"{subject}{source} is on {device}, and {others}" + _SAYS.get(facts.why, lambda facts: "")(facts)


def _generator(facts: DeviceFacts) -> str:
    if facts.why == "loader":
        return (
            f"The loader shuffles with a generator on the host, and random numbers are to be made on {facts.home} "
            "(`torch.set_default_device`)"
        )
    name = f"`{facts.attribute}`" if facts.attribute else "The generator"
    return f"{name} makes random numbers on another device than {facts.home}, where they are wanted"


def _no_data(facts: DeviceFacts) -> str:
    count = facts.counts.get("meta", 0)
    return (
        f"`{facts.owner}` has {count} parameters on the meta device: they have shapes and no values, so there is "
        "nothing to move"
    )


def _attribute(facts: DeviceFacts) -> str:
    return (
        f": `{facts.attribute}` is a plain attribute of `{facts.owner}` ({facts.holder}), and `.to` moves "
        "parameters and buffers"
    )


def _dropped(facts: DeviceFacts) -> str:
    return f": `.to` gives a new tensor, and the line that calls it ({facts.dropped.place}) does not keep it"


def _created(facts: DeviceFacts) -> str:
    call = facts.origin.call if facts.origin is not None else ""
    return f": `{call}` makes it on the host, since no device is given"


def _model(facts: DeviceFacts, odd: ArgumentFact) -> str:
    partner = facts.met
    return f"`{facts.owner}` is still on {odd.fact.device} (`{odd.name}`), and " + (
        f"{partner.phrase} is on {partner.fact.device}" if partner else f"the others are on {facts.home}"
    )


def _part(facts: DeviceFacts, odd: ArgumentFact) -> str:
    return (
        f"`{facts.owner}` is on {odd.fact.device}, and the rest of its model on {facts.home}: it came in after the "
        "model was moved"
    )


def _list(facts: DeviceFacts, odd: ArgumentFact) -> str:
    return (
        f"`{facts.owner}` is on {odd.fact.device}, and what it is given on {facts.home}: `{facts.holder}` keeps it "
        f"in a plain container (`{facts.attribute}`), so it is no part of the model, and `.to` does not reach it"
    )


def _state(facts: DeviceFacts, odd: ArgumentFact) -> str:
    return (
        f"`{facts.owner}` keeps its `{facts.attribute}` of `{facts.parameter}` on {odd.fact.device}, and the "
        f"parameter is on {facts.home}: the model was moved after the optimizer had started or was loaded"
    )


_WHOLE: dict[str, Callable[[DeviceFacts, ArgumentFact], str]] = {
    "model": _model,
    "part": _part,
    "list": _list,
    "state": _state,
}
_SAYS: dict[str, Callable[[DeviceFacts], str]] = {
    "attribute": _attribute,
    "dropped": _dropped,
    "made": _created,
    "batch": lambda facts: ": it comes out of the loader, and nothing moves it",
    "holder": lambda facts: f": `{facts.holder}` is no module, so nothing moves its `{facts.attribute}`",
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
        return (Fix("Copy it to the host first.", f"{cure.code}{numpy}"),)
    if odd is None:
        return ()
    container = "ModuleDict" if re.search(r"\[['\"]", facts.owner) else "ModuleList"
    code = {
        "attribute": f'self.register_buffer("{facts.attribute}", {facts.attribute})   # in {facts.holder}.__init__, '
        f"instead of self.{facts.attribute} = …",
        "model": f"{as_code(facts.owner)}.to({facts.target})",
        "part": f"{as_code(facts.owner)}.to({facts.target})",
        "list": f"self.{facts.attribute} = nn.{container}(self.{facts.attribute})   # in __init__",
        "state": f"for kept in {facts.owner}.state.values():\n    for key, value in kept.items():\n        "
        f"if torch.is_tensor(value) and value.ndim:\n            kept[key] = value.to({facts.home!r})",
    }.get(
        facts.why,
        f"{odd.name} = {odd.name}.to({facts.target})"
        if is_plain(odd.name)
        else f"{odd.name}.to({facts.target})"
        if odd.known
        else f"x = x.to({facts.target})",
    )
    title = {
        "attribute": "Register it as a buffer: it then moves with its module, and is saved with it.",
        "list": f"Keep the modules in an nn.{container}.",
        "dropped": "Keep what `.to` gives.",
        "state": "Move the state as well; better, move the model before the optimizer is made or loaded.",
        "made": "Move it.",
    }.get(facts.why, "Move it there before this line.")
    if facts.together:
        code = "\n".join(f"{part.name} = {part.name}.to({facts.target})" for part in (odd, *facts.also))
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
        fixes.append(Fix("Or make it there.", f"{origin.name} = {origin.code[:-1]}, device={facts.target})"))
    if facts.source and facts.why in ("variable", "batch"):
        fixes.append(
            Fix(
                f"Or move `{facts.source}`, from which it is made.",
                f"{facts.source} = {facts.source}.to({facts.target})",
            )
        )
    if facts.why == "part":
        root = facts.model or facts.owner.split(".")[0]
        fixes.append(Fix("Or move the whole model once all of its parts are there.", f"{root}.to({facts.target})"))
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
        return (Fix("Make the generator on that device.", code),)
    if facts.kind == "parallel":
        return (Fix("Move the model before it is wrapped.", f"model = nn.DataParallel(model.to({facts.target}))"),)
    name = facts.owner or (facts.odd.name if facts.odd else "model")
    if facts.odd is not None:
        return (Fix("Make it on a device that has memory.", f'{name} = torch.empty_like({name}, device="cpu")'),)
    return (
        Fix(
            "Give it memory, then fill in the weights.",
            f'{name}.to_empty(device="cpu")\n{name}.load_state_dict(state)   # or initialise it',
        ),
        Fix(
            "Or let the loaded weights take the place of those without values.",
            f"{name}.load_state_dict(state, assign=True)",
        ),
    )


def _chain(facts: DeviceFacts) -> tuple[Link, ...]:
    if facts.why == "dropped":
        return (Link("the result of this line goes nowhere", facts.dropped),)
    return facts.origin.way if facts.origin is not None else ()
