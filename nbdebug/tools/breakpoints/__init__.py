"""A breakpoint on a layer: training runs until it reaches the layer, and then stands still inside it.

    stop_at(model, pattern)
    ├── layers       which layers a pattern means
    ├── condition    when to stop; asked before the forward, after it, or when a gradient arrives
    ├── awaited      waits for the frame of a layer's own `forward`; its profile function lives as long as the call
    ├── frames       the user's frame to stop in, and the names that are lent to it
    ├── debuggers    how: debugpy where a client is attached, ipdb where somebody can type, neither: a record
    ├── recorded     what is kept of a stop where nobody can type
    └── handle       `LayerStop`: hooks on the layers, what they do, how they go

A hook runs before a `forward` has a frame and after it has lost it, so it cannot stop inside. It can set a profile
function for the thread, though, which is told of the frame when it begins and when it returns, with all its locals.
Nothing that a hook does here changes a value: a training that does not stop goes on bit for bit as without.
"""

from __future__ import annotations
