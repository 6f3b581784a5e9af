"""A breakpoint on a layer: training runs until it reaches the layer, and stops inside it.

    stop_at        the public function, the layers that a pattern names, and `LayerStop`: its hooks, records and end
    condition      when to stop; evaluated before the forward, after it, or when a gradient arrives
    hooks          the frame of a layer's own `forward`, found by a profile function that lives as long as the call; the
                   gradient of a layer's output
    stop           one stop: the user's frame, the names that are added to it; debugpy where a client is attached, ipdb
                   where somebody can type, a record where nobody can

A hook runs before a `forward` has a frame and after it has lost it, so it cannot stop inside. But it can set a profile
function for the thread, which gets the frame when it begins and when it returns, with all its locals. Nothing that a
hook does here changes a value: a training that does not stop continues bit for bit as without.
"""

from __future__ import annotations
