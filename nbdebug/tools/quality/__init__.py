"""What comes out of a model: the number that is reported for it, and the pictures, texts and vectors that it makes.

    perplexity     the public function: per real target token, with an interval; which mistake gives a reported
                   number, and its line
    check_outputs  the public function: pictures, texts and vectors beside what the model learnt from; of texts loops,
                   cut ends, copies
    images         copies, collapse, colours, sharpness
    compare        the public function: two models on the same inputs, and whether the comparison is fair
    check_adapter  the public function: what a LoRA changes, and what keeps it from doing so
    check_diffusion  the public function: what a denoiser predicts, and how its loss goes over the steps
    rules          what was measured as plain values; the rules that name causes

Nothing is judged by a threshold of its own: a number is compared with what is computed beside it, and samples are
compared with the training set's own distances and colours.
"""

from __future__ import annotations
