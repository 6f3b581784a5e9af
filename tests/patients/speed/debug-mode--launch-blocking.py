"""The host waits for each kernel, and so does the GPU for the host: as the clock of a machine with GPUs tells it."""

from nbdebug.tools.speed.rules import SpeedFacts, StepTimes

CODE, BOTTLENECK, LINE = "speed/debug-mode", "forward", None


def facts(busy):
    times = StepTimes({"waiting for data": 0.001, "forward": 0.02, "backward": 0.04, "optimizer": 0.004}, 32)
    kernels = 300.0, busy * times.total
    modes = {"CUDA_LAUNCH_BLOCKING": 13}
    return SpeedFacts(steps=(times,) * 12, ran=13, device="cuda", cards=1, backwards=13, kernels=kernels, modes=modes)


def sick():
    return facts(busy=0.6)


def healthy():
    return facts(busy=0.97)
