"""Logs as people and frameworks write them, of runs with a planted trouble, and of the same runs in good health."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import pathlib
import random
import struct
import time
from collections.abc import Callable
from typing import Any

EVERY, STEPS, EPOCHS = 5, 600, 6


@dataclasses.dataclass
class Run:
    """rows: a dict for each logged step. after: what the process wrote at its end; old: nothing has come for hours."""

    rows: list[dict[str, Any]]
    planned: int = STEPS
    after: str = ""
    ended: bool = True
    old: bool = True
    expect: tuple[str, ...] = ()  # words that the report must have; () for silence


def healthy(seed: int = 0, noise: float = 0.03) -> Run:
    rng = random.Random(seed)
    rows = []
    for step in range(EVERY, STEPS + 1, EVERY):
        loss = 0.35 + 2.1 * math.exp(-step / 130)
        loss *= math.exp(rng.gauss(0, noise))
        rate = 3e-4 * min(1, step / 60) * 0.5 * (1 + math.cos(math.pi * step / (STEPS + EVERY)))
        row = {
            "step": step,
            "epoch": (step - 1) // 100,
            "loss": loss,
            "lr": rate,
            "norm": 1.2 * math.exp(rng.gauss(0, 0.2)),
        }
        if step % 50 == 0:
            row["val"] = loss * 1.04 * math.exp(rng.gauss(0, 0.01))
        rows.append(row)
    return Run(rows)


def changed(change: Callable[[Run], None], *expect: str) -> Callable[[int], Run]:
    def make(seed: int = 0) -> Run:
        run = healthy(seed)
        change(run)
        run.expect = expect
        return run

    return make


def each(start: int, what: Callable[[dict, int], Any]) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        for row in run.rows:
            if row["step"] >= start:
                what(row, row["step"])

    return change


def _nan(run: Run) -> None:
    each(400, lambda row, _: row.update(loss=math.nan, norm=math.nan, **({"val": math.nan} if "val" in row else {})))(
        run
    )


def _spike(run: Run) -> None:
    each(400, lambda row, s: row.update(loss=row["loss"] + 8 * math.exp(-(s - 400) / 30)) if s < 500 else None)(run)


def _diverge(run: Run) -> None:
    each(250, lambda row, s: row.update(loss=row["loss"] + (s - 250) / 40))(run)


def _level(run: Run) -> None:
    for n, row in enumerate(run.rows):
        row["loss"], row["lr"] = 2.303 + 0.004 * math.sin(n * 12.9), 3e-4
        if "val" in row:
            row["val"] = 2.304


def _overfit(run: Run) -> None:
    for row in run.rows:
        row["loss"] = max(0.02, row["loss"] - 0.33)
        if "val" in row:
            row["val"] = 0.9 + max(0, row["step"] - 200) / 300 + 1.5 * math.exp(-row["step"] / 60)


def _rate_zero(run: Run) -> None:
    level = 0.9
    for n, row in enumerate(run.rows):
        if row["step"] >= 200:
            row["lr"], row["loss"] = 0.0, level * (1 + 0.02 * math.sin(n * 7.1))
            if "val" in row:
                row["val"] = level * 1.03


def _rate_grows(run: Run) -> None:
    for row in run.rows:
        row["lr"] = 1e-5 * 1.02 ** row["step"]
        if row["step"] > 300:
            row["loss"] += (row["step"] - 300) / 30


def _restart(run: Run) -> None:
    before = [row for row in run.rows if row["step"] <= 400]
    again = [dict(row) for row in run.rows if row["step"] > 300]
    for row in again:
        row["loss"] += 1.5 * math.exp(-(row["step"] - 300) / 120)
        row.pop("val", None)
    run.rows = before + again


def _back(run: Run) -> None:
    before = [row for row in run.rows if row["step"] <= 400]
    run.rows = before + [dict(row) for row in run.rows if row["step"] > 300]


def _cut(run: Run) -> None:
    run.rows = [row for row in run.rows if row["step"] <= 340]
    run.ended = False


def _zero(run: Run) -> None:
    each(0, lambda row, _: row.update(loss=0.0, norm=0.0, **({"val": 0.0} if "val" in row else {})))(run)


TRACE = """Traceback (most recent call last):
  File "/home/someone/train.py", line 88, in <module>
    main()
  File "/home/someone/train.py", line 61, in main
    loss = loss_fn(model(x), y)
  File "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x784 and 512x10)
"""


def _raises(run: Run) -> None:
    _cut(run)
    run.after = TRACE


def _killed(run: Run) -> None:
    _cut(run)
    run.after = "train.sh: line 12: 48213 Killed                  python train.py --epochs 6\n"


TROUBLES: dict[str, Callable[[int], Run]] = {
    "nan": changed(_nan, "nan"),
    "spike": changed(_spike, "jumped"),
    "divergence": changed(_diverge, "climb|rose|jumped"),
    "plateau": changed(_level, "stayed at"),
    "validation": changed(_overfit, "validation"),
    "rate zero": changed(_rate_zero, "run/rate-zero"),
    "rate grows": changed(_rate_grows, "run/rate-grows"),
    "restart": changed(_restart, "run/not-resumed"),
    "back": changed(_back, "goes back"),
    "cut": changed(_cut, "run/stopped"),
    "zero": changed(_zero, "exactly 0"),
    "traceback": changed(_raises, "error/shape"),
    "killed": changed(_killed, "run/killed"),
}
NUMBERS_ONLY = ("trainer_state", "csv", "events", "jsonl", "record", "keras")
"""Formats that hold no words, and no plan."""


def write(path: pathlib.Path, text: str, run: Run) -> pathlib.Path:
    path.write_text(text, encoding="utf-8")
    if run.old:
        os.utime(path, (time.time() - 90_000,) * 2)
    return path


def num(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else str(value)


def plain(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """Epoch 3 | step 40/100 | loss 0.52 | lr 1e-4"""
    lines = ["Using device: cuda:0", "Model has 1,234,567 parameters"]
    for row in run.rows:
        lines.append(
            f"Epoch {row['epoch'] + 1}/{EPOCHS} | step {row['step']}/{run.planned} | loss {num(row['loss'])}"
            f" | lr {row['lr']:.2e} | grad norm {num(row['norm'], 3)}"
        )
        if "val" in row:
            lines.append(f"Epoch {row['epoch'] + 1} validation: val loss {num(row['val'])}")
    lines += ["Training finished."] if run.ended else []
    return write(folder / "train.log", "\n".join(lines) + "\n" + run.after, run)


def keyed(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """2026-01-02 03:04:05,678 INFO [train.py:50] step=10 loss=nan lr=0.0001"""
    lines = []
    for n, row in enumerate(run.rows):
        head = f"2026-01-02 03:{n // 60 % 60:02}:{n % 60:02},678 INFO [train.py:50] "
        lines.append(
            f"{head}step={row['step']} loss={num(row['loss'], 5)} lr={row['lr']:.3e} gnorm={num(row['norm'], 2)}"
        )
        if "val" in row:
            lines.append(f"{head}eval: step={row['step']} val_loss={num(row['val'], 5)}")
    lines += ["2026-01-02 04:00:00,000 INFO [train.py:99] Training complete"] if run.ended else []
    text = "\n".join([f"2026-01-02 03:00:00,000 INFO [train.py:10] max_steps={run.planned}", *lines])
    return write(folder / "out.txt", text + "\n" + run.after, run)


def tqdm(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """Progress bars with carriage returns and colours, one for the whole run."""
    parts = []
    for row in run.rows:
        share = row["step"] / run.planned
        bar = "█" * int(20 * share)
        parts.append(
            f"\r\x1b[32mtraining\x1b[0m: {share:4.0%}|{bar:20}| {row['step']}/{run.planned} "
            f"[00:{row['step'] % 60:02}<00:10, 35.20it/s, loss={num(row['loss'])}, lr={row['lr']:.2e}]"
        )
        if "val" in row:
            parts.append(f"\nvalidation loss: {num(row['val'])}\n")
    end = "\n" if run.ended else ""
    return write(folder / "slurm.out", "".join(parts) + end + ("\n" + run.after if run.after else ""), run)


def transformers(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """{'loss': 0.5, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1} between progress bars"""
    lines = []
    for row in run.rows:
        bar = f"{row['step'] / run.planned:4.0%}|███  | {row['step']}/{run.planned} [00:10<00:20,  5.00it/s]"
        values = {
            "loss": row["loss"],
            "grad_norm": row["norm"],
            "learning_rate": row["lr"],
            "epoch": round(row["step"] / 100, 2),
        }
        lines.append(
            f"\r{bar}" + " " * 10 + f"\r{{'loss': {num(row['loss'])}, 'grad_norm': {num(row['norm'])}, "
            f"'learning_rate': {row['lr']:.6g}, 'epoch': {values['epoch']}}}\n"
        )
        if "val" in row:
            lines.append(
                f"{{'eval_loss': {num(row['val'])}, 'eval_runtime': 1.2, "
                f"'eval_samples_per_second': 83.1, 'epoch': {values['epoch']}}}\n"
            )
    if run.ended:
        lines.append("{'train_runtime': 12.3, 'train_samples_per_second': 100.1, 'train_loss': 0.6, 'epoch': 6.0}\n")
        lines.append(f"\r100%|█████| {run.planned}/{run.planned} [00:30<00:00,  5.00it/s]\n")
    return write(folder / "hf.log", "".join(lines) + run.after, run)


def lightning(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """Epoch 0:  50%|█████     | 50/100 [00:01<00:01, 35.2it/s, v_num=0, train_loss=0.52]"""
    parts = ["GPU available: True (cuda), used: True\n"]
    for row in run.rows:
        inside = (row["step"] - 1) % 100 + 1
        val = f", val_loss={num(row['val'], 3)}" if "val" in row else ""
        parts.append(
            f"\rEpoch {row['epoch']}: {inside:3}%|████  | {inside}/100 [00:01<00:01, 35.20it/s, v_num=0, "
            f"train_loss={num(row['loss'], 3)}{val}, lr={row['lr']:.2e}]"
        )
        if inside == 100:
            parts.append("\n")
    parts.append(f"`Trainer.fit` stopped: `max_epochs={EPOCHS}` reached.\n" if run.ended else "")
    return write(folder / "pl.out", "".join(parts) + ("\n" + run.after if run.after else ""), run)


def absl(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """I0102 03:04:05.678901 140123 train.py:77] [3] step 40 of 600: train loss 0.52, learning rate: 1.5E-04"""
    lines = [
        f"I0102 03:04:{n % 60:02}.678901 140123 train.py:77] iteration {row['step']:>6}/{run.planned:>6} "
        f"| learning rate: {row['lr']:.3E} | lm loss: {row['loss']:.6E} | grad norm: {num(row['norm'], 3)} |"
        + (f"\nI0102 03:04:{n % 60:02}.9 140123 eval.py:12] validation loss: {num(row['val'])}" if "val" in row else "")
        for n, row in enumerate(run.rows)
    ]
    lines += ["I0102 03:09:00.1 140123 train.py:99] training done"] if run.ended else []
    return write(folder / "job.err", "\n".join(lines) + "\n" + run.after, run)


def jsonl(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """{"step": 10, "train": {"loss": 0.5}, "lr": 0.0001}"""
    lines = []
    for row in run.rows:
        entry: dict[str, Any] = {
            "_step": row["step"],
            "train": {"loss": row["loss"]},
            "optim/lr": row["lr"],
            "grad_norm": row["norm"],
        }
        if "val" in row:
            entry["val"] = {"loss": row["val"]}
        lines.append(json.dumps(entry))
    return write(folder / "metrics.jsonl", "\n".join(lines) + "\n", run)


def lightning_csv(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """epoch,lr,step,train_loss,val_loss with blank cells"""
    path = folder / "metrics.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["epoch", "grad_norm", "lr-AdamW", "step", "train_loss", "val_loss"])
        for row in run.rows:
            table.writerow([row["epoch"], "", row["lr"], row["step"], "", ""])
            table.writerow([row["epoch"], row["norm"], "", row["step"], row["loss"], ""])
            if "val" in row:
                table.writerow([row["epoch"], "", "", row["step"], "", row["val"]])
    return write(path, path.read_text(), run)


def varint(value: int) -> bytes:
    out = b""
    while True:
        out += bytes([value & 127 | (128 if value > 127 else 0)])
        value >>= 7
        if not value:
            return out


def event(step: int, tag: str, value: float) -> bytes:
    name = tag.encode()
    scalar = b"\x0a" + varint(len(name)) + name + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + varint(len(scalar)) + scalar
    data = b"\x09" + struct.pack("<d", 1.7e9 + step) + b"\x10" + varint(step) + b"\x2a" + varint(len(summary)) + summary
    return struct.pack("<Q", len(data)) + b"\0\0\0\0" + data + b"\0\0\0\0"


def events(folder: pathlib.Path, run: Run) -> pathlib.Path:
    path, data = folder / "events.out.tfevents.1700000000.host.1.0", b""
    for row in run.rows:
        data += event(row["step"], "Loss/train", row["loss"]) + event(row["step"], "lr", row["lr"])
        data += event(row["step"], "Loss/val", row["val"]) if "val" in row else b""
    path.write_bytes(data)
    return path


def trainer_state(folder: pathlib.Path, run: Run) -> pathlib.Path:
    history = []
    for row in run.rows:
        history.append(
            {
                "epoch": row["step"] / 100,
                "grad_norm": row["norm"],
                "learning_rate": row["lr"],
                "loss": row["loss"],
                "step": row["step"],
            }
        )
        if "val" in row:
            history.append(
                {"epoch": row["step"] / 100, "eval_loss": row["val"], "eval_runtime": 1.1, "step": row["step"]}
            )
    state = {
        "best_metric": None,
        "epoch": 6.0,
        "global_step": run.rows[-1]["step"],
        "log_history": history,
        "logging_steps": 5,
        "max_steps": run.planned,
        "num_train_epochs": 6,
    }
    return write(folder / "trainer_state.json", json.dumps(state, indent=2), run)


def record(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """A guard's record: a folder with steps.jsonl."""
    path = folder / "run.nbdebug"
    path.mkdir()
    word = lambda v: v if math.isfinite(v) else "nan"
    lines = [json.dumps({"run": "a", "header": 1, "time": 1.7e9, "about": {}})]
    for row in run.rows:
        lines.append(
            json.dumps(
                {
                    "run": "a",
                    "step": row["step"],
                    "loss": word(row["loss"]),
                    "norm": word(row["norm"]),
                    "clipped": False,
                    "outcome": "ok",
                    "lr": row["lr"],
                    "time": 1.7e9 + row["step"],
                }
            )
        )
    write(path / "steps.jsonl", "\n".join(lines) + "\n", run)
    return path


def keras(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """A history by name, an entry an epoch."""
    rows = run.rows[::4]
    text = json.dumps(
        {
            "loss": [r["loss"] for r in rows],
            "val_loss": [r.get("val", r["loss"] * 1.02) for r in rows],
            "lr": [r["lr"] for r in rows],
        }
    )
    return write(folder / "history.json", text, run)


def ranks(folder: pathlib.Path, run: Run) -> pathlib.Path:
    """[rank0]: step 10/600 loss 0.5: two ranks in one file, as torchrun writes them"""
    lines = []
    for row in run.rows:
        for rank in (0, 1):
            lines.append(
                f"[rank{rank}]: step {row['step']}/{run.planned} loss {num(row['loss'] * (1 + 0.01 * rank), 5)} "
                f"lr {row['lr']:.3e}"
            )
        if "val" in row:
            lines.append(f"[rank0]: step {row['step']} val_loss {num(row['val'])}")
    lines += ["[rank0]: Training completed"] if run.ended else []
    after = (
        "".join(f"[rank1]: {line}\n" for line in run.after.splitlines()) if run.after.startswith("Trace") else run.after
    )
    return write(folder / "torchrun.log", "\n".join(lines) + "\n" + after, run)


FORMATS = {
    f.__name__: f
    for f in (
        plain,
        keyed,
        tqdm,
        transformers,
        lightning,
        absl,
        jsonl,
        lightning_csv,
        events,
        trainer_state,
        record,
        keras,
        ranks,
    )
}
SILENT = {
    "jsonl": ("cut", "traceback", "killed"),
    "lightning_csv": ("cut", "traceback", "killed"),
    "events": ("cut", "traceback", "killed"),
    "trainer_state": ("cut", "traceback", "killed"),
    "record": ("cut", "traceback", "killed", "validation"),
    "keras": ("cut", "traceback", "killed", "restart", "back", "spike", "validation"),
}
"""What a format can't hold: words, a plan, a second beginning, a validation loss."""


def main() -> int:
    """Each trouble in each form, and healthy runs: how many are named with their line, and the false alarms."""
    import re
    import tempfile

    import nbdebug

    missed, alarms, sick, well = [], [], 0, 0
    for form, form_of in FORMATS.items():
        for name, make in [*(("healthy", healthy) for _ in range(2)), *TROUBLES.items()]:
            if name in SILENT.get(form, ()):
                continue
            with tempfile.TemporaryDirectory() as folder:
                run = make(sick + well)
                report = nbdebug.read_log(form_of(pathlib.Path(folder), run))
            words = [*(f"{f.code} {f.title} {f.where.place}" for f in report), *(s.what for s in report.symptoms)]
            said = " ".join([*words, *(report.notes if name == "back" else ())])
            if not run.expect or name == "back":
                well += 1
                alarms += [f"{form}: {name}: {said[:200]}"] * (not report.ok)
            if run.expect:
                sick += 1
                named = all(re.search(word, said) for word in run.expect) and re.search(r"line [\d,]+", said)
                missed += [f"{form}: {name}: {said[:200]}"] * (not named)
    print(*missed, *alarms, sep="\n")
    print(f"{sick - len(missed)} of {sick} troubles named; {len(alarms)} false alarms in {well} healthy logs")
    return len(missed) + len(alarms)


if __name__ == "__main__":
    raise SystemExit(main())
