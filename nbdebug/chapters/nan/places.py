"""From an op to the place that a person reads: step, phase, module, line."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbdebug.finding import Where
from nbdebug.observe.record import Op
from nbdebug.observe.sites import Site, Stop, cell_name, source_text


def where_of(op: Op, **more: Any) -> Where:
    """The place of an op. In backward the op named is the forward op whose derivative ran, unless the user wrote it."""
    named = op.forward.name if op.forward is not None and not op.custom else op.name
    place = Where(step=op.step, phase=op.during, module=op.module, module_type=op.module_type, op=named)
    return dataclasses.replace(at_site(place, op.site), **more)


def at_site(place: Where, site: Site | Stop | None) -> Where:
    """The same place with its line filled in."""
    site = site.site if isinstance(site, Stop) else site
    if site is None:
        return place
    return dataclasses.replace(place, file=site.file, line=site.line, text=source_text(site), cell=cell_name(site.file))
