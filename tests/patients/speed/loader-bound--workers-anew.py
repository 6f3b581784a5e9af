"""Epochs of three batches, and new workers for each of them: as the clock tells it."""

from nbdebug.tools.speed.rules import SpeedCure, SpeedFacts, StepTimes

CODE, BOTTLENECK, LINE = "speed/loader-bound", "loader", None


def facts(start):
    own = {"forward": 0.004, "backward": 0.008, "optimizer": 0.001}
    steps = [
        StepTimes(own | {"waiting for data": 0.001 + start * (i % 3 == 0)}, 8, started=i % 3 == 0) for i in range(12)
    ]
    return SpeedFacts(
        steps=tuple(steps), ran=13, workers=2, backwards=13, cures=[SpeedCure("workers that stay", 2.5, 2.2)]
    )


def sick():
    return facts(start=0.09)


def healthy():
    return facts(start=0.002)
