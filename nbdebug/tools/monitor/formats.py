"""What people and frameworks write while a training runs, read as a stream: rows of numbers, each with its line.

    text        "Epoch 3 | loss 0.52", "step=10 loss=nan", progress bars, dicts of transformers, prefixes of loggers
    jsonl, csv  an object, or a row, for each step; blank cells are no numbers
    json        transformers' trainer_state.json, Keras' history, a list of objects
    events      TensorBoard's event files: TFRecord and the few fields of protobuf that hold a scalar
    record      the folder that guard(..., record=PATH) wrote

Nothing of a file is executed. A file that still grows, or ends within a line, is read as far as it goes.
"""

from __future__ import annotations

import array
import csv
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MOST_ROWS = 50_000
"""Rows that are read of one source: of more, evenly spread ones, and those that are RARE."""
URGENT = (
    *("inf,", " inf ", "=inf", "-inf", "val", "traceback", "error", "kill", "warning", "sig", "resum", "restor"),
    *("complete", "finish", "done", "fault", "cancel"),
)
"""Of very many lines those with one of these are read in any case, and the first MOST_NANS with a NaN."""
MOST_NANS = 1000
RARE = re.compile(r"\b(?:nan|inf(?:inity)?\b|val|eval|test)")
ROW_BYTES = 80
LONGEST = 2**16
"""Bytes of a line; of longer ones only so much is read."""
MOST_WHOLE = 2**28
"""Bytes of a JSON file, which can't be read in pieces."""
MOST_TRACEBACKS, MOST_TRACEBACK_LINES, MOST_WARNINGS = 50, 400, 200

NAN = float("nan")
ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
RANK = re.compile(
    r"^\s*(?:\[(?:rank|default)[ :_=]?(\d+)\]|\[1,(\d+)\]<std(?:err|out)>|rank[ _=]?(\d+)(?=[:|]))[:|]? ?", re.I
)
RANK_INSIDE = re.compile(r"\brank[ :=_]*(\d+)\b", re.IGNORECASE)
STAMP = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
NUMBER = (
    r"[-+]?(?:0,\d+(?![.,]?\d)|\d+,(?:\d{1,2}|\d{4,})(?![.,]?\d)|\d{1,3}(?:,\d{3})+(?:\.\d+)?"
    r"|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?:nan|inf(?:inity)?)\b)"
)
PAIR = re.compile(
    r"(?<![A-Za-z])(?P<key>(?!is\b)[A-Za-z][A-Za-z0-9_./@-]*)(?=[\s'\":=(|])['\"]?(?:\s*\([a-z]+\))?"
    rf"(?:\s*[:=]\s*|\s+is:?\s+|\s+\|\s+|\s+)(?:tensor\()?['\"\[(]*(?P<value>{NUMBER})(?![\w%]|\.\d)"
    r"(?:\s*(?:/|of)\s*(?P<total>\d[\d,]*)(?![\d.]))?",
    re.IGNORECASE,
)
WORD_BEFORE = re.compile(r"([a-z]+)\.? $", re.IGNORECASE)
OF_EVALUATION = re.compile(r"[\W\d]*(?:test|val|valid|validation|eval|evaluation)\b(?!.*train)", re.IGNORECASE)
"""How a line of an evaluation begins, of which a "loss" is no training loss."""
BAR = re.compile(r"(?<![\d./])(\d[\d,]*)/(\d[\d,]*|\?) ?\[(?:\d+:)?\d+:\d\d<")
"""tqdm's: "50/100 [00:01<00:01, 35.2it/s"."""
KERAS = re.compile(r"\s*(\d+)/(\d+) (?:\[[=>.]*\]|[━ ]+\x1b?) ")
"""Keras' own: "  1/313 [....] - ETA: 1:02 - loss: 2.31"."""
PAIRED_PLACE = re.compile(r"\[(\d+)/(\d+)\]\s*\[(\d+)/(\d+)\]")
"""As in "[0/5][50/400]": the epoch, and the step within it."""
EPOCH = re.compile(r"epoch\W{0,3}\[?\s*(\d+)\s*(?:/\s*(\d+))?", re.IGNORECASE)
MEASURED = ("loss", "validation", "norm", "rate")
PLACE = re.compile(r"\[\s*(\d+)\s*/\s*(\d+)\b")
"""As in "Epoch: [3][ 100/5005]" and "Train Epoch: 1 [640/60000 (1%)]"."""
NUMERIC = ("loss", "nan", "epoch", "step", "iter", "lr", "norm", "/")
"""A line without any of these holds no number of a training."""
WORDS = (
    *"traceback error exception warn kill signal interrupt exit fault terminat cancel limit preempt dumped".split(),
    *"finish complete done stop resum restor load restart watchdog memory runtime training best final test".split(),
    *"save w0 w1".split(),
)
"""… and without any of these, no event."""
WARNING = re.compile(r"\b(?:[A-Z]\w*Warning: |WARN(?:ING)?\b|warning: )|^W\d{4} ")
KILLED = re.compile(
    r"^(?:.*: line \d+: +\d+ )?Killed\b|Out of memory: Killed process|oom[-_ ]?kill(?:er| event)|SIGKILL"
    r"|out-of-memory handler|signal: (?:9|killed)\b|exitcode: ?-(?:9|15)\b|\bCANCELLED AT\b|DUE TO TIME LIMIT"
    r"|DUE TO PREEMPTION|Segmentation fault|core dumped"
    r"|Received signal \d+|received SIGTERM|^Terminated$|SignalException"
)
ENDED = re.compile(
    r"train_runtime|\btraining (?:is |was |has )?(?:completed?|finished|done|ended|over)\b|finished training"
    r"|Trainer\.fit` stopped|early ?stopp|stopping early|\ball done\b|^\W*(?:done|finished|completed)\W*$"
    r"|training took|total training time|best (?:model|epoch|checkpoint|val)"
    r"|final (?:loss|model|results?|test|accuracy)|test (?:acc|loss|set)|saved? (?:final|last) ",
    re.IGNORECASE,
)
CHAINED = ("Traceback (most", "Original Traceback (most", "During handling of the above", "The above exception was")
RESUMED = re.compile(
    r"\b(?:resum(?:ed?|ing)|restor(?:ed|ing)|restarting|load(?:ed|ing) (?:the )?(?:model |state |latest )?"
    r"checkpoint)\b",
    re.IGNORECASE,
)
ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Iteration)\b(?::|$)|^(?:[a-z_]\w*\.)+[A-Z]\w*: "
    r"|.*Watchdog caught collective operation timeout"
)
LOSS_ITSELF = re.compile(r"[\w.]+[:,]? *[-+]?(?:\d*\.\d|nan)", re.IGNORECASE)
"""As in "ValidationError: 0.31": a number, no exception."""
HEAD = re.compile(r"[\s|]*(?:epoch|step|iter\w*)\b\D*\Z", re.IGNORECASE)
"""The names above the columns of a table, as fastai, Ultralytics, and transformers in a notebook write it."""

TRAIN_LOSS = "loss train_loss training_loss total_loss train_total_loss train_loss_step lm_loss loss_train".split()
VALIDATION = re.compile(r"(?:^|_)(?:val|valid|validation|eval|evaluation|dev|test)(?:_|$)")


@functools.lru_cache(4096)
def role_of(key: str) -> str:
    """What a number of this name is: "loss", "validation", "norm", "rate", "step", "epoch", "batch", "rank", or ""."""
    key = re.sub(r"[ ./@-]+", "_", key.lower()).strip("_")
    key = re.sub(r"^(?:log|logs|metrics?|scalars?|summary)_(?=.)", "", key)
    if key in ROLES:
        return ROLES[key]
    if re.search(r"(?:^|_)(?:loss|nll|lossscale)(?:_|$)", key) and not re.search(
        r"scale|best|weight|min|delta|num|count|ema", key
    ):
        return "validation" if VALIDATION.search(key) else "loss"
    if re.search(r"grad(?:ient)?s?_?(?:2_)?(?:total_)?norm|^gnorm$|(?:^|_)total_norm$", key):
        return "norm"
    if re.search(r"(?:^|_)(?:lr|learning_?rate)(?:_|$)", key):
        return "rate"
    return ""


PLACES = {
    "step": "step global_step steps iteration iter it itr num_updates num_update _step trainer_global_step update "
    "updates global_iteration train_step global_steps",
    "epoch": "epoch epochs train_epoch ep training_epoch current_epoch",
    "batch": "batch batch_idx minibatch batches",
    "rank": "rank local_rank global_rank",
}
ROLES = {key: role for role, keys in PLACES.items() for key in keys.split()}


@dataclasses.dataclass
class LogText:
    """Lines of a log that belong together: a traceback, a warning. times: how often it came."""

    line: int
    text: str
    rank: int | None = None
    times: int = 1


class LogRows:
    """A source's rows as columns, and what else its lines say.

    lines, steps, epochs, places, totals, ranks: by row, NaN or -1 where a row has none; places of totals: "50/100".
    series: by key, the rows that have it and their values; exact_zero: keys whose zeros were written with few digits.
    ends: lines that say that the training is over; kills: that it was killed; resumes: that a checkpoint was read.
    """

    def __init__(self, path: pathlib.Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.lines, self.ranks = array.array("q"), array.array("q")
        self.steps, self.epochs, self.places, self.totals = (array.array("d") for _ in range(4))
        self.series: dict[str, tuple[array.array[int], array.array[float]]] = {}
        self.rounded: set[str] = set()
        self.tracebacks: list[LogText] = []
        self.warnings: dict[str, LogText] = {}
        self.kills: list[LogText] = []
        self.resumes: list[LogText] = []
        self.ends: list[int] = []
        self.last_stamp = ""
        self.line = 0  # the last one that was read
        self.broken: list[int] = []
        self.bar: tuple[int, int, int] | None = None  # the last progress bar: place, total, line
        self.open_end = False  # the last line has no end
        self.stride, self.seen = 1, 0  # of so many rows one is read
        self.epochs_planned = self.steps_planned = 0

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, line: int, values: Mapping[str, float], where: Mapping[str, float], rank: int = -1) -> None:
        """A row. where: its step, epoch, place and total, as far as they are known."""
        row = len(self)
        self.lines.append(line)
        self.ranks.append(rank)
        columns = {"step": self.steps, "epoch": self.epochs, "place": self.places, "total": self.totals}
        for name, own in columns.items():
            own.append(where.get(name, NAN))
        for key, value in values.items():
            if key not in self.series and len(self.series) >= 2000:
                continue
            rows, column = self.series.setdefault(key, (array.array("q"), array.array("d")))
            rows.append(row)
            column.append(value)

    def skips(self) -> bool:
        """Whether the next row may be left out, of a source with very many."""
        self.seen += 1
        return self.seen % self.stride != 0

    def add_mapping(self, line: int, values: Mapping[str, Any], rank: int = -1) -> None:
        """A row of names and values, such as an object of JSON Lines."""
        where: dict[str, float] = {}
        numbers: dict[str, float] = {}
        for key, value in _flat(values):
            number = number_of(value)
            role = role_of(key)
            if number is None or not role:
                self.note_plan(key, number)
            elif role == "step":  # the count of all, where there are several
                where[role] = max(number, where.get(role, number))
            elif role in ("epoch", "batch", "rank"):
                where.setdefault("place" if role == "batch" else role, number)
            else:
                numbers[key] = number
        if "train_runtime" in values:
            self.ends.append(line)
        if numbers:
            self.add(line, numbers, where, int(where["rank"]) if math.isfinite(where.get("rank", NAN)) else rank)

    def note_plan(self, key: str, number: float | None) -> None:
        """The end that the settings name."""
        if number is not None and 0 < number < 1e12:
            if key in ("max_steps", "total_steps", "max_iters", "train_iters", "max_iterations"):
                self.steps_planned = int(number)
            elif key in ("num_train_epochs", "max_epochs", "num_epochs"):
                self.epochs_planned = int(number)


def number_of(value: Any) -> float | None:
    """A number, also one that stands in quotes; None for anything else."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            return float(value.replace(",", "") if isinstance(value, str) else value)
        except OverflowError:
            return math.inf
        except ValueError:
            pass
    return None


def _flat(values: Mapping[str, Any], prefix: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    for key, value in list(values.items())[:1000]:
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth:
            yield from _flat(value, f"{name}/", depth - 1)
        elif isinstance(value, (list, tuple)) and len(value) == 1:
            yield name, value[0]
        else:
            yield name, value


# -- lines ------------------------------------------------------------------------------------------------------------


class LineFeed:
    """Bytes to lines, in pieces of any size: a progress bar's carriage returns end a line as well, and count none."""

    END = re.compile(rb"\r\n|\n|\r")

    def __init__(self) -> None:
        self.rest, self.number = b"", 1

    def feed(self, data: bytes) -> Iterator[tuple[int, str]]:
        """The lines that are complete: (number in the file, text)."""
        data, start = self.rest + data, 0
        for match in self.END.finditer(data):
            if match.end() == len(data) and match.group() == b"\r":
                break  # the line feed may come with the next piece
            yield self.number, _text(data[start : match.start()])
            self.number += b"\n" in match.group()
            start = match.end()
        self.rest = data[start:] if len(data) - start <= 4 * LONGEST else data[start : start + LONGEST]

    def end(self) -> Iterator[tuple[int, str]]:
        """The last line, which has no end."""
        if self.rest.strip():
            yield self.number, _text(self.rest)
        self.rest = b""


def _text(data: bytes) -> str:
    if len(data) > LONGEST:
        data = data[: LONGEST // 2] + data[-LONGEST // 2 :]
    return data.decode("utf-8", "replace")


class TextLog:
    """A log of lines for people."""

    def __init__(self, rows: LogRows, rank: int = -1) -> None:
        self.rows, self.rank = rows, rank
        self.epoch, self._last, self.nans = NAN, "", 0
        self.names: list[str] = []  # of a table's columns
        self.between = re.compile("")
        self._trace: dict[int, LogText] = {}  # the tracebacks that have not ended, by rank

    def line(self, number: int, text: str) -> None:
        rows, rank = self.rows, self.rank
        rows.line = number
        low = text.lower()
        if rows.stride > 1 and not self._trace and rows.skips() and not any(map(low.__contains__, URGENT)):
            self.nans += "nan" in low
            if "nan" not in low or self.nans > MOST_NANS:
                return
        text = ANSI.sub("", text) if "\x1b" in text else text
        match = RANK.match(text)
        if match is not None:
            rank, text = int(next(filter(None, match.groups()))), text[match.end() :]
        if rank in self._trace and self._continues(rank, text):
            return
        low = text.lower()
        if "traceback (most" in low:
            self._begin(number, text, rank)
            return
        if any(map(low.__contains__, WORDS)):
            self._note(number, text, rank)
        if text[:1] == "{" and self._object(number, text, rank):
            return
        if self.names and self._row(number, text, rank):
            self._last = text
        elif any(map(low.__contains__, NUMERIC)) and not self._head(text):
            self._last = text
            self._numbers(number, text, rank)

    def end(self) -> None:
        for rank in list(self._trace):
            self._close(rank)
        if (stamp := STAMP.search(self._last[:60])) is not None:
            self.rows.last_stamp = f"{stamp[1]} {stamp[2]}"

    def _begin(self, number: int, text: str, rank: int) -> None:
        self._close(rank)
        if (inside := RANK_INSIDE.search(text)) is not None and rank < 0:
            rank = int(inside[1])
        self._trace[rank] = LogText(number, text[text.index("Traceback") :], rank if rank >= 0 else None)

    def _continues(self, rank: int, text: str) -> bool:
        """Whether the line belongs to the traceback: up to the error's own line, and the indented ones below that."""
        trace, plain = self._trace[rank], text.strip()
        last = trace.text.rpartition("\n")[2]
        over = "\n" in trace.text and last[:1] not in " \t" and not last.startswith(CHAINED)
        if over and plain and text[:1] not in " \t" and not plain.startswith(CHAINED):
            self._close(rank)
            return False
        if plain and trace.text.count("\n") < MOST_TRACEBACK_LINES:
            trace.text += "\n" + text[:500]
        return True

    def _close(self, rank: int) -> None:
        trace = self._trace.pop(rank, None)
        if trace is not None and len(self.rows.tracebacks) < MOST_TRACEBACKS:
            self.rows.tracebacks.append(trace)

    def _note(self, number: int, text: str, rank: int) -> None:
        rows, plain = self.rows, text.strip()[:400]
        said = LogText(number, plain, rank if rank >= 0 else None)
        if KILLED.search(plain):
            rows.kills.append(said)
        elif WARNING.search(plain):
            key = re.sub(r"\d+", "#", plain)[-200:]
            if key in rows.warnings:
                rows.warnings[key].times += 1
            elif len(rows.warnings) < MOST_WARNINGS:
                rows.warnings[key] = said
        elif ERROR.match(plain) and not LOSS_ITSELF.match(plain):
            rows.tracebacks.append(said)
        if ENDED.search(plain):
            rows.ends.append(number)
        if RESUMED.search(plain):
            rows.resumes.append(said)

    def _object(self, number: int, text: str, rank: int) -> bool:
        """A line that is one object of JSON."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        if isinstance(value, dict):
            self.rows.add_mapping(number, value, rank)
        return isinstance(value, dict)

    def _head(self, text: str) -> bool:
        """The names above a table's columns."""
        if "oss" not in text or not HEAD.match(text):
            return False
        between = re.compile(
            r" *[\t|] *" if re.search(r"[\t|]", text.strip()) else r" {2,}" if "  " in text.strip() else " "
        )
        names = between.split(text.strip(" |\n"))
        if len(names) < 2 or not any(role_of(name) in MEASURED for name in names):
            return False
        self.names, self.between = names, between
        return True

    def _row(self, number: int, text: str, rank: int) -> bool:
        """A row of the table."""
        cells = self.between.split(text.strip(" |\n"))
        if len(cells) < len(self.names) or not (first := re.fullmatch(r"(\d+)(?:/(\d+))?", cells[0])):
            return False
        if first[2] and role_of(self.names[0]) == "epoch":
            self.rows.epochs_planned = int(first[2])
        self.rows.add_mapping(number, dict(zip(self.names, [first[1], *cells[1:]])), rank)
        return True

    def _numbers(self, number: int, text: str, rank: int) -> None:
        rows = self.rows
        where, values = self._pairs(text)
        if "<" in text and (bar := BAR.search(text)) is not None and bar[2] != "?":
            where["place"], where["total"] = float(bar[1].replace(",", "")), float(bar[2].replace(",", ""))
            rows.bar = int(where["place"]), int(where["total"]), number
        if ("/step" in text or "ETA" in text) and (bar := KERAS.match(text)) is not None and bar[1] != bar[2]:
            return  # the mean of an epoch that goes on
        rest = self._epoch(text)
        if not {"place", "step"} & {*where} and (inside := PLACE.search(rest)) is not None:
            where["place"], where["total"] = float(inside[1]), float(inside[2])
        if not {"place", "step"} & {*where} and rows.bar is not None and rows.bar[2] == number:
            where["place"], where["total"] = map(float, rows.bar[:2])  # this text has written over the bar
            rows.bar = None
        if values:
            rows.add(number, values, {**where, "epoch": self.epoch}, rank)

    def _epoch(self, text: str) -> str:
        """Note the epoch that a line names. Returns what stands behind it."""
        match = ("][" in text and PAIRED_PLACE.search(text)) or (EPOCH.search(text) if "poch" in text else None)
        if not match:
            return text
        self.epoch = float(match[1])
        self.rows.epochs_planned = int(match[2]) if match[2] else self.rows.epochs_planned
        return text[match.end(2) + 1 if match.re is PAIRED_PLACE else match.end() :]

    def _pairs(self, text: str) -> tuple[dict[str, float], dict[str, float]]:
        """The counters (step, place, total) and the measured values that a line names."""
        counters: dict[str, float] = {}
        values: dict[str, float] = {}
        end, judged = 0, OF_EVALUATION.match(text) is not None
        for match in PAIR.finditer(text):
            key, value = match["key"].lower(), _float(match["value"])
            before, end = WORD_BEFORE.search(text, end, match.start()), match.end()
            joined = f"{before[1].lower()}_{key}" if before else key
            name = joined if role_of(joined) else key
            name = f"val_{name}" if judged and role_of(name) == "loss" else name
            role = role_of(name)
            if role in MEASURED:
                values.setdefault(name, value)
                if value == 0 and re.fullmatch(r"0\.0{2,}", match["value"]):
                    self.rows.rounded.add(name)
            elif role == "step" and not match["total"] and "place" not in counters:
                if not joined.startswith("per_"):  # "time per iteration: 12"
                    counters["step"] = max(value, counters.get("step", value))
            elif role in ("step", "batch") and not counters:
                counters["place"] = value
                if match["total"]:
                    counters["total"] = float(match["total"].replace(",", ""))
            elif role == "epoch":
                self.epoch = value
            else:
                self.rows.note_plan(key, value)
        return counters, values


def _float(text: str) -> float:
    """A comma stands for a point where it can't part thousands."""
    if "," in text:
        whole, _, part = text.partition(",")
        text = text.replace(",", "." if len(part) != 3 and part.isdecimal() or whole.lstrip("+-") == "0" else "")
    return float(text)


class JsonLines(TextLog):
    """An object for each line."""

    def line(self, number: int, text: str) -> None:
        self.rows.line = number
        if text.lstrip()[:1] != "{":
            super().line(number, text)
        elif self.rows.skips() and not RARE.search(text.lower()):
            return
        elif not self._object(number, text, self.rank):
            self.rows.broken.append(number)


class CsvLines(TextLog):
    """A row for each step, under a line of names; blank cells are no numbers."""

    delimiter = ","

    def line(self, number: int, text: str) -> None:
        self.rows.line = number
        if not text.strip() or text.startswith("#"):
            return
        if not self.names:
            self.delimiter = max(",;\t", key=text.count)
        cells = next(csv.reader([text], delimiter=self.delimiter), [])
        if not self.names:
            self.names = [name.strip().lstrip("\ufeff") for name in cells]
        elif [c.strip() for c in cells] == self.names:
            return  # the head again: another run was appended
        elif self.rows.skips() and not RARE.search(text.lower()):
            return
        elif len(cells) < len(self.names):
            self.rows.broken.append(number)
        else:
            self.rows.add_mapping(number, dict(zip(self.names, cells)), self.rank)


READERS = {"text": TextLog, "JSON Lines": JsonLines, "CSV": CsvLines}


# -- whole files ------------------------------------------------------------------------------------------------------


def read_json(rows: LogRows) -> None:
    """trainer_state.json, a list of objects, or a history by name. Raises ValueError for anything else."""
    data = rows.path.read_bytes() if rows.path.stat().st_size <= MOST_WHOLE else b""
    text = data.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    rows.line, start = text.count("\n") + 1, 0
    if isinstance(value, dict) and isinstance(value.get("log_history"), list):
        rows.kind = "trainer_state.json"
        rows.add_mapping(0, {k: value[k] for k in ("max_steps", "num_train_epochs") if k in value})
        value, start = value["log_history"], text.find('"log_history"')
    if isinstance(value, dict):
        columns = {k: v for k, v in value.items() if isinstance(v, list) and role_of(str(k))}
        length = max(map(len, columns.values()), default=0)
        value = [{"epoch": i, **{k: v[i] for k, v in columns.items() if i < len(v)}} for i in range(length)] or None
        rows.kind = "JSON history"
    if not isinstance(value, list):
        raise ValueError("it holds no history of a loss")
    entries = [entry for entry in value if isinstance(entry, dict)]
    begins = [] if rows.kind == "JSON history" else [m.start() for m in re.finditer(r"\{", text[start:])]
    if len(begins) < len(entries):  # the objects can't be told apart: the line of the list
        begins = [0] * len(entries)
    line, at = text.count("\n", 0, start) + 1, start
    for entry, begin in zip(entries, begins if rows.kind == "trainer_state.json" else begins[-len(entries) :]):
        line, at = line + text.count("\n", at, start + begin), start + begin
        rows.add_mapping(line, entry)


def read_events(rows: LogRows, data: bytes) -> int:
    """Scalars of an event file: TFRecords, each with an Event. Returns the bytes that were whole."""
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if length > 2**30 or at + 16 + length > len(data):
            break
        rows.line += 1
        try:
            step, scalars = _event(memoryview(data)[at + 12 : at + 12 + length])
        except (ValueError, IndexError, TypeError, struct.error):
            rows.broken.append(rows.line)
            step, scalars = 0, {}
        at += 16 + length
        for tag, value in scalars.items():
            if role_of(tag):
                rows.add(rows.line, {tag: value}, {"step": float(step)})
    rows.open_end = at < len(data)
    return at


def _event(data: Any) -> tuple[int, dict[str, float]]:
    """(step, scalars by their tags) of an Event. Its field 5 is a summary, of which each field 1 is a value: field 1
    its tag, 2 a float, 8 a tensor (1: its type, 4: its bytes, 5 and 6: its floats and doubles)."""
    event = list(fields(data))
    scalars = {}
    for part in (part for field, summary in event if field == 5 for inner, part in fields(summary) if inner == 1):
        value = dict(fields(part))
        tensor = dict(fields(value.get(8, b"")))
        content = tensor.get(4) if tensor.get(1) in (1, 2) else None
        number = next(
            (c for c in (value.get(2), tensor.get(5), tensor.get(6), content) if c and len(c) in (4, 8)), None
        )
        if number is not None:
            (number,) = struct.unpack("<f" if len(number) == 4 else "<d", bytes(number))
            scalars[bytes(value.get(1, b"")[:200]).decode()] = number
    return next((value for field, value in event if field == 2 and isinstance(value, int)), 0), scalars


def fields(data: Any) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers as int, the rest as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind not in (0, 1, 2, 5):
            raise ValueError(f"no message has fields of kind {kind}")
        length, at = (8 if kind == 1 else 4, at) if kind in (1, 5) else _varint(data, at)
        value: Any = length
        if kind:
            value, at = data[at : at + length], at + length
        if at > len(data):
            raise ValueError("a message ends early")
        yield key >> 3, value


def _varint(data: Any, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")


# -- which format -----------------------------------------------------------------------------------------------------


NAMES = ("*.log", "*.txt", "*.out", "*.err", "*.jsonl", "*.ndjson", "*.csv", "*.tsv", "*.json")
NO_LOGS = {"requirements.txt", "merges.txt", "vocab.txt", "readme.txt", "license.txt"}


def kind_of(path: pathlib.Path) -> str:
    """The format of a file, by its name and its first bytes: "events", "JSON", or a key of READERS."""
    name = path.name.lower()
    if "tfevents" in name:
        return "events"
    with path.open("rb") as file:
        head = file.read(4096)
    first, *more = head.lstrip(b"\xef\xbb\xbf \r\n\t").split(b"\n", 1)
    if name.endswith((".jsonl", ".ndjson")):
        return "JSON Lines"
    if name.endswith((".csv", ".tsv")):
        return "CSV"
    if name.endswith(".json") and not (more and _is_object(first) and _is_object(more[0].split(b"\n", 1)[0])):
        return "JSON"
    if _is_object(first):
        return "JSON Lines"
    names = re.split(r"[,;\t]", first.decode("utf-8", "replace").strip())
    if len(names) > 1 and not any(re.search(r"\d", n) for n in names) and any(role_of(n.strip()) for n in names):
        return "CSV"
    return "text"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def is_log(path: pathlib.Path) -> bool:
    """Whether a file is the log of a training: by its name, or because many of its first lines hold a loss."""
    if "tfevents" in path.name or path.name.endswith((".log", ".out", ".err", "trainer_state.json")):
        return True
    if not any(path.match(pattern) for pattern in NAMES) or (kind := kind_of(path)) not in READERS:
        return False
    rows, lines = LogRows(path, kind), LineFeed()
    reader = READERS[kind](rows, -1)
    with path.open("rb") as file:
        for number, text in lines.feed(file.read(4 * LONGEST)):
            reader.line(number, text)
    found = [len(values) for key, (_, values) in rows.series.items() if role_of(key) in ("loss", "validation")]
    return max(found, default=0) > max(1, 0.2 * rows.line)


def rank_of(path: pathlib.Path) -> int:
    """The rank that a file's name, or its folder's, carries; -1 without one."""
    for part in (path.stem, path.parent.name):
        if (match := re.search(r"(?:^|[._-])rank[_-]?(\d+)(?:$|[._-])", part)) is not None:
            return int(match[1])
    return -1


def sources(folder: pathlib.Path, most: int = 200) -> list[pathlib.Path]:
    """The files of a folder that may be logs, in order, the first 200 of them. Of several trainer_state.json of
    one run, the newest; links are not followed."""
    found: list[pathlib.Path] = []
    for root, folders, names in os.walk(folder):
        here = pathlib.Path(root)
        deep = len(here.relative_to(folder).parts) >= 4
        skipped = {f for f in folders if deep or f.startswith(".") or f in ("wandb-cache", "__pycache__")}
        folders[:] = sorted({*folders} - skipped)
        for path in (here / name for name in sorted(names)):
            named = "tfevents" in path.name or any(path.match(pattern) for pattern in NAMES)
            other = path.suffix == ".json" and path.name != "trainer_state.json" and "histor" not in path.name
            if named and not other and path.name.lower() not in NO_LOGS and not path.is_symlink() and path.is_file():
                found.append(path)
    states = [path for path in found if path.name == "trainer_state.json"]
    newest: dict[pathlib.Path, pathlib.Path] = {}
    for path in sorted(states, key=lambda p: (p.stat().st_mtime, str(p))):
        run = path.parent.parent if re.fullmatch(r"checkpoint-\d+", path.parent.name) else path.parent
        newest[run] = path
    return [path for path in found if path not in states or path in newest.values()][:most]


def texts_of(path: pathlib.Path, numbers: set[int]) -> dict[int, str]:
    """These lines of a file of lines, without colours; of a progress bar, its last state."""
    texts: dict[int, str] = {}
    with path.open("rb") as file:
        feed = LineFeed()
        while numbers and feed.number <= max(numbers) and (data := file.read(2**20)):
            for number, text in feed.feed(data):
                if number in numbers and text.strip():
                    texts[number] = ANSI.sub("", text).strip()
    return texts


class Follower:
    """A file that may grow: `read` takes in what has come."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._start()

    def _start(self) -> None:
        self.kind = kind_of(self.path)
        self.rows, self.at, self.size = LogRows(self.path, self.kind), 0, -1
        self.lines = LineFeed()
        self.reader = READERS.get(self.kind, TextLog)(self.rows, rank_of(self.path))

    def read(self, progress: Callable[[int], object] = lambda read: None) -> bool:
        """Take in what is new; whether there was anything. A file that is shorter than before begins anew."""
        size = self.path.stat().st_size
        if size == self.size:
            return False
        if size < self.at or self.kind == "JSON" or self.size <= 0:
            self._start()
            self.rows.stride = max(1, size // (MOST_ROWS * ROW_BYTES))
        self.size = size
        if self.kind == "JSON":
            read_json(self.rows)
            return True
        with self.path.open("rb") as file:
            file.seek(self.at)
            if self.kind == "events":
                self.rows.kind = "TensorBoard events"
                self.at += read_events(self.rows, file.read(MOST_WHOLE))
                return True
            while data := file.read(2**20):
                self.at += len(data)
                progress(len(data))
                for line in self.lines.feed(data):
                    self.reader.line(*line)
        self.rows.open_end = bool(self.lines.rest.strip())
        return True

    def end(self) -> None:
        """The file will not grow: its last line is read as it is, though it has no end."""
        if self.kind in READERS:
            broken = len(self.rows.broken)
            for line in self.lines.end():
                self.reader.line(*line)
            if self.rows.open_end and len(self.rows.broken) > broken:
                self.rows.broken.pop()  # cut off, not damaged
            elif self.kind != "text":
                self.rows.open_end = False
            self.reader.end()
