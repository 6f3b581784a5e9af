"""The factor of an exponential schedule is above one."""

import math

CODE, NAMES = "run/rate-grows", ("grows", "line 120")


def log(factor):
    lines = []
    for n in range(1, 121):
        rate = 1e-4 * factor**n
        loss = 0.4 + 2 * math.exp(-n / 20) + max(0.0, rate - 2e-3) * 500 + 0.01 * math.sin(n * 12.9)
        lines.append(f"step {n}/120 loss {loss:.4f} lr {rate:.3e}")
    return "\n".join([*lines, "Training finished"]) + "\n"


def sick():
    return log(1.05)


def healthy():
    return log(1.02)
