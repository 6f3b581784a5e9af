"""The peak of a training step, predicted before anything is allocated, and what would make it fit.

job         the request (FitRequest), the answer (Prediction), batches of other sizes; the user's model, batch and
            optimizer as tensors that have no data
meta_trace  two steps of that copy: each block of memory with its allocation, its end, its size and its use; and what
            kernels take besides their results: workspaces, buffers of reductions, copies
allocator   the same sequence through a model of the CUDA caching allocator; a card's choices without a card
predict     all of it together; where tensors without data fail, a few small real batches and lines through them; the
            largest batch, sequence or image that fits
remedies    each remedy predicted again, ranked by what it saves and costs; several at once where none is enough
"""

from __future__ import annotations
