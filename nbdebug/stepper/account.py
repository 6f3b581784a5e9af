"""What a stepper says: where the step waits and what is there, or how it ended."""

from __future__ import annotations

import math
import traceback
from typing import TYPE_CHECKING, Any

import nbdebug
from nbdebug.finding import Finding, Report
from nbdebug.observe.sites import USER, Site, cell_name, kind_of, source_text
from nbdebug.observe.tensors import tensors_made
from nbdebug.stepper.places import AFTER, BACKWARD, BACKWARD_DONE, BEFORE, LOSS, Stop

if TYPE_CHECKING:
    from nbdebug.stepper.run import Run

QUESTION = "step_through(model, batch)"
COLUMNS = ("", "tensor", "shape", "NaN", "inf", "min", "max", "mean", "std", "zeros", "dtype", "device")


def report_of(run: Run, asked: tuple[str, str], note: str) -> Report:
    """The report of a run as it stands. asked: the question, and its subject."""
    stop = None if run.turns.running else run.stop
    notes = [note] * bool(note)
    tables: list[dict[str, Any]] = []
    if stop is not None:
        notes += _stop_notes(stop)
        tables = [_table(stop)] if stop.rows else []
    if run.error is not None:
        notes += _error_notes(run)
    if run.fault:
        notes.append(f"nbdebug could not follow the step any further ({run.fault}); the step itself was not changed.")
    return Report(
        asked[0],
        findings=run.explained or (),
        subject=asked[1],
        notes=tuple(notes),
        facts={
            "headline": _headline(run, stop),
            "stepper": _picture(run, stop),
            "tables": tables,
            "failed": run.error is not None or stop is not None and stop.culprit,
        },
    )


def explained(error: BaseException) -> tuple[Finding, ...]:
    """The cause of what the step has raised, where it is known."""
    try:
        return nbdebug.explain(error).findings if isinstance(error, Exception) else ()
    except Exception:  # it is to help, and the error is told without it, too
        return ()


def _headline(run: Run, stop: Stop | None) -> str:
    if stop is not None:
        return f"{str(stop.place)[:1].upper()}{str(stop.place)[1:]}{_state(stop)}."
    if not run.turns.over:
        return "The step is running."
    if run.error is not None:
        where = ""
        if run.raised is not None:
            where = f" in {'the backward of ' * (run.raised.phase == BACKWARD)}{run.raised.layer}"
        return f"The step failed{where}: {type(run.error).__name__}: {_first_line(run.error)}"
    if run.turns.abandoned:
        return "The step was abandoned; model, gradients and random numbers are as before."
    end = "Model, gradients and random numbers are as before." if run.restore else "The model is as a step leaves it."
    return f"The step is over{_result(run.result)}. {end}"


def _state(stop: Stop) -> str:
    """What is to be seen there at once."""
    bad = [row for row in stop.rows if row.get("NaN") or row.get("inf")]
    if not any("NaN" in row for row in stop.rows):
        return ""
    if not bad:
        return ": all finite"
    phase, made = stop.place.phase, [row for row in bad if row[""] == "out"]
    if stop.culprit and phase == BEFORE:
        return f": it is given {_counts(bad)}"
    if stop.culprit and phase == BACKWARD:
        return ": its gradient is not finite, and no layer has made that: it comes from between the model and the loss"
    if stop.culprit:
        masked = any(row.get("inf") for row in bad if row[""] == "in")
        said = {
            AFTER: "made of inputs that hold inf and no NaN" if masked else "made of finite inputs",
            LOSS: "made of finite outputs of the model",
            BACKWARD_DONE: "made of finite gradients",
        }[phase]
        return f": {_counts(made or bad)} {said}"
    return f": {_counts(made or bad)}"


def _counts(rows: list[dict[str, Any]]) -> str:
    found = [(sum(row[kind] for row in rows), kind) for kind in ("NaN", "inf")]
    said = " and ".join(f"{count:,} {kind}" for count, kind in found if count)
    of = "the gradient of " if rows[0].get("gradient") else ""
    return f"{said} in {of}`{rows[0]['tensor']}`" + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")


def _result(result: Any) -> str:
    if isinstance(result, float) or hasattr(result, "numel") and result.numel() == 1 and result.device.type != "meta":
        return f": it returned {float(result):.4g}" if not getattr(result, "is_complex", bool)() else ""
    found = tensors_made(result)
    return f": it returned {len(found)} tensor{'s' * (len(found) != 1)}" if found else ""


def _stop_notes(stop: Stop) -> list[str]:
    called = [f"Called from {_place(stop.site)}"] if stop.site is not None else []
    return [*called, *stop.notes]


def _error_notes(run: Run) -> list[str]:
    """The error, kept: where in the user's code it was raised, and how to look at it."""
    assert run.error is not None
    sites = [
        Site(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(run.error.__traceback__)
        if kind_of(frame.f_code) == USER
    ]
    said = [f"It was raised from {_place(sites[-1])}"] if sites else []
    message = str(run.error).strip()
    if "\n" in message:
        said.append(message)
    said.append(
        "Everything is as it was before the step. " * run.restore + "The exception is kept as `.error` of what "
        "step_through has returned: raise it to see its traceback."
    )
    return said


def _place(site: Site) -> str:
    place = f"{cell_name(site.file) or site.file.replace(chr(92), '/').rpartition('/')[2]}, line {site.line}"
    text = source_text(site)
    return f"{place}: `{text}`" if text else f"{place}."


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or ["no message"])[0]
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _table(stop: Stop) -> dict[str, Any]:
    rows = [[_cell(name, row.get(name)) for name in COLUMNS] for row in stop.rows]
    gradients = stop.place.phase in (BACKWARD, BACKWARD_DONE)
    bad = any(row.get("NaN") or row.get("inf") for row in stop.rows)
    return {
        "title": "Gradients at this layer" if gradients else "Tensors of this layer",
        "columns": list(COLUMNS),
        "rows": rows,
        "note": "min, max, mean and std are those of the finite elements." if bad else "",
    }


def _cell(column: str, value: Any) -> Any:
    if column == "zeros" and value is not None:
        return f"{value:.1%}" if 0 < value < 1 else f"{value:.0%}"
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _picture(run: Run, stop: Stop | None) -> dict[str, Any]:
    """For the view: the layers, where it stands among them, and histograms."""
    at = stop.place if stop is not None else run.raised
    layers = [
        {
            "name": layer.name,
            "type": layer.kind,
            "depth": layer.depth,
            "calls": layer.calls,
            "low": layer.low,
            "high": layer.high,
            "finite": layer.finite,
            "gradient": layer.gradient,
        }
        for layer in run.layers.all.values()
    ]
    state = (
        "waits"
        if stop is not None
        else "runs"
        if not run.turns.over
        else "failed"
        if run.error is not None
        else "abandoned"
        if run.turns.abandoned
        else "over"
    )
    return {
        "state": state,
        "at": None if at is None else {"name": at.name, "phase": at.phase, "said": str(at)},
        "layers": layers,
        "histograms": stop.histograms if stop is not None else [],
    }
