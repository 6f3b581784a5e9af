"""Sizes that do not fit: which operand is wrong, where its size came from, and which change was tried and fits.

`messages.py` reads torch's sentence, `call.py` finds the call and its operands in the user's source, `history.py`
follows the size back through layers and ops, `fixes.py`, `layer_fixes.py` and `trials.py` propose changes and run
them on small copies. `detect.py` puts it together for the dispatcher.
"""
