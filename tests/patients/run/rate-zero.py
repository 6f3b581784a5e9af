"""The schedule was made for a third of the steps."""

import math

CODE, NAMES = "run/rate-zero", ("step 40", "line 40")


def log(of_schedule):
    lines, level = [], 2.0
    for n in range(1, 121):
        rate = max(0.0, 1e-3 * (1 - n / of_schedule))
        level -= 15 * rate * (level - 0.3) * 2
        lines.append(f"step {n}/120 loss {level + 0.01 * math.sin(n * 12.9):.4f} lr {rate:.3e}")
    return "\n".join([*lines, "Training finished"]) + "\n"


def sick():
    return log(40)


def healthy():
    return log(120)
