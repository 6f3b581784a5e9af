"""What lies in an object or an exception, read without asking it: no property, `__getattr__`, `__str__`, `__repr__`."""

from __future__ import annotations

from typing import Any

import torch

from nbdebug.observe.named import attributes


def members(thing: Any) -> dict[str, Any]:
    """The attributes that an object has of its own; of a module its parameters, buffers and children, too."""
    found = attributes(thing)
    if issubclass(type(thing), torch.nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            inside: Any = found.get(table)
            if issubclass(type(inside), dict):
                found |= {name: value for name, value in dict.items(inside) if value is not None}
    return found


def of_tensor(value: Any, name: str) -> Any:
    """An attribute of a tensor as torch itself has it, whatever a subclass puts in its place. Raises what torch raises:
    a nested tensor has no shape, a lazy parameter none yet."""
    return torch._C.TensorBase.__dict__[name].__get__(value)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor; None of what is none, or has no shape of its own (a nested or a lazy one)."""
    if not issubclass(type(value), torch.Tensor):
        return None
    try:
        return tuple(int(side) for side in of_tensor(value, "shape"))
    except (RuntimeError, TypeError, ValueError):
        return None


def message_of(error: BaseException) -> str:
    """What an exception of torch's or Python's says: the text among its own arguments."""
    given: Any = BaseException.__dict__["args"].__get__(error)
    if type(error) is KeyError and len(given) == 1 and type(given[0]) in (str, int):
        return repr(given[0])
    if issubclass(type(error), OSError) and len(given) >= 2 and type(given[1]) is str:
        return given[1]
    said = [part for part in given if issubclass(type(part), (str, int, float))]
    if said:
        text = said[0]
        return str.__str__(text) if isinstance(text, str) else str(text) if type(text) in (int, float, bool) else ""
    if issubclass(type(error), (ImportError, SyntaxError)):
        slot = (ImportError if isinstance(error, ImportError) else SyntaxError).__dict__["msg"]
        text = slot.__get__(error)
        return text if type(text) is str else ""
    return type(given[0]).__name__ if type(error) is KeyError and given else ""
