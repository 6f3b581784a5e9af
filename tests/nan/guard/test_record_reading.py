"""The record as it is read: whole lines out of damaged files, and nothing believed that a stranger may have written."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pandas
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nbdebug
from nbdebug.report import Finding, Report, Where
from nbdebug.tools.guard.record import files as record_lines
from nbdebug.tools.guard.record.files import StepLine, decode, encode, strict
from nbdebug.tools.guard.record.open_record import downsample, history_of
from nbdebug.tools.guard.record.trips import report_from
from nbdebug.tools.guard.record.writer import RecordWriter
from tests.views import reports

ROOT = pathlib.Path(__file__).resolve().parents[3]


def recorded(
    path: pathlib.Path, count: int = 12, about: dict | None = None, rank: int | None = None, **changed: StepLine
) -> pathlib.Path:
    """A record of `count` steps; `changed` are lines by "step_7"."""
    record = RecordWriter(path, {"models": {"net": "Net"}} if about is None else about, rank)
    for step in range(count):
        record.line(changed.get(f"step_{step}", StepLine(step, 2.0 / (step + 1), 1.0, False, "ok", 0.1, 1.7e9 + step)))
    record.close()
    return path


def trip_folder(path: pathlib.Path, name: str, report: object = None, **step: object) -> pathlib.Path:
    folder = path / name
    folder.mkdir(parents=True)
    if report is not None:
        (folder / "report.json").write_text(json.dumps(report))
    if step:
        (folder / "step.json").write_text(json.dumps({"form": 1, "reason": "loss", "loss": "nan", **step}))
    return folder


def plain(report: Report) -> dict:
    return strict(report.to_dict())


# -- a table -----------------------------------------------------------------------------------------------------------


def test_a_row_a_step(tmp_path) -> None:
    bad = StepLine(3, float("nan"), None, True, "tripped", None, 1.7e9)
    recorded(tmp_path / "r", 4, step_3=bad)
    recorded(tmp_path / "r", 2, {"n": 2})
    frame = nbdebug.open_record(tmp_path / "r").frame
    assert list(frame.columns) == ["run", "rank", "step", "loss", "norm", "clipped", "outcome", "lr", "time"]
    assert list(frame["run"]) == [0, 0, 0, 0, 1, 1] and list(frame["step"]) == [0, 1, 2, 3, 0, 1]
    assert frame["loss"].isna().tolist() == [False, False, False, True, False, False]
    assert frame["clipped"].dtype == bool and list(frame["clipped"]) == [False, False, False, True, False, False]
    assert list(frame["outcome"]) == ["ok", "ok", "ok", "tripped", "ok", "ok"] and frame["norm"].isna()[3]
    assert frame["time"][0] == pandas.Timestamp(1.7e9, unit="s", tz="UTC")


def test_a_record_without_a_step_is_one_too(tmp_path) -> None:
    found = nbdebug.open_record(recorded(tmp_path / "r", 0))
    assert found.ok and len(found.frame) == 0 and found.trips == [] and len(found.runs) == 1
    assert "0 steps on record, none stopped." in str(found) and "text/html" in found._repr_mimebundle_()
    with pytest.raises(ValueError, match="nothing to draw"):
        found.figure()


def test_where_there_is_none(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        nbdebug.open_record(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"file'? is a file"):
        nbdebug.open_record(tmp_path / "file")
    with pytest.raises(ValueError, match="not a record"):
        nbdebug.open_record(tmp_path / "folder")
    with pytest.raises(TypeError, match="7"):
        nbdebug.open_record(7)


def test_a_run_that_goes_on_can_be_opened(tmp_path) -> None:
    record = RecordWriter(tmp_path / "r", {})
    for step in range(3):
        record.line(StepLine(step))
        assert len(nbdebug.open_record(tmp_path / "r").frame) == step + 1
    record.close()


def test_it_is_opened_without_torch(tmp_path) -> None:
    recorded(tmp_path / "r")
    code = (
        "import sys, nbdebug; r = nbdebug.open_record(sys.argv[1]); str(r); r.frame; r._repr_mimebundle_(); "
        "sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "r")], cwd=ROOT, check=False).returncode == 0


# -- a report ----------------------------------------------------------------------------------------------------------


def test_a_healthy_run(tmp_path) -> None:
    clipped = {f"step_{n}": StepLine(n, 0.5, 9.0, True, "ok", 0.1, 1.7e9 + n) for n in range(9)}
    about = {"models": {"net": "Classifier"}, "optimizers": {"optimizer": "AdamW"}, "max_grad_norm": 1.0}
    found = nbdebug.open_record(
        recorded(tmp_path / "r", 12, about, step_11=StepLine(11, 0.1, 80.0, True, "above"), **clipped)
    )
    said = str(found)
    assert found.ok and found.report().ok
    assert said.startswith("12 steps on record, none stopped. The loss went from 0.5 to 0.1.")
    for part in (
        "10 steps (83%) clipped.",
        "the learning rate is too high",
        "1 step (8.3%) dropped: the norm was",
        "norm too large, dropped: step 11",
        "model `net` (Classifier), optimizer AdamW",
        "open_record(r)",
    ):
        assert part in said, part
    html = found._repr_mimebundle_()["text/html"]
    assert "data:image/svg+xml" in html and "learning rate is too high" in html
    assert found.figure().axes


def test_steps_that_were_only_counted(tmp_path) -> None:
    bad = {"step_5": StepLine(5, float("nan"), 1.0, False, "skipped")}
    for policy, ok in (("skip", True), ("record", False)):
        found = nbdebug.open_record(recorded(tmp_path / policy, 9, {"on_trip": policy}, **bad))
        assert found.ok is ok and bool(found.report().findings) is not ok and not found.report().ok
        assert str(found).startswith("1 of 9 steps on record dropped as not finite: step 5.")
    (finding,) = found.report()
    assert (finding.code, finding.where.step) == ("nan/not-located", 5)
    assert finding.evidence["losses before"] == pytest.approx([2.0, 1.0, 2 / 3, 0.5, 0.4])


def test_the_last_trip_speaks(tmp_path) -> None:
    recorded(tmp_path / "r")
    first, last = reports.overflow(), reports.forward_log()
    trip_folder(tmp_path / "r", "trip-000007", plain(first), time=1.7e9 + 7)
    trip_folder(
        tmp_path / "r",
        "trip-000003",
        plain(last),
        time=1.7e9 + 90,
        reason="gradient",
        norm="inf",
        lines=[StepLine(2, 0.5).to_json(), StepLine(3, 0.5, float("inf"), False, "tripped").to_json()],
        tape={},
        bad_ranks=[0],
    )
    found = nbdebug.open_record(tmp_path / "r")
    assert [trip.step for trip in found.trips] == [7, 3] and not found.ok
    trip = found.trips[-1]
    assert trip.sentence() == "In step 3 the gradient norm was inf" and trip.norm == float("inf")
    assert [x.step for x in trip.lines] == [2, 3] and trip.folder.name == "trip-000003" and trip.no_replay == ""
    report = found.report()
    assert plain(report)["findings"] == plain(last)["findings"]
    assert report.ruled_out == last.ruled_out and report.unchecked == last.unchecked
    assert report.plot("run") and report.plot("histogram") and len(report.figure().axes) == 3
    said = " ".join(report.notes)
    assert "folder trip-000003), the last of 2 in the record" in said and "A -inf in `attn.mask` is intended" in said


def test_a_run_after_the_trip_is_told(tmp_path) -> None:
    recorded(tmp_path / "r")
    trip_folder(tmp_path / "r", "trip-000003", plain(reports.overflow()), time=1.0, tape={})
    assert "The run after it had no such step." in str(nbdebug.open_record(tmp_path / "r"))


def test_of_several_processes_the_one_that_was_bad_speaks(tmp_path) -> None:
    for rank in (0, 1):
        recorded(tmp_path / "r", rank=rank)
    other = Report("guard", (Finding("nan/not-located", "it was finite here", Where(step=3)),))
    trip_folder(tmp_path / "r", "trip-000003", plain(other), time=1.7e9 + 1.0, bad_ranks=[1], tape={})
    trip_folder(tmp_path / "r", "trip-000003-rank1", plain(reports.overflow()), time=1.7e9, bad_ranks=[1], tape={})
    found = nbdebug.open_record(tmp_path / "r")
    assert [(t.step, t.rank) for t in found.trips] == [(3, 1), (3, 0)]
    assert found.report().findings[0].code == "nan/overflow"
    assert "2 processes wrote it; steps and shares here are those of rank 0" in str(found)


def test_a_trip_whose_cause_was_not_looked_for(tmp_path) -> None:
    trip_folder(tmp_path / "r", "trip-000012-rank3-again2", time=5.0, tape={}, no_weights="they were too large")
    found = nbdebug.open_record(tmp_path / "r")
    (trip,), (finding,) = found.trips, found.report()
    assert (trip.step, trip.rank, trip.report) == (12, 3, None)
    assert finding.code == "nan/not-located" and "record.replay(model)" in finding.fixes[0].code
    assert "Its weights are not in the record: they were too large" in str(found.report().full())
    with pytest.raises(IndexError):
        found.replay(None, 4)


def test_a_trip_written_by_a_later_version_can_not_be_replayed(tmp_path) -> None:
    folder = trip_folder(tmp_path / "r", "trip-000012", plain(reports.overflow()), tape={}, nbdebug="9.0")
    (folder / "step.json").write_text((folder / "step.json").read_text().replace('"form": 1', '"form": 2'))
    (trip,) = nbdebug.open_record(tmp_path / "r").trips
    assert trip.no_replay == "nbdebug 9.0 wrote it in another form" and trip.report.findings[0].code == "nan/overflow"


TRIP = ("histogram", "tree")
"""The pictures of a trip's report: the record draws the run itself, the others are of other tools."""


@pytest.mark.parametrize("make", reports.ALL.values(), ids=reports.ALL)
def test_a_report_comes_back_as_it_was(make) -> None:
    report = make()
    back = report_from(decode(encode(plain(report))))
    for view in (str, lambda r: r._repr_mimebundle_()["text/html"]):
        drawn = [
            view(dataclasses.replace(r, plots=tuple(plot for plot in r.plots if plot.kind in TRIP)))
            for r in (report, back)
        ]
        assert drawn[0] == drawn[1]


# -- damaged files -----------------------------------------------------------------------------------------------------


WHOLE = b"".join(
    encode({"run": "a1", **StepLine(n, 0.5 + n, 1.0, False, "ok", 0.1, 1.7e9).to_json()}) for n in range(40)
)


def steps_read(tmp_path: pathlib.Path, data: bytes) -> tuple[list[int], int]:
    folder = tmp_path / "damaged"
    folder.mkdir(exist_ok=True)
    (folder / "steps.jsonl").write_bytes(data)
    found = nbdebug.open_record(folder)
    str(found)
    return [s for run in found.runs for s in run.columns.step], found.unreadable


damage = st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=6)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(end=st.integers(0, len(WHOLE)), flips=damage)
def test_every_line_that_is_whole_is_read(tmp_path, end, flips) -> None:
    data = bytearray(WHOLE)
    for place, value in flips:
        data[place] = value
    data = data[:end]
    found, unreadable = steps_read(tmp_path, bytes(data))
    start = 0
    for step, whole in enumerate(WHOLE.splitlines(keepends=True)):
        untouched = data[start : start + len(whole) - 1] == whole[:-1]  # a line is whole without its end, too
        if untouched:
            assert step in found, f"line {step} was whole"
        start += len(whole)
    assert unreadable <= 2 * len(flips) + 1


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(WHOLE.splitlines())), max_size=8))
def test_whatever_the_file_holds_it_opens(tmp_path, parts) -> None:
    steps_read(tmp_path, b"\n".join(parts))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["nan", "inf", 10**400, -1, 2**63, 1e308, "a1", "ok", "tripped"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["run", "step", "loss", "norm", "clipped", "outcome", "lr", "time", "header", "about", "lost"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), json_values, max_size=11), max_size=6), json_values)
def test_lines_of_a_stranger(tmp_path, entries, about) -> None:
    base = {"run": "a1", **StepLine(0, 0.5).to_json()}
    lines = [{**base, **entry} for entry in entries] + [{"run": "a1", "header": 1, "about": about, "time": about}]
    steps_read(tmp_path, "\n".join(map(json.dumps, lines)).encode())


def test_deep_nesting_endless_numbers_and_endless_lines_are_no_lines(tmp_path) -> None:
    whole = WHOLE.splitlines()[:3]
    bad = [
        b"[" * 100_000,
        b'{"run":"a1","step":' + b"9" * 10_000 + b"}",
        b'{"a":' * 50_000,
        b"x" * 200_000,
        b'{"run":"a1","step":NaN}',
        b'{"run":"a1","step":1e999}',
        b"\xff\xfe\x00",
        b'"text"',
        b"7",
        b"null",
    ]
    found, unreadable = steps_read(tmp_path, b"\n".join([whole[0], *bad, whole[1], whole[2]]))
    assert found == [0, 1, 2] and unreadable == len(bad)


def test_two_lines_run_together(tmp_path) -> None:
    a, b, c = WHOLE.splitlines()[:3]
    assert steps_read(tmp_path, a[:30] + b + b"\n" + c) == ([1, 2], 1)
    assert steps_read(tmp_path, a + b + b"\n" + c) == ([0, 1, 2], 1)
    assert steps_read(tmp_path, a + b"\x00\xff" + b + b"\n" + c + b"!") == ([0, 1, 2], 2)


def test_a_line_has_numbers_and_no_nonsense() -> None:
    good = StepLine(3, float("-inf"), float("nan"), True, "above", None, 5.0)
    back = StepLine.from_json(good.to_json())
    assert repr(back) == repr(good)
    for key, wrong in [
        ("step", -1),
        ("step", True),
        ("step", 1.5),
        ("step", 2**63),
        ("loss", "NaN"),
        ("loss", []),
        ("loss", True),
        ("norm", 10**400),
        ("clipped", 1),
        ("outcome", "fine"),
        ("outcome", ["ok"]),
        ("time", "nan"),
        ("time", -1),
        ("time", 1e300),
        ("lr", {}),
    ]:
        with pytest.raises(ValueError, match=key):
            StepLine.from_json({**good.to_json(), key: wrong})
    for missing in good.to_json():
        with pytest.raises(ValueError, match=missing):
            StepLine.from_json({k: v for k, v in good.to_json().items() if k != missing})
    for wrong in (None, 3, [], "x"):
        with pytest.raises(ValueError, match="object"):
            StepLine.from_json(wrong)


# -- a stranger's record -----------------------------------------------------------------------------------------------


def test_links_are_not_followed_and_said(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "steps.jsonl").write_bytes(WHOLE)
    (secret / "report.json").write_text(json.dumps(plain(reports.overflow())))
    path = recorded(tmp_path / "r", 3)
    (path / "steps.000.jsonl").symlink_to(secret / "steps.jsonl")
    (path / "trip-000001").symlink_to(secret)
    folder = trip_folder(path, "trip-000002", time=1.0)
    (folder / "report.json").symlink_to(secret / "report.json")
    found = nbdebug.open_record(path)
    assert len(found.frame) == 3 and [t.step for t in found.trips] == [2]
    assert found.trips[0].report is None and "not followed" in found.trips[0].problems[0]
    assert "Links are not followed: steps.000.jsonl, trip-000001." in str(found)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "steps.jsonl").symlink_to(secret / "steps.jsonl")
    with pytest.raises(ValueError, match="links are not followed"):
        nbdebug.open_record(tmp_path / "only")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_waited_for(tmp_path) -> None:
    path = recorded(tmp_path / "r", 3)
    os.mkfifo(path / "steps.000.jsonl")
    os.mkfifo(trip_folder(path, "trip-000002") / "step.json")
    found = nbdebug.open_record(path)
    assert len(found.frame) == 3 and "not a plain file" in found.trips[0].no_replay


def test_other_names_are_nothing_to_it(tmp_path) -> None:
    path = recorded(tmp_path / "r", 3)
    for name in (
        "steps.jsonl.bak",
        "steps.rank1.rank2.jsonl",
        "trip-",
        "trip-1x",
        "trip-000001 ",
        ".trip-000001.part",
        "trip-٣",
        "steps.٣٣٣.jsonl",
        "trip-" + "9" * 40,
    ):
        (path / name).mkdir()
    (path / "trip-000005").write_text("a file")
    found = nbdebug.open_record(path)
    assert len(found.frame) == 3 and found.trips == [] and found.ok


reports_of_strangers = st.dictionaries(
    st.sampled_from(
        ["question", "findings", "ruled_out", "unchecked", "notes", "subject", "facts", "headline", "tables", "plots"]
    ),
    st.one_of(
        json_values,
        st.lists(
            st.dictionaries(
                st.sampled_from(
                    ["code", "title", "where", "evidence", "fixes", "chain", "what", "columns", "rows", "kind", "data"]
                ),
                json_values,
            ),
            max_size=2,
        ),
        st.dictionaries(
            st.sampled_from(["exponents", "tree", "history", "steps", "headline", "guard"]),
            st.one_of(
                json_values, st.dictionaries(st.sampled_from(["counts", "dtype", "zeros", "losses"]), json_values)
            ),
        ),
    ),
)


@settings(max_examples=80, deadline=None)
@given(reports_of_strangers | json_values)
def test_a_report_of_a_stranger_is_drawn_or_refused(given_report) -> None:
    try:
        report = report_from(decode(json.dumps(given_report, allow_nan=True).encode()))
    except ValueError:
        return
    str(report)
    report._repr_mimebundle_()
    try:
        report.figure()
    except ValueError as reason:
        assert "nothing to draw" in str(reason)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"findings": {}}, "findings is not a list"),
        ({"findings": [7]}, r"findings\[0\] is not a JSON object"),
        ({"findings": [{"code": 7}]}, "code is not a text"),
        ({"notes": [None]}, r"notes\[0\] is not a text"),
        ({"findings": [{"where": {"line": -1}}]}, r"where.line is not a whole number"),
        ({"findings": [{"where": {"step": 1.5}}]}, r"where.step"),
        ({"findings": [{"fixes": [{"verified": 1}]}]}, "verified"),
        ({"findings": [{"evidence": {"a": [[[[[[[[[[1]]]]]]]]]]}}]}, "nested"),
        ({"facts": []}, "facts is not a JSON object"),
    ],
)
def test_a_wrong_part_is_named(tmp_path, changed, said) -> None:
    with pytest.raises(ValueError, match=said):
        report_from({**plain(reports.forward_log()), **changed})
    trip_folder(tmp_path / "r", "trip-000001", {**plain(reports.forward_log()), **changed})
    (trip,) = nbdebug.open_record(tmp_path / "r").trips
    assert trip.report is None and "its report can't be read" in trip.problems[0]


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch) -> None:
    folder = trip_folder(tmp_path / "r", "trip-000001", time=1.0)
    with open(folder / "report.json", "wb") as file:
        file.truncate(2**40)  # a terabyte that takes no room
    (trip,) = nbdebug.open_record(tmp_path / "r").trips
    assert "larger than" in trip.problems[0]
    monkeypatch.setattr(record_lines, "MOST_BYTES", 1000)
    found = nbdebug.open_record(recorded(tmp_path / "s", 50))
    assert 0 < len(found.frame) < 12


def test_hostile_names_stay_names(tmp_path) -> None:
    about = {"models": {reports.EVIL: reports.EVIL}, "optimizers": {"a\x1b[31m": 7}, "on_trip": reports.EVIL}
    path = recorded(tmp_path / "r", 3, about)
    trip_folder(path, "trip-000001", plain(reports.hostile()), time=1.0, tape={}, no_replay=reports.EVIL)
    bundle = nbdebug.open_record(path)._repr_mimebundle_()
    assert "<script" not in bundle["text/html"] and "\x1b" not in bundle["text/plain"]


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_runs_are_drawn_one_after_another_and_spikes_stay() -> None:
    frame = pandas.DataFrame(
        {
            "run": [0] * 3 + [1] * 3 + [2] * 2,
            "step": [0, 1, 2, 0, 1, 2, 50, 51],
            "loss": 1.0,
            "norm": float("nan"),
            "outcome": ["ok"] * 5 + ["tripped"] * 3,
        }
    )
    course = history_of(frame)
    assert [x for x, _ in course["losses"]] == [0, 1, 2, 3, 4, 5, 50, 51] and course["norms"] == []
    assert course["runs"] == [3, 50] and course["joined"] is True and course["steps"] == 8
    assert course["marks"] == {"tripped": [5, 50, 51]} and course["counts"] == {"tripped": 3}
    assert history_of(frame[:0]) == {}
    count = 50_000
    places = pandas.Series(range(count)).to_numpy().astype(float)
    values = pandas.Series([1.0] * count).to_numpy().copy()
    values[31_234], values[31_235], values[7] = 99.0, float("nan"), -5.0
    points = downsample(places, values)
    assert len(points) < 900 and [31_234.0, 99.0] in points and [7.0, -5.0] in points
    assert points[0] == [0.0, 1.0] and points[-1] == [count - 1.0, 1.0] and points == sorted(points)


def test_a_long_night_is_read_in_seconds(tmp_path, capsys) -> None:
    """Not measured, only that nothing is kept a line that would not fit: columns, no objects."""
    path = recorded(tmp_path / "r", 3)
    with open(path / "steps.jsonl", "ab") as file:
        file.write(WHOLE * 500)
    found = nbdebug.open_record(path)
    assert len(found.frame) == 20_003 and sys.getsizeof(found.runs[1].columns.loss) < 250_000
    assert len(str(found)) < 4000 and len(found._repr_mimebundle_()["text/html"]) < 90_000
    assert capsys.readouterr().err == ""
