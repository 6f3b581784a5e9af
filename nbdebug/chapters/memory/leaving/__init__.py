"""What the notebook keeps by itself, letting go of it, and what was held when memory ran out.

reach       what memory a thing holds on to, found without running the user's code
named       the user's variables and what lies in them, by the names a person would write
standing    what would stay if the notebook let go of everything
shell       the places in which a shell keeps outputs and tracebacks
graphs      losses that are kept with their graph
hooks       hooks that a cell, run again, has registered a second time
listed      all of it, with bytes, each counted once
letting_go  each entry's release, and what came back
process     the numbers of the allocators and of the process, before and after
asked_for   what an out-of-memory error says of itself
scene       what was held, frame by frame, when it was raised
work        what the failed call was doing
"""
