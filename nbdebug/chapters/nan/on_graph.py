"""The derivative in which a bad value was born, run once more on the autograd graph that the recording has left.

Where all of the forward was finite, nothing else has to be run again: backward starts anew, unseen, and is watched only
at the node that made a bad gradient of good ones.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from nbdebug.chapters.nan.alongside import Alongside
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.relived import Found, Relived
from nbdebug.chapters.nan.repro import Reproduction
from nbdebug.chapters.nan.scout import Sighted
from nbdebug.chapters.nan.sightings import Seen
from nbdebug.observe.provenance import memories_of
from nbdebug.observe.tensors import key


class OnGraph(Relived):
    """The books of one node of the graph. They are of use only if `origins` is filled in."""

    def __init__(self, probe: Probe, seen: Seen, sighted: Sighted, alongside: Alongside):
        super().__init__(probe, seen, sighted, set())
        self.alongside = alongside

    def look(self) -> None:
        """Run backward as far as that node."""
        call, node = self.alongside.call, self.alongside.born_in
        assert call is not None and node is not None, "there is a graph to look at"
        memories = memories_of(self.probe.tape)
        self.recorder.go_on_from(self.probe.recorder, memories)
        for held in self.probe.tape.held.values():
            known = memories.get(key(held.tensor))
            if known is not None and known.role == "target":
                self.flow.births.note_shape(held.tensor)
        self.flow.in_backward = True
        self.flow.births.segment = self.probe.flow.births.segment - 1
        handles = [node.register_prehook(self._enter), node.register_hook(self._leave)]
        try:
            with contextlib.suppress(Found), torch.enable_grad():
                torch.autograd.backward(call.roots, call.seeds, inputs=call.inputs or None)
        finally:
            for handle in handles:
                handle.remove()
        if self.recorder.fault is not None:
            raise self.recorder.fault

    def _enter(self, given: tuple) -> None:
        op = self.alongside.born_at
        assert op is not None and self._born_at is not None, "the node is an op's"
        self.caught[self._born_at] = Reproduction(op.func, None, None)
        self.caught[self._born_at].came_back(given)
        self.recorder.__enter__()

    def _leave(self, passed: Any, given: Any) -> None:
        self.recorder.__exit__(None, None, None)
        self._conclude()
