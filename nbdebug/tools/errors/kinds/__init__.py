"""One look for each kind of error: does this exception belong to it, and what do the frames say of it?"""

from __future__ import annotations
