"""check_adapter(): what a LoRA, or an adapter of its kin, does to its model, and why it does nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from nbdebug.observe.snapshot import same_random_numbers
from nbdebug.observe.tensors import output_tensors
from nbdebug.observe.validation import check_model, optimizers_of
from nbdebug.report import Report, Symptom, Table
from nbdebug.text import count, figures, listed, percent
from nbdebug.tools.checkpoint.formats import loaded
from nbdebug.tools.quality.compare import kept
from nbdebug.tools.quality.rules import Evidence, findings_of

CALL = "check_adapter(model, *, base=None, saved=None)"
PARTNER = {"a": "b", "down": "up"}
"""Words of a factor's name, and of its partner's: the second is the one that begins at zero."""
RANKS = ("r", "rank", "lora_rank", "lora_r")
STEPS = 10
"""An optimizer's steps after which a factor that is still zero was not trained (a warm-up may begin at a rate of 0)."""
PROPORTIONAL = 1e-3
"""Relative error up to which what a layer adds is a number times its factors' product: the scale is that number."""
LARGEST = 1 << 28
"""Numbers of the largest layer of which a copy is made."""
EXPLAINED = 0.2
"""Share of a change of the base weights that may be left over where merged factors explain it (half precision)."""
TIMES = 10
NONE = Symptom("No adapter is seen in this model", "Names of a layer's two factors, with lora in them, tell it.")
WRAPPERS = re.compile(
    r"^(?:base_model\.model\.|model\.|module\.|_orig_mod\.|lora_unet_|lora_te\d?_|transformer\.|unet\.)+"
)
INNER = re.compile(
    r"\.(?:processor|base_layer|linear|base|original|layer|parametrizations\.weight(?:\.original)?)(?=\.|$)"
)


@dataclasses.dataclass
class Adapted:
    """A layer with an adapter. down, up: its factors, None of other kinds than LoRA; weight: what they are added to, if
    known; product: of the factors, in the weight's shape. scale: what the product is multiplied by; said: scales that
    the layer's own attributes give. merged: the product stands in the weight, and is not added."""

    name: str
    adapter: str
    factors: dict[str, torch.Tensor]
    product: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    rank: int | None = None
    scale: float | None = None
    said: dict[str, float] = dataclasses.field(default_factory=dict)
    measured: bool = False
    merged: bool = False
    active: bool = True

    @property
    def change(self) -> float | None:
        """The size of the change beside the weight's (Frobenius norms)."""
        if self.product is None or self.weight is None or self.scale is None:
            return None
        whole = float(self.weight.detach().float().norm())
        return abs(self.scale) * float(self.product.norm()) / whole if whole else None

    @property
    def zero(self) -> tuple[str, ...]:
        """Factors that hold nothing but zeros."""
        return tuple(name for name, factor in self.factors.items() if not bool(factor.detach().any()))

    @property
    def idle(self) -> bool:
        return self.product is not None and not bool(self.product.any())


def check_adapter(
    model: torch.nn.Module,
    *,
    base: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
    saved: str | pathlib.Path | Mapping[str, torch.Tensor] | None = None,
    optimizer: Any = None,
    inputs: Any = None,
) -> Report:
    """Say what the adapter of a model (LoRA, or what peft has beside it) changes, and what keeps it from doing so.

    model: with its adapter: layers of peft, or of your own that hold two factors of low rank beside a weight (their
    names have lora in them, or end in A and B, down and up, and the layer knows its rank). base: the model without
    adapter, or its state dict: whether the adapter stands in the weights already. saved: the adapter's file
    (safetensors, or what `torch.load(weights_only=True)` reads), its folder, or its state dict: whether it fits, and
    is in the model. optimizer: whether it trains the factors. inputs: of one forward pass (a dict by keyword, a tuple
    by position): outputs are computed without the adapter, with it, and with ten times its scale, in eval mode.

    Sizes of changes are Frobenius norms beside the base weight's. The scale of your own linear layers is measured on a
    copy of the layer. Model, modes and random numbers are as before afterwards. `report.frame()` has a row for each
    layer. Raises TypeError for what is no model, FileNotFoundError or ValueError for a file that is none.
    """
    check_model(model, CALL)
    optimizers = [] if optimizer is None else list(optimizers_of(optimizer, CALL).values())
    with same_random_numbers(), torch.no_grad():
        layers = [*_of_peft(model), *_of_own(model)]
        weights = None if base is None else _weights(base)
        for layer in layers:
            if layer.weight is None and weights is not None:
                layer.weight = _named(weights, layer.name)
        file = ({}, {}) if saved is None else _opened(saved)
        effect = {} if inputs is None or not layers else _effect(model, layers, inputs)
        seen = [*(_saved(model, layers, *file) if saved is not None else ()), *_trained(layers, optimizers, model)]
        unexplained = {row for one in seen for row in one.values.get("layers", ())}
        seen += [*_inactive(layers, effect), *_zero(layers, optimizers, unexplained), *_scales(layers)]
        inside = _in_file(model, *file) if weights is not None and not layers else []
        seen += [] if weights is None else _merged(layers or inside, weights)
        merged = bool(inside) and all(_times(layer, weights or {}) == 1 for layer in inside)
    seen = list({one.code: one for one in reversed(seen)}.values())[::-1]
    rows = [(x.name, x.rank, x.scale, x.change, _state(x), x.adapter) for x in layers]
    rows.sort(key=lambda row: -(row[3] or 0.0))
    columns = ("layer", "rank", "scale", "change / weight", "state", "adapter")
    if not any(x.adapter for x in layers):
        rows, columns = [row[:-1] for row in rows], columns[:-1]  # type: ignore[misc,assignment]
    headline = "" if seen or not (layers or file[0]) else _headline(layers, merged)
    plain = {"layers": len(layers), "trained numbers": sum(f.numel() for x in layers for f in x.factors.values())}
    return Report(
        CALL.partition("(")[0] + "()",
        findings_of(seen),
        unchecked=tuple(_unchecked(base, saved, optimizer, inputs, layers)),
        notes=tuple(_notes(layers, effect, optimizers)),
        subject=f"{type(model).__name__}: {count(len(layers), 'adapted layer')}",
        facts={**plain, **effect},
        headline=headline,
        symptoms=() if layers or saved is not None else (NONE,),
        tables=(Table("Layers", columns, rows),) if rows else (),
        independent=True,
    )


# -- layers ------------------------------------------------------------------------------------------------------------


def _of_peft(model: torch.nn.Module) -> Iterator[Adapted]:
    """Layers of peft: by their attributes, so that it need not be installed."""
    for name, module in model.named_modules():
        if not all(hasattr(module, word) for word in ("adapter_layer_names", "base_layer", "merged_adapters")):
            continue
        holders = {word: getattr(module, word, {}) for word in module.adapter_layer_names}
        adapters = dict.fromkeys(key for held in holders.values() if hasattr(held, "keys") for key in held)
        for adapter in adapters:
            factors: dict[str, torch.Tensor] = {}
            for word, held in holders.items():
                part = held[adapter] if hasattr(held, "keys") and adapter in held else None
                if isinstance(part, torch.nn.Module):
                    factors |= {f"{name}.{word}.{adapter}.{n}": p for n, p in part.named_parameters()}
                elif isinstance(part, torch.Tensor):
                    factors[f"{name}.{word}.{adapter}"] = part
            layer = Adapted(name, adapter, factors, scale=_peft_scale(module, adapter))
            layer.active = adapter in module.active_adapters and not module.disable_adapters
            layer.merged = adapter in module.merged_adapters
            layer.rank = next(iter(_numbers(getattr(module, "r", {}).get(adapter))), None)
            pairs = [(n, f) for n, f in factors.items() if "lora_" in n and f.ndim >= 2]
            if len(pairs) == 2:
                layer.down, layer.up = (f for _, f in sorted(pairs))
            weight = getattr(module.base_layer, "weight", None)
            layer.weight = weight if isinstance(weight, torch.Tensor) and weight.is_floating_point() else None
            layer.product = _peft_product(module, adapter, layer.scale)
            yield layer


def _peft_scale(module: Any, adapter: str) -> float | None:
    scaling = getattr(module, "scaling", {})
    return next(iter(_numbers(scaling.get(adapter))), 1.0) if hasattr(scaling, "get") else None


def _peft_product(module: Any, adapter: str, scale: float | None) -> torch.Tensor | None:
    """The change without its scale; None where the kind of layer can't tell."""
    try:
        change: torch.Tensor = module.get_delta_weight(adapter).float()
    except Exception:  # a kind without one, or a weight that is quantized
        return None
    return change / scale if scale else change


def _numbers(*values: Any) -> list[Any]:
    plain = [v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for v in values]
    return [v for v in plain if isinstance(v, (int, float)) and not isinstance(v, bool)]


def _of_own(model: torch.nn.Module) -> Iterator[Adapted]:
    """Layers of the user's own, which hold two factors, or a module with these beside the weight."""
    modules = dict(model.named_modules())
    libraries = tuple(f"{n}." for n, m in modules.items() if hasattr(m, "adapter_layer_names"))
    pairs: list[tuple[str, str, str]] = []
    held = {name: _held(module) for name, module in modules.items()}
    for name, own in held.items():
        if not (name + ".").startswith(libraries or ("\0",)):
            pairs += [(name, down, up) for down, up in _pairs(own) if _is_adapter(modules[name], name, own, down, up)]
    taken = {f"{name}.{factor}".strip(".") for name, *both in pairs for factor in both}
    for name, down, up in pairs:
        layer = _own_layer(modules, held, taken, name, down, up)
        if layer is not None:
            yield layer


def _held(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's own matrices, and those of its children that have no children."""
    own: dict[str, torch.Tensor] = {n: p for n, p in module._parameters.items() if p is not None and p.ndim >= 2}
    for name, child in module._modules.items():
        weight = None if child is None or child._modules else child._parameters.get("weight")
        if weight is not None and weight.ndim >= 2:
            own[name] = weight
    return own


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name)]


def _pairs(own: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    by_words = {tuple(_words(name)): name for name in own}
    for words, name in by_words.items():
        for at, word in enumerate(words):
            partner = by_words.get((*words[:at], PARTNER.get(word, ""), *words[at + 1 :]))
            if partner is not None:
                yield name, partner


def _is_adapter(module: torch.nn.Module, path: str, own: Mapping[str, torch.Tensor], down: str, up: str) -> bool:
    """By name, or by a rank that the module knows."""
    rank = _rank(own[down], own[up], None)
    named = "lora" in f"{type(module).__name__} {path.rpartition('.')[2]} {down}".lower()
    known = [getattr(module, word, None) for word in RANKS]
    return rank is not None and (named or rank in known)


def _rank(down: torch.Tensor, up: torch.Tensor, shape: tuple[int, ...] | None) -> int | None:
    """The dimension in which both meet: (r, in) and (out, r), or (in, r) and (r, out)."""
    (p, q), (s, t) = down.flatten(1).shape, up.flatten(1).shape
    options = [r for r, fits in ((p, p == t), (q, q == s)) if fits]
    if shape is not None:
        sides = {p: {q, s}, q: {p, t}} if p != q else {p: {q, s}}
        options = [r for r in options if sides[r] == set(shape)] or options
    return min(options, default=None)


def _product(down: torch.Tensor, up: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor | None:
    """(out, in), as a weight stands; turned where this is the weight's shape."""
    a, b = down.detach().flatten(1).float(), up.detach().flatten(1).float()
    rank = _rank(down, up, shape)
    whole = b @ a if a.shape[0] == rank == b.shape[1] else (a @ b).T if a.shape[1] == b.shape[0] else None
    if whole is not None and shape is not None and tuple(whole.shape) != shape and tuple(whole.T.shape) == shape:
        return whole.T
    return whole


def _own_layer(
    modules: Mapping[str, torch.nn.Module],
    held: Mapping[str, Mapping[str, torch.Tensor]],
    taken: set[str],
    name: str,
    down: str,
    up: str,
) -> Adapted | None:
    module, a, b = modules[name], held[name][down], held[name][up]
    plain = _product(a, b, None)
    if plain is None:
        return None
    shapes = {tuple(plain.shape), tuple(plain.T.shape)}
    host, weight, title = name, None, name
    for place in (name, name.rpartition(".")[0]):
        fits = {
            n: w
            for n, w in held.get(place, {}).items()
            if f"{place}.{n}".strip(".") not in taken and tuple(w.flatten(1).shape) in shapes
        }
        likely = sorted(fits, key=lambda n: -len(set(_words(n)) & set(_words(f"{name.rpartition('.')[2]} {down}"))))
        if likely:
            several = sum(t.startswith(f"{place}.") for t in taken) > 2 and place != ""
            host, weight = place, fits[likely[0]]
            title = f"{place}.{likely[0]}".strip(".") if several else place
            break
    if not title:
        title = name or down
    shape = None if weight is None else tuple(weight.flatten(1).shape)
    factors = {f"{name}.{n}".strip("."): held[name][n] for n in (down, up)}
    layer = Adapted(INNER.sub("", title), "", factors, _product(a, b, shape), weight, a, b, _rank(a, b, shape))
    things = [module, modules[host]]
    layer.said = _said(things, layer.rank or 1)
    layer.merged = any(getattr(thing, "merged", False) is True for thing in things)
    value = None if layer.merged or weight is None or weight.ndim != 2 else _measured(modules[host], layer)
    layer.measured = value is not None
    layer.scale = next(iter(layer.said.values()), 1.0) if value is None else value
    return layer


def _said(things: Iterable[Any], rank: int) -> dict[str, float]:
    """Scales that the layer's own attributes give, likeliest first."""
    said: dict[str, float] = {}
    for thing in things:
        more = [float(v) for v in _numbers(getattr(thing, "multiplier", None))] or [1.0]
        for word in ("scaling", "scale", "lora_scale"):
            said.update((word, float(v) * more[0]) for v in _numbers(getattr(thing, word, None)))
        for word in ("alpha", "lora_alpha"):
            for value in map(float, _numbers(getattr(thing, word, None))):
                said |= {f"{word} / rank": value / rank * more[0], f"{word} / sqrt(rank)": value / math.sqrt(rank)}
                said |= {word: value}
    return said


def _measured(host: torch.nn.Module, layer: Adapted) -> float | None:
    """What the layer adds, beside the product of its factors: on a copy, with factors of our own. None where it is no
    multiple of it, or the layer takes other inputs."""
    assert layer.down is not None and layer.up is not None and layer.weight is not None
    if sum(p.numel() for p in host.parameters()) > LARGEST:
        return None
    try:
        own = copy.deepcopy(host).float().cpu()
        places = {id(p): q for (_, p), (_, q) in zip(host.named_parameters(), own.named_parameters(), strict=True)}
        down, up = places[id(layer.down)], places[id(layer.up)]
        for module in own.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                module.p = 0.0
        maker = torch.Generator().manual_seed(0)
        for factor in (down, up):
            factor.copy_(torch.randn(factor.shape, generator=maker, device="cpu"))
        product = _product(down, up, tuple(layer.weight.shape))
        x = torch.randn(5, layer.weight.shape[1], generator=maker, device="cpu")
        with_it = own(x)
        up.zero_()
        added, expected = with_it - own(x), x @ product.T  # type: ignore[union-attr]
        scale = float((added * expected).sum() / expected.square().sum())
        left = float((added - scale * expected).norm())
    except Exception:  # a layer that takes other inputs, or can't be copied
        return None
    return scale if left <= PROPORTIONAL * max(float(added.norm()), float(with_it.norm()) * 1e-3) else None


# -- base and file -----------------------------------------------------------------------------------------------------


def _plain(name: str) -> str:
    """A layer's name without wrappers, in the one form that all ways of saving have in common."""
    name = INNER.sub("", WRAPPERS.sub("", f"{name}".removesuffix(".weight")))
    return name.replace(".", "_")


def _named(weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """The weight of a layer: by its name, or by the only name that ends so."""
    wanted = _plain(name)
    plain = {_plain(n): w for n, w in weights.items() if w.ndim >= 2 and "lora" not in n}
    if wanted in plain:
        return plain[wanted]
    ends = [w for n, w in plain.items() if n.endswith(f"_{wanted}") or wanted.endswith(f"_{n}")]
    return ends[0] if len(ends) == 1 else None


def _weights(base: Any) -> Mapping[str, torch.Tensor]:
    given = base.state_dict() if isinstance(base, torch.nn.Module) else base
    if not isinstance(given, Mapping):
        raise TypeError(f"base takes a model or a state dict; got {type(base).__name__}")
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


def _opened(saved: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, settings) of a file, a folder or a state dict."""
    if isinstance(saved, Mapping):
        return dict(_weights(saved)), {}
    place = pathlib.Path(saved)
    folder = place if place.is_dir() else place.parent
    names = ("adapter_model.safetensors", "adapter_model.bin", "pytorch_lora_weights.safetensors")
    path = next((place / n for n in names if (place / n).exists()), None) if place.is_dir() else place
    if path is None or not path.exists():
        raise FileNotFoundError(f"no adapter's file is in {place.name}" if place.exists() else f"no file {saved}")
    state: Any = loaded(path)
    state = state.get("state_dict", state) if isinstance(state, Mapping) else {}
    config = folder / "adapter_config.json"
    settings = json.loads(config.read_text(encoding="utf-8")) if config.exists() and path.parent == folder else {}
    return dict(_weights(state)), settings


@dataclasses.dataclass(frozen=True)
class SavedLayer:
    name: str
    down: torch.Tensor
    up: torch.Tensor
    scale: float | None

    @property
    def shape(self) -> tuple[int, ...]:
        product = _product(self.down, self.up, None)
        return () if product is None else tuple(product.shape)


def _saved_layers(
    file: Mapping[str, torch.Tensor], settings: Mapping[str, Any], own: Iterable[str] = ()
) -> Iterator[SavedLayer]:
    """Pairs of factors in a file, by their names. own: names of factors in the model, which need no lora in them."""
    known = {name.removesuffix(".weight") for name in own}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in file.items():
        parts = re.fullmatch(r"(.+?)[._]?lora_?(?:embedding_)?[._]?(A|B|a|b|down|up)\b.*", key)
        if parts is None and key.removesuffix(".weight") in known:
            parts = re.fullmatch(r"(?:(.+)[._])?(A|B|a|b|down|up)(?:\.weight)?", key)
        if parts is not None and value.ndim >= 2:
            side = "down" if parts[2].lower() in ("a", "down") else "up"
            found.setdefault(parts[1] or "", {})[side] = value
    for name, pair in found.items():
        if set(pair) == {"down", "up"} and (rank := _rank(pair["down"], pair["up"], None)) is not None:
            alphas = _numbers(file.get(f"{name}.alpha"), settings.get("lora_alpha"))
            divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
            plain = not settings.get("alpha_pattern")
            yield SavedLayer(name, pair["down"], pair["up"], alphas[0] / divisor if alphas and plain else None)


def _saved(model: torch.nn.Module, layers: list[Adapted], file: Any, settings: Mapping[str, Any]) -> Iterator[Evidence]:
    """What is wrong with a saved adapter beside this model."""
    pairs = list(_saved_layers(file, settings, (name for layer in layers for name in layer.factors)))
    if not pairs:
        keys = listed(list(file), 3)
        yield Evidence("quality/adapter-other-base", f"The file holds no factors of an adapter: its keys are {keys}")
        return
    weights = _weights(model)
    wrong: dict[str, list[str]] = {"no layer": [], "shape": [], "rank": []}
    unloaded, scales = [], []
    for pair in pairs:
        layer = _layer_named(layers, pair.name)
        kind, text = _misfit(pair, layer, _named(weights, pair.name))
        if kind:
            wrong[kind].append(text)
        elif layer is not None:
            if bool(pair.up.any()) and layer.idle:
                unloaded.append(layer.name)
            if pair.scale and layer.scale and not math.isclose(pair.scale, layer.scale, rel_tol=0.01):
                scales.append((layer.name, pair.scale, layer.scale))
    some = {kind: part for kind, part in wrong.items() if part}
    if some:
        names = [name for part in some.values() for name in part]
        why = {"no layer": "no layer of the model has their name", "shape": "their shape is another one"}
        title = f"{len(names)} of {count(len(pairs), 'pair')} of factors in the file "
        title += f"{'does' if len(names) == 1 else 'do'} not fit, "
        yield Evidence(
            "quality/adapter-other-base",
            f"{title}{why.get(next(iter(some)), 'their rank is another one')}: {listed(names)}",
            values=some,
        )
    if unloaded:
        title = (
            f"The file's factors are not in the model: in {listed(unloaded)} they are zero, in the file they are not"
        )
        yield Evidence("quality/adapter-not-loaded", title, values={"layers": unloaded})
    if scales and not some:
        name, right, value = scales[0]
        title = f"The model adds the adapter with a scale of {figures(value)} (`{name}`); by its file it is "
        title += figures(right)
        yield Evidence("quality/adapter-scale", title, values={"layers": [s[0] for s in scales], "file": right})


def _layer_named(layers: Iterable[Adapted], name: str) -> Adapted | None:
    """The layer of this name, or the first of whose name it is the end."""
    wanted = _plain(name)
    known = {_plain(layer.name): layer for layer in layers}
    ends = (x for n, x in known.items() if n.endswith(f"_{wanted}") or wanted.endswith(f"_{n}"))
    return known.get(wanted) or next(ends, None)


def _misfit(pair: SavedLayer, layer: Adapted | None, weight: torch.Tensor | None) -> tuple[str, str]:
    """(what does not fit, in words) of a saved pair of factors; ("", "") where all does."""
    weight = layer.weight if weight is None and layer is not None else weight
    if weight is None and layer is None:
        return "no layer", pair.name
    shape = pair.shape if weight is None else tuple(weight.flatten(1).shape)
    if pair.shape not in (shape, shape[::-1]):
        return "shape", f"{pair.name} {pair.shape} for {shape}"
    rank = _rank(pair.down, pair.up, shape)
    return ("rank", f"{pair.name}: {rank} for {layer.rank}") if layer is not None and layer.rank != rank else ("", "")


# -- what is wrong -----------------------------------------------------------------------------------------------------


def _trained(layers: list[Adapted], optimizers: list[Any], model: torch.nn.Module) -> Iterator[Evidence]:
    """Factors that no optimizer moves: frozen, or not handed over. A frozen first factor is a method of its own."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if not optimizers:
        factors = {id(f) for layer in layers for f in layer.factors.values()}
        others = any(p.requires_grad and id(p) not in factors for p in model.parameters())
        if not others or any(f.requires_grad for layer in layers for f in layer.factors.values()):
            return
    frozen, missing = {}, {}
    for layer in layers:
        if not layer.active:
            continue
        moving = [n for n, f in layer.factors.items() if f.requires_grad]
        if not moving or layer.up is not None and not layer.up.requires_grad:
            frozen[layer.name] = [n for n, f in layer.factors.items() if not f.requires_grad]
        elif optimizers and any(id(layer.factors[n]) not in held for n in moving):
            missing[layer.name] = [n for n in moving if id(layer.factors[n]) not in held]
    parts = [f"{len(frozen)} frozen"] * bool(frozen) + [f"{len(missing)} not in the optimizer"] * bool(missing)
    if parts:
        names = [name for part in (*frozen.values(), *missing.values()) for name in part]
        title = f"Factors of {len(frozen) + len(missing)} of {count(len(layers), 'layer')} are not trained "
        title += f"({', '.join(parts)}): {listed(names, 2)}"
        yield Evidence("quality/adapter-frozen", title, values={"layers": [*frozen, *missing], "factors": names[:12]})


def _inactive(layers: list[Adapted], effect: Mapping[str, Any]) -> Iterator[Evidence]:
    """It has something to add, and does not."""
    if not layers:
        return
    off = [x for x in layers if not x.active and not x.merged]
    unused = [x for x in layers if x.measured and x.scale is not None and abs(x.scale) < 1e-6]
    if len(off) == len(layers):
        title = f"The adapter is switched off in all {count(len(off), 'layer')}: the model answers as without it"
        yield Evidence("quality/adapter-inactive", title, values={"layers": [x.name for x in off]})
    elif unused:
        title = f"{count(len(unused), 'layer')} of {len(layers)} {'adds' if len(unused) == 1 else 'add'} nothing, "
        title += f"whatever {'its' if len(unused) == 1 else 'their'} factors are: {listed([x.name for x in unused])}"
        yield Evidence("quality/adapter-inactive", title, values={"layers": [x.name for x in unused]})
    elif effect and effect["effect"] == 0 == effect["effect of ten times"] and not any(x.idle for x in layers):
        title = "The outputs are the same, to the last bit, without the adapter and with ten times its scale"
        yield Evidence("quality/adapter-inactive", title, values={"layers": [x.name for x in layers]})


def _zero(layers: list[Adapted], optimizers: list[Any], known: set[str]) -> Iterator[Evidence]:
    """Factors of zeros: both (no gradient can move them), or one that was trained, or beside others that are not."""
    both = [x for x in layers if x.idle and len(x.zero) > 1 and len(x.zero) == len(x.factors) and x.name not in known]
    steps = [_steps(x, optimizers) for x in layers]
    alive = {x.adapter for x in layers if x.product is not None and not x.idle}
    still = [x for x, n in zip(layers, steps) if x.idle and x.name not in known and (n >= STEPS or x.adapter in alive)]
    idle = [x for x in layers if x in both or x in still]
    if idle:
        zeros = [name for x in idle for name in x.zero]
        title = f"{len(idle)} of {count(len(layers), 'adapted layer')} "
        title += f"{'changes' if len(idle) == 1 else 'change'} nothing: {listed(zeros, 2)} "
        title += f"{'is' if len(zeros) == 1 else 'are'} zero"
        title += ", and with both factors at zero neither gets a gradient" if both else ""
        values: dict[str, Any] = {"layers": [x.name for x in idle], "zero factors": zeros[:12]}
        yield Evidence("quality/adapter-zero", title, values=values | {"optimizer's steps": max(steps, default=0)})


def _steps(layer: Adapted, optimizers: list[Any]) -> int:
    """Steps that an optimizer made with the layer's factors, as far as it counts them."""
    states = [o.state.get(f, {}) for o in optimizers for f in layer.factors.values()]
    return int(max((float(s.get("step", 0)) for s in states), default=0))


def _scales(layers: list[Adapted]) -> Iterator[Evidence]:
    """What the layer adds is not what its own attributes say."""
    wrong = [
        x
        for x in layers
        if x.measured and x.said and x.scale is not None and abs(x.scale) >= 1e-6
        and not any(math.isclose(x.scale, value, rel_tol=0.01) for value in x.said.values())
    ]  # fmt: skip
    if wrong:
        first, (word, value) = wrong[0], next(iter(wrong[0].said.items()))
        title = (
            f"{count(len(wrong), 'layer')} of {len(layers)} {'adds' if len(wrong) == 1 else 'add'} the adapter with "
        )
        title += f"a scale of {figures(first.scale or 0.0)} (measured); {word} is {figures(value)} (`{first.name}`)"
        values = {"layers": [x.name for x in wrong], "measured": first.scale, **first.said}
        yield Evidence("quality/adapter-scale", title, values=values)


def _merged(layers: list[Adapted], base: Mapping[str, torch.Tensor]) -> Iterator[Evidence]:
    """The change stands in the weight already, and is added once more."""
    whole = {layer.name: _times(layer, base) + (not layer.merged) for layer in layers}
    twice = {name: times for name, times in whole.items() if times >= 2}
    if twice:
        name, times = next(iter(twice.items()))
        title = f"{len(twice)} of {count(len(layers), 'layer')} {'has' if len(twice) == 1 else 'have'} the adapter "
        title += f"{'twice' if times == 2 else f'{times} times'}: it stands in the base weight already (`{name}`)"
        yield Evidence("quality/adapter-merged-twice", title, values={"layers": list(twice), "times": times})


def _times(layer: Adapted, base: Mapping[str, torch.Tensor]) -> int:
    """How often the layer's change stands in its weight, beside the base's; 0 where it does not explain the weight."""
    known = _named(base, layer.name)
    if known is None or layer.weight is None or layer.product is None or known.shape != layer.weight.shape:
        return 0
    moved = (layer.weight.detach().float().cpu() - known.detach().float().cpu()).flatten(1)
    change = (layer.scale or 0.0) * layer.product.detach().float().cpu()
    if change.shape != moved.shape or not bool(change.any()) or not bool(moved.any()):
        return 0
    if change.shape[0] == change.shape[1] and float((moved * change.T).sum()) > float((moved * change).sum()):
        change = change.T  # a square weight that stands the other way round (Conv1D of transformers)
    times = float((moved * change).sum() / change.square().sum())
    left = float((moved - times * change).norm() / moved.norm())
    return max(0, round(times)) if left <= EXPLAINED and abs(times - round(times)) < 0.1 else 0


def _in_file(model: torch.nn.Module, file: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> list[Adapted]:
    """The layers of a saved adapter, as if they were merged into a model that has none."""
    weights, layers = _weights(model), []
    for pair in _saved_layers(file, settings):
        weight = _named(weights, pair.name)
        if weight is not None:
            product = _product(pair.down, pair.up, tuple(weight.flatten(1).shape))
            layers.append(Adapted(_plain(pair.name), "", {}, product, weight, scale=pair.scale or 1.0, merged=True))
    return layers


# -- tried, and said ---------------------------------------------------------------------------------------------------


def _effect(model: torch.nn.Module, layers: list[Adapted], inputs: Any) -> dict[str, Any]:
    """How far outputs move with the adapter, and with ten times its scale (relative, by norm). Each second factor is
    exchanged for the time of a forward pass; the tensors themselves are never written to."""
    ups = {id(x.up): x.up for x in layers if x.up is not None and x.active and not x.merged}
    if not ups:
        return {}
    before = {key: up.data for key, up in ups.items()}
    outputs = {}
    try:
        with kept([model], evaluate=True):
            for times in (0, 1, TIMES):
                for key, up in ups.items():
                    up.data = before[key] * times
                outputs[times] = _called(model, inputs)
    finally:
        for key, up in ups.items():
            up.data = before[key]
    size = math.sqrt(sum(float(out.double().square().sum()) for out in outputs[0])) or 1.0
    effect: dict[str, Any] = {}
    for times, name in ((1, "effect"), (TIMES, "effect of ten times")):
        gaps = [float((a.double() - b.double()).square().sum()) for a, b in zip(outputs[times], outputs[0])]
        effect[name] = math.sqrt(sum(gaps)) / size
    return effect


def _called(model: torch.nn.Module, inputs: Any) -> list[torch.Tensor]:
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    return [out for out in output_tensors(output) if out.is_floating_point()]


def _state(layer: Adapted) -> str:
    words = ["merged"] * layer.merged + ["off"] * (not layer.active) + ["zero"] * layer.idle
    words += ["frozen"] * (not any(f.requires_grad for f in layer.factors.values()))
    return ", ".join(words) or "on"


def _span(values: Iterable[float | None], words: Any) -> str:
    some = sorted({words(value) for value in values if value is not None}, key=str)
    return "" if not some else some[0] if len(some) == 1 else f"{some[0]} to {some[-1]}"


def _headline(layers: list[Adapted], merged: bool) -> str:
    if not layers:
        return f"The file fits the model, {'whose weights hold it, once' if merged else 'which has no adapter yet'}."
    changes = sorted(x.change for x in layers if x.change is not None)
    sizes = ""
    if changes:
        ends = [percent(value) for value in dict.fromkeys((changes[0], changes[-1]))]
        sizes = f" changes weights by {' to '.join(dict.fromkeys(ends))}"
    if all(x.idle for x in layers):
        sizes = " changes nothing: one factor of each layer is zero, as it is before training"
    rank, scale = _span((x.rank for x in layers), str), _span((x.scale for x in layers), figures)
    parts = [f"rank {rank}"] * bool(rank) + [f"scale {scale}"] * bool(scale)
    return f"The adapter of {count(len(layers), 'layer')} ({', '.join(parts)}){sizes}."


def _notes(layers: list[Adapted], effect: Mapping[str, Any], optimizers: list[Any]) -> Iterator[str]:
    if effect and not all(x.idle for x in layers):
        one, ten = effect["effect"], effect["effect of ten times"]
        yield f"Outputs move by {percent(one)} with the adapter, and by {percent(ten)} with ten times its scale."
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    trained = [x.name for x in layers if x.weight is not None and x.weight.requires_grad and id(x.weight) in held]
    if trained:
        text = f"The optimizer trains the base weights of {listed(trained)} as well"
        yield f"{text}: the adapter's file alone will not give this model back."
    if layers and all(x.idle for x in layers):
        yield "All changes are zero. That is right before the first step of training, and wrong after it."


def _unchecked(base: Any, saved: Any, optimizer: Any, inputs: Any, layers: list[Adapted]) -> Iterator[str]:
    asked = {
        "whether it stands in the base weights already: base= is not given": base,
        "its file: saved= is not given": saved,
        "whether factors are trained: optimizer= is not given": optimizer,
        "outputs with ten times its scale: inputs= is not given": inputs,
    }
    yield from (text for text, given in asked.items() if given is None)
    unknown = [x.name for x in layers if x.product is None]
    if unknown:
        yield f"the size of the change of {listed(unknown)}: this kind of layer can't tell it"
