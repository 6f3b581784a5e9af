"""Texts of every length have left a card in pieces. There is no such allocator on a CPU: these are its numbers."""

from nbdebug.tools.memory.facts import Device, HeldMemory, MemoryFacts

CODE, HOLDER, LINE = "memory/fragmentation", ["cuda:0"], None
GIB = 1 << 30


def card(allocated, largest):
    device = Device(
        "cuda:0",
        live=allocated,
        allocated=allocated,
        reserved=20 * GIB,
        peak_allocated=17 * GIB,
        peak_reserved=20 * GIB,
        total=24 * GIB,
        free=3 * GIB,
        largest=largest,
    )
    return MemoryFacts(now=HeldMemory(devices=(device,)))


def sick():
    return card(allocated=12 * GIB, largest=GIB // 4)


def healthy():
    return card(allocated=12 * GIB, largest=7 * GIB)
