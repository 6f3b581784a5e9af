"""Bad data: what is wrong with the files of a set, with its rows, and with the stream that a loader makes of them.

    check_data    the public function: a folder, a table, a data set in memory; problems side by side, as a report
    check_loader  the public function: two passes of a loader, watched in a copy of the process
    inventory     what lies in a folder: pictures, sounds, captions, tables, what is no file (the probe of names)
    pictures      pictures decoded to their end, in processes of their own where there are many
    media         captions, masks, splits and sizes: files judged beside one another; sounds, decoded
    tables        columns of numbers, labels, texts and boxes
    rows          the rows of a data set in memory, or of a file of records: tokens, labels, tensors
    similarity    items beside items: equal and near copies, two labels of one input, folders of another colour
    expectation   what the user means, or what a processor, a tokenizer or a model asks for
    cures         problems as plain values, and what helps, as code that was tried in a copy of the process
    rules         the rules that name the problems

Files are opened as untrusted: no pickle, no picture beyond a limit of pixels, no text beyond a limit of bytes, nothing
that is no regular file. Nothing of the user's is ever written.
"""

from __future__ import annotations
