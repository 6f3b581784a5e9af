"""A profiler runs around the whole training: as the clock tells it."""

from nbdebug.tools.speed.rules import SpeedFacts, StepTimes

CODE, BOTTLENECK, LINE = "speed/debug-mode", "forward", None


def facts(steps):
    times = StepTimes({"waiting for data": 0.001, "forward": 0.02, "backward": 0.04, "optimizer": 0.004}, 32)
    return SpeedFacts(steps=(times,) * 12, ran=13, backwards=13, modes={"a profiler": steps})


def sick():
    return facts(13)


def healthy():
    return facts(3)
