"""read_log on logs of many forms: each planted trouble is named with its line, and healthy runs are silent."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re

import pytest

import nbdebug
from nbdebug.__main__ import main
from tests.monitor import logs


def words(report: nbdebug.Report) -> str:
    return " ".join([*(f"{f.code} {f.title} {f.where.place}" for f in report), *(s.what for s in report.symptoms)])


@pytest.mark.parametrize("form", logs.FORMATS)
def test_each_trouble_is_named_with_its_line_and_a_healthy_run_is_silent(form: str, tmp_path: pathlib.Path) -> None:
    write = logs.FORMATS[form]
    report = nbdebug.read_log(write(_folder(tmp_path, "healthy"), logs.healthy(1)))
    assert report.ok and report.steps >= 30, words(report)
    possible = [trouble for trouble in logs.TROUBLES if trouble not in logs.SILENT.get(form, ())]
    for trouble in possible[list(logs.FORMATS).index(form) % 3 :: 3]:  # all: python -m tests.monitor.logs
        make = logs.TROUBLES[trouble]
        run = make(3)
        report = nbdebug.read_log(write(_folder(tmp_path, trouble), run))
        said = words(report) if trouble != "back" else " ".join(report.notes)
        assert report.ok == (trouble == "back"), (trouble, said)
        assert all(re.search(word, said) for word in run.expect) and re.search(r"line [\d,]+", said), (trouble, said)


def _folder(tmp_path: pathlib.Path, name: str) -> pathlib.Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_a_folder_is_read_by_runs(tmp_path: pathlib.Path) -> None:
    for version, make in enumerate((logs.healthy, logs.TROUBLES["spike"])):
        logs.lightning_csv(_folder(tmp_path, f"version_{version}"), make(4))
    for step in (500, 600):
        logs.trainer_state(_folder(tmp_path, f"checkpoint-{step}"), logs.healthy(5))
    (tmp_path / "requirements.txt").write_text("torch==2.6\nnumpy\n")
    report = nbdebug.read_log(tmp_path)
    assert [f.code for f in report] == ["training/loss-spike"] and "version_1" in report.findings[0].where.file
    files = [source["file"] for source in report.facts["sources"]]
    assert len(files) == 3 and sum("checkpoint" in file for file in files) == 1  # of one run's states the newest
    assert next(table for table in report.tables if table.title == "Runs").rows[1][0].endswith("metrics.csv")


def test_a_file_may_grow_and_end_within_a_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "train.jsonl"
    lines = [json.dumps({"step": n, "loss": 2 / (1 + n) if n < 30 else float("nan")}) + "\n" for n in range(40)]
    path.write_text("".join(lines[:20]) + lines[20][:9])
    following = nbdebug.read_log(path, follow=True, every=0.01)
    first = next(following)
    assert first.ok and first.steps == 20
    assert nbdebug.read_log(path).ok and "cut off" in " ".join(nbdebug.read_log(path).notes)
    with path.open("a") as file:
        file.write(lines[20][9:] + "".join(lines[21:]))
    second = next(following)
    assert second.steps == 40 and "line 31" in words(second)
    with pytest.raises(StopIteration):
        following.throw(KeyboardInterrupt)
        next(following)


def test_what_is_no_log_is_refused_and_hostile_bytes_are_only_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        nbdebug.read_log(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no log"):
        nbdebug.read_log(tmp_path)
    os.mkfifo(tmp_path / "pipe.log")
    with pytest.raises(ValueError, match="neither a file"):
        nbdebug.read_log(tmp_path / "pipe.log")
    (tmp_path / "settings.json").write_text('{"lr": 0.1}')
    with pytest.raises(ValueError, match="no history"):
        nbdebug.read_log(tmp_path / "settings.json")
    for name, data in (
        ("events.out.tfevents.1", logs.event(1, "loss", 1.0) + b"\xff" * 100),
        ("deep.json", b"[" * 100_000),
        ("long.log", b"loss 1.0 " * 200_000),
        ("bytes.log", bytes(range(256)) * 50),
        ("bad.csv", b'step,loss\n1,"2\n3\n'),
    ):
        (tmp_path / name).write_bytes(data)
        try:
            assert isinstance(str(nbdebug.read_log(tmp_path / name)), str)
        except ValueError as refused:
            assert "no log" in str(refused) or "no history" in str(refused) or "nested" in str(refused)


def test_ranks_with_one_trouble_share_a_sentence_and_the_first_error_is_named(tmp_path: pathlib.Path) -> None:
    run = logs.TROUBLES["nan"](2)
    report = nbdebug.read_log(logs.ranks(tmp_path, run))
    assert len(report.symptoms) == 1 and "1 other rank" in report.symptoms[0].what
    run = logs.TROUBLES["traceback"](2)
    path = logs.ranks(tmp_path, run)
    path.write_text(path.read_text() + "[rank0]: torch.distributed.DistBackendError: Connection closed by peer\n")
    finding = nbdebug.read_log(path).findings[0]
    assert finding.code == "error/shape-mismatch" and finding.where.rank == 1


def test_a_crash_at_the_exit_is_no_killed_run(tmp_path: pathlib.Path) -> None:
    path = logs.plain(tmp_path, logs.healthy(3))
    path.write_text(path.read_text() + "Segmentation fault (core dumped)\n")
    assert nbdebug.read_log(path).ok


def falling(step: int, of: int) -> float:
    return 0.5 + 1.9 * math.exp(-4 * step / of) + 0.02 * math.sin(37.0 * step)


FORMS = {  # as Ultralytics, fastai, Lightning, fairseq, Megatron, timm, kohya, srun and a usual print write a loss
    "time per step": (
        40,
        lambda n, loss: f"iteration {n}/ 40 | time per iteration (ms): 12.5 | lm loss: {loss:.4E} |\n",
    ),
    "two prints": (
        30,
        lambda e, loss: (
            f"Epoch: {e:02d} | Time: 0m 12s\n\tTrain Loss: {loss:.3f}\n\t Val. Loss: {2.5 - 0.06 * e:.3f}\n"
        ),
    ),
    "a comma": (30, lambda e, loss: f"Epoche {e}: Loss: {loss:.4f}, lr 0.0010\n".replace(".", ",")),
    "in brackets": (30, lambda e, loss: f"epoch: {e}, loss is: [{loss:.6f}]\n"),
    "percent": (40, lambda n, loss: f"\rsteps: {n * 5 // 2}%|##| {n}/40 [00:01<00:02, 1.03it/s, avr_loss={loss:.4f}]"),
    "ranks": (30, lambda n, loss: f"0: step {n} loss {falling(n, 30):.4f}\n1: step {n} loss {loss:.4f}\n"),
    "passes": (
        40,
        lambda n, loss: (
            f"Train: {n // 10} [{n % 10}/10]  Loss: {loss:#.4g}\n" + "Test: [0/4]  Loss: 0.9\n" * (n % 10 == 9)
        ),
    ),
    "table": (
        30,
        lambda e, loss: f"  Epoch   GPU_mem   box_loss   Size\n  {e}/30   4.2G   {loss:.4f}   640: 100%|##| 5/5\n",
    ),
    "rows": (30, lambda e, loss: "epoch     train_loss  time\n" * (e == 1) + f"{e}         {loss:.4f}    00:12\n"),
    "bar": (
        30,
        lambda e, loss: f"Epoch {e}: 100%|##| 391/391 [00:12<00:00, 31.2it/s, v_num=3, train_loss={loss:.3f}]\n",
    ),
    "two counts": (
        40,
        lambda n, loss: f'INFO | {{"update": {n / 40}, "loss": "{loss:.3f}", "num_updates": "{n}00"}}\n',
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_told_apart_where_bars_tables_or_other_counts_stand_beside_them(
    form: str, tmp_path: pathlib.Path
) -> None:
    number, line = FORMS[form]
    losses = [falling(n, number) for n in range(1, number + 1)]
    path = tmp_path / "train.log"
    path.write_text("".join(line(n, loss) for n, loss in enumerate(losses, 1)))
    report = nbdebug.read_log(path)
    assert report.ok and report.steps in (number, number + 1), words(report)
    path.write_text("".join(line(n, loss if n < 20 else math.nan) for n, loss in enumerate(losses, 1)))
    assert re.search("is nan from (epoch|step|logged value) (20|21|2,000|7,820) on", words(nbdebug.read_log(path)))


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=9.batch.", "run/killed .*line 31"),
        ("[rank1]:[E304 12:12:12.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
         "WorkNCCL(SeqNum=50, OpType=ALLREDUCE, NumelIn=9, Timeout(ms)=600000) ran for 600070 milliseconds",
         "error/nccl .*line 31"),
        ("FloatingPointError: Minimum loss scale reached (0.0001). Your loss explodes.", "loss scale.*line 31"),
        ("ValidationError: 0.31, loss 0.42", ""),
        ("Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\n    f()\nKeyError: Caught KeyError "
         "in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File \"b.py\", line 2, in g\n"
         "    x[1]\nKeyError: 'pixels'", "KeyError: 'pixels'.*line 31"),
    ],
)  # fmt: skip
def test_the_last_word_of_a_run(last: str, said: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {n} loss {falling(n, 30):.4f}\n" for n in range(30)) + last + "\n")
    report = nbdebug.read_log(path)
    assert re.search(said, words(report)) if said else report.ok, words(report)


def test_a_loss_that_is_the_same_in_each_epoch(tmp_path: pathlib.Path) -> None:
    line = "Epoch {}/12\n1563/1563 [====] - 6s 4ms/step - loss: {:.4f} - accuracy: 0.1\n"
    path = tmp_path / "train.log"
    path.write_text("".join(line.format(e, 2.3026 + 0.0004 * (-1) ** e) for e in range(1, 13)))
    assert "stayed at 2.302 for 12 epochs" in words(nbdebug.read_log(path))
    path.write_text("Resuming from checkpoint last.pt\n" + path.read_text())
    assert nbdebug.read_log(path).ok


def test_of_a_long_log_the_first_nan_is_found_to_the_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "train.log"
    losses = [falling(n, 200_000) if n < 150_001 else math.nan for n in range(200_000)]
    path.write_text(
        "".join(f"[2026-03-04 10:00:00][INFO] train.py:88 step={n} loss={v:.5f}\n" for n, v in enumerate(losses))
    )
    assert "line 150,002" in words(nbdebug.read_log(path))


def test_from_a_shell(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    sick = logs.plain(tmp_path, logs.TROUBLES["nan"](1))
    assert main(["read-log", str(sick), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "not well, no cause known"
    assert main(["read-log", str(logs.plain(tmp_path, logs.healthy(1)))]) == 0
    assert main(["read_log", str(tmp_path / "none")]) == 2
    sick = logs.plain(tmp_path, logs.TROUBLES["nan"](1))
    assert main(["check", str(sick)]) == 1 and "is nan" in capsys.readouterr().out  # nothing says that it is a log
    assert main(["check", str(_folder(tmp_path, "empty"))]) == 2


def test_a_record_goes_out_as_csv_and_events_and_comes_back(tmp_path: pathlib.Path) -> None:
    record = nbdebug.open_record(logs.record(tmp_path, logs.TROUBLES["nan"](6)))
    folder = record.to_tensorboard(tmp_path / "events")
    table = record.to_csv(tmp_path / "steps.csv")
    for path in (folder, table):
        report = nbdebug.read_log(path)
        assert report.steps == 120 and "nan from step 400" in words(report)
    with pytest.raises(FileExistsError):
        record.to_tensorboard(folder)
