"""generation(): how fast a model writes tokens, whether later ones take longer, and what would make it faster."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nbdebug.observe.snapshot import modes_put_back, same_random_numbers
from nbdebug.observe.validation import check_count
from nbdebug.report import Finding, Fix, Report, RuledOut, Table, Where
from nbdebug.text import count, duration, figures, percent
from nbdebug.tools.speed.rules import WORTH_MOVING, SpeedFacts, finding

GROWS = 1.5
"""The last tokens over the first: level ones stay under 1.2 on a busy machine."""
WORTH = 1.3
"""Times faster from which on a cache that is off is a fault."""
ROWS = 4
NONE = SpeedFacts()
"""Tokens have no steps of training."""


@dataclasses.dataclass(frozen=True)
class Writing:
    """One way to write the same tokens. prompt: seconds of the first; steps: of each further one."""

    name: str
    prompt: float
    steps: tuple[float, ...]
    tokens: torch.Tensor

    @property
    def rate(self) -> float:
        return self.tokens.numel() / (self.prompt + sum(self.steps))

    @property
    def ends(self) -> tuple[float, float]:
        """Seconds of the first and of the last tokens. The least of some: what else runs only adds."""
        some = max(len(self.steps) // 4, min(len(self.steps) // 2, 3), 1)
        return min(self.steps[:some]), min(self.steps[-some:])

    @property
    def growth(self) -> float:
        return self.ends[1] / max(self.ends[0], 1e-9)


def generation(model: Any, inputs: Any, *, max_new_tokens: int = 64) -> Report:
    """How long the prompt and each further token take, with and without a cache, and whether the tokens are the same.

    model: a model of transformers, or anything that is called with tokens (batch, length) and gives logits (batch,
    length, vocabulary), an object with `logits`, or a tuple that begins with them. inputs: the tokens, or what a
    tokenizer gives (input_ids, attention_mask). max_new_tokens: that are written, greedily, in each way; the first
    ones, which warm up, are written once more.

    The model is in eval mode meanwhile, without gradients, and is afterwards as it was. Raises TypeError for inputs
    that are no tokens, ValueError for max_new_tokens below 2.
    """
    check_count(max_new_tokens, "max_new_tokens")
    if max_new_tokens < 2:
        raise ValueError("max_new_tokens must be at least 2: one token shows no trend.")
    ids, mask = _tokens(inputs)
    module = model if isinstance(model, torch.nn.Module) else torch.nn.Module()
    weights = next(module.parameters(), None)
    if weights is not None:
        ids, mask = ids.to(weights.device), None if mask is None else mask.to(weights.device)
    cache = _cache_name(model)
    off = bool(cache) and _cache_is_off(model)
    with modes_put_back(module), torch.no_grad(), same_random_numbers():
        for part in module.modules():
            part.training = False
        _write(model, ids, mask, 2, cache, "warm-up")
        plain = _write(model, ids, mask, max_new_tokens, "", "no cache")
        ways = [plain]
        if cache:
            ways.insert(off, _write(model, ids, mask, max_new_tokens, cache, "cache"))
        ways += list(_others(model, ids, mask, max_new_tokens, cache, weights))
    return _report(model, ids, mask, ways, off, weights)


def _tokens(inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    mask = None
    if isinstance(inputs, Mapping) or hasattr(inputs, "input_ids"):
        inputs, mask = inputs["input_ids"], inputs.get("attention_mask")
    if not isinstance(inputs, torch.Tensor) or inputs.is_floating_point() or inputs.dim() not in (1, 2):
        raise TypeError(
            "generation needs tokens: a tensor of whole numbers (batch, length), or what a tokenizer gives with "
            f'return_tensors="pt"; got {type(inputs).__name__}.'
        )
    return (inputs if inputs.dim() == 2 else inputs[None]), mask


def _cache_name(model: Any) -> str:
    """The argument that takes the cache, `past_key_values`, in transformers 5 `cache`; "" for a model without one."""
    forward = getattr(type(model), "forward", None)
    takes = set(inspect.signature(forward).parameters) if forward is not None else set()
    return next((name for name in ("past_key_values", "cache") if {name, "use_cache"} <= takes), "")


def _cache_is_off(model: Any) -> bool:
    """By the model's settings, or because checkpointing in training mode turns it off."""
    places = (getattr(model, "generation_config", None), getattr(model, "config", None))
    checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return (checkpoints and model.training) or any(getattr(place, "use_cache", None) is False for place in places)


def _logits(output: Any) -> torch.Tensor:
    output = getattr(output, "logits", output)
    return output[0] if isinstance(output, (tuple, list)) else output


def _write(model: Any, ids: Any, mask: Any, number: int, cache: str, name: str) -> Writing:
    """Greedy tokens, each timed."""
    times, written, past, newest, text = [], [], None, ids, ids
    wait: Callable[[], Any] = torch.cuda.synchronize if ids.is_cuda else lambda: None
    unused = {"use_cache": False} if _cache_name(model) else {}
    for _ in range(number):
        begin = time.perf_counter()
        options = {} if mask is None else {"attention_mask": mask}
        if cache:
            output = model(newest, use_cache=True, **options, **{cache: past})
            past = getattr(output, cache if hasattr(output, cache) else "past_key_values")
        else:
            output = model(text, **options, **unused)
        newest = _logits(output)[:, -1:].argmax(-1)
        text = torch.cat([text, newest], 1)
        mask = None if mask is None else torch.cat([mask, torch.ones_like(newest)], 1)
        wait()
        times.append(time.perf_counter() - begin)
        written.append(newest)
    return Writing(name, times[0], tuple(times[1:]), torch.cat(written, 1))


def _others(model: Any, ids: Any, mask: Any, number: int, cache: str, weights: Any) -> Iterator[Writing]:
    """Half precision, and more rows at once."""
    few = min(number, 32)
    with contextlib.suppress(Exception):  # a model that takes neither
        if weights is not None and weights.dtype == torch.float32:
            with torch.autocast(weights.device.type, torch.bfloat16):
                yield _write(model, ids, mask, few, cache, "autocast to bfloat16")
    with contextlib.suppress(Exception):
        more = None if mask is None else mask.repeat(ROWS, 1)
        yield _write(model, ids.repeat(ROWS, 1), more, few, cache, f"{ROWS} times the rows")


def _report(model: Any, ids: Any, mask: Any, ways: list[Writing], off: bool, weights: Any) -> Report:
    first, name = ways[0], type(model).__name__
    plain = next(way for way in ways if way.name == "no cache")
    found = tuple(_findings(plain, ways, off, weights, name))
    grown, steps = f"{figures(first.growth, 2)} times", statistics.median(first.steps)
    times = f"{duration(first.prompt)} for the prompt, {duration(steps)} for each further token"
    level = f"grow to {grown}" if first.growth >= GROWS else "stay level"
    rows = [(w.name, duration(w.prompt), *map(duration, w.ends), figures(w.rate), _same(w, first)) for w in ways]
    columns = ("way", "prompt", "first tokens", "last tokens", "tokens a second", "same tokens")
    facts = {way.name: {"prompt": way.prompt, "steps": list(way.steps), "rate": way.rate} for way in ways}
    return Report(
        f"generation({name})",
        found,
        ruled_out=() if found else (RuledOut("no-kv-cache", f"the last tokens take {grown} the first"),),
        notes=tuple(_notes(model, ids, mask, weights)),
        facts={"generation": facts},
        headline="" if found else f"{figures(first.rate)} tokens a second: {times}, which {level}.",
        steps=len(first.steps) + 1,
        tables=(Table("Ways to write the tokens", columns, rows, f"greedy, {count(len(ids), 'row')}", open=True),),
    )


def _same(way: Writing, first: Writing) -> str:
    length = min(way.tokens.shape[1], first.tokens.shape[1])
    equal = (way.tokens[: len(first.tokens), :length] == first.tokens[:, :length]).float().mean().item()
    return "yes" if equal == 1 else f"{percent(equal)} of them"


def _findings(plain: Writing, ways: list[Writing], off: bool, weights: Any, name: str) -> Iterator[Finding]:
    where, times = Where(phase="forward"), f"{figures(plain.growth, 2)} times"
    seen = {"tokens_a_second": figures(plain.rate), "last_over_first_token": times}
    cached = next((way for way in ways if way.name == "cache"), None)
    gain = plain.ends[1] / max(cached.ends[1], 1e-9) if cached is not None else 0.0
    if cached is not None and off and gain >= WORTH:
        same = _same(cached, plain)
        after = {"a token": duration(statistics.median(cached.steps)), "same tokens": same}
        fix = Fix("Turn the cache on.", "model.generate(**inputs, use_cache=True)", True, after)
        title = f"The cache is off: each token runs `{name}` over all earlier ones again"
        seen |= {"last_tokens_with_the_cache": f"{figures(gain, 2)} times as fast", "same_tokens": same}
        yield finding(NONE, "speed/no-kv-cache", "forward", title, where, fix, **seen)
    elif cached is None and plain.growth >= GROWS:
        title = f"Each further token takes longer, {times} at the end: nothing is kept"
        kept = "Keep what the model returns for earlier tokens, and give it the newest."
        fix = Fix(kept, "out, past = model(new, past)")
        yield finding(NONE, "speed/no-kv-cache", "forward", title, where, fix, **seen)
    if weights is not None and weights.dtype == torch.float64:
        fix = Fix("Compute in float32, or in bfloat16 on a GPU.", "model.float()")
        yield finding(NONE, "speed/wrong-dtype", "forward", "The weights are float64", where, fix)
    worth_moving = statistics.median(plain.steps) >= WORTH_MOVING
    if worth_moving and weights is not None and weights.device.type == "cpu" and torch.cuda.is_available():
        fix = Fix("Move the model and its inputs.", "model.to('cuda')")
        title = "The model writes on the CPU, and a GPU idles"
        yield finding(NONE, "speed/cpu-device", "forward", title, Where(), fix)


def _notes(model: Any, ids: Any, mask: Any, weights: Any) -> Iterator[str]:
    if weights is not None:
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        kernel = f", attention by {attention}" if attention else ""
        dtype = str(weights.dtype).removeprefix("torch.")
        yield f"Weights: {dtype} on {weights.device}{kernel}; {count(len(ids), 'row')}."
    if getattr(model, "training", False):
        yield "The model is in training mode: dropout would change the tokens. Call model.eval() first."
    padding = 0.0 if mask is None else 1 - mask.float().mean().item()
    if padding > 0.25:
        yield f"{percent(padding)} of the prompt is padding: sort by length, or write rows of one length together."
