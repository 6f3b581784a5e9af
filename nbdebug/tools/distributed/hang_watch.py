"""`with nbdebug.hang_watch(after=60):` in a script of one's own: where each rank stands when a rank does not get on."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdebug.observe.locations import ENGINE, kind_of, site_of, source_text, users_frames
from nbdebug.text import count, figures


@contextlib.contextmanager
def hang_watch(after: float = 60.0) -> Iterator[None]:
    """Watch this rank from a thread. When one of its collectives lasts longer than `after` seconds, the stacks of all
    ranks that have entered a watch are printed on stderr by the rank that waits, in the user's lines: the rank that is
    elsewhere, or at another line, is the one to look at. The program goes on.

    Every rank enters it, after init_process_group. It needs the store of the group and does not change any result.
    Raises ValueError where `after` is not above zero, RuntimeError where there is no process group."""
    if not after > 0:
        raise ValueError(f"after is a number of seconds above zero; got {after!r}")
    if not dist.is_initialized():
        raise RuntimeError("hang_watch watches the ranks of a process group: call init_process_group first")
    watch = _Watch(after)
    thread = threading.Thread(target=watch.run, daemon=True, name="nbdebug hang_watch")
    thread.start()
    try:
        yield
    finally:
        watch.over.set()
        thread.join(timeout=5)


class _Watch:
    """The rank's own thread. Its stack goes into the group's store, from where a rank that waits reads all."""

    def __init__(self, after: float) -> None:
        self.after, self.over = after, threading.Event()
        self.main = threading.get_ident()
        self.store = c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def place(self) -> tuple[bool, str]:
        """(whether the main thread is in a function of torch.distributed or in backward, its lines)."""
        frame = sys._current_frames().get(self.main)
        codes = [each.f_code for each, _ in traceback.walk_stack(frame)]
        inside = any(f"torch{os.sep}distributed" in code.co_filename for code in codes[:4])
        inside |= any(kind_of(code) == ENGINE for code in codes)
        own = map(site_of, itertools.islice(users_frames(frame), 6))
        lines = [f"    {site.file}, line {site.line}, in {site.function}: {source_text(site)}" for site in own]
        return inside, "\n".join(reversed(lines))

    def run(self) -> None:
        since, last, printed = time.monotonic(), "", False
        while not self.over.wait(min(self.after / 10, 1.0)):
            inside, lines = self.place()
            now = time.monotonic()
            if lines != last or not inside:
                since, last, printed = now, lines, printed and lines == last
            with contextlib.suppress(Exception):  # the store goes with the first rank
                self.store.set(f"nbdebug/{self.rank}", f"{'waits' if inside else 'is elsewhere'}\n{lines}")
                if inside and now - since > self.after and not printed:
                    printed = True
                    self.tell(now - since)

    def tell(self, seconds: float) -> None:
        parts = [f"nbdebug: rank {self.rank} has waited for {figures(seconds)} s, of {count(self.world, 'rank')}:"]
        for rank in range(self.world):
            key = f"nbdebug/{rank}"
            text = self.store.get(key).decode() if self.store.check([key]) else "has not entered hang_watch"
            parts.append(f"  rank {rank} {text}")
        parts.append("  The rank that is elsewhere, or at another line, is the one to look at.")
        print("\n".join(parts), file=sys.stderr, flush=True)
