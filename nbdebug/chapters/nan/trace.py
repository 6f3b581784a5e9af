"""`nan_trace`: run a training step, and name what first made a NaN or an inf that mattered."""
from __future__ import annotations
from nbdebug.chapters.nan.probe import Probe
from nbdebug.chapters.nan.verdict import facts_of
from nbdebug.finding import Report
from torch import nn

def nan_trace(step, *, model=None, optimizer=None, max_steps=1, strategy="auto", restore=False):
    from nbdebug.chapters.nan.rules import name_it
    models = {"model": model} if isinstance(model, nn.Module) else dict(model or {})
    opts = {"optimizer": optimizer} if optimizer is not None else {}
    probe = Probe(models, opts)
    seen = None
    with probe:
        for n in range(max_steps):
            probe.begin_step(n)
            out = step()
            seen = probe.end_step(out)
            del out
            if seen: break
    if probe.recorder.fault: raise probe.recorder.fault
    if not seen: return Report("nan_trace")
    facts = facts_of(probe, seen)
    return Report("nan_trace(step)", (name_it(facts),), saver=None)
