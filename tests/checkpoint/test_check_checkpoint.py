"""check_checkpoint: formats, files that are torn, changed or hostile, folders; its magic and its command."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pathlib
import pickle
import random
import zipfile

import pytest
import safetensors.torch
import torch
from torch import nn

import nbdebug
from nbdebug import __main__ as command
from tests.shell import started


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def codes(report: nbdebug.Report) -> list[str]:
    return [finding.code for finding in report]


def legacy(state: object, path: pathlib.Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


WRITERS = {"zip": torch.save, "legacy": legacy, "safetensors": safetensors.torch.save_file}


@pytest.mark.parametrize("form", WRITERS)
def test_each_format_is_read_without_loading(form, model, tmp_path, monkeypatch) -> None:
    path = tmp_path / "net.bin"
    state = model.state_dict()
    WRITERS[form](state, path)
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("it was loaded"))
    report = nbdebug.check_checkpoint(path, model=model)
    assert report.ok and f", {form}" in report.subject, report
    table = report.frame("The weights")
    assert dict(zip(table["name"], table["shape"]))["0.weight"] == "5x6" and len(table) == len(state)
    state["0.bias"][2] = float("nan")
    WRITERS[form](state, path)
    (finding,) = nbdebug.check_checkpoint(path)
    assert finding.code == "checkpoint/nonfinite-weights" and finding.evidence["keys"] == ["0.bias"]


@pytest.mark.parametrize("form", WRITERS)
def test_a_file_that_was_cut_or_changed_anywhere_is_never_an_error_of_ours(form, model, tmp_path) -> None:
    path = tmp_path / "net.bin"
    WRITERS[form](model.state_dict(), path)
    whole, dice = path.read_bytes(), random.Random(1)
    for _ in range(40):
        path.write_bytes(whole[: dice.randrange(len(whole))])
        assert codes(nbdebug.check_checkpoint(path, model=model))[:1] == ["checkpoint/truncated-file"]
        changed = bytearray(whole)
        changed[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        path.write_bytes(bytes(changed))
        nbdebug.check_checkpoint(path, model=model)


def test_one_flipped_bit_in_a_weight_is_seen_by_the_checksum(model, tmp_path) -> None:
    path = tmp_path / "net.pt"
    torch.save(model.state_dict(), path)
    data = path.read_bytes()
    at = data.index(model[0].weight.detach().numpy().tobytes()) + 9
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert torch.load(path)["0.weight"].isfinite().all(), "torch itself sees nothing"
    (finding,) = nbdebug.check_checkpoint(path)
    assert finding.code == "checkpoint/truncated-file" and "0.weight" in finding.title


class Hostile:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_hostile_pickle_is_named_and_does_not_run(form, model, tmp_path) -> None:
    path, marker = tmp_path / "net.pt", tmp_path / "ran"
    WRITERS[form]({"net": model.state_dict(), "extra": [Hostile(str(marker))]}, path)
    report = nbdebug.check_checkpoint(path, model=model)
    assert codes(report) == ["checkpoint/unsafe-pickle"] and "system" in report.findings[0].title
    assert report.findings[0].evidence["keys"] == ["extra.0"] and not marker.exists()
    load = lambda path: model.load_state_dict(torch.load(path, weights_only=False)["net"])
    assert codes(nbdebug.check_checkpoint(path, model=model, load=load)) == ["checkpoint/unsafe-pickle"]
    assert not marker.exists(), "a fix was tried with a file that runs code"


def test_shards_and_a_shard_that_is_gone(model, tmp_path) -> None:
    state = model.state_dict()
    names = list(state)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for name, keys in parts.items():
        safetensors.torch.save_file({key: state[key] for key in keys}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {key: name for name, keys in parts.items() for key in keys}}))
    assert nbdebug.check_checkpoint(tmp_path, model=model).ok
    (tmp_path / "b.safetensors").unlink()
    (finding,) = nbdebug.check_checkpoint(index, model=model)
    assert finding.code == "checkpoint/rotated-away" and "b.safetensors" in finding.title


def test_a_folder_of_transformers_is_one_checkpoint_and_the_newest_is_taken_by_step(model, tmp_path) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (900, 1000):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    report = nbdebug.check_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert report.ok and report.facts["step"] == 1000 and "checkpoint-1000" in report.subject
    assert "By name the last would be checkpoint-900" in str(report.full())
    assert codes(nbdebug.check_checkpoint(tmp_path / "checkpoint-900", model=model)) == [
        "checkpoint/lexicographic-latest"
    ]


def test_half_precision_weights_alone_are_for_inference_and_no_fault(model, tmp_path) -> None:
    torch.save({name: value.half() for name, value in model.state_dict().items()}, tmp_path / "net.pt")
    assert nbdebug.check_checkpoint(tmp_path / "net.pt", model=model).ok


def test_renamed_modules_get_lines_that_load_them(model, tmp_path) -> None:
    trained = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    state = {name.replace("0.", "stem.").replace("2.", "head."): v for name, v in trained.state_dict().items()}
    torch.save(state, tmp_path / "net.pt")
    before = model[0].weight.clone()
    (finding,) = nbdebug.check_checkpoint(tmp_path / "net.pt", model=model)
    assert finding.code == "error/state-dict-mismatch" and finding.fixes[0].verified
    assert torch.equal(model[0].weight, before), "the fix was tried on a copy"
    exec(finding.fixes[0].code, {"torch": torch, "model": model})
    assert torch.equal(model[0].weight, trained[0].weight) and torch.equal(model[2].bias, trained[2].bias)


def test_the_edit_of_the_users_own_line_is_tried_and_nothing_here_changes(model, tmp_path) -> None:
    torch.save(nn.DataParallel(model).state_dict(), tmp_path / "net.pt")
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    before = net[0].weight.clone()

    def load(path):
        net.load_state_dict(torch.load(path), strict=False)

    (finding,) = nbdebug.check_checkpoint(tmp_path / "net.pt", model=net, load=load)
    (fix,) = finding.fixes
    assert finding.code == "checkpoint/prefix-module" and fix.verified and fix.edit is not None
    assert fix.edit.old.strip() == "net.load_state_dict(torch.load(path), strict=False)" and "9 of 9" in str(fix.after)
    assert torch.equal(net[0].weight, before)


def test_what_is_not_there_is_an_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        nbdebug.check_checkpoint(tmp_path / "net.pt")
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        nbdebug.check_checkpoint(tmp_path)
    with pytest.raises(TypeError, match="model takes"):
        nbdebug.check_checkpoint(tmp_path, model=3)


def test_the_command_prints_the_report(model, tmp_path, capsys) -> None:
    torch.save(model.state_dict(), tmp_path / "net.pt")
    assert command.main(["check-checkpoint", str(tmp_path)]) == 0 and "net.pt is whole" in capsys.readouterr().out
    (tmp_path / "net.pt").write_bytes(b"")
    assert command.main(["check-checkpoint", str(tmp_path / "net.pt")]) == 1
    assert "checkpoint/truncated-file" in capsys.readouterr().out
    assert command.main(["check-checkpoint", str(tmp_path / "no.pt")]) == 2 and "no.pt" in capsys.readouterr().err


def test_the_magic_in_a_shell(tmp_path) -> None:
    setup = f"import torch\nnet = torch.nn.Linear(3, 2)\npath = {str(tmp_path / 'net.pt')!r}\n"
    with started(setup + "torch.save({'module.' + k: v for k, v in net.state_dict().items()}, path)") as book:
        done = book.run("%check_checkpoint path --model net")
        assert codes(done.result) == ["checkpoint/prefix-module"] and "Tried, it works" in done.shown
        assert "net.load_state_dict({name.removeprefix" in done.result.findings[0].fixes[0].code
        assert book.run("%check_checkpoint path").result.ok
        assert "UsageError" in book.run("%check_checkpoint no.pt").printed
        assert "without loading it" in " ".join(book.run("%check_checkpoint -h").printed.split())


def test_a_loading_that_raises_is_not_met_with_green_and_need_not_want_the_optimizer(model, tmp_path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.save({"net": model.state_dict(), "epoch": 4}, tmp_path / "net.pt")

    def going_on(path: str) -> None:
        state = torch.load(path)
        model.load_state_dict(state["net"])
        torch.optim.lr_scheduler.StepLR(optimizer, 3, last_epoch=state["epoch"])

    report = nbdebug.check_checkpoint(tmp_path / "net.pt", model=model, optimizer=optimizer, load=going_on)
    assert not report.ok and not report.findings and "raises KeyError: param 'initial_lr'" in str(report)
    optimizer.param_groups[0]["initial_lr"] = 0.1
    assert nbdebug.check_checkpoint(tmp_path / "net.pt", model=model, optimizer=optimizer, load=going_on).ok


def test_a_loading_that_copes_with_the_file_is_left_in_peace(model, tmp_path) -> None:
    wide = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 9))
    torch.save({f"module.{n}": v for n, v in model.state_dict().items()}, tmp_path / "net.pt")
    torch.save(wide.state_dict(), tmp_path / "wide.pt")

    def stripping(path):
        model.load_state_dict({name[7:]: value for name, value in torch.load(path).items()})

    def giving(path):
        stripping(path)
        return model[0].weight.detach()  # of which there is no truth value

    def choosing(path):
        own, state = model.state_dict(), torch.load(path)
        model.load_state_dict({n: v for n, v in state.items() if v.shape == own[n].shape}, strict=False)

    assert nbdebug.check_checkpoint(tmp_path / "net.pt", model=model, load=stripping).ok
    assert nbdebug.check_checkpoint(tmp_path / "net.pt", model=model, load=giving).ok
    assert nbdebug.check_checkpoint(tmp_path / "wide.pt", model=model, load=choosing).ok
    optimizer = torch.optim.Adam(model.parameters())
    assert nbdebug.check_checkpoint(tmp_path / "net.pt", model=model, optimizer=optimizer, load=stripping).ok


def test_explain_asks_about_the_file_that_the_failing_line_reads(model, tmp_path) -> None:
    torch.save({"net": model.state_dict(), "args": argparse.Namespace(lr=1)}, tmp_path / "step_1.pt")
    (tmp_path / "latest").write_text("step_2.pt")
    safetensors.torch.save_file(model.state_dict(), tmp_path / "cut.safetensors")
    os.truncate(tmp_path / "cut.safetensors", 150)
    for name, read, code in (
        ("step_1.pt", torch.load, "unsafe-pickle"),
        ("step_2.pt", torch.load, "rotated-away"),
        ("step_2.pt", open, "rotated-away"),
        ("cut.safetensors", safetensors.torch.load_file, "truncated-file"),
    ):
        with pytest.raises(Exception) as raised:
            read(tmp_path / name)
        (finding,) = nbdebug.explain(raised.value)
        assert finding.code == f"checkpoint/{code}" and "read(tmp_path / name)" in str(finding.where.text)


def test_a_folder_of_torch_distributed_checkpoint(model, tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 7}
    for name in ("step_7", "nan"):
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        state["model"] = {**state["model"], "0.bias": torch.full((5,), float("nan"))}
    report = nbdebug.check_checkpoint(tmp_path / "step_7", model=model, optimizer=optimizer)
    assert report.ok and report.facts["step"] == 7 and "distributed" in report.subject, report
    assert codes(nbdebug.check_checkpoint(tmp_path / "nan")) == ["checkpoint/nonfinite-weights"]
    wide = torch.nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    assert codes(nbdebug.check_checkpoint(tmp_path / "step_7", model=wide)) == ["checkpoint/shape-changed"]
    (part,) = (tmp_path / "step_7").glob("*.distcp")
    os.truncate(part, part.stat().st_size - 100)
    assert codes(nbdebug.check_checkpoint(tmp_path / "step_7", model=model)) == ["checkpoint/truncated-file"]
    part.unlink()
    assert codes(nbdebug.check_checkpoint(tmp_path / "step_7", model=model)) == ["checkpoint/rotated-away"]


def test_settings_saved_beside_the_sampler_and_the_next_to_go(model, tmp_path) -> None:
    model.config = {"width": 5, "dropout": 0.1}
    for step in (8, 9, 10):
        state = {"net": model.state_dict(), "step": step, "config": {"width": 5, "dropout": 0.2}}
        torch.save(state, tmp_path / f"step_{step}.pt")
    report = nbdebug.check_checkpoint(tmp_path, model=model)
    assert report.ok and "dropout = 0.2 (the model: 0.1)" in str(report) and "deletes step_8.pt next" in str(report)
    loader = torch.utils.data.RandomSampler([1, 2])
    assert codes(nbdebug.check_checkpoint(tmp_path, sampler=loader)) == ["checkpoint/sampler-not-resumed"]


@pytest.mark.parametrize("form", ["zip", "safetensors"])
def test_a_mended_file_is_written_beside_the_users(form, model, tmp_path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

    net, end = Tied(), {"zip": "pt", "safetensors": "safetensors"}[form]
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    for target, state in ((model, wrapped), (net, {"table.weight": net.table.weight.detach()})):
        WRITERS[form](state if form == "safetensors" else {"net": state, "step": 3}, tmp_path / f"net.{end}")
        before = (tmp_path / f"net.{end}").read_bytes()
        report = nbdebug.check_checkpoint(tmp_path / f"net.{end}", model=target)
        new = report.mended(tmp_path / f"new.{end}")
        assert not report.ok and nbdebug.check_checkpoint(new, model=target).ok
        assert (tmp_path / f"net.{end}").read_bytes() == before
        with pytest.raises(FileExistsError):
            report.mended(tmp_path / f"net.{end}")
        new.unlink()
    with pytest.raises(ValueError, match="do not mend"):
        nbdebug.check_checkpoint(tmp_path / f"net.{end}").mended(new)


def test_folders_by_step_whose_files_have_names_of_their_own(tmp_path):
    """As DeepSpeed leaves them: a folder a step, files by rank, and `latest` with a folder's name."""
    model = nn.Linear(4, 2)
    for step in (90, 100):
        (tmp_path / f"global_step{step}").mkdir()
        torch.save({"module": model.state_dict()}, tmp_path / f"global_step{step}" / "mp_rank_00_model_states.pt")
        torch.save({"step": step}, tmp_path / f"global_step{step}" / "zero_pp_rank_0_optim_states.pt")
    (tmp_path / "latest").write_text("global_step100")
    assert not nbdebug.check_checkpoint(tmp_path, model=model).findings
    (tmp_path / "latest").write_text("global_step80")
    found = nbdebug.check_checkpoint(tmp_path, model=model).findings[0]
    assert found.code == "checkpoint/rotated-away" and "global_step80" in found.title


def test_a_note_in_json_whose_own_name_tells_what_it_names(tmp_path):
    model = nn.Linear(4, 2)
    for epoch in (3, 4):
        torch.save({"model": model.state_dict(), "epoch": epoch}, tmp_path / f"epoch_{epoch}.pt")
    note = tmp_path / "best.json"
    for epoch, codes in ((3, []), (1, ["checkpoint/rotated-away"])):
        note.write_text(json.dumps({"file": f"epoch_{epoch}.pt", "score": 0.8}))
        for path in (note, tmp_path):
            assert [one.code for one in nbdebug.check_checkpoint(path, model=model)] == codes


def test_a_tracker_that_holds_the_number_alone(tmp_path):
    """As Megatron leaves them: a folder a step with a folder for each rank, and the step's number in a file."""
    model = nn.Linear(4, 2)
    for step in (4000, 5000):
        (folder := tmp_path / f"iter_{step:07}" / "mp_rank_00").mkdir(parents=True)
        torch.save({"model": model.state_dict(), "iteration": step}, folder / "model_optim_rng.pt")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for step, codes in ((5000, []), (6000, ["checkpoint/rotated-away"])):
        tracker.write_text(f"{step}\n")
        for path in (tracker, tmp_path):
            report = nbdebug.check_checkpoint(path, model=model)
            assert [one.code for one in report] == codes and ("iter_0006000" in str(report)) == bool(codes)
    (tmp_path / "last_epoch.txt").write_text("7")  # counts something, and points to nothing
    tracker.write_text("5000")
    assert nbdebug.check_checkpoint(tmp_path, model=model).ok


def test_folders_of_shards_and_of_torch_distributed_are_mended_whole(model, tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    names, shards = list(state), tmp_path / "shards"
    shards.mkdir()
    places = {name: f"{'ab'[at > 2]}.safetensors" for at, name in enumerate(names)}
    for part in set(places.values()):
        safetensors.torch.save_file({n: state[n] for n in names if places[n] == part}, shards / part)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"a": 1}, "weight_map": places}))
    (shards / "config.json").write_text("{}")
    torch.save({"step": 3}, shards / "scheduler.pt")
    dcp.save({"model": state, "step": 7}, checkpoint_id=tmp_path / "pieces", no_dist=True)
    for folder in (shards, tmp_path / "pieces"):
        report = nbdebug.check_checkpoint(folder, model=model)
        assert codes(report) == ["checkpoint/prefix-module"]
        for target in ("new.pt", "new"):
            new = report.mended(tmp_path / target)
            assert nbdebug.check_checkpoint(new, model=model).ok
            assert not new.is_dir() or {p.name for p in new.iterdir()} >= {p.name for p in folder.iterdir()}
            os.rename(new, tmp_path / f"{folder.name}-{target}")
    assert report.facts["step"] == nbdebug.check_checkpoint(tmp_path / "pieces-new").facts["step"] == 7
    report = nbdebug.check_checkpoint(shards, model=model)
    (fix,) = report.findings[0].fixes
    assert fix.verified and "9 of 9" in str(fix.after), fix
    exec(fix.code, {"torch": torch, "model": model})
    single = report.mended(tmp_path / "one.safetensors")
    assert set(safetensors.torch.load_file(single)) == set(model.state_dict())
    with pytest.raises(ValueError, match="weights alone"):
        nbdebug.check_checkpoint(tmp_path / "pieces", model=model).mended(tmp_path / "two.safetensors")
    assert not list(tmp_path.glob(".*"))


def test_a_hostile_part_of_a_folder_is_named(model, tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    marker = tmp_path / "ran"
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(argparse.Namespace(lr=1), tmp_path / "training_args.bin")
    assert nbdebug.check_checkpoint(tmp_path, model=model).ok
    torch.save(Hostile(str(marker)), tmp_path / "training_args.bin")
    assert codes(nbdebug.check_checkpoint(tmp_path, model=model)) == ["checkpoint/unsafe-pickle"]
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "pieces", no_dist=True)
    held = pickle.loads((tmp_path / "pieces" / ".metadata").read_bytes())
    held.planner_data["more"] = (Hostile(str(marker)),)
    (tmp_path / "pieces" / ".metadata").write_bytes(pickle.dumps(held))
    report = nbdebug.check_checkpoint(tmp_path / "pieces", model=model)
    assert codes(report) == ["checkpoint/unsafe-pickle"] and "posix.system" in report.findings[0].title
    with pytest.raises(ValueError):
        report.mended(tmp_path / "new")
    assert not marker.exists()


def test_another_file_is_named_only_after_it_was_read(model, tmp_path) -> None:
    for step in (7, 8, 9, 10):
        torch.save({"net": model.state_dict(), "step": step}, tmp_path / f"step_{step:02d}.pt")
    spoiled = {"net": {**model.state_dict(), "0.bias": torch.full((5,), float("nan"))}, "step": 9}
    torch.save(spoiled, tmp_path / "step_09.pt")
    os.truncate(tmp_path / "step_08.pt", 500)
    os.truncate(tmp_path / "step_10.pt", 500)
    for name, code in (("step_10.pt", "truncated-file"), ("step_09.pt", "nonfinite-weights")):
        finding = nbdebug.check_checkpoint(tmp_path / name, model=model).findings[0]
        fix = finding.fixes[0]
        assert finding.code == f"checkpoint/{code}" and fix.code == "path = 'step_07.pt'" and fix.verified
    (tmp_path / "latest").write_text("step_11.pt")
    finding = nbdebug.check_checkpoint(tmp_path).findings[0]
    assert finding.code == "checkpoint/rotated-away" and finding.fixes[0].code == "path = 'step_07.pt'"


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)


def test_layers_that_are_counted_from_one_each_get_their_own_weights(tmp_path) -> None:
    trained, net = Blocks(), Blocks()
    names = {f"layers.{n}.{end}": f"layers.{n + 1}.{end}" for n in range(3) for end in ("weight", "bias")}
    state = {names.get(name, name): value for name, value in trained.state_dict().items()}
    torch.save(state, tmp_path / "net.pt")
    (finding,) = nbdebug.check_checkpoint(tmp_path / "net.pt", model=net)
    assert finding.code == "error/state-dict-mismatch" and finding.fixes[0].verified, finding.fixes
    exec(finding.fixes[0].code, {"torch": torch, "net": net})
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in trained.state_dict().items())
    torch.save(trained.state_dict(), tmp_path / "net.pt")
    assert nbdebug.check_checkpoint(tmp_path / "net.pt", model=net).ok


def test_some_names_with_another_beginning_leave_the_others_as_they_are(tmp_path) -> None:
    trained, net = Blocks(), Blocks()
    state = {name.replace("layers.", "body.layers."): value for name, value in trained.state_dict().items()}
    torch.save(state, tmp_path / "net.pt")
    (finding,) = nbdebug.check_checkpoint(tmp_path / "net.pt", model=net)
    assert finding.fixes[0].verified and "10 of 10" in str(finding.fixes[0].after)


def test_a_weight_that_lies_the_other_way_round_is_turned(tmp_path) -> None:
    trained, net = Blocks(), Blocks()
    torch.save(trained.state_dict() | {"stem.weight": trained.stem.weight.detach().t().clone()}, tmp_path / "net.pt")
    (finding,) = nbdebug.check_checkpoint(tmp_path / "net.pt", model=net)
    assert finding.code == "checkpoint/shape-changed" and finding.fixes[0].verified
    exec(finding.fixes[0].code, {"torch": torch, "net": net})
    assert torch.equal(net.stem.weight, trained.stem.weight)


FOREIGN = {
    "page.safetensors": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML"),
    "error.safetensors": (b'{"error": "Repository not found"}', "JSON"),
    "net.pt": (gzip.compress(b"weights" * 99), "gzip"),
    "net.bin": (b"\x93NUMPY\x01\x00" + bytes(99), "NumPy"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_lies_under_the_name_of_a_checkpoint_is_named(name, tmp_path) -> None:
    data, words = FOREIGN[name]
    (tmp_path / name).write_bytes(data)
    (finding,) = nbdebug.check_checkpoint(tmp_path / name)
    assert finding.code == "checkpoint/not-weights" and words in finding.title
    with zipfile.ZipFile(tmp_path / "others.pt", "w") as archive:
        archive.writestr("notes.txt", "hello")
    (finding,) = nbdebug.check_checkpoint(tmp_path / "others.pt")
    assert finding.code == "checkpoint/not-weights" and "notes.txt" in finding.title


def test_whole_objects_and_programs_are_told_as_what_they_are(model, tmp_path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "net.pt")
    (finding,) = nbdebug.check_checkpoint(tmp_path / "net.pt", model=model, optimizer=optimizer)
    assert finding.code == "checkpoint/unsafe-pickle" and set(finding.evidence["keys"]) == {"model", "optimizer"}
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "net.pt"))
    (finding,) = nbdebug.check_checkpoint(tmp_path / "net.pt", model=model)
    assert finding.code == "checkpoint/not-weights" and "jit.load" in finding.fixes[0].code


def test_a_key_that_the_index_names_and_no_shard_holds(model, tmp_path) -> None:
    state = model.state_dict()
    safetensors.torch.save_file({key: state[key] for key in list(state)[:-1]}, tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(state, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (finding,) = nbdebug.check_checkpoint(tmp_path)
    assert finding.code == "checkpoint/truncated-file" and list(state)[-1] in finding.title
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    assert nbdebug.check_checkpoint(tmp_path, model=model).ok


def test_an_optimizer_alone_and_moments_that_are_not_finite(model, tmp_path) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    torch.save({"net": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "net.pt")
    report = nbdebug.check_checkpoint(tmp_path / "net.pt", model=model, optimizer=optimizer)
    assert report.ok and "has no averages" in str(report.full())
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert nbdebug.check_checkpoint(tmp_path / "optimizer.pt", optimizer=optimizer).ok
    optimizer.state[model[0].weight]["exp_avg"][0] = float("nan")
    torch.save({"net": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "net.pt")
    (finding,) = nbdebug.check_checkpoint(tmp_path / "net.pt", model=model, optimizer=optimizer)
    assert finding.code == "checkpoint/nonfinite-weights" and "optimizer.state.0.exp_avg" in finding.evidence["keys"]
