"""Errors of autograd: they show in `backward()`, when the frames of the forward are gone.

What is left are the graph, from the loss backwards (`graph`), and the sources of the functions that took part
(`source`, `calls`). `no_grad` follows a result back to where its gradient ended (`path`, `cutting`), `twice` finds the
variable that brought a freed graph along (`carried`), `in_place` the statement that overwrote a saved value (`changes`,
`weighing`)."""

from __future__ import annotations
