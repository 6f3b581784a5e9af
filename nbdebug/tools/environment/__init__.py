"""Whether a machine, its packages and its variables can do what a run asks of them.

    check_environment  the public function, and the facts of this machine, with the standard library alone (the probe)
    rules       the facts as plain values; tables of what goes together, and what else is looked up, with sources and
                dates; the rules that name causes

Tables are silent on what they don't know: a version newer than theirs is never called wrong.
"""

from __future__ import annotations
