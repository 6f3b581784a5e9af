"""monitor and incident: what they see, that they touch nothing, and that a page names nobody."""

from __future__ import annotations

import getpass
import pathlib
import socket
import threading
import time

import pytest
import torch
from torch import nn

import nbdebug
from nbdebug.report import Finding, Fix, Report, Symptom, Where
from nbdebug.tools.monitor.incident import GivenReport, scrubbed
from nbdebug.tools.monitor.rules import MACHINE_RULES, MachineFacts, MachineSample
from tests.shell import started


def steps(number: int, wait: float = 0.0) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for _ in range(number):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        other.step()
        time.sleep(wait)


def test_it_counts_steps_beside_the_machine_and_leaves_nothing_behind() -> None:
    threads = threading.active_count()
    with nbdebug.monitor(every=0.05) as watch:
        steps(10, 0.03)
        watch.mark("something")
    report = watch.report()
    assert watch.steps == 10 and report.ok and not watch.fault and not watch.active
    assert threading.active_count() == threads
    assert {"time", "steps", "own", "free", "disk", "core"} <= set(watch.frame.columns)
    data = report.plot("losses")
    assert {"steps a second", "use in percent", "memory in GiB"} <= set(data["panels"]) and len(data["marks"]) == 1
    steps(3)
    assert watch.close().steps == 10
    assert "<img" in report._repr_mimebundle_()["text/html"]


def test_a_fault_of_ours_ends_the_watch_and_not_the_training() -> None:
    watch = nbdebug.monitor(every=0.05)
    watch._machine.sample = None  # type: ignore[assignment, method-assign]
    steps(4, 0.05)
    assert watch.close().fault and watch.report().unchecked


@pytest.mark.parametrize("every", [0, -1, float("nan")])
def test_an_interval_is_a_time(every: float) -> None:
    with pytest.raises(ValueError, match="seconds between"):
        nbdebug.monitor(every=every)


def test_what_is_not_certain_is_silent() -> None:
    gib = 2.0**30
    warm_up = [MachineSample(n, n, own=gib * min(n, 20) / 4, free=9 * gib) for n in range(1, 61)]
    waves = [
        MachineSample(n, n, own=gib * (3 + n % 9), free=(20 - n % 9) * gib, card=5 + 90 * (n % 2), core=99)
        for n in range(1, 61)
    ]
    capped = [MachineSample(n, n, card=99, power=300, heat=62) for n in range(1, 61)]
    before = [MachineSample(n, 0, card=1, core=100, own=n * gib, free=gib) for n in range(1, 61)]
    mapped = [MachineSample(n, n, own=gib * n / 8, free=9 * gib) for n in range(1, 61)]
    for samples in (mapped, warm_up, waves, capped, before, []):
        facts = MachineFacts(samples, host=32 * gib)
        assert not [check(facts) for check in MACHINE_RULES if check(facts)]


SICK = Report(
    "%nan_trace step()",
    (
        Finding(
            "nan/log-of-nonpositive",
            "log of 0",
            Where(file="/home/anna/run.py", line=3),
            {"zeros": 4},
            (Fix("Clamp.", "x.clamp(1e-8).log()"),),
        ),
    ),
    symptoms=(Symptom("The loss is nan from step 3 on."),),
)
WELL = Report("%nan_trace step()", steps=1)


def test_a_page_has_five_parts_and_the_proof(tmp_path: pathlib.Path) -> None:
    page = nbdebug.incident([GivenReport("In [3]", 1e9, SICK), GivenReport("In [5]", 1e9 + 60, WELL)], title="Tuesday")
    for part in (
        "# Incident: Tuesday",
        "## 1. Problem",
        "## 2. Facts",
        "## 3. Cause",
        "## 4. Cure",
        "## 5. Prevention",
    ):
        assert part in page.markdown
    assert "was healthy (In [5])" in page.markdown and "x.clamp(1e-8).log()" in page.markdown
    assert page.save(tmp_path / "page.md").read_text() == page.markdown
    with pytest.raises(ValueError, match=r"as \.md"):
        page.save(tmp_path / "page.html")
    with pytest.raises(ValueError, match="no incident"):
        nbdebug.incident([WELL])


def test_a_page_names_nobody() -> None:
    name, host = getpass.getuser(), socket.gethostname()
    text = scrubbed(
        f"/home/anna/run.py and {pathlib.Path.home()}/x, C:\\Users\\Anna\\y on {host}; hf_abcdefghijkl, "
        "api_key='s3cretvalue', password: hunter22, anna@example.org at 10.1.2.3"
    )
    for word in ("anna", "Anna", host, "hf_abc", "s3cret", "hunter22", "example.org", "10.1.2.3"):
        assert word not in text, text
    assert name in ("root", "user") or name not in text


def test_the_magics_in_a_session(tmp_path: pathlib.Path) -> None:
    with started("from tests.monitor import test_monitor as they") as book:
        assert "Nothing is monitored" in book.run("%monitor").shown
        assert "is watched" in book.run("%monitor on --every 0.05").shown
        book.run("they.SICK")
        book.run("they.steps(4, 0.03)")
        assert "Active: %monitor" in book.run("%nbdebug status").shown
        report = book.run("%monitor off").result
        assert report.steps == 4 and report.plot("losses")["marks"][0][1] == "nan/log-of-nonpositive"
        path = tmp_path / "page.md"
        assert "Written" in book.run(f"%incident --save {path}").shown and "In [" in path.read_text()
        log = tmp_path / "run.log"
        log.write_text(
            "".join(f"step {n} loss {'nan' if n > 9 else 1 / n:.4}\n" for n in range(1, 20)).replace("nan", "nan")
        )
        done = book.run(f"%read_log {log}")
        assert done.error is None and "line 10" in done.shown
