"""Slurm ends a job whose time is over."""

import math

CODE, NAMES = "run/killed", ("line 61", "TIME LIMIT")


def log(end):
    lines = [f"step {n}/100 loss {0.4 + math.exp(-n / 20):.4f}" for n in range(1, 61)]
    return "\n".join([*lines, *end]) + "\n"


def sick():
    return log(["slurmstepd: error: *** JOB 4711 ON node7 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***"])


def healthy():
    """A worker of the loader was killed, and the training went on to its end."""
    return log(["Killed", *(f"step {n}/100 loss {0.4 + math.exp(-n / 20):.4f}" for n in range(61, 101))])
