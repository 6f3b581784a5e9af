"""Sizes that do not fit: which operand is wrong, where its size came from, and which change was tried and fits.

`detect` puts the facts together, and follows the size back through layers and ops: `call` parses torch's sentence and
finds the call and its operands in the user's source, `fixes` proposes changes, which `trials` runs on small copies.
`rules` holds the facts and the rule.
"""

from __future__ import annotations
