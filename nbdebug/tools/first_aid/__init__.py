"""First aid: in which order a tired person tries things, with each step run on what is among the variables.

`procedures.py` has the lists: for each symptom the steps in order, each with its minutes, the magic that does it, and
what it is run on. `first_aid.py` walks a list, stops at the first cause, and keeps the log of what was tried.
`describe.py` shows a line for each tensor of anything. `smallest.py` shrinks a failing program while it fails alike.
"""
