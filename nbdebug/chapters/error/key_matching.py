"""How the keys of a saved state and those of a model belong together: which prefix has to go, come or change.

Keys and shapes alone; no tensor is touched. A change is judged by how many saved keys it brings to a key of the model
with the same shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

Shapes = Mapping[str, tuple[int, ...]]

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "model.")
"""What DataParallel, torch.compile, FSDP, checkpoint wrappers and trainers put into a key."""
SAMPLES = 40
"""Keys without a partner from which changes are read."""
PARTNERS = 50
"""Keys of the model with the same end that each of them is held against."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Replace `old` at the start of a saved key by `new`; anywhere: take `old` away wherever it stands.

    fits: saved keys that then meet a key of the model with the same shape; whole: the saved state then is the
    model's, key for key."""

    old: str
    new: str
    anywhere: bool
    fits: int
    whole: bool

    def applied(self, key: str) -> str:
        if self.anywhere:
            return key.replace(self.old, "")
        return self.new + key[len(self.old) :] if key.startswith(self.old) else key


def fitting(saved: Shapes, model: Shapes) -> int:
    """Saved keys that the model has with the same shape."""
    return sum(model.get(key) == shape for key, shape in saved.items())


def best_change(saved: Shapes, model: Shapes) -> Change | None:
    """The change that brings the most keys together, if it brings more than there are without one."""
    best, most = None, fitting(saved, model)
    for old, new, anywhere in dict.fromkeys(_candidates(saved, model)):
        change = _judged(Change(old, new, anywhere, 0, False), saved, model)
        if change is not None and (
            change.fits > most or best is not None and change.fits == most and change.whole and not best.whole
        ):
            best, most = change, change.fits
    return best


def _judged(change: Change, saved: Shapes, model: Shapes) -> Change | None:
    renamed = {change.applied(key): shape for key, shape in saved.items()}
    if len(renamed) < len(saved):  # two keys would become one
        return None
    fits = fitting(renamed, model)
    return dataclasses.replace(change, fits=fits, whole=fits == len(saved) == len(model))


def _candidates(saved: Shapes, model: Shapes) -> Iterator[tuple[str, str, bool]]:
    for wrapper in WRAPPERS:
        if any(wrapper in key for key in saved):
            yield wrapper, "", not all(key.startswith(wrapper) for key in saved)
    lonely = _spread([key for key in saved if key not in model])
    wanted = [key for key in model if key not in saved]
    by_end: dict[str, list[str]] = {}
    for key in wanted:
        for end in {_end(key), _last(key)}:
            by_end.setdefault(end, []).append(key)
    for key in lonely:
        for partner in (by_end.get(_end(key)) or by_end.get(_last(key), []))[:PARTNERS]:
            yield from _changes(key, partner)


def _changes(key: str, partner: str) -> Iterator[tuple[str, str, bool]]:
    """What makes the one of the other: their differing starts, cut at dots; the longest common end first."""
    ours, theirs = key.split("."), partner.split(".")
    same = 0
    while same < min(len(ours), len(theirs)) and ours[-1 - same] == theirs[-1 - same]:
        same += 1
    for keep in range(same, 0, -1):
        old, new = (".".join(parts[: len(parts) - keep]) for parts in (ours, theirs))
        yield old + "." if old else "", new + "." if new else "", False


def _end(key: str) -> str:
    return ".".join(key.split(".")[-2:]) if key.count(".") else key


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _spread(keys: list[str]) -> list[str]:
    step = max(1, len(keys) // SAMPLES)
    return keys[::step][:SAMPLES]
