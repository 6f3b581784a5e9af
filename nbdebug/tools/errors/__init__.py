"""Errors: an exception of torch's says what an op could not do, seldom whose tensor it was and where its size, its
device or its missing gradient came from.

All of that still lies in the frames of the traceback: the arguments of the failing op, the modules around it, the
user's own variables with their names. A look recognises one kind of error and reads what the frames hold, a rule says
it in one sentence with the user's names, and a fix is tried on the very operands where that needs none of the user's
code.
"""

from __future__ import annotations
