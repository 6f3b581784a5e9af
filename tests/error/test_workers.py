"""Workers of a loader that die, can't start or don't answer: real ones, and the words of other machines."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import nbdebug


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A loader that failed waits so many seconds for its workers (torch's own: 5)."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()


CODE = "error/loader-worker-died"


class Made(Dataset):
    def __init__(self, make):
        self.make, self.table = make, torch.zeros(1000)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.make(i)


def explained(make, **settings):
    loader = DataLoader(Made(make) if callable(make) else make, batch_size=4, **settings)
    with pytest.raises(Exception) as caught:
        for _batch in loader:
            pass
    return told(caught.value)


def told(error):
    report = nbdebug.explain(error, names={})
    return report, str(report.full())


def only(report):
    (finding,) = report.findings
    assert finding.code == CODE and finding.fixes
    return finding


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda i: os._exit(3), ["exit code 3", "num_workers=0"]),
        (lambda i: os.kill(os.getpid(), signal.SIGKILL), ["killed", "memory", "3.91 KiB"]),
        (lambda i: os.kill(os.getpid(), signal.SIGSEGV), ["crashed", "Segmentation fault"]),
    ],
)
def test_a_worker_that_dies_is_told_with_its_loader(make, words) -> None:
    report, said = explained(make, num_workers=1)
    finding = only(report)
    assert all(word in said for word in ["`loader`", "`num_workers=1`", "Made", *words]), said
    assert finding.where.text == "for _batch in loader:"


def test_a_child_that_ends_meanwhile_does_not_disturb(monkeypatch) -> None:
    """As torch does it: the handler raises in the line that is running."""
    from nbdebug.tools.errors import dispatch as account

    heard = []

    def raises(number, frame):
        heard.append(number)
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    def causes_late(*given):
        os.kill(os.getpid(), signal.SIGCHLD)
        return whole(*given)

    whole = account.find_causes
    before = signal.signal(signal.SIGCHLD, raises)
    monkeypatch.setattr(account, "find_causes", causes_late)
    try:
        report = nbdebug.explain(RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), names={})
        assert signal.getsignal(signal.SIGCHLD) is raises and heard == [signal.SIGCHLD]
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert only(report)


def test_a_worker_that_does_not_answer() -> None:
    report, said = explained(lambda i: time.sleep(3), num_workers=1, timeout=1)
    assert only(report) and "within 1 s" in said


def test_what_can_not_be_sent_to_a_fresh_process_is_named() -> None:
    report, said = explained(lambda i: torch.zeros(2), num_workers=1, multiprocessing_context="spawn")
    assert only(report) and "`Made.make` is a lambda" in said and "def make(...)" in said
    locked = Made(None)
    locked.lock = threading.Lock()
    report, said = explained(locked, num_workers=1, multiprocessing_context="spawn")
    assert only(report) and "`Made.lock`" in said and "can't be pickled" in said


def test_cuda_in_a_forked_worker() -> None:
    def make(i):
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
            "use the 'spawn' start method"
        )

    report, said = explained(make, num_workers=1)
    assert only(report) and "forked worker" in said and "multiprocessing_context='spawn'" in said


MESSAGES = [
    (
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
        "shared memory. Please try to raise your shared memory limit.",
        "shared memory",
    ),
    ("DataLoader worker (pid 7) is killed by signal: Killed. ", "memory ran out"),
    ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "exit"),
    (
        "\n        An attempt has been made to start a new process before the\n        current "
        "process has finished its "
        "bootstrapping phase.\n",
        "if __name__ == '__main__':",
    ),
]


@pytest.mark.parametrize(("message", "word"), MESSAGES)
def test_messages_of_other_machines(message, word) -> None:
    loader = DataLoader(Made(None), num_workers=2)

    def fails(loader):
        raise RuntimeError(message)

    with pytest.raises(RuntimeError) as caught:
        fails(loader)
    report, said = told(caught.value)
    assert only(report) and word in said


def test_near_misses_are_not_named_so(tmp_path) -> None:
    def save():
        torch.save(lambda: 1, tmp_path / "x.pt")

    def read():
        raise OSError(28, "No space left on device")

    for fails in (save, read):
        with pytest.raises(Exception) as caught:
            fails()
        assert not told(caught.value)[0].findings


def test_an_error_of_the_data_sets_own_is_no_death() -> None:
    report, said = explained(lambda i: 1 // 0, num_workers=1)
    assert not report.findings and "ZeroDivisionError" in said and "worker process 0" in said
    assert "lambda i: 1 // 0" in said, "the line in the worker is shown"


def kill(i):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_pipe_that_broke_tells_by_exit_code_who_was_killed_and_names_a_loader_without_a_name() -> None:
    with pytest.raises(Exception) as caught:
        for batch in DataLoader(Made(kill), batch_size=4, num_workers=1):
            batch.sum()
    report, said = told(caught.value)
    assert "system killed" in only(report).title and "`num_workers=1`" in said and "Made" in said, said
    assert "library crashed" not in said


def test_at_another_line_the_loop_says_which_loader_it_was() -> None:
    with pytest.raises(RuntimeError) as caught:
        for batch in DataLoader(Made(lambda i: torch.zeros(2)), batch_size=4, num_workers=0):
            batch.sum()
            raise RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. ")
    report, said = told(caught.value)
    assert "system killed" in only(report).title and "Made" in said
