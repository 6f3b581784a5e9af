"""The causes of dtype and device errors: which tensor has which, what it does not match, and where it comes from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from nbdebug.registry import rule
from nbdebug.report import Finding, Fix, Link, Where
from nbdebug.text import count
from nbdebug.tools.errors.rules import (
    NOWHERE,
    ArgumentFact,
    Raised,
    TriedFix,
    ValueOrigin,
    as_code,
    bracketed,
    is_plain,
    word_pairs,
)


@dataclasses.dataclass(frozen=True)
class DtypeFacts:
    """kind: what the op could not do:

        mixed        two dtypes in one op       index        an index is not an integer
        classes      needs class numbers        probable     needs a float target
        whole        needs floats               mask         needs a mask, or no mask
        half         no kernel for half         complex      no kernel for complex numbers
        in-place     the result does not fit    gradient     integers have no gradient
        integers     needs integers, or masks
        array        an array that can't become a tensor, or a tensor with a dtype that NumPy does not have
        autocast     unsafe under autocast      overflow     a constant beyond the dtype's range

    odd: the tensor to change; partner: the other operand (a weight, a tensor); expected: the dtype that works; op: the
    module ("net.0") or function that failed, "" where not known; named: the dtype in the message, for an array that of
    its entries ("object_"); model: whose weight odd or partner is; default: the dtype of most parameters of the user's
    models. entry: for an array the type and place of the first entry that is not a number."""

    raised: Raised
    kind: str
    odd: ArgumentFact | None = None
    partner: ArgumentFact | None = None
    expected: str = ""
    op: str = ""
    named: str = ""
    model: str = ""
    default: str = "float32"
    origin: ValueOrigin | None = None
    cure: TriedFix | None = None
    entry: str = ""


CASTS = word_pairs(
    "double:float64 half:float16 bfloat16:bfloat16 float:float32 long:int64 int:int32 bool:bool byte:uint8 short:int16"
)


def cast(dtype: str) -> str:
    """The method that converts to a dtype: "float()", "to(torch.uint8)"."""
    short = (call for call, to in CASTS.items() if to == dtype and call not in ("byte", "short"))
    return next((f"{call}()" for call in short), f"to(torch.{dtype})")


_TAKES = ("from_numpy", "tensor", "as_tensor", "asarray")


def computes(op: str, dtype: str) -> str:
    return f"`{op}` computes in {dtype}"


def dtype_reason(origin: ValueOrigin, dtype: str) -> str:
    """Why the value has this dtype, as a clause; "" where that is not known."""
    call = origin.call
    name = f"`{origin.name}`"
    if origin.stated:
        return f"{name} is created with dtype={origin.stated}"
    if call == "from_numpy" or call in _TAKES and dtype in ("float64", "int32", "int16", "uint8", "bool"):
        return f"`{call}` keeps NumPy's {dtype}" + f" ({name})"
    if call == "tensor" and dtype == "int64":
        return f"`tensor` of integers gives int64 ({name})"
    if CASTS.get(call) == dtype:
        return f"`.{call}()` converted it ({name})"
    call = "comparison" if call in ("eq", "ne", "gt", "ge", "lt", "le") else call
    phrases = {
        "comparison": f"{name} is the result of a comparison",
        "module": f"{name} computes in {dtype}",
        "autocast": "it was computed under autocast, which has ended",
    }
    if call in phrases:
        return phrases[call]
    if call in ("to", "type", "astype"):
        return f"`.{call}(…)` converted it ({name})"
    if call in ("argmax", "argmin", "argsort", "one_hot", "arange", "randint", "randperm", "multinomial", "bincount"):
        return f"`{call}` gives {dtype} ({name})"
    if call in ("zeros", "ones", "empty", "full", "rand", "randn", "linspace", "Tensor", "FloatTensor", "tensor"):
        return f"`{call}` gives {dtype} by default ({name})"
    return f"{name} comes from `{call}`" if call else ""


def rewritten(origin: ValueOrigin, expected: str) -> str | None:
    """The binding of the origin with a cast at its end: `features = torch.from_numpy(values).float()`."""
    named = all(part.isidentifier() for part in origin.name.split("."))
    whole, call = origin.code, origin.call
    if not named or "\n" in whole or "Parameter(" in whole or len(whole) > 120:
        return None
    if origin.stated:
        return f"{origin.name} = {whole.replace(f'dtype={origin.stated}', f'dtype=torch.{expected}')}"
    known = (*_TAKES, *CASTS, *"zeros ones empty full rand randn linspace randint arange".split())
    if call not in known or not whole.endswith(")"):
        return None
    if call in CASTS and whole.endswith(f".{call}()"):
        return f"{origin.name} = {whole.removesuffix(f'{call}()')}{cast(expected)}"
    simple = whole.count("(") == whole.count(")") and " " not in whole.split("(", 1)[0]
    return f"{origin.name} = {whole if simple else f'({whole})'}.{cast(expected)}"


TENSORS = "https://pytorch.org/docs/stable/tensor_attributes.html"


@rule(
    code="error/dtype-mismatch",
    title="An op gets a dtype that it does not support, or operands of two dtypes.",
    symptom="mat1 and mat2 must have the same dtype; expected scalar type Long but found Float; not implemented for "
    "'Long'; result type Float can't be cast to the desired output type Long; can't convert np.ndarray of "
    "type numpy.object_.",
    cause="Layers and many ops do not convert dtypes. NumPy's floats are float64 and stay float64 in `from_numpy`, "
    "integers become int64, class numbers must be int64 and other targets float, `.half()` on a model does not convert "
    "its inputs, and results of autocast stay in half precision after its block.",
    confirm="`x.dtype`, `y.dtype` and `next(model.parameters()).dtype` right before the line.",
    fix="Convert where the tensor is created: `.float()` for inputs, `.long()` for class numbers and ids.",
    reference=TENSORS,
)
def dtype_mismatch(facts: DtypeFacts) -> Finding | None:
    if facts.odd is None and facts.kind not in ("autocast", "array", "gradient"):
        return None
    title, chain = _dtype_title(facts), facts.origin.way if facts.origin is not None else ()
    evidence = {
        "tensors": [_row(part) for part in (facts.odd, facts.partner) if part is not None],
        "expected": facts.expected,
        "message": facts.raised.message.partition("\n")[0][:300],
    }
    return Finding("error/dtype-mismatch", title, facts.raised.where, evidence, _dtype_fixes(facts), chain)


def _row(part: ArgumentFact) -> dict[str, object]:
    fact = part.fact
    return {
        "tensor": part.name,
        "dtype": fact.dtype,
        "shape": list(fact.shape),
        "device": fact.device,
        "least": fact.low,
        "largest": fact.high,
    }


def _dtype_title(facts: DtypeFacts) -> str:
    odd, origin = facts.odd, facts.origin
    if odd is None:
        return _without(facts)
    what = f"a {odd.fact.dtype}" if odd.fact.kind == "list" else odd.fact.dtype
    start = f"{odd.phrase[:1].upper()}{odd.phrase[1:]} is {what}"
    partner = facts.partner
    weight = partner if partner is not None and partner.owner is not None else odd  # a model's `.half()`
    whole = origin is not None and weight.name.startswith(f"{origin.name}.")
    dtype = weight.fact.dtype if whole else odd.fact.dtype
    why = dtype_reason(origin, dtype) if origin is not None and facts.kind != "overflow" else ""
    clash = _dtype_REASONS.get(facts.kind, _mixed)(facts, odd)
    return start + clash + (f": {why}" if why else "")


def _without(facts: DtypeFacts) -> str:
    if facts.kind == "autocast":
        return "`BCELoss` gets probabilities under autocast, where a sigmoid in half precision becomes 0 or 1"
    if facts.kind == "gradient":
        return "This tensor holds integers, but only floating-point tensors can require gradients"
    if facts.named in ("object_", "str_", "str", "NoneType"):
        return f"The data for a tensor contains values that are not numbers ({facts.named.strip('_')})"
    phrases = {
        "order": "An array has another byte order than this machine (big-endian)",
        "ScalarType": "A tensor has a dtype that NumPy does not know",
    }
    return phrases.get(facts.named, f"The argument is a {facts.named}, but must be a tensor")


def _mixed(facts: DtypeFacts, odd: ArgumentFact) -> str:
    partner = facts.partner
    if odd.owner is not None and odd.fact.kind == "parameter":
        return f", but the input of {_of(facts)} is {facts.expected}"
    if partner is not None and partner.owner is not None:
        return f", but {computes(facts.op or partner.owner, partner.fact.dtype)}"
    if partner is not None:
        return f", but {partner.phrase} is {partner.fact.dtype}"
    return f", but must be {facts.expected}"


def _of(facts: DtypeFacts) -> str:
    return f"`{facts.op}`" if facts.op else "the op"


def _probable(facts: DtypeFacts, odd: ArgumentFact) -> str:
    if facts.op.endswith("cross_entropy") and not facts.op.startswith("binary") and len(odd.fact.shape) > 1:
        return (
            f" with the shape of the scores, so {_of(facts)} reads it as probabilities, which must be "
            f"{facts.expected}; class numbers would have one dimension less"
        )
    return f", but {_of(facts)} needs a {facts.expected} target, like its input"


def _index(facts: DtypeFacts, odd: ArgumentFact) -> str:
    if facts.expected == "bool":
        return ", but a mask must be bool"
    return f", but {_of(facts)} takes indices, which must be int64"


def _mask(facts: DtypeFacts, odd: ArgumentFact) -> str:
    if odd.fact.dtype == "bool":
        return ", a mask, and `-` is not defined for masks (`~` inverts one, `^` is true where two differ)"
    return ", but a mask must be bool"


def _array(facts: DtypeFacts, odd: ArgumentFact) -> str:
    if odd.fact.dtype == "bfloat16":
        return ", which NumPy does not have"
    if facts.named == "order":
        return " with another byte order than this machine (big-endian)"
    if facts.entry:
        return f", with {facts.entry}: a tensor holds only numbers of one type"
    if facts.named not in ("object_", "str_"):
        return f"{' in NumPy' * (odd.fact.device == 'numpy')}, but {_of(facts)} needs a tensor"
    return ": a tensor holds only numbers of one type"


_dtype_REASONS = {
    "mixed": _mixed,
    "classes": lambda facts, odd: f", but {_of(facts)} takes class numbers, which must be int64",
    "probable": _probable,
    "index": _index,
    "mask": _mask,
    "whole": lambda facts, odd: f", but {_of(facts)} is defined only for floating-point numbers",
    "integers": lambda facts, odd: (
        ", but `&`, `|` and `~` take masks and integers: compare first, as in `(a > 0) & (b > 0)`"
        if facts.expected == "bool"
        else f", but {_of(facts)} takes integers"
    ),
    "in-place": lambda facts, odd: f", but the result, which is written into it, is {facts.expected}",
    "half": lambda facts, odd: f", but {_of(facts)} has no kernel for it{' on the CPU' * (odd.fact.device == 'cpu')}",
    "array": _array,
    "gradient": lambda facts, odd: ", but only floating-point tensors can require gradients",
    "complex": lambda facts, odd: f", but {_of(facts)} is not defined for complex numbers",
    "overflow": lambda facts, odd: ", but the constant in this line is outside its range",
    "autocast": lambda facts, odd: (
        " and goes into `BCELoss` under autocast, where a sigmoid in half precision becomes exactly 0 or 1"
    ),
}


def _dtype_fixes(facts: DtypeFacts) -> tuple[Fix, ...]:
    if facts.kind == "autocast":
        title = "Pass the scores, without the sigmoid, to a loss that computes it safely."
        return (Fix(title, "loss = nn.functional.binary_cross_entropy_with_logits(scores, target)"),)
    if facts.kind == "overflow" and facts.odd is not None:
        return (Fix("Use the lowest number of the dtype.", f"torch.finfo({facts.odd.name}.dtype).min"),)
    fixes = []
    if facts.kind == "mask" and facts.odd is not None and facts.odd.fact.dtype == "bool":
        return _masks(facts, facts.odd)
    if facts.cure is not None and facts.odd is not None:
        title = {
            "in-place": "Use a dtype that can hold the result.",
            "complex": "Use the magnitude, or work on the real and the imaginary part.",
        }.get(facts.kind, f"Convert it to {facts.expected} before this line.")
        fixes.append(facts.cure.fix(title, _assigned(facts, facts.odd)))
    ours = (
        facts.origin is not None
        and facts.odd is not None
        and facts.origin.call != "module"
        and not (facts.partner is not None and facts.partner.name.startswith(f"{facts.origin.name}."))
    )
    if facts.origin is not None and ours and facts.kind not in ("half", "complex"):
        code = rewritten(facts.origin, facts.expected)
        if code is not None and (not fixes or code != fixes[0].code):
            fixes.append(Fix("Or where it is created.", code))
    return (*fixes, *_dtype_others(facts))


def _masks(facts: DtypeFacts, odd: ArgumentFact) -> tuple[Fix, ...]:
    """Fixes for arithmetic with masks."""
    if "Negation" in facts.raised.message:
        return (Fix("Invert a mask with `~`.", f"~{bracketed(odd.name)}"),)
    first, cure = bracketed(odd.name), dataclasses.replace(facts.cure or TriedFix(""), edit=None)
    if facts.partner is None:
        return cure.fix("Convert the mask to numbers.", f"{first}.float()"), Fix("Or invert the mask.", f"~{first}")
    partner = bracketed(facts.partner.name)
    count = cure.fix("Convert the mask to numbers.", f"{first}.float() - {partner}.float()")
    return count, Fix("Or mark where the two differ.", f"{first} ^ {partner}")


def _assigned(facts: DtypeFacts, odd: ArgumentFact) -> str:
    """`x = x.float()` for a variable, the cast in place of the expression for another."""
    assert facts.cure is not None
    plain = odd.known and is_plain(odd.name)
    if plain:
        return f"{odd.name} = {facts.cure.code}"
    return facts.cure.code if odd.known else (f"x = x.to(torch.{facts.expected})   # {odd.name}")


def _dtype_others(facts: DtypeFacts) -> list[Fix]:
    """Other fixes: what the user may have meant."""
    odd, partner = facts.odd, facts.partner
    if odd is None and facts.cure is not None and facts.cure.edit is not None:
        return [Fix.of("Create it with floating-point numbers.", facts.cure.edit)]
    if odd is None:
        code = 'values = frame.select_dtypes("number").to_numpy("float32")'
        tensor = "torch.tensor(values, dtype=torch.float32, requires_grad=True)"
        if facts.kind == "array":
            return [Fix("Keep only the numbers, in one dtype.", code)]
        return [Fix("Create it with floating-point numbers.", tensor)]
    if facts.kind == "array" and facts.cure is None:
        title = "Remove the entries that are not numbers, or replace them, before you create the tensor."
        return [Fix(title, f"bad = [i for i, value in enumerate({odd.name}) if not isinstance(value, (int, float))]")]
    if facts.kind == "probable" and odd.fact.dtype == "int64" and "shape of the scores" in _probable(facts, odd):
        return [Fix("Or pass the class numbers.", f"{odd.name} = {odd.name}.argmax(1)")] if odd.known else []
    if odd.fact.kind == "parameter" and odd.owner is not None:
        return [Fix("Convert the whole model to one dtype.", f"{facts.model or odd.name.split('.')[0]}.float()")]
    if facts.kind == "mixed" and partner is not None and partner.owner is not None and partner.fact.dtype != "float32":
        root = facts.model or partner.name.split(".")[0]
        title = "Or keep the model in float32 (and use torch.autocast for half precision)."
        return [Fix(title, f"{root}.float()")]
    if facts.kind == "whole" and odd.fact.dtype in ("int64", "int32"):
        return (
            [
                Fix(
                    "If these are ids or classes: use an embedding or one_hot, not arithmetic.",
                    f"nn.functional.one_hot({odd.name}, num_classes).float()",
                )
            ]
            if odd.known and facts.op
            else []
        )
    if facts.kind == "mixed" and odd.fact.dtype == "uint8":
        return [Fix("If these are images: scale them to 0…1 as well.", f"{odd.name} = {odd.name}.float() / 255")]
    return []


# -- devices -----------------------------------------------------------------------------------------------------------


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
    title = _device_title(facts)
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
    return Finding(
        "error/device-mismatch", title, facts.raised.where, evidence, _device_fixes(facts), _device_chain(facts)
    )


def _device_title(facts: DeviceFacts) -> str | None:
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
    if facts.why in _device_TITLES:
        return _device_TITLES[facts.why](facts, odd)
    source = f" (computed from `{facts.source}`)" if facts.source and facts.why in ("variable", "batch") else ""
    return f"{subject}{source} is on {device}, but {_elsewhere(facts)}" + _device_REASONS.get(
        facts.why, lambda facts: ""
    )(facts)


def _elsewhere(facts: DeviceFacts) -> str:
    partner = facts.partner
    return f"{partner.phrase} is on {partner.fact.device}" if partner else f"the others are on {facts.home}"


def _generator(facts: DeviceFacts) -> str:
    if facts.why == "loader":
        return (
            f"The loader shuffles with a CPU generator, but random numbers must be generated on {facts.home} "
            "(`torch.set_default_device`)"
        )
    name = f"`{facts.attribute}`" if facts.attribute else "The generator"
    return f"{name} is on another device than {facts.home}, where the random numbers must be generated"


_device_TITLES: dict[str, Callable[[DeviceFacts, ArgumentFact], str]] = {
    "model": lambda facts, odd: (
        f"`{facts.owner}` is still on {odd.fact.device} (`{odd.name}`), but {_elsewhere(facts)}"
    ),
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
_device_REASONS: dict[str, Callable[[DeviceFacts], str]] = {
    "attribute": lambda facts: (
        f": `{facts.attribute}` is a plain attribute of `{facts.owner}` ({facts.holder}), and `.to` moves only "
        "parameters and buffers"
    ),
    "dropped": lambda facts: (
        f": `.to` returns a new tensor, and the line that calls it ({facts.dropped.place}) does not keep it"
    ),
    "made": lambda facts: (
        f": `{facts.origin.call if facts.origin else ''}` creates it on the CPU, because it gets no device"
    ),
    "batch": lambda facts: ": it comes from the loader, and nothing moves it",
    "holder": lambda facts: f": `{facts.holder}` is not a module, so nothing moves its `{facts.attribute}`",
}


def _device_fixes(facts: DeviceFacts) -> tuple[Fix, ...]:
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
        return (Fix.of(title, cure.edit, worked, after), *_device_others(facts, odd))
    first = Fix(title, code, worked, after)
    return (first, *_device_others(facts, odd))


def _device_others(facts: DeviceFacts, odd: ArgumentFact) -> list[Fix]:
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
        title = f"Or move `{facts.source}`, from which it is computed."
        fixes.append(Fix(title, f"{facts.source} = {facts.source}.to({facts.target})"))
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
    title = "Allocate memory for it, then load the weights."
    return (
        Fix(title, f'{name}.to_empty(device="cpu")\n{name}.load_state_dict(state)   # or initialize it'),
        Fix("Or replace the weights without values by the loaded ones.", f"{name}.load_state_dict(state, assign=True)"),
    )


def _device_chain(facts: DeviceFacts) -> tuple[Link, ...]:
    if facts.why == "dropped":
        return (Link("the result of this line is not kept", facts.dropped),)
    return facts.origin.way if facts.origin is not None else ()
