"""The record of a guarded training: a folder that can be read while the training runs, and after it was killed.

`writer.py` appends, `files.py` knows the names and the order of writes, `step_lines.py` is one line for each step,
`trips.py` one bad step with its report. `pack.py` puts the batch and the weights of a bad step into a folder,
`unpack.py` and `replay.py` run it again: the folder may come from a stranger, so nothing in it is trusted
(`op_allowlist.py`). `open_record.py` is the public function, `report.py` what a person reads.
"""
