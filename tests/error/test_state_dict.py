"""States that do not fit: the prefix, the entry, the sizes, or another model; each named with the user's keys."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.observe.state_keys import rename

CODE = "error/state-dict-mismatch"


class Net(nn.Module):
    def __init__(self, width=8, classes=10):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, width))
        self.head = nn.Linear(width, classes)


def explained(call, *given):
    with pytest.raises(Exception) as caught:
        call(*given)
    report = nbdebug.explain(caught.value, names={})
    return report, str(report)


def only(report):
    (finding,) = report.findings
    assert finding.code == CODE
    return finding


def load(model, state, strict=True):
    model.load_state_dict(state, strict=strict)


def renamed(change, model=None):
    return {change(key): value for key, value in (model or Net()).state_dict().items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda key: "module." + key, ["`module.` before", "name.removeprefix('module.')"]),
        (lambda key: "_orig_mod." + key, ["`_orig_mod.`", "removeprefix"]),
        (
            lambda key: key.replace("backbone.", "backbone._orig_mod."),
            ["have the part `_orig_mod.` too many", "name.replace('_orig_mod.', '')"],
        ),
        (lambda key: "net.encoder." + key, ["`net.encoder.`"]),
        (lambda key: key.replace("backbone.", "body.").replace("head.", "body.head."), ["body."]),
    ],
)
def test_a_prefix_is_found_and_its_removal_tried(change, words) -> None:
    report, said = explained(load, Net(), renamed(change))
    finding = only(report)
    assert all(word in said for word in words), said
    assert finding.fixes[0].code


def test_the_offered_lines_do_load_the_state() -> None:
    for change in (
        lambda key: "module." + key,
        lambda key: key.replace("backbone.", "encoder."),
        lambda key: key.replace("0.", "0._checkpoint_wrapped_module."),
    ):
        state, model = renamed(change), Net()
        report, _ = explained(lambda model=model, state=state: model.load_state_dict(state))
        space = {"state": state, "model": model}
        exec(only(report).fixes[0].code, space)
    wrapped, good = nn.Sequential(Net()), Net().state_dict()
    report, said = explained(lambda: wrapped.load_state_dict(good))
    exec(only(report).fixes[0].code, {"wrapped": wrapped, "good": good})
    assert "lack the prefix `0.`" in said and "wrapped[0].load_state_dict(good)" in said
    report, said = explained(lambda: (wrapped if good else None).load_state_dict(good))
    assert "(wrapped if good else None)[0].load_state_dict(good)" in said


def test_the_entry_of_a_checkpoint_is_found() -> None:
    model = Net()
    checkpoint = {"epoch": 3, "state_dict": renamed(lambda key: "model." + key), "optimizer": {"state": {}}}
    report, said = explained(lambda: model.load_state_dict(checkpoint))
    assert "`['state_dict']`" in said and "`model.`" in said
    exec(only(report).fixes[0].code, {"model": model, "checkpoint": checkpoint})
    report, said = explained(lambda: model.load_state_dict({"net": Net()}))
    assert "holds the model itself" in said
    other = Net()
    report, said = explained(lambda: model.load_state_dict(other))
    assert "`other` is a whole model" in said and "other.state_dict()" in only(report).fixes[0].code


def test_sizes_are_told_by_the_layers_argument_and_the_models_own() -> None:
    model, state = Net(), Net(classes=3).state_dict()
    report, said = explained(lambda: model.load_state_dict(state, strict=False))
    assert all(
        word in said
        for word in (
            "head.weight",
            "head.bias",
            "[3, 8]",
            "[10, 8]",
            "out_features=3",
            "strict=False ignores",
            "Net(classes=3)",
        )
    ), said
    fix = only(report).fixes[1]
    exec(fix.code, {"model": model, "state": state})


@pytest.mark.parametrize(
    ("layer", "other", "word"),
    [
        (nn.Conv2d(3, 8, 3), nn.Conv2d(1, 8, 3), "in_channels=1"),
        (nn.Embedding(10, 4), nn.Embedding(12, 4), "num_embeddings=12"),
        (nn.LSTM(4, 8), nn.LSTM(4, 6), "hidden_size=6"),
        (nn.GRU(4, 8), nn.GRU(5, 8), "input_size=5"),
        (nn.BatchNorm2d(4), nn.BatchNorm2d(5), "num_features=5"),
        (nn.ConvTranspose2d(2, 3, 3), nn.ConvTranspose2d(2, 5, 3), "out_channels=5"),
        (nn.MultiheadAttention(8, 2), nn.MultiheadAttention(4, 2), "embed_dim=4"),
    ],
)
def test_the_argument_of_torchs_layers(layer, other, word) -> None:
    assert word in explained(load, nn.Sequential(layer), nn.Sequential(other).state_dict())[1]


def test_a_path_or_a_function_in_place_of_a_state() -> None:
    model, path = Net(), "weights.pt"
    report, said = explained(lambda: model.load_state_dict(path))
    assert "path of a file" in said and "torch.load(path)" in only(report).fixes[0].code
    assert "`function`" in explained(lambda: model.load_state_dict(torch.load))[1]


class Positions(nn.Module):
    def __init__(self, length=16, turned=False):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, length) if turned else torch.zeros(length, 3))


def test_plain_parameters_by_the_models_own_argument_or_turned_round() -> None:
    model, state = Positions(), Positions(9).state_dict()
    report, said = explained(lambda: model.load_state_dict(state))
    assert only(report).fixes[0].code.startswith("model = Positions(length=9)") and len(only(report).fixes) == 1
    turned = Positions(turned=True).state_dict()
    report, said = explained(lambda: model.load_state_dict(turned))
    assert "transposed" in said
    exec(only(report).fixes[0].code, {"model": model, "turned": turned, "Positions": Positions})


def test_a_compiled_model_and_a_plain_state() -> None:
    net, state = torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2).state_dict()
    _, said = explained(lambda: net.load_state_dict(state))
    assert "lack the prefix `_orig_mod.`" in said and "net._orig_mod.load" in said


def test_another_models_state_is_said_to_be_one() -> None:
    report, said = explained(load, Net(), nn.TransformerEncoderLayer(8, 2).state_dict())
    assert "of another model" in said and "12 keys" in said and not any(fix.verified for fix in only(report).fixes)


def test_missing_or_unexpected_keys_alone() -> None:
    state = Net().state_dict()
    without = {key: value for key, value in state.items() if "head" not in key}
    _, said = explained(load, Net(), without)
    assert "2 keys that `state` lacks: `head.weight` and `head.bias`" in said and "strict=False" in said
    _, said = explained(load, Net(), {**state, "extra.weight": torch.zeros(3)})
    assert "`extra.weight`" in said


def test_an_optimizers_state() -> None:
    model = Net()
    state = torch.optim.Adam(model.parameters()).state_dict()
    apart = torch.optim.Adam([{"params": model.backbone.parameters()}, {"params": model.head.parameters()}])
    report, said = explained(lambda: apart.load_state_dict(state))
    assert only(report) and "8 parameters" in said and "2 groups of 6, 2" in said
    report, said = explained(lambda: torch.optim.Adam(model.parameters()).load_state_dict({"opt": state, "epoch": 1}))
    assert "['opt']" in said
    few = torch.optim.SGD(model.head.parameters(), lr=1)
    assert "2 parameters" in explained(lambda: few.load_state_dict(state))[1]


def test_a_library_that_says_it_again_and_a_message_without_frames() -> None:
    def restore(model, state):
        try:
            model.load_state_dict(state)
        except RuntimeError as failed:
            raise ValueError("could not resume") from failed

    report, said = explained(restore, Net(), Net(classes=2).state_dict())
    assert only(report) and "could not resume" in said
    bare = RuntimeError(
        'Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "a.b", "c". \n\t'
        "size mismatch for head.weight: copying a param with shape torch.Size([1, 8]) from checkpoint, "
        "the shape in current model is torch.Size([78, 8])."
    )
    report = nbdebug.explain(bare, names={})
    assert only(report) and "head.weight" in str(report) and "a.b" in str(report)


def test_other_errors_about_keys_are_not_named_so() -> None:
    assert not explained(lambda: Net().state_dict()["haed.weight"])[0].findings
    assert explained(lambda: Net().load_state_dict())[0].findings[0].code == "error/wrong-argument"


def test_thousands_of_keys_take_no_time() -> None:
    saved = {f"module.layers.{i}.{name}": (4, 4) for i in range(1500) for name in ("weight", "bias")}
    model = {key.removeprefix("module."): shape for key, shape in saved.items()}
    started = time.perf_counter()
    change = rename(saved, model)
    print(f"{len(saved)} keys: {time.perf_counter() - started:.2f} s")
    assert change is not None and (change.old, change.new, len(change.pairs)) == ("module.", "", len(saved))
