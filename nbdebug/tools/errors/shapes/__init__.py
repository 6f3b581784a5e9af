"""Sizes that do not fit: which operand is wrong, where its size came from, and which change was tried and fits.

`detect` puts the facts together: `call` parses torch's sentence and finds the call and its operands in the user's
source, `history` follows the size back through layers and ops, `fixes` proposes changes, which `trials` runs on small
copies. `rules` holds the facts and the rule.
"""
