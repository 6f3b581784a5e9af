"""What does looking cost? Step times with nbdebug and with other tools, against the bare step.

    python -m tests.benchmarks.nan [--device cpu|cuda] [--size smallest|small|gpt2] [--repeats N] [--json FILE]

    training.py   a transformer and its training step, by hand; a fault can be planted in its middle block
    tools.py      each tool: how it is attached, and what it names after one step
    timing.py     the tools' steps and bare steps in turn, in one process; ratios, medians, spread
    nan.py        the command: the table
    preflight.py  how long preflight takes on three small models: `python -m tests.benchmarks.preflight`
    guard.py      another command, `python -m tests.benchmarks.guard`: steps with and without a guard, and from a trip
                  to its report

Time is measured and printed, never judged: a test that fails on a busy machine teaches nobody anything.
"""
