"""The terminal was closed."""

import math

CODE, NAMES = "run/stopped", ("step 37 of 100", "line 37")


def log(steps, end=()):
    lines = [f"step {n}/100: loss {0.4 + math.exp(-n / 20):.4f}" for n in range(1, steps + 1)]
    return "\n".join([*lines, *end]) + "\n"


def sick():
    return log(37)


def healthy():
    return log(37, ["early stopping: no better validation loss in 5 evaluations"])
