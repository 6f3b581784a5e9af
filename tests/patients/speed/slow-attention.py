"""A mask of its own keeps attention from the fused kernels: as the clock of a machine with GPUs tells it."""

from nbdebug.report import Where
from nbdebug.tools.speed.rules import SpeedFacts, StepTimes, WorkShare

CODE, BOTTLENECK, LINE = "speed/slow-attention", "forward", None


def facts(device="cuda", cards=1, phases=None, **seen):
    times = {"waiting for data": 0.001, "forward": 0.02, "backward": 0.04, "optimizer": 0.004} | (phases or {})
    return SpeedFacts(steps=(StepTimes(times, 32),) * 12, ran=13, device=device, cards=cards, backwards=13, **seen)


def sick():
    return facts(attention=WorkShare(Where(phase="forward"), 1.0, "float32, heads of 64, mask True"))


def healthy():
    return facts()
