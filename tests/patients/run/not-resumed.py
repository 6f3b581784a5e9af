"""The run was started again from step 60, without the state of its optimizer."""

import math

CODE, NAMES = "run/not-resumed", ("step 60", "line 81")


def log(lost):
    losses = {n: 0.4 + 2 * math.exp(-n / 30) + 0.01 * math.sin(n * 12.9) for n in range(1, 121)}
    lines = [f"step {n}/120 loss {losses[n]:.4f}" for n in range(1, 81)]
    lines += [f"step {n}/120 loss {losses[n] + lost * math.exp(-(n - 60) / 20):.4f}" for n in range(60, 121)]
    return "\n".join([*lines, "Training finished"]) + "\n"


def sick():
    return log(1.0)


def healthy():
    return log(0.0)
