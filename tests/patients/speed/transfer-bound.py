"""Batches are copied from pageable memory: as the clock of a machine with GPUs tells it."""

from nbdebug.tools.speed.rules import SpeedFacts, StepTimes

CODE, BOTTLENECK, LINE = "speed/transfer-bound", "transfer", None


def facts(device="cuda", cards=1, phases=None, **seen):
    times = {"waiting for data": 0.001, "forward": 0.02, "backward": 0.04, "optimizer": 0.004} | (phases or {})
    return SpeedFacts(steps=(StepTimes(times, 32),) * 12, ran=13, device=device, cards=cards, backwards=13, **seen)


def sick():
    return facts(phases={"copy": 0.09})


def healthy():
    return facts(phases={"copy": 0.002})
