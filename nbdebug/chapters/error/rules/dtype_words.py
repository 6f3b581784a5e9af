"""How the rules over dtypes say what made a dtype, and the line that would make another."""

from __future__ import annotations

from nbdebug.chapters.error.facts_parts import Origin

CASTS = {
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "long": "int64",
    "int": "int32",
    "bool": "bool",
    "byte": "uint8",
    "short": "int16",
}
SHORT = {
    "float32": ".float()",
    "float64": ".double()",
    "float16": ".half()",
    "bfloat16": ".bfloat16()",
    "int64": ".long()",
    "bool": ".bool()",
    "int32": ".int()",
}
_TAKES = ("from_numpy", "tensor", "as_tensor", "asarray")


def computes(op: str, dtype: str) -> str:
    return f"`{op}` computes in {dtype}"


def made(origin: Origin, dtype: str) -> str:
    """What made the dtype, in half a sentence; "" where that says nothing."""
    call = origin.call
    name = f"`{origin.name}`"
    if origin.stated:
        return f"it is made with dtype={origin.stated} ({name})"
    if call == "from_numpy" or call in _TAKES and dtype in ("float64", "int32", "int16", "uint8", "bool"):
        return f"`{call}` keeps NumPy's {dtype}" + f" ({name})"
    if call == "tensor" and dtype == "int64":
        return f"`tensor` of whole numbers is int64 ({name})"
    if CASTS.get(call) == dtype:
        return f"`.{call}()` made it so ({name})"
    call = "comparison" if call in ("eq", "ne", "gt", "ge", "lt", "le") else call
    known = {
        "comparison": f"{name} is a comparison, which gives a mask",
        "module": f"{name} computes in {dtype}",
        "autocast": "it was computed under autocast, which has ended",
    }
    if call in known:
        return known[call]
    if call in ("to", "type", "astype"):
        return f"`.{call}(…)` made it so ({name})"
    if call in ("argmax", "argmin", "argsort", "one_hot", "arange", "randint", "randperm", "multinomial", "bincount"):
        return f"`{call}` gives {dtype} ({name})"
    if call in ("zeros", "ones", "empty", "full", "rand", "randn", "linspace", "Tensor", "FloatTensor", "tensor"):
        return f"`{call}` gives {dtype} unless it is told otherwise ({name})"
    return f"{name} comes from `{call}`" if call else ""


def rewritten(origin: Origin, wanted: str) -> str | None:
    """The binding of the origin with a cast behind it: `features = torch.from_numpy(values).float()`."""
    named = all(part.isidentifier() for part in origin.name.split("."))
    if not named or "\n" in origin.code or "Parameter(" in origin.code or len(origin.code) > 120:
        return None
    if origin.stated:
        return f"{origin.name} = {origin.code.replace(f'dtype={origin.stated}', f'dtype=torch.{wanted}')}"
    cast = SHORT.get(wanted, f".to(torch.{wanted})")
    whole = origin.code
    if origin.call not in (
        *_TAKES,
        *CASTS,
        "zeros",
        "ones",
        "empty",
        "full",
        "rand",
        "randn",
        "linspace",
        "randint",
        "arange",
    ) or not whole.endswith(")"):
        return None
    if CASTS.get(origin.call) is not None and whole.endswith(f".{origin.call}()"):
        return f"{origin.name} = {whole.removesuffix(f'.{origin.call}()')}{cast}"
    simple = whole.count("(") == whole.count(")") and " " not in whole.split("(", 1)[0]
    return f"{origin.name} = {whole}{cast}" if simple else f"{origin.name} = ({whole}){cast}"
