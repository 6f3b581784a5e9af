"""The record as it is written: each line whole, whatever becomes of the disk, the folder and the process."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import pytest
import torch

import nbdebug
from nbdebug.tools.guard.record import writer as recording
from nbdebug.tools.guard.record.files import StepLine
from nbdebug.tools.guard.record.writer import RecordWriter

ROOT = pathlib.Path(__file__).resolve().parents[3]


def line(step: int, loss: float | None = 0.5, outcome: str = "ok") -> StepLine:
    return StepLine(step, loss, 1.5, step % 2 == 0, outcome, 1e-3, 1.7e9 + step)


def written(path: pathlib.Path, name: str = "steps.jsonl") -> list[dict]:
    """The lines of a file; a bare NaN, or anything else that is not JSON, fails here."""

    def refused(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(text, parse_constant=refused) for text in (path / name).read_text("ascii").splitlines() if text]


def steps(path: pathlib.Path, name: str = "steps.jsonl") -> list[int]:
    return [entry["step"] for entry in written(path, name) if "step" in entry]


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "run.nbdebug"


@pytest.fixture(autouse=True)
def quiet():
    """Unless a test asks for it, nothing is told; and no file stays open."""
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert not before or len(os.listdir("/proc/self/fd")) <= before, "a file was left open"


class Disk:
    """Stands in for a disk: takes `room` more bytes, then is full; a write that meets the end is cut off there."""

    def __init__(self, monkeypatch, room: int = 10**9, error: int = errno.ENOSPC):
        self.room, self.error, self._write = room, error, os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data) -> int:
        if self.room <= 0:
            raise OSError(self.error, os.strerror(self.error))
        count = self._write(descriptor, bytes(data)[: self.room])
        self.room -= count
        return count


# -- what is written ---------------------------------------------------------------------------------------------------


def test_a_header_then_a_line_a_step_in_strict_json(path) -> None:
    about = {"models": {"net": "Net"}, "on_trip": "trace", "max_grad_norm": float("inf"), "world_size": 1}
    record = RecordWriter(path, about)
    for step, loss in enumerate((0.25, None, float("nan"), float("inf"), float("-inf"))):
        record.line(line(step, loss))
        assert len(written(path)) == step + 2, "on the disk as soon as it is known"
    record.close()
    header, *lines = written(path)
    assert header["nbdebug"] == nbdebug.__version__ and header["pid"] == os.getpid() and header["rank"] == 0
    assert header["about"] == {**about, "max_grad_norm": "inf"} and abs(header["time"] - time.time()) < 60
    assert [entry["loss"] for entry in lines] == [0.25, None, "nan", "inf", "-inf"]
    assert {key for entry in lines for key in entry} == {
        "run",
        "step",
        "loss",
        "norm",
        "clipped",
        "outcome",
        "lr",
        "time",
    }
    assert {entry["run"] for entry in lines} == {header["run"]}


def test_an_earlier_run_is_continued_and_a_line_cut_off_is_ended(path) -> None:
    for _ in range(2):
        record = RecordWriter(path, {})
        record.line(line(0))
        record.close()
    with open(path / "steps.jsonl", "ab") as file:
        file.write(b'{"run":"x","step":1,"lo')  # killed within a write
    record = RecordWriter(path, {})
    record.line(line(7))
    record.close()
    found = nbdebug.open_record(path)
    assert [run.steps for run in found.runs] == [1, 1, 1] and found.unreadable == 1
    assert len({run.id for run in found.runs}) == 3 and list(found.frame["step"]) == [0, 0, 7]


def test_a_full_file_is_set_aside_and_the_last_eight_stay(path, monkeypatch) -> None:
    monkeypatch.setattr(recording, "LIMIT", 2000)
    record = RecordWriter(path, {"models": {"net": "Net"}})
    for step in range(300):
        record.line(line(step))
    record.close()
    names = sorted(p.name for p in path.iterdir())
    full = [name for name in names if name != "steps.jsonl"]
    assert len(full) == recording.FULL_FILES == 8 and len(names) == 9
    assert all(written(path, name)[0]["about"] == {"models": {"net": "Net"}} for name in names)
    assert all(2000 <= (path / name).stat().st_size < 2300 for name in full)
    kept = [step for name in (*full, "steps.jsonl") for step in steps(path, name)]
    assert kept == list(range(kept[0], 300)) and kept[0] > 100
    found = nbdebug.open_record(path)
    assert list(found.frame["step"]) == kept and len(found.runs) == 1 and found.unreadable == 0


def test_a_later_run_sets_a_full_file_aside_too(path, monkeypatch) -> None:
    monkeypatch.setattr(recording, "LIMIT", 1000)
    for n in range(3):
        record = RecordWriter(path, {})
        for step in range(12):
            record.line(line(100 * n + step))
        record.close()
    assert list(nbdebug.open_record(path).frame["step"]) == [100 * n + step for n in range(3) for step in range(12)]


def test_each_process_of_several_has_files_of_its_own(path) -> None:
    records = [RecordWriter(path, {"world_size": 2}, rank) for rank in (0, 1)]
    for rank, record in enumerate(records):
        for step in range(3):
            record.line(line(step, loss=float(rank)))
        record.close()
    assert {p.name for p in path.iterdir()} == {"steps.jsonl", "steps.rank1.jsonl"}
    frame = nbdebug.open_record(path).frame
    assert list(frame["rank"]) == [0, 0, 0, 1, 1, 1] and list(frame["loss"]) == [0.0] * 3 + [1.0] * 3


def test_two_records_at_the_same_path_do_not_mix(path) -> None:
    """As where a cell that sets up a guard is run again, and the old guard is still there."""
    old, new = RecordWriter(path, {"n": 1}), RecordWriter(path, {"n": 2})
    for step in range(4):
        old.line(line(step)), new.line(line(100 + step))
    old.close(), new.close()
    found = nbdebug.open_record(path)
    assert [list(run.columns.step) for run in found.runs] == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert [run.about for run in found.runs] == [{"n": 1}, {"n": 2}]


# -- a wrong path is told at once --------------------------------------------------------------------------------------


def test_a_path_that_can_be_no_record_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    for given, error, said in [
        (7, TypeError, "7"),
        ("", TypeError, "folder"),
        (tmp_path / "file", ValueError, "is a file"),
        (tmp_path / "thesis", ValueError, "other files"),
        (tmp_path / "file" / "run", OSError, "can't be written"),
    ]:
        with pytest.raises(error, match=said):
            RecordWriter(given, {})
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


def test_a_disk_that_is_full_from_the_start_is_told_at_once(path, monkeypatch) -> None:
    Disk(monkeypatch, room=10)
    with pytest.raises(OSError, match=r"can't be written: No space left.*run\.nbdebug") as told:
        RecordWriter(path, {})
    assert told.value.errno == errno.ENOSPC
    del told


def test_a_link_in_the_place_of_the_file_is_not_written_through(tmp_path, path) -> None:
    (tmp_path / "precious").write_text("mine\n")
    path.mkdir()
    (path / "steps.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="can't be written"):
        RecordWriter(path, {})
    assert (tmp_path / "precious").read_text() == "mine\n"


def test_missing_folders_are_made_and_the_home_folder_is_known(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    RecordWriter("~/runs/night/run.nbdebug", {}).close()
    assert (tmp_path / "runs/night/run.nbdebug/steps.jsonl").exists()


def test_a_change_of_directory_does_not_move_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = RecordWriter("run.nbdebug", {})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "run.nbdebug")
    with pytest.warns(RuntimeWarning, match="deleted"):
        record.line(line(0))
    record.close()
    assert steps(tmp_path / "run.nbdebug") == [0]


# -- afterwards nothing raises -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", range(0, 260, 13))
def test_a_full_disk_is_told_once_and_nothing_is_lost(path, monkeypatch, room) -> None:
    record = RecordWriter(path, {})
    record.line(line(0))
    before = (path / "steps.jsonl").read_bytes()
    disk = Disk(monkeypatch, room)
    with pytest.warns(RuntimeWarning) as told:
        for step in range(1, 9):
            record.line(line(step))
    assert len(told) == 1
    said = str(told[0].message)
    assert "No space left" in said and str(path) in said and "kept in memory" in said and "training goes on" in said
    disk.room = 10**6
    record.line(line(9))
    record.close()
    assert (path / "steps.jsonl").read_bytes().startswith(before)
    found = nbdebug.open_record(path)
    assert list(found.frame["step"]) == list(range(10)) and found.unreadable <= 1


def test_a_disk_that_is_full_again_and_again_damages_no_line(path, monkeypatch) -> None:
    record = RecordWriter(path, {})
    disk = Disk(monkeypatch)
    with pytest.warns(RuntimeWarning) as told:
        for step in range(200):
            disk.room = step * 37 % 211 if step % 3 else 0
            record.line(line(step))
    disk.room = 10**6
    record.close()
    assert len(told) == 1
    assert sorted(set(nbdebug.open_record(path).frame["step"])) == list(range(200))
    assert len(nbdebug.open_record(path).frame) == 200


def test_of_lines_that_wait_too_long_the_oldest_go_and_are_counted(path, monkeypatch) -> None:
    monkeypatch.setattr(recording, "WAITING", 5)
    record = RecordWriter(path, {})
    disk = Disk(monkeypatch, 0)
    with pytest.warns(RuntimeWarning):
        for step in range(12):
            record.line(line(step))
    disk.room = 10**6
    record.close()
    found = nbdebug.open_record(path)
    assert list(found.frame["step"]) == [7, 8, 9, 10, 11] and found.runs[0].lost == 7
    assert any("7 steps could not be written" in note for note in found.report().notes)


def test_a_real_full_disk(path) -> None:
    """The system's own limit on a file's size, in a process of its own: a write is cut off there, and then fails."""
    program = """
        import resource, sys, warnings
        from nbdebug.tools.guard.record.files import StepLine
        from nbdebug.tools.guard.record.writer import RecordWriter
        record = RecordWriter(sys.argv[1], {})
        size = record._size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 500, resource.RLIM_INFINITY))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(20):
                record.line(StepLine(step, 0.5, 1.5))
        assert len(told) == 1 and "File too large" in str(told[0].message), told
        assert record._size == size + 500, record._size
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        record.line(StepLine(20, 0.5, 1.5))
        record.close()
    """
    pytest.importorskip("resource")
    run(program, path)
    found = nbdebug.open_record(path)
    assert list(found.frame["step"]) == list(range(21)) and found.unreadable == 1


@pytest.mark.skipif(
    not shutil.which("mount") or not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="only root can mount a small disk",
)
def test_a_small_disk_that_runs_full(tmp_path, monkeypatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs can't be mounted here")
    try:
        record = RecordWriter(small / "run.nbdebug", {})
        with pytest.warns(RuntimeWarning) as told:
            for step in range(1000):
                record.line(line(step))
        (small / "run.nbdebug" / "steps.jsonl").stat()
        subprocess.run(["mount", "-o", "remount,size=1m", str(small)], check=True)
        record.close()
        found = nbdebug.open_record(small / "run.nbdebug")
        assert len(told) == 1 and list(found.frame["step"]) == list(range(1000))
    finally:
        subprocess.run(["umount", str(small)], check=False)


def test_a_deleted_folder_is_made_again_with_what_it_had(path) -> None:
    record = RecordWriter(path, {"models": {"net": "Net"}})
    for step in range(5):
        record.line(line(step))
    shutil.rmtree(path)
    with pytest.warns(RuntimeWarning, match="it was deleted") as told:
        for step in range(5, 9):
            record.line(line(step))
        shutil.rmtree(path)
        record.line(line(9))
        record.close()
    assert len(told) == 1
    found = nbdebug.open_record(path)
    assert list(found.frame["step"]) == list(range(10)) and found.unreadable == 0
    assert found.runs[0].about == {"models": {"net": "Net"}}
    assert [p.name for p in path.iterdir()] == ["steps.jsonl"]


def test_a_deleted_file_too_and_one_that_somebody_else_made_since(path) -> None:
    record = RecordWriter(path, {})
    record.line(line(0))
    (path / "steps.jsonl").unlink()
    with pytest.warns(RuntimeWarning, match="deleted"):
        record.line(line(1))
    assert steps(path) == [0, 1]
    shutil.rmtree(path)
    other = RecordWriter(path, {})
    record.line(line(2))
    other.line(line(50))
    record.close(), other.close()
    assert steps(path) == [2, 50]


def test_a_folder_that_can_not_be_made_again_is_waited_for(path) -> None:
    """What a folder without permission is for others than root: it can't be written, until it can."""
    record = RecordWriter(path, {})
    record.line(line(0))
    shutil.rmtree(path)
    path.write_text("a file in its place")
    with pytest.warns(RuntimeWarning) as told:
        for step in range(1, 4):
            record.line(line(step))
        assert record.trip(object()) is None
        path.unlink()
        record.line(line(4))
        record.close()
    assert steps(path) == [0, 1, 2, 3, 4]
    assert ["kept in memory" in str(w.message) for w in told] == [True, False, False]  # then the trip, the deletion


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_other_errors_are_waited_for_too(path, monkeypatch, error) -> None:
    record = RecordWriter(path, {})
    disk = Disk(monkeypatch, 0, error)
    with pytest.warns(RuntimeWarning, match=os.strerror(error)) as told:
        record.line(line(0)), record.line(line(1))
    disk.room = 10**6
    record.close()
    assert steps(path) == [0, 1] and len(told) == 1


def test_a_folder_that_takes_no_new_files_lets_the_full_one_grow(path, monkeypatch) -> None:
    monkeypatch.setattr(recording, "LIMIT", 1000)
    record = RecordWriter(path, {})
    real = os.rename

    def refused(*names):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", refused)
    with pytest.warns(RuntimeWarning, match="grows on") as told:
        for step in range(40):
            record.line(line(step))
    monkeypatch.setattr(os, "rename", real)
    for step in range(40, 60):
        record.line(line(step))
    record.close()
    assert len(told) == 1 and not list(path.glob(".*"))
    assert list(nbdebug.open_record(path).frame["step"]) == list(range(60))
    assert (path / "steps.000.jsonl").exists()


def test_a_program_that_turns_warnings_into_errors_trains_on(path, monkeypatch, capsys) -> None:
    record = RecordWriter(path, {})
    Disk(monkeypatch, 0)
    record.line(line(0)), record.line(line(1))
    record.close()
    assert capsys.readouterr().err.count("No space left") == 1


def test_what_can_not_be_a_line_is_told_and_the_others_are_written(path) -> None:
    record = RecordWriter(path, {})
    with pytest.warns(RuntimeWarning, match="a step could not be written"):
        record.line(StepLine(0, object()))
    record.line(line(1))
    record.close()
    assert steps(path) == [1]


def test_a_program_that_closes_all_files_does_not_get_lines_into_its_own(path, tmp_path) -> None:
    record = RecordWriter(path, {})
    record.line(line(0))
    os.close(record._fd)
    with open(tmp_path / "letter", "w") as letter:
        assert letter.fileno() == record._fd
        record.line(line(1))
        letter.write("dear")
    record.close()
    assert (tmp_path / "letter").read_text() == "dear" and steps(path) == [0, 1]
    os.path.exists(path) and record.line(line(2))
    assert steps(path) == [0, 1], "closed is closed"


class Training:
    """A small training whose losses are on record."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(6, 4)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> list[bytes]:
        return [p.detach().numpy().tobytes() for p in self.model.parameters()]


@pytest.mark.filterwarnings("error")
def test_whatever_becomes_of_the_record_the_training_is_the_same(path, monkeypatch) -> None:
    bare, guarded = Training(), Training()
    torch.manual_seed(1)
    for _ in range(30):
        bare.step()
    torch.manual_seed(1)
    with nbdebug.guard(guarded.model, guarded.optimizer, record=path) as guard:
        disk = Disk(monkeypatch)
        with pytest.warns(RuntimeWarning) as told:
            for step in range(30):
                disk.room = 0 if 5 <= step < 10 or step == 20 else 50 if step == 12 else 10**6
                if step in (15, 20):
                    shutil.rmtree(path)
                guarded.step()
    assert guarded.state() == bare.state() and guard.fault == "" and guard.steps == 30
    assert len(told) == 2, "the disk was full, the folder was deleted"
    assert list(nbdebug.open_record(path).frame["step"]) == list(range(30))


# -- other processes ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_worker_writes_nothing(path) -> None:
    record = RecordWriter(path, {})
    record.line(line(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, in Python 3.12
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            record.line(line(99))
            record.trip(object())
            record.close()
            del record
        os._exit(0)
    os.waitpid(child, 0)
    record.line(line(1))
    record.close()
    assert steps(path) == [0, 1] and [p.name for p in path.iterdir()] == ["steps.jsonl"]


def test_a_copy_or_what_a_spawned_worker_gets_writes_nothing(path) -> None:
    record = RecordWriter(path, {})
    for twin in (copy.deepcopy(record), pickle.loads(pickle.dumps(record)), copy.copy(record)):
        twin.line(line(99))
        twin.close()
        del twin
    record.line(line(0))
    record.close()
    assert steps(path) == [0]


def run(program: str, *args: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, args)],
        cwd=ROOT,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


KILLED = """
    import os, sys, time
    from nbdebug.tools.guard.record.files import StepLine
    from nbdebug.tools.guard.record.writer import RecordWriter
    record = RecordWriter(sys.argv[1], {})
    write, count = os.write, 0
    def torn(descriptor, data):  # the system is slow, and has taken half of a line when the process dies
        global count
        count += 1
        if count < 200:
            return write(descriptor, data)
        write(descriptor, bytes(data)[:len(data) // 2])
        print("in the middle", flush=True)
        time.sleep(60)
    os.write = torn
    for step in range(10**6):
        record.line(StepLine(step, 0.5, 1.5))
"""


def test_a_process_killed_within_a_write_leaves_every_line_before(path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "in the middle\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found = nbdebug.open_record(path)
    assert list(found.frame["step"]) == list(range(199)) and found.unreadable == 1
    assert "1 line could not be read" in str(found)
    record = RecordWriter(path, {})
    record.line(line(500))
    record.close()
    assert list(nbdebug.open_record(path).frame["step"]) == [*range(199), 500]


def test_a_process_killed_at_any_moment(path) -> None:
    program = KILLED.replace("count < 200", "True")
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), str(path)], cwd=ROOT)
    end = time.monotonic() + 60
    while not (path / "steps.jsonl").exists() or (path / "steps.jsonl").stat().st_size < 20_000:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = nbdebug.open_record(path)
    assert list(found.frame["step"]) == list(range(len(found.frame))) and len(found.frame) > 100
    assert found.unreadable <= 1
