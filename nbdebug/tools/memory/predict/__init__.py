"""The peak of a training step, foretold before anything is allocated, and what would make it fit.

asking      the user's loss and batch, and batches of other sizes
mirror      the user's model, batch and optimizer once more, made of tensors that have no data
steering    on a machine without a card: the choices that a card's kernels would make
trace       two steps of the mirror: each piece of memory with its birth, its death, its size and what it is for
hidden      what kernels take besides their results: workspaces, buffers of reductions, copies
allocator   the same sequence through a model of the CUDA caching allocator: what is reserved, and does it fit
job         what is asked for (a Job) and what is answered (a Prediction)
predict     all of it together
measured    where tensors without data fail: a few small real batches, and lines through them
sizes       the largest batch, sequence or image that fits
blocks      which parts of a model are alike, which are frozen
remedies    each remedy predicted again, ranked by what it saves and costs
together    several at once, where none is enough alone
account     the report
"""

from __future__ import annotations
