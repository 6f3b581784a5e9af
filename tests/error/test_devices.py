"""What stayed behind on another device, and why: an attribute, a list, a dropped `.to`, a part that came later.

The meta device stands in for a card.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbdebug

CODE = "error/device-mismatch"
device = torch.device("meta")


class Offsets(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.linspace(0, 1, 4)

    def forward(self, x):
        return x + self.table


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2))]

    def forward(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        keep = torch.ones(x.shape[1])
        return self.lin(x) * keep


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = {"a": nn.Linear(4, 2)}

    def forward(self, x):
        return self.heads["a"](x)


class Trainer:
    def __init__(self):
        self.noise = torch.linspace(0, 1, 4)

    def step(self, x):
        return x * self.noise


small = nn.Sequential(nn.Linear(4, 3)).to(device)


def on_card(*shape):
    return torch.ones(*shape, device=device)


def attribute():
    encoder = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Offsets()), nn.Linear(4, 2)).to(device)
    encoder(on_card(2, 4))


def plain_list():
    tower = Hidden().to(device)
    tower(on_card(2, 4))


def made_in_forward():
    masked = Masked().to(device)
    masked(on_card(2, 4))


def dropped():
    x = torch.ones(2, 4)
    x.to(device)
    small(x)


def from_a_loader():
    for x, y in DataLoader(TensorDataset(torch.ones(4, 4), torch.zeros(4).long()), batch_size=2):
        scores = small(x.to(device))
        F.cross_entropy(scores, y)


def model_left():
    other, x = nn.Linear(4, 2), on_card(2, 4)
    other(x)


def part_put_in_later():
    grown = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2))).to(device)
    grown[1] = nn.Sequential(nn.Linear(4, 2))
    grown(on_card(2, 4))


def weights_of_the_loss():
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    criterion(small(on_card(2, 4)), torch.zeros(2, dtype=torch.long, device=device))


def no_module():
    trainer = Trainer()
    trainer.step(on_card(2, 4))


def in_a_comprehension():
    rows = [torch.ones(1, 4)]
    return [small(row) for row in rows]


def in_a_comprehension_over_the_same_name():
    row = on_card(1, 4)
    rows = (row.new_zeros(1, 4, device="cpu"),)
    return {str(i): small(row) for i, row in enumerate(rows)}


def joined():
    seen, new = on_card(2, 4), torch.ones(2, 4)
    return torch.cat([seen, new])


def state_of_a_network():
    rnn, state = nn.GRU(4, 3).to(device), torch.zeros(1, 2, 3)
    rnn(on_card(5, 2, 4), state)


def two_states():
    rnn = nn.LSTM(4, 3).to(device)
    state, cell = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)
    rnn(on_card(5, 2, 4), (state, cell))


def named_heads():
    many = Heads().to(device)
    many(on_card(2, 4))


def averaged_weights():
    kept = {name: weight.detach().clone() for name, weight in nn.Linear(4, 3).named_parameters()}
    for name, weight in small[0].named_parameters():
        kept[name] = 0.9 * kept[name] + 0.1 * weight


def to_numpy():
    out = small(on_card(2, 4)).detach()
    return out.numpy()


def lengths_on_the_card():
    padded, sizes = on_card(2, 5, 4), torch.tensor([5, 3], device=device)
    nn.utils.rnn.pack_padded_sequence(padded, sizes, batch_first=True)


def lengths_counted_in_the_line():
    padded, mask = on_card(2, 5, 4), torch.ones(2, 5, device=device)
    nn.utils.rnn.pack_padded_sequence(padded, mask.sum(1), batch_first=True, enforce_sorted=False)


def weights_without_values():
    big = nn.Linear(3, 3, device=device)
    big.to("cpu")


def values_of_nothing():
    x = on_card(3)
    return x.sum().item()


SITUATIONS = [
    (attribute, "attribute", ["`self.table` is on cpu", "encoder.0.1", "Offsets", 'register_buffer("table"']),
    (plain_list, "list", ["`tower.rest[0]` is on cpu", "nn.ModuleList("]),
    (made_in_forward, "made", ["`keep` is on cpu", "`ones` creates it on the CPU", "it gets no device"]),
    (dropped, "dropped", ["`x` is on cpu", "does not keep it", "x = x.to(device)"]),
    (from_a_loader, "batch", ["`y` is on cpu", "loader", "y = y.to(device)"]),
    (model_left, "model", ["`other` is still on cpu", "other.to(device)"]),
    (part_put_in_later, "part", ["`grown.1` is on cpu", "after the model was moved", "grown[1].to(device)"]),
    (weights_of_the_loss, "model", ["`criterion` is still on cpu", "criterion.to(device)"]),
    (no_module, "holder", ["`self.noise` is on cpu", "`Trainer` is not a module"]),
    (in_a_comprehension, "variable", ["`row` is on cpu", "small.0.weight"]),
    (in_a_comprehension_over_the_same_name, "variable", ["`row` is on cpu", "small.0.weight"]),
    (joined, "made", ["`new` is on cpu", "`seen` is on meta"]),
    (state_of_a_network, "made", ["`state` is on cpu", "state = state.to(device)"]),
    (two_states, "made", ["`state` is on cpu", "cell = cell.to("]),
    (named_heads, "list", ["`many.heads['a']` is on cpu", "nn.ModuleDict(self.heads)"]),
    (averaged_weights, "variable", ["`kept[name]` is on cpu"]),
    (to_numpy, "", ["`out` is on meta", "out.cpu().numpy()"]),
    (lengths_counted_in_the_line, "", ["`mask.sum(1)` is on meta", "pack_padded_sequence", "mask.sum(1).cpu()"]),
    (lengths_on_the_card, "", ["`sizes` is on meta", "pack_padded_sequence", "sizes.cpu()"]),
    (weights_without_values, "", ["`big` has 2 parameters on the meta device", "to_empty"]),
    (values_of_nothing, "", ["`x` is on the meta device"]),
]
TRIED = {
    attribute,
    plain_list,
    dropped,
    from_a_loader,
    no_module,
    joined,
    state_of_a_network,
    two_states,
}


def explained(call):
    with pytest.raises(Exception) as caught:
        call()
    report = nbdebug.explain(caught.value, names=globals())
    return report, " ".join(str(report).split())


@pytest.mark.parametrize(("call", "why", "words"), SITUATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_stayed_behind_is_named_and_why(call, why, words) -> None:
    report, said = explained(call)
    (finding,) = report.findings
    assert finding.code == CODE
    assert not [word for word in words if (word.partition(" = ")[2] or word) not in said], said
    assert finding.fixes
    assert call not in TRIED or finding.fixes[0].verified


def raised(message):
    """An error in torch's words, from code that is no user's: no card is at hand."""
    space = {"message": message}
    exec("def fail(*given):\n    raise RuntimeError(message)", space)
    return space["fail"]


def test_a_generator_of_the_host_for_a_card() -> None:
    dice = torch.Generator()
    report, said = explained(lambda: raised("Expected a 'cuda' device type for generator but found 'cpu'")(dice))
    assert [f.code for f in report] == [CODE]
    assert "`dice`" in said and 'dice = torch.Generator(device="cuda")' in said


def test_a_wrapped_model_that_was_not_moved() -> None:
    report, said = explained(
        raised(
            "module must have its parameters and buffers on device cuda:0 (device_ids[0]) but "
            "found one of them on device: cpu"
        )
    )
    assert [f.code for f in report] == [CODE]
    assert "cuda:0" in said and "DataParallel" in said


def wrong_dtype():
    small.to(device)(torch.ones(2, 4, dtype=torch.float64, device="cpu").to(device).to(torch.complex64).real[:, :3])


def own_words():
    raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")


def old_words_for_a_dtype():
    raised("Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same")()


@pytest.mark.parametrize("call", [wrong_dtype, own_words, old_words_for_a_dtype])
def test_other_errors_are_not_named_so(call) -> None:
    report, _ = explained(call)
    assert CODE not in [finding.code for finding in report]


def test_no_tensor_at_hand_is_no_guess() -> None:
    report, _ = explained(
        raised(
            "Expected all tensors to be on the same device, but found at least two devices, "
            "cuda:0 and cpu! (when checking argument for argument mat1 in method …)"
        )
    )
    assert not report.findings


def test_the_cures_work() -> None:
    """The oracle: plain torch with what is offered."""
    tower = Hidden()
    tower.rest = nn.ModuleList(tower.rest)
    assert tower.to(device)(on_card(2, 4)).shape == (2, 2)
    shifted = Offsets()
    table = shifted.table
    del shifted.table
    shifted.register_buffer("table", table)
    assert shifted.to(device)(on_card(2, 4)).is_meta
