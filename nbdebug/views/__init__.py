"""Views: a Report drawn for people. Each reads plain data and knows no tensor.

    wording     how values, places and tables are written, the same everywhere
    text        a screen of a terminal; displays a report at once
    html        a fragment for notebooks, or a whole page
    plots       the pictures, as SVG and with matplotlib
    widgets     controls over a picture; the only file that imports ipywidgets

A report imports them on demand, and of the pictures only those that it has.
"""

from __future__ import annotations
