"""A list of all outputs is joined in each step: as the clock of a machine with GPUs tells it."""

from nbdebug.report import Where
from nbdebug.tools.speed.rules import Slower, SpeedFacts, StepTimes

CODE, BOTTLENECK, LINE = "speed/slowing-down", "forward", None


def facts(device="cuda", cards=1, phases=None, **seen):
    times = {"waiting for data": 0.001, "forward": 0.02, "backward": 0.04, "optimizer": 0.004} | (phases or {})
    return SpeedFacts(steps=(StepTimes(times, 32),) * 12, ran=13, device=device, cards=cards, backwards=13, **seen)


def sick():
    return facts(slower=Slower(Where(), 2.4, "elements", 1000.0, 21000.0))


def healthy():
    return facts(slower=Slower(Where(), 1.3, "elements", 1000.0, 1010.0))
