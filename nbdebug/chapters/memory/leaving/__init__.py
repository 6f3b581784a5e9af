"""What the notebook keeps by itself, and what becomes of it.

    reach.py      what memory a thing holds on to, found without running the user's code
    named.py      the user's variables and what lies in them, by the names a person would write
    shell.py      the places in which a shell keeps outputs and tracebacks
    listed.py     all that is kept, with bytes: outputs, tracebacks, exceptions, graphs of losses, hooks, pictures
    hooks.py      hooks that a cell, run again, has registered a second time
    letting_go.py each entry's release, and what came back
    process.py    the numbers of the allocator and of the process, before and after
    asked_for.py  what an out-of-memory error says of itself
    scene.py      what was held, frame by frame, when it was raised
    savings.py    what would have made it fit, in bytes
"""
