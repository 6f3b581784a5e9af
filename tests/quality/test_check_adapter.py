"""check_adapter(): LoRA layers of one's own and of peft; nothing of the model changes."""

from __future__ import annotations

import copy
import pathlib
import types
from typing import Any

import pytest
import torch
from torch import nn

import nbdebug
from tests.quality.adapters import FusedAttention, LoRALinear, WithFactors, factors, network, trained

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("kind", "scale"), [(LoRALinear, 2.0), (WithFactors, 2.0)])
def test_a_healthy_adapter_is_measured_and_left_as_it_is(kind: Any, scale: float) -> None:
    run = network(kind)
    fresh = nbdebug.check_adapter(run.model, base=run.base, optimizer=run.optimizer, inputs=X)
    assert not fresh.findings and "before training" in fresh.headline and fresh.facts["effect"] == 0
    trained(run)
    state, random = copy.deepcopy(run.model.state_dict()), torch.random.get_rng_state()
    report = nbdebug.check_adapter(
        run.model, base=run.base, optimizer=run.optimizer, inputs=X, saved=factors(run.model)
    )
    assert not report.findings and report.verdict == "healthy"
    assert all(torch.equal(state[name], value) for name, value in run.model.state_dict().items())
    assert torch.equal(random, torch.random.get_rng_state()) and run.model.training
    frame = report.frame()
    layer = run.model[0]
    up, down = (layer.lora_B, layer.lora_A) if kind is LoRALinear else (layer.lora.B.T, layer.lora.A.T)
    change = scale * (up @ down).norm() / layer.linear.weight.norm()
    row = frame[frame.layer == "0"].iloc[0]
    assert row["rank"] == 4 and row["scale"] == pytest.approx(scale)
    assert row["change / weight"] == pytest.approx(float(change.detach()), rel=1e-4)
    run.model.eval()
    with torch.no_grad():
        size = (run.model(X) - run.base(X)).norm() / run.base(X).norm()
    assert report.facts["effect"] == pytest.approx(float(size), rel=1e-4)
    assert report.facts["effect of ten times"] > 5 * report.facts["effect"]


def test_two_weights_of_one_shape_keep_their_own_factors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FusedAttention(), FusedAttention())
    nn.init.normal_(model[1].lora_B_value.weight)  # type: ignore[arg-type,union-attr]
    report = nbdebug.check_adapter(model)
    assert report.findings[0].code == "quality/adapter-zero"
    assert set(report.findings[0].evidence["layers"]) == {"0.query", "0.value", "1.query"}


def test_what_is_no_adapter_is_none() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up, self.skip = nn.Linear(32, 4), nn.Linear(4, 32), nn.Linear(32, 32)

    report = nbdebug.check_adapter(nn.Sequential(Block(), nn.MultiheadAttention(16, 4)))
    assert not report.findings and report.verdict == "not well, no cause known"
    with pytest.raises(TypeError):
        nbdebug.check_adapter("a model")  # type: ignore[arg-type]


def test_files_of_several_programs_fit(tmp_path: pathlib.Path) -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"to_q": nn.Linear(16, 32)})})
    pair = {"down": torch.randn(4, 16), "up": torch.randn(32, 4)}
    for down, up in (
        ("lora_unet_block_to_q.lora_down.weight", "lora_unet_block_to_q.lora_up.weight"),
        ("unet.block.to_q.lora_A.weight", "unet.block.to_q.lora_B.weight"),
        ("block.processor.to_q_lora.down.weight", "block.processor.to_q_lora.up.weight"),
        ("base_model.model.block.to_q.lora_A.default.weight", "base_model.model.block.to_q.lora_B.default.weight"),
    ):
        torch.save({down: pair["down"], up: pair["up"]}, tmp_path / "adapter.bin")
        assert not nbdebug.check_adapter(model, saved=tmp_path / "adapter.bin").findings, down
        other = nn.ModuleDict({"block": nn.ModuleDict({"to_q": nn.Linear(24, 32)})})
        report = nbdebug.check_adapter(other, saved={down: pair["down"], up: pair["up"]})
        assert report.findings[0].evidence["shape"], down
    with pytest.raises(FileNotFoundError):
        nbdebug.check_adapter(model, saved=tmp_path / "none.bin")


def test_a_file_that_is_merged_into_a_model_without_adapters() -> None:
    run = trained(network())
    file = {**factors(run.model), "0.alpha": torch.tensor(8.0), "2.alpha": torch.tensor(8.0)}
    model = copy.deepcopy(run.base)
    assert "no adapter yet" in nbdebug.check_adapter(model, base=run.base, saved=file).headline
    for words in ("once", "twice"):
        for place in (0, 2):
            model[place].weight.data += 2 * (run.model[place].lora_B @ run.model[place].lora_A).detach()
        report = nbdebug.check_adapter(model, base=run.base, saved=file)
        assert words in (report.findings[0].title if report.findings else report.headline)


def test_layers_of_peft() -> None:
    peft: types.ModuleType = pytest.importorskip("peft")
    run = network(lambda linear: linear)
    model = peft.get_peft_model(run.model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"]))
    assert "rank 4, scale 2" in nbdebug.check_adapter(model, inputs=X).headline
    model.disable_adapter_layers()
    assert nbdebug.check_adapter(model).findings[0].code == "quality/adapter-inactive"
