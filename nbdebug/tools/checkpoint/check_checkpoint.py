"""check_checkpoint(): a file or a folder beside the model, the optimizer and the rest of the run that it is for."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import inspect
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nbdebug.observe.locations import Site, at_site
from nbdebug.observe.sources import edit_of, edited_functions, nodes_of, source
from nbdebug.observe.state_keys import rename
from nbdebug.observe.variables import closure_variables
from nbdebug.process import CopyFailed, in_process
from nbdebug.report import Edit, Finding, Fix, Report, RuledOut, Symptom, Table, Where
from nbdebug.text import clip, count, listed, size
from nbdebug.tools.checkpoint.formats import is_checkpoint, loaded, read_file, within
from nbdebug.tools.checkpoint.rules import (
    DANGEROUS,
    PARTS,
    CheckpointFacts,
    Group,
    SavedFile,
    SavedTensor,
    name_all,
    walk,
)

WHOLE = tuple(
    "model.safetensors.index.json pytorch_model.bin.index.json model.safetensors pytorch_model.bin "
    "adapter_model.safetensors adapter_model.bin .metadata model_optim_rng.pt".split()
)
"""Names of weights in a folder that is one checkpoint (transformers, accelerate, peft, torch.distributed, Megatron)."""
BESIDE = {
    "optimizer.pt": "optimizer", "optimizer.bin": "optimizer", "scheduler.pt": "scheduler",
    "scheduler.bin": "scheduler", "scaler.pt": "scaler", "rng_state.pth": "rng", "random_states_0.pkl": "rng",
    "sampler.bin": "sampler",
}  # fmt: skip
"""The other files of such a folder, and what they hold."""
NUMBER = re.compile(r"\d+")
TRACKER = re.compile(r"(?:latest|last)(?:_checkpoint\w*)?(?:\.txt)?$")
"""Names of a pointer that may hold the number of a step alone (Megatron: latest_checkpointed_iteration.txt)."""
MOST = 200  # files of a folder that are looked at
ROLES = {
    "ema": r"(?:^|_|\.)(?:ema|average|averaged|shadow|swa|slow)",
    "sampler": r"sampler|data_?loader|loader_state|position|consumed",
    "rng": r"(?:^|_|\.)rng|random_state|random_states|generator",
}
COMPARED = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "max_exp_avg_sq")
"""Tensors of torch's optimizers that have the shape of their parameter."""
MINOR = frozenset(
    "params param_names foreach fused maximize capturable differentiable decoupled_weight_decay initial_lr lr".split()
) | {"weight_decay", "eps"}
"""Settings of a group that come and go with torch's versions, or that most optimizers have."""


def check_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    sampler: Any = None,
    load: Callable[[Any], Any] | None = None,
) -> Report:
    """Will this file load, and into what? Nothing of it is executed, and no tensor of it is allocated.

    path: a file (of torch.save, zip or legacy, safetensors, an index of shards), or a folder: the newest checkpoint in
    it by its *step* is taken. model, optimizer, scheduler, scaler, ema, sampler: what the run needs; what the file has
    of each is compared, and what it lacks is a finding. load: your own loading, `load(path)`: its lines are mended, and
    the edit is tried in a copy of the process.

    The report names files that end early or changed since (checksums of the zip), classes and functions that loading
    would import or call, weights with other names, shapes, types or values that are not finite, an optimizer of other
    groups, and pointers to files that are gone. `report.frame()` lists the files or the weights;
    `report.mended("new.pt")` writes the file with the names that the model has, beside the user's. Raises
    FileNotFoundError where there is nothing at the path, TypeError where model is no module.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model takes a torch.nn.Module; got {type(model).__name__}.")
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema, "sampler": sampler}
    spaces = (vars(sys.modules["__main__"]), sys._getframe(1).f_globals, sys._getframe(1).f_locals)
    names = {id(thing): name for held in spaces for name, thing in list(held.items()) if not name.startswith("_")}
    facts = checkpoint_facts(path, model=model, load=load, called=names.get(id(model), "model"), **parts)
    doubts = model is not None and (facts.rename or facts.missing or facts.reshaped or facts.on_cards)
    asked, after = load is not None and _loadable(facts), dict[str, str]()
    if asked:  # what the user's own loading copes with is no fault: it is run as it is, in a copy of the process
        equal, after = _by_loading(facts, model if doubts else None, load, str(path), None)
    if doubts and "loaded" in after:
        facts.reshaped, facts.cuda = (), True
        facts.missing = tuple(name for name in facts.missing if not any(name in group for group in facts.tied))
        if equal and facts.rename is not None:
            facts.rename, facts.missing, facts.unexpected = None, (), ()
    report = _report(facts, pathlib.Path(path).name)
    if not report.ok or "raised" not in after:
        return report
    symptom = Symptom(f"Your own loading of {facts.name} raises {after['raised']}", "Run it in a cell, then %explain.")
    return dataclasses.replace(report, symptoms=[symptom], headline="")


def checkpoint_facts(
    path: Any, *, model: Any = None, optimizer: Any = None, load: Any = None, called: str = "model", **parts: Any
) -> CheckpointFacts:
    """What there is at the path, beside the run. called: the user's name of the model; parts: what else it has."""
    place = pathlib.Path(os.fspath(path))
    facts = CheckpointFacts(SavedFile(str(place)), place.name, cuda=torch.cuda.is_available(), called=called)
    chosen, others = _choose(place, facts)
    if chosen is not None:
        facts.file = read_file(chosen)
        if chosen.name in WHOLE:
            _add_parts(facts.file, chosen.parent)
    facts.wanted = tuple(role for role, thing in {"optimizer": optimizer, **parts}.items() if thing is not None)
    compare(facts, model, optimizer, getattr(getattr(load, "__code__", None), "co_consts", ()))
    if not facts.file.whole:
        newest_first = ((name, file) for name, (_, file) in reversed(others.items()) if name != facts.name)
        facts.good = next((name for name, file in newest_first if read_file(file).whole), "")
    facts.configs = tuple(_other_settings(facts.file, chosen, getattr(model, "config", None)))
    facts.fixes = _tried(facts, model, load, _loading(facts, load), str(chosen))
    return facts


# -- which file ------------------------------------------------------------------------------------------------------


def _choose(place: pathlib.Path, facts: CheckpointFacts) -> tuple[pathlib.Path | None, dict[str, Any]]:
    """The file to read, and the checkpoints beside it. Notes its name, their steps, and what a pointer names that is
    not there."""
    folder, pointed = place if place.is_dir() else place.parent, _pointed(place)
    if there := next(filter(None, pointed.values()), None):
        return _choose(there, facts)
    own, facts.name, facts.file.lost = _main_file(place), place.name, tuple(pointed)
    if whole := place.is_file() or own is not None and own.name in WHOLE and own.parent == place:
        folder = place.parent
    others = _checkpoints(folder)
    if whole and not pointed:
        others = {name: one for name, one in others.items() if _alike(name, place.name)}
    facts.siblings = {name: step for name, (step, _) in others.items()}
    if whole or pointed:
        return (own if whole and not pointed else None), others
    lost = {name: each.name for each in _listing(folder) for name, there in _pointed(each).items() if there is None}
    if not place.is_dir():
        steps = [step or 0 for name, step in facts.siblings.items() if _alike(name, place.name)]
        numbers = NUMBER.findall(place.name)
        if place.name not in lost and not (numbers and max(steps, default=0) > int(numbers[-1])):
            raise FileNotFoundError(f"There is no file or folder {str(place)!r}.")
        facts.name, facts.file.lost = lost.get(place.name, place.name), (place.name,)
    elif lost:
        facts.name, facts.file.lost = next(iter(lost.values())), tuple(lost)
    elif others:
        facts.name, facts.chosen = list(others)[-1], False
        return others[facts.name][1], others
    else:
        kinds = "no file that ends in .pt, .pth, .ckpt, .bin or .safetensors"
        raise FileNotFoundError(f"There is no checkpoint in {str(place)!r}: {kinds}.")
    return None, others


def _listing(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.iterdir())[:MOST] if folder.is_dir() else []


def _main_file(place: pathlib.Path) -> pathlib.Path | None:
    """A file itself; of a folder its weights: by their usual name, else the largest file. Ranks have files (DeepSpeed)
    or folders."""
    if place.is_file():
        return place
    folder = min((each.parent for each in place.glob("mp_rank_00*/*.pt")), default=place)
    known = next((folder / name for name in WHOLE if (folder / name).is_file()), None)
    weights = [each for each in _listing(folder) if is_checkpoint(each) and "optim" not in each.name]
    return known or max(weights, key=lambda each: (each.stat().st_size, each.name), default=None)


def _checkpoints(folder: pathlib.Path) -> dict[str, tuple[int | None, pathlib.Path]]:
    """The checkpoints of a folder by name: their steps, as their names or their contents tell, in the order of these,
    and the files of their weights."""
    found: dict[str, tuple[int | None, pathlib.Path]] = {}
    for each in _listing(folder):
        numbers = NUMBER.findall(each.name)
        file = _main_file(each) if is_checkpoint(each) or each.is_dir() and numbers else None
        if file is not None:
            found[each.name] = int(numbers[-1]) if numbers else read_file(file, values=False).step, file
    return dict(sorted(found.items(), key=lambda one: (-1 if one[1][0] is None else one[1][0], one[0])))


def _alike(one: str, other: str) -> bool:
    return NUMBER.sub("#", one) == NUMBER.sub("#", other)


def _of_step(step: int, folder: pathlib.Path) -> str:
    """The checkpoint of a step; where there is none, the name that it would have."""
    there = _checkpoints(folder)
    last = next(reversed(there), str(step))
    named = re.sub(r"\d+(?=\D*$)", lambda n: f"{step:0{len(n[0]) if n[0][0] == '0' else 1}}", last)
    return next((name for name, (own, _) in there.items() if own == step), named)


def _pointed(path: pathlib.Path) -> dict[str, pathlib.Path | None]:
    """The checkpoints that a link, or a small file of a line or of JSON, names: with their places, None if gone."""
    if path.is_symlink() and not path.exists():
        return {os.path.basename(os.readlink(path)): None}
    if is_checkpoint(path) or not path.is_file() or path.stat().st_size > 65_536 or path.name.endswith(".index.json"):
        return {}
    names, found, folder = list[str](), dict[str, pathlib.Path | None](), path.parent
    with contextlib.suppress(OSError, ValueError):  # bytes that are no text, text that is no JSON
        text = path.read_text(encoding="utf-8").strip()
        names = [text] if "\n" not in text and len(text) < 300 else []
        if text.startswith("{"):
            word = re.compile(r"(?i)latest|last|best|checkpoint|resume")  # in the note's own name, or its entry's
            names = [v for k, v in json.loads(text).items() if isinstance(v, str) and word.search(f"{path.stem} {k}")]
    for name in names:
        if name.isdecimal() and TRACKER.match(path.name):
            name = _of_step(int(name), folder)
        last = pathlib.PurePath(name).name
        is_one = bool(re.search(r"\.(?:pt|pth|ckpt|bin|tar|safetensors)$", last))
        if not is_one and NUMBER.search(last):  # or like those that are there
            is_one = any(_alike(last, other) for other in [*_checkpoints(folder), *_checkpoints(folder.parent)])
        if is_one and not re.search(r'[<>{}"\0]', name):
            places = (folder / name, pathlib.Path(name), folder / last, folder.parent / last)
            found[last] = next((each for each in places if each.exists()), None)
    return found


def _add_parts(file: SavedFile, folder: pathlib.Path) -> None:
    """The other files of a folder that is one checkpoint; of all that are pickled what they would call."""
    tree = {"": file.tree}
    for each in _listing(folder):
        if is_checkpoint(each) and each.suffix != ".safetensors":
            role = BESIDE.get(each.name)
            part = read_file(each, values=role is not None)
            file.globals += tuple(g for g in part.globals if g.name.startswith(DANGEROUS) and g not in file.globals)
            if role is not None:
                tree[role] = part.tree
                file.fault = file.fault or (f"{each.name}: {part.fault}" if part.fault else "")
    state = folder / "trainer_state.json"
    if state.is_file() and state.stat().st_size < 50_000_000:
        step = json.loads(state.read_text(encoding="utf-8")).get("global_step")
        tree["step"] = step if type(step) is int else None
    if len(tree) > 1:
        file.tree = tree


# -- beside the model ------------------------------------------------------------------------------------------------


def compare(facts: CheckpointFacts, model: Any, optimizer: Any, asked: Any = ()) -> None:
    """Weights beside the model's, the optimizer's groups beside the user's. asked: constants of the user's loading."""
    for path, value in walk(facts.file.tree):  # the outermost of each role
        if role := _role(path, value):
            facts.entries.setdefault(role, path)
    if facts.file.step is not None:
        facts.entries["step"] = facts.file.steps()[facts.file.step]
    state = {} if model is None else {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    facts.entry, facts.own = _weights(facts.file, set(state), asked)
    _compare_optimizer(facts, optimizer, {} if model is None else {id(p): n for n, p in model.named_parameters()})
    if model is None:
        return
    facts.model = {name: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in state.items()}
    facts.inf_in_model = frozenset(n for n, v in state.items() if v.dtype.is_floating_point and bool(v.isinf().any()))
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, value in state.items():
        if value.numel():
            groups.setdefault((value.data_ptr(), value.shape, value.stride()), []).append(name)
    facts.tied = tuple(tuple(group) for group in groups.values() if len(group) > 1)
    if not facts.own:
        return
    shapes = {name: tensor.shape for name, tensor in facts.own.items()}
    facts.rename = rename(shapes, {name: shape for name, (shape, _) in facts.model.items()})
    to_model = dict(facts.rename.pairs) if facts.rename else {}
    names = {to_model.get(name, name): name for name in facts.own}
    facts.missing = tuple(name for name in facts.model if name not in names)
    facts.unexpected = tuple(old for new, old in names.items() if new not in facts.model)
    both = [name for name in facts.own if name in facts.model and name not in to_model]
    facts.reshaped = tuple(name for name in both if shapes[name] != facts.model[name][0])


def _weights(file: SavedFile, wanted: set[str], asked: Any) -> tuple[str, Mapping[str, SavedTensor]]:
    """Path and tensors of the entry that is asked for, else most like the model, else with the most tensors."""
    lasts = {name.rpartition(".")[2] for name in wanted}
    best: tuple[tuple[bool, int, float, int], str, Mapping[str, SavedTensor]] = ((False, 0, 0, 0), "", {})
    for path, value in walk(file.tree):
        others = r"optim|param_groups|scheduler|(^|\.)_(modules|parameters|buffers)\b"
        if not isinstance(value, Mapping) or re.search(others, path) or {"scale", "growth_factor"} <= value.keys():
            continue
        tensors = {str(k): v for k, v in value.items() if isinstance(v, SavedTensor) and isinstance(k, str)}
        if all(v.dtype == "uint8" and len(v.shape) == 1 for v in tensors.values()):  # none, or states of random numbers
            continue
        exact = len(wanted & tensors.keys())
        near = sum(name.rpartition(".")[2] in lasts for name in tensors)
        named, average = path.rpartition(".")[2] in asked, re.search(ROLES["ema"], path)
        score = (named, 0 if average else 1, exact + near / 2, len(tensors))
        if score > best[0] and (path or len(tensors) * 2 > len(value)):
            best = (score, path, tensors)
    return best[1], best[2]


def _role(path: str, value: Any) -> str:
    keys = set(value) if isinstance(value, Mapping) else set()
    if {"param_groups", "state"} <= keys:
        return "optimizer"
    if {"scale", "growth_factor"} <= keys:
        return "scaler"
    if keys & {"last_epoch", "_last_lr", "_step_count", "base_lrs"}:
        return "scheduler"
    if isinstance(value, SavedTensor) and value.dtype == "uint8" and value.shape == (5056,):
        return "rng"
    if path.count(".") < 2:
        return next((role for role, pattern in ROLES.items() if re.search(pattern, path.lower())), "")
    return ""


def _compare_optimizer(facts: CheckpointFacts, optimizer: Any, names: Mapping[int, str]) -> None:
    """The saved optimizer's groups beside those of the user's. names: id of a parameter → its name."""
    path = facts.entries.get("optimizer")
    saved = next((value for place, value in walk(facts.file.tree) if place == path), None)
    if optimizer is None or not isinstance(saved, Mapping) or not isinstance(saved.get("param_groups"), list):
        return
    shapes = {n: [s[k].shape for k in COMPARED if isinstance(s.get(k), SavedTensor)] for n, s in saved["state"].items()}
    sizes = [[(str(n), next(iter(shapes.get(n, ())), None)) for n in g["params"]] for g in saved["param_groups"]]
    own = [[(names.get(id(p), "a parameter"), tuple(p.shape)) for p in g["params"]] for g in optimizer.param_groups]
    facts.groups = list(map(_group, saved["param_groups"], sizes)), list(map(_group, optimizer.param_groups, own))
    averages = any(group.get("betas") or group.get("momentum") for group in saved["param_groups"])
    facts.hollow = averages and not saved["state"]


def _group(group: Mapping[str, Any], parameters: list[tuple[str, Any]]) -> Group:
    rates: tuple[Any, ...] = (group.get("initial_lr", group.get("lr")), group.get("weight_decay", 0.0))
    rates = rates if all(isinstance(rate, (int, float)) for rate in rates) else ()
    return Group(parameters, rates, frozenset(map(str, group)) - MINOR)


def _other_settings(file: SavedFile, chosen: pathlib.Path | None, config: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, the file's, the model's) of the model's settings that were saved with other values."""
    own = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    beside = chosen.parent / "config.json" if chosen is not None and chosen.name in WHOLE else None
    settings = re.compile(r"(?:^|\.)(?:config|hparams|hyper_parameters|args)$")
    saved = next((value for path, value in walk(file.tree) if settings.search(path)), None)
    if beside is not None and beside.is_file() and beside.stat().st_size < 1_000_000:
        saved = json.loads(beside.read_text(encoding="utf-8"))
    saved = getattr(saved, "state", saved)  # of an object that was pickled
    for name, value in saved.items() if isinstance(saved, Mapping) else ():
        plain = all(type(each) in (int, float, str, bool) for each in (value, own.get(name)))
        if plain and value != own[name] and not re.search(r"^_|dtype|version|cache", str(name)):
            yield str(name), value, own[name]


# -- the user's loading, mended and tried -----------------------------------------------------------------------------


def _loading(facts: CheckpointFacts, load: Any) -> dict[str, ast.Call]:
    """The user's calls of torch.load and load_state_dict, as syntax; notes its text and line in the facts."""
    if not inspect.isroutine(load):
        return {}
    try:
        (lines, first), file = inspect.getsourcelines(load), inspect.getsourcefile(load)
    except OSError:
        return {}
    facts.loads = "".join("".join(lines).split(" "))
    calls: dict[str, ast.Call] = {}
    names = {**load.__globals__, **closure_variables(load)} if inspect.isfunction(load) else {}
    inside = [n for n in nodes_of(str(file)) if isinstance(n, ast.Call) and 0 <= n.lineno - first < len(lines)]
    for node in inside:
        owner, _, method = ast.unparse(node.func).rpartition(".")
        if method == "load_state_dict" and not isinstance(names.get(owner), torch.optim.Optimizer):
            calls.setdefault("into", node)
        elif (owner, method) == ("torch", "load"):
            calls.setdefault("load", node)
    call = calls.get("load") or calls.get("into")
    if call is not None:
        facts.where = at_site(Where(), Site(str(file), call.lineno, ""))
    return calls


def _mended(facts: CheckpointFacts) -> dict[str, Callable[[str], str]]:
    """Code → the new text of what is given to load_state_dict, from its old text."""
    changes: dict[str, Callable[[str], str]] = {}
    if facts.rename is not None:
        text = facts.rename.text
        changes[facts.rename.code] = lambda old: f"{{{text}: value for name, value in {old}.items()}}"
    if facts.doubled:
        more = ", ".join(f"{name!r}: state[{other!r}]" for name, other in facts.doubled.items())
        changes["checkpoint/tied-weights-missing"] = lambda old: f"{{**(state := {old}), {more}}}"
    names = sorted(facts.reshaped)
    shapes = [(facts.own[name].shape, (facts.model or {})[name][0]) for name in names]
    if names and all(len(a) == 2 and a == b[::-1] for a, b in shapes):
        turned = f"value.T if name in {names!r} else value"
        changes["checkpoint/shape-changed"] = lambda old: f"{{name: {turned} for name, value in {old}.items()}}"
    elif names:
        kept = f"if name not in {names!r}}}, strict=False"
        changes["checkpoint/shape-changed"] = lambda old: f"{{name: value for name, value in {old}.items() {kept}"
    return changes


def _loadable(facts: CheckpointFacts) -> bool:
    """Whether the file is whole, and loading it calls nothing but torch's own."""
    return bool(facts.file.format) and not (facts.file.fault or facts.file.lost or facts.file.executes)


def _tried(facts: CheckpointFacts, model: Any, load: Any, calls: Mapping[str, ast.Call], path: str) -> dict[str, Any]:
    """Fixes that were run: the user's lines as edited, in a copy of the process; or ours, on a copy of the model."""
    form, changes = facts.file.format, _mended(facts)
    lines = {code: f"{facts.called}.load_state_dict({change('state')})" for code, change in changes.items()}
    fixes = {code: (Fix("Load it so.", line),) for code, line in lines.items()}
    if model is None or not _loadable(facts) or form == "distributed" or facts.entry and form == "safetensors":
        return fixes
    file, edits = str(facts.where.file), dict[str, Edit | None]()
    if load is None:
        return {code: (_by_our_lines(facts, model, line, path),) for code, line in lines.items()}
    if "into" in calls and calls["into"].args:
        given = calls["into"].args[0]
        edits = {code: edit_of(file, {given: change(source(file, given))}) for code, change in changes.items()}
    if "load" in calls and facts.on_cards and "map_location" not in facts.loads:
        last = calls["load"].args[-1]
        edits["checkpoint/device-mapping"] = edit_of(file, {last: f"{source(file, last)}, map_location='cpu'"})
    tried = {code: (edit, _by_loading(facts, model, load, path, edit)) for code, edit in edits.items() if edit}
    return fixes | {code: (Fix.of("Load it so.", edit, *outcome),) for code, (edit, outcome) in tried.items()}


def _by_loading(
    facts: CheckpointFacts, model: Any, load: Any, path: str, edit: Edit | None
) -> tuple[bool | None, dict[str, str]]:
    """The user's own loading, as it is or as edited, in a copy of the process."""

    def run() -> Any:
        with edited_functions(edit) if edit is not None else contextlib.nullcontext(1) as number:
            if not number:
                raise LookupError("no function of yours has these lines")
            load(path)
        return model

    return _outcome(facts, path, run, True)


def _by_our_lines(facts: CheckpointFacts, model: Any, line: str, path: str) -> Fix:
    entry = "".join(f"[{part!r}]" for part in facts.entry.split(".") if part)
    lines = f"state = torch.load({path!r}, map_location='cpu'){entry}\n"
    if facts.file.format == "safetensors":
        lines = f"from safetensors.torch import load_file\n\nstate = load_file({path!r})\n"
    elif facts.file.format == "index":
        folder, safe = os.path.dirname(path), any("safetensors" in name for name in os.listdir(os.path.dirname(path)))
        load, taken = ("load_file(", "") if safe else ("torch.load(", ", map_location='cpu'")
        lines = "from safetensors.torch import load_file\n" if safe else ""
        lines += f"import json\n\nshards = json.load(open({path!r}))['weight_map'].values()\nstate = {{}}\n"
        lines += f"for shard in set(shards):\n    state.update({load}{folder!r} + '/' + shard{taken}))\n"
    code = lines + line

    def run() -> Any:
        own = copy.deepcopy(model)
        exec(code, {"torch": torch, facts.called: own})  # our own text, with names quoted by repr
        return own

    return Fix("Load it so.", code, *_outcome(facts, path, run, False))


def _outcome(
    facts: CheckpointFacts, path: str, run: Callable[[], Any], copied: bool
) -> tuple[bool | None, dict[str, str]]:
    """Whether the model that `run()` gives has all weights of the file that it can take. copied: in a copy."""

    def loaded_now() -> tuple[int, int]:
        model = run()
        if model is None:
            return 0, 0
        state, whole = model.state_dict(), within(loaded(pathlib.Path(path)), facts.entry)
        names = dict(facts.rename.pairs) if facts.rename else {}
        taken = [old for old in facts.own if names.get(old, old) in state and old not in facts.reshaped]
        pairs = [(whole[old], state[names.get(old, old)]) for old in taken]
        equal = sum(bool(torch.equal(a.to(b.dtype), b.cpu())) or bool(a.isnan().any()) for a, b in pairs)
        return equal, len(pairs)

    try:
        equal, total = in_process(loaded_now) if copied else loaded_now()
    except CopyFailed as error:
        return None, {"not tried": str(error)}
    except Exception as error:  # whatever the user's code or ours raises there: it was tried, and does not work
        words = str(*error.args[:1])  # a KeyError's own text is a quotation
        return False, {"raised": f"{type(error).__name__}: {clip(words.partition(chr(10))[0], 120)}"}
    return equal > 0 and equal == total, {"loaded": f"{equal} of {total} weights equal those of the file"}


def _report(facts: CheckpointFacts, name: str) -> Report:
    findings, file = tuple(name_all(facts)), facts.file
    held = {"path": str(file.path), "bytes": file.bytes, "step": file.step, "entries": dict(facts.entries)}
    if _loadable(facts):  # what `Report.mended` needs: the file's names → the model's, and those that it has besides
        names = dict(facts.rename.pairs if facts.rename else ())
        held |= {"entry": facts.entry, "names": names, "copies": facts.doubled}
    unchecked = ["names, shapes and types: give the model (model=…)"] if facts.model is None else []
    if not facts.wanted:
        unchecked.append("whether training can go on from it: give the optimizer and what else the run has")
    subject = f"{facts.name}, {size(file.bytes)}, {file.format or 'no format of weights'}"
    rows = [(n, t.dtype, "x".join(map(str, t.shape)), t.nan, t.inf) for n, t in facts.own.items()]
    weights = Table("The weights", ("name", "type", "shape", "NaN", "infinite"), rows, open=False)
    others = Table("The checkpoints, by step", ("file", "step"), list(facts.siblings.items()))
    return Report(
        f"check_checkpoint({name!r})",
        findings,
        tuple(_ruled_out(facts, findings)),
        tuple(unchecked),
        tuple(_notes(facts)),
        subject + (f", step {file.step}" if file.step is not None else ""),
        held,
        headline="" if findings else f"{facts.name} is whole, and fits what it was compared with.",
        tables=tuple(t for t in (others, weights) if t.rows and not (t is others and facts.chosen)),
        independent=True,
    )


def _ruled_out(facts: CheckpointFacts, findings: tuple[Finding, ...]) -> Iterator[RuledOut]:
    codes = {finding.code for finding in findings}
    if not facts.file.fault and facts.file.format:
        yield RuledOut("a file that ends early", f"all {size(facts.file.bytes)} were read")
    if facts.file.globals and not facts.file.executes:
        names = count(len(facts.file.globals), "function or class", "functions and classes")
        yield RuledOut("code in the file", f"it names {names}, all of torch's own list")
    if facts.own and "checkpoint/nonfinite-weights" not in codes:
        yield RuledOut("weights that are not finite", f"{count(len(facts.own), 'tensor')} read")
    if facts.model and facts.own and not (facts.missing or facts.unexpected or facts.reshaped or facts.rename):
        yield RuledOut("weights that stay random", f"all {len(facts.model)} names and shapes are in the file")


def _notes(facts: CheckpointFacts) -> Iterator[str]:
    zeros = [n for n, t in facts.own.items() if t.zero and len(t.shape) > 1 and "lora_B" not in n]
    if zeros:
        yield f"{listed(zeros)} {'is' if len(zeros) == 1 else 'are'} all zeros."
    absent = [PARTS[role][1] for role in ("step", "rng", "sampler") if role not in facts.entries]
    if facts.wanted and absent:
        yield f"It does not hold {listed(absent, quote='')}. nbdebug.resume_proof tells whether your run needs them."
    if facts.hollow:
        yield "The saved optimizer has no averages: it was made anew before the save, or has never stepped."
    if facts.configs:
        named = [f"{name} = {saved!r} (the model: {own!r})" for name, saved, own in facts.configs]
        yield f"Settings saved with it that differ from the model's: {listed(named, quote='')}."
    numbered = list(facts.numbered)
    if not facts.chosen and len(numbered) > 1:
        yield f"A rotation that keeps {len(numbered)} deletes {numbered[0]} next."
    if not facts.chosen and facts.name in numbered and facts.name != max(numbered):
        yield f"By name the last would be {max(numbered)}: take the largest number, not sorted(…)[-1]."
