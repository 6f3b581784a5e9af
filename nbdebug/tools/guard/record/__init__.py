"""The record of a guarded training: a folder that can be read while the training runs, and after it was killed.

`writer.py` appends, `files.py` knows the names, the order of writes and the line of each step, `trips.py` one bad step
with its report. `pack.py` puts the batch and the weights of a bad step into a folder, `replay.py` runs it again: the
folder may come from a stranger, so nothing in it is trusted. `open_record.py` is the public function, with what a
person reads.
"""
