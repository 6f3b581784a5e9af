"""compare(): is one model better than another, beyond noise, and was the comparison a fair one?"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch

from nbdebug.observe.snapshot import modes_put_back, same_random_numbers
from nbdebug.observe.variables import closure_variables
from nbdebug.report import Fix, Report, Symptom, Table
from nbdebug.text import count, figures, listed
from nbdebug.tools.quality.rules import Evidence, findings_of
from nbdebug.tools.training.evaluate import mode, spared_buffers

RESAMPLES, CHUNK, LEVEL = 2000, 100, 0.95
AGAIN = 4
"""Inputs that are run once more: with the same seed, and with another one."""
MOST = 400
"""Rows of the table of inputs: those with the largest differences."""
POWER = 2.8
"""Standard errors at which a difference of this size is seen in 8 of 10 comparisons (1.96 + 0.84)."""
PLAIN = (int, float, str, bool, type(None), tuple)
LIMITS = re.compile(
    r"max|min_|limit|length|temperature|top_?[pk]$|sample|beam|steps|guidance|cfg|seed|batch|crop|resize|prompt|shot|split"
    r"|data|dtype|penalty|normali|window|stride|truncat|image_size|resolution"
)
"""Names of settings that change what is measured, and not what is compared (a name, a path, a number of the run)."""
BY_MODE = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)


def compare(
    a: Any,
    b: Any,
    inputs: Any,
    metric: Callable[[Any, Any], Any],
    *,
    seeds: Sequence[int] | int = (0,),
    better: str = "higher",
    settings: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
) -> Report:
    """Compare two models on the same inputs and seeds, and say which is better only where noise does not explain it.

    a, b: models or functions, called with one input (a dict by keyword to a model) without gradients; lists of them:
    one for each training run, and the noise between runs counts; or lists of outputs, one for each input. inputs: a
    list or a loader, read once. metric: `metric(output, input)` → a number, or for a batch one for each row. seeds: set
    before each pass, for both alike. better: "higher" or "lower". settings: how either was evaluated (data, limits,
    prompt, seed), where that does not show in what is given.

    The difference is paired by input, with a 95% interval: the wider one of a bootstrap over inputs (and runs) and of
    Student's t. It holds for these checkpoints; where either is one training run, another run may differ by more. An
    unfair comparison is a finding: other settings, limits or constants in the functions, train mode, outputs that
    change at the same seed. Models are called in the mode that they are in; their buffers and modes and the random
    numbers are as before afterwards. `report.facts` has `a`, `b`, `difference`, `interval`. Raises ValueError for
    lengths that differ and a metric that gives no number.
    """
    if better not in ("higher", "lower"):
        raise ValueError(f'better takes "higher" or "lower"; got {better!r}')
    items = list(inputs)
    seeds = [seeds] if isinstance(seeds, int) else list(seeds)
    if not items or not seeds:
        raise ValueError("compare needs at least one input and one seed")
    sides = [_runs(thing, len(items), name) for thing, name in ((a, "a"), (b, "b"))]
    models = [m for side in sides for run in side for m in _models(run)]
    with same_random_numbers(), torch.no_grad(), kept(models):
        scores = [numpy.stack([_scores(run, items, metric, seeds) for run in side]) for side in sides]
        if scores[0].shape[2] != scores[1].shape[2]:
            raise ValueError(f"a has {scores[0].shape[2]} scores and b {scores[1].shape[2]}: other inputs or batches")
        draws = [_draws(side[0], items, metric, seeds[0]) for side in sides]
    modes, fix = _modes(sides), None
    if modes:
        with same_random_numbers(), torch.no_grad(), kept(models, evaluate=True):
            calm = _statistics([numpy.stack([_scores(run, items, metric, seeds) for run in s]).mean(1) for s in sides])
        after = {name: calm[name] for name in ("a", "b", "difference", "interval")}
        fix = Fix("Call both in eval mode.", "a.eval()\nb.eval()", True, after)
    reasons = [*_settings(a, b, settings), *modes]
    one, two = (side.mean((0, 1)) for side in scores)
    good = numpy.isfinite(one) & numpy.isfinite(two)
    if not good.any():
        raise ValueError("the metric gives no finite number for any input")
    plain = _statistics([side.mean(1)[:, good] for side in scores])
    fair = Evidence("quality/unfair-comparison", _unfair(reasons), values=dict(reasons), fix=fix)
    rows = sorted(zip(range(len(one)), one, two, two - one), key=lambda row: -abs(row[3]))[:MOST]
    bad = int((~good).sum())
    return Report(
        "compare(a, b)",
        findings_of((fair,) if reasons else ()),
        notes=tuple(_notes(scores, draws, sides, seeds, plain)),
        subject=f"{count(len(one), 'input')}, {count(len(seeds), 'seed')}, {better} is better",
        facts=plain,
        headline=f"As it was run: {_verdict(plain, better)}" if reasons else _verdict(plain, better),
        symptoms=(Symptom(f"The metric is not finite for {count(bad, 'input')}", "They are left out."),) * bool(bad),
        tables=(
            Table("Means", ("which", "mean", "inputs"), [(n, plain[n], int(good.sum())) for n in ("a", "b")]),
            Table(
                "Inputs, largest difference first", ("input", "a", "b", "b - a"), [tuple(map(_plain, r)) for r in rows]
            ),
        ),
    )


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


# -- scores ------------------------------------------------------------------------------------------------------------


def _runs(thing: Any, inputs: int, name: str) -> list[Any]:
    """What is called, one for each run; a list of outputs as a function of the place."""
    if callable(thing):
        return [thing]
    things = list(thing)
    if things and all(callable(one) for one in things):
        return things
    if len(things) != inputs:
        raise ValueError(f"{name} has {count(len(things), 'output')} for {count(inputs, 'input')}: other data")
    return [things]


def _models(run: Any) -> Iterator[torch.nn.Module]:
    """The models that a run calls, as far as they show."""
    if isinstance(run, torch.nn.Module):
        yield run
    elif isinstance(run, functools.partial):
        for part in (run.func, *run.args, *run.keywords.values()):
            yield from _models(part)
    elif hasattr(run, "__self__"):
        yield from _models(run.__self__)
    elif hasattr(run, "__code__"):
        named = [run.__globals__.get(name) for name in run.__code__.co_names]
        things = (*closure_variables(run).values(), *named)
        yield from (part for part in things if isinstance(part, torch.nn.Module))


@contextlib.contextmanager
def kept(models: Sequence[Any], evaluate: bool = False) -> Iterator[None]:
    """Modes and buffers are as before afterwards (in train mode a forward pass moves running statistics). evaluate: in
    eval mode meanwhile, without `.eval()`, in which some layers merge their adapters. What is no module is passed."""
    with contextlib.ExitStack() as stack:
        for model in (each for each in models if isinstance(each, torch.nn.Module)):
            stack.enter_context(mode(model, False) if evaluate else modes_put_back(model))
            stack.enter_context(spared_buffers(model.modules()))
        yield


def _seeded(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def _output(run: Any, place: int, item: Any) -> Any:
    if not callable(run):
        return run[place]
    return run(**item) if isinstance(run, torch.nn.Module) and isinstance(item, Mapping) else run(item)


def _scores(run: Any, items: list[Any], metric: Any, seeds: Sequence[int]) -> Any:
    """(seeds, inputs)."""
    rows = []
    for seed in seeds if callable(run) else seeds[:1]:
        _seeded(seed)
        parts = [_numbers(metric(_output(run, place, item), item)) for place, item in enumerate(items)]
        rows.append(numpy.concatenate(parts))
    return numpy.stack(rows)


def _numbers(value: Any) -> Any:
    """(n,) scores. Raises ValueError for what is no number."""
    plain = value.detach().cpu().double().numpy() if isinstance(value, torch.Tensor) else value
    try:
        return numpy.atleast_1d(numpy.asarray(plain, dtype="float64")).reshape(-1)
    except (TypeError, ValueError):
        raise ValueError(f"metric(output, input) takes to give a number; got {type(value).__name__}") from None


def _draws(run: Any, items: list[Any], metric: Any, seed: int) -> tuple[bool, bool]:
    """(the same seed gives the same scores, another seed as well), on some inputs."""
    if not callable(run):
        return True, True
    some = items[:AGAIN]
    first, same, other = (_scores(run, some, metric, (s,)) for s in (seed, seed, seed + 1))
    equal = functools.partial(numpy.allclose, first, rtol=1e-6, atol=1e-9, equal_nan=True)
    return bool(equal(same)), bool(equal(other))


# -- is it fair --------------------------------------------------------------------------------------------------------


def _settings(a: Any, b: Any, given: Any) -> Iterator[tuple[str, Any]]:
    """(name, both values) of what differs between the ways in which either is evaluated."""
    one, two = given if given is not None else ({}, {})
    yield from _differences(dict(one), dict(two), missing=True)
    models = [{id(model) for model in _models(thing)} for thing in (a, b)]
    if callable(a) and callable(b) and not (models[0] and models[0] == models[1]):  # one model: settings are compared
        yield from _differences(_shown(a), _shown(b))
        yield from _constants(a, b)


def _differences(one: Mapping[str, Any], two: Mapping[str, Any], missing: bool = False) -> Iterator[tuple[str, Any]]:
    for key in dict.fromkeys((*one, *two)):
        if (missing or (key in one and key in two)) and one.get(key) != two.get(key):
            yield str(key), (one.get(key), two.get(key))


def _shown(thing: Any) -> dict[str, Any]:
    """Plain settings that show: keywords of a partial, defaults, variables around a function, a generation config."""
    known: dict[str, Any] = {}
    if isinstance(thing, functools.partial):
        known |= _shown(thing.func) | thing.keywords
    elif hasattr(thing, "__code__"):
        code = thing.__code__
        names = code.co_varnames[: code.co_argcount]
        known |= dict(zip(reversed(names), reversed(thing.__defaults__ or ()))) | (thing.__kwdefaults__ or {})
        known |= closure_variables(thing)
    for model in _models(thing):
        config: Any = getattr(model, "generation_config", None)
        known |= config.to_dict() if hasattr(config, "to_dict") else {}
    return {key: value for key, value in known.items() if isinstance(value, PLAIN) and LIMITS.search(key.lower())}


def _constants(a: Any, b: Any) -> Iterator[tuple[str, Any]]:
    """Of two functions with the same code: numbers in them that differ (a limit, a seed, a temperature)."""
    codes = [getattr(thing, "__code__", None) for thing in (a, b)]
    if codes[0] is None or codes[1] is None or codes[0].co_code != codes[1].co_code:
        return
    pairs = list(zip(codes[0].co_consts, codes[1].co_consts))
    wrong = [pair for pair in pairs if all(type(v) is int for v in pair) and pair[0] != pair[1]]
    if wrong:
        yield "constants in the functions", wrong[0] if len(wrong) == 1 else wrong


def _modes(sides: list[list[Any]]) -> list[tuple[str, Any]]:
    """Models that are called in train mode, where that matters."""
    modes = []
    for side in sides:
        acting = [
            m.training for run in side for model in _models(run) for m in model.modules() if isinstance(m, BY_MODE)
        ]
        modes.append("train mode" if any(acting) else "eval mode")
    return [("mode", tuple(modes))] if "train mode" in modes else []


def _unfair(reasons: Sequence[tuple[str, Any]]) -> str:
    parts = []
    for name, values in reasons[:3]:
        if name == "mode":
            who = [side for side, mode in zip("ab", values) if mode == "train mode"]
            parts.append(f"{listed(who)} {'is' if len(who) == 1 else 'are'} called in train mode")
        elif isinstance(values, tuple):
            parts.append(f"{name}: {values[0]!r} for `a`, {values[1]!r} for `b`")
        else:
            parts.append(name)
    return f"The comparison is not fair: {'; '.join(parts)}"


# -- statistics --------------------------------------------------------------------------------------------------------


def _statistics(sides: list[Any]) -> dict[str, Any]:
    """Of (runs, inputs) for either: the means, their difference and its interval."""
    one, two = sides
    gaps = two.mean(0) - one.mean(0)
    size, value = len(gaps), float(gaps.mean())
    maker = numpy.random.default_rng(0)
    means = []
    for _ in range(RESAMPLES // CHUNK):
        weights = maker.multinomial(size, numpy.full(size, 1 / size), CHUNK) / size
        runs = [maker.multinomial(len(side), numpy.full(len(side), 1 / len(side)), CHUNK) / len(side) for side in sides]
        drawn = [numpy.einsum("ci,ri,cr->c", weights, side, share) for side, share in zip(sides, runs)]
        means.extend(drawn[1] - drawn[0])
    low, high = numpy.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    error = float(gaps.std(ddof=1) / math.sqrt(size)) if size > 1 else math.inf
    between = [float(side.mean(1).var(ddof=1)) / len(side) for side in (one, two) if len(side) > 1]
    whole = math.hypot(error, math.sqrt(sum(between)))
    degrees = min([size - 1, *[len(side) - 1 for side in (one, two) if len(side) > 1]])
    half = _t(degrees) * whole
    return {
        "a": float(one.mean()),
        "b": float(two.mean()),
        "difference": value,
        "interval": [min(float(low), value - half), max(float(high), value + half)],
        "standard error": whole,
        "inputs": size,
        "equal": bool((gaps == 0).all()),
    }


def _t(degrees: int) -> float:
    """The 97.5% quantile of Student's t, by the series of Cornish and Fisher (within 0.2% from 3 degrees on)."""
    exact = {0: math.inf, 1: 12.706, 2: 4.303}
    if degrees in exact:
        return exact[degrees]
    z = 1.959964
    series = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / degrees**power for power, term in enumerate(series, 1))


def _verdict(plain: Mapping[str, Any], better: str) -> str:
    value, (low, high) = plain["difference"], plain["interval"]
    if plain["equal"]:
        return f"a and b score the same on every input ({figures(plain['a'], 4)})."
    where = f"{figures(plain['b'], 4)} beside {figures(plain['a'], 4)}, difference {figures(value)}"
    where += f" (95% interval {figures(low)} to {figures(high)})" if math.isfinite(low) else " (one input: no interval)"
    if low <= 0 <= high:
        return f"No difference beyond noise: {where}."
    return f"{'b' if (value > 0) == (better == 'higher') else 'a'} is better: b scores {where}."


def _notes(scores: list[Any], draws: Any, sides: Any, seeds: Any, plain: Mapping[str, Any]) -> Iterator[str]:
    low, high = plain["interval"]
    if plain["equal"]:
        yield "Equal on every input: are both checkpoints loaded? Print a weight of each."
    elif low <= 0 <= high and plain["difference"] and math.isfinite(low):
        more = math.ceil(plain["inputs"] * (POWER * plain["standard error"] / plain["difference"]) ** 2)
        yield f"A difference of this size would show with about {more:,} inputs like these."
    loose = [name for name, (same, _) in zip("ab", draws) if not same]
    if loose:
        yield f"{listed(loose)} gives other scores at the same seed: that noise is not paired, and is in the interval."
    if len(seeds) == 1 and not loose and not all(other for _, other in draws):
        yield "The scores depend on the seed, and one seed is one draw: give seeds=range(5)."
    if len(seeds) > 1 and not plain["equal"]:
        gaps = scores[1].mean((0, 2)) - scores[0].mean((0, 2)) if scores[0].shape[1] == scores[1].shape[1] else None
        if gaps is not None:
            yield f"By seed the difference is {figures(float(gaps.min()))} to {figures(float(gaps.max()))}."
    if len(sides[0]) == 1 or len(sides[1]) == 1:
        yield "One training run of either: another run of the same program may differ by more than this interval."
